"""Read pickles that contain plain data: dictionaries, lists, bytes, text, numbers and numpy arrays.

A pickle is a program. The unpickler of the standard library runs it, but here it gets stand-ins of our own for the few
names that a pickle of arrays needs, and no other name. So no function that a file chooses is ever called.
"""

import io
import math
import pickle
import pickletools
from collections.abc import Callable
from typing import Any

import numpy as np

from ...errors import DataError

Array = np.ndarray[Any, Any]

_NUMBERS = frozenset(["u1", "i1", "u2", "i2", "u4", "i4", "u8", "i8", "f4", "f8"])
# Nested tuples and sets as keys of a dictionary would exhaust the C stack when they are hashed.
_MAX_TUPLES = 1000
_SETS = frozenset(["EMPTY_SET", "FROZENSET", "ADDITEMS"])


def load(data: bytes) -> Any:
    """Return the value of a pickle.

    Raises:
        DataError: the pickle asks for something that is not plain data, or is damaged.

    >>> load(b"(dS'labels'" + bytes([10]) + b"(lI7" + bytes([10]) + b"as.")
    {b'labels': [7]}
    """
    try:
        _check_instructions(data)
        value = _Unpickler(data).load()
        if isinstance(value, dict):
            return {key: _plain(field) for key, field in value.items()}
        return _plain(value)
    except DataError:
        raise
    # A damaged pickle can raise nearly any error.
    except Exception as problem:
        raise DataError(f"not a pickle that can be read: {' '.join(str(problem).split())[:300]}") from None


def _check_instructions(data: bytes) -> None:
    """Raise DataError if a pickle would exhaust the C stack or the memory of the unpickler."""
    tuples = 0
    for instruction, argument, _ in pickletools.genops(data):
        tuples += instruction.name.startswith("TUPLE")
        if tuples > _MAX_TUPLES or instruction.name in _SETS:
            raise DataError(f"a pickle with {_MAX_TUPLES} tuples, or with a set: not plain data, not read")
        # The unpickler allocates as many places as the largest number of a place.
        if "PUT" in instruction.name and argument is not None and argument > len(data):
            raise DataError(f"a pickle that stores a value at place {argument}: damaged, not read")


class _Unpickler(pickle.Unpickler):
    def __init__(self, data: bytes):
        super().__init__(io.BytesIO(data), encoding="bytes")
        # An honest file copies each of its bytes at most once here.
        self.free_bytes = 2 * len(data)

    def find_class(self, module: str, name: str) -> Callable[..., Any]:
        """Return a stand-in for a name that a pickle of arrays needs; raise DataError for any other."""
        match module, name:
            case "numpy.core.multiarray" | "numpy._core.multiarray", "_reconstruct":
                return _Array
            case "numpy", "ndarray":
                return _no_array
            case "numpy", "dtype":
                return _Type
            case "_codecs", "encode":
                return self._encoded
        raise DataError(f"a pickle that asks for {module}.{name}, which is forbidden: not plain data, not read")

    def _encoded(self, text: str, encoding: str | bytes) -> bytes:
        """Return bytes, which Python 3 writes as text in the old protocols."""
        if encoding not in ("latin1", b"latin1"):
            raise DataError("a pickle with bytes in an unknown encoding")
        self.free_bytes -= len(text)
        if self.free_bytes < 0:
            raise DataError("a pickle that copies its content over and over: not plain data, not read")
        return text.encode("latin-1")


class _Parts:
    """The parts of an array or of its type, as the pickle gives them."""

    def __init__(self, *arguments: Any):
        self.arguments = arguments
        self.state: Any = None

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _Array(_Parts):
    pass


class _Type(_Parts):
    pass


def _no_array(*arguments: Any) -> None:
    """Raise DataError: the pickle of an array names this class, and never calls it."""
    raise DataError("a pickle that makes an array in an unknown way: not plain data, not read")


def _plain(value: Any) -> Any:
    """Return an array in place of its parts, and anything else as it is."""
    if isinstance(value, _Parts):
        return _array(value)
    return value


def _array(parts: _Parts) -> Array:
    """Return the array that parts describe. Raise DataError if their sizes disagree."""
    if type(parts) is not _Array or type(parts.state) is not tuple or len(parts.state) != 5:
        raise DataError("a pickle with an array that lacks its parts")
    _, shape, kind, fortran, raw = parts.state
    plain = _number_type(kind)
    if type(shape) is not tuple or not all(type(side) is int and side >= 0 for side in shape) or len(shape) > 8:
        raise DataError("a pickle with an array of no sensible shape")
    if type(raw) is not bytes or math.prod(shape) * plain.itemsize != len(raw):
        raise DataError(f"a pickle with an array of shape {shape} whose bytes do not fit")
    return np.frombuffer(raw, plain).reshape(shape, order="F" if fortran else "C")


def _number_type(kind: Any) -> np.dtype[Any]:
    if type(kind) is not _Type or type(kind.state) is not tuple or not kind.arguments:
        raise DataError("a pickle with an array of an unknown type")
    code, order = kind.arguments[0], kind.state[1] if len(kind.state) > 1 else "|"
    code, order = (part.decode("latin-1") if isinstance(part, bytes) else part for part in (code, order))
    if code not in _NUMBERS or order not in ("<", ">", "|", "="):
        raise DataError(f"a pickle with an array of {str(code)[:40]!r}, which are no plain numbers")
    return np.dtype(order.replace("|", "=") + code)

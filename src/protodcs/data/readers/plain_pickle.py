"""Reads pickles that hold nothing but data: dictionaries, lists, bytes, text, numbers and plain numpy arrays.

A pickle is a program, and the standard unpickler runs it. This one knows the instructions that build plain data,
rebuilds arrays itself, calls nothing that a file names, and refuses all else by name before anything has happened.
"""

import math
import pickletools
from typing import Any

import numpy as np

from ...errors import DataError

Array = np.ndarray[Any, Any]

# The globals that an honest pickle of arrays names, and what each stands for here.
_ADMITTED = {
    ("numpy", "ndarray"): "class",
    ("numpy", "dtype"): "type",
    ("numpy.core.multiarray", "_reconstruct"): "array",
    ("numpy._core.multiarray", "_reconstruct"): "array",
    ("_codecs", "encode"): "bytes",  # What Python 3 writes for bytes in the old protocols.
}
_NUMBERS = frozenset(["u1", "i1", "u2", "i2", "u4", "i4", "u8", "i8", "f4", "f8"])
_VALUES = frozenset(
    ["INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4", "FLOAT", "BINFLOAT"]
    + ["BINBYTES", "SHORT_BINBYTES", "BINBYTES8", "UNICODE", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8"]
)
# Python 2 did not tell text from bytes; the reader of instructions hands it on as text.
_OLD_STRINGS = frozenset(["STRING", "BINSTRING", "SHORT_BINSTRING"])
_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False, "EMPTY_TUPLE": ()}
_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
_PUTS = frozenset(["PUT", "BINPUT", "LONG_BINPUT"])
_GETS = frozenset(["GET", "BINGET", "LONG_BINGET"])


def load(data: bytes) -> Any:
    """The value that a pickle describes.

    Raises:
        DataError: the pickle asks for something that is not plain data, or is damaged.

    >>> load(b"(dS'labels'" + bytes([10]) + b"(lI7" + bytes([10]) + b"as.")
    {b'labels': [7]}
    """
    machine = _Machine(room=2 * len(data))
    try:
        for instruction, argument, _ in pickletools.genops(data):
            machine.step(instruction.name, argument)
        return machine.result()
    except DataError:
        raise
    except Exception as problem:
        raise DataError(f"not a pickle that can be read: {' '.join(str(problem).split())[:300]}") from None


class _Mark:
    """Where a group of values starts on the stack."""


class _Global:
    """A name that the pickle asked for; it is never looked up."""

    def __init__(self, module: str, name: str):
        if (module, name) not in _ADMITTED:
            raise DataError(f"a pickle that asks for {module}.{name}, which is forbidden: not plain data, not read")
        self.role = _ADMITTED[module, name]


class _Built:
    """An array or its type while its parts come in."""

    def __init__(self, role: str, arguments: tuple[Any, ...]):
        self.role = role
        self.arguments = arguments
        self.state: Any = None


class _Machine:
    """The stack and the memory of one pickle.

    A value can be named again for two bytes, so copies of it are counted against `room`: an honest file copies each
    byte at most twice, into bytes and into an array.
    """

    def __init__(self, room: int) -> None:
        self.stack: list[Any] = []
        self.memory: dict[int, Any] = {}
        self.room = room

    def step(self, name: str, argument: Any) -> None:
        """Carry out one instruction."""
        stack = self.stack
        if name in _VALUES:
            stack.append(argument)
        elif name in _OLD_STRINGS:
            stack.append(argument.encode("latin-1"))
        elif name in _PUTS:
            self.memory[argument] = stack[-1]
        elif name in _GETS:
            stack.append(self.memory[argument])
        elif name in _CONSTANTS:
            stack.append(_CONSTANTS[name])
        elif name in _TUPLES:
            stack[-_TUPLES[name] :] = [tuple(stack[-_TUPLES[name] :])]
        elif name in _OTHERS:
            _OTHERS[name](self, argument)
        else:
            raise DataError(f"a pickle with the instruction {name}, which is forbidden: not plain data, not read")

    def result(self) -> Any:
        """The value that is left at the end, its arrays made real."""
        (value,) = self.stack
        if isinstance(value, dict):
            return {key: self.real(field) for key, field in value.items()}
        return self.real(value)

    def real(self, value: Any) -> Any:
        """An array in place of its parts; anything else as it is."""
        if not isinstance(value, _Built):
            return value
        array = _array(value)
        self.spend(array.nbytes)
        return array.copy()

    def spend(self, size: int) -> None:
        """Count a copy."""
        self.room -= size
        if self.room < 0:
            raise DataError("a pickle that copies its content over and over: not plain data, not read")

    def since_mark(self) -> list[Any]:
        """The values above the last mark, taken off the stack."""
        for start in range(len(self.stack) - 1, -1, -1):
            if self.stack[start] is _Mark:
                values = self.stack[start + 1 :]
                del self.stack[start:]
                return values
        raise DataError("a pickle that closes a group it has not opened")

    def memoize(self) -> None:
        """Remember the value on top under the next free number."""
        self.memory[len(self.memory)] = self.stack[-1]

    def extend(self, values: list[Any]) -> None:
        """Append to the list on top."""
        _of_kind(self.stack[-1], list).extend(values)

    def update(self, values: list[Any]) -> None:
        """Set pairs in the dictionary on top. Keys are plain: the hash of a deep tuple would exhaust the C stack."""
        target = _of_kind(self.stack[-1], dict)
        for key, value in zip(values[::2], values[1::2], strict=True):
            target[_of_kind(key, str, bytes, int)] = value

    def pop(self, count: int) -> list[Any]:
        """The topmost values, taken off the stack."""
        values = self.stack[len(self.stack) - count :]
        del self.stack[len(self.stack) - count :]
        return values

    def call(self) -> None:
        """Make one of the few admitted things; no function that the pickle names is called."""
        wanted, arguments = self.pop(2)
        role, arguments = _of_kind(wanted, _Global).role, _of_kind(arguments, tuple)
        if role == "bytes":
            text, encoding = arguments
            if encoding not in ("latin1", b"latin1"):
                raise DataError("a pickle with bytes in an unknown encoding")
            self.spend(len(_of_kind(text, str)))
            self.stack.append(text.encode("latin-1"))
        else:
            self.stack.append(_Built(role, arguments))

    def build(self) -> None:
        """Give an array or a type its parts."""
        (state,) = self.pop(1)
        _of_kind(self.stack[-1], _Built).state = state


_OTHERS: dict[str, Any] = {
    "PROTO": lambda machine, argument: None,
    "FRAME": lambda machine, argument: None,
    "STOP": lambda machine, argument: None,
    "MARK": lambda machine, argument: machine.stack.append(_Mark),
    "POP": lambda machine, argument: machine.pop(1),
    "POP_MARK": lambda machine, argument: machine.since_mark(),
    "DUP": lambda machine, argument: machine.stack.append(machine.stack[-1]),
    "MEMOIZE": lambda machine, argument: machine.memoize(),
    "EMPTY_LIST": lambda machine, argument: machine.stack.append([]),
    "EMPTY_DICT": lambda machine, argument: machine.stack.append({}),
    "TUPLE": lambda machine, argument: machine.stack.append(tuple(machine.since_mark())),
    "LIST": lambda machine, argument: machine.stack.append(machine.since_mark()),
    "APPEND": lambda machine, argument: machine.extend(machine.pop(1)),
    "APPENDS": lambda machine, argument: machine.extend(machine.since_mark()),
    "SETITEM": lambda machine, argument: machine.update(machine.pop(2)),
    "SETITEMS": lambda machine, argument: machine.update(machine.since_mark()),
    "GLOBAL": lambda machine, argument: machine.stack.append(_Global(*argument.split(" ", 1))),
    "STACK_GLOBAL": lambda machine, argument: machine.stack.append(_Global(*machine.pop(2))),
    "REDUCE": lambda machine, argument: machine.call(),
    "BUILD": lambda machine, argument: machine.build(),
}


def _dictionary(machine: _Machine, argument: Any) -> None:
    values = machine.since_mark()
    machine.stack.append({})
    machine.update(values)


_OTHERS["DICT"] = _dictionary


def _of_kind(value: Any, *kinds: type) -> Any:
    if type(value) not in kinds:
        wanted = " or ".join(kind.__name__.strip("_").lower() for kind in kinds)
        raise DataError(f"a pickle with a {type(value).__name__} where a {wanted} is wanted")
    return value


def _array(built: _Built) -> Array:
    """The array that its parts describe, a view of their bytes, once all sizes agree."""
    if built.role != "array" or type(built.state) is not tuple or len(built.state) != 5:
        raise DataError("a pickle with an array that lacks its parts")
    _, shape, kind, fortran, raw = built.state
    plain = _number_type(_of_kind(kind, _Built))
    if not all(type(side) is int and side >= 0 for side in _of_kind(shape, tuple)) or len(shape) > 8:
        raise DataError("a pickle with an array of no sensible shape")
    if math.prod(shape) * plain.itemsize != len(_of_kind(raw, bytes)):
        raise DataError(f"a pickle with an array of shape {shape} made of {len(raw)} bytes of {plain}")
    return np.frombuffer(raw, plain).reshape(shape, order="F" if fortran else "C")


def _number_type(kind: _Built) -> np.dtype[Any]:
    code, *_ = kind.arguments or ("",)
    order = kind.state[1] if type(kind.state) is tuple and len(kind.state) > 1 else "|"
    code, order = (part.decode("latin-1") if isinstance(part, bytes) else part for part in (code, order))
    if kind.role != "type" or code not in _NUMBERS or order not in ("<", ">", "|", "="):
        raise DataError(
            f"a pickle with an array of {str(code)[:40]!r}, which is forbidden: only plain numbers are read"
        )
    return np.dtype(f"{'=' if order == '|' else order}{code}")

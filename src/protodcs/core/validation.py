"""Checks of arrays and class names that a user passes in.

Valid vectors are normalised into new arrays. These functions never write to an array of the user.
"""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..arrays import Feature
from ..errors import InputError, UnknownClassError
from .vectors import SHORTEST, to_unit, to_unit_rows

# `to_unit` takes float32 and float64. Widening float16 loses nothing.
_WORKING_TYPE: dict[np.dtype[Any], np.dtype[Any]] = {
    np.dtype(np.float16): np.dtype(np.float32),
    np.dtype(np.float32): np.dtype(np.float32),
    np.dtype(np.float64): np.dtype(np.float64),
}


def check_feature(feature: Any, out: Feature) -> None:
    """Write a feature (d,) to `out` (d,), normalised. Raise InputError if it cannot be used."""
    if not is_plain(feature) or feature.shape != out.shape:
        raise InputError(f"a feature must be a numpy array of shape {out.shape}; given: {described(feature)}")
    values = _contiguous(feature, _working_type(feature, "a feature"))
    if not to_unit(values, out):
        raise InputError(f"a feature must be finite and longer than 1e-6; given: {_described_values(feature)}")


def check_features(features: Any, dimension: int) -> Feature:
    """Return features (N, d) with normalised rows. Raise InputError if a row cannot be used."""
    if not is_plain(features) or features.ndim != 2 or features.shape[1] != dimension:
        raise InputError(f"features must be a numpy array of shape (N, {dimension}); given: {described(features)}")
    return unit_rows(features, "features", least=0)


def check_prototype(prototype: Any, dimension: int) -> Feature:
    """Return a prototype (d,) as one normalised row (1, d). Raise InputError if it cannot be used."""
    if not is_plain(prototype) or prototype.shape != (dimension,):
        raise InputError(f"a prototype must be a numpy array of shape ({dimension},); given: {described(prototype)}")
    return unit_rows(prototype[None], "the prototype")


def unit_rows(rows: Any, what: str, least: int = 1) -> Feature:
    """Return rows (N, d) as float32, each normalised in float64. `what` names them in errors."""
    if not is_plain(rows) or rows.ndim != 2 or rows.shape[0] < least or rows.shape[1] < 1:
        raise InputError(
            f"{what} must be a numpy array of shape (N, d) with at least {least} row(s); given: {described(rows)}"
        )
    working = _working_type(rows, what)
    out = np.empty(rows.shape, dtype=np.float32)
    if rows.dtype == np.float32 and rows.flags.c_contiguous and rows.flags.aligned:
        usable = to_unit_rows(rows, out)
    else:
        # Other rows are converted one by one, which takes little memory.
        unusable = (i for i, row in enumerate(rows) if not to_unit(_contiguous(row, working), out[i]))
        usable = next(unusable, len(rows))
    if usable < len(rows):
        raise _bad_row(rows, usable, what)
    return out


def check_rows(rows: NDArray[np.floating], what: str) -> None:
    """Raise InputError if an engine would reject one of the rows (N, d) in float16 or float32. `what` names them."""
    # Converting a signalling NaN would warn. A comparison with NaN is false.
    with np.errstate(invalid="ignore"):
        wide = rows.astype(np.float64)
        squares = np.einsum("nd,nd->n", wide, wide)
    unusable = np.flatnonzero(~((squares > SHORTEST**2) & (squares < np.inf)))
    if len(unusable):
        raise _bad_row(rows, int(unusable[0]), what)


def _bad_row(rows: NDArray[Any], i: int, what: str) -> InputError:
    return InputError(f"row {i} of {what} must be finite and longer than 1e-6; given: {_described_values(rows[i])}")


def class_names(classes: Sequence[str] | None, count: int) -> tuple[str, ...]:
    """Return unique non-empty names, one per prototype; "0", "1", ... if `classes` is None."""
    if classes is None:
        return tuple(str(k) for k in range(count))
    if isinstance(classes, str) or not isinstance(classes, Sequence):
        raise InputError(f"classes must be a list of names; given: {described(classes)}")
    for name in classes:
        if not isinstance(name, str) or not name:
            raise InputError(f"a class name must be a non-empty string; given: {name!r}")
    if len(classes) != count:
        raise InputError(f"there are {count} prototypes and {len(classes)} class names: give one name for each")
    if len(set(classes)) != count:
        repeated, times = Counter(classes).most_common(1)[0]
        raise InputError(f"class names must be unique; {repeated!r} occurs {times} times")
    try:
        "".join(classes).encode()
    except UnicodeEncodeError as problem:
        raise InputError(
            f"class names must be text that UTF-8 can encode; given: one with {problem.object[problem.start]!r}"
        ) from None
    return tuple(classes)


def class_index(name: str, classes: Sequence[str]) -> int:
    """Return the position of a class. Raise UnknownClassError if there is none of this name."""
    if name not in classes:
        some = ", ".join(classes[:10]) + (", ..." if len(classes) > 10 else "")
        raise UnknownClassError(f"There is no class {name!r}. The classes are {some}.")
    return classes.index(name)


def check_encoder(encoder: Any) -> None:
    """Raise InputError if `encoder` is neither None nor a fingerprint."""
    if encoder is not None and not (isinstance(encoder, str) and 0 < len(encoder) <= 1000):
        raise InputError(f"encoder must be a fingerprint of 1 to 1000 characters; given: {described(encoder)}")


def is_plain(value: Any) -> bool:
    """Return whether a value is a numpy array and no subclass with a meaning of its own, such as a masked array."""
    return type(value) is np.ndarray or isinstance(value, np.memmap)


def described(value: Any) -> str:
    """Return a short description of a value for an error message."""
    if isinstance(value, np.ndarray):
        return f"an array of shape {value.shape} and type {value.dtype}"
    return f"{type(value).__name__} {str(value)[:80]!r}"


def _described_values(row: NDArray[Any]) -> str:
    """Return what is wrong with a vector."""
    wrong = int(np.count_nonzero(~np.isfinite(row)))
    if wrong:
        return f"{wrong} of {row.size} values are NaN or infinite"
    with np.errstate(over="ignore"):
        return f"a vector of length {np.linalg.norm(row.astype(np.float64)):.3g}"


def _working_type(array: NDArray[Any], what: str) -> np.dtype[Any]:
    if array.dtype not in _WORKING_TYPE:
        raise InputError(f"{what} must be float16, float32 or float64; given: {described(array)}")
    return _WORKING_TYPE[array.dtype]


def _contiguous(array: NDArray[Any], working: np.dtype[Any]) -> NDArray[Any]:
    """Return the array in this type, contiguous and aligned, as the compiled functions need it."""
    with np.errstate(invalid="ignore"):  # Converting a signalling NaN would warn; `to_unit` rejects it.
        values = np.ascontiguousarray(array, dtype=working)
    return values if values.flags.aligned else values.copy()

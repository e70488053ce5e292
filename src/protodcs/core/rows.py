"""What a user hands in as vectors: checked, named in words where it is wrong, and brought to unit length.

Nothing given is ever written to.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..arrays import Feature
from ..errors import InputError
from .vectors import to_unit

# float16 is widened, which loses nothing; `to_unit` takes the other two as they are.
WORKING_TYPE: dict[np.dtype[Any], np.dtype[Any]] = {
    np.dtype(np.float16): np.dtype(np.float32),
    np.dtype(np.float32): np.dtype(np.float32),
    np.dtype(np.float64): np.dtype(np.float64),
}


def is_plain(value: Any) -> bool:
    """Whether a value is a numpy array without further meaning, such as a mask."""
    return type(value) is np.ndarray or isinstance(value, np.memmap)


def contiguous(array: NDArray[Any], working: np.dtype[Any]) -> NDArray[Any]:
    """Return the array in this type, contiguous, aligned and writeable, as the compiled functions need it."""
    with np.errstate(invalid="ignore"):  # Converting a signalling NaN would warn; `to_unit` refuses it.
        values = np.ascontiguousarray(array, dtype=working)
    return values if values.flags.behaved else values.copy()


def unit_rows(rows: Any, what: str, least: int = 1) -> Feature:
    """Validate (N, d) rows and normalise each, in float64, to a new float32 array."""
    if not is_plain(rows) or rows.ndim != 2 or rows.shape[0] < least or rows.shape[1] < 1:
        raise InputError(
            f"{what} must be a numpy array of shape (N, d) with at least {least} row(s); given: {described(rows)}"
        )
    working = WORKING_TYPE.get(rows.dtype)
    if working is None:
        raise InputError(f"{what} must be float16, float32 or float64; given: {described(rows)}")
    out = np.empty(rows.shape, dtype=np.float32)
    for i, row in enumerate(rows):
        if not to_unit(contiguous(row, working), out[i]):
            raise InputError(f"row {i} of {what} must be finite and longer than 1e-6; given: {described_values(row)}")
    return out


def described(value: Any) -> str:
    """A value in a few words, for an error message."""
    if isinstance(value, np.ndarray):
        return f"an array of shape {value.shape} and type {value.dtype}"
    return f"{type(value).__name__} {str(value)[:80]!r}"


def described_values(row: NDArray[Any]) -> str:
    """What is wrong with a vector."""
    wrong = int(np.count_nonzero(~np.isfinite(row)))
    if wrong:
        return f"{wrong} of {row.size} values are NaN or infinite"
    with np.errstate(over="ignore"):
        return f"a vector of length {np.linalg.norm(row.astype(np.float64)):.3g}"

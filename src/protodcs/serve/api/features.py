"""Read features from request bodies: float32 numbers as bytes, or rows of JSON numbers."""

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...errors import InputError

MAX_ROWS = 4096
# More numbers than the features of any encoder have. The time and memory of an engine grow with them.
MAX_WIDTH = 16_384
_BAD_ROWS = "Rows must have the same length and hold finite numbers."
# Shorter features have no direction.
_MIN_NORM = 1e-6


def from_bytes(body: bytes, count: str) -> list[bytes]:
    """Return the features of a body of float32 numbers; `count` says how many there are."""
    if not count.isdecimal() or len(count) > 10 or not 0 < int(count) <= MAX_ROWS:
        raise InputError(f"`count` must be a number from 1 to {MAX_ROWS}; given: {count[:100]!r}.")
    number = int(count)
    if not body or len(body) % (4 * number):
        raise InputError(f"{number} features of float32 cannot have {len(body)} bytes.")
    rows: NDArray[np.float32] = np.frombuffer(body, dtype="<f4").reshape(number, -1)
    return split_rows(rows)


def from_rows(rows: list[Any], check_row: Callable[[Any], list[float]]) -> list[bytes]:
    """Return the features of rows of numbers.

    Args:
        rows: the rows, unchecked.
        check_row: returns a row if it is a list of numbers, and raises an error otherwise.
    """
    first = rows[0]
    if len(rows) > MAX_ROWS or (isinstance(first, list) and not 0 < len(first) <= MAX_WIDTH):
        raise InputError(
            f"Features must be 1 to {MAX_ROWS} rows of 1 to {MAX_WIDTH} numbers; given: {len(rows)} rows, the first of "
            f"{len(first)} numbers."
        )
    # Row by row: between two of them, other threads get their turn.
    arrays = [as_float32([check_row(row)]) for row in rows]
    if len({array.shape for array in arrays}) > 1:
        raise InputError(_BAD_ROWS)
    return split_rows(np.concatenate(arrays))


def as_float32(rows: list[list[float]]) -> NDArray[np.float32]:
    """Return rows as an array. Numbers that are too large become infinite, which `split_rows` rejects."""
    try:
        with np.errstate(over="ignore"):
            return np.asarray(rows, dtype=np.float32)
    except (ValueError, OverflowError):
        raise InputError(_BAD_ROWS) from None


def split_rows(rows: NDArray[np.float32]) -> list[bytes]:
    """Return each row as bytes. Raise InputError if an engine would reject one of them."""
    # Converting a signalling NaN would warn; the check below rejects it.
    with np.errstate(invalid="ignore"):
        wide = rows.astype(np.float64)
    smallest, largest = _MIN_NORM**2, np.inf
    # A comparison with NaN is false.
    if not all(smallest < wide_row.dot(wide_row) < largest for wide_row in wide):
        raise InputError("A feature must be finite and its norm above 1e-6.")
    return [row.tobytes() for row in rows.astype("<f4", copy=False)]

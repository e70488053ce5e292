"""Read features from request bodies: numbers as bytes, or rows of a JSON body as numbers or base64."""

import binascii
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
_FLOAT32 = np.dtype("<f4")
# How a body of numbers holds them, by its media type.
RAW: dict[str, np.dtype[Any]] = {
    "": _FLOAT32,
    "application/octet-stream": _FLOAT32,
    "application/x-float32": _FLOAT32,
    "application/x-float16": np.dtype("<f2"),
}


def from_bytes(body: bytes, count: str, numbers: np.dtype[Any] = _FLOAT32) -> list[bytes]:
    """Return the features of a body of numbers; `count` says how many features there are."""
    if not count.isdecimal() or len(count) > 10 or not 0 < int(count) <= MAX_ROWS:
        raise InputError(f"`count` must be a number from 1 to {MAX_ROWS}; given: {count[:100]!r}.")
    number = int(count)
    if not body or len(body) % (numbers.itemsize * number):
        raise InputError(f"{number} features of {numbers.name} cannot have {len(body)} bytes.")
    rows: NDArray[np.floating] = np.frombuffer(body, dtype=numbers).reshape(number, -1)
    return split_rows(rows)


def from_rows(rows: list[Any], check_row: Callable[[Any], list[float]]) -> list[bytes]:
    """Return the features of the rows of a JSON body: all are lists of numbers, or all are float32 in base64.

    Args:
        rows: the rows, unchecked.
        check_row: returns a row if it is a list of numbers, and raises an error otherwise.
    """
    first = rows[0]
    if isinstance(first, str):
        contents = [from_base64(row, "features") for row in rows]
        if len({len(content) for content in contents}) > 1:
            raise InputError(_BAD_ROWS)
        return from_bytes(b"".join(contents), str(len(rows)))
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


def from_base64(text: Any, name: str) -> bytes:
    """Return the bytes of a field of a JSON body."""
    try:
        content = binascii.a2b_base64(text, strict_mode=True) if isinstance(text, str) else b""
    except (binascii.Error, ValueError):
        content = b""
    if not content:
        raise InputError(f"`{name}` must be base64.")
    return content


def as_float32(rows: list[list[float]]) -> NDArray[np.float32]:
    """Return rows as an array. Numbers that are too large become infinite, which `split_rows` rejects."""
    try:
        with np.errstate(over="ignore"):
            return np.asarray(rows, dtype=np.float32)
    except (ValueError, OverflowError):
        raise InputError(_BAD_ROWS) from None


def split_rows(rows: NDArray[np.floating]) -> list[bytes]:
    """Return each row as the bytes of float32 numbers. Raise InputError if an engine would reject one of them."""
    # Converting a signalling NaN would warn; the check below rejects it.
    with np.errstate(invalid="ignore"):
        wide = rows.astype(np.float64)
    smallest, largest = _MIN_NORM**2, np.inf
    # A comparison with NaN is false.
    if not all(smallest < wide_row.dot(wide_row) < largest for wide_row in wide):
        raise InputError("A feature must be finite and its norm above 1e-6.")
    return [row.tobytes() for row in rows.astype(_FLOAT32, copy=False)]

"""Read features from request bodies: numbers as bytes, or rows of a JSON body as numbers or base64."""

import binascii
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...core.validation import check_rows
from ...errors import InputError

MAX_ROWS = 4096
# More numbers than the features of any encoder have. The time and memory of an engine grow with them.
MAX_WIDTH = 16_384
_BAD_ROWS = "Rows must have the same length and hold finite numbers."
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
    rows = rows_in(body, int(count), numbers)
    # The engine checks it. More rows are checked here: a request is applied as a whole.
    return [body] if len(rows) == 1 and numbers is _FLOAT32 else _split(rows)


def rows_in(body: bytes, count: int, numbers: np.dtype[Any] = _FLOAT32) -> NDArray[np.floating]:
    """Return the numbers of a body as so many rows. Their values are not checked."""
    size = numbers.itemsize * count
    if not body or len(body) % size or len(body) > size * MAX_WIDTH:
        raise InputError(
            f"{count} features of {numbers.name} with up to {MAX_WIDTH} numbers cannot have {len(body)} bytes."
        )
    return np.frombuffer(body, dtype=numbers).reshape(count, -1)


def from_row(row: list[float]) -> bytes:
    """Return the feature of a row of numbers."""
    return _split(as_float32([row]))[0]


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
    return _split(np.concatenate(arrays))


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
    """Return rows as an array. Numbers that are too large become infinite, which `check_rows` rejects."""
    try:
        with np.errstate(over="ignore"):
            return np.asarray(rows, dtype=np.float32)
    except (ValueError, OverflowError):
        raise InputError(_BAD_ROWS) from None


def _split(rows: NDArray[np.floating]) -> list[bytes]:
    """Return each row as the bytes of float32 numbers. All are checked first: a request is applied as a whole."""
    check_rows(rows, "the features")
    data, size = rows.astype(_FLOAT32, copy=False).tobytes(), _FLOAT32.itemsize * rows.shape[1]
    return [data[first : first + size] for first in range(0, len(data), size)]

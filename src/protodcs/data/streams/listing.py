"""The list of a manifest as text: one line `<source> <index> <label>` per sample, and back.

Only this one spelling is accepted: what was read is written again and compared, so that a list has one set of bytes.
Both directions work through pieces of bounded size, and neither may use more memory than a few times the list.
"""

import numpy as np

from ...arrays import Integers
from ...errors import DataError

COLUMNS = 3
_LINES_AT_A_TIME = 1 << 16
_BYTES_AT_A_TIME = 1 << 20
# A source of 3 digits, an index of 16, a label of 7 and their separators: no line of a valid list is longer.
LONGEST_LINE = 32
SHORTEST_LINE = 6


def write(rows: Integers) -> bytes:
    """The text of (N, 3) rows."""
    pieces = (rows[start : start + _LINES_AT_A_TIME] for start in range(0, len(rows), _LINES_AT_A_TIME))
    return b"".join(_text(piece) for piece in pieces)


def read(text: bytes, samples: int) -> Integers:
    """The (samples, 3) rows of a text that `write` wrote."""
    lines = text.count(b"\n")
    if lines != samples:
        raise DataError(f"the manifest announces {samples} samples, its list has {lines} lines: it is damaged")
    # A newline costs one byte, a row of the result 24: what cannot be rows gets no memory.
    if len(text) < samples * SHORTEST_LINE:
        raise DataError(f"the manifest's list has {lines} lines in {len(text)} bytes: it is damaged")
    rows = np.empty((samples, COLUMNS), dtype=np.int64)
    line, start = 0, 0
    while start < len(text):
        # A newline lies within reach of every piece of a valid list; a longer line is cut and then not understood.
        stop = text.find(b"\n", start + _BYTES_AT_A_TIME, start + _BYTES_AT_A_TIME + LONGEST_LINE) + 1
        piece = text[start : stop or start + _BYTES_AT_A_TIME + LONGEST_LINE]
        found = _numbers(piece, line)
        rows[line : line + len(found)] = found
        line, start = line + len(found), start + len(piece)
    return rows


def _text(rows: Integers) -> bytes:
    # One formatting of many lines at once takes a quarter of the time of a loop over lines.
    return ("%d %d %d\n" * len(rows) % tuple(rows.ravel().tolist())).encode("ascii")


def _numbers(piece: bytes, line: int) -> Integers:
    try:
        rows = np.array(list(map(int, piece.split())), dtype=np.int64).reshape(-1, COLUMNS)
    except (ValueError, OverflowError):
        rows = np.empty((0, COLUMNS), dtype=np.int64)
    if _text(rows) != piece:
        raise DataError(
            f"the manifest's list is not in its one spelling near line {line + 1}: each line is "
            "'<source> <index> <label>' in plain decimal numbers; it is damaged or was changed by hand"
        )
    return rows

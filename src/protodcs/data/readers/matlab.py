"""Reads plain arrays of numbers from MATLAB 5 files, the format of SVHN.

The general readers of this format can be brought down by a damaged file. This one knows arrays of numbers and no
more, checks every length against what is there, and never unpacks more than the file is worth.
"""

import math
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...errors import DataError

# SVHN's largest file has 1.3 GB.
MAX_BYTES = 2**31
# Photographs shrink by less than half; who promises twenty times the file is up to something.
_MAX_RATIO = 20
_HEADER = 128
_COMPRESSED, _MATRIX = 15, 14
# How numbers are stored, by the type number in the file.
_STORED = {1: "i1", 2: "u1", 3: "<i2", 4: "<u2", 5: "<i4", 6: "<u4", 7: "<f4", 9: "<f8", 12: "<i8", 13: "<u8"}
_NUMERIC_CLASSES = range(6, 16)
_COMPLEX = 0x0800


def read_arrays(path: Path, wanted: tuple[str, ...]) -> dict[str, NDArray[Any]]:
    """The arrays of the wanted names that the file holds, as they are stored (first index fastest).

    Raises:
        DataError: not a MATLAB 5 file, damaged, or a wanted name is not a plain array of numbers.
    """
    try:
        with path.open("rb") as stream:
            data = stream.read(MAX_BYTES + 1)
    except OSError as problem:
        raise DataError(f"{path}: cannot be read: {problem.strerror}") from None
    if len(data) > MAX_BYTES:
        raise DataError(f"{path}: larger than the {MAX_BYTES:,} bytes that are read")
    try:
        _check_header(data)
        found = {}
        for matrix in _matrices(data):
            name, array = _array(matrix, wanted)
            if array is not None:
                found[name] = array
        return found
    except DataError as problem:
        raise DataError(f"{path}: {problem}") from None
    except (struct.error, zlib.error, ValueError, MemoryError) as problem:
        raise DataError(f"{path}: not a MATLAB 5 file that can be read: {problem}") from None


def _check_header(data: bytes) -> None:
    if data.startswith((b"MATLAB 7.3", b"\x89HDF")):
        raise DataError("a MATLAB 7.3 file, which is another format; save it with -v7")
    if len(data) < _HEADER or data[126:128] != b"IM":
        raise DataError("not a MATLAB 5 file of a little-endian machine")


def _matrices(data: bytes) -> Iterator[memoryview]:
    """The content of each variable, unpacked."""
    position = _HEADER
    while position < len(data):
        kind, size = struct.unpack_from("<II", data, position)
        start, position = position + 8, position + 8 + size
        if position > len(data):
            raise DataError("truncated: the MATLAB file ends inside a variable")
        body = memoryview(data)[start:position]
        if kind == _COMPRESSED:
            body = memoryview(_unpacked(body, _MAX_RATIO * len(data)))
            kind, size = struct.unpack_from("<II", body)
            body = body[8 : 8 + size]
        if kind == _MATRIX:
            yield body


def _unpacked(body: memoryview, most: int) -> bytes:
    unpacker = zlib.decompressobj()
    data = unpacker.decompress(body, most)
    if not unpacker.eof:
        raise DataError("truncated, or unpacks to far more than it is: a variable that cannot be read")
    return data


def _array(matrix: memoryview, wanted: tuple[str, ...]) -> tuple[str, NDArray[Any] | None]:
    flags, position = _element(matrix, 0)
    sides, position = _element(matrix, position)
    label, position = _element(matrix, position)
    name = bytes(label[1]).decode("ascii", "replace")
    if name not in wanted:
        return name, None
    (bits,) = struct.unpack_from("<I", flags[1])
    values = _element(matrix, position)[0] if bits & 0xFF in _NUMERIC_CLASSES else (0, memoryview(b""))
    if bits & _COMPLEX or values[0] not in _STORED or sides[0] != 5:
        raise DataError(f"the variable {name!r} is not a plain array of numbers")
    shape = struct.unpack(f"<{len(sides[1]) // 4}i", sides[1])
    kind = np.dtype(_STORED[values[0]])
    if min(shape, default=-1) < 0 or len(shape) > 8 or math.prod(shape) * kind.itemsize != len(values[1]):
        raise DataError(f"the variable {name!r} has the shape {shape[:8]} and {len(values[1])} bytes of {kind}")
    return name, np.frombuffer(values[1], kind).reshape(shape, order="F")


def _element(matrix: memoryview, position: int) -> tuple[tuple[int, memoryview], int]:
    """The type and content of one part of a variable, and where the next one starts."""
    kind, size = struct.unpack_from("<II", matrix, position)
    if kind >> 16:
        # Up to four bytes share the first eight with their type and size.
        content = matrix[position + 4 : position + 4 + (kind >> 16)]
        if kind >> 16 > 4:
            raise DataError("a part of a variable that claims more than its place")
        return (kind & 0xFFFF, content), position + 8
    content = matrix[position + 8 : position + 8 + size]
    if len(content) != size:
        raise DataError("truncated: a variable ends inside one of its parts")
    return (kind, content), position + 8 + size + -size % 8

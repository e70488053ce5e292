"""How a sleeping stream is laid out: blocks of bytes, of which only those that changed are written again.

A parcel is a file's content: an id, then records. A record is a set of blocks, each with its place in an image of the
state; the first lies on zeros, each later one on those before it. Every record has a checksum, which tells damage, not
forgery. A record that the file's end cuts off is one whose writer was killed, and counts as never written.
"""

import json
import math
import struct
import zlib
from collections.abc import Iterator
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..errors import StateError
from .compiled import kernel
from .state import Arrays

Bytes = NDArray[np.uint8]
Digests = NDArray[np.uint64]

_MAGIC = b"PDCSstr1"
_START = struct.Struct("<8sI")
# Magic, how many blocks, how many blocks the image has, the checksum over all of it, and one over these four alone:
# a record whose length is damaged must not pass for one that was cut off.
_RECORD = struct.Struct("<4sIIQ")
_SEAL = struct.Struct("<I")
_HEAD = _RECORD.size + _SEAL.size
_RECORD_MAGIC = b"blck"
# Bytes of a block: a sample of a stream changes some tens of kilobytes in small pieces.
_BLOCK = 256
_WORDS = _BLOCK // 8
# The header of an image gets so much room, and more of it in steps of that size.
_HEADER_ROOM = 2048
# No image is larger: a damaged record must not make us allocate for it.
_MOST_BLOCKS = 2**24
_TYPES: dict[str, np.dtype[Any]] = {"F64": np.dtype("<f8"), "F32": np.dtype("<f4"), "I64": np.dtype("<i8")}
_encode = json.JSONEncoder(separators=(",", ":")).encode
_CODES = {dtype: code for code, dtype in _TYPES.items()}


def digest_twin(words: Digests, weights: Digests, out: Digests) -> None:
    """The same without numba."""
    np.matmul(words, weights, out=out)


@kernel("void(uint64[:,::1], uint64[::1], uint64[::1])", twin=digest_twin)
def digest(words: Digests, weights: Digests, out: Digests) -> None:
    """The weighted sum of each row of `words` (n, m) into `out` (n,), modulo 2 to the 64."""
    for row in range(words.shape[0]):
        total = np.uint64(0)
        for i in range(words.shape[1]):
            total += words[row, i] * weights[i]
        out[row] = total


class Image(NamedTuple):
    """A state laid out, and a digest of each of its blocks."""

    blocks: Bytes
    digests: Digests


def start(name: str) -> bytes:
    """What a parcel begins with."""
    text = name.encode()
    return _START.pack(_MAGIC, len(text)) + text


def name_of(data: bytes | bytearray) -> str:
    """The id in the beginning of a parcel."""
    return data[_START.size : _start_length(data)].decode()


def image(header: dict[str, Any], arrays: Arrays) -> Image:
    """Lay out a state: a header for `json`, and arrays; one that grows a little moves none of the others."""
    table: list[tuple[str, str, tuple[int, ...], int]] = []
    parts: list[Any] = []
    at = 0
    for name in sorted(arrays):
        array = np.ascontiguousarray(arrays[name])
        room = _room(array.nbytes)
        table.append((name, _CODES[array.dtype], array.shape, at))
        parts += (array.data, bytes(room - array.nbytes))
        at += room
    text = _encode({**header, "arrays": table}).encode()
    first = _first(len(text))
    parts[:0] = (struct.pack("<Q", len(text)), text, bytes(first - 8 - len(text)))
    # Kernels want what can be written to, though none does.
    blocks = np.frombuffer(bytearray().join(parts), dtype=np.uint8).reshape(-1, _BLOCK)
    return Image(blocks, _digests(blocks))


def contents(blocks: Bytes) -> tuple[dict[str, Any], Arrays]:
    """Header and arrays of an image; the arrays are views of it."""
    flat = blocks.reshape(-1)
    try:
        length = int(flat[:8].view("<u8")[0])
        header = json.loads(flat[8 : 8 + length].tobytes())
        first, buffer = _first(length), flat.data
        arrays: Arrays = {}
        for name, code, shape, at in header.pop("arrays"):
            array = np.frombuffer(buffer, _TYPES[code], math.prod(shape), first + at)
            arrays[name] = array if len(shape) == 1 else array.reshape(shape)
    except (ValueError, KeyError, TypeError, IndexError, RecursionError) as problem:
        raise StateError(f"the stream cannot be read: {str(problem)[:200]}") from None
    return header, arrays


def record(new: Image, old: Digests | None) -> bytes:
    """The blocks of an image that differ from those with the digests `old`, or from zeros; empty where none do."""
    changed = new.digests != (old if old is not None else 0)
    if old is None:
        # A block of other numbers may have the digest of zeros.
        changed |= new.blocks.any(axis=1)
    places = np.flatnonzero(changed).astype("<u4")
    if not len(places) and old is not None:
        return b""
    digest = _checksum(len(new.blocks), places, new.digests[places])
    head = _RECORD.pack(_RECORD_MAGIC, len(places), len(new.blocks), digest)
    return b"".join((head, _SEAL.pack(zlib.crc32(head)), places.tobytes(), new.blocks[places].tobytes()))


class Opened(NamedTuple):
    """The image that a parcel holds, how many bytes it had when it was written whole, and how many of them count."""

    image: Image
    whole: int
    used: int


def opened(data: bytearray, name: str) -> Opened:
    """What a parcel holds; refuses one that is damaged or of another stream than `name`."""
    at, whole = _start_length(data), 0
    if name_of(data) != name:
        raise StateError(f"the file of the stream {name!r} holds the stream {name_of(data)[:200]!r}")
    blocks, digests = np.zeros((0, _BLOCK), dtype=np.uint8), np.zeros(0, dtype=np.uint64)
    for total, places, rows, found, end in _records(data, at):
        if len(blocks) == 0:
            blocks, digests = np.zeros((total, _BLOCK), dtype=np.uint8), np.zeros(total, dtype=np.uint64)
            whole = end
        if total != len(blocks):
            raise StateError("the stream's records are of different sizes")
        blocks[places], digests[places], at = rows, found, end
    if len(blocks) == 0:
        raise StateError("the stream's file was cut off")
    return Opened(Image(blocks, digests), whole, at)


def _records(data: bytearray, at: int) -> Iterator[tuple[int, NDArray[np.uint32], Bytes, Digests, int]]:
    """Of each record how many blocks its image has, where its blocks lie, they and their digests, and where it ends."""
    while at + _HEAD <= len(data):
        magic, count, total, checksum = _RECORD.unpack_from(data, at)
        body = at + _HEAD
        sealed = data[body - _SEAL.size : body] == _SEAL.pack(zlib.crc32(data[at : body - _SEAL.size]))
        if magic != _RECORD_MAGIC or not sealed or not 0 < total <= _MOST_BLOCKS or count > total:
            raise StateError("the stream's file is damaged: a record does not begin as one does")
        end = body + count * (4 + _BLOCK)
        if end > len(data):
            return
        places = np.frombuffer(data, dtype="<u4", count=count, offset=body)
        rows = np.frombuffer(data, dtype=np.uint8, count=count * _BLOCK, offset=body + 4 * count).reshape(-1, _BLOCK)
        digests = _digests(rows)
        if _checksum(total, places, digests) != checksum or (count and int(places.max()) >= total):
            raise StateError("the stream's content does not match its checksum: it is damaged")
        yield total, places, rows, digests, end
        at = end


def _start_length(data: bytes | bytearray) -> int:
    if len(data) < _START.size:
        raise StateError(f"the stream's file has {len(data)} bytes: it was cut off")
    magic, length = _START.unpack_from(data)
    if magic != _MAGIC:
        raise StateError("the stream's file does not begin as one does: it is damaged, or something else")
    if _START.size + length > len(data):
        raise StateError("the stream's file was cut off")
    return int(_START.size + length)


def _first(length: int) -> int:
    """Where the arrays begin behind a header of so many bytes."""
    return _HEADER_ROOM * (1 + (length + 8) // _HEADER_ROOM)


@lru_cache(maxsize=4096)
def _room(size: int) -> int:
    """Room for so many bytes and some more, the same for sizes nearby: a power of two, or a quarter or more of one."""
    step = max(_BLOCK, 1 << max(0, size.bit_length() - 3))
    return step * (1 + size // step)


@lru_cache(maxsize=1)
def _weights() -> Digests:
    """Odd numbers without a pattern, from a fixed stream of them: no change of a single word escapes an odd weight."""
    numbers = np.random.Generator(np.random.Philox(key=np.ones(2, dtype=np.uint64)))
    return numbers.integers(0, 2**64, size=_WORDS, dtype=np.uint64) | np.uint64(1)


def _digests(blocks: Bytes) -> Digests:
    """One number of 64 bits for each block (n, 256)."""
    words = blocks.reshape(-1).view("<u8").reshape(-1, _WORDS)
    digests: Digests = np.empty(len(words), dtype=np.uint64)
    digest(words, _weights(), digests)
    return digests


def _checksum(total: int, places: NDArray[np.uint32], digests: Digests) -> int:
    """Over the places and digests of a record's blocks, in order."""
    turns = np.arange(1, 2 * len(places) + 1, 2, dtype=np.uint64)
    mixed = (digests ^ (digests >> np.uint64(29))) + places.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    return (int(mixed @ turns) + total) % 2**64

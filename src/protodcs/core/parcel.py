"""How a sleeping stream is laid out: blocks of bytes, of which only those that changed are written again.

An image of a state begins with a text that says what is in it, the same for most states of a pool; then come its
numbers, then its arrays. A parcel is a file's content: an id, then records. A record is a set of blocks, each with its
place in an image; the first lies on zeros, each later one on those before it. Every record has a checksum, which tells
damage, not forgery. A record that the file's end cuts off is one whose writer was killed, and counts as never written.
"""

import json
import struct
import zlib
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..errors import StateError
from .state import Arrays

Bytes = NDArray[np.uint8]
Digests = NDArray[np.uint64]
Places = NDArray[np.uint32]

_MAGIC = b"PDCSstr1"
_START = struct.Struct("<8sI")
# Magic, how many blocks, how many blocks the image has, the checksum over all of it, and one over these four alone:
# a record whose length is damaged must not pass for one that was cut off.
_RECORD = struct.Struct("<4sIIQ")
_SEAL = struct.Struct("<I")
_HEAD = _RECORD.size + _SEAL.size
_RECORD_MAGIC = b"blck"
# Bytes of a block: a sample of a stream changes some tens of kilobytes in small pieces.
BLOCK = 256
_WORDS = BLOCK // 8
# The header of an image gets so much room, and more of it in steps of that size.
_HEADER_ROOM = 2048
# No image is larger: a damaged record must not make us allocate for it.
_MOST_BLOCKS = 2**24
_TYPES: dict[str, np.dtype[Any]] = {"F64": np.dtype("<f8"), "F32": np.dtype("<f4"), "I64": np.dtype("<i8")}
_encode = json.JSONEncoder(separators=(",", ":")).encode
# The text of an image begins so.
_LAYOUT = b'{"layout":2,'
# How a number is packed.
_NUMBERS: tuple[tuple[type, str], ...] = ((bool, "?"), (int, "q"), (float, "d"), (type(None), "x"))
_UNREADABLE = (ValueError, KeyError, TypeError, IndexError, RecursionError, struct.error)
_CODES = {dtype: code for code, dtype in _TYPES.items()}


def digest(words: Digests, weights: Digests, out: Digests) -> None:
    """The weighted sum of each row of `words` (n, m) into `out` (n,), modulo 2 to the 64."""
    np.matmul(words, weights, out=out)


def lay(places: Places, rows: Digests, words: Digests, weights: Digests, digests: Digests) -> tuple[bool, int]:
    """Lay the blocks `rows` (n, m) of a record upon an image `words` (N, m) at `places` (n,), and their digests (N,).

    Returns whether all places are in the image, and the checksum of the record.
    """
    if len(places) and int(places.max()) >= len(words):
        return False, 0
    words[places] = rows
    digests[places] = rows @ weights
    return True, _checksum(places, digests[places])


def differ(words: Digests, digests: Digests, old: Digests, whole: bool, places: Places) -> tuple[int, int]:
    """Which blocks have other digests than the `old` ones, into `places` (N,); their number, and a record's checksum.

    `whole` says that the old ones are of zeros: other blocks may have that digest too, so the `words` are looked at.
    """
    changed = digests != old
    if whole:
        changed |= words.any(axis=1)
    found = np.flatnonzero(changed)
    places[: len(found)] = found
    return len(found), _checksum(found, digests[found])


class Image(NamedTuple):
    """A state laid out, and a digest of each of its blocks."""

    blocks: Bytes
    digests: Digests


def start(name: str) -> bytes:
    """What a parcel begins with."""
    text = name.encode()
    return _START.pack(_MAGIC, len(text)) + text


def name_of(data: bytes | bytearray | memoryview) -> str:
    """The id in the beginning of a parcel."""
    return bytes(data[_START.size : _start_length(data)]).decode()


def image(header: dict[str, Any], counters: dict[str, Any], arrays: Arrays) -> Image:
    """Lay out a state: a header for `json`, numbers and arrays; one that grows a little moves none of the others."""
    names = sorted(arrays)
    parts: list[Any] = [b""]
    kinds: list[tuple[np.dtype[Any], int]] = []
    shapes: list[int] = []
    for name in names:
        array = np.ascontiguousarray(arrays[name])
        kinds.append((array.dtype, array.ndim))
        shapes += array.shape
        if size := array.nbytes:
            parts += (array.data, _zeros(_room(size) - size))
    parts[0] = front(header, tuple(names), tuple(kinds), shapes, counters)
    # Kernels want what can be written to, though none does.
    blocks = np.frombuffer(bytearray().join(parts), dtype=np.uint8).reshape(-1, BLOCK)
    return Image(blocks, digests_of(blocks))


def front(
    header: dict[str, Any],
    names: tuple[str, ...],
    kinds: tuple[tuple[np.dtype[Any], int], ...],
    shapes: list[int],
    counters: dict[str, Any],
) -> bytes:
    """What an image has before its arrays: the text and the numbers, `shapes` being the lengths along all axes."""
    values = list(counters.values())
    text, numbers = _described(names, kinds, tuple(counters), tuple(map(type, values)))
    text = _LAYOUT + _encode(header)[1:-1].encode() + text
    packed = numbers.pack(*shapes, *(value for value in values if value is not None))
    used = 8 + len(text) + len(packed)
    return b"".join((struct.pack("<Q", len(text)), text, packed, _zeros(_first(used) - used)))


@lru_cache(maxsize=256)
def _described(
    names: tuple[str, ...],
    kinds: tuple[tuple[np.dtype[Any], int], ...],
    counters: tuple[str, ...],
    types: tuple[type, ...],
) -> tuple[bytes, struct.Struct]:
    """What the text of an image says of its arrays and counters, and how their lengths and values are packed."""
    codes = [next(code for type_, code in _NUMBERS if issubclass(given, type_)) for given in types]
    arrays = [(name, _CODES[dtype], axes) for name, (dtype, axes) in zip(names, kinds, strict=True)]
    text = _encode({"counters": list(zip(counters, codes, strict=True)), "arrays": arrays})
    return f",{text[1:]}".encode(), _numbers(sum(axes for _, axes in kinds), codes)


def _numbers(axes: int, codes: list[str]) -> struct.Struct:
    return struct.Struct(f"<{axes}q{''.join(codes)}")


class Text(NamedTuple):
    """What the text of an image says.

    Attributes:
        header: as it was given.
        counters, none: the names of the numbers, and of those that are None.
        names, kinds: of the arrays; a kind is a type and a number of axes.
        axes: how many axes they have in all.
        numbers: how the lengths of the arrays along their axes and then the numbers are packed.
    """

    header: dict[str, Any]
    counters: list[str]
    none: dict[str, None]
    names: tuple[str, ...]
    kinds: tuple[tuple[np.dtype[Any], int], ...]
    axes: int
    numbers: struct.Struct


@lru_cache(maxsize=256)
def _read_text(text: bytes) -> Text:
    header = json.loads(text)
    del header["layout"]
    counters, arrays = header.pop("counters"), header.pop("arrays")
    codes = {code for _, code in _NUMBERS}
    if not all(code in codes for _, code in counters) or not all(axes in (1, 2, 3, 4) for _, _, axes in arrays):
        raise ValueError("its text describes what cannot be")
    return Text(
        header,
        [name for name, code in counters if code != "x"],
        {name: None for name, code in counters if code == "x"},
        tuple(name for name, _, _ in arrays),
        tuple((_TYPES[code], axes) for _, code, axes in arrays),
        sum(axes for _, _, axes in arrays),
        _numbers(sum(axes for _, _, axes in arrays), [code for _, code in counters]),
    )


class Front(NamedTuple):
    """What an image has before its arrays: what its text says, lengths and numbers, and where the arrays begin."""

    said: Text
    shapes: tuple[int, ...]
    counters: dict[str, Any]
    end: int


def contents(blocks: Bytes) -> tuple[dict[str, Any], dict[str, Any], Arrays]:
    """Header, numbers and arrays of an image; the arrays are views of it."""
    found = front_of(blocks)
    try:
        return found.said.header, found.counters, _arrays(found, blocks.reshape(-1).data)
    except _UNREADABLE as problem:
        raise StateError(f"the stream cannot be read: {str(problem)[:200]}") from None


def front_of(blocks: Bytes) -> Front:
    """Return what an image has before its arrays."""
    flat = blocks.reshape(-1)
    try:
        length = int(flat[:8].view("<u8")[0])
        text = flat[8 : 8 + length].tobytes()
        if not text.startswith(_LAYOUT):
            raise ValueError("its layout is not the one that this version writes")
        said = _read_text(text)
        numbers = said.numbers.unpack_from(flat.data, 8 + length)
    except _UNREADABLE as problem:
        raise StateError(f"the stream cannot be read: {str(problem)[:200]}") from None
    counters = dict(zip(said.counters, numbers[said.axes :], strict=True)) | said.none
    return Front(said, numbers[: said.axes], counters, _first(8 + length + said.numbers.size))


def _arrays(found: Front, buffer: memoryview) -> Arrays:
    at, axis = found.end, 0
    arrays: Arrays = {}
    for name, (dtype, axes) in zip(found.said.names, found.said.kinds, strict=True):
        shape = found.shapes[axis : axis + axes]
        axis += axes
        if 0 in shape:
            arrays[name] = _nothing(shape, dtype)
            continue
        arrays[name] = array = np.ndarray(shape, dtype, buffer, at)
        at += _room(array.nbytes)
    return arrays


@lru_cache(maxsize=256)
def _nothing(shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
    """An array without elements, which many share."""
    return np.zeros(shape, dtype=dtype)


def record(new: Image, old: Digests | None) -> bytes:
    """The blocks of an image that differ from those with the digests `old`, or from zeros; empty where none do."""
    total, whole = len(new.blocks), old is None
    places = np.empty(total, dtype=np.uint32)
    before = np.zeros_like(new.digests) if old is None else old
    count, mixed = differ(_words(new.blocks), new.digests, before, whole, places)
    if not count and not whole:
        return b""
    head = _RECORD.pack(_RECORD_MAGIC, count, total, (int(mixed) + total) % 2**64)
    places = places[:count].astype("<u4", copy=False)
    rows = new.blocks.take(places, axis=0)
    return b"".join((head, _SEAL.pack(zlib.crc32(head)), places.data, rows.data))


class Opened(NamedTuple):
    """The image that a parcel holds, how many bytes it had when it was written whole, and how many of them count."""

    image: Image
    whole: int
    used: int


def opened(data: bytearray | memoryview, name: str) -> Opened:
    """Return what a file holds. Raise StateError if it is damaged or belongs to another stream than `name`."""
    at, whole = _start_length(data), 0
    if name_of(data) != name:
        raise StateError(f"the file of the stream {name!r} holds the stream {name_of(data)[:200]!r}")
    found: Image | None = None
    while at + _HEAD <= len(data):
        count, total, checksum, end = _record_head(data, at)
        if end > len(data):
            break
        if found is None:
            found, whole = _empty_image(total), end
        if total != len(found.blocks):
            raise StateError("the stream's records are of different sizes")
        places = np.frombuffer(data, dtype="<u4", count=count, offset=at + _HEAD)
        rows = np.frombuffer(data, dtype="<u8", count=count * _WORDS, offset=end - count * BLOCK).reshape(-1, _WORDS)
        fits, mixed = lay(places, rows, _words(found.blocks), _weights(), found.digests)
        if not fits or (int(mixed) + total) % 2**64 != checksum:
            raise StateError("the stream's content does not match its checksum: it is damaged")
        at = end
    if found is None:
        raise StateError("the stream's file was cut off")
    return Opened(found, whole, at)


def _empty_image(blocks: int) -> Image:
    return Image(np.zeros((blocks, BLOCK), dtype=np.uint8), np.zeros(blocks, dtype=np.uint64))


def _record_head(data: bytearray | memoryview, at: int) -> tuple[int, int, int, int]:
    """Of the record that begins here how many blocks it has and its image has, its checksum, and where it ends."""
    magic, count, total, checksum = _RECORD.unpack_from(data, at)
    body = at + _HEAD
    sealed = bytes(data[body - _SEAL.size : body]) == _SEAL.pack(zlib.crc32(data[at : body - _SEAL.size]))
    if magic != _RECORD_MAGIC or not sealed or not 0 < total <= _MOST_BLOCKS or count > total:
        raise StateError("the stream's file is damaged: a record does not begin as one does")
    return count, total, checksum, body + count * (4 + BLOCK)


def _start_length(data: bytes | bytearray | memoryview) -> int:
    if len(data) < _START.size:
        raise StateError(f"the stream's file has {len(data)} bytes: it was cut off")
    magic, length = _START.unpack_from(data)
    if magic != _MAGIC:
        raise StateError("the stream's file does not begin as one does: it is damaged, or something else")
    if _START.size + length > len(data):
        raise StateError("the stream's file was cut off")
    return int(_START.size + length)


def _first(used: int) -> int:
    """Where the arrays begin behind a text and numbers of so many bytes."""
    return _HEADER_ROOM * (1 + used // _HEADER_ROOM)


@lru_cache(maxsize=4096)
def _room(size: int) -> int:
    """Room for so many bytes and some more, the same for sizes nearby: a power of two, or a quarter or more of one."""
    step = max(BLOCK, 1 << max(0, size.bit_length() - 3))
    return step * (1 + size // step)


@lru_cache(maxsize=1)
def _weights() -> Digests:
    """Odd numbers without a pattern, from a fixed stream of them: no change of a single word escapes an odd weight."""
    numbers = np.random.Generator(np.random.Philox(key=np.ones(2, dtype=np.uint64)))
    return numbers.integers(0, 2**64, size=_WORDS, dtype=np.uint64) | np.uint64(1)


_ZEROS = memoryview(bytes(2**16))


def _zeros(size: int) -> bytes | memoryview:
    """So many zeros, which cost nothing where they are few."""
    return _ZEROS[:size] if size <= len(_ZEROS) else bytes(size)


def _words(blocks: Bytes) -> Digests:
    """Blocks (n, 256) as (n, 32) numbers of 64 bits."""
    return blocks.view("<u8")


def digests_of(blocks: Bytes) -> Digests:
    """One number of 64 bits for each block (n, 256)."""
    words = _words(blocks)
    digests: Digests = np.empty(len(words), dtype=np.uint64)
    digest(words, _weights(), digests)
    return digests


def _checksum(places: NDArray[np.integer], digests: Digests) -> int:
    """Over the places and digests of a record's blocks, in order."""
    turns = np.arange(1, 2 * len(places) + 1, 2, dtype=np.uint64)
    mixed = (digests ^ (digests >> np.uint64(29))) + places.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    return int(mixed @ turns)

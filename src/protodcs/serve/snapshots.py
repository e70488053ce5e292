"""A stream at rest: what its engine has learned, and what its callers were told lately.

One blob, versioned and under a checksum. The engine's part is the state that `protodcs state` knows, without the
prototypes that many streams share.
"""

import struct
import zlib
from typing import NamedTuple

from ..errors import StoreError
from .records import Record

VERSION = 1
# version, position, bytes of the state, number of records
_HEAD = struct.Struct("<BQQI")
_LENGTH = struct.Struct("<I")


class Snapshot(NamedTuple):
    """A stream after its first `position` records: the engine's state, and the records that are remembered."""

    position: int
    state: bytes
    remembered: list[Record]


def pack(snapshot: Snapshot) -> bytes:
    """A snapshot as bytes."""
    parts = [_HEAD.pack(VERSION, snapshot.position, len(snapshot.state), len(snapshot.remembered)), snapshot.state]
    for record in snapshot.remembered:
        data = record.pack()
        parts += (_LENGTH.pack(len(data)), data)
    body = b"".join(parts)
    return body + _LENGTH.pack(zlib.crc32(body))


def unpack(data: bytes) -> Snapshot:
    """The snapshot that was packed; anything else is refused."""
    if len(data) < _HEAD.size + _LENGTH.size:
        raise StoreError(f"a snapshot of {len(data)} bytes: it was cut off")
    version, position, size, count = _HEAD.unpack_from(data)
    if version != VERSION:
        raise StoreError(f"a snapshot of version {version}, this protodcs reads {VERSION}: upgrade protodcs")
    end = len(data) - _LENGTH.size
    if zlib.crc32(memoryview(data)[:end]) != _LENGTH.unpack_from(data, end)[0]:
        raise StoreError("a snapshot does not match its checksum: it is damaged")
    at = _HEAD.size + size
    state, records = data[_HEAD.size : at], []
    for _ in range(count):
        if at + _LENGTH.size > end:
            break
        (length,) = _LENGTH.unpack_from(data, at)
        records.append(Record.unpack(data[at + _LENGTH.size : at + _LENGTH.size + length]))
        at += _LENGTH.size + length
    if at != end or len(records) != count:
        raise StoreError(f"a snapshot of {len(data)} bytes that announces another length: it is damaged")
    return Snapshot(position, state, records)

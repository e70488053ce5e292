"""A stream at rest: what its engine has learned, what its guard knows, and what its callers were told lately.

One blob, versioned and under a checksum. The engine's part is the state that `protodcs state` knows, without the
prototypes that many streams share.
"""

import struct
import zlib
from typing import NamedTuple

from ...errors import StoreError
from .records import Record

VERSION = 2
# version, position, bytes of the state, of the guard, number of records
_HEAD = struct.Struct("<BQQQI")
# The first version had no guard.
_FIRST = 1
_FIRST_HEAD = struct.Struct("<BQQI")
_LENGTH = struct.Struct("<I")


class Snapshot(NamedTuple):
    """A stream after its first `position` records.

    Attributes:
        position: how many records it covers.
        state: the engine's.
        remembered: the records that are remembered.
        guard: what the guard knows; empty where there is none.
    """

    position: int
    state: bytes
    remembered: list[Record]
    guard: bytes = b""


def pack(snapshot: Snapshot) -> bytes:
    """A snapshot as bytes."""
    sizes = len(snapshot.state), len(snapshot.guard), len(snapshot.remembered)
    parts = [_HEAD.pack(VERSION, snapshot.position, *sizes), snapshot.state, snapshot.guard]
    for record in snapshot.remembered:
        data = record.pack()
        parts += (_LENGTH.pack(len(data)), data)
    body = b"".join(parts)
    return body + _LENGTH.pack(zlib.crc32(body))


def unpack(data: bytes) -> Snapshot:
    """The snapshot that was packed; anything else is refused."""
    version = data[0] if data else VERSION
    if version not in (_FIRST, VERSION):
        raise StoreError(f"a snapshot of version {version}, this protodcs reads {VERSION}: upgrade protodcs")
    head = _FIRST_HEAD if version == _FIRST else _HEAD
    if len(data) < head.size + _LENGTH.size:
        raise StoreError(f"a snapshot of {len(data)} bytes: it was cut off")
    _, position, size, *watched, count = head.unpack_from(data)
    end = len(data) - _LENGTH.size
    if zlib.crc32(memoryview(data)[:end]) != _LENGTH.unpack_from(data, end)[0]:
        raise StoreError("a snapshot does not match its checksum: it is damaged")
    at = head.size + size + sum(watched)
    state, guard, records = data[head.size : head.size + size], data[head.size + size : at], []
    for _ in range(count):
        if at + _LENGTH.size > end:
            break
        (length,) = _LENGTH.unpack_from(data, at)
        records.append(Record.unpack(data[at + _LENGTH.size : at + _LENGTH.size + length]))
        at += _LENGTH.size + length
    if at != end or len(records) != count:
        raise StoreError(f"a snapshot of {len(data)} bytes that announces another length: it is damaged")
    return Snapshot(position, state, records, guard)

"""The snapshot of a stream: engine state, guard state, and the requests it recognises as retries.

One blob, versioned and under a checksum. The engine's part is the state that `protodcs state` knows, without the
prototypes that many streams share.
"""

import struct
import zlib
from typing import NamedTuple

from ...errors import DamagedDataError, StateVersionError

VERSION = 7
# Version and position, then bytes of the engine state, of the guard, of the applied requests, of the stored samples and
# of the latest decisions.
_HEAD = struct.Struct("<BQQQQQQ")
_CHECKSUM = struct.Struct("<I")


class Snapshot(NamedTuple):
    """A stream after its first `position` records.

    Attributes:
        position: how many records it covers.
        state: of the engine.
        guard: of the guard; empty if there is none.
        requests: the applied requests, as `IdempotencyCache.pack` returns them.
        samples: as `StreamSamples.pack` returns them; empty if the stream stores none.
        latest: the latest decisions, as `Latest.pack` returns them.
    """

    position: int
    state: bytes
    guard: bytes
    requests: bytes
    samples: bytes = b""
    latest: bytes = b""


def pack(snapshot: Snapshot) -> bytes:
    """Return a snapshot as bytes."""
    position, *parts = snapshot
    body = b"".join((_HEAD.pack(VERSION, position, *map(len, parts)), *parts))
    return body + _CHECKSUM.pack(zlib.crc32(body))


def unpack(data: bytes) -> Snapshot:
    """Return the snapshot that `pack` was given. Raise DamagedDataError or StateVersionError otherwise."""
    if len(data) < _HEAD.size + _CHECKSUM.size:
        raise DamagedDataError(f"a snapshot of {len(data)} bytes: it was cut off")
    end = len(data) - _CHECKSUM.size
    if zlib.crc32(memoryview(data)[:end]) != _CHECKSUM.unpack_from(data, end)[0]:
        raise DamagedDataError("a snapshot does not match its checksum: it is damaged")
    if data[0] != VERSION:
        raise StateVersionError.of("The snapshot of the stream", data[0], VERSION)
    _, position, *sizes = _HEAD.unpack_from(data)
    if _HEAD.size + sum(sizes) != end:
        raise DamagedDataError(f"a snapshot of {len(data)} bytes that announces another length: it is damaged")
    parts, at = [], _HEAD.size
    for size in sizes:
        parts.append(data[at : at + size])
        at += size
    return Snapshot(position, *parts)

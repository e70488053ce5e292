"""Pack the prototypes that streams share: one blob, written when a stream is created and read when one is loaded.

This is not numpy's own format, whose reader parses Python syntax: CPython 3.11 fails if two threads do that at once.
"""

import struct

import numpy as np

from ...core.prototypes import Prototypes
from ...errors import DamagedDataError

# Number of rows, and of numbers in each; then the rows as float32, little-endian.
_HEAD = struct.Struct("<II")


def pack_prototypes(prototypes: Prototypes) -> bytes:
    """Return prototypes as a blob."""
    return _HEAD.pack(*prototypes.unit.shape) + prototypes.unit.astype("<f4", copy=False).tobytes()


def unpack_prototypes(data: bytes) -> Prototypes:
    """Return the prototypes that were packed. Raise DamagedDataError if a part is missing."""
    count, dimension = _HEAD.unpack_from(data) if len(data) >= _HEAD.size else (0, 0)
    if not count or not dimension or len(data) != _HEAD.size + 4 * count * dimension:
        raise DamagedDataError(f"The shared prototypes are damaged: {len(data)} bytes for {count} rows of {dimension}.")
    rows = np.frombuffer(data, dtype="<f4", offset=_HEAD.size).reshape(count, dimension)
    return Prototypes.of_unit(np.array(rows, dtype=np.float32))

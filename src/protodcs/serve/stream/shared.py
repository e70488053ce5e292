"""Pack what streams share: prototypes and vocabularies, each a blob that is read when a stream is loaded.

This is not numpy's own format, whose reader parses Python syntax: CPython 3.11 fails if two threads do that at once.
"""

import struct

import numpy as np

from ...arrays import Feature
from ...core.prototypes import Prototypes
from ...core.vocabulary import LEAST_NAMES, Vocabulary
from ...errors import DamagedDataError, InputError

# Number of rows, and of numbers in each; then the rows as float32, little-endian.
_HEAD = struct.Struct("<II")
# Names of a vocabulary, at most: a class edit compares all of them with all classes.
MAX_NAMES = 5000


def pack_rows(rows: Feature) -> bytes:
    """Return unit rows as a blob."""
    return _HEAD.pack(*rows.shape) + rows.astype("<f4", copy=False).tobytes()


def pack_prototypes(prototypes: Prototypes) -> bytes:
    """Return prototypes as a blob."""
    return pack_rows(prototypes.unit)


def unpack_prototypes(data: bytes) -> Prototypes:
    """Return the prototypes that were packed. Raise DamagedDataError if a part is missing."""
    return Prototypes.of_unit(_unpack_rows(data))


def unpack_vocabulary(data: bytes, fingerprint: str) -> Vocabulary:
    """Return the vocabulary whose rows were packed. Raise DamagedDataError if a part is missing."""
    return Vocabulary.of_unit(_unpack_rows(data), fingerprint)


def check_vocabulary(names: int) -> None:
    """Raise InputError if a vocabulary may not have so many names."""
    if not LEAST_NAMES <= names <= MAX_NAMES:
        raise InputError(f"A vocabulary must have {LEAST_NAMES} to {MAX_NAMES} names; given: {names}.")


def _unpack_rows(data: bytes) -> Feature:
    count, dimension = _HEAD.unpack_from(data) if len(data) >= _HEAD.size else (0, 0)
    if not count or not dimension or len(data) != _HEAD.size + 4 * count * dimension:
        raise DamagedDataError(f"The shared rows are damaged: {len(data)} bytes for {count} rows of {dimension}.")
    rows = np.frombuffer(data, dtype="<f4", offset=_HEAD.size).reshape(count, dimension)
    return np.array(rows, dtype=np.float32)

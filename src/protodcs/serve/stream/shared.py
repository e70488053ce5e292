"""Prototypes as a blob that streams share: made where a stream is created, read where one is woken."""

import io

import numpy as np

from ...core.prototypes import Prototypes
from ...errors import StoreError


def pack_prototypes(prototypes: Prototypes) -> bytes:
    """Prototypes as a blob that streams share: the rows, as numpy writes them."""
    buffer = io.BytesIO()
    np.save(buffer, prototypes.unit, allow_pickle=False)
    return buffer.getvalue()


def unpack_prototypes(data: bytes) -> Prototypes:
    """The prototypes that were packed."""
    try:
        rows = np.load(io.BytesIO(data), allow_pickle=False)
    except (ValueError, OSError, EOFError) as problem:
        raise StoreError(f"shared prototypes cannot be read: {problem}") from None
    return Prototypes.of_unit(np.ascontiguousarray(rows, dtype=np.float32))

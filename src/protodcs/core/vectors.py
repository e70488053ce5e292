"""Vectors of unit length: normalise them, compare a feature with every prototype, and identify rows of them.

The compiled functions sum in a fixed order, so that equal inputs give equal bytes on every CPU.
"""

import hashlib
import math

import numpy as np
from numpy.typing import NDArray

from ..arrays import Feature, Features, Floats, Singles
from ._native import native

# A shorter vector has no direction. The compiled functions have the same number.
SHORTEST = 1e-6


def cosines_numpy(prototypes: Feature, inverse_norms: Floats, feature: Feature, out: Floats) -> int:
    """Write the cosine of `feature` (d,) with each prototype (K, d) to `out` (K,). Return the first largest."""
    np.matmul(prototypes.astype(np.float64), feature.astype(np.float64), out=out)
    out *= inverse_norms
    return int(out.argmax())


def to_unit_numpy(values: NDArray[np.floating], out: Feature) -> bool:
    """Normalise `values` (d,) in float64 into `out`. Return False if not finite or shorter than 1e-6."""
    with np.errstate(over="ignore", invalid="ignore"):
        wide, scale = values.astype(np.float64), 1.0
        total = float(wide @ wide)
        if total == math.inf:  # The squares overflow: try again with the largest value as the unit.
            scale = max(1.0, float(np.abs(wide).max()))
            wide /= scale
            total = float(wide @ wide)
        norm = math.sqrt(total)
        if not SHORTEST < norm * scale < math.inf:
            return False
    out[:] = wide * (1.0 / norm)
    return True


def to_unit_rows_numpy(rows: Feature, out: Feature) -> int:
    """Normalise `rows` (N, d) into `out` like `to_unit`, up to the first that cannot be. Return how many can."""
    return next((n for n, row in enumerate(rows) if not to_unit_numpy(row, out[n])), len(rows))


def move_towards_numpy(mean: Feature, rows: Features, rates: Singles) -> None:
    """Move `mean` (d,) towards one of `rows` (N, d) after the other, by its share in `rates` (N,)."""
    for row, rate in zip(rows, rates, strict=True):
        if rate:
            mean += (row - mean) * rate


def inverse_norms_numpy(rows: Feature) -> Floats:
    """Return 1 / norm of each of `rows` (K, d): (K,) float64."""
    norms: Floats = np.linalg.norm(rows.astype(np.float64), axis=1)
    return 1.0 / norms


def _inverse_norms_native(rows: Feature) -> Floats:
    out: Floats = np.empty(len(rows))
    native.invert_norms(rows, out)  # type: ignore[union-attr]
    return out


def row_fingerprint(rows: Feature) -> str:
    """Return the SHA-256 of shape and values of `rows` (N, d), in hexadecimal digits."""
    digest = hashlib.sha256(f"{rows.shape[0]} x {rows.shape[1]} float32 ".encode())
    digest.update(np.ascontiguousarray(rows, dtype="<f4").data)
    return digest.hexdigest()


cosines = cosines_numpy if native is None else native.cosines
to_unit = to_unit_numpy if native is None else native.to_unit
to_unit_rows = to_unit_rows_numpy if native is None else native.to_unit_rows
move_towards = move_towards_numpy if native is None else native.move_towards
inverse_norms = inverse_norms_numpy if native is None else _inverse_norms_native

"""Vectors of unit length: normalise them, and compare a feature with every prototype.

The kernels work in single precision and in a fixed order, so that equal inputs give equal bits on one machine.
"""

import math

import numpy as np
from numpy.typing import NDArray

from ._native import native
from .compiled import inner, kernel

Vector = NDArray[np.float64]
Row = NDArray[np.float32]
Matrix = NDArray[np.float32]


def similarities_twin(prototypes: Matrix, inverse_norms: Vector, feature: Row, out: Vector) -> int:
    out[:] = (prototypes @ feature) * inverse_norms
    return int(out.argmax())


@inner
def product(row: Row, feature: Row) -> np.float32:
    """The product of two vectors (d,), in single precision."""
    total = np.float32(0.0)
    for i in range(feature.shape[0]):
        total += row[i] * feature[i]
    return total


@inner
def four_products(
    one: Row, two: Row, three: Row, four: Row, feature: Row
) -> tuple[np.float32, np.float32, np.float32, np.float32]:
    """The same of four rows: they share the loads of the feature, and their sums do not wait for each other."""
    a, b, c, d = np.float32(0.0), np.float32(0.0), np.float32(0.0), np.float32(0.0)
    for i in range(feature.shape[0]):
        a += one[i] * feature[i]
        b += two[i] * feature[i]
        c += three[i] * feature[i]
        d += four[i] * feature[i]
    return a, b, c, d


@kernel("void(int64[::1], float32[:,::1], float32[::1], float64[::1])")
def products(chosen: NDArray[np.int64], rows: Matrix, feature: Row, out: Vector) -> None:
    """The products of `feature` (d,) with the `chosen` of some `rows` (K, d), into their places of `out` (K,)."""
    count = len(chosen)
    if count < 4:
        for k in chosen:
            out[k] = product(rows[k], feature)
        return
    for at in range(0, count, 4):
        # The last four overlap with those before: equal rows give equal bits wherever they stand.
        first = min(at, count - 4)
        j, k, m, n = chosen[first], chosen[first + 1], chosen[first + 2], chosen[first + 3]
        out[j], out[k], out[m], out[n] = four_products(rows[j], rows[k], rows[m], rows[n], feature)


@kernel("int64(float32[:,::1], float64[::1], float32[::1], float64[::1])", twin=similarities_twin)
def similarities(prototypes: Matrix, inverse_norms: Vector, feature: Row, out: Vector) -> int:
    """Cosine of `feature` (d,) with every row of `prototypes` (K, d) into `out` (K,); returns the lowest best index."""
    products(np.arange(prototypes.shape[0]), prototypes, feature, out)
    best = 0
    for k in range(prototypes.shape[0]):
        out[k] *= inverse_norms[k]
        if out[k] > out[best]:
            best = k
    return best


def invert_norms_twin(rows: Matrix, out: Vector) -> None:
    out[:] = 1.0 / np.linalg.norm(rows.astype(np.float64), axis=1)


@kernel("void(float32[:,::1], float64[::1])", twin=invert_norms_twin)
def invert_norms(rows: Matrix, out: Vector) -> None:
    """1 / ||row|| of each row of `rows` (K, d) into `out` (K,), in float64."""
    for k in range(rows.shape[0]):
        total = 0.0
        for i in range(rows.shape[1]):
            total += np.float64(rows[k, i]) * np.float64(rows[k, i])
        out[k] = 1.0 / math.sqrt(total)


def cosines_numpy(prototypes: Matrix, inverse_norms: Vector, feature: Row, out: Vector) -> int:
    """Write the cosine of `feature` (d,) with each prototype (K, d) to `out` (K,). Return the first largest."""
    np.matmul(prototypes.astype(np.float64), feature.astype(np.float64), out=out)
    out *= inverse_norms
    return int(out.argmax())


def to_unit_numpy(values: NDArray[np.floating], out: Row) -> bool:
    """Normalise `values` (d,) in float64 into `out`. Return False if not finite or shorter than 1e-6."""
    wide, scale = values.astype(np.float64), 1.0
    with np.errstate(over="ignore", invalid="ignore"):
        total = float(wide @ wide)
        if total == math.inf:  # The squares overflow: try again with the largest value as the unit.
            scale = max(1.0, float(np.abs(wide).max()))
            wide /= scale
            total = float(wide @ wide)
        norm = math.sqrt(total)
        if not 1e-6 < norm * scale < math.inf:
            return False
    out[:] = wide * (1.0 / norm)
    return True


def inverse_norms_numpy(rows: Matrix) -> Vector:
    """Return 1 / norm of each of `rows` (K, d): (K,) float64."""
    norms: Vector = np.linalg.norm(rows.astype(np.float64), axis=1)
    return 1.0 / norms


def _inverse_norms_native(rows: Matrix) -> Vector:
    out: Vector = np.empty(len(rows))
    native.invert_norms(rows, out)  # type: ignore[union-attr]
    return out


cosines = cosines_numpy if native is None else native.cosines
to_unit = to_unit_numpy if native is None else native.to_unit
inverse_norms = inverse_norms_numpy if native is None else _inverse_norms_native

"""Products, norms and cosines of rows, with sums in float64.

Every row is treated by itself, so a row has the same result alone and among others. Floats products of BLAS do not
promise that, and may differ with the number of threads.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...arrays import Floats

# Numbers of a block: 128 kB in float64.
_BLOCK = 2**14


def wide(rows: NDArray[np.floating]) -> Floats:
    """Return `rows` in float64; the array itself if it is."""
    return rows.astype(np.float64, copy=False)


def blocks(array: NDArray[Any], width: int) -> Iterator[NDArray[Any]]:
    """Yield an array in parts of a few items, for work on rows of `width` numbers.

    Temporary arrays of more rows leave the processor's cache, and each one would be new memory of the system.
    """
    step = max(1, _BLOCK // width)
    for at in range(0, len(array), step):
        yield array[at : at + step]


def products(rows: NDArray[np.floating], others: NDArray[np.floating]) -> Floats:
    """Return the product (n,) of each of the `rows` (n, d) with its row of `others` (n, d), or with the one (d,)."""
    if rows.dtype == np.float64 or others.ndim == 2:
        found: Floats = np.vecdot(wide(rows), wide(others))
        return found
    other = wide(others)
    return np.concatenate([np.zeros(0), *(np.vecdot(wide(part), other) for part in blocks(rows, rows.shape[1]))])


def norms(rows: NDArray[np.floating]) -> Floats:
    """Return the length (n,) of each of the `rows` (n, d)."""
    return np.sqrt(products(rows, rows))


def inverse_norms(rows: NDArray[np.floating]) -> Floats:
    """Return 1 / length (n,) of each of the `rows` (n, d)."""
    inverse: Floats = 1.0 / norms(rows)
    return inverse


def normalised(rows: NDArray[np.floating]) -> Floats:
    """Return `rows` (n, d) with length one, in float64."""
    unit: Floats = wide(rows) / norms(rows)[:, None]
    return unit


def cosines(rows: NDArray[np.floating], feature: NDArray[np.floating]) -> Floats:
    """Return the cosine (n,) of each of the `rows` (n, d) with the unit `feature` (d,)."""
    exact = wide(rows)
    found: Floats = products(exact, feature) / norms(exact)
    return found

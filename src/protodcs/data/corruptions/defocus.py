"""defocus_blur: every point becomes a disk with a softened edge.

The disk is made in single precision, as published: its weights do not sum to exactly 1, and flat areas show it after
the truncation.
"""

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from ...arrays import Floats, Pixels, Singles
from . import constants
from .compiled import kernel
from .levels import LEVELS, to_level
from .smoothing import continued
from .task import Task

# The smallest grid a disk is drawn on reaches so far; larger disks get their own size and a wider softening.
_GRID = 8


def defocus_blur(task: Task) -> Pixels:
    """Correlation with a disk; the image is mirrored about its edge pixels."""
    disk = _disk(*task.pick(constants.DEFOCUS_BLUR))
    radius = len(disk) // 2
    height, width = task.images.shape[1:3]
    rows, columns = continued(height, radius, "reflect"), continued(width, radius, "reflect")
    out = np.empty_like(task.images)
    _correlate(task.images, LEVELS, disk, rows, columns, task.half, out)
    return out


@lru_cache(maxsize=16)
def _disk(radius: float, softness: float) -> Floats:
    """The disk without its empty frame, (2 r + 1, 2 r + 1)."""
    reach = _GRID if radius <= _GRID else int(radius)
    offsets = np.arange(-reach, reach + 1)
    hard = (offsets[:, None] ** 2 + offsets**2 <= radius**2).astype(np.float32)
    hard /= hard.sum()
    weights = _softener(1 if radius <= _GRID else 2, softness)
    soft = _soften(_soften(hard, weights).T, weights).T.astype(np.float64)
    frame = int(np.flatnonzero(soft.any(axis=0))[0])
    return np.ascontiguousarray(soft[frame : len(soft) - frame, frame : len(soft) - frame])


def _softener(radius: int, deviation: float) -> Singles:
    offsets = np.arange(-radius, radius + 1)
    weights = np.exp(-(offsets**2) / (2.0 * deviation * deviation))
    return (weights / weights.sum())[radius:].astype(np.float32)


def _soften(disk: Singles, weights: Singles) -> Singles:
    """Along the last axis, mirrored about the edge, in single precision."""
    radius, side = len(weights) - 1, disk.shape[1]
    padded = np.pad(disk, ((0, 0), (radius, radius)), mode="reflect")
    total = padded[:, radius : radius + side] * weights[0]
    for j in range(1, radius + 1):
        left, right = padded[:, radius - j : radius - j + side], padded[:, radius + j : radius + j + side]
        total = total + (left + right) * weights[j]
    return total


@kernel
def _correlate(
    images: Pixels,
    levels: Floats,
    disk: Floats,
    rows: NDArray[np.int64],
    columns: NDArray[np.int64],
    half: float,
    out: Pixels,
) -> None:
    count, height, width, _ = images.shape
    radius = disk.shape[0] // 2
    length, padded_length = width * 3, columns.size * 3
    padded = np.empty((height, padded_length))
    pair = np.empty(padded_length)
    total = np.empty(length)
    for n in range(count):
        for y in range(height):
            for k in range(columns.size):
                for c in range(3):
                    padded[y, 3 * k + c] = levels[images[n, y, columns[k], c]]
        for y in range(height):
            total[:] = 0.0
            # Rows at equal distance carry equal weights: they are added before they are weighed.
            for j in range(radius + 1):
                above, below = rows[y + radius - j], rows[y + radius + j]
                for i in range(padded_length):
                    pair[i] = padded[above, i] + padded[below, i] if j else padded[above, i]
                for k in range(2 * radius + 1):
                    weight = disk[radius + j, k]
                    if weight != 0.0:
                        for i in range(length):
                            total[i] += pair[3 * k + i] * weight
            for x in range(width):
                for c in range(3):
                    out[n, y, x, c] = to_level(total[3 * x + c], half)

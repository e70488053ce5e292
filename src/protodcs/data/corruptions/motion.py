"""motion_blur, and the same sweep for the falling flakes of snow: ImageMagick's one-sided motion blur.

Each pixel becomes a weighted mean of whole pixels on a ray from it, edges repeated, and is rounded to a level: in both
variants, because ImageMagick rounds.
"""

import math

import numpy as np
from numpy.typing import NDArray

from ...arrays import Floats, Pixels
from . import constants
from .compiled import kernel
from .task import Task


def motion_blur(task: Task) -> Pixels:
    """Blurred along a direction within 45 degrees of the horizontal."""
    angles = np.array([generator.uniform(-45.0, 45.0) for generator in task.generators()])
    radius, deviation = task.pick(constants.MOTION_BLUR)
    return sweep(task.images, radius, deviation, angles)


def sweep(images: Pixels, radius: float, deviation: float, angles: Floats) -> Pixels:
    """Each of `images` (N, H, W, C) blurred along its angle, in degrees."""
    taps = np.arange(2 * int(np.ceil(radius)) + 1)
    weights = np.exp(-(taps**2) / (2.0 * deviation * deviation))
    # One angle at a time: numpy's cosine of many may differ in the last bit from its cosine of one.
    directions = np.array([(math.cos(angle), math.sin(angle)) for angle in map(math.radians, angles.tolist())])
    right, down = np.ceil(directions.reshape(-1, 2).T[:, :, None] * taps - 0.5).astype(np.int64)
    out = np.empty_like(images)
    _sweep(images, weights / weights.sum(), right, down, out)
    return out


@kernel
def _sweep(images: Pixels, weights: Floats, right: NDArray[np.int64], down: NDArray[np.int64], out: Pixels) -> None:
    count, height, width, channels = images.shape
    margin, length = weights.size, width * channels
    padded = np.empty((height, (width + 2 * margin) * channels))
    total = np.empty(length)
    for n in range(count):
        for y in range(height):
            _pad(images[n, y], margin, padded[y])
        for y in range(height):
            total[:] = 0.0
            for tap in range(weights.size):
                row = min(max(y + down[n, tap], 0), height - 1)
                start = (margin + right[n, tap]) * channels
                _add(total, padded[row, start : start + length], weights[tap])
            for x in range(width):
                for c in range(channels):
                    out[n, y, x, c] = np.uint8(total[x * channels + c] + 0.5)


@kernel
def _pad(row: Pixels, margin: int, out: Floats) -> None:
    """A row (W, C), its ends repeated, into `out` ((W + 2 margin) x C)."""
    width, channels = row.shape
    for k in range(margin):
        for c in range(channels):
            out[k * channels + c] = row[0, c]
            out[(margin + width + k) * channels + c] = row[width - 1, c]
    for x in range(width):
        for c in range(channels):
            out[(margin + x) * channels + c] = row[x, c]


# A kernel of its own, because the compiler puts a loop into vector lanes only when every index starts at zero.
@kernel
def _add(total: Floats, values: Floats, weight: float) -> None:
    for i in range(total.size):
        total[i] += values[i] * weight

"""zoom_blur, and the enlarging that snow uses: the middle of an image, enlarged to its full size.

Enlarging follows `scipy.ndimage.zoom` of order 1 bit by bit. It is linear interpolation along each axis, whose places
and weights are computed once per size and factor. scipy takes at least 40 times as long.
"""

from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...arrays import Floats, Pixels, Singles
from . import constants
from .compiled import kernel
from .levels import LEVELS_SINGLE, single_to_level
from .task import Task


class Lens(NamedTuple):
    """Linear interpolation along one axis, for several factors.

    Attributes:
        low: (factors, side) the place left of the wanted point; the other is the next one.
        low_weight: (factors, side) the weight of the left place.
        high_weight: (factors, side) the weight of the right place.
        starts: (factors, side + 1) where runs begin in which `low` grows by one per step; then the end.
        runs: (factors,) how many there are.
    """

    low: NDArray[np.int64]
    low_weight: Floats
    high_weight: Floats
    starts: NDArray[np.int64]
    runs: NDArray[np.int64]


def zoom_blur(task: Task) -> Pixels:
    """The mean of the image and its enlargements, in single precision."""
    count, height, width, channels = task.images.shape
    start, stop, step = task.pick(constants.ZOOM_BLUR)
    factors = tuple(np.arange(start, stop, step).tolist())
    out = np.empty((count, height, width * channels), dtype=np.uint8)
    flat = task.images.reshape(out.shape)
    _average(flat, LEVELS_SINGLE, channels, lens(height, factors), lens(width, factors), task.half, out)
    return out.reshape(task.images.shape)


def enlarged(layers: Floats, factor: float) -> Floats:
    """Each of `layers` (N, H, W), its middle enlarged by `factor`."""
    rows, columns = (lens(side, (factor,)) for side in layers.shape[1:])
    out = np.zeros_like(layers)
    _enlarge(layers, rows, columns, out)
    return out


@lru_cache(maxsize=64)
def lens(side: int, factors: tuple[float, ...]) -> Lens:
    """The lens for an axis of length `side`."""
    parts = [_lens(side, factor) for factor in factors]
    low, low_weight, high_weight = (np.array(column) for column in zip(*parts, strict=True))
    breaks = np.diff(low, axis=1, prepend=-1) != 1
    breaks[:, 0] = True
    starts = np.full((len(factors), side + 1), side, dtype=np.int64)
    for row, where in zip(starts, breaks, strict=True):
        row[: where.sum()] = np.flatnonzero(where)
    return Lens(low, low_weight, high_weight, starts, breaks.sum(axis=1))


def _lens(side: int, factor: float) -> tuple[NDArray[np.int64], Floats, Floats]:
    """Left places and the two weights for one factor."""
    crop = int(np.ceil(side / factor))
    size = round(crop * factor)
    trim = (size - side) // 2
    points = np.arange(trim, trim + side) * ((crop - 1) / (size - 1))
    # At a few sizes, none of them published, rounding carries the last point past the last pixel; scipy, which finds
    # nothing there, would draw a black line.
    points = np.minimum(points, crop - 1)
    floor = np.floor(points).astype(np.int64)
    low_weight = 1.0 - (points - floor)
    return (side - crop) // 2 + floor, low_weight, 1.0 - low_weight


@kernel
def _average(
    images: Pixels, levels: Singles, channels: int, rows: Lens, columns: Lens, half: float, out: Pixels
) -> None:
    count, height, length = images.shape
    factors = rows.low.shape[0]
    values, total = np.empty((height, length), np.float32), np.empty((height, length), np.float32)
    for n in range(count):
        for y in range(height):
            for i in range(length):
                values[y, i] = levels[images[n, y, i]]
        total[:] = np.float32(0.0)
        for factor in range(factors):
            _add_enlarged(values, channels, factor, rows, columns, total)
        for y in range(height):
            for i in range(length):
                mean = (values[y, i] + total[y, i]) / np.float32(factors + 1)
                out[n, y, i] = single_to_level(mean, half)


@kernel
def _enlarge(layers: Floats, rows: Lens, columns: Lens, out: Floats) -> None:
    for n in range(layers.shape[0]):
        _add_enlarged(layers[n], 1, 0, rows, columns, out[n])


@kernel
def _add_enlarged(
    values: NDArray[np.floating[Any]],
    channels: int,
    factor: int,
    rows: Lens,
    columns: Lens,
    total: NDArray[np.floating[Any]],
) -> None:
    """Add `values` (H, W x channels), enlarged in doubles, to `total`, both in the type of `values`."""
    height, length = values.shape
    # One place more than there are: the last point has a right neighbour too, of weight zero.
    upper, lower = np.zeros(length + channels), np.zeros(length + channels)
    left_weight, right_weight = np.empty(length), np.empty(length)
    for x in range(columns.low.shape[1]):
        for c in range(channels):
            left_weight[x * channels + c] = columns.low_weight[factor, x]
            right_weight[x * channels + c] = columns.high_weight[factor, x]
    line = np.empty(length, values.dtype)
    for y in range(height):
        above = rows.low[factor, y]
        _scale(upper, values[above], rows.low_weight[factor, y])
        _scale(lower, values[min(above + 1, height - 1)], rows.high_weight[factor, y])
        for run in range(columns.runs[factor]):
            start, end = columns.starts[factor, run], columns.starts[factor, run + 1]
            _blend(
                upper,
                lower,
                left_weight,
                right_weight,
                np.uint64(start * channels),
                np.uint64(end * channels),
                np.uint64((columns.low[factor, start] - start) * channels),
                np.uint64(channels),
                line,
            )
        for i in range(length):
            total[y, i] += line[i]


@kernel
def _scale(out: Floats, values: NDArray[np.floating[Any]], weight: float) -> None:
    for i in range(values.size):
        out[i] = np.float64(values[i]) * weight


# The places are unsigned because the compiler must not fear that one is negative, and so counted from the end: only
# then does it put the loop into vector lanes. A shift to the left wraps around, as it should.
@kernel
def _blend(
    upper: Floats,
    lower: Floats,
    left_weight: Floats,
    right_weight: Floats,
    start: np.uint64,
    end: np.uint64,
    shift: np.uint64,
    channels: np.uint64,
    line: NDArray[np.floating[Any]],
) -> None:
    next_shift = shift + channels
    for i in range(start, end):
        left, right = left_weight[i], right_weight[i]
        line[i] = ((upper[i + shift] * left + upper[i + next_shift] * right) + lower[i + shift] * left) + lower[
            i + next_shift
        ] * right

"""Gaussian smoothing in two dimensions: the corruption gaussian_blur, and a part of glass, spatter and elastic.

The sums run in the order of `scipy.ndimage.gaussian_filter`, the middle first and then pairs from the outside in, so
the pixels are equal. scipy takes three to six times as long. OpenCV adds in another order and gives other pixels.
"""

from functools import lru_cache
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from ...arrays import Floats, Pixels
from . import constants
from .compiled import kernel
from .levels import LEVELS, to_level
from .task import Task

Layers = TypeVar("Layers", NDArray[np.float32], NDArray[np.float64])
# How many standard deviations the window reaches to each side, unless a corruption says otherwise.
REACH = 4.0


def gaussian_blur(task: Task) -> Pixels:
    """Each channel smoothed, edges repeated."""
    window = Window(task.images.shape[1:3], float(task.pick(constants.GAUSSIAN_BLUR)))
    return blurred(task.images, window, task.half)


class Window:
    """What smoothing needs to know, for images of one size.

    Attributes:
        weights: (radius + 1,) from the middle outwards.
        rows: (H + 2 radius,) the row that stands for each row of the image continued to both sides.
        columns: (W + 2 radius,) likewise.
    """

    def __init__(self, size: tuple[int, ...], deviation: float, reach: float = REACH, mode: str = "edge"):
        self.weights = gaussian_weights(deviation, reach)
        radius = len(self.weights) - 1
        self.rows, self.columns = (continued(side, radius, mode) for side in size)


def blurred(images: Pixels, window: Window, half: float) -> Pixels:
    """`images` (N, H, W, C), smoothed and brought back to levels."""
    count, height, width, channels = images.shape
    out = np.empty((count, height, width * channels), dtype=np.uint8)
    _blur(images.reshape(out.shape), LEVELS, channels, window.weights, window.rows, window.columns, half, out)
    return out.reshape(images.shape)


@lru_cache(maxsize=64)
def gaussian_weights(deviation: float, reach: float) -> Floats:
    """The right half of the window, its middle included; the whole of it sums to 1."""
    radius = int(reach * deviation + 0.5)
    offsets = np.arange(-radius, radius + 1)
    whole = np.exp(-0.5 / (deviation * deviation) * offsets**2)
    return np.ascontiguousarray((whole / whole.sum())[radius:])


@lru_cache(maxsize=64)
def continued(side: int, radius: int, mode: str) -> NDArray[np.int64]:
    """Which of `side` places stands where, from -radius to side + radius; `mode` is one of `numpy.pad`."""
    places = np.arange(side, dtype=np.int64)
    return places if radius == 0 else np.pad(places, radius, mode=mode)  # type: ignore[call-overload]


def smoothed(layers: Layers, window: Window) -> Layers:
    """`layers` (N, H, W), smoothed, in their own type."""
    out = np.empty_like(layers)
    _smooth_all(layers, window.weights, window.rows, window.columns, out)
    return out


@kernel
def _blur(
    images: Pixels,
    levels: Floats,
    channels: int,
    weights: Floats,
    rows: NDArray[np.int64],
    columns: NDArray[np.int64],
    half: float,
    out: Pixels,
) -> None:
    count, height, length = images.shape
    values, result = np.empty((height, length)), np.empty((height, length))
    for n in range(count):
        for y in range(height):
            for i in range(length):
                values[y, i] = levels[images[n, y, i]]
        _smooth(values, channels, weights, rows, columns, result)
        for y in range(height):
            for i in range(length):
                out[n, y, i] = to_level(result[y, i], half)


@kernel
def _smooth_all(
    layers: NDArray[np.floating[Any]],
    weights: Floats,
    rows: NDArray[np.int64],
    columns: NDArray[np.int64],
    out: NDArray[np.floating[Any]],
) -> None:
    for n in range(layers.shape[0]):
        _smooth(layers[n], 1, weights, rows, columns, out[n])


@kernel
def _smooth(
    values: NDArray[np.floating[Any]],
    channels: int,
    weights: Floats,
    rows: NDArray[np.int64],
    columns: NDArray[np.int64],
    out: NDArray[np.floating[Any]],
) -> None:
    """Smooth `values` (H, W x channels) into `out`. Between the axes the sums take the type of `values`."""
    height, length = values.shape
    radius = weights.size - 1
    start = radius * channels
    total = np.empty(length)
    line = np.empty(columns.size * channels, values.dtype)
    for y in range(height):
        _begin(total, values[rows[y + radius]], weights[0])
        for j in range(radius, 0, -1):
            _add_pair(total, values[rows[y + radius - j]], values[rows[y + radius + j]], weights[j])
        middle = line[start:]
        for i in range(length):
            middle[i] = total[i]
        for k in range(radius):
            last = columns.size - 1 - k
            for c in range(channels):
                line[k * channels + c] = total[columns[k] * channels + c]
                line[last * channels + c] = total[columns[last] * channels + c]
        _begin(total, middle, weights[0])
        for j in range(radius, 0, -1):
            _add_pair(total, line[start - j * channels :], line[start + j * channels :], weights[j])
        for i in range(length):
            out[y, i] = total[i]


# Kernels of their own, because the compiler puts a loop into vector lanes only when every index starts at zero.
@kernel
def _begin(total: Floats, values: NDArray[np.floating[Any]], weight: float) -> None:
    for i in range(total.size):
        total[i] = np.float64(values[i]) * weight


@kernel
def _add_pair(total: Floats, one: NDArray[np.floating[Any]], other: NDArray[np.floating[Any]], weight: float) -> None:
    for i in range(total.size):
        total[i] += (np.float64(one[i]) + np.float64(other[i])) * weight

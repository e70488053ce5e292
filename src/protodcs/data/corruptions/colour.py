"""brightness, saturate and contrast: every pixel by itself, but for the mean that contrast shrinks to.

Hue, saturation and value are worked out in doubles in the order of scikit-image; where two channels are equally
strong, the later one gives the hue.
"""

import numpy as np

from ...arrays import Floats, Pixels
from . import constants
from .compiled import inner, kernel
from .levels import LEVELS, to_level
from .task import Task


def brightness(task: Task) -> Pixels:
    """The value of hue, saturation, value is raised."""
    out = np.empty_like(task.images)
    _shift(task.images, LEVELS, 1.0, 0.0, float(task.pick(constants.BRIGHTNESS)), task.half, out)
    return out


def saturate(task: Task) -> Pixels:
    """The saturation of hue, saturation, value is scaled and raised."""
    factor, offset = task.pick(constants.SATURATE)
    out = np.empty_like(task.images)
    _shift(task.images, LEVELS, float(factor), float(offset), 0.0, task.half, out)
    return out


def contrast(task: Task) -> Pixels:
    """Every channel moves towards its mean."""
    out = np.empty_like(task.images)
    _flatten(task.images, LEVELS, float(task.pick(constants.CONTRAST)), task.half, out)
    return out


@kernel
def _flatten(images: Pixels, levels: Floats, rest: float, half: float, out: Pixels) -> None:
    count, height, width, channels = images.shape
    for n in range(count):
        for c in range(channels):
            total = 0.0
            for y in range(height):
                for x in range(width):
                    total += levels[images[n, y, x, c]]
            mean = total / (height * width)
            for y in range(height):
                for x in range(width):
                    out[n, y, x, c] = to_level((levels[images[n, y, x, c]] - mean) * rest + mean, half)


@inner
def _hue_and_saturation(red: float, green: float, blue: float, value: float) -> tuple[float, float]:
    spread = value - min(red, green, blue)
    if spread == 0.0:
        return 0.0, 0.0
    if blue == value:
        hue = 4.0 + (red - green) / spread
    elif green == value:
        hue = 2.0 + (blue - red) / spread
    else:
        hue = (green - blue) / spread
    return (hue / 6.0) % 1.0, spread / value


@inner
def _red_green_blue(hue: float, saturation: float, value: float) -> tuple[float, float, float]:
    sector = np.floor(hue * 6.0)
    part = hue * 6.0 - sector
    lowest = value * (1.0 - saturation)
    falling = value * (1.0 - part * saturation)
    rising = value * (1.0 - (1.0 - part) * saturation)
    place = int(sector) % 6
    if place == 0:
        return value, rising, lowest
    if place == 1:
        return falling, value, lowest
    if place == 2:
        return lowest, value, rising
    if place == 3:
        return lowest, falling, value
    if place == 4:
        return rising, lowest, value
    return value, lowest, falling


@kernel
def _shift(
    images: Pixels, levels: Floats, factor: float, offset: float, raised: float, half: float, out: Pixels
) -> None:
    count, height, width, _ = images.shape
    for n in range(count):
        for y in range(height):
            for x in range(width):
                red, green, blue = (
                    levels[images[n, y, x, 0]],
                    levels[images[n, y, x, 1]],
                    levels[images[n, y, x, 2]],
                )
                value = max(red, green, blue)
                hue, saturation = _hue_and_saturation(red, green, blue, value)
                saturation = min(max(saturation * factor + offset, 0.0), 1.0)
                value = min(max(value + raised, 0.0), 1.0)
                red, green, blue = _red_green_blue(hue, saturation, value)
                out[n, y, x, 0] = to_level(red, half)
                out[n, y, x, 1] = to_level(green, half)
                out[n, y, x, 2] = to_level(blue, half)

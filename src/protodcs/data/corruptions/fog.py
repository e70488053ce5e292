"""fog: a plasma of many scales, laid over the image.

The plasma is made by the diamond-square method on a torus whose side is a power of two. The wobble multiplies a number
that is already as wide as the wobble: a quirk of the published generator that makes its fog what it is, and is kept.
"""

import numpy as np

from ...arrays import Floats, Pixels
from . import constants
from .compiled import kernel
from .levels import LEVELS, to_level
from .task import Task, uniform

_SMALLEST_MAP = 32
_FIRST_WOBBLE = 100.0


def fog(task: Task) -> Pixels:
    """Image and plasma, scaled so that the brightest value stays what it was."""
    strength, decay = task.pick(constants.FOG)
    side = map_side(*task.images.shape[1:3])
    chances = task.draw((side * side - 1,), uniform)
    out = np.empty_like(task.images)
    _veil(task.images, chances, side, float(strength), float(decay), LEVELS, task.half, out)
    return out


def map_side(height: int, width: int) -> int:
    """The next power of two that covers the image."""
    return max(_SMALLEST_MAP, 1 << (max(height, width) - 1).bit_length())


@kernel
def _veil(
    images: Pixels,
    chances: Floats,
    side: int,
    strength: float,
    decay: float,
    levels: Floats,
    half: float,
    out: Pixels,
) -> None:
    count, height, width, _ = images.shape
    plasma = np.empty((side, side))
    for n in range(count):
        grow(plasma, chances[n], decay)
        brightest = levels[images[n].max()]
        lowest = plasma.min()
        span = plasma.max() - lowest
        for y in range(height):
            for x in range(width):
                veil = strength * ((plasma[y, x] - lowest) / span)
                for c in range(3):
                    value = levels[images[n, y, x, c]] + veil
                    out[n, y, x, c] = to_level(value * brightest / (brightest + strength), half)


@kernel
def grow(plasma: Floats, chances: Floats, decay: float) -> None:
    """Fill `plasma` (side, side) from `chances` (side x side - 1), numbers from [0, 1)."""
    side = plasma.shape[0]
    plasma[0, 0] = 0.0
    step, wobble, at = side, _FIRST_WOBBLE, 0
    while step >= 2:
        half = step // 2
        # The middle of each square.
        for y in range(0, side, step):
            for x in range(0, side, step):
                next_y, next_x = (y + step) % side, (x + step) % side
                corners = (plasma[y, x] + plasma[next_y, x]) + (plasma[y, next_x] + plasma[next_y, next_x])
                plasma[y + half, x + half] = corners / 4 + wobble * (-wobble + 2 * wobble * chances[at])
                at += 1
        # The middle of each diamond: first those on the rows of the corners, then those on their columns.
        for y in range(0, side, step):
            for x in range(0, side, step):
                middles = plasma[y + half, x + half] + plasma[(y - half) % side, x + half]
                ends = plasma[y, x] + plasma[y, (x + step) % side]
                plasma[y, x + half] = (middles + ends) / 4 + wobble * (-wobble + 2 * wobble * chances[at])
                at += 1
        for y in range(0, side, step):
            for x in range(0, side, step):
                middles = plasma[y + half, x + half] + plasma[y + half, (x - half) % side]
                ends = plasma[y, x] + plasma[(y + step) % side, x]
                plasma[y + half, x] = (middles + ends) / 4 + wobble * (-wobble + 2 * wobble * chances[at])
                at += 1
        step, wobble = half, wobble / decay

"""snow: random flakes, enlarged, swept downwards, over an image that is paled first.

The image is single precision and the flakes double, as published.
"""

import numpy as np
from numpy.typing import NDArray

from ...arrays import Pixels
from . import constants
from .compiled import kernel
from .levels import LEVELS_SINGLE, to_level
from .motion import sweep
from .task import Task
from .zoom import enlarged


def snow(task: Task) -> Pixels:
    """The paled image, the flakes, and the flakes once more turned by half a turn."""
    mean, deviation, factor, threshold, radius, fall, share = task.pick(constants.SNOW)
    count, height, width, _ = task.images.shape
    flakes, angles = np.empty((count, height, width)), np.empty(count)
    for n, generator in enumerate(task.generators()):
        generator.standard_normal(out=flakes[n])
        angles[n] = generator.uniform(-135.0, -45.0)
    grown = enlarged(mean + deviation * flakes, float(factor))
    grown[grown < threshold] = 0.0
    levels = (np.clip(grown, 0.0, 1.0) * 255.0).astype(np.uint8)
    fallen = sweep(levels[..., None], radius, fall, angles)
    out = np.empty_like(task.images)
    _cover(task.images, fallen[..., 0], LEVELS_SINGLE, np.float32(share), np.float32(1 - share), task.half, out)
    return out


@kernel
def _cover(
    images: Pixels,
    flakes: Pixels,
    levels: NDArray[np.float32],
    share: np.float32,
    rest: np.float32,
    half: float,
    out: Pixels,
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
                grey = red * np.float32(0.299) + green * np.float32(0.587) + blue * np.float32(0.114)
                pale = grey * np.float32(1.5) + np.float32(0.5)
                flake, turned = flakes[n, y, x] / 255.0, flakes[n, height - 1 - y, width - 1 - x] / 255.0
                for c in range(3):
                    value = levels[images[n, y, x, c]]
                    value = share * value + rest * max(value, pale)
                    out[n, y, x, c] = to_level((value + flake) + turned, half)

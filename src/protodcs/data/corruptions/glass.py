"""glass_blur: smoothed, pixels exchanged with near ones, smoothed again.

The exchange walks from the lower right corner to the upper left, so what it has moved it may move again.
"""

import numpy as np
from numpy.typing import NDArray

from ...arrays import Pixels
from . import constants
from .compiled import kernel
from .smoothing import Window, blurred
from .task import Task


def glass_blur(task: Task) -> Pixels:
    """Smooth, exchange, smooth."""
    deviation, reach, rounds = task.pick(constants.GLASS_BLUR)
    count, height, width, _ = task.images.shape
    steps = np.empty((count, rounds, max(0, height - 2 * reach), max(0, width - 2 * reach), 2), dtype=np.int8)
    for part, generator in zip(steps, task.generators(), strict=True):
        part[:] = generator.integers(-reach, reach, size=part.shape, dtype=np.int8)
    window = Window((height, width), deviation)
    pixels = blurred(task.images, window, task.half)
    exchange = _swap if task.variant == "fixed" else _copy
    exchange(pixels, steps, reach)
    return blurred(pixels, window, task.half)


@kernel
def _copy(images: Pixels, steps: NDArray[np.int8], reach: int) -> None:
    """Each pixel takes the colour of a near one. `steps` (N, rounds, rows, columns, 2) holds dx, dy."""
    count, rounds, rows, columns, _ = steps.shape
    height, width = images.shape[1:3]
    for n in range(count):
        for r in range(rounds):
            for i in range(rows):
                for j in range(columns):
                    y, x = height - reach - i, width - reach - j
                    near_y, near_x = y + steps[n, r, i, j, 1], x + steps[n, r, i, j, 0]
                    for c in range(3):
                        images[n, y, x, c] = images[n, near_y, near_x, c]


@kernel
def _swap(images: Pixels, steps: NDArray[np.int8], reach: int) -> None:
    """Each pixel changes places with a near one. `steps` (N, rounds, rows, columns, 2) holds dx, dy."""
    count, rounds, rows, columns, _ = steps.shape
    height, width = images.shape[1:3]
    for n in range(count):
        for r in range(rounds):
            for i in range(rows):
                for j in range(columns):
                    y, x = height - reach - i, width - reach - j
                    near_y, near_x = y + steps[n, r, i, j, 1], x + steps[n, r, i, j, 0]
                    for c in range(3):
                        kept = images[n, y, x, c]
                        images[n, y, x, c] = images[n, near_y, near_x, c]
                        images[n, near_y, near_x, c] = kept

"""The noises: gaussian, shot, impulse and speckle, each on doubles between 0 and 1.

Shot noise looks its photons up: a pixel has one of 256 levels, so there are 256 Poisson distributions, and inverting
their tables gives the same distribution as a sampler several times as fast.
"""

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from ...arrays import Floats, Pixels
from . import constants
from .compiled import kernel
from .levels import LEVELS, to_level
from .task import Task, normal, uniform

# Where to start looking in a table: one entry per 1/256 of the probability.
_STARTS = 256


def gaussian_noise(task: Task) -> Pixels:
    """Noise of the same strength everywhere."""
    out = np.empty_like(task.images)
    noise = task.draw(task.images.shape[1:], normal)
    _add(task.images.ravel(), noise.ravel(), float(task.pick(constants.GAUSSIAN_NOISE)), LEVELS, task.half, out.ravel())
    return out


def speckle_noise(task: Task) -> Pixels:
    """Noise in proportion to the pixel."""
    out = np.empty_like(task.images)
    noise = task.draw(task.images.shape[1:], normal)
    scale = float(task.pick(constants.SPECKLE_NOISE))
    _add_in_proportion(task.images.ravel(), noise.ravel(), scale, LEVELS, task.half, out.ravel())
    return out


def impulse_noise(task: Task) -> Pixels:
    """A share c of the values becomes white or black, each with probability one half."""
    out = np.empty_like(task.images)
    chances = task.draw((2, *task.images.shape[1:]), uniform)
    _salt_and_pepper(task.images, chances, task.pick(constants.IMPULSE_NOISE), out)
    return out


def shot_noise(task: Task) -> Pixels:
    """Poisson(c x) photons, of which c make white."""
    photons = float(task.pick(constants.SHOT_NOISE))
    sums, starts = _poisson_tables(photons)
    results = ((np.minimum(np.arange(sums.shape[1]) / photons, 1.0) * 255.0) + task.half).astype(np.uint8)
    out = np.empty_like(task.images)
    chances = task.draw(task.images.shape[1:], uniform)
    _look_up(task.images.ravel(), chances.ravel(), sums, starts, results, out.ravel())
    return out


@kernel
def _add(images: Pixels, noise: Floats, scale: float, levels: Floats, half: float, out: Pixels) -> None:
    for i in range(images.size):
        out[i] = to_level(levels[images[i]] + scale * noise[i], half)


@kernel
def _add_in_proportion(images: Pixels, noise: Floats, scale: float, levels: Floats, half: float, out: Pixels) -> None:
    for i in range(images.size):
        value = levels[images[i]]
        out[i] = to_level(value + value * (scale * noise[i]), half)


@kernel
def _salt_and_pepper(images: Pixels, chances: Floats, share: float, out: Pixels) -> None:
    count, height, width, _ = images.shape
    for n in range(count):
        for y in range(height):
            for x in range(width):
                for c in range(3):
                    replaced = 255 if chances[n, 1, y, x, c] <= 0.5 else 0
                    out[n, y, x, c] = replaced if chances[n, 0, y, x, c] <= share else images[n, y, x, c]


@lru_cache(maxsize=16)
def _poisson_tables(photons: float) -> tuple[Floats, NDArray[np.int32]]:
    """Cumulative probabilities (256, most + 1) of each level, and where the search in them starts (256, _STARTS)."""
    # Beyond ten standard deviations lies less than the smallest step of a uniform number.
    most = int(photons + 10.0 * np.sqrt(photons) + 30.0)
    sums = np.empty((256, most + 1))
    starts = np.empty((256, _STARTS), dtype=np.int32)
    edges = np.arange(_STARTS) / _STARTS
    for level in range(256):
        _accumulate(LEVELS[level] * photons, sums[level])
        starts[level] = np.searchsorted(sums[level], edges, side="right")
    return sums, starts


@kernel
def _accumulate(mean: float, sums: Floats) -> None:
    """P(count <= k) for every k; the means here are at most 500, so exp(-mean) is no underflow."""
    probability = np.exp(-mean)
    total = 0.0
    for k in range(sums.size):
        total += probability
        sums[k] = total
        probability *= mean / (k + 1)
    # The last is certain: a search always ends.
    sums[sums.size - 1] = 2.0


@kernel
def _look_up(
    images: Pixels,
    chances: Floats,
    sums: Floats,
    starts: NDArray[np.int32],
    results: Pixels,
    out: Pixels,
) -> None:
    for i in range(images.size):
        level = images[i]
        chance = chances[i]
        count = starts[level, int(chance * _STARTS)]
        while sums[level, count] <= chance:
            count += 1
        out[i] = results[count]

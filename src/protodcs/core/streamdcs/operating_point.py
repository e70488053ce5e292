"""Operating point: the boundary that rejects a given fraction of the known samples (`target_false_reject`).

If two groups are detected, known samples are modelled by a Gaussian that is wider on its unknown side, because unusual
views and shifts lower their scores, and unknown samples by a plain Gaussian. Both are fitted together, and the boundary
is a quantile of the known one. Known samples that overlap with unknown ones are thereby counted, too.
"""

import math
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from ..compiled import kernel
from .fallback import Fallback

Vector = NDArray[np.float64]

# Width of the unknown side of the known scores relative to the other side.
_SKEW = 1.4
_ITERATIONS = 40
_TOLERANCE = 1e-5
_NARROWEST = 0.01
_LEAST_SHARE = 0.01
# Increase of the rejected fraction at full alarm, because part of the recent samples are unknown then.
_ALARMED = 1.2
# If all samples look unknown: expected mean and deviation of the text score of known ones, in noise floors.
_EXPECTED, _WIDTH = 2.35, 0.6


@kernel("Tuple((float64, float64))(float64[::1], float64[::1], float64, int64, float64)")
def fit_skewed(values: Vector, start: Vector, skew: float, iterations: int, tolerance: float) -> tuple[float, float]:
    """Return mode and narrow width of the known part of `values`, which is `skew` times wider above its mode.

    EM from the mixture `start` (6,) of two Gaussians, known first; the unknown part stays a Gaussian.
    """
    size = values.shape[0]
    centre, spread = 0.0, 0.0
    for i in range(size):
        centre += values[i]
    centre /= size
    for i in range(size):
        spread += (values[i] - centre) ** 2
    floor = _NARROWEST * spread / size + 1e-12
    mode, width = start[1], math.sqrt(start[2])
    share, mean, deviation = start[3], start[4], math.sqrt(start[5])
    previous = -math.inf
    for step in range(iterations):
        likelihood, unknown, first, second = 0.0, 0.0, 0.0, 0.0
        weight, known_first, known_second = 0.0, 0.0, 0.0
        by_unknown = math.log(share / deviation)
        by_known = math.log((1.0 - share) / (0.5 * (1.0 + skew) * width))
        for i in range(size):
            x, y = values[i] - mean, values[i] - mode
            side = skew if y > 0.0 else 1.0
            log_unknown = by_unknown - 0.5 * (x / deviation) ** 2
            log_known = by_known - 0.5 * (y / (side * width)) ** 2
            top = max(log_unknown, log_known)
            total = top + math.log(math.exp(log_unknown - top) + math.exp(log_known - top))
            likelihood += total
            part = math.exp(log_unknown - total)
            counted = (1.0 - part) / (side * side)
            unknown += part
            first += part * values[i]
            second += part * x * x
            weight += counted
            known_first += counted * values[i]
            known_second += counted * y * y
        share = min(max(unknown / size, _LEAST_SHARE), 1.0 - _LEAST_SHARE)
        deviation = math.sqrt(max(second / max(unknown, 1.0), floor))
        width = math.sqrt(max(known_second / max(size - unknown, 1.0), floor))
        mean, mode = first / max(unknown, 1e-9), known_first / max(weight, 1e-9)
        if step > 3 and likelihood - previous < tolerance * size:
            break
        previous = likelihood
    return mode, width


def boundary_with_mixture(novelty: Vector, parameters: Vector, share: float) -> float:
    """Return the novelty above which the fraction `share` of the known samples is, given an accepted mixture."""
    mode, width = fit_skewed(novelty, parameters, _SKEW, _ITERATIONS, _TOLERANCE)
    if share < _SKEW / (1.0 + _SKEW):  # The quantile is on the wide side.
        return float(mode - _SKEW * width * NormalDist().inv_cdf(share * (1.0 + _SKEW) / (2.0 * _SKEW)))
    return float(mode + width * NormalDist().inv_cdf((1.0 - share) * (1.0 + _SKEW) / 2.0))


def boundary_without_mixture(novelty: Vector, fallback: Fallback, noise_floor: float, share: float) -> float:
    """Return the same without a mixture; if all samples look unknown, a threshold on minus the text score."""
    if fallback.concentration.all_unknown:
        return -noise_floor * (_EXPECTED + _WIDTH * NormalDist().inv_cdf(share))
    return float(np.quantile(novelty, 1.0 - min(0.5, share * (1.0 + _ALARMED * fallback.concentration.alarm))))

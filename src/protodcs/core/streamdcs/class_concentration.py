"""Class concentration: how recent samples spread over the classes. Unknown samples concentrate on few of them.

This is independent of the scale of the scores. Concentration is how often two recent samples share a class, relative
to how often they would if all classes were equally frequent. A strong shift also concentrates known samples on the
classes that it raises; the alarm therefore uses the top z-score class instead of the nearest class. If the stream
comes in runs of one class, concentration means nothing; runs are detected.
"""

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..compiled import kernel

Vector = NDArray[np.float64]
Classes = NDArray[np.int64]

# Pairs added to both counts, so that few samples have little influence.
_PAIRS = 4.0
# How much more often than by chance a class may follow itself: above the first value the stream comes in runs, above
# the second there is no alarm.
_RUN, _RUN_WITH_ALARM = 0.1, 0.03
# The alarm, on the top classes: concentration of the less familiar half relative to the other, times that of all
# samples (with many unknown samples, both halves hold some). The alarm is 0 at the first value and 1 at the second. It
# fades out between these median text scores, in noise floors: above them the scores are clear enough.
_ALARM = (2.85, 3.35)
_ALARM_NOISE_FLOORS = (1.4, 1.6)
# Concentration of all samples at which `crowded` is 0 and 1.
_CROWDED = (2.4, 3.0)
# A stream of unknown samples only: at least this concentration, at most this median text score in noise floors, and at
# most this confidence. It cannot be detected if the mean confidence is below the last value.
_ALL_UNKNOWN, _ALL_UNKNOWN_NOISE_FLOORS, _SURE, _UNSURE = 1.2, 1.7, 0.6, 0.3
# The classes are filled evenly: largest concentration, smallest numbers of classes and of expected pairs.
_EVEN, _EVEN_CLASSES, _EVEN_PAIRS = 1.15, 50, 60.0


class ClassConcentration(NamedTuple):
    """How recent samples spread over the classes.

    Attributes:
        alarm: 0 to 1, how certainly the less familiar half concentrates on few classes.
        crowded: 0 to 1, how much all samples together do.
        all_unknown: the stream looks like unknown samples only.
        even: the classes are filled as evenly as known samples fill them.
        runs: the stream comes in runs of one class, so concentration means nothing.
        unsure: the encoder is rarely sure of a class.
    """

    alarm: float = 0.0
    crowded: float = 0.0
    all_unknown: bool = False
    even: bool = False
    runs: bool = False
    unsure: bool = False


class _Spread(NamedTuple):
    concentration: float
    error: float
    expected: float


@kernel("int64(float64[::1], int64[::1], float64, int64[:,::1], float64[::1])")
def count(familiarity: Vector, of: Classes, middle: float, counts: Classes, pairs: Vector) -> int:
    """Count each class in `of` (n,), below and above the `middle` familiarity, into `counts` (2, K).

    `pairs` (6,) receives the pairs of samples that share a class and the numbers of samples: below, above and in all.
    Return how often a sample has the class of the one before it.
    """
    repeated = 0
    counts[:] = 0
    for i in range(of.shape[0]):
        counts[int(familiarity[i] >= middle), of[i]] += 1
        if i > 0:
            repeated += int(of[i] == of[i - 1])
    pairs[:] = 0.0
    for k in range(counts.shape[1]):
        low, high = counts[0, k], counts[1, k]
        pairs[0] += low * (low - 1) // 2
        pairs[1] += high * (high - 1) // 2
        pairs[2] += (low + high) * (low + high - 1) // 2
        pairs[3] += low
        pairs[4] += high
    pairs[5] = pairs[3] + pairs[4]
    return repeated


def measure_concentration(
    familiarity: Vector, predicted: Classes, top_class: Classes, classes: int, height: float, confidence: float
) -> ClassConcentration:
    """Measure how samples spread over the classes, from their familiarity (n,) and classes (n,) in order of arrival.

    `height` is the median text score in noise floors, `confidence` the mean softmax probability of the nearest class.
    """
    unsure, half = confidence < _UNSURE, median(familiarity)
    lower, upper, whole, repeats = _halves(predicted, familiarity, half, classes)
    if repeats > _RUN:
        return ClassConcentration(runs=True, unsure=unsure)
    ratio = lower.concentration / upper.concentration
    even = classes >= _EVEN_CLASSES and whole.expected >= _EVEN_PAIRS and max(ratio, whole.concentration) < _EVEN
    all_unknown = (
        whole.concentration - whole.error >= _ALL_UNKNOWN
        and height < _ALL_UNKNOWN_NOISE_FLOORS
        and not unsure
        and confidence <= _SURE
    )
    lower, upper, whole, _ = _halves(top_class, familiarity, half, classes)
    ratio = lower.concentration / upper.concentration
    # One standard error lower, to be safe.
    certain = ratio * math.exp(-math.hypot(lower.error / lower.concentration, upper.error / upper.concentration))
    alarm = 0.0
    if repeats <= _RUN_WITH_ALARM:
        alarm = _ramp(certain * whole.concentration, *_ALARM) * (1.0 - _ramp(height, *_ALARM_NOISE_FLOORS))
    return ClassConcentration(alarm, _ramp(whole.concentration, *_CROWDED), all_unknown, even, False, unsure)


def median(values: Vector) -> float:
    """Return the median. `np.median` takes ten times as long for checks of its arguments."""
    middle = len(values) // 2
    parted = np.partition(values, (middle - 1, middle)) if len(values) > 1 else values
    return float(parted[middle] if len(values) % 2 else 0.5 * (parted[middle - 1] + parted[middle]))


def _halves(of: Classes, familiarity: Vector, half: float, classes: int) -> tuple[_Spread, _Spread, _Spread, float]:
    """Return the spread over the classes `of` (n,) of the lower half, the upper half and all, and their repeats."""
    pairs = np.empty(6)
    repeated = count(familiarity, of, half, np.empty((2, classes), dtype=np.int64), pairs)
    below, above, both, fewer, more, total = pairs.tolist()
    # Among n samples, n + 2 * (pairs that share a class) ordered pairs, including self-pairs, share a class.
    repeats = _repeats(repeated, total, (total + 2.0 * both) / total**2)
    return _spread(below, fewer, classes), _spread(above, more, classes), _spread(both, total, classes), repeats


def _spread(pairs: float, total: float, classes: int) -> _Spread:
    """Return the pairs that share a class relative to those expected, the standard error, and the expected number."""
    expected = total * (total - 1.0) / (2.0 * classes)
    scale = expected + _PAIRS
    return _Spread((pairs + _PAIRS) / scale, math.sqrt(pairs + _PAIRS) / scale, expected)


def _repeats(repeated: int, total: float, chance: float) -> float:
    """Return how much more often than by `chance` a class follows itself, as a fraction of what is possible."""
    return (repeated / (total - 1.0) - chance) / (1.0 - chance) if total > 1.0 and chance < 1.0 else 0.0


def _ramp(value: float, low: float, high: float) -> float:
    return min(1.0, max(0.0, (value - low) / (high - low)))

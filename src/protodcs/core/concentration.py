"""What the classes of recent samples tell about known and unknown: strangers pile up on few, known samples do not.

A second view beside the scores, which needs no scale of its own. Concentration is how often two recent samples share a
class, over how often they would if the classes were filled evenly. A heavy shift piles known samples up too, on the
classes that it lifts for everyone; so an alarm looks at the foremost class, above what the stream usually shows it, and
not at the best. Concentration says nothing where the stream comes in runs of one class; that is seen and allowed for.
"""

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from .compiled import kernel

Vector = NDArray[np.float64]
Classes = NDArray[np.int64]

# So many pairs are added to both counts, so that few samples say little.
_PAIRS = 4.0
# How much likelier than by chance a class may follow itself before its share means nothing, and before it is no alarm.
_RUN, _RUN_WITH_ALARM = 0.1, 0.03
# By the foremost classes: how much more concentrated the less familiar half may be than the other, times how
# concentrated all are, since of many strangers both halves hold some; from the second value on there surely are some.
# Only where most samples lie so few levels high: farther up the scores speak for themselves.
_ALARM = (2.85, 3.35)
_ALARM_LEVELS = (1.4, 1.6)
# All samples together: from where on, and up to where, more of them are taken for strangers.
_CROWDED = (2.4, 3.0)
# A stream of strangers alone: so concentrated, no higher than so many levels, and not as sure of its classes as known
# samples are. Of an encoder that is never sure of anything it cannot be told.
_STRANGE, _STRANGE_LEVELS, _SURE, _UNSURE = 1.2, 1.7, 0.6, 0.3
# Filled as evenly as known samples fill them; told from so many classes and expected pairs on.
_EVEN, _EVEN_CLASSES, _EVEN_PAIRS = 1.15, 50, 60.0


class Crowd(NamedTuple):
    """How recent samples spread over the classes.

    Attributes:
        alarm: 0 to 1, how surely the less familiar half piles up on few classes.
        crowded: 0 to 1, how much all samples together do.
        strange: the stream looks like strangers alone.
        even: the classes are filled as evenly as known samples fill them.
        runs: the stream comes in runs of one class, so shares say nothing.
        unsure: the encoder is hardly ever sure of a class.
    """

    alarm: float = 0.0
    crowded: float = 0.0
    strange: bool = False
    even: bool = False
    runs: bool = False
    unsure: bool = False


class _Spread(NamedTuple):
    concentration: float
    error: float
    expected: float


@kernel("int64(float64[::1], int64[::1], float64, int64[:,::1], float64[::1])")
def count(familiarity: Vector, of: Classes, middle: float, counts: Classes, pairs: Vector) -> int:
    """How often each class stands in `of` (n,), below and above the `middle` familiarity, into `counts` (2, K).

    `pairs` (6,) become the pairs of samples of one class and the numbers of samples: below, above and in all. Returns
    how often a class is that of the sample before.
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


def crowd(
    familiarity: Vector, predicted: Classes, foremost: Classes, classes: int, height: float, confidence: float
) -> Crowd:
    """What the `predicted` and `foremost` classes of samples with this `familiarity` (n,) in order of arrival tell.

    `height` is the median familiarity by the text in levels of noise, `confidence` the mean softmax probability of the
    best class.
    """
    unsure, half = confidence < _UNSURE, median(familiarity)
    lower, upper, whole, repeats = _halves(predicted, familiarity, half, classes)
    if repeats > _RUN:
        return Crowd(runs=True, unsure=unsure)
    ratio = lower.concentration / upper.concentration
    even = classes >= _EVEN_CLASSES and whole.expected >= _EVEN_PAIRS and max(ratio, whole.concentration) < _EVEN
    strange = (
        whole.concentration - whole.error >= _STRANGE
        and height < _STRANGE_LEVELS
        and not unsure
        and confidence <= _SURE
    )
    lower, upper, whole, _ = _halves(foremost, familiarity, half, classes)
    ratio = lower.concentration / upper.concentration
    # One standard error to the safe side.
    certain = ratio * math.exp(-math.hypot(lower.error / lower.concentration, upper.error / upper.concentration))
    alarm = 0.0
    if repeats <= _RUN_WITH_ALARM:
        alarm = _ramp(certain * whole.concentration, *_ALARM) * (1.0 - _ramp(height, *_ALARM_LEVELS))
    return Crowd(alarm, _ramp(whole.concentration, *_CROWDED), strange, even, False, unsure)


def median(values: Vector) -> float:
    """As numpy's, which takes ten times as long over its arguments as over the values."""
    middle = len(values) // 2
    parted = np.partition(values, (middle - 1, middle)) if len(values) > 1 else values
    return float(parted[middle] if len(values) % 2 else 0.5 * (parted[middle - 1] + parted[middle]))


def _halves(of: Classes, familiarity: Vector, half: float, classes: int) -> tuple[_Spread, _Spread, _Spread, float]:
    """How the samples below, above and all in all spread over their classes `of` (n,), and how much those repeat."""
    pairs = np.empty(6)
    repeated = count(familiarity, of, half, np.empty((2, classes), dtype=np.int64), pairs)
    below, above, both, fewer, more, total = pairs.tolist()
    # Of n samples n + 2 (pairs of one class) ordered pairs, each with itself too, are of one class.
    repeats = _repeats(repeated, total, (total + 2.0 * both) / total**2)
    return _spread(below, fewer, classes), _spread(above, more, classes), _spread(both, total, classes), repeats


def _spread(pairs: float, total: float, classes: int) -> _Spread:
    """Pairs of samples of the same class over those expected, its standard error, and how many are expected."""
    expected = total * (total - 1.0) / (2.0 * classes)
    scale = expected + _PAIRS
    return _Spread((pairs + _PAIRS) / scale, math.sqrt(pairs + _PAIRS) / scale, expected)


def _repeats(repeated: int, total: float, chance: float) -> float:
    """How much more often than by `chance` a class follows itself, as a share of what is possible."""
    return (repeated / (total - 1.0) - chance) / (1.0 - chance) if total > 1.0 and chance < 1.0 else 0.0


def _ramp(value: float, low: float, high: float) -> float:
    return min(1.0, max(0.0, (value - low) / (high - low)))

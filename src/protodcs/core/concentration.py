"""What the predicted classes tell about known and unknown: strangers pile up on few classes, known samples do not.

A second view beside the scores, which needs no scale of its own. Concentration is how often two recent samples share a
predicted class, over how often they would if the classes were filled evenly. It says nothing where the stream comes in
runs of one class, and little where known classes are filled unevenly themselves; both are seen and allowed for.
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
# How much likelier than by chance a class may follow itself before its share means nothing.
_RUN = 0.1
# The less familiar half may be so much more concentrated than the other; from the second value on it surely holds
# strangers. Only where most samples lie so few levels high: farther up the scores speak for themselves.
_ALARM = (1.5, 2.0)
_ALARM_LEVELS = (1.4, 1.6)
# All samples together: from where on, and up to where, more of them are taken for strangers.
_CROWDED = (2.5, 5.0)
# A stream of strangers alone: so concentrated, no higher than so many levels, and not as sure of its classes as known
# samples are. An encoder that is never sure of anything must lie lower still, by how sure it is.
_STRANGE, _STRANGE_LEVELS, _SURE, _UNSURE = 1.2, 1.7, 0.6, 0.3
_EXPECTED, _PER_CONFIDENCE = 0.85, 1.2
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
    """

    alarm: float = 0.0
    crowded: float = 0.0
    strange: bool = False
    even: bool = False
    runs: bool = False


class _Spread(NamedTuple):
    concentration: float
    error: float
    expected: float


@kernel("float64(float64[::1], int64[::1], float64, int64[::1], int64[::1])")
def count(familiarity: Vector, predicted: Classes, middle: float, below: Classes, above: Classes) -> float:
    """How often each class was predicted, below and above the `middle` familiarity, into `below` and `above` (K,).

    Returns the share of samples whose class is that of the one before.
    """
    repeated = 0
    for i in range(predicted.shape[0]):
        k = predicted[i]
        if familiarity[i] < middle:
            below[k] += 1
        else:
            above[k] += 1
        if i > 0:
            repeated += k == predicted[i - 1]
    return repeated / max(predicted.shape[0] - 1, 1)


def crowd(familiarity: Vector, predicted: Classes, classes: int, height: float, confidence: float) -> Crowd:
    """What the `predicted` classes of samples with this `familiarity` (n,) in order of arrival tell.

    `height` is the median familiarity by the text in levels of noise, `confidence` the mean softmax probability of the
    best class.
    """
    below, above = np.zeros(classes, dtype=np.int64), np.zeros(classes, dtype=np.int64)
    repeated = count(familiarity, predicted, median(familiarity), below, above)
    if _in_runs(repeated, (below + above) / len(predicted)):
        return Crowd(runs=True)
    lower, upper, whole = (_spread(counts, classes) for counts in (below, above, below + above))
    ratio = lower.concentration / upper.concentration
    # One standard error to the safe side.
    certain = ratio * math.exp(-math.hypot(lower.error / lower.concentration, upper.error / upper.concentration))
    even = classes >= _EVEN_CLASSES and whole.expected >= _EVEN_PAIRS and max(ratio, whole.concentration) < _EVEN
    strange = (
        whole.concentration - whole.error >= _STRANGE
        and height < _STRANGE_LEVELS
        and confidence <= _SURE
        and (confidence >= _UNSURE or height < _EXPECTED + _PER_CONFIDENCE * confidence)
    )
    alarm = _ramp(certain, *_ALARM) * (1.0 - _ramp(height, *_ALARM_LEVELS))
    return Crowd(alarm, _ramp(whole.concentration, *_CROWDED), strange, even, False)


def median(values: Vector) -> float:
    """As numpy's, which takes ten times as long over its arguments as over the values."""
    middle = len(values) // 2
    parted = np.partition(values, (middle - 1, middle)) if len(values) > 1 else values
    return float(parted[middle] if len(values) % 2 else 0.5 * (parted[middle - 1] + parted[middle]))


def _spread(counts: Classes, classes: int) -> _Spread:
    """Pairs of samples of the same class over those expected, its standard error, and how many are expected."""
    total = int(counts.sum())
    found, expected = float((counts * (counts - 1)).sum()) / 2.0, total * (total - 1) / (2.0 * classes)
    scale = expected + _PAIRS
    return _Spread((found + _PAIRS) / scale, math.sqrt(found + _PAIRS) / scale, expected)


def _in_runs(repeated: float, shares: Vector) -> bool:
    """Whether a class follows itself, in a share `repeated` of all steps, much more often than its share explains."""
    chance = float(shares @ shares)
    return chance < 1.0 and (repeated - chance) / (1.0 - chance) > _RUN


def _ramp(value: float, low: float, high: float) -> float:
    return min(1.0, max(0.0, (value - low) / (high - low)))

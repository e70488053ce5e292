"""Figures of a labelled collection, each with a 95 % interval.

The intervals are Wilson score intervals of a proportion. They hold for images that are drawn independently: many
pictures of one scene make them too narrow.
"""

import math
from dataclasses import dataclass
from statistics import NormalDist

from ..arrays import Flags
from . import checking
from .checking import Classes

CONFIDENCE = 0.95


@dataclass(frozen=True, slots=True)
class Proportion:
    """A fraction of images with its 95 % interval.

    Attributes:
        count: number of images that have the property.
        total: number of images that could have it.
        value: `count / total`; NaN if `total` is zero.
        low, high: ends of the interval; 0 and 1 if `total` is zero.
    """

    count: int
    total: int
    value: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Figures of decisions on labelled images.

    Attributes:
        false_reject: known images that were decided as unknown.
        unknown_recall: unknown images that were decided as unknown.
        known_accuracy: known images whose best class is right, whether or not they were rejected.
        known_accuracy_with_rejection: known images that were accepted, and whose class is right.
    """

    false_reject: Proportion
    unknown_recall: Proportion
    known_accuracy: Proportion
    known_accuracy_with_rejection: Proportion


def evaluate(labels: Classes, predicted: Classes, accepted: Flags) -> Evaluation:
    """Return the figures of decisions on labelled images.

    For `Decisions`, pass `decisions.index` and `decisions.known`.

    Args:
        labels: (N,) integers, the true class, -1 for unknown.
        predicted: (N,) integers, the best class, also for rejected images.
        accepted: (N,) bool, whether an image was decided as known.

    >>> import numpy as np
    >>> found = evaluate(np.array([0, 1, 1, -1]), np.array([0, 1, 0, 0]), np.array([True, False, True, False]))
    >>> found.false_reject.value, found.unknown_recall.value
    (0.3333333333333333, 1.0)
    """
    labels, predicted = checking.labels(labels), checking.predictions(predicted)
    accepted = checking.flags(accepted, "accepted")
    checking.same_length(labels=labels, predicted=predicted, accepted=accepted)
    known = labels >= 0
    correct = (predicted == labels)[known]
    return Evaluation(
        false_reject=proportion(~accepted[known]),
        unknown_recall=proportion(~accepted[~known]),
        known_accuracy=proportion(correct),
        known_accuracy_with_rejection=proportion(correct & accepted[known]),
    )


def proportion(flags: Flags) -> Proportion:
    """Return the fraction of true values with its Wilson score interval.

    >>> import numpy as np
    >>> found = proportion(np.array([True] * 9 + [False]))
    >>> found.value, round(found.low, 3), round(found.high, 3)
    (0.9, 0.596, 0.982)
    """
    count, total = int(flags.sum()), len(flags)
    if total == 0:
        return Proportion(0, 0, math.nan, 0.0, 1.0)
    value, square = count / total, NormalDist().inv_cdf(0.5 + CONFIDENCE / 2) ** 2
    centre = (value + square / (2 * total)) / (1 + square / total)
    half = math.sqrt(square * (value * (1 - value) / total + square / (4 * total**2))) / (1 + square / total)
    # All or none: the interval ends at the value, but rounding may move it.
    low, high = min(value, centre - half), max(value, centre + half)
    return Proportion(count, total, value, max(0.0, low), min(1.0, high))

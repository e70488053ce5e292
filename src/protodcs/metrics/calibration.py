"""Do confidence and uncertainty mean what they say: reliability bins, ECE, accuracy among the most certain.

Usually asked of the known samples only: leave the unknown ones out, or call them wrong, and say which. A confidence is
never rescaled here.
"""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..arrays import Flags
from ..errors import InputError
from . import checking
from .checking import Scores


# Arrays have no single answer to `==`: two diagrams are compared column by column.
@dataclass(frozen=True, slots=True, eq=False)
class Reliability:
    """The bins of a reliability diagram.

    Attributes:
        edges: (bins + 1,) from 0 to 1; bin b holds edges[b] < confidence <= edges[b + 1], the first also 0.
        count: (bins,) samples in each bin.
        confidence: (bins,) their mean confidence, NaN where there are none.
        accuracy: (bins,) the share of correct ones, NaN where there are none.
    """

    edges: NDArray[np.float64]
    count: NDArray[np.int64]
    confidence: NDArray[np.float64]
    accuracy: NDArray[np.float64]


def reliability(confidence: Scores, correct: Flags, bins: int = 15) -> Reliability:
    """Mean confidence and accuracy in bins of equal width.

    The edges are b / bins in float64, and a confidence is compared with them as float64: 0.2 in float32 is a little
    above 0.2 and belongs to the bin above.

    Args:
        confidence: (N,) from 0 to 1.
        correct: (N,) bool.
        bins: how many, at least 1.

    >>> table = reliability(np.array([0.5, 0.6, 1.0]), np.array([False, True, True]), bins=2)
    >>> table.count.tolist(), table.confidence.tolist(), table.accuracy.tolist()
    ([1, 2], [0.5, 0.8], [0.0, 1.0])
    """
    confidence, correct = checking.shares(confidence, "confidence"), checking.flags(correct, "correct")
    checking.same_length(confidence=confidence, correct=correct)
    if isinstance(bins, bool) or not isinstance(bins, (int, np.integer)) or bins < 1:
        raise InputError(f"bins must be a whole number of at least 1; given: {bins!r}")
    edges = np.arange(bins + 1) / bins
    place = np.maximum(np.searchsorted(edges, confidence, side="left") - 1, 0)
    count = np.bincount(place, minlength=bins)
    total = np.bincount(place, weights=confidence, minlength=bins)
    right = np.bincount(place[correct], minlength=bins)
    return Reliability(edges, count, _ratio(total, count), _ratio(right, count))


def ece(confidence: Scores, correct: Flags, bins: int = 15) -> float:
    """The expected calibration error: the mean distance of accuracy and confidence over the bins, weighted by count.

    It depends on the number of bins: name it beside the figure. NaN without samples.

    >>> round(ece(np.array([0.5, 0.6, 1.0]), np.array([False, True, True]), bins=2), 12)
    0.3
    """
    table = reliability(confidence, correct, bins)
    total = int(table.count.sum())
    if not total:
        return math.nan
    filled = table.count > 0
    distance = np.abs(table.accuracy[filled] - table.confidence[filled])
    return float((table.count[filled] * distance).sum()) / total


def accuracy_uncertainty_curve(uncertainty: Scores, correct: Flags) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """The share of samples kept, the most certain first, and the accuracy among them.

    One point for each distinct uncertainty, upwards: samples that tie enter together, so their order never matters.
    The last point is (1, accuracy). No points without samples.

    Args:
        uncertainty: (N,) larger is less certain, infinities allowed.
        correct: (N,) bool.

    >>> kept, accuracy = accuracy_uncertainty_curve(np.array([0.1, 0.7, 0.1, 0.9]), np.array([True, False, True, True]))
    >>> kept.tolist(), accuracy.tolist()
    ([0.5, 0.75, 1.0], [1.0, 0.6666666666666666, 0.75])
    """
    count, right = _steps(uncertainty, correct)
    kept = np.cumsum(count)
    return kept / max(int(count.sum()), 1), np.cumsum(right) / kept


def area_under_accuracy_uncertainty(uncertainty: Scores, correct: Flags) -> float:
    """The mean, over k from 1 to N, of the accuracy among the k most certain samples; larger is better.

    It is 1 less the usual area under the risk-coverage curve. Where k cuts through samples that tie, the accuracy is
    the mean over all orders of them. A useless uncertainty gives the plain accuracy on average, one that is the same
    for all samples exactly. NaN without samples.

    >>> area_under_accuracy_uncertainty(np.array([0.1, 0.2]), np.array([True, False]))
    0.75
    >>> area_under_accuracy_uncertainty(np.array([0.2, 0.2]), np.array([True, False]))
    0.5
    """
    count, right = _steps(uncertainty, correct)
    total = int(count.sum())
    if not total:
        return math.nan
    kept = np.arange(1, total + 1)
    before, right_before = np.cumsum(count) - count, np.cumsum(right) - right
    within_step = kept - np.repeat(before, count)
    expected = np.repeat(right_before, count) + within_step * np.repeat(right / count, count)
    return float((expected / kept).mean())


def _steps(uncertainty: Scores, correct: Flags) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """For each distinct uncertainty, upwards: how many samples have it, and how many of them are correct."""
    uncertainty, correct = checking.scores(uncertainty, "uncertainty"), checking.flags(correct, "correct")
    checking.same_length(uncertainty=uncertainty, correct=correct)
    distinct, count = np.unique(uncertainty, return_counts=True)
    # Asked in order, neighbouring queries look at the same memory: several times faster.
    right = np.bincount(np.searchsorted(distinct, np.sort(uncertainty[correct])), minlength=len(distinct))
    return count, right


def _ratio(sums: NDArray[np.float64] | NDArray[np.int64], count: NDArray[np.int64]) -> NDArray[np.float64]:
    return np.divide(sums, count, out=np.full(len(count), np.nan), where=count > 0)

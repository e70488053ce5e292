"""Known against unknown by the score alone: AUROC, the false positive rate at a true positive rate, AUPR.

Scores grow with familiarity. No threshold of the system is used, no probability is assumed, and no score is squeezed
into 0 to 1 first: only the order of the scores matters, so any increasing function of them gives the same figures.
"""

import math
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from ..errors import InputError
from . import checking
from .checking import Scores
from .pairs import count_at_least, twice_the_wins

Positive = Literal["known", "unknown"]


def auroc(known: Scores, unknown: Scores) -> float:
    """The probability that a known sample scores above an unknown one, a tie counting half.

    The figure is the same whichever side is called positive. It is computed from a whole number of pairs: exact, then
    rounded once to float64. NaN if a side is empty.

    Args:
        known: (n,) scores of the known samples, float16, float32 or float64, infinities allowed.
        unknown: (m,) scores of the unknown samples.

    >>> auroc(np.array([3.0, 2.0, 1.0]), np.array([2.0, 0.0]))
    0.75
    """
    known, unknown = checking.scores(known, "known"), checking.scores(unknown, "unknown")
    if not len(known) or not len(unknown):
        return math.nan
    return twice_the_wins(known, unknown) / (2 * len(known) * len(unknown))


def fpr_at_tpr(known: Scores, unknown: Scores, tpr: float = 0.95, positive: Positive = "known") -> float:
    """The false positive rate at the strictest threshold that still finds at least `tpr` of the positives.

    With `positive="known"` a sample is accepted if its score is at least t; t is the largest score that accepts the
    share `tpr` of the known, and the figure is the share of the unknown accepted with them (UniEnt, ROSITA, CLIPTTA).
    With `positive="unknown"` a sample is flagged if its score is at most t; t is the smallest score that flags the
    share `tpr` of the unknown, and the figure is the share of the known flagged with them (OpenOOD, pytorch-ood).
    The two are different quantities. Samples that tie with t are all on the positive side. NaN if a side is empty.

    The threshold is always one that a system could use: nothing is interpolated. Two habits differ from this:

    - a ROC curve interpolated linearly at `tpr` (`np.interp`, scipy's `interp1d`): where some count of the positives
      is exactly `tpr` of them, as 9,500 of 10,000, it takes the last point of that height, and the figure is higher
      by the share of the negatives between t and the next positive; elsewhere it is lower by less than the share of
      the negatives that tie with t, and the same without such ties;
    - `np.quantile(known, 1 - tpr)` puts the threshold between two neighbouring scores of the known, at most one place
      from t: the figure differs, up or down, by at most the share of the unknown between t and the next score of the
      known on that side, t included. It may also accept less than `tpr` of the known.

    Args:
        known: (n,) scores of the known samples.
        unknown: (m,) scores of the unknown samples.
        tpr: above 0, at most 1.
        positive: the class to be found.

    >>> known, unknown = np.array([4.0, 3.0, 2.0, 1.0]), np.array([5.0, 2.0, 0.0, 0.0])
    >>> fpr_at_tpr(known, unknown, 0.75), fpr_at_tpr(known, unknown, 0.75, positive="unknown")
    (0.5, 0.5)
    >>> fpr_at_tpr(known, unknown, 0.95), fpr_at_tpr(known, unknown, 0.95, positive="unknown")
    (0.5, 1.0)
    """
    tpr = checking.share(tpr, "tpr")
    if not tpr > 0:
        raise InputError(f"tpr must be above 0 and at most 1; given: {tpr}")
    positives, negatives = _sides(known, unknown, positive)
    if not len(positives) or not len(negatives):
        return math.nan
    rejected = len(positives) - _smallest_count(tpr, len(positives))
    threshold = np.partition(positives, rejected)[rejected]
    return int(np.count_nonzero(negatives >= threshold)) / len(negatives)


def recall_at_false_reject(known: Scores, unknown: Scores, rate: float = 0.05) -> float:
    """The share of the unknown samples that a threshold finds if it rejects at most `rate` of the known ones.

    It compares methods at an equal rate of false rejects. The threshold is chosen with labels, the strictest of that
    kind, so no method without labels decides better by the same score. This is one minus `fpr_at_tpr` at 1 - `rate`.

    >>> recall_at_false_reject(np.array([4.0, 3.0, 2.0, 1.0]), np.array([1.5, 0.5]), 0.25)
    1.0
    """
    return 1.0 - fpr_at_tpr(known, unknown, 1.0 - checking.share(rate, "rate"))


def rejectable(count: int, rate: float) -> int:
    """Return how many of `count` known samples a threshold may reject at this rate: at most `rate` of them.

    >>> rejectable(100, 0.05), rejectable(19, 0.05)
    (5, 0)
    """
    return count - _smallest_count(1.0 - rate, count)


def aupr(known: Scores, unknown: Scores, positive: Positive = "known") -> float:
    """Average precision: over all distinct thresholds, the precision weighted by the gain in recall.

    Samples with the same score enter together, and nothing is interpolated: the trapezoids under a precision-recall
    curve would be too high. Blind guessing gives the share of the positives, so the figure moves with the ratio of
    known to unknown. NaN if a side is empty.

    >>> aupr(np.array([3.0, 1.0]), np.array([2.0]))
    0.8333333333333333
    """
    positives, negatives = _sides(known, unknown, positive)
    if not len(positives) or not len(negatives):
        return math.nan
    # Recall grows only at the scores of positives: no other threshold has a weight.
    thresholds, gained = np.unique(positives, return_counts=True)
    true = np.cumsum(gained[::-1])[::-1]
    precision = true / (true + count_at_least(np.sort(negatives), thresholds))
    return float((gained * precision).sum()) / len(positives)


def _sides(known: Scores, unknown: Scores, positive: str) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Positives and negatives, turned so that a larger value is more positive."""
    known, unknown = checking.scores(known, "known"), checking.scores(unknown, "unknown")
    if positive == "known":
        return known, unknown
    if positive == "unknown":
        return -unknown, -known
    raise InputError(f"positive must be 'known' or 'unknown'; given: {positive!r}")


def _smallest_count(share: float, total: int) -> int:
    """The smallest count with `count / total >= share`, by that very division."""
    # The rounded product may lie on either side of a whole number, 0.07 * 100 a little above 7: begin not above it.
    count = math.floor(share * total)
    while count / total < share:
        count += 1
    return count

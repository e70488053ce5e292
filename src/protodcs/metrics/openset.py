"""One figure for both tasks, naming the known and spotting the unknown: OSCR, its published faulty form, H-score.

Scores grow with familiarity. A known sample counts only if its class is right, and an unknown one only through its
score: what the system itself accepted must not enter here.
"""

import math

import numpy as np
from numpy.typing import NDArray

from ..arrays import Flags
from ..errors import InputError
from . import checking
from .checking import Groups, Scores
from .pairs import count_above, count_at_least, twice_the_wins


def oscr(known_scores: Scores, known_correct: Flags, unknown_scores: Scores) -> float:
    """The open-set classification rate: the area under correct classification over false positives.

    With n known and m unknown samples,

        OSCR = 1 / (n m) * sum over correct known i, all unknown j of [s_i > s_j] + 0.5 [s_i == s_j],

    the probability that a known sample is named rightly and scores above an unknown one. This is the area under
    `oscr_curve` by trapezoids: going down past a score with c correct known and u unknown samples, the curve moves by
    u / m to the right and by c / n upwards in one straight line, and the trapezoid below holds for each of the u all
    correct samples above it and half of the c that tie with it.

    Since wrong known samples win at most all their pairs, Acc + AUROC - 1 <= OSCR <= Acc. Repeating all samples of
    one side changes nothing, so the figure does not depend on the ratio of known to unknown. Exact, then rounded
    once. NaN if a side is empty.

    Args:
        known_scores: (n,) scores of the known samples, float16, float32 or float64, infinities allowed.
        known_correct: (n,) bool, whether the best class is the true one, without rejection.
        unknown_scores: (m,) scores of the unknown samples.

    >>> oscr(np.array([3.0, 2.0, 1.0]), np.array([True, False, True]), np.array([2.0, 1.0]))
    0.4166666666666667
    """
    known, correct, unknown = _checked(known_scores, known_correct, unknown_scores)
    if not len(known) or not len(unknown):
        return math.nan
    return twice_the_wins(known[correct], unknown) / (2 * len(known) * len(unknown))


def oscr_curve(
    known_scores: Scores, known_correct: Flags, unknown_scores: Scores
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """The curve whose area is `oscr`: shares (false positive, correct) from (0, 0) to (1, Acc).

    One point for each distinct score t, downwards: the share of the unknown with a score of at least t, and the share
    of all known samples that are correct and have a score of at least t. The share of an empty side is NaN.

    >>> false, correct = oscr_curve(np.array([3.0, 1.0]), np.array([True, True]), np.array([2.0]))
    >>> false.tolist(), correct.tolist()
    ([0.0, 0.0, 1.0, 1.0], [0.0, 0.5, 0.5, 1.0])
    """
    known, correct, unknown = _checked(known_scores, known_correct, unknown_scores)
    thresholds = np.unique(np.concatenate([known, unknown]))[::-1]
    accepted = count_at_least(np.sort(unknown), thresholds)
    right = count_at_least(np.sort(known[correct]), thresholds)
    return _from_zero(accepted, len(unknown)), _from_zero(right, len(known))


def oscr_legacy(
    known_scores: Scores,
    known_correct: Flags,
    unknown_scores: Scores,
    known_batch: Groups | None = None,
    unknown_batch: Groups | None = None,
) -> float:
    """OSCR as the code of UniEnt computes it, with its fault, to check published figures. Never report it.

    The fault: in each batch, known samples first, the unknown ones are cut out from the place m_b on, the number of
    unknown samples of the batch, where it should be n_b, the number of known ones. In a batch with fewer unknown than
    known samples the last n_b - m_b known ones are taken for unknown too; in one with more, the first m_b - n_b
    unknown ones are lost. Only n_b = m_b is right. Even a frozen model's figure then moves with the ratio.

    The sweep differs from `oscr` as well: at the threshold t unknown samples count if they score at least t, correct
    ones only if they score above t. Each unknown sample so loses half of the correct ones at the next higher score,
    and all that tie with it. Where n_b = m_b in every batch and no scores tie, the result is lower than `oscr` by at
    most 1 / (2 n). Two other oddities of that code change nothing and are left out: a point (1, 1) at the end adds a
    strip of no width, and the last strip, which is skipped, has no height.

    NaN if a side is empty.

    Args:
        known_scores: (n,) scores of the known samples, in the order of the stream.
        known_correct: (n,) bool, whether the best class is the true one.
        unknown_scores: (m,) scores of the unknown samples, in the order of the stream.
        known_batch: (n,) the batch of each known sample, integers or strings; None: all samples form one batch.
        unknown_batch: (m,) the same for the unknown samples; an unknown sample in a batch without known ones is lost.

    >>> known, correct = np.array([4.0, 3.0, 2.0, 1.0]), np.array([True, True, True, True])
    >>> oscr(known, correct, np.array([0.0])), oscr_legacy(known, correct, np.array([0.0]))
    (1.0, 0.5)
    """
    known, correct, unknown = _checked(known_scores, known_correct, unknown_scores)
    if (known_batch is None) != (unknown_batch is None):
        raise InputError("known_batch and unknown_batch belong together: give both or none; given: one of them")
    known_batch = _batches(known_batch, "known_batch", known)
    unknown_batch = _batches(unknown_batch, "unknown_batch", unknown)
    if not len(known) or not len(unknown):
        return math.nan
    called_unknown = _sliced_at_the_wrong_count(known, unknown, known_batch, unknown_batch)
    thresholds = np.unique(np.concatenate([known, called_unknown]))[::-1]
    false = _from_zero(count_at_least(np.sort(called_unknown), thresholds), len(called_unknown))
    right = _from_zero(count_above(np.sort(known[correct]), thresholds), len(known))
    return float((np.diff(false) * (right[1:] + right[:-1])).sum()) / 2


def h_score(first: float, second: float) -> float:
    """The harmonic mean of two shares from 0 to 1; 0 if both are 0, NaN if one is NaN.

    STAMP takes accuracy without rejection and AUROC, ROSITA known accuracy with rejection and unknown recall: name
    both beside the figure.

    >>> round(h_score(0.6, 0.9), 12)
    0.72
    """
    first, second = checking.share(first, "first"), checking.share(second, "second")
    if first == second:
        return first
    return 2 * first * second / (first + second)


def _checked(
    known_scores: Scores, known_correct: Flags, unknown_scores: Scores
) -> tuple[NDArray[np.float64], Flags, NDArray[np.float64]]:
    known = checking.scores(known_scores, "known_scores")
    correct = checking.flags(known_correct, "known_correct")
    checking.same_length(known_scores=known, known_correct=correct)
    return known, correct, checking.scores(unknown_scores, "unknown_scores")


def _from_zero(counts: NDArray[np.int64], total: int) -> NDArray[np.float64]:
    if not total:
        return np.full(len(counts) + 1, np.nan)
    return np.concatenate([[0], counts]) / total


def _batches(batch: Groups | None, name: str, samples: NDArray[np.float64]) -> Groups:
    if batch is None:
        return np.zeros(len(samples), dtype=np.int64)
    batch = checking.groups(batch, name)
    checking.same_length(**{name: batch, name.replace("batch", "scores"): samples})
    return batch


def _sliced_at_the_wrong_count(
    known: NDArray[np.float64], unknown: NDArray[np.float64], known_batch: Groups, unknown_batch: Groups
) -> NDArray[np.float64]:
    names = np.unique(known_batch)
    known_parts = _parts(known, known_batch, names)
    unknown_parts = _parts(unknown, unknown_batch, names)
    both = zip(known_parts, unknown_parts, strict=True)
    return np.concatenate([np.concatenate([inside, outside])[len(outside) :] for inside, outside in both])


def _parts(values: NDArray[np.float64], batch: Groups, names: Groups) -> list[NDArray[np.float64]]:
    """The values of each named batch, in their order."""
    order = np.argsort(batch, kind="stable")
    ordered, values = batch[order], values[order]
    starts = np.searchsorted(ordered, names, side="left")
    stops = np.searchsorted(ordered, names, side="right")
    return [values[start:stop] for start, stop in zip(starts, stops, strict=True)]

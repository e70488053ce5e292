"""Threshold: the score below which a sample is unknown, from unlabelled scores.

Known scores are close to a Gaussian. The threshold is its lower tail at `target_false_reject`. If the stream shows two
groups of samples, a mixture of two components gives the tail. Otherwise the upper half of all scores gives it,
mirrored: nearly all samples with high scores are known.

The mirrored tail is computed twice, on the final scores and on the text scores, and averaged: the linear head gives the
known scores a longer lower tail than it gives the upper one. If more samples than asked for lie in it, and their best
classes stand out, they are known too, and the threshold is lower.
"""

import math
from statistics import NormalDist
from typing import NamedTuple

import numpy as np

from ...arrays import Floats
from .constants import (
    CAUTION,
    CAUTIOUS_SCORES,
    GAIN_ALL,
    GAIN_FEW,
    LEAST_SEPARATION,
    MIRROR_RATIO,
    MOST_HIDDEN,
    SKEW,
    STAND_OUT_RAMP,
    WINDOW,
)

_STARTS = (0.1, 0.4, 0.7)  # Shares of unknown samples from which EM starts.
_ITERATIONS = 25
_SMALL = 1e-9
_NORMAL = NormalDist()


class Mixture(NamedTuple):
    """Two groups of scores: known ones around `mode`, wider below it than above, and unknown ones around `mean`."""

    likelihood: float
    share: float
    mode: float
    width: float
    mean: float
    deviation: float
    unknown: Floats

    @property
    def separation(self) -> float:
        """The distance between the two groups in standard deviations."""
        return (self.mode - self.mean) / math.sqrt(0.5 * (self.width**2 + self.deviation**2))


class Groups(NamedTuple):
    """The two groups that recent samples may form, and the evidence for them.

    Attributes:
        mixture: the best fit of two groups; None if there is none.
        evidence: 0 to 1, how far two groups are detected.
        share: estimated share of unknown samples.
    """

    mixture: Mixture | None
    evidence: float
    share: float


def fit_mixture(scores: Floats, unknown: Floats) -> Mixture:
    """Fit two groups to the scores (n,) by EM, starting from the probabilities `unknown` (n,)."""
    count, narrowest = len(scores), 0.1 * float(scores.std()) + _SMALL
    mode = float((1.0 - unknown) @ scores) / max(count - float(unknown.sum()), _SMALL)
    before = -math.inf
    for _ in range(_ITERATIONS):
        total = float(unknown.sum())
        share = min(max((total + 1.0) / (count + 2.0), 0.005), 0.98)
        mean = float(unknown @ scores) / max(total, _SMALL)
        deviation = max(math.sqrt(float(unknown @ (scores - mean) ** 2) / max(total, _SMALL)), narrowest)
        known = (1.0 - unknown) / np.where(scores < mode, SKEW**2, 1.0)
        mode = float(known @ scores) / max(float(known.sum()), _SMALL)
        known = (1.0 - unknown) / np.where(scores < mode, SKEW**2, 1.0)
        width = max(math.sqrt(float(known @ (scores - mode) ** 2) / max(count - total, _SMALL)), narrowest)
        as_known = math.log(1.0 - share) + _known_density(scores, mode, width)
        as_unknown = math.log(share / deviation) - 0.5 * ((scores - mean) / deviation) ** 2
        both = np.logaddexp(as_known, as_unknown)
        # Above the mode a wide unknown component would win again; nothing there is unknown.
        unknown = np.where(scores > mode, 0.0, np.exp(as_unknown - both))
        likelihood = float(both.sum())
        if likelihood - before < 1e-5 * count:
            break
        before = likelihood
    return Mixture(likelihood, share, mode, width, mean, deviation, unknown)


def find_groups(scores: Floats, stand_out: Floats, limit: float) -> Groups:
    """Look for a group of unknown samples below the known ones.

    Without two groups the share of unknown samples is what the lower tail has too much.

    Args:
        scores: (n,) the cosine scores of recent samples.
        stand_out: (n,) how far their best class stands out from the others.
        limit: how far that of unknown samples does at most. Known samples of a harder kind stand out more.
    """
    ordered, best = np.sort(scores), None
    for share in _STARTS:
        fitted = fit_mixture(scores, (scores <= ordered[int(share * len(ordered))]).astype(np.float64))
        if fitted.mean < fitted.mode and (best is None or fitted.likelihood > best.likelihood):
            best = fitted
    hidden = min(mirrored_tail(scores, 0.05, SKEW).share, MOST_HIDDEN)
    if best is None or best.separation <= LEAST_SEPARATION:
        return Groups(None, 0.0, hidden)
    full = len(scores) / WINDOW
    least, enough = ((1.0 - full) * few + full * most for few, most in zip(GAIN_FEW, GAIN_ALL, strict=True))
    gain = best.likelihood - _single_likelihood(scores)
    evidence = ramp(gain, least, enough)
    found = float(best.unknown @ stand_out) / max(float(best.unknown.sum()), _SMALL)
    evidence *= 1.0 - ramp(found, limit - STAND_OUT_RAMP, limit + STAND_OUT_RAMP)
    return Groups(best, evidence, evidence * best.share + (1.0 - evidence) * hidden)


def _single_likelihood(scores: Floats) -> float:
    """Return the log-likelihood of one group of known scores (n,)."""
    mode = float(np.median(scores))
    for _ in range(8):
        weights = 1.0 / np.where(scores < mode, SKEW**2, 1.0)
        mode = float(weights @ scores) / float(weights.sum())
    width = math.sqrt(float(weights @ (scores - mode) ** 2) / len(scores))
    return float(_known_density(scores, mode, max(width, _SMALL)).sum())


def _known_density(scores: Floats, mode: float, width: float) -> Floats:
    """Return the log-density of known scores (n,), up to a constant."""
    sides = np.where(scores < mode, SKEW * width, width)
    density: Floats = -math.log(0.5 * (1.0 + SKEW) * width) - 0.5 * ((scores - mode) / sides) ** 2
    return density


class Tail(NamedTuple):
    """The lower tail of the known scores, their median, and the share of unknown samples."""

    score: float
    median: float
    share: float


def mirrored_tail(scores: Floats, target: float, ratio: float) -> Tail:
    """Return the `target` tail of the known scores, from the upper half of all scores (n,).

    Scores below the tail that the known ones do not explain are unknown; the quantiles then leave them out.
    """
    ordered, share = np.sort(scores), 0.0
    deviations = _NORMAL.inv_cdf(target) / _NORMAL.inv_cdf(0.9)
    for _ in range(8):
        median = quantile(ordered, share + 0.5 * (1.0 - share))
        tail = median + ratio * deviations * (quantile(ordered, share + 0.9 * (1.0 - share)) - median)
        below = float(np.searchsorted(ordered, tail)) / len(ordered)
        share = min(0.5, max(0.0, below - target * (1.0 - share)))
    return Tail(tail, median, share)


class Threshold(NamedTuple):
    """The threshold, and the slope of the log-odds of being unknown at it."""

    score: float
    slope: float


def fit_threshold(
    scores: Floats, text: Floats, stand_out: Floats | None, groups: Groups, limit: float, target: float
) -> Threshold:
    """Return the threshold that rejects the fraction `target` of the known samples.

    Args:
        scores: (n,) the final scores of recent samples.
        text: (n,) their text scores.
        stand_out: (n,) how far their best class stands out from the others; None if there are too few classes to tell.
        groups: the two groups that these and some earlier samples may form.
        limit: how far the best class of unknown samples stands out at most.
        target: fraction of known samples that may be rejected.
    """
    tail, ordered = mirrored_tail(scores, target, MIRROR_RATIO), np.sort(scores)
    rejected = float((text < mirrored_tail(text, target, MIRROR_RATIO).score).mean())
    most = target + MOST_HIDDEN * min(1.0, len(scores) / CAUTIOUS_SCORES)
    lowest = min(0.5 * (tail.score + quantile(ordered, rejected)), quantile(ordered, most))
    if stand_out is not None and (scores < lowest).any():
        # If the samples below stand out, they are known ones of a harder kind.
        low = float(stand_out[scores < lowest].mean())
        known = ramp(low, limit - STAND_OUT_RAMP, limit + STAND_OUT_RAMP)
        lowest = known * min(lowest, quantile(ordered, target)) + (1.0 - known) * lowest
    score = tail.median + (lowest - tail.median) * (1.0 + CAUTION / len(scores))
    slope = 4.0 / max(tail.median - score, _SMALL)
    if groups.mixture is None or groups.evidence == 0.0:
        return Threshold(score, slope)
    fitted, evidence = fit_mixture(scores, groups.mixture.unknown[-len(scores) :]), groups.evidence
    between = fitted.mode + SKEW * fitted.width * _NORMAL.inv_cdf(target * (1.0 + SKEW) / (2.0 * SKEW))
    known_slope = (fitted.mode - between) / (SKEW * fitted.width) ** 2
    steep = max((between - fitted.mean) / fitted.deviation**2 + known_slope, 1e-3)
    return Threshold(
        evidence * between + (1.0 - evidence) * score,
        evidence * steep + (1.0 - evidence) * slope,
    )


def ramp(value: float, low: float, high: float) -> float:
    """Return 0 up to `low`, 1 from `high`, and a line between them."""
    return min(1.0, max(0.0, (value - low) / (high - low)))


def quantile(ordered: Floats, fraction: float) -> float:
    """Return the value below which this fraction of the sorted values (n,) lies."""
    return float(ordered[min(len(ordered) - 1, int(fraction * len(ordered)))])

"""Threshold: the score below which a sample is unknown, from unlabelled scores.

The text scores of recent samples are a mixture of two groups: known ones around a mode, wider below it than above, and
unknown ones below them. The widths of the groups are similar on all streams, so expected widths count as some more
samples. That tells one wide group from two narrow ones.

Each sample is known with some probability, by the mixture and by the linear head. The threshold is the score that
rejects the share `target_false_reject` of the known samples, counted by these probabilities. No density is assumed for
the final scores. If the mixture gains nothing over one group, all samples count as known.
"""

import math
from typing import NamedTuple

import numpy as np

from ...arrays import Floats
from .constants import ALONE, ALONE_DEVIATIONS, CAUTION, DOUBT, GAIN, HARD_KNOWN, SKEW, WIDTH_PRIOR

_STARTS = (0.1, 0.4, 0.7, 0.9)  # Shares of unknown samples from which EM starts.
_ITERATIONS = 25
_SMALL = 1e-9


class Widths(NamedTuple):
    """Expected widths of the two groups: of the known one above its mode, and of the unknown one; 0 for any."""

    known: float
    unknown: float


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


def fit_mixture(scores: Floats, unknown: Floats, expected: Widths) -> Mixture:
    """Fit two groups to the scores (n,) by EM.

    Args:
        scores: the scores.
        unknown: (n,) the probabilities to start from.
        expected: expected widths of the groups.
    """
    count, narrowest = len(scores), 0.1 * expected.known
    prior = WIDTH_PRIOR if expected.unknown else 0.0
    mode = float((1.0 - unknown) @ scores) / max(count - float(unknown.sum()), _SMALL)
    before = -math.inf
    for _ in range(_ITERATIONS):
        total = float(unknown.sum())
        share = min(max((total + 1.0) / (count + 2.0), 0.005), 0.98)
        mean = float(unknown @ scores) / max(total, _SMALL)
        spread = float(unknown @ (scores - mean) ** 2) + prior * expected.unknown**2
        deviation = max(math.sqrt(spread / max(total + prior, _SMALL)), narrowest)
        known = (1.0 - unknown) / np.where(scores < mode, SKEW**2, 1.0)
        mode = float(known @ scores) / max(float(known.sum()), _SMALL)
        known = (1.0 - unknown) / np.where(scores < mode, SKEW**2, 1.0)
        spread = float(known @ (scores - mode) ** 2) + WIDTH_PRIOR * expected.known**2
        width = max(math.sqrt(spread / (count - total + WIDTH_PRIOR)), narrowest)
        as_known = math.log(1.0 - share) + _known_density(scores, mode, width)
        as_unknown = math.log(share / deviation) - 0.5 * ((scores - mean) / deviation) ** 2
        both = np.logaddexp(as_known, as_unknown)
        # Above the mode a wide unknown component would win again; nothing there is unknown.
        unknown = np.where(scores > mode, 0.0, np.exp(as_unknown - both))
        widths = _width_density(width, expected.known) + _width_density(deviation, expected.unknown)
        likelihood = float(both.sum()) + widths
        if likelihood - before < 1e-5 * count:
            break
        before = likelihood
    return Mixture(likelihood, share, mode, width, mean, deviation, unknown)


def find_groups(scores: Floats, leads: Floats, general: bool, expected: Widths) -> Groups:
    """Look for a group of unknown samples below the known ones.

    Args:
        scores: (n,) the text scores of recent samples.
        leads: (n,) how far their best class leads over names; 0 if there are none. If even the lower group leads far,
            it is of known samples of a harder kind.
        general: whether the names are those of a vocabulary. Only then a small lead shows that samples are unknown.
        expected: expected widths of the groups.
    """
    ordered, best = np.sort(scores), None
    for share in _STARTS:
        fitted = fit_mixture(scores, (scores <= ordered[int(share * len(ordered))]).astype(np.float64), expected)
        if fitted.mean < fitted.mode and (best is None or fitted.likelihood > best.likelihood):
            best = fitted
    if best is None:
        return Groups(None, 0.0, 0.0)
    gain = best.likelihood - _single_likelihood(scores, expected.known)
    lead = float(best.unknown @ leads) / max(float(best.unknown.sum()), _SMALL)
    # The larger a wrong group is, the more known samples it costs.
    doubt = DOUBT * best.share * (ramp(lead, ALONE[0], HARD_KNOWN[0]) if general else 1.0)
    evidence = ramp(gain - doubt, 0.0, GAIN) * (1.0 - ramp(lead, *HARD_KNOWN))
    return Groups(best, evidence, evidence * best.share)


def _single_likelihood(scores: Floats, expected: float) -> float:
    """Return the log-likelihood of one group of known scores (n,)."""
    mode = float(np.median(scores))
    for _ in range(8):
        weights = 1.0 / np.where(scores < mode, SKEW**2, 1.0)
        mode = float(weights @ scores) / float(weights.sum())
    spread = float(weights @ (scores - mode) ** 2) + WIDTH_PRIOR * expected**2
    width = math.sqrt(spread / (len(scores) + WIDTH_PRIOR))
    return float(_known_density(scores, mode, width).sum()) + _width_density(width, expected)


def _known_density(scores: Floats, mode: float, width: float) -> Floats:
    """Return the log-density of known scores (n,), up to a constant."""
    sides = np.where(scores < mode, SKEW * width, width)
    density: Floats = -math.log(0.5 * (1.0 + SKEW) * width) - 0.5 * ((scores - mode) / sides) ** 2
    return density


def _width_density(width: float, expected: float) -> float:
    """Return the log-density of a width, up to a constant: that of `WIDTH_PRIOR` scores of the expected width."""
    if not expected:
        return 0.0
    ratio = expected / width
    return WIDTH_PRIOR * (math.log(ratio) + 0.5 - 0.5 * ratio * ratio)


class Threshold(NamedTuple):
    """The threshold, and the slope of the log-odds of being unknown at it."""

    score: float
    slope: float


def fit_threshold(scores: Floats, known: Floats, leads: Floats | None, target: float) -> Threshold:
    """Return the threshold that rejects the fraction `target` of the known samples.

    Args:
        scores: (n,) the final scores of recent samples.
        known: (n,) their probabilities of being known.
        leads: (n,) how far their best class leads over the names of a vocabulary; None without one. If not even the
            upper half of the known samples leads, all samples are unknown.
        target: fraction of known samples that may be rejected.
    """
    order = np.argsort(scores, kind="stable")
    below = np.cumsum(known[order])
    tail, median = (float(scores[order[np.searchsorted(below, part * below[-1])]]) for part in (target, 0.5))
    score = median - (median - tail) * (1.0 + CAUTION / len(scores))
    slope = 4.0 / max(median - score, _SMALL)
    if leads is not None:
        alone = 1.0 - ramp(float(leads[scores >= median].mean()), *ALONE)
        score = alone * float(scores.mean() + ALONE_DEVIATIONS * scores.std()) + (1.0 - alone) * score
    return Threshold(score, slope)


def ramp(value: float, low: float, high: float) -> float:
    """Return 0 up to `low`, 1 from `high`, and a line between them."""
    return min(1.0, max(0.0, (value - low) / (high - low)))


def quantile(ordered: Floats, fraction: float) -> float:
    """Return the value below which this fraction of the sorted values (n,) lies."""
    return float(ordered[min(len(ordered) - 1, int(fraction * len(ordered)))])

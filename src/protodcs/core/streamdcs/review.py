"""Review: which samples a person should look at, and how many known samples are probably rejected.

Both are computed from recent scores and the threshold, outside of the compiled step.
"""

import numpy as np

from ...arrays import Floats
from .constants import SKEW
from .threshold import Widths, fit_mixture, quantile


def band_width(scores: Floats, threshold: float, slope: float, rate: float) -> float:
    """Return the log-odds of being unknown, plus or minus, between which the share `rate` of the samples lies.

    Args:
        scores: (n,) the final scores of recent samples.
        threshold: score below which a sample is unknown.
        slope: slope of the log-odds of being unknown at the threshold.
        rate: share of the samples that a person can look at.
    """
    return slope * quantile(np.sort(np.abs(scores - threshold)), rate)


def estimated_false_reject(scores: Floats, threshold: float, share: float, expected: Widths | None) -> float:
    """Estimate the fraction of known samples below the threshold, without labels.

    Nearly all high scores are known. Mirrored at the middle of the known scores, their upper tail shows how many are
    in the lower one, which is wider.

    Args:
        scores: (n,) the final scores of recent samples.
        threshold: score below which a sample is unknown.
        share: estimated share of unknown samples.
        expected: expected widths of the groups if a separate group of unknown samples is detected. A mixture then gives
            the middle. None otherwise.
    """
    if expected is not None:
        middle = fit_mixture(scores, (scores < threshold).astype(np.float64), expected).mode
    else:
        middle = quantile(np.sort(scores), share + 0.5 * (1.0 - share))
    upper = scores[scores >= middle]
    if threshold >= middle or not len(upper):
        return 0.5
    return 0.5 * float((upper > middle + (middle - threshold) / SKEW).mean())

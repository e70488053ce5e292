"""Review: which samples a person should look at, and how many known samples are probably rejected.

Both are computed from recent scores and the threshold, outside of the compiled step.
"""

import numpy as np

from ...arrays import Floats
from .constants import MIRROR_RATIO
from .threshold import quantile


def band_width(scores: Floats, threshold: float, slope: float, rate: float) -> float:
    """Return the log-odds of being unknown, plus or minus, between which the share `rate` of the samples lies.

    Args:
        scores: (n,) the final scores of recent samples.
        threshold: score below which a sample is unknown.
        slope: slope of the log-odds of being unknown at the threshold.
        rate: share of the samples that a person can look at.
    """
    return slope * quantile(np.sort(np.abs(scores - threshold)), rate)


def estimated_false_reject(scores: Floats, threshold: float, share: float) -> float:
    """Estimate the fraction of known samples below the threshold, without labels.

    Nearly all high scores are known. Mirrored at the median of the known scores, their upper tail shows how many are
    in the lower one, as in `threshold.mirrored_tail`.

    Args:
        scores: (n,) the final scores of recent samples.
        threshold: score below which a sample is unknown.
        share: estimated share of unknown samples.
    """
    median = quantile(np.sort(scores), share + 0.5 * (1.0 - share))
    upper = scores[scores >= median]
    beyond = median + (median - threshold) / MIRROR_RATIO
    return 0.5 * float((upper > beyond).mean()) if threshold < median else 0.5

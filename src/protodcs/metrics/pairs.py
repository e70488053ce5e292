"""Counting pairs: how often does a sample of one side score above a sample of the other?

AUROC and OSCR are both such a count. It is a whole number here, so the metric is the nearest float64 to the true
fraction at any size. It must never become a sum of floats.
"""

import numpy as np
from numpy.typing import NDArray


def twice_the_wins(upper: NDArray[np.float64], lower: NDArray[np.float64]) -> int:
    """Two for each pair with the sample of `upper` above that of `lower`, one for each tie.

    Sorting costs O(n log n). The queries are sorted too: neighbours then look at the same memory, which is several
    times faster than asking in any order.
    """
    ladder, queries = np.sort(lower), np.sort(upper)
    below = np.searchsorted(ladder, queries, side="left")
    below_or_tied = np.searchsorted(ladder, queries, side="right")
    return int(below.sum(dtype=np.int64)) + int(below_or_tied.sum(dtype=np.int64))


def count_at_least(ascending: NDArray[np.float64], thresholds: NDArray[np.float64]) -> NDArray[np.int64]:
    """For each threshold the number of values that reach it."""
    return len(ascending) - np.searchsorted(ascending, thresholds, side="left").astype(np.int64)


def count_above(ascending: NDArray[np.float64], thresholds: NDArray[np.float64]) -> NDArray[np.int64]:
    """For each threshold the number of values beyond it."""
    return len(ascending) - np.searchsorted(ascending, thresholds, side="right").astype(np.int64)

"""Drops: what to do if the scores of the latest samples are lower than those of the earlier ones.

Either the images have shifted, or unknown ones have come in a burst. The best class of a sample tells which: it stands
out from the other classes under a shift too, but hardly for unknown samples.
"""

import math
from typing import NamedTuple

import numpy as np

from ...arrays import Floats
from .constants import SHIFT_DEVIATIONS, SHIFT_QUANTILE, SHIFT_WINDOW, STAND_OUT_KEPT
from .threshold import quantile


class Drop(NamedTuple):
    """What the latest samples are: known ones after a `shift`, a `burst` of unknown ones, or neither for sure."""

    shift: bool
    burst: bool


NO_DROP = Drop(False, False)


def lower_than_before(scores: Floats, threshold: float) -> bool:
    """Whether more of the latest scores are low than of the earlier ones; `scores` (n,) are in order of arrival."""
    recent, earlier = scores[-SHIFT_WINDOW:], scores[:-SHIFT_WINDOW]
    if len(earlier) < SHIFT_WINDOW:
        return False
    fraction = max(SHIFT_QUANTILE, float((earlier < threshold).mean()))
    low = int((recent < quantile(np.sort(earlier), fraction)).sum())
    expected, deviation = SHIFT_WINDOW * fraction, math.sqrt(SHIFT_WINDOW * fraction * (1.0 - fraction))
    return low >= expected + SHIFT_DEVIATIONS * deviation


def kind_of_drop(stand_out: Floats, limit: float, noticed_before: bool) -> Drop:
    """Return what the latest samples are, if their scores have dropped.

    Some of the latest samples may come from before the drop. So if they stand out somewhat less than the earlier ones,
    they count as shifted only if the last refit noticed the drop too.

    Args:
        stand_out: (n,) how far the best classes of recent samples stand out, in order of arrival.
        limit: how far those of unknown samples do at most.
        noticed_before: whether the last refit noticed the drop, outside of a burst.
    """
    latest, earlier = float(stand_out[-SHIFT_WINDOW:].mean()), float(stand_out[:-SHIFT_WINDOW].mean())
    part = STAND_OUT_KEPT * max(earlier - limit, 0.0)
    shift = latest > limit + 2.0 * part or (noticed_before and latest > limit + part)
    return Drop(shift, earlier > limit and latest <= limit + part)

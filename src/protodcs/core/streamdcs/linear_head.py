"""Linear head: the direction from the mean unknown-looking feature to the mean known-looking one.

It finds unknown samples that the class names do not, if they differ from the known ones in a common way. Unknown
samples near the known classes have no such direction, so the head has a weight: how well it separates samples that look
known from samples that look unknown. Each of them was projected before the head learned from it.
"""

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...arrays import Feature, Floats
from .. import state
from ..arena import Arena, Layout
from ..state_checks import required, within
from .constants import HEAD_AUROC, HEAD_FIRST, HEAD_LEAST, HEAD_SHARE, HEAD_TAIL, KNOWN_HORIZON, UNKNOWN_HORIZON
from .threshold import ramp

# Rows of `means`.
UNKNOWN, KNOWN = 0, 1
_HORIZONS = (UNKNOWN_HORIZON, KNOWN_HORIZON)
_SMALL = 1e-9


class HeadWeight(NamedTuple):
    """How a projection on the head counts: `weight` times (projection - `middle`) / `gap`.

    On the known side, if that is positive, only the fraction `known_side` of it counts.
    """

    weight: float
    middle: float
    gap: float
    known_side: float

    def add_to(self, text: Floats, projections: Floats) -> Floats:
        """Return the scores (n,) of samples with these text scores and projections."""
        side = (projections - self.middle) / self.gap
        scores: Floats = text + self.weight * np.where(side < 0.0, side, self.known_side * side)
        return scores


NO_HEAD = HeadWeight(0.0, 0.0, 1.0, 0.0)


def layout(dimension: int) -> Layout:
    """Return the arrays of a head over features of this length."""
    return {"head_means": (np.float64, (2, dimension)), "head_learned": (np.int64, (2,))}


class LinearHead:
    """The mean features of both kinds of samples.

    Attributes:
        means: (2, d) float64, the mean feature of unknown-looking and of known-looking samples.
        learned: (2,) int64, how many of either kind there were.
    """

    def __init__(self, arena: Arena):
        self.means = arena["head_means"]
        self.learned = arena["head_learned"]

    @property
    def ready(self) -> bool:
        """Whether there is a direction to project on."""
        return bool(self.learned[UNKNOWN] and self.learned[KNOWN] >= HEAD_FIRST)

    def project(self, feature: Feature) -> float:
        """Return how far a feature (d,) lies on the known side; zero until the head is ready."""
        if not self.ready:
            return 0.0
        direction = self.means[KNOWN] - self.means[UNKNOWN]
        length = max(math.sqrt(float(direction @ direction)), _SMALL)
        return float((feature - self.means[KNOWN]) @ direction) / length

    def learn(self, side: int, feature: Feature) -> None:
        """Move the mean of one side, UNKNOWN or KNOWN, towards a feature (d,)."""
        self.learned[side] += 1
        self.means[side] += (feature - self.means[side]) / min(int(self.learned[side]), _HORIZONS[side])

    def restore(self, arrays: state.Arrays, seen: int) -> None:
        """Take over exported arrays. Raise StateError for anything that cannot have been exported."""
        self.means[:] = within(required(arrays, "head_means", np.float64, self.means.shape), "head_means", -1.1, 1.1)
        self.learned[:] = within(required(arrays, "head_learned", np.int64, (2,)), "head_learned", 0, seen)


def weigh_head(
    projections: Floats, order: NDArray[np.int64], text: Floats, share: float, known_side: float
) -> HeadWeight:
    """Return how the head counts, by how it separates the two tails of the cosine score.

    Args:
        projections: (n,) those of recent samples.
        order: (n,) the places of these samples by rising cosine score.
        text: (n,) their text scores, which give the scale.
        share: estimated share of unknown samples.
        known_side: see `HeadWeight`.
    """
    lowest = int(max(HEAD_TAIL, HEAD_SHARE * share) * len(order))
    if lowest < HEAD_LEAST:
        return NO_HEAD
    low, high = order[:lowest], order[int((share + 0.5 * (1.0 - share)) * len(order)) :]
    separation = _auroc(projections[high], projections[low])
    certain = separation - math.sqrt(separation * (1.0 - separation) / lowest)
    low_mean, high_mean = float(projections[low].mean()), float(projections[high].mean())
    weight = ramp(certain, *HEAD_AUROC)
    distance = max(float(text[high].mean() - text[low].mean()), 0.0)
    middle, gap = 0.5 * (low_mean + high_mean), max(high_mean - low_mean, _SMALL)
    return HeadWeight(weight * distance, middle, gap, known_side)


def _auroc(known: Floats, unknown: Floats) -> float:
    """Return the probability that a known value exceeds an unknown one; a tie counts one half."""
    ordered = np.sort(unknown)
    below, tied = np.searchsorted(ordered, known), np.searchsorted(ordered, known, side="right")
    return float(below.sum() + tied.sum()) / (2.0 * len(known) * len(unknown))

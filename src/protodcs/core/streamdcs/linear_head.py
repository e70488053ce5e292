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
from .constants import HEAD_AUROC, HEAD_FIRST, HEAD_ODDS, KNOWN_HORIZON, UNKNOWN_HORIZON
from .threshold import ramp

# Rows of `means`.
UNKNOWN, KNOWN = 0, 1
_HORIZONS = (UNKNOWN_HORIZON, KNOWN_HORIZON)
_SMALL = 1e-9


class HeadWeight(NamedTuple):
    """How a projection on the head counts.

    Its side is (projection - `middle`) / `gap`, from -1/2 at the mean of the unknown samples to 1/2 at that of the
    known ones, and not beyond. On the known side, only the fraction `known_side` of it counts.

    Attributes:
        weight: what a side of one adds to the score.
        trust: 0 to 1, how far the head is trusted.
        middle, gap, known_side: see above.
    """

    weight: float
    trust: float
    middle: float
    gap: float
    known_side: float

    def sides(self, projections: Floats) -> Floats:
        """Return the sides (n,) of samples with these projections."""
        side = np.clip((projections - self.middle) / self.gap, -0.5, 0.5)
        return np.where(side < 0.0, side, self.known_side * side)

    def known(self, unknown: Floats, sides: Floats) -> Floats:
        """Return the probabilities (n,) of being known, from those of being unknown without the head."""
        odds = (1.0 - unknown) / np.maximum(unknown, _SMALL) * np.exp(HEAD_ODDS * self.trust * sides)
        probabilities: Floats = odds / (1.0 + odds)
        return probabilities


NO_HEAD = HeadWeight(0.0, 0.0, 0.0, 1.0, 0.0)


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
    projections: Floats, order: NDArray[np.int64], text: Floats, tail: float, share: float, evidence: float, many: float
) -> HeadWeight:
    """Return how the head counts, by how it separates samples that look unknown from samples that look known.

    With few classes, it may only tell the classes apart. So it counts as far as two groups are detected, or as the
    classes are many.

    Args:
        projections: (n,) those of recent samples.
        order: (n,) the places of these samples by rising base score.
        text: (n,) their text scores, which give the scale.
        tail: fraction of samples that look unknown.
        share: estimated share of unknown samples.
        evidence: 0 to 1, how far two groups are detected.
        many: 0 to 1, how far the number of classes counts as many.
    """
    lowest = int(tail * len(order))
    if lowest < HEAD_FIRST:
        return NO_HEAD
    low, high = order[:lowest], order[int((share + 0.5 * (1.0 - share)) * len(order)) :]
    separation = _auroc(projections[high], projections[low])
    certain = separation - math.sqrt(separation * (1.0 - separation) / lowest)
    low_mean, high_mean = float(projections[low].mean()), float(projections[high].mean())
    trust = max(evidence, many) * ramp(certain, *HEAD_AUROC)
    distance = max(float(text[high].mean() - text[low].mean()), 0.0)
    middle, gap = 0.5 * (low_mean + high_mean), max(high_mean - low_mean, _SMALL)
    return HeadWeight(trust * distance, trust, middle, gap, evidence)


def _auroc(known: Floats, unknown: Floats) -> float:
    """Return the probability that a known value exceeds an unknown one; a tie counts one half."""
    ordered = np.sort(unknown)
    below, tied = np.searchsorted(ordered, known), np.searchsorted(ordered, known, side="right")
    return float(below.sum() + tied.sum()) / (2.0 * len(known) * len(unknown))

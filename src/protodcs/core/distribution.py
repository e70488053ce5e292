"""The distribution of recent scores, the groups that an engine fitted to them, and its threshold, for plots."""

import math
from typing import NamedTuple

import numpy as np

from ..arrays import Floats


class Group(NamedTuple):
    """A fitted group of samples: a Gaussian whose two sides may have different widths.

    Attributes:
        name: "known" or "unknown".
        share: fraction of the samples in this group.
        mode: the most frequent value.
        below, above: standard deviations below and above the mode.
    """

    name: str
    share: float
    mode: float
    below: float
    above: float

    def density(self, values: Floats) -> Floats:
        """Return the share times the density at values (n,)."""
        deviations = np.where(values < self.mode, self.below, self.above)
        height = self.share / (math.sqrt(math.tau) * 0.5 * (self.below + self.above))
        density: Floats = height * np.exp(-0.5 * ((values - self.mode) / deviations) ** 2)
        return density


class ScoreDistribution(NamedTuple):
    """Recent values behind the decisions of an engine. `protodcs.plot.score_histogram` draws them.

    Attributes:
        quantity: what the values are, such as "score".
        values: (n,) of recent samples, in ascending order. They do not tell which samples they are of.
        threshold: the value between known and unknown; None before the first one is fitted.
        groups: the fitted groups; empty if the engine does not detect two.
    """

    quantity: str
    values: Floats
    threshold: float | None
    groups: tuple[Group, ...]

"""The rule that a refit makes: which samples teach the engine, how the head counts, and the threshold."""

from typing import NamedTuple

import numpy as np

from ...arrays import Floats
from ..state_checks import within
from .linear_head import HeadWeight

SMALL = 1e-9
# A class with hardly any variance has a score of this size.
LARGEST = 1e12


class Rule(NamedTuple):
    """The result of a refit.

    Attributes:
        looks_unknown, looks_known: base scores up to which and above which a sample teaches baseline and head.
        head_weight, head_trust, head_middle, head_gap, head_known_side: how the head counts, see `HeadWeight`.
        threshold: score below which a sample is unknown.
        slope: slope of the log-odds of being unknown at the threshold.
        share: estimated share of unknown samples.
        evidence: 0 to 1, how far two groups of samples are detected.
        separation: distance between the two groups in standard deviations; 0 if there is one.
        shifted: 1 if the latest samples score lower than the earlier ones, or did a while ago.
    """

    looks_unknown: float
    looks_known: float
    head_weight: float
    head_trust: float
    head_middle: float
    head_gap: float
    head_known_side: float
    threshold: float
    slope: float
    share: float
    evidence: float
    separation: float
    shifted: float

    @property
    def shows_two_groups(self) -> bool:
        """Whether a separate group of unknown samples is detected."""
        return self.evidence > 0.5

    @property
    def head(self) -> HeadWeight:
        """How the head counts."""
        return HeadWeight(self.head_weight, self.head_trust, self.head_middle, self.head_gap, self.head_known_side)


# Place of a field among the numbers of a rule.
SHIFTED = Rule._fields.index("shifted")


class Verdict(NamedTuple):
    """The decision between known and unknown, and the score behind it.

    Attributes:
        score: increases as the sample looks more known.
        p_unknown: P(unknown), one half at the threshold.
        known: the decision.
        reason: why the decision is less certain than it looks, see `Decision.reason`.
    """

    score: float
    p_unknown: float
    known: bool
    reason: str | None


def checked_rule(values: Floats) -> Rule:
    """Return the rule of a state. Raise StateError if no refit can have made it."""
    within(values, "rule", -(LARGEST**2), LARGEST**2)
    rule = Rule(*values.tolist())
    within(np.array([rule.share, rule.evidence, rule.shifted, rule.head_trust, rule.head_known_side]), "rule", 0.0, 1.0)
    within(np.array([rule.head_weight, rule.slope, rule.separation]), "rule", 0.0, LARGEST**2)
    within(np.array([rule.head_gap]), "rule", SMALL, LARGEST)
    return rule

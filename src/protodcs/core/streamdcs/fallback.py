"""Fallback threshold: decide while two groups are not detected.

That is the case at the start, on streams of one group, and if the scores overlap. The rule is a threshold on novelty
with a soft edge. At first it is set where known samples rarely are, from the noise floor and the spread of the first
scores. Later it rejects the least familiar few of recent samples, or more if the class concentration raises an alarm.
"""

import copy
import math
from typing import Self

import numpy as np
from numpy.typing import NDArray

from .. import state
from ..base import required, within
from ..windows import quantile
from .bimodality import MAX_NOVELTY, sigmoid
from .class_baseline import NO_NOISE_FLOOR
from .class_concentration import ClassConcentration

Vector = NDArray[np.float64]

# Steepness of the soft edge, per unit of novelty.
_STEEPNESS = 4.0
# With fewer classes, known samples hardly exceed noise, so the noise floor sets no threshold.
FEWEST_CLASSES = 5
# Number of samples from which recent samples set the threshold.
_START = 96
# The first threshold in noise floors: if the scores spread like one group, and if they spread like two. The spread is
# relative to the distance of the mean from the noise floor, and needs this many samples.
_FIRST_CUT = (1.4, 1.7)
_SPREAD = (0.5, 0.8)
_SPREAD_SAMPLES = 8
_LEAST_DISTANCE = 0.05
# An encoder that is rarely sure scores known samples lower: the largest threshold in noise floors, by confidence.
_MAX, _MAX_PER_CONFIDENCE = 0.3, 3.2
# The threshold if unknown samples are obvious: a fifth of the text scores is below and a quarter above these multiples
# of the noise floor.
_OBVIOUS_CUT = 1.45
_OBVIOUS = ((0.2, 1.1), (0.75, 1.6))
# Fraction of recent samples to reject: without an alarm, with one, and added to that if all samples are crowded too.
_FEW, _ALARMED, _CROWDED = 0.02, 0.25, 0.35
# The threshold on the text score, in noise floors, if all samples look unknown: then both memories hold such samples.
_ALL_UNKNOWN_CUT = 1.65


class Fallback:
    """The fallback threshold.

    Attributes:
        sums: (4,) float64, over all samples: their number, text scores, squared text scores and confidences.
        concentration: the class concentration at the last refit.
        cut: novelty above which a sample is unknown, if `settled`.
    """

    def __init__(self) -> None:
        self.sums = np.zeros(4)
        self.concentration = ClassConcentration()
        self.cut = 0.0
        self.settled = False

    def posterior(self, novelty: float, text: float, noise_floor: float) -> float:
        """Return P(unknown)."""
        if self.concentration.all_unknown:
            return sigmoid(_STEEPNESS * (_ALL_UNKNOWN_CUT * noise_floor - text))
        return sigmoid(_STEEPNESS * (novelty - self._middle(noise_floor)))

    def boundary(self, noise_floor: float, threshold: float) -> float:
        """Return the novelty at which P(unknown) reaches a threshold; if all look unknown, minus the text score."""
        middle = -_ALL_UNKNOWN_CUT * noise_floor if self.concentration.all_unknown else self._middle(noise_floor)
        return middle + math.log(threshold / (1.0 - threshold)) / _STEEPNESS if threshold < 1.0 else MAX_NOVELTY

    def _middle(self, noise_floor: float) -> float:
        """Return the novelty at which P(unknown) is one half."""
        return self.cut if self.settled else -self._first_cut(noise_floor)

    def refit(
        self, novelty: Vector, text: Vector, confidence: float, noise_floor: float, concentration: ClassConcentration
    ) -> None:
        """Set the threshold from recent samples: their novelty (n,), text scores (n,) and mean confidence."""
        self.concentration = concentration
        if self.sums[0] < _START:
            return
        self.settled = True
        highest = -min(_OBVIOUS_CUT, _MAX + _MAX_PER_CONFIDENCE * confidence) * noise_floor
        (low, below), (high, above) = _OBVIOUS
        ordered = np.sort(text)
        lower, upper = quantile(ordered, len(ordered), low), quantile(ordered, len(ordered), high)
        if (
            noise_floor > NO_NOISE_FLOOR
            and lower < below * noise_floor
            and upper > above * noise_floor
            and not concentration.even
        ):
            self.cut = highest
            return
        share = _FEW + concentration.alarm * (_ALARMED - _FEW + concentration.crowded * _CROWDED)
        few = quantile(np.sort(novelty), len(novelty), 1.0 - share)
        self.cut = few if concentration.alarm > 0.0 else max(highest, few)

    def _first_cut(self, noise_floor: float) -> float:
        """Return the first threshold, in familiarity, from the sums alone; none without a noise floor."""
        if noise_floor <= NO_NOISE_FLOOR:
            return -MAX_NOVELTY
        count, total, squares, confidence = self.sums.tolist()
        spread = 0.5 * sum(_SPREAD)
        if count >= _SPREAD_SAMPLES:
            mean = total / count
            deviation = math.sqrt(max(squares / count - mean * mean, 0.0))
            spread = deviation / max(mean - noise_floor, _LEAST_DISTANCE * noise_floor)
        apart = min(1.0, max(0.0, (spread - _SPREAD[0]) / (_SPREAD[1] - _SPREAD[0])))
        cut = _FIRST_CUT[0] + apart * (_FIRST_CUT[1] - _FIRST_CUT[0])
        return noise_floor * min(cut, _MAX + _MAX_PER_CONFIDENCE * confidence / max(count, 1.0))

    def fork(self) -> Self:
        copied = copy.copy(self)
        copied.sums = self.sums.copy()
        return copied

    def export(self) -> state.Arrays:
        return {"fallback": np.array([*self.sums, self.cut, self.settled, *self.concentration], dtype=np.float64)}

    @classmethod
    def restored(cls, arrays: state.Arrays) -> Self:
        fallback = cls()
        values = required(arrays, "fallback", np.float64, (12,))
        within(values[:4], "fallback", -1e18, 1e18)
        within(values[4:5], "fallback", -MAX_NOVELTY, MAX_NOVELTY)
        within(values[5:], "fallback", 0.0, 1.0)
        fallback.sums, fallback.cut, fallback.settled = values[:4].copy(), float(values[4]), bool(values[5])
        alarm, crowded, *flags = values[6:].tolist()
        fallback.concentration = ClassConcentration(alarm, crowded, *map(bool, flags))
        return fallback

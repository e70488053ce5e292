"""Decides while two kinds of samples are not proven: at the start, on streams of one kind, and where scores overlap.

The rule is a cut on strangeness with a soft edge. At first it lies where known samples rarely fall, by the scale of
what noise reaches and by how the first scores spread; later it takes the least familiar few of recent samples, or more
where the classes betray strangers that the scores do not show.
"""

import copy
import math
from typing import Self

import numpy as np
from numpy.typing import NDArray

from . import state
from .background import NO_LEVEL
from .base import required, within
from .concentration import Crowd
from .first_check import quantile
from .modes import STRANGEST, sigmoid

Vector = NDArray[np.float64]

# How steep the soft edge is, in strangeness.
_STEEPNESS = 4.0
# With fewer classes known samples hardly rise above noise: there is no cut by its level.
FEWEST_CLASSES = 5
# From so many samples on there are recent ones to look at.
_START = 96
# The first cut in levels of noise: where the scores spread as those of one kind, and where as those of two. The spread
# is measured by the mean's distance from the level, and it takes so many samples.
_FIRST_CUT = (1.4, 1.7)
_SPREAD = (0.5, 0.8)
_SPREAD_SAMPLES = 8
_LEAST_DISTANCE = 0.05
# An encoder that is never sure of its classes lifts known samples less: the cut is at most so many levels.
_MOST, _MOST_PER_CONFIDENCE = 0.3, 3.2
# The cut where strangers are plain to see in the text's scores: a fifth below and a quarter above so many levels.
_PLAIN_CUT = 1.45
_PLAIN = ((0.2, 1.1), (0.75, 1.6))
# The share of recent samples beyond the cut: without an alarm, with one, and where all classes are crowded too.
_FEW, _ALARMED, _CROWDED = 0.02, 0.25, 0.35
# The cut, in levels, on the text's score alone where all samples look like strangers: then both memories hold them.
_STRANGE_CUT = 1.65


class Cold:
    """The cut.

    Attributes:
        sums: (4,) float64, over all samples: how many, the text's familiarity, its square, the confidence.
        crowd: what the classes told when they were last looked at.
        cut: strangeness beyond which a sample is unknown, once `settled`.
    """

    def __init__(self) -> None:
        self.sums = np.zeros(4)
        self.crowd = Crowd()
        self.cut = 0.0
        self.settled = False

    def posterior(self, strangeness: float, text: float, level: float) -> float:
        """P(unknown)."""
        if self.crowd.strange:
            return sigmoid(_STEEPNESS * (_STRANGE_CUT * level - text))
        return sigmoid(_STEEPNESS * (strangeness - self._middle(level)))

    def boundary(self, level: float, threshold: float) -> float:
        """The strangeness at which P(unknown) reaches a threshold; where all look like strangers, that of the text."""
        middle = -_STRANGE_CUT * level if self.crowd.strange else self._middle(level)
        return middle + math.log(threshold / (1.0 - threshold)) / _STEEPNESS if threshold < 1.0 else STRANGEST

    def _middle(self, level: float) -> float:
        """The strangeness at which P(unknown) is one half."""
        return self.cut if self.settled else -self._first_cut(level)

    def weigh(self, strangeness: Vector, text: Vector, confidence: float, level: float, crowd: Crowd) -> None:
        """Set the cut by recent samples: their strangeness (n,), the text's familiarity (n,), their mean confidence."""
        self.crowd = crowd
        if self.sums[0] < _START:
            return
        self.settled = True
        highest = -min(_PLAIN_CUT, _MOST + _MOST_PER_CONFIDENCE * confidence) * level
        (low, below), (high, above) = _PLAIN
        ordered = np.sort(text)
        strange, familiar = quantile(ordered, len(ordered), low), quantile(ordered, len(ordered), high)
        if level > NO_LEVEL and strange < below * level and familiar > above * level and not crowd.even:
            self.cut = highest
            return
        share = _FEW + crowd.alarm * (_ALARMED - _FEW + crowd.crowded * _CROWDED)
        few = quantile(np.sort(strangeness), len(strangeness), 1.0 - share)
        self.cut = few if crowd.alarm > 0.0 else max(highest, few)

    def _first_cut(self, level: float) -> float:
        """In familiarity, from the sums alone; without a level of noise there is none."""
        if level <= NO_LEVEL:
            return -STRANGEST
        count, total, squares, confidence = self.sums.tolist()
        spread = 0.5 * sum(_SPREAD)
        if count >= _SPREAD_SAMPLES:
            mean = total / count
            deviation = math.sqrt(max(squares / count - mean * mean, 0.0))
            spread = deviation / max(mean - level, _LEAST_DISTANCE * level)
        apart = min(1.0, max(0.0, (spread - _SPREAD[0]) / (_SPREAD[1] - _SPREAD[0])))
        cut = _FIRST_CUT[0] + apart * (_FIRST_CUT[1] - _FIRST_CUT[0])
        return level * min(cut, _MOST + _MOST_PER_CONFIDENCE * confidence / max(count, 1.0))

    def fork(self) -> Self:
        twin = copy.copy(self)
        twin.sums = self.sums.copy()
        return twin

    def export(self) -> state.Arrays:
        return {"cold": np.array([*self.sums, self.cut, self.settled, *self.crowd], dtype=np.float64)}

    @classmethod
    def restored(cls, arrays: state.Arrays) -> Self:
        cold = cls()
        values = required(arrays, "cold", np.float64, (12,))
        within(values[:4], "cold", -1e18, 1e18)
        within(values[4:5], "cold", -STRANGEST, STRANGEST)
        within(values[5:], "cold", 0.0, 1.0)
        cold.sums, cold.cut, cold.settled = values[:4].copy(), float(values[4]), bool(values[5])
        alarm, crowded, *flags = values[6:].tolist()
        cold.crowd = Crowd(alarm, crowded, *map(bool, flags))
        return cold

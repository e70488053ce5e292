"""The gate of ROSITA over frozen features: known and unknown are told apart by a threshold that follows the stream.

The score is the largest cosine. Of a grid of thresholds the one is taken that splits the most recent scores, this one
included, into two groups of least variance (the rule of Otsu). The rest of ROSITA trains the image encoder and has no
place here: the prototypes never move, so class and score are those of the zero-shot classifier.
"""

import math
from collections.abc import Mapping
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from ..arrays import Feature, Floats
from ..core import state
from ..core.base import Capabilities, FeatureMethod
from ..core.decision import Decision, decision_from_cosines
from ..core.numerics.windows import Window
from ..core.settings import Settings
from ..core.state_checks import Counters, check_unit, counter, decided, required
from ..core.vectors import cosines as compute_cosines
from ..core.vectors import inverse_norms
from ..errors import StateError

# The mean of equal scores may be off by its rounding, which must not make any of them reliable.
_ROUNDING = 1e-12
_COUNTERS = ("sequence", "learned", "known", "reliable_known", "reliable_unknown")
_SUMS = ("unknown", "skipped")


class RositaGateConfig(Settings):
    """The settings of the gate."""

    window: int = Field(512, ge=2, le=100_000, description="How many recent scores set the threshold. Samples.")
    step: float = Field(
        0.01, ge=1e-4, le=0.5, description="Thresholds tried are 0, step, 2 step, ... below 1. In units of the cosine."
    )
    temperature: float = Field(
        0.01, gt=0, le=100, description="tau, of the class probabilities; the gate itself looks at cosines."
    )


def best_split(ordered: Floats, size: int, step: float) -> tuple[float, float, float]:
    """Return the threshold of least variance within the groups, and the means of the groups below and above it.

    `ordered` holds `size` ascending scores. Of equally good thresholds the lowest is taken. If none leaves scores on
    both sides, the threshold is 0 and the means are infinite, so that nothing lies beyond them.
    """
    values = ordered[:size]
    sums, squares = np.cumsum(values), np.cumsum(values * values)
    grid = np.arange(math.ceil(1.0 / step)) * step
    below = np.searchsorted(values, grid)
    split = np.flatnonzero((below > 0) & (below < size))
    if not len(split):
        return 0.0, -math.inf, math.inf
    low, high = below[split], size - below[split]
    low_sum, high_sum = sums[low - 1], sums[-1] - sums[low - 1]
    spread = squares[-1] - low_sum**2 / low - high_sum**2 / high
    best = int(spread.argmin())
    return float(grid[split[best]]), float(low_sum[best] / low[best]), float(high_sum[best] / high[best])


class Memory:
    """The prototypes, the recent scores, and counts of what was decided."""

    def __init__(self, initial: Feature, window: int):
        self.initial = initial
        self.inverse_norms = inverse_norms(initial)
        self.window = Window(window)
        self.sequence = 0
        self.learned = 0
        self.known = 0
        self.reliable_known = 0
        self.reliable_unknown = 0

    def fork(self) -> Self:
        """A copy to advance; the prototypes are shared."""
        copy = object.__new__(type(self))
        copy.__dict__.update(self.__dict__)
        copy.window = self.window.fork()
        return copy

    def export(self) -> tuple[Counters, state.Arrays]:
        """All there is, the scores in their ring."""
        counters: Counters = {name: getattr(self, name) for name in _COUNTERS}
        # Sums that a broken state would contradict.
        counters |= {"unknown": self.learned - self.known, "skipped": self.sequence - self.learned}
        return counters, {"initial_prototypes": self.initial, "window": self.window.arrivals[: self.window.size]}


class RositaGate(FeatureMethod):
    """Nearest prototype by cosine; known if the cosine reaches the threshold of the recent scores.

    `trusted` marks what ROSITA calls a reliable known sample: its score lies above the mean of the upper group.
    """

    name: ClassVar[str] = "rosita_gate"
    capabilities: ClassVar[Capabilities] = Capabilities(
        batch_invariant=True, rotation_invariant=True, editable_classes=True, cost="scoring"
    )
    config_type = RositaGateConfig
    score_names: ClassVar[Mapping[str, str]] = {"": "max cosine"}
    config: RositaGateConfig
    _memory: Memory

    def _advance(self, memory: Memory, feature: Feature, scores: bool) -> Decision:
        cosines = np.empty(len(self.classes))
        index = compute_cosines(memory.initial, memory.inverse_norms, feature, cosines)
        score = float(cosines[index])
        threshold, low_mean, high_mean = self._score(memory, score)
        known = score >= threshold
        trusted = score > high_mean + _ROUNDING
        memory.sequence += 1
        memory.learned += 1
        memory.known += known
        memory.reliable_known += trusted
        memory.reliable_unknown += score < low_mean - _ROUNDING
        return decision_from_cosines(
            self.classes,
            index,
            cosines,
            cosines if scores else None,
            score=score,
            sequence=memory.sequence - 1,
            known=known,
            trusted=trusted,
        )

    def _score(self, memory: Memory, score: float) -> tuple[float, float, float]:
        """Take the score into the window; the threshold and the means of the two groups that result."""
        memory.window.push(score)
        split: tuple[float, float, float] = best_split(memory.window.ordered, memory.window.size, self.config.step)
        return split

    def _with_classes(self, memory: Memory, kept: NDArray[np.int64], added: Feature) -> Memory:
        # Scores of the old list stay in the window: they leave it as new ones come.
        copy = memory.fork()
        copy.initial = np.concatenate([memory.initial[kept], added])
        copy.inverse_norms = inverse_norms(copy.initial)
        return copy

    def _new_memory(self, initial: Feature) -> Memory:
        return Memory(initial, self.config.window)

    def _restored_memory(self, counters: Counters, arrays: state.Arrays) -> Memory:
        if set(arrays) != {"initial_prototypes", "window"} or set(counters) != {*_COUNTERS, *_SUMS}:
            raise StateError(
                f"a state of this gate holds 'initial_prototypes' and 'window'; given: {sorted(arrays)[:10]}"
            )
        _, learned, _ = decided(counters)
        for name in ("reliable_known", "reliable_unknown"):
            counter(counters, name, high=learned)
        initial = required(arrays, "initial_prototypes", np.float32, (None, None))
        check_unit(initial, "initial_prototypes")
        window = required(arrays, "window", np.float64, (min(learned, self.config.window),))
        if not (np.abs(window) < 1.001).all():
            raise StateError("the state's scores are cosines, they must lie from -1 to 1")
        memory = Memory(initial, self.config.window)
        memory.window.restore(window, learned)
        for name in _COUNTERS:
            setattr(memory, name, counters[name])
        return memory

    def _initial_prototypes(self, memory: Memory) -> Feature:
        return memory.initial

    def stats(self) -> dict[str, Any]:
        """Numbers for monitoring, JSON-ready."""
        memory, window = self._memory, self._memory.window
        threshold = best_split(window.ordered, window.size, self.config.step)[0] if window.size else None
        return {
            **super().stats(),
            "known": memory.known,
            "unknown": memory.learned - memory.known,
            "reliable_known": memory.reliable_known,
            "reliable_unknown": memory.reliable_unknown,
            "threshold": threshold,
        }

"""What the methods share that keep the prototypes, give each sample a score, and let a threshold on it decide.

A method of this kind names its arrays in `_layout` and implements `_step`. States, checks and the decision are here.
Unless a paper has a rule of its own, the threshold splits the recent scores into two groups of least variance (Otsu).
"""

import math
from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple, Self

import numpy as np
from pydantic import Field

from ..arrays import Feature, Floats
from ..core import state
from ..core.arena import Arena, Layout
from ..core.base import Capabilities, FeatureMethod
from ..core.decision import Decision, decision_from_cosines
from ..core.numerics.windows import Window
from ..core.settings import Settings
from ..core.state_checks import Counters, check_unit, counter, decided, required
from ..core.vectors import cosines as compute_cosines
from ..core.vectors import inverse_norms
from ..errors import StateError

_COUNTERS = ("sequence", "learned", "known")
_SUMS = ("unknown", "skipped")


class ScoredConfig(Settings):
    """The settings that all of these methods have."""

    threshold: float | None = Field(
        None,
        description="A sample is known if its score is at least this. None: the value that splits the recent scores "
        "into two groups of least variance.",
    )
    window: int = Field(512, ge=2, le=5_000, description="How many recent scores set the threshold. Samples.")


class Step(NamedTuple):
    """What a method makes of a sample.

    Attributes:
        score: increases as the sample looks more known.
        prediction: (K,) the final prediction of every class; None: the cosines with the prototypes.
        cached: whether a memory of features changed.
        comparable: whether the score says something about later ones. If not, the sample counts as known.
    """

    score: float
    prediction: Floats | None = None
    cached: bool = False
    comparable: bool = True


def split(ordered: Floats) -> float:
    """Return the least value of the upper of two groups of ascending values (n,) whose variance is least.

    Equal values are never torn apart. If all are equal, there is one group, and the result is minus infinity.
    """
    cuts = np.flatnonzero(ordered[1:] > ordered[:-1]) + 1
    if not len(cuts):
        return -math.inf
    centred = ordered - ordered[len(ordered) // 2]
    left = np.cumsum(centred)
    low = left[cuts - 1]
    between = low**2 / cuts + (left[-1] - low) ** 2 / (len(ordered) - cuts)
    return float(ordered[cuts[int(between.argmax())]])


def check_filled(rows: Feature, count: int, name: str) -> None:
    """Raise StateError unless the first `count` rows of a buffer (n, d) have length one, and the others are zero."""
    if not 0 <= count <= len(rows) or rows[count:].any():
        raise StateError(f"the state's array {name!r} does not have {count} rows")
    check_unit(rows[:count], name)


class Memory:
    """The prototypes, the recent scores, counts of decisions, and the arrays of a method by name."""

    def __init__(self, initial: Feature, layout: Layout, window: int):
        self.initial = initial
        self.inverse_norms = inverse_norms(initial)
        self.arrays = Arena(layout)
        self.window = Window(window)
        self.sequence = 0
        self.learned = 0
        self.known = 0

    def __getitem__(self, name: str) -> Any:
        return self.arrays[name]

    def fork(self) -> Self:
        """Return a copy to advance; the prototypes are shared."""
        copy = object.__new__(type(self))
        copy.__dict__.update(self.__dict__)
        copy.arrays, copy.window = self.arrays.copy(), self.window.fork()
        return copy

    def export(self) -> tuple[Counters, state.Arrays]:
        """Return everything."""
        counters: Counters = {name: getattr(self, name) for name in _COUNTERS}
        # Sums that a broken state would contradict.
        counters |= {"unknown": self.learned - self.known, "skipped": self.sequence - self.learned}
        counters["compared"] = self.window.pushed
        recent = self.window.arrivals[: self.window.size]
        return counters, {"initial_prototypes": self.initial, "window": recent, **self.arrays}


class ScoredMethod(FeatureMethod):
    """A method that gives a score and decides by a threshold. The class is the best of its prediction."""

    capabilities: ClassVar[Capabilities] = Capabilities(
        batch_invariant=True, rotation_invariant=False, editable_classes=False, cost="scoring"
    )
    config: Any
    _memory: Memory

    @abstractmethod
    def _step(self, memory: Memory, feature: Feature, cosines: Floats) -> Step:
        """Score a unit feature (d,) with these cosines (K,), and learn from it. Change `memory` and nothing else."""

    def _layout(self, classes: int, width: int) -> Layout:
        """Return the type and shape of each array that the method learns; all begin with zeros."""
        return {}

    def _begin(self, memory: Memory) -> None:
        """Set the arrays that do not begin with zeros."""

    def _check(self, memory: Memory) -> None:
        """Raise StateError if the arrays, which are finite, cannot come from this method."""

    def _p_unknown(self, memory: Memory, score: float) -> float:
        """Return the probability that a sample with this score is unknown, after the score joined the window."""
        threshold = self.config.threshold
        return 0.0 if score >= (split(memory.window.sorted) if threshold is None else threshold) else 1.0

    def _advance(self, memory: Memory, feature: Feature, scores: bool) -> Decision:
        cosines = np.empty(len(self.classes))
        index = compute_cosines(memory.initial, memory.inverse_norms, feature, cosines)
        step = self._step(memory, feature, cosines)
        prediction = cosines if step.prediction is None else step.prediction
        if step.prediction is not None:
            index = int(prediction.argmax())
        if step.comparable:
            memory.window.push(step.score)
        decides = step.comparable or self.config.threshold is not None
        p_unknown = self._p_unknown(memory, step.score) if decides else 0.0
        known = p_unknown < 0.5
        memory.sequence += 1
        memory.learned += 1
        memory.known += known
        return decision_from_cosines(
            self.classes,
            index,
            cosines,
            prediction if scores else None,
            score=step.score,
            sequence=memory.sequence - 1,
            known=known,
            p_unknown=p_unknown,
            cached=step.cached,
        )

    def _empty_memory(self, initial: Feature) -> Memory:
        return Memory(initial, self._layout(*initial.shape), self.config.window)

    def _new_memory(self, initial: Feature) -> Memory:
        memory = self._empty_memory(initial)
        self._begin(memory)
        return memory

    def _restored_memory(self, counters: Counters, arrays: state.Arrays) -> Memory:
        initial = required(arrays, "initial_prototypes", np.float32, (None, None))
        check_unit(initial, "initial_prototypes")
        try:
            memory = self._empty_memory(initial)
        except MemoryError:
            raise StateError("the state asks for arrays larger than this machine's memory") from None
        expected, given = memory.export()
        if set(arrays) != set(given) or set(counters) != set(expected):
            raise StateError(f"a state of {self.name} holds the arrays {sorted(given)}; given: {sorted(arrays)[:20]}")
        _, learned, _ = decided(counters)
        for name in _COUNTERS:
            setattr(memory, name, counters[name])
        compared = counter(counters, "compared", high=learned)
        window = required(arrays, "window", np.float64, (min(compared, self.config.window),))
        memory.window.restore(window, compared)
        for name, (dtype, shape) in memory.arrays.layout.items():
            memory[name][...] = required(arrays, name, dtype, shape)
        self._restore_more(memory, counters, arrays)
        self._check(memory)
        return memory

    def _restore_more(self, memory: Memory, counters: Counters, arrays: state.Arrays) -> None:
        """Restore what a method stores beside its arrays."""

    def _initial_prototypes(self, memory: Memory) -> Feature:
        return memory.initial

    def stats(self) -> dict[str, Any]:
        """Return numbers for monitoring, JSON-ready."""
        memory = self._memory
        return {**super().stats(), "known": memory.known, "unknown": memory.learned - memory.known, **self._numbers()}

    def _numbers(self) -> Mapping[str, Any]:
        """Return the numbers that only this method has."""
        return {}

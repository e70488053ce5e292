"""Zero-shot CLIP: the frozen classifier everything else is measured against, with the four usual scores.

It learns nothing. The scores grow with familiarity: the maximum cosine, the maximum softmax probability at the
temperature of CLIP, the same at temperature 1 (MCM), and the free energy.
"""

import math
from collections.abc import Mapping
from typing import Any, ClassVar, Literal, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from ..arrays import Feature
from ..core import state
from ..core.base import Capabilities, FeatureMethod
from ..core.decision import Decision, decision_from_cosines
from ..core.settings import Settings
from ..core.state_checks import Counters, check_unit, counter, required
from ..core.vectors import cosines as compute_cosines
from ..core.vectors import inverse_norms
from ..errors import StateError
from .familiarity import PROBABLE


class ZeroShotConfig(Settings):
    """The settings of the zero-shot classifier."""

    score: Literal["max", "softmax", "mcm", "energy"] = Field("max", description="The familiarity that is reported.")
    temperature: float = Field(0.01, gt=0, le=100, description="Softmax temperature of 'softmax' and 'energy'.")
    threshold: float | None = Field(
        None, description="A sample is known if its score is at least this. None: every sample counts as known."
    )


class Memory:
    """The prototypes, and how many samples went by."""

    def __init__(self, initial: Feature):
        self.initial = initial
        self.inverse_norms = inverse_norms(initial)
        self.sequence = 0
        self.known = 0

    def fork(self) -> Self:
        """A copy to advance; the prototypes are shared."""
        copy = object.__new__(type(self))
        copy.__dict__.update(self.__dict__)
        return copy

    def export(self) -> tuple[Counters, state.Arrays]:
        """All there is."""
        return {"sequence": self.sequence, "known": self.known}, {"initial_prototypes": self.initial}


class ZeroShot(FeatureMethod):
    """Nearest prototype by cosine, with a score and, if wanted, a fixed threshold on it.

    It never answers "unknown" unless you set `threshold`: no threshold fits the scores of every encoder.

    >>> import numpy as np
    >>> features = np.eye(3, 8)
    >>> ZeroShot.from_options(features[:2]).observe(features[2]).outcome
    'known'
    >>> ZeroShot.from_options(features[:2], threshold=0.2).observe(features[2]).outcome
    'unknown'
    """

    name: ClassVar[str] = "zero_shot"
    capabilities: ClassVar[Capabilities] = Capabilities(
        batch_invariant=True, rotation_invariant=True, editable_classes=True, cost="scoring"
    )
    config_type = ZeroShotConfig
    score_names: ClassVar[Mapping[str, str]] = {"max": "max cosine", **PROBABLE}
    config: ZeroShotConfig
    _memory: Memory

    def _advance(self, memory: Memory, feature: Feature, scores: bool) -> Decision:
        cosines = np.empty(len(self.classes))
        index = compute_cosines(memory.initial, memory.inverse_norms, feature, cosines)
        score = self._score(cosines)
        known = self.config.threshold is None or score >= self.config.threshold
        memory.sequence += 1
        memory.known += known
        return decision_from_cosines(
            self.classes,
            index,
            cosines,
            cosines if scores else None,
            score=score,
            sequence=memory.sequence - 1,
            known=known,
        )

    def _score(self, cosines: NDArray[np.float64]) -> float:
        top = float(cosines.max())
        if self.config.score == "max":
            return 1.0 - (1.0 - top)  # 1 - openness, to the bit
        temperature = 1.0 if self.config.score == "mcm" else self.config.temperature
        partition = float(np.exp((cosines - top) / temperature).sum())
        return math.log(partition) + top / temperature if self.config.score == "energy" else 1.0 / partition

    def _with_classes(self, memory: Memory, kept: NDArray[np.int64], added: Feature) -> Memory:
        copy = Memory(np.concatenate([memory.initial[kept], added]))
        copy.sequence, copy.known = memory.sequence, memory.known
        return copy

    def _new_memory(self, initial: Feature) -> Memory:
        return Memory(initial)

    def _restored_memory(self, counters: Counters, arrays: state.Arrays) -> Memory:
        if set(arrays) != {"initial_prototypes"} or set(counters) != {"sequence", "known"}:
            raise StateError(f"a zero-shot state holds only its prototypes; given: {sorted(arrays)[:10]}")
        initial = required(arrays, "initial_prototypes", np.float32, (None, None))
        check_unit(initial, "initial_prototypes")
        memory = Memory(initial)
        memory.sequence = counter(counters, "sequence", high=2**62)
        memory.known = counter(counters, "known", high=memory.sequence)
        return memory

    def _count_frozen(self, decision: Decision) -> None:
        super()._count_frozen(decision)
        self._memory.known += decision.known

    def _initial_prototypes(self, memory: Memory) -> Feature:
        return memory.initial

    def stats(self) -> dict[str, Any]:
        """Numbers for monitoring, JSON-ready."""
        known, sequence = self._memory.known, self._memory.sequence
        return {**super().stats(), "known": known, "unknown": sequence - known}

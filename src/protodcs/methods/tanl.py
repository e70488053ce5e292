"""TANL: of all names, those count as negative labels that the stream's unknown-looking samples activate.

    a_n = mean over unknown-looking x of p_n(x) - mean over known-looking x of p_n(x)
    S(x) = mean_m  sum_k e^{z_k} / (sum_k e^{z_k} + sum_{j <= m} e^{z_j}),   names j in the order of falling a_j

p is the softmax over classes and all names. "Activation Matters: Test-time Activated Negative Labels for OOD Detection
with Vision-Language Models" (CVPR 2026, arXiv 2603.25250). A sample looks known if its score, with the names as they
stand, is above t + gap (1 - t), and unknown below t - gap t; t splits the recent scores into two groups of least
variance, on a grid of 0.01. Its own p then counts 5 % in the mean of its kind, and it is scored again. The scores of
the classes' own texts, and of noise, are the first of the recent ones.

Different from the authors' code, on purpose:

- Its script is transductive in batches of 256: the mean over the batch's own p changes the labels before any sample
  of the batch is scored. Here each sample is scored when it comes.
- It starts the unknown-looking samples with 15 noise images. From features alone there are none, so the start is
  uniform over all labels, which noise without content would be.
- It keeps the last 300 p of each kind. Here a mean forgets at that rate: one sample weighs 1/300.
- It has 10,000 WordNet names and takes 1,000 of them. Here `labels` is as many as there are classes, 16 at least.
- It splits the last 20,000 scores; here those are 4,096.
"""

from collections.abc import Mapping
from typing import ClassVar

import numpy as np
from pydantic import Field

from ..arrays import Feature, Floats
from ..core.arena import Layout
from ..core.numerics.windows import Window
from ..errors import StateError
from .activation import NOISE_SAMPLES, WithActivation
from .negatives import NegativesConfig
from .rosita_gate import best_split
from .scored import Memory, Step

_LEAST_LABELS = 16
# How many scores are split into two groups.
_RECENT = 4096
_GRID = 0.01


class TANLConfig(NegativesConfig):
    """The settings of TANL."""

    labels: int | None = Field(
        None, ge=1, le=1_000_000, description="Negative labels; None: as many as classes, but at least 16."
    )
    gap: float = Field(0.5, ge=0, le=1, description="How far from t a score must be to count as clearly known or not.")
    memory: int = Field(300, ge=1, le=10**6, description="About how many samples of each kind are remembered.")


def prefix_share(known: Floats, negative: Floats) -> float:
    """Return the mean over m of the share of the softmax on the classes (K,), with the first m names of (M,)."""
    top = max(float(known.max()), float(negative.max()))
    mass = float(np.exp(known - top).sum())
    return float(np.mean(mass / (mass + np.cumsum(np.exp(negative - top)))))


class TANL(WithActivation):
    """Nearest prototype by cosine; the score compares it with the names that the stream activates."""

    name: ClassVar[str] = "tanl"
    config_type = TANLConfig
    score_names: ClassVar[Mapping[str, str]] = {"": "activation-aware share on classes"}
    config: TANLConfig

    def _layout(self, classes: int, width: int) -> Layout:
        recent = (np.float64, (_RECENT,))
        return {**super()._layout(classes, width), "recent": recent, "ordered": recent}

    def _begin(self, memory: Memory) -> None:
        super()._begin(memory)
        if not len(self._negatives):
            return
        names = self._most_used(memory, self._count())
        recent = Window.over(memory["recent"], memory["ordered"], 0)
        # More classes than scores that are kept would push each other out.
        for text in memory.initial[:_RECENT]:
            known = (memory.initial @ text).astype(np.float64) / self.config.temperature
            recent.push(prefix_share(known, self._logits(text)[names]))
        for _ in range(NOISE_SAMPLES):
            recent.push(prefix_share(np.zeros(len(memory.initial)), np.zeros(len(names))))

    def _count(self) -> int:
        return self.config.labels or max(_LEAST_LABELS, len(self.classes))

    def _step(self, memory: Memory, feature: Feature, cosines: Floats) -> Step:
        known = cosines / self.config.temperature
        if not len(self._negatives):
            return Step(self._largest_probability(known))
        negative, count = self._logits(feature), self._count()
        kind = self._kind(memory, prefix_share(known, negative[self._most_used(memory, count)]))
        use = self._own_use(known, negative)
        score = prefix_share(known, negative[self._most_used_with(memory, count, use, kind)])
        if kind is not None:
            self._remember_use(memory, use, kind, self.config.memory)
        return Step(score, cached=kind is not None)

    def _kind(self, memory: Memory, score: float) -> int | None:
        """Return 0 if a sample with this score clearly looks known, 1 if it clearly looks unknown, else None."""
        started = min(len(memory.initial), _RECENT) + NOISE_SAMPLES
        recent = Window.over(memory["recent"], memory["ordered"], memory.learned + started)
        recent.push(score)
        middle, gap = middle_split(recent.sorted), self.config.gap
        if score > middle + gap * (1.0 - middle):
            return 0
        return 1 if score < middle - gap * middle else None

    def _check(self, memory: Memory) -> None:
        super()._check(memory)
        recent, ordered = memory["recent"], memory["ordered"]
        if not ((recent >= 0) & (recent <= 1.0 + 1e-9)).all():
            raise StateError("the state's recent scores must lie from 0 to 1")
        if len(self._negatives):
            size = min(memory.learned + min(len(memory.initial), _RECENT) + NOISE_SAMPLES, _RECENT)
            if not np.array_equal(np.sort(recent[:size]), ordered[:size]):
                raise StateError("the state's ordered scores are not its recent ones")


def middle_split(ordered: Floats) -> float:
    """Return the threshold on the grid that splits ascending scores (n,) best; of equally good ones, the middle one."""
    lowest, _, _ = best_split(ordered, len(ordered), _GRID)
    above = np.searchsorted(ordered, lowest)
    if above == len(ordered):
        return lowest
    first = round(lowest / _GRID)
    last = min(int(ordered[above] / _GRID), round(1.0 / _GRID) - 1)
    return _GRID * (first + (max(last - first, 0) + 1) // 2)

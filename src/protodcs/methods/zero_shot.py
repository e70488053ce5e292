"""Zero-shot CLIP: the frozen classifier everything else is measured against, with the four usual scores.

The scores grow with familiarity: the maximum cosine, the maximum softmax probability at the temperature of CLIP, the
same at temperature 1 (MCM), and the free energy. Prediction and score learn nothing from the stream.

Papers choose the threshold with labelled images. Without labels, the default is the rank among the recent scores:

    unknown if  #{recent scores <= s} <= target_false_reject * #{recent scores},   s itself included

If all images are known and in random order, at most the target is rejected, whatever the encoder. Unknown images that
score low take the place of known ones, so fewer known images are rejected then. No more images than the target are
called unknown in all: at a target of 5 %, at most half of 10 % unknown images are found. `mixture` has no such limit.
"""

import math
from collections.abc import Mapping
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from ..arrays import Feature, Floats
from ..core.base import Capabilities
from .familiarity import PROBABLE, Score
from .scored import Memory, ScoredConfig, ScoredMethod, Step


class ZeroShotConfig(ScoredConfig):
    """The settings of the zero-shot classifier."""

    score: Score = Field("max", description="The familiarity that is reported.")
    temperature: float = Field(0.01, gt=0, le=100, description="Softmax temperature of 'softmax' and 'energy'.")
    target_false_reject: float = Field(
        0.05, gt=0, lt=0.5, description="Fraction of the recent images that are called unknown, without `threshold`."
    )
    threshold: float | None = Field(
        None,
        description="A sample is known if its score is at least this. None: the lowest of the recent scores are "
        "unknown, as many as `target_false_reject` allows.",
    )


class ZeroShot(ScoredMethod):
    """Nearest prototype by cosine, with a score; the lowest of the recent scores are unknown.

    >>> import numpy as np
    >>> features = np.eye(3, 8)
    >>> ZeroShot.from_options(features[:2], threshold=0.2).observe(features[2]).outcome
    'unknown'
    >>> engine = ZeroShot.from_options(features[:2], target_false_reject=0.05)
    >>> decisions = engine.observe_many(features[[0, 1] * 20 + [2]])
    >>> decisions.label[-2:]
    ['1', None]
    """

    name: ClassVar[str] = "zero_shot"
    version: ClassVar[int] = 2
    capabilities: ClassVar[Capabilities] = Capabilities(
        batch_invariant=True, rotation_invariant=True, editable_classes=True, cost="scoring"
    )
    config_type = ZeroShotConfig
    score_names: ClassVar[Mapping[str, str]] = {"max": "max cosine", **PROBABLE}
    config: ZeroShotConfig

    def _step(self, memory: Memory, feature: Feature, cosines: Floats) -> Step:
        return Step(self._score(cosines))

    def _score(self, cosines: Floats) -> float:
        top = float(cosines.max())
        if self.config.score == "max":
            return 1.0 - (1.0 - top)  # 1 - openness, to the bit
        temperature = 1.0 if self.config.score == "mcm" else self.config.temperature
        partition = float(np.exp((cosines - top) / temperature).sum())
        return math.log(partition) + top / temperature if self.config.score == "energy" else 1.0 / partition

    def _p_unknown(self, memory: Memory, score: float) -> float:
        if self.config.threshold is not None:
            return super()._p_unknown(memory, score)
        recent = memory.window.sorted
        return float(recent.searchsorted(score, side="right") <= self.config.target_false_reject * len(recent))

    def _with_classes(self, memory: Memory, kept: NDArray[np.int64], added: Feature) -> Memory:
        # The recent scores are forgotten: most scores depend on the number of classes.
        edited = self._empty_memory(np.concatenate([memory.initial[kept], added]))
        edited.sequence, edited.learned, edited.known = memory.sequence, memory.learned, memory.known
        return edited

"""OODD: a queue of the most unknown-looking features of the stream; what is near to them is unknown.

    S(x) = MCM(x) - (k-th largest cosine of x with the queue)

"OODD: Test-time Out-of-Distribution Detection with Dynamic Dictionary" (CVPR 2025). The queue has the `queue` features
of lowest MCM score, the largest softmax probability of plain cosines. A sample joins the queue before it is scored.

Different from the authors' code, on purpose:

- It queues 64 samples, then scores them, so a sample is compared with later ones. Here each is scored when it comes.
- Its queue of 2,048 is 3 % of its 60,000 images. The default here is 128, for streams of some thousand samples.
- With fewer than k features, the least cosine counts; the authors' code would raise.
- The paper has no threshold but one for 95 % of the known images. Here the recent scores set it.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
from pydantic import Field

from ..arrays import Feature, Floats
from ..core.arena import Layout
from ..errors import StateError
from .familiarity import familiarity
from .scored import Memory, ScoredConfig, ScoredMethod, Step, check_filled


class OODDConfig(ScoredConfig):
    """The settings of OODD."""

    queue: int = Field(128, ge=1, le=100_000, description="How many of the most unknown-looking features are kept.")
    neighbours: int = Field(5, ge=1, le=1000, description="k: which of the nearest features in the queue counts.")


class OODD(ScoredMethod):
    """Nearest prototype by cosine; the score falls with the similarity to features that looked unknown."""

    name: ClassVar[str] = "oodd"
    config_type = OODDConfig
    score_names: ClassVar[Mapping[str, str]] = {"": "MCM minus k-th cosine with the queue"}
    config: OODDConfig

    def _layout(self, classes: int, width: int) -> Layout:
        queue = self.config.queue
        return {"scores": (np.float64, (queue,)), "queued": (np.int64, (1,)), "queue": (np.float32, (queue, width))}

    def _step(self, memory: Memory, feature: Feature, cosines: Floats) -> Step:
        mcm = familiarity(cosines, 1.0, "mcm")
        cached = self._enqueue(memory, feature, mcm)
        count = int(memory["queued"][0])
        near = memory["queue"][:count] @ feature
        k = min(self.config.neighbours, count)
        return Step(mcm - float(np.partition(near, count - k)[count - k]), cached=cached)

    def _enqueue(self, memory: Memory, feature: Feature, score: float) -> bool:
        scores, queued = memory["scores"], memory["queued"]
        place = int(queued[0])
        if place == len(scores):
            place = int(scores.argmax())
            if scores[place] <= score:
                return False
        else:
            queued[0] += 1
        scores[place], memory["queue"][place] = score, feature
        return True

    def _check(self, memory: Memory) -> None:
        count, scores = int(memory["queued"][0]), memory["scores"]
        if count != min(memory.learned, self.config.queue):
            raise StateError(f"the state's queue has {count} features after {memory.learned} samples")
        check_filled(memory["queue"], count, "queue")
        if scores[count:].any() or not ((scores[:count] > 0) & (scores[:count] <= 1)).all():
            raise StateError("the state's scores of queued features must be probabilities")

    def _numbers(self) -> Mapping[str, Any]:
        return {"queued": int(self._memory["queued"][0])}

"""ETA, that is EATA without its Fisher term: entropy is lowered on samples that are sure and not all alike.

A sample is kept if its entropy lies below a margin and its prediction points away from the running mean of kept
predictions; kept samples weigh `exp(margin - entropy)`. The Fisher term needs source images, which a dual encoder does
not come with. The answer is that of the forward pass before the step. There is no open-set rule.
"""

import math
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field
from torch import Tensor

from ..familiarity import Score
from .answer import Answer
from .tower import entropies
from .tower_method import TowerMethod, TowerSettings

# By the number of classes up to which it holds: UniEnt's choices for CIFAR-10, CIFAR-100 and beyond.
_REDUNDANCY = ((10, 0.4), (100, 0.1), (math.inf, 0.05))


class ETAConfig(TowerSettings):
    """The settings of ETA."""

    rate: float = Field(
        1e-3, ge=0, le=1, description="lr of Adam, as in UniEnt's open-set runs; EATA itself: SGD at 0.00025."
    )
    margin: float = Field(
        0.4, gt=0, le=1, description="A sample is kept if its entropy is below this share of ln K, and weighed by it."
    )
    redundancy: float | None = Field(
        None,
        ge=0,
        le=1,
        description="d: a sample is kept if the cosine of its prediction with the running mean is below this. None: "
        "UniEnt's open-set values, 0.4 for up to 10 classes, 0.1 for up to 100, 0.05 for more (EATA: 0.05).",
    )
    momentum: float = Field(
        0.9,
        ge=0,
        lt=1,
        description="Share of the old running mean of predictions; the rest is the mean of the kept ones of a batch.",
    )
    score: Score = Field(
        "energy", description="The familiarity that is reported; the free energy is what the UniEnt protocol takes."
    )


class ETA(TowerMethod):
    """Weighted entropy minimisation on kept samples."""

    name: ClassVar[str] = "eta"
    config_type = ETAConfig
    config: ETAConfig

    def _begin(self) -> None:
        self._optimizer = torch.optim.Adam(self._tower.parameters, lr=self.config.rate)
        self._running: Tensor | None = None
        self._kept = 0

    def _adapt(self, batch: NDArray[np.uint8]) -> Answer:
        cosines = self._tower.cosines(self._tower.pixels(batch))
        logits = cosines / self.temperature
        entropy = entropies(logits)
        kept = self._keep(entropy.detach(), torch.softmax(logits.detach(), dim=1))
        if kept.any():
            weights = torch.exp(self._bound() - entropy.detach()[kept])
            if not self._descend((weights * entropy[kept]).mean()):
                kept = torch.zeros_like(kept)
        self._kept += int(kept.sum())
        return self._answer(cosines, kept.cpu().numpy())

    def _keep(self, entropy: Tensor, probabilities: Tensor) -> Tensor:
        """(N,) which samples are sure and not redundant; the running mean follows them."""
        kept = entropy < self._bound()
        if self._running is not None:
            alike = _cosines_with(probabilities, self._running)
            kept = kept & (alike.abs() < self._redundancy())
        if kept.any():
            mean, share = probabilities[kept].mean(dim=0), self.config.momentum
            self._running = mean if self._running is None else share * self._running + (1 - share) * mean
        return kept

    def _bound(self) -> float:
        return self.config.margin * math.log(len(self.classes))

    def _redundancy(self) -> float:
        if self.config.redundancy is not None:
            return self.config.redundancy
        return next(value for most, value in _REDUNDANCY if len(self.classes) <= most)

    def stats(self) -> dict[str, Any]:
        """Return numbers for monitoring, ready for JSON. `kept` counts samples."""
        return {**super().stats(), "kept": self._kept}


def _cosines_with(rows: Tensor, row: Tensor) -> Tensor:
    """(N,) cosines of rows (N, K) with one row (K,)."""
    return torch.nn.functional.cosine_similarity(rows, row[None], dim=1)

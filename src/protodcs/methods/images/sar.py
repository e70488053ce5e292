"""SAR: entropy is lowered on sure samples by sharpness-aware steps, and the tower starts again if it grows too sure.

A first pass keeps samples of low entropy and climbs to the worst point nearby; a second pass there keeps again and
gives the gradient that is descended from where the tower was. The top layers are left alone. The answer is that of the
first pass. There is no open-set rule.
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
from .tower import climbed, entropies, gradients
from .tower_method import TowerMethod, TowerSettings

# The batch to which SAR's published rate belongs.
_RATE, _RATE_BATCH = 0.001, 64


class SARConfig(TowerSettings):
    """The settings of SAR."""

    batch_size: int = Field(64, ge=1, le=4096, description="Images that are decided and learned from at once.")
    rate: float | None = Field(
        None, ge=0, le=1, description="lr of SGD. None: SAR's for vision transformers, 0.001 batch_size / 64."
    )
    momentum: float = Field(0.9, ge=0, lt=1, description="Of SGD.")
    margin: float = Field(0.4, gt=0, le=1, description="A sample is kept if its entropy is below this share of ln K.")
    radius: float = Field(0.05, ge=0, le=10, description="rho: how far the sharpness-aware step climbs.")
    loss_momentum: float = Field(0.9, ge=0, lt=1, description="Share of the old running mean of the second loss.")
    restart: float = Field(
        0.2, ge=0, le=100, description="The tower starts again once that running mean is below this. Nats. 0: never."
    )
    skip_top: float = Field(
        0.25,
        ge=0,
        lt=1,
        description="Share of the norm layers, by depth and rounded up, that is not trained: of a ViT-B the last three "
        "blocks and the final norm, as published; there by name, here by the order in which images meet them.",
    )
    score: Score = Field(
        "energy", description="The familiarity that is reported; the free energy is what the UniEnt protocol takes."
    )


class SAR(TowerMethod):
    """Sharpness-aware entropy minimisation on sure samples."""

    name: ClassVar[str] = "sar"
    config_type = SARConfig
    config: SARConfig

    def _forget(self) -> None:
        self._restarts = 0
        super()._forget()

    def _begin(self) -> None:
        config = self.config
        rate = _RATE * config.batch_size / _RATE_BATCH if config.rate is None else config.rate
        self._optimizer = torch.optim.SGD(self._tower.parameters, lr=rate, momentum=config.momentum)
        self._running: float | None = None

    def _adapt(self, batch: NDArray[np.uint8]) -> Answer:
        pixels = self._tower.pixels(batch)
        cosines = self._tower.cosines(pixels)
        entropy = entropies(cosines / self.temperature)
        kept = entropy.detach() < self._bound()
        if kept.any():
            kept = self._learn(pixels, entropy, kept)
        return self._answer(cosines, kept.cpu().numpy())

    def _learn(self, pixels: Tensor, entropy: Tensor, kept: Tensor) -> Tensor:
        """Climb, keep again, step; which samples the step was made of."""
        uphill = gradients(entropy[kept].mean(), self._tower.parameters)
        if uphill is None:
            self._skipped_steps += 1
            return torch.zeros_like(kept)
        with climbed(self._tower.parameters, uphill, self.config.radius):
            second = entropies(self._tower.cosines(pixels) / self.temperature)
            kept = kept & (second.detach() < self._bound())
            loss = second[kept].mean()
            slopes = gradients(loss, self._tower.parameters)
        if slopes is None:
            self._skipped_steps += 1
            return torch.zeros_like(kept)
        self._step(loss, slopes)
        self._follow(float(loss.detach()))
        return kept

    def _follow(self, loss: float) -> None:
        """The running mean of the second loss; the tower starts again where it has fallen too low."""
        share = self.config.loss_momentum
        self._running = loss if self._running is None else share * self._running + (1 - share) * loss
        if self._running < self.config.restart:
            self._tower.restore()
            self._begin()
            self._restarts += 1

    def _bound(self) -> float:
        return self.config.margin * math.log(len(self.classes))

    def stats(self) -> dict[str, Any]:
        """Numbers for monitoring, JSON-ready; `restarts` counts how often the tower grew too sure."""
        return {**super().stats(), "restarts": self._restarts, "running_loss": self._running}

"""TENT: each batch lowers the entropy of its own predictions, by the weights and biases of the norm layers.

The loss is the mean entropy of the softmax over cosines. As published, the answer is that of the forward pass whose
loss is descended, before the step. It has no open-set rule, and none is made up here.
"""

from typing import ClassVar, Literal, Self

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field, model_validator

from ..familiarity import Score
from .answer import Answer
from .tower import entropies, entropy_of_mean
from .tower_method import TowerMethod, TowerSettings


class TentConfig(TowerSettings):
    """The settings of TENT."""

    rate: float = Field(
        1e-3,
        ge=0,
        le=1,
        description="lr of Adam: 1e-3 in TENT itself on CIFAR-10-C and in CLIPArTT's port; 1e-4, with ten steps and a "
        "diversity term, in CLIPTTA's open-set runs on CLIP.",
    )
    steps: int = Field(1, ge=1, le=100, description="Steps per batch: 1 in TENT, 10 in the ports to CLIP.")
    episodic: bool = Field(
        False, description="Set the tower back before every batch, as CLIPArTT's port does; the published one goes on."
    )
    answer: Literal["before", "after"] | None = Field(
        None,
        description="The answer is that of the last step's forward pass (published), or of one more after that step "
        "(ports to CLIP). None: 'after' when episodic, else 'before'.",
    )
    diversity_weight: float = Field(
        0.0,
        ge=0,
        le=100,
        description="Weight of the entropy of the batch-mean prediction, which is rewarded: 0 in TENT, 1 in CLIPTTA.",
    )
    score: Score = Field(
        "energy", description="The familiarity that is reported; the free energy is what the UniEnt protocol takes."
    )

    @model_validator(mode="after")
    def _adapts(self) -> Self:
        if self.episodic and self.steps == 1 and self.answer == "before":
            raise ValueError("episodic with one step and answer='before' is the frozen tower: use answer='after'")
        return self


class Tent(TowerMethod):
    """Entropy minimisation on all samples."""

    name: ClassVar[str] = "tent"
    config_type = TentConfig
    config: TentConfig

    def _begin(self) -> None:
        self._optimizer = torch.optim.Adam(self._tower.parameters, lr=self.config.rate)

    def _adapt(self, batch: NDArray[np.uint8]) -> Answer:
        config, pixels = self.config, self._tower.pixels(batch)
        if config.episodic:
            self._tower.restore()
            self._begin()
        first, moved = None, False
        for _ in range(config.steps):
            cosines = self._tower.cosines(pixels)
            first = cosines if first is None else first
            moved |= self._descend(self._objective(cosines / self.temperature))
        if (config.answer or ("after" if config.episodic else "before")) == "after":
            with torch.no_grad():
                cosines = self._tower.cosines(pixels)
        return self._answer(cosines, np.full(len(batch), moved), first=first)

    def _objective(self, logits: torch.Tensor) -> torch.Tensor:
        loss = entropies(logits).mean()
        if self.config.diversity_weight:
            loss = loss - self.config.diversity_weight * entropy_of_mean(logits)
        return loss

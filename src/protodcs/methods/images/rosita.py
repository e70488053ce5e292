"""ROSITA: a threshold that follows the stream tells known from unknown, and reliable samples train the norm layers.

The score is the largest cosine before the step. Otsu's rule splits the recent scores in two; a sample beyond the mean
of its group is reliable. A reliable known sample is pulled to its own label, by itself and by one random view; both
kinds are pulled to their like in two banks of features and pushed from the other kind. The class that is answered is
that after the step, the score and the verdict are those before it.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field
from torch import Tensor

from ...arrays import Floats
from ...core.numerics.windows import Window
from ..rosita_gate import best_split
from .answer import Answer
from .tower_method import TowerMethod, TowerSettings, to_array
from .views import random_views

# The mean of equal scores may be off by its rounding, which must not make any of them reliable.
_ROUNDING = 1e-12


class RositaConfig(TowerSettings):
    """The settings of ROSITA."""

    batch_size: int = Field(1, ge=1, le=4096, description="Images decided and learned from at once; 1 as published.")
    rate: float = Field(1e-3, ge=0, le=1, description="lr of SGD, one step per batch.")
    momentum: float = Field(0.0, ge=0, lt=1, description="Of SGD. Not known of the published code; ours is none.")
    window: int = Field(512, ge=2, le=100_000, description="How many recent scores set the threshold. Samples.")
    step: float = Field(
        0.01, ge=1e-4, le=0.5, description="Thresholds tried are 0, step, 2 step, ... below 1. In units of the cosine."
    )
    known_bank: int = Field(5, ge=1, le=1000, description="Reliable known features kept, for each class on the list.")
    unknown_bank: int = Field(64, ge=1, le=100_000, description="Reliable unknown features kept.")
    neighbours: int = Field(
        5, ge=1, le=1000, description="Nearest features of either bank; used once both hold more than this."
    )
    contrast_weight: float = Field(0.5, ge=0, le=100, description="Weight of the term of the banks.")
    contrast_temperature: float = Field(
        0.1, gt=0, le=100, description="Temperature of that term. Not known of the published code; ours."
    )
    least_area: float = Field(
        0.5,
        gt=0,
        le=1,
        description="Smallest share of an image that its view covers. Not known of the published code; ours.",
    )
    seed: int = Field(0, ge=0, lt=2**63, description="Which views are drawn.")


class Bank:
    """The most recent `size` unit features of one kind."""

    def __init__(self, size: int, like: Tensor):
        self._rows = torch.zeros((size, like.shape[1]), dtype=like.dtype, device=like.device)
        self._placed = 0

    def __len__(self) -> int:
        return min(self._placed, len(self._rows))

    def take(self, features: Tensor) -> None:
        """Keep these features (n, d), in place of the oldest if the bank is full."""
        for feature in features:
            self._rows[self._placed % len(self._rows)] = feature
            self._placed += 1

    def similarities(self, features: Tensor, count: int) -> Tensor:
        """(n, count) cosines of features (n, d) with the nearest ones kept."""
        return (features @ self._rows[: len(self)].T).topk(count, dim=1).values


class Rosita(TowerMethod):
    """Adaptation by reliable samples, with a threshold that follows the stream."""

    name: ClassVar[str] = "rosita"
    config_type = RositaConfig
    config: RositaConfig
    score_names: ClassVar[Mapping[str, str]] = {"": "max cosine"}

    def _begin(self) -> None:
        config, like = self.config, self._tower.prototypes
        self._optimizer = torch.optim.SGD(self._tower.parameters, lr=config.rate, momentum=config.momentum)
        self._window = Window(config.window)
        self._threshold = 0.0
        self._known_bank = Bank(config.known_bank * len(self.classes), like)
        self._unknown_bank = Bank(config.unknown_bank, like)

    def _adapt(self, batch: NDArray[np.uint8]) -> Answer:
        pixels = self._tower.pixels(batch)
        features = self._tower.features(pixels)
        first = features @ self._tower.prototypes.T
        score = to_array(first).max(axis=1)
        known, unknown = self._reliable(score)
        loss = self._objective(batch, features, known, unknown)
        moved = loss is not None and self._descend(loss)
        trusted = (known | (unknown & self._contrasts())) & moved
        self._known_bank.take(features.detach()[torch.from_numpy(known)])
        self._unknown_bank.take(features.detach()[torch.from_numpy(unknown)])
        cosines = first
        if moved:
            with torch.no_grad():
                cosines = self._tower.cosines(pixels)
        p_unknown = np.where(score >= self._threshold, 0.0, 1.0)
        return self._answer(cosines, trusted, first=first, score=score, p_unknown=p_unknown)

    def _reliable(self, score: Floats) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
        """Take the scores into the window; which of them are surely known, and which surely unknown."""
        for value in score:
            self._window.push(float(value))
        ordered, size = self._window.ordered, self._window.size
        self._threshold, low_mean, high_mean = best_split(ordered, size, self.config.step)
        return score > high_mean + _ROUNDING, score < low_mean - _ROUNDING

    def _contrasts(self) -> bool:
        return bool(self.config.contrast_weight) and self.config.neighbours < min(
            len(self._known_bank), len(self._unknown_bank)
        )

    def _objective(
        self, batch: NDArray[np.uint8], features: Tensor, known: NDArray[np.bool_], unknown: NDArray[np.bool_]
    ) -> Tensor | None:
        """The loss of a batch by its reliable samples; None where there is none to learn from."""
        terms: list[Tensor] = []
        if known.any():
            terms.append(self._label_loss(batch[known], features[torch.from_numpy(known)]))
        if self._contrasts() and (known | unknown).any():
            kinds = ((known, self._known_bank, self._unknown_bank), (unknown, self._unknown_bank, self._known_bank))
            rows = [self._contrast(features[torch.from_numpy(which)], own, other) for which, own, other in kinds]
            terms.append(self.config.contrast_weight * torch.cat(rows).mean())
        return torch.stack(terms).sum() if terms else None

    def _label_loss(self, batch: NDArray[np.uint8], features: Tensor) -> Tensor:
        """Cross-entropy with their own labels of images and of a view of each, by cosines as logits, summed over both.

        The published logits are not scaled, which makes for small steps.
        """
        cosines = features @ self._tower.prototypes.T
        labels = cosines.detach().argmax(dim=1)
        views = random_views(batch, 1, self._generator(), area=(self.config.least_area, 1.0))
        again = self._tower.cosines(self._tower.pixels(views[:, 0]))
        loss = torch.nn.functional.cross_entropy
        return loss(cosines, labels) + loss(again, labels)

    def _contrast(self, features: Tensor, own: Bank, other: Bank) -> Tensor:
        """(n,) InfoNCE: each near feature of the own bank against all near ones of the other."""
        count, temperature = self.config.neighbours, self.config.contrast_temperature
        like = own.similarities(features, count) / temperature
        unlike = other.similarities(features, count) / temperature
        # -log(e^a / (e^a + sum e^b)) = softplus(log sum e^b - a)
        return torch.nn.functional.softplus(torch.logsumexp(unlike, dim=1, keepdim=True) - like).mean(dim=1)

    def stats(self) -> dict[str, Any]:
        """Numbers for monitoring, JSON-ready."""
        return {
            **super().stats(),
            "threshold": self._threshold,
            "known_bank": len(self._known_bank),
            "unknown_bank": len(self._unknown_bank),
        }

"""UniEnt: a mixture over each batch tells known from unknown; entropy falls on the one and grows on the other.

The strangeness of a sample is one minus the largest cosine of the source tower, scaled to 0..1 inside its batch. Two
Gaussians are fitted to it, and the one of the lower mean is known. Where no mixture can be trusted the whole batch
counts as known. The answer is that of the forward pass before the step. `openness_first` is that of the source tower.
"""

from typing import Any, ClassVar, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field
from torch import Tensor

from ...core.numerics.gaussian_mixture import Stop, fit, posterior
from ..familiarity import Score
from .answer import Answer, Vector
from .tower import entropies, entropy_of_mean
from .tower_method import TowerMethod, TowerSettings, to_array

Weighting = Literal["split", "posterior"]

# scikit-learn's defaults, with which the method was published.
_TOLERANCE, _ITERATIONS, _FLOOR = 1e-3, 100, 1e-6
# Two Gaussians have five parameters; below this many samples the batch says nothing about them.
_FEWEST = 4
# Strangeness that differs by less inside a batch is rounding.
_SPREAD = 1e-6


class UniEntConfig(TowerSettings):
    """The settings of UniEnt."""

    rate: float = Field(1e-3, ge=0, le=1, description="lr of Adam, as published for CIFAR; one step per batch.")
    weighting: Weighting = Field(
        "split",
        description="UniEnt takes the mean entropy of each side of the mixture; UniEnt+ ('posterior') weighs every "
        "sample of the batch by its posterior of either side.",
    )
    unknown_weight: float = Field(
        0.1,
        ge=0,
        le=100,
        description="lambda_2: weight of the entropy of unknown samples, which is rewarded. Published as a grid, 0.1 "
        "to 1, without the choice; 0.1 is CLIPTTA's on CLIP.",
    )
    diversity_weight: float = Field(
        0.5,
        ge=0,
        le=100,
        description="lambda_1: weight of the entropy of the batch-mean prediction, which is rewarded. Published as a "
        "grid, 0.1 to 1, without the choice; CLIPTTA's on CLIP are 0.1 to 1.",
    )
    mixture_weight: float = Field(
        0.02,
        ge=0,
        lt=0.5,
        description="A mixture with a lighter component is not trusted. Ours: the published code has no such guard.",
    )
    score: Score = Field(
        "energy", description="The familiarity that is reported; the free energy is what the UniEnt protocol takes."
    )


class UniEnt(TowerMethod):
    """Entropy minimisation on known and maximisation on unknown samples."""

    name: ClassVar[str] = "unient"
    config_type = UniEntConfig
    config: UniEntConfig

    def _begin(self) -> None:
        self._optimizer = torch.optim.Adam(self._tower.parameters, lr=self.config.rate)
        self._failed_mixtures = 0

    def _adapt(self, batch: NDArray[np.uint8]) -> Answer:
        pixels = self._tower.pixels(batch)
        with self._tower.as_source():
            source = self._tower.cosines(pixels)
        unknown = self._posteriors(1.0 - to_array(source).max(axis=1))
        cosines = self._tower.cosines(pixels)
        loss = self._objective(cosines / self.temperature, unknown)
        moved = self._descend(loss)
        return self._answer(cosines, np.full(len(batch), moved), first=source, p_unknown=unknown)

    def _posteriors(self, openness: Vector) -> Vector:
        """(N,) the posterior of 'unknown' for each sample of a batch; zeros where no mixture can be trusted."""
        found = batch_posteriors(openness, self.config.mixture_weight)
        if found is None:
            self._failed_mixtures += 1
            return np.zeros(len(openness))
        return found

    def _objective(self, logits: Tensor, unknown: Vector) -> Tensor:
        """The loss for logits (N, K) and posteriors (N,) of 'unknown'."""
        posterior = torch.from_numpy(unknown)
        apart = separation(entropies(logits), posterior, self.config.weighting, self.config.unknown_weight)
        return apart - self.config.diversity_weight * entropy_of_mean(logits)

    def stats(self) -> dict[str, Any]:
        """Numbers for monitoring, JSON-ready; `failed_mixtures` counts batches that were all taken as known."""
        return {**super().stats(), "failed_mixtures": self._failed_mixtures}


def batch_posteriors(openness: Vector, least_weight: float) -> Vector | None:
    """P(unknown) of each sample under a mixture of two Gaussians over its batch; None where there is none to trust."""
    low, high = float(openness.min()), float(openness.max())
    if len(openness) < _FEWEST or not high - low > _SPREAD:
        return None
    scaled = (openness - low) / (high - low)
    parameters = fit(np.sort(scaled), Stop(_TOLERANCE, _ITERATIONS, _FLOOR, least_weight))
    if parameters is None:
        return None
    return np.array([posterior(parameters, value) for value in scaled.tolist()])


def separation(entropy: Tensor, unknown: Tensor, weighting: Weighting, unknown_weight: float) -> Tensor:
    """The entropy (N,) of known samples less a multiple of that of unknown ones, by posteriors (N,) of 'unknown'."""
    posterior = unknown.to(entropy)
    if weighting == "posterior":
        known_part, unknown_part = ((1.0 - posterior) * entropy).mean(), (posterior * entropy).mean()
    else:
        strange = posterior >= 0.5
        known_part, unknown_part = _mean_of(entropy, ~strange), _mean_of(entropy, strange)
    return known_part - unknown_weight * unknown_part


def _mean_of(values: Tensor, chosen: Tensor) -> Tensor:
    """The mean of the chosen values, zero where none is."""
    return (values * chosen).sum() / chosen.sum().clamp_min(1)

"""UniEnt+TPT: one prompt for the stream, tuned on batches that were split into known and unknown images.

The paper extends UniEnt to TPT and leaves the details open. Here TPT gives the prompt, the views and, for each image,
the mean probability of its confident views; UniEnt gives the split, by a mixture over 1 - maximum cosine with the
untuned prompt, and the loss: the entropy of known images falls, that of unknown ones and that of the batch mean grow.
Like UniEnt, and unlike TPT, the prompt and its optimizer go on from batch to batch, unless `episodic` is set. Where no
mixture can be trusted, the whole batch counts as known.
"""

from functools import partial
from typing import Any, ClassVar

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from ...arrays import Floats
from ...core.base import Capabilities
from ..familiarity import Score
from .answer import Answer
from .prompt import PromptMethod, PromptSettings, averaged, confident, log_probabilities
from .tower import entropy
from .tower_method import to_array
from .unient import Weighting, batch_posteriors, separation


class UniEntTPTConfig(PromptSettings):
    """The settings of UniEnt+TPT."""

    batch_size: int = Field(64, ge=1, le=4096, description="Images that are split, learned from and decided at once.")
    episodic: bool = Field(False, description="Start every batch from the words again, as TPT does with every image.")
    weighting: Weighting = Field(
        "split",
        description="UniEnt takes the mean entropy of each side of the mixture; UniEnt+ ('posterior') weighs every "
        "image of the batch by its posterior of either side.",
    )
    unknown_weight: float = Field(
        0.1, ge=0, le=100, description="lambda_2: of the entropy of unknown images, which is rewarded. As in UniEnt."
    )
    diversity_weight: float = Field(
        0.5, ge=0, le=100, description="lambda_1: of the batch mean's entropy, which is rewarded. As in UniEnt."
    )
    mixture_weight: float = Field(0.02, ge=0, lt=0.5, description="A mixture with a lighter component is not trusted.")
    threshold: float | None = Field(
        None, description="An image is known if its score is at least this. None: as the mixture says."
    )
    score: Score = Field(
        "energy", description="The familiarity that is reported; the free energy is what the UniEnt protocol takes."
    )


class UniEntTPT(PromptMethod):
    """UniEnt's loss on TPT's prompt."""

    name: ClassVar[str] = "unient_tpt"
    capabilities: ClassVar[Capabilities] = Capabilities(
        batch_invariant=False, rotation_invariant=False, editable_classes=False, cost="backbone"
    )
    config_type = UniEntTPTConfig
    config: UniEntTPTConfig

    def stats(self) -> dict[str, Any]:
        """Numbers for monitoring, JSON-ready; `failed_mixtures` counts batches that were all taken as known."""
        return {**super().stats(), "failed_mixtures": self._failed_mixtures}

    def _forget(self) -> None:
        super()._forget()
        self._failed_mixtures = 0
        self._begin()

    def _begin(self) -> None:
        self._context = self._first_context()
        self._graph = None
        self._optimizer = self._new_optimizer(self._context)

    def _adapt(self, views: Tensor) -> Answer:
        """Tune the one prompt on the batch, and answer for all of it."""
        plain, words = views[:, 0], self._words()
        unknown = self._posteriors(1.0 - to_array(plain @ words.T).max(axis=1))
        if self.config.episodic:
            self._begin()
        now = self._start()[1].detach()
        chosen = torch.stack([confident(image, now, self.temperature, self.config.keep) for image in views])
        self._consistent = False
        objective = partial(self._objective, chosen, torch.from_numpy(unknown))
        moved = self._tune(self._context, self._optimizer, objective)
        # The prompt has moved on, and the way it took is of no more use.
        self._graph = None
        answer = self._answer(views, self._cosines(plain, self._context), np.full(len(views), moved), unknown)
        self._consistent = answer.finite
        return answer

    def _posteriors(self, openness: Floats) -> Floats:
        """(N,) posterior of 'unknown'; zeros where no mixture can be trusted."""
        found = batch_posteriors(openness, self.config.mixture_weight)
        self._failed_mixtures += found is None
        return np.zeros(len(openness)) if found is None else found

    def _objective(self, views: Tensor, unknown: Tensor, features: Tensor) -> Tensor:
        """The loss of confident views (N, n, dimension) of a batch, with posteriors (N,) of 'unknown'."""
        logs = averaged(log_probabilities(views, features, self.temperature))
        apart = separation(entropy(logs), unknown, self.config.weighting, self.config.unknown_weight)
        return apart - self.config.diversity_weight * entropy(averaged(logs))

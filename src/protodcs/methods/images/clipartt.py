"""CLIPArTT: the three likeliest classes of each image make one sentence, and the batch is matched with its sentences.

Targets are a softmax over the batch of the mean of image-image and sentence-sentence similarity; the cross-entropy of
the sentence-to-image similarities with them is descended in several steps, from the source tower for every batch. The
text tower never moves, so sentences are encoded once. The answer is that of one more forward pass, over the plain
class prototypes. There is no open-set rule.
"""

from collections.abc import Sequence
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field, field_validator
from torch import Tensor

from ...data.prompts import PLACE
from ...errors import InputError, UsageError
from ..familiarity import Score
from .answer import Answer
from .tower import TowerEncoder
from .tower_method import TowerMethod, TowerSettings

# Encoded sentences that are kept; a thousand classes have a billion ordered triples.
_MOST_SENTENCES = 20_000


class CLIPArTTConfig(TowerSettings):
    """The settings of CLIPArTT."""

    batch_size: int = Field(128, ge=1, le=4096, description="Images that are decided and learned from at once.")
    rate: float = Field(
        1e-3, ge=0, le=1, description="lr of Adam. The published command line has the option too, but ignores it."
    )
    steps: int = Field(10, ge=1, le=100, description="Steps per batch, each with new sentences and targets.")
    top: int = Field(3, ge=1, le=10, description="K: classes that are joined in a sentence, likeliest first.")
    template: str = Field("a photo of a {}", description="The sentence; the classes, joined with 'or', fill its {}.")
    joined: Literal["sentence", "mean"] = Field(
        "sentence",
        description="What stands for the joined classes: their encoded sentence (published), or the unit mean of their "
        "prototypes, for encoders that know class names only.",
    )
    target_temperature: float = Field(
        0.01, gt=0, le=100, description="Temperature of the target matrix; that of the logits is `temperature`."
    )
    score: Score = Field(
        "energy", description="The familiarity that is reported; the free energy is what the UniEnt protocol takes."
    )

    @field_validator("template")
    @classmethod
    def _one_place(cls, template: str) -> str:
        if template.count(PLACE) != 1:
            raise ValueError(f"a template has exactly one {PLACE} for the joined class names")
        return template


class CLIPArTT(TowerMethod):
    """Matching a batch of images with sentences of their likeliest classes."""

    name: ClassVar[str] = "clipartt"
    config_type = CLIPArTTConfig
    config: CLIPArTTConfig

    def __init__(self, encoder: TowerEncoder, classes: Sequence[str], config: TowerSettings | None = None):
        super().__init__(encoder, classes, config)
        if self.config.joined == "sentence":
            self._check_sentences()

    def _begin(self) -> None:
        self._optimizer = torch.optim.Adam(self._tower.parameters, lr=self.config.rate)

    def _forget(self) -> None:
        # How sentences are padded depends on what is encoded beside them: a new stream encodes them again, bit for bit.
        self._sentences: dict[tuple[int, ...], NDArray[np.float32]] = {}
        super()._forget()

    def _adapt(self, batch: NDArray[np.uint8]) -> Answer:
        pixels = self._tower.pixels(batch)
        self._tower.restore()
        self._begin()
        first, moved = None, False
        for _ in range(self.config.steps):
            features = self._tower.features(pixels)
            cosines = features.detach() @ self._tower.prototypes.T
            first = cosines if first is None else first
            moved |= self._descend(self._objective(features, self._joined(cosines)))
        with torch.no_grad():
            cosines = self._tower.cosines(pixels)
        return self._answer(cosines, np.full(len(batch), moved), first=first)

    def _objective(self, features: Tensor, texts: Tensor) -> Tensor:
        """The loss for unit features (N, d) of images and of their sentences."""
        goal = target_matrix(features.detach(), texts, self.config.target_temperature)
        logs = torch.log_softmax(texts @ features.T / self.temperature, dim=1)
        return -(goal * logs).sum(dim=1).mean()

    def _joined(self, cosines: Tensor) -> Tensor:
        """(N, d) unit features that stand for the likeliest classes of each image."""
        top = cosines.topk(min(self.config.top, len(self.classes)), dim=1).indices
        if self.config.joined == "mean":
            return torch.nn.functional.normalize(self._tower.prototypes[top].mean(dim=1), dim=1)
        chosen = [tuple(row) for row in top.tolist()]
        missing = list(dict.fromkeys(key for key in chosen if key not in self._sentences))
        if len(self._sentences) + len(missing) > _MOST_SENTENCES:
            self._sentences.clear()
            missing = list(dict.fromkeys(chosen))
        if missing:
            rows = self._encoder.encode_texts([self._sentence(key) for key in missing])
            self._sentences.update(zip(missing, rows, strict=True))
        return torch.from_numpy(np.stack([self._sentences[key] for key in chosen])).to(cosines)

    def _sentence(self, classes: Sequence[int]) -> str:
        return self.config.template.replace(PLACE, " or ".join(self.classes[k] for k in classes))

    def _check_sentences(self) -> None:
        try:
            self._encoder.encode_texts([self._sentence(range(min(self.config.top, len(self.classes))))])
        except InputError as problem:
            self.close()
            raise UsageError(
                f"CLIPArTT joins class names in sentences, and {self._encoder.name} refuses them ({problem}): use "
                "joined='mean', or another encoder"
            ) from None

    def stats(self) -> dict[str, Any]:
        """Numbers for monitoring, JSON-ready; `sentences` counts those that are kept."""
        return {**super().stats(), "sentences": len(self._sentences)}


def target_matrix(images: Tensor, texts: Tensor, temperature: float) -> Tensor:
    """(N, N) rows of targets for unit features (N, d) of images and of their sentences."""
    alike = (images @ images.T + texts @ texts.T) / 2.0
    return torch.softmax(alike / temperature, dim=1)

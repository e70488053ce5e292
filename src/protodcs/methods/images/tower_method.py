"""What the methods share that train the norm layers of an image tower: settings, checks, one caller, decisions, reset.

A method implements `_begin`, which forgets the stream, and `_adapt`, which answers a batch and learns from it. No step
is made on a loss or a gradient that is not finite, and an answer that is not finite never leaves: the tower is then
set back to what it was, and answers once more.
"""

import threading
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field
from torch import Tensor

from ...arrays import Floats
from ...core.decision import Decisions
from ...core.settings import Settings
from ...errors import EncoderError, UsageError
from ...method import Capabilities, ImageMethod
from ..familiarity import PROBABLE, Score, familiarity
from .answer import Answer, to_decisions
from .batch import IN_USE, INCONSISTENT, check_images
from .tower import AdaptedTower, TowerEncoder, descend, gradients

_CLOSED = "this method is closed, and its encoder was given back: make a new one"


class TowerSettings(Settings):
    """What every one of these methods can be told."""

    batch_size: int = Field(200, ge=1, le=4096, description="Images that are decided and learned from at once.")
    temperature: float | None = Field(
        None, gt=0, le=100, description="tau, softmax temperature of the cosines. None: 1 / the encoder's logit scale."
    )
    threshold: float | None = Field(
        None,
        description="A sample is known if its score is at least this. None: the method's own rule; where it has none, "
        "every sample counts as known.",
    )


class TowerMethod(ImageMethod):
    """The base of methods that train norm layers; the encoder is theirs until `close` is called or they are gone."""

    kind: ClassVar[Literal["images", "texts"]] = "images"
    capabilities: ClassVar[Capabilities] = Capabilities(
        batch_invariant=False, rotation_invariant=False, editable_classes=False, cost="backbone"
    )
    score_names: ClassVar[Mapping[str, str]] = {"max": "max cosine", **PROBABLE}
    config_type: ClassVar[type[TowerSettings]]
    config: TowerSettings

    def __init__(self, encoder: TowerEncoder, classes: Sequence[str], config: TowerSettings | None = None):
        super().__init__(encoder, classes, config)
        self._encoder = encoder
        self._tower = AdaptedTower(encoder, self.classes, getattr(self.config, "skip_top", 0.0))
        self._busy = threading.Lock()
        self._forget()

    # What a method implements.

    @abstractmethod
    def _begin(self) -> None:
        """Forget all that was learned but the tower's parameters, which are the source's; make `self._optimizer`."""

    @abstractmethod
    def _adapt(self, batch: NDArray[np.uint8]) -> Answer:
        """Answer fitted images (N, height, width, 3) and learn from them."""

    _optimizer: torch.optim.Optimizer
    _loss: float | None

    # What a user calls.

    def observe_batch(self, images: Sequence[NDArray[np.uint8]]) -> Decisions:
        """Decide on the next RGB images (height, width, 3) of the stream and learn from them."""
        if not self._busy.acquire(blocking=False):
            raise UsageError(IN_USE)
        try:
            self._check(images)
            batch = self._encoder.preprocessing.fitted(images)
            self._consistent = False
            with self._tower.adapting():
                answer = self._adapt(batch)
            if not answer.finite:
                answer = self._recovered(batch)
            decisions = to_decisions(answer, self.classes, self._sequence)
            self._sequence += len(images)
            self._batches += 1
            self._known += int(decisions.known.sum())
            self._consistent = True
            return decisions
        finally:
            self._busy.release()

    def reset(self) -> None:
        """Give the encoder back its parameters, to the bit, and forget the stream; the encoder stays taken."""
        if self._tower.closed:
            raise UsageError(_CLOSED)
        if not self._busy.acquire(blocking=False):
            raise UsageError(IN_USE)
        try:
            self._tower.restore()
            self._forget()
        finally:
            self._busy.release()

    def close(self) -> None:
        """Give the encoder back for good; the same happens when the method is deleted."""
        self._tower.close()

    def stats(self) -> dict[str, Any]:
        """Numbers for monitoring, JSON-ready; `loss` is that of the last step."""
        return {
            "method": self.name,
            "classes": len(self.classes),
            "sequence": self._sequence,
            "batches": self._batches,
            "known": self._known,
            "unknown": self._sequence - self._known,
            "steps": self._steps,
            "skipped_steps": self._skipped_steps,
            "recoveries": self._recoveries,
            "loss": self._loss,
        }

    # What methods build on.

    def _answer(
        self,
        cosines: Tensor,
        trusted: Tensor | NDArray[np.bool_],
        *,
        first: Tensor | None = None,
        scores: Floats | None = None,
        score: Floats | None = None,
        p_unknown: Floats | None = None,
    ) -> Answer:
        """An answer by cosines (N, K); what is not given follows from them and from the settings."""
        rows = to_array(cosines)
        if score is None:
            score = self._familiarity(rows)
        if self.config.threshold is not None:
            p_unknown = np.where(score >= self.config.threshold, 0.0, 1.0)
        return Answer(
            cosines=rows,
            first=rows if first is None else to_array(first),
            scores=rows if scores is None else scores,
            score=score,
            trusted=np.asarray(trusted, dtype=np.bool_),
            p_unknown=np.zeros(len(rows)) if p_unknown is None else p_unknown,
        )

    def _familiarity(self, cosines: Floats) -> Floats:
        """(N,) the chosen score, by cosines (N, K) alone."""
        choice: Score = getattr(self.config, "score", "max")
        return np.array([familiarity(row / self.temperature, self.temperature, choice) for row in cosines])

    def _descend(self, loss: Tensor) -> bool:
        """One step down this loss; False, and nothing happens, where it or a gradient is not finite."""
        slopes = gradients(loss, self._tower.parameters)
        if slopes is None:
            self._skipped_steps += 1
            return False
        self._step(loss, slopes)
        return True

    def _step(self, loss: Tensor, slopes: Sequence[Tensor]) -> None:
        descend(self._optimizer, self._tower.parameters, slopes)
        self._loss = float(loss.detach())
        self._steps += 1

    def _generator(self) -> np.random.Generator:
        """Chance for the batch at hand: it depends on the seed and on the place in the stream alone."""
        return np.random.default_rng([getattr(self.config, "seed", 0), self._sequence])

    def _forget(self) -> None:
        self._sequence = self._batches = self._known = 0
        self._steps = self._skipped_steps = self._recoveries = 0
        self._loss = None
        self._consistent = True
        self._begin()

    def _recovered(self, batch: NDArray[np.uint8]) -> Answer:
        """Start again from the source, which answers this batch without learning."""
        self._tower.restore()
        self._begin()
        self._recoveries += 1
        with torch.no_grad():
            cosines = self._tower.cosines(self._tower.pixels(batch))
        answer = self._answer(cosines, np.zeros(len(batch), dtype=np.bool_))
        if not answer.finite:
            raise EncoderError(f"{self._encoder.name}: a feature is not finite: the weights are damaged")
        return answer

    def _check(self, images: Sequence[NDArray[np.uint8]]) -> None:
        if self._tower.closed:
            raise UsageError(_CLOSED)
        if not self._consistent:
            raise UsageError(INCONSISTENT)
        check_images(images, self.config.batch_size)


def to_array(rows: Tensor) -> Floats:
    """A tensor as float64 on the host."""
    array: Floats = rows.detach().double().cpu().numpy()
    return array

"""STAMP: entropy is lowered on a small, class-balanced memory of images whose views agree.

Each image is answered by the mean prediction of itself and of random views. It enters the memory if that prediction is
sure and names the class that the source tower names. After the answer one sharpness-aware step is made on the memory,
where sure images weigh more. The top layers are left alone. The score is minus the entropy of the mean prediction;
there is no rule for a threshold on it.
"""

import math
from collections import deque
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field
from torch import Tensor

from ...arrays import Floats
from ...core.numerics.softmax import entropy_rows
from .answer import Answer, log_scores, softmax
from .tower import climbed, entropies, gradients
from .tower_method import TowerMethod, TowerSettings, to_array
from .views import random_views

# By the number of classes up to which they hold, from the published run script: margin, rate, steps of the schedule.
_BY_CLASSES = ((10, (0.25, 0.1, 150)), (100, (0.9, 0.05, 150)), (math.inf, (0.8, 0.01, 750)))
_COUNT_MOMENTUM = 0.9


class STAMPConfig(TowerSettings):
    """The settings of STAMP."""

    batch_size: int = Field(64, ge=1, le=4096, description="Images that are decided and learned from at once.")
    rate: float | None = Field(
        None,
        ge=0,
        le=1,
        description="lr of SGD at the top of its cosine schedule. None: those of the published script, 0.1 for up to "
        "10 classes, 0.05 for up to 100, 0.01 for more.",
    )
    momentum: float = Field(0.0, ge=0, lt=1, description="Of SGD. Not known of the published code; ours is none.")
    period: int | None = Field(
        None,
        ge=1,
        le=1_000_000,
        description="Steps in which the rate falls to zero along a cosine, to rise again in as many. None: 150, and "
        "750 for more than 100 classes.",
    )
    margin: float | None = Field(
        None,
        gt=0,
        le=1,
        description="alpha: an image is admitted if the entropy of its mean prediction is below this share of ln K. "
        "None: those of the published script, 0.25 for up to 10 classes, 0.9 for up to 100, 0.8 for more.",
    )
    memory_size: int = Field(64, ge=1, le=4096, description="Images in the memory.")
    views: int = Field(15, ge=0, le=128, description="Random views of each image beside itself.")
    least_area: float = Field(
        0.5,
        gt=0,
        le=1,
        description="Smallest share of an image that a view covers. Not known of the published code; ours.",
    )
    radius: float = Field(0.05, ge=0, le=10, description="rho: how far the sharpness-aware step climbs.")
    skip_top: float = Field(
        0.25,
        ge=0,
        lt=1,
        description="Share of the norm layers, by depth and rounded up, that is not trained; see SAR.",
    )
    score: Literal["entropy", "softmax", "max"] = Field(
        "entropy",
        description="The familiarity that is reported: minus the entropy of the mean prediction, its largest "
        "probability, or the largest cosine of the image itself.",
    )
    seed: int = Field(0, ge=0, lt=2**63, description="Which views are drawn.")


class BalancedMemory:
    """Up to `size` images; where one must go, it is the oldest of the class that has held most of late.

    Attributes:
        counts: (K,) running means, over admissions, of how many images each class holds. What arrives would be the
            wrong number to count: the memory would fill up with the rarest class.
    """

    def __init__(self, classes: int, size: int):
        self.size = size
        self.counts = np.zeros(classes)
        self._queues: list[deque[NDArray[np.uint8]]] = [deque() for _ in range(classes)]

    def __len__(self) -> int:
        return sum(len(queue) for queue in self._queues)

    def take(self, images: NDArray[np.uint8], labels: NDArray[np.int64]) -> None:
        """Take in the admitted images of one batch, in order."""
        for image, label in zip(images, labels, strict=True):
            if len(self) == self.size:
                # Of equally full classes the first: nothing here is left to chance.
                self._queues[int(np.where(self._held() > 0, self.counts, -1.0).argmax())].popleft()
            self._queues[label].append(image.copy())
            self.counts = _COUNT_MOMENTUM * self.counts + (1.0 - _COUNT_MOMENTUM) * self._held()

    def _held(self) -> NDArray[np.int64]:
        return np.array([len(queue) for queue in self._queues])

    def labels(self) -> list[int]:
        """The class of each image, in the order of `images`."""
        return [k for k, queue in enumerate(self._queues) for _ in queue]

    def images(self) -> NDArray[np.uint8]:
        """(n, height, width, 3): class by class, oldest first."""
        return np.stack([image for queue in self._queues for image in queue])


class STAMP(TowerMethod):
    """Self-weighted entropy minimisation on a memory of stable samples."""

    name: ClassVar[str] = "stamp"
    config_type = STAMPConfig
    config: STAMPConfig
    score_names: ClassVar[Mapping[str, str]] = {
        "entropy": "negative entropy",
        "softmax": "softmax",
        "max": "max cosine",
    }

    def _begin(self) -> None:
        margin, rate, period = next(values for most, values in _BY_CLASSES if len(self.classes) <= most)
        config = self.config
        self._margin = margin if config.margin is None else config.margin
        self._rate = rate if config.rate is None else config.rate
        self._period = config.period or period
        self._optimizer = torch.optim.SGD(self._tower.parameters, lr=self._rate, momentum=config.momentum)
        self._memory = BalancedMemory(len(self.classes), config.memory_size)
        self._iterations = self._admitted = 0

    def _adapt(self, batch: NDArray[np.uint8]) -> Answer:
        pixels = self._tower.pixels(batch)
        with self._tower.as_source():
            source = self._tower.cosines(pixels).argmax(dim=1).cpu().numpy()
        with torch.no_grad():
            cosines = self._tower.cosines(pixels)
        mean = self._mean_prediction(batch, to_array(cosines))
        labels = mean.argmax(axis=1)
        entropy = entropy_rows(mean)
        admitted = (labels == source) & (entropy < self._margin * math.log(len(self.classes)))
        self._memory.take(batch[admitted], labels[admitted])
        self._admitted += int(admitted.sum())
        if len(self._memory) and not self._learn():
            admitted[:] = False
        score = {"entropy": -entropy, "softmax": mean.max(axis=1)}.get(self.config.score)
        return self._answer(cosines, admitted, scores=log_scores(mean, self.temperature), score=score)

    def _mean_prediction(self, batch: NDArray[np.uint8], cosines: Floats) -> Floats:
        """(N, K) mean probability over the images, whose cosines these are, and their views."""
        total = softmax(cosines, self.temperature)
        area = (self.config.least_area, 1.0)
        views = random_views(batch, self.config.views, self._generator(), area=area)
        for place in range(self.config.views):
            with torch.no_grad():
                cosines = to_array(self._tower.cosines(self._tower.pixels(views[:, place])))
            total = total + softmax(cosines, self.temperature)
        return total / (1.0 + self.config.views)

    def _learn(self) -> bool:
        """One sharpness-aware step on the memory; False if none could be made."""
        pixels, parameters = self._tower.pixels(self._memory.images()), self._tower.parameters
        slopes = gradients(self._objective(pixels), parameters)
        if slopes is not None:
            with climbed(parameters, slopes, self.config.radius):
                loss = self._objective(pixels)
                slopes = gradients(loss, parameters)
        if slopes is None:
            self._skipped_steps += 1
            return False
        for group in self._optimizer.param_groups:
            group["lr"] = self._rate * 0.5 * (1.0 + math.cos(math.pi * self._iterations / self._period))
        self._step(loss, slopes)
        self._iterations += 1
        return True

    def _objective(self, pixels: Tensor) -> Tensor:
        return self_weighted(entropies(self._tower.cosines(pixels) / self.temperature))

    def _familiarity(self, cosines: Floats) -> Floats:
        probabilities = softmax(cosines, self.temperature)
        if self.config.score == "entropy":
            return -entropy_rows(probabilities)
        best: Floats = (probabilities if self.config.score == "softmax" else cosines).max(axis=1)
        return best

    def stats(self) -> dict[str, Any]:
        """Numbers for monitoring, JSON-ready; `memory` counts images now, `admitted` all that ever entered."""
        return {**super().stats(), "memory": len(self._memory), "admitted": self._admitted}


def self_weighted(entropy: Tensor) -> Tensor:
    """The mean of entropies (n,), each weighed by exp(-entropy); the weights, mean one, are not differentiated."""
    weights = torch.softmax(-entropy.detach(), dim=0) * len(entropy)
    return (weights * entropy).mean()

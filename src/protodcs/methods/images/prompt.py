"""What the methods that tune a prompt share: views of each image, the gradient through the text tower, the answer.

The image tower is frozen, and so are the weights of the text tower: all that is ever tuned are the context vectors in
place of a prompt's first words, which the method keeps to itself.
"""

import math
import threading
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, Literal, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field
from torch import Tensor

from ...arrays import Floats, Pixels
from ...core.decision import Decisions
from ...core.settings import Settings
from ...errors import EncoderError, UsageError
from ...method import ImageMethod
from ..familiarity import PROBABLE, Score, familiarity
from .answer import Answer, to_decisions
from .batch import IN_USE, INCONSISTENT, check_images
from .tower import descend, entropy
from .tower_method import to_array
from .views import random_views


class PromptSettings(Settings):
    """The settings of every method that tunes a prompt."""

    batch_size: int = Field(1, ge=1, le=100_000, description="Images that are decided at once.")
    views: int = Field(64, ge=1, le=4096, description="Of each image: the plain one, then random resized crops.")
    keep: float = Field(
        0.1, gt=0, le=1, description="Share of the views, those of lowest entropy, that tune; at least one."
    )
    steps: int = Field(1, ge=1, le=1000, description="AdamW steps on each batch.")
    rate: float = Field(5e-3, ge=0, le=10, description="AdamW learning rate of the context vectors.")
    weight_decay: float = Field(0.01, ge=0, le=10, description="AdamW weight decay of the context vectors.")
    words: str = Field("a photo of a", min_length=1, description="The words before the class name: the first context.")
    crop_area: float = Field(0.08, gt=0, le=1, description="Lowest share of the image's area that a crop covers.")
    temperature: float | None = Field(
        None, gt=0, le=100, description="Softmax temperature. None: the inverse of the encoder's logit scale."
    )
    threshold: float | None = Field(
        None, description="An image is known if its score is at least this. None: every image counts as known."
    )
    score: Score = Field("max", description="The familiarity that is reported.")
    seed: int = Field(0, ge=0, lt=2**63, description="Of the views, together with the place in the stream.")


class Prompts(Protocol):
    """Class features as a function of context vectors."""

    @property
    def initial(self) -> Tensor:
        """(n, width): the vectors of the words themselves."""
        ...

    def features(self, context: Tensor) -> Tensor:
        """(K, dimension), differentiable; not of unit length."""
        ...


class Preprocessing(Protocol):
    """What happens to an image before the tower."""

    @property
    def shape(self) -> tuple[int, int, int]:
        """Of a fitted image: height, width, 3."""
        ...

    def fitted(self, images: Sequence[Pixels]) -> Pixels:
        """(N, height, width, 3) of images of any size."""
        ...


class Encoder(Protocol):
    """What a prompt is tuned beside."""

    @property
    def preprocessing(self) -> Preprocessing:
        """Before the image tower."""
        ...

    @property
    def text_tower(self) -> Any:
        """With `prompts(names, words)`, which gives `Prompts`."""
        ...

    @property
    def logit_scale(self) -> float:
        """Factor on cosines before a softmax."""
        ...

    @property
    def name(self) -> str:
        """What it was loaded by."""
        ...

    def encode_pixels(self, images: Sequence[Pixels]) -> NDArray[np.float32]:
        """(N, dimension) unit features."""
        ...


class PromptMethod(ImageMethod):
    """A method whose prompt is tuned on views of the images it is about to answer for."""

    kind: ClassVar[Literal["images", "texts"]] = "texts"
    score_names: ClassVar[Mapping[str, str]] = {"max": "max cosine", **PROBABLE}
    config_type: ClassVar[type[PromptSettings]]
    config: PromptSettings

    def __init__(self, encoder: Encoder, classes: Sequence[str], config: PromptSettings | None = None):
        super().__init__(encoder, classes, config)
        self._encoder = encoder
        self._prompts = prompts_of(encoder, self.classes, self.config.words)
        self._busy = threading.Lock()
        self._forget()

    @abstractmethod
    def _adapt(self, views: Tensor) -> Answer:
        """Tune on unit features (N, views, dimension), and answer for the plain view of each image, the first."""

    @property
    def sequence(self) -> int:
        """How many images were observed."""
        return self._sequence

    def observe_batch(self, images: Sequence[Pixels]) -> Decisions:
        """Tune the prompt on the next images of the stream and decide on them."""
        check_images(images, self.batch_size)
        if not self._busy.acquire(blocking=False):
            raise UsageError(IN_USE)
        try:
            if not self._consistent:
                raise UsageError(INCONSISTENT)
            # The caller may have switched gradients off, which is no business of ours.
            with torch.inference_mode(False), torch.enable_grad():
                views = torch.stack([self._views(image, self._sequence + place) for place, image in enumerate(images)])
                answer = self._adapt(views)
            if not answer.finite:
                raise EncoderError(
                    f"{self._encoder.name}: a class feature of the tuned prompt is not finite: lower the rate, or load "
                    "the encoder with dtype='float32'"
                )
            decisions = to_decisions(answer, self.classes, self._sequence)
            self._sequence += len(images)
            self._known += int(decisions.known.sum())
            return decisions
        finally:
            self._busy.release()

    def stats(self) -> dict[str, Any]:
        """Numbers for monitoring, JSON-ready; `loss` is that of the last image or batch before its first step."""
        return {
            "method": self.name,
            "classes": len(self.classes),
            "sequence": self._sequence,
            "known": self._known,
            "unknown": self._sequence - self._known,
            "steps": self._steps,
            "skipped_steps": self._skipped_steps,
            "loss": self._loss,
        }

    def reset(self) -> None:
        """Back to the words and to the start of the stream; the encoder was never changed."""
        if not self._busy.acquire(blocking=False):
            raise UsageError(IN_USE)
        try:
            self._forget()
        finally:
            self._busy.release()

    def _forget(self) -> None:
        self._sequence = self._known = self._steps = self._skipped_steps = 0
        self._loss: float | None = None
        # False while a prompt that is carried on may have been moved for a batch that was not answered.
        self._consistent = True
        self._context = self._first_context()
        self._graph: tuple[Tensor, Tensor] | None = None
        self._words_features: Tensor | None = None

    def _first_context(self) -> Tensor:
        # A tensor made in a caller's inference mode could not be tuned outside of it.
        with torch.inference_mode(False):
            return self._prompts.initial.detach().clone()

    def _tuned_alone(self, views: Tensor, objective: Callable[[Tensor, Tensor], Tensor]) -> Answer:
        """Return an answer with its own prompt for each image: context and optimizer start again.

        `objective` is the loss of confident views (n, dimension) beside unit class features (K, dimension).
        """
        rows, moved = [], []
        # One by one throughout: products of larger matrices round differently, and the cut of the stream would show.
        for image in views:
            context = self._context.clone()
            few = confident(image, self._words(), self.temperature, self.config.keep)
            moved.append(self._tune(context, self._new_optimizer(context), partial(objective, few)))
            rows.append(self._cosines(image[:1], context)[0])
        return self._answer(views, torch.stack(rows), np.array(moved))

    def _cosines(self, rows: Tensor, context: Tensor) -> Tensor:
        with torch.no_grad():
            return rows @ self._features(context).T

    def _tune(self, context: Tensor, optimizer: torch.optim.Optimizer, objective: Callable[[Tensor], Tensor]) -> bool:
        """Let the optimizer move `context`, which equals the current one, down this function of class features.

        No step is made along a gradient that is not finite. Returns whether any was made.
        """
        moved = False
        for step in range(self.config.steps):
            leaf, features = self._start() if step == 0 else self._traced(context)
            loss = objective(features)
            (slope,) = torch.autograd.grad(loss, leaf, retain_graph=step == 0)
            if step == 0:
                self._loss = float(loss.detach())
            if torch.isfinite(slope).all():
                descend(optimizer, [context], [slope])
                self._steps += 1
                moved = True
            else:
                self._skipped_steps += 1
        return moved

    def _new_optimizer(self, context: Tensor) -> torch.optim.Optimizer:
        return torch.optim.AdamW([context], lr=self.config.rate, weight_decay=self.config.weight_decay)

    def _views(self, image: Pixels, sequence: int) -> Tensor:
        """(views, dimension) unit features; those of one image depend on nothing but it and its place."""
        generator = np.random.default_rng([self.config.seed, sequence])
        preprocessing = self._encoder.preprocessing
        crops = random_views(
            np.asarray(image)[None],
            self.config.views - 1,
            generator,
            area=(self.config.crop_area, 1.0),
            size=preprocessing.shape[:2],
        )
        rows = self._encoder.encode_pixels([preprocessing.fitted([image])[0], *crops[0]])
        return torch.from_numpy(rows).to(self._context.device)

    def _features(self, context: Tensor) -> Tensor:
        """(K, dimension) unit class features."""
        return torch.nn.functional.normalize(self._prompts.features(context), dim=1)

    def _traced(self, context: Tensor) -> tuple[Tensor, Tensor]:
        """A copy of the context that asks for a gradient, and its features."""
        leaf = context.detach().clone().requires_grad_()
        return leaf, self._features(leaf)

    def _start(self) -> tuple[Tensor, Tensor]:
        # As long as the prompt starts from the same context, its way through the text tower is gone only once.
        if self._graph is None:
            self._graph = self._traced(self._context)
        return self._graph

    def _words(self) -> Tensor:
        """(K, dimension) unit class features of the words themselves, without a gradient."""
        if self._words_features is None:
            self._words_features = self._start()[1].detach()
        return self._words_features

    def _answer(
        self, views: Tensor, cosines: Tensor, moved: NDArray[np.bool_], unknown: Floats | None = None
    ) -> Answer:
        """An answer by cosines (N, K); `unknown` (N,) is the method's own p_unknown, if it has one."""
        rows = to_array(cosines)
        score = np.array([familiarity(row / self.temperature, self.temperature, self.config.score) for row in rows])
        if self.config.threshold is not None:
            unknown = np.where(score >= self.config.threshold, 0.0, 1.0)
        return Answer(
            cosines=rows,
            first=to_array(torch.stack([self._words() @ image[0] for image in views])),
            scores=rows,
            score=score,
            trusted=moved,
            p_unknown=np.zeros(len(rows)) if unknown is None else unknown,
        )


def prompts_of(encoder: Encoder, classes: Sequence[str], words: str) -> Prompts:
    """The encoder's prompts; an encoder that has none is refused."""
    make = getattr(encoder.text_tower, "prompts", None)
    if make is None:
        raise UsageError(
            f"the text tower of {encoder.name!r} cannot tune prompts: load the model itself with transformers or "
            "open_clip, not its export"
        )
    prompts: Prompts = make(classes, words)
    return prompts


def log_probabilities(views: Tensor, features: Tensor, temperature: float) -> Tensor:
    """(..., K) for unit views (..., dimension) beside unit class features."""
    return torch.log_softmax(views @ features.T / temperature, dim=-1)


def averaged(log_probabilities: Tensor) -> Tensor:
    """(..., K): the logarithm of the mean probability over the views of (..., views, K)."""
    return torch.logsumexp(log_probabilities, dim=-2) - math.log(log_probabilities.shape[-2])


def confident(views: Tensor, features: Tensor, temperature: float, keep: float) -> Tensor:
    """(n, dimension): of the views (views, dimension) of one image the share `keep` of lowest entropy, at least one.

    Of equal ones the earlier is taken.
    """
    uncertainty = entropy(log_probabilities(views, features, temperature))
    # The small number undoes what the product of a share may lose: 0.29 * 100 is below 29.
    count = max(1, int(len(views) * keep + 1e-9))
    return views[torch.argsort(uncertainty, stable=True)[:count]]

"""The two streaming contracts, what a method may promise, and the register of methods.

A `FeatureMethod` sees unit features, one at a time. An `ImageMethod` is given an encoder and sees batches of images,
cut every `batch_size` from the stream's start. Benchmarks, services and contract checks know methods only by these.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from typing import Any, ClassVar, Literal, Self

import numpy as np
from numpy.typing import NDArray

from .core.base import Capabilities, FeatureMethod
from .core.decision import Decisions
from .core.numerics.softmax import softmax_rows
from .data.prompts import class_names
from .errors import ConfigError, UnknownMethodError, did_you_mean

__all__ = ["Capabilities", "FeatureMethod", "ImageMethod", "Register"]


class ImageMethod(ABC):
    """The contract of a method that adapts the encoder itself and therefore needs images.

    Attributes:
        name: as registered.
        capabilities: what it promises.
        kind: what it adapts, the tower of "images" or that of "texts".
        config_type: of its settings, of which `batch_size` and `temperature` are always two.
        score_names: description of `Decisions.score` for each choice of the option `score`; "" without that option.
        config: the settings.
        classes: the class names, in order.
        temperature: of the softmax over cosines.
    """

    name: ClassVar[str]
    capabilities: ClassVar[Capabilities]
    kind: ClassVar[Literal["images", "texts"]]
    config_type: ClassVar[type[Any]]
    score_names: ClassVar[Mapping[str, str]]

    config: Any
    classes: tuple[str, ...]
    temperature: float

    def __init__(self, encoder: Any, classes: Sequence[str], config: Any = None):
        if config is None:
            config = self.config_type()
        if not isinstance(config, self.config_type):
            raise ConfigError(f"config must be a {self.config_type.__name__}; given: {type(config).__name__}")
        self.config = config
        self.classes = class_names(classes)
        self.temperature = config.temperature or 1.0 / encoder.logit_scale

    @classmethod
    def from_options(cls, encoder: Any, classes: Sequence[str], **options: Any) -> Self:
        """A method from loose options, as `create` passes them."""
        return cls(encoder, classes, cls.config_type(**options))

    @property
    def batch_size(self) -> int:
        """How many images the stream is cut into, from its start."""
        return int(self.config.batch_size)

    @property
    def score_name(self) -> str:
        """Return a description of `Decisions.score`."""
        return self.score_names[getattr(self.config, "score", "")]

    @abstractmethod
    def observe_batch(self, images: Sequence[NDArray[np.uint8]]) -> Decisions:
        """Decide on the next RGB images (height, width, 3) of the stream and learn from them; `scores` are given.

        All batches but the last of a segment of the stream have `batch_size` images.
        """

    def probabilities(self, scores: NDArray[np.floating]) -> NDArray[np.float64]:
        """(N, K) class probabilities for the `scores` of decisions: their softmax at the method's temperature."""
        return softmax_rows(np.asarray(scores, dtype=np.float64) / self.temperature)

    @abstractmethod
    def reset(self) -> None:
        """Give the encoder back its parameters, to the bit, and forget the stream."""

    def close(self) -> None:
        """Let go of the encoder for good."""
        self.reset()


class Register:
    """Names of methods and where they live; a method is imported when it is first asked for."""

    def __init__(self) -> None:
        self._homes: dict[str, str] = {}

    def add(self, name: str, home: str) -> None:
        """Register a method; `home` is "module:Class"."""
        if name in self._homes:
            raise ValueError(f"the method {name!r} is registered twice: {self._homes[name]} and {home}")
        self._homes[name] = home

    def __iter__(self) -> Iterator[str]:
        return iter(self._homes)

    def __getitem__(self, name: str) -> type[Any]:
        if name not in self._homes:
            raise UnknownMethodError(
                f"There is no method {name!r}.{did_you_mean(name, self._homes)} Choose one of {', '.join(self._homes)}."
            )
        module, _, attribute = self._homes[name].partition(":")
        method: type[Any] = getattr(import_module(module), attribute)
        return method

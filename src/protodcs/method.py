"""The two streaming contracts, what a method may promise, and the register of methods.

A `FeatureMethod` sees unit features, one at a time. An `ImageMethod` is given an encoder and sees batches of images,
cut every `batch_size` from the stream's start. Benchmarks, services and contract checks know methods only by these.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from importlib import import_module
from typing import Any, ClassVar

from .core.base import Capabilities, FeatureMethod
from .core.decision import Decisions
from .errors import UnknownMethodError

__all__ = ["Capabilities", "FeatureMethod", "ImageMethod", "Register"]


class ImageMethod(ABC):
    """The contract of a method that adapts the encoder itself and therefore needs images."""

    name: ClassVar[str]
    capabilities: ClassVar[Capabilities]

    batch_size: int

    @abstractmethod
    def observe_batch(self, images: Any) -> Decisions:
        """Decide on the next batch of the stream and learn from it; all but the last have `batch_size` images."""

    @abstractmethod
    def reset(self) -> None:
        """Give the encoder back its parameters, to the bit, and forget the stream."""


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
            raise UnknownMethodError(f"there is no method {name!r}: choose one of {', '.join(self._homes)}")
        module, _, attribute = self._homes[name].partition(":")
        method: type[Any] = getattr(import_module(module), attribute)
        return method

"""A method with its options, as grids of the benchmark and `compare` name it."""

import hashlib
import inspect
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from ..errors import ConfigError, ProtoDCSError, did_you_mean
from ..method import FeatureMethod, ImageMethod
from . import REGISTER, images


class MethodSpec(BaseModel):
    """A method with its options."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    method: str = Field(description="A registered name, or module:Class.")
    label: str = Field("", max_length=80, description="In tables; empty: the name of the method.")
    options: dict[str, Any] = {}
    trace: bool = Field(False, description="Keep what it does sample by sample, for figures; on the first seed.")

    @model_validator(mode="after")
    def _valid(self) -> Self:
        """Refuse an unknown method, or options it does not take."""
        try:
            self.config()
        except (ProtoDCSError, TypeError) as problem:
            raise ValueError(f"{self.title}: {problem}") from None
        return self

    @property
    def title(self) -> str:
        """What tables call it."""
        return self.label or self.method

    @property
    def implementation(self) -> type[FeatureMethod] | type[ImageMethod]:
        """Its class: a registered one, or that which `module:Class` names."""
        for register in (REGISTER, images.REGISTER):
            if self.method in register:
                return register[self.method]
        module, colon, name = self.method.partition(":")
        if not colon:
            known = [*REGISTER, *images.REGISTER]
            raise ConfigError(
                f"There is no method {self.method!r}.{did_you_mean(self.method, known)} Choose one of "
                f"{', '.join(known)}, or write module:Class."
            )
        try:
            found = getattr(import_module(module), name)
        except (ImportError, AttributeError, ValueError) as problem:
            raise ConfigError(
                f"The method {self.method!r} cannot be imported: {problem}. Set PYTHONPATH to the folder of its module."
            ) from None
        if not (isinstance(found, type) and issubclass(found, FeatureMethod | ImageMethod)):
            raise ConfigError(f"{self.method!r} is neither a FeatureMethod nor an ImageMethod")
        return found

    @property
    def source(self) -> str:
        """Hash of the file of a method of your own, whose results must not outlive a change; else empty."""
        if ":" not in self.method:
            return ""
        file = inspect.getsourcefile(self.implementation)
        return hashlib.sha256(Path(file).read_bytes()).hexdigest() if file else ""

    @property
    def sees(self) -> Literal["features", "images"]:
        """What it takes."""
        return "features" if issubclass(self.implementation, FeatureMethod) else "images"

    @property
    def uses_vocabulary(self) -> bool:
        """Whether it takes the vocabulary of a stream."""
        kind = self.implementation
        return issubclass(kind, FeatureMethod) and kind.uses_vocabulary

    def config(self, temperature: float | None = None) -> BaseModel:
        """Its settings, resolved; a temperature is that of the encoder, and taken unless the grid names another."""
        options = dict(self.options)
        kind = self.implementation.config_type
        if temperature is not None and "temperature" in kind.model_fields:
            options.setdefault("temperature", temperature)
        return kind(**options)

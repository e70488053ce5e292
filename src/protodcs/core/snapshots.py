"""Headers of snapshots: the settings of an engine, written to a state and checked when it is restored.

`state` has the file format, `state_checks` the checks of arrays and counters.
"""

from typing import TYPE_CHECKING

from pydantic import BaseModel

from ..errors import ConfigError, InputError, StateError
from ..version import __version__
from . import state
from ._native import BACKEND
from .state_checks import Counters, check_same_encoder
from .validation import class_names

if TYPE_CHECKING:
    from .base import FeatureMethod


def header_of(engine: "FeatureMethod", counters: Counters, prototypes: str | None = None) -> state.Header:
    """Return the header of an engine's state; `prototypes` is their fingerprint if the state leaves them out."""
    return state.Header(
        package=__version__,
        backend=BACKEND,
        method=engine.name,
        method_version=engine.version,
        config=engine.config.model_dump(),
        classes=list(engine.classes),
        encoder=engine.encoder,
        prototypes=prototypes,
        vocabulary=None if engine.vocabulary is None else engine.vocabulary.fingerprint,
        frozen=engine.frozen,
        counters=counters,
    )


def checked_settings(
    method: "type[FeatureMethod]", header: state.Header, encoder: str | None
) -> tuple[BaseModel, tuple[str, ...]]:
    """Return config and class names of a state. Raise StateError if it does not fit the method or the encoder."""
    if header.method != method.name:
        raise StateError(
            f"The state belongs to the method {header.method!r}, not to {method.name!r}. Use methods.restore."
        )
    method.check_version(header.method_version)
    check_same_encoder(header.encoder, encoder, "stream")
    try:
        return method.config_type(**header.config), class_names(header.classes, len(header.classes))
    except (ConfigError, InputError) as problem:
        raise StateError(f"The header of the state is invalid: {problem}") from None

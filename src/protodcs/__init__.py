"""Open-set test-time adaptation for CLIP-style classifiers, on a frozen backbone.

`StreamDCS` is the recommended method. `ProtoDCS` is the method of the paper.

>>> from protodcs import StreamDCS, StreamDCSConfig
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .version import __version__

if TYPE_CHECKING:
    from . import data, discovery, encoders, errors, methods, metrics, plot
    from .classifier import OpenSetClassifier
    from .client import AsyncClient, Client, Observed
    from .core.decision import Decision, Decisions
    from .core.protodcs.config import ProtoDCSConfig
    from .core.protodcs.engine import ProtoDCS
    from .core.protodcs.explain import ProtoDCSExplanation
    from .core.prototypes import Prototypes
    from .core.streamdcs.config import StreamDCSConfig
    from .core.streamdcs.engine import StreamDCS
    from .core.streamdcs.explain import StreamDCSExplanation
    from .core.vocabulary import Vocabulary
    from .method_comparison import MethodComparison, compare
    from .pool import StreamPool

# Where each public name lives. Nothing is imported before it is asked for, so `import protodcs` stays instant.
_HOMES = {
    "AsyncClient": ".client",
    "Client": ".client",
    "Decision": ".core.decision",
    "Decisions": ".core.decision",
    "ProtoDCSExplanation": ".core.protodcs.explain",
    "MethodComparison": ".method_comparison",
    "Observed": ".client",
    "OpenSetClassifier": ".classifier",
    "ProtoDCS": ".core.protodcs.engine",
    "ProtoDCSConfig": ".core.protodcs.config",
    "Prototypes": ".core.prototypes",
    "StreamDCS": ".core.streamdcs.engine",
    "StreamDCSConfig": ".core.streamdcs.config",
    "StreamDCSExplanation": ".core.streamdcs.explain",
    "StreamPool": ".pool",
    "Vocabulary": ".core.vocabulary",
    "compare": ".method_comparison",
}

_PACKAGES = ("data", "discovery", "encoders", "errors", "methods", "metrics", "plot")

__all__ = [
    "AsyncClient",
    "Client",
    "Decision",
    "Decisions",
    "MethodComparison",
    "Observed",
    "OpenSetClassifier",
    "ProtoDCS",
    "ProtoDCSConfig",
    "ProtoDCSExplanation",
    "Prototypes",
    "StreamDCS",
    "StreamDCSConfig",
    "StreamDCSExplanation",
    "StreamPool",
    "Vocabulary",
    "__version__",
    "compare",
    "data",
    "discovery",
    "encoders",
    "errors",
    "methods",
    "metrics",
    "plot",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name], __name__), name)
    if name in _PACKAGES:
        return import_module(f".{name}", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__

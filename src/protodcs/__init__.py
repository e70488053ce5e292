"""ProtoDCS: open-set test-time adaptation for CLIP-style classifiers, on a frozen backbone.

>>> from protodcs import ProtoDCS, Config
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .version import __version__

if TYPE_CHECKING:
    from . import data, encoders, errors, methods, metrics
    from .classifier import OpenSetClassifier
    from .client import AsyncClient, Client
    from .core.config import Config
    from .core.decision import Decision, Decisions
    from .core.engine import ProtoDCS
    from .core.explain import Explanation
    from .core.prototypes import Prototypes
    from .streams import Streams
    from .wire import Observed

# Where each public name lives. Nothing is imported before it is asked for, so `import protodcs` stays instant.
_HOMES = {
    "AsyncClient": ".client",
    "Client": ".client",
    "Config": ".core.config",
    "Decision": ".core.decision",
    "Decisions": ".core.decision",
    "Explanation": ".core.explain",
    "Observed": ".wire",
    "OpenSetClassifier": ".classifier",
    "ProtoDCS": ".core.engine",
    "Prototypes": ".core.prototypes",
    "Streams": ".streams",
}

_ROOMS = ("data", "encoders", "errors", "methods", "metrics")

__all__ = [
    "AsyncClient",
    "Client",
    "Config",
    "Decision",
    "Decisions",
    "Explanation",
    "Observed",
    "OpenSetClassifier",
    "ProtoDCS",
    "Prototypes",
    "Streams",
    "__version__",
    "data",
    "encoders",
    "errors",
    "methods",
    "metrics",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name], __name__), name)
    if name in _ROOMS:
        return import_module(f".{name}", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__

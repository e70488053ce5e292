"""Images and where they come from: sources, decoding, corruptions, class names and streams.

>>> from protodcs.data import open_source, decode
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .datasets import names, open_source
    from .image import decode
    from .source import ImageSource

# Where each public name lives. Nothing is imported before it is asked for: Pillow and pyarrow are optional.
_HOMES = {
    "ImageSource": ".source",
    "decode": ".image",
    "names": ".datasets",
    "open_source": ".datasets",
}

__all__ = ["ImageSource", "decode", "names", "open_source"]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name], __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__

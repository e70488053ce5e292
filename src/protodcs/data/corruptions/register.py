"""Which corruptions there are, and which file of this folder makes each: a new one is a new file and one line here.

The file holds a function of the corruption's own name, `Task -> pixels`. It is imported when first asked for, so a
corruption that needs a package nobody installed disturbs no other.
"""

import importlib
from collections.abc import Callable

from ...arrays import Pixels
from .task import Task

_STANDARD_FILES: dict[str, str] = {
    "gaussian_noise": "noise",
    "shot_noise": "noise",
    "impulse_noise": "noise",
    "defocus_blur": "defocus",
    "glass_blur": "glass",
    "motion_blur": "motion",
    "zoom_blur": "zoom",
    "snow": "snow",
    "frost": "frost",
    "fog": "fog",
    "brightness": "colour",
    "contrast": "colour",
    "elastic_transform": "elastic",
    "pixelate": "digital",
    "jpeg_compression": "digital",
}
_EXTRA_FILES: dict[str, str] = {
    "speckle_noise": "noise",
    "gaussian_blur": "smoothing",
    "spatter": "spatter",
    "saturate": "colour",
}
_FILES = _STANDARD_FILES | _EXTRA_FILES

STANDARD: tuple[str, ...] = tuple(_STANDARD_FILES)
EXTRA: tuple[str, ...] = tuple(_EXTRA_FILES)
NAMES: tuple[str, ...] = STANDARD + EXTRA


def find(name: str) -> Callable[[Task], Pixels]:
    """The function that makes the corruption `name`, one of `NAMES`."""
    module = importlib.import_module(f".{_FILES[name]}", __package__)
    function: Callable[[Task], Pixels] = getattr(module, name)
    return function

"""The packages that some corruptions need and a plain installation lacks, imported when first needed."""

import importlib
from typing import Any

from ...errors import UsageError


def opencv(corruption: str) -> Any:
    """The module cv2."""
    return _imported("cv2", "opencv-python-headless", corruption)


def pillow_image(corruption: str) -> Any:
    """The module PIL.Image."""
    return _imported("PIL.Image", "pillow", corruption)


def _imported(module: str, package: str, corruption: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError:
        raise UsageError(f"{corruption} needs the package {package}: pip install {package}") from None

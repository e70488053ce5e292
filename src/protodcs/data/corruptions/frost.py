"""frost: a random part of a photograph of frost, laid over the image.

The six photographs belong to the ImageNet-C generator and are not part of this package; they are read once per folder
and scale and kept in memory.
"""

import os
from functools import lru_cache
from pathlib import Path

import numpy as np

from ...arrays import Pixels
from ...errors import DataError
from . import constants
from .compiled import kernel
from .packages import opencv
from .task import Task

FILES = ("frost1.png", "frost2.png", "frost3.png", "frost4.jpg", "frost5.jpg", "frost6.jpg")
# The published generator draws a number below five for six files.
_PUBLISHED_FILES = 5


def frost(task: Task) -> Pixels:
    """The image and the overlay, weighted and added, on the scale of the levels."""
    height, width = task.images.shape[1:3]
    overlays = [
        _at_least(overlay, height + 1, width + 1)
        for overlay in _overlays(_folder(task.overlays), constants.FROST_SCALE[task.family])
    ]
    files = len(FILES) if task.variant == "fixed" else _PUBLISHED_FILES
    parts = np.empty_like(task.images)
    for part, generator in zip(parts, task.generators(), strict=True):
        overlay = overlays[generator.integers(files)]
        top = generator.integers(overlay.shape[0] - height)
        left = generator.integers(overlay.shape[1] - width)
        part[:] = overlay[top : top + height, left : left + width]
    image_share, overlay_share = task.pick(constants.FROST)
    out = np.empty_like(task.images)
    _mix(task.images.ravel(), parts.ravel(), float(image_share), float(overlay_share), task.half, out.ravel())
    return out


@kernel
def _mix(images: Pixels, overlays: Pixels, image_share: float, overlay_share: float, half: float, out: Pixels) -> None:
    for i in range(images.size):
        value = image_share * images[i] + overlay_share * overlays[i]
        out[i] = np.uint8(min(value, 255.0) + half)


def _folder(overlays: Path | None) -> Path:
    if overlays is None and not os.environ.get("PROTODCS_DATA"):
        raise DataError(f"frost needs its six overlays, and PROTODCS_DATA names no folder to look in. {_ADVICE}")
    folder = Path(overlays) if overlays is not None else Path(os.environ["PROTODCS_DATA"]) / "frost"
    missing = [name for name in FILES if not (folder / name).is_file()]
    if missing:
        raise DataError(f"frost needs its six overlays, and {', '.join(missing)} is not in {folder}. {_ADVICE}")
    return folder


_ADVICE = (
    f"Copy {', '.join(FILES)} from the folder ImageNet-C/create_c of the repository hendrycks/robustness on GitHub "
    "(Apache-2.0) into the folder frost under $PROTODCS_DATA, or name their folder with overlays="
)


@lru_cache(maxsize=8)
def _overlays(folder: Path, scale: float) -> tuple[Pixels, ...]:
    """The six overlays, RGB, scaled."""
    cv2 = opencv("frost")
    scaled = []
    for name in FILES:
        picture = cv2.imread(str(folder / name))
        if picture is None:
            raise DataError(f"the overlay {folder / name} cannot be read as an image. {_ADVICE}")
        if scale != 1.0:
            picture = cv2.resize(picture, (0, 0), fx=scale, fy=scale)
        scaled.append(np.ascontiguousarray(picture[..., ::-1]))
    return tuple(scaled)


def _at_least(overlay: Pixels, height: int, width: int) -> Pixels:
    """The overlay, continued downwards and to the right by reflection where it is too small."""
    lacking = (max(0, height - overlay.shape[0]), max(0, width - overlay.shape[1]))
    if not any(lacking):
        return overlay
    return np.pad(overlay, ((0, lacking[0]), (0, lacking[1]), (0, 0)), mode="symmetric")

"""From pixels of any size to the tensor a vision tower takes: resize, crop, scale, normalise.

One rule for every back-end, the one of transformers' own image processors, so that the same image gives the same
tensor whichever library holds the weights. It must never look at more than one image at a time.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from ..data.crop import without_ends
from ..errors import EncoderError

Resampling = Literal["nearest", "lanczos", "bilinear", "bicubic", "box", "hamming"]
# The numbers by which Pillow and transformers' configuration files call the filters.
_RESAMPLING: tuple[Resampling, ...] = ("nearest", "lanczos", "bilinear", "bicubic", "box", "hamming")


@dataclass(frozen=True, slots=True)
class Preprocessing:
    """What happens to an image before the vision tower sees it.

    Attributes:
        height: of the tensor.
        width: of the tensor.
        resize: "shortest" scales the shorter side and crops the centre, "squash" ignores the aspect ratio.
        shortest: length of the shorter side after "shortest"; the crop is taken from that.
        resampling: the filter.
        mean: subtracted from each channel, on the scale of 0 to 1.
        std: each channel is divided by it afterwards.
    """

    height: int
    width: int
    resize: Literal["shortest", "squash"]
    shortest: int
    resampling: Resampling
    mean: tuple[float, float, float]
    std: tuple[float, float, float]

    def __post_init__(self) -> None:
        if min(self.height, self.width, self.shortest) < 1 or max(self.height, self.width, self.shortest) > 4096:
            raise EncoderError(
                f"the preprocessing asks for images of {self.width} x {self.height}: 1 to 4096 is wanted"
            )
        if self.resize == "shortest" and self.shortest < max(self.height, self.width):
            raise EncoderError(
                f"the preprocessing scales the shorter side to {self.shortest} and then crops {self.width} x "
                f"{self.height}: the crop must fit inside"
            )
        if min(self.std) <= 0 or not np.all(np.isfinite([self.mean, self.std])):
            raise EncoderError(f"the preprocessing divides by {self.std}: three positive numbers are wanted")

    @classmethod
    def from_transformers(cls, settings: Mapping[str, Any]) -> "Preprocessing":
        """Read a `preprocessor_config.json` of a CLIP or SigLIP processor."""
        for step in ("do_resize", "do_rescale", "do_normalize"):
            if not settings.get(step, True):
                raise EncoderError(f"the processor's {step} is off: CLIP and SigLIP towers need it")
        factor = _number(settings, "rescale_factor", 1 / 255)
        if abs(factor - 1 / 255) > 1e-9:
            raise EncoderError(f"the processor's rescale_factor is {factor}: 1/255 is wanted")
        filters = int(_number(settings, "resample", 3))
        if not 0 <= filters < len(_RESAMPLING):
            raise EncoderError(
                f"the processor's resample is {filters}: a number from 0 to 5 is wanted, as Pillow counts"
            )
        colours = _RESAMPLING[filters], _three(settings, "image_mean"), _three(settings, "image_std")
        size = _edges(settings.get("size"), "size")
        if "shortest_edge" not in size:
            return cls(size["height"], size["width"], "squash", min(size.values()), *colours)
        if not settings.get("do_center_crop", True):
            raise EncoderError("the processor scales the shorter side but does not crop: no tower takes such images")
        crop = _edges(settings.get("crop_size", size), "crop_size")
        height, width = (crop.get(side, crop.get("shortest_edge", 0)) for side in ("height", "width"))
        return cls(height, width, "shortest", size["shortest_edge"], *colours)

    @property
    def hash(self) -> str:
        """SHA-256 of the settings."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()

    @property
    def shape(self) -> tuple[int, int, int]:
        """Of a fitted image: height, width, 3."""
        return self.height, self.width, 3

    def __call__(self, images: Sequence[NDArray[np.uint8]]) -> NDArray[np.float32]:
        """(N, 3, height, width) float32 for RGB images (height, width, 3) of any size."""
        return self.normalised(self.fitted(images))

    def fitted(self, images: Sequence[NDArray[np.uint8]]) -> NDArray[np.uint8]:
        """(N, height, width, 3): the images, resized and cropped; the part that is work for a CPU."""
        batch = np.empty((len(images), *self.shape), dtype=np.uint8)
        for row, image in zip(batch, images, strict=True):
            row[:] = self.fit(image)
        return batch

    def normalised(self, batch: NDArray[np.uint8]) -> NDArray[np.float32]:
        """(N, 3, height, width) float32 for fitted images."""
        scaled = batch * np.float32(1 / 255)
        scaled -= np.array(self.mean, dtype=np.float32)
        scaled /= np.array(self.std, dtype=np.float32)
        return np.ascontiguousarray(scaled.transpose(0, 3, 1, 2))

    def fit(self, image: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """One image (height, width, 3) of any size, resized and cropped."""
        if self.resize == "squash":
            return self._resampled(image, self.height, self.width)
        image = without_ends(image)
        height, width = image.shape[:2]
        shorter = min(height, width)
        # Integer division truncates as transformers does; a float quotient would now and then be a pixel off.
        scaled = self._resampled(image, self.shortest * height // shorter, self.shortest * width // shorter)
        top, left = (scaled.shape[0] - self.height) // 2, (scaled.shape[1] - self.width) // 2
        return scaled[top : top + self.height, left : left + self.width]

    def _resampled(self, image: NDArray[np.uint8], height: int, width: int) -> NDArray[np.uint8]:
        if image.shape[:2] == (height, width):
            return image
        return np.asarray(Image.fromarray(image).resize((width, height), Image.Resampling[self.resampling.upper()]))


def _edges(size: Any, key: str) -> dict[str, int]:
    """A size as transformers writes it: one number, a shortest edge, or height and width."""
    given = {"shortest_edge": size} if isinstance(size, int) else size
    if isinstance(given, Mapping):
        sides = {name: value for name, value in given.items() if isinstance(value, int) and value > 0}
        for names in (("height", "width"), ("shortest_edge",)):
            if set(names) <= set(sides):
                return {name: sides[name] for name in names}
    raise EncoderError(f"the processor's {key} is {size!r}: a height and width, or a shortest_edge, is wanted")


def _number(settings: Mapping[str, Any], key: str, default: float) -> float:
    value = settings.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise EncoderError(f"the processor's {key} is {value!r}: a number is wanted")
    return float(value)


def _three(settings: Mapping[str, Any], key: str) -> tuple[float, float, float]:
    value = settings.get(key)
    if (
        not isinstance(value, list | tuple)
        or len(value) != 3
        or not all(isinstance(part, int | float) for part in value)
    ):
        raise EncoderError(f"the processor's {key} is {value!r}: three numbers are wanted, one for each colour")
    red, green, blue = value
    return float(red), float(green), float(blue)

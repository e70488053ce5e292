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
        if abs(settings.get("rescale_factor", 1 / 255) - 1 / 255) > 1e-9:
            raise EncoderError(f"the processor's rescale_factor is {settings['rescale_factor']}: 1/255 is wanted")
        size = settings.get("size", {"shortest_edge": 224})
        resampling = _RESAMPLING[int(settings.get("resample", 3))]
        mean, std = (tuple(float(value) for value in settings[key]) for key in ("image_mean", "image_std"))
        if "shortest_edge" not in _edges(size):
            height, width = _edges(size)["height"], _edges(size)["width"]
            return cls(height, width, "squash", min(height, width), resampling, mean, std)  # type: ignore[arg-type]
        shortest = _edges(size)["shortest_edge"]
        crop = _edges(settings.get("crop_size", shortest), square=True)
        if not settings.get("do_center_crop", True):
            raise EncoderError("the processor scales the shorter side but does not crop: no tower takes such images")
        return cls(crop["height"], crop["width"], "shortest", shortest, resampling, mean, std)  # type: ignore[arg-type]

    @property
    def hash(self) -> str:
        """SHA-256 of the settings."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()

    def __call__(self, images: Sequence[NDArray[np.uint8]]) -> NDArray[np.float32]:
        """(N, 3, height, width) float32 for RGB images (height, width, 3) of any size."""
        return self.normalised(self.fitted(images))

    def fitted(self, images: Sequence[NDArray[np.uint8]]) -> NDArray[np.uint8]:
        """(N, height, width, 3): the images, resized and cropped; the part that is work for a CPU."""
        batch = np.empty((len(images), self.height, self.width, 3), dtype=np.uint8)
        for row, image in zip(batch, images, strict=True):
            row[:] = self._fitted(image)
        return batch

    def normalised(self, batch: NDArray[np.uint8]) -> NDArray[np.float32]:
        """(N, 3, height, width) float32 for fitted images."""
        scaled = batch * np.float32(1 / 255)
        scaled -= np.array(self.mean, dtype=np.float32)
        scaled /= np.array(self.std, dtype=np.float32)
        return np.ascontiguousarray(scaled.transpose(0, 3, 1, 2))

    def _fitted(self, image: NDArray[np.uint8]) -> NDArray[np.uint8]:
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


def _edges(size: Any, square: bool = False) -> dict[str, int]:
    if isinstance(size, int):
        return {"height": size, "width": size} if square else {"shortest_edge": size}
    if isinstance(size, Mapping) and ({"height", "width"} <= set(size) or "shortest_edge" in size):
        if square and "shortest_edge" in size:
            return {"height": int(size["shortest_edge"]), "width": int(size["shortest_edge"])}
        return {key: int(value) for key, value in size.items() if key in ("height", "width", "shortest_edge") and value}
    raise EncoderError(f"the processor's size is {size!r}: a height and width, or a shortest_edge, is wanted")

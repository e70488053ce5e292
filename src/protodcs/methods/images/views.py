"""Random views of images: crops of random area and aspect, scaled back to one size, mirrored half of the time.

The given generator is the only source of randomness: the same generator, images and count give the same views. The
images themselves are never changed.
"""

import math

import numpy as np
from numpy.typing import NDArray

from ...errors import DataError, InputError

try:
    from PIL import Image
except ImportError:
    raise DataError("random views of images need Pillow: pip install pillow") from None

# How often a box that does not fit into the image is drawn again before it is cut to the image.
_ATTEMPTS = 10


def random_views(
    images: NDArray[np.uint8],
    count: int,
    generator: np.random.Generator,
    *,
    area: tuple[float, float] = (0.08, 1.0),
    aspect: tuple[float, float] = (3 / 4, 4 / 3),
    size: tuple[int, int] | None = None,
) -> NDArray[np.uint8]:
    """(N, count, height, width, 3): `count` random resized crops of each RGB image (N, height, width, 3).

    Args:
        images: of one size.
        count: views of each image; the plain image is not among them.
        generator: of all chance.
        area: lowest and highest share of the image's area that a crop covers.
        aspect: lowest and highest width over height of a crop, drawn evenly on the scale of logarithms.
        size: height and width of the views; that of the images unless told.
    """
    if images.ndim != 4 or images.shape[3] != 3 or images.dtype != np.uint8:
        raise InputError(f"views are made of uint8 images (N, height, width, 3); given: {images.dtype} {images.shape}")
    if not (0 < area[0] <= area[1] <= 1 and 0 < aspect[0] <= aspect[1]):
        raise InputError(f"area must lie in (0, 1] and aspect above 0, lowest first; given: {area} and {aspect}")
    height, width = images.shape[1:3] if size is None else size
    views = np.empty((len(images), count, height, width, 3), dtype=np.uint8)
    for image, rows in zip(images, views, strict=True):
        boxes = _boxes(image.shape[1], image.shape[0], count, generator, area, aspect)
        mirrored = generator.random(count) < 0.5
        picture = Image.fromarray(image)
        for row, box, mirror in zip(rows, boxes.tolist(), mirrored, strict=True):
            # A large photograph is shrunk coarsely before it is scaled; the gap is wide enough for that not to show.
            resized = picture.resize((width, height), Image.Resampling.BILINEAR, box=tuple(box), reducing_gap=3.0)
            view = np.asarray(resized)
            row[:] = view[:, ::-1] if mirror else view
    return views


def _boxes(
    width: int,
    height: int,
    count: int,
    generator: np.random.Generator,
    area: tuple[float, float],
    aspect: tuple[float, float],
) -> NDArray[np.int64]:
    """(count, 4) whole pixels: left, top, right, bottom, inside an image of this size."""
    areas = generator.uniform(*area, (count, _ATTEMPTS)) * (width * height)
    aspects = np.exp(generator.uniform(math.log(aspect[0]), math.log(aspect[1]), (count, _ATTEMPTS)))
    wide, tall = np.rint(np.sqrt(areas * aspects)), np.rint(np.sqrt(areas / aspects))
    # The first attempt that fits; the first of all where none does, cut to the image below.
    taken = np.arange(count), np.argmax((wide <= width) & (tall <= height), axis=1)
    wide, tall = np.clip(wide[taken], 1, width), np.clip(tall[taken], 1, height)
    left = np.floor(generator.random(count) * (width - wide + 1))
    top = np.floor(generator.random(count) * (height - tall + 1))
    return np.stack([left, top, left + wide, top + tall], axis=1).astype(np.int64)

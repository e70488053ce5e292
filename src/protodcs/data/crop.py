"""Parts of images: the square middle as the makers of ImageNet-C cut it, and the middle of a strip."""

import numpy as np
from PIL import Image

from ..arrays import Pixels

# Sides of an image beyond this ratio add nothing that a square in its middle could show.
_LONGEST_STRIP = 64


def centre_crop(image: Pixels, side: int) -> Pixels:
    """Scale the shorter side to 8/7 of `side` (256 for 224), bilinear, and cut the middle square; (side, side, 3)."""
    image = without_ends(image)
    height, width = image.shape[:2]
    if (height, width) == (side, side):
        return image
    shorter = round(side * 8 / 7)
    tall, wide = (shorter * length // min(height, width) for length in (height, width))
    scaled = np.asarray(Image.fromarray(image).resize((wide, tall), Image.Resampling.BILINEAR))
    top, left = round((tall - side) / 2), round((wide - side) / 2)
    return np.ascontiguousarray(scaled[top : top + side, left : left + side])


def without_ends(image: Pixels) -> Pixels:
    """The middle of a very long strip, any other image as it is: ends that are cut off later must not be scaled up."""
    longest = _LONGEST_STRIP * min(image.shape[:2])
    top, left = (max(0, side - longest) // 2 for side in image.shape[:2])
    return image[top : top + longest, left : left + longest]

"""Shifts: what happens to images while the objects stay the same."""

import numpy as np
from PIL import Image, ImageFilter

from ..arrays import Floats, Pixels
from ..errors import InputError

SHIFTS = ("clean", "fog", "noise", "blur", "darkness", "camera")


def shifted(image: Pixels, shift: str, rng: np.random.Generator) -> Pixels:
    """Return the image under one of `SHIFTS`.

    Args:
        image: RGB pixels (height, width, 3).
        shift: "clean" changes nothing; "camera" is a new camera with another colour balance, contrast and sharpness.
        rng: source of the fog's density and of the noise.
    """
    pixels = image.astype(np.float64)
    match shift:
        case "clean":
            return image
        case "fog":
            pixels = _fog(pixels, rng)
        case "noise":
            pixels += rng.normal(scale=20, size=pixels.shape)
        case "blur":
            return np.asarray(Image.fromarray(image).filter(ImageFilter.GaussianBlur(1.8)))
        case "darkness":
            pixels = pixels * 0.42 + rng.normal(scale=5, size=pixels.shape)
        case "camera":
            pixels = _camera(pixels)
        case _:
            raise InputError(f"there is no shift {shift!r}: choose one of {', '.join(SHIFTS)}")
    return np.clip(pixels, 0, 255).astype(np.uint8)


def _fog(pixels: Floats, rng: np.random.Generator) -> Floats:
    """Cover the image with drifting light grey."""
    coarse = Image.fromarray(rng.integers(0, 256, size=(5, 5), dtype=np.uint8))
    height, width = pixels.shape[:2]
    drift = np.asarray(coarse.resize((width, height), Image.Resampling.BICUBIC))[..., None] / 255
    density = 0.25 + 0.25 * drift
    return pixels * (1 - density) + 225 * density


def _camera(pixels: Floats) -> Floats:
    """Change the colour balance and contrast, sharpen, and darken the corners."""
    height, width = pixels.shape[:2]
    smooth = np.asarray(Image.fromarray(pixels.astype(np.uint8)).filter(ImageFilter.BoxBlur(2)))
    sharp = pixels + 1.2 * (pixels - smooth)
    mixed = sharp @ np.array([[0.55, 0.15, 0.3], [0.35, 0.6, 0.05], [0.1, 0.25, 0.65]])
    bent = 255 * np.clip(mixed / 255, 0, 1) ** 1.7
    rows, columns = np.linspace(-1, 1, height)[:, None], np.linspace(-1, 1, width)[None, :]
    return bent * (1 - 0.3 * (rows**2 + columns**2))[..., None] + np.array([25, 10, -5])

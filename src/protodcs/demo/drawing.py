"""Draw one image: an object in a random pose, with random colours and texture, before a random background.

The image depends on the kind and the random generator alone.
"""

import colorsys

import numpy as np
from PIL import Image, ImageDraw

from ..arrays import Pixels, Singles
from ..errors import InputError
from .kinds import OUTLINES

SIDE = 96
# Red, green and blue of each colour.
Palette = list[tuple[int, int, int]]
# The outlines are drawn larger and then reduced, which smooths their edges.
_OVERSAMPLING = 3
# Hue in turns of the colour circle.
COLOURS = {"red": 0.0, "orange": 0.08, "yellow": 0.15, "green": 0.33, "blue": 0.6, "purple": 0.77, "pink": 0.9}


def draw(kind: str, rng: np.random.Generator, colour: str | None = None, difficulty: float = 0.5) -> Pixels:
    """Return an RGB image of 96 x 96 pixels that shows one object.

    Args:
        kind: a name of `KNOWN`, `UNKNOWN` or `EXTRA`.
        rng: source of pose, texture and background.
        colour: main colour of the object, a key of `COLOURS` (default: random).
        difficulty: 0 to 1. A larger number makes objects smaller and hides more of them.

    >>> draw("star", np.random.default_rng(0)).shape
    (96, 96, 3)
    """
    if kind not in OUTLINES:
        raise InputError(f"the demo cannot draw {kind!r}: choose one of {', '.join(OUTLINES)}")
    colour = colour or str(rng.choice(list(COLOURS)))
    if colour not in COLOURS:
        raise InputError(f"the demo has no colour {colour!r}: choose one of {', '.join(COLOURS)}")
    palette = new_palette(COLOURS[colour], rng)
    ground = _background(rng)
    painted, opacity = cutout(kind, palette, difficulty, rng, rng)
    mixed = np.asarray(ground * (1 - opacity) + painted * opacity, dtype=np.float32)
    pixels = _occluded(mixed, difficulty, rng) * np.float32(rng.uniform(0.8, 1.1))
    pixels += rng.normal(scale=4, size=pixels.shape)
    return np.clip(pixels, 0, 255).astype(np.uint8)


def cutout(
    kind: str, palette: Palette, difficulty: float, pose: np.random.Generator, paint: np.random.Generator
) -> tuple[Singles, Singles]:
    """Return an object with its texture (96, 96, 3), and its opacity (96, 96, 1) from 0 to 1."""
    layer: Singles = np.asarray(_layer(kind, palette, difficulty, pose), dtype=np.float32)
    painted: Singles = layer[..., :3] * (1 + 0.35 * _texture(paint)[..., None])
    return painted, np.divide(layer[..., 3:], 255, dtype=np.float32)


def new_palette(hue: float, rng: np.random.Generator) -> Palette:
    """Return the main, second, dark and light colour."""
    other = hue + rng.uniform(0.2, 0.8)
    return [
        _rgb(hue + rng.normal(scale=0.015), rng.uniform(0.6, 1), rng.uniform(0.65, 1)),
        _rgb(other, rng.uniform(0.4, 1), rng.uniform(0.5, 1)),
        _rgb(other, 0.4, rng.uniform(0.1, 0.3)),
        _rgb(other, rng.uniform(0, 0.25), rng.uniform(0.85, 1)),
    ]


def _rgb(hue: float, saturation: float, value: float) -> tuple[int, int, int]:
    red, green, blue = (round(255 * part) for part in colorsys.hsv_to_rgb(hue % 1, saturation, value))
    return red, green, blue


def _layer(kind: str, palette: Palette, difficulty: float, rng: np.random.Generator) -> Image.Image:
    """Return the object on a transparent ground."""
    side = SIDE * _OVERSAMPLING
    angle, shear = rng.normal(scale=0.45), rng.normal(scale=0.18)
    wide, high = rng.uniform(0.4 - 0.06 * difficulty, 0.82) * np.exp(rng.normal(scale=0.12, size=2))
    wide *= rng.choice((-1, 1))
    turn = np.array([[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]])
    pose = turn @ np.array([[1, shear], [0, 1]]) @ np.diag([wide, high])
    place = rng.uniform(-0.28, 0.28, size=2)
    waves, phases = rng.normal(scale=0.05, size=2), rng.uniform(0, 2 * np.pi, size=2)
    image = Image.new("RGBA", (side, side))
    pen = ImageDraw.Draw(image)
    for colour, points in OUTLINES[kind]:
        bent = points + waves * np.sin(3 * points[:, ::-1] + phases)
        pixels = ((bent @ pose.T + place) * 0.5 + 0.5) * side
        pen.polygon(pixels.ravel().tolist(), fill=(*palette[colour], 255))
    return image.reduce(_OVERSAMPLING)


def _grid() -> tuple[Singles, Singles]:
    steps = np.linspace(-1, 1, SIDE, dtype=np.float32)
    return steps[:, None], steps[None, :]


def _texture(rng: np.random.Generator) -> Singles:
    """Return a pattern between -1 and 1: plain, stripes, checks, spots or grain."""
    rows, columns = _grid()
    angle, pitch = rng.uniform(0, np.pi), rng.uniform(8, 25)
    across = np.cos(angle) * rows + np.sin(angle) * columns
    along = np.sin(angle) * rows - np.cos(angle) * columns
    match rng.integers(5):
        case 0:
            pattern = 0.5 * across
        case 1:
            pattern = np.sign(np.sin(pitch * across))
        case 2:
            pattern = np.sign(np.sin(pitch * across) * np.sin(pitch * along))
        case 3:
            pattern = np.where(np.sin(pitch * across) * np.sin(pitch * along) > 0.4, 1.0, 0.0)
        case _:
            pattern = rng.normal(scale=0.4, size=(SIDE, SIDE))
    return np.asarray(pattern * rng.uniform(0.2, 1), dtype=np.float32)


def _background(rng: np.random.Generator) -> Singles:
    """Return a textured ground with blurred spots of another colour."""
    rows, columns = _grid()
    ground, spots = (np.array(_rgb(rng.random(), rng.uniform(0, 0.7), rng.uniform(0.2, 1))) for _ in range(2))
    cover = np.zeros((SIDE, SIDE), dtype=np.float32)
    for _ in range(rng.integers(1, 6)):
        (y, x), size = rng.uniform(-1, 1, size=2), rng.uniform(0.15, 0.6)
        cover += np.exp(-((rows - y) ** 2 + (columns - x) ** 2) / size**2)
    share = np.clip(cover, 0, 1)[..., None]
    pixels = ground * (1 - share) + spots * share
    return np.asarray(pixels * (1 + 0.25 * _texture(rng)[..., None]), dtype=np.float32)


def _occluded(pixels: Singles, difficulty: float, rng: np.random.Generator) -> Singles:
    """Hide a strip of some images."""
    if rng.random() < 0.2 * difficulty:
        colour = np.array(_rgb(rng.random(), rng.uniform(0, 0.8), rng.uniform(0.2, 1)), dtype=np.float32)
        start, width = rng.integers(10, SIDE - 30), rng.integers(8, 12 + round(20 * difficulty))
        if rng.random() < 0.5:
            pixels[start : start + width] = colour
        else:
            pixels[:, start : start + width] = colour
    return pixels

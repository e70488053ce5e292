"""Outlines of the objects that the demo draws: coloured polygons in the square from -1 to 1, y pointing down.

The twenty kinds of `KNOWN` are the classes of the demo. The encoder was trained on these and on those of `EXTRA`. It
has never seen those of `UNKNOWN`.
"""

import numpy as np
from numpy.typing import NDArray

Points = NDArray[np.float64]
# A polygon and the place of its colour: 0 main colour, 1 second colour, 2 dark, 3 light.
Part = tuple[int, Points]
MAIN, SECOND, DARK, LIGHT = range(4)


def _polygon(colour: int, *numbers: float) -> Part:
    """Return a polygon; the numbers are x, y, x, y, ..."""
    return colour, np.reshape(np.array(numbers, dtype=np.float64), (-1, 2))


def _oval(colour: int, x: float, y: float, width: float, height: float, start: int = 0, end: int = 360) -> Part:
    """Return an ellipse, or the part of it between two angles in degrees; 0 points right, 90 down."""
    angles = np.radians(np.linspace(start, end, 36))
    return colour, np.stack([x + width * np.cos(angles), y + height * np.sin(angles)], axis=1)


def _box(colour: int, left: float, top: float, right: float, bottom: float) -> Part:
    return _polygon(colour, left, top, right, top, right, bottom, left, bottom)


def _bar(colour: int, x: float, y: float, to_x: float, to_y: float, width: float = 0.14) -> Part:
    """Return a thick line."""
    along = np.array([to_x - x, to_y - y])
    across = np.array([-along[1], along[0]]) * width / 2 / np.hypot(*along)
    start, end = np.array([x, y]), np.array([to_x, to_y])
    return colour, np.stack([start + across, end + across, end - across, start - across])


def _ring(colour: int, x: float, y: float, radius: float, width: float, start: int = 0, end: int = 360) -> Part:
    """Return a part of a ring between two angles."""
    outside = _oval(colour, x, y, radius, radius, start, end)[1]
    inside = _oval(colour, x, y, radius - width, radius - width, start, end)[1]
    return colour, np.concatenate([outside, inside[::-1]])


def _star(colour: int, points: int, outside: float, inside: float, x: float = 0, y: float = 0) -> Part:
    angles = np.arange(2 * points) * np.pi / points - np.pi / 2
    lengths = np.where(np.arange(2 * points) % 2, inside, outside)
    return colour, np.stack([x + lengths * np.cos(angles), y + lengths * np.sin(angles)], axis=1)


def _mirrored(*parts: Part) -> tuple[Part, ...]:
    """Return the parts and their mirror images, left and right."""
    return *parts, *((colour, points * (-1, 1)) for colour, points in parts)


_KNOWN: dict[str, tuple[Part, ...]] = {
    "apple": (
        _bar(DARK, 0, -0.5, 0.12, -0.95, 0.12),
        _oval(SECOND, 0.36, -0.72, 0.28, 0.14),
        *_mirrored(_oval(MAIN, 0.3, 0.12, 0.56, 0.72)),
        _oval(LIGHT, -0.4, -0.15, 0.12, 0.2),
    ),
    "balloon": (
        _bar(DARK, 0, 0.4, 0.1, 1.0, 0.06),
        _polygon(SECOND, 0, 0.35, -0.15, 0.55, 0.15, 0.55),
        _oval(MAIN, 0, -0.3, 0.58, 0.7),
        _oval(LIGHT, -0.22, -0.55, 0.11, 0.18),
    ),
    "boat": (
        _bar(DARK, 0, -0.95, 0, 0.4, 0.1),
        _polygon(SECOND, 0.08, -0.9, 0.75, 0.25, 0.08, 0.25),
        _polygon(LIGHT, -0.08, -0.6, -0.6, 0.25, -0.08, 0.25),
        _polygon(MAIN, -0.95, 0.38, 0.95, 0.38, 0.6, 0.85, -0.6, 0.85),
    ),
    "butterfly": (
        *_mirrored(
            _oval(MAIN, -0.48, -0.35, 0.48, 0.5),
            _oval(SECOND, -0.4, 0.42, 0.36, 0.4),
            _oval(LIGHT, -0.5, -0.35, 0.18, 0.2),
            _bar(DARK, 0, -0.5, -0.25, -0.95, 0.07),
        ),
        _oval(DARK, 0, 0, 0.12, 0.68),
    ),
    "car": (
        _polygon(MAIN, -0.55, -0.02, -0.35, -0.5, 0.35, -0.5, 0.6, -0.02),
        _polygon(LIGHT, -0.38, -0.05, -0.25, -0.38, -0.04, -0.38, -0.04, -0.05),
        _polygon(LIGHT, 0.06, -0.05, 0.06, -0.38, 0.28, -0.38, 0.42, -0.05),
        _box(MAIN, -0.97, -0.05, 0.97, 0.4),
        *_mirrored(_oval(DARK, -0.52, 0.42, 0.25, 0.25), _oval(SECOND, -0.52, 0.42, 0.1, 0.1)),
    ),
    "cat": (
        *_mirrored(_polygon(MAIN, -0.75, -0.1, -0.7, -0.95, -0.1, -0.5)),
        _oval(MAIN, 0, 0.1, 0.78, 0.7),
        *_mirrored(
            _oval(SECOND, -0.32, -0.02, 0.16, 0.16),
            _oval(DARK, -0.32, -0.02, 0.07, 0.14),
            _bar(DARK, -0.2, 0.38, -0.95, 0.28, 0.05),
            _bar(DARK, -0.2, 0.45, -0.92, 0.55, 0.05),
        ),
        _polygon(DARK, -0.1, 0.25, 0.1, 0.25, 0, 0.38),
    ),
    "cloud": (
        _oval(MAIN, -0.5, 0.2, 0.45, 0.38),
        _oval(MAIN, 0.5, 0.22, 0.45, 0.36),
        _oval(MAIN, -0.1, -0.15, 0.48, 0.46),
        _oval(MAIN, 0.3, 0, 0.38, 0.36),
        _box(MAIN, -0.5, 0.15, 0.5, 0.58),
    ),
    "cup": (
        _ring(MAIN, 0.55, 0.05, 0.4, 0.16, -90, 90),
        _polygon(MAIN, -0.7, -0.55, 0.6, -0.55, 0.48, 0.75, -0.58, 0.75),
        _oval(SECOND, -0.05, -0.55, 0.65, 0.17),
        _oval(DARK, -0.05, -0.52, 0.52, 0.11),
    ),
    "fish": (
        _polygon(SECOND, 0.4, 0, 0.98, -0.5, 0.85, 0, 0.98, 0.5),
        _polygon(SECOND, -0.15, -0.3, 0.25, -0.75, 0.35, -0.2),
        _oval(MAIN, -0.2, 0, 0.75, 0.45),
        _oval(LIGHT, -0.58, -0.1, 0.13, 0.13),
        _oval(DARK, -0.6, -0.1, 0.06, 0.06),
    ),
    "flower": (
        _bar(DARK, 0, 0.1, 0, 1.0, 0.1),
        *(_oval(MAIN, 0.36 * np.cos(a), -0.35 + 0.36 * np.sin(a), 0.26, 0.26) for a in np.arange(6) * np.pi / 3),
        _oval(SECOND, 0, -0.35, 0.24, 0.24),
        _oval(DARK, 0.25, 0.65, 0.26, 0.11),
    ),
    "heart": (
        *_mirrored(_oval(MAIN, -0.42, -0.3, 0.47, 0.45)),
        _polygon(MAIN, -0.85, -0.12, -0.4, -0.3, 0.4, -0.3, 0.85, -0.12, 0, 0.9),
        _oval(LIGHT, -0.48, -0.38, 0.13, 0.1),
    ),
    "house": (
        _box(SECOND, 0.35, -0.8, 0.55, -0.2),
        _box(MAIN, -0.65, -0.15, 0.65, 0.85),
        _polygon(SECOND, -0.92, -0.1, 0, -0.9, 0.92, -0.1),
        _box(DARK, -0.15, 0.3, 0.18, 0.85),
        *_mirrored(_box(LIGHT, -0.5, 0.05, -0.25, 0.3)),
    ),
    "key": (
        _ring(MAIN, -0.5, 0, 0.45, 0.2),
        _bar(MAIN, -0.1, 0, 0.95, 0, 0.18),
        _box(SECOND, 0.5, 0, 0.62, 0.35),
        _box(SECOND, 0.8, 0, 0.92, 0.42),
    ),
    "leaf": (
        _polygon(MAIN, 0, -0.95, 0.45, -0.45, 0.55, 0.05, 0.35, 0.5, 0, 0.72, -0.35, 0.5, -0.55, 0.05, -0.45, -0.45),
        _bar(SECOND, 0, -0.8, 0, 1.0, 0.08),
        *_mirrored(_bar(SECOND, 0, 0.35, -0.38, 0, 0.06), _bar(SECOND, 0, -0.1, -0.36, -0.4, 0.06)),
    ),
    "moon": (
        (
            MAIN,
            np.concatenate([_oval(0, 0, 0, 0.85, 0.85, 60, 300)[1], _oval(0, 0.42, 0, 0.75, 0.75, 270, 90)[1] * 0.98]),
        ),
    ),
    "mushroom": (
        _polygon(LIGHT, -0.25, 0, 0.25, 0, 0.34, 0.85, -0.34, 0.85),
        _oval(MAIN, 0, 0.08, 0.9, 0.85, 180, 360),
        _oval(SECOND, -0.42, -0.2, 0.16, 0.14),
        _oval(SECOND, 0.1, -0.5, 0.16, 0.14),
        _oval(SECOND, 0.5, -0.12, 0.13, 0.12),
    ),
    "rocket": (
        *_mirrored(_polygon(SECOND, -0.25, 0.1, -0.65, 0.65, -0.25, 0.6)),
        _polygon(SECOND, -0.2, 0.6, 0.2, 0.6, 0, 1.0),
        _polygon(MAIN, 0, -1.0, 0.22, -0.6, 0.32, -0.1, 0.25, 0.65, -0.25, 0.65, -0.32, -0.1, -0.22, -0.6),
        _oval(LIGHT, 0, -0.25, 0.16, 0.16),
        _oval(DARK, 0, -0.25, 0.09, 0.09),
    ),
    "star": (_star(MAIN, 5, 0.98, 0.42),),
    "tree": (
        _box(DARK, -0.14, 0.5, 0.14, 0.98),
        _polygon(MAIN, -0.72, 0.6, 0.72, 0.6, 0, -0.15),
        _polygon(MAIN, -0.58, 0.15, 0.58, 0.15, 0, -0.55),
        _polygon(SECOND, -0.42, -0.28, 0.42, -0.28, 0, -0.98),
    ),
    "umbrella": (
        _bar(DARK, 0, -0.85, 0, 0.7, 0.1),
        _ring(DARK, -0.17, 0.7, 0.22, 0.1, 0, 180),
        _oval(MAIN, 0, 0.05, 0.95, 0.8, 180, 360),
        _oval(SECOND, 0, 0.05, 0.35, 0.78, 180, 360),
    ),
}

_UNKNOWN: dict[str, tuple[Part, ...]] = {
    "anchor": (
        _ring(SECOND, 0, -0.72, 0.24, 0.11),
        _bar(MAIN, 0, -0.5, 0, 0.85, 0.16),
        _bar(MAIN, -0.4, -0.28, 0.4, -0.28, 0.14),
        _ring(MAIN, 0, 0.15, 0.75, 0.16, 10, 170),
        *_mirrored(_polygon(MAIN, -0.95, 0.35, -0.72, 0.02, -0.48, 0.38)),
    ),
    "bell": (
        _oval(DARK, 0, 0.68, 0.17, 0.17),
        _polygon(MAIN, -0.42, -0.3, 0.42, -0.3, 0.55, 0.3, 0.85, 0.6, -0.85, 0.6, -0.55, 0.3),
        _oval(MAIN, 0, -0.3, 0.42, 0.45, 180, 360),
        _ring(SECOND, 0, -0.8, 0.17, 0.09),
        _box(SECOND, -0.6, 0.25, 0.6, 0.38),
    ),
    "clock": (
        _oval(MAIN, 0, 0, 0.9, 0.9),
        _oval(LIGHT, 0, 0, 0.7, 0.7),
        _bar(DARK, 0, 0, 0, -0.55, 0.1),
        _bar(DARK, 0, 0, 0.4, 0.18, 0.12),
        *(_oval(SECOND, 0.6 * np.cos(a), 0.6 * np.sin(a), 0.06, 0.06) for a in np.arange(8) * np.pi / 4),
    ),
    "ghost": (
        _oval(MAIN, 0, -0.2, 0.65, 0.72, 180, 360),
        _polygon(
            MAIN,
            -0.65,
            -0.22,
            0.65,
            -0.22,
            0.65,
            0.9,
            0.42,
            0.62,
            0.2,
            0.9,
            0,
            0.62,
            -0.2,
            0.9,
            -0.42,
            0.62,
            -0.65,
            0.9,
        ),
        *_mirrored(_oval(DARK, -0.25, -0.2, 0.12, 0.18)),
        _oval(DARK, 0, 0.22, 0.12, 0.12),
    ),
    "guitar": (
        _bar(SECOND, 0, -0.95, 0, 0.2, 0.16),
        _box(DARK, -0.16, -1.0, 0.16, -0.75),
        _oval(MAIN, 0, 0.15, 0.4, 0.33),
        _oval(MAIN, 0, 0.58, 0.55, 0.42),
        _oval(DARK, 0, 0.3, 0.16, 0.16),
        _bar(DARK, -0.22, 0.72, 0.22, 0.72, 0.09),
    ),
    "hammer": (
        _bar(SECOND, 0, -0.4, 0, 1.0, 0.2),
        _box(MAIN, -0.6, -0.85, 0.45, -0.4),
        _box(DARK, 0.45, -0.78, 0.7, -0.47),
    ),
    "ladder": (
        *_mirrored(_bar(MAIN, -0.4, -1.0, -0.4, 1.0, 0.14)),
        *(_bar(SECOND, -0.4, y, 0.4, y, 0.12) for y in (-0.75, -0.4, -0.05, 0.3, 0.65)),
    ),
    "robot": (
        _bar(DARK, 0, -0.95, 0, -0.6, 0.07),
        _oval(SECOND, 0, -0.92, 0.1, 0.1),
        _box(MAIN, -0.48, -0.7, 0.48, -0.05),
        *_mirrored(_oval(LIGHT, -0.22, -0.42, 0.13, 0.13), _bar(SECOND, -0.5, 0.15, -0.9, 0.45, 0.16)),
        _box(DARK, -0.25, -0.22, 0.25, -0.14),
        _box(SECOND, -0.55, 0.03, 0.55, 0.65),
        *_mirrored(_box(MAIN, -0.4, 0.65, -0.15, 0.98)),
    ),
    "snowman": (
        _oval(MAIN, 0, 0.5, 0.55, 0.48),
        _oval(MAIN, 0, -0.15, 0.4, 0.36),
        _oval(MAIN, 0, -0.6, 0.27, 0.26),
        _box(DARK, -0.32, -0.84, 0.32, -0.76),
        _box(DARK, -0.2, -1.0, 0.2, -0.8),
        _polygon(SECOND, 0, -0.6, 0.35, -0.53, 0, -0.5),
        *(_oval(DARK, 0, y, 0.05, 0.05) for y in (-0.2, 0, 0.35, 0.55)),
    ),
    "spider": (
        *_mirrored(
            *(
                part
                for up in (-0.75, -0.3, 0.25, 0.8)
                for part in (_bar(DARK, 0, 0.1, -0.5, up, 0.07), _bar(DARK, -0.5, up, -0.92, up + 0.3, 0.07))
            )
        ),
        _oval(MAIN, 0, 0.3, 0.38, 0.42),
        _oval(SECOND, 0, -0.25, 0.24, 0.24),
    ),
}

_EXTRA: dict[str, tuple[Part, ...]] = {
    "arrow": (_polygon(MAIN, -0.95, -0.2, 0.2, -0.2, 0.2, -0.6, 0.95, 0, 0.2, 0.6, 0.2, 0.2, -0.95, 0.2),),
    "banana": (
        (MAIN, np.concatenate([_oval(0, 0, -0.4, 0.95, 1.0, 5, 160)[1], _oval(0, 0.05, -0.5, 0.8, 0.6, 160, 5)[1]])),
        _oval(DARK, 0.92, -0.35, 0.09, 0.12),
    ),
    "book": (
        _polygon(LIGHT, -0.75, -0.75, 0.7, -0.75, 0.7, 0.85, -0.75, 0.85),
        _box(MAIN, -0.8, -0.85, 0.62, 0.75),
        _box(SECOND, -0.8, -0.85, -0.58, 0.75),
        _box(DARK, -0.35, -0.5, 0.4, -0.35),
        _box(DARK, -0.35, -0.2, 0.2, -0.08),
    ),
    "candle": (
        _box(MAIN, -0.28, -0.25, 0.28, 0.85),
        _bar(DARK, 0, -0.25, 0, -0.5, 0.06),
        _polygon(SECOND, 0, -1.0, 0.17, -0.6, 0, -0.4, -0.17, -0.6),
        _oval(DARK, 0, 0.85, 0.6, 0.12),
    ),
    "crown": (
        _polygon(MAIN, -0.8, 0.6, -0.95, -0.45, -0.45, 0, 0, -0.75, 0.45, 0, 0.95, -0.45, 0.8, 0.6),
        _box(SECOND, -0.8, 0.4, 0.8, 0.62),
        *_mirrored(_oval(LIGHT, -0.95, -0.48, 0.12, 0.12)),
        _oval(LIGHT, 0, -0.78, 0.12, 0.12),
    ),
    "diamond": (
        _polygon(MAIN, -0.5, -0.6, 0.5, -0.6, 0.95, -0.1, 0, 0.9, -0.95, -0.1),
        _polygon(LIGHT, -0.28, -0.1, 0.28, -0.1, 0, 0.85),
        _polygon(SECOND, -0.28, -0.1, 0, -0.58, 0.28, -0.1),
    ),
    "envelope": (
        _box(MAIN, -0.92, -0.6, 0.92, 0.6),
        _polygon(SECOND, -0.92, -0.6, 0.92, -0.6, 0, 0.15),
        _bar(DARK, -0.92, -0.6, 0, 0.15, 0.06),
        _bar(DARK, 0.92, -0.6, 0, 0.15, 0.06),
    ),
    "flag": (
        _bar(DARK, -0.65, -1.0, -0.65, 1.0, 0.12),
        _polygon(MAIN, -0.6, -0.9, 0.9, -0.75, 0.6, -0.35, 0.9, 0.1, -0.6, 0.1),
        _oval(SECOND, -0.05, -0.4, 0.24, 0.24),
    ),
    "glasses": (
        *_mirrored(
            _ring(MAIN, -0.5, 0, 0.42, 0.12), _oval(LIGHT, -0.5, 0, 0.31, 0.31), _bar(MAIN, -0.9, -0.05, -1, -0.4)
        ),
        _bar(MAIN, -0.1, -0.05, 0.1, -0.05, 0.12),
    ),
    "ice cream": (
        _polygon(SECOND, -0.42, 0, 0.42, 0, 0, 1.0),
        _oval(MAIN, -0.22, -0.2, 0.32, 0.3),
        _oval(MAIN, 0.22, -0.2, 0.32, 0.3),
        _oval(LIGHT, 0, -0.58, 0.32, 0.3),
        _oval(DARK, 0, -0.9, 0.1, 0.1),
    ),
    "lamp": (
        _bar(DARK, 0, -0.1, 0, 0.8, 0.12),
        _polygon(MAIN, -0.35, -0.9, 0.35, -0.9, 0.7, -0.05, -0.7, -0.05),
        _oval(SECOND, 0, 0.82, 0.5, 0.14),
    ),
    "pear": (
        _bar(DARK, 0, -0.6, 0.1, -1.0, 0.1),
        _oval(MAIN, 0, -0.35, 0.34, 0.42),
        _oval(MAIN, 0, 0.35, 0.62, 0.55),
        _oval(LIGHT, -0.25, 0.25, 0.1, 0.16),
    ),
    "pencil": (
        _box(MAIN, -0.18, -0.7, 0.18, 0.55),
        _polygon(LIGHT, -0.18, 0.55, 0.18, 0.55, 0, 1.0),
        _polygon(DARK, -0.07, 0.83, 0.07, 0.83, 0, 1.0),
        _box(SECOND, -0.18, -0.95, 0.18, -0.7),
    ),
    "snail": (
        _polygon(SECOND, -0.95, 0.6, -0.7, -0.1, -0.5, -0.1, -0.5, 0.4, 0.9, 0.6),
        _oval(MAIN, 0.15, 0, 0.58, 0.56),
        _ring(DARK, 0.15, 0, 0.38, 0.08, 0, 300),
        _oval(DARK, -0.75, -0.25, 0.1, 0.1),
    ),
    "sun": (_star(SECOND, 12, 0.98, 0.6), _oval(MAIN, 0, 0, 0.55, 0.55)),
    "train": (
        _box(MAIN, -0.9, -0.2, 0.45, 0.4),
        _box(SECOND, 0.3, -0.75, 0.85, 0.4),
        _box(LIGHT, 0.42, -0.6, 0.72, -0.25),
        _box(DARK, -0.7, -0.65, -0.48, -0.2),
        *(_oval(DARK, x, 0.5, 0.2, 0.2) for x in (-0.65, -0.1, 0.5)),
    ),
}

KNOWN, UNKNOWN, EXTRA = tuple(_KNOWN), tuple(_UNKNOWN), tuple(_EXTRA)
OUTLINES = {**_KNOWN, **_UNKNOWN, **_EXTRA}

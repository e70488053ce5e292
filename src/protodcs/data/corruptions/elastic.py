"""elastic_transform: an affine shift of three points, then a smooth random displacement of every pixel.

The affine part follows OpenCV's fixed-point warp (places in steps of 1/32 pixel, mirrored about the edge pixels), as it
was when the corruptions were published. Later versions of OpenCV give other pixels. The displacement follows
`scipy.ndimage.map_coordinates` of order 1, which takes five to ten times as long.
"""

from functools import lru_cache

import numpy as np

from ...arrays import Floats, Pixels, Singles
from . import constants
from .compiled import inner, kernel
from .levels import LEVELS_SINGLE, single_to_level
from .smoothing import Window, continued, gaussian_weights, smoothed
from .task import Task

# How many standard deviations the smoothing of the displacement reaches to each side.
_REACH = 3.0
# OpenCV works the places out in 1/1024 pixel and interpolates in 1/32 pixel.
_PLACE_SCALE = 1024.0
_PLACE_BITS = 5
_PARTS = 32


def elastic_transform(task: Task) -> Pixels:
    """Warped, then displaced."""
    height, width = task.images.shape[1:3]
    strength, smoothing, shift = (_side(task) * share for share in task.pick(constants.ELASTIC_TRANSFORM))
    count = len(task.images)
    moves, fields = np.empty((count, 3, 2)), np.zeros((count, 2, height, width))
    for n, generator in enumerate(task.generators()):
        moves[n] = generator.uniform(-shift, shift, size=(3, 2))
        if strength:
            generator.random(out=fields[n])
    if strength:
        fields = _smoothed(2.0 * fields - 1.0, float(smoothing)) * strength
    out = np.empty_like(task.images)
    places = _backwards(height, width, moves.astype(np.float32))
    _transform(task.images, LEVELS_SINGLE, places, fields.astype(np.float32), task.half, out)
    return out


def _side(task: Task) -> int:
    """The length that the constants are multiples of."""
    if task.family == "imagenet" and task.variant == "published":
        return constants.PUBLISHED_ELASTIC_SIDE
    return min(task.images.shape[1:3])


def _backwards(height: int, width: int, moves: Singles) -> Floats:
    """(N, 2, 3): from a place (x, y, 1) of the result to the place it is taken from.

    The three points are the corners of a square in the middle, all but the lower left; `moves` (N, 3, 2) shifts them.
    """
    reach = min(height, width) // 3
    x, y = width // 2, height // 2
    corners = np.array([[x + reach, y + reach], [x + reach, y - reach], [x - reach, y - reach]], dtype=np.float32)
    moved = (corners + moves).astype(np.float64)
    per_x = (moved[:, 1] - moved[:, 2]) / (2 * reach)
    per_y = (moved[:, 0] - moved[:, 1]) / (2 * reach)
    offset = moved[:, 1] - per_x * (x + reach) - per_y * (y - reach)
    determinant = per_x[:, 0] * per_y[:, 1] - per_y[:, 0] * per_x[:, 1]
    # Three moved points on one line cannot be undone; OpenCV then takes everything from one place, and so do we.
    scale = np.divide(1.0, determinant, out=np.zeros_like(determinant), where=determinant != 0.0)
    inverse = np.empty((len(moves), 2, 3))
    inverse[:, 0, 0], inverse[:, 0, 1] = per_y[:, 1] * scale, -per_y[:, 0] * scale
    inverse[:, 1, 0], inverse[:, 1, 1] = -per_x[:, 1] * scale, per_x[:, 0] * scale
    inverse[:, :, 2] = -inverse[:, :, 0] * offset[:, :1] - inverse[:, :, 1] * offset[:, 1:]
    return inverse


def _smoothed(fields: Floats, deviation: float) -> Floats:
    """Each of `fields` (N, 2, H, W), smoothed, mirrored at the edges."""
    count, _, height, width = fields.shape
    layers = fields.reshape(2 * count, height, width)
    if 2 * int(_REACH * deviation + 0.5) < min(height, width):
        return smoothed(layers, Window((height, width), deviation, _REACH, "symmetric")).reshape(fields.shape)
    # The window folds back onto the image, perhaps many times: a matrix has fewer weights.
    out = np.empty_like(layers)
    _multiply(layers, _folded(height, deviation), np.ascontiguousarray(_folded(width, deviation).T), out)
    return out.reshape(fields.shape)


@lru_cache(maxsize=16)
def _folded(side: int, deviation: float) -> Floats:
    """(side, side): the weight of each place in the smoothed value at each place."""
    half = gaussian_weights(deviation, _REACH)
    radius = len(half) - 1
    places = continued(side, radius, "symmetric")
    matrix = np.zeros((side, side))
    for offset in range(-radius, radius + 1):
        matrix[np.arange(side), places[np.arange(side) + radius + offset]] += half[abs(offset)]
    return matrix


@kernel
def _multiply(layers: Floats, rows: Floats, columns: Floats, out: Floats) -> None:
    """`rows @ layer @ columns`, each sum in order."""
    count, height, width = layers.shape
    line = np.empty(width)
    for n in range(count):
        for y in range(height):
            line[:] = 0.0
            for k in range(height):
                weight = rows[y, k]
                for x in range(width):
                    line[x] += weight * layers[n, k, x]
            out[n, y] = 0.0
            for k in range(width):
                weight = line[k]
                for x in range(width):
                    out[n, y, x] += weight * columns[k, x]


@kernel
def _transform(images: Pixels, levels: Singles, places: Floats, fields: Singles, half: float, out: Pixels) -> None:
    count, height, width, _ = images.shape
    warped = np.empty((height, width, 3), np.float32)
    for n in range(count):
        warp(images[n], levels, places[n], warped)
        displace(warped, fields[n], half, out[n])


@inner
def _mirrored(place: int, side: int) -> int:
    """Back into 0..side-1, mirrored about the first and the last place."""
    if 0 <= place < side:
        return place
    period = 2 * (side - 1)
    place = abs(place) % period
    return period - place if place >= side else place


@kernel
def warp(image: Pixels, levels: Singles, places: Floats, out: Singles) -> None:
    """The affine part of one image (H, W, 3), in fixed-point places and single precision."""
    height, width, _ = image.shape
    one, part = np.float32(1.0), np.float32(1.0 / _PARTS)
    rounding = int(_PLACE_SCALE) // _PARTS // 2
    steps = np.empty((width, 2), np.int64)
    for x in range(width):
        steps[x, 0] = int(np.rint(places[0, 0] * x * _PLACE_SCALE))
        steps[x, 1] = int(np.rint(places[1, 0] * x * _PLACE_SCALE))
    for y in range(height):
        first_x = int(np.rint((places[0, 1] * y + places[0, 2]) * _PLACE_SCALE)) + rounding
        first_y = int(np.rint((places[1, 1] * y + places[1, 2]) * _PLACE_SCALE)) + rounding
        for x in range(width):
            from_x, from_y = (first_x + steps[x, 0]) >> _PLACE_BITS, (first_y + steps[x, 1]) >> _PLACE_BITS
            right, down = np.float32(from_x & (_PARTS - 1)) * part, np.float32(from_y & (_PARTS - 1)) * part
            left, top = from_x >> _PLACE_BITS, from_y >> _PLACE_BITS
            x0, x1 = _mirrored(left, width), _mirrored(left + 1, width)
            y0, y1 = _mirrored(top, height), _mirrored(top + 1, height)
            for c in range(3):
                out[y, x, c] = (
                    (
                        levels[image[y0, x0, c]] * ((one - down) * (one - right))
                        + levels[image[y0, x1, c]] * ((one - down) * right)
                    )
                    + levels[image[y1, x0, c]] * (down * (one - right))
                ) + levels[image[y1, x1, c]] * (down * right)


@inner
def _reflected(point: float, side: int) -> float:
    """Back to the image, reflected at the outer edges of the first and last pixel; up to a pixel may stand out."""
    period = 2.0 * side
    if point < 0.0:
        if point < -period:
            point = period * np.floor(-point / period) + point
        # A point just below zero must not come back as exactly -1.
        point = point + period if point < -side else max(-point, 1e-15) - 1.0
    elif point > side - 1:
        point -= period * np.floor(point / period)
        if point >= side:
            point = period - point - 1.0
    return point


@inner
def _inside(place: int, side: int) -> int:
    """A place up to one pixel outside, reflected."""
    return 0 if place < 0 else side - 1 if place >= side else place


@kernel
def displace(image: Singles, fields: Singles, half: float, out: Pixels) -> None:
    """Take each pixel of `image` (H, W, 3) from where `fields` (2, H, W), dx and dy, say."""
    height, width, _ = image.shape
    for y in range(height):
        for x in range(width):
            from_x = _reflected(x + np.float64(fields[0, y, x]), width)
            from_y = _reflected(y + np.float64(fields[1, y, x]), height)
            left, top = np.floor(from_x), np.floor(from_y)
            left_weight, top_weight = 1.0 - (from_x - left), 1.0 - (from_y - top)
            right_weight, bottom_weight = 1.0 - left_weight, 1.0 - top_weight
            x0, x1 = _inside(int(left), width), _inside(int(left) + 1, width)
            y0, y1 = _inside(int(top), height), _inside(int(top) + 1, height)
            for c in range(3):
                value = (
                    (image[y0, x0, c] * top_weight * left_weight + image[y0, x1, c] * top_weight * right_weight)
                    + image[y1, x0, c] * bottom_weight * left_weight
                ) + image[y1, x1, c] * bottom_weight * right_weight
                out[y, x, c] = single_to_level(np.float32(value), half)

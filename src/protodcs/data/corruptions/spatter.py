"""spatter: drops of water, or of mud at the two highest severities.

The shape of the drops comes from OpenCV, image by image, as published; the drops' colour is added in single precision.
"""

import numpy as np

from ...arrays import Floats, Pixels, Singles
from . import constants
from .compiled import kernel
from .levels import LEVELS_SINGLE, single_to_level
from .packages import opencv
from .smoothing import Window, smoothed
from .task import Task, normal

_WATER = (np.array([175, 238, 238]) / 255.0).astype(np.float32)
_MUD = (np.array([63, 42, 20]) / 255.0).astype(np.float32)
# Gives the edge of a drop its light and its shadow.
_RELIEF = np.array([[-2, -1, 0], [-1, 1, 1], [0, 1, 2]], dtype=np.float32)
# Beyond this distance from an edge a drop is equally thick, in pixels.
_THICKNESS = 20.0
# Mud thinner than this runs off.
_THINNEST_MUD = np.float32(0.8)


def spatter(task: Task) -> Pixels:
    """Liquid where smoothed noise is above a threshold."""
    mean, deviation, smoothing, threshold, strength, is_mud = task.pick(constants.SPATTER)
    noise = mean + deviation * task.draw(task.images.shape[1:3], normal)
    liquid = smoothed(noise, Window(noise.shape[1:], float(smoothing)))
    liquid[liquid < threshold] = 0.0
    out = np.empty_like(task.images)
    if is_mud:
        _stain(task.images, _mud(liquid, threshold, strength), LEVELS_SINGLE, _MUD, task.half, out)
    else:
        _wet(task.images, _water(liquid, strength), LEVELS_SINGLE, _WATER, task.half, out)
    return out


def _mud(liquid: Floats, threshold: float, strength: float) -> Singles:
    """How much mud is where, (N, H, W)."""
    stains = (liquid > threshold).astype(np.float32)
    mud = smoothed(stains, Window(stains.shape[1:], float(strength)))
    mud[mud < _THINNEST_MUD] = 0.0
    return mud


def _water(liquid: Floats, strength: float) -> Singles:
    """How much water is where, (N, H, W)."""
    cv2 = opencv("spatter")
    layers = (liquid * 255.0).astype(np.uint8)
    water = np.empty(liquid.shape, dtype=np.float32)
    for layer, drops in zip(layers, water, strict=True):
        distance = cv2.distanceTransform(255 - cv2.Canny(layer, 50, 150), cv2.DIST_L2, 5)
        thickness = cv2.blur(np.minimum(distance, np.float32(_THICKNESS)), (3, 3)).astype(np.uint8)
        relief = cv2.filter2D(cv2.equalizeHist(thickness), cv2.CV_8U, _RELIEF)
        np.multiply(layer, cv2.blur(relief, (3, 3)), out=drops, dtype=np.float32)
        most = drops.max()
        if most > 0.0:
            drops /= most
    water *= np.float32(strength)
    return water


@kernel
def _wet(images: Pixels, water: Singles, levels: Singles, colour: Singles, half: float, out: Pixels) -> None:
    count, height, width, _ = images.shape
    for n in range(count):
        for y in range(height):
            for x in range(width):
                for c in range(3):
                    value = levels[images[n, y, x, c]] + water[n, y, x] * colour[c]
                    out[n, y, x, c] = single_to_level(value, half)


@kernel
def _stain(images: Pixels, mud: Singles, levels: Singles, colour: Singles, half: float, out: Pixels) -> None:
    count, height, width, _ = images.shape
    for n in range(count):
        for y in range(height):
            for x in range(width):
                amount = mud[n, y, x]
                for c in range(3):
                    value = levels[images[n, y, x, c]] * (np.float32(1.0) - amount) + colour[c] * amount
                    out[n, y, x, c] = single_to_level(value, half)

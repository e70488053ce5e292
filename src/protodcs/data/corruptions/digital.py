"""pixelate and jpeg_compression: what Pillow and libjpeg make of the image, the same in both variants.

Published JPEGs went through Pillow. OpenCV calls the same library with the same settings (4:2:0, slow integer
transform), gives the same pixels and takes a sixth of the time.
"""

import numpy as np

from ...arrays import Pixels
from . import constants
from .packages import opencv, pillow_image
from .task import Task


def pixelate(task: Task) -> Pixels:
    """Shrunk and enlarged again by averaging over boxes."""
    pillow = pillow_image("pixelate")
    share = task.pick(constants.PIXELATE)
    height, width = task.images.shape[1:3]
    small = (int(width * share), int(height * share))
    out = np.empty_like(task.images)
    for image, result in zip(task.images, out, strict=True):
        shrunk = pillow.fromarray(image).resize(small, pillow.Resampling.BOX)
        result[:] = shrunk.resize((width, height), pillow.Resampling.BOX)
    return out


def jpeg_compression(task: Task) -> Pixels:
    """Written as JPEG and read again."""
    cv2 = opencv("jpeg_compression")
    options = [cv2.IMWRITE_JPEG_QUALITY, task.pick(constants.JPEG_COMPRESSION)]
    out = np.empty_like(task.images)
    for image, result in zip(task.images, out, strict=True):
        _, file = cv2.imencode(".jpg", cv2.cvtColor(image, cv2.COLOR_RGB2BGR), options)
        cv2.cvtColor(cv2.imdecode(file, cv2.IMREAD_COLOR), cv2.COLOR_BGR2RGB, dst=result)
    return out

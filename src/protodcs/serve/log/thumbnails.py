"""Small copies of images for the decision log.

A thumbnail has at most 128 pixels per side and 8 kB, so that people can recognise the image and the log stays small.
"""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from io import BytesIO
from typing import Final

from PIL import Image

from ...arrays import Pixels
from ...data.image import decode
from ...errors import ImageError

MAX_SIDE: Final = 128
MAX_BYTES: Final = 8192
# Side and JPEG quality of each attempt, until the file is small enough. The last one always is: 48 x 48 pixels.
_ATTEMPTS: Final = ((MAX_SIDE, 75), (MAX_SIDE, 50), (96, 50), (64, 40), (48, 30))


def make_thumbnail(pixels: Pixels) -> bytes:
    """Return a thumbnail of RGB pixels (height, width, 3) as a JPEG file without metadata."""
    image = Image.fromarray(pixels)
    data = b""
    for side, quality in _ATTEMPTS:
        image.thumbnail((side, side), Image.Resampling.BILINEAR, reducing_gap=2.0)
        file = BytesIO()
        image.save(file, "JPEG", quality=quality)
        data = file.getvalue()
        if len(data) <= MAX_BYTES:
            break
    return data


class ThumbnailMaker:
    """Makes thumbnails in a thread of its own, beside the encoder."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="thumbnails")

    async def make(self, image: bytes) -> bytes:
        """Return a thumbnail of an image file; empty if it cannot be decoded, which the encoder reports."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, _from_file, image)


def _from_file(image: bytes) -> bytes:
    try:
        return make_thumbnail(decode(image))
    except ImageError:
        return b""

"""Decode any image to RGB pixels: one function, the same rules for every caller.

A file may be hostile: it is rejected by its header before anything is decoded, and every problem is an ImageError.
No global setting of Pillow is read or changed, and no warning is issued.

The rules: EXIF orientation is applied (a damaged EXIF block counts as none). Grey, palette, CMYK, YCCK and YCbCr
become RGB as Pillow converts them; colour profiles are not applied. Transparency is laid on white. 16-bit grey is
divided by 257 and rounded; of 16-bit colour PNGs Pillow gives the high byte. Floating-point grey must lie in 0..1.
Of several frames the first is taken. CIE Lab and 32-bit integers beyond 16 bits are refused.
"""

import os
import stat
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..arrays import Pixels
from ..errors import ImageError, MissingPackageError
from .sanitize import MAX_PIXELS, MAX_SIDE, SCREENS, check_size, kind_of, orientation_of

try:
    from PIL import Image
    from PIL.BmpImagePlugin import BmpImageFile
    from PIL.GifImagePlugin import GifImageFile
    from PIL.ImageFile import ImageFile
    from PIL.JpegImagePlugin import JpegImageFile
    from PIL.PngImagePlugin import PngImageFile
    from PIL.PpmImagePlugin import PpmImageFile
    from PIL.TiffImagePlugin import TiffImageFile
    from PIL.WebPImagePlugin import WebPImageFile
except ImportError:
    raise MissingPackageError(
        "Images need Pillow, which the extra of your encoder installs: pip install 'protodcs[transformers]', or "
        "open-clip, onnx or demo"
    ) from None

__all__ = ["MAX_BYTES", "MAX_PIXELS", "MAX_SIDE", "Picture", "decode"]

Picture = str | os.PathLike[str] | bytes | bytearray | memoryview | Image.Image | NDArray[Any]

# The largest file that is read at all: more than any 64-million-pixel photograph, with enough space for TIFF and PPM.
MAX_BYTES = 256 * 2**20
# Pillow decodes these in Python, about a million pixels a second: larger files would hold a worker for minutes.
_SLOW_DECODERS = frozenset(["ppm", "ppm_plain", "bmp_rle"])
MAX_SLOW_BYTES = 4 * 2**20
# Large images are converted in strips of about this many pixels, so that only one full copy exists beside the result.
_STRIP_PIXELS = 2**20

_OPENERS: dict[str, type[ImageFile]] = {
    "JPEG": JpegImageFile,
    "PNG": PngImageFile,
    "WEBP": WebPImageFile,
    "GIF": GifImageFile,
    "BMP": BmpImageFile,
    "TIFF": TiffImageFile,
    "PPM": PpmImageFile,
}


def decode(image: Picture, name: str | None = None) -> Pixels:
    """The pixels of an image: (height, width, 3) RGB uint8, C-contiguous, writable and the caller's own.

    Args:
        image: a path; the bytes of a JPEG, PNG, WebP, GIF, BMP, TIFF or PPM file; a Pillow image (its current
            frame); or an array of shape (height, width), (height, width, 1), (height, width, 3) or
            (height, width, 4), of uint8, of uint16 (divided by 257), or of floats in 0..1.
        name: what to call the image in an error; by default the path, or "the given bytes", "image" or "array".

    Raises:
        ImageError: the image cannot be used; the message gives its name and the reason.

    >>> decode(np.zeros((2, 4), np.uint8)).shape
    (2, 4, 3)
    """
    try:
        if isinstance(image, bytes):
            return _from_bytes(image)
        if isinstance(image, str | os.PathLike):
            return _from_bytes(_contents(image))
        if isinstance(image, np.ndarray):
            return _from_array(image)
        if isinstance(image, Image.Image):
            return _from_pillow(image)
        if isinstance(image, bytearray | memoryview):
            return _from_bytes(bytes(image))
    except Exception as problem:
        raise ImageError(f"{name or _called(image)}: {_reason(problem)}") from None
    raise ImageError(
        f"{name or 'the given object'}: not an image: {type(image).__name__}; wanted: a path, the bytes of an image "
        "file, a Pillow image or a numpy array"
    )


def _called(image: Picture) -> str:
    if isinstance(image, str | os.PathLike):
        # A file name may hold bytes that are no text; an error message must still be printable.
        return os.fspath(image).encode("utf-8", "backslashreplace").decode()
    if isinstance(image, np.ndarray):
        return "the given array"
    return "the given image" if isinstance(image, Image.Image) else "the given bytes"


def _reason(problem: Exception) -> str:
    """Why an image is refused, from whatever a decoder raised."""
    if isinstance(problem, ImageError):
        return str(problem)
    if isinstance(problem, MemoryError):
        return "too large: it needs more memory than there is"
    words = " ".join(str(problem).split())[:200] or type(problem).__name__
    if isinstance(problem, EOFError) or any(sign in words for sign in ("truncated", "Truncated", "not enough image")):
        return f"truncated: the file ends before its picture does ({words}); copy or download it again"
    return f"damaged or not supported: {words}"


def _contents(path: str | os.PathLike[str]) -> bytes:
    if isinstance(path, str) and path.startswith(("http://", "https://")):
        raise ImageError("an address, not a file: download it first")
    file = Path(path)
    try:
        about = file.stat()
        if stat.S_ISREG(about.st_mode) and about.st_size <= MAX_BYTES:
            with file.open("rb") as stream:
                return stream.read(MAX_BYTES + 1)
    except FileNotFoundError:
        raise ImageError("no such file") from None
    except PermissionError:
        raise ImageError("no permission to read the file") from None
    except (OSError, ValueError) as problem:
        raise ImageError(f"the file cannot be read: {problem}") from None
    if stat.S_ISDIR(about.st_mode):
        raise ImageError("a folder, not a file; to read a folder of images use protodcs.data.open_source")
    if not stat.S_ISREG(about.st_mode):
        raise ImageError("a device, pipe or socket, not a file")
    raise _too_many_bytes(about.st_size)


def _too_many_bytes(count: int) -> ImageError:
    return ImageError(f"too large: {count:,} bytes; at most {MAX_BYTES:,} bytes are read; scale it down first")


def _from_bytes(data: bytes) -> Pixels:
    if not data:
        raise ImageError("empty: no bytes at all")
    if len(data) > MAX_BYTES:
        raise _too_many_bytes(len(data))
    kind = kind_of(data)
    screened = SCREENS[kind](data)
    image = _OPENERS[kind](BytesIO(screened.data))
    if image.size != (screened.width, screened.height):
        raise ImageError(f"damaged: two sizes, {screened.width} x {screened.height} and {image.width} x {image.height}")
    if image.tile and image.tile[0][0] in _SLOW_DECODERS and len(data) > MAX_SLOW_BYTES:
        raise ImageError(
            f"too large: {len(data):,} bytes of text or run-length {kind}, of which at most {MAX_SLOW_BYTES:,} are "
            "decoded; save it as PNG"
        )
    image.load()
    return _turned(_pixels(image), screened.orientation)


def _from_pillow(image: Image.Image) -> Pixels:
    check_size(*image.size)
    image.load()
    exif = image.info.get("exif")
    return _turned(_pixels(image), orientation_of(exif) if isinstance(exif, bytes) else 1)


def _turned(pixels: Pixels, orientation: int) -> Pixels:
    """The picture upright, from one of the eight ways EXIF says it can lie."""
    if orientation == 1:
        return pixels
    if orientation in (5, 6, 7, 8):
        pixels = pixels.transpose(1, 0, 2)
    if orientation in (2, 3, 6, 7):
        pixels = pixels[:, ::-1]
    if orientation in (3, 4, 7, 8):
        pixels = pixels[::-1]
    return np.ascontiguousarray(pixels)


def _pixels(image: Image.Image) -> Pixels:
    width, height = image.size
    rows = max(1, _STRIP_PIXELS // width)
    if height <= rows:
        return _rgb(image)
    pixels = np.empty((height, width, 3), np.uint8)
    for top in range(0, height, rows):
        bottom = min(top + rows, height)
        pixels[top:bottom] = _rgb(image.crop((0, top, width, bottom)))
    return pixels


def _rgb(image: Image.Image) -> Pixels:
    mode = image.mode
    if mode.startswith("I") or mode == "F":
        return _rgb_from_deep_grey(image)
    if mode in ("RGBA", "LA", "PA", "RGBa", "La") or "transparency" in image.info or _alpha_palette(image):
        image = image.convert("RGBA")
        white = Image.new("RGB", image.size, "white")
        white.paste(image, mask=image)
        return np.array(white)
    if mode == "RGB":
        return np.array(image)
    if mode in ("1", "L", "P", "CMYK", "YCbCr", "RGBX", "HSV"):
        return np.array(image.convert("RGB"))
    raise ImageError(f"not supported: pixels of the kind Pillow calls {mode}; save it as RGB")


def _alpha_palette(image: Image.Image) -> bool:
    return image.mode == "P" and image.palette is not None and image.palette.mode.endswith("A")


def _rgb_from_deep_grey(image: Image.Image) -> Pixels:
    values = np.asarray(image)
    if values.dtype.kind == "i":
        if values.min() < 0 or values.max() > 65535:
            raise ImageError(
                f"not supported: grey values from {values.min()} to {values.max()}, which is more than 16 bits; "
                "scale them to 0..65535"
            )
        values = values.astype(np.uint16)
    grey = _eight_bits(values)
    key = image.info.get("transparency")
    if isinstance(key, int):
        grey[values == key] = 255
    return _from_array(grey)


def _eight_bits(values: NDArray[Any]) -> Pixels:
    """Samples of 16 bits or of 0..1 as 8 bits, rounded to nearest."""
    if values.dtype.kind == "u" and values.dtype.itemsize == 2:
        # 257 maps 65535 to 255 and 0 to 0; half of it, rounded down, rounds to nearest.
        return ((values.astype(np.uint32) + 128) // 257).astype(np.uint8)
    low, high = values.min(), values.max()
    if not (low >= 0.0 and high <= 1.0):  # Written so that NaN is refused too.
        raise ImageError(
            f"not supported: floating-point values from {low} to {high}; wanted: 0 to 1, or 0 to 255 as uint8"
        )
    return np.rint(values.astype(np.float64) * 255.0).astype(np.uint8)


def _from_array(array: NDArray[Any]) -> Pixels:
    array = np.asarray(array)
    _check_array(array)
    if array.dtype != np.uint8:
        array = _eight_bits(array)
    if array.ndim == 2:
        array = array[:, :, None]
    if array.shape[2] == 4:
        return _rgb(Image.fromarray(np.ascontiguousarray(array), "RGBA"))
    pixels = np.empty((*array.shape[:2], 3), np.uint8)
    pixels[:] = array  # Grey is repeated over the three channels.
    return pixels


def _check_array(array: NDArray[Any]) -> None:
    shape = array.shape
    if array.dtype not in (np.uint8, np.uint16, np.float16, np.float32, np.float64):
        raise ImageError(f"not supported: an array of type {array.dtype}; wanted: uint8, uint16 or floats in 0..1")
    if array.ndim == 3 and shape[2] not in (1, 3, 4) and shape[0] in (1, 3, 4):
        raise ImageError(
            f"not supported: an array of shape {shape}, channels first; wanted: (height, width, 3); "
            "use array.transpose(1, 2, 0)"
        )
    if array.ndim == 4:
        raise ImageError(f"not supported: a batch of shape {shape}; wanted: one image of shape (height, width, 3)")
    if array.ndim not in (2, 3) or (array.ndim == 3 and shape[2] not in (1, 3, 4)):
        raise ImageError(f"not supported: an array of shape {shape}; wanted: (height, width, 3)")
    check_size(shape[1], shape[0])

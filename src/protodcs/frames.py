"""Images of a video file, a camera or a growing folder, at a chosen rate.

Video needs PyAV: the extra `protodcs[video]`. A camera that stops answering is connected again; a video file ends.
"""

import io
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from .errors import InputError

SUFFIXES = (".bmp", ".gif", ".jpeg", ".jpg", ".png", ".tif", ".tiff", ".webp")
_CAMERAS = ("rtsp://", "rtsps://", "http://", "https://", "udp://")
# Encoders look at a few hundred pixels, so larger frames only take time.
_LARGEST_SIDE = 640
_QUALITY = 90
# A folder is looked at so often. Seconds.
_LOOK_SECONDS = 0.5
# The times of frames are rounded. Seconds.
_ROUNDING = 1e-6
# Time for a camera to answer, and waits before it is connected again. Seconds.
_CAMERA_SECONDS = 10.0
_RETRY_SECONDS = (1.0, 2.0, 5.0, 10.0)


class Frame(NamedTuple):
    """An image in a file format, and a name for it."""

    image: bytes
    name: str


def read_frames(source: str, rate: float, stopped: threading.Event) -> Iterator[Frame]:
    """Yield images of a source at most `rate` times per second, until it ends or the event is set.

    Args:
        source: a folder, a video file, or the address of a camera such as rtsp://HOST/PATH.
        rate: images per second. Of a folder, all images are returned.
        stopped: set it to end.

    Raises:
        InputError: the source does not exist or is no video.
    """
    if source.startswith(_CAMERAS):
        return _camera(source, rate, stopped)
    path = Path(source)
    if path.is_dir():
        return _folder(path, rate, stopped)
    if not path.is_file():
        raise InputError(
            f"There is no file or folder {source!r}. Give a video, a folder of images, or an RTSP address."
        )
    return _video(path, rate, stopped)


def _folder(folder: Path, rate: float, stopped: threading.Event) -> Iterator[Frame]:
    """Yield the images in a folder by name, then new ones as they appear."""
    seen: set[str] = set()
    sizes: dict[str, int] = {}
    while not stopped.is_set():
        files = sorted(file for file in folder.iterdir() if file.suffix.lower() in SUFFIXES and file.name not in seen)
        for file in files:
            size = file.stat().st_size
            # A file that still grows is read when its size stays the same.
            if size == 0 or sizes.get(file.name) != size:
                sizes[file.name] = size
                continue
            seen.add(file.name)
            del sizes[file.name]
            yield Frame(file.read_bytes(), file.name)
            if stopped.wait(1 / rate):
                return
        stopped.wait(_LOOK_SECONDS)


def _video(path: Path, rate: float, stopped: threading.Event) -> Iterator[Frame]:
    """Yield frames of a file at their times, as if it were played."""
    import av

    try:
        container = av.open(str(path))
    except av.FFmpegError as problem:
        raise InputError(f"{path} is no video that can be read: {problem}") from None
    with container:
        taken = 0
        for frame in container.decode(video=0):
            if (frame.time or 0.0) < taken / rate - _ROUNDING:
                continue
            taken += 1
            yield Frame(_jpeg(frame), f"{path.name}@{frame.time or 0.0:.2f}")
            if stopped.wait(1 / rate):
                return


def _camera(address: str, rate: float, stopped: threading.Event) -> Iterator[Frame]:
    """Yield frames of a camera, and connect again if it stops answering."""
    failures = 0
    while not stopped.is_set():
        for frame in _connected(address, rate, stopped):
            failures = 0
            yield frame
        stopped.wait(_RETRY_SECONDS[min(failures, len(_RETRY_SECONDS) - 1)])
        failures += 1


def _connected(address: str, rate: float, stopped: threading.Event) -> Iterator[Frame]:
    """Yield frames of a camera until the connection ends."""
    import time

    import av

    options = {"rtsp_transport": "tcp"} if address.startswith("rtsp") else {}
    try:
        with av.open(address, options=options, timeout=_CAMERA_SECONDS) as container:
            due, number = time.monotonic(), 0
            for frame in container.decode(video=0):
                if stopped.is_set():
                    return
                # Frames in between are decoded and left out: the camera sends them anyway.
                if time.monotonic() < due:
                    continue
                due = time.monotonic() + 1 / rate
                number += 1
                yield Frame(_jpeg(frame), f"frame {number}")
    except (av.FFmpegError, OSError):
        return


def _jpeg(frame: Any) -> bytes:
    """Return a frame of PyAV as a JPEG file."""
    image = frame.to_image()
    image.thumbnail((_LARGEST_SIDE, _LARGEST_SIDE))
    file = io.BytesIO()
    image.save(file, "JPEG", quality=_QUALITY)
    return file.getvalue()

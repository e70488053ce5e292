"""When a photograph was taken, as its EXIF block says. Nothing is decoded, and no length is trusted."""

import struct
from collections.abc import Iterator
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

# The EXIF block of a JPEG is among its first segments, each at most 64 KiB long.
_HEAD = 256 * 1024
# Tags: the folder with what the camera noted, and when it took the photograph.
EXIF_FOLDER, DATE_TIME_ORIGINAL = 0x8769, 0x9003
_LONG, _TEXT = 4, 2
_LENGTH = len("2025:05:01 12:00:00")


def capture_time(file: Path) -> datetime | None:
    """Return DateTimeOriginal of a JPEG file by the clock of its camera, written as UTC; None if there is none."""
    try:
        with file.open("rb") as stream:
            head = stream.read(_HEAD)
    except OSError:
        return None
    with suppress(struct.error):
        return _original_time(_exif_block(head))
    return None


def parse_time(text: str) -> datetime | None:
    """Return a time as EXIF or ISO 8601 write it, without time zone and written as UTC; None if it is no time.

    >>> parse_time("2025:05:01 12:00:00")
    datetime.datetime(2025, 5, 1, 12, 0, tzinfo=datetime.timezone.utc)
    """
    day = text[:10].replace(":", "-")
    with suppress(ValueError):
        return datetime.fromisoformat(day + text[10:]).replace(tzinfo=UTC, microsecond=0)
    return None


def _exif_block(head: bytes) -> bytes:
    """Return the EXIF block of a JPEG file, empty if there is none."""
    position = 2
    while head.startswith(b"\xff\xd8") and head[position : position + 1] == b"\xff":
        marker, length = struct.unpack_from(">BH", head, position + 1)
        if marker == 0xDA or length < 2:
            break
        if marker == 0xE1 and head.startswith(b"Exif\x00\x00", position + 4):
            return head[position + 10 : position + 2 + length]
        position += 2 + length
    return b""


def _original_time(block: bytes) -> datetime | None:
    order = byte_order(block)
    if order is None:
        return None
    for tag, kind, _, place in entries(block, order, _long(block, order, 4)):
        if tag != EXIF_FOLDER or kind != _LONG:
            continue
        for inner, form, count, start in entries(block, order, _long(block, order, place)):
            if inner == DATE_TIME_ORIGINAL and form == _TEXT and count >= _LENGTH:
                at = _long(block, order, start)
                return parse_time(block[at : at + _LENGTH].decode("ascii", "replace"))
    return None


def byte_order(block: bytes) -> str | None:
    """Return the byte order of an EXIF block, as `struct` calls it; None if it is none."""
    return {b"II*\x00": "<", b"MM\x00*": ">"}.get(block[:4]) if len(block) >= 8 else None


def entries(block: bytes, order: str, start: int) -> Iterator[tuple[int, int, int, int]]:
    """Yield tag, type and count of each entry of a folder of EXIF, and where its value is. Cut ones are left out."""
    if start + 2 > len(block):
        return
    (count,) = struct.unpack_from(order + "H", block, start)
    for place in range(start + 2, min(start + 2 + 12 * count, len(block) - 11), 12):
        tag, kind, number = struct.unpack_from(order + "HHI", block, place)
        yield tag, kind, number, place + 8


def _long(block: bytes, order: str, place: int) -> int:
    number: int = struct.unpack_from(order + "I", block, place)[0]
    return number

"""What of an image file may reach its decoder: the size is read from the header, the rest is cut down to the pixels.

Comments, colour profiles, thumbnails, EXIF blocks and later frames are where bombs hide, and no pixel depends on
them, so they are left out before Pillow sees the file. Nothing here decodes, and nothing here trusts a length.
"""

import re
import struct
import zlib
from collections.abc import Callable
from typing import NamedTuple

from ..errors import ImageError
from .exif import byte_order, entries

# 64 million pixels is an 8000 x 8000 image: four times the largest photograph a phone takes, and no more than about
# one gigabyte while it is decoded. A side of 65,535 is the most that JPEG can say.
MAX_PIXELS = 64_000_000
MAX_SIDE = 65_535
# Chunks, segments, strips or tiles of one file. A whole file in pieces of 1 KiB has as many, and no writer cuts finer.
MAX_PARTS = 262_144
# A progressive JPEG passes over all its pixels once a scan. Writers make about ten scans; a hostile file makes
# thousands of empty ones, each as costly as a full one.
MAX_SCANNED_PIXELS = 20 * MAX_PIXELS


class Screened(NamedTuple):
    """An image file cut down to its pixels, with what its header says."""

    data: bytes
    width: int
    height: int
    orientation: int = 1


def truncated(kind: str) -> ImageError:
    """The refusal of a file that ends too early."""
    return ImageError(f"truncated: the {kind} file ends before its picture does; copy or download it again")


def damaged(kind: str, what: str) -> ImageError:
    """The refusal of a file that contradicts its own format."""
    return ImageError(f"damaged: {what} in the {kind} file; copy or save it again")


def check_size(width: int, height: int) -> None:
    """Refuse a picture without pixels and one with too many."""
    if width < 1 or height < 1:
        raise ImageError(f"zero size: its header says {width} x {height} pixels")
    if width > MAX_SIDE or height > MAX_SIDE or width * height > MAX_PIXELS:
        raise ImageError(
            f"too large: its header says {width} x {height} pixels; at most {MAX_PIXELS:,} pixels and {MAX_SIDE:,} "
            "a side are decoded; scale it down first"
        )


def orientation_of(exif: bytes) -> int:
    """The orientation an EXIF block names, 1 to 8; 1 where the block is silent or unreadable.

    A damaged EXIF block is common in real photographs and says nothing about the pixels: it is no reason to refuse.
    """
    exif = exif.removeprefix(b"Exif\x00\x00")
    order = byte_order(exif)
    if order is None:
        return 1
    (start,) = struct.unpack_from(order + "I", exif, 4)
    for tag, kind, _, place in entries(exif, order, start):
        if tag == 0x0112:
            (value,) = struct.unpack_from(order + "H", exif, place)
            return value if kind == 3 and 1 <= value <= 8 else 1
    return 1


_BARE_MARKERS = frozenset([0x01, 0xD8, *range(0xD0, 0xD8)])
_FRAME_MARKERS = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
# Tables, frame and restart interval; APP0 (JFIF) and APP14 (Adobe) because they say how the colours are coded.
_KEPT_SEGMENTS = _FRAME_MARKERS | {0xC4, 0xCC, 0xDB, 0xDD, 0xE0, 0xEE}
_NEXT_MARKER = re.compile(rb"\xff[^\x00\xd0-\xd7\xff]")


def jpeg(data: bytes) -> Screened:
    """A JPEG without its metadata; of a multi-picture file the first picture."""
    kept = [b"\xff\xd8"]
    size: tuple[int, int] | None = None
    orientation = 1
    position = 2
    for _ in range(MAX_PARTS):
        position = data.find(b"\xff", position)
        if position < 0 or position + 4 > len(data):
            raise truncated("JPEG")
        marker = data[position + 1]
        if marker in (0x00, 0xFF) or marker in _BARE_MARKERS:
            position += 1 if marker == 0xFF else 2
            continue
        length = int.from_bytes(data[position + 2 : position + 4], "big")
        end = position + 2 + length
        if marker == 0xD9 or length < 2:
            raise damaged("JPEG", "no picture before the end mark" if marker == 0xD9 else "a segment of no length")
        if end > len(data):
            raise truncated("JPEG")
        if marker == 0xDA:
            return _jpeg_with_scans(data, position, kept, size, orientation)
        if marker in _FRAME_MARKERS:
            if size is not None or length < 8:
                raise damaged("JPEG", "a second or unreadable frame header")
            height, width = struct.unpack_from(">HH", data, position + 5)
            check_size(width, height)
            size = width, height
        elif marker == 0xE1 and data.startswith(b"Exif\x00\x00", position + 4):
            orientation = orientation_of(data[position + 4 : end])
        if marker in _KEPT_SEGMENTS:
            kept.append(data[position:end])
        position = end
    raise damaged("JPEG", "too many segments")


def _jpeg_with_scans(
    data: bytes, start: int, kept: list[bytes], size: tuple[int, int] | None, orientation: int
) -> Screened:
    if size is None:
        raise damaged("JPEG", "a scan without a frame header")
    width, height = size
    allowed = MAX_SCANNED_PIXELS // (width * height)
    # The plain count is never too low and costs little; the walk, which is exact, is left to the suspects.
    if data.count(b"\xff\xda", start) > allowed and _has_more_scans(data, start, allowed):
        raise damaged("JPEG", f"more than {allowed} scans over {width} x {height} pixels")
    kept.append(data[start:])
    return Screened(b"".join(kept), width, height, orientation)


def _has_more_scans(data: bytes, position: int, allowed: int) -> bool:
    scans = 0
    for _ in range(MAX_PARTS):
        found = _NEXT_MARKER.search(data, position)
        if found is None or data[found.start() + 1] == 0xD9:
            return False
        marker = data[found.start() + 1]
        scans += marker == 0xDA
        if scans > allowed:
            return True
        position = found.end()
        if marker not in _BARE_MARKERS:
            position += int.from_bytes(data[position : position + 2], "big")
    return True


_PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"


def png(data: bytes) -> Screened:
    """A PNG of its first header, palette, transparency and pixels; of an animation the default picture."""
    kept = [_PNG_SIGNATURE]
    seen: set[bytes] = set()
    orientation = 1
    position = 8
    for _ in range(MAX_PARTS):
        end = position + 12 + int.from_bytes(data[position : position + 4], "big")
        kind = data[position + 4 : position + 8]
        if end > len(data):
            raise truncated("PNG")
        if not seen:
            if kind != b"IHDR" or end != position + 25:
                raise damaged("PNG", "no header chunk at the start")
            width, height = struct.unpack_from(">II", data, position + 8)
            check_size(width, height)
        if kind == b"IDAT" or (kind in (b"IHDR", b"PLTE", b"tRNS") and kind not in seen):
            # Pillow does not look at the check sum of pixels: damage would pass as another picture.
            if zlib.crc32(data[position + 4 : end - 4]) != int.from_bytes(data[end - 4 : end], "big"):
                raise damaged("PNG", f"a wrong check sum of chunk {kind.decode()}")
            kept.append(data[position:end])
        elif kind == b"eXIf":
            orientation = orientation_of(data[position + 8 : end - 4])
        elif kind == b"IEND":
            kept.append(data[position:end])
            return Screened(b"".join(kept), width, height, orientation)
        seen.add(kind)
        position = end
    raise damaged("PNG", "too many chunks")


def webp(data: bytes) -> Screened:
    """A WebP of its picture only; of an animation the first frame."""
    total = 8 + int.from_bytes(data[4:8], "little")
    if total > len(data) or len(data) < 30:
        raise truncated("WebP")
    width, height = _webp_size(data)
    check_size(width, height)
    if data[12:16] != b"VP8X":
        return Screened(data, width, height)
    kept: dict[bytes, bytes] = {}
    orientation = 1
    position = 12
    for _ in range(MAX_PARTS):
        if position + 8 > total:
            break
        kind = data[position : position + 4]
        length = int.from_bytes(data[position + 4 : position + 8], "little")
        end = position + 8 + length + length % 2
        if position + 8 + length > total:
            raise truncated("WebP")
        if kind == b"EXIF":
            orientation = orientation_of(data[position + 8 : end])
        elif kind in (b"VP8X", b"ANIM", b"ANMF", b"ALPH", b"VP8 ", b"VP8L"):
            kept.setdefault(kind, data[position:end])
        position = end
    else:
        raise damaged("WebP", "too many chunks")
    # The header announces a profile, EXIF and XMP by flags; they are cleared with the chunks they announce.
    head = kept[b"VP8X"]
    kept[b"VP8X"] = head[:8] + bytes([head[8] & ~0x2C]) + head[9:]
    body = b"WEBP" + b"".join(kept.values())
    return Screened(b"RIFF" + struct.pack("<I", len(body)) + body, width, height, orientation)


def _webp_size(data: bytes) -> tuple[int, int]:
    kind = data[12:16]
    if kind == b"VP8X":
        return 1 + int.from_bytes(data[24:27], "little"), 1 + int.from_bytes(data[27:30], "little")
    if kind == b"VP8L" and data[20] == 0x2F:
        bits = int.from_bytes(data[21:25], "little")
        return 1 + (bits & 0x3FFF), 1 + (bits >> 14 & 0x3FFF)
    if kind == b"VP8 " and data[23:26] == b"\x9d\x01\x2a":
        width, height = struct.unpack_from("<HH", data, 26)
        return width & 0x3FFF, height & 0x3FFF
    raise damaged("WebP", "no picture header at the start")


def gif(data: bytes) -> Screened:
    """A GIF of its palette, the last graphic control before its first frame, and that frame."""
    if len(data) < 13:
        raise truncated("GIF")
    width, height, flags = struct.unpack_from("<HHB", data, 6)
    position = start = 13 + (3 << (flags & 7) + 1 if flags & 0x80 else 0)
    control = b""
    for _ in range(MAX_PARTS):
        block = data[position : position + 2]
        if block[:1] == b",":
            if position + 10 > len(data):
                break
            left, top, wide, high = struct.unpack_from("<HHHH", data, position + 1)
            # A frame may reach beyond the screen, and decoders then widen the screen.
            width, height = max(width, left + wide), max(height, top + high)
            check_size(width, height)
            return Screened(data[:start] + control + data[position:], width, height)
        if block[:1] == b";":
            raise damaged("GIF", "no frame before the end mark")
        if len(block) < 2:
            break
        if block[:1] != b"!":
            raise damaged("GIF", "an unknown block")
        end = _after_sub_blocks(data, position + 2)
        if block[1] == 0xF9 and end == position + 8:
            control = data[position:end]
        position = end
    raise truncated("GIF")


def _after_sub_blocks(data: bytes, position: int) -> int:
    end = min(len(data), _MAX_GIF_PREFACE)
    while position < end and data[position]:
        position += 1 + data[position]
    if position >= _MAX_GIF_PREFACE:
        raise damaged("GIF", f"no frame in the first {_MAX_GIF_PREFACE:,} bytes")
    return position + 1


# Comments come in pieces of one to 255 bytes, each of which is a step; no comment needs this much.
_MAX_GIF_PREFACE = 2**24


def bmp(data: bytes) -> Screened:
    """A BMP as it is, its size checked."""
    if len(data) < 26:
        raise truncated("BMP")
    (header,) = struct.unpack_from("<I", data, 14)
    width, height = struct.unpack_from("<HH" if header == 12 else "<ii", data, 18)
    check_size(width, abs(height))  # A negative height means that the rows run downwards.
    return Screened(data, width, abs(height))


# Two numbers after the kind, between white space and comments. Each repetition starts with another character than it
# ends before, so the search is linear.
_PPM_HEADER = re.compile(rb"P[1-6](?:\s|#[^\r\n]*[\r\n])+(\d{1,10})(?:\s|#[^\r\n]*[\r\n])+(\d{1,10})(?=[\s#])")


def ppm(data: bytes) -> Screened:
    """A PBM, PGM or PPM as it is, its size checked."""
    found = _PPM_HEADER.match(data)
    if found is None:
        raise damaged("PPM", "no readable width and height")
    width, height = int(found[1]), int(found[2])
    check_size(width, height)
    return Screened(data, width, height)


_TIFF_BYTES = {1: 1, 2: 1, 3: 2, 4: 4, 5: 8, 6: 1, 7: 1, 8: 2, 9: 4, 10: 8, 11: 4, 12: 8}
# The tags that pixels depend on, by the types that a well-made file gives them, and the most values they may hold.
_INTEGER, _RATIONAL, _RAW = (1, 3, 4), (5,), (7,)
_TIFF_TAGS = {
    256: (_INTEGER, 1),  # width
    257: (_INTEGER, 1),  # height
    258: (_INTEGER, 8),  # bits per sample
    259: (_INTEGER, 1),  # compression
    262: (_INTEGER, 1),  # photometric interpretation
    266: (_INTEGER, 1),  # fill order
    273: (_INTEGER, MAX_PARTS),  # strip offsets
    277: (_INTEGER, 1),  # samples per pixel
    278: (_INTEGER, 1),  # rows per strip
    279: (_INTEGER, MAX_PARTS),  # strip sizes
    284: (_INTEGER, 1),  # planes
    292: (_INTEGER, 1),  # group 3 options
    293: (_INTEGER, 1),  # group 4 options
    317: (_INTEGER, 1),  # predictor
    320: (_INTEGER, 3 * 65536),  # palette
    322: (_INTEGER, 1),  # tile width
    323: (_INTEGER, 1),  # tile height
    324: (_INTEGER, MAX_PARTS),  # tile offsets
    325: (_INTEGER, MAX_PARTS),  # tile sizes
    338: (_INTEGER, 8),  # extra samples
    339: (_INTEGER, 8),  # sample format
    347: (_RAW, 65536),  # JPEG tables
    529: (_RATIONAL, 3),  # YCbCr coefficients
    530: (_INTEGER, 2),  # YCbCr subsampling
    531: (_INTEGER, 1),  # YCbCr positioning
    532: (_RATIONAL, 6),  # black and white points
}
# Not among them, on purpose: old-style JPEG, which no writer makes any more, and LZMA, Zstandard and WebP, which few
# readers know and whose headers ask for memory.
_TIFF_COMPRESSIONS = {1: "none", 2: "CCITT", 3: "CCITT", 4: "CCITT", 5: "LZW", 7: "JPEG", 8: "deflate"} | {
    32773: "packbits",
    32946: "deflate",
}


def tiff(data: bytes) -> Screened:
    """A TIFF whose first directory is replaced by a sound copy that holds only what the pixels need."""
    order = "<" if data[:2] == b"II" else ">"
    if len(data) < 8:
        raise truncated("TIFF")
    (start,) = struct.unpack_from(order + "I", data, 4)
    if start + 2 > len(data):
        raise truncated("TIFF")
    (count,) = struct.unpack_from(order + "H", data, start)
    if start + 2 + 12 * count > len(data):
        raise truncated("TIFF")
    entries: dict[int, bytes] = {}
    values: dict[int, int] = {}
    for position in range(start + 2, start + 2 + 12 * count, 12):
        tag, kind, number, offset = struct.unpack_from(order + "HHII", data, position)
        if tag == 274 and kind == 3:
            values[tag] = struct.unpack_from(order + "H", data, position + 8)[0]
        if tag not in _TIFF_TAGS or tag in entries:
            continue
        kinds, most = _TIFF_TAGS[tag]
        if kind not in kinds or not 0 < number <= most:
            raise damaged("TIFF", f"{number} values of type {kind} under tag {tag}")
        length = number * _TIFF_BYTES[kind]
        if length > 4 and offset + length > len(data):
            raise truncated("TIFF")
        entries[tag] = data[position : position + 12]
        values[tag] = _first_value(entries[tag], order) if number == 1 and kind in _INTEGER else number
    _check_tiff(values, entries, order)
    orientation = values.get(274, 1)
    # The copy is never longer than the original, so it takes its place: bytes appended to a file that was cut short
    # would be read as pixels.
    directory = struct.pack(order + "H", len(entries)) + b"".join(entries[tag] for tag in sorted(entries)) + bytes(4)
    clean = b"".join([data[:start], directory, memoryview(data)[start + len(directory) :]])
    return Screened(clean, values[256], values[257], orientation if 1 <= orientation <= 8 else 1)


def _first_value(entry: bytes, order: str) -> int:
    kind = int.from_bytes(entry[2:4], "little" if order == "<" else "big")
    return int(struct.unpack_from(order + {1: "B", 3: "H", 4: "I"}[kind], entry, 8)[0])


def _check_tiff(values: dict[int, int], entries: dict[int, bytes], order: str) -> None:
    """Refuse a directory that asks for more work or memory than its pixels are worth."""
    width, height = values.get(256, 0), values.get(257, 0)
    check_size(width, height)
    compression = values.get(259, 1)
    if compression not in _TIFF_COMPRESSIONS:
        raise ImageError(f"not supported: a TIFF compressed by method {compression}; save it as PNG")
    planes = values.get(277, 1) if values.get(284, 1) == 2 else 1
    if values.get(277, 1) > 6:
        raise ImageError(f"not supported: a TIFF of {values[277]} samples a pixel; save it as PNG")
    pieces = []
    if 273 in entries:
        rows = max(1, min(values.get(278, height), height))
        pieces.append((273, -(-height // rows) * planes))
    if 324 in entries:
        tile_width, tile_height = values.get(322, 0), values.get(323, 0)
        check_size(tile_width, tile_height)
        pieces.append((324, -(-width // tile_width) * -(-height // tile_height) * planes))
    if len(pieces) != 1:
        raise damaged("TIFF", "both strips and tiles" if pieces else "neither strips nor tiles")
    for tag, most in pieces:
        # More strips than rows would have the same pixels decoded over and over.
        number = struct.unpack_from(order + "I", entries[tag], 4)[0]
        if number > most:
            raise damaged("TIFF", f"{number} pieces where {most} make the picture")


SCREENS: dict[str, Callable[[bytes], Screened]] = {
    "JPEG": jpeg,
    "PNG": png,
    "WEBP": webp,
    "GIF": gif,
    "BMP": bmp,
    "TIFF": tiff,
    "PPM": ppm,
}


def kind_of(data: bytes) -> str:
    """Which of the admitted formats the file starts like; an ImageError that names what else it is."""
    head = data[:16]
    if head.startswith(b"\xff\xd8\xff"):
        return "JPEG"
    if head.startswith(_PNG_SIGNATURE):
        return "PNG"
    if head.startswith(b"RIFF") and head[8:12] == b"WEBP":
        return "WEBP"
    if head.startswith((b"GIF87a", b"GIF89a")):
        return "GIF"
    if head.startswith((b"II*\x00", b"MM\x00*")):
        return "TIFF"
    if head[:1] == b"P" and head[1:2] in b"123456" and head[2:3] in b" \t\r\n#" and len(head) > 2:
        return "PPM"
    if head.startswith(b"BM"):
        return "BMP"
    raise ImageError(f"{_foreign(data)}; wanted: JPEG, PNG, WebP, GIF, BMP, TIFF or PPM")


_FOREIGN_STARTS = {
    b"%PDF": "a PDF document",
    b"PK\x03\x04": "a ZIP archive",
    b"PK\x05\x06": "a ZIP archive",
    b"\x1f\x8b": "a gzip archive",
    b"7z\xbc\xaf": "a 7z archive",
    b"Rar!": "a RAR archive",
    b"8BPS": "a Photoshop document",
    b"\x00\x00\x01\x00": "a Windows icon",
    b"\xff\x0a": "a JPEG XL image",
    b"\x00\x00\x00\x0cJXL ": "a JPEG XL image",
    b"\x00\x00\x00\x0cjP": "a JPEG 2000 image",
    b"\xff\x4f\xff\x51": "a JPEG 2000 image",
    b"II+\x00": "a BigTIFF image",
    b"MM\x00+": "a BigTIFF image",
    b"v/1\x01": "an OpenEXR image",
    b"DDS ": "a DirectDraw surface",
    b"SIMPLE": "a FITS file",
    b"\x93NUMPY": "a numpy array file",
    b"\x89HDF": "an HDF5 file",
    b"PAR1": "a Parquet file",
    b"Pf": "a floating-point PFM image",
    b"PF": "a floating-point PFM image",
    b"P7": "a PAM image",
    b"version https://git-lfs": "a Git LFS pointer (run `git lfs pull`)",
}
_FOREIGN_BRANDS = {b"avif": "an AVIF image", b"heic": "a HEIC image", b"heix": "a HEIC image", b"mif1": "a HEIF image"}


def _foreign(data: bytes) -> str:
    """Return a description of a file that has none of the accepted formats."""
    for start, words in _FOREIGN_STARTS.items():
        if data.startswith(start):
            return f"not supported: {words}" if "image" in words else f"not an image: {words}"
    if data[4:8] == b"ftyp":
        return f"not supported: {_FOREIGN_BRANDS.get(data[8:12], 'a video or an image in an MP4 box')}"
    text = data[:1024].removeprefix(b"\xef\xbb\xbf").lstrip().lower()
    if text.startswith((b"<!doctype html", b"<html", b"<head", b"<body")):
        return "not an image: an HTML page, probably an error page saved under an image's name; download it again"
    if text.startswith((b"<svg", b"<?xml", b"<!doctype svg")):
        return "not supported: an SVG drawing or another XML document"
    if not data.strip(b"\x00"):
        return "not an image: nothing but zero bytes"
    if all(byte >= 32 or byte in b"\t\r\n\f" for byte in data[:1024]) and b"\xff" not in data[:1024]:
        return "not an image: text"
    return "not an image, or of a kind that is not supported"

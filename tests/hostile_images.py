"""Three thousand damaged and hostile image files, made from real images, the same ones in every run.

`python hostile_images.py <data folder>` decodes them all in one process and prints what happened as JSON: a crash of
that process is a failed test.
"""

import io
import json
import random
import resource
import struct
import sys
import time
import zlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from PIL import Image

PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"
SIDES = (0, 1, 7, 255, 8001, 9000, 16384, 30000, 50000, 65535, 65536, 2**24 - 1, 2**31 - 1, 2**31, 2**32 - 1)
REASONS = ("truncated", "too large", "zero size", "damaged", "not an image", "not supported", "empty")


def real_images(folder: Path, count: int = 6) -> list[Image.Image]:
    import pyarrow.parquet as parquet

    images = []
    for file in ("cifar10_test.parquet", "tiny_imagenet_val.parquet"):
        rows = parquet.ParquetFile(folder / file).read_row_group(0, columns=["image"]).column("image")
        images += [Image.open(io.BytesIO(rows[100 * row].as_py())).convert("RGB") for row in range(count // 2)]
    return images


def saved(image: Image.Image, kind: str, **options: object) -> bytes:
    stream = io.BytesIO()
    # Copies, because Pillow leaves the settings of one save in an image for the next.
    options["append_images"] = [frame.copy() for frame in options.get("append_images", [])]
    image.copy().save(stream, kind, **options)
    return stream.getvalue()


def variants(image: Image.Image) -> dict[str, bytes]:
    """One image in every kind of file that is read, whole and sound."""
    exif = Image.Exif()
    exif[0x0112] = 6
    exif[0x010E] = "a description"
    clear = image.convert("RGBA")
    clear.putalpha(image.convert("L"))
    palette = image.quantize(32)
    deep = Image.fromarray(np.asarray(image.convert("L")).astype(np.uint16) * 257)
    frames = [image.rotate(90), image.rotate(180)]
    numbers = " ".join(map(str, np.asarray(image).reshape(-1).tolist()))
    text = f"P3 {image.width} {image.height} 255\n{numbers}\n"
    return {
        "jpeg": saved(image, "JPEG", quality=90),
        "jpeg progressive": saved(image, "JPEG", progressive=True, exif=exif, comment=b"a comment"),
        "jpeg cmyk": saved(image.convert("CMYK"), "JPEG"),
        "jpeg grey": saved(image.convert("L"), "JPEG", restart_marker_rows=1),
        "mpo": saved(image, "MPO", save_all=True, append_images=frames),
        "png": saved(image, "PNG", exif=exif),
        "png alpha": saved(clear, "PNG"),
        "png palette": saved(palette, "PNG", transparency=3),
        "png deep": saved(deep, "PNG"),
        "png animated": saved(image, "PNG", save_all=True, append_images=frames),
        "webp": saved(image, "WEBP"),
        "webp lossless": saved(image, "WEBP", lossless=True),
        "webp alpha": saved(clear, "WEBP", exif=exif),
        "webp animated": saved(image, "WEBP", save_all=True, append_images=frames),
        "gif": saved(palette, "GIF", comment=b"a comment"),
        "gif animated": saved(palette, "GIF", save_all=True, append_images=[f.quantize(32) for f in frames]),
        "bmp": saved(image, "BMP"),
        "bmp palette": saved(palette, "BMP"),
        "tiff": saved(image, "TIFF"),
        "tiff lzw": saved(image, "TIFF", compression="tiff_lzw", exif=exif),
        "tiff deflate": saved(clear, "TIFF", compression="tiff_adobe_deflate"),
        "tiff jpeg": saved(image, "TIFF", compression="jpeg"),
        "tiff deep": saved(deep, "TIFF", compression="packbits"),
        "tiff frames": saved(image, "TIFF", save_all=True, append_images=frames),
        "ppm": saved(image, "PPM"),
        "pgm": saved(image.convert("L"), "PPM"),
        "ppm text": text.encode(),
    }


def png_chunks(data: bytes) -> list[tuple[bytes, bytes]]:
    chunks, position = [], 8
    while position < len(data):
        (length,) = struct.unpack_from(">I", data, position)
        chunks.append((data[position + 4 : position + 8], data[position + 8 : position + 8 + length]))
        position += 12 + length
    return chunks


def png_of(chunks: list[tuple[bytes, bytes]]) -> bytes:
    """A PNG whose check sums are right, whatever else is wrong."""
    parts = [
        struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body)) for kind, body in chunks
    ]
    return PNG_SIGNATURE + b"".join(parts)


def jpeg_segments(data: bytes) -> list[bytes]:
    segments, position = [], 2
    while data[position + 1] != 0xDA:
        (length,) = struct.unpack_from(">H", data, position + 2)
        segments.append(data[position : position + 2 + length])
        position = data.index(b"\xff", position + 2 + length)
    return [*segments, data[position:]]


def riff_chunks(data: bytes) -> list[bytes]:
    chunks, position = [], 12
    while position < len(data):
        (length,) = struct.unpack_from("<I", data, position + 4)
        end = position + 8 + length + length % 2
        chunks.append(data[position:end])
        position = end
    return chunks


def shuffled_parts(data: bytes, rng: random.Random) -> bytes:
    """The file with one of its own building blocks dropped, doubled, moved or changed, and its lengths right."""
    if data.startswith(PNG_SIGNATURE):
        chunks = png_chunks(data)
        _disturb(chunks, rng)
        place = rng.randrange(len(chunks))
        kind, body = chunks[place]
        if rng.random() < 0.5 and body:
            chunks[place] = kind, _flipped(body, rng, 3)
        return png_of(chunks)
    if data.startswith(b"\xff\xd8"):
        segments = jpeg_segments(data)
        _disturb(segments, rng)
        return b"\xff\xd8" + b"".join(segments)
    if data.startswith(b"RIFF"):
        chunks = riff_chunks(data)
        _disturb(chunks, rng)
        body = b"WEBP" + b"".join(chunks)
        return b"RIFF" + struct.pack("<I", len(body)) + body
    if data[:2] in (b"II", b"MM"):
        return _with_other_tag(data, rng)
    return _spliced(data, rng)


def _disturb(parts: list, rng: random.Random) -> None:
    place, other = rng.randrange(len(parts)), rng.randrange(len(parts))
    match rng.randrange(4):
        case 0:
            if len(parts) > 1:
                del parts[place]
        case 1:
            parts.insert(other, parts[place])
        case 2:
            parts[place], parts[other] = parts[other], parts[place]
        case _:
            parts[place:place] = [parts[place]] * rng.choice([2, 50, 500])


def _with_other_tag(data: bytes, rng: random.Random) -> bytes:
    order = "<" if data[:2] == b"II" else ">"
    (start,) = struct.unpack_from(order + "I", data, 4)
    (count,) = struct.unpack_from(order + "H", data, start)
    changed = bytearray(data)
    position = start + 2 + 12 * rng.randrange(count)
    field, code, values = rng.choice(
        [
            (0, "H", (254, 256, 258, 259, 262, 273, 277, 278, 279, 284, 317, 322, 324, 330, 34665, 700)),
            (2, "H", (0, 1, 2, 3, 4, 5, 7, 12, 13, 16, 255)),
            (4, "I", (0, 1, 2, 3, 100, 65536, 10**6, 2**31, 2**32 - 1)),
            (8, "I", (0, 1, 2, 5, 8, 100, 65535, 10**6, 2**31, 2**32 - 1)),
        ]
    )
    struct.pack_into(order + code, changed, position + field, rng.choice(values))
    return bytes(changed)


def _flipped(data: bytes, rng: random.Random, most: int) -> bytes:
    changed = bytearray(data)
    # Half of the damage goes to the head, where files say what they are.
    reach = len(changed) if rng.random() < 0.5 else min(len(changed), 120)
    for _ in range(rng.randint(1, most)):
        changed[rng.randrange(reach)] ^= 1 << rng.randrange(8)
    return bytes(changed)


def _spliced(data: bytes, rng: random.Random) -> bytes:
    start = rng.randrange(len(data))
    end = min(len(data), start + rng.choice([1, 2, 7, 64, 700]))
    piece = rng.choice([b"", data[start:end] * 2, bytes(end - start), b"\xff" * (end - start), rng.randbytes(40)])
    return data[:start] + piece + data[end:]


def with_other_size(data: bytes, width: int, height: int) -> bytes:
    """The file with another size in its header and everything else as it was."""
    changed = bytearray(data)
    if data.startswith(PNG_SIGNATURE):
        chunks = png_chunks(data)
        chunks[0] = b"IHDR", struct.pack(">II", width, height) + chunks[0][1][8:]
        return png_of(chunks)
    if data.startswith(b"\xff\xd8"):
        position = 2
        while not (0xC0 <= data[position + 1] <= 0xC2):
            position = data.index(b"\xff", position + 2 + struct.unpack_from(">H", data, position + 2)[0])
        struct.pack_into(">HH", changed, position + 5, height & 0xFFFF, width & 0xFFFF)
    elif data.startswith(b"RIFF"):
        kind = data[12:16]
        if kind == b"VP8X":
            for place, side in ((24, width), (27, height)):
                changed[place : place + 3] = (side - 1 & 0xFFFFFF).to_bytes(3, "little")
        elif kind == b"VP8L":
            struct.pack_into("<I", changed, 21, (width - 1 & 0x3FFF) | (height - 1 & 0x3FFF) << 14)
        else:
            struct.pack_into("<HH", changed, 26, width & 0x3FFF, height & 0x3FFF)
    elif data.startswith(b"GIF"):
        struct.pack_into("<HH", changed, 6, width & 0xFFFF, height & 0xFFFF)
        if width % 2:
            struct.pack_into("<HH", changed, data.index(b",") + 5, width & 0xFFFF, height & 0xFFFF)
    elif data.startswith(b"BM"):
        struct.pack_into("<II", changed, 18, width, height)
    elif data[:2] in (b"II", b"MM"):
        order = "<" if data[:2] == b"II" else ">"
        (start,) = struct.unpack_from(order + "I", data, 4)
        (count,) = struct.unpack_from(order + "H", data, start)
        for position in range(start + 2, start + 2 + 12 * count, 12):
            (tag,) = struct.unpack_from(order + "H", data, position)
            if tag in (256, 257):
                struct.pack_into(order + "HII", changed, position + 2, 4, 1, width if tag == 256 else height)
    else:
        head, _, rest = data.partition(b"255\n")
        return head[:2] + b"\n%d %d\n255\n" % (width, height) + rest
    return bytes(changed)


def tiff_of(entries: list[tuple[int, int, int, int]], tail: bytes = b"") -> bytes:
    """A little-endian TIFF of a directory at byte 8 and whatever follows it."""
    body = b"".join(struct.pack("<HHII", *entry) for entry in entries)
    return b"II*\x00\x08\x00\x00\x00" + struct.pack("<H", len(entries)) + body + bytes(4) + tail


def bombs(image: Image.Image) -> Iterator[bytes]:
    """Small files that ask for large work."""
    header = struct.pack(">IIBBBBB", 50000, 50000, 8, 2, 0, 0, 0)
    yield png_of([(b"IHDR", header), (b"IDAT", zlib.compress(bytes(50_000_000))), (b"IEND", b"")])
    small = png_chunks(saved(image, "PNG"))
    for megabytes in (1, 40):
        packed = zlib.compress(bytes(megabytes * 2**20), 9)
        for body in (
            (b"zTXt", b"Comment\0\0" + packed),
            (b"iTXt", b"Comment\0\1\0\0\0" + packed),
            (b"iCCP", b"profile\0\0" + packed),
        ):
            yield png_of([small[0], body, *small[1:]])
            yield png_of([small[0]] + [body] * 100 + small[1:])
            yield png_of([*small[:-1], body, small[-1]])
    yield png_of([small[0], (b"tEXt", b"Comment\0" + bytes(5_000_000)), *small[1:]])
    yield png_of([small[0]] + [(b"tEXt", b"a\0b")] * 300_000 + small[1:])
    yield png_of([small[0], (b"eXIf", exif_bomb(200_000)), *small[1:]])
    yield png_of([small[0], (b"acTL", struct.pack(">II", 2**31 - 1, 0)), *small[1:]])
    yield png_of([small[0], (b"PLTE", bytes(3_000_000)), (b"tRNS", bytes(1_000_000)), *small[1:]])

    yield b"GIF89a" + struct.pack("<HHBBB", 65535, 65535, 0x80, 0, 0) + bytes(6) + b"," + bytes(9) + b"\x02\x00;"
    yield b"GIF89a" + struct.pack("<HHBBB", 1, 1, 0, 0, 0) + b"," + struct.pack("<HHHHB", 65535, 65535, 65535, 65535, 0)
    yield b"GIF89a" + struct.pack("<HHBBB", 1, 1, 0, 0, 0) + b"!\xfe\x01a\x00" * 300_000 + b";"
    yield (
        b"GIF89a"
        + struct.pack("<HHBBB", 7000, 7000, 0, 0, 0)
        + b","
        + struct.pack("<HHHHB", 0, 0, 7000, 7000, 0)
        + b"\x08\x00;"
    )

    yield b"GIF89a" + struct.pack("<HHBBB", 1, 1, 0, 0, 0) + b"!\xfe" + b"\x01a" * 10_000_000

    size = [(256, 4, 1, 30), (257, 4, 1, 30)]
    colour = [(258, 3, 1, 8), (259, 3, 1, 1), (262, 3, 1, 1), (277, 3, 1, 1)]
    sound = size + colour
    yield tiff_of([(256, 4, 1, 10**9), (257, 4, 1, 10**9), *colour, (273, 4, 1, 200), (278, 4, 1, 30)], bytes(5000))
    yield tiff_of([*sound, (273, 4, 2**30, 200), (278, 4, 1, 1), (279, 4, 2**30, 200)], bytes(5000))
    yield tiff_of([*sound, (273, 4, 200_000, 200), (278, 4, 1, 29), (279, 4, 200_000, 200)], bytes(900_000))
    yield tiff_of([*sound, (322, 4, 1, 60_000), (323, 4, 1, 60_000), (324, 4, 1, 200)], bytes(5000))
    yield tiff_of([*sound, (322, 4, 1, 0), (323, 4, 1, 0), (324, 4, 1, 200)], bytes(5000))
    yield tiff_of(
        [*size, (258, 3, 1, 8), (259, 3, 1, 5), (262, 3, 1, 1), (277, 3, 1, 60_000), (273, 4, 1, 200)], bytes(5000)
    )
    for compression in (2, 3, 4, 5, 6, 7, 8, 32773, 34925, 50000, 50001, 9999):
        wide = [(256, 4, 1, 7000), (257, 4, 1, 7000), (258, 3, 1, 1), (259, 3, 1, compression), (262, 3, 1, 1)]
        yield tiff_of([*wide, (273, 4, 1, 200), (278, 4, 1, 7000), (279, 4, 1, 900)], bytes(range(256)) * 4)
    yield tiff_of([(tag, 1, 700_000, 8) for tag in range(20_000)], bytes(500_000))
    yield tiff_of(
        [*sound, (273, 4, 1, 200), (278, 4, 1, 30)] + [(700 + n, 7, 400_000, 8) for n in range(20_000)], bytes(200_000)
    )
    yield b"II*\x00\x08\x00\x00\x00\xff\xff"
    yield b"II*\x00\xff\xff\xff\xff"

    segments = jpeg_segments(saved(image, "JPEG"))
    exif = exif_bomb(65_000)
    app1 = b"\xff\xe1" + struct.pack(">H", len(exif) + 8) + b"Exif\0\0" + exif
    yield b"\xff\xd8" + app1 + b"".join(segments)
    yield b"\xff\xd8" + app1 * 200 + b"".join(segments)
    yield b"\xff\xd8" + b"\xff\xfe\x00\x02" * 500_000 + b"".join(segments)
    yield b"\xff\xd8" + bytes(5_000_000) + b"".join(segments)
    yield b"\xff\xd8" + b"\xff" * 5_000_000 + b"".join(segments)
    yield many_scans(image)
    yield many_scans(image) + b"\xff\xfe\x00\x02" * 1_000_000

    for height in (2**31 - 1, -(2**31), -1, 0x00FFFFFF):
        for width in (1, -1, 2**31 - 1):
            yield (
                b"BM"
                + struct.pack("<IIIIiiHHIIIIII", 9000, 0, 54, 40, width, height, 1, 24, 0, 0, 0, 0, 0, 0)
                + bytes(90)
            )
    for method, bits in ((1, 8), (2, 4), (3, 32), (4, 24), (5, 24), (9, 24)):
        start = b"BM" + struct.pack("<IIIIiiHHIIIIII", 9000, 0, 1078, 40, 5000, 5000, 1, bits, method, 0, 0, 0, 0, 0)
        yield start + bytes(1024) + b"\x00\x02\xff\xff" * 1000
        yield start + bytes(1024) + bytes(5_000_000)
    for numbers in (
        b"99999 99999",
        b"9" * 40 + b" 1",
        b"4000000000 4000000000",
        b"-1 -1",
        b"0 0",
        b"1e9 1e9",
        b"7999 8000",
    ):
        for kind in (b"P1", b"P2", b"P3", b"P4", b"P5", b"P6"):
            yield kind + b"\n" + numbers + b"\n255\n" + b"1 2 3 " * 10
    yield b"P5\n" + b"#" * 1_000_000 + b"\n4 4\n255\n" + bytes(16)
    yield b"P5 " + b"# x\n" * 300_000 + b"4 4\n255\n" + bytes(16)
    yield b"P6\n2000 2000\n254\n" + bytes(12_000_000)
    yield b"P3\n2000 2000\n255\n" + b"1 " * 12_000_000
    canvas = b"VP8X\x0a\0\0\0\x02\0\0\0" + b"\xff" * 6
    for frames in (1, 20_000):
        body = b"WEBP" + canvas + b"ANIM\x06\0\0\0" + bytes(6) + (b"ANMF\x10\0\0\0" + bytes(16)) * frames
        yield b"RIFF" + struct.pack("<I", len(body)) + body
    body = b"WEBP" + canvas[:12] + struct.pack("<I", 30)[:3] * 2 + b"JUNK\0\0\0\0" * 300_000
    yield b"RIFF" + struct.pack("<I", len(body)) + body


def exif_bomb(size: int) -> bytes:
    """An EXIF block whose thousands of entries each claim the whole block as their value."""
    count = min(size // 24, 65_000)
    entries = b"".join(struct.pack("<HHII", 1000 + number, 7, size - 100, 8) for number in range(count))
    return (b"II*\x00\x08\x00\x00\x00" + struct.pack("<H", count) + entries).ljust(size, b"\0")


def many_scans(image: Image.Image) -> bytes:
    """A progressive JPEG of 6000 x 6000 pixels that repeats its last scan three thousand times."""
    data = with_other_size(saved(image, "JPEG", progressive=True), 6000, 6000)
    last = data.rindex(b"\xff\xda")
    return data[:-2] + data[last:-2] * 3000 + b"\xff\xd9"


def foreigners(image: Image.Image, rng: random.Random) -> Iterator[bytes]:
    """Files that are no image, or of a kind that is not read."""
    yield b""
    yield b"<!DOCTYPE html><html><body>404 not found</body></html>"
    yield b"\n  <html><head><title>403</title></head></html>"
    yield b"<?xml version='1.0'?><Error><Code>AccessDenied</Code></Error>"
    yield b"%PDF-1.7\n" + bytes(100)
    yield b"PK\x03\x04" + rng.randbytes(300)
    yield b"\x1f\x8b" + rng.randbytes(300)
    yield b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n"
    yield b"\x00\x00\x00\x1cftypavif" + rng.randbytes(100)
    yield b"\x00\x00\x00\x1cftypheic" + rng.randbytes(100)
    yield b"II+\x00\x08\x00\x00\x00" + rng.randbytes(100)
    yield b"Pf\n2 2\n-1.0\n" + bytes(16)
    yield bytes(1000)
    yield b"just some text\n" * 10
    yield saved(image, "ICO")
    yield saved(image, "TGA")
    yield saved(image, "JPEG2000")
    yield saved(image, "PCX")
    for start in (
        b"",
        b"\xff\xd8\xff",
        PNG_SIGNATURE,
        b"RIFF\xff\0\0\0WEBP",
        b"GIF89a",
        b"BM",
        b"II*\0",
        b"MM\0*",
        b"P6\n",
    ):
        for _ in range(20):
            yield start + rng.randbytes(rng.choice([0, 1, 5, 30, 3000]))


def files(folder: Path, count: int = 3000) -> Iterator[tuple[str, bytes]]:
    """(what was done, the file), `count` of them at least."""
    rng = random.Random(20)
    images = real_images(folder)
    sound = [data for image in images for data in variants(image).values()]
    made = 0
    for data in sound:
        yield "sound", data
    for data in bombs(images[0]):
        made += 1
        yield "bomb", data
    for data in foreigners(images[0], rng):
        made += 1
        yield "foreign", data
    for data in sound[: len(variants(images[0]))]:
        for _ in range(16):
            made += 1
            yield "size", with_other_size(data, rng.choice(SIDES), rng.choice(SIDES))
    while made < count:
        data = rng.choice(sound)
        made += 4
        yield "flips", _flipped(data, rng, 20)
        yield "cut", data[: rng.randrange(len(data))]
        yield "splice", _spliced(data, rng)
        yield "surgery", shuffled_parts(data, rng)


def reason_of(problem: Exception) -> str:
    words = str(problem).removeprefix("the given bytes: ")
    return next((reason for reason in REASONS if words.startswith(reason)), f"none of the known: {words}")


def main(folder: Path) -> dict:
    from protodcs.data.image import decode
    from protodcs.errors import ImageError

    # Whoever asks for more than this is told no at once, whatever the machine would grant.
    resource.setrlimit(resource.RLIMIT_AS, (6 * 2**30, resource.RLIM_INFINITY))
    outcomes: dict[str, Counter] = {}
    slowest, unsound = 0.0, []
    decode(saved(Image.new("RGBA", (9, 9)), "WEBP"))
    before = 0
    for number, (kind, data) in enumerate(files(folder)):
        if kind != "sound" and not before:
            before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        start = time.process_time()
        try:
            pixels = decode(data)
            outcome = "decoded"
            if pixels.dtype != np.uint8 or pixels.ndim != 3 or pixels.shape[2] != 3 or not pixels.flags.c_contiguous:
                unsound.append(f"{kind} {number}: {pixels.shape} {pixels.dtype}")
        except ImageError as problem:
            outcome = reason_of(problem)
            if "memory" in str(problem):
                unsound.append(f"{kind} {number}: asked for too much memory")
        slowest = max(slowest, time.process_time() - start)
        outcomes.setdefault(kind, Counter())[outcome] += 1
    growth = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    return {"outcomes": outcomes, "slowest": slowest, "growth": growth * 1024, "unsound": unsound}


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]))))

"""Decoding: the same pixels from every kind of holder, rules for odd modes, and refusals in words."""

import contextlib
import io
import json
import os
import subprocess
import sys
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageFile, ImageOps

import hostile_images
from hostile_images import saved
from protodcs.data import decode
from protodcs.data.image import MAX_BYTES, MAX_PIXELS, MAX_SLOW_BYTES
from protodcs.data.sanitize import orientation_of
from protodcs.errors import ImageError


@pytest.fixture(scope="module")
def photo(data_folder) -> Image.Image:
    return hostile_images.real_images(data_folder)[-1]


def pattern(height: int = 6, width: int = 9) -> np.ndarray:
    """No row, column or channel like another."""
    return np.arange(height * width * 3, dtype=np.uint8).reshape(height, width, 3)


def on_white(colour: np.ndarray, alpha: np.ndarray) -> np.ndarray:
    return np.rint(colour * (alpha / 255.0) + 255.0 * (1 - alpha / 255.0)).astype(np.uint8)


# Where it comes from


def test_every_kind_of_holder_gives_the_same_pixels(photo, tmp_path):
    data = saved(photo, "PNG")
    path = tmp_path / "photo.PNG"
    path.write_bytes(data)
    wanted = np.asarray(photo)
    holders = [
        path,
        str(path),
        data,
        bytearray(data),
        memoryview(data),
        photo,
        Image.open(path),
        wanted,
        wanted[:, ::-1][:, ::-1],
    ]
    for holder in holders:
        pixels = decode(holder)
        assert np.array_equal(pixels, wanted)
        assert pixels.dtype == np.uint8
        assert pixels.flags.c_contiguous
        assert pixels.flags.writeable
        assert type(pixels) is np.ndarray


def test_the_result_is_the_callers_own():
    array = pattern()
    image = Image.fromarray(array)
    for holder in (array, image):
        decode(holder)[:] = 0
        assert np.array_equal(decode(holder), pattern())


@pytest.mark.parametrize("kind", ["PNG", "BMP", "TIFF", "PPM", "JPEG", "GIF", "WEBP"])
def test_files_decode_as_pillow_decodes_them(photo, kind):
    data = saved(photo, kind)
    assert np.array_equal(decode(data), np.asarray(Image.open(io.BytesIO(data)).convert("RGB")))


def test_real_sets_decode_as_pillow_decodes_them(data_folder):
    import pyarrow.parquet as parquet

    for file in ("cifar10_test.parquet", "tiny_imagenet_val.parquet", "dtd10_64.parquet"):
        rows = parquet.ParquetFile(data_folder / file).read_row_group(0, columns=["image"]).column("image")
        for row in rows.to_pylist()[::10]:
            assert np.array_equal(decode(row), np.asarray(Image.open(io.BytesIO(row)).convert("RGB")))


def test_a_large_image_goes_through_strips_and_comes_out_whole():
    rng = np.random.default_rng(0)
    array = rng.integers(0, 256, (1201, 1903, 4), dtype=np.uint8)
    assert np.array_equal(decode(saved(Image.fromarray(array[..., :3]), "PPM")), array[..., :3])
    assert np.array_equal(decode(array), on_white(array[..., :3].astype(float), array[..., 3:].astype(float)))


# Orientation


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "TIFF", "MPO"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_orientation_is_applied(photo, kind, orientation):
    exif = Image.Exif()
    exif[0x0112] = orientation
    options = {"exif": exif} | ({"lossless": True} if kind == "WEBP" else {})
    data = saved(photo.crop((0, 0, 40, 64)), kind, **options)
    wanted = ImageOps.exif_transpose(Image.open(io.BytesIO(data)))
    assert np.array_equal(decode(data), np.asarray(wanted.convert("RGB")))
    assert np.array_equal(decode(Image.open(io.BytesIO(data))), np.asarray(wanted.convert("RGB")))
    assert np.array_equal(decode(wanted), np.asarray(wanted.convert("RGB")))


@pytest.mark.parametrize(
    "block",
    [b"", b"Exif\0\0", b"II*\0\xff\xff\xff\xff", b"II*\0\x08\0\0\0\xff\xff", b"MM\0*\0\0\0\x08", b"\x9e\x01\x02\x03"]
    + [
        b"II*\0\x08\0\0\0\x01\0\x12\x01\x03\0\x01\0\0\0\x09\0\0\0",
        b"II*\0\x08\0\0\0\x01\0\x12\x01\x04\0\x01\0\0\0\x06\0\0\0",
    ],
)
def test_an_unreadable_exif_block_counts_as_none(block):
    assert orientation_of(block) == 1


# Kinds of pixels


def test_grey_is_repeated_over_the_channels():
    grey = pattern()[..., 0]
    wanted = np.repeat(grey[..., None], 3, axis=2)
    for holder in (grey, grey[..., None], Image.fromarray(grey), saved(Image.fromarray(grey), "PNG")):
        assert np.array_equal(decode(holder), wanted)
    bits = Image.fromarray(grey).convert("1")
    assert np.array_equal(decode(saved(bits, "PNG")), np.asarray(bits.convert("RGB")))


def test_transparency_is_laid_on_white():
    rng = np.random.default_rng(1)
    array = rng.integers(0, 256, (64, 64, 4), dtype=np.uint8)
    image = Image.fromarray(array)
    wanted = on_white(array[..., :3].astype(float), array[..., 3:].astype(float))
    for holder in (
        array,
        image,
        saved(image, "PNG"),
        saved(image, "TIFF"),
        saved(image, "WEBP", lossless=True, exact=True),
    ):
        assert np.array_equal(decode(holder), wanted)
    grey = image.convert("LA")
    both = np.asarray(grey).astype(float)
    assert np.array_equal(decode(saved(grey, "PNG")), np.repeat(on_white(both[..., :1], both[..., 1:]), 3, axis=2))


def test_a_transparent_palette_entry_or_colour_becomes_white(photo):
    palette = photo.quantize(16)
    chosen = np.asarray(palette) == 5
    wanted = np.where(chosen[..., None], 255, np.asarray(palette.convert("RGB")))
    for kind in ("PNG", "GIF"):
        assert np.array_equal(decode(saved(palette, kind, transparency=5)), wanted)
    array = pattern()
    wanted = array.copy()
    wanted[2, 3] = 255
    assert np.array_equal(
        decode(saved(Image.fromarray(array), "PNG", transparency=tuple(array[2, 3].tolist()))), wanted
    )
    half = bytes([128] * 16)
    wanted = on_white(np.asarray(palette.convert("RGB")).astype(float), np.full((*chosen.shape, 1), 128.0))
    assert np.array_equal(decode(saved(palette, "PNG", transparency=half)), wanted)


def test_cmyk_is_converted(photo):
    data = saved(photo.convert("CMYK"), "JPEG", quality=95)
    assert np.array_equal(decode(data), np.asarray(Image.open(io.BytesIO(data)).convert("RGB")))
    assert np.abs(decode(data).astype(int) - np.asarray(photo)).mean() < 8


def test_sixteen_bits_are_rounded_to_eight():
    deep = np.arange(65536, dtype=np.uint16).reshape(256, 256)
    wanted = np.rint(deep / 257.0).astype(np.uint8)
    for holder in (
        deep,
        deep[..., None],
        Image.fromarray(deep),
        saved(Image.fromarray(deep), "PNG"),
        saved(Image.fromarray(deep), "TIFF"),
    ):
        assert np.array_equal(decode(holder)[..., 1], wanted)
    assert np.array_equal(decode(np.stack([deep, deep, deep.T], axis=2))[..., 2], wanted.T)
    assert np.array_equal(decode(Image.fromarray(deep.astype(np.int32)))[..., 0], wanted)


def test_floats_from_zero_to_one_are_rounded():
    steps = np.linspace(0, 1, 511).reshape(7, 73, 1).repeat(3, axis=2)
    for kind in (np.float16, np.float32, np.float64):
        array = steps.astype(kind)
        assert np.array_equal(decode(array), np.rint(array.astype(float) * 255).astype(np.uint8))
    grey = steps[..., 0].astype(np.float32)
    wanted = np.rint(grey.astype(float) * 255.0)
    assert np.array_equal(decode(saved(Image.fromarray(grey), "TIFF"))[..., 0], wanted)


@pytest.mark.parametrize("kind", ["GIF", "WEBP", "PNG", "TIFF"])
def test_of_an_animation_the_first_frame_is_taken(photo, kind):
    first = photo.quantize(200).convert("RGB")
    options = {"lossless": True} if kind == "WEBP" else {}
    data = saved(first, kind, save_all=True, append_images=[ImageOps.invert(first), first.rotate(90)], **options)
    assert np.array_equal(decode(data), np.asarray(Image.open(io.BytesIO(data)).convert("RGB")))
    assert np.abs(decode(data).astype(int) - np.asarray(first)).mean() < 1


# Refusals


BAD_ARRAYS = {
    "channels first": (np.zeros((3, 20, 30), np.uint8), r"\(3, 20, 30\), channels first.*transpose\(1, 2, 0\)"),
    "batch": (np.zeros((2, 20, 30, 3), np.uint8), "one image"),
    "line": (np.zeros(30, np.uint8), r"shape \(30,\)"),
    "scalar": (np.array(3, np.uint8), r"shape \(\)"),
    "two channels": (np.zeros((20, 30, 2), np.uint8), r"shape \(20, 30, 2\)"),
    "no pixels": (np.zeros((0, 30, 3), np.uint8), "zero size"),
    "integers": (np.zeros((20, 30, 3), np.int64), "type int64; wanted: uint8"),
    "booleans": (np.zeros((20, 30, 3), bool), "type bool"),
    "objects": (np.zeros((20, 30, 3), object), "type object"),
    "complex": (np.zeros((20, 30, 3), complex), "type complex128"),
    "floats of bytes": (np.full((2, 2, 3), 200.0), "from 200.0 to 200.0; wanted: 0 to 1"),
    "negative floats": (np.full((2, 2, 3), -0.1), "wanted: 0 to 1"),
    "NaN": (np.full((2, 2, 3), np.nan), "wanted: 0 to 1"),
    "huge": (np.broadcast_to(np.uint8(0), (9000, 9000, 3)), "too large: .* 9000 x 9000"),
}


@pytest.mark.parametrize("kind", BAD_ARRAYS)
def test_a_bad_array_is_refused_in_words(kind):
    array, message = BAD_ARRAYS[kind]
    with pytest.raises(ImageError, match=f"the given array: .*{message}"):
        decode(array)


@pytest.mark.parametrize("thing", [None, 7, ["a.png"], {"bytes": b""}, object])
def test_an_object_that_is_no_image_is_refused(thing):
    with pytest.raises(ImageError, match="wanted: a path, the bytes of an image file"):
        decode(thing)


BAD_BYTES = {
    "empty": (b"", "empty"),
    "html": (b"<!DOCTYPE html>\n<html>404</html>", "an HTML page, probably an error page"),
    "text": (b"hello\n", "not an image: text"),
    "svg": (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "SVG"),
    "pdf": (b"%PDF-1.4 and so on", "a PDF document"),
    "zip": (b"PK\x03\x04 and so on", "a ZIP archive"),
    "heic": (b"\0\0\0\x18ftypheic and so on", "a HEIC image"),
    "git lfs": (b"version https://git-lfs.github.com/spec/v1\n", "git lfs pull"),
    "zeros": (bytes(100), "nothing but zero bytes"),
    "noise": (b"\x9e\x01\x02\x03" * 9, "not an image, or of a kind"),
}


@pytest.mark.parametrize("kind", BAD_BYTES)
def test_bytes_that_are_no_image_are_refused_by_name(kind):
    data, message = BAD_BYTES[kind]
    with pytest.raises(ImageError, match=f"^the given bytes: .*{message}"):
        decode(data)
    with pytest.raises(ImageError, match=r"^row 7: "):
        decode(data, "row 7")


def test_pixels_that_have_no_rgb_meaning_are_refused(photo):
    for image, message in (
        (Image.fromarray(np.full((4, 4), 70000, np.int32)), "more than 16 bits"),
        (Image.fromarray(np.full((4, 4), -1, np.int32)), "more than 16 bits"),
        (Image.fromarray(np.full((4, 4), 2.5, np.float32)), "wanted: 0 to 1"),
        (Image.new("LAB", (4, 4)), "LAB"),
    ):
        with pytest.raises(ImageError, match=message):
            decode(image)
        with pytest.raises(ImageError, match=message):
            decode(saved(image, "TIFF"))


def test_paths_that_cannot_be_read_are_refused_by_name(photo, tmp_path, monkeypatch):
    with pytest.raises(ImageError, match=r"missing\.png: no such file"):
        decode(tmp_path / "missing.png")
    with pytest.raises(ImageError, match=r": a folder, not a file"):
        decode(tmp_path)
    with pytest.raises(ImageError, match=r"b\.png: the file cannot be read|no such file"):
        decode("a\0b.png")
    with pytest.raises(ImageError, match="download it first"):
        decode("https://example.org/cat.jpg")
    pipe = tmp_path / "pipe.jpg"
    os.mkfifo(pipe)
    with pytest.raises(ImageError, match=r"pipe\.jpg: a device, pipe or socket"):
        decode(pipe)
    page = tmp_path / "cat.jpg"
    page.write_text("<html><body>503</body></html>")
    with pytest.raises(ImageError, match=r"cat\.jpg: not an image: an HTML page"):
        decode(page)

    def refuse(*_):
        raise PermissionError

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(ImageError, match=r"cat\.jpg: no permission"):
        decode(page)


def test_a_file_beyond_the_limit_is_refused_without_being_read(tmp_path, monkeypatch):
    path = tmp_path / "huge.png"
    with path.open("wb") as stream:
        stream.truncate(MAX_BYTES + 1)
    monkeypatch.setattr(Path, "open", lambda *_: pytest.fail("the file was opened"))
    with pytest.raises(ImageError, match=r"huge\.png: too large: 268,435,457 bytes"):
        decode(path)


@pytest.mark.parametrize("name", hostile_images.variants(Image.new("RGB", (8, 8))))
def test_a_file_cut_anywhere_is_refused_or_gives_the_whole_picture(photo, name):
    data = hostile_images.variants(photo)[name]
    whole = decode(data)
    reasons = []
    # A text file cut inside its last number is a whole file with another number.
    end = len(data) - (4 if name == "ppm text" else 0)
    for length in [*range(0, end, 1 + len(data) // 150), end - 1]:
        try:
            assert np.array_equal(decode(data[:length]), whole), length
        except ImageError as problem:
            reasons.append(hostile_images.reason_of(problem))
    assert reasons.count("truncated") > 10
    # Before that, a file is too short to tell what it is.
    assert set(reasons[reasons.index("truncated") :]) <= {"truncated", "damaged"}


def test_a_header_that_claims_too_much_is_refused_before_decoding(photo, monkeypatch):
    def refuse(*_):
        pytest.fail("the decoder was asked")

    for name, data in hostile_images.variants(photo).items():
        lying = hostile_images.with_other_size(data, 16000, 16000)
        with monkeypatch.context() as patch:
            for part in ("new", "fill"):
                patch.setattr(Image.core, part, refuse)
            with pytest.raises(ImageError, match="too large: its header says 16000 x 16000"):
                decode(lying, name)


def test_what_is_hidden_in_comments_and_profiles_is_never_unpacked(photo):
    chunks = hostile_images.png_chunks(saved(photo, "PNG"))
    packed = hostile_images.zlib.compress(bytes(30_000_000), 9)
    for kind, body in ((b"iTXt", b"Comment\0\1\0\0\0" + packed), (b"iCCP", b"profile\0\0" + packed)):
        data = hostile_images.png_of([chunks[0], (kind, body), *chunks[1:]])
        assert np.array_equal(decode(data), np.asarray(photo))


def test_a_damaged_png_is_refused_even_where_pillow_would_not_notice(photo):
    data = bytearray(saved(photo, "PNG", compress_level=0))
    data[len(data) // 2] ^= 1
    with pytest.raises(ImageError, match="check sum of chunk IDAT"):
        decode(bytes(data))


def test_slow_text_formats_are_limited():
    text = b"P2 2048 1024 255 " + b"12 " * (MAX_SLOW_BYTES // 3 + 1)
    with pytest.raises(ImageError, match=r"of text or run-length PPM.*save it as PNG"):
        decode(text)


def test_a_picture_at_the_limit_is_decoded():
    side = int(MAX_PIXELS**0.5)
    data = saved(Image.new("1", (side, side)), "TIFF", compression="group4")
    assert decode(data).shape == (side, side, 3)


# Side effects


def test_nothing_global_changes_and_no_warning_gets_out(photo):
    before = Image.MAX_IMAGE_PIXELS, ImageFile.LOAD_TRUNCATED_IMAGES, list(warnings.filters)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        inside = list(warnings.filters)
        for data in [*hostile_images.variants(photo).values(), *hostile_images.bombs(photo)]:
            with contextlib.suppress(ImageError):
                decode(data)
        assert list(warnings.filters) == inside
    assert not seen
    assert (Image.MAX_IMAGE_PIXELS, ImageFile.LOAD_TRUNCATED_IMAGES, list(warnings.filters)) == before


def test_threads_do_not_disturb_each_other(photo):
    files = list(hostile_images.variants(photo).values())
    wanted = [decode(data) for data in files]
    with ThreadPoolExecutor(8) as pool:
        for pixels, expected in zip(pool.map(decode, files * 8), wanted * 8, strict=True):
            assert np.array_equal(pixels, expected)


# Three thousand strangers


def test_three_thousand_hostile_files_are_decoded_or_refused_in_words(data_folder):
    """One process takes them all: no crash, no other error, no warning, no runaway memory, no long wait."""
    child = subprocess.run(
        [sys.executable, "-W", "error", "-X", "faulthandler", hostile_images.__file__, str(data_folder)],
        capture_output=True,
        text=True,
        timeout=1200,
    )
    assert child.returncode == 0, child.stderr[-3000:]
    report = json.loads(child.stdout)
    print(json.dumps(report["outcomes"], indent=1), report["slowest"], report["growth"])
    outcomes = report["outcomes"]
    assert not report["unsound"]
    assert set(outcomes.pop("sound")) == {"decoded"}
    assert sum(sum(kind.values()) for kind in outcomes.values()) >= 3000
    reasons = {reason for kind in outcomes.values() for reason in kind}
    assert reasons == {"decoded", *hostile_images.REASONS}
    # 16 bytes for each pixel of the largest image that is decoded at all.
    assert report["growth"] < 16 * MAX_PIXELS
    assert report["slowest"] < 5

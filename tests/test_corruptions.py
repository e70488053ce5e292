"""The corruptions: the same pixels whatever the batch, and the published arithmetic, held against slow references."""

import colorsys
import hashlib
import io
import json
import math
import os
import re
import shutil
import subprocess
import sys
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from scipy import ndimage, stats

from protodcs.data.corruptions import (
    EXTRA,
    FAMILIES,
    NAMES,
    STANDARD,
    VARIANTS,
    constants,
    corrupt,
    family_of,
    generator,
)
from protodcs.data.corruptions.register import find
from protodcs.data.corruptions.task import Task
from protodcs.errors import ConfigError, DataError, InputError, UsageError

SEVERITIES = range(1, 6)
SIDES = {"cifar": 32, "tiny-imagenet": 64, "imagenet": 224}
# These draw no random numbers: source and index do not matter to them.
WITHOUT_CHANCE = {
    "defocus_blur",
    "zoom_blur",
    "brightness",
    "contrast",
    "pixelate",
    "jpeg_compression",
    "gaussian_blur",
    "saturate",
}
# Their results are whole levels in both variants, and nothing else about them is fixed.
SAME_IN_BOTH_VARIANTS = {"impulse_noise", "motion_blur", "pixelate", "jpeg_compression"}


@pytest.fixture(scope="session")
def photos(data_folder):
    """`photos(side, count)`: real images, of CIFAR-10 at 32 and of Tiny-ImageNet at 64."""
    parquet = pytest.importorskip("pyarrow.parquet")
    kept = {}

    def read(side, count):
        if side not in kept:
            name = {32: "cifar10_test", 64: "tiny_imagenet_val"}[side]
            rows = next(parquet.ParquetFile(data_folder / f"{name}.parquet").iter_batches(256, columns=["image"]))
            files = [io.BytesIO(row) for row in rows.column("image").to_pylist()]
            kept[side] = np.stack([np.asarray(Image.open(file).convert("RGB")) for file in files])
        return kept[side][:count]

    return read


@pytest.fixture(scope="session")
def overlays(tmp_path_factory):
    """A folder of six overlays, for tests that need no real frost."""
    folder = tmp_path_factory.mktemp("frost")
    rng = np.random.default_rng(4)
    for at, name in enumerate(["frost1.png", "frost2.png", "frost3.png", "frost4.jpg", "frost5.jpg", "frost6.jpg"]):
        pixels = rng.integers(40 * at, 40 * at + 40, size=(400 + 20 * at, 500, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / name)
    return folder


def drawn(count, height, width=None, seed=0):
    """Images with slopes, flat parts, black, white and noise."""
    width = width or height
    rng = np.random.default_rng(seed)
    down, right = np.mgrid[:height, :width]
    images = np.empty((count, height, width, 3), dtype=np.uint8)
    for image in images:
        slope = rng.uniform(-4, 4, size=(2, 3))
        image[:] = np.clip(down[..., None] * slope[0] + right[..., None] * slope[1] + rng.integers(60, 200, 3), 0, 255)
        image[: height // 3, : width // 3] = rng.integers(256, size=3)
        image[-height // 4 :, : width // 4] = 255
        image[: height // 4, -width // 4 :] = 0
        image[height // 2 :, width // 2 :] = rng.integers(256, size=(height - height // 2, width - width // 2, 3))
    return images


def dice(name, severity, family, index=0, source="drawn", variant="published"):
    """The generator that an image's pixels must come from, made anew from the documented key."""
    text = json.dumps([source, name, severity, family, variant, index])
    digest = hashlib.blake2b(text.encode(), digest_size=16).digest()
    return np.random.Generator(np.random.Philox(key=int.from_bytes(digest, "little")))


def corrupted(image, name, severity, family, **options):
    """One image of the source "drawn"."""
    return corrupt(image[None], name, severity, source="drawn", indices=[0], family=family, **options)[0]


def assert_truncated(levels, expected, slack=1e-9):
    """`levels` is `expected` (0..1) x 255 without its fraction; within `slack` of a whole level either side will do."""
    exact = np.clip(np.asarray(expected, dtype=np.float64), 0, 1) * 255
    low, high = np.floor(exact - slack), np.floor(exact + slack)
    wrong = (levels < low) | (levels > high)
    assert not wrong.any(), f"{wrong.sum()} of {wrong.size} pixels, such as {levels[wrong][:5]} for {exact[wrong][:5]}"


def every(*families):
    return pytest.mark.parametrize(("family", "severity"), [(f, s) for f in families or FAMILIES for s in SEVERITIES])


def psnr(one, other):
    errors = ((one.astype(np.float64) - other) ** 2).mean(axis=(1, 2, 3))
    return float(np.mean(10 * np.log10(255**2 / np.maximum(errors, 0.01))))


# What there is


def test_the_fifteen_and_the_four_are_there_in_the_published_order():
    assert STANDARD == (
        "gaussian_noise",
        "shot_noise",
        "impulse_noise",
        "defocus_blur",
        "glass_blur",
        "motion_blur",
        "zoom_blur",
        "snow",
        "frost",
        "fog",
        "brightness",
        "contrast",
        "elastic_transform",
        "pixelate",
        "jpeg_compression",
    )
    assert EXTRA == ("speckle_noise", "gaussian_blur", "spatter", "saturate")
    assert NAMES == STANDARD + EXTRA


def test_the_family_follows_the_longer_side():
    assert [family_of(side, side) for side in (8, 32, 48, 49, 64, 128, 129, 224)] == (
        ["cifar"] * 3 + ["tiny-imagenet"] * 3 + ["imagenet"] * 2
    )
    assert family_of(20, 100) == family_of(100, 20) == "tiny-imagenet"


def test_the_constants_are_the_published_ones_digit_by_digit(data_folder):
    text = (data_folder / "corruption_constants.txt").read_text()
    text = text.replace("# 244 should have been 224, but ultimately nothing is incorrect ", "")
    parts = re.split(r"^## .*$", text, flags=re.MULTILINE)[1:]
    for family, part in zip(FAMILIES, parts, strict=True):
        lines = dict(line.split(": ", 1) for line in part.strip().splitlines())
        assert set(lines) == set(NAMES)
        side = 244 if family == "imagenet" else SIDES[family]
        for name, line in lines.items():
            published = eval(line, {"np": np, "IMSIZE": side})
            ours = getattr(constants, name.upper())[family]
            if name == "zoom_blur":
                ours = [np.arange(*row) for row in ours]
            if name == "elastic_transform":
                ours = [tuple(side * share for share in row) for row in ours]
            assert len(ours) == len(published) == 5
            assert all(np.array_equal(one, other) for one, other in zip(ours, published, strict=True)), name


# The same pixels, whatever the batch


@pytest.mark.parametrize("side", [32, 64])
@pytest.mark.parametrize("name", NAMES)
def test_an_image_is_the_same_alone_in_a_batch_and_in_any_order(photos, monkeypatch, name, side):
    images, rng = photos(side, 24), np.random.default_rng(side)
    indices = rng.choice(10_000, size=len(images), replace=False)
    for severity in SEVERITIES:
        whole = corrupt(images, name, severity, source="photos", indices=indices)
        assert whole.shape == images.shape
        assert whole.dtype == np.uint8
        assert (whole != images).any()
        some = rng.choice(len(images), size=rng.integers(1, len(images)), replace=True)
        part = corrupt(images[some], name, severity, source="photos", indices=indices[some])
        np.testing.assert_array_equal(part, whole[some])
        at = int(rng.integers(len(images)))
        alone = corrupt(images[at : at + 1], name, severity, source="photos", indices=[int(indices[at])])
        np.testing.assert_array_equal(alone[0], whole[at])
        with monkeypatch.context() as patch:
            patch.setattr(generator, "_PIECE_BYTES", int(rng.integers(1, 20)) * 8 * images[0].size)
            again = corrupt(images, name, severity, source="photos", indices=indices)
        np.testing.assert_array_equal(again, whole)


@pytest.mark.parametrize("name", NAMES)
def test_threads_change_nothing(photos, name):
    images = photos(32, 16)

    def one(at):
        return corrupt(images[at : at + 1], name, 4, source="photos", indices=[at])[0]

    with ThreadPoolExecutor(4) as pool:
        together = np.stack(list(pool.map(one, range(len(images)))))
    np.testing.assert_array_equal(together, corrupt(images, name, 4, source="photos", indices=range(len(images))))


@pytest.mark.parametrize("name", NAMES)
def test_the_images_are_left_alone_and_any_array_will_do(overlays, name):
    images = drawn(3, 40)
    before = images.copy()
    options = {"source": "drawn", "indices": [4, 5, 6], "overlays": overlays}
    expected = corrupt(images, name, 3, **options)
    np.testing.assert_array_equal(images, before)
    assert not np.shares_memory(images, expected)
    sealed = images.copy()
    sealed.flags.writeable = False
    mirrored = np.ascontiguousarray(images[:, :, ::-1])[:, :, ::-1]
    for same in (sealed, mirrored, np.asfortranarray(images)):
        np.testing.assert_array_equal(corrupt(same, name, 3, **options), expected)


@pytest.mark.parametrize("name", NAMES)
def test_source_and_index_change_the_pixels_where_chance_has_a_part(overlays, name):
    images = np.repeat(drawn(1, 32), 6, axis=0)
    options = {"overlays": overlays}
    results = corrupt(images, name, 5, source="drawn", indices=range(6), **options)
    elsewhere = corrupt(images, name, 5, source="redrawn", indices=range(6), **options)
    if name in WITHOUT_CHANCE:
        assert (results == results[0]).all()
        np.testing.assert_array_equal(results, elsewhere)
    else:
        assert len({result.tobytes() for result in (*results, *elsewhere)}) > 6


@pytest.mark.parametrize("name", NAMES)
def test_every_severity_and_family_gives_other_pixels(overlays, name):
    image = drawn(1, 64)[0]
    results = {
        (family, severity): corrupted(image, name, severity, family, overlays=overlays).tobytes()
        for family in FAMILIES
        for severity in SEVERITIES
    }
    per_family = [{results[family, severity] for severity in SEVERITIES} for family in FAMILIES]
    assert [len(some) for some in per_family] == [5, 5, 5]
    assert len(set(results.values())) > 5


def test_the_randomness_is_the_documented_one(overlays):
    image = drawn(1, 32)[0]
    got = corrupt(image[None], "gaussian_noise", 2, source='a \u00fcmlaut, "quoted"', indices=[10**12])[0]
    rng = dice("gaussian_noise", 2, "cifar", index=10**12, source='a \u00fcmlaut, "quoted"')
    assert_truncated(got, image / 255 + rng.normal(scale=0.06, size=image.shape))


def test_a_large_batch_needs_little_memory_beside_its_result():
    images = np.zeros((4000, 32, 32, 3), dtype=np.uint8)
    corrupt(images[:1], "impulse_noise", 1, source="black", indices=[0])
    tracemalloc.start()
    try:
        corrupt(images, "impulse_noise", 1, source="black", indices=range(len(images)))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak - images.nbytes < 64 << 20 < 2 * 8 * images.size


# Noise


@every()
@pytest.mark.parametrize("name", ["gaussian_noise", "speckle_noise"])
def test_normal_noise_is_added_and_truncated(name, family, severity):
    image = drawn(1, 40)[0]
    values = image / 255
    noise = dice(name, severity, family).normal(
        scale=getattr(constants, name.upper())[family][severity - 1], size=values.shape
    )
    expected = values + noise if name == "gaussian_noise" else values + values * noise
    assert_truncated(corrupted(image, name, severity, family), expected)


@every()
def test_impulse_noise_replaces_the_drawn_share(family, severity):
    image = drawn(1, 40)[0]
    share = constants.IMPULSE_NOISE[family][severity - 1]
    chance, side = dice("impulse_noise", severity, family).random((2, *image.shape))
    expected = np.where(chance <= share, np.where(side <= 0.5, 255, 0), image)
    np.testing.assert_array_equal(corrupted(image, "impulse_noise", severity, family), expected)


@every()
def test_shot_noise_inverts_the_poisson_distribution(family, severity):
    image = drawn(1, 40)[0]
    photons = constants.SHOT_NOISE[family][severity - 1]
    chance = dice("shot_noise", severity, family).random(image.shape)
    counts = stats.poisson.ppf(chance, image / 255 * photons)
    # The percent point of scipy starts at -1 for a chance of exactly nothing.
    assert_truncated(corrupted(image, "shot_noise", severity, family), np.maximum(counts, 0) / photons)


def test_shot_noise_has_the_mean_and_variance_of_photons():
    level, photons = 100, constants.SHOT_NOISE["imagenet"][4]
    images = np.full((20, 64, 64, 3), level, dtype=np.uint8)
    values = corrupt(images, "shot_noise", 5, source="grey", indices=range(20), family="imagenet", variant="fixed")
    counts = np.round(values / 255 * photons)
    mean = level / 255 * photons
    # Counts above white are cut off; so is the distribution they are held against.
    expected = stats.poisson(mean)
    shares = np.array([expected.pmf(0), expected.pmf(1), expected.pmf(2), expected.sf(2)])
    found = np.bincount(counts.ravel().astype(int), minlength=4)
    assert stats.chisquare(found, shares * counts.size).pvalue > 1e-4


# Blur


@every()
def test_gaussian_blur_is_scipys(family, severity):
    image = drawn(1, SIDES[family], SIDES[family] + 5)[0]
    deviation = constants.GAUSSIAN_BLUR[family][severity - 1]
    expected = ndimage.gaussian_filter(image / 255, (deviation, deviation, 0), mode="nearest", truncate=4)
    assert_truncated(corrupted(image, "gaussian_blur", severity, family), expected)


def disk(radius, softness):
    """The disk of defocus blur, softened by scipy."""
    reach = 8 if radius <= 8 else radius
    down, right = np.mgrid[-reach : reach + 1, -reach : reach + 1]
    hard = (down**2 + right**2 <= radius**2).astype(np.float64)
    offsets = np.arange(3 if radius <= 8 else 5) - (1 if radius <= 8 else 2)
    weights = np.exp(-(offsets**2) / (2 * softness**2))
    weights /= weights.sum()
    once = ndimage.correlate1d(hard / hard.sum(), weights, axis=0, mode="mirror")
    return ndimage.correlate1d(once, weights, axis=1, mode="mirror")


@every()
def test_defocus_blur_is_a_correlation_with_a_disk(family, severity):
    image = drawn(1, SIDES[family] if family != "imagenet" else 80, 70)[0]
    kernel = disk(*constants.DEFOCUS_BLUR[family][severity - 1])
    expected = np.stack([ndimage.correlate(image[..., c] / 255, kernel, mode="mirror") for c in range(3)], axis=-1)
    # The published disk is single precision: a tenth of a thousandth of a level.
    assert_truncated(corrupted(image, "defocus_blur", severity, family), expected, slack=1e-4)


@pytest.mark.parametrize("variant", VARIANTS)
@every("cifar", "imagenet")
def test_glass_blur_walks_from_the_lower_right_and_exchanges(family, severity, variant):
    image = drawn(1, 32, 40)[0]
    deviation, reach, rounds = constants.GLASS_BLUR[family][severity - 1]
    rng = dice("glass_blur", severity, family, variant=variant)
    half = 0.5 if variant == "fixed" else 0

    def smooth(levels):
        return ndimage.gaussian_filter(levels / 255, (deviation, deviation, 0), mode="nearest", truncate=4)

    pixels = np.floor(smooth(image) * 255 + half).astype(np.uint8)
    rows, columns = range(32 - reach, reach, -1), range(40 - reach, reach, -1)
    steps = rng.integers(-reach, reach, size=(rounds, len(rows), len(columns), 2), dtype=np.int8).astype(int)
    for plan in steps:
        for i, y in enumerate(rows):
            for j, x in enumerate(columns):
                right, down = plan[i, j]
                here, there = pixels[y, x].copy(), pixels[y + down, x + right].copy()
                pixels[y, x] = there
                if variant == "fixed":
                    pixels[y + down, x + right] = here
    got = corrupted(image, "glass_blur", severity, family, variant=variant)
    assert_truncated(got, smooth(pixels) + half / 255)


def swept(image, radius, deviation, angle):
    """ImageMagick's motion blur, pixel by pixel."""
    height, width = image.shape[:2]
    weights = [math.exp(-(i**2) / (2 * deviation**2)) for i in range(2 * math.ceil(radius) + 1)]
    out = np.zeros(image.shape)
    for y in range(height):
        for x in range(width):
            for i, weight in enumerate(weights):
                right = math.ceil(i * math.cos(math.radians(angle)) - 0.5)
                down = math.ceil(i * math.sin(math.radians(angle)) - 0.5)
                out[y, x] += weight * image[min(max(y + down, 0), height - 1), min(max(x + right, 0), width - 1)]
    return np.floor(out / sum(weights) + 0.5)


@every()
def test_motion_blur_is_a_weighted_mean_along_a_ray(family, severity):
    image = drawn(1, 24, 20)[0]
    radius, deviation = constants.MOTION_BLUR[family][severity - 1]
    angle = dice("motion_blur", severity, family).uniform(-45, 45)
    expected = swept(image, radius, deviation, angle)
    np.testing.assert_array_equal(corrupted(image, "motion_blur", severity, family), expected)


def imagemagick():
    """The command of a real ImageMagick, or None."""
    for folder in os.get_exec_path():
        for name in ("magick", "convert"):
            command = shutil.which(name, path=folder)
            if command:
                answer = subprocess.run([command, "-version"], capture_output=True, text=True, check=False).stdout
                if answer.startswith("Version: ImageMagick"):
                    return command
    return None


@every("cifar", "imagenet")
def test_motion_blur_is_imagemagicks(tmp_path, family, severity):
    command = imagemagick()
    if command is None:
        pytest.skip("ImageMagick is not installed")
    image = drawn(1, 48, 40)[0]
    radius, deviation = constants.MOTION_BLUR[family][severity - 1]
    angle = dice("motion_blur", severity, family).uniform(-45, 45)
    Image.fromarray(image).save(tmp_path / "image.png")
    # In 16 bits, and rounded here: some versions truncate when they write 8.
    blur = ["-motion-blur", f"{radius}x{deviation}{angle:+.17g}", "-depth", "16", "-endian", "LSB", "rgb:-"]
    answer = subprocess.run([command, tmp_path / "image.png", *blur], capture_output=True, check=True).stdout
    expected = (np.frombuffer(answer, dtype="<u2").reshape(image.shape).astype(int) + 128) // 257
    np.testing.assert_array_equal(corrupted(image, "motion_blur", severity, family), expected)


def clipped_zoom(layer, factor):
    """The middle of a layer, enlarged by scipy to the layer's size."""
    crops = [math.ceil(side / factor) for side in layer.shape]
    firsts = [(side - crop) // 2 for side, crop in zip(layer.shape, crops, strict=True)]
    middle = layer[firsts[0] : firsts[0] + crops[0], firsts[1] : firsts[1] + crops[1]]
    large = ndimage.zoom(middle, factor, order=1)
    trims = [(there - here) // 2 for there, here in zip(large.shape, layer.shape, strict=True)]
    return large[trims[0] : trims[0] + layer.shape[0], trims[1] : trims[1] + layer.shape[1]]


@pytest.mark.parametrize("shape", [(32, 32), (64, 64), (45, 33)])
@every("cifar", "imagenet")
def test_zoom_blur_is_a_mean_of_scipys_zooms(family, severity, shape):
    image = drawn(1, *shape)[0]
    values = (image / 255).astype(np.float32)
    factors = np.arange(*constants.ZOOM_BLUR[family][severity - 1])
    total = np.zeros_like(values)
    for factor in factors:
        total += np.stack([clipped_zoom(values[..., c], factor) for c in range(3)], axis=-1)
    expected = (values + total) / np.float32(len(factors) + 1)
    assert_truncated(corrupted(image, "zoom_blur", severity, family), expected, slack=1e-4)


@pytest.mark.parametrize("side", [26, 36, 42, 71, 87])
def test_a_grey_image_stays_grey_when_zoomed_at_sizes_where_scipy_draws_a_black_line(side):
    image = np.full((side, side, 3), 128, dtype=np.uint8)
    for family in FAMILIES:
        for severity in SEVERITIES:
            assert np.isin(corrupted(image, "zoom_blur", severity, family), [127, 128]).all()


# Weather


def plasma(side, decay, rng):
    """The diamond-square method, point by point."""
    heights, step, wobble = {(0, 0): 0.0}, side, 100.0
    while step >= 2:
        half = step // 2
        corners = [(y, x) for y in range(0, side, step) for x in range(0, side, step)]
        diagonal = [(0, 0), (step, 0), (0, step), (step, step)]
        for place, near in (
            ((half, half), diagonal),
            ((0, half), [(half, half), (-half, half), (0, 0), (0, step)]),
            ((half, 0), [(half, half), (half, -half), (0, 0), (step, 0)]),
        ):
            for (y, x), wobbled in zip(corners, rng.uniform(-wobble, wobble, len(corners)), strict=True):
                mean = sum(heights[(y + dy) % side, (x + dx) % side] for dy, dx in near) / 4
                heights[y + place[0], x + place[1]] = mean + wobble * wobbled
        step, wobble = half, wobble / decay
    out = np.array([[heights[y, x] for x in range(side)] for y in range(side)])
    out -= out.min()
    return out / out.max()


@pytest.mark.parametrize(("shape", "side"), [((32, 32), 32), ((20, 12), 32), ((40, 64), 64), ((65, 30), 128)])
@every("cifar", "imagenet")
def test_fog_is_a_plasma_by_diamonds_and_squares(family, severity, shape, side):
    image = drawn(1, *shape)[0]
    strength, decay = constants.FOG[family][severity - 1]
    values = image / 255
    brightest = values.max()
    veil = plasma(side, decay, dice("fog", severity, family))[: shape[0], : shape[1], None]
    expected = (values + strength * veil) * brightest / (brightest + strength)
    assert_truncated(corrupted(image, "fog", severity, family), expected)


@every()
def test_frost_is_a_part_of_one_of_the_first_five_overlays(data_folder, family, severity):
    cv2 = pytest.importorskip("cv2")
    files = ["frost1.png", "frost2.png", "frost3.png", "frost4.jpg", "frost5.jpg"]
    image = drawn(1, SIDES[family])[0]
    rng = dice("frost", severity, family)
    overlay = cv2.imread(str(data_folder / "frost" / files[rng.integers(5)]))
    scale = {"cifar": 0.2, "tiny-imagenet": 0.3, "imagenet": 1}[family]
    overlay = cv2.resize(overlay, (0, 0), fx=scale, fy=scale)
    top, left = rng.integers(0, overlay.shape[0] - len(image)), rng.integers(0, overlay.shape[1] - len(image))
    part = overlay[top : top + len(image), left : left + len(image), ::-1]
    of_image, of_overlay = constants.FROST[family][severity - 1]
    assert_truncated(corrupted(image, "frost", severity, family), (of_image * image + of_overlay * part) / 255)


def test_only_fixed_frost_draws_the_sixth_overlay(overlays):
    # The overlays grow brighter from one to the next: over black, the mean level tells which one was drawn.
    black = np.zeros((120, 32, 32, 3), dtype=np.uint8)
    share = constants.FROST["imagenet"][4][1]
    drawn_files = {}
    for variant in VARIANTS:
        options = {"source": "black", "indices": range(120), "family": "imagenet", "overlays": overlays}
        means = corrupt(black, "frost", 5, variant=variant, **options).mean(axis=(1, 2, 3))
        drawn_files[variant] = set((means / share // 40).astype(int).tolist())
    assert drawn_files == {"published": {0, 1, 2, 3, 4}, "fixed": {0, 1, 2, 3, 4, 5}}


def test_an_overlay_smaller_than_the_image_goes_on_by_reflection(overlays):
    # At the scale of "cifar" the overlays are at most 100 pixels high and 100 wide.
    black = np.zeros((30, 150, 230, 3), dtype=np.uint8)
    results = corrupt(black, "frost", 3, source="black", indices=range(30), family="cifar", overlays=overlays)
    brightness = results.mean(axis=(2, 3))
    assert (brightness.std(axis=1) < 6).all()
    rows = results[0].astype(int)
    folds = [at for at in range(1, 149) if (rows[at] == rows[at - 1]).all()]
    assert folds
    np.testing.assert_array_equal(rows[folds[0] + 3], rows[folds[0] - 4])


def test_missing_overlays_are_named_with_where_to_get_them(tmp_path, overlays, monkeypatch):
    images = drawn(1, 32)
    monkeypatch.delenv("PROTODCS_DATA", raising=False)
    with pytest.raises(DataError, match=r"PROTODCS_DATA names no folder.*ImageNet-C/create_c.*hendrycks/robustness"):
        corrupt(images, "frost", 1, source="drawn", indices=[0])
    monkeypatch.setenv("PROTODCS_DATA", str(tmp_path))
    with pytest.raises(DataError, match=r"frost1\.png, .*frost6\.jpg is not in .*frost"):
        corrupt(images, "frost", 1, source="drawn", indices=[0])
    shutil.copytree(overlays, tmp_path / "frost")
    corrupt(images, "frost", 1, source="drawn", indices=[0])
    shutil.copytree(overlays, tmp_path / "broken")
    (tmp_path / "broken" / "frost2.png").write_bytes(b"no image")
    with pytest.raises(DataError, match=r"frost2\.png cannot be read"):
        corrupt(images, "frost", 1, source="drawn", indices=[0], overlays=tmp_path / "broken")


@every("cifar", "imagenet")
def test_snow_is_flakes_enlarged_swept_and_turned(family, severity):
    image = drawn(1, 30, 24)[0]
    mean, deviation, factor, threshold, radius, fall, share = constants.SNOW[family][severity - 1]
    rng = dice("snow", severity, family)
    flakes = clipped_zoom(rng.normal(mean, deviation, size=image.shape[:2]), factor)
    flakes[flakes < threshold] = 0
    levels = np.floor(np.clip(flakes, 0, 1) * 255)
    fallen = swept(levels, radius, fall, rng.uniform(-135, -45))[..., None] / 255
    values = image / 255
    pale = np.maximum(values, (values @ [0.299, 0.587, 0.114])[..., None] * 1.5 + 0.5)
    expected = share * values + (1 - share) * pale + fallen + fallen[::-1, ::-1]
    assert_truncated(corrupted(image, "snow", severity, family), expected, slack=1e-4)


def smoothed_noise(name, severity, family, shape):
    mean, deviation, smoothing, threshold, strength, kind = constants.SPATTER[family][severity - 1]
    noise = dice(name, severity, family).normal(mean, deviation, size=shape)
    liquid = ndimage.gaussian_filter(noise, smoothing, mode="nearest", truncate=4)
    return np.where(liquid < threshold, 0, liquid), threshold, strength, kind


@pytest.mark.parametrize("severity", [4, 5])
@pytest.mark.parametrize("family", FAMILIES)
def test_mud_covers_what_it_falls_on(family, severity):
    image = drawn(1, 64)[0]
    liquid, threshold, strength, kind = smoothed_noise("spatter", severity, family, image.shape[:2])
    assert kind == 1
    stains = (liquid > threshold).astype(np.float32)
    mud = ndimage.gaussian_filter(stains, strength, mode="nearest", truncate=4)[..., None]
    mud = np.where(mud < np.float32(0.8), 0, mud)
    assert mud.any()
    expected = image / 255 * (1 - mud) + mud * np.array([63, 42, 20]) / 255
    assert_truncated(corrupted(image, "spatter", severity, family), expected, slack=1e-4)


@pytest.mark.parametrize("severity", [1, 2, 3])
@pytest.mark.parametrize("family", FAMILIES)
def test_water_is_pale_turquoise_where_liquid_is_and_nowhere_else(family, severity):
    black = np.zeros((SIDES[family], SIDES[family], 3), dtype=np.uint8)
    liquid, _, strength, kind = smoothed_noise("spatter", severity, family, black.shape[:2])
    assert kind == 0
    got = corrupted(black, "spatter", severity, family).astype(float)
    assert got[liquid == 0].max(initial=0) == 0
    # The wettest pixel gets the full strength of the colour.
    np.testing.assert_allclose(got.max(axis=(0, 1)), strength * np.array([175, 238, 238]), atol=1)
    np.testing.assert_allclose(got[..., 0], got[..., 1] * 175 / 238, atol=1)
    np.testing.assert_array_equal(got[..., 1], got[..., 2])


@pytest.mark.parametrize("severity", [1, 2, 3])
@pytest.mark.parametrize("family", FAMILIES)
def test_water_is_thick_away_from_its_edges_and_lit_from_one_side(family, severity):
    cv2 = pytest.importorskip("cv2")
    image = drawn(1, SIDES[family])[0]
    liquid, _, strength, _ = smoothed_noise("spatter", severity, family, image.shape[:2])
    liquid = (liquid * 255).astype(np.uint8)
    distance = cv2.distanceTransform(255 - cv2.Canny(liquid, 50, 150), cv2.DIST_L2, 5)
    thickness = cv2.equalizeHist(cv2.blur(np.where(distance > 20, np.float32(20), distance), (3, 3)).astype(np.uint8))
    lit = ndimage.correlate(thickness.astype(int), [[-2, -1, 0], [-1, 1, 1], [0, 1, 2]], mode="mirror")
    water = liquid * cv2.blur(np.clip(lit, 0, 255).astype(np.uint8), (3, 3)).astype(np.float64)
    expected = image / 255 + strength * (water / water.max())[..., None] * np.array([175, 238, 238]) / 255
    assert_truncated(corrupted(image, "spatter", severity, family), expected, slack=1e-4)


def test_no_drop_no_water():
    images = drawn(60, 8)
    results = corrupt(images, "spatter", 1, source="drawn", indices=range(60), family="imagenet")
    dry = [
        not (ndimage.gaussian_filter(rng.normal(0.65, 0.3, (8, 8)), 4, mode="nearest", truncate=4) >= 0.69).any()
        for rng in (dice("spatter", 1, "imagenet", index=index) for index in range(60))
    ]
    assert any(dry)
    np.testing.assert_array_equal(results[dry], images[dry])


# Colour


@every()
@pytest.mark.parametrize("name", ["brightness", "saturate"])
def test_brightness_and_saturation_are_those_of_colorsys(name, family, severity):
    image = drawn(1, 24)[0]
    constant = getattr(constants, name.upper())[family][severity - 1]
    expected = np.empty(image.shape)
    for y, x in np.ndindex(image.shape[:2]):
        hue, saturation, value = colorsys.rgb_to_hsv(*(image[y, x] / 255))
        if name == "brightness":
            value = min(value + constant, 1)
        else:
            saturation = min(max(saturation * constant[0] + constant[1], 0), 1)
        expected[y, x] = colorsys.hsv_to_rgb(hue, saturation, value)
    assert_truncated(corrupted(image, name, severity, family), expected)


@every()
def test_contrast_shrinks_towards_the_mean_of_each_channel(family, severity):
    image = drawn(1, 40, 32)[0]
    values = image / 255
    means = values.mean(axis=(0, 1))
    expected = (values - means) * constants.CONTRAST[family][severity - 1] + means
    assert_truncated(corrupted(image, "contrast", severity, family), expected)


# Digital


@every()
def test_jpeg_is_pillows(family, severity):
    for image in (drawn(1, 32)[0], drawn(1, 45, 70)[0]):
        file = io.BytesIO()
        Image.fromarray(image).save(file, "JPEG", quality=constants.JPEG_COMPRESSION[family][severity - 1])
        np.testing.assert_array_equal(corrupted(image, "jpeg_compression", severity, family), Image.open(file))


@every()
def test_pixelate_averages_over_boxes_twice(family, severity):
    image = drawn(1, 40, 64)[0]
    share = constants.PIXELATE[family][severity - 1]
    small = Image.fromarray(image).resize((int(64 * share), int(40 * share)), Image.Resampling.BOX)
    expected = small.resize((64, 40), Image.Resampling.BOX)
    np.testing.assert_array_equal(corrupted(image, "pixelate", severity, family), expected)


def affine(shape, moves):
    """From places of the result to places of the image: the three moved corners, solved for and inverted."""
    height, width = shape
    reach, x, y = min(shape) // 3, width // 2, height // 2
    corners = np.array([[x + reach, y + reach], [x + reach, y - reach], [x - reach, y - reach]], dtype=np.float32)
    moved = corners + moves.astype(np.float32)
    forward = np.linalg.solve(np.column_stack([corners, np.ones(3)]), moved.astype(np.float64)).T
    return forward, np.linalg.inv(np.vstack([forward, [0, 0, 1]]))[:2]


@pytest.mark.parametrize("shape", [(32, 32), (64, 64), (40, 28)])
@every()
def test_elastic_transform_is_an_affine_shift_and_a_smooth_displacement(family, severity, shape):
    image = drawn(1, *shape)[0]
    side = 244 if family == "imagenet" else min(shape)
    strength, smoothing, shift = (side * share for share in constants.ELASTIC_TRANSFORM[family][severity - 1])
    rng = dice("elastic_transform", severity, family)
    _, backwards = affine(shape, rng.uniform(-shift, shift, size=(3, 2)))
    down, right = np.mgrid[: shape[0], : shape[1]]
    # Places are rounded to 1/1024 pixel in two parts, then to 1/32.
    from_x, from_y = (
        np.floor((np.rint((row[1] * down + row[2]) * 1024) + 16 + np.rint(row[0] * right * 1024)) / 32) / 32
        for row in backwards
    )
    values = (image / 255).astype(np.float32)
    warped = [ndimage.map_coordinates(values[..., c], (from_y, from_x), order=1, mode="mirror") for c in range(3)]
    moves = [np.zeros(shape), np.zeros(shape)]
    if strength:
        fields = (rng.uniform(-1, 1, size=shape) for _ in range(2))
        moves = [ndimage.gaussian_filter(field, smoothing, mode="reflect", truncate=3) * strength for field in fields]
    places = down + moves[1].astype(np.float32), right + moves[0].astype(np.float32)
    displaced = [ndimage.map_coordinates(channel, places, order=1, mode="reflect") for channel in warped]
    got = corrupted(image, "elastic_transform", severity, family)
    assert_truncated(got, np.stack(displaced, axis=-1), slack=2e-3)


def test_the_affine_shift_is_opencvs_but_for_its_steps_of_a_32nd_pixel():
    cv2 = pytest.importorskip("cv2")
    smooth = ndimage.gaussian_filter(drawn(1, 64)[0].astype(float), (3, 3, 0)).astype(np.uint8)
    shift = 64 * 0.08
    forward, _ = affine((64, 64), dice("elastic_transform", 1, "tiny-imagenet").uniform(-shift, shift, size=(3, 2)))
    expected = cv2.warpAffine(smooth.astype(np.float32), forward, (64, 64), borderMode=cv2.BORDER_REFLECT_101)
    got = corrupted(smooth, "elastic_transform", 1, "tiny-imagenet", variant="published")
    assert np.abs(got + 0.5 - expected).mean() < 1


# Severities and variants


# Left out, because their constants do not grow in one direction. glass_blur: severity 4 smooths less than 3 but
# exchanges twice, and smoothing hides what the exchange did. frost: less of the image, so less light, from severity 3
# on. elastic_transform: the shift of the corners, which costs most pixels, shrinks. spatter: water, then mud.
# saturate: less colour at severities 1 and 2, more from 3 on.
FALLING = [name for name in NAMES if name not in {"glass_blur", "frost", "elastic_transform", "spatter", "saturate"}]


@pytest.mark.parametrize("side", [32, 64])
@pytest.mark.parametrize("name", FALLING)
def test_each_severity_is_further_from_the_image_than_the_one_before(photos, name, side):
    images = photos(side, 150)
    values = [psnr(images, corrupt(images, name, s, source="photos", indices=range(len(images)))) for s in SEVERITIES]
    # Motion blur hardly differs between severities 3 and 4 of "cifar": a longer ray of the same width.
    assert all(after < before + 0.1 for before, after in pairwise(values)), values
    assert values[4] < values[0] - 2, values


def test_the_corner_shift_of_elastic_transform_shrinks_and_the_images_come_closer(photos):
    images = photos(32, 150)
    shifts = [row[2] for row in constants.ELASTIC_TRANSFORM["cifar"]]
    assert shifts == sorted(shifts, reverse=True)
    options = {"source": "photos", "indices": range(len(images))}
    values = [psnr(images, corrupt(images, "elastic_transform", s, **options)) for s in SEVERITIES]
    assert values == sorted(values)


def both_variants(images, name, severity, family, overlays):
    """Published and fixed from the same randomness; through `corrupt` the two draw different numbers."""
    keys = np.random.default_rng(7).integers(2**63, size=(len(images), 2), dtype=np.uint64)
    return [find(name)(Task(images, keys, family, severity, variant, overlays)).astype(int) for variant in VARIANTS]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", NAMES)
def test_fixed_differs_from_published_by_rounding_and_in_the_named_quirks_only(overlays, name, family):
    images = drawn(12, 64)
    for severity in SEVERITIES:
        published, fixed = both_variants(images, name, severity, family, overlays)
        difference = fixed - published
        if name in SAME_IN_BOTH_VARIANTS:
            assert not difference.any()
        elif name == "glass_blur" or (name == "elastic_transform" and family == "imagenet"):
            assert np.abs(difference).max() > 1
        elif name == "frost":
            # Six overlays instead of five: most images get the same one, some do not.
            close = (np.isin(difference, [0, 1])).all(axis=(1, 2, 3))
            assert 0 < close.sum() < len(images)
        else:
            assert np.isin(difference, [0, 1]).all()
            # Shot noise of few photons makes few levels, and all may happen to be rounded down.
            assert difference.any() or name == "shot_noise"


def test_the_variants_draw_from_different_randomness():
    images = drawn(1, 32)
    results = [
        corrupt(images, "gaussian_noise", 5, source="drawn", indices=[0], variant=variant).astype(int)
        for variant in VARIANTS
    ]
    assert np.abs(results[0] - results[1]).max() > 1


# Sizes and errors


@pytest.mark.parametrize("shape", [(8, 8), (9, 31), (50, 23), (130, 65)])
@pytest.mark.parametrize("name", NAMES)
def test_any_size_from_eight_pixels_works_in_every_family(overlays, name, shape):
    images = drawn(2, *shape)
    for family in (None, *FAMILIES):
        for severity in SEVERITIES:
            options = {"source": "drawn", "family": family, "overlays": overlays}
            both = corrupt(images, name, severity, indices=[3, 9], **options)
            assert both.shape == images.shape
            np.testing.assert_array_equal(corrupt(images[1:], name, severity, indices=[9], **options)[0], both[1])


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("level", [0, 255])
def test_black_and_white_images_are_no_trouble(overlays, name, level):
    images = np.full((3, 32, 32, 3), level, dtype=np.uint8)
    for severity in SEVERITIES:
        got = corrupt(images, name, severity, source="plain", indices=range(3), overlays=overlays)
        assert got.shape == images.shape


def test_no_images_give_no_images():
    empty = np.empty((0, 32, 32, 3), dtype=np.uint8)
    assert corrupt(empty, "fog", 1, source="none", indices=[]).shape == empty.shape


GOOD = np.zeros((2, 32, 32, 3), dtype=np.uint8)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"name": "gausian_noise"}, ConfigError, "no corruption 'gausian_noise'. Did you mean 'gaussian_noise'"),
        ({"name": "x"}, ConfigError, "There are: gaussian_noise, shot_noise"),
        ({"severity": 0}, ConfigError, "from 1 to 5; given: 0"),
        ({"severity": 6}, ConfigError, "from 1 to 5; given: 6"),
        ({"severity": 2.0}, ConfigError, r"from 1 to 5; given: 2\.0"),
        ({"severity": True}, ConfigError, "from 1 to 5; given: True"),
        ({"family": "imagenet-c"}, ConfigError, "cifar, tiny-imagenet, imagenet, or None to choose by size"),
        ({"variant": "new"}, ConfigError, "published, fixed; given: 'new'"),
        ({"source": ""}, ConfigError, "name of the image set"),
        ({"source": None}, ConfigError, "name of the image set"),
        ({"images": GOOD.tolist()}, InputError, "numpy array .* given: list"),
        ({"images": GOOD.astype(np.float32)}, InputError, "must be uint8, 0 to 255; .* type float32"),
        ({"images": GOOD[0]}, InputError, r"\(N, height, width, 3\).* use image\[None\]"),
        ({"images": GOOD[..., :1]}, InputError, r"RGB last; given: an array of shape \(2, 32, 32, 1\)"),
        ({"images": GOOD[:, :7]}, InputError, "at least 8 pixels high and wide"),
        ({"indices": [0]}, InputError, "2 images and 1 indices"),
        ({"indices": [0, -3]}, InputError, "count from 0 in the source; given: -3"),
        ({"indices": [0, 1.5]}, InputError, "whole numbers"),
        ({"indices": 7}, InputError, "whole numbers, one per image; given: 7"),
    ],
)
def test_a_bad_request_is_refused_in_words(change, error, message):
    request = {"images": GOOD, "name": "fog", "severity": 1, "source": "black", "indices": [0, 1]} | change
    with pytest.raises(error, match=message):
        corrupt(request.pop("images"), request.pop("name"), request.pop("severity"), **request)


@pytest.mark.parametrize(
    ("name", "module", "package"), [("spatter", "cv2", "opencv-python-headless"), ("pixelate", "PIL.Image", "pillow")]
)
def test_a_missing_package_is_named_with_how_to_install_it(monkeypatch, name, module, package):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(UsageError, match=f"{name} needs the package {package}: pip install {package}"):
        corrupt(GOOD, name, 1, source="black", indices=[0, 1])


def test_asking_for_the_names_imports_neither_opencv_nor_pillow_nor_numba():
    code = (
        "import sys; from protodcs.data.corruptions import NAMES, corrupt; "
        "print([name for name in ('cv2', 'PIL', 'numba', 'scipy') if name in sys.modules])"
    )
    root = str(Path(generator.__file__).parents[3])
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([root, os.environ.get("PYTHONPATH", "")])}
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    assert answer.stdout.strip() == "[]"

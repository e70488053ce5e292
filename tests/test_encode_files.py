"""Image files are encoded once, and again only if they or the encoder have changed."""

import os

import numpy as np
import pytest
from PIL import Image

from protodcs.encoders.files import encode_files
from protodcs.errors import DataError


class Counting:
    """An encoder whose features are the first pixels; it counts the images."""

    batch_size, dimension = 4, 6

    def __init__(self, image_fingerprint="a"):
        self.image_fingerprint = image_fingerprint
        self.images = 0

    def encode_pixels(self, images):
        self.images += len(images)
        rows = np.array([image.reshape(-1)[:6] for image in images], dtype=np.float32).reshape(-1, 6)
        return rows / np.linalg.norm(rows, axis=1, keepdims=True)


@pytest.fixture
def files(tmp_path):
    """Ten files by name; the fourth and all of the last batch are no images."""
    rng, found = np.random.default_rng(0), {}
    for number in range(10):
        found[f"{number}.png"] = file = tmp_path / f"{number}.png"
        if number in (3, 8, 9):
            file.write_bytes(b"no image")
        else:
            Image.fromarray(rng.integers(1, 255, (4, 4, 3), dtype=np.uint8)).save(file)
    return found


def test_files_are_encoded_in_order_and_broken_ones_are_reported(files):
    encoder, steps = Counting(), []
    encoded = encode_files(encoder, files, advance=steps.append)
    assert encoded.names == tuple(f"{number}.png" for number in (0, 1, 2, 4, 5, 6, 7))
    assert set(encoded.errors) == {"3.png", "8.png", "9.png"}
    assert encoded.errors["3.png"].startswith("3.png: ")
    pixels = [np.asarray(Image.open(files[name])) for name in encoded.names]
    np.testing.assert_array_equal(encoded.features, Counting().encode_pixels(pixels))
    assert sum(steps) == 10


def test_only_what_has_changed_is_encoded_again(files, tmp_path):
    store, first = tmp_path / "store", Counting()
    expected = encode_files(first, files, store)
    assert first.images == 7
    again = Counting()
    same = encode_files(again, files, store)
    assert again.images == 0
    np.testing.assert_array_equal(same.features, expected.features)
    assert same.errors == expected.errors
    Image.fromarray(np.full((4, 4, 3), 7, np.uint8)).save(files["3.png"])
    os.utime(files["3.png"], ns=(1, 1))
    repaired = Counting()
    assert "3.png" in encode_files(repaired, files, store).names
    assert repaired.images == 1
    other = Counting("b")
    encode_files(other, files, store)
    assert other.images == 8


def test_an_interrupted_call_continues_after_its_last_batch(files, tmp_path):
    class Stopped(Counting):
        def encode_pixels(self, images):
            if self.images:
                raise KeyboardInterrupt
            return super().encode_pixels(images)

    with pytest.raises(KeyboardInterrupt):
        encode_files(Stopped(), files, tmp_path / "store")
    rest = Counting()
    encoded = encode_files(rest, files, tmp_path / "store")
    assert rest.images == 4
    np.testing.assert_array_equal(encoded.features, encode_files(Counting(), files).features)


def test_missing_files_and_damaged_stores_are_errors(files, tmp_path):
    files["0.png"].unlink()
    assert "0.png" in encode_files(Counting(), files).errors
    (tmp_path / "store").write_bytes(b"someone else's file" * 100)
    with pytest.raises(DataError, match="store: the features cannot be stored"):
        encode_files(Counting(), files, tmp_path / "store")
    with pytest.raises(DataError, match="cannot be stored"):
        encode_files(Counting(), files, tmp_path / "nowhere" / "store")

"""`protodcs corrupt`: copies on disk are what `corrupt` gives, in the layouts others publish, and survive a kill."""

import json
import signal
import subprocess
import sys

import numpy as np
import pytest

from interrupting import interrupting
from protodcs.data import open_source
from protodcs.data.corrupted_export import CorruptedExport
from protodcs.data.corruptions import corrupt
from protodcs.data.crop import centre_crop
from protodcs.data.readers.npy import CifarC
from protodcs.errors import ConfigError, DataError

pq = pytest.importorskip("pyarrow.parquet")


@pytest.fixture(scope="module")
def digits(data_folder, tmp_path_factory):
    """40 digits in a file of their own."""
    file = tmp_path_factory.mktemp("digits") / "svhn_test.parquet"
    pq.write_table(pq.read_table(data_folder / "svhn_test.parquet").slice(0, 40), file)
    return open_source(file)


def planned(folder, source, **changes):
    settings = {
        "corruptions": ["fog", "glass_blur"],
        "severities": [5, 1],
        "form": "npy",
        "family": None,
        "variant": "published",
        "side": None,
    }
    return CorruptedExport.planned(folder=folder, source=source, **{**settings, **changes})


def written(copies):
    for part in copies.open():
        copies.write(part)
    return copies


def test_npy_copies_have_the_layout_of_cifar10_c_and_hold_what_corrupt_gives(digits, tmp_path):
    written(planned(tmp_path / "copies", digits))
    array = np.load(tmp_path / "copies" / "glass_blur.npy")
    assert array.shape == (80, 32, 32, 3)
    expected = corrupt(np.stack(digits.read([3])), "glass_blur", 5, source=digits.name, indices=[3])
    assert np.array_equal(array[40 + 3], expected[0])
    assert np.array_equal(np.load(tmp_path / "copies" / "labels.npy"), np.tile(digits.labels, 2))


def test_all_five_severities_are_read_back_as_a_published_set(digits, tmp_path):
    written(planned(tmp_path / "copies", digits, corruptions=["contrast"], severities=[1, 2, 3, 4, 5]))
    source = CifarC(tmp_path / "copies", "contrast", 4)
    expected = corrupt(np.stack(digits.read([7])), "contrast", 4, source=digits.name, indices=[7])
    assert np.array_equal(source.read([7])[0], expected[0])
    assert np.array_equal(source.labels, digits.labels)


def test_folder_copies_are_read_back_pixel_by_pixel(digits, tmp_path):
    written(planned(tmp_path / "copies", digits, form="folder", corruptions=["fog"], severities=[2]))
    source = open_source(tmp_path / "copies" / "fog" / "2")
    assert len(source) == 40
    images = corrupt(np.stack(digits.read(range(40))), "fog", 2, source=digits.name, indices=range(40))
    # Within a class the files stand in the order of their numbers.
    order = sorted(range(40), key=lambda index: (digits.classes[digits.labels[index]], index))
    assert all(np.array_equal(a, images[index]) for a, index in zip(source.read(range(40)), order, strict=True))


def test_images_of_many_sizes_need_a_side_for_npy_and_none_for_folders(tmp_path, data_folder):
    from PIL import Image

    (tmp_path / "odd").mkdir()
    for number, image in enumerate(open_source("tiny-imagenet-val").read(range(3))):
        Image.fromarray(image).resize((100 + 31 * number, 90)).save(tmp_path / "odd" / f"{number}.png")
    odd = open_source(tmp_path / "odd")
    with pytest.raises(DataError, match="--side"):
        written(planned(tmp_path / "npy", odd))
    written(planned(tmp_path / "folder", odd, form="folder"))
    written(planned(tmp_path / "square", odd, side=64))
    expected = corrupt(centre_crop(odd.read([2])[0], 64)[None], "fog", 1, source=odd.name, indices=[2])
    assert np.array_equal(np.load(tmp_path / "square" / "fog.npy")[2], expected[0])


def test_a_folder_of_other_copies_is_refused(digits, tmp_path):
    written(planned(tmp_path / "copies", digits))
    assert planned(tmp_path / "copies", digits).open() == []
    with pytest.raises(DataError, match="holds other copies"):
        planned(tmp_path / "copies", digits, variant="fixed").open()
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    with pytest.raises(DataError, match="is not empty"):
        planned(tmp_path / "full", digits).open()


@pytest.mark.parametrize(
    "wrong",
    [
        {"corruptions": ["rain"]},
        {"corruptions": []},
        {"severities": [6]},
        {"form": "zip"},
        {"variant": "best"},
        {"family": "mnist"},
        {"side": 0},
    ],
)
def test_settings_that_do_not_exist_are_refused(wrong, digits, tmp_path):
    with pytest.raises(ConfigError):
        planned(tmp_path, digits, **wrong)


def test_classes_with_strange_names_keep_folders_of_their_own(tmp_path, data_folder):
    images = np.stack(open_source("cifar10-test").read(range(6)))
    names = ["c+", "c#", "a/b", "a:b", ".hidden", "50%"]

    class Strange:
        name, classes, labels, fingerprint = "strange", tuple(names), np.arange(6), "0" * 64

        def __len__(self):
            return 6

        def read(self, indices):
            return [images[index] for index in indices]

    written(planned(tmp_path / "copies", Strange(), form="folder", corruptions=["fog"], severities=[1]))
    source = open_source(tmp_path / "copies" / "fog" / "1")
    assert len(source) == len(source.classes) == 6
    assert sorted(source.labels.tolist()) == list(range(6))


def test_memory_does_not_grow_with_the_number_of_large_images(tmp_path, data_folder):
    import tracemalloc

    from protodcs.data.reading import read_corrupted

    class Large:
        name, classes, labels, fingerprint = "large", (), np.full(60, -1), "0" * 64

        def __len__(self):
            return 60

        def read(self, indices):
            return [np.zeros((1500, 2000, 3), dtype=np.uint8) for _ in indices]

    tracemalloc.start()
    assert sum(1 for _ in read_corrupted(Large(), range(60), None, 0, side=32)) == 60
    # 60 images of 3 megapixels are 540 MB; about 8 megapixels are held at a time.
    assert tracemalloc.get_traced_memory()[1] < 100e6
    tracemalloc.stop()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--severities", "1,x"], "Severities are 1 to 5"),
        (["--severities", "1,"], "Severities are 1 to 5"),
        (["--side", "0"], "side is 8 to 2048"),
        (["--corruptions", "rain"], "rain"),
    ],
)
def test_corrupt_says_what_is_wrong_in_one_line_and_writes_nothing(arguments, words, digits, tmp_path):
    command = [sys.executable, "-m", "protodcs", "corrupt", str(digits.path), str(tmp_path / "out"), *arguments]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 1
    assert words in run.stderr
    assert "Traceback" not in run.stderr
    assert not (tmp_path / "out").exists()


def test_corrupt_killed_and_resumed_gives_the_same_bytes(digits, tmp_path, data_folder):
    def command(folder, *more):
        return [
            *(sys.executable, "-m", "protodcs", "corrupt", str(digits.path), str(folder), "--json"),
            *("--corruptions", "fog,contrast,brightness,pixelate,gaussian_noise,jpeg_compression", *more),
        ]

    whole = subprocess.run(command(tmp_path / "whole", "--workers", "2"), capture_output=True, text=True, check=False)
    assert whole.returncode == 0, whole.stderr[-2000:]
    assert json.loads(whole.stdout)["written"] == 6
    assert json.loads(whole.stdout)["images"] == 6 * 5 * 40
    cut = subprocess.run(
        command(tmp_path / "cut"), env=interrupting(tmp_path, ".npy", 4), check=False, start_new_session=True
    )
    assert cut.returncode == -signal.SIGKILL
    again = subprocess.run(command(tmp_path / "cut"), capture_output=True, text=True, check=False)
    assert again.returncode == 0, again.stderr[-2000:]
    assert json.loads(again.stdout)["written"] == 6 - 3
    assert {file.name for file in (tmp_path / "whole").iterdir()} == {
        file.name for file in (tmp_path / "cut").iterdir()
    }
    for file in (tmp_path / "whole").iterdir():
        assert file.read_bytes() == (tmp_path / "cut" / file.name).read_bytes()

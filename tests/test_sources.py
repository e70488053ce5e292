"""Readers: each published format gives back the images that went into it, and hostile files are refused in words."""

import io
import json
import os
import pickle
import random
import shutil
import struct
import subprocess
import sys
import tarfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as arrow
import pyarrow.parquet as parquet
import pytest
import scipy.io
from PIL import Image

import protodcs.data.readers.parquet as parquet_reader
from hostile_images import saved
from protodcs.data import ImageSource, decode, names, open_source
from protodcs.data.prompts import class_names
from protodcs.data.readers import plain_pickle
from protodcs.data.readers.cifar import Cifar
from protodcs.data.readers.folder import Folder
from protodcs.data.readers.npy import CifarC
from protodcs.data.readers.parquet import Parquet
from protodcs.data.readers.svhn import Svhn
from protodcs.data.readers.tiny_imagenet import TinyImageNetVal
from protodcs.data.readers.webdataset import WebDataset
from protodcs.errors import DataError, ImageError, InputError

COUNT = 30


@pytest.fixture(scope="module")
def pictures(data_folder) -> tuple[np.ndarray, list[int]]:
    """(30, 32, 32, 3) real images and their labels."""
    source = open_source("cifar10-test", data_folder)
    return np.stack(source.read(range(COUNT))), source.labels[:COUNT].tolist()


# Writers of the published formats, from what is known about them


def png(image: np.ndarray) -> bytes:
    return saved(Image.fromarray(image), "PNG")


def write_parquet(path: Path, images, labels) -> None:
    table = arrow.table({"image": [png(image) for image in images], "label": arrow.array(labels, arrow.int32())})
    parquet.write_table(
        table.replace_schema_metadata({"classes": json.dumps(class_names("cifar10"))}), path, row_group_size=7
    )


def write_hugging_face(path: Path, images, labels) -> None:
    rows = [{"bytes": png(image), "path": f"{place}.png"} for place, image in enumerate(images)]
    features = {"label": {"names": list(class_names("cifar10")), "_type": "ClassLabel"}}
    table = arrow.table({"img": rows, "label": labels})
    parquet.write_table(
        table.replace_schema_metadata({"huggingface": json.dumps({"info": {"features": features}})}), path
    )


def write_folder(path: Path, images, labels) -> None:
    for place, (image, label) in enumerate(zip(images, labels, strict=True)):
        file = path / class_names("cifar10")[label] / "deeper" / f"{place:03}.PnG"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(png(image))


def write_cifar_c(path: Path, images, labels) -> None:
    path.mkdir()
    np.save(path / "fog.npy", np.concatenate([np.roll(images, level, axis=0) for level in (1, 2, 0, 3, 4)]))
    np.save(path / "labels.npy", np.concatenate([np.roll(labels, level) for level in (1, 2, 0, 3, 4)]).astype(np.uint8))


def old_pickle(fields: dict[str, object]) -> bytes:
    """A dictionary as Python 2 pickled it: strings for bytes, arrays by numpy's old recipe."""

    def text(value: bytes) -> bytes:
        return (b"U" + bytes([len(value)]) if len(value) < 256 else b"T" + struct.pack("<I", len(value))) + value

    def array(value: np.ndarray) -> bytes:
        kind = (
            b"cnumpy\ndtype\n"
            + text(b"u1")
            + b"K\x00K\x01\x87R(K\x03"
            + text(b"|")
            + b"NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
        )
        shape = b"".join(b"J" + struct.pack("<i", side) for side in value.shape)
        start = b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85" + text(b"b") + b"\x87R(K\x01("
        return start + shape + b"t" + kind + b"\x89" + text(value.tobytes()) + b"tb"

    def value_of(value: object) -> bytes:
        if isinstance(value, np.ndarray):
            return array(value)
        if isinstance(value, list):
            return (
                b"](" + b"".join(b"K" + bytes([item]) if isinstance(item, int) else text(item) for item in value) + b"e"
            )
        return text(value)

    return b"\x80\x02}(" + b"".join(text(key.encode()) + value_of(value) for key, value in fields.items()) + b"u."


def cifar_rows(images: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(np.asarray(images).transpose(0, 3, 1, 2).reshape(len(images), -1))


def write_cifar10(path: Path, images, labels) -> None:
    path.mkdir()
    files = [b"%d.png" % place for place in range(len(images))]
    fields = {"batch_label": b"testing batch 1 of 1", "labels": labels, "data": cifar_rows(images), "filenames": files}
    (path / "test_batch").write_bytes(old_pickle(fields))
    for number in range(1, 6):
        part = slice(6 * number - 6, 6 * number)
        (path / f"data_batch_{number}").write_bytes(
            old_pickle({"data": cifar_rows(images[part]), "labels": labels[part]})
        )


def write_cifar100(path: Path, images, labels) -> None:
    path.mkdir()
    fields = {b"data": cifar_rows(images), b"fine_labels": labels, b"coarse_labels": [0] * len(labels)}
    (path / "test").write_bytes(pickle.dumps(fields, protocol=2))
    (path / "train").write_bytes(pickle.dumps(fields, protocol=4))
    (path / "meta").write_bytes(b"")


def write_svhn(path: Path, images, labels) -> None:
    digits = np.array([[label or 10] for label in labels], np.uint8)
    scipy.io.savemat(path, {"X": np.asarray(images).transpose(1, 2, 3, 0), "y": digits}, do_compression=True)


def write_tiny_imagenet(path: Path, images, labels) -> None:
    (path / "images").mkdir(parents=True)
    lines = []
    for place, (image, label) in enumerate(zip(images, labels, strict=True)):
        (path / "images" / f"val_{place}.JPEG").write_bytes(png(image))
        lines.append(f"val_{place}.JPEG\tn{label:08}\t0\t0\t31\t31\n")
    (path / "val_annotations.txt").write_text("".join(lines))


def add(tar: tarfile.TarFile, name: str, data: bytes, **fields: object) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(data)
    for field, value in fields.items():
        setattr(member, field, value)
    tar.addfile(member, io.BytesIO(data))


def write_tar(path: Path, images, labels, kind: int = tarfile.PAX_FORMAT) -> None:
    with tarfile.open(path, "w", format=kind) as tar:
        add(tar, "classes.json", b"{}")
        for place, (image, label) in enumerate(zip(images, labels, strict=True)):
            key = "train/" + "long" * (40 if place % 3 == 0 else 1) + f"/{place:05}"
            add(tar, f"{key}.png", png(image))
            add(tar, f"{key}.cls", b"%d\n" % label)
            add(tar, f"{key}.json", b"{}")


@dataclass
class Case:
    """A set that was written, and how it is opened at any place it is moved to."""

    file: str
    open: object
    classes: tuple[str, ...]
    stored_pixels: bool = False


CASES = {
    "parquet": (write_parquet, Case("set.parquet", Parquet, class_names("cifar10"))),
    "hugging face": (write_hugging_face, Case("set.parquet", Parquet, class_names("cifar10"))),
    "cifar-c": (write_cifar_c, Case("CIFAR-10-C", lambda path: CifarC(path, "fog", 3), (), True)),
    "cifar10": (write_cifar10, Case("cifar-10-batches-py", Cifar, class_names("cifar10"), True)),
    "cifar10 train": (write_cifar10, Case("batches", lambda path: Cifar(path, "train"), class_names("cifar10"), True)),
    "cifar100": (write_cifar100, Case("cifar-100-python", Cifar, class_names("cifar100"), True)),
    "cifar100 train": (write_cifar100, Case("cifar", lambda path: Cifar(path, "train"), class_names("cifar100"), True)),
    "svhn": (write_svhn, Case("test_32x32.mat", Svhn, tuple("0123456789"), True)),
    "tiny-imagenet": (write_tiny_imagenet, Case("val", TinyImageNetVal, tuple(f"n{n:08}" for n in range(10)))),
    "webdataset": (write_tar, Case("set.tar", WebDataset, ())),
    "webdataset gnu": (lambda *a: write_tar(*a, tarfile.GNU_FORMAT), Case("set.tar", WebDataset, ())),
}


@pytest.fixture(params=CASES)
def case(request, pictures, tmp_path) -> tuple[Case, Path]:
    write, case = CASES[request.param]
    write(tmp_path / case.file, *pictures)
    return case, tmp_path / case.file


# What every reader keeps


def test_the_images_and_labels_come_back_as_they_went_in(case, pictures):
    about, path = case
    source = about.open(path)
    images, labels = pictures
    assert isinstance(source, ImageSource)
    assert len(source) == COUNT
    assert source.classes == about.classes
    assert source.labels.dtype == np.int64
    assert source.labels.tolist() == labels
    assert np.array_equal(np.stack(source.read(range(COUNT))), images)


def test_any_order_and_repetition_is_read(case, pictures):
    about, path = case
    wanted = np.random.default_rng(3).integers(COUNT, size=100)
    read = about.open(path).read(wanted)
    assert np.array_equal(np.stack(read), pictures[0][wanted])
    assert about.open(path).read([]) == []


def test_images_are_the_callers_own_and_labels_are_not_writable(case):
    about, path = case
    source = about.open(path)
    first, second = source.read([4, 4])
    assert first.flags.c_contiguous
    assert type(first) is np.ndarray
    first[:] = 0
    assert second.any()
    assert source.read([4])[0].any()
    with pytest.raises(ValueError, match="read-only"):
        source.labels[0] = 3


@pytest.mark.parametrize("index", [-1, COUNT, 10**20, 1.0, "1", None])
def test_an_index_that_does_not_exist_is_refused(case, index):
    about, path = case
    source = about.open(path)
    with pytest.raises(InputError, match=r"asked for|a whole number"):
        source.read([0, index])


def test_the_fingerprint_is_that_of_the_content_wherever_it_lies(case, tmp_path):
    about, path = case
    elsewhere = tmp_path / "elsewhere" / "renamed" / path.name
    elsewhere.parent.mkdir(parents=True)
    (shutil.copytree if path.is_dir() else shutil.copy)(path, elsewhere)
    source = about.open(path)
    assert len(bytes.fromhex(source.fingerprint)) == 32
    assert about.open(elsewhere).fingerprint == source.fingerprint
    assert pickle.loads(pickle.dumps(source)).fingerprint == source.fingerprint


def test_the_fingerprint_changes_with_a_pixel_a_label_and_the_order(request, case, pictures, tmp_path):
    about, path = case
    write = CASES[request.node.callspec.params["case"]][0]
    images, labels = pictures
    pixel = images.copy()
    pixel[7, 3, 3, 1] ^= 1
    others = {
        "pixel": (pixel, labels),
        "label": (images, [*labels[:9], (labels[9] + 1) % 10, *labels[10:]]),
        "order": (images[::-1], labels[::-1]),
    }
    fingerprints = {about.open(path).fingerprint}
    for name, content in others.items():
        folder = tmp_path / name
        folder.mkdir()
        write(folder / path.name, *content)
        fingerprints.add(about.open(folder / path.name).fingerprint)
    assert len(fingerprints) == 4


def test_raw_pixels_have_one_fingerprint_in_every_container(pictures, tmp_path):
    fingerprints = set()
    for name, (write, about) in CASES.items():
        if about.stored_pixels:
            folder = tmp_path / name
            folder.mkdir()
            write(folder / about.file, *pictures)
            fingerprints.add(about.open(folder / about.file).fingerprint)
    assert len(fingerprints) == 1


def test_a_source_opens_nothing_before_it_is_asked(case, tmp_path):
    about, path = case
    for absent in (path.with_name("absent"), tmp_path / "no" / "such" / path.name):
        source = about.open(absent)
        with pytest.raises(DataError, match="no such"):
            len(source)
        with pytest.raises(DataError, match="no such"):
            source.read([0])


def test_threads_share_a_source(case, pictures):
    about, path = case
    source = about.open(path)
    chosen = [np.random.default_rng(seed).integers(COUNT, size=20) for seed in range(24)]
    with ThreadPoolExecutor(8) as pool:
        for indices, read in zip(chosen, pool.map(source.read, chosen), strict=True):
            assert np.array_equal(np.stack(read), pictures[0][indices])


def test_a_pickled_source_reads_in_another_process(pictures, tmp_path):
    """Used or fresh, a source travels without its images and reads the same on the other side."""
    sources = []
    for name, (write, about) in CASES.items():
        folder = tmp_path / name
        folder.mkdir()
        write(folder / about.file, *pictures)
        source = about.open(folder / about.file) if "train" not in name else None
        if source is not None:
            used = pickle.loads(pickle.dumps(source))
            used.read([0])
            sources += [source, used]
    data = pickle.dumps(sources)
    assert len(data) < len(sources) * pictures[0].nbytes / 4
    code = (
        "import pickle, sys, hashlib\n"
        "for source in pickle.load(sys.stdin.buffer):\n"
        "    pixels = b''.join(image.tobytes() for image in source.read([5, 1, 5]))\n"
        "    print(source.fingerprint, hashlib.sha256(pixels).hexdigest())"
    )
    child = subprocess.run([sys.executable, "-W", "error", "-c", code], input=data, capture_output=True, timeout=600)
    assert child.returncode == 0, child.stderr.decode()
    lines = child.stdout.decode().split("\n")[:-1]
    assert [line.split()[0] for line in lines] == [source.fingerprint for source in sources]
    assert len({line.split()[1] for line in lines}) == 1


# The shared sets


@pytest.mark.parametrize(
    ("name", "count", "classes", "per_class", "shape"),
    [
        ("cifar10-test", 10_000, 10, {1000}, (32, 32, 3)),
        ("svhn-test", 26_032, 10, None, (32, 32, 3)),
        ("tiny-imagenet-val", 10_000, 200, {50}, (64, 64, 3)),
        ("dtd10-64", 1_200, 10, {120}, (64, 64, 3)),
    ],
)
def test_the_shared_sets_are_what_they_say(data_folder, name, count, classes, per_class, shape):
    source = open_source(name, data_folder)
    assert source.name == name
    assert len(source) == count
    assert len(source.classes) == len(set(source.classes)) == classes
    sizes = np.bincount(source.labels, minlength=classes)
    assert sizes.sum() == count
    assert per_class is None or set(sizes.tolist()) == per_class
    for image in source.read(range(0, count, count // 50)):
        assert image.shape == shape


def test_shipped_class_names_are_those_of_the_shared_sets(data_folder):
    for name, words in (("cifar10-test", "cifar10"), ("tiny-imagenet-val", "tiny-imagenet")):
        assert open_source(name, data_folder).classes == class_names(words)


# Parquet


def test_few_row_groups_stay_in_memory(pictures, tmp_path, monkeypatch):
    write_parquet(tmp_path / "set.parquet", *pictures)
    monkeypatch.setattr(parquet_reader, "CACHE_BYTES", 2 * 7 * 2500)
    source = Parquet(tmp_path / "set.parquet")
    loaded = []
    load = source._load
    monkeypatch.setattr(source, "_load", lambda group: loaded.append(group) or load(group))
    order = np.random.default_rng(0).permutation(COUNT)
    assert np.array_equal(np.stack(source.read(order)), pictures[0][order])
    assert sorted(loaded) == [0, 1, 2, 3, 4]  # Each once, however the indices jump.
    assert len(source._cache) < 5
    source.read([0])
    assert len(loaded) == 6


def test_a_parquet_file_without_labels_or_names_has_none(pictures, tmp_path):
    path = tmp_path / "some_images.v2.parquet"
    parquet.write_table(arrow.table({"image": [png(image) for image in pictures[0]]}), path)
    source = Parquet(path)
    assert source.name == "some-images"
    assert source.classes == ()
    assert set(source.labels.tolist()) == {-1}
    parquet.write_table(arrow.table({"image": [b"x"], "label": arrow.array([None], arrow.int8())}), path)
    assert Parquet(path).labels.tolist() == [-1]


@pytest.mark.parametrize(
    ("columns", "metadata", "message"),
    [
        ({"picture": [b""]}, {}, r"no column `image`; its columns are \['picture'\]"),
        ({"image": ["text"]}, {}, "images must be bytes.*string"),
        ({"image": [{"path": "a"}]}, {}, "images must be bytes"),
        ({"image": [b""], "label": ["cat"]}, {}, "labels must be integers; given: string"),
        ({"image": [b""], "label": [3]}, {"classes": '["a", "b"]'}, "image 0 has the label 3; wanted: -1 to 1"),
        ({"image": [b""], "label": [-2]}, {}, "image 0 has the label -2"),
        ({"image": [b""]}, {"classes": "{"}, "not a JSON list of strings"),
        ({"image": [b""]}, {"classes": "[1, 2]"}, "not a JSON list of strings"),
        ({"image": [b""]}, {"classes": "[" * 100_000}, "not a JSON list of strings"),
        ({"image": [b""], "label": [1]}, {"huggingface": "[]"}, "not a JSON list of strings"),
    ],
)
def test_a_parquet_file_that_is_no_set_of_images_is_refused(tmp_path, columns, metadata, message):
    path = tmp_path / "set.parquet"
    parquet.write_table(arrow.table(columns).replace_schema_metadata(metadata), path)
    with pytest.raises(DataError, match=message):
        len(Parquet(path))


def test_a_parquet_file_of_more_rows_than_bytes_is_refused(tmp_path):
    path = tmp_path / "set.parquet"
    parquet.write_table(arrow.table({"image": arrow.nulls(10**6, arrow.binary())}), path)
    with pytest.raises(DataError, match="claims 1,000,000 rows, more than it has bytes"):
        len(Parquet(path))


def test_a_damaged_row_is_named(tmp_path, pictures):
    path = tmp_path / "set.parquet"
    parquet.write_table(arrow.table({"image": [png(pictures[0][0]), b"<html>", None, b""]}), path)
    source = Parquet(path)
    assert len(source.read([0])) == 1
    for row, reason in ((1, "an HTML page"), (2, "no image in this row"), (3, "empty")):
        with pytest.raises(ImageError, match=rf"row {row} of set\.parquet: .*{reason}"):
            source.read([0, row])


def test_a_damaged_parquet_file_is_refused(tmp_path, pictures):
    write_parquet(tmp_path / "whole.parquet", *pictures)
    data = (tmp_path / "whole.parquet").read_bytes()
    path = tmp_path / "set.parquet"
    for broken in (b"", b"PAR1", b"not parquet at all", data[:-5], data[: len(data) // 2], data[4:], bytes(len(data))):
        path.write_bytes(broken)
        with pytest.raises(DataError, match="not a Parquet file that can be read"):
            len(Parquet(path))


# Folders


def test_a_folder_is_listed_in_the_order_of_its_paths(pictures, tmp_path):
    data = png(pictures[0][0])
    files = ["b/2.png", "b/10.JPG", "B/x.jpeg", "a b/1.webp", "a-b/1.bmp", "a/z/y/1.TIFF", "\u00e4/1.gif"]
    others = ["a/.hidden.png", ".git/1.png", "a/notes.txt", "empty/readme.md", "a/png"]
    for file in files + others:
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_bytes(data)
    source = Folder(tmp_path, "mine")
    assert source._listing.files == tuple(sorted(files, key=str.encode))
    assert source.classes == ("B", "a", "a b", "a-b", "b", "\u00e4")
    assert [source.classes[label] for label in source.labels] == [file.split("/")[0] for file in source._listing.files]
    assert len(source.read(range(len(files)))) == len(files)


def test_a_flat_folder_has_no_labels(pictures, tmp_path):
    for place, image in enumerate(pictures[0]):
        (tmp_path / f"{place:02}.png").write_bytes(png(image))
    source = Folder(tmp_path)
    assert source.classes == ()
    assert set(source.labels.tolist()) == {-1}
    assert np.array_equal(np.stack(source.read(range(COUNT))), pictures[0])


def test_links_are_followed_but_not_in_circles(pictures, tmp_path):
    write_folder(tmp_path / "set", *pictures)
    wanted = Folder(tmp_path / "set")
    (tmp_path / "linked").mkdir()
    for entry in (tmp_path / "set").iterdir():
        (tmp_path / "linked" / entry.name).symlink_to(entry, target_is_directory=True)
    assert Folder(tmp_path / "linked").fingerprint == wanted.fingerprint
    assert Folder(tmp_path / "linked").classes == wanted.classes
    inside = tmp_path / "set" / "cat"
    (inside / "again").symlink_to(tmp_path / "set", target_is_directory=True)
    (inside / "self").symlink_to(".", target_is_directory=True)
    (inside / "dangling.png").symlink_to("nowhere.png")
    # Twenty folders, each with links to all: as a tree of paths they would have no end.
    for number in range(20):
        (inside / f"knot-{number}").mkdir()
        for other in range(20):
            (inside / f"knot-{number}" / f"to-{other}").symlink_to(inside / f"knot-{other}", target_is_directory=True)
    assert Folder(tmp_path / "set").fingerprint == wanted.fingerprint


def test_folders_that_are_no_set_are_refused(pictures, tmp_path):
    with pytest.raises(DataError, match="contains no image"):
        len(Folder(tmp_path))
    write_folder(tmp_path, *pictures)
    (tmp_path / "stray.png").write_bytes(b"")
    with pytest.raises(DataError, match=r"'stray\.png' lies beside the class folders"):
        len(Folder(tmp_path))


def test_a_damaged_file_in_a_folder_is_named(pictures, tmp_path):
    write_folder(tmp_path, *pictures)
    (tmp_path / "cat" / "aaa.png").write_bytes(b"<html>404</html>")
    source = Folder(tmp_path)
    with pytest.raises(ImageError, match=r"cat.aaa\.png: not an image: an HTML page"):
        source.read(range(len(source)))


# CIFAR-10-C and CIFAR-100-C


def test_each_severity_is_its_fifth_of_the_file(pictures, tmp_path):
    write_cifar_c(tmp_path / "c", *pictures)
    for severity, shift in ((1, 1), (2, 2), (3, 0), (4, 3), (5, 4)):
        source = CifarC(tmp_path / "c", "fog", severity)
        assert np.array_equal(np.stack(source.read(range(COUNT))), np.roll(pictures[0], shift, axis=0))
        assert source.labels.tolist() == np.roll(pictures[1], shift).tolist()
        assert source.name == f"c/fog/{severity}"


def test_arrays_of_another_shape_are_refused(pictures, tmp_path):
    write_cifar_c(tmp_path / "c", *pictures)
    folder = tmp_path / "c"
    np.save(folder / "floats.npy", np.zeros((50, 32, 32, 3)))
    np.save(folder / "planes.npy", np.zeros((50, 3, 32, 32), np.uint8))
    np.save(folder / "short.npy", np.zeros((49, 32, 32, 3), np.uint8))
    np.save(folder / "objects.npy", np.array([print], object))
    np.savez(folder / "archive", a=np.zeros(3))
    (folder / "archive.npz").rename(folder / "archive.npy")
    (folder / "text.npy").write_text("hello")
    (folder / "cut.npy").write_bytes((folder / "fog.npy").read_bytes()[:-1])
    for name in ("floats", "planes", "short"):
        with pytest.raises(DataError, match=rf"{name}\.npy: an array of shape .* wanted: uint8 of shape"):
            len(CifarC(folder, name, 1))
    for name in ("objects", "text", "cut"):
        with pytest.raises(DataError, match=rf"{name}\.npy: not an array file"):
            len(CifarC(folder, name, 1))
    with pytest.raises(DataError, match="an archive of arrays"):
        len(CifarC(folder, "archive", 1))
    with pytest.raises(DataError, match=r"no corruption 'rain'; there is: .*fog"):
        len(CifarC(folder, "rain", 1))
    np.save(folder / "labels.npy", np.zeros(7, int))
    with pytest.raises(DataError, match=r"labels\.npy: an array of shape \(7,\)"):
        len(CifarC(folder, "fog", 1))
    for severity in (0, 6, "1", 2.5):
        with pytest.raises(InputError, match="severity is 1 to 5"):
            CifarC(folder, "fog", severity)
    with pytest.raises(InputError, match="a plain name"):
        CifarC(folder, "../fog", 1)


# CIFAR's pickles


class Attack:
    def __init__(self, function, *arguments):
        self.recipe = function, arguments

    def __reduce__(self):
        return self.recipe


@pytest.mark.parametrize("protocol", range(6))
def test_a_pickle_that_would_run_a_program_is_refused_by_name(tmp_path, protocol):
    mark = tmp_path / "it-ran"
    folder = tmp_path / "batches"
    folder.mkdir()
    attacks = {
        "system": {b"data": Attack(os.system, f"touch {mark}")},
        "eval": {b"data": Attack(eval, f"open({str(mark)!r}, 'w')")},
        "getattr": [Attack(getattr, "", "join")],
        "Path": Path("/etc/passwd"),
        "Attack": Attack,
    }
    for name, attack in attacks.items():
        (folder / "test_batch").write_bytes(pickle.dumps(attack, protocol=protocol))
        with pytest.raises(
            DataError, match=rf"test_batch: a pickle that asks for .*{name}.* forbidden|copyreg.* forbidden"
        ):
            len(Cifar(folder))
    assert not mark.exists()
    pickle.loads(pickle.dumps(attacks["system"], protocol=protocol))
    assert mark.exists()  # The attack is a real one.


HOSTILE_PICKLES = {
    "persistent": (b"Pname\n.", "persistent"),
    "extension": (b"\x82\x01.", "extension"),
    "instance": (b"(ios\nsystem\n.", "os.system"),
    "object": (b"(cos\nsystem\no.", "os.system"),
    "stack global": (b"\x8c\x02os\x8c\x06system\x93.", "os.system"),
    "bytes ahead": (b"\x96\xff\xff\xff\xff\x00\x00\x00\x00.", "not a pickle"),
    "call of data": (b"U\x01a)R.", "not callable"),
    "call of an array": (b"cnumpy\nndarray\nJ\xff\xff\xff\x7f\x85R.", "array in an unknown way"),
    "call of a dtype's cousin": (b"cnumpy\nload\nU\x01a\x85R.", "numpy.load"),
    "state of data": (b"}}b.", "not a pickle"),
    "deep key": (b"}" + b")" + b"\x85" * 500_000 + b"Ns.", "1000 tuples"),
    "deep set": (b"}" + b"(\x91" * 2 + b"Ns.", "with a set"),
    "far place": (b"]r\xff\xff\xff\xff.", "place 4294967295"),
    "wrong group": (b"u.", "not a pickle"),
    "early slot": (b"\x80\x02q\x00.", "not a pickle"),
    "missing slot": (b"j\xff\xff\xff\xff.", "not a pickle"),
    "empty": (b"", "not a pickle"),
    "nothing left": (b".", "not a pickle"),
    "text": (b"hello", "not a pickle"),
    "long number": (b"I" + b"9" * 100_000 + b"\n.", "not a pickle"),
    "object array": (b"cnumpy\ndtype\nU\x02O8\x85R.", "array that lacks its parts"),
    "copies of text": (
        b"}X"
        + struct.pack("<I", 10_000)
        + b"a" * 10_000
        + b"q\x010"
        + b"".join(b"K" + bytes([n]) + b"c_codecs\nencode\nh\x01X\x06\0\0\0latin1\x86Rs" for n in range(99))
        + b".",
        "over and over",
    ),
}


@pytest.mark.parametrize("name", HOSTILE_PICKLES)
def test_hostile_pickles_are_refused(name):
    data, message = HOSTILE_PICKLES[name]
    with pytest.raises(DataError, match=message):
        plain_pickle.load(data)


def test_arrays_whose_parts_disagree_are_refused(pictures):
    rows = cifar_rows(pictures[0])
    whole = old_pickle({"data": rows})
    assert np.array_equal(plain_pickle.load(whole)[b"data"], rows)
    for old, new in (
        (b"U\x02u1", b"U\x02O8"),
        (b"U\x02u1", b"U\x02u2"),
        (b"U\x02u1", b"U\x02V1"),
        (b"U\x01|", b"U\x01!"),
        (b"J" + struct.pack("<i", COUNT), b"J" + struct.pack("<i", COUNT + 1)),
        (b"J" + struct.pack("<i", COUNT), b"J" + struct.pack("<i", -COUNT)),
    ):
        assert old in whole
        with pytest.raises(DataError, match="a pickle with an array"):
            plain_pickle.load(whole.replace(old, new, 1))
    field = whole[whole.index(b"cnumpy.core") : -2]
    copies = b"\x80\x02}(U\x01a" + field + b"q\x01" + b"".join(b"K" + bytes([n]) + b"h\x01" for n in range(200)) + b"u."
    arrays = plain_pickle.load(copies)
    assert all(np.shares_memory(arrays[n], arrays[b"a"]) for n in range(200))


def test_what_plain_pickles_hold_is_what_pickle_says():
    values = [
        {"a": [1, -5, 2**70, 2.5, True, None, "text", b"bytes", ("x", (1,)), {}]},
        {b"data": np.arange(12, dtype=np.uint8).reshape(3, 4)},
        {"deep": np.arange(24, dtype=">i4").reshape(2, 3, 4), "fortran": np.asfortranarray(np.eye(3))},
    ]
    for value in values:
        for protocol in range(5):
            read = plain_pickle.load(pickle.dumps(value, protocol=protocol))
            np.testing.assert_equal(read, value)


def test_damaged_pickles_are_refused_or_read(pictures):
    whole = old_pickle({"labels": pictures[1], "data": cifar_rows(pictures[0][:2])})
    rng = random.Random(0)
    refused = 0
    for _ in range(1500):
        data = bytearray(whole)
        for _ in range(rng.randint(1, 4)):
            data[rng.randrange(len(data) if rng.random() < 0.2 else 200)] = rng.randrange(256)
        try:
            plain_pickle.load(bytes(data[: rng.choice([len(data), rng.randrange(len(data))])]))
        except DataError:
            refused += 1
    assert refused > 700


def test_batches_that_are_no_cifar_are_refused(pictures, tmp_path):
    rows = cifar_rows(pictures[0])
    for content, message in (
        ([1, 2], "a pickled list"),
        ({"labels": pictures[1]}, "no field `data`"),
        ({"data": rows[:, :-1], "labels": pictures[1]}, "no field `data`"),
        ({"data": rows.astype(np.int16), "labels": pictures[1]}, "no field `data`"),
        ({"data": rows}, "no list of 30 whole numbers"),
        ({"data": rows, "labels": pictures[1][1:]}, "no list of 30 whole numbers"),
        ({"data": rows, "labels": ["a"] * COUNT}, "no list of 30 whole numbers"),
        ({"data": rows, "labels": [2**70] * COUNT}, "no class number"),
        ({"data": rows, "labels": [10] * COUNT}, "image 0 has the label 10"),
    ):
        (tmp_path / "test_batch").write_bytes(pickle.dumps(content, protocol=2))
        with pytest.raises(DataError, match=message):
            len(Cifar(tmp_path))
    with pytest.raises(InputError, match="'test' or 'train'"):
        Cifar(tmp_path, "val")
    with pytest.raises(DataError, match="no train split of CIFAR"):
        len(Cifar(tmp_path, "train"))


# SVHN


def test_a_mat_file_that_is_not_svhn_is_refused(pictures, tmp_path):
    path = tmp_path / "test_32x32.mat"
    images = np.asarray(pictures[0]).transpose(1, 2, 3, 0)
    digits = np.ones((COUNT, 1))
    for content, message in (
        ({"X": images}, r"holds \['X'\] of X and y"),
        ({"X": pictures[0], "y": digits}, "X of shape"),
        ({"X": images[..., 0], "y": digits}, "X of shape"),
        ({"X": images.astype(float), "y": digits}, "X of shape"),
        ({"X": images, "y": digits[1:]}, "y of 29 digits"),
        ({"X": images, "y": digits * 0}, "digits must be 1 to 10"),
        ({"X": images, "y": digits * 11}, "digits must be 1 to 10"),
        ({"X": images, "y": digits * 1.5}, "digits must be 1 to 10"),
        ({"X": "text", "y": digits}, "'X' is not a plain array"),
        ({"X": images * 1j, "y": digits}, "'X' is not a plain array"),
        ({"X": {"a": 1}, "y": digits}, "'X' is not a plain array"),
        ({"X": np.zeros((32, 32, 3, 9000), np.uint8), "y": digits}, "far more than the file"),
    ):
        scipy.io.savemat(path, content, do_compression=True)
        with pytest.raises(DataError, match=message):
            len(Svhn(path))
    scipy.io.savemat(path, {"X": images, "y": digits}, do_compression=True)
    whole = path.read_bytes()
    for broken in (b"", b"MATLAB 5.0", b"MATLAB 7.3 MAT-file".ljust(600), whole[:-9], whole[:150]):
        path.write_bytes(broken)
        with pytest.raises(DataError, match=r"not a MATLAB 5 file"):
            len(Svhn(path))


@pytest.mark.parametrize("compressed", [True, False])
def test_a_damaged_mat_file_is_refused_or_read(pictures, tmp_path, compressed):
    path = tmp_path / "test_32x32.mat"
    images = np.asarray(pictures[0][:9]).transpose(1, 2, 3, 0)
    scipy.io.savemat(path, {"y": np.ones((9, 1)), "X": images}, do_compression=compressed)
    whole = path.read_bytes()
    rng = random.Random(2)
    refused = 0
    for _ in range(5):
        data = bytearray(whole)
        for _ in range(rng.randint(1, 3)):
            data[rng.randrange(100, 320)] = rng.randrange(256)
        path.write_bytes(data)
        try:
            assert np.stack(Svhn(path).read(range(9))).shape == (9, 32, 32, 3)
        except DataError:
            refused += 1
    assert refused > 1


# Tar files


def tar_of(path: Path, *members: tuple[str, bytes, dict]) -> WebDataset:
    with tarfile.open(path, "w") as tar:
        for name, data, fields in members:
            add(tar, name, data, **fields)
    return WebDataset(path)


def test_names_in_a_tar_are_never_paths(pictures, tmp_path):
    data = png(pictures[0][0])
    before = set(tmp_path.parent.iterdir())
    source = tar_of(
        tmp_path / "set.tar",
        ("/etc/passwd.png", data, {}),
        ("../../outside.png", data, {}),
        ("link.png", b"", {"type": tarfile.SYMTYPE, "linkname": "/etc/passwd"}),
        ("hard.png", b"", {"type": tarfile.LNKTYPE, "linkname": "/etc/passwd.png"}),
        ("device.png", b"", {"type": tarfile.CHRTYPE}),
        ("pipe.png", b"", {"type": tarfile.FIFOTYPE}),
        ("folder.png", b"", {"type": tarfile.DIRTYPE}),
        ("a.b.png", data, {}),
        (".png", data, {}),
        ("plain.PNG", data, {}),
        ("plain.cls", b" 4 ", {}),
        ("lonely.cls", b"4", {}),
    )
    assert source.labels.tolist() == [-1, -1, 4]
    assert [sample.key for sample in source._samples] == ["/etc/passwd", "../../outside", "plain"]
    assert len(source.read([0, 1, 2])) == 3
    assert set(tmp_path.parent.iterdir()) == before


def test_several_shards_are_one_set(pictures, tmp_path):
    images, labels = pictures
    shards = []
    for number in range(3):
        part = slice(10 * number, 10 * number + 10)
        shards.append(tmp_path / f"part-{number}.tar")
        write_tar(shards[-1], images[part], labels[part])
    source = WebDataset(shards, classes=class_names("cifar10"))
    assert source.classes == class_names("cifar10")
    assert source.labels.tolist() == labels
    order = np.random.default_rng(1).permutation(COUNT)
    assert np.array_equal(np.stack(source.read(order)), images[order])
    write_tar(tmp_path / "whole.tar", images, labels)
    assert WebDataset(tmp_path / "whole.tar").fingerprint == source.fingerprint
    assert len(open_source(tmp_path)) == 2 * COUNT


def test_hostile_tars_are_refused(pictures, tmp_path):
    data = png(pictures[0][0])
    path = tmp_path / "set.tar"
    for members, message in (
        ([("a.png", data, {}), ("a.png", data, {})], "two images under the key 'a'"),
        ([("a.png", data, {}), ("a.jpg", data, {})], "two images under the key 'a'"),
        ([("a.png", data, {}), ("a.cls", b"1", {}), ("a.cls", b"2", {})], "two labels under the key 'a'"),
        ([("a.png", data, {}), ("a.cls", b"cat", {})], "'a.cls' must hold a class number"),
        ([("a.png", data, {}), ("a.cls", b"1" * 1000, {})], "'a.cls' must hold a class number"),
        ([("a.png", data, {}), ("a.cls", b"-7", {})], "'a.cls' must hold a class number"),
        ([("a.txt", data, {})], "no image in this tar"),
        ([("a.png", data, {"pax_headers": {"size": "99999999999"}})], "truncated: .* claims 99,999,999,999 bytes"),
        ([("a.png", data, {"pax_headers": {"size": "-5"}})], "a pax header with the size"),
        ([("a.png", data, {"pax_headers": {"GNU.sparse.major": "1"}})], "a sparse file"),
    ):
        with pytest.raises(DataError, match=message):
            len(tar_of(path, *members))
    tar_of(path, ("a.png", data, {}))
    whole = path.read_bytes()
    for size in (b"77777777777\0", b"\x80" + b"\xff" * 11, b"\xff" * 11 + b"\xf0", b"-0000000001\0", b"9999\0"):
        header = bytearray(whole[:512])
        header[124:136] = size.ljust(12, b"\0")
        header[148:156] = b" " * 8
        header[148:156] = b"%06o\0 " % sum(header)
        path.write_bytes(bytes(header) + whole[512:])
        with pytest.raises(DataError, match=r"truncated: |is no number"):
            len(WebDataset(path))
    for broken, message in ((b"", "not a tar file"), (b"x" * 5000, "not a tar file"), (whole[:700], "truncated")):
        path.write_bytes(broken)
        with pytest.raises(DataError, match=message):
            len(WebDataset(path))


def test_compressed_tars_are_refused_in_words(pictures, tmp_path):
    for kind, name in (("gz", "gzip"), ("bz2", "bzip2"), ("xz", "xz")):
        path = tmp_path / f"set.tar.{kind}"
        with tarfile.open(path, f"w:{kind}") as tar:
            add(tar, "a.png", png(pictures[0][0]))
        with pytest.raises(DataError, match=f"compressed with {name}.*unpack it"):
            len(open_source(path))


def test_damaged_tars_are_refused_or_read(pictures, tmp_path):
    path = tmp_path / "set.tar"
    write_tar(path, pictures[0][:3], pictures[1][:3])
    whole = path.read_bytes()
    rng = random.Random(1)
    outcomes = {"read": 0, "refused": 0}
    for _ in range(600):
        data = bytearray(whole)
        for _ in range(rng.randint(1, 3)):
            data[512 * rng.randrange(len(data) // 512) + rng.choice([0, 124, 130, 135, 148, 156, 345])] = rng.randrange(
                256
            )
        path.write_bytes(data[: rng.choice([len(data), len(data), rng.randrange(len(data))])])
        try:
            source = WebDataset(path)
            source.read(range(len(source)))
            outcomes["read"] += 1
        except (DataError, ImageError):
            outcomes["refused"] += 1
    assert min(outcomes.values()) > 20


def test_a_tar_that_shrinks_after_it_was_listed_is_noticed(pictures, tmp_path):
    path = tmp_path / "set.tar"
    write_tar(path, *pictures)
    source = WebDataset(path)
    assert len(source) == COUNT
    path.write_bytes(path.read_bytes()[:20_000])
    with pytest.raises(DataError, match="shorter since it was listed"):
        source.read([COUNT - 1])


# WordNet numbers


def test_wordnet_numbers_get_their_words(pictures, tmp_path):
    root = tmp_path / "tiny-imagenet-200"
    write_tiny_imagenet(root / "val", *pictures)
    (root / "words.txt").write_text("n00000000\tcrane, bird\nn00000001\tcrane\nn00000003\ttabby, tabby cat\n")
    assert TinyImageNetVal(root / "val").classes[:4] == ("crane (n00000000)", "crane (n00000001)", "n00000002", "tabby")
    folder = root / "train"
    for number in (3, 1):
        (folder / f"n{number:08}").mkdir(parents=True)
        (folder / f"n{number:08}" / "1.JPEG").write_bytes(png(pictures[0][0]))
    assert Folder(folder).classes == ("crane", "tabby")
    for number in range(200):
        (folder / f"n{number:08}").mkdir(exist_ok=True)
        (folder / f"n{number:08}" / "1.JPEG").write_bytes(png(pictures[0][0]))
    assert Folder(folder).classes == class_names("tiny-imagenet")


def write_class_folders(path: Path, folders, image) -> None:
    for folder in folders:
        (path / folder).mkdir(parents=True)
        (path / folder / "1.JPEG").write_bytes(png(image))


def test_images_of_imagenet_o_are_of_no_class(pictures, tmp_path):
    write_class_folders(tmp_path / "imagenet-o", ["n01443537", "n01770081"], pictures[0][0])
    source = open_source("imagenet-o", tmp_path)
    assert source.classes == ()
    assert source.labels.tolist() == [-1, -1]


def test_folders_named_by_numbers_are_in_the_order_of_the_numbers(pictures, tmp_path):
    write_class_folders(tmp_path / "imagenetv2", map(str, range(1000)), pictures[0][0])
    source = open_source("imagenetv2", tmp_path)
    assert source.classes == class_names("imagenet")
    # Files are in the order of their paths: 0, 1, 10, 100, 101, and so on.
    assert source.labels[:5].tolist() == [0, 1, 10, 100, 101]


@pytest.mark.parametrize("name", ["imagenet-a", "imagenet-r"])
def test_the_variants_of_imagenet_with_200_classes_have_their_own_names(pictures, tmp_path, name):
    write_class_folders(tmp_path / name, [f"n{number:08}" for number in range(200)], pictures[0][0])
    assert open_source(name, tmp_path).classes == class_names(name)
    assert len(set(class_names(name)) & set(class_names("imagenet"))) == 200


def test_an_incomplete_dataset_is_told_by_its_number_of_classes(pictures, tmp_path):
    write_class_folders(tmp_path / "imagenet-val", ["n01440764"], pictures[0][0])
    with pytest.raises(DataError, match="has 1 class folders, and imagenet-val has 1000 classes"):
        _ = open_source("imagenet-val", tmp_path).labels


@pytest.mark.parametrize("line", ["val_0.JPEG", "../val_0.JPEG\tn1", "/etc/passwd\tn1", "val_0.JPEG\t", ""])
def test_bad_annotations_are_refused(tmp_path, line):
    (tmp_path / "val_annotations.txt").write_text(line + "\n")
    with pytest.raises(DataError, match="a line must read file, tab, WordNet number"):
        len(TinyImageNetVal(tmp_path))


# By name


@pytest.mark.parametrize(
    ("name", "file", "write", "reader"),
    [
        ("cifar10-test", "cifar10_test.parquet", write_parquet, Parquet),
        ("cifar10-test", "cifar-10-batches-py", write_cifar10, Cifar),
        ("cifar100-test", "cifar-100-python", write_cifar100, Cifar),
        ("svhn-test", "svhn/test_32x32.mat", write_svhn, Svhn),
        ("tiny-imagenet-val", "tiny-imagenet-200/val", write_tiny_imagenet, TinyImageNetVal),
        ("dtd10-64", "dtd10-64", write_folder, Folder),
        ("dtd", "dtd/images", write_folder, Folder),
        ("cifar10-c/fog/3", "CIFAR-10-C", write_cifar_c, CifarC),
        ("cifar100-c/fog/3", "CIFAR-100-C", write_cifar_c, CifarC),
        ("tiny-imagenet-c/fog/3", "Tiny-ImageNet-C/fog/3", write_folder, Folder),
        ("imagenet-c/fog/3", "imagenet-c/fog/3", write_folder, Folder),
    ],
)
def test_known_sets_are_found_in_their_published_layout(pictures, tmp_path, monkeypatch, name, file, write, reader):
    monkeypatch.delenv("PROTODCS_DATA", raising=False)
    with pytest.raises(DataError, match=f"dataset {name} is missing, because PROTODCS_DATA is not set"):
        open_source(name)
    with pytest.raises(DataError, match=f"dataset {name} is missing: .* Download it .* (Put it there as|It becomes) "):
        open_source(name, tmp_path)
    (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
    write(tmp_path / file, *pictures)
    source = open_source(name, tmp_path)
    assert type(source) is reader
    assert source.name == name
    assert len(source) == COUNT
    assert len(source.classes) in (10, 100)
    assert np.array_equal(sorted(source.labels), sorted(pictures[1]))
    monkeypatch.setenv("PROTODCS_DATA", str(tmp_path))
    assert open_source(name).fingerprint == source.fingerprint


def test_paths_are_opened_by_what_lies_there(pictures, tmp_path):
    for name, (write, about) in CASES.items():
        if name in ("cifar-c", "cifar10 train", "cifar100 train"):
            continue
        folder = tmp_path / name
        folder.mkdir()
        write(folder / about.file, *pictures)
        opened = open_source(folder / about.file)
        assert type(opened) is type(about.open(folder / about.file))
        assert open_source(str(folder / about.file)).fingerprint == opened.fingerprint
    write_folder(tmp_path / "images", *pictures)
    assert type(open_source(tmp_path / "images")) is Folder


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("cifar11", "no file, folder or dataset 'cifar11'.* Datasets: cifar10-test"),
        ("cifar10-test/fog/3", "no file, folder or dataset"),
        ("cifar10-c", "such as 'cifar10-c/fog/5'"),
        ("cifar10-c/fog", "severity 1 to 5"),
        ("cifar10-c/fog/6", "severity 1 to 5"),
        ("cifar10-c/fog/3/x", "severity 1 to 5"),
        ("cifar10-c/../3", "such as 'cifar10-c/fog/5'"),
        ("imagenet-c//3", "such as 'imagenet-c/fog/5'"),
        ("", "known are|no image"),
    ],
)
def test_unknown_names_are_refused_with_the_known_ones(tmp_path, monkeypatch, name, message):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match=message):
        len(open_source(name, tmp_path))


def test_a_missing_corruption_names_those_that_are_there(pictures, tmp_path):
    write_folder(tmp_path / "ImageNet-C" / "snow" / "3", *pictures)
    with pytest.raises(DataError, match="no corruption 'fog' at severity 3; there is: snow"):
        open_source("imagenet-c/fog/3", tmp_path)


def test_files_of_unknown_kinds_are_refused(tmp_path):
    for name, message in (("a.zip", "unknown kind"), ("a.npy", "CifarC"), ("a", "unknown kind")):
        (tmp_path / name).write_bytes(b"")
        with pytest.raises(DataError, match=message):
            open_source(tmp_path / name)


def test_every_name_says_where_its_set_comes_from(tmp_path):
    assert len(names()) == 22
    for name in names():
        concrete = name.replace("<corruption>", "fog").replace("<severity>", "1")
        with pytest.raises(
            DataError, match=r"Download it from the |Download it with `protodcs fetch [\w-]+`: .* MB, from https?://"
        ):
            open_source(concrete, tmp_path)


def test_importing_the_room_is_light():
    code = (
        "import sys, protodcs.data as room\n"
        "assert not {'PIL', 'pyarrow', 'scipy', 'torch'} & set(sys.modules), sys.modules\n"
        "room.names(); room.open_source\n"
        "assert not {'PIL', 'pyarrow', 'scipy', 'torch'} & set(sys.modules), sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=600)
    assert decode is not None

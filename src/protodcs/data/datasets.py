"""The datasets that have a name, and the kinds of files that are recognised. Nothing is downloaded here.

A row of `SETS` lists the paths of a dataset below the data folder, the reader of each, and where it comes from.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ..errors import DataError, did_you_mean
from .origins import ORIGINS
from .source import ImageSource

VARIABLE = "PROTODCS_DATA"
PATTERN = "<corruption>/<severity>"


@dataclass(frozen=True)
class Place:
    """A file or folder, relative to the data folder, and its reader."""

    path: str
    reader: Callable[[Path, str], ImageSource]


@dataclass(frozen=True)
class KnownSet:
    """A dataset with a name. If it is `corrupted`, corruption and severity follow the name.

    `images` and `classes` are the published numbers: enough to plan with before the dataset is here.
    """

    name: str
    places: tuple[Place, ...]
    images: int
    classes: int
    corrupted: bool = False
    # Where to get it, if `ORIGINS` does not list it.
    origin: str = ""


def _parquet(path: Path, name: str) -> ImageSource:
    from .readers.parquet import Parquet

    return Parquet(path, name)


def _cifar(path: Path, name: str) -> ImageSource:
    from .readers.cifar import Cifar

    return Cifar(path, "test", name)


def _cifar_c(path: Path, name: str) -> ImageSource:
    from .prompts import class_names
    from .readers.npy import CifarC

    family, corruption, severity = name.split("/")
    return CifarC(path, corruption, int(severity), name, class_names(family.removesuffix("-c")))


def _svhn(path: Path, name: str) -> ImageSource:
    from .readers.svhn import Svhn

    return Svhn(path, name)


def _tiny_imagenet(path: Path, name: str) -> ImageSource:
    from .readers.tiny_imagenet import TinyImageNetVal

    return TinyImageNetVal(path, name)


def _folder(path: Path, name: str) -> ImageSource:
    from .readers.folder import Folder

    return Folder(path, name)


def _imagenet_folder(path: Path, name: str) -> ImageSource:
    """Read a folder of class folders whose classes are those of ImageNet, in its order, or the 200 of a variant."""
    from .prompts import class_names
    from .readers.folder import Folder

    return Folder(path, name, class_names(name if name in ("imagenet-a", "imagenet-r") else "imagenet"))


def _without_labels(path: Path, name: str) -> ImageSource:
    """Read a set of unknown images: its folders are no classes of the stream, or do not name what the images show."""
    from .readers.folder import Folder

    return Folder(path, name, classes=())


def _folder_of_severity(path: Path, name: str) -> ImageSource:
    from .readers.folder import Folder

    _, corruption, severity = name.split("/")
    if not (path / corruption / severity).is_dir():
        there = sorted(entry.name for entry in path.iterdir() if (entry / severity).is_dir())
        raise DataError(
            f"{path}: no corruption {corruption!r} at severity {severity}; there is: {', '.join(there) or 'none'}"
        )
    return Folder(path / corruption / severity, name)


SETS: tuple[KnownSet, ...] = (
    KnownSet(
        "cifar10-test",
        (Place("cifar10_test.parquet", _parquet), Place("cifar-10-batches-py", _cifar)),
        images=10_000,
        classes=10,
    ),
    KnownSet(
        "cifar100-test",
        (Place("cifar100_test.parquet", _parquet), Place("cifar-100-python", _cifar)),
        images=10_000,
        classes=100,
    ),
    KnownSet(
        "svhn-test",
        (
            Place("svhn_test.parquet", _parquet),
            Place("svhn/test_32x32.mat", _svhn),
            Place("SVHN/test_32x32.mat", _svhn),
            Place("test_32x32.mat", _svhn),
        ),
        images=26_032,
        classes=10,
    ),
    KnownSet(
        "tiny-imagenet-val",
        (Place("tiny_imagenet_val.parquet", _parquet), Place("tiny-imagenet-200/val", _tiny_imagenet)),
        images=10_000,
        classes=200,
    ),
    KnownSet(
        "dtd10-64",
        (Place("dtd10_64.parquet", _parquet), Place("dtd10-64", _folder)),
        images=1_200,
        classes=10,
        origin="the Describable Textures Dataset page of the Visual Geometry Group, Oxford: the first ten classes, "
        "centre-cropped and scaled to 64 x 64, one folder a class",
    ),
    KnownSet(
        "dtd",
        (Place("dtd/images", _folder),),
        images=5_640,
        classes=47,
    ),
    KnownSet(
        "cifar10-c",
        (Place("CIFAR-10-C", _cifar_c), Place("cifar-10-c", _cifar_c)),
        images=10_000,
        classes=10,
        corrupted=True,
    ),
    KnownSet(
        "cifar100-c",
        (Place("CIFAR-100-C", _cifar_c), Place("cifar-100-c", _cifar_c)),
        images=10_000,
        classes=100,
        corrupted=True,
    ),
    KnownSet(
        "tiny-imagenet-c",
        (Place("Tiny-ImageNet-C", _folder_of_severity), Place("tiny-imagenet-c", _folder_of_severity)),
        images=10_000,
        classes=200,
        origin="the robustness project of Dan Hendrycks and Thomas Dietterich, on Zenodo: Tiny-ImageNet-C, unpacked",
        corrupted=True,
    ),
    KnownSet(
        "imagenet-c",
        (Place("ImageNet-C", _folder_of_severity), Place("imagenet-c", _folder_of_severity)),
        images=50_000,
        classes=1_000,
        origin="the robustness project of Dan Hendrycks and Thomas Dietterich, on Zenodo: ImageNet-C, its parts "
        "unpacked into one folder",
        corrupted=True,
    ),
    KnownSet(
        "imagenet-o",
        (Place("imagenet-o", _without_labels), Place("ImageNet-O", _without_labels)),
        images=2_000,
        classes=0,
        origin="the project page of Natural Adversarial Examples by Dan Hendrycks and others: ImageNet-O, unpacked",
    ),
    KnownSet(
        "ssb-hard",
        (Place("images_largescale/ssb_hard", _without_labels), Place("ssb-hard", _without_labels)),
        images=49_000,
        classes=0,
        origin="the OpenOOD benchmark, its ImageNet-1K sets: SSB-hard, from the Semantic Shift Benchmark "
        "of Sagar Vaze and others",
    ),
    KnownSet(
        "ninco",
        (Place("images_largescale/ninco", _without_labels), Place("ninco", _without_labels)),
        images=5_879,
        classes=0,
        origin="the project of Julian Bitterwolf and others, In or Out? Fixing ImageNet Out-of- "
        "Distribution Detection Evaluation: NINCO, its out-of-distribution classes alone",
    ),
    KnownSet(
        "inaturalist-ood",
        (Place("images_largescale/inaturalist", _without_labels), Place("inaturalist-ood", _without_labels)),
        images=10_000,
        classes=0,
        origin="the project MOS of Rui Huang and Yixuan Li: iNaturalist, 10,000 images",
    ),
    KnownSet(
        "sun-ood",
        (Place("images_largescale/sun", _without_labels), Place("sun-ood", _without_labels)),
        images=10_000,
        classes=0,
        origin="the project MOS of Rui Huang and Yixuan Li: SUN, 10,000 images",
    ),
    KnownSet(
        "places-ood",
        (Place("images_largescale/places", _without_labels), Place("places-ood", _without_labels)),
        images=10_000,
        classes=0,
        origin="the project MOS of Rui Huang and Yixuan Li: Places, 10,000 images",
    ),
    KnownSet(
        "openimage-o",
        (Place("images_largescale/openimage_o", _without_labels), Place("openimage-o", _without_labels)),
        images=17_632,
        classes=0,
        origin="the project ViM of Haoqi Wang and others: OpenImage-O",
    ),
    KnownSet(
        "imagenet-val",
        (Place("imagenet/val", _imagenet_folder), Place("imagenet-val", _imagenet_folder)),
        images=50_000,
        classes=1_000,
        origin="the ImageNet project, after registration: the validation images of ILSVRC 2012, sorted into a folder "
        "for each WordNet number",
    ),
    KnownSet(
        "imagenetv2",
        (Place("imagenetv2-matched-frequency-format-val", _imagenet_folder), Place("imagenetv2", _imagenet_folder)),
        images=10_000,
        classes=1_000,
        origin="the ImageNetV2 project of Benjamin Recht and others: the version matched-frequency, unpacked",
    ),
    KnownSet(
        "imagenet-sketch",
        (Place("imagenet-sketch", _imagenet_folder), Place("sketch", _imagenet_folder)),
        images=50_889,
        classes=1_000,
        origin="the ImageNet-Sketch project of Haohan Wang and others, unpacked",
    ),
    KnownSet(
        "imagenet-a",
        (Place("imagenet-a", _imagenet_folder),),
        images=7_500,
        classes=200,
        origin="the project page of Natural Adversarial Examples by Dan Hendrycks and others: ImageNet-A, unpacked",
    ),
    KnownSet(
        "imagenet-r",
        (Place("imagenet-r", _imagenet_folder),),
        images=30_000,
        classes=200,
        origin="the project page of The Many Faces of Robustness by Dan Hendrycks and others: ImageNet-R, unpacked",
    ),
)


def names() -> list[str]:
    """Return the names of the datasets that `open_source` knows.

    >>> names()[0]
    'cifar10-test'
    """
    return [f"{row.name}/{PATTERN}" if row.corrupted else row.name for row in SETS]


def published(name: str) -> KnownSet | None:
    """Return the row of a dataset by its name, or None if it has none. The dataset need not be here."""
    return _row_of(name)


def open_source(name_or_path: str | os.PathLike[str], root: str | os.PathLike[str] | None = None) -> ImageSource:
    """Open a dataset by its name or path.

    Args:
        name_or_path: a name as `names` lists them, such as "cifar10-test" or "cifar10-c/fog/5"; or the path of a
            Parquet file, a tar file, a .mat file of SVHN, a folder of images, of CIFAR's batches, or of tar files.
        root: folder of the named datasets; by default the one that PROTODCS_DATA names.

    Raises:
        DataError: the dataset is missing or damaged; the message says where it comes from.
    """
    row = _row_of(name_or_path) if isinstance(name_or_path, str) else None
    if row is not None:
        return _open_known(row, str(name_or_path), root)
    # Absolute, since a source may be sent to a process that works in another folder.
    path = Path(name_or_path).absolute()
    if path.is_dir():
        return _open_folder(path)
    if path.is_file():
        return _open_file(path)
    raise DataError(
        f"There is no file, folder or dataset {str(name_or_path)!r}.{did_you_mean(str(name_or_path), names())} "
        f"Datasets: {', '.join(names())}."
    )


def _row_of(name: str) -> KnownSet | None:
    family, _, rest = name.partition("/")
    row = next((row for row in SETS if row.name == family), None)
    if row is None or (rest and not row.corrupted):
        return None
    if row.corrupted:
        corruption, _, severity = rest.partition("/")
        # Letters and underscores only: the name of a corruption becomes the name of a file.
        if not corruption.replace("_", "").isalpha() or severity not in ("1", "2", "3", "4", "5"):
            raise DataError(f"{name}: wanted: {family}/{PATTERN} such as '{family}/fog/5', severity 1 to 5")
    return row


def _open_known(row: KnownSet, name: str, root: str | os.PathLike[str] | None) -> ImageSource:
    folder = root if root is not None else os.environ.get(VARIABLE)
    if folder is None:
        raise DataError(
            f"The dataset {name} is missing, because {VARIABLE} is not set. Set it to your folder of datasets. "
            f"{_how_to_get(row)}"
        )
    for place in row.places:
        path = Path(folder).absolute() / place.path
        if path.exists():
            return place.reader(path, name)
    looked = ", ".join(place.path for place in row.places)
    raise DataError(f"The dataset {name} is missing: {os.fspath(folder)} has none of {looked}. {_how_to_get(row)}")


def _how_to_get(row: KnownSet) -> str:
    """Return where a dataset comes from, how large it is, and the command that downloads it."""
    origin = ORIGINS.get(row.name)
    if origin is None:
        return f"Download it from {row.origin}. Put it there as {row.places[-1].path}."
    return (
        f"Download it with `protodcs fetch {row.name}`: {origin.about}, {origin.megabytes}, from {origin.url}. "
        f"It becomes {origin.path}."
    )


def _open_file(path: Path) -> ImageSource:
    ending = path.suffix.lower()
    if ending == ".parquet":
        from .readers.parquet import Parquet

        return Parquet(path)
    if ending == ".tar" or path.name.lower().endswith((".tar.gz", ".tgz", ".tar.bz2", ".tar.xz", ".tar.zst")):
        from .readers.webdataset import WebDataset

        return WebDataset(path)
    if ending == ".mat":
        from .readers.svhn import Svhn

        return Svhn(path)
    if ending == ".npy":
        raise DataError(
            f"{path}: one array of a corrupted CIFAR; use protodcs.data.readers.npy.CifarC(folder, corruption, 1)"
        )
    raise DataError(f"{path}: a file of an unknown kind; wanted: .parquet, .tar or .mat, or a folder of images")


def _open_folder(path: Path) -> ImageSource:
    there = {entry.name for entry in path.iterdir()}
    if "test_batch" in there or {"test", "meta"} <= there:
        from .readers.cifar import Cifar

        return Cifar(path)
    if "val_annotations.txt" in there:
        from .readers.tiny_imagenet import TinyImageNetVal

        return TinyImageNetVal(path)
    tars = sorted(name for name in there if name.endswith(".tar"))
    if tars:
        from .readers.webdataset import WebDataset

        return WebDataset([path / tar for tar in tars], path.resolve().name)
    from .readers.folder import Folder

    return Folder(path)

"""A folder of labelled images: one subfolder for each class, and one of images that belong to no class."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from ..errors import DataError
from .readers.folder import image_files
from .readers.wordnet import class_words

UNKNOWN = -1


class LabelledFolder(NamedTuple):
    """Labelled images of a folder.

    Attributes:
        classes: the class names.
        files: the files, by their path relative to the folder.
        labels: the class of each file, by the same path; -1 for unknown.
    """

    classes: tuple[str, ...]
    files: Mapping[str, Path]
    labels: Mapping[str, int]


def labelled_folder(
    folder: Path, classes: Sequence[str] | None = None, unknown: str | None = "unknown"
) -> LabelledFolder:
    """Return the labelled images of a folder, in the order of their paths.

    Args:
        folder: has one subfolder of images for each class.
        classes: the class names, if there are more than subfolders.
        unknown: the subfolder of images that belong to no class; None: there is none.
    """
    if not folder.is_dir():
        raise DataError(f"{folder} is not a folder. Give a folder with one subfolder of images for each class.")
    subfolders = sorted(entry.name for entry in folder.iterdir() if entry.is_dir() and not entry.name.startswith("."))
    if unknown is not None and unknown not in subfolders:
        raise DataError(
            f"{folder} has no subfolder {unknown!r} with images of no class. Name it with --unknown, or pass "
            "--known-only to measure without unknown images."
        )
    known = tuple(name for name in subfolders if name != unknown)
    if not known and classes is None:
        raise DataError(f"{folder} has no class subfolder. Put the images of each class into a subfolder of its name.")
    names = dict(zip(known, class_words(known, folder), strict=True)) if known else {}
    classes = tuple(names.values()) if classes is None else tuple(classes)
    if missing := [name for name in names.values() if name not in classes]:
        raise DataError(f"The subfolder {missing[0]!r} is not a class of the list. Rename it, or add it to --classes.")
    numbers = {subfolder: classes.index(name) for subfolder, name in names.items()}
    if unknown is not None:
        numbers[unknown] = UNKNOWN
    files, labels = {}, {}
    for subfolder, label in numbers.items():
        for file in image_files(folder / subfolder):
            name = f"{subfolder}/{file}"
            files[name], labels[name] = folder / subfolder / file, label
    return LabelledFolder(classes, files, labels)

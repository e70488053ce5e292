"""A folder of image files: one sub-folder a class, or images side by side without labels.

The images are in the order of the relative paths, byte by byte, so it is the same on every machine. Hidden files are
skipped. Links are followed, but within a class no folder is entered twice, so links in a circle come to an end.
"""

import os
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ...arrays import Labels, Pixels
from ...errors import DataError
from ..image import MAX_BYTES, decode
from .stored import IMAGE_ENDINGS, FilePath, StoredImages, named_after
from .wordnet import class_words


class _Listing(NamedTuple):
    """The files in order, relative to the folder, and what they show."""

    files: tuple[str, ...]
    labels: Labels
    classes: tuple[str, ...]


class Folder(StoredImages):
    """The images of one folder, listed once.

    Args:
        path: the folder. With sub-folders that hold images, each is a class (at any depth below it); without, the
            images have no labels. Sub-folders named by WordNet number are classes by their words, where known.
            Sub-folders named by numbers, as those of ImageNet-V2, are in the order of the numbers.
        name: the name of the set; by default the folder's.
        classes: names of the classes in the order of the sub-folders; by default those of the sub-folders. Without any
            name, the images have no labels.
    """

    def __init__(self, path: FilePath, name: str | None = None, classes: Sequence[str] | None = None):
        super().__init__(name or named_after(Path(path).resolve()))
        self.path = Path(path)
        self._given = None if classes is None else tuple(classes)

    @cached_property
    def _listing(self) -> _Listing:
        files = image_files(self.path)
        owners = [file.partition("/")[0] if "/" in file else None for file in files]
        if self._given == () or all(owner is None for owner in owners):
            return _Listing(tuple(files), np.full(len(files), -1, np.int64), ())
        if None in owners:
            stray = files[owners.index(None)]
            raise DataError(
                f"{self.path}: {stray!r} lies beside the class folders, so it has no class; move it out, or into one"
            )
        classes = _in_order({owner for owner in owners if owner is not None})
        number = {owner: label for label, owner in enumerate(classes)}
        labels = np.array([number[owner] for owner in owners if owner is not None], np.int64)
        return _Listing(tuple(files), labels, self._named(classes))

    def _named(self, folders: list[str]) -> tuple[str, ...]:
        if self._given is None:
            return class_words(folders, self.path)
        if len(self._given) != len(folders):
            raise DataError(
                f"{self.path} has {len(folders)} class folders, and {self.name} has {len(self._given)} classes. Unpack "
                "the dataset again."
            )
        return self._given

    def _find_classes(self) -> tuple[str, ...]:
        return self._listing.classes

    def _find_labels(self) -> Labels:
        return self._listing.labels

    def _stored(self) -> Iterator[bytes]:
        for file in self._listing.files:
            yield stored_file(self.path / file)

    def _read(self, positions: list[int]) -> list[Pixels]:
        return [decode(self.path / self._listing.files[position]) for position in positions]


def _in_order(folders: set[str]) -> list[str]:
    """Return the class folders in label order: as numbers if all are numbers, otherwise byte by byte."""
    if all(folder.isascii() and folder.isdecimal() for folder in folders):
        return sorted(folders, key=lambda folder: (int(folder), folder))
    return sorted(folders, key=os.fsencode)


def image_files(folder: Path) -> list[str]:
    """Return the image files below a folder at any depth, relative to it and in order; at least one."""
    if folder.is_file():
        raise DataError(f"{folder} is a file. Give the folder that contains the images.")
    if not folder.is_dir():
        raise DataError(f"There is no folder {str(folder)!r}. Check the path.")
    files = sorted(_images_below(folder, "", set()), key=os.fsencode)
    if not files:
        raise DataError(f"{folder} contains no image. Endings of images: {', '.join(sorted(IMAGE_ENDINGS))}.")
    return files


def stored_file(path: Path) -> bytes:
    """The bytes of one image file of a set, within the size that is read at all."""
    try:
        with path.open("rb") as stream:
            data = stream.read(MAX_BYTES + 1)
    except OSError as problem:
        raise DataError(f"{path}: this file of the set cannot be read: {problem.strerror}") from None
    if len(data) > MAX_BYTES:
        raise DataError(f"{path}: larger than the {MAX_BYTES:,} bytes that are read; no image is")
    return data


def _images_below(folder: Path, relative: str, entered: set[tuple[int, int]]) -> Iterator[str]:
    try:
        about = folder.stat()
        entries = sorted(os.scandir(folder), key=lambda entry: os.fsencode(entry.name))
    except OSError as problem:
        raise DataError(f"{folder}: this folder of the set cannot be read: {problem.strerror}") from None
    identity = about.st_dev, about.st_ino
    if identity in entered:
        return
    entered.add(identity)
    for entry in entries:
        if entry.name.startswith("."):
            continue
        if entry.is_dir():
            # Two classes may link to the same folder, so each class keeps its own account.
            account = entered if relative else set(entered)
            yield from _images_below(folder / entry.name, f"{relative}{entry.name}/", account)
        elif entry.is_file() and os.path.splitext(entry.name)[1].lower() in IMAGE_ENDINGS:  # noqa: PTH122
            yield relative + entry.name

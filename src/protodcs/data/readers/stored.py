"""What every reader shares: indices are checked, labels are kept, and the content gets its fingerprint.

A reader adds where its images lie and how one is read. It opens nothing before it is asked, and a pickled copy carries
what the reader has learnt (its index, its fingerprint), never open files or images.
"""

import hashlib
import operator
import os
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from ...arrays import Labels, Pixels
from ...errors import DataError, InputError

FilePath = str | os.PathLike[str]

IMAGE_ENDINGS = frozenset(
    [".jpg", ".jpeg", ".jpe", ".jfif", ".mpo", ".png", ".webp", ".gif", ".bmp", ".tif", ".tiff"]
    + [".ppm", ".pgm", ".pbm", ".pnm"]
)


class StoredImages(ABC):
    """An `ImageSource` over files on disk."""

    # What a pickled copy does without: attributes that hold images or open files.
    _left_behind: ClassVar[tuple[str, ...]] = ()

    def __init__(self, name: str):
        self.name = name

    @abstractmethod
    def _find_classes(self) -> tuple[str, ...]:
        """The class names, in label order."""

    @abstractmethod
    def _find_labels(self) -> Labels:
        """(N,) the class of each image."""

    @abstractmethod
    def _stored(self) -> Iterator[bytes]:
        """Each image as it is stored, in order."""

    @abstractmethod
    def _read(self, positions: list[int]) -> list[Pixels]:
        """The images at positions that are known to exist."""

    @cached_property
    def classes(self) -> tuple[str, ...]:
        """The class names, in label order; empty where the set has none."""
        return self._find_classes()

    @cached_property
    def _all_labels(self) -> Labels:
        labels = self._find_labels()
        top = len(self.classes) or np.iinfo(np.int64).max
        wrong = np.flatnonzero((labels < -1) | (labels >= top))
        if wrong.size:
            raise DataError(
                f"{self.name}: image {wrong[0]} has the label {labels[wrong[0]]}; wanted: -1 to {top - 1} "
                f"for {len(self.classes)} classes"
            )
        return labels

    @property
    def labels(self) -> Labels:
        """(N,) the class of each image, -1 where the set does not say. Not writable."""
        labels = self._all_labels.view()
        labels.flags.writeable = False
        return labels

    def __len__(self) -> int:
        return len(self._all_labels)

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 of the stored images and labels in order, the same wherever the files lie."""
        digest = hashlib.sha256(b"protodcs images 1\n")
        for image in self._stored():
            digest.update(len(image).to_bytes(8, "little"))
            digest.update(image)
        digest.update(self._all_labels.astype("<i8").tobytes())
        return digest.hexdigest()

    def read(self, indices: Sequence[int]) -> list[Pixels]:
        """The images at `indices`, in that order, each RGB uint8 of shape (height, width, 3) and the caller's own."""
        count = len(self)
        positions = []
        for index in indices:
            try:
                position = operator.index(index)
            except TypeError:
                raise InputError(f"{self.name}: an index is a whole number; given: {index!r}") from None
            if not 0 <= position < count:
                raise InputError(f"{self.name} has images 0 to {count - 1}; asked for: {position}")
            positions.append(position)
        return self._read(positions)

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in self.__dict__.items() if key not in self._left_behind}

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name!r}>"


def named_after(path: FilePath) -> str:
    """A short name for a set, from its file: `cifar10_test.parquet` is cifar10-test."""
    return Path(path).name.partition(".")[0].replace("_", "-") or "images"


def no_such(path: Path, what: str) -> DataError:
    """The refusal of a file or folder that is not there."""
    return DataError(f"{path}: no such {what}; check the path, or see protodcs.data.names() for the sets it knows")

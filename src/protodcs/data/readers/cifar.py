"""CIFAR-10 and CIFAR-100 in their Python version, which is published as pickles.

A pickle is a program, and this reader runs none: see `plain_pickle`. What is not plain data is a DataError.
"""

from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from ...arrays import Labels, Pixels
from ...errors import DataError, InputError
from . import plain_pickle
from .stored import FilePath, StoredImages, named_after, no_such

# The training file of CIFAR-100, the largest, has 155 MB.
MAX_BYTES = 256 * 2**20

_FILES = {
    ("cifar10", "test"): ("test_batch",),
    ("cifar10", "train"): tuple(f"data_batch_{number}" for number in range(1, 6)),
    ("cifar100", "test"): ("test",),
    ("cifar100", "train"): ("train",),
}


class _Content(NamedTuple):
    images: Pixels
    labels: Labels


class Cifar(StoredImages):
    """One split of CIFAR-10 or CIFAR-100; which of the two, the files in the folder say.

    Args:
        folder: `cifar-10-batches-py` or `cifar-100-python`, as they are unpacked.
        split: "test" or "train".
        name: the name of the set; by default such as "cifar10-test".
    """

    _left_behind = ("_content",)

    def __init__(self, folder: FilePath, split: Literal["test", "train"] = "test", name: str | None = None):
        if split not in ("test", "train"):
            raise InputError(f"a split of CIFAR is 'test' or 'train'; given: {split!r}")
        super().__init__(name or f"{named_after(folder)}-{split}")
        self.folder = Path(folder)
        self.split = split

    @cached_property
    def _family(self) -> str:
        if not self.folder.is_dir():
            raise no_such(self.folder, "folder")
        for family in ("cifar10", "cifar100"):
            if all((self.folder / file).is_file() for file in _FILES[family, self.split]):
                return family
        wanted = " or ".join(" ... ".join(_FILES[family, self.split]) for family in ("cifar10", "cifar100"))
        raise DataError(f"{self.folder}: no {self.split} split of CIFAR; wanted: the files {wanted}")

    @cached_property
    def _content(self) -> _Content:
        family = self._family
        batches = [_batch(self.folder / file) for file in _FILES[family, self.split]]
        images = np.concatenate([batch.images for batch in batches])
        return _Content(images, np.concatenate([batch.labels for batch in batches]))

    def _find_classes(self) -> tuple[str, ...]:
        from ..prompts import class_names

        return class_names(self._family)

    def _find_labels(self) -> Labels:
        return self._content.labels

    def _stored(self) -> Iterator[bytes]:
        for image in self._content.images:
            yield image.tobytes()

    def _read(self, positions: list[int]) -> list[Pixels]:
        return [self._content.images[position].copy() for position in positions]


def _batch(path: Path) -> _Content:
    content = _unpickled(path)
    if not isinstance(content, dict):
        raise DataError(f"{path}: a pickled {type(content).__name__}; wanted: the dictionary of a CIFAR batch")
    fields = {key.decode("latin-1") if isinstance(key, bytes) else key: value for key, value in content.items()}
    data, labels = fields.get("data"), fields.get("labels", fields.get("fine_labels"))
    if not isinstance(data, np.ndarray) or data.dtype != np.uint8 or data.ndim != 2 or data.shape[1] != 3072:
        raise DataError(f"{path}: no field `data` of shape (n, 3072), uint8; its fields are {sorted(map(str, fields))}")
    if not isinstance(labels, list) or len(labels) != len(data) or not all(type(label) is int for label in labels):
        raise DataError(f"{path}: no list of {len(data)} whole numbers under `labels` or `fine_labels`")
    images = np.ascontiguousarray(data.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1))
    try:
        return _Content(images, np.array(labels, np.int64).reshape(-1))
    except OverflowError:
        raise DataError(f"{path}: a label that is no class number") from None


def _unpickled(path: Path) -> Any:
    try:
        with path.open("rb") as stream:
            data = stream.read(MAX_BYTES + 1)
    except OSError as problem:
        raise DataError(f"{path}: cannot be read: {problem.strerror}") from None
    if len(data) > MAX_BYTES:
        raise DataError(f"{path}: larger than the {MAX_BYTES:,} bytes that a CIFAR file can have")
    try:
        return plain_pickle.load(data)
    except DataError as problem:
        raise DataError(f"{path}: {problem}") from None

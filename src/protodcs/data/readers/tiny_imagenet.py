"""The validation set of Tiny-ImageNet as published: all images in one folder, their classes in a text file."""

from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ...arrays import Labels, Pixels
from ...errors import DataError
from ..image import decode
from .folder import stored_file
from .stored import FilePath, StoredImages, no_such
from .wordnet import class_words

ANNOTATIONS = "val_annotations.txt"


class _Listing(NamedTuple):
    files: tuple[str, ...]
    labels: Labels
    classes: tuple[str, ...]


class TinyImageNetVal(StoredImages):
    """The images in the order of `val_annotations.txt`; the classes sorted by WordNet number.

    Args:
        folder: the folder `val`, with `images` and `val_annotations.txt` in it.
        name: the name of the set.
    """

    def __init__(self, folder: FilePath, name: str = "tiny-imagenet-val"):
        super().__init__(name)
        self.folder = Path(folder)

    @cached_property
    def _listing(self) -> _Listing:
        path = self.folder / ANNOTATIONS
        try:
            lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
        except FileNotFoundError:
            raise no_such(path, "file") from None
        except (OSError, UnicodeDecodeError) as problem:
            raise DataError(f"{path}: cannot be read: {problem}") from None
        pairs = [tuple(line.split("\t")[:2]) for line in lines]
        wrong = next((line for line, pair in zip(lines, pairs, strict=True) if not _is_sound(pair)), None)
        if wrong is not None or not lines:
            raise DataError(f"{path}: a line must read file, tab, WordNet number, tab, box; given: {wrong or 'none'!r}")
        numbers = sorted({pair[1] for pair in pairs})
        place = {number: label for label, number in enumerate(numbers)}
        return _Listing(
            files=tuple(pair[0] for pair in pairs),
            labels=np.array([place[pair[1]] for pair in pairs], np.int64),
            classes=class_words(numbers, self.folder),
        )

    def _find_classes(self) -> tuple[str, ...]:
        return self._listing.classes

    def _find_labels(self) -> Labels:
        return self._listing.labels

    def _stored(self) -> Iterator[bytes]:
        for file in self._listing.files:
            yield stored_file(self.folder / "images" / file)

    def _read(self, positions: list[int]) -> list[Pixels]:
        images = self.folder / "images"
        return [decode(images / self._listing.files[position]) for position in positions]


def _is_sound(pair: tuple[str, ...]) -> bool:
    # A name with a folder in it could point anywhere on the disk.
    return len(pair) == 2 and Path(pair[0]).name == pair[0] and bool(pair[1])

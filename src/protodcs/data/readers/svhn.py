"""SVHN's cropped digits as published: one MATLAB file with the images and their digits.

It reads only these two arrays, and raises DataError if they do not have the published shapes.
"""

from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ...arrays import Labels, Pixels
from ...errors import DataError
from .matlab import read_arrays
from .stored import FilePath, StoredImages, named_after, no_such


class _Content(NamedTuple):
    images: Pixels
    labels: Labels


class Svhn(StoredImages):
    """The digits of one file, such as `test_32x32.mat`; the file's label 10 means the digit 0.

    Args:
        path: the file.
        name: the name of the set; by default from the file's name.
    """

    _left_behind = ("_content",)

    def __init__(self, path: FilePath, name: str | None = None):
        super().__init__(name or f"svhn-{named_after(path).partition('-')[0]}")
        self.path = Path(path)

    @cached_property
    def _content(self) -> _Content:
        """Images (N, 32, 32, 3) and labels (N,)."""
        if not self.path.is_file():
            raise no_such(self.path, "file")
        fields = read_arrays(self.path, ("X", "y"))
        if set(fields) != {"X", "y"}:
            raise DataError(f"{self.path}: holds {sorted(fields)} of X and y; wanted: X, the images, and y, the digits")
        images, digits = fields["X"], fields["y"].reshape(-1)
        if (
            images.ndim != 4
            or images.dtype != np.uint8
            or images.shape[:3] != (32, 32, 3)
            or len(digits) != images.shape[3]
        ):
            raise DataError(
                f"{self.path}: X of shape {images.shape} and type {images.dtype}, y of {len(digits)} digits; wanted: "
                "uint8 of shape (32, 32, 3, n) and n digits"
            )
        if digits.dtype.kind not in "iuf" or not np.isin(digits, np.arange(1, 11)).all():
            raise DataError(f"{self.path}: digits must be 1 to 10, where 10 means 0")
        return _Content(np.ascontiguousarray(images.transpose(3, 0, 1, 2)), digits.astype(np.int64) % 10)

    def _find_classes(self) -> tuple[str, ...]:
        return tuple("0123456789")

    def _find_labels(self) -> Labels:
        return self._content.labels

    def _stored(self) -> Iterator[bytes]:
        for image in self._content.images:
            yield image.tobytes()

    def _read(self, positions: list[int]) -> list[Pixels]:
        return [self._content.images[position].copy() for position in positions]

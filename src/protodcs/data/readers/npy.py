"""CIFAR-10-C and CIFAR-100-C as published: one array file a corruption, its five severities one after the other.

The files are mapped, not loaded, and never unpickled. Other shapes than the published one raise DataError.
"""

from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...arrays import Labels, Pixels
from ...errors import DataError, InputError
from .stored import FilePath, StoredImages, no_such

SEVERITIES = 5


class CifarC(StoredImages):
    """One corruption at one severity.

    Args:
        folder: holds `<corruption>.npy`, uint8 of shape (5 n, 32, 32, 3), and `labels.npy` of shape (5 n,) or (n,).
        corruption: such as "fog".
        severity: 1 to 5.
        name: the name of the set; by default the folder's with corruption and severity.
        classes: the class names, in label order.
    """

    _left_behind = ("_images",)

    def __init__(
        self,
        folder: FilePath,
        corruption: str,
        severity: int,
        name: str | None = None,
        classes: tuple[str, ...] = (),
    ):
        if severity not in range(1, SEVERITIES + 1):
            raise InputError(f"a severity is 1 to {SEVERITIES}; given: {severity!r}")
        if Path(corruption).name != corruption:
            raise InputError(f"a corruption is a plain name such as 'fog'; given: {corruption!r}")
        self.folder = Path(folder)
        super().__init__(name or f"{self.folder.resolve().name.lower()}/{corruption}/{severity}")
        self.corruption = corruption
        self.severity = severity
        self._classes = tuple(classes)

    @cached_property
    def _images(self) -> NDArray[np.uint8]:
        """(n, 32, 32, 3) the images of this severity, mapped."""
        if not self.folder.is_dir():
            raise no_such(self.folder, "folder")
        path = self.folder / f"{self.corruption}.npy"
        if not path.is_file():
            there = sorted(file.stem for file in self.folder.glob("*.npy") if file.stem != "labels")
            raise DataError(f"{self.folder}: no corruption {self.corruption!r}; there is: {', '.join(there) or 'none'}")
        array = _mapped(path)
        if array.dtype != np.uint8 or array.ndim != 4 or array.shape[3] != 3 or len(array) % SEVERITIES:
            raise DataError(
                f"{path}: an array of shape {array.shape} and type {array.dtype}; wanted: uint8 of shape "
                f"(n, 32, 32, 3), n a multiple of {SEVERITIES}"
            )
        count = len(array) // SEVERITIES
        return array[count * (self.severity - 1) : count * self.severity]

    def _find_classes(self) -> tuple[str, ...]:
        return self._classes

    def _find_labels(self) -> Labels:
        count = len(self._images)
        path = self.folder / "labels.npy"
        labels = _mapped(path)
        if labels.dtype.kind not in "iu" or labels.shape not in ((count,), (count * SEVERITIES,)):
            raise DataError(
                f"{path}: an array of shape {labels.shape} and type {labels.dtype}; wanted: integers of shape "
                f"({count},) or ({count * SEVERITIES},)"
            )
        start = 0 if len(labels) == count else count * (self.severity - 1)
        return np.array(labels[start : start + count], np.int64)

    def _stored(self) -> Iterator[bytes]:
        for image in self._images:
            yield image.tobytes()

    def _read(self, positions: list[int]) -> list[Pixels]:
        return [np.array(self._images[position], order="C", subok=False) for position in positions]


def _mapped(path: Path) -> NDArray[Any]:
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except FileNotFoundError:
        raise no_such(path, "file") from None
    except Exception as problem:
        raise DataError(f"{path}: not an array file that can be read: {' '.join(str(problem).split())[:300]}") from None
    if not isinstance(array, np.ndarray):
        raise DataError(f"{path}: an archive of arrays; wanted: one array, as numpy.save writes it")
    return array

"""What a set of images is to everything else: a name, labels, and images by index.

Readers of concrete formats live beside this file, one each; `protodcs.data.open_source` finds the right one.
"""

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from ..arrays import Pixels


@runtime_checkable
class ImageSource(Protocol):
    """A fixed, ordered set of images. A source opens its files lazily and can be pickled to another process.

    Attributes:
        name: short and stable, such as "cifar10-test"; it seeds corruptions and stands in manifests.
    """

    name: str

    @property
    def classes(self) -> tuple[str, ...]:
        """The class names, in label order; empty where the set has none."""
        ...

    def __len__(self) -> int:
        """How many images there are."""
        ...

    @property
    def labels(self) -> NDArray[np.int64]:
        """(N,) the class of each image, -1 where the set does not say."""
        ...

    @property
    def fingerprint(self) -> str:
        """SHA-256, in hexadecimal, of the stored images and labels in order: equal if and only if the content is."""
        ...

    def read(self, indices: Sequence[int]) -> list[Pixels]:
        """The images at `indices`, in that order, each RGB uint8 of shape (height, width, 3)."""
        ...

"""What a camera adds to the features of all its images, such as its light and background, and how to remove it.

A feature is taken as the mean of its class plus the offset of its camera. Both are estimated in turn, without labels:
the class is that of the most similar text. So a camera that sees one species most of the time keeps that species.
"""

from pathlib import Path
from typing import NamedTuple

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load, save

from ..arrays import Features, Floats, Integers
from ..errors import StateError

# Rounds after which classes and offsets hardly change.
_ROUNDS = 3
# An offset counts half if the camera has so many boxes.
_FEW_BOXES = 20


class ClassMeans(NamedTuple):
    """What the offsets of later images are measured from.

    Attributes:
        centre: (d,) mean of all features, without offsets.
        classes: (K, d) mean feature of each class; NaN if it was never seen.
    """

    centre: Floats
    classes: Floats

    def to_bytes(self) -> bytes:
        """Return the content of a file."""
        return save(self._asdict())


def read_means(file: Path, shape: tuple[int, ...]) -> ClassMeans:
    """Read class means from a file.

    Args:
        file: what `to_bytes` returned.
        shape: (K, d) of the text features of the classes.

    Raises:
        StateError: if the file is damaged or belongs to other classes.
    """
    try:
        found = ClassMeans(**load(file.read_bytes()))
    except (SafetensorError, TypeError):
        raise StateError(f"{file} is damaged. Copy it again from where it was made.") from None
    if found.classes.shape != shape or found.centre.shape != shape[1:]:
        raise StateError(f"{file} belongs to other classes or to another encoder.")
    return found


def without_offsets(
    features: Features, cameras: Integers, prototypes: Features, earlier: ClassMeans | None = None
) -> tuple[Features, ClassMeans]:
    """Return unit features without the offsets of their cameras, and the class means.

    Args:
        features: (n, d) unit features.
        cameras: (n,) number of the camera of each.
        prototypes: (K, d) text features of the classes.
        earlier: class means of an earlier part of the season. Without them, the mean offset of the cameras is zero.
    """
    offsets = np.zeros((int(cameras.max()) + 1, features.shape[1]))
    counts = np.bincount(cameras)[:, None]
    texts = _unit(prototypes - prototypes.mean(axis=0))
    rows = features.astype(np.float64)
    for _ in range(_ROUNDS):
        placed = _unit(rows - offsets[cameras])
        centre = placed.mean(axis=0) if earlier is None else earlier.centre
        nearest = np.argmax(_unit(placed - centre) @ texts.T, axis=1)
        means = _means(rows - offsets[cameras], nearest, len(prototypes))
        if earlier is not None:
            means = np.where(np.isnan(earlier.classes), means, earlier.classes)
        offsets = _means(rows - means[nearest], cameras, len(offsets)) * counts / (counts + _FEW_BOXES)
        if earlier is None:
            offsets -= offsets.mean(axis=0)
    return _unit(rows - offsets[cameras]).astype(np.float32), ClassMeans(centre, means)


def _means(rows: Floats, groups: Integers, count: int) -> Floats:
    """Return the mean of each group; NaN if it is empty."""
    sums = np.zeros((count, rows.shape[1]))
    np.add.at(sums, groups, rows)
    sizes = np.bincount(groups, minlength=count)[:, None]
    return np.divide(sums, sizes, out=np.full_like(sums, np.nan), where=sizes > 0)


def _unit(rows: Floats | Features) -> Floats:
    norms = np.linalg.norm(rows, axis=1, keepdims=True)
    return np.asarray(rows / np.maximum(norms, 1e-12), dtype=np.float64)

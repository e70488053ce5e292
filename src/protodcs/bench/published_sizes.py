"""Streams by their published sizes, for the plan of a run whose datasets or weights are not here yet.

Nothing here is ever run: such a stream has no images, no features and no hash.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..arrays import Labels, Pixels
from ..data import datasets
from ..data.prompts import class_names
from ..data.source import ImageSource
from ..data.streams import build
from ..errors import DataError, EncoderError
from . import streams
from .grid import ImageStream

# Length of a feature, by the end of the name of an encoder. The others are taken to be as wide as CLIP ViT-B.
_WIDTHS = {"RN50/openai": 1024, "ViT-L-14/openai": 768, "mini": 128}
_WIDTH = 512
TEMPERATURE = 0.01


@dataclass(frozen=True)
class Size:
    """The size of a stream, and what is not here: messages that say how to get it."""

    samples: int
    classes: int
    dimension: int
    missing: tuple[str, ...]


class _Published:
    """A dataset that is not here: as many images and classes as were published."""

    def __init__(self, row: datasets.KnownSet, name: str):
        self.name = name
        self.classes = tuple(f"class {number}" for number in range(row.classes))
        self.fingerprint = hashlib.sha256(name.encode()).hexdigest()
        self._images = row.images

    def __len__(self) -> int:
        return self._images

    @property
    def labels(self) -> Labels:
        """(N,) each class as often as the others; -1 without classes."""
        count = len(self.classes)
        return np.arange(self._images) % count if count else np.full(self._images, -1, np.int64)

    def read(self, indices: Sequence[int]) -> list[Pixels]:
        """Raise DataError: there are no images."""
        raise DataError(f"The dataset {self.name} is missing.")


def size_of(words: ImageStream, protocol: str, seed: int) -> Size:
    """Return the size of a stream. Datasets that are not here count with their published sizes."""
    missing: list[str] = []
    sources = {name: _source(name, missing) for name in (words.known, *words.unknown)}
    manifest = build(
        protocol,
        sources[words.known],
        [sources[name] for name in words.unknown],
        seed,
        streams.conditions(words),
        words.severity,
        **words.options,
    )
    return Size(len(manifest), len(class_names(words.classes)), _dimension(words.encoder, missing), tuple(missing))


def _source(name: str, missing: list[str]) -> ImageSource:
    try:
        found = streams.source(name)
        len(found)
    except DataError as problem:
        row = datasets.published(name)
        if row is None:
            raise
        missing.append(str(problem))
        return _Published(row, name)
    return found


def _dimension(name: str, missing: list[str]) -> int:
    try:
        return streams.encoder(name).dimension
    except EncoderError as problem:
        missing.append(str(problem))
    return next((width for end, width in _WIDTHS.items() if name.endswith(end)), _WIDTH)

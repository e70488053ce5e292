"""A stream of a grid, ready to be run: its segments one after another, as features or as images.

A worker builds its stream again from the grid; the hash proves that it is the planned one. At most one segment
is in memory.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path

from .. import encoders
from ..arrays import Features, Labels, Pixels
from ..core.vocabulary import LEAST_NAMES, Vocabulary
from ..data import open_source
from ..data.corruptions import STANDARD
from ..data.prompts import class_names
from ..data.reading import read_samples
from ..data.source import ImageSource
from ..data.streams import Manifest, build
from ..encoders import Encoder
from ..errors import DataError
from ..features import FeatureStore
from ..features.views import Views
from . import feature_pack, user_streams
from .grid import ImageStream, PackStream, UserStream


@dataclass(frozen=True)
class Part:
    """A segment: its title, whether adaptation starts afresh before it, and its labels, -1 for unknown."""

    title: str
    reset: bool
    labels: Labels


class Packed:
    """A stream of CLIP features."""

    def __init__(self, words: PackStream | UserStream, seed: int):
        if isinstance(words, UserStream):
            content = user_streams.stream(**words.model_dump(), seed=seed)
            self.classes = user_streams.class_names(words.family, words.split)
            self.known, unknown = str(words.family), str(words.unknown)
        else:
            content = feature_pack.stream(
                words.pack, seed, words.split, words.unknown, words.order, words.classes, words.samples
            )
            self.classes = tuple(str(number) for number in range(len(content.prototypes)))
            kind = "ImageNet classes" if feature_pack.encoder()[0] == feature_pack.ENCODER else "known classes"
            self.known = f"{len(self.classes)} {kind}"
            unknown = " + ".join(feature_pack.STREAMS[words.pack].unknown) or f"other {kind}"
        self.prototypes = content.prototypes
        self.unknown = unknown if (content.labels < 0).any() else ""
        self.encoder, self.temperature = feature_pack.encoder()
        self.fingerprint = feature_pack.fingerprint()
        self.hash, self.prompts = content.hash, _digest(self.classes)
        self.device = ""
        self.parts = [Part("clean", False, content.labels)]
        self._features = content.features

    def features(self, number: int) -> Features:
        """All of them: there is one segment."""
        return self._features


class Imaged:
    """A stream over sets of images; its features come from a store, its images from the sets."""

    def __init__(self, words: ImageStream, protocol: str, seed: int, store: Path | None = None):
        self.words = words
        self.sources = _sources(words)
        self.manifest = manifest(words, protocol, seed)
        self.classes = class_names(words.classes)
        self.known, self.unknown = words.known, " + ".join(words.unknown)
        self.hash, self.prompts = self.manifest.hash, _digest(self.classes)
        self.parts = [
            Part(title, segment.reset, self.manifest.label[segment.rows])
            for title, segment in zip(_titles(self.manifest), self.manifest.segments, strict=True)
        ]
        self._store = store
        loaded = encoder(words.encoder)
        views = views_of(words)
        self.encoder = words.encoder
        self.fingerprint = loaded.fingerprint if views is None else views.fingerprint(loaded)
        self.device = str(getattr(loaded.image_tower, "device", ""))
        self.temperature = 1.0 / loaded.logit_scale
        if len(self.classes) != len(self.manifest.classes):
            raise DataError(
                f"{words.name}: the prompts {words.classes!r} have {len(self.classes)} names, and {words.known!r} has "
                f"{len(self.manifest.classes)} classes"
            )

    @cached_property
    def prototypes(self) -> Features:
        """(K, d), of unit length."""
        return encoder(self.words.encoder).prototypes(self.words.classes)

    def features(self, number: int) -> Features:
        """(n, d) features of one segment, from the store."""
        if self._store is None:
            raise DataError(f"{self.words.name}: no features were prepared for this stream")
        return _opened(self._store).gather(self.manifest, number)

    def images(self, number: int, batch_size: int) -> Iterator[list[Pixels]]:
        """The images of one segment, a batch at a time, from its start."""
        segment = self.manifest.segments[number]
        sources = [self.sources[origin.name] for origin in self.manifest.sources]
        for first in range(segment.start, segment.start + segment.length, batch_size):
            rows = slice(first, min(first + batch_size, segment.start + segment.length))
            images = dict(read_samples(self.manifest, number, rows, sources))
            yield [images[place] for place in range(len(images))]


def opened(
    words: ImageStream | PackStream | UserStream, protocol: str, seed: int, store: Path | None = None
) -> Packed | Imaged:
    """The stream that a grid means by these words."""
    if isinstance(words, ImageStream):
        return Imaged(words, protocol, seed, store)
    return _packed(words, seed, feature_pack.path())


# The methods of a stream and a seed follow each other.
@lru_cache(maxsize=2)
def _packed(words: PackStream | UserStream, seed: int, file: Path) -> Packed:
    return Packed(words, seed)


def vocabulary(words: ImageStream | PackStream | UserStream, name: str) -> Vocabulary:
    """Return the vocabulary that a grid gives this name for a stream."""
    if not isinstance(words, ImageStream):
        return feature_pack.vocabulary(name)
    found = _encoded(words.encoder, name, words.classes)
    if found is None:
        raise DataError(
            f"{words.name}: the vocabulary {name!r} has fewer than {LEAST_NAMES} names that are no classes of the "
            "stream. Leave `vocabulary` out."
        )
    return found


@lru_cache(maxsize=4)
def _encoded(encoder_name: str, names: str, classes: str) -> Vocabulary | None:
    return encoder(encoder_name).vocabulary(names, class_names(classes))


def manifest(words: ImageStream, protocol: str, seed: int) -> Manifest:
    """Which images come, in which order, under which corruption."""
    sources = _sources(words)
    return build(
        protocol,
        sources[words.known],
        [sources[name] for name in words.unknown],
        seed,
        conditions(words),
        words.severity,
        **words.options,
    )


def conditions(words: ImageStream) -> list[str | None]:
    """The corruptions of a stream, in order; None for clean images."""
    named: dict[str, list[str | None]] = {"standard": [*STANDARD], "clean": [None]}
    if isinstance(words.corruptions, str):
        return named[words.corruptions]
    return [None if name == "clean" else name for name in words.corruptions]


@lru_cache(maxsize=4)
def encoder(name: str) -> Encoder:
    """The encoder, loaded once a process; whoever adapts it gives its parameters back."""
    return encoders.load(name, device="auto")


@lru_cache(maxsize=4)
def _views(name: str, classes: str, count: int) -> Views:
    return Views.of(encoder(name), class_names(classes), count)


def views_of(words: ImageStream) -> Views | None:
    """Return how the features of a stream come from views; None if they come from the plain images."""
    return None if words.views == 1 else _views(words.encoder, words.classes, words.views)


@lru_cache(maxsize=16)
def source(name: str) -> ImageSource:
    """A set of images, opened once a process."""
    return open_source(name)


def _sources(words: ImageStream) -> dict[str, ImageSource]:
    return {name: source(name) for name in (words.known, *words.unknown)}


def _titles(manifest: Manifest) -> Iterator[str]:
    """The corruptions, with a number where the stream meets one again."""
    met: Counter[str] = Counter()
    for segment in manifest.segments:
        title = segment.corruption or "clean"
        met[title] += 1
        yield title if met[title] == 1 else f"{title} ({met[title]})"


def _digest(names: Sequence[str]) -> str:
    return hashlib.sha256(json.dumps(list(names)).encode()).hexdigest()[:16]


@lru_cache(maxsize=4)
def _opened(folder: Path) -> FeatureStore:
    return FeatureStore(folder)

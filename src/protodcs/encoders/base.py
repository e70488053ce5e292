"""What every dual encoder shares: checks, unit length, prototypes of class names, a fingerprint.

A back-end brings two towers and says what its weights are; everything a user calls is built here, once.
An encoder is stateless: the same image gives the same feature, whatever came before.
"""

import hashlib
import json
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol
from weakref import WeakValueDictionary

import numpy as np
from numpy.typing import NDArray

from ..arrays import Features
from ..core.vocabulary import LEAST_NAMES, Vocabulary
from ..data.image import decode
from ..data.prompts import class_names, filled
from ..data.prompts import templates as read_templates
from ..errors import EncoderError, InputError, UsageError
from . import prototypes as kept
from .preprocessing import Preprocessing

if TYPE_CHECKING:
    from .prompting import Prompts

# (N, dimension) for preprocessed images (N, 3, height, width); not yet of unit length.
ImageTower = Callable[[Features], Features]

# The list of names that stands for things in general.
GENERAL = "general"
_SENTENCES_AT_ONCE = 256
# The same for a vocabulary: others may use the encoder after each batch.
_NAMES_AT_ONCE = 64
# Encoding more names than this takes long enough to say so.
_MANY_NAMES = 1000
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Options:
    """How an encoder is loaded, whichever back-end loads it; `protodcs.encoders.load` describes each."""

    device: str = "auto"
    dtype: str | None = None
    batch_size: int = 32
    revision: str | None = None
    templates: str | Sequence[str] | None = None


class TextTower(Protocol):
    """The side that takes words."""

    @property
    def known_names(self) -> tuple[str, ...] | None:
        """The names that it knows; None if it was trained on any words."""
        ...

    def sentences(self, sentences: Sequence[str]) -> Features:
        """(N, dimension) for sentences; not yet of unit length."""
        ...

    def names(self, names: Sequence[str], templates: Sequence[str]) -> Features:
        """(K, dimension) for class names, each put into every template; not yet of unit length."""
        ...


@dataclass(frozen=True, slots=True)
class SentenceTower:
    """A text tower that knows sentences only: a class is the mean of its sentences' unit features."""

    sentences: Callable[[Sequence[str]], Features]
    known_names: tuple[str, ...] | None = None

    def names(self, names: Sequence[str], templates: Sequence[str]) -> Features:
        """The mean over the templates that fit a name, each sentence at unit length."""
        total: Features | None = None
        counts = np.zeros(len(names), dtype=np.float32)
        for template in templates:
            found = [filled(template, name) for name in names]
            fits = np.array([sentence is not None for sentence in found])
            sentences = [sentence for sentence in found if sentence is not None]
            if not sentences:
                continue
            rows = np.concatenate([_unit(self.sentences(part)) for part in parts(sentences, _SENTENCES_AT_ONCE)])
            total = np.zeros((len(names), rows.shape[1]), dtype=rows.dtype) if total is None else total
            total[fits] += rows
            counts += fits
        if total is None:
            raise EncoderError("no template was given")
        return total / counts[:, None]

    def prompts(self, names: Sequence[str], words: str = "a photo of a") -> "Prompts":
        """Class features as a differentiable function of the vectors in place of `words`."""
        make = getattr(self.sentences, "prompts", None)
        if make is None:
            raise UsageError(
                "this encoder's text tower has no gradient, so its prompts cannot be tuned: load the model with "
                "transformers or open_clip"
            )
        tuned: Prompts = make(names, words)
        return tuned


class Encoder:
    """Images and class names to unit features of one space.

    Attributes:
        name: what the encoder was loaded by.
        back_end: the library that runs it.
        preprocessing: what happens to an image before the vision tower sees it; callable on a list of images.
        image_tower: preprocessed images to features; those of torch carry their `module`.
        text_tower: sentences and class names to features.
        dimension: length of a feature.
        logit_scale: factor on cosines before a softmax, already exponentiated; its inverse is the temperature.
        weights: SHA-256 of the parameters and of what of the architecture they do not tell.
        templates: the sentences a class name is put into.
        batch_size: how many images go through the tower at once.
    """

    def __init__(
        self,
        *,
        name: str,
        back_end: str,
        preprocessing: Preprocessing,
        image_tower: ImageTower,
        text_tower: TextTower,
        dimension: int,
        logit_scale: float,
        weights: str,
        templates: str | Sequence[str],
        batch_size: int,
    ):
        if not np.isfinite(logit_scale) or logit_scale <= 0:
            raise EncoderError(f"{name}: the logit scale is {logit_scale}: a positive number is wanted")
        if batch_size < 1:
            raise InputError(f"batch_size must be at least 1; given: {batch_size}")
        self.name = name
        self.back_end = back_end
        self.preprocessing = preprocessing
        self.image_tower = image_tower
        self.text_tower = text_tower
        self.dimension = dimension
        self.logit_scale = float(logit_scale)
        self.weights = weights
        self.templates = read_templates(templates)
        self.batch_size = batch_size
        self._vocabularies: WeakValueDictionary[str, Vocabulary] = WeakValueDictionary()

    def encode(self, images: Iterable[Any]) -> Features:
        """(N, dimension) float32 unit features of images: paths, bytes, PIL images or arrays."""
        rows = [self.encode_pixels([decode(image) for image in part]) for part in parts(images, self.batch_size)]
        return self._joined(rows)

    def encode_pixels(self, images: Sequence[NDArray[np.uint8]]) -> Features:
        """As `encode`, for images that are RGB uint8 arrays (height, width, 3) already."""
        return self._joined(
            [self.encode_fitted(self.preprocessing.fitted(part)) for part in parts(images, self.batch_size)]
        )

    def encode_fitted(self, batch: NDArray[np.uint8]) -> Features:
        """As `encode`, for one batch that `preprocessing.fitted` has made."""
        return self._proven(self.image_tower(self.preprocessing.normalised(batch)))

    def encode_texts(self, sentences: Sequence[str]) -> Features:
        """(N, dimension) float32 unit features of whole sentences."""
        if isinstance(sentences, str):
            raise InputError("encode_texts takes a list of sentences; given: one string")
        return self._joined(
            [self._proven(self.text_tower.sentences(part)) for part in parts(sentences, _SENTENCES_AT_ONCE)]
        )

    def prototypes(self, classes: str | Sequence[str]) -> Features:
        """(K, dimension) float32: the unit mean, over the templates, of each class name's unit text features."""
        names = class_names(classes)
        return kept.remembered(
            self._key(names, self.templates),
            (len(names), self.dimension),
            lambda: self._named(names, self.templates),
        )

    def vocabulary(
        self,
        names: str | Path | Sequence[str] = GENERAL,
        classes: Sequence[str] = (),
        advance: Callable[[int], None] = lambda count: None,
        run: Callable[[Callable[[], Features]], Features] = lambda batch: batch(),
    ) -> Vocabulary | None:
        """Return names to compare classes with. They are encoded once and stored on disk, like prototypes.

        They are encoded with the first template only, because thousands of names take long on a CPU.

        Args:
            names: "general" is the list of the package, or all names that the encoder knows; otherwise names or a file.
            classes: if fewer than 16 general names are none of these, there is no vocabulary.
            advance: receives the number of names that were encoded, batch by batch.
            run: runs each batch and returns its features, for example in a thread that others use too.
        """
        known = self.text_tower.known_names
        chosen = known if names == GENERAL and known is not None else class_names(names)
        if names == GENERAL and len({*chosen} - {*classes}) < LEAST_NAMES:
            return None
        if len(chosen) < LEAST_NAMES:
            raise InputError(f"A vocabulary needs at least {LEAST_NAMES} names; given: {len(chosen)}.")
        # An encoder with names of its own has them in all its templates, and in no others.
        templates = self.templates[:1] if known is None else self.templates
        fingerprint = _digest(["vocabulary", 1, self.weights, templates, chosen])
        found = self._vocabularies.get(fingerprint)
        if found is None:
            rows = kept.remembered(
                self._key(chosen, templates),
                (None if names == GENERAL else len(chosen), self.dimension),
                lambda: self._encoded_names(chosen, templates, names == GENERAL, advance, run),
            )
            found = self._vocabularies[fingerprint] = Vocabulary(rows, fingerprint)
        return found

    def _key(self, names: Sequence[str], templates: Sequence[str]) -> str:
        """Return what the stored features of names depend on, as a hash."""
        return _digest(["prototypes", 1, self.back_end, self.weights, templates, names])

    def _encoded_names(
        self,
        names: Sequence[str],
        templates: Sequence[str],
        leave_out: bool,
        advance: Callable[[int], None],
        run: Callable[[Callable[[], Features]], Features],
    ) -> Features:
        """Return the features of names; `leave_out` those that are too long for the text tower."""
        if len(names) > _MANY_NAMES:
            place = kept.folder()
            stored = "" if place is None else f" This happens once: the result is stored in {place}."
            _log.warning("Encoding %d names of the vocabulary with %s.%s", len(names), self.name, stored)
        rows, encode = [], self._readable if leave_out else self._named
        for part in parts(names, _NAMES_AT_ONCE):
            rows.append(run(partial(encode, part, templates)))
            advance(len(part))
        return self._joined(rows)

    def _named(self, names: Sequence[str], templates: Sequence[str]) -> Features:
        return self._proven(self.text_tower.names(names, templates))

    def _readable(self, names: Sequence[str], templates: Sequence[str]) -> Features:
        """Return the features of the names that are short enough for the text tower."""
        try:
            return self._named(names, templates)
        except InputError:
            if len(names) == 1:
                return self._joined([])
            middle = len(names) // 2
            return self._joined([self._readable(half, templates) for half in (names[:middle], names[middle:])])

    @property
    def fingerprint(self) -> str:
        """Weights, preprocessing and templates, each by its hash; it goes into states and feature files."""
        return f"{self.image_fingerprint},templates={_digest(self.templates)[:16]}"

    @property
    def image_fingerprint(self) -> str:
        """The part of the fingerprint on which image features depend."""
        return f"weights={self.weights[:32]},preprocessing={self.preprocessing.hash[:16]}"

    def _joined(self, rows: list[Features]) -> Features:
        return np.concatenate(rows) if rows else np.empty((0, self.dimension), dtype=np.float32)

    def _proven(self, rows: Features) -> Features:
        if rows.ndim != 2 or rows.shape[1] != self.dimension:
            raise EncoderError(f"{self.name}: the tower gave {rows.shape}, and (N, {self.dimension}) is wanted")
        unit = _unit(rows)
        if not np.all(np.isfinite(unit)):
            raise EncoderError(
                f"{self.name}: a feature is zero or not finite: the weights are damaged, or their number type is too "
                "small for them (load with dtype='float32')"
            )
        return unit

    def __repr__(self) -> str:
        return f"Encoder({self.name!r}, back_end={self.back_end!r}, dimension={self.dimension})"


def parts(items: Iterable[Any], size: int) -> Iterator[list[Any]]:
    """The items in lists of `size`, the last one shorter."""
    part: list[Any] = []
    for item in items:
        part.append(item)
        if len(part) == size:
            yield part
            part = []
    if part:
        yield part


def _unit(rows: Features) -> Features:
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        unit: Features = (rows / np.linalg.norm(rows, axis=1, keepdims=True)).astype(np.float32, copy=False)
    return unit


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()

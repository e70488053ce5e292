"""Labelled samples of your own as one stream: a folder of images, a file of features, or arrays."""

from collections.abc import Callable, Sequence
from itertools import count
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from . import encoders
from .arrays import Features, Integers
from .core.prototypes import Prototypes
from .core.validation import check_features
from .core.vocabulary import Vocabulary, VocabularyLike
from .data.feature_file import FeatureFile, read_features
from .data.labelled_folder import UNKNOWN, LabelledFolder, labelled_folder
from .data.prompts import class_names
from .encoders import Encoder
from .encoders.base import GENERAL
from .encoders.files import encode_files
from .errors import DataError, InputError

DEFAULT_MODEL = "openai/clip-vit-base-patch16"

# Is called with what is being done, how much of it is done, and how much there is.
Advance = Callable[[str, int, int], None]
_NO_VOCABULARY = "No vocabulary: StreamDCS works better with one. Pass `model`, or the features of general names."


class LabelledStream(NamedTuple):
    """Samples with their labels, and what a method starts from.

    Attributes:
        features: (N, d) unit features.
        labels: (N,) positions of classes, -1 for unknown.
        prototypes: of the classes.
        classes: their names.
        vocabulary: names of other things, if there are any.
        temperature: of the encoder; None without one.
        fingerprint: of the encoder; None without one.
        is_folder: whether the samples are files, sorted by class.
        notes: what was skipped or is missing.
    """

    features: Features
    labels: Integers
    prototypes: Prototypes
    classes: tuple[str, ...]
    vocabulary: Vocabulary | None
    temperature: float | None
    fingerprint: str | None
    is_folder: bool
    notes: tuple[str, ...]


def read_stream(
    data: str | Path | NDArray[np.floating],
    labels: Sequence[Any] | NDArray[Any] | None,
    model: str | Path | Encoder | None,
    classes: str | Sequence[str] | None,
    prototypes: NDArray[np.floating] | None,
    vocabulary: str | Path | Sequence[str] | VocabularyLike | None,
    unknown: str | None,
    advance: Advance,
) -> LabelledStream:
    """Return the samples of a folder, a file or an array; the arguments are those of `compare`."""
    names = None if classes is None else class_names(classes)
    encoder: Encoder | None
    if isinstance(data, str | Path) and Path(data).is_dir():
        if labels is not None or prototypes is not None:
            raise InputError("`labels` and `prototypes` belong to features; given: a folder of images")
        folder = labelled_folder(Path(data), names, unknown)
        encoder = _encoder(DEFAULT_MODEL if model is None else model)
        samples = _of_folder(folder, encoder, advance)
    else:
        given = FeatureFile(np.asarray(data)) if isinstance(data, np.ndarray) else read_features(Path(data))
        own: dict[str, Any] = {"labels": labels, "prototypes": prototypes, "classes": names}
        given = given._replace(**{name: value for name, value in own.items() if value is not None})
        if isinstance(vocabulary, str) and vocabulary == GENERAL and given.vocabulary is not None:
            vocabulary = given.vocabulary
        encoder = None if model is None else _encoder(model)
        samples = _of_features(given)
    shared, names = _prototypes(samples, encoder)
    others = _vocabulary(vocabulary, names, encoder)
    notes = samples.notes
    if others is None and encoder is None and vocabulary is not None:
        notes = (*notes, _NO_VOCABULARY)
    rows, numbers = check_features(samples.features, shared.unit.shape[1]), samples.labels
    if len(rows) != len(numbers) or not len(rows):
        raise InputError(
            f"There must be one label for each feature, and at least one feature; given: {len(rows)} features and "
            f"{len(numbers)} labels"
        )
    if numbers.max() >= len(names):
        raise InputError(
            f"There are {len(names)} classes, but a label is {numbers.max()}. Labels are positions from 0."
        )
    return LabelledStream(
        features=rows,
        labels=numbers,
        prototypes=shared,
        classes=names,
        vocabulary=others,
        temperature=None if encoder is None else 1 / encoder.logit_scale,
        fingerprint=None if encoder is None else encoder.fingerprint,
        is_folder=samples.is_folder,
        notes=notes,
    )


def ordered(stream: LabelledStream, shuffle: int | Literal[False] | None) -> tuple[LabelledStream, str]:
    """Return the stream in the order that was asked for, and a description of this order."""
    if shuffle is None:
        shuffle = 0 if stream.is_folder else False
    if shuffle is False:
        return stream, "in the given order"
    places = np.random.default_rng(shuffle).permutation(len(stream.labels))
    moved = stream._replace(features=stream.features[places], labels=stream.labels[places])
    return moved, f"shuffled with seed {shuffle}"


class _Samples(NamedTuple):
    """Features with their labels, the names and prototypes of the classes if they are known, and notes."""

    features: Features
    labels: Integers
    classes: tuple[str, ...] | None
    prototypes: Features | None
    is_folder: bool
    notes: tuple[str, ...] = ()


def _of_folder(folder: LabelledFolder, encoder: Encoder, advance: Advance) -> _Samples:
    total, done = len(folder.files), count()

    def one_more(images: int) -> None:
        for _ in range(images):
            advance("images", next(done) + 1, total)

    encoded = encode_files(encoder, folder.files, advance=one_more)
    if not encoded.names:
        raise DataError(f"No image can be read. The first error: {next(iter(encoded.errors.values()))}")
    labels = np.array([folder.labels[name] for name in encoded.names], dtype=np.int64)
    notes = tuple(f"Skipped: {error}" for error in encoded.errors.values())
    return _Samples(encoded.features, labels, folder.classes, None, True, notes)


def _of_features(given: FeatureFile) -> _Samples:
    if given.labels is None:
        raise InputError("The labels are missing. Pass `labels`, or put an array `labels` into the file.")
    array = np.asarray(given.labels)
    if array.ndim != 1:
        raise InputError(f"`labels` must be one-dimensional; given: {array.shape}")
    names = given.classes
    if array.dtype.kind in "iu":
        numbers = np.maximum(array.astype(np.int64), UNKNOWN)
        return _Samples(given.features, numbers, names, given.prototypes, False)
    texts = [None if label in (None, "unknown", UNKNOWN) else str(label) for label in array.tolist()]
    if names is None:
        if given.prototypes is not None:
            raise InputError("The labels are names, so the order of the prototypes must be given. Pass `classes`.")
        names = tuple(sorted({text for text in texts if text is not None}))
    places: dict[str | None, int] = {None: UNKNOWN, **{name: place for place, name in enumerate(names)}}
    if strange := sorted({str(text) for text in texts if text not in places}):
        raise InputError(f"The label {strange[0]!r} is not a class of the list. Add it to `classes`, or use 'unknown'.")
    numbers = np.array([places[text] for text in texts], dtype=np.int64)
    return _Samples(given.features, numbers, names, given.prototypes, False)


def _encoder(model: str | Path | Encoder) -> Encoder:
    return model if isinstance(model, Encoder) else encoders.load(model)


def _prototypes(samples: _Samples, encoder: Encoder | None) -> tuple[Prototypes, tuple[str, ...]]:
    names = samples.classes
    if samples.prototypes is not None:
        shared = Prototypes.of(np.asarray(samples.prototypes))
        names = tuple(str(number) for number in range(len(shared.unit))) if names is None else names
        if len(names) != len(shared.unit):
            raise InputError(f"There are {len(shared.unit)} prototypes and {len(names)} class names.")
        return shared, names
    if encoder is None:
        raise InputError(
            "The prototypes are missing. Pass `prototypes`, put an array `prototypes` into the file, or pass `model` "
            "and `classes`."
        )
    if not names:
        raise InputError("The class names are missing. Pass `classes`.")
    return Prototypes.of(encoder.prototypes(names)), names


def _vocabulary(
    given: str | Path | Sequence[str] | VocabularyLike | None, names: tuple[str, ...], encoder: Encoder | None
) -> Vocabulary | None:
    if given is None:
        return None
    if isinstance(given, Vocabulary | np.ndarray):
        return Vocabulary.of(given)
    if encoder is not None:
        return encoder.vocabulary(given, names)
    if isinstance(given, str) and given == GENERAL:
        return None
    raise InputError("The names of a vocabulary need an encoder. Pass `model`, or the features of the names (V, d).")

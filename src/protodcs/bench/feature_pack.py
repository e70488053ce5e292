"""Six streams of real CLIP ViT-B/32 features: known ImageNet classes against unknown images of other sets.

The features lie in one file under `$PROTODCS_DATA`; they are probably means over augmented views of training images, so
they serve to compare methods with each other and must never be quoted as ImageNet results.
"""

import hashlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import load_file

from ..arrays import Flags, Integers
from ..core.vocabulary import Vocabulary
from ..errors import DataError, InputError

FILE = "clip_vitb32_features.safetensors"
# Names another pack; see `packing`.
VARIABLE = "PROTODCS_PACK"
ENCODER = "CLIP ViT-B/32 feature pack"
TEMPERATURE = 0.01
# Names in a pack: the known classes, their texts, and the sets of unknown images.
KNOWN, TEXT = "imagenet", "text_imagenet1000"
# In a pack of your own and in files of vocabularies: features of general names.
VOCABULARY = "text"
GENERAL = "general"
UNKNOWN_SETS = ("dtd", "ucf101", "oxford_flowers", "sun397", "oxford_pets")
SHUFFLED = "shuffled"
# Unknown samples in a row.
BURST = 1000


@dataclass(frozen=True)
class Recipe:
    """The known classes and the unknown images of a stream."""

    known: int
    unknown: tuple[str, ...]  # empty: the other ImageNet classes
    most: int | None  # unknown samples, drawn; None: all


STREAMS = {
    "dtd": Recipe(100, ("dtd",), None),
    "ucf": Recipe(100, ("ucf101",), 2000),
    "flowers": Recipe(200, ("oxford_flowers",), None),
    "sun": Recipe(100, ("sun397",), 2000),
    "near": Recipe(100, (), 1800),
    "big": Recipe(1000, ("dtd", "ucf101"), None),
}


@dataclass(frozen=True)
class Packed:
    """A stream: unit prototypes (K, d), unit features (N, d), labels (N,) with -1 for unknown, and its hash."""

    prototypes: NDArray[np.float32]
    features: NDArray[np.float32]
    labels: NDArray[np.int64]
    hash: str


@lru_cache(maxsize=1)
def _content(file: Path) -> tuple[dict[str, NDArray[np.float16]], str]:
    try:
        return load_file(file), hashlib.sha256(file.read_bytes()).hexdigest()
    except FileNotFoundError:
        raise DataError(
            f"The feature pack is missing: {file.parent.absolute()} has no {file.name}. If you have the file, set "
            "PROTODCS_DATA to its folder. It is not public: build one from your image sets with `protodcs data pack`, "
            "and name it with --pack."
        ) from None
    except (OSError, SafetensorError) as problem:
        raise DataError(f"{file} cannot be read: {problem}. Copy it again.") from None


def content() -> tuple[dict[str, NDArray[np.float16]], str]:
    """Return the arrays of the feature pack, by name, and the hash of its file."""
    return _content(path())


def path() -> Path:
    """Return the file of the feature pack."""
    named = os.environ.get(VARIABLE)
    return Path(named) if named else Path(os.environ.get("PROTODCS_DATA", ".")) / FILE


def is_own() -> bool:
    """Return whether the pack is one of `protodcs data pack`."""
    return bool(os.environ.get(VARIABLE))


def encoder() -> tuple[str, float]:
    """Return the name and the temperature of the encoder of the pack."""
    return _encoder(path())


@lru_cache(maxsize=1)
def _encoder(file: Path) -> tuple[str, float]:
    content()
    with safe_open(file, "np") as opened:
        about = opened.metadata() or {}
    if "encoder" not in about:
        return ENCODER, TEMPERATURE
    return f"{about['encoder']} feature pack", float(about["temperature"])


def vocabulary(name: str) -> Vocabulary:
    """Return the vocabulary of a file in the folder of the feature pack, or with `GENERAL` that of the pack itself."""
    return _vocabulary(path() if name == GENERAL else Path(os.environ.get("PROTODCS_DATA", ".")) / name)


@lru_cache(maxsize=4)
def _vocabulary(file: Path) -> Vocabulary:
    return read_vocabulary(file)


def read_vocabulary(file: Path) -> Vocabulary:
    """Return the vocabulary of a safetensors file that has the features of general names as `text`."""
    try:
        arrays = load_file(file)
    except FileNotFoundError:
        raise DataError(
            f"The vocabulary {file.name!r} is missing: {file.parent.absolute()} has no such file. Set PROTODCS_DATA to "
            "the folder that has it, or leave `vocabulary` out."
        ) from None
    except (OSError, SafetensorError) as problem:
        raise DataError(f"{file} cannot be read: {problem}. Copy it again.") from None
    if VOCABULARY not in arrays:
        raise DataError(
            f"{file} has no array `text`; it has: {', '.join(sorted(arrays)) or 'none'}. Name a file with the text "
            "features of general names."
        )
    try:
        return Vocabulary(arrays[VOCABULARY])
    except InputError as problem:
        raise DataError(f"{file}: {problem}") from None


def fingerprint() -> str:
    """Of the features, as an encoder has one."""
    return f"pack={content()[1][:32]}"


def stream(
    name: str,
    seed: int,
    split: str = "all",
    unknown: str | None = None,
    order: str = SHUFFLED,
    classes: int | None = None,
    samples: int | None = None,
) -> Packed:
    """Return one of the six streams. The seed draws the known classes, the unknown samples and the order.

    The split "tune" has the even ImageNet classes, the even unknown classes and the validation features, "judge" the
    odd ones and the test features: choose parameters on one, judge on the other.

    Args:
        name: one of `STREAMS`.
        seed: of all that is drawn.
        split: "all", "tune" or "judge".
        unknown: the share of unknown samples, a fraction such as "9/10"; None: as the recipe gives.
        order: one of `ORDERS`.
        classes: number of known classes; None: as the recipe gives.
        samples: length of the stream, at most; None: all.
    """
    recipe = STREAMS[name]
    count = classes or recipe.known
    arrays, digest = content()
    chance = np.random.default_rng(seed)
    text = arrays[TEXT].astype(np.float32)
    pool = np.arange(len(text)) if split == "all" else np.arange(split == "judge", len(text), 2)
    if len(pool) < count:
        raise DataError(f"the stream {name!r} needs {count} known classes, its split {split!r} has {len(pool)}")
    known = chance.permutation(pool)[:count]
    place = np.full(len(text), -1)
    place[known] = np.arange(count)
    labels = arrays[f"{KNOWN}_y"].astype(int)
    inside = place[labels] >= 0
    if recipe.unknown:
        unknown_features = np.concatenate([_unknown_features(arrays, other, split) for other in recipe.unknown])
    else:
        unknown_features = arrays[f"{KNOWN}_x"][~inside & np.isin(labels, pool)].astype(np.float32)
    if recipe.most:
        unknown_features = unknown_features[chance.permutation(len(unknown_features))[: recipe.most]]
    features = np.concatenate([arrays[f"{KNOWN}_x"][inside].astype(np.float32), unknown_features])
    truth = np.concatenate([place[labels[inside]], np.full(len(unknown_features), -1)])
    chosen = chance.permutation(len(features))
    if unknown is not None:
        chosen = chosen[in_proportion(truth[chosen] < 0, Fraction(unknown), samples)]
        # The kind that is cut short comes early in what is left: it has to be mixed again.
        chosen = chosen[chance.permutation(len(chosen))]
    chosen = chosen[:samples]
    chosen = chosen[ORDERS[order](truth[chosen] < 0)]
    words = f"pack {digest} {name} {split} {seed}"
    # What a stream was called before there was a choice, it is called still.
    words += f" unknown={unknown} order={order}" if (unknown, order) != (None, SHUFFLED) else ""
    words += f" classes={count}" if count != recipe.known else ""
    words += f" samples={samples}" if samples is not None else ""
    told = hashlib.sha256(words.encode())
    told.update(truth[chosen].astype("<i8").tobytes())
    return Packed(unit(text[known]), unit(features[chosen]), truth[chosen].astype(np.int64), told.hexdigest())


def in_proportion(strange: Flags, share: Fraction, most: int | None = None) -> Integers:
    """The places of as many samples as can be taken so that `share` of them is strange: exactly, and none twice.

    They are the first of either kind, which in a shuffled stream are as good as drawn; more always contain the fewer.

    >>> in_proportion(np.array([False, True, True, False, True]), Fraction(1, 2))
    array([0, 1, 2, 3])
    """
    known, unknown = np.flatnonzero(~strange), np.flatnonzero(strange)
    one_part, other_part = share.denominator - share.numerator, share.numerator
    parts = min(len(some) // part for some, part in ((known, one_part), (unknown, other_part)) if part)
    parts = parts if most is None else min(parts, most // share.denominator)
    if parts == 0:
        raise DataError(
            f"{len(known)} known and {len(unknown)} unknown samples are too few for a share of {share}: take another"
        )
    return np.sort(np.concatenate([known[: parts * one_part], unknown[: parts * other_part]]))


def shuffled(strange: Flags) -> Integers:
    """As they come."""
    return np.arange(len(strange))


def bursts(strange: Flags) -> Integers:
    """The strange ones in bursts of `BURST` in a row, the last one shorter, evenly between the others.

    >>> bursts(np.array([False, True, False, True]))
    array([0, 1, 3, 2])
    """
    known, unknown = np.flatnonzero(~strange), np.flatnonzero(strange)
    several = np.split(unknown, np.arange(BURST, len(unknown), BURST))
    between = np.array_split(known, len(several) + 1)
    pieces = [piece for pair in zip(between, several, strict=False) for piece in pair]
    return np.concatenate([*pieces, between[-1]])


def known_first(strange: Flags) -> Integers:
    """All known ones, then all strange ones: the worst for whoever thinks that what comes is mixed.

    >>> known_first(np.array([True, False, True, False]))
    array([1, 3, 0, 2])
    """
    return np.argsort(strange, kind="stable")


# Whoever orders the samples of a shuffled stream is told which are strange, and says in which order they come.
ORDERS: dict[str, Callable[[Flags], Integers]] = {SHUFFLED: shuffled, "bursts": bursts, "sorted": known_first}


def _unknown_features(arrays: dict[str, NDArray[np.float16]], name: str, split: str) -> NDArray[np.float32]:
    if f"{name}_val_x" not in arrays:
        raise DataError(
            f"{path()} has no unknown set {name!r}. Add it with `protodcs data pack --unknown {name}=DATASET`."
        )
    part = "val" if split == "tune" or f"{name}_test_x" not in arrays else "test"
    rows, classes = arrays[f"{name}_{part}_x"].astype(np.float32), arrays[f"{name}_{part}_y"].astype(int)
    return rows if split == "all" else rows[classes % 2 == (split == "judge")]


def unit(rows: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return rows (n, d) of length one."""
    scaled: NDArray[np.float32] = rows / np.maximum(np.linalg.norm(rows, axis=-1, keepdims=True), 1e-12)
    return scaled

"""Streams as users have them: 2 to 12 classes with many images each, and unknown images that look like known ones.

They are made of the feature pack, see `feature_pack`. `wild` has groups of animals with coarse names, and the prototype
of a group is the mean of the names of its ImageNet classes. `pets` has breeds, `catdog` two classes. The splits "tune"
and "judge" share no image, and no known class but cat and dog.
"""

import hashlib
from fractions import Fraction
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..arrays import Feature, Integers
from ..errors import DataError
from .feature_pack import Packed, content, unit

Family = Literal["wild", "pets", "catdog"]
Unknown = Literal["near", "objects", "sun", "ucf", "dtd", "flowers"]
Split = Literal["tune", "judge"]
# Samples of a stream, at most.
MOST = 3000

# Name of each group of animals, and its first and last ImageNet class.
_WILD: dict[str, dict[str, tuple[int, int]]] = {
    "tune": {
        "fish": (0, 6), "songbird": (7, 24), "snake": (52, 68), "turtle": (33, 37), "wild cat": (286, 293),
        "monkey": (365, 382), "insect": (308, 320), "hoofed animal": (339, 353), "snail or jellyfish": (107, 117),
    },
    "judge": {
        "water bird": (127, 146), "game bird or parrot": (80, 100), "lizard": (38, 48), "spider": (70, 77),
        "dog": (151, 268), "cat": (281, 285), "bear": (294, 297), "beetle": (300, 307), "butterfly": (321, 326),
        "crab or lobster": (118, 126),
    },
}  # fmt: skip
# Other animals: the near unknown images of `wild`.
_OTHER_ANIMALS = {
    "tune": ((25, 32), (277, 280), (330, 332), (356, 358)),
    "judge": ((269, 272), (298, 299), (333, 338), (359, 363), (385, 387)),
}
# Breed of Oxford Pets, and the ImageNet class of the same breed. The other breeds have none.
_BREEDS = {
    3: 161, 4: 162, 8: 242, 10: 151, 11: 285, 12: 219, 13: 212, 14: 210, 15: 257, 17: 152, 18: 261, 19: 255, 21: 237,
    22: 256, 23: 283, 24: 259, 25: 254, 28: 247, 29: 258, 30: 199, 32: 284, 34: 179, 35: 202, 36: 187,
}  # fmt: skip
_BREED_COUNT = 37
_CAT_BREEDS = (0, 5, 6, 7, 9, 11, 20, 23, 26, 27, 32, 33)
_CATS, _DOGS, _CATS_AND_DOGS = (281, 285), (151, 268), (151, 293)
_FIRST_OBJECT = 398
# Classes of the unknown sets that show a known animal, such as dog sleds and horse races.
_UNCLEAR = {"objects": (537, 603, 690, 815), "ucf": (40, 41, 97)}
_SETS = {"sun": "sun397", "ucf": "ucf101", "dtd": "dtd", "flowers": "oxford_flowers"}
# Shares of the two frequent classes with `tail`, if there are two classes and if there are more.
_TAIL_OF_TWO, _TAIL = (0.8, 0.2), (0.45, 0.25)


class _Known(NamedTuple):
    """Class names, prototypes (K, d), features (N, d) with their labels (N,), and features of near unknown images."""

    names: tuple[str, ...]
    prototypes: Feature
    features: Feature
    labels: Integers
    near: Feature


def stream(
    family: Family,
    unknown: Unknown,
    share: str,
    seed: int,
    split: Split,
    tail: bool = False,
    run: int = 1,
    samples: int = MOST,
) -> Packed:
    """Return a stream. The seed draws the samples and their order.

    Args:
        family: the known classes.
        unknown: "near" has other animals, or other breeds for `pets`; the others are sets of the feature pack.
        share: the share of unknown samples, a fraction such as "1/20".
        seed: of all that is drawn.
        split: choose parameters on "tune", judge on "judge".
        tail: whether two classes make up most of the known samples: 70 %, or 80 and 20 % if there are no others.
        run: mean length of runs of one class; 1: shuffled.
        samples: length of the stream, at most.
    """
    random = np.random.default_rng(seed)
    known, fraction = _known(family, split), float(Fraction(share))
    others = known.near if unknown == "near" else _unknown_features(unknown, split)
    rows, wanted = np.arange(0), samples
    if fraction < 1.0:
        rows = _chosen(known.labels, len(known.names), tail, random)[: round(samples * (1.0 - fraction))]
        wanted = round(len(rows) * fraction / (1.0 - fraction))
    if wanted > len(others):
        wanted = len(others)
        rows = rows[: round(wanted * (1.0 - fraction) / fraction)]
    if len(rows) + wanted == 0:
        raise DataError(f"The stream {family!r} has no sample at a share of {share}.")
    drawn = random.permutation(len(others))[:wanted]
    features = np.concatenate([known.features[rows], others[drawn]])
    labels = np.concatenate([known.labels[rows], np.full(wanted, -1)])
    order = random.permutation(len(labels)) if run == 1 else _in_runs(labels, run, random)
    words = f"user {content()[1]} {family} {unknown} {share} {split} {seed} tail={tail} run={run}"
    words += f" samples={samples}" if samples != MOST else ""
    digest = hashlib.sha256(words.encode() + labels[order].astype("<i8").tobytes()).hexdigest()
    return Packed(known.prototypes, features[order], labels[order].astype(np.int64), digest)


def class_names(family: Family, split: Split) -> tuple[str, ...]:
    """Return the names of the known classes."""
    return _known(family, split).names


def _array(name: str) -> NDArray[np.float16]:
    return content()[0][name]


def _rows(name: str) -> tuple[Feature, Integers]:
    """Return the unit features (N, d) and the labels (N,) of a set."""
    return unit(_array(f"{name}_x").astype(np.float32)), _array(f"{name}_y").astype(np.int64)


def _ids(*ranges: tuple[int, int]) -> Integers:
    return np.concatenate([np.arange(first, last + 1) for first, last in ranges])


def _known(family: Family, split: Split) -> _Known:
    text = unit(_array("text_imagenet1000").astype(np.float32))
    if family == "wild":
        return _wild(text, split)
    return _pets(text, split) if family == "pets" else _cats_and_dogs(text, split)


def _wild(text: Feature, split: Split) -> _Known:
    features, labels = _rows("imagenet")
    groups = _WILD[split]
    place = np.full(len(text), -1)
    for number, ids in enumerate(groups.values()):
        place[_ids(ids)] = number
    rows = place[labels] >= 0
    near = features[np.isin(labels, _ids(*_OTHER_ANIMALS[split]))]
    return _Known(tuple(groups), _means(text, *groups.values()), features[rows], place[labels[rows]], near)


def _pets(text: Feature, split: Split) -> _Known:
    features, labels = _rows("oxford_pets_test")
    breeds = sorted(_BREEDS)[split == "judge" :: 2]
    place = np.full(_BREED_COUNT, -1)
    place[breeds] = np.arange(len(breeds))
    rows = place[labels] >= 0
    ids = [_BREEDS[breed] for breed in breeds]
    near = features[np.isin(labels, _other_breeds(split))]
    names = tuple(f"ImageNet class {number}" for number in ids)
    return _Known(names, text[ids], features[rows], place[labels[rows]], near)


def _cats_and_dogs(text: Feature, split: Split) -> _Known:
    features, labels = _rows("oxford_pets_test")
    rows = np.isin(labels, sorted(_BREEDS)[split == "judge" :: 2] + _other_breeds(split))
    animals, kinds = _rows("imagenet")
    others = _ids(*_WILD[split].values(), *_OTHER_ANIMALS[split])
    near = animals[np.isin(kinds, others) & ~np.isin(kinds, _ids(_CATS_AND_DOGS))]
    is_dog = (~np.isin(labels[rows], _CAT_BREEDS)).astype(np.int64)
    return _Known(("cat", "dog"), _means(text, _CATS, _DOGS), features[rows], is_dog, near)


def _means(text: Feature, *ranges: tuple[int, int]) -> Feature:
    """Return one prototype for each range of ImageNet classes: the mean of their names."""
    return unit(np.stack([text[_ids(ids)].mean(axis=0) for ids in ranges]))


def _other_breeds(split: Split) -> list[int]:
    return [breed for breed in range(_BREED_COUNT) if breed not in _BREEDS][split == "judge" :: 2]


def _unknown_features(name: Unknown, split: Split) -> Feature:
    odd = split == "judge"
    if name == "objects":
        features, labels = _rows("imagenet")
        return features[(labels >= _FIRST_OBJECT) & (labels % 2 == odd) & ~np.isin(labels, _UNCLEAR[name])]
    stored = _SETS[name]
    part = "val" if not odd or f"{stored}_test_x" not in content()[0] else "test"
    features, labels = _rows(f"{stored}_{part}")
    return features[(labels % 2 == odd) & ~np.isin(labels, _UNCLEAR.get(name, ()))]


def _chosen(labels: Integers, count: int, tail: bool, random: np.random.Generator) -> Integers:
    """Return the places of known samples, shuffled; without `tail` no class has over three times the median size."""
    sizes = np.bincount(labels, minlength=count)
    if count == 2:
        weights = np.array(_TAIL_OF_TWO if tail else (0.5, 0.5))[random.permutation(2)]
    elif tail:
        frequent = random.permutation(np.argsort(sizes)[-3:])[:2]
        weights = np.full(count, (1.0 - sum(_TAIL)) / (count - 2))
        weights[frequent] = _TAIL
    else:
        weights = np.minimum(sizes, 3 * np.median(sizes))
        weights = weights / weights.sum()
    total = (sizes / weights).min()
    rows = [
        random.permutation(np.flatnonzero(labels == label))[: max(1, round(total * weights[label]))]
        for label in range(count)
    ]
    return random.permutation(np.concatenate(rows))


def _in_runs(labels: Integers, mean: int, random: np.random.Generator) -> Integers:
    """Return an order of the samples in which classes come in runs, geometric with this mean."""
    runs = []
    for label in np.unique(labels):
        members, place = random.permutation(np.flatnonzero(labels == label)), 0
        while place < len(members):
            length = random.geometric(1.0 / mean)
            runs.append(members[place : place + length])
            place += length
    return np.concatenate([runs[number] for number in random.permutation(len(runs))])

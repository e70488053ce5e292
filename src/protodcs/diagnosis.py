"""What an engine can and cannot decide on its images: an estimate without labels, and sentences for users.

Three things are told. Do the scores show a separate group of unknown images, and how much of it is called unknown? If a
class were missing from the list, how many of its images would be called unknown, and which class would take the others?
And what is missing: classes, a vocabulary, images?

The second answer comes from copies of the engine that learn from the same images without one class. The engine itself
is never changed. docs/research/log.md, "What users are told", has what these estimates predict and what they don't.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from math import erf, sqrt
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from .arrays import Features, Integers
from .core.decision import Decisions
from .core.distribution import Group, ScoreDistribution
from .core.streamdcs.constants import LEAST_NAMES
from .method import FeatureMethod

# With fewer images, more known ones are rejected: see docs/research/log.md, "Whole collections".
FEW_IMAGES = 200
# Limits that keep the estimate at about a second: images that are decided, and that each copy learns from; classes that
# are left out; images of such a class; and classes times copies, because a class makes a step of each copy longer.
_DECIDED, _LEARNED, _MOST_CLASSES, _ASKED, _MOST_PRODUCT = 1000, 400, 12, 40, 900
# A class with fewer images is not left out. With fewer known images in all, nothing is estimated.
_LEAST_ASKED, _LEAST_KNOWN = 5, 50
# Values below which users are warned. At an estimate of 95 % or more, 93 to 100 % of the unknown images are found in
# 8 of 10 collections; below 85 %, sometimes only half.
_FOUND, _MISSING, _CLOSE, _TAKEN = 0.85, 0.7, 0.5, 0.25
# Classes that are named in the sentences.
_NAMED = 5
_NOTHING_STORED = (
    "This stream stores no samples, so nothing is estimated for missing classes. Create it with `discovery`."
)


class MissingClass(NamedTuple):
    """What would become of the images of a class if it were missing from the list.

    Attributes:
        name: the class.
        images: number of its images that were asked about.
        unknown: fraction of them that would be called unknown.
        instead: the class that takes most of the others; None if there are no others.
        taken: fraction of the images that it takes.
    """

    name: str
    images: int
    unknown: float
    instead: str | None
    taken: float

    @property
    def is_close(self) -> bool:
        """Whether another class takes so many of the images that the two are too close."""
        return self.instead is not None and self.unknown < _CLOSE and self.taken >= _TAKEN


class Diagnosis(NamedTuple):
    """What an engine can and cannot decide.

    Attributes:
        images: number of images that the engine has observed.
        two_groups: whether the scores show a separate group of unknown images; None if the method does not test it.
        unknown_share: estimated share of this group; None without two groups.
        unknown_found: estimated fraction of this group that is called unknown; None without two groups.
        missing_class: if a class were missing from the list, the estimated fraction of its images that would be called
            unknown, as a mean over classes; None if there are too few images, or if classes cannot be removed.
        classes: the same for single classes, the lowest fraction first. Not all classes are among them.
        misses_similar: whether unknown images that look like the classes probably often get one of them.
        sentences: all of it for users, with what to do.
    """

    images: int
    two_groups: bool | None
    unknown_share: float | None
    unknown_found: float | None
    missing_class: float | None
    classes: tuple[MissingClass, ...]
    misses_similar: bool
    sentences: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return it JSON-ready."""
        return {**self._asdict(), "classes": [one._asdict() for one in self.classes], "sentences": [*self.sentences]}


def diagnose(engine: FeatureMethod, features: Features, decisions: Decisions | None = None) -> Diagnosis:
    """Return what an engine can and cannot decide. The engine does not change.

    Args:
        engine: has learned from these images, or from others of the same stream.
        features: (N, d) of a collection, or of the recent images of a stream, as far as they are stored.
        decisions: on these features; None: as `engine.peek` decides.

    >>> import numpy as np
    >>> from protodcs import StreamDCS
    >>> engine, features = StreamDCS(np.eye(3, 8), classes=["cat", "dog", "fox"]), np.eye(3, 8)
    >>> diagnose(engine, features, engine.observe_many(features)).missing_class is None  # Three images are too few.
    True
    """
    if decisions is None:
        features = features[_drawn(len(features), _DECIDED)]
        peeked = [engine.peek(row) for row in features]
        known = np.array([one.known for one in peeked], dtype=np.bool_)
        index = np.array([one.index for one in peeked], dtype=np.int64)
    else:
        known, index = np.asarray(decisions.known), np.asarray(decisions.index)
    classes = tuple(missing_classes(engine, features, np.where(known, index, -1)))
    stats = engine.stats()
    two_groups = stats["two_groups"] > 0.5 if "two_groups" in stats else None
    share = found = None
    if two_groups:
        share, found = float(stats["share_unknown"]), _found(engine.score_distribution())  # type: ignore[attr-defined]
    mean = float(np.mean([one.unknown for one in classes])) if classes else None
    overlaps = found is not None and found < _FOUND
    misses = overlaps or (mean is not None and mean < _MISSING) or any(one.is_close for one in classes)
    diagnosis = Diagnosis(engine.sequence, two_groups, share, found, mean, classes, misses, ())
    rejected = float((~known).mean()) if len(known) else engine.unknown_share or 0.0
    sentences = [*_sentences(engine, diagnosis, rejected)]
    if not len(known) and engine.sequence:
        sentences.append(_NOTHING_STORED)
    elif not engine.capabilities.editable_classes:
        sentences.append(f"The method {engine.name!r} cannot remove classes, so nothing is estimated for missing ones.")
    return diagnosis._replace(sentences=tuple(sentences))


def missing_classes(engine: FeatureMethod, features: Features, labels: Integers) -> list[MissingClass]:
    """Return what would become of the images of single classes if they were missing, the lowest fraction first.

    For each class, a copy of the engine learns again, from the same images without it, and decides on its images.

    Args:
        engine: is not changed.
        features: (N, d).
        labels: (N,) the class that each is called; -1 if unknown.
    """
    counts = np.bincount(labels[labels >= 0], minlength=len(engine.classes))
    if not engine.capabilities.editable_classes or len(counts) < 2 or counts.sum() < _LEAST_KNOWN:
        return []
    most = min(_MOST_CLASSES, max(3, _MOST_PRODUCT // len(counts)))
    chosen = [place for place in np.argsort(-counts, kind="stable")[:most] if counts[place] >= _LEAST_ASKED]
    learned = features[_drawn(len(features), _LEARNED)]
    # Learning begins again: a threshold of images among which the class was known would be wrong without it.
    blank = _copied(engine, engine.snapshot())
    blank.reset()
    state, found = blank.snapshot(), []
    for place in chosen:
        copied = _copied(engine, state)
        copied.remove_class(engine.classes[place])
        copied.observe_many(learned, two_pass=True)
        rows = features[labels == place]
        answers = [copied.peek(row).label for row in rows[_drawn(len(rows), _ASKED)]]
        found.append(_missing(engine.classes[place], answers))
    return sorted(found, key=lambda one: one.unknown)


def _copied(engine: FeatureMethod, state: bytes) -> FeatureMethod:
    return type(engine).restore(state, vocabulary=engine.vocabulary, trusted=True)


def _missing(name: str, answers: Sequence[str | None]) -> MissingClass:
    others = Counter(answer for answer in answers if answer is not None)
    instead, count = others.most_common(1)[0] if others else (None, 0)
    return MissingClass(name, len(answers), 1.0 - others.total() / len(answers), instead, count / len(answers))


def _drawn(count: int, most: int) -> NDArray[np.int64]:
    """Return at most this many of `count` places, in order. The same call returns the same ones."""
    return np.sort(np.random.default_rng(0).permutation(count)[:most])


def _found(scores: ScoreDistribution) -> float:
    """Return the fraction of the fitted group of unknown images that lies on its side of the threshold."""
    group = next(group for group in scores.groups if group.name == "unknown")
    assert scores.threshold is not None
    return _below(group, scores.threshold)


def _below(group: Group, value: float) -> float:
    """Return the fraction of a group below a value."""
    deviation = group.below if value < group.mode else group.above
    part = group.below / (group.below + group.above)
    side = erf((value - group.mode) / (deviation * sqrt(2.0)))
    return part * (1.0 + side) if value < group.mode else part + (1.0 - part) * side


def _sentences(engine: FeatureMethod, found: Diagnosis, rejected: float) -> Iterator[str]:
    """Return the sentences of a diagnosis, if this fraction of the images is called unknown."""
    yield from _of_what_is_missing(engine, found)
    if found.images >= _LEAST_KNOWN:
        yield from _of_groups(engine, found, rejected)
    close = [one for one in found.classes if one.is_close]
    if found.missing_class is not None:
        tried = f"{len(found.classes)} of {len(engine.classes)} classes"
        yield (
            f"If a class were missing from your list, about {_percent(found.missing_class)} of its images would be "
            f"called unknown. This is estimated without labels, from {tried}."
        )
    for one in close[:_NAMED]:
        taken = _percent(one.taken)
        yield f"Too close: without the class {one.name}, {taken} of its images would be called {one.instead}."
    if (more := len(close) - _NAMED) > 0:
        yield f"{more} more {'class is' if more == 1 else 'classes are'} too close to another one."
    if found.misses_similar:
        yield "So unknown images that look like your classes often get one of them."
        merge = "merge close classes, give them clearer names, or " if close else ""
        yield f"To find more unknown images, {merge}raise the false-reject target."


def _of_what_is_missing(engine: FeatureMethod, found: Diagnosis) -> Iterator[str]:
    """Return what the engine lacks: images, classes, or a vocabulary."""
    count = len(engine.classes)
    if found.images < FEW_IMAGES:
        yield (
            f"There are only {found.images} images. With fewer than {FEW_IMAGES}, more known images are called "
            "unknown than you ask for, and estimates are rough. Add images, or wait for more."
        )
    classes = "There is one class" if count == 1 else f"There are {count} classes"
    if engine.uses_vocabulary and engine.vocabulary is None and count < LEAST_NAMES:
        yield (
            f"{classes} and no vocabulary, so fewer unknown images are found. Use a vocabulary such as `general`, if "
            "the encoder knows the words, or name more things that your images show."
        )
    elif count == 1 or (count == 2 and not engine.uses_vocabulary):
        yield f"{classes}, so little shows what is unknown. Name more things that your images show."


def _of_groups(engine: FeatureMethod, found: Diagnosis, rejected: float) -> Iterator[str]:
    """Return what the scores show."""
    target = getattr(engine.config, "target_false_reject", 0.05)
    if rejected > 0.5:
        yield "Most images are called unknown. If you expected known ones, check the class names and the encoder."
    if found.two_groups and found.unknown_share is not None and found.unknown_found is not None:
        overlap, only = ("", "") if found.unknown_found >= _FOUND else (" that overlap", "only ")
        yield (
            f"The scores show two groups{overlap}. About {_percent(found.unknown_share)} of the images are in the "
            f"group of unknown images, and {only}about {_percent(found.unknown_found)} of this group is called unknown."
        )
    elif found.two_groups is False and rejected <= 0.5:
        yield (
            "The scores show no separate group of unknown images: there are none or few, or they look like your "
            f"classes. In both cases, about {_percent(target)} of all images are called unknown."
        )


def _percent(fraction: float) -> str:
    return f"{100 * fraction:.2g} %" if fraction < 0.1 else f"{100 * fraction:.0f} %"

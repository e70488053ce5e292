"""From sources, a protocol and a seed to a manifest.

Everything that a stream depends on enters here as an argument and leaves in the manifest. No clock, no global random
state, no order of a dictionary or set may reach the result.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import numpy as np

from ...arrays import Integers
from ...errors import ConfigError, DataError
from ..source import ImageSource
from .header import HIGHEST_SEVERITY, LARGEST_NUMBER, MOST_SAMPLES, Option, Origin, Segment, shown, whole_number
from .manifest import UNKNOWN, Manifest, known_labels
from .order import drawing
from .protocol import Pool, Protocol, read_options
from .protocols import REGISTER

Rest = Literal["left-out", "unknown"]


def protocols() -> list[str]:
    """The names of all protocols."""
    return list(REGISTER)


def build(
    protocol: str,
    known: ImageSource,
    unknown: Sequence[ImageSource] | ImageSource | None,
    seed: int,
    corruptions: Sequence[str | None] | None = None,
    severity: int = HIGHEST_SEVERITY,
    family: str | None = None,
    variant: str = "published",
    *,
    classes: Sequence[str] | None = None,
    rest: Rest = "left-out",
    **options: object,
) -> Manifest:
    """The stream that a protocol makes of these sources. The same arguments give the same bytes on every machine.

    Args:
        protocol: one of `protocols()`.
        known: the source of the known images; its class names are the known classes.
        unknown: one or more sources of unknown images.
        seed: where all chance comes from.
        corruptions: one segment each, in this order; None in the list is a segment of clean images. Left out: the
            fifteen standard ones. The order within a segment depends on its corruption and on how often that stood
            earlier in the list, so a shorter list has the same segments.
        severity: of all corruptions; 0, without a list, is one segment of clean images.
        family: which published constants; None leaves it to the image size.
        variant: which implementation of the corruptions.
        classes: keep only these classes of the known source, in this order; None for all.
        rest: what becomes of the other classes' images: nothing, or they are unknown images, ahead of all others.
        options: those of the protocol, each described in its file.
    """
    rule = _find(protocol)
    if not whole_number(seed, 0, LARGEST_NUMBER):
        raise ConfigError(f"the seed is {shown(seed)}; wanted: a whole number from 0 to 2**53 - 1")
    settings = read_options(protocol, rule.settings, options)
    conditions = _conditions(corruptions, severity, family, variant)
    stock = _stock(known, _sources(unknown), classes, rest)
    orders = list(_orders(rule, stock.pool, settings, seed, [corruption for corruption, *_ in conditions]))
    return _manifest(protocol, {**settings, "rest": rest}, seed, stock, _segments(conditions, orders, rule), orders)


@dataclass(frozen=True)
class _Stock:
    """All images there are: for each of the pool's numbers its source, its place in it and its label."""

    classes: tuple[str, ...]
    origins: list[Origin]
    source: Integers
    index: Integers
    label: Integers

    @property
    def pool(self) -> Pool:
        labels = self.label[self.label != UNKNOWN]
        return Pool(labels, len(self.label) - len(labels))


_Condition = tuple[str | None, int, str | None, str | None]


def _find(protocol: str) -> Protocol:
    if not isinstance(protocol, str) or protocol not in REGISTER:
        raise ConfigError(f"there is no protocol {shown(protocol)}; choose one of {', '.join(REGISTER)}")
    return REGISTER[protocol]


def _sources(unknown: Sequence[ImageSource] | ImageSource | None) -> list[ImageSource]:
    if unknown is None:
        return []
    return list(unknown) if isinstance(unknown, Sequence) else [unknown]


def _conditions(
    corruptions: Sequence[str | None] | None, severity: int, family: str | None, variant: str
) -> list[_Condition]:
    # Imported late: the corruptions bring compiled code that only building needs.
    from ..corruptions import FAMILIES, NAMES, STANDARD, VARIANTS

    if not whole_number(severity, 0, HIGHEST_SEVERITY):
        raise ConfigError(f"the severity is {shown(severity)}; wanted: 0 for clean images, or 1 to {HIGHEST_SEVERITY}")
    for name, value, choices in (("variant", variant, VARIANTS), ("family", family, (None, *FAMILIES))):
        if value not in choices:
            raise ConfigError(f"the {name} is {shown(value)}; choose one of {', '.join(map(repr, choices))}")
    if corruptions is None:
        corruptions = STANDARD if severity else (None,)
    if isinstance(corruptions, str) or not corruptions:
        raise ConfigError(f"corruptions is {shown(corruptions)}; wanted: a list of at least one name")
    for corruption in corruptions:
        if corruption is not None and corruption not in NAMES:
            raise ConfigError(f"there is no corruption {shown(corruption)}; choose from {', '.join(NAMES)}")
        if corruption is not None and severity == 0:
            raise ConfigError(f"severity 0 means clean images, but the corruption {corruption!r} is asked for")
    return [(name, severity, family, variant) if name else (None, 0, None, None) for name in corruptions]


def _stock(known: ImageSource, unknown: list[ImageSource], classes: Sequence[str] | None, rest: Rest) -> _Stock:
    for source in (known, *unknown):
        _check_source(source)
    mine, others = _origin(known, "known"), [_origin(source, "unknown") for source in unknown]
    _check_apart(mine, others)
    chosen = _chosen_classes(known, classes, rest)
    labels = known_labels(known, chosen)
    if (known.labels < 0).any():
        raise DataError(
            f"the known source {known.name!r} has {int((known.labels < 0).sum())} images without a label: "
            "a known image needs one; leave these images out of the source"
        )
    parts = [(mine, np.flatnonzero(labels != UNKNOWN))]
    if rest == "unknown":
        parts.append((replace(mine, role="unknown"), np.flatnonzero(labels == UNKNOWN)))
    parts += [(other, np.arange(other.size)) for other in others]
    return _Stock(
        classes=chosen,
        origins=[origin for origin, _ in parts],
        source=np.repeat(np.arange(len(parts)), [len(index) for _, index in parts]),
        index=np.concatenate([index for _, index in parts]),
        label=np.concatenate(
            [labels[parts[0][1]]] + [np.full(len(index), UNKNOWN, dtype=np.int64) for _, index in parts[1:]]
        ),
    )


def _check_source(source: ImageSource) -> None:
    if not isinstance(source, ImageSource):
        raise DataError(f"a source of images is wanted; given: {shown(source)}")
    if len(source) == 0:
        raise DataError(f"the source {source.name!r} has no images: a stream cannot use it")


def _check_apart(known: Origin, unknown: list[Origin]) -> None:
    if any(known.name == other.name or known.fingerprint == other.fingerprint for other in unknown):
        raise DataError(
            f"the source {known.name!r} is given as known and as unknown: its images would be both; "
            "to split one source, give the known classes as classes=[...] with rest='unknown'"
        )
    if len({other.name for other in unknown}) < len(unknown):
        raise DataError("two unknown sources have the same name: no image is taken twice, and names tell sources apart")


def _chosen_classes(known: ImageSource, classes: Sequence[str] | None, rest: Rest) -> tuple[str, ...]:
    if not known.classes:
        raise DataError(f"the known source {known.name!r} has no class names: a stream cannot say what is known")
    if len(set(known.classes)) != len(known.classes):
        raise DataError(f"the known source {known.name!r} has two classes of the same name")
    chosen = tuple(known.classes if classes is None else classes)
    once = 0 < len(chosen) == len(set(chosen)) and set(chosen) <= set(known.classes)
    if isinstance(classes, str) or not once:
        raise ConfigError(
            f"classes is {shown(classes)}; wanted: names of classes of {known.name!r}, each once, from "
            f"{', '.join(known.classes[:10])}{', ...' if len(known.classes) > 10 else ''}"
        )
    if rest not in ("left-out", "unknown"):
        raise ConfigError(f"rest is {shown(rest)}; wanted: 'left-out' or 'unknown'")
    if rest == "unknown" and len(chosen) == len(known.classes):
        raise ConfigError("rest='unknown' needs classes=[...] that leave some class over; these are all of them")
    return chosen


def _origin(source: ImageSource, role: str) -> Origin:
    return Origin(name=source.name, fingerprint=source.fingerprint, size=len(source), role=role)


def _orders(
    rule: Protocol, pool: Pool, options: dict[str, Option], seed: int, names: list[str | None]
) -> Iterator[Integers]:
    chance = partial(drawing, rule.chance, seed)
    choice = rule.choose(pool, options, chance)
    length = len(choice.known) + len(choice.unknown)
    if not 0 < length * len(names) <= MOST_SAMPLES:
        raise DataError(
            f"the stream would have {length * len(names)} samples; wanted: 1 to {MOST_SAMPLES}: "
            "choose other counts, classes or fewer corruptions"
        )
    earlier: Counter[str] = Counter()
    for name in names:
        title = name or "clean"
        yield rule.order(choice, options, chance(f"order {title} {earlier[title]}"))
        earlier[title] += 1


def _segments(conditions: list[_Condition], orders: list[Integers], rule: Protocol) -> list[Segment]:
    stops = np.cumsum([len(order) for order in orders])
    return [
        Segment(*condition, reset=rule.resets, start=int(stop) - len(order), length=len(order))
        for condition, order, stop in zip(conditions, orders, stops, strict=True)
    ]


def _manifest(
    protocol: str,
    options: dict[str, Option],
    seed: int,
    stock: _Stock,
    segments: list[Segment],
    orders: list[Integers],
) -> Manifest:
    numbers = np.concatenate(orders)
    source = stock.source[numbers]
    # The known source is always listed, for it gives the classes; an unknown one only where a sample comes from it.
    used = np.bincount(source, minlength=len(stock.origins)) > 0
    used[0] = True
    return Manifest(
        protocol=protocol,
        options=options,
        seed=seed,
        classes=stock.classes,
        sources=tuple(origin for origin, listed in zip(stock.origins, used, strict=True) if listed),
        segments=tuple(segments),
        source=(np.cumsum(used) - 1)[source],
        index=stock.index[numbers],
        label=stock.label[numbers],
    )

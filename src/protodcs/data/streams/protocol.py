"""What a protocol is: a rule that says which samples stand in a stream and in which order.

A protocol is a pure function of the known labels, the number of unknown images, its options and words of chance. It
never sees an image, a name or a file, so that the same numbers give the same stream.
"""

import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np

from ...arrays import Integers
from ...errors import ConfigError
from .header import LARGEST_NUMBER, Option, shown
from .order import Draw

Options = Mapping[str, Option]
# Gives the words that belong to one purpose of a protocol.
Chance = Callable[[str], Draw]

# Keeps every product of weights and counts far below 2**63.
_LARGEST_TERM = 1_000_000
_FRACTION = re.compile(r"[0-9]{1,9}(\.[0-9]{1,9}|/[0-9]{1,9})?")


@dataclass(frozen=True)
class Pool:
    """What there is to choose from: known images by label, and a number of unknown ones.

    Every image has a number here. The known ones come first, in the order of their source, then the unknown ones, in
    the order in which their sources were given.
    """

    labels: Integers
    unknown: int

    @property
    def known_numbers(self) -> Integers:
        """The numbers of all known images."""
        return np.arange(len(self.labels), dtype=np.int64)

    @property
    def unknown_numbers(self) -> Integers:
        """The numbers of all unknown images."""
        return np.arange(len(self.labels), len(self.labels) + self.unknown, dtype=np.int64)


@dataclass(frozen=True)
class Choice:
    """The numbers of the images that every segment of the stream holds, and the labels of the known ones."""

    known: Integers
    labels: Integers
    unknown: Integers


@dataclass(frozen=True)
class Setting:
    """An option of a protocol: its default and the function that reads a user's value into its one spelling."""

    default: Option
    read: Callable[[str, Any], Option]


@dataclass(frozen=True)
class Protocol:
    """One rule.

    Attributes:
        chance: what its words are derived from; two protocols that share it draw alike.
        settings: its options by name.
        choose: which images every segment holds; the same for all segments.
        order: the order of one segment; called for each with words of its own.
        resets: whether adaptation starts afresh before every segment.
    """

    chance: str
    settings: Mapping[str, Setting]
    choose: Callable[[Pool, Options, Chance], Choice]
    order: Callable[[Choice, Options, Draw], Integers]
    resets: bool = False


def read_options(protocol: str, settings: Mapping[str, Setting], given: Mapping[str, object]) -> dict[str, Option]:
    """Every option of a protocol with its value, in its one spelling."""
    strange = sorted(set(given) - set(settings))
    if strange:
        raise ConfigError(
            f"the protocol {protocol!r} has no option {strange[0]!r}; its options: {', '.join(sorted(settings))}"
        )
    return {
        name: setting.read(name, given[name]) if given.get(name) is not None else setting.default
        for name, setting in settings.items()
    }


def count(name: str, value: object) -> int:
    """A number of images, 0 or more."""
    return _whole(name, value, 0)


def positive(name: str, value: object) -> int:
    """A whole number, 1 or more."""
    return _whole(name, value, 1)


def share(name: str, value: object) -> str:
    """A fraction from 0 to 9/10."""
    return _fraction(name, value, Fraction(0), Fraction(9, 10))


def concentration(name: str, value: object) -> str:
    """A fraction above 0."""
    return _fraction(name, value, Fraction(1, _LARGEST_TERM), Fraction(_LARGEST_TERM))


def mean_length(name: str, value: object) -> str:
    """A fraction from 1 up."""
    return _fraction(name, value, Fraction(1), Fraction(_LARGEST_TERM))


def _whole(name: str, value: object, low: int) -> int:
    try:
        number = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        number = -1
    if isinstance(value, bool) or not low <= number <= LARGEST_NUMBER:
        raise ConfigError(f"{name} is {shown(value)}; wanted: a whole number from {low} up")
    return number


def _fraction(name: str, value: object, low: Fraction, high: Fraction) -> str:
    fraction = _exact(value)
    if fraction is None or not low <= fraction <= high:
        raise ConfigError(f"{name} is {shown(value)}; wanted: a number from {low} to {high}, such as 0.5 or '1/2'")
    if max(fraction.numerator, fraction.denominator) > _LARGEST_TERM:
        raise ConfigError(
            f"{name} is {shown(value)}, which as a fraction has terms above {_LARGEST_TERM}; "
            "write it as a shorter number or as a fraction such as '1/3'"
        )
    return str(fraction)


def _exact(value: object) -> Fraction | None:
    if isinstance(value, Fraction) or (isinstance(value, int) and not isinstance(value, bool)):
        return Fraction(value)
    if isinstance(value, float) and np.isfinite(value):
        # The shortest text of a float is what its writer meant: 0.1 is one tenth.
        return Fraction(repr(float(value)))
    if isinstance(value, str) and _FRACTION.fullmatch(value):
        try:
            return Fraction(value)
        except ZeroDivisionError:
            return None
    return None

"""How many known and unknown images a stream holds: all, so many of each, or a share of unknown ones.

A share is met exactly or refused, and no image is ever taken twice: where there are too few, the error says so.
"""

from collections.abc import Mapping
from fractions import Fraction
from types import MappingProxyType
from typing import cast

import numpy as np

from ...arrays import Integers
from ...errors import ConfigError, DataError
from .order import permutation
from .protocol import Chance, Choice, Options, Pool, Setting, count, positive, share

KNOWN_COUNT = Setting(None, count)
UNKNOWN_COUNT = Setting(None, count)
# known_count, unknown_count: None means all. ratio: the share of unknown images, instead of the counts. total: the
# length of a segment under a ratio; None means as long as the images last.
AMOUNTS: Mapping[str, Setting] = MappingProxyType(
    {
        "known_count": KNOWN_COUNT,
        "unknown_count": UNKNOWN_COUNT,
        "ratio": Setting(None, share),
        "total": Setting(None, positive),
    }
)


def by_amounts(pool: Pool, options: Options, chance: Chance) -> Choice:
    """The images that the four options above ask for, drawn once and the same in every segment."""
    known, unknown = _by_ratio(pool, options) if options["ratio"] is not None else _by_counts(pool, options)
    return drawn(pool, known, unknown, chance)


def drawn(pool: Pool, known: int, unknown: int, chance: Chance) -> Choice:
    """So many known and unknown images drawn without repetition; more of them always contain the fewer."""
    require_known(pool, known)
    require_unknown(pool, unknown)
    chosen = _some(pool.known_numbers, known, chance, "choose known")
    return Choice(chosen, pool.labels[chosen], _some(pool.unknown_numbers, unknown, chance, "choose unknown"))


def wanted(options: Options, name: str, otherwise: int) -> int:
    """The number that an option asks for, or `otherwise` where it asks for none."""
    value = options[name]
    return otherwise if value is None else cast(int, value)


def require_known(pool: Pool, number: int) -> None:
    """Raise a `DataError` unless there are so many known images."""
    if number > len(pool.labels):
        raise DataError(f"the stream wants {number} known images, there are {len(pool.labels)}: {_MEND}")


def require_unknown(pool: Pool, number: int) -> None:
    """Raise a `DataError` unless there are so many unknown images."""
    if number > pool.unknown:
        raise DataError(f"the stream wants {number} unknown images, there are {pool.unknown}: {_MEND}")


_MEND = "no image is taken twice; ask for fewer or give a larger source"


def require_some_unknown(pool: Pool) -> None:
    """Raise a `DataError` if there is no unknown image at all."""
    if pool.unknown == 0:
        raise DataError(
            "the stream wants unknown images and there are none: give a source of them, or classes=... with "
            "rest='unknown', or take the protocol 'no-unknown'"
        )


def _by_counts(pool: Pool, options: Options) -> tuple[int, int]:
    if options["total"] is not None:
        raise ConfigError("total needs a ratio; without one, give known_count and unknown_count")
    if options["unknown_count"] is None:
        require_some_unknown(pool)
    return wanted(options, "known_count", len(pool.labels)), wanted(options, "unknown_count", pool.unknown)


def _by_ratio(pool: Pool, options: Options) -> tuple[int, int]:
    if options["known_count"] is not None or options["unknown_count"] is not None:
        raise ConfigError("give a ratio, with or without a total, or known_count and unknown_count, not both")
    ratio = Fraction(str(options["ratio"]))
    unknown_part, whole = ratio.numerator, ratio.denominator
    if unknown_part:
        require_some_unknown(pool)
    if options["total"] is None:
        parts = _most_parts(pool, ratio)
    else:
        total = wanted(options, "total", 0)
        parts, left = divmod(total, whole)
        if left:
            raise ConfigError(
                f"a total of {total} cannot hold a share of {ratio} exactly; the nearest that can are "
                f"{' and '.join(str(whole * n) for n in (parts, parts + 1) if n)}"
            )
    return parts * (whole - unknown_part), parts * unknown_part


def _most_parts(pool: Pool, ratio: Fraction) -> int:
    most = len(pool.labels) // (ratio.denominator - ratio.numerator)
    if ratio.numerator:
        most = min(most, pool.unknown // ratio.numerator)
    if most == 0:
        raise DataError(
            f"{len(pool.labels)} known and {pool.unknown} unknown images are too few for a share of {ratio}: it takes "
            f"{ratio.denominator - ratio.numerator} known and {ratio.numerator} unknown images, or a multiple of both"
        )
    return most


def _some(numbers: Integers, wanted_count: int, chance: Chance, purpose: str) -> Integers:
    if wanted_count == len(numbers):
        return numbers
    return numbers[np.sort(permutation(chance(purpose), len(numbers))[:wanted_count])]

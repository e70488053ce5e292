"""The legacy protocol of UniEnt: every batch is 100 known images, then 100 unknown ones, and nothing is shuffled.

Legacy, and kept on purpose: the known images stand in the order of their file, which every corruption repeats; the
unknown ones are the first as many of their file (10,000 of 26,032 for SVHN); a batch always is known first, unknown
second, so a method that adapts to a batch sees the same share in each. Adaptation is never reset and the seed changes
nothing. One thing is not repeated: where UniEnt fills up with copies of too few unknown images, we refuse.
Options: `batch`, an even number, 200; `known_count`, the first so many known images, None for all.
"""

import numpy as np

from ....arrays import Integers
from ....errors import ConfigError
from ..order import Draw
from ..protocol import Chance, Choice, Options, Pool, Protocol, Setting, positive
from ..sample_counts import KNOWN_COUNT, require_known, require_unknown, wanted


def even(name: str, value: object) -> int:
    """A whole number that has a half."""
    number = positive(name, value)
    if number % 2:
        raise ConfigError(f"{name} is {number}; wanted: an even number, half of it known and half unknown")
    return number


def choose(pool: Pool, options: Options, chance: Chance) -> Choice:
    """The first known images and as many of the first unknown ones."""
    number = wanted(options, "known_count", len(pool.labels))
    require_known(pool, number)
    require_unknown(pool, number)
    return Choice(pool.known_numbers[:number], pool.labels[:number], pool.unknown_numbers[:number])


def order(choice: Choice, options: Options, draw: Draw) -> Integers:
    """Block after block, in the order of the files; the last block may be shorter."""
    half = wanted(options, "batch", 0) // 2
    blocks = [
        side[start : start + half]
        for start in range(0, len(choice.known), half)
        for side in (choice.known, choice.unknown)
    ]
    return np.concatenate(blocks or [choice.known])


PROTOCOL = Protocol(
    chance="unient",
    settings={"batch": Setting(200, even), "known_count": KNOWN_COUNT},
    choose=choose,
    order=order,
)

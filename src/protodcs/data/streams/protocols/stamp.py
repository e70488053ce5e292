"""The protocol of STAMP: four known images to one unknown, shuffled together, a reset before every corruption.

There is one unknown image for every four known ones, rounded down; which ones is drawn once by the seed.
Options: `known_count`, None for all; `batch`, 64, a note for methods that work on batches: it changes no order.
"""

from ..protocol import Chance, Choice, Options, Pool, Protocol, Setting, positive
from ..sample_counts import KNOWN_COUNT, drawn, require_known, require_some_unknown, wanted
from . import continual

KNOWN_PER_UNKNOWN = 4


def choose(pool: Pool, options: Options, chance: Chance) -> Choice:
    """The known images asked for, and a quarter as many unknown ones."""
    known = wanted(options, "known_count", len(pool.labels))
    require_known(pool, known)
    require_some_unknown(pool)
    return drawn(pool, known, known // KNOWN_PER_UNKNOWN, chance)


PROTOCOL = Protocol(
    chance="stamp-4to1",
    settings={"batch": Setting(64, positive), "known_count": KNOWN_COUNT},
    choose=choose,
    order=continual.order,
    resets=True,
)

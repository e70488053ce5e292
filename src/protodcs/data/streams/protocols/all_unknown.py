"""A stream of nothing but unknown images, never reset: a method that must find its classes everywhere fails here.

Option: `unknown_count`, None for all. The known source still gives the classes.
"""

from ..protocol import Chance, Choice, Options, Pool, Protocol
from ..sample_counts import UNKNOWN_COUNT, drawn, require_some_unknown, wanted
from . import continual


def choose(pool: Pool, options: Options, chance: Chance) -> Choice:
    """Unknown images only."""
    require_some_unknown(pool)
    return drawn(pool, 0, wanted(options, "unknown_count", pool.unknown), chance)


PROTOCOL = Protocol(
    chance="all-unknown", settings={"unknown_count": UNKNOWN_COUNT}, choose=choose, order=continual.order
)

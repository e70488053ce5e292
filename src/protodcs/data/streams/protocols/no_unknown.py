"""A stream without any unknown image, never reset: a method that must find unknowns everywhere fails here.

Option: `known_count`, None for all.
"""

from ..protocol import Chance, Choice, Options, Pool, Protocol
from ..sample_counts import KNOWN_COUNT, drawn, wanted
from . import continual


def choose(pool: Pool, options: Options, chance: Chance) -> Choice:
    """Known images only, whatever unknown ones there are."""
    return drawn(pool, wanted(options, "known_count", len(pool.labels)), 0, chance)


PROTOCOL = Protocol(chance="no-unknown", settings={"known_count": KNOWN_COUNT}, choose=choose, order=continual.order)

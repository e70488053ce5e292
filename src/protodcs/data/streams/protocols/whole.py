"""No stream but a set: every known image, then every unknown one, in the order of their sources, for each corruption.

For work that must see each image once, such as the extraction of features. It has no options.
"""

import numpy as np

from ....arrays import Integers
from ..order import Draw
from ..protocol import Chance, Choice, Options, Pool, Protocol


def choose(pool: Pool, options: Options, chance: Chance) -> Choice:
    """All there is."""
    return Choice(pool.known_numbers, pool.labels, pool.unknown_numbers)


def order(choice: Choice, options: Options, draw: Draw) -> Integers:
    """The images as they stand in their sources."""
    return np.concatenate([choice.known, choice.unknown])


PROTOCOL = Protocol(chance="whole", settings={}, choose=choose, order=order, resets=True)

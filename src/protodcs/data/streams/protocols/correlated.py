"""Neighbours in time are alike: each class gathers in a few stretches of time, unknown images fall in anywhere.

Time is cut into slots. Each class spreads its images over the slots by proportions from a symmetric Dirichlet
distribution, and within a slot the classes follow one another, each in one piece. Drawing a Dirichlet vector takes
logarithms, whose last digit differs between machines. But only the resulting counts matter, and those have an exact
construction, Polya's urn: image j of a class, from 0, joins slot t with probability

    (c + number of the class's images already in t) / (slots * c + j),      c = a/b the concentration,

which gives the same distribution of counts as Dirichlet proportions followed by multinomial sampling. Times b
every weight is a whole number: one draw below slots * a + j * b, of which the first slots * a values open any slot
alike and every further b values copy the slot of one earlier image.

Options: those of `amounts`; `concentration`, above 0, smaller is more correlated, "1/10"; `slots`, None for as many as
there are classes, at most 100.
"""

from fractions import Fraction

import numpy as np

from ....arrays import Integers
from ....errors import ConfigError
from ..order import Draw, below, interleaved, permutation, shuffled
from ..protocol import Choice, Options, Protocol, Setting, concentration, positive
from ..sample_counts import AMOUNTS, by_amounts, wanted

USUAL_SLOTS = 100
# Keeps the urn's weights far below 2**63.
MOST_SLOTS = 1_000_000


def slot_count(name: str, value: object) -> int:
    """A number of slots."""
    number = positive(name, value)
    if number > MOST_SLOTS:
        raise ConfigError(f"{name} is {number}; wanted: at most {MOST_SLOTS}")
    return number


def order(choice: Choice, options: Options, draw: Draw) -> Integers:
    """The known images slot by slot and class by class, with the unknown ones mixed in uniformly."""
    mixed = permutation(draw, len(choice.known))
    classes, place, sizes = np.unique(choice.labels[mixed], return_inverse=True, return_counts=True)
    slots = wanted(options, "slots", min(max(len(classes), 1), USUAL_SLOTS))
    strength = Fraction(str(options["concentration"]))
    slot = np.empty(len(mixed), dtype=np.int64)
    for members in np.split(np.argsort(place, kind="stable"), np.cumsum(sizes)[:-1]):
        slot[members] = spread(draw, len(members), slots, strength)
    # The rank of a (slot, class) pair among all pairs, at random, decides which class comes first within a slot.
    pairs, pair = np.unique(slot * len(classes) + place, return_inverse=True)
    rank = permutation(draw, len(pairs))
    known = choice.known[mixed][np.lexsort((rank[pair], slot))]
    return interleaved(draw, known, shuffled(draw, choice.unknown))


def spread(draw: Draw, images: int, slots: int, strength: Fraction) -> Integers:
    """(images,) the slot of each image of one class, by Polya's urn."""
    opening = slots * strength.numerator
    earlier = np.arange(images, dtype=np.int64)
    value = below(draw, opening + earlier * strength.denominator)
    opens = value < opening
    slot = np.where(opens, value // strength.numerator, 0)
    model = np.where(opens, earlier, (value - opening) // strength.denominator)
    # An image copies an earlier one, which may copy a still earlier one: jumping twice as far each time, all arrive.
    while not opens[model].all():
        model = model[model]
    copied: Integers = slot[model]
    return copied


PROTOCOL = Protocol(
    chance="correlated",
    settings={**AMOUNTS, "concentration": Setting("1/10", concentration), "slots": Setting(None, slot_count)},
    choose=by_amounts,
    order=order,
)

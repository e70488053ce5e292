"""Unknown images come in bursts: nothing strange for a while, then many in a row.

After each unknown image of a burst the burst ends with probability one over the mean length, so lengths are geometric;
the last burst ends where the images do. The bursts lie between the shuffled known images, never two in one gap, and
every choice of gaps is equally likely. All of it is drawn in whole numbers.
Options: those of `amounts`; `mean_burst`, the mean length of a burst, 1 or more, "20".
"""

from fractions import Fraction

import numpy as np

from ....arrays import Integers
from ....errors import DataError
from ..order import Draw, below, permutation, placed, shuffled
from ..protocol import Choice, Options, Protocol, Setting, mean_length
from ..sample_counts import AMOUNTS, by_amounts


def order(choice: Choice, options: Options, draw: Draw) -> Integers:
    """The known images shuffled, with whole bursts of shuffled unknown ones in gaps between them."""
    known, unknown = shuffled(draw, choice.known), shuffled(draw, choice.unknown)
    if not len(unknown):
        return known
    burst = burst_numbers(draw, len(unknown), Fraction(str(options["mean_burst"])))
    bursts, gaps = int(burst[-1]) + 1, len(known) + 1
    if bursts > gaps:
        raise DataError(
            f"{bursts} bursts of unknown images do not fit into the {gaps} gaps around {len(known)} known ones: "
            f"take a longer mean_burst than {options['mean_burst']}, or fewer unknown images"
        )
    gap = np.sort(permutation(draw, gaps)[:bursts])
    # In front of an unknown image stand the known ones before its gap and the unknown ones before it.
    return placed(gap[burst] + np.arange(len(unknown)), unknown, known)


def burst_numbers(draw: Draw, images: int, mean: Fraction) -> Integers:
    """(images,) the number of the burst that each unknown image belongs to, from 0."""
    last = below(draw, np.full(images, mean.numerator, dtype=np.int64)) < mean.denominator
    numbers = np.zeros(images, dtype=np.int64)
    numbers[1:] = np.cumsum(last[:-1])
    return numbers


PROTOCOL = Protocol(
    chance="bursty",
    settings={**AMOUNTS, "mean_burst": Setting("20", mean_length)},
    choose=by_amounts,
    order=order,
)

"""The paper's protocol: one corruption after another, never a reset, known and unknown images shuffled together.

With the 10,000 test images of CIFAR-10 and the 26,032 of SVHN every corruption holds 36,032 samples, each image once.
Options: see `amounts`.
"""

import numpy as np

from ....arrays import Integers
from ..order import Draw, shuffled
from ..protocol import Choice, Options, Protocol
from ..sample_counts import AMOUNTS, by_amounts


def order(choice: Choice, options: Options, draw: Draw) -> Integers:
    """All images of the segment in a uniformly random order."""
    return shuffled(draw, np.concatenate([choice.known, choice.unknown]))


PROTOCOL = Protocol(chance="continual", settings=AMOUNTS, choose=by_amounts, order=order)

"""A logistic head that tells the two memories apart, trained on them one row at a time.

It sees the directions in which strangers differ from familiar samples where nearest neighbours only see distances. Each
sample replays a few rows of either memory, in turn and in a fixed order: no randomness, and a bounded cost.
"""

import copy
import math
from typing import Self

import numpy as np
from numpy.typing import NDArray

from . import state
from .base import required, within
from .compiled import kernel
from .config import Config

Vector = NDArray[np.float64]
Row = NDArray[np.float32]
Matrix = NDArray[np.float32]

# The offset learns so much slower than the weights: it has to average over both memories.
_OFFSET_SHARE = 0.1


def logit_twin(weights: Vector, row: Row) -> float:
    """The same without numba."""
    return float(np.dot(weights[:-1], row) + weights[-1])


@kernel("float64(float64[::1], float32[::1])", twin=logit_twin)
def logit(weights: Vector, row: Row) -> float:
    """Log-odds that `row` (d,) is familiar, by `weights` (d + 1,), of which the last is the offset."""
    total = 0.0
    for i in range(row.shape[0]):
        total += weights[i] * row[i]
    return float(total + weights[row.shape[0]])


def replay_twin(
    weights: Vector, strangers: Matrix, held: int, familiars: Matrix, kept: int, start: int, steps: int,
    rate: float, decay: float,
) -> None:  # fmt: skip
    """The same without numba."""
    scale = math.sqrt(strangers.shape[1])
    for place in range(start, start + steps):
        for truth, row in ((0.0, strangers[place % held]), (1.0, familiars[place % kept])):
            error = truth - 0.5 * (1.0 + math.tanh(0.5 * logit_twin(weights, row)))
            weights[:-1] += rate * (error * scale * row.astype(np.float64) - decay * weights[:-1])
            weights[-1] += _OFFSET_SHARE * rate * error


@kernel(
    "void(float64[::1], float32[:,::1], int64, float32[:,::1], int64, int64, int64, float64, float64)", twin=replay_twin
)
def replay(
    weights: Vector, strangers: Matrix, held: int, familiars: Matrix, kept: int, start: int, steps: int,
    rate: float, decay: float,
) -> None:  # fmt: skip
    """Gradient steps of the logistic loss on `steps` rows of either memory, from the row `start` on, around and around.

    The first `held` strangers and the first `kept` familiars take part.
    """
    width = strangers.shape[1]
    scale, left = math.sqrt(width), 1.0 - rate * decay
    for place in range(start, start + steps):
        # A stranger's step and then a familiar's, in two passes instead of four: what the first step does to the logit
        # of the second row follows from the product of the two rows.
        one, two = strangers[place % held], familiars[place % kept]
        by_one, by_two, product = 0.0, 0.0, 0.0
        for i in range(width):
            by_one += weights[i] * one[i]
            by_two += weights[i] * two[i]
            product += np.float64(one[i]) * np.float64(two[i])
        error = -1.0 / (1.0 + math.exp(-(by_one + weights[width])))
        weights[width] += _OFFSET_SHARE * rate * error
        first = rate * scale * error
        error = 1.0 - 1.0 / (1.0 + math.exp(-(left * by_two + first * product + weights[width])))
        weights[width] += _OFFSET_SHARE * rate * error
        first, second = left * first, rate * scale * error
        for i in range(width):
            weights[i] = left * left * weights[i] + first * one[i] + second * two[i]


class Head:
    """The head: `weights` (d + 1,) float64, the last of them the offset."""

    def __init__(self, width: int, config: Config):
        self.config = config
        self.weights = np.zeros(width + 1)

    def fork(self) -> Self:
        twin = copy.copy(self)
        twin.weights = self.weights.copy()
        return twin

    def export(self) -> state.Arrays:
        return {"head": self.weights}

    @classmethod
    def restored(cls, width: int, config: Config, arrays: state.Arrays) -> Self:
        head = cls(width, config)
        head.weights = within(required(arrays, "head", np.float64, (width + 1,)), "head", -1e6, 1e6).copy()
        return head

"""Linear head: a logistic regression that separates the two memories, trained one row at a time.

It finds the directions in which unknown samples differ from known ones; nearest neighbors only see distances. At every
sample it trains on a few rows of either memory, in a fixed order: no randomness, and a bounded cost.
"""

import copy
import math
from typing import Self

import numpy as np
from numpy.typing import NDArray

from .. import state
from ..base import required, within
from ..compiled import kernel
from .config import StreamDCSConfig

Vector = NDArray[np.float64]
Row = NDArray[np.float32]
Matrix = NDArray[np.float32]

# Learning rate of the offset relative to the weights. It averages over both memories, so it learns more slowly.
_OFFSET_RATE = 0.1


def logit_numpy(weights: Vector, row: Row) -> float:
    """Numpy reference."""
    return float(np.dot(weights[:-1], row) + weights[-1])


@kernel("float64(float64[::1], float32[::1])", twin=logit_numpy)
def logit(weights: Vector, row: Row) -> float:
    """Return the log-odds that `row` (d,) is known; the last of `weights` (d + 1,) is the offset."""
    total = 0.0
    for i in range(row.shape[0]):
        total += weights[i] * row[i]
    return float(total + weights[row.shape[0]])


def train_numpy(
    weights: Vector, unknown: Matrix, unknown_held: int, known: Matrix, known_held: int, start: int, steps: int,
    rate: float, decay: float,
) -> None:  # fmt: skip
    """Numpy reference."""
    scale = math.sqrt(unknown.shape[1])
    for place in range(start, start + steps):
        for truth, row in ((0.0, unknown[place % unknown_held]), (1.0, known[place % known_held])):
            error = truth - 0.5 * (1.0 + math.tanh(0.5 * logit_numpy(weights, row)))
            weights[:-1] += rate * (error * scale * row.astype(np.float64) - decay * weights[:-1])
            weights[-1] += _OFFSET_RATE * rate * error


@kernel(
    "void(float64[::1], float32[:,::1], int64, float32[:,::1], int64, int64, int64, float64, float64)", twin=train_numpy
)
def train(
    weights: Vector, unknown: Matrix, unknown_held: int, known: Matrix, known_held: int, start: int, steps: int,
    rate: float, decay: float,
) -> None:  # fmt: skip
    """Take gradient steps of the logistic loss on `steps` rows of either memory, from row `start` on, cyclically.

    Only the first `unknown_held` and `known_held` rows take part.
    """
    width = unknown.shape[1]
    scale, left = math.sqrt(width), 1.0 - rate * decay
    for place in range(start, start + steps):
        # One step on an unknown row and one on a known row, in two passes instead of four: the product of the two rows
        # gives what the first step does to the logit of the second row.
        one, two = unknown[place % unknown_held], known[place % known_held]
        by_one, by_two, product = 0.0, 0.0, 0.0
        for i in range(width):
            by_one += weights[i] * one[i]
            by_two += weights[i] * two[i]
            product += np.float64(one[i]) * np.float64(two[i])
        error = -1.0 / (1.0 + math.exp(-(by_one + weights[width])))
        weights[width] += _OFFSET_RATE * rate * error
        first = rate * scale * error
        error = 1.0 - 1.0 / (1.0 + math.exp(-(left * by_two + first * product + weights[width])))
        weights[width] += _OFFSET_RATE * rate * error
        first, second = left * first, rate * scale * error
        for i in range(width):
            weights[i] = left * left * weights[i] + first * one[i] + second * two[i]


class LinearHead:
    """The linear head: `weights` (d + 1,) float64, the last one is the offset."""

    def __init__(self, width: int, config: StreamDCSConfig):
        self.config = config
        self.weights = np.zeros(width + 1)

    def fork(self) -> Self:
        copied = copy.copy(self)
        copied.weights = self.weights.copy()
        return copied

    def export(self) -> state.Arrays:
        return {"head": self.weights}

    @classmethod
    def restored(cls, width: int, config: StreamDCSConfig, arrays: state.Arrays) -> Self:
        head = cls(width, config)
        head.weights = within(required(arrays, "head", np.float64, (width + 1,)), "head", -1e6, 1e6).copy()
        return head

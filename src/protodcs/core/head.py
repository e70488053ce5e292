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
from .compiled import inner, kernel
from .config import Config
from .recall import Recall

Vector = NDArray[np.float64]
Row = NDArray[np.float32]
Matrix = NDArray[np.float32]

# The offset learns so much slower than the weights: it has to average over both memories.
_OFFSET_SHARE = 0.1


@inner
def _logit(weights: Vector, row: Row) -> float:
    """Log-odds that `row` (d,) is familiar; the last of the weights (d + 1,) is the offset."""
    total = float(weights[row.shape[0]])
    for i in range(row.shape[0]):
        total += weights[i] * row[i]
    return total


def logit_twin(weights: Vector, row: Row) -> float:
    """The same without numba."""
    return float(np.dot(weights[:-1], row) + weights[-1])


@kernel("float64(float64[::1], float32[::1])", twin=logit_twin)
def logit(weights: Vector, row: Row) -> float:
    """Log-odds that `row` (d,) is familiar, by `weights` (d + 1,)."""
    return float(_logit(weights, row))


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
    scale = math.sqrt(width)
    for place in range(start, start + steps):
        for familiar in range(2):
            row = familiars[place % kept] if familiar else strangers[place % held]
            error = familiar - 1.0 / (1.0 + math.exp(-_logit(weights, row)))
            for i in range(width):
                weights[i] += rate * (error * scale * row[i] - decay * weights[i])
            weights[width] += _OFFSET_SHARE * rate * error


class Head:
    """The head: `weights` (d + 1,) float64, the last of them the offset."""

    def __init__(self, width: int, config: Config):
        self.config = config
        self.weights = np.zeros(width + 1)

    def look(self, centred: Row) -> float:
        """Log-odds that a centred feature is familiar."""
        return float(logit(self.weights, centred))

    def learn(self, recall: Recall, sample: int) -> None:
        """Replay the rows that are the turn of sample number `sample`."""
        config = self.config
        held, kept = recall.held
        replay(
            self.weights, recall.strangers, held, recall.familiars, kept, config.head_steps * sample,
            config.head_steps, config.head_rate, config.head_decay,
        )  # fmt: skip

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

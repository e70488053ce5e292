"""Two memories of the stream: samples that the text found strangest, and samples it found most familiar.

A new sample is compared with both. Features are kept less the stream's running mean and of unit length, so that what
all of the stream shares, its shift, says nothing. Admission is by the text's familiarity alone, never by an answer that
these memories took part in: they cannot confirm themselves.
"""

import copy
import math
from typing import Self

import numpy as np
from numpy.typing import NDArray

from . import state
from .base import check_unit, required, within
from .compiled import kernel
from .config import Config

Vector = NDArray[np.float64]
Row = NDArray[np.float32]
Matrix = NDArray[np.float32]

# The running mean of the features remembers about so many samples.
MEAN_HORIZON = 1000
# With fewer rows in either memory a comparison says nothing.
LEAST_ROWS = 5
_SHORTEST = 1e-6
# A memory starts with room for so many rows and grows by a quarter, so that a young stream stays small.
_FIRST_ROOM = 16


def centre_twin(feature: Row, mean: Vector, out: Row) -> None:
    """The same without numba."""
    gap = feature - mean
    length = math.sqrt(float(gap @ gap))
    out[:] = gap / length if length > _SHORTEST else 0.0


@kernel("void(float32[::1], float64[::1], float32[::1])", twin=centre_twin)
def centre(feature: Row, mean: Vector, out: Row) -> None:
    """The unit direction of `feature` less `mean` into `out` (d,); zero where nothing is left."""
    total = 0.0
    for i in range(feature.shape[0]):
        total += (feature[i] - mean[i]) ** 2
    length = math.sqrt(total)
    scale = 1.0 / length if length > _SHORTEST else 0.0
    for i in range(feature.shape[0]):
        out[i] = (feature[i] - mean[i]) * scale


def follow_twin(mean: Vector, feature: Row, rate: float) -> None:
    """The same without numba."""
    mean += rate * (feature - mean)


@kernel("void(float64[::1], float32[::1], float64)", twin=follow_twin)
def follow(mean: Vector, feature: Row, rate: float) -> None:
    """Move `mean` (d,) towards `feature`."""
    for i in range(mean.shape[0]):
        mean[i] += rate * (feature[i] - mean[i])


def nearest_twin(rows: Matrix, held: int, feature: Row, cosines: Vector, best: Vector) -> tuple[float, float]:
    """The same without numba."""
    count = min(held, len(best))
    largest = np.sort((rows[:held] @ feature).astype(np.float64))[::-1][:count]
    return float(largest[0]), float(largest.mean())


@kernel("Tuple((float64, float64))(float32[:,::1], int64, float32[::1], float64[::1], float64[::1])", twin=nearest_twin)
def nearest(rows: Matrix, held: int, feature: Row, cosines: Vector, best: Vector) -> tuple[float, float]:
    """The largest cosine of `feature` with the first `held` rows, and the mean of the largest few.

    `cosines` and `best` are work space; the length of the latter is how many the few are.
    """
    whole = held - held % 4
    # Four rows at a time: they share the loads of the feature, and their sums do not wait for each other.
    for row in range(0, whole, 4):
        one, two, three, four = np.float32(0.0), np.float32(0.0), np.float32(0.0), np.float32(0.0)
        for i in range(feature.shape[0]):
            one += rows[row, i] * feature[i]
            two += rows[row + 1, i] * feature[i]
            three += rows[row + 2, i] * feature[i]
            four += rows[row + 3, i] * feature[i]
        cosines[row], cosines[row + 1], cosines[row + 2], cosines[row + 3] = one, two, three, four
    for row in range(whole, held):
        dot = np.float32(0.0)
        for i in range(feature.shape[0]):
            dot += rows[row, i] * feature[i]
        cosines[row] = dot
    few = best.shape[0]
    best[:] = -2.0
    for row in range(held):
        if cosines[row] > best[0]:
            at = 0
            while at + 1 < few and best[at + 1] < cosines[row]:
                best[at] = best[at + 1]
                at += 1
            best[at] = cosines[row]
    total, count = 0.0, min(held, few)
    for i in range(few - count, few):
        total += best[i]
    return best[few - 1], total / count


@kernel("boolean(float32[:,::1], int64, float32[::1])")
def keep(rows: Matrix, slot: int, centred: Row) -> bool:
    """Put the direction `centred` (d,) into a row; False where there is none."""
    directed = False
    for i in range(centred.shape[0]):
        directed |= centred[i] != 0.0
    if directed:
        rows[slot, :] = centred
    return directed


class Recall:
    """The two memories.

    Attributes:
        mean: (d,) float64, the running mean of all features.
        strangers, familiars: (S, d) and (F, d) float32, the last centred features of each kind. They grow as there is
            need, up to the number in the settings.
        strangers_seen, familiars_seen: how many ever entered.
        held: how many strangers and familiars are remembered.
        centred: (d,) float32, the sample at hand less the mean, of unit length.
        ready: whether both hold enough to compare with.
        roomy: whether they are its own, and one more of either kind has a place.
        best, cosines: work space of a comparison.
    """

    def __init__(self, width: int, config: Config):
        self.config = config
        self.mean = np.zeros(width)
        self.strangers = np.zeros((min(_FIRST_ROOM, config.strangers), width), dtype=np.float32)
        self.familiars = np.zeros((min(_FIRST_ROOM, config.familiars), width), dtype=np.float32)
        self.strangers_seen = 0
        self.familiars_seen = 0
        self.centred = np.zeros(width, dtype=np.float32)
        self.best = np.zeros(config.nearest)
        self.cosines = np.zeros(max(config.strangers, config.familiars))
        self._shared = False
        self.recount()

    def recount(self) -> None:
        """Tell from how many ever entered how many are remembered, and whether one more has a place."""
        strangers, familiars = self.config.strangers, self.config.familiars
        self.held = held, kept = min(self.strangers_seen, strangers), min(self.familiars_seen, familiars)
        self.ready = min(held, kept) >= LEAST_ROWS
        room = min(held, strangers - 1) < len(self.strangers) and min(kept, familiars - 1) < len(self.familiars)
        self.roomy = room and not self._shared

    def make_room(self) -> None:
        """Have memories of its own, in which one more of either kind has a place."""
        if self._shared:
            self.strangers, self.familiars, self._shared = self.strangers.copy(), self.familiars.copy(), False
        self.strangers = _with_room(self.strangers, self.strangers_seen, self.config.strangers)
        self.familiars = _with_room(self.familiars, self.familiars_seen, self.config.familiars)
        self.roomy = True

    def entered(self, familiar: bool) -> None:
        """Count a sample that came into a memory."""
        if familiar:
            self.familiars_seen += 1
        else:
            self.strangers_seen += 1
        self.recount()

    def fork(self) -> Self:
        """A copy that shares the two memories until one of them grows."""
        twin = copy.copy(self)
        twin.mean, twin.centred = self.mean.copy(), self.centred.copy()
        twin._shared, twin.roomy = True, False
        return twin

    def export(self) -> state.Arrays:
        strangers, familiars = self.held
        return {
            "mean": self.mean,
            "strangers": self.strangers[:strangers],
            "familiars": self.familiars[:familiars],
            "entered": np.array([self.strangers_seen, self.familiars_seen], dtype=np.int64),
        }

    @classmethod
    def restored(cls, width: int, config: Config, arrays: state.Arrays, seen: int) -> Self:
        recall = cls(width, config)
        entered = within(required(arrays, "entered", np.int64, (2,)), "entered", 0, seen)
        recall.strangers_seen, recall.familiars_seen = int(entered[0]), int(entered[1])
        recall.recount()
        recall.mean = within(required(arrays, "mean", np.float64, (width,)), "mean", -1.001, 1.001).copy()
        for name, held in zip(("strangers", "familiars"), recall.held, strict=True):
            rows = required(arrays, name, np.float32, (held, width))
            check_unit(rows, name)
            most = getattr(config, name)
            setattr(recall, name, rows.copy() if held == most else _with_room(rows, held, most))
        recall.recount()
        return recall


def _with_room(rows: Matrix, held: int, most: int) -> Matrix:
    """The rows themselves if one more than `held` fits, up to `most`; else a larger copy."""
    if min(held, most - 1) < len(rows):
        return rows
    grown = np.zeros((min(most, max(_FIRST_ROOM, held + 1 + held // 4)), rows.shape[1]), dtype=np.float32)
    grown[: len(rows)] = rows
    return grown

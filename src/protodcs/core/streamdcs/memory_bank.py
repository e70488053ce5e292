"""Memory bank: stored samples that looked unknown, and stored samples that looked known.

A new sample is compared with both kinds. Features are stored minus the running mean of the stream, at unit length, so
that the shift that all samples share does not count. The text score alone decides what is stored, never a decision
that used this memory: it cannot confirm itself.
"""

import copy
import math
from typing import Self

import numpy as np
from numpy.typing import NDArray

from .. import state
from ..base import check_unit, required, within
from ..compiled import kernel
from .config import StreamDCSConfig

Vector = NDArray[np.float64]
Row = NDArray[np.float32]
Matrix = NDArray[np.float32]

# Number of samples that the running mean of the features remembers.
MEAN_HORIZON = 1000
# With fewer rows in either memory there are no memory signals.
MIN_ROWS = 5
_MIN_NORM = 1e-6
# First capacity of a memory in rows. It grows by a quarter when full, so that a young stream stays small.
_FIRST_CAPACITY = 16


def centre_numpy(feature: Row, mean: Vector, out: Row) -> None:
    """Numpy reference."""
    gap = feature - mean
    length = math.sqrt(float(gap @ gap))
    out[:] = gap / length if length > _MIN_NORM else 0.0


@kernel("void(float32[::1], float64[::1], float32[::1])", twin=centre_numpy)
def centre(feature: Row, mean: Vector, out: Row) -> None:
    """Write the unit direction of `feature` minus `mean` into `out` (d,); zero if the two are equal."""
    total = 0.0
    for i in range(feature.shape[0]):
        total += (feature[i] - mean[i]) ** 2
    length = math.sqrt(total)
    scale = 1.0 / length if length > _MIN_NORM else 0.0
    for i in range(feature.shape[0]):
        out[i] = (feature[i] - mean[i]) * scale


def update_mean_numpy(mean: Vector, feature: Row, rate: float) -> None:
    """Numpy reference."""
    mean += rate * (feature - mean)


@kernel("void(float64[::1], float32[::1], float64)", twin=update_mean_numpy)
def update_mean(mean: Vector, feature: Row, rate: float) -> None:
    """Move `mean` (d,) towards `feature`."""
    for i in range(mean.shape[0]):
        mean[i] += rate * (feature[i] - mean[i])


def nearest_numpy(rows: Matrix, held: int, feature: Row, cosines: Vector, best: Vector) -> tuple[float, float]:
    """Numpy reference."""
    count = min(held, len(best))
    largest = np.sort((rows[:held] @ feature).astype(np.float64))[::-1][:count]
    return float(largest[0]), float(largest.mean())


@kernel(
    "Tuple((float64, float64))(float32[:,::1], int64, float32[::1], float64[::1], float64[::1])", twin=nearest_numpy
)
def nearest(rows: Matrix, held: int, feature: Row, cosines: Vector, best: Vector) -> tuple[float, float]:
    """Return the largest cosine of `feature` with the first `held` rows, and the mean of the largest few.

    `cosines` and `best` are work space. The length of `best` is the number of cosines that the mean includes.
    """
    whole = held - held % 4
    # Four rows at a time share the loads of the feature, and their sums do not depend on each other.
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
def store(rows: Matrix, slot: int, centred: Row) -> bool:
    """Store the direction `centred` (d,) in a row. Return False if it is zero."""
    directed = False
    for i in range(centred.shape[0]):
        directed |= centred[i] != 0.0
    if directed:
        rows[slot, :] = centred
    return directed


class MemoryBank:
    """The stored samples of both kinds.

    Attributes:
        mean: (d,) float64, the running mean of all features.
        unknown, known: (U, d) and (N, d) float32, the latest centred features of each kind. They grow as needed, up to
            the numbers in the settings.
        unknown_added, known_added: number of samples that were ever stored.
        held: number of samples of either kind that are stored now.
        centred: (d,) float32, the current sample minus the mean, at unit length.
        ready: whether both kinds have enough samples for memory signals.
        has_room: whether the arrays are not shared with a copy and have room for one more sample of either kind.
        best, cosines: work space of a comparison.
    """

    def __init__(self, width: int, config: StreamDCSConfig):
        self.config = config
        self.mean = np.zeros(width)
        self.unknown = np.zeros((min(_FIRST_CAPACITY, config.unknown_memory), width), dtype=np.float32)
        self.known = np.zeros((min(_FIRST_CAPACITY, config.known_memory), width), dtype=np.float32)
        self.unknown_added = 0
        self.known_added = 0
        self.centred = np.zeros(width, dtype=np.float32)
        self.best = np.zeros(config.neighbors)
        self.cosines = np.zeros(max(config.unknown_memory, config.known_memory))
        self._shared = False
        self.recount()

    def recount(self) -> None:
        """Derive `held`, `ready` and `has_room` from how many samples were ever stored."""
        max_unknown, max_known = self.config.unknown_memory, self.config.known_memory
        self.held = unknown, known = min(self.unknown_added, max_unknown), min(self.known_added, max_known)
        self.ready = min(unknown, known) >= MIN_ROWS
        room = min(unknown, max_unknown - 1) < len(self.unknown) and min(known, max_known - 1) < len(self.known)
        self.has_room = room and not self._shared

    def make_room(self) -> None:
        """Take own arrays that have room for one more sample of either kind."""
        if self._shared:
            self.unknown, self.known, self._shared = self.unknown.copy(), self.known.copy(), False
        self.unknown = _with_room(self.unknown, self.unknown_added, self.config.unknown_memory)
        self.known = _with_room(self.known, self.known_added, self.config.known_memory)
        self.has_room = True

    def count(self, known: bool) -> None:
        """Count a sample that was stored."""
        if known:
            self.known_added += 1
        else:
            self.unknown_added += 1
        self.recount()

    def fork(self) -> Self:
        """Return a copy that shares the stored samples until it stores one itself."""
        copied = copy.copy(self)
        copied.mean, copied.centred = self.mean.copy(), self.centred.copy()
        copied._shared, copied.has_room = True, False
        return copied

    def export(self) -> state.Arrays:
        unknown, known = self.held
        return {
            "feature_mean": self.mean,
            "unknown_memory": self.unknown[:unknown],
            "known_memory": self.known[:known],
            "memory_added": np.array([self.unknown_added, self.known_added], dtype=np.int64),
        }

    @classmethod
    def restored(cls, width: int, config: StreamDCSConfig, arrays: state.Arrays, seen: int) -> Self:
        bank = cls(width, config)
        added = within(required(arrays, "memory_added", np.int64, (2,)), "memory_added", 0, seen)
        bank.unknown_added, bank.known_added = int(added[0]), int(added[1])
        bank.recount()
        mean = required(arrays, "feature_mean", np.float64, (width,))
        bank.mean = within(mean, "feature_mean", -1.001, 1.001).copy()
        for name, held in zip(("unknown", "known"), bank.held, strict=True):
            stored = f"{name}_memory"
            rows = required(arrays, stored, np.float32, (held, width))
            check_unit(rows, stored)
            capacity = getattr(config, stored)
            setattr(bank, name, rows.copy() if held == capacity else _with_room(rows, held, capacity))
        bank.recount()
        return bank


def _with_room(rows: Matrix, held: int, capacity: int) -> Matrix:
    """Return the rows themselves if one more than `held` fits, up to `capacity`; otherwise a larger copy."""
    if min(held, capacity - 1) < len(rows):
        return rows
    grown = np.zeros((min(capacity, max(_FIRST_CAPACITY, held + 1 + held // 4)), rows.shape[1]), dtype=np.float32)
    grown[: len(rows)] = rows
    return grown

"""First check: how strange a sample looks to the text prototypes, and the two gates it must pass (equation 2).

Openness is `S = 1 - max cosine`. The gates are quantiles of a sliding window of recent openness, the sample itself
included. A window keeps its values twice, in order of arrival and in order of size, so a quantile costs no sorting.
"""

import copy
import math

import numpy as np
from numpy.typing import NDArray

from .compiled import inner, kernel

Vector = NDArray[np.float64]
Row = NDArray[np.float32]
Matrix = NDArray[np.float32]


def similarities_twin(prototypes: Matrix, inverse_norms: Vector, feature: Row, out: Vector) -> int:
    out[:] = (prototypes @ feature) * inverse_norms
    return int(out.argmax())


@inner
def product(row: Row, feature: Row) -> np.float32:
    """The product of two vectors (d,), in single precision."""
    total = np.float32(0.0)
    for i in range(feature.shape[0]):
        total += row[i] * feature[i]
    return total


@inner
def four_products(
    one: Row, two: Row, three: Row, four: Row, feature: Row
) -> tuple[np.float32, np.float32, np.float32, np.float32]:
    """The same of four rows: they share the loads of the feature, and their sums do not wait for each other."""
    a, b, c, d = np.float32(0.0), np.float32(0.0), np.float32(0.0), np.float32(0.0)
    for i in range(feature.shape[0]):
        a += one[i] * feature[i]
        b += two[i] * feature[i]
        c += three[i] * feature[i]
        d += four[i] * feature[i]
    return a, b, c, d


@kernel("void(int64[::1], float32[:,::1], float32[::1], float64[::1])")
def products(chosen: NDArray[np.int64], rows: Matrix, feature: Row, out: Vector) -> None:
    """The products of `feature` (d,) with the `chosen` of some `rows` (K, d), into their places of `out` (K,)."""
    count = len(chosen)
    if count < 4:
        for k in chosen:
            out[k] = product(rows[k], feature)
        return
    for at in range(0, count, 4):
        # The last four overlap with those before: equal rows give equal bits wherever they stand.
        first = min(at, count - 4)
        j, k, m, n = chosen[first], chosen[first + 1], chosen[first + 2], chosen[first + 3]
        out[j], out[k], out[m], out[n] = four_products(rows[j], rows[k], rows[m], rows[n], feature)


@kernel("int64(float32[:,::1], float64[::1], float32[::1], float64[::1])", twin=similarities_twin)
def similarities(prototypes: Matrix, inverse_norms: Vector, feature: Row, out: Vector) -> int:
    """Cosine of `feature` (d,) with every row of `prototypes` (K, d) into `out` (K,); returns the lowest best index."""
    products(np.arange(prototypes.shape[0]), prototypes, feature, out)
    best = 0
    for k in range(prototypes.shape[0]):
        out[k] *= inverse_norms[k]
        if out[k] > out[best]:
            best = k
    return best


def invert_norms_twin(rows: Matrix, out: Vector) -> None:
    out[:] = 1.0 / np.linalg.norm(rows.astype(np.float64), axis=1)


@kernel("void(float32[:,::1], float64[::1])", twin=invert_norms_twin)
def invert_norms(rows: Matrix, out: Vector) -> None:
    """1 / ||row|| of each row of `rows` (K, d) into `out` (K,), in float64."""
    for k in range(rows.shape[0]):
        total = 0.0
        for i in range(rows.shape[1]):
            total += np.float64(rows[k, i]) * np.float64(rows[k, i])
        out[k] = 1.0 / math.sqrt(total)


def inverse_norms(rows: Matrix) -> Vector:
    """1 / ||row|| of each row of `rows` (K, d): (K,) float64."""
    out: Vector = np.empty(len(rows))
    invert_norms(rows, out)
    return out


@kernel("boolean(float32[::1], float32[::1])", "boolean(float64[::1], float32[::1])")
def to_unit(values: NDArray[np.floating], out: Row) -> bool:
    """Normalise `values` (d,) in float64 into `out`, float32; False if not finite or shorter than 1e-6."""
    total = 0.0
    for i in range(values.shape[0]):
        total += np.float64(values[i]) * np.float64(values[i])
    scale = 1.0
    if total == math.inf:  # The squares overflow: try again with the largest value as the unit.
        for i in range(values.shape[0]):
            scale = max(scale, abs(np.float64(values[i])))
        total = 0.0
        for i in range(values.shape[0]):
            total += (np.float64(values[i]) / scale) ** 2
    norm = math.sqrt(total)
    if not (1e-6 < norm * scale < math.inf):
        return False
    inverse = 1.0 / norm
    if scale == 1.0:
        for i in range(values.shape[0]):
            out[i] = np.float64(values[i]) * inverse
    else:
        for i in range(values.shape[0]):
            out[i] = np.float64(values[i]) / scale * inverse
    return True


@inner
def _place(ordered: Vector, size: int, value: float) -> int:
    """Index of the first of the `size` ordered values that is not below `value`."""
    low, high = 0, size
    while low < high:
        middle = (low + high) // 2
        if ordered[middle] < value:
            low = middle + 1
        else:
            high = middle
    return low


@kernel("float64(float64[::1], int64, float64)", strict=True)
def quantile(ordered: Vector, size: int, share: float) -> float:
    """The `share` quantile of the first `size` ordered values, interpolated linearly exactly as numpy does it."""
    position = share * (size - 1)
    low = int(math.floor(position))
    if low >= size - 1:
        return ordered[size - 1]
    fraction = position - low
    step = ordered[low + 1] - ordered[low]
    if fraction >= 0.5:
        return ordered[low + 1] - step * (1.0 - fraction)
    return ordered[low] + step * fraction


@kernel("UniTuple(float64, 2)(float64[::1])")
def mean_and_deviation(values: Vector) -> tuple[float, float]:
    """Mean and standard deviation of some values."""
    total, squares = 0.0, 0.0
    for i in range(values.shape[0]):
        total += values[i]
    mean = total / values.shape[0]
    for i in range(values.shape[0]):
        squares += (values[i] - mean) ** 2
    return float(mean), math.sqrt(squares / values.shape[0])


@kernel("int64(float64[::1], float64[::1], int64, float64)")
def push(arrivals: Vector, ordered: Vector, pushed: int, value: float) -> int:
    """Add `value` to a window that took `pushed` values so far, dropping the oldest when full; returns its new size."""
    capacity = arrivals.shape[0]
    size = min(pushed, capacity)
    slot = pushed % capacity
    if size == capacity:
        size -= 1
        gap = _place(ordered, capacity, arrivals[slot])
        for i in range(gap, size):
            ordered[i] = ordered[i + 1]
    place = _place(ordered, size, value)
    for i in range(size, place, -1):
        ordered[i] = ordered[i - 1]
    ordered[place] = value
    arrivals[slot] = value
    return size + 1


@kernel(
    "Tuple((int64, float64, float64, float64))(float32[:,::1], float64[::1], float32[::1], float64[::1], "
    "float64[::1], float64[::1], int64, float64, float64)"
)
def look(
    prototypes: Matrix,
    inverse_norms: Vector,
    feature: Row,
    cosines: Vector,
    arrivals: Vector,
    ordered: Vector,
    pushed: int,
    low: float,
    high: float,
) -> tuple[int, float, float, float]:
    """The first check in one pass: best class, openness, and two quantiles of the window that now includes it."""
    best = similarities(prototypes, inverse_norms, feature, cosines)
    openness = 1.0 - float(cosines[best])
    size = push(arrivals, ordered, pushed, openness)
    return best, openness, float(quantile(ordered, size, low)), float(quantile(ordered, size, high))


class Window:
    """The most recent values of a number, by arrival and by size."""

    def __init__(self, capacity: int):
        self.arrivals = np.zeros(capacity)
        self.ordered = np.zeros(capacity)
        self.pushed = 0

    @property
    def size(self) -> int:
        return min(self.pushed, len(self.arrivals))

    def push(self, value: float) -> None:
        push(self.arrivals, self.ordered, self.pushed, value)
        self.pushed += 1

    def quantile(self, share: float) -> float:
        return quantile(self.ordered, self.size, share)

    def fork(self) -> "Window":
        twin = copy.copy(self)
        twin.arrivals, twin.ordered = self.arrivals.copy(), self.ordered.copy()
        return twin

    def make_room(self, capacity: int) -> None:
        """Let a window hold more values, before it is full for the first time."""
        arrivals, ordered = np.zeros((2, capacity))
        arrivals[: len(self.arrivals)], ordered[: len(self.ordered)] = self.arrivals, self.ordered
        self.arrivals, self.ordered = arrivals, ordered

    def restore(self, values: NDArray[np.float64], pushed: int) -> None:
        self.arrivals[: len(values)] = values
        self.ordered[: len(values)] = np.sort(values)
        self.pushed = pushed

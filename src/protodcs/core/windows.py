"""Sliding windows over a number, with quantiles that cost no sorting.

A window keeps its values twice: in order of arrival and sorted.
"""

import copy
import math

import numpy as np
from numpy.typing import NDArray

from .compiled import inner, kernel

Vector = NDArray[np.float64]


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

    def restore(self, values: NDArray[np.float64], pushed: int) -> None:
        self.arrivals[: len(values)] = values
        self.ordered[: len(values)] = np.sort(values)
        self.pushed = pushed

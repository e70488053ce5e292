"""Sliding windows over a number, with quantiles that cost no sorting.

A window keeps its values twice: in order of arrival and sorted.
"""

import copy
import math

import numpy as np

from ...arrays import Floats


class Window:
    """The most recent values of a number.

    Attributes:
        arrivals: (capacity,) the values in order of arrival; the oldest one is replaced first.
        ordered: (capacity,) the same values in ascending order.
        pushed: how many values were ever added.
    """

    def __init__(self, capacity: int):
        self.arrivals: Floats = np.zeros(capacity)
        self.ordered: Floats = np.zeros(capacity)
        self.pushed = 0

    @classmethod
    def over(cls, arrivals: Floats, ordered: Floats, pushed: int) -> "Window":
        """Return a window that keeps its values in these arrays."""
        window = object.__new__(cls)
        window.arrivals, window.ordered, window.pushed = arrivals, ordered, pushed
        return window

    @property
    def size(self) -> int:
        """How many values the window holds."""
        return min(self.pushed, len(self.arrivals))

    @property
    def sorted(self) -> Floats:
        """The values that the window holds, in ascending order."""
        return self.ordered[: self.size]

    def push(self, value: float) -> None:
        """Add a value. A full window drops its oldest one."""
        ordered, size, slot = self.ordered, self.size, self.pushed % len(self.arrivals)
        if size == len(ordered):
            gap = ordered.searchsorted(self.arrivals[slot])
            size -= 1
            ordered[gap:size] = ordered[gap + 1 :]
        place = ordered[:size].searchsorted(value)
        ordered[place + 1 : size + 1] = ordered[place:size]
        ordered[place] = value
        self.arrivals[slot] = value
        self.pushed += 1

    def quantile(self, fraction: float) -> float:
        """Return this quantile of the values, interpolated linearly exactly as numpy does it."""
        last = self.size - 1
        position = fraction * last
        low = math.floor(position)
        if low >= last:
            return float(self.ordered[last])
        below, above = float(self.ordered[low]), float(self.ordered[low + 1])
        part = position - low
        return above - (above - below) * (1.0 - part) if part >= 0.5 else below + (above - below) * part

    def fork(self) -> "Window":
        """Return a copy."""
        copied = copy.copy(self)
        copied.arrivals, copied.ordered = self.arrivals.copy(), self.ordered.copy()
        return copied

    def restore(self, values: Floats, pushed: int) -> None:
        """Take over the `arrivals` of a stored window."""
        self.arrivals[: len(values)] = values
        self.ordered[: len(values)] = np.sort(values)
        self.pushed = pushed

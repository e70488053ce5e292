"""Figures over seeds: means with intervals, and differences of two methods that saw the same streams.

An interval needs two seeds; from one seed none is made up. A figure that cannot be said for one seed (NaN) cannot be
said for their mean.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

CONFIDENCE = 0.95
# Bisection halves the bracket each time; a hundred halvings reach the last bit from any start.
_BISECTIONS = 100


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean over seeds with its interval.

    Attributes:
        mean: NaN without values, or where one of them is NaN.
        low, high: the ends of the 95 % interval; NaN with less than two seeds.
        seeds: how many values stand behind it.
    """

    mean: float
    low: float
    high: float
    seeds: int

    @property
    def has_interval(self) -> bool:
        """Whether more than one seed speaks."""
        return not math.isnan(self.low)

    @property
    def half(self) -> float:
        """Half the width of the interval."""
        return (self.high - self.low) / 2

    def holds(self, value: float) -> bool:
        """Whether `value` lies in the interval; never, where there is none."""
        return self.low <= value <= self.high


def estimate(values: Sequence[float], confidence: float = CONFIDENCE) -> Estimate:
    """The mean of `values` and its interval by Student's t.

    >>> estimate([0.5])
    Estimate(mean=0.5, low=nan, high=nan, seeds=1)
    >>> estimate([1.0, 3.0]).mean
    2.0
    """
    count = len(values)
    mean = math.fsum(values) / count if count else math.nan
    if count < 2 or math.isnan(mean):
        return Estimate(mean, math.nan, math.nan, count)
    deviation = math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (count - 1))
    half = student_quantile(0.5 + confidence / 2, count - 1) * deviation / math.sqrt(count)
    return Estimate(mean, mean - half, mean + half, count)


def paired(first: Mapping[int, float], second: Mapping[int, float]) -> Estimate:
    """The mean of `first - second` over the seeds that both have, with its interval.

    >>> paired({0: 0.5, 1: 0.75}, {0: 0.25, 2: 0.5})
    Estimate(mean=0.25, low=nan, high=nan, seeds=1)
    """
    return estimate([first[seed] - second[seed] for seed in sorted(first.keys() & second.keys())])


def student_quantile(share: float, freedom: int) -> float:
    """The value below which Student's t with `freedom` degrees of freedom falls with probability `share`.

    >>> round(student_quantile(0.975, 4), 3)
    2.776
    """
    if share < 0.5:
        return -student_quantile(1 - share, freedom)
    high = 1.0
    while student_share(high, freedom) < share:
        high *= 2
    low = 0.0
    for _ in range(_BISECTIONS):
        middle = 0.5 * (low + high)
        if student_share(middle, freedom) < share:
            low = middle
        else:
            high = middle
    return 0.5 * (low + high)


def student_share(value: float, freedom: int) -> float:
    """P(t <= value): for whole degrees of freedom a finite sum in the angle atan(value / sqrt(freedom))."""
    angle = math.atan(value / math.sqrt(freedom))
    sine, square = math.sin(angle), math.cos(angle) ** 2
    odd = freedom % 2
    term = math.cos(angle) if odd else 1.0
    total = term if freedom > 1 else 0.0
    for step in range(2 + odd, freedom - 1, 2):
        term *= square * (step - 1) / step
        total += term
    inside = (angle + sine * total) * 2 / math.pi if odd else sine * total
    return 0.5 + 0.5 * inside

"""Class baseline: the text score compares each class's score with what unknown images usually give it.

Some classes are close to every image and some to none, so a cosine means little by itself. Each class has the mean and
variance of its centred cosine over samples that look unknown. The text score is the largest score over the classes,
each minus its mean and divided by its relative deviation. With few unknown-looking samples, or few classes, the
baseline of all classes counts instead: the score starts as a plain maximum and becomes specific with evidence.
"""

import numpy as np
from numpy.typing import NDArray

from ...arrays import Floats
from .. import state
from ..arena import Arena, Layout
from ..state_checks import required, within
from .constants import BASELINE_HORIZON, BASELINE_PRIOR

# Rows of `moments`.
_MEAN, _VARIANCE, MOMENTS = range(3)
# Places in `pool`.
POOL_MEAN, POOL_VARIANCE, POOLED = range(3)
_LEAST_VARIANCE = 1e-10
_LARGEST = 1e6


def layout(classes: int) -> Layout:
    """Return the arrays of the baselines of this number of classes."""
    return {
        "baseline_moments": (np.float64, (MOMENTS, classes)),
        "baseline_weights": (np.float64, (classes,)),
        "baseline_pool": (np.float64, (POOLED,)),
    }


class ClassBaseline:
    """The baselines of K classes.

    Attributes:
        moments: (2, K) float64, mean and variance of the score of each class.
        weights: (K,) float64, the weight of the samples behind them.
        pool: (2,) float64, mean and variance over all samples and classes.
        many: 0 to 1, how far the number of classes counts as many. Few classes have no baseline of their own.
    """

    def __init__(self, arena: Arena, many: float):
        self.moments = arena["baseline_moments"]
        self.weights = arena["baseline_weights"]
        self.pool = arena["baseline_pool"]
        self.many = many

    def text_score(self, scores: Floats) -> float:
        """Return the largest score over the classes, by their baselines; `scores` (K,) are centred cosines in units."""
        own = self.many * self.weights / (self.weights + BASELINE_PRIOR)
        means, variances, common = self.moments[_MEAN], self.moments[_VARIANCE], self.pool[POOL_VARIANCE]
        total = float(own.sum())
        middle = float(own @ means) / total if total else 0.0
        if common <= 0.0:
            return float((scores - own * (means - middle)).max())
        ratio = common / np.maximum(own * variances + (1.0 - own) * common, _LEAST_VARIANCE)
        return float(((scores - own * (means - middle)) * np.sqrt(ratio)).max())

    def learn(self, scores: Floats, weight: float, count: int) -> None:
        """Update all baselines by one sample of this weight, the `count`-th one."""
        np.minimum(self.weights + weight, BASELINE_HORIZON, out=self.weights)
        rates, moments = weight / self.weights, self.moments
        gap = scores - moments[_MEAN]
        moments[_MEAN] += rates * gap
        moments[_VARIANCE] += rates * (gap * (scores - moments[_MEAN]) - moments[_VARIANCE])
        rate, pool = 1.0 / min(count, BASELINE_HORIZON), self.pool
        pool[POOL_MEAN] += rate * (float(scores.mean()) - pool[POOL_MEAN])
        pool[POOL_VARIANCE] += rate * (float(((scores - pool[POOL_MEAN]) ** 2).mean()) - pool[POOL_VARIANCE])

    # Classes, restore.

    def take_classes(self, other: "ClassBaseline", kept: NDArray[np.int64]) -> None:
        """Take over the classes `kept` of another baseline as the first ones."""
        self.moments[:, : len(kept)] = other.moments[:, kept]
        self.weights[: len(kept)] = other.weights[kept]
        self.pool[:] = other.pool

    def restore(self, arrays: state.Arrays) -> None:
        """Take over exported arrays. Raise StateError for anything that cannot have been exported."""
        moments = required(arrays, "baseline_moments", np.float64, self.moments.shape)
        weights = required(arrays, "baseline_weights", np.float64, self.weights.shape)
        pool = required(arrays, "baseline_pool", np.float64, self.pool.shape)
        within(moments, "baseline_moments", -_LARGEST, _LARGEST)
        within(moments[_VARIANCE], "baseline_moments", -1e-6, _LARGEST)
        within(weights, "baseline_weights", 0.0, BASELINE_HORIZON)
        within(pool, "baseline_pool", -_LARGEST, _LARGEST)
        within(pool[POOL_VARIANCE:], "baseline_pool", 0.0, _LARGEST)
        self.moments[:], self.weights[:], self.pool[:] = moments, weights, pool

"""Class baseline: the text score compares each class's cosine with what unknown images usually give it.

Some classes are close to every image and some to none, so a cosine means little by itself. Each class has the mean and
variance of its cosine over samples that look unknown. The text score is the largest z-score over the classes, once of
the raw cosines and once of the centred ones (minus the sample's mean cosine). With few unknown-looking samples the
baseline of all classes counts instead: the score starts as a plain maximum cosine and becomes specific with evidence.
"""

import numpy as np
from numpy.typing import NDArray

from ...arrays import Floats
from .. import state
from ..arena import Arena, Layout
from ..state_checks import required, within
from .constants import BASELINE_HORIZON, BASELINE_PRIOR

# Rows of `moments`.
_RAW_MEAN, _RAW_VARIANCE, _CENTRED_MEAN, _CENTRED_VARIANCE, MOMENTS = range(5)
# Places in `pool`.
POOL_MEAN, POOL_VARIANCE, POOL_CENTRED_VARIANCE, POOLED = range(4)
_LEAST_VARIANCE = 1e-10


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
        moments: (4, K) float64, mean and variance of the raw and of the centred cosine of each class.
        weights: (K,) float64, the weight of the samples behind them.
        pool: (3,) float64, over all samples and classes: mean and variance of the cosines, variance of the centred.
    """

    def __init__(self, arena: Arena):
        self.moments = arena["baseline_moments"]
        self.weights = arena["baseline_weights"]
        self.pool = arena["baseline_pool"]

    @property
    def classes(self) -> int:
        """Number of classes."""
        return len(self.weights)

    def z_scores(self, cosines: Floats) -> tuple[float, float]:
        """Return the largest z-score of the raw and of the centred cosines (K,)."""
        own = self.weights / (self.weights + BASELINE_PRIOR)
        rest, moments = 1.0 - own, self.moments
        mean = own * moments[_RAW_MEAN] + rest * self.pool[POOL_MEAN]
        variance = own * moments[_RAW_VARIANCE] + rest * self.pool[POOL_VARIANCE]
        raw = (cosines - mean) / np.sqrt(np.maximum(variance, _LEAST_VARIANCE))
        mean = own * moments[_CENTRED_MEAN]
        variance = own * moments[_CENTRED_VARIANCE] + rest * self.pool[POOL_CENTRED_VARIANCE]
        centred = (cosines - cosines.mean() - mean) / np.sqrt(np.maximum(variance, _LEAST_VARIANCE))
        return float(raw.max()), float(centred.max())

    def learn(self, cosines: Floats, weight: float, count: int) -> None:
        """Update all baselines by one sample of this weight, the `count`-th one."""
        average = float(cosines.mean())
        centred = cosines - average
        np.minimum(self.weights + weight, BASELINE_HORIZON, out=self.weights)
        rates, moments = weight / self.weights, self.moments
        for mean, variance, values in (
            (_RAW_MEAN, _RAW_VARIANCE, cosines),
            (_CENTRED_MEAN, _CENTRED_VARIANCE, centred),
        ):
            gap = values - moments[mean]
            moments[mean] += rates * gap
            moments[variance] += rates * (gap * (values - moments[mean]) - moments[variance])
        rate, pool = 1.0 / min(count, BASELINE_HORIZON), self.pool
        pool[POOL_MEAN] += rate * (average - pool[POOL_MEAN])
        pool[POOL_VARIANCE] += rate * (float(((cosines - pool[POOL_MEAN]) ** 2).mean()) - pool[POOL_VARIANCE])
        pool[POOL_CENTRED_VARIANCE] += rate * (float((centred**2).mean()) - pool[POOL_CENTRED_VARIANCE])

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
        # Cosines of float32 features may exceed one by rounding errors.
        within(moments, "baseline_moments", -4.1, 4.1)
        within(moments[[_RAW_VARIANCE, _CENTRED_VARIANCE]], "baseline_moments", -1e-6, 4.1)
        within(weights, "baseline_weights", 0.0, BASELINE_HORIZON)
        within(pool, "baseline_pool", -1.1, 4.1)
        within(pool[POOL_VARIANCE:], "baseline_pool", 0.0, 4.1)
        self.moments[:], self.weights[:], self.pool[:] = moments, weights, pool

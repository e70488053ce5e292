"""Class baseline: the text score, which compares each class's cosine with what the stream usually gives it.

Some classes are close to every image and some to none, and a shift moves all of them, so a cosine means little by
itself. Each class's cosine is standardised by its own mean and variance over the stream, once as it is and once minus
the sample's mean cosine. The text score is the largest of these z-scores. The noise floor is the score that noise
reaches: unknown samples are near it, known samples well above. No label and no earlier decision enters.
"""

import copy
import math
from typing import Self

import numpy as np
from numpy.typing import NDArray

from .. import state
from ..base import Feature, required, within
from ..compiled import kernel
from ..vectors import similarities
from .config import StreamDCSConfig

Vector = NDArray[np.float64]
Moments = NDArray[np.float64]

# Places in `pool`, the numbers about all classes: mean cosine, variance of the cosines within a sample, number of
# samples, and the mean squares of the z-scores, raw and centred, without the largest.
_MEAN, _SPREAD, _SEEN, _RAW, _CENTRED, POOLED = range(6)
# The pool averages over all classes, so it may forget faster than a class. Samples.
_POOL_HORIZON = 1000.0
# The variance of a class starts as if this many samples had come before.
_VARIANCE_PRIOR = 5.0
# Up to this many samples the mean stands for the median; then each sample moves it by a step that fits a Gaussian.
_MEDIAN_FROM, _MEDIAN_STEP = 10.0, math.sqrt(0.5 * math.pi)
# Number of random vectors behind the noise floor. They come from a fixed seed.
_NOISE = 256
_LEAST = 1e-12
# The noise floor of a single class: there are no others to compare noise with.
NO_NOISE_FLOOR = _LEAST


def score_classes_numpy(
    cosines: Vector, seen: Vector, moments: Moments, prior: float, pool: Vector
) -> tuple[float, float, int]:
    """Numpy reference."""
    mean, spread = float(cosines.mean()), float(cosines.var())
    pool[_SEEN] += 1.0
    rate = 1.0 / min(pool[_SEEN], _POOL_HORIZON)
    pool[_MEAN] += rate * (mean - pool[_MEAN])
    pool[_SPREAD] += rate * (spread - pool[_SPREAD])
    own = seen / (seen + prior)
    raw = cosines - (own * moments[0] + (1.0 - own) * pool[_MEAN])
    raw /= np.sqrt(own * moments[1] + (1.0 - own) * pool[_SPREAD] + _LEAST)
    centred = cosines - mean - own * moments[2]
    centred /= np.sqrt(own * moments[3] + (1.0 - own) * pool[_SPREAD] + _LEAST)
    if len(cosines) > 1:
        for at, values in ((_RAW, raw), (_CENTRED, centred)):
            others = (float(values @ values) - float(values.max()) ** 2) / (len(values) - 1)
            pool[at] += rate * (others - pool[at])
    above = cosines - (own * moments[4] + (1.0 - own) * pool[_MEAN])
    return float(raw.max()), float(centred.max()), int(above.argmax())


@kernel(
    "Tuple((float64, float64, int64))(float64[::1], float64[::1], float64[:,::1], float64, float64[::1])",
    twin=score_classes_numpy,
)
def score_classes(
    cosines: Vector, seen: Vector, moments: Moments, prior: float, pool: Vector
) -> tuple[float, float, int]:
    """Return the largest z-score of `cosines` (K,), raw and centred, and the top class; update `pool` (POOLED,).

    `moments` (5, K) are mean and variance of each class's cosine and of its centred cosine, and the median of its
    cosine, from `seen` (K,) samples; the pool counts as `prior` samples. The top class has the cosine farthest above
    its median: a class that a shift raises for all samples is often the nearest class but rarely the top class.
    """
    classes = cosines.shape[0]
    total, squares = 0.0, 0.0
    for k in range(classes):
        total += cosines[k]
    mean = total / classes
    for k in range(classes):
        squares += (cosines[k] - mean) ** 2
    pool[_SEEN] += 1.0
    rate = 1.0 / min(pool[_SEEN], _POOL_HORIZON)
    pool[_MEAN] += rate * (mean - pool[_MEAN])
    pool[_SPREAD] += rate * (squares / classes - pool[_SPREAD])
    best_raw, best_centred, raw_squares, centred_squares = -math.inf, -math.inf, 0.0, 0.0
    for k in range(classes):
        own = seen[k] / (seen[k] + prior)
        rest = 1.0 - own
        raw = cosines[k] - (own * moments[0, k] + rest * pool[_MEAN])
        raw /= math.sqrt(own * moments[1, k] + rest * pool[_SPREAD] + _LEAST)
        centred = cosines[k] - mean - own * moments[2, k]
        centred /= math.sqrt(own * moments[3, k] + rest * pool[_SPREAD] + _LEAST)
        best_raw, best_centred = max(best_raw, raw), max(best_centred, centred)
        raw_squares += raw * raw
        centred_squares += centred * centred
    # A loop of its own, because the index of a maximum would keep the loop above from being vectorised.
    top_class, highest = 0, -math.inf
    for k in range(classes):
        own = seen[k] / (seen[k] + prior)
        above = cosines[k] - (own * moments[4, k] + (1.0 - own) * pool[_MEAN])
        if above > highest:
            top_class, highest = k, above
    if classes > 1:
        pool[_RAW] += rate * ((raw_squares - best_raw * best_raw) / (classes - 1) - pool[_RAW])
        pool[_CENTRED] += rate * ((centred_squares - best_centred * best_centred) / (classes - 1) - pool[_CENTRED])
    return best_raw, best_centred, top_class


@kernel("float64(float64[::1], float64[::1], float64)")
def expected_noise_floor(noise_maxima: Vector, pool: Vector, centred_weight: float) -> float:
    """Return the noise floor: the text score that noise reaches, given the z-scores of all but the best class."""
    raw, centred = noise_maxima[0] * math.sqrt(pool[_RAW]), noise_maxima[1] * math.sqrt(pool[_CENTRED])
    return max((1.0 - centred_weight) * raw + centred_weight * centred, NO_NOISE_FLOOR)


@kernel("Tuple((float64, int64))(float64[::1], float64[::1], float64[:,::1], float64, float64[::1], float64)")
def score_text(
    cosines: Vector, seen: Vector, moments: Moments, prior: float, pool: Vector, centred_weight: float
) -> tuple[float, int]:
    """Return the text score and the top class of a sample with these `cosines` (K,), and update `pool`."""
    raw, centred, top_class = score_classes(cosines, seen, moments, prior, pool)
    return (1.0 - centred_weight) * raw + centred_weight * centred, top_class


def update_baseline_numpy(cosines: Vector, seen: Vector, moments: Moments, horizon: float) -> None:
    """Numpy reference."""
    seen += 1.0
    rate, slow = 1.0 / np.minimum(seen, horizon), 1.0 / np.minimum(seen + _VARIANCE_PRIOR, horizon)
    step = _MEDIAN_STEP * rate * np.sqrt(moments[1])
    median = moments[4] + np.copysign(step, cosines - moments[4])
    for mean, variance, values in (
        (moments[0], moments[1], cosines),
        (moments[2], moments[3], cosines - cosines.mean()),
    ):
        first = seen == 1.0
        mean[first] = values[first]
        gap = values - mean
        mean += rate * gap
        variance += slow * (gap * gap - variance)
    moments[4] = np.where(seen < _MEDIAN_FROM, moments[0], median)


@kernel("void(float64[::1], float64[::1], float64[:,::1], float64)", twin=update_baseline_numpy)
def update_baseline(cosines: Vector, seen: Vector, moments: Moments, horizon: float) -> None:
    """Update the baseline of every class by the `cosines` (K,) of one sample; it remembers `horizon` samples."""
    classes = cosines.shape[0]
    total = 0.0
    for k in range(classes):
        total += cosines[k]
    mean = total / classes
    for k in range(classes):
        seen[k] += 1.0
        rate, slow = 1.0 / min(seen[k], horizon), 1.0 / min(seen[k] + _VARIANCE_PRIOR, horizon)
        raw, centred = cosines[k], cosines[k] - mean
        if seen[k] == 1.0:
            moments[0, k], moments[2, k] = raw, centred
        step = _MEDIAN_STEP * rate * math.sqrt(moments[1, k])
        gap = raw - moments[0, k]
        moments[0, k] += rate * gap
        moments[1, k] += slow * (gap * gap - moments[1, k])
        gap = centred - moments[2, k]
        moments[2, k] += rate * gap
        moments[3, k] += slow * (gap * gap - moments[3, k])
        if seen[k] < _MEDIAN_FROM:
            moments[4, k] = moments[0, k]
        else:
            # copysign instead of a branch, which would be mispredicted half of the time.
            moments[4, k] += math.copysign(step, raw - moments[4, k])


def noise_maxima(entry: Feature) -> Vector:
    """Return the mean largest z-score of random vectors, raw and centred: (2,).

    It increases with the number of classes and decreases with their similarity to each other.
    """
    rows = entry.astype(np.float64)
    rows -= rows.mean(axis=0)
    spread = np.sqrt(np.einsum("kd,kd->k", rows, rows) + _LEAST)
    numbers = np.random.Generator(np.random.Philox(key=np.zeros(2, dtype=np.uint64)))
    largest = np.zeros(2)
    cosines, none = np.empty(len(entry)), np.ones(len(entry))
    for noise in numbers.standard_normal((_NOISE, entry.shape[1]), dtype=np.float32):
        similarities(entry, none, noise, cosines)
        largest += cosines.max(), ((cosines - cosines.mean()) / spread).max()
    return np.maximum(largest / _NOISE, 0.0)


class ClassBaseline:
    """What the stream usually gives each of K classes.

    Attributes:
        seen: (K,) float64, number of samples behind each class.
        moments: (5, K) float64, mean and variance of its cosine, of its centred cosine, and the median of its cosine,
            which neither its own samples nor a minority of unknown samples can move far.
        pool: (POOLED,) float64, the same over all classes.
        noise_maxima: (2,) float64, see `noise_maxima`.
        noise_floor: the text score that noise reaches.
    """

    def __init__(self, entry: Feature, config: StreamDCSConfig, measured: Vector | None = None):
        self.config = config
        self.seen = np.zeros(len(entry))
        self.moments = np.zeros((5, len(entry)))
        self.pool = np.zeros(POOLED)
        self.noise_maxima = noise_maxima(entry) if measured is None else measured
        self.noise_floor = self._measure_noise_floor()

    @property
    def prior(self) -> float:
        """The weight of the pool in the baseline of each class, in samples."""
        return self.config.baseline_prior if self.config.class_baseline else math.inf

    def _measure_noise_floor(self) -> float:
        return float(expected_noise_floor(self.noise_maxima, self.pool, self.config.centred_weight))

    def fork(self) -> Self:
        copied = copy.copy(self)
        copied.seen, copied.moments, copied.pool = self.seen.copy(), self.moments.copy(), self.pool.copy()
        return copied

    def with_classes(self, entry: Feature, kept: NDArray[np.int64]) -> "ClassBaseline":
        """Return the baseline for the prototypes `entry`: first the classes `kept`, then new ones."""
        copied = ClassBaseline(entry, self.config)
        copied.seen[: len(kept)] = self.seen[kept]
        copied.moments[:, : len(kept)] = self.moments[:, kept]
        if len(kept) > 1:  # The variance within a sample is undefined for a single class.
            copied.pool = self.pool
        copied.noise_floor = copied._measure_noise_floor()
        return copied

    def export(self) -> state.Arrays:
        return {
            "baseline_seen": self.seen,
            "baseline_moments": self.moments,
            "baseline_pool": self.pool,
            "noise_maxima": self.noise_maxima,
        }

    @classmethod
    def restored(cls, entry: Feature, config: StreamDCSConfig, arrays: state.Arrays) -> Self:
        classes = len(entry)
        baseline = cls(entry, config, required(arrays, "noise_maxima", np.float64, (2,)).copy())
        baseline.seen = within(
            required(arrays, "baseline_seen", np.float64, (classes,)), "baseline_seen", 0.0, 2.0**62
        ).copy()
        baseline.moments = required(arrays, "baseline_moments", np.float64, (5, classes)).copy()
        baseline.pool = within(
            required(arrays, "baseline_pool", np.float64, (POOLED,)), "baseline_pool", -1.01, 2.0**62
        ).copy()
        within(baseline.noise_maxima, "noise_maxima", 0.0, 100.0)
        within(baseline.moments[::2], "baseline_moments", -2.01, 2.01)
        within(baseline.moments[1::2], "baseline_moments", 0.0, 16.01)
        within(baseline.pool[1:], "baseline_pool", 0.0, 2.0**62)
        baseline.noise_floor = baseline._measure_noise_floor()
        return baseline

"""Familiarity by the text alone: how far a sample's best class stands out from what the stream usually shows it.

Some classes are close to everything and some to nothing, and a shift moves them all, so a cosine means little by
itself. Each class's cosine is therefore measured against its own background: its mean and variance over the stream,
once as it is and once less the sample's mean cosine. What noise would reach by chance, the level, gives the scale a
zero point: strangers lie near it, known samples well above. No label and no earlier answer enters.
"""

import copy
import math
from typing import Self

import numpy as np
from numpy.typing import NDArray

from . import state
from .base import Feature, required, within
from .compiled import kernel
from .config import Config
from .first_check import similarities

Vector = NDArray[np.float64]
Moments = NDArray[np.float64]

# Where the numbers about all classes stand in `pool`: the mean cosine, the spread of cosines within a sample, how many
# samples they come from, and the mean squares of standardised cosines, raw and centred, without the largest.
_MEAN, _SPREAD, _SEEN, _RAW, _CENTRED, POOLED = range(6)
# The pool forgets faster than a class: it averages over all of them.
_POOL_HORIZON = 1000.0
# A class's first variances come from few samples: they move as if so many had come before.
_VARIANCE_PRIOR = 5.0
# A median of few samples is their mean; later each sample moves it by a step that suits a Gaussian of its spread.
_MEDIAN_FROM, _MEDIAN_STEP = 10.0, math.sqrt(0.5 * math.pi)
# Directionless vectors that measure the level, from a fixed stream of numbers.
_NOISE = 256
_LEAST = 1e-12
# The level of a single class, which noise has nothing to be the best of.
NO_LEVEL = _LEAST


def stand_out_twin(
    cosines: Vector, seen: Vector, moments: Moments, prior: float, pool: Vector
) -> tuple[float, float, int]:
    """The same without numba."""
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
    twin=stand_out_twin,
)
def stand_out(cosines: Vector, seen: Vector, moments: Moments, prior: float, pool: Vector) -> tuple[float, float, int]:
    """The largest standardised cosine, raw and centred, of `cosines` (K,); `pool` (POOLED,) takes the sample in.

    `moments` (5, K) are mean and variance of each class's cosine and of its centred cosine, and the median of its
    cosine, known from `seen` (K,) samples; they count against `prior` samples of the pool. The third number is the
    foremost class, whose cosine lies farthest above its median: a class that a shift lifts for all samples is the best
    of many and the foremost of few.
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
    # Apart from the loop above, which runs in vector lanes: the place of a maximum does not.
    foremost, highest = 0, -math.inf
    for k in range(classes):
        own = seen[k] / (seen[k] + prior)
        above = cosines[k] - (own * moments[4, k] + (1.0 - own) * pool[_MEAN])
        if above > highest:
            foremost, highest = k, above
    if classes > 1:
        pool[_RAW] += rate * ((raw_squares - best_raw * best_raw) / (classes - 1) - pool[_RAW])
        pool[_CENTRED] += rate * ((centred_squares - best_centred * best_centred) / (classes - 1) - pool[_CENTRED])
    return best_raw, best_centred, foremost


@kernel("float64(float64[::1], float64[::1], float64)")
def noise_level(chance: Vector, pool: Vector, centred_weight: float) -> float:
    """N: the familiarity that noise would have. Other classes' cosines give its width; own classes widen it."""
    raw, centred = chance[0] * math.sqrt(pool[_RAW]), chance[1] * math.sqrt(pool[_CENTRED])
    return max((1.0 - centred_weight) * raw + centred_weight * centred, NO_LEVEL)


@kernel("Tuple((float64, int64))(float64[::1], float64[::1], float64[:,::1], float64, float64[::1], float64)")
def stand_by_text(
    cosines: Vector, seen: Vector, moments: Moments, prior: float, pool: Vector, centred_weight: float
) -> tuple[float, int]:
    """T: the familiarity of a sample with these `cosines` (K,), of which `pool` takes note; and its foremost class."""
    raw, centred, foremost = stand_out(cosines, seen, moments, prior, pool)
    return (1.0 - centred_weight) * raw + centred_weight * centred, foremost


def blend_in_twin(cosines: Vector, seen: Vector, moments: Moments, horizon: float) -> None:
    """The same without numba."""
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


@kernel("void(float64[::1], float64[::1], float64[:,::1], float64)", twin=blend_in_twin)
def blend_in(cosines: Vector, seen: Vector, moments: Moments, horizon: float) -> None:
    """Let every class's background take in the `cosines` (K,) of one sample, remembering about `horizon` samples."""
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
            # A branch here would be guessed wrong every other time.
            moments[4, k] += math.copysign(step, raw - moments[4, k])


def chance(entry: Feature) -> Vector:
    """What the largest standardised cosine, raw and centred, of directionless noise is on average: (2,).

    It grows with the number of classes and falls with their likeness to each other.
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


class Background:
    """What each of K classes usually sees of the stream.

    Attributes:
        seen: (K,) float64, how many samples each class has seen.
        moments: (5, K) float64, mean and variance of its cosine, and of its cosine less the sample's mean; the median
            of its cosine, which neither its own samples nor a minority of strangers pull away.
        pool: (POOLED,) float64, the same over all classes.
        chance: (2,) float64, see `chance`.
        level: N, the familiarity that noise would have.
    """

    def __init__(self, entry: Feature, config: Config, by_chance: Vector | None = None):
        self.config = config
        self.seen = np.zeros(len(entry))
        self.moments = np.zeros((5, len(entry)))
        self.pool = np.zeros(POOLED)
        self.chance = chance(entry) if by_chance is None else by_chance
        self.level = self._level()

    @property
    def prior(self) -> float:
        """How many samples of all classes together a class's own ones count against."""
        return self.config.background_prior if self.config.background else math.inf

    def _level(self) -> float:
        return float(noise_level(self.chance, self.pool, self.config.centred_weight))

    def fork(self) -> Self:
        twin = copy.copy(self)
        twin.seen, twin.moments, twin.pool = self.seen.copy(), self.moments.copy(), self.pool.copy()
        return twin

    def with_classes(self, entry: Feature, kept: NDArray[np.int64]) -> "Background":
        """The background of the prototypes `entry`, of which the first are the classes `kept`; the others are new."""
        twin = Background(entry, self.config)
        twin.seen[: len(kept)] = self.seen[kept]
        twin.moments[:, : len(kept)] = self.moments[:, kept]
        if len(kept) > 1:  # A single class has no spread that others could start from.
            twin.pool = self.pool
        twin.level = twin._level()
        return twin

    def export(self) -> state.Arrays:
        return {"seen": self.seen, "moments": self.moments, "pool": self.pool, "chance": self.chance}

    @classmethod
    def restored(cls, entry: Feature, config: Config, arrays: state.Arrays) -> Self:
        classes = len(entry)
        background = cls(entry, config, required(arrays, "chance", np.float64, (2,)).copy())
        background.seen = within(required(arrays, "seen", np.float64, (classes,)), "seen", 0.0, 2.0**62).copy()
        background.moments = required(arrays, "moments", np.float64, (5, classes)).copy()
        background.pool = within(required(arrays, "pool", np.float64, (POOLED,)), "pool", -1.01, 2.0**62).copy()
        within(background.chance, "chance", 0.0, 100.0)
        within(background.moments[::2], "moments", -2.01, 2.01)
        within(background.moments[1::2], "moments", 0.0, 16.01)
        within(background.pool[1:], "pool", 0.0, 2.0**62)
        background.level = background._level()
        return background

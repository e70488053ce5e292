"""A prototype of the next StreamDCS, for streams in which unknown images are rare.

It was chosen on tuning streams and never judged. docs/research.md has the figures and the known faults. It saves no
states, and its classes cannot change. To run it, add this line to a grid, and run
`python -m protodcs bench run GRID` in the root of the repository:
`{method: "benchmarks.streamdcs_prototype:StreamDCSPrototype", label: "prototype"}`.

1. Text score. Each class has a baseline: mean and variance of its cosine over samples that look unknown. The score is
   the largest z-score over the classes. With few unknown-looking samples the baseline of all classes counts instead, so
   the score starts as a plain maximum cosine and becomes specific as evidence comes in.
2. Linear head. The difference between the mean feature of known-looking and of unknown-looking samples is a direction.
   A sample far on its unknown side loses score. The head counts only as far as it separates samples that it has not
   learned from.
3. Threshold. The known scores are close to a Gaussian. Its lower tail, at `target_false_reject`, is the threshold. It
   comes from a mixture of two components if the stream shows two groups, and otherwise from the upper half of all
   scores, mirrored.

The sample is decided first and learned from afterwards. What may teach the baseline and the head is chosen by the
cosines alone, so a decision cannot confirm itself.
"""

import math
from collections.abc import Mapping
from statistics import NormalDist
from typing import Any, ClassVar, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from protodcs.core.base import Capabilities, Counters, Feature, FeatureMethod
from protodcs.core.decision import Decision
from protodcs.core.settings import Settings
from protodcs.core.state import Arrays
from protodcs.core.vectors import inverse_norms, similarities
from protodcs.errors import UsageError
from protodcs.metrics import auroc

Vector = NDArray[np.float64]
Matrix = NDArray[np.float64]

# Columns of the history: largest cosine, the same minus the sample's mean cosine, largest z-score of the raw and of the
# centred cosines, and the projection on the linear head.
_MAX, _CENTRED_MAX, _Z_RAW, _Z_CENTRED, _HEAD, _SIGNALS = range(6)
_SMALL = 1e-9

# The tuned constants.
_BASELINE_PRIOR = 60.0  # Samples that the baseline of all classes counts for in the baseline of one.
_REST_WEIGHT = 0.03  # Weight in the baseline of a sample that does not look unknown.
_HORIZON = 2000.0  # Samples after which baselines forget.
_CENTRED_WEIGHT = 0.6  # Weight of the centred cosines in the text score; the raw ones have the rest.
_LEAST_SHARE, _MOST_SHARE = 0.04, 0.6  # Bounds of the fraction of samples that look unknown.
_UNKNOWN_MEAN, _KNOWN_MEAN = 256, 1000  # Samples behind the two mean features.
_HEAD_TAIL, _HEAD_LEAST = 0.05, 6  # Fraction and smallest number of samples that test the head.
_HEAD_AUROC = (0.84, 0.92)  # Its AUROC, minus one standard error, from which it counts, and counts in full.
_SKEW = 1.1  # The lower side of the known scores is wider than the upper one by this factor.
_MIRROR = 1.2  # The same if the lower side is estimated from the upper one.
# Log-likelihood that the second component must add until it counts, and counts in full: with few and with all scores.
_GAIN_FEW, _GAIN_ALL = (5.0, 12.0), (12.0, 30.0)
_LEAST_SEPARATION = 1.8  # Distance between the components in standard deviations.
_MOST_HIDDEN = 0.15  # Largest share of unknown samples that the mirrored tail may assume.
_WINDOW = 1024  # Scores behind the threshold.
_FIRST_REFIT, _REFIT_PERIOD = 16, 32  # Samples.
_CAUTION = 8.0  # With n scores the mirrored tail is longer by this / n.
_SCALE_PRIOR = 4.0  # Samples that a relative deviation of 0.2 counts for in the scale of a signal.
# Before the first refit a sample is unknown if its largest cosine is below this many of what noise reaches, in standard
# deviations of its cosines. Needs this many classes.
_FIRST_CUT, _FIRST_CLASSES = 0.75, 5


class StreamDCSPrototypeConfig(Settings):
    """The settings of the prototype."""

    target_false_reject: float = Field(
        0.05, gt=0, lt=0.5, description="Fraction of known images that may be rejected. The one setting to choose."
    )
    temperature: float = Field(0.01, gt=0, le=100, description="Softmax temperature of the cosines.")
    history: int = Field(2048, ge=64, le=100_000, description="Recent samples that scales and threshold follow.")


class Mixture(NamedTuple):
    """Two groups of scores: known ones around `mode`, wider below it than above, and unknown ones around `mean`."""

    likelihood: float
    share: float
    mode: float
    width: float
    mean: float
    deviation: float
    unknown: Vector


def known_density(scores: Vector, mode: float, width: float) -> Vector:
    """Return the log-density of known scores (n,), up to a constant."""
    sides = np.where(scores < mode, _SKEW * width, width)
    density: Vector = -math.log(0.5 * (1.0 + _SKEW) * width) - 0.5 * ((scores - mode) / sides) ** 2
    return density


def fit_mixture(scores: Vector, unknown: Vector, iterations: int = 25) -> Mixture:
    """Fit the mixture by EM, starting from the probabilities `unknown` (n,) of being unknown."""
    count, narrowest = len(scores), 0.1 * float(scores.std()) + _SMALL
    mode = float((1.0 - unknown) @ scores) / max(count - float(unknown.sum()), _SMALL)
    before = -math.inf
    for _ in range(iterations):
        total = float(unknown.sum())
        share = min(max((total + 1.0) / (count + 2.0), 0.005), 0.98)
        mean = float(unknown @ scores) / max(total, _SMALL)
        deviation = max(math.sqrt(float(unknown @ (scores - mean) ** 2) / max(total, _SMALL)), narrowest)
        known = (1.0 - unknown) / np.where(scores < mode, _SKEW**2, 1.0)
        mode = float(known @ scores) / max(float(known.sum()), _SMALL)
        known = (1.0 - unknown) / np.where(scores < mode, _SKEW**2, 1.0)
        width = max(math.sqrt(float(known @ (scores - mode) ** 2) / max(count - total, _SMALL)), narrowest)
        as_known = math.log(1.0 - share) + known_density(scores, mode, width)
        as_unknown = math.log(share / deviation) - 0.5 * ((scores - mean) / deviation) ** 2
        both = np.logaddexp(as_known, as_unknown)
        # Above the mode a wide unknown component would win again; nothing there is unknown.
        unknown = np.where(scores > mode, 0.0, np.exp(as_unknown - both))
        likelihood = float(both.sum())
        if likelihood - before < 1e-5 * count:
            break
        before = likelihood
    return Mixture(likelihood, share, mode, width, mean, deviation, unknown)


def best_mixture(scores: Vector) -> tuple[Mixture | None, float]:
    """Return the best of three fits with the unknown group below, and what it gains over a single group."""
    ordered, best = np.sort(scores), None
    for share in (0.1, 0.4, 0.7):
        fitted = fit_mixture(scores, (scores <= ordered[int(share * len(ordered))]).astype(np.float64))
        if fitted.mean < fitted.mode and (best is None or fitted.likelihood > best.likelihood):
            best = fitted
    if best is None:
        return None, 0.0
    mode = float(np.median(scores))
    for _ in range(8):
        weights = 1.0 / np.where(scores < mode, _SKEW**2, 1.0)
        mode = float(weights @ scores) / float(weights.sum())
    width = math.sqrt(float(weights @ (scores - mode) ** 2) / len(scores))
    return best, best.likelihood - float(known_density(scores, mode, max(width, _SMALL)).sum())


def mirrored_tail(scores: Vector, target: float, ratio: float) -> tuple[float, float, float]:
    """Return the `target` tail of the known scores from the upper half of all scores, the median, the unknown share.

    Scores below the tail that the known ones do not explain are unknown; the quantiles then leave them out.
    """
    ordered, share = np.sort(scores), 0.0
    deviations = NormalDist().inv_cdf(target) / NormalDist().inv_cdf(0.9)
    for _ in range(8):
        middle = _quantile(ordered, share + 0.5 * (1.0 - share))
        tail = middle + ratio * deviations * (_quantile(ordered, share + 0.9 * (1.0 - share)) - middle)
        below = float(np.searchsorted(ordered, tail)) / len(ordered)
        share = min(0.5, max(0.0, below - target * (1.0 - share)))
    return tail, middle, share


def _quantile(ordered: Vector, fraction: float) -> float:
    return float(ordered[min(len(ordered) - 1, int(fraction * len(ordered)))])


class Rule(NamedTuple):
    """What the last refit measured. All scores are on the scale of the text score.

    Attributes:
        looks_unknown, looks_known: cosine scores below and above which a sample teaches baseline and head.
        head_weight: weight of the linear head, 0 if it does not separate the tails.
        head_middle, head_gap: its middle and the distance between its tails.
        threshold: score below which a sample is unknown.
        steepness: slope of the log-odds of being unknown at the threshold.
        share: estimated share of unknown samples.
        two_groups: 0 to 1, how far the threshold rests on the mixture.
    """

    looks_unknown: float
    looks_known: float
    head_weight: float
    head_middle: float
    head_gap: float
    threshold: float
    steepness: float
    share: float
    two_groups: float


class Memory:
    """All that an engine with K classes of dimension d has learned.

    Attributes:
        history: (H, 5) float64, the signals of recent samples; row n mod H holds sample n.
        moments: (4, K) float64, mean and variance of each class's raw and centred cosine, over unknown-looking samples.
        weight: weight of the samples behind the moments.
        pool: (3,) float64, over all samples and classes: mean and variance of the raw, variance of the centred cosines.
        means: (2, d) float64, mean feature of unknown-looking and of known-looking samples.
        taught: (2,) int64, how many of either kind there were.
        seen: number of samples learned from.
        head_from: number of the first sample with a head signal.
        centres, scales: (4,) float64, mean and deviation of the first four signals.
        rule: what the last refit measured; None before the first one.
    """

    def __init__(self, entry: Feature, config: StreamDCSPrototypeConfig):
        classes, width = entry.shape
        self.entry, self.config = entry, config
        self.inverse_norms = inverse_norms(entry)
        self.history = np.zeros((config.history, _SIGNALS))
        self.moments, self.weight, self.pool = np.zeros((4, classes)), 0.0, np.zeros(3)
        self.means, self.taught = np.zeros((2, width)), np.zeros(2, dtype=np.int64)
        self.seen = self.head_from = self.sequence = self.known = 0
        self.centres, self.scales = np.zeros(4), np.ones(4)
        self.rule: Rule | None = None

    def fork(self) -> Self:
        """Return a copy that can change freely."""
        copied = object.__new__(type(self))
        copied.__dict__.update(self.__dict__)
        for name in ("history", "moments", "pool", "means", "taught"):
            setattr(copied, name, getattr(self, name).copy())
        return copied

    # The score of a sample.

    def signals(self, feature: Feature, cosines: Vector) -> Vector:
        """Return the five signals of a sample with these cosines (K,)."""
        centred = cosines - cosines.mean()
        signals = np.array([cosines.max(), centred.max(), 0.0, 0.0, 0.0])
        if self.seen:
            own = self.weight / (self.weight + _BASELINE_PRIOR)
            raw_mean, raw_variance, centred_variance = self.pool
            mean, variance, other_mean, other_variance = own * self.moments
            rest = 1.0 - own
            signals[_Z_RAW] = ((cosines - mean - rest * raw_mean) / _root(variance + rest * raw_variance)).max()
            signals[_Z_CENTRED] = ((centred - other_mean) / _root(other_variance + rest * centred_variance)).max()
        if self.taught[0] >= 3 and self.taught[1] >= 8:
            direction = self.means[1] - self.means[0]
            length = max(float(np.linalg.norm(direction)), _SMALL)
            signals[_HEAD] = float((feature - self.means[1]) @ direction) / length
        return signals

    def cosine_scores(self, rows: Matrix) -> Vector:
        """Return the scores (n,) from the cosines alone, without any baseline."""
        scaled = (rows[:, :2] - self.centres[:2]) / self.scales[:2]
        scores: Vector = scaled.sum(axis=1)
        return scores

    def text_scores(self, rows: Matrix) -> Vector:
        """Return the text scores (n,): both largest z-scores, each scaled by its spread."""
        scaled = (rows[:, _Z_RAW:_HEAD] - self.centres[2:]) / self.scales[2:]
        scores: Vector = (1.0 - _CENTRED_WEIGHT) * scaled[:, 0] + _CENTRED_WEIGHT * scaled[:, 1]
        return scores

    def scores(self, rows: Matrix, with_head: NDArray[np.bool_]) -> Vector:
        """Return the final scores (n,) of some signals; `with_head` (n,) says which of them have a head signal."""
        text, rule = self.text_scores(rows), self.rule
        if rule is None or rule.head_weight == 0.0:
            return text
        # Only the unknown side counts, so that the head cannot lift a sample and known scores keep their shape.
        head = np.minimum((rows[:, _HEAD] - rule.head_middle) / rule.head_gap, 0.0)
        combined: Vector = text + np.where(with_head, rule.head_weight * head, 0.0)
        return combined

    # Learning.

    def learn(self, feature: Feature, cosines: Vector, signals: Vector) -> None:
        """Learn from a sample that was decided, and refit if it is time."""
        weight = _REST_WEIGHT
        if self.rule is not None:
            score = float(self.cosine_scores(signals[None])[0])
            if score <= self.rule.looks_unknown:
                weight = 1.0
                self._move_mean(0, feature, _UNKNOWN_MEAN)
            elif score > self.rule.looks_known:
                self._move_mean(1, feature, _KNOWN_MEAN)
        self._move_baseline(cosines, weight)
        self.history[self.seen % len(self.history)] = signals
        self.seen += 1
        if self.taught[0] < 8:
            self.head_from = self.seen
        if self.seen >= _FIRST_REFIT and (self.seen % _REFIT_PERIOD == 0 or self.seen == _FIRST_REFIT):
            self.refit()
        elif 3 <= self.seen < _FIRST_REFIT:
            self._measure_scales(self.history[1 : self.seen])

    def _move_mean(self, side: int, feature: Feature, horizon: int) -> None:
        self.taught[side] += 1
        self.means[side] += (feature - self.means[side]) / min(int(self.taught[side]), horizon)

    def _move_baseline(self, cosines: Vector, weight: float) -> None:
        centred = cosines - cosines.mean()
        self.weight = min(self.weight + weight, _HORIZON)
        rate = weight / self.weight
        for mean, variance, values in ((0, 1, cosines), (2, 3, centred)):
            gap = values - self.moments[mean]
            self.moments[mean] += rate * gap
            self.moments[variance] += rate * (gap * (values - self.moments[mean]) - self.moments[variance])
        rate = 1.0 / min(self.seen + 1, _HORIZON)
        self.pool[0] += rate * (float(cosines.mean()) - self.pool[0])
        self.pool[1] += rate * (float(((cosines - self.pool[0]) ** 2).mean()) - self.pool[1])
        self.pool[2] += rate * (float((centred**2).mean()) - self.pool[2])

    def _measure_scales(self, rows: Matrix) -> None:
        """Measure mean and deviation of the first four signals; a prior keeps few samples from a tiny deviation."""
        count, rows = len(rows), rows[:, :_HEAD]
        self.centres = rows.mean(axis=0)
        prior = _SCALE_PRIOR * (0.2 * self.centres) ** 2
        self.scales = np.maximum(np.sqrt((count * rows.var(axis=0) + prior) / (count + _SCALE_PRIOR)), _SMALL)

    # Every so many samples.

    def recent(self) -> tuple[Matrix, NDArray[np.bool_]]:
        """Return the signals of recent samples in order of arrival, and which of them have a head signal."""
        held = min(self.seen, len(self.history))
        # The very first samples have no baseline yet.
        numbers = np.arange(max(self.seen - held, min(8, self.seen - 8)), self.seen)
        return self.history[numbers % len(self.history)], numbers >= self.head_from

    def refit(self) -> None:
        """Measure scales, the share of unknown samples, the weight of the head and the threshold again."""
        rows, with_head = self.recent()
        self._measure_scales(rows)
        cosine_scores = self.cosine_scores(rows)
        window = cosine_scores[-_WINDOW:]
        groups, gain = best_mixture(window)
        full = len(window) / _WINDOW
        least, enough = ((1.0 - full) * few + full * most for few, most in zip(_GAIN_FEW, _GAIN_ALL, strict=True))
        two_groups = 0.0
        if groups is not None and _separation(groups) > _LEAST_SEPARATION:
            two_groups = _ramp(gain, least, enough)
        _, _, hidden = mirrored_tail(window, 0.05, _SKEW)
        share = (1.0 - two_groups) * min(hidden, _MOST_HIDDEN)
        if groups is not None:
            share += two_groups * groups.share
        tail = min(_MOST_SHARE, max(_LEAST_SHARE, share))
        ordered = np.sort(cosine_scores)
        looks_unknown, looks_known = _quantile(ordered, tail), _quantile(ordered, tail + 0.5 * (1.0 - tail))
        head = self._test_head(rows[with_head], cosine_scores[with_head], share)
        self.rule = Rule(looks_unknown, looks_known, *head, 0.0, 1.0, share, two_groups)
        scores = self.scores(rows, with_head)[-_WINDOW:]
        threshold, steepness = self._threshold(scores, groups, two_groups)
        self.rule = self.rule._replace(threshold=threshold, steepness=steepness)

    def _test_head(self, rows: Matrix, cosine_scores: Vector, share: float) -> tuple[float, float, float]:
        """Return weight, middle and gap of the head, by how it separates the two tails of the cosine scores."""
        lowest = int(max(_HEAD_TAIL, 0.6 * share) * len(rows))
        if lowest < _HEAD_LEAST:
            return 0.0, 0.0, 1.0
        order = np.argsort(cosine_scores, kind="stable")
        low, high = rows[order[:lowest]], rows[order[int((share + 0.5 * (1.0 - share)) * len(rows)) :]]
        separation = auroc(high[:, _HEAD], low[:, _HEAD])
        certain = separation - math.sqrt(separation * (1.0 - separation) / lowest)
        gap = float(self.text_scores(high).mean() - self.text_scores(low).mean())
        middle = 0.5 * float(low[:, _HEAD].mean() + high[:, _HEAD].mean())
        weight = max(gap, 0.0) * _ramp(certain, *_HEAD_AUROC)
        return weight, middle, max(float(high[:, _HEAD].mean() - low[:, _HEAD].mean()), _SMALL)

    def _threshold(self, scores: Vector, groups: Mixture | None, two_groups: float) -> tuple[float, float]:
        """Return the threshold on recent scores (n,), and the slope of the log-odds there."""
        target = self.config.target_false_reject
        tail, middle, _ = mirrored_tail(scores, target, _MIRROR)
        threshold = middle + (tail - middle) * (1.0 + _CAUTION / len(scores))
        steepness = 4.0 / max(middle - threshold, _SMALL)
        if groups is None or two_groups == 0.0:
            return threshold, steepness
        fitted = fit_mixture(scores, groups.unknown)
        between = fitted.mode + _SKEW * fitted.width * NormalDist().inv_cdf(target * (1.0 + _SKEW) / (2.0 * _SKEW))
        slope = (between - fitted.mean) / fitted.deviation**2 + (fitted.mode - between) / (_SKEW * fitted.width) ** 2
        return (
            two_groups * between + (1.0 - two_groups) * threshold,
            two_groups * max(slope, 1e-3) + (1.0 - two_groups) * steepness,
        )

    def export(self) -> tuple[Counters, Arrays]:
        """Raise UsageError: a prototype saves no states."""
        raise UsageError("The prototype saves no states.")


def _root(variances: Vector) -> Vector:
    return np.sqrt(np.maximum(variances, 1e-10))


def _ramp(value: float, low: float, high: float) -> float:
    return min(1.0, max(0.0, (value - low) / (high - low)))


def _separation(groups: Mixture) -> float:
    """Return the distance between the two groups in standard deviations."""
    return (groups.mode - groups.mean) / math.sqrt(0.5 * (groups.width**2 + groups.deviation**2))


class StreamDCSPrototype(FeatureMethod):
    """The prototype of the next StreamDCS.

    >>> import numpy as np
    >>> engine = StreamDCSPrototype(np.eye(3, 8), classes=["cat", "dog", "fox"])
    >>> engine.observe(np.eye(3, 8)[1]).label
    'dog'
    """

    name: ClassVar[str] = "streamdcs_prototype"
    capabilities: ClassVar[Capabilities] = Capabilities(
        batch_invariant=True, rotation_invariant=False, editable_classes=False, cost="prototypes"
    )
    config_type = StreamDCSPrototypeConfig
    score_names: ClassVar[Mapping[str, str]] = {"": "score against the class baselines"}
    config: StreamDCSPrototypeConfig
    _memory: Memory

    def _advance(self, memory: Memory, feature: Feature, scores: bool) -> Decision:
        cosines = np.empty(len(self.classes))
        index = similarities(memory.entry, memory.inverse_norms, feature, cosines)
        signals = memory.signals(feature, cosines)
        score, p_unknown = self._judge(memory, cosines, signals)
        memory.learn(feature, cosines, signals)
        memory.sequence += 1
        memory.known += p_unknown < 0.5
        return self._decision(
            index, cosines, cosines if scores else None, score=score, p_unknown=p_unknown,
            sequence=memory.sequence - 1, known=p_unknown < 0.5,
        )  # fmt: skip

    def _judge(self, memory: Memory, cosines: Vector, signals: Vector) -> tuple[float, float]:
        """Return score and P(unknown), which is one half at the threshold."""
        rule = memory.rule
        if rule is None:
            score = 0.0 if memory.seen < 3 else float(memory.text_scores(signals[None])[0])
            classes = len(self.classes)
            if classes < _FIRST_CLASSES or not memory.seen:
                return score, 0.0
            noise = math.sqrt(2.0 * math.log(classes)) * float(cosines.std())
            return score, 0.0 if signals[_CENTRED_MAX] >= _FIRST_CUT * noise else 0.5
        score = float(memory.scores(signals[None], np.array([memory.seen >= memory.head_from]))[0])
        log_odds = rule.steepness * (rule.threshold - score)
        return score, 1.0 / (1.0 + math.exp(min(max(-log_odds, -50.0), 50.0)))

    def stats(self) -> dict[str, Any]:
        """Return numbers for monitoring, JSON-ready."""
        memory, rule = self._memory, self._memory.rule
        stats = {**super().stats(), "known": memory.known, "unknown": memory.sequence - memory.known}
        if rule is not None:
            stats |= {"share_unknown": rule.share, "two_groups": rule.two_groups, "head_weight": rule.head_weight}
        return stats

    # What the base class asks for.

    def _new_memory(self, entry: Feature) -> Memory:
        return Memory(entry, self.config)

    def _entry(self, memory: Memory) -> Feature:
        return memory.entry

    def _restored_memory(self, counters: Counters, arrays: Arrays) -> Memory:
        raise UsageError("The prototype saves no states.")

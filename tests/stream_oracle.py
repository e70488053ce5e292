"""An independent, slow float64 version of StreamDCS, to check the engine.

It shares only the constants and settings with the engine. It stores every sample, and computes each mean, variance and
weight from all stored samples. The parts follow docs/explanation/how-a-decision-is-made.md.
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from sklearn.metrics import roc_auc_score

from protodcs import StreamDCSConfig
from protodcs.core.streamdcs import constants as c

LEAST_VARIANCE = 1e-10
TINY = 1e-9

Products = Callable[[np.ndarray, np.ndarray], np.ndarray]


class StepResult(NamedTuple):
    """The decision of the oracle.

    Attributes:
        edge: distance of p_unknown from one half, or of the first verdict from its limit.
        lead: distance between the two largest class scores.
    """

    score: float
    p_unknown: float
    known: bool
    reason: str | None
    index: int
    scores: np.ndarray
    edge: float
    lead: float


class Signals(NamedTuple):
    """The signals of one sample. `has_head` is false for the samples before the head had learned enough."""

    base: float
    text: float
    projection: float
    lead: float
    has_head: bool


class Rows:
    """Numbers, or rows of numbers, that are appended one by one. The array that holds them doubles when it is full."""

    def __init__(self, rows: Sequence[float] | np.ndarray = ()):
        self._array = np.array(rows, dtype=float)
        self._count = len(self._array)

    def append(self, row: float | np.ndarray) -> None:
        if self._count == len(self._array):
            longer = np.empty((max(64, 2 * self._count), *np.shape(row)))
            longer[: self._count] = self.values if self._count else 0.0
            self._array = longer
        self._array[self._count] = row
        self._count += 1

    @property
    def values(self) -> np.ndarray:
        return self._array[: self._count]

    def __len__(self) -> int:
        return self._count


class Verified(NamedTuple):
    """Samples that are certainly of one class: their centred cosines (n, K), and what each counts (n,)."""

    rows: Rows
    shares: Rows


class Head(NamedTuple):
    """How the linear head counts."""

    weight: float
    trust: float
    middle: float
    gap: float
    known_side: float


NO_HEAD = Head(0.0, 0.0, 0.0, 1.0, 0.0)


class Rule(NamedTuple):
    """The result of a refit."""

    looks_unknown: float
    looks_known: float
    head: Head
    threshold: float
    slope: float
    share: float
    evidence: float
    dropped: bool


class StreamOracle:
    """StreamDCS, sample by sample. `products(rows, vector)` makes the cosines; exact unless replaced."""

    def __init__(
        self,
        prototypes: np.ndarray,
        config: StreamDCSConfig,
        products: Products | None = None,
        vocabulary: np.ndarray | None = None,
    ):
        self.vocabulary = None if vocabulary is None else unit(vocabulary).astype(float)
        self.config = config
        self.products = products or exact_products
        self.prototypes = unit(prototypes)
        self.likeness = without_own(exact_products(self.prototypes, self.prototypes.T))
        # One entry for each sample of the history.
        self.signals: list[Signals] = []
        # What the baselines learn from each sample: the scores of the classes (K,), and the weight of the sample.
        self.scores, self.weights = Rows(), Rows()
        self.averages, self.pool_squares = Rows(), Rows()
        # Number of samples before each class was added.
        self.added = np.zeros(len(prototypes), dtype=int)
        # Features of the samples that taught each side of the head.
        self.unknown_features, self.known_features = Rows(), Rows()
        # How much the latest sample moved the means over all samples and classes.
        self.pool_rates = Rows()
        # Number of the first sample behind the threshold.
        self.window_from = 0
        self.rule: Rule | None = None
        self.sureness = Rows()
        self.verified: dict[int, Verified] = {}
        self.bias = np.zeros(len(prototypes))

    def step(self, feature: np.ndarray) -> StepResult:
        """Decide a sample first, then learn from it."""
        feature = unit(feature)
        cosines = self.products(self.prototypes, feature) / np.linalg.norm(self.prototypes.astype(float), axis=1)
        signals = self.measure(feature.astype(float), cosines)
        score, p_unknown, known, edge = self.decide(signals)
        reason = "few samples" if len(self.signals) < c.SHIFT_WINDOW else None
        if self.rule is not None and self.rule.dropped:
            reason = "possible shift"
        scores = cosines / self.config.temperature + self.bias
        self.learn_bias(cosines, scores, p_unknown)
        self.learn(feature.astype(float), cosines, signals)
        largest = np.sort(scores)[::-1]
        lead = float(largest[0] - largest[1]) if len(scores) > 1 else math.inf
        return StepResult(score, p_unknown, known, reason, int(scores.argmax()), scores, edge, lead)

    # Signals.

    def names(self) -> np.ndarray | None:
        """Return the names that the classes are compared with: three quarters of a vocabulary, or enough classes."""
        if self.vocabulary is not None:
            nearest = (self.vocabulary @ self.prototypes.T.astype(float)).max(axis=1)
            kept = np.argsort(nearest, kind="stable")[: len(nearest) - len(nearest) // 4]
            return self.vocabulary[np.sort(kept)]
        return self.prototypes.astype(float) if len(self.prototypes) >= c.LEAST_NAMES else None

    def compare(self, feature: np.ndarray, cosines: np.ndarray) -> tuple[np.ndarray, float]:
        """Return the score of each class (K,), and the lead of the best one over names."""
        classes, names = len(cosines), self.names()
        many = classes / (classes + c.NAMES_PRIOR)
        if names is None:
            centre = cosines.mean() * classes / (classes + c.CLASSES_PRIOR)
            return (cosines - (1 - c.RAW_PART * many) * centre) / c.UNIT, 0.0
        spread = math.sqrt(names.var(axis=0).sum() / names.shape[1])
        with_names = cosines.mean() if self.vocabulary is None else float(feature @ names.mean(axis=0))
        centre = (classes * cosines.mean() + c.NAMES_PRIOR * with_names) / (classes + c.NAMES_PRIOR)
        lead = (cosines.max() - with_names) / spread / math.sqrt(2 * math.log(len(names)))
        return (cosines - (1 - c.RAW_PART * many) * centre) / spread, lead

    def measure(self, feature: np.ndarray, cosines: np.ndarray) -> Signals:
        scores, lead = self.compare(feature, cosines)
        ready = len(self.unknown_features) and len(self.known_features) >= c.HEAD_FIRST
        return Signals(scores.max(), self.text_score(scores), self.project(feature) if ready else 0.0, lead, True)

    def text_score(self, scores: np.ndarray) -> float:
        """Return the largest score, each minus what its class gets from unknown samples, by its deviation."""
        if not len(self.scores):
            return float(scores.max())
        classes = len(scores)
        common = float(remaining(self.pool_rates.values) @ self.pool_squares.values)
        means, variances, parts = np.zeros((3, classes))
        for first in {*self.added.tolist()} - {len(self.scores)}:
            same = self.added == first
            weights, values = self.weights.values[first:], self.scores.values[first:, same]
            shares = fading(weights, c.BASELINE_HORIZON)
            means[same] = shares @ values
            variances[same] = shares @ (values - means[same]) ** 2
            count = min(weights.sum(), c.BASELINE_HORIZON)
            parts[same] = classes / (classes + c.NAMES_PRIOR) * count / (count + c.BASELINE_PRIOR)
        middle = np.average(means, weights=parts) if parts.any() else 0.0
        factors = np.ones(classes)
        if common > 0:
            factors = np.sqrt(common / np.maximum(parts * variances + (1 - parts) * common, LEAST_VARIANCE))
        return float(((scores - parts * (means - middle)) * factors).max())

    def project(self, feature: np.ndarray) -> float:
        known, unknown = (
            fading(np.ones(len(features)), horizon) @ features.values
            for features, horizon in (
                (self.known_features, c.KNOWN_HORIZON),
                (self.unknown_features, c.UNKNOWN_HORIZON),
            )
        )
        return float((feature - known) @ (known - unknown)) / max(float(np.linalg.norm(known - unknown)), TINY)

    # Scores and decision.

    def score(self, signals: Signals, head: Head) -> float:
        return signals.text + head.weight * side_of(signals, head)

    def decide(self, signals: Signals) -> tuple[float, float, bool, float]:
        """Return score, p_unknown, the decision and how clear it is."""
        if self.rule is None:
            known = self.names() is None or signals.lead >= c.FIRST_LEAD
            return signals.text, 0.0 if known else 0.5, known, abs(signals.lead - c.FIRST_LEAD)
        score = self.score(signals, self.rule.head)
        log_odds = min(max(self.rule.slope * (self.rule.threshold - score), -50.0), 50.0)
        p_unknown = 1 / (1 + math.exp(-log_odds))
        return score, p_unknown, p_unknown < 0.5, abs(p_unknown - 0.5)

    # Learning.

    def learn(self, feature: np.ndarray, cosines: np.ndarray, signals: Signals) -> None:
        weight = c.REST_WEIGHT
        if self.rule is not None:
            weight = max(weight, self.rule.share**2)
            if signals.base <= self.rule.looks_unknown:
                weight = 1.0
                self.unknown_features.append(feature)
            elif signals.base > self.rule.looks_known:
                self.known_features.append(feature)
        self.signals.append(signals._replace(has_head=len(self.unknown_features) >= c.HEAD_FIRST))
        seen = len(self.signals)
        scores, _ = self.compare(feature, cosines)
        self.scores.append(scores)
        self.weights.append(weight)
        self.pool_rates.append(1 / min(seen, c.BASELINE_HORIZON))
        self.averages.append(scores.mean())
        pool_mean = remaining(self.pool_rates.values) @ self.averages.values
        self.pool_squares.append(((scores - pool_mean) ** 2).mean())
        if seen == c.FIRST_REFIT or (seen > c.FIRST_REFIT and seen % c.REFIT_PERIOD == 0):
            self.refit()

    def refit(self) -> None:
        seen, dropped_before = len(self.signals), self.rule is not None and self.rule.dropped
        rows = self.signals[max(0, seen - self.config.history) :]
        self.rule = self.fit_rule(rows)
        latest = np.mean([row.lead for row in rows[-c.SHIFT_WINDOW :]])
        if self.rule.dropped and dropped_before and not self.shifted_lately() and latest > c.ALONE[1]:
            self.window_from = seen - c.SHIFT_WINDOW
            self.rule = self.fit_rule(rows)

    def shifted_lately(self) -> bool:
        return self.window_from > 0 and len(self.signals) - self.window_from <= c.SHIFT_WARNING

    def fit_rule(self, rows: list[Signals]) -> Rule:
        window = rows[-min(c.WINDOW, len(self.signals) - self.window_from) :]
        text = np.array([row.text for row in window])
        leads, general = np.array([row.lead for row in window]), self.vocabulary is not None
        few, more = c.KNOWN_WIDTH
        classes = len(self.prototypes)
        expected = max(text.std() / ((1 + c.SKEW) / 2), TINY)
        if self.names() is not None:
            expected = min(expected, few + more * classes / (classes + c.NAMES_PRIOR))
        # What the unknown group's width is expected to be, and how many samples that counts for.
        other = (expected / c.SKEW, c.WIDTH_PRIOR if self.names() is not None else 0)
        mixture, evidence, share = find_groups(text, leads, general, expected, other)
        tail = max(c.TAIL_LEAST, c.TAIL_SHARE * share)
        head = self.weigh_head(rows, tail, share, evidence) if self.config.linear_head else NO_HEAD
        scores = np.array([self.score(row, head) for row in window])
        known = np.ones(len(window))
        if mixture is not None:
            sides = np.array([side_of(row, head) for row in window])
            odds = (1 - mixture.unknown) / np.maximum(mixture.unknown, TINY) * np.exp(c.HEAD_ODDS * head.trust * sides)
            known = 1 - evidence / (1 + odds)
        threshold, slope = fit_threshold(scores, known, leads if general else None, self.config.target_false_reject)
        base = np.array([row.base for row in rows])
        return Rule(
            quantile(base, tail),
            quantile(base, tail + 0.5 * (1.0 - tail)),
            head,
            threshold,
            slope,
            share,
            evidence,
            self.shifted_lately() or lower_than_before(scores, threshold),
        )

    def weigh_head(self, rows: list[Signals], tail: float, share: float, evidence: float) -> Head:
        judged = sorted((row for row in rows if row.has_head), key=lambda row: row.base)
        lowest = int(tail * len(judged))
        if lowest < c.HEAD_FIRST:
            return NO_HEAD
        low, high = judged[:lowest], judged[int((share + 0.5 * (1.0 - share)) * len(judged)) :]
        low_values, high_values = ([row.projection for row in side] for side in (low, high))
        area = roc_auc_score([0] * len(low) + [1] * len(high), low_values + high_values)
        certain = area - math.sqrt(area * (1 - area) / lowest)
        distance = np.mean([row.text for row in high]) - np.mean([row.text for row in low])
        classes = len(self.prototypes)
        trust = max(evidence, classes / (classes + c.NAMES_PRIOR)) * float(np.interp(certain, c.HEAD_AUROC, [0.0, 1.0]))
        low_mean, high_mean = np.mean(low_values), np.mean(high_values)
        gap = max(high_mean - low_mean, TINY)
        return Head(trust * max(distance, 0.0), trust, (low_mean + high_mean) / 2, gap, evidence)

    # Class bias.

    def learn_bias(self, cosines: np.ndarray, scores: np.ndarray, p_unknown: float) -> None:
        """Store a sample that is certainly known with its class, and fit the bias again.

        A sample with less than the average probability of its class counts for a part.
        """
        classes = len(self.prototypes)
        if not self.config.class_bias or not 3 <= classes <= self.config.class_bias_limit or p_unknown >= c.BIAS_SURE:
            return
        best, sure = int(scores.argmax()), float(softmax(scores).max())
        self.sureness.append(sure)
        average = fading(np.ones(len(self.sureness)), c.BIAS_CONFIDENCE_HORIZON) @ self.sureness.values
        off = np.arange(classes) != best
        row = np.where(off, cosines - np.mean(cosines, where=off), 0.0)
        verified = self.verified.setdefault(best, Verified(Rows(), Rows()))
        verified.rows.append(row)
        verified.shares.append(min(1.0, sure / average))
        self.fit_bias()

    def fit_bias(self) -> None:
        classes = len(self.prototypes)
        rows, counts = np.zeros((classes, classes)), np.zeros(classes)
        for k, verified in self.verified.items():
            rows[k] = fading(verified.shares.values, c.BIAS_HORIZON) @ verified.rows.values
            counts[k] = min(verified.shares.values.sum(), c.BIAS_HORIZON)
        self.bias = fitted_bias(self.likeness, rows, counts, self.config.temperature)

    # Classes.

    def edit_classes(self, kept: list[int], added: np.ndarray) -> None:
        """Keep some classes and add the prototypes `added` (n, d) behind them."""
        new = len(added)
        self.prototypes = np.concatenate([self.prototypes[kept], unit(added)])
        self.likeness = without_own(exact_products(self.prototypes, self.prototypes.T))
        self.scores = Rows(np.pad(self.scores.values[:, kept], ((0, 0), (0, new)), constant_values=np.nan))
        self.added = np.concatenate([self.added[kept], np.full(new, len(self.scores))])
        verified = {}
        for best in self.verified.keys() & {*kept}:
            rows, off = self.verified[best].rows.values[:, kept], np.array(kept) != best
            centred = np.where(off, rows - np.mean(rows, axis=1, where=off, keepdims=True), 0.0)
            rows = Rows(np.pad(centred, ((0, 0), (0, new))))
            verified[kept.index(best)] = Verified(rows, self.verified[best].shares)
        self.verified = verified
        self.bias = np.zeros(len(self.prototypes))
        if self.verified:
            self.fit_bias()
        if new:
            self.known_features, self.unknown_features = Rows(), Rows()
            self.signals = [signals._replace(has_head=False) for signals in self.signals]
            if self.rule is not None:
                self.refit()


# Plain functions.


def unit(rows: np.ndarray) -> np.ndarray:
    """Return rows of length one, normalised in float64 and rounded to float32."""
    rows = np.asarray(rows, dtype=float)
    return (rows / np.linalg.norm(rows, axis=-1, keepdims=True)).astype(np.float32)


def exact_products(rows: np.ndarray, vector: np.ndarray) -> np.ndarray:
    """Return dot products in float64."""
    return rows.astype(float) @ vector.astype(float)


def fading(weights: np.ndarray, horizon: float) -> np.ndarray:
    """Return how much each value counts in a running mean over values with these positive weights, oldest first.

    The rate of a value is its weight over the sum of weights so far, which stops at the horizon. Each later rate takes
    its part from what came before.
    """
    return remaining(weights / np.minimum(np.cumsum(weights), horizon))


def remaining(rates: np.ndarray) -> np.ndarray:
    """Return how much each value counts in a running mean that moved by these rates, oldest first."""
    left = np.append(np.cumprod((1 - rates)[:0:-1])[::-1], 1.0)
    return rates * left


def softmax(logits: np.ndarray) -> np.ndarray:
    """Return exponentials over their sum."""
    grown = np.exp(logits - logits.max())
    return grown / grown.sum()


def side_of(signals: Signals, head: Head) -> float:
    """Return the side of the head that a sample is on: -1/2 at the unknown mean, 1/2 at the known one, not beyond."""
    side = min(max((signals.projection - head.middle) / head.gap, -0.5), 0.5) if signals.has_head else 0.0
    return side if side < 0 else head.known_side * side


def quantile(values: np.ndarray, fraction: float) -> float:
    """Return the smallest value that has at least this fraction of the others below it."""
    ordered = np.sort(values)
    return float(ordered[min(len(ordered) - 1, int(fraction * len(ordered)))])


# Two groups.


class Mixture(NamedTuple):
    """Known scores around `mode`, wider below it than above, and unknown ones around `mean`."""

    likelihood: float
    share: float
    mode: float
    width: float
    mean: float
    deviation: float
    unknown: np.ndarray


def known_log_density(scores: np.ndarray, mode: float, width: float) -> np.ndarray:
    """Return the log-density of a two-piece Gaussian, up to log sqrt(2 pi)."""
    below, above = c.SKEW * width, width
    return -np.log((below + above) / 2) - 0.5 * ((scores - mode) / np.where(scores < mode, below, above)) ** 2


def unknown_log_density(scores: np.ndarray, mean: float, deviation: float) -> np.ndarray:
    return -np.log(deviation) - 0.5 * ((scores - mean) / deviation) ** 2


def width_log_density(width: float, expected: float) -> float:
    """Return the log-density of a width as that of `WIDTH_PRIOR` scores of the expected width, zero at the largest."""
    return -c.WIDTH_PRIOR * (math.log(width / expected) + ((expected / width) ** 2 - 1) / 2)


def fit_mixture(scores: np.ndarray, unknown: np.ndarray, expected: float, other: tuple[float, float]) -> Mixture:
    """Fit two groups by EM, from the probabilities `unknown` (n,)."""
    count, narrowest, before = len(scores), 0.1 * expected, -math.inf
    mode = ((1 - unknown) * scores).sum() / max(count - unknown.sum(), TINY)
    for _ in range(25):
        total = max(unknown.sum(), TINY)
        share = min(max((unknown.sum() + 1) / (count + 2), 0.005), 0.98)
        mean = (unknown * scores).sum() / total
        spread = (unknown * (scores - mean) ** 2).sum() + other[1] * other[0] ** 2
        deviation = max(math.sqrt(spread / (total + other[1])), narrowest)
        side = np.where(scores < mode, c.SKEW**-2, 1.0)
        mode = ((1 - unknown) * side * scores).sum() / max(((1 - unknown) * side).sum(), TINY)
        side = np.where(scores < mode, c.SKEW**-2, 1.0)
        spread = ((1 - unknown) * side * (scores - mode) ** 2).sum() + c.WIDTH_PRIOR * expected**2
        width = max(math.sqrt(spread / (count - unknown.sum() + c.WIDTH_PRIOR)), narrowest)
        known_part = math.log(1 - share) + known_log_density(scores, mode, width)
        unknown_part = math.log(share) + unknown_log_density(scores, mean, deviation)
        both = np.logaddexp(known_part, unknown_part)
        unknown = np.where(scores > mode, 0.0, np.exp(unknown_part - both))
        likelihood = float(both.sum()) + width_log_density(width, expected)
        likelihood += other[1] / c.WIDTH_PRIOR * width_log_density(deviation, other[0])
        if likelihood - before < 1e-5 * count:
            break
        before = likelihood
    return Mixture(likelihood, share, mode, width, mean, deviation, unknown)


def one_group_likelihood(scores: np.ndarray, expected: float) -> float:
    """Return the log-likelihood of the scores if all are known."""
    mode = float(np.median(scores))
    for _ in range(8):
        weights = np.where(scores < mode, c.SKEW**-2, 1.0)
        mode = float(np.average(scores, weights=weights))
    spread = (weights * (scores - mode) ** 2).sum() + c.WIDTH_PRIOR * expected**2
    width = math.sqrt(spread / (len(scores) + c.WIDTH_PRIOR))
    return float(known_log_density(scores, mode, width).sum()) + width_log_density(width, expected)


def find_groups(
    scores: np.ndarray, leads: np.ndarray, general: bool, expected: float, other: tuple[float, float]
) -> tuple[Mixture | None, float, float]:
    """Return the best fit of two groups, the evidence for them, and the share of unknown samples."""
    starts = [(scores <= quantile(scores, share)).astype(float) for share in (0.1, 0.4, 0.7, 0.9)]
    fits = [fit for fit in (fit_mixture(scores, start, expected, other) for start in starts) if fit.mean < fit.mode]
    if not fits:
        return None, 0.0, 0.0
    best = max(fits, key=lambda fit: fit.likelihood)
    gain = best.likelihood - one_group_likelihood(scores, expected)
    lead = (best.unknown * leads).sum() / max(best.unknown.sum(), TINY)
    like_known = float(np.interp(lead, [c.ALONE[0], c.HARD_KNOWN[0]], [0.0, 1.0]))
    hard_known = float(np.interp(lead, c.HARD_KNOWN, [0.0, 1.0]))
    gain -= c.DOUBT * best.share * (like_known if general else 1)
    evidence = float(np.interp(gain, [0.0, c.GAIN], [0.0, 1.0])) * (1 - hard_known)
    return best, evidence, evidence * best.share


# Threshold.


def fit_threshold(
    scores: np.ndarray, known: np.ndarray, leads: np.ndarray | None, target: float
) -> tuple[float, float]:
    """Return threshold and slope, from the scores (n,) and their probabilities of being known."""
    order = np.argsort(scores)
    below = np.cumsum(known[order])
    median, tail = (float(scores[order][below >= part * below[-1] - 1e-9][0]) for part in (0.5, target))
    threshold = median - (median - tail) * (1 + c.CAUTION / len(scores))
    slope = 4 / max(median - threshold, TINY)
    if leads is not None:
        alone = float(np.interp(np.mean(leads[scores >= median]), c.ALONE, [1.0, 0.0]))
        threshold = alone * (scores.mean() + c.ALONE_DEVIATIONS * scores.std()) + (1 - alone) * threshold
    return threshold, slope


def lower_than_before(scores: np.ndarray, threshold: float) -> bool:
    """Whether too many of the latest scores are low."""
    earlier, latest = scores[: -c.SHIFT_WINDOW], scores[-c.SHIFT_WINDOW :]
    if len(earlier) < c.SHIFT_WINDOW:
        return False
    fraction = max(c.SHIFT_QUANTILE, np.count_nonzero(earlier < threshold) / len(earlier))
    low = np.count_nonzero(latest < quantile(earlier, fraction)) - c.SHIFT_WINDOW * fraction
    return low >= c.SHIFT_DEVIATIONS * math.sqrt(c.SHIFT_WINDOW * fraction * (1 - fraction))


# Class bias.


def without_own(square: np.ndarray) -> np.ndarray:
    """Return a matrix minus the mean of each row without its diagonal, which is zero."""
    if len(square) == 1:
        return np.zeros((1, 1))
    off = ~np.eye(len(square), dtype=bool)
    return np.where(off, square - np.mean(square, axis=1, where=off, keepdims=True), 0.0)


def fitted_bias(likeness: np.ndarray, rows: np.ndarray, counts: np.ndarray, temperature: float) -> np.ndarray:
    """Return what is added to each logit: minus each column's mean beyond beta times likeness, shrunk.

    The weight of a class is count / (count + 10). Beta is the slope of the rows by likeness, not below zero. The
    James-Stein shrinkage compares the variance that the misfit alone gives the column means with the variance they
    have. Beta squared minus a floor scales the result, up to a limit.
    """
    classes = len(counts)
    weights = np.where(np.eye(classes, dtype=bool), 0.0, (counts / (counts + c.BIAS_PRIOR))[:, None])
    squares = (weights * likeness**2).sum()
    alike = squares <= c.BIAS_MIN_LIKENESS * weights.sum()
    beta = 0.0 if alike else max((weights * rows * likeness).sum() / squares, 0.0)
    left, others = rows - beta * likeness, weights.sum(axis=0)
    told, divisor = others > 1e-6, np.maximum(others, 1e-6)
    moved = np.where(told, (weights * left).sum(axis=0) / divisor, 0.0)
    misfit = max((weights * left**2).sum() - (others * moved**2).sum(), 0.0)
    heard = np.count_nonzero(counts)
    misfit *= heard / max(heard - 1, 1) / max(others.sum(), 1e-9)
    error = np.where(told, (weights**2).sum(axis=0) / divisor**2, 0.0).mean()
    moved = moved - moved.mean()
    known = max(0.0, 1 - misfit * error / (moved.var(ddof=1) + 1e-12)) if heard > 1 else 0.0
    return -known * min(c.BIAS_MAX, max(0.0, beta**2 - c.BIAS_FLOOR)) * moved / temperature

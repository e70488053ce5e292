"""An independent, slow float64 version of StreamDCS, to check the engine.

It shares only the constants and settings with the engine. It stores every sample, and computes each mean, variance and
weight from all stored samples. The parts follow docs/explanation/how-a-decision-is-made.md.
"""

import math
from collections.abc import Callable
from statistics import NormalDist
from typing import NamedTuple

import numpy as np
from sklearn.metrics import roc_auc_score

from protodcs import StreamDCSConfig
from protodcs.core.streamdcs import constants as c

LEAST_VARIANCE = 1e-10
TINY = 1e-9

Products = Callable[[np.ndarray, np.ndarray], np.ndarray]


class Outcome(NamedTuple):
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

    maximum: float
    centred_maximum: float
    raw_z: float
    centred_z: float
    projection: float
    stand_out: float
    has_head: bool


class Sample(NamedTuple):
    """What the baselines learn from one sample: cosines (K,), centred cosines (K,), weight of the sample."""

    raw: np.ndarray
    centred: np.ndarray
    weight: float


class Head(NamedTuple):
    """How the linear head counts."""

    weight: float
    middle: float
    gap: float
    known_side: float


NO_HEAD = Head(0.0, 0.0, 1.0, 0.0)


class Rule(NamedTuple):
    """The result of a refit."""

    looks_unknown: float
    looks_known: float
    head: Head
    threshold: float
    slope: float
    share: float
    evidence: float
    shifted: bool


class StreamOracle:
    """StreamDCS, sample by sample. `products(rows, vector)` makes the cosines; exact unless replaced."""

    def __init__(self, prototypes: np.ndarray, config: StreamDCSConfig, products: Products | None = None):
        self.config = config
        self.products = products or exact_products
        self.prototypes = unit(prototypes)
        self.likeness = without_own(exact_products(self.prototypes, self.prototypes.T))
        # One entry for each sample of the history.
        self.signals: list[Signals] = []
        # One entry for each sample that the baselines learned from.
        self.samples: list[Sample] = []
        self.averages: list[float] = []
        self.pool_squares: list[float] = []
        self.centred_squares: list[float] = []
        # Number of samples before each class was added.
        self.added = np.zeros(len(prototypes), dtype=int)
        # Features of the samples that taught each side of the head.
        self.unknown_features: list[np.ndarray] = []
        self.known_features: list[np.ndarray] = []
        self.scales = np.array([[0.0] * 4, [1.0] * 4])
        # How much the latest sample moved the means over all samples and classes.
        self.pool_rates: list[float] = []
        # Number of the first sample behind the threshold, and of samples left out in the present burst.
        self.window_from = 0
        self.paused = 0
        self.rule: Rule | None = None
        self.sureness: list[float] = []
        self.verified: list[tuple[int, np.ndarray, float]] = []
        self.bias = np.zeros(len(prototypes))

    def step(self, feature: np.ndarray) -> Outcome:
        """Decide a sample first, then learn from it."""
        feature = unit(feature)
        cosines = self.products(self.prototypes, feature) / np.linalg.norm(self.prototypes.astype(float), axis=1)
        signals = self.measure(feature.astype(float), cosines)
        score, p_unknown, known, edge = self.decide(signals)
        reason = "few samples" if len(self.signals) < c.SHIFT_WINDOW else None
        if self.rule is not None and self.rule.shifted:
            reason = "possible shift"
        scores = cosines / self.config.temperature + self.bias
        self.learn_bias(cosines, scores, p_unknown)
        self.learn(feature.astype(float), cosines, signals)
        largest = np.sort(scores)[::-1]
        lead = float(largest[0] - largest[1]) if len(scores) > 1 else math.inf
        return Outcome(score, p_unknown, known, reason, int(scores.argmax()), scores, edge, lead)

    # Signals.

    def measure(self, feature: np.ndarray, cosines: np.ndarray) -> Signals:
        centred = cosines - cosines.mean()
        raw_z, centred_z = self.largest_z(cosines, centred)
        ready = self.unknown_features and len(self.known_features) >= c.HEAD_FIRST
        projection = self.project(feature) if ready else 0.0
        noise = math.sqrt(2 * math.log(max(len(cosines), 2))) * cosines.std()
        return Signals(
            cosines.max(), centred.max(), raw_z, centred_z, projection, centred.max() / max(noise, TINY), True
        )

    def largest_z(self, cosines: np.ndarray, centred: np.ndarray) -> tuple[float, float]:
        if not self.samples:
            return 0.0, 0.0
        pool = remaining(self.pool_rates)
        pool_mean, pool_variance, pool_centred = (
            float(pool @ np.array(values)) for values in (self.averages, self.pool_squares, self.centred_squares)
        )
        raw_z, centred_z = np.zeros((2, len(cosines)))
        for k, first in enumerate(self.added):
            mean, variance, centred_mean, centred_variance, count = self.baseline(k, first)
            own = count / (count + c.BASELINE_PRIOR)
            mean = own * mean + (1 - own) * pool_mean
            variance = own * variance + (1 - own) * pool_variance
            raw_z[k] = (cosines[k] - mean) / math.sqrt(max(variance, LEAST_VARIANCE))
            variance = own * centred_variance + (1 - own) * pool_centred
            centred_z[k] = (centred[k] - own * centred_mean) / math.sqrt(max(variance, LEAST_VARIANCE))
        return raw_z.max(), centred_z.max()

    def baseline(self, k: int, first: int) -> tuple[float, float, float, float, float]:
        """Return mean and variance of the cosines of class k and of the centred ones, and their weight."""
        own = self.samples[first:]
        if not own:
            return 0.0, 0.0, 0.0, 0.0, 0.0
        weights = [sample.weight for sample in own]
        shares, found = fading(weights, c.BASELINE_HORIZON), []
        for values in (np.array([sample.raw[k] for sample in own]), np.array([sample.centred[k] for sample in own])):
            mean = shares @ values
            found += [mean, shares @ (values - mean) ** 2]
        return *found, min(sum(weights), c.BASELINE_HORIZON)

    def project(self, feature: np.ndarray) -> float:
        known, unknown = (
            fading([1.0] * len(features), horizon) @ np.array(features)
            for features, horizon in (
                (self.known_features, c.KNOWN_HORIZON),
                (self.unknown_features, c.UNKNOWN_HORIZON),
            )
        )
        return float((feature - known) @ (known - unknown)) / max(float(np.linalg.norm(known - unknown)), TINY)

    # Scores and decision.

    def cosine_score(self, signals: Signals) -> float:
        scaled = (np.array(signals[:4]) - self.scales[0]) / self.scales[1]
        return scaled[0] + scaled[1]

    def text_score(self, signals: Signals) -> float:
        scaled = (np.array(signals[:4]) - self.scales[0]) / self.scales[1]
        return (1 - c.CENTRED_WEIGHT) * scaled[2] + c.CENTRED_WEIGHT * scaled[3]

    def score(self, signals: Signals, head: Head) -> float:
        side = (signals.projection - head.middle) / head.gap if signals.has_head else 0.0
        return self.text_score(signals) + head.weight * (side if side < 0 else head.known_side * side)

    def decide(self, signals: Signals) -> tuple[float, float, bool, float]:
        """Return score, p_unknown, the decision and how clear it is."""
        if self.rule is None:
            margin = signals.stand_out - c.FIRST_CUT
            known = len(self.prototypes) < c.LEAST_CLASSES or margin >= 0
            score = self.text_score(signals) if len(self.samples) >= 3 else 0.0
            return score, 0.0 if known else 0.5, known, abs(margin)
        score = self.score(signals, self.rule.head)
        log_odds = min(max(self.rule.slope * (self.rule.threshold - score), -50.0), 50.0)
        p_unknown = 1 / (1 + math.exp(-log_odds))
        return score, p_unknown, p_unknown < 0.5, abs(p_unknown - 0.5)

    # Learning.

    def learn(self, feature: np.ndarray, cosines: np.ndarray, signals: Signals) -> None:
        weight, most = c.REST_WEIGHT
        if self.rule is not None:
            weight = max(weight, most * self.rule.evidence * min(1.0, 2 * self.rule.share))
            score = self.cosine_score(signals)
            if score <= self.rule.looks_unknown:
                weight = 1.0
                self.unknown_features.append(feature)
            elif score > self.rule.looks_known:
                self.known_features.append(feature)
        self.signals.append(signals._replace(has_head=len(self.unknown_features) >= c.HEAD_FIRST))
        seen = len(self.signals)
        if self.paused in (0, c.LONGEST_BURST):
            self.samples.append(Sample(cosines, cosines - cosines.mean(), weight))
            self.pool_rates.append(1 / min(seen, c.BASELINE_HORIZON))
            self.averages.append(cosines.mean())
            pool_mean = remaining(self.pool_rates) @ np.array(self.averages)
            self.pool_squares.append(((cosines - pool_mean) ** 2).mean())
            self.centred_squares.append(cosines.var())
        if seen == c.FIRST_REFIT or (seen > c.FIRST_REFIT and seen % c.REFIT_PERIOD == 0):
            self.refit()
        elif 3 <= seen < c.FIRST_REFIT:
            self.measure_scales(self.signals[1:])

    def measure_scales(self, rows: list[Signals]) -> None:
        values, count = np.array(rows)[:, :4], len(rows)
        pool = remaining(self.pool_rates)
        prior = [pool @ np.array(self.pool_squares), pool @ np.array(self.centred_squares), *[c.Z_DEVIATION**2] * 2]
        variance = (((values - values.mean(axis=0)) ** 2).sum(axis=0) + c.SCALE_PRIOR * np.array(prior)) / (
            count + c.SCALE_PRIOR
        )
        self.scales = np.array([values.mean(axis=0), np.maximum(np.sqrt(variance), TINY)])

    def refit(self) -> None:
        seen = len(self.signals)
        rows = self.signals[max(min(c.LEFT_OUT, seen - c.LEFT_OUT), seen - self.config.history) :]
        self.measure_scales(rows)
        noticed = self.rule is not None and self.rule.shifted and not self.paused
        self.rule = self.fit_rule(rows)
        shift, burst = self.drop(rows, noticed)
        if shift:
            self.window_from = seen - c.SHIFT_WINDOW
            self.rule = self.fit_rule(rows)
        if not burst:
            self.paused = 0
        elif self.paused < c.LONGEST_BURST:
            del self.signals[-2 * c.REFIT_PERIOD : -c.REFIT_PERIOD]
            self.paused += c.REFIT_PERIOD

    def drop(self, rows: list[Signals], noticed: bool) -> tuple[bool, bool]:
        """Return whether the latest samples are known ones after a shift, and whether they are a burst of unknown ones.

        `noticed`: whether the last refit noticed the drop of the scores, outside of a pause.
        """
        recently = self.window_from > 0 and len(self.signals) - self.window_from <= c.SHIFT_WARNING
        if not self.rule.shifted or recently:
            return False, False
        stand_out, limit = [row.stand_out for row in rows], self.stand_out_limit()
        earlier, latest = np.mean(stand_out[: -c.SHIFT_WINDOW]), np.mean(stand_out[-c.SHIFT_WINDOW :])
        if earlier <= limit:
            return bool(latest > limit), False
        # 1: as far above the limit as the earlier samples. 0: at the limit.
        left = (latest - limit) / (earlier - limit)
        return left > (c.STAND_OUT_KEPT if noticed else 2 * c.STAND_OUT_KEPT), left <= c.STAND_OUT_KEPT

    def fit_rule(self, rows: list[Signals]) -> Rule:
        since, target = len(self.signals) - self.window_from, self.config.target_false_reject
        size, late = min(c.WINDOW, since, len(rows)), max(c.LEAST_WINDOW, min(c.WINDOW, since // 2))
        by_cosines = np.array([self.cosine_score(row) for row in rows])
        stand_out = np.array([row.stand_out for row in rows[-size:]])
        mixture, evidence, share = find_groups(by_cosines[-size:], stand_out, self.stand_out_limit())
        head = self.weigh_head(rows, by_cosines, share, evidence) if self.config.linear_head else NO_HEAD
        scores = np.array([self.score(row, head) for row in rows])
        text = np.array([self.text_score(row) for row in rows])
        above_limit = np.array([row.stand_out for row in rows[-late:]]) - self.stand_out_limit()
        if len(self.prototypes) < c.LEAST_CLASSES:
            above_limit[:] = -math.inf
        threshold, slope = fit_threshold(scores[-late:], text[-late:], above_limit, mixture, evidence, target)
        tail = min(max(share, c.LEAST_SHARE), c.MOST_SHARE)
        recently = self.window_from > 0 and since <= c.SHIFT_WARNING
        return Rule(
            quantile(by_cosines, tail),
            quantile(by_cosines, tail + 0.5 * (1.0 - tail)),
            head,
            threshold,
            slope,
            share,
            evidence,
            recently or lower_than_before(scores[-size:], threshold),
        )

    def stand_out_limit(self) -> float:
        return c.STAND_OUT_BASE + c.STAND_OUT_RISE * math.log(len(self.prototypes))

    def weigh_head(self, rows: list[Signals], by_cosines: np.ndarray, share: float, evidence: float) -> Head:
        judged = [row for _, row in sorted(zip(by_cosines, rows, strict=True)) if row.has_head]
        lowest = int(max(c.HEAD_TAIL, c.HEAD_SHARE * share) * len(judged))
        if lowest < c.HEAD_LEAST:
            return NO_HEAD
        low, high = judged[:lowest], judged[int((share + 0.5 * (1.0 - share)) * len(judged)) :]
        low_values, high_values = ([row.projection for row in side] for side in (low, high))
        area = roc_auc_score([0] * len(low) + [1] * len(high), low_values + high_values)
        certain = area - math.sqrt(area * (1 - area) / lowest)
        distance = np.mean([self.text_score(row) for row in high]) - np.mean([self.text_score(row) for row in low])
        weight = float(np.interp(certain, c.HEAD_AUROC, [0.0, 1.0]))
        low_mean, high_mean = np.mean(low_values), np.mean(high_values)
        gap = max(high_mean - low_mean, TINY)
        return Head(weight * max(distance, 0.0), (low_mean + high_mean) / 2, gap, evidence)

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
        average = fading([1.0] * len(self.sureness), c.BIAS_CONFIDENCE_HORIZON) @ np.array(self.sureness)
        off = np.arange(classes) != best
        row = np.where(off, cosines - np.mean(cosines, where=off), 0.0)
        self.verified.append((best, row, min(1.0, sure / average)))
        self.fit_bias()

    def fit_bias(self) -> None:
        classes = len(self.prototypes)
        rows, counts = np.zeros((classes, classes)), np.zeros(classes)
        for k in {best for best, _, _ in self.verified}:
            shares = [share for best, _, share in self.verified if best == k]
            rows[k] = fading(shares, c.BIAS_HORIZON) @ np.array([row for best, row, _ in self.verified if best == k])
            counts[k] = min(sum(shares), c.BIAS_HORIZON)
        self.bias = fitted_bias(self.likeness, rows, counts, self.config.temperature)

    # Classes.

    def edit_classes(self, kept: list[int], added: np.ndarray) -> None:
        """Keep some classes and add the prototypes `added` (n, d) behind them."""
        new = len(added)
        self.prototypes = np.concatenate([self.prototypes[kept], unit(added)])
        self.likeness = without_own(exact_products(self.prototypes, self.prototypes.T))
        self.samples = [
            Sample(np.append(raw[kept], [np.nan] * new), np.append(centred[kept], [np.nan] * new), weight)
            for raw, centred, weight in self.samples
        ]
        self.added = np.concatenate([self.added[kept], np.full(new, len(self.samples))])
        verified = []
        for best, row, share in self.verified:
            if best in kept:
                off = np.array(kept) != best
                centred = np.where(off, row[kept] - np.mean(row[kept], where=off), 0.0)
                verified.append((kept.index(best), np.append(centred, [0.0] * new), share))
        self.verified = verified
        self.bias = np.zeros(len(self.prototypes))
        if self.verified:
            self.fit_bias()
        if new:
            self.known_features, self.unknown_features = [], []
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


def fading(weights: list[float], horizon: float) -> np.ndarray:
    """Return how much each value counts in a running mean over values with these positive weights, oldest first.

    The rate of a value is its weight over the sum of weights so far, which stops at the horizon. Each later rate takes
    its part from what came before.
    """
    weights = np.array(weights)
    return remaining(weights / np.minimum(np.cumsum(weights), horizon))


def remaining(rates: list[float] | np.ndarray) -> np.ndarray:
    """Return how much each value counts in a running mean that moved by these rates, oldest first."""
    rates = np.array(rates)
    left = np.append(np.cumprod((1 - rates)[:0:-1])[::-1], 1.0)
    return rates * left


def softmax(logits: np.ndarray) -> np.ndarray:
    """Return exponentials over their sum."""
    grown = np.exp(logits - logits.max())
    return grown / grown.sum()


def quantile(values: np.ndarray, fraction: float) -> float:
    """Return the smallest value that has at least this fraction of the others below it."""
    ordered = sorted(values)
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


def fit_mixture(scores: np.ndarray, unknown: np.ndarray) -> Mixture:
    """Fit two groups by EM, from the probabilities `unknown` (n,)."""
    count, narrowest, before = len(scores), 0.1 * scores.std() + TINY, -math.inf
    mode = ((1 - unknown) * scores).sum() / max(count - unknown.sum(), TINY)
    for _ in range(25):
        total = max(unknown.sum(), TINY)
        share = min(max((unknown.sum() + 1) / (count + 2), 0.005), 0.98)
        mean = (unknown * scores).sum() / total
        deviation = max(math.sqrt((unknown * (scores - mean) ** 2).sum() / total), narrowest)
        side = np.where(scores < mode, c.SKEW**-2, 1.0)
        mode = ((1 - unknown) * side * scores).sum() / max(((1 - unknown) * side).sum(), TINY)
        side = np.where(scores < mode, c.SKEW**-2, 1.0)
        spread = ((1 - unknown) * side * (scores - mode) ** 2).sum() / max(count - unknown.sum(), TINY)
        width = max(math.sqrt(spread), narrowest)
        known_part = (1 - share) * np.exp(known_log_density(scores, mode, width))
        unknown_part = share * np.exp(unknown_log_density(scores, mean, deviation))
        unknown = np.where(scores > mode, 0.0, unknown_part / (known_part + unknown_part))
        likelihood = float(np.log(known_part + unknown_part).sum())
        if likelihood - before < 1e-5 * count:
            break
        before = likelihood
    return Mixture(likelihood, share, mode, width, mean, deviation, unknown)


def one_group_likelihood(scores: np.ndarray) -> float:
    """Return the log-likelihood of the scores if all are known."""
    mode = float(np.median(scores))
    for _ in range(8):
        weights = np.where(scores < mode, c.SKEW**-2, 1.0)
        mode = float(np.average(scores, weights=weights))
    width = max(math.sqrt((weights * (scores - mode) ** 2).mean()), TINY)
    return float(known_log_density(scores, mode, width).sum())


def find_groups(scores: np.ndarray, stand_out: np.ndarray, limit: float) -> tuple[Mixture | None, float, float]:
    """Return the best fit of two groups, the evidence for them, and the share of unknown samples."""
    fits = [fit_mixture(scores, (scores <= quantile(scores, share)).astype(float)) for share in (0.1, 0.4, 0.7)]
    fits = [fit for fit in fits if fit.mean < fit.mode]
    hidden = min(mirrored_tail(scores, 0.05, c.SKEW)[2], c.MOST_HIDDEN)
    if not fits:
        return None, 0.0, hidden
    best = max(fits, key=lambda fit: fit.likelihood)
    if (best.mode - best.mean) / math.sqrt((best.width**2 + best.deviation**2) / 2) <= c.LEAST_SEPARATION:
        return None, 0.0, hidden
    full = len(scores) / c.WINDOW
    limits = (1 - full) * np.array(c.GAIN_FEW) + full * np.array(c.GAIN_ALL)
    evidence = float(np.interp(best.likelihood - one_group_likelihood(scores), limits, [0.0, 1.0]))
    found = (best.unknown * stand_out).sum() / max(best.unknown.sum(), TINY)
    evidence *= float(np.interp(found, [limit - c.STAND_OUT_RAMP, limit + c.STAND_OUT_RAMP], [1.0, 0.0]))
    return best, evidence, evidence * best.share + (1 - evidence) * hidden


# Threshold.


def mirrored_tail(scores: np.ndarray, target: float, ratio: float) -> tuple[float, float, float]:
    """Return the lower tail of the known scores, their median and the share of unknown samples."""
    share, deviations = 0.0, NormalDist().inv_cdf(target) / NormalDist().inv_cdf(0.9)
    for _ in range(8):
        median = quantile(scores, share + 0.5 * (1.0 - share))
        tail = median + ratio * deviations * (quantile(scores, share + 0.9 * (1.0 - share)) - median)
        share = min(0.5, max(0.0, np.count_nonzero(scores < tail) / len(scores) - target * (1.0 - share)))
    return tail, median, share


def fit_threshold(
    scores: np.ndarray, text: np.ndarray, stand_out: np.ndarray, mixture: Mixture | None, evidence: float, target: float
) -> tuple[float, float]:
    """Return threshold and slope. `stand_out` (n,) is how far the best class stands out, minus the limit."""
    tail, median, _ = mirrored_tail(scores, target, c.MIRROR_RATIO)
    rejected = np.count_nonzero(text < mirrored_tail(text, target, c.MIRROR_RATIO)[0]) / len(text)
    most = target + c.MOST_HIDDEN * min(1.0, len(scores) / c.CAUTIOUS_SCORES)
    tail = min((tail + quantile(scores, rejected)) / 2, quantile(scores, most))
    low = stand_out[scores < tail]
    known = np.interp(np.mean(low), [-c.STAND_OUT_RAMP, c.STAND_OUT_RAMP], [0, 1]) if len(low) else 0.0
    tail -= known * max(0.0, tail - quantile(scores, target))
    alone = median - (median - tail) * (1 + c.CAUTION / len(scores))
    alone_slope = 4 / max(median - alone, TINY)
    if mixture is None or evidence == 0:
        return alone, alone_slope
    fitted = fit_mixture(scores, mixture.unknown[-len(scores) :])
    lower = c.SKEW * fitted.width
    # A two-piece Gaussian has the part SKEW / (1 + SKEW) of its mass below its mode.
    threshold = fitted.mode + lower * NormalDist().inv_cdf(0.5 * target * (1 + c.SKEW) / c.SKEW)
    slope = (threshold - fitted.mean) / fitted.deviation**2 + (fitted.mode - threshold) / lower**2
    return (
        evidence * threshold + (1 - evidence) * alone,
        evidence * max(slope, 1e-3) + (1 - evidence) * alone_slope,
    )


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

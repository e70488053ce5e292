"""Verification: decide between known and unknown, then learn from the sample.

The score of a sample is its text score (`class_baseline`), minus a penalty if it is on the unknown side of the linear
head (`linear_head`). `threshold` decides. Which samples teach the baseline and the head is chosen by their cosines
alone, so a decision cannot confirm itself. Every few samples `refit` measures scales, head weight and threshold again.

If the scores of the latest samples drop, the images have shifted, or unknown ones have come in a burst (`drop`). The
decisions then carry a warning. After a shift, the threshold is fitted to the samples since then. In a burst, the engine
pauses: baseline and history leave its samples out, except the latest ones, so that it does not become normal.
"""

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...arrays import Feature, Floats
from ...errors import StateError
from .. import state
from ..arena import Arena, Layout
from ..decision import FEW_SAMPLES, POSSIBLE_SHIFT
from ..distribution import Group, ScoreDistribution
from ..state_checks import Counters, counter, required, within
from . import class_baseline, linear_head
from .class_baseline import POOL_CENTRED_VARIANCE, POOL_VARIANCE, ClassBaseline
from .config import StreamDCSConfig
from .constants import (
    CENTRED_WEIGHT,
    FIRST_CUT,
    FIRST_REFIT,
    HEAD_FIRST,
    LEAST_CLASSES,
    LEAST_SHARE,
    LEAST_WINDOW,
    LEFT_OUT,
    LONGEST_BURST,
    MOST_SHARE,
    REFIT_PERIOD,
    REST_WEIGHT,
    SCALE_PRIOR,
    SHIFT_WARNING,
    SHIFT_WINDOW,
    SKEW,
    STAND_OUT_BASE,
    STAND_OUT_RISE,
    WINDOW,
    Z_DEVIATION,
)
from .drop import NO_DROP, kind_of_drop, lower_than_before
from .linear_head import KNOWN, NO_HEAD, UNKNOWN, HeadWeight, LinearHead, weigh_head
from .rule import LARGEST, SHIFTED, SMALL, Rule, Verdict, checked_rule
from .threshold import Groups, find_groups, fit_mixture, fit_threshold, quantile

# The signals of a sample: largest cosine, the same minus the sample's mean cosine, largest z-score of the raw and of
# the centred cosines, projection on the linear head, and how far the best class stands out from the others.
_MAX, _CENTRED_MAX, _RAW_Z, _CENTRED_Z, _HEAD, _STAND_OUT, SIGNALS = range(7)
# The signals that are scaled by their spread.
_SCALED = 4
# Places in `progress`.
SEEN, HEAD_FROM, WINDOW_FROM, PAUSED, OMITTED, PROGRESS = range(6)
_ARRAYS = frozenset(
    ("history", "scales", "rule", "head_means", "head_learned", "baseline_moments", "baseline_weights", "baseline_pool")
)
# Their names in a state.
_COUNTERS = ("seen", "head_from", "window_from", "paused", "omitted")


def layout(classes: int, dimension: int, config: StreamDCSConfig) -> Layout:
    """Return the arrays of a verification."""
    return {
        **class_baseline.layout(classes),
        **linear_head.layout(dimension),
        "scales": (np.float64, (2, _SCALED)),
        "rule": (np.float64, (len(Rule._fields),)),
        "progress": (np.int64, (PROGRESS,)),
        # The last one, because it fills slowly; see `Arena.packed`. A pause needs some rows more.
        "history": (np.float64, (config.history + REFIT_PERIOD, SIGNALS)),
    }


class Verification:
    """What the engine has learned from the stream about known and unknown samples.

    Attributes:
        baseline: the class baselines.
        head: the linear head.
        history: (H, 6) float64, the signals of recent samples; row n mod H holds sample n.
        scales: (2, 4) float64, mean and deviation of the first four signals.
        progress: (5,) int64, number of samples learned from; number of the first sample with a head signal, and of the
            first sample behind the threshold, which is the first one after a shift; number of samples left out in the
            present burst, and in all bursts.
    """

    def __init__(self, arena: Arena, config: StreamDCSConfig):
        self.config = config
        self.baseline = ClassBaseline(arena)
        self.head = LinearHead(arena)
        self.history = arena["history"]
        self.scales = arena["scales"]
        self.progress = arena["progress"]
        self._rule = arena["rule"]
        if not self.seen:
            self.scales[1] = 1.0

    @property
    def seen(self) -> int:
        """Number of samples learned from, without those left out in bursts."""
        return int(self.progress[SEEN])

    @property
    def head_from(self) -> int:
        """Number of the first sample with a head signal."""
        return int(self.progress[HEAD_FROM])

    @property
    def window_from(self) -> int:
        """Number of the first sample behind the threshold, the first one after a shift."""
        return int(self.progress[WINDOW_FROM])

    @property
    def paused(self) -> int:
        """Number of samples left out since the present burst began; 0 without a burst."""
        return int(self.progress[PAUSED])

    @property
    def omitted(self) -> int:
        """Number of samples left out in all bursts."""
        return int(self.progress[OMITTED])

    @property
    def rule(self) -> Rule | None:
        """The result of the last refit; None before the first one."""
        return Rule(*self._rule.tolist()) if self.seen >= FIRST_REFIT else None

    # The decision.

    def signals(self, feature: Feature, cosines: Floats) -> Floats:
        """Return the signals (6,) of a sample with this unit feature (d,) and these cosines (K,)."""
        largest = float(cosines.max())
        centred = largest - float(cosines.mean())
        # The largest of K Gaussian numbers is about this many deviations above their mean.
        noise = math.sqrt(2.0 * math.log(max(len(cosines), 2))) * float(cosines.std())
        stand_out = centred / max(noise, SMALL)
        z_scores = self.baseline.z_scores(cosines) if self.seen else (0.0, 0.0)
        return np.array([largest, centred, *z_scores, self.head.project(feature), stand_out])

    def decide(self, signals: Floats) -> Verdict:
        """Decide a sample by its signals (6,)."""
        rule = self.rule
        if rule is None:
            return self._first_verdict(signals)
        score = float(self._scores(signals[None], np.array([self.seen >= self.head_from]), rule.head)[0])
        log_odds = rule.slope * (rule.threshold - score)
        p_unknown = 1.0 / (1.0 + math.exp(min(max(-log_odds, -50.0), 50.0)))
        return Verdict(score, p_unknown, p_unknown < 0.5, self.reason)

    @property
    def reason(self) -> str | None:
        """Why decisions are less certain than they look; None otherwise."""
        if self.rule is not None and self.rule.shifted:
            return POSSIBLE_SHIFT
        return FEW_SAMPLES if self.seen < SHIFT_WINDOW else None

    def _first_verdict(self, signals: Floats) -> Verdict:
        """Decide before the first refit: unknown if no class stands out from the others."""
        score = 0.0 if self.seen < 3 else self.text_score(signals)
        known = self.baseline.classes < LEAST_CLASSES or bool(signals[_STAND_OUT] >= FIRST_CUT)
        return Verdict(score, 0.0 if known else 0.5, known, FEW_SAMPLES)

    def text_score(self, signals: Floats) -> float:
        """Return the text score of a sample with these signals (6,)."""
        return float(self._text_scores(signals[None])[0])

    def _cosine_scores(self, rows: Floats) -> Floats:
        """Return the scores (n,) by the cosines alone: both maxima, each scaled by its spread."""
        scaled = (rows[:, : _CENTRED_MAX + 1] - self.scales[0, :2]) / self.scales[1, :2]
        scores: Floats = scaled.sum(axis=1)
        return scores

    def _text_scores(self, rows: Floats) -> Floats:
        """Return the text scores (n,): both largest z-scores, each scaled by its spread."""
        scaled = (rows[:, _RAW_Z:_HEAD] - self.scales[0, 2:]) / self.scales[1, 2:]
        scores: Floats = (1.0 - CENTRED_WEIGHT) * scaled[:, 0] + CENTRED_WEIGHT * scaled[:, 1]
        return scores

    def _scores(self, rows: Floats, with_head: NDArray[np.bool_], head: HeadWeight) -> Floats:
        """Return the final scores (n,) of some signals; `with_head` (n,) says which of them have a head signal."""
        text = self._text_scores(rows)
        return np.where(with_head, head.add_to(text, rows[:, _HEAD]), text) if head.weight > 0.0 else text

    # Learning.

    def learn(self, feature: Feature, cosines: Floats, signals: Floats) -> None:
        """Learn from a sample after its decision, and refit if it is time."""
        rule, count = self.rule, self.seen + 1
        weight, most = REST_WEIGHT
        if rule is not None:
            # Many unknown samples are among those that do not look unknown, if there are many of them at all.
            weight = max(weight, most * rule.evidence * min(1.0, 2.0 * rule.share))
            score = float(self._cosine_scores(signals[None])[0])
            if score <= rule.looks_unknown:
                weight = 1.0
                self.head.learn(UNKNOWN, feature)
            elif score > rule.looks_known:
                self.head.learn(KNOWN, feature)
        if self.paused in (0, LONGEST_BURST):
            self.baseline.learn(cosines, weight, count)
        self.history[self.seen % len(self.history)] = signals
        self.progress[SEEN] = count
        if self.head.learned[UNKNOWN] < HEAD_FIRST:
            self.progress[HEAD_FROM] = count
        if self.just_fitted:
            self.refit()
        elif 3 <= count < FIRST_REFIT:
            self._measure_scales(self.history[1:count])

    def refit(self) -> None:
        """Measure scales, share of unknown samples, head weight and threshold again."""
        rows, with_head = self._recent()
        noticed_before = bool(self._rule[SHIFTED]) and not self.paused
        self._measure_scales(rows)
        self._fit_rule(rows, with_head)
        drop = NO_DROP
        if self._rule[SHIFTED] and not self._shifted_lately:
            drop = kind_of_drop(rows[:, _STAND_OUT], self._stand_out_limit, noticed_before)
        if drop.shift:
            self.progress[WINDOW_FROM] = self.seen - SHIFT_WINDOW
            self._fit_rule(rows, with_head)
        if not drop.burst:
            self.progress[PAUSED] = 0
        elif self.paused < LONGEST_BURST:
            self._leave_out()

    def _leave_out(self) -> None:
        """Take samples of a burst out of the history: those before the samples since the last refit."""
        latest = np.arange(self.seen - REFIT_PERIOD, self.seen) % len(self.history)
        before = np.arange(self.seen - 2 * REFIT_PERIOD, self.seen - REFIT_PERIOD) % len(self.history)
        self.history[before] = self.history[latest]
        self.history[latest] = 0.0
        moved = max(self.seen - 2 * REFIT_PERIOD, self.head_from - REFIT_PERIOD)
        self.progress[HEAD_FROM] = min(self.head_from, moved)
        self.progress[SEEN] -= REFIT_PERIOD
        self.progress[[PAUSED, OMITTED]] += REFIT_PERIOD

    @property
    def just_fitted(self) -> bool:
        """Whether the latest sample led to a refit."""
        return self.seen >= FIRST_REFIT and (self.seen % REFIT_PERIOD == 0 or self.seen == FIRST_REFIT)

    def recent_scores(self) -> Floats:
        """Return the final scores of the recent samples behind the threshold, by the present rule."""
        rule = self.rule
        if rule is None:
            return np.empty(0)
        rows, with_head = self._recent()
        return self._scores(rows, with_head, rule.head)[-self._late :]

    def distribution(self) -> ScoreDistribution:
        """Return the recent scores with the two groups that they form, if the stream shows two."""
        rule, scores = self.rule, self.recent_scores()
        if rule is None or not rule.shows_two_groups:
            return ScoreDistribution("score", np.sort(scores), None if rule is None else rule.threshold, ())
        fitted = fit_mixture(scores, (scores < rule.threshold).astype(np.float64))
        groups = (
            Group("known", 1.0 - fitted.share, fitted.mode, SKEW * fitted.width, fitted.width),
            Group("unknown", fitted.share, fitted.mean, fitted.deviation, fitted.deviation),
        )
        return ScoreDistribution("score", np.sort(scores), rule.threshold, groups)

    @property
    def _late(self) -> int:
        """Number of recent scores that the threshold is fitted to."""
        # Baseline and head improve at first, so the scores of the first half of the samples are out of date.
        return max(LEAST_WINDOW, min(WINDOW, (self.seen - self.window_from) // 2))

    def _fit_rule(self, rows: Floats, with_head: NDArray[np.bool_]) -> None:
        """Fit the rule to the signals of recent samples."""
        since = self.seen - self.window_from
        window = rows[-min(WINDOW, since) :]
        cosine_scores = self._cosine_scores(rows)
        groups = find_groups(cosine_scores[-len(window) :], window[:, _STAND_OUT], self._stand_out_limit)
        head = self._weigh_head(rows[with_head], cosine_scores[with_head], groups)
        scores = self._scores(rows, with_head, head)
        late = self._late
        threshold = fit_threshold(
            scores[-late:],
            self._text_scores(rows[-late:]),
            rows[-late:, _STAND_OUT] if self.baseline.classes >= LEAST_CLASSES else None,
            groups,
            self._stand_out_limit,
            self.config.target_false_reject,
        )
        tail = min(MOST_SHARE, max(LEAST_SHARE, groups.share))
        ordered = np.sort(cosine_scores)
        lower = lower_than_before(scores[-len(window) :], threshold.score)
        self._rule[:] = Rule(
            quantile(ordered, tail),
            quantile(ordered, tail + 0.5 * (1.0 - tail)),
            *head,
            *threshold,
            groups.share,
            groups.evidence,
            0.0 if groups.mixture is None else groups.mixture.separation,
            float(lower or self._shifted_lately),
        )

    @property
    def _shifted_lately(self) -> bool:
        """Whether decisions still carry the warning of the last shift."""
        return self.window_from > 0 and self.seen - self.window_from <= SHIFT_WARNING

    @property
    def _stand_out_limit(self) -> float:
        """How far the best class of unknown samples stands out at most, on average."""
        return STAND_OUT_BASE + STAND_OUT_RISE * math.log(self.baseline.classes)

    def _recent(self) -> tuple[Floats, NDArray[np.bool_]]:
        """Return the signals of recent samples in order of arrival, and which of them have a head signal."""
        held = min(self.seen, self.config.history)
        numbers = np.arange(max(self.seen - held, min(LEFT_OUT, self.seen - LEFT_OUT)), self.seen)
        return self.history[numbers % len(self.history)], numbers >= self.head_from

    def _measure_scales(self, rows: Floats) -> None:
        """Measure mean and deviation of the first four signals; a prior keeps few samples from a tiny deviation."""
        count, rows, pool = len(rows), rows[:, :_SCALED], self.baseline.pool
        prior = np.array([pool[POOL_VARIANCE], pool[POOL_CENTRED_VARIANCE], Z_DEVIATION**2, Z_DEVIATION**2])
        variance = (count * rows.var(axis=0) + SCALE_PRIOR * prior) / (count + SCALE_PRIOR)
        self.scales[:] = rows.mean(axis=0), np.maximum(np.sqrt(variance), SMALL)

    def _weigh_head(self, rows: Floats, cosine_scores: Floats, groups: Groups) -> HeadWeight:
        if not self.config.linear_head:
            return NO_HEAD
        order = np.argsort(cosine_scores, kind="stable")
        # Without two groups only the unknown side counts, so that known scores keep their shape.
        return weigh_head(rows[:, _HEAD], order, self._text_scores(rows), groups.share, groups.evidence)

    # Classes, export.

    def take_classes(self, other: "Verification", kept: NDArray[np.int64]) -> None:
        """Take over another verification, with its classes `kept` as the first ones."""
        self.baseline.take_classes(other.baseline, kept)
        self.head.means[:], self.head.learned[:] = other.head.means, other.head.learned
        self.history[:], self.scales[:], self._rule[:] = other.history, other.scales, other._rule
        self.progress[:] = other.progress

    def forget_head(self) -> None:
        """Let the head learn again from the next samples; refit afterwards."""
        self.head.means[:], self.head.learned[:] = 0.0, 0
        self.progress[HEAD_FROM] = self.seen

    def export(self) -> state.Arrays:
        """Return the arrays of a state."""
        return {
            "history": self.history[: self.seen],
            "scales": self.scales,
            "rule": self._rule[: 0 if self.rule is None else None],
            "head_means": self.head.means,
            "head_learned": self.head.learned,
            "baseline_moments": self.baseline.moments,
            "baseline_weights": self.baseline.weights,
            "baseline_pool": self.baseline.pool,
        }

    def counters(self) -> Counters:
        """Return the numbers of a state beside its arrays."""
        return dict(zip(_COUNTERS, self.progress.tolist(), strict=True))

    def restore(self, counters: Counters, arrays: state.Arrays) -> None:
        """Take over exported numbers and arrays. Raise StateError for anything that cannot have been exported."""
        if set(counters) != set(_COUNTERS):
            raise StateError(f"The state's verification has {sorted(counters)[:20]}; it must have {sorted(_COUNTERS)}.")
        if set(arrays) != _ARRAYS:
            raise StateError(f"The state has the arrays {sorted(arrays)[:30]}; it must have {sorted(_ARRAYS)}.")
        seen = counter(counters, "seen", high=2**56)
        held = min(seen, len(self.history))
        history = required(arrays, "history", np.float64, (held, SIGNALS))
        scales = required(arrays, "scales", np.float64, (2, _SCALED))
        rule = required(arrays, "rule", np.float64, (len(Rule._fields) if seen >= FIRST_REFIT else 0,))
        self.history[:held] = within(history, "history", -LARGEST, LARGEST)
        self.scales[:] = within(scales, "scales", -LARGEST, LARGEST)
        within(scales[1], "scales", SMALL, LARGEST)
        if len(rule):
            self._rule[:] = checked_rule(rule)
        head_from = counter(counters, "head_from", high=seen)
        window_from = counter(counters, "window_from", high=max(0, seen - SHIFT_WINDOW))
        omitted = counter(counters, "omitted", high=2**56)
        paused = counter(counters, "paused", high=min(LONGEST_BURST, omitted))
        self.progress[:] = seen, head_from, window_from, paused, omitted
        self.baseline.restore(arrays)
        self.head.restore(arrays, seen + omitted)

    def stats(self) -> dict[str, Any]:
        """Return numbers for monitoring, JSON-ready."""
        rule = self.rule
        return {
            "share_unknown": None if rule is None else rule.share,
            "threshold": None if rule is None else rule.threshold,
            "two_groups": 0.0 if rule is None else rule.evidence,
            "head_weight": 0.0 if rule is None else rule.head_weight,
            "mixture": {"separation": rule.separation} if rule is not None and rule.shows_two_groups else None,
            "reason": self.reason,
        }

"""Verification: decide between known and unknown, then learn from the sample.

The base score of a sample is its largest centred cosine (`centring`). The text score compares it with what its class
usually gets (`class_baseline`). The final score adds what the linear head says (`linear_head`); `threshold` decides.
Which samples teach the baseline and the head is chosen by the base score alone, so a decision cannot confirm itself.
Every few samples `refit` fits groups, head weight and threshold again.

If the scores of the latest samples drop, decisions carry a warning. If they have dropped at two refits in a row and the
best classes still lead over the names, the images have shifted: the threshold is fitted to the latest samples alone.
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
from .centring import Centring
from .class_baseline import ClassBaseline
from .config import StreamDCSConfig
from .constants import (
    ALONE,
    FIRST_LEAD,
    FIRST_REFIT,
    HEAD_FIRST,
    REFIT_PERIOD,
    REST_WEIGHT,
    SHIFT_DEVIATIONS,
    SHIFT_QUANTILE,
    SHIFT_WARNING,
    SHIFT_WINDOW,
    SKEW,
    TAIL_LEAST,
    TAIL_SHARE,
    WINDOW,
)
from .linear_head import KNOWN, NO_HEAD, UNKNOWN, HeadWeight, LinearHead, weigh_head
from .rule import LARGEST, SHIFTED, SMALL, Rule, Verdict, checked_rule
from .threshold import Groups, Widths, find_groups, fit_mixture, fit_threshold, quantile

# The signals of a sample: base score, text score, projection on the linear head, and lead of the best class over names.
_BASE, _TEXT, _HEAD, _LEAD, SIGNALS = range(5)
# Places in `progress`.
SEEN, HEAD_FROM, WINDOW_FROM, PROGRESS = range(4)
_ARRAYS = frozenset(
    ("history", "rule", "head_means", "head_learned", "baseline_moments", "baseline_weights", "baseline_pool")
)
# Their names in a state.
_COUNTERS = ("seen", "head_from", "window_from")


def layout(classes: int, dimension: int, config: StreamDCSConfig) -> Layout:
    """Return the arrays of a verification."""
    return {
        **class_baseline.layout(classes),
        **linear_head.layout(dimension),
        "rule": (np.float64, (len(Rule._fields),)),
        "progress": (np.int64, (PROGRESS,)),
        # The last one, because it fills slowly; see `Arena.packed`.
        "history": (np.float64, (config.history, SIGNALS)),
    }


class Verification:
    """What the engine has learned from the stream about known and unknown samples.

    Attributes:
        centring: how cosines are centred and scaled.
        baseline: the class baselines.
        head: the linear head.
        history: (H, 4) float64, the signals of recent samples; row n mod H holds sample n.
        progress: (3,) int64, number of samples learned from; number of the first sample with a head signal, and of the
            first sample behind the threshold, which is the first one after a shift.
    """

    def __init__(self, arena: Arena, config: StreamDCSConfig, centring: Centring):
        self.config = config
        self.centring = centring
        self.baseline = ClassBaseline(arena, centring.many)
        self.head = LinearHead(arena)
        self.history = arena["history"]
        self.progress = arena["progress"]
        self._rule = arena["rule"]

    @property
    def seen(self) -> int:
        """Number of samples learned from."""
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
    def rule(self) -> Rule | None:
        """The result of the last refit; None before the first one."""
        return Rule(*self._rule.tolist()) if self.seen >= FIRST_REFIT else None

    # The decision.

    def signals(self, feature: Feature, cosines: Floats) -> Floats:
        """Return the signals (4,) of a sample with this unit feature (d,) and these cosines (K,)."""
        centre, lead = self.centring.centre(feature, cosines)
        scores = (cosines - centre) / self.centring.unit
        return np.array([scores.max(), self.baseline.text_score(scores), self.head.project(feature), lead])

    def decide(self, signals: Floats) -> Verdict:
        """Decide a sample by its signals (4,)."""
        rule = self.rule
        if rule is None:
            # Before the first refit, a sample is unknown if no class leads over the names.
            known = self.centring.noise == 0.0 or bool(signals[_LEAD] >= FIRST_LEAD)
            return Verdict(float(signals[_TEXT]), 0.0 if known else 0.5, known, FEW_SAMPLES)
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

    def text_score(self, signals: Floats) -> float:
        """Return the text score of a sample with these signals (4,)."""
        return float(signals[_TEXT])

    def _scores(self, rows: Floats, with_head: NDArray[np.bool_], head: HeadWeight) -> Floats:
        """Return the final scores (n,) of some signals; `with_head` (n,) says which of them have a head signal."""
        scores: Floats = rows[:, _TEXT] + np.where(with_head, head.weight * head.sides(rows[:, _HEAD]), 0.0)
        return scores

    # Learning.

    def learn(self, feature: Feature, cosines: Floats, signals: Floats) -> None:
        """Learn from a sample after its decision, and refit if it is time."""
        rule, count, weight = self.rule, self.seen + 1, REST_WEIGHT
        if rule is not None:
            # Many unknown samples are among those that do not look unknown, if there are many of them at all.
            weight = max(weight, rule.share**2)
            if signals[_BASE] <= rule.looks_unknown:
                weight = 1.0
                self.head.learn(UNKNOWN, feature)
            elif signals[_BASE] > rule.looks_known:
                self.head.learn(KNOWN, feature)
        centre, _ = self.centring.centre(feature, cosines)
        self.baseline.learn((cosines - centre) / self.centring.unit, weight, count)
        self.history[self.seen % len(self.history)] = signals
        self.progress[SEEN] = count
        if self.head.learned[UNKNOWN] < HEAD_FIRST:
            self.progress[HEAD_FROM] = count
        if self.just_fitted:
            self.refit()

    def refit(self) -> None:
        """Measure share of unknown samples, head weight and threshold again."""
        rows, with_head = self._recent()
        dropped_before = bool(self._rule[SHIFTED])
        self._fit_rule(rows, with_head)
        dropped = bool(self._rule[SHIFTED]) and not self._shifted_lately
        # Unknown samples hardly lead, and after two refits the latest samples are all from after the drop.
        if dropped and dropped_before and float(rows[-SHIFT_WINDOW:, _LEAD].mean()) > ALONE[1]:
            self.progress[WINDOW_FROM] = self.seen - SHIFT_WINDOW
            self._fit_rule(rows, with_head)

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
        return self._scores(rows, with_head, rule.head)[-self._size :]

    def distribution(self) -> ScoreDistribution:
        """Return the recent scores with the two groups that they form, if the stream shows two."""
        rule, scores = self.rule, self.recent_scores()
        if rule is None or not rule.shows_two_groups:
            return ScoreDistribution("score", np.sort(scores), None if rule is None else rule.threshold, ())
        fitted = fit_mixture(scores, (scores < rule.threshold).astype(np.float64), self.expected_widths(scores))
        groups = (
            Group("known", 1.0 - fitted.share, fitted.mode, SKEW * fitted.width, fitted.width),
            Group("unknown", fitted.share, fitted.mean, fitted.deviation, fitted.deviation),
        )
        return ScoreDistribution("score", np.sort(scores), rule.threshold, groups)

    @property
    def _size(self) -> int:
        """Number of recent scores that the threshold is fitted to."""
        return min(WINDOW, self.seen - self.window_from)

    def expected_widths(self, scores: Floats) -> Widths:
        """Return the expected widths of the groups of scores (n,). The known one is at most as wide as all of them."""
        whole = max(2.0 / (1.0 + SKEW) * float(scores.std()), SMALL)
        if not self.centring.noise:
            return Widths(whole, 0.0)
        known = min(self.centring.width, whole)
        return Widths(known, known / SKEW)

    def _fit_rule(self, rows: Floats, with_head: NDArray[np.bool_]) -> None:
        """Fit the rule to the signals of recent samples."""
        window, late_head = rows[-self._size :], with_head[-self._size :]
        text, leads = window[:, _TEXT], window[:, _LEAD]
        general = self.centring.names is not None
        groups = find_groups(text, leads, general, self.expected_widths(text))
        tail = max(TAIL_LEAST, TAIL_SHARE * groups.share)
        head = self._weigh_head(rows[with_head], tail, groups)
        scores = self._scores(window, late_head, head)
        known = np.ones(len(window))
        if groups.mixture is not None:
            sides = np.where(late_head, head.sides(window[:, _HEAD]), 0.0)
            known -= groups.evidence * (1.0 - head.known(groups.mixture.unknown, sides))
        threshold = fit_threshold(scores, known, leads if general else None, self.config.target_false_reject)
        ordered = np.sort(rows[:, _BASE])
        self._rule[:] = Rule(
            quantile(ordered, tail),
            quantile(ordered, tail + 0.5 * (1.0 - tail)),
            *head,
            *threshold,
            groups.share,
            groups.evidence,
            0.0 if groups.mixture is None else groups.mixture.separation,
            float(lower_than_before(scores, threshold.score) or self._shifted_lately),
        )

    @property
    def _shifted_lately(self) -> bool:
        """Whether decisions still carry the warning of the last shift."""
        return self.window_from > 0 and self.seen - self.window_from <= SHIFT_WARNING

    def _recent(self) -> tuple[Floats, NDArray[np.bool_]]:
        """Return the signals of recent samples in order of arrival, and which of them have a head signal."""
        numbers = np.arange(max(0, self.seen - len(self.history)), self.seen)
        return self.history[numbers % len(self.history)], numbers >= self.head_from

    def _weigh_head(self, rows: Floats, tail: float, groups: Groups) -> HeadWeight:
        if not self.config.linear_head:
            return NO_HEAD
        order = np.argsort(rows[:, _BASE], kind="stable")
        # Without two groups only the unknown side counts, so that known scores keep their shape.
        return weigh_head(
            rows[:, _HEAD], order, rows[:, _TEXT], tail, groups.share, groups.evidence, self.centring.many
        )

    # Classes, export.

    def take_classes(self, other: "Verification", kept: NDArray[np.int64]) -> None:
        """Take over another verification, with its classes `kept` as the first ones."""
        self.baseline.take_classes(other.baseline, kept)
        self.head.means[:], self.head.learned[:] = other.head.means, other.head.learned
        self.history[:], self._rule[:] = other.history, other._rule
        self.progress[:] = other.progress

    def forget_head(self) -> None:
        """Let the head learn again from the next samples; refit afterwards."""
        self.head.means[:], self.head.learned[:] = 0.0, 0
        self.progress[HEAD_FROM] = self.seen

    def export(self) -> state.Arrays:
        """Return the arrays of a state."""
        return {
            "history": self.history[: self.seen],
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
        rule = required(arrays, "rule", np.float64, (len(Rule._fields) if seen >= FIRST_REFIT else 0,))
        self.history[:held] = within(history, "history", -LARGEST, LARGEST)
        if len(rule):
            self._rule[:] = checked_rule(rule)
        head_from = counter(counters, "head_from", high=seen)
        window_from = counter(counters, "window_from", high=max(0, seen - SHIFT_WINDOW))
        self.progress[:] = seen, head_from, window_from
        self.baseline.restore(arrays)
        self.head.restore(arrays, seen)

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


def lower_than_before(scores: Floats, threshold: float) -> bool:
    """Whether more of the latest scores are low than of the earlier ones; `scores` (n,) are in order of arrival."""
    recent, earlier = scores[-SHIFT_WINDOW:], scores[:-SHIFT_WINDOW]
    if len(earlier) < SHIFT_WINDOW:
        return False
    fraction = max(SHIFT_QUANTILE, float((earlier < threshold).mean()))
    low = int((recent < quantile(np.sort(earlier), fraction)).sum())
    expected, deviation = SHIFT_WINDOW * fraction, math.sqrt(SHIFT_WINDOW * fraction * (1.0 - fraction))
    return low >= expected + SHIFT_DEVIATIONS * deviation

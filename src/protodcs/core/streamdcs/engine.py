"""StreamDCS: score a sample against what the stream usually shows, decide, then learn from it.

`StreamState.step` is the whole method. The parts live in the files of their names; `verification` puts those together
that decide between known and unknown.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from ...arrays import Feature, Floats
from ...errors import InputError, UsageError
from .._native import NativeStep
from ..arena import Arena
from ..base import Capabilities, FeatureMethod
from ..decision import REASONS, Decision, Decisions
from ..distribution import ScoreDistribution
from ..numerics.softmax import softmax_rows
from ..state import Arrays
from ..state_checks import Counters
from ..validation import check_features, class_index
from .config import StreamDCSConfig
from .constants import FIRST_REFIT, REFIT_PERIOD
from .corrections import NO_CLASS
from .explain import StreamDCSExplanation, explain
from .state import StreamState


class StreamDCS(FeatureMethod):
    """An open-set classifier over unit features that adapts to its stream.

    Args:
        prototypes: (K, d), one row per known class; normalised on entry. Or `Prototypes`, which engines share.
        classes: K unique names; None names them "0".."K-1".
        config: the settings, see `StreamDCSConfig`.
        encoder: fingerprint of the encoder that makes the features, if known.
        vocabulary: general names to compare the classes with, (V, d) or a `Vocabulary`, which engines share.

    >>> import numpy as np
    >>> engine = StreamDCS(np.eye(3, 8), classes=["cat", "dog", "fox"])
    >>> engine.observe(np.eye(3, 8)[1]).label
    'dog'
    """

    name: ClassVar[str] = "streamdcs"
    version: ClassVar[int] = 3
    capabilities: ClassVar[Capabilities] = Capabilities(
        batch_invariant=True, rotation_invariant=False, editable_classes=True, cost="prototypes"
    )
    config_type = StreamDCSConfig
    uses_vocabulary: ClassVar[bool] = True
    score_names: ClassVar[Mapping[str, str]] = {"": "score against the stream"}
    config: StreamDCSConfig
    _memory: StreamState

    def probabilities(self, scores: NDArray[np.floating]) -> NDArray[np.float64]:
        """Return (N, K) class probabilities: the softmax of the `scores` of decisions, which are logits."""
        return softmax_rows(np.asarray(scores, dtype=np.float64))

    def initial_cosines(self) -> NDArray[np.float64]:
        """Return the cosines (K,) of the latest feature with the prototypes."""
        return self._memory.cosines

    @property
    def unknown_share(self) -> float | None:
        """Share of unknown samples among those that the engine learned from; None before the first."""
        _, learned, known = self._memory.samples.tolist()
        return 1.0 - known / learned if learned else None

    def _predict(self, feature: Feature, scores: bool) -> Decision:
        return self._advance(self._memory, feature, scores, learns=False)

    def _advance(self, memory: StreamState, feature: Feature, scores: bool, learns: bool = True) -> Decision:
        """Decide on a sample, and learn from it if it `learns`."""
        sequence = memory.sequence
        outcome = memory.step(feature, learns)
        return Decision(
            outcome.known,
            outcome.best,
            self.classes[outcome.best] if outcome.known else None,
            outcome.p_unknown,
            outcome.openness,
            outcome.openness,
            outcome.score,
            memory.logits.astype(np.float32) if scores else None,
            outcome.aleatoric,
            outcome.epistemic,
            False,
            False,
            False,
            sequence,
            outcome.reason,
            outcome.unsure,
        )

    def _observe_rows(self, rows: Feature, scores: bool) -> Decisions:
        if self._memory.native is None or self._memory.is_reviewed:
            return super()._observe_rows(rows, scores)
        logits = np.empty((len(rows), len(self.classes)), np.float32) if scores else None
        return self._run(self._memory.native, rows, logits, None)

    def _observe_compared(self, rows: Feature) -> tuple[Decisions, Floats | None]:
        if self._memory.native is None or self._memory.is_reviewed:
            return super()._observe_compared(rows)
        cosines = np.empty((len(rows), len(self.classes)))
        return self._run(self._memory.native, rows, None, cosines), cosines

    def _run(self, step: NativeStep, rows: Feature, logits: Feature | None, cosines: Floats | None) -> Decisions:
        """Observe unit rows (N, d) in one call. Write logits and cosines (N, K) to the arrays that are given."""
        first, count, learns = self.sequence, len(rows), not self.frozen
        known, reasons, best = np.empty(count, np.bool_), np.empty(count, np.int64), np.empty(count, np.int64)
        p_unknown, openness, score, aleatoric, epistemic = numbers = np.empty((5, count))
        trusted, cached, evolved, unsure = np.zeros((4, count), np.bool_)
        self._consistent = not learns
        step.run(rows, learns, (known.view(np.uint8), best, reasons, numbers), logits, cosines)
        self._consistent = True
        columns = {
            "known": known,
            "index": best,
            "p_unknown": p_unknown,
            "openness": openness,
            "openness_first": openness.copy(),
            "score": score,
            "aleatoric": aleatoric,
            "epistemic": epistemic,
            "trusted": trusted,
            "cached": cached,
            "evolved": evolved,
            "sequence": np.arange(first, first + count),
            "unsure": unsure,
        }
        return Decisions.of_columns(
            columns, [(None, *REASONS)[code] for code in reasons.tolist()], logits, self.classes
        )

    def explain(self, feature: NDArray[np.floating]) -> StreamDCSExplanation:
        """Return how each part would judge this feature, and why. Nothing changes."""
        with self._exclusive():
            values = self._checked(feature)
            memory = self._memory
            decision = self._predict(values, True)
            signals = memory.verification.signals(values, memory.cosines)
            return explain(self.classes, memory, signals, decision)

    def score_distribution(self) -> ScoreDistribution:
        """Return the scores of recent samples, the two groups that they form, and the threshold."""
        with self._exclusive():
            return self._memory.verification.distribution()

    def calibrate(self, features: NDArray[np.floating]) -> bool:
        """Prepare for a stream from unlabelled features (N, d) like those to come, known and unknown ones mixed.

        The engine learns from them as from samples, but does not count them.

        Returns:
            Whether the engine now detects two groups of samples, known and unknown ones.
        """
        with self._exclusive():
            if self.frozen:
                raise UsageError("a frozen engine learns nothing: unfreeze it before you calibrate it")
            rows = check_features(features, self.dimension)
            if len(rows) < 4:
                raise InputError(f"calibration needs at least 4 features; given: {len(rows)}")
            self._consistent = False
            self._warm_up(rows)
            self._consistent = True
            rule = self._memory.verification.rule
            return rule is not None and rule.shows_two_groups

    def _warm_up(self, rows: Feature) -> None:
        for row in rows:
            self._memory.calibrate(row)

    def feedback(self, feature: NDArray[np.floating], label: str | None) -> None:
        """Tell the engine the true class of a feature (d,); `None` if it is unknown.

        Decisions on similar features change at once. What the engine learns from the stream does not. Frozen engines
        take feedback too. A second call with the same feature replaces the first one.

        >>> import numpy as np
        >>> engine = StreamDCS(np.eye(3, 8), classes=["cat", "dog", "fox"])
        >>> engine.feedback(np.eye(3, 8)[1], "fox")
        >>> engine.peek(np.eye(3, 8)[1]).label
        'fox'
        """
        with self._exclusive():
            place = NO_CLASS if label is None else class_index(label, self.classes)
            self._memory.correct(self._checked(feature), place)

    def withdraw_feedback(self, feature: NDArray[np.floating]) -> None:
        """Forget what `feedback` said about a feature (d,), if anything."""
        with self._exclusive():
            self._memory.corrections = self._memory.corrections.without(self._checked(feature))

    def is_corrected(self, feature: NDArray[np.floating]) -> bool:
        """Return whether `feedback` was called with this feature (d,), or one that is almost the same."""
        with self._exclusive():
            return self._memory.corrections.contains(self._checked(feature))

    def until_refit(self) -> int:
        """Return the number of samples until the threshold is fitted again."""
        seen = self._memory.verification.seen
        return FIRST_REFIT - seen if seen < FIRST_REFIT else REFIT_PERIOD - seen % REFIT_PERIOD

    def stats(self) -> dict[str, Any]:
        """Return numbers for monitoring, JSON-ready."""
        with self._exclusive():
            return {**super().stats(), **self._memory.stats(), "false_reject": self._memory.false_reject()}

    def quick_stats(self) -> dict[str, Any]:
        """Return the numbers of `stats` without `false_reject`, which takes most of a millisecond."""
        with self._exclusive():
            return {**super().stats(), **self._memory.stats()}

    # What the base class asks for.

    def _new_memory(self, initial: Feature) -> StreamState:
        return StreamState(self._prototypes, self.config)

    def _restored_memory(self, counters: Counters, arrays: Arrays) -> StreamState:
        return StreamState.restored(self._prototypes, self.config, counters, arrays, trusted=False)

    def _trusted_memory(self, counters: Counters, arrays: Arrays) -> StreamState:
        return StreamState.restored(self._prototypes, self.config, counters, arrays, trusted=True)

    def _arena(self) -> Arena | None:
        # Corrections are stored beside the arena, because most engines have none.
        return None if len(self._memory.corrections) else self._memory.arena

    def _initial_prototypes(self, memory: StreamState) -> Feature:
        return memory.prototypes

    def _with_classes(self, memory: StreamState, kept: NDArray[np.int64], added: Feature) -> StreamState:
        return memory.with_classes(kept, added)

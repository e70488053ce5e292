"""StreamDCS: score a sample against what the stream usually shows, decide, then learn from it.

`_advance` is the whole method. The parts live in the files of their names; `verification` puts those together that
decide between known and unknown.
"""

import copy
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from ...errors import InputError, UsageError
from ..base import Capabilities, Counters, Feature, FeatureMethod, softmax_rows
from ..decision import Decision
from ..evidence import confidence, uncertainty
from ..state import Arrays
from ..vectors import similarities
from .config import StreamDCSConfig
from .constants import FIRST_REFIT, REFIT_PERIOD
from .explain import StreamDCSExplanation, explain
from .state import StreamState

Vector = NDArray[np.float64]


class StreamDCS(FeatureMethod):
    """An open-set classifier over unit features that adapts to its stream.

    Args:
        prototypes: (K, d), one row per known class; normalised on entry. Or `Prototypes`, which engines share.
        classes: K unique names; None names them "0".."K-1".
        config: the settings, see `StreamDCSConfig`.
        encoder: fingerprint of the encoder that makes the features, if known.

    >>> import numpy as np
    >>> engine = StreamDCS(np.eye(3, 8), classes=["cat", "dog", "fox"])
    >>> engine.observe(np.eye(3, 8)[1]).label
    'dog'
    """

    name: ClassVar[str] = "streamdcs"
    capabilities: ClassVar[Capabilities] = Capabilities(
        batch_invariant=True, rotation_invariant=False, editable_classes=True, cost="prototypes"
    )
    config_type = StreamDCSConfig
    score_names: ClassVar[Mapping[str, str]] = {"": "score against the stream"}
    config: StreamDCSConfig
    _memory: StreamState

    def probabilities(self, scores: NDArray[np.floating]) -> NDArray[np.float64]:
        """Return (N, K) class probabilities: the softmax of the `scores` of decisions, which are logits."""
        return softmax_rows(np.asarray(scores, dtype=np.float64))

    def entry_cosines(self) -> NDArray[np.float64]:
        """Return the cosines (K,) of the latest feature with the prototypes."""
        return self._cosines

    def _glance(self, feature: Feature, scores: bool) -> Decision:
        return self._advance(copy.copy(self._memory), feature, scores, learns=False)

    def _advance(self, memory: StreamState, feature: Feature, scores: bool, learns: bool = True) -> Decision:
        """Decide on a sample, and learn from it if it `learns`."""
        cosines, logits = self._cosines, self._logits
        nearest = similarities(memory.prototypes, memory.inverse_norms, feature, cosines)
        best = self._predict(memory)
        verification = memory.verification
        signals = verification.signals(feature, cosines)
        verdict = verification.decide(signals)
        if learns:
            self._learn(memory, feature, signals, best, verdict.p_unknown)

        sequence = memory.sequence
        memory.sequence += 1
        memory.learned += 1
        memory.known += verdict.known
        openness = 1.0 - float(cosines[nearest])
        aleatoric, epistemic = uncertainty(cosines, self._work)
        return Decision(
            verdict.known,
            best,
            self.classes[best] if verdict.known else None,
            verdict.p_unknown,
            openness,
            openness,
            verdict.score,
            logits.astype(np.float32) if scores else None,
            aleatoric,
            epistemic,
            False,
            False,
            False,
            sequence,
            verdict.reason,
        )

    def _predict(self, memory: StreamState) -> int:
        """Return the class with the largest logit, class bias included. The logits stay in `_logits`."""
        np.divide(self._cosines, self.config.temperature, out=self._logits)
        if memory.class_bias is not None:
            self._logits += memory.class_bias.logits
        return int(self._logits.argmax())

    def _learn(self, memory: StreamState, feature: Feature, signals: Vector, best: int, p_unknown: float) -> None:
        bias = memory.class_bias
        if bias is not None and bias.learns_from(p_unknown):
            bias.learn(self._cosines, best, confidence(self._logits, best, 1.0), p_unknown)
        memory.verification.learn(feature, self._cosines, signals)

    def explain(self, feature: NDArray[np.floating]) -> StreamDCSExplanation:
        """Return how each part would judge this feature, and why. Nothing changes."""
        with self._alone():
            values = self._checked(feature)
            decision = self._glance(values, True)
            signals = self._memory.verification.signals(values, self._cosines)
            return explain(self.classes, self._memory, signals, decision, self._logits)

    def calibrate(self, features: NDArray[np.floating]) -> bool:
        """Prepare for a stream from unlabelled features (N, d) like those to come, known and unknown ones mixed.

        The engine learns from them as from samples, but does not count them.

        Returns:
            Whether the engine now detects two groups of samples, known and unknown ones.
        """
        with self._alone():
            if self.frozen:
                raise UsageError("a frozen engine learns nothing: unfreeze it before you calibrate it")
            rows = self._checked_many(features)
            if len(rows) < 4:
                raise InputError(f"calibration needs at least 4 features; given: {len(rows)}")
            self._whole = False
            self._rehearse(list(rows))
            self._whole = True
            rule = self._memory.verification.rule
            return rule is not None and rule.evidence > 0.5

    def _rehearse(self, rows: Sequence[Feature]) -> None:
        memory, cosines, verification = self._memory, self._cosines, self._memory.verification
        for row in rows:
            similarities(memory.prototypes, memory.inverse_norms, row, cosines)
            verification.learn(row, cosines, verification.signals(row, cosines))

    def until_refit(self) -> int:
        """Return the number of samples until the threshold is fitted again."""
        seen = self._memory.verification.seen
        return FIRST_REFIT - seen if seen < FIRST_REFIT else REFIT_PERIOD - seen % REFIT_PERIOD

    def stats(self) -> dict[str, Any]:
        """Return numbers for monitoring, JSON-ready."""
        with self._alone():
            return {**super().stats(), **self._memory.stats()}

    # What the base class asks for.

    def _resize(self, classes: tuple[str, ...], width: int) -> None:
        super()._resize(classes, width)
        self._cosines, self._logits, self._work = np.empty((3, len(classes)))

    def _new_memory(self, entry: Feature) -> StreamState:
        return StreamState(self._prototypes, self.config)

    def _restored_memory(self, counters: Counters, arrays: Arrays) -> StreamState:
        return StreamState.restored(self._prototypes, self.config, counters, arrays)

    def _entry(self, memory: StreamState) -> Feature:
        return memory.prototypes

    def _with_classes(self, memory: StreamState, kept: NDArray[np.int64], added: Feature) -> StreamState:
        return memory.with_classes(kept, added)

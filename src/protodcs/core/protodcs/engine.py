"""ProtoDCS: Algorithm 1 of the paper, one sample at a time.

`ProtoDCS._run` is the whole method. It calls the stages in the order of the paper; each one is a file of its own.
"""

import math
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from ...arrays import Feature
from ...errors import InputError, UsageError
from ..base import Capabilities, FeatureMethod
from ..decision import Decision, Decisions
from ..distribution import Group, ScoreDistribution
from ..numerics import gaussian_mixture
from ..numerics.linalg import products
from ..numerics.softmax import softmax_rows
from ..state import Arrays
from ..state_checks import Counters
from ..validation import check_features
from . import build
from .cache import flush, hold, offer
from .compiled import compare, is_compiled
from .config import ProtoDCSConfig
from .evolution import evolve, passes_gate
from .explain import ProtoDCSExplanation, explain
from .first_check import FirstCheck, check_openness, quality_of
from .openness import openness_of
from .prediction import predict
from .stages import Stages
from .state import ProtoDCSState
from .temporary import global_prototypes, temporary_prototypes
from .verification import fit_mixture, is_known, known_limit, verify


class ProtoDCS(FeatureMethod):
    """An open-set classifier over unit features that adapts to its stream.

    Args:
        prototypes: (K, d), one row per known class; normalised on entry. Or `Prototypes`, which engines share.
        classes: K unique names; None names them "0".."K-1".
        config: the settings, see `ProtoDCSConfig`.
        encoder: fingerprint of the encoder that makes the features, if known.

    >>> import numpy as np
    >>> engine = ProtoDCS(np.eye(3, 8), classes=["cat", "dog", "fox"])
    >>> engine.observe(np.eye(3, 8)[1]).label
    'dog'
    """

    name: ClassVar[str] = "protodcs"
    version: ClassVar[int] = 2
    capabilities: ClassVar[Capabilities] = Capabilities(
        batch_invariant=True, rotation_invariant=False, editable_classes=True, cost="prototypes"
    )
    config_type = ProtoDCSConfig
    score_names: ClassVar[Mapping[str, str]] = {
        "openness": "1 - openness", "openness_first": "1 - first openness", "posterior": "1 - p(unknown)",
        "prediction": "largest value of equation 9",
    }  # fmt: skip
    config: ProtoDCSConfig
    _memory: ProtoDCSState

    def probabilities(self, scores: NDArray[np.floating]) -> NDArray[np.float64]:
        """Return (N, K) class probabilities for the `scores` of decisions: their softmax, or their share of all."""
        values = np.asarray(scores, dtype=np.float64)
        if self.config.prediction_scale == "logit":
            return softmax_rows(values)
        total = values.sum(axis=1, keepdims=True)
        return np.divide(values, total, out=np.full_like(values, 1.0 / values.shape[1]), where=total > 0)

    def initial_cosines(self) -> NDArray[np.float64] | None:
        """Return the cosines (K,) of the latest feature with the initial prototypes; None once those have moved."""
        return None if self._memory.evolved else self._cosines

    def _advance(self, state: ProtoDCSState, feature: Feature, scores: bool) -> Decision:
        """Decide on a unit feature (d,) and learn from it."""
        return self._conclude(state, self._run(state, feature), scores)

    def _run(self, state: ProtoDCSState, feature: Feature) -> Stages:
        """Run Algorithm 1 on a sample f (d,)."""
        if self._compiled:
            return self._run_compiled(state, feature)

        # 1. First check: S = 1 - max(P_t f). If S < Theta_a, offer f to the queue of its class (Algorithm 2).
        first = check_openness(state, feature)
        offered = first.confident and self.config.cache_admission == "immediate"
        cached = offered and offer(state, first.nearest, feature, first.quality)

        # 2. Temporary prototypes: if S < Theta_b, P'_t and P'_v by one AdamW step; otherwise P_t and P_v.
        adapt = temporary_prototypes if first.trusted else global_prototypes
        temporary = adapt(state, feature, first)

        # 3. Final verification: p = P(unknown | S') with S' = 1 - max(P'_t f); known if p < Theta_p.
        p_unknown, known = verify(state, temporary.openness, first.trusted)

        # 4. Prediction: the class with the largest softmax(P'_t f / tau) + alpha exp(-beta (1 - P'_v f)).
        prediction = predict(state, temporary.cosines, temporary.affinity)

        # 5. Evolution: if AU < Theta_q, P_t becomes (1 - 1/n) P_t + (1/n) P'_t.
        passed = known and passes_gate(state, prediction)
        evolved = passed and evolve(state, feature, first.cosines, temporary, first.trusted)

        # Readings in which a sample enters its queue only after both checks.
        cached = cached or self._admit_later(state, feature, first, known, passed)
        return Stages(first, temporary, prediction, p_unknown, known, cached, evolved)

    def _admit_later(
        self, state: ProtoDCSState, feature: Feature, first: FirstCheck, known: bool, passed: bool
    ) -> bool:
        """Offer a sample to its queue after both checks, now or at the next refit. Return whether a queue changed."""
        admission = self.config.cache_admission
        if admission == "verified" and first.confident and known:
            return offer(state, first.nearest, feature, first.quality)
        if admission == "buffered" and first.confident and known:
            hold(state, first.nearest, feature, first.quality)
        if admission == "gated" and passed and self.config.visual_prototypes:
            hold(state, first.nearest, feature, quality_of(self.config, first.cosines))
        return admission in ("buffered", "gated") and state.refit_due and flush(state)

    def _run_compiled(self, state: ProtoDCSState, feature: Feature) -> Stages:
        """Run the same, with one compiled call for most of it."""
        first, temporary, prediction, cached, p_unknown = compare(state, feature)
        if p_unknown is None:
            p_unknown, known = verify(state, temporary.openness, first.trusted)
        else:
            known = is_known(state, temporary.openness, p_unknown)
        passed = known and passes_gate(state, prediction)
        evolved = passed and evolve(state, feature, first.cosines, temporary, first.trusted)
        cached = cached or self._admit_later(state, feature, first, known, passed)
        return Stages(first, temporary, prediction, p_unknown, known, cached, evolved)

    def _conclude(self, state: ProtoDCSState, stages: Stages, scores: bool) -> Decision:
        """Count a sample and return its decision."""
        first, temporary, prediction = stages.first, stages.temporary, stages.prediction
        self._cosines = first.cosines
        sequence = state.sequence
        state.sequence += 1
        state.learned += 1
        state.known += stages.known
        state.trusted += first.trusted
        return Decision(
            stages.known,
            prediction.best,
            self.classes[prediction.best] if stages.known else None,
            stages.p_unknown,
            temporary.openness,
            first.openness,
            self._score(stages),
            prediction.scores.astype(np.float32) if scores else None,
            prediction.aleatoric,
            prediction.epistemic,
            first.trusted,
            stages.cached,
            stages.evolved,
            sequence,
        )

    def _score(self, stages: Stages) -> float:
        if self.config.score == "openness":
            return 1.0 - stages.temporary.openness
        if self.config.score == "prediction":
            return float(stages.prediction.scores[stages.prediction.best])
        return 1.0 - (stages.first.openness if self.config.score == "openness_first" else stages.p_unknown)

    def explain(self, feature: NDArray[np.floating]) -> ProtoDCSExplanation:
        """Return what each stage would do with this feature, and why. Nothing changes."""
        with self._exclusive():
            values, before = self._checked(feature), self._memory
            after = before.fork()
            stages = self._run(after, values)
            decision = self._conclude(after, stages, True)
            explanation = explain(self.classes, values, (before, after), stages, decision)
            return explanation.nothing_kept() if self.frozen else explanation

    def score_distribution(self) -> ScoreDistribution:
        """Return the openness of recent samples, the two components of the mixture, and its boundary."""
        with self._exclusive():
            memory = self._memory
            groups: tuple[Group, ...] = ()
            if memory.fitted:
                fitted = zip(("known", "unknown"), gaussian_mixture.components(memory.mixture), strict=True)
                groups = tuple(
                    Group(name, one.weight, one.mean, math.sqrt(one.variance), math.sqrt(one.variance))
                    for name, one in fitted
                )
            return ScoreDistribution("openness", memory.mixture_window.sorted.copy(), known_limit(memory), groups)

    def calibrate(self, features: NDArray[np.floating]) -> bool:
        """Set Theta_c, the threshold until a mixture fits, from unlabelled features (N, d), known and unknown ones.

        Returns:
            True if a mixture fits the features: its boundary is the threshold now. False if none fits; then nothing has
            changed.
        """
        with self._exclusive():
            if self.frozen:
                raise UsageError("a frozen engine learns nothing: unfreeze it before you calibrate it")
            rows = check_features(features, self.dimension)
            if len(rows) < 4:
                raise InputError(f"calibration needs at least 4 features; given: {len(rows)}")
            openness = np.sort([openness_of(self.config, products(self._memory.unit_text, row)) for row in rows])
            parameters = fit_mixture(self.config, openness)
            if parameters is None:
                return False
            self._memory.cold_threshold = gaussian_mixture.boundary(parameters)
            return True

    def until_refit(self) -> int:
        """Return the number of samples until the mixture is fitted again."""
        return self.config.until_refit(self._memory.learned)

    @property
    def unknown_share(self) -> float | None:
        """Share of unknown samples among those that the engine learned from; None before the first."""
        memory = self._memory
        return 1.0 - memory.known / memory.learned if memory.learned else None

    def stats(self) -> dict[str, Any]:
        """Return numbers for monitoring, JSON-ready."""
        with self._exclusive():
            return {**super().stats(), **self._memory.stats()}

    # What the base class asks for.

    def _recount(self, learned: Decisions, decided: Decisions) -> None:
        super()._recount(learned, decided)
        self._memory.trusted += int(decided.trusted.sum()) - int(learned.trusted.sum())

    def _resize(self, classes: tuple[str, ...], width: int) -> None:
        super()._resize(classes, width)
        self._cosines = np.zeros(len(classes))
        self._compiled = is_compiled(self.config, len(classes))

    def _new_memory(self, initial: Feature) -> ProtoDCSState:
        return ProtoDCSState(self._prototypes, self.config)

    def _restored_memory(self, counters: Counters, arrays: Arrays) -> ProtoDCSState:
        return build.restored(self._prototypes, self.config, counters, arrays, trusted=False)

    def _trusted_memory(self, counters: Counters, arrays: Arrays) -> ProtoDCSState:
        return build.restored(self._prototypes, self.config, counters, arrays, trusted=True)

    def _initial_prototypes(self, memory: ProtoDCSState) -> Feature:
        return memory.initial

    def _with_classes(self, memory: ProtoDCSState, kept: NDArray[np.int64], added: Feature) -> ProtoDCSState:
        return build.with_classes(memory, kept, added)

"""Explain a decision: one record per stage, in numbers and in sentences.

An explanation compares the state before a sample with a copy that has learned from it. So it costs `observe` nothing,
and cannot contradict it.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from html import escape
from textwrap import fill
from typing import Any

import numpy as np

from ...arrays import Feature
from ..decision import Decision
from ..numerics.evidence import uncertainty
from ..numerics.gaussian_mixture import components
from ..numerics.linalg import normalised, products
from .cache import offer
from .evolution import normalised_entropy
from .first_check import FirstCheck
from .residual import text_gradient
from .stages import Stages
from .state import ProtoDCSState
from .temporary import moved_text

# Of the best classes: in the numbers, and in the sentence.
_SHOWN, _TOLD = 5, 3
# Columns of the printed text, and of the names of the stages.
_WIDTH, _MARGIN = 76, 14


@dataclass(frozen=True, slots=True)
class FirstCheckStage:
    """Openness against both gates."""

    predicted: str
    openness: float
    cache_gate: float
    trust_gate: float
    confident: bool
    trusted: bool
    reason: str


@dataclass(frozen=True, slots=True)
class CacheStage:
    """The queue the sample belongs to; `nearest` lists (cosine, stored uncertainty), nearest first."""

    queue: str
    held: int
    size: int
    nearest: list[tuple[float, float]]
    changed: bool
    reason: str


@dataclass(frozen=True, slots=True)
class TemporaryStage:
    """Uncertainty before and after the temporary step; `text_step` is the mean distance from P_t to P'_t."""

    stepped: bool
    gradient_norm: float
    text_step: float
    aleatoric_before: float
    aleatoric_after: float
    epistemic_before: float
    epistemic_after: float
    openness_before: float
    openness_after: float
    reason: str


@dataclass(frozen=True, slots=True)
class VerificationStage:
    """The mixture and the posterior; `mixture` lists (weight, mean, variance) of known and unknown.

    They are over openness; so is the boundary.
    """

    fitted: bool
    mixture: list[tuple[float, float, float]] | None
    boundary: float
    p_unknown: float
    known: bool
    reason: str


@dataclass(frozen=True, slots=True)
class PredictionStage:
    """The best classes with their text term and their affinity, which add up to the score, and the normalised entropy.

    The entropy is that of the logits that predict, over log2 K. Without text prototypes, the affinity alone is the
    score.
    """

    parts: list[tuple[str, float, float]]
    entropy: float
    reason: str


@dataclass(frozen=True, slots=True)
class EvolutionStage:
    """Whether the text prototypes would move, and what held them back.

    `measured` is compared with `threshold`. Drift is the mean of 1 - cosine with the initial prototypes.
    """

    gate: str
    measured: float
    threshold: float | None
    passed: bool
    evolved: bool
    drift_before: float
    drift_after: float
    reason: str


@dataclass(frozen=True, slots=True)
class ProtoDCSExplanation:
    """What each stage would do with one feature. `print` shows sentences, `to_dict` is for programs.

    `best` lists the best classes with their scores.
    """

    decision: Decision
    first_check: FirstCheckStage
    cache: CacheStage
    temporary: TemporaryStage
    verification: VerificationStage
    prediction: PredictionStage
    best: list[tuple[str, float]]
    evolution: EvolutionStage

    def nothing_kept(self) -> "ProtoDCSExplanation":
        """Return the same for a frozen engine, which decides alike and keeps nothing."""
        frozen = "the engine is frozen, nothing is kept; otherwise: "
        return replace(
            self,
            decision=replace(self.decision, cached=False, evolved=False),
            cache=replace(self.cache, changed=False, reason=frozen + self.cache.reason),
            evolution=replace(
                self.evolution,
                evolved=False,
                drift_after=self.evolution.drift_before,
                reason=frozen + self.evolution.reason,
            ),
        )

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON-ready dictionary."""
        stages = ("first_check", "cache", "temporary", "verification", "prediction", "evolution")
        return {
            "decision": self.decision.to_dict(),
            **{stage: asdict(getattr(self, stage)) for stage in stages},
            "best": self.best,
        }

    def _repr_html_(self) -> str:
        """Return the sentences for notebooks."""
        return f"<pre>{escape(str(self))}</pre>"

    def __str__(self) -> str:
        answer = f"known: {self.decision.label}" if self.decision.known else "unknown"
        stages = {
            "Decision": f"{answer} (p_unknown {self.decision.p_unknown:.3f})",
            "First check": self.first_check.reason,
            "Cache": self.cache.reason,
            "Temporary": self.temporary.reason,
            "Verification": self.verification.reason,
            "Prediction": self.prediction.reason,
            "Evolution": self.evolution.reason,
        }
        return "\n".join(
            fill(reason, _WIDTH, initial_indent=f"{stage:{_MARGIN}}", subsequent_indent=" " * _MARGIN)
            for stage, reason in stages.items()
        )


def explain(
    classes: Sequence[str],
    feature: Feature,
    states: tuple[ProtoDCSState, ProtoDCSState],
    stages: Stages,
    decision: Decision,
) -> ProtoDCSExplanation:
    """Explain a decision from the states before and after the sample, and from the results of the stages."""
    before, after = states
    scores = stages.prediction.scores
    first = _first_check(after, stages.first, classes[stages.first.nearest])
    return ProtoDCSExplanation(
        decision=decision,
        first_check=first,
        cache=_cache(before, feature, stages, first, after.passed > before.passed),
        temporary=_temporary(before, feature, stages),
        verification=_verification(after, decision),
        prediction=_prediction(classes, stages),
        best=[(classes[k], float(scores[k])) for k in np.argsort(-scores, kind="stable")[:_SHOWN]],
        evolution=_evolution(before, after, stages),
    )


def _first_check(after: ProtoDCSState, first: FirstCheck, predicted: str) -> FirstCheckStage:
    config, openness = after.config, first.openness
    cache_gate = after.gate_window.quantile(config.cache_quantile)
    trust_gate = after.gate_window.quantile(config.trust_quantile)
    confident = openness < cache_gate or not config.first_check
    if not config.first_check:
        reason = "switched off: every sample is confident and trusted"
    elif confident:
        reason = f"openness {openness:.4f} is below the cache gate {cache_gate:.4f}: confident and trusted"
    elif first.trusted:
        reason = f"openness {openness:.4f} is below the trust gate {trust_gate:.4f} only: trusted, not cached"
    else:
        reason = f"openness {openness:.4f} is not below the trust gate {trust_gate:.4f}: not trusted"
    return FirstCheckStage(predicted, openness, cache_gate, trust_gate, confident, first.trusted, reason)


def _cache(before: ProtoDCSState, feature: Feature, stages: Stages, first: FirstCheckStage, passed: bool) -> CacheStage:
    config, k, queue = before.config, stages.first.nearest, first.predicted
    held = int(before.counts[k])
    cosines = products(before.cache[k, :held], feature)
    nearest = [(float(cosines[i]), float(before.quality[k, i])) for i in np.argsort(-cosines, kind="stable")]
    similar = bool(nearest) and nearest[0][0] > config.cache_similarity
    if not config.visual_prototypes:
        reason = "switched off"
    elif config.cache_admission == "gated" and not passed:
        reason = "not offered: admission is 'gated' and the sample did not pass the quality gate"
    elif config.cache_admission != "gated" and not first.confident:
        reason = "not offered: the sample is not confident"
    elif config.cache_admission != "immediate" and not stages.known:
        reason = f"not offered: admission is '{config.cache_admission}' and the sample is not known"
    elif config.cache_admission in ("buffered", "gated"):
        reason = "held back until the mixture is fitted again" + (", which is now" if stages.cached else "")
    elif not stages.cached:
        reason = f"refused: a cached feature at cosine {nearest[0][0]:.3f} shows the same and is less uncertain"
    elif similar:
        reason = f"replaces the cached feature at cosine {nearest[0][0]:.3f}, which is more uncertain"
    elif held < config.cache_size:
        reason = f"added as number {held + 1} of {config.cache_size} to the queue of {queue!r}"
    else:
        reason = f"replaces the most uncertain feature in the full queue of {queue!r}"
    return CacheStage(queue, held, config.cache_size, nearest, stages.cached, reason)


def _temporary(before: ProtoDCSState, feature: Feature, stages: Stages) -> TemporaryStage:
    config, first, temporary, prediction = before.config, stages.first, stages.temporary, stages.prediction
    aleatoric, epistemic = uncertainty(config.evidence_scale * first.cosines)
    stepped = first.trusted and config.text_prototypes and config.text_rate > 0
    if stepped:
        reason = f"one step moves openness by {temporary.openness - first.openness:+.5f}"
        if config.evidence_logits == "text":
            reason += f" and AU from {aleatoric:.5f} to {prediction.aleatoric:.5f}"
    elif first.trusted:
        reason = "trusted, but the text prototypes are not adapted (text_rate or text_prototypes is off)"
    else:
        reason = "no step: the sample is not trusted, the global prototypes answer"
    gradient_norm, text_step = _text_step(before, feature, stages) if stepped else (0.0, 0.0)
    return TemporaryStage(
        stepped,
        gradient_norm,
        text_step,
        aleatoric,
        prediction.aleatoric,
        epistemic,
        prediction.epistemic,
        first.openness,
        temporary.openness,
        reason,
    )


def _text_step(before: ProtoDCSState, feature: Feature, stages: Stages) -> tuple[float, float]:
    """Return the length of the gradient by the text residual, and the mean distance from P_t to P'_t.

    The queues are as they were at the step.
    """
    state, first = before, stages.first
    if stages.cached and before.config.cache_admission == "immediate":
        state = before.fork()
        offer(state, first.nearest, feature, first.quality)
    slopes, classes = stages.temporary.slopes, np.arange(len(state.text))
    gradient = text_gradient(state.text, state.inverse_norms, first.cosines, slopes, feature, state.text_alignment)
    moved = normalised(moved_text(state, feature, first.cosines, slopes, classes))
    return float(np.linalg.norm(gradient)), float(np.linalg.norm(moved - state.unit_text, axis=1).mean())


def _prediction(classes: Sequence[str], stages: Stages) -> PredictionStage:
    scores, affinity = stages.prediction.scores, stages.temporary.affinity
    best = np.argsort(-scores, kind="stable")[:_SHOWN]
    parts = [(classes[k], float(scores[k] - affinity[k]), float(affinity[k])) for k in best]
    reason = ", ".join(
        f"{name} {text + visual:.3f} ({text:.3f} + {visual:.3f})" for name, text, visual in parts[:_TOLD]
    )
    entropy = normalised_entropy(stages.prediction.entropy, len(scores))
    return PredictionStage(parts, entropy, f"text + affinity: {reason}")


def _verification(after: ProtoDCSState, decision: Decision) -> VerificationStage:
    config, mixture = after.config, None
    side = "known" if decision.known else "unknown"
    if not config.verification:
        reason = f"switched off: {'trusted' if decision.trusted else 'not trusted'} by the first check means {side}"
    elif after.fitted:
        known, unknown = components(after.mixture)
        mixture = [(*known,), (*unknown,)]
        reason = (
            f"openness {decision.openness:.4f} between means {known.mean:.4f} (known) and {unknown.mean:.4f} (unknown) "
            f"gives p_unknown {decision.p_unknown:.3f}: {side}"
        )
        if config.target_false_reject is not None:
            reason += f", by the tail that loses {config.target_false_reject:.1%} of the known"
    else:
        relation = "below" if decision.openness < after.cold_threshold else "not below"
        reason = (
            f"no mixture in force: openness {decision.openness:.4f} is {relation} {after.cold_threshold:.4f}: {side}"
        )
    return VerificationStage(after.fitted, mixture, after.cold_threshold, decision.p_unknown, decision.known, reason)


def _evolution(before: ProtoDCSState, after: ProtoDCSState, stages: Stages) -> EvolutionStage:
    config, prediction = before.config, stages.prediction
    passed = after.passed > before.passed
    threshold: float | None = before.evolution_threshold
    if config.evolution_gate == "quantile":
        window = after.quality_window
        threshold = window.quantile(config.evolution_quantile) if stages.known and window.size else None
    measured, quantity = prediction.aleatoric, "AU"
    if config.evolution_gate == "entropy":
        measured, quantity = normalised_entropy(prediction.entropy, len(prediction.scores)), "normalised entropy"
    at = "" if threshold is None else f" at {threshold:.3g}"
    drift_before, drift_after = text_drift(before), text_drift(after)
    if stages.evolved:
        reason = f"the text prototypes move: {quantity} {measured:.3g} passed the {config.evolution_gate!r} gate{at}; "
        reason += f"their mean drift changes from {drift_before:.2e} to {drift_after:.2e}"
    elif config.evolution_gate == "off" or not config.text_prototypes:
        reason = "switched off"
    elif not stages.known:
        reason = "held back: the sample is not known"
    elif not passed:
        reason = f"held back: the {config.evolution_gate!r} gate{at} did not open for {quantity} {measured:.3g}"
    else:
        reason = "held back: it passed the gate but was not trusted, so there is no step to take over"
    return EvolutionStage(
        config.evolution_gate, measured, threshold, passed, stages.evolved, drift_before, drift_after, reason
    )


def text_drift(state: ProtoDCSState) -> float:
    """Return the mean of one minus the cosine of the text prototypes with the initial ones."""
    return float((1.0 - products(state.initial, state.unit_text)).mean()) if state.evolved else 0.0

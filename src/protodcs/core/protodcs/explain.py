"""Why an engine would decide as it would: one record per stage, in numbers and in words.

An explanation is read off the memory before a sample and off forks that have seen it, so explaining costs the hot
path nothing and cannot disagree with it.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .. import evidence
from ..base import Feature
from ..decision import Decision
from .config import ProtoDCSConfig
from .memory import Memory
from .residual import text_gradient
from .scratch import Scratch

_SHOWN = 5


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
    """Uncertainty before and after the temporary step."""

    stepped: bool
    gradient_norm: float
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
class EvolutionStage:
    """Whether the text prototypes would move, and what held them back."""

    gate: str
    threshold: float | None
    passed: bool
    evolved: bool
    reason: str


@dataclass(frozen=True, slots=True)
class ProtoDCSExplanation:
    """What each stage would do with one feature. `print` it for sentences, `to_dict` it for a program.

    `best` lists the best classes with their scores.
    """

    decision: Decision
    first_check: FirstCheckStage
    cache: CacheStage
    temporary: TemporaryStage
    verification: VerificationStage
    best: list[tuple[str, float]]
    evolution: EvolutionStage

    def nothing_kept(self) -> "ProtoDCSExplanation":
        """The same for a frozen engine, which decides likewise and keeps nothing."""
        frozen = "the engine is frozen, nothing is kept; otherwise: "
        return replace(
            self,
            decision=replace(self.decision, cached=False, evolved=False),
            cache=replace(self.cache, changed=False, reason=frozen + self.cache.reason),
            evolution=replace(self.evolution, evolved=False, reason=frozen + self.evolution.reason),
        )

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready dictionary."""
        stages = ("first_check", "cache", "temporary", "verification", "evolution")
        return {
            "decision": self.decision.to_dict(),
            **{stage: asdict(getattr(self, stage)) for stage in stages},
            "best": self.best,
        }

    def __str__(self) -> str:
        answer = f"known: {self.decision.label}" if self.decision.known else "unknown"
        best = ", ".join(f"{name} {value:.3f}" for name, value in self.best)
        lines = [
            f"Decision      {answer} (p_unknown {self.decision.p_unknown:.3f})",
            f"First check   {self.first_check.reason}",
            f"Cache         {self.cache.reason}",
            f"Temporary     {self.temporary.reason}",
            f"Verification  {self.verification.reason}",
            f"Prediction    {best}",
            f"Evolution     {self.evolution.reason}",
        ]
        return "\n".join(lines)


def explanation(
    config: ProtoDCSConfig,
    classes: Sequence[str],
    feature: Feature,
    memories: tuple[Memory, Memory, Memory],
    decision: Decision,
    scratch: Scratch,
) -> ProtoDCSExplanation:
    """Read the stages off the memory before the sample, when it takes its step, and after it.

    `scratch` holds the vectors of the last of these.
    """
    before, stepped, after = memories
    predicted = int(scratch.before.argmax())
    first = _first_check(config, classes[predicted], after, decision)
    return ProtoDCSExplanation(
        decision=decision,
        first_check=first,
        cache=_cache(config, classes[predicted], predicted, feature, before, decision, first),
        temporary=_temporary(config, feature, stepped, decision, scratch),
        verification=_verification(config, after, decision),
        best=[(classes[k], float(scratch.scores[k])) for k in np.argsort(-scratch.scores, kind="stable")[:_SHOWN]],
        evolution=_evolution(config, before, after, decision, scratch),
    )


def _first_check(config: ProtoDCSConfig, predicted: str, after: Memory, decision: Decision) -> FirstCheckStage:
    openness = decision.openness_first
    cache_gate = after.gate_window.quantile(config.cache_quantile)
    trust_gate = after.gate_window.quantile(config.trust_quantile)
    confident = openness < cache_gate or not config.first_check
    if not config.first_check:
        reason = "switched off: every sample is confident and trusted"
    elif confident:
        reason = f"openness {openness:.4f} is below the cache gate {cache_gate:.4f}: confident and trusted"
    elif decision.trusted:
        reason = f"openness {openness:.4f} is below the trust gate {trust_gate:.4f} only: trusted, not cached"
    else:
        reason = f"openness {openness:.4f} is not below the trust gate {trust_gate:.4f}: not trusted"
    return FirstCheckStage(predicted, openness, cache_gate, trust_gate, confident, decision.trusted, reason)


def _cache(
    config: ProtoDCSConfig,
    queue: str,
    k: int,
    feature: Feature,
    before: Memory,
    decision: Decision,
    first: FirstCheckStage,
) -> CacheStage:
    held = int(before.counts[k])
    cosines = before.cache[k, :held] @ feature
    nearest = [(float(cosines[i]), float(before.quality[k, i])) for i in np.argsort(-cosines, kind="stable")]
    similar = bool(nearest) and nearest[0][0] > config.cache_similarity
    if not config.visual_prototypes:
        reason = "switched off"
    elif not first.confident:
        reason = "not offered: the sample is not confident"
    elif config.cache_admission != "immediate" and not decision.known:
        reason = f"not offered: admission is '{config.cache_admission}' and the sample is not known"
    elif config.cache_admission == "buffered":
        reason = "held back until the mixture is fitted again" + (", which is now" if decision.cached else "")
    elif not decision.cached:
        reason = f"refused: a cached feature at cosine {nearest[0][0]:.3f} shows the same and is less uncertain"
    elif similar:
        reason = f"replaces the cached feature at cosine {nearest[0][0]:.3f}, which is more uncertain"
    elif held < config.cache_size:
        reason = f"added as number {held + 1} of {config.cache_size} to the queue of {queue!r}"
    else:
        reason = f"replaces the most uncertain feature in the full queue of {queue!r}"
    return CacheStage(queue, held, config.cache_size, nearest, decision.cached, reason)


def _temporary(
    config: ProtoDCSConfig, feature: Feature, memory: Memory, decision: Decision, scratch: Scratch
) -> TemporaryStage:
    aleatoric, epistemic = evidence.uncertainty(scratch.before, np.empty_like(scratch.before))
    stepped = decision.trusted and config.text_prototypes and config.text_rate > 0
    norm = 0.0
    if stepped:
        gradient = np.empty_like(memory.text)
        text_gradient(
            memory.text, memory.inverse_norms, memory.pull, memory.pull_scale, feature, scratch.before, scratch.slopes,
            gradient,
        )  # fmt: skip
        norm = float(np.linalg.norm(gradient))
        change = decision.openness - decision.openness_first
        reason = f"one step moves openness by {change:+.5f}"
        if config.evidence_logits == "text":
            reason += f" and AU from {aleatoric:.5f} to {decision.aleatoric:.5f}"
    elif decision.trusted:
        reason = "trusted, but the text prototypes are not adapted (text_rate or text_prototypes is off)"
    else:
        reason = "no step: the sample is not trusted, the global prototypes answer"
    return TemporaryStage(
        stepped,
        norm,
        aleatoric,
        decision.aleatoric,
        epistemic,
        decision.epistemic,
        decision.openness_first,
        decision.openness,
        reason,
    )


def _parts(parameters: NDArray[np.float64]) -> list[tuple[float, float, float]]:
    """(weight, mean, variance) of the known and of the unknown component."""
    weight, mean, variance, other_weight, other_mean, other_variance = parameters.tolist()
    return [(weight, mean, variance), (other_weight, other_mean, other_variance)]


def _verification(config: ProtoDCSConfig, after: Memory, decision: Decision) -> VerificationStage:
    parts = None
    side = "known" if decision.known else "unknown"
    if not config.verification:
        reason = f"switched off: {'trusted' if decision.trusted else 'not trusted'} by the first check means {side}"
    elif after.fitted:
        known, unknown = parts = _parts(after.mixture)
        reason = (
            f"openness {decision.openness:.4f} between means {known[1]:.4f} (known) and {unknown[1]:.4f} (unknown) "
            f"gives p_unknown {decision.p_unknown:.3f}: {side}"
        )
        if config.target_false_reject is not None:
            reason += f", by the tail that loses {config.target_false_reject:.1%} of the known"
    else:
        relation = "below" if decision.openness < after.cold_threshold else "not below"
        reason = (
            f"no mixture in force: openness {decision.openness:.4f} is {relation} {after.cold_threshold:.4f}: {side}"
        )
    return VerificationStage(after.fitted, parts, after.cold_threshold, decision.p_unknown, decision.known, reason)


def _evolution(
    config: ProtoDCSConfig, before: Memory, after: Memory, decision: Decision, scratch: Scratch
) -> EvolutionStage:
    passed = after.passed > before.passed
    threshold: float | None = before.evolution_threshold
    if config.evolution_gate == "quantile":
        window = after.quality_window
        threshold = window.quantile(config.evolution_quantile) if decision.known and window.size else None
    if decision.evolved:
        reason = f"the text prototypes move: the sample passed the {config.evolution_gate!r} gate"
    elif config.evolution_gate == "off" or not config.text_prototypes:
        reason = "switched off"
    elif not decision.known:
        reason = "held back: the sample is not known"
    elif not passed:
        at = "" if threshold is None else f" at {threshold:.5f}"
        measured = f"AU {decision.aleatoric:.5f}"
        if config.evolution_gate == "entropy":
            entropy = evidence.softmax(scratch.after / config.temperature, np.empty_like(scratch.after))
            measured = f"normalised entropy {entropy / np.log(max(len(scratch.after), 2)):.5f}"
        reason = f"held back: the {config.evolution_gate!r} gate{at} did not open for {measured}"
    else:
        reason = "held back: it passed the gate but was not trusted, so there is no step to take over"
    return EvolutionStage(config.evolution_gate, threshold, passed, decision.evolved, reason)

"""Explain how StreamDCS would decide on one feature, in numbers and in sentences.

An explanation is read from the state before the sample and from a copy that has seen it. It costs `observe` nothing and
cannot disagree with it.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..decision import Decision
from .class_baseline import NO_NOISE_FLOOR
from .signal_weights import TEXT
from .state import StreamState
from .verification import Verification

_SHOWN = 5


@dataclass(frozen=True, slots=True)
class FamiliarityStage:
    """The score of the sample.

    Attributes:
        text: the score from the text alone.
        noise_floor: the text score that noise would reach.
        signals: the value of every other signal.
        separation: the AUROC of each signal between the two tails of the text score; None if it is not measured.
        weights: the weight of each signal.
        unknown_memory, known_memory: number of stored samples of either kind.
        familiarity: the weighted sum of all signals, on the scale of the text score.
        reason: the same in a sentence.
    """

    text: float
    noise_floor: float
    signals: dict[str, float]
    separation: dict[str, float | None]
    weights: dict[str, float]
    unknown_memory: int
    known_memory: int
    familiarity: float
    reason: str


@dataclass(frozen=True, slots=True)
class DecisionStage:
    """The decision between known and unknown.

    Attributes:
        fitted: whether the mixture decides; otherwise the fallback threshold does.
        mixture: (weight, mean, variance) of the known and of the unknown component, over minus the familiarity.
        boundary: minus the familiarity at which the decision changes.
        p_unknown, known: the decision.
        reason: the same in a sentence.
    """

    fitted: bool
    mixture: list[tuple[float, float, float]] | None
    boundary: float
    p_unknown: float
    known: bool
    reason: str


@dataclass(frozen=True, slots=True)
class StreamDCSExplanation:
    """How StreamDCS would decide on one feature. `print` it for sentences; `to_dict` is for programs.

    Attributes:
        decision: what `observe` would return.
        familiarity: the score of the sample.
        verification: the decision between known and unknown.
        best: the best classes with their logits.
        class_bias: what the class bias adds to the logit of the first of them; None if there is no class bias.
    """

    decision: Decision
    familiarity: FamiliarityStage
    verification: DecisionStage
    best: list[tuple[str, float]]
    class_bias: float | None

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON-ready dictionary."""
        return {
            "decision": self.decision.to_dict(),
            "familiarity": asdict(self.familiarity),
            "verification": asdict(self.verification),
            "best": self.best,
            "class_bias": self.class_bias,
        }

    def __str__(self) -> str:
        answer = f"known: {self.decision.label}" if self.decision.known else "unknown"
        best = ", ".join(f"{name} {value:.3f}" for name, value in self.best)
        if self.class_bias is not None:
            best += f"; the class bias of {self.best[0][0]} is {self.class_bias:+.3f}"
        return "\n".join(
            [
                f"Decision      {answer} (p_unknown {self.decision.p_unknown:.3f})",
                f"Familiarity   {self.familiarity.reason}",
                f"Verification  {self.verification.reason}",
                f"Prediction    {best}",
            ]
        )


def explain(
    classes: Sequence[str], before: StreamState, after: StreamState, decision: Decision, logits: NDArray[np.float64]
) -> StreamDCSExplanation:
    """Return the explanation of a decision, from the states before and after it and the logits (K,) behind it."""
    return StreamDCSExplanation(
        decision=decision,
        familiarity=_familiarity(after.verification),
        verification=_verification(after.verification, decision),
        best=[(classes[k], float(logits[k])) for k in np.argsort(-logits, kind="stable")[:_SHOWN]],
        # Adding zero turns -0.0 into 0.0: a restored state may differ in that sign.
        class_bias=None if before.class_bias is None else float(before.class_bias.logits[decision.index]) + 0.0,
    )


def _familiarity(after: Verification) -> FamiliarityStage:
    weights, measured = after.signal_weights.by_name(), after.signal_weights.separations()
    unknown, known = after.bank.held
    signals = dict(zip(weights, after.signals[1:], strict=True))
    separation = {signal: measured.get(signal) for signal in weights}
    text, noise_floor = after.signals[TEXT], after.baseline.noise_floor
    familiarity = after.familiarity
    used = [f"{name} {signals[name]:+.2f} (weight {weights[name]:.2f})" for name in weights if weights[name] > 0]
    reason = f"text {text:.2f}"
    if noise_floor > NO_NOISE_FLOOR:
        reason += f", {text / noise_floor:.2f} times the noise floor"
    if used:
        reason += f"; with {', '.join(used)} it is {familiarity:.2f}"
    elif after.config.uses_memory:
        reason += "; the memory signals have no weight yet"
    return FamiliarityStage(text, noise_floor, signals, separation, weights, unknown, known, familiarity, reason)


def _verification(after: Verification, decision: Decision) -> DecisionStage:
    bimodality, concentration, boundary = after.bimodality, after.fallback.concentration, after.boundary
    side, mixture = "known" if decision.known else "unknown", None
    if bimodality.fitted:
        weight, mean, variance, other_weight, other_mean, other_variance = bimodality.parameters.tolist()
        mixture = [(weight, mean, variance), (other_weight, other_mean, other_variance)]
        reason = f"the stream has two groups, around {-mean:.2f} and around {-other_mean:.2f}"
    elif concentration.all_unknown:
        reason = "the stream looks like unknown samples only, so the text score decides"
    elif concentration.alarm > 0:
        reason = "two groups are not detected, but the less familiar half concentrates on few classes"
    else:
        reason = "two groups are not detected"
    reason += f"; the boundary is {-boundary:.2f}: {side}"
    if after.targeted:
        reason += f", by the boundary that rejects {after.config.target_false_reject:.1%} of the known samples"
    return DecisionStage(bimodality.fitted, mixture, boundary, decision.p_unknown, decision.known, reason)

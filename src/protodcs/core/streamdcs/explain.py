"""Explain how StreamDCS would decide on one feature, in numbers and in sentences.

An explanation is read from the state that decides. It costs `observe` nothing and cannot disagree with it.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from html import escape
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..decision import FEW_SAMPLES, POSSIBLE_SHIFT, Decision
from .state import StreamState
from .verification import Verification

_SHOWN = 5
# Both backends compute the text score, and may round it differently.
_ROUNDING = 1e-9


@dataclass(frozen=True, slots=True)
class VerificationStage:
    """The decision between known and unknown.

    Attributes:
        text_score: the score by the class names alone.
        head_score: what the linear head adds to it; negative for a sample on its unknown side.
        correction_score: what corrections of similar samples add to it.
        score: the sum of the three.
        threshold: the score below which a sample is unknown; None before the first one is fitted.
        two_groups: 0 to 1, how far the stream shows a separate group of unknown samples.
        share_unknown: estimated share of unknown samples; None before the first threshold.
        reason: the same in a sentence.
    """

    text_score: float
    head_score: float
    correction_score: float
    score: float
    threshold: float | None
    two_groups: float
    share_unknown: float | None
    reason: str


@dataclass(frozen=True, slots=True)
class StreamDCSExplanation:
    """How StreamDCS would decide on one feature. `print` it for sentences; `to_dict` is for programs.

    Attributes:
        decision: what `observe` would return.
        verification: the decision between known and unknown.
        best: the best classes with their logits.
        class_bias: what the class bias adds to the logit of the first of them; None if there is no class bias.
    """

    decision: Decision
    verification: VerificationStage
    best: list[tuple[str, float]]
    class_bias: float | None

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON-ready dictionary."""
        return {
            "decision": self.decision.to_dict(),
            "verification": asdict(self.verification),
            "best": self.best,
            "class_bias": self.class_bias,
        }

    def _repr_html_(self) -> str:
        """Return the sentences for notebooks."""
        return f"<pre>{escape(str(self))}</pre>"

    def __str__(self) -> str:
        answer = f"known: {self.decision.label}" if self.decision.known else "unknown"
        answer += ", unsure" if self.decision.unsure else ""
        best = ", ".join(f"{name} {value:.3f}" for name, value in self.best)
        if self.class_bias is not None:
            best += f"; the class bias of {self.best[0][0]} is {self.class_bias:+.3f}"
        return "\n".join(
            [
                f"Decision      {answer} (p_unknown {self.decision.p_unknown:.3f})",
                f"Verification  {self.verification.reason}",
                f"Prediction    {best}",
            ]
        )


def explain(
    classes: Sequence[str],
    memory: StreamState,
    signals: NDArray[np.float64],
    decision: Decision,
) -> StreamDCSExplanation:
    """Return the explanation of the latest decision, from the state and the signals (4,) behind it."""
    logits = memory.logits
    return StreamDCSExplanation(
        decision=decision,
        verification=_verification(memory.verification, signals, decision),
        best=[(classes[k], float(logits[k])) for k in np.argsort(-logits, kind="stable")[:_SHOWN]],
        # Adding zero turns -0.0 into 0.0: a restored state may differ in that sign.
        class_bias=None if memory.class_bias is None else float(memory.class_bias.logits[decision.index]) + 0.0,
    )


def _verification(verification: Verification, signals: NDArray[np.float64], decision: Decision) -> VerificationStage:
    rule, score = verification.rule, decision.score
    if rule is None:
        reason = f"{verification.seen} samples are too few for a threshold"
        if not decision.known:
            reason += "; no class stands out from the others"
        return VerificationStage(score, 0.0, 0.0, score, None, 0.0, None, reason)
    text, plain = verification.text_score(signals), verification.decide(signals).score
    corrected = score - plain if abs(score - plain) > _ROUNDING else 0.0
    reason = f"score {score:.2f}, threshold {rule.threshold:.2f}"
    if abs(plain - text) > _ROUNDING:
        reason += f"; the text score is {text:.2f}, and the linear head adds {plain - text:+.2f}"
    if corrected:
        reason += f"; corrections of similar samples add {corrected:+.2f}"
    if rule.shows_two_groups:
        reason += f"; the stream shows two groups, about {rule.share:.0%} of the samples are unknown"
    else:
        target = verification.config.target_false_reject
        reason += f"; the stream shows one group, and the lowest {target:.0%} of its known samples are rejected"
    warnings = {
        POSSIBLE_SHIFT: "; the latest samples score lower than earlier ones: known images are probably rejected",
        FEW_SAMPLES: f"; only {verification.seen} samples so far",
    }
    reason += warnings.get(decision.reason or "", "")
    return VerificationStage(text, plain - text, corrected, score, rule.threshold, rule.evidence, rule.share, reason)

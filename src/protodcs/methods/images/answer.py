"""From what a method over images computed for a batch to `Decisions`, one row per image.

Everything is float64 numpy here. Nothing here knows a network, and no value that is not finite leaves it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...arrays import Floats
from ...core.decision import Decisions
from ...core.numerics.evidence import uncertainty
from ...core.numerics.softmax import softmax_rows

# The least probability whose logarithm is taken.
_LEAST = 1e-30


@dataclass(frozen=True, slots=True, eq=False)
class Answer:
    """What was found for a batch of N images and K classes.

    Attributes:
        cosines: (N, K) behind openness and uncertainty.
        first: (N, K), the same before this batch was learned from.
        scores: (N, K), such that their softmax at the method's temperature are the class probabilities.
        score: (N,), the familiarity.
        trusted: (N,), whether the sample took part in the loss.
        p_unknown: (N,); a sample is known below one half.
    """

    cosines: Floats
    first: Floats
    scores: Floats
    score: Floats
    trusted: NDArray[np.bool_]
    p_unknown: Floats

    @property
    def finite(self) -> bool:
        """Whether all numbers are."""
        parts = (self.cosines, self.first, self.scores, self.score, self.p_unknown)
        return all(np.isfinite(part).all() for part in parts)


def to_decisions(answer: Answer, classes: Sequence[str], sequence: int) -> Decisions:
    """One row per image, counted on from `sequence`."""
    index = answer.scores.argmax(axis=1)
    rows = np.arange(len(index))
    uncertainties = np.array([uncertainty(row) for row in answer.cosines])
    nothing = np.zeros(len(index), dtype=np.bool_)
    return _filled(
        classes,
        known=answer.p_unknown < 0.5,
        index=index,
        p_unknown=answer.p_unknown,
        openness=1.0 - answer.cosines[rows, index],
        openness_first=1.0 - answer.first.max(axis=1),
        score=answer.score,
        aleatoric=uncertainties[:, 0],
        epistemic=uncertainties[:, 1],
        trusted=answer.trusted,
        cached=nothing,
        evolved=nothing.copy(),
        sequence=np.arange(sequence, sequence + len(index)),
        scores=answer.scores.astype(np.float32),
    )


def log_scores(probabilities: Floats, temperature: float) -> Floats:
    """Scores whose softmax at this temperature are the probabilities."""
    logs: Floats = temperature * np.log(np.maximum(probabilities, _LEAST))
    return logs


def softmax(scores: NDArray[np.floating], temperature: float) -> Floats:
    """(N, K) probabilities for scores (N, K)."""
    return softmax_rows(np.asarray(scores, dtype=np.float64) / temperature)


def _filled(classes: Sequence[str], **columns: NDArray[Any]) -> Decisions:
    """Decisions from their columns, without making a row for each first."""
    decisions = Decisions([], classes)
    for name, column in columns.items():
        empty = getattr(decisions, name)
        setattr(decisions, name, column if empty is None else column.astype(empty.dtype, copy=False))
    return decisions

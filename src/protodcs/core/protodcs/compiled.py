"""The stages 1, 2 and 4 of Algorithm 1 in one compiled call, for the usual readings of the paper.

It works on the arrays of the state and gives the answers of the numpy code. What happens rarely stays in numpy: the
first feature of a queue, a refit, an evolution.
"""

from typing import NamedTuple

import numpy as np

from ...arrays import Feature
from .._native import native
from .._native.interface import ProtoDCSStep
from .alignment import REBUILD_AFTER
from .cache import place
from .config import ProtoDCSConfig
from .first_check import FirstCheck
from .prediction import Prediction
from .state import ProtoDCSState
from .temporary import Temporary


class Compared(NamedTuple):
    """A sample compared with all prototypes; `p_unknown` is None if the mixture was not asked."""

    first: FirstCheck
    temporary: Temporary
    prediction: Prediction
    cached: bool
    p_unknown: float | None


def is_compiled(config: ProtoDCSConfig, classes: int) -> bool:
    """Whether the compiled step can run with these settings and so many classes."""
    return (
        native is not None
        and classes <= max(config.candidates, config.candidates_above)
        and config.text_prototypes
        and config.uncertainty == "evidence"
        and config.openness == "cosine"
        and config.evidence_logits == "text"
        and config.evidence_scale == 1.0
        and config.cache_quality == "aleatoric"
        and config.prediction_scale == "probability"
    )


def compare(state: ProtoDCSState, feature: Feature) -> Compared:
    """Run the first check, offer the sample to its queue, take its step, and predict."""
    config = state.config
    forwards, counted = config.alignment_direction == "visual-to-text", state.alignment_updates + 1
    follows = forwards and counted < REBUILD_AFTER and not state.borrowed
    # The mixture window takes the sample here only if a mixture stays as it is.
    judges = state.fitted and config.verification and not state.refit_due
    judged = state.mixture_window.pushed if judges else -1
    step, window = _step(state), state.gate_window
    found = step.run(feature, window.pushed, config.cache_admission == "immediate", follows, judged)
    window.pushed += 1
    nearest, openness_first, confident, trusted, quality, slot, placed = found[:7]
    if placed:
        state.cached += 1
        state.alignment_updates += 1
    elif slot >= 0:
        place(state, nearest, slot, feature, quality)
        step = _step(state)
        found = step.finish(feature, trusted, judged)
    openness, best, aleatoric, epistemic, entropy, p_unknown = found[7:]
    state.mixture_window.pushed += judges
    return Compared(
        FirstCheck(step.cosines, nearest, openness_first, confident, trusted, quality),
        Temporary(step.after, openness, step.affinity, step.slopes),
        Prediction(best, step.scores, aleatoric, epistemic, entropy),
        slot >= 0,
        p_unknown if judges else None,
    )


def _step(state: ProtoDCSState) -> ProtoDCSStep:
    """Return the compiled step over the arrays that the state has now."""
    if state.step is None:
        assert native is not None
        if state.work is None:
            state.work = np.zeros((10, max(state.text.shape)))
        state.step = native.ProtoDCSStep(state, state.work)
    return state.step

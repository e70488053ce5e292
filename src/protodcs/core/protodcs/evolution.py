"""Stage 4, evolution of the text prototypes: a cumulative mean of the temporary ones (equation 11).

Only samples that both checks call known and that pass the quality gate move the prototypes, and each of them moves
them less than the one before.
"""

import math

import numpy as np

from ...arrays import Feature, Floats
from ..numerics.linalg import normalised
from . import alignment
from .prediction import Prediction
from .state import ProtoDCSState
from .temporary import Temporary, moved_text


def evolve(state: ProtoDCSState, feature: Feature, text: Floats, temporary: Temporary, trusted: bool) -> bool:
    """Move P_t by 1/n towards P'_t of a known sample that passed the gate. Return whether it moved.

    Args:
        state: the state.
        feature: (d,) the sample.
        text: (K,) its cosines with P_t.
        temporary: its step.
        trusted: whether it took one. Otherwise P'_t is P_t, and their mean too.
    """
    config = state.config
    state.passed += 1
    if not trusted:
        return False
    counted = state.passed if config.evolution_count == "passed" else state.known + 1
    share = 1.0 / (counted + config.evolution_prior)
    moved = moved_text(state, feature, text, temporary.slopes, np.arange(len(text)))
    mean = move(state.text, moved, share)
    if config.evolution_norm == "unit":
        mean = normalised(mean)
    state.replace_text(mean.astype(np.float32))
    state.evolved += 1
    alignment.rebuild(state)
    return True


def move(text: Feature, moved: Feature, share: float) -> Floats:
    """Return `(1 - share) text + share Norm(moved)`, rows (K, d)."""
    mean: Floats = (1.0 - share) * text.astype(np.float64) + share * normalised(moved)
    return mean


def passes_gate(state: ProtoDCSState, prediction: Prediction) -> bool:
    """Whether a known sample passes the quality gate; what passes also moves Theta_q."""
    config = state.config
    if config.evolution_gate == "off" or not config.text_prototypes:
        return False
    if config.evolution_gate == "quantile":
        state.quality_window.push(prediction.aleatoric)
        return prediction.aleatoric < state.quality_window.quantile(config.evolution_quantile)
    uncertainty = prediction.aleatoric
    if config.evolution_gate == "entropy":
        uncertainty = normalised_entropy(prediction.entropy, len(prediction.scores))
    if uncertainty >= state.evolution_threshold:
        return False
    state.evolution_threshold += config.evolution_momentum * (uncertainty - state.evolution_threshold)
    return True


def normalised_entropy(entropy: float, classes: int) -> float:
    """Return an entropy in nats over log2 K, as DPE has it: from 0 to ln 2 = 0.69 for K classes."""
    return entropy / math.log2(classes) if classes > 1 else 0.0

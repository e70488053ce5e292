"""Stage 2, temporary prototypes: one AdamW step on `lambda_AU AU + EU + lambda_align InfoNCE` (equations 3 to 7).

InfoNCE does not depend on the sample, so its part of the gradient is state (see `alignment`). Unless the evidence is
fused, P'_v does not depend on the sample either.
"""

from typing import NamedTuple

import numpy as np

from ...arrays import Feature, Floats, Integers
from ..numerics.evidence import uncertainty_gradient
from ..numerics.linalg import blocks, cosines
from ..numerics.softmax import entropy_gradient, softmax
from .alignment import visual_step
from .config import ProtoDCSConfig
from .first_check import FirstCheck
from .openness import openness_of
from .prediction import affinities
from .residual import adam_step, text_gradient
from .state import ProtoDCSState


class Temporary(NamedTuple):
    """A sample compared with its temporary prototypes, or with the global ones if it is not trusted.

    Attributes:
        cosines: (K,) P'_t f.
        openness: S', by default 1 - max P'_t f.
        affinity: (K,) alpha exp(-beta (1 - P'_v f)).
        slopes: (K,) the derivative of the loss by each text cosine; zero without a step.
    """

    cosines: Floats
    openness: float
    affinity: Floats
    slopes: Floats


def global_prototypes(state: ProtoDCSState, feature: Feature, first: FirstCheck) -> Temporary:
    """Compare a sample that is not trusted with the global prototypes P_t and P_v."""
    affinity = affinities(state, state.visual[state.opened], feature)
    return Temporary(first.cosines, first.openness, affinity, np.zeros_like(first.cosines))


def temporary_prototypes(state: ProtoDCSState, feature: Feature, first: FirstCheck) -> Temporary:
    """Take one AdamW step from zero residuals, and compare the sample with P'_t and P'_v."""
    config = state.config
    slopes, visual = step_of(state, feature, first)
    after, openness = first.cosines, first.openness
    if config.text_prototypes and config.text_rate > 0:
        after = _text_step(state, feature, first.cosines, slopes)
        openness = openness_of(config, after)
    return Temporary(after, openness, affinities(state, visual, feature), slopes)


def step_of(state: ProtoDCSState, feature: Feature, first: FirstCheck) -> tuple[Floats, Feature]:
    """Return the derivative (K,) of the loss by each text cosine, and P'_v (M, d) of the open classes."""
    config, opened = state.config, state.opened
    if config.evidence_logits == "text":
        slopes, _ = _loss_slopes(config, first.cosines, np.zeros_like(first.cosines))
        return slopes, state.adapted[opened]
    affinity = affinities(state, state.visual[opened], feature)
    slopes, by_visual = _loss_slopes(config, first.cosines, affinity)
    gradient = state.alignment_scale * state.visual_sum[opened] + by_visual[opened, None] * feature
    return slopes, visual_step(state, opened, gradient).astype(np.float32)


def _loss_slopes(config: ProtoDCSConfig, text: Floats, affinity: Floats) -> tuple[Floats, Floats]:
    """Return the derivative (K,) of the uncertainty by each text cosine, and by each visual one."""
    if config.uncertainty == "evidence":
        logits = config.evidence_scale * text + affinity
        by_logit = uncertainty_gradient(logits, config.aleatoric_weight, config.epistemic_weight)
        by_text = config.evidence_scale * by_logit
    else:
        by_logit = entropy_gradient(*softmax(text / config.temperature + affinity))
        by_text = by_logit / config.temperature
    return by_text, by_logit * config.affinity_sharpness * affinity


def moved_text(state: ProtoDCSState, feature: Feature, text: Floats, slopes: Floats, rows: Integers) -> Feature:
    """Return `P_t + D_t` (n, d) of the classes `rows` after the step, for the `text` cosines (K,) before it."""
    prototypes = state.text[rows]
    gradient = text_gradient(
        prototypes, state.inverse_norms[rows], text[rows], slopes[rows], feature, state.text_alignment[rows]
    )
    return adam_step(prototypes, gradient, state.config.text_rate, state.config.step_epsilon)


def candidates(config: ProtoDCSConfig, text: Floats) -> Integers:
    """Return the classes whose text prototypes a step moves: all, or the most similar of very many."""
    if len(text) <= max(config.candidates, config.candidates_above):
        return np.arange(len(text))
    return np.sort(np.argpartition(text, -config.candidates)[-config.candidates :])


def _text_step(state: ProtoDCSState, feature: Feature, text: Floats, slopes: Floats) -> Floats:
    """Return the cosines (K,) with P'_t, from the `text` cosines (K,) with P_t.

    A class that is not a candidate moves by the mean change of those candidates that have no queue either, since such
    a class moves along the sample alone; if each has a queue, by the mean change of all candidates.
    """
    rows = candidates(state.config, text)
    moved = (moved_text(state, feature, text, slopes, some) for some in blocks(rows, len(feature)))
    after = np.concatenate([cosines(some, feature) for some in moved])
    if len(rows) == len(text):
        return after
    change, alike = after - text[rows], state.counts[rows] == 0
    spread = text + (change[alike] if alike.any() else change).mean()
    spread[rows] = after
    return spread

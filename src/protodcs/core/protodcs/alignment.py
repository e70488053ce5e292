"""InfoNCE between visual and text prototypes: its gradient, kept up to date as queues change (section IV-B).

The loss does not depend on the sample, only on the queues and the text prototypes, so its gradient is state. For query
m with probabilities p_mj over the keys, the two sums without the common factor 1/(M T) are

    visual_sum_m = sum_j p_mj t_j - t_m            text_sum_j = sum_m p_mj v_m - v_j

with unit rows v and t. The queries are the M classes with a non-empty queue. If one queue changes, only its own row of
probabilities does, and a rank-two update of `text_sum` suffices. If a class gets its first feature it becomes a key of
all queries, and everything is computed in full; so it is after an evolution and every `REBUILD_AFTER` updates.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...arrays import Floats, Integers
from ..numerics.linalg import blocks, normalised, wide
from .residual import adam_step, project, queue_means
from .state import ProtoDCSState

REBUILD_AFTER = 1000


def key_probabilities(queries: Floats, keys: Floats, temperature: float) -> Floats:
    """Return p (M, J): the softmax over the unit `keys` (J, d) of each of the unit `queries` (M, d)."""
    logits = queries @ keys.T
    logits /= temperature
    logits -= logits.max(axis=1, keepdims=True)
    np.exp(logits, out=logits)
    logits /= logits.sum(axis=1, keepdims=True)
    return logits


def contrast(queries: Floats, keys: Floats, own: Integers, temperature: float) -> tuple[Floats, Floats]:
    """Return both sums in full: one row for each query (M, d), one for each key (J, d).

    Args:
        queries: (M, d) unit rows.
        keys: (J, d) unit rows.
        own: (M,) the position of each query's own key.
        temperature: that of InfoNCE.
    """
    probabilities = key_probabilities(queries, keys, temperature)
    query_sum = probabilities @ keys - keys[own]
    key_sum = probabilities.T @ queries
    key_sum[own] -= queries
    return query_sum, key_sum


def follow(state: ProtoDCSState, k: int, previous: Floats | None, current: Floats) -> None:
    """Update the alignment after the queue of class k has changed its direction, or got its first feature.

    Args:
        state: the state, with the queue and its visual prototype up to date.
        k: the class.
        previous: (d,) the direction before; None if the queue was empty.
        current: (d,) the direction now.
    """
    config = state.config
    if previous is None:
        state.find_opened()
    state.alignment_updates += 1
    new_key = previous is None and config.alignment_keys == "open"
    backwards = config.alignment_direction == "text-to-visual"
    if new_key or backwards or state.alignment_updates == REBUILD_AFTER:
        rebuild(state)
        return
    keys = state.keys
    texts = state.unit_text[keys]
    directions = current[None] if previous is None else np.stack([current, previous])
    probabilities = key_probabilities(directions, texts, config.alignment_temperature)
    state.visual_sum[k] = probabilities[0] @ texts - state.unit_text[k]
    # What the new direction adds, less what the previous one added.
    probabilities[1:] *= -1.0
    for some, weights in zip(_blocks(state, keys), _blocks(state, probabilities.T), strict=True):
        state.text_sum[some] += weights @ directions
    state.text_sum[k] -= directions[0] - directions[1:].sum(axis=0)
    # One query more changes the mean over queries, hence every visual step.
    derive(state, state.opened if previous is None else np.array([k]))


def rebuild(state: ProtoDCSState) -> None:
    """Compute the alignment in full."""
    state.own()
    config, opened = state.config, state.opened
    state.alignment_updates = 0
    if not len(opened):
        return
    visual, _ = queue_means(state.cache[opened], state.counts[opened])
    texts = state.unit_text[state.keys]
    own = opened if config.alignment_keys == "all" else np.arange(len(opened))
    if config.alignment_direction == "visual-to-text":
        visual_sum, text_sum = contrast(visual, texts, own, config.alignment_temperature)
    else:
        text_sum, visual_sum = contrast(texts, visual, own, config.alignment_temperature)
    state.visual_sum[opened], state.text_sum[state.keys] = visual_sum, text_sum
    derive(state, opened)


def derive(state: ProtoDCSState, rows: Integers) -> None:
    """Compute what follows from the sums: the gradient by the text residual, and P'_v of the classes `rows`."""
    scale = state.alignment_scale
    for some in _blocks(state, state.keys):
        projected = project(state.text_sum[some], state.unit_text[some], state.inverse_norms[some])
        state.text_alignment[some] = scale * projected
    state.adapted[rows] = visual_step(state, rows, scale * state.visual_sum[rows])


def _blocks(state: ProtoDCSState, items: NDArray[Any]) -> Iterator[NDArray[Any]]:
    return blocks(items, state.text.shape[1])


def visual_step(state: ProtoDCSState, rows: Integers, gradient: Floats) -> Floats:
    """Return P'_v of the classes `rows`, for the loss's `gradient` (n, d) by their unit visual prototypes.

    The residual D_v is added to the un-normalised queue means.
    """
    config, visual, lengths = state.config, wide(state.visual[rows]), state.lengths[rows]
    by_mean = project(gradient, visual, 1.0 / lengths)
    moved = adam_step(lengths[:, None] * visual, by_mean, config.visual_rate, config.step_epsilon)
    return normalised(moved)

"""The diversity-aware visual cache (Algorithm 2): a queue of a few features per class, different and certain ones.

A new feature that resembles a cached one replaces it only if it is less uncertain. One that resembles none is added; if
the queue is full, it replaces the most uncertain feature. The mean of a queue is the visual prototype of its class.
"""

from collections import Counter

from ...arrays import Feature, Floats
from ..numerics.linalg import products
from . import alignment
from .residual import queue_means
from .state import ProtoDCSState, Waiting


def choose_slot(
    queue: Feature, quality: Floats, size: int, feature: Feature, uncertainty: float, similarity: float
) -> int | None:
    """Return the slot of a queue for a feature (d,), or None if it does not enter.

    Args:
        queue: (n, d) the features in the queue.
        quality: (n,) the uncertainty stored with each of them.
        size: how many features the queue may hold.
        feature: the new one.
        uncertainty: that of the new one.
        similarity: tau_sim, the cosine above which two features count as the same view.
    """
    if len(queue):
        cosines = products(queue, feature)
        nearest = int(cosines.argmax())
        if cosines[nearest] > similarity:
            return nearest if uncertainty < quality[nearest] else None
    return len(queue) if len(queue) < size else int(quality.argmax())


def offer(state: ProtoDCSState, k: int, feature: Feature, uncertainty: float) -> bool:
    """Offer a feature to the queue Q_k. Return whether the queue changed."""
    count, config = int(state.counts[k]), state.config
    slot = choose_slot(
        state.cache[k, :count], state.quality[k, :count], config.cache_size, feature, uncertainty,
        config.cache_similarity,
    )  # fmt: skip
    if slot is None:
        return False
    place(state, k, slot, feature, uncertainty)
    return True


def place(state: ProtoDCSState, k: int, slot: int, feature: Feature, uncertainty: float) -> None:
    """Put a feature into a slot of the queue Q_k. Visual prototype and alignment follow."""
    state.own()
    count, queue = int(state.counts[k]), slice(k, k + 1)
    previous = queue_means(state.cache[queue], state.counts[queue])[0][0] if count else None
    state.cache[k, slot] = feature
    state.quality[k, slot] = uncertainty
    state.counts[k] = max(count, slot + 1)
    state.cached += 1
    directions, lengths = queue_means(state.cache[queue], state.counts[queue])
    state.visual[k], state.lengths[k] = directions[0], lengths[0]
    alignment.follow(state, k, previous, directions[0])


def hold(state: ProtoDCSState, k: int, feature: Feature, uncertainty: float) -> None:
    """Hold a sample back until the next refit (admission "buffered" and "gated")."""
    state.waiting.append(Waiting(k, feature.copy(), uncertainty))


def flush(state: ProtoDCSState) -> bool:
    """Offer the samples that wait, least uncertain first, at most a queue's size per class.

    Returns:
        Whether a queue changed.
    """
    changed, offered = False, Counter[int]()
    for sample in sorted(state.waiting, key=lambda sample: sample.uncertainty):
        offered[sample.k] += 1
        if offered[sample.k] <= state.config.cache_size:
            changed |= offer(state, sample.k, sample.feature, sample.uncertainty)
    state.waiting = []
    return changed

"""The diversity-aware visual cache (Algorithm 2): a few features per class, different from each other and clean.

A new feature that resembles a cached one replaces it only if it is less uncertain; one that resembles none is added,
in place of the most uncertain one when the queue is full. The mean of a queue is the class's visual prototype.
"""

import math

import numpy as np
from numpy.typing import NDArray

from ..compiled import kernel

Vector = NDArray[np.float64]
Row = NDArray[np.float32]
Matrix = NDArray[np.float32]

# Opposite features can cancel in a queue; a shorter mean than this has no direction left.
_SHORTEST_MEAN = 1e-12


@kernel("int64(float32[:,::1], float64[::1], int64, float32[::1], float64, float64)")
def choose_slot(queue: Matrix, quality: Vector, count: int, feature: Row, uncertainty: float, threshold: float) -> int:
    """The slot of `queue` (size, d) that `feature` should take, or -1 if it should not enter.

    `quality` (size,) holds the uncertainty stored with each of the first `count` features: lower is better.
    """
    nearest, nearest_similarity = -1, -math.inf
    worst = 0
    for slot in range(count):
        dot = 0.0
        for i in range(feature.shape[0]):
            dot += np.float64(queue[slot, i]) * np.float64(feature[i])
        if dot > nearest_similarity:
            nearest, nearest_similarity = slot, dot
        if quality[slot] > quality[worst]:
            worst = slot
    if nearest_similarity > threshold:
        return nearest if uncertainty < quality[nearest] else -1
    return count if count < queue.shape[0] else worst


@kernel("float64(float32[:,::1], int64, float64[::1])")
def queue_mean(queue: Matrix, count: int, direction: Vector) -> float:
    """Write the unit direction of the mean of the first `count` features into `direction` (d,); returns its length."""
    for i in range(queue.shape[1]):
        direction[i] = queue[0, i]
    for slot in range(1, count):
        for i in range(queue.shape[1]):
            direction[i] += queue[slot, i]
    total = 0.0
    for i in range(queue.shape[1]):
        total += direction[i] * direction[i]
    length = max(math.sqrt(total) / count, _SHORTEST_MEAN)
    scale = 1.0 / (length * count)
    for i in range(queue.shape[1]):
        direction[i] *= scale
    return length


@kernel(
    "boolean(int64, int64, float32[::1], float64, float32[:,:,::1], float64[:,::1], int64[::1], float32[:,::1], "
    "float64[::1], float64[::1], float64[::1])"
)
def place(
    k: int,
    slot: int,
    feature: Row,
    uncertainty: float,
    cache: NDArray[np.float32],
    quality: NDArray[np.float64],
    counts: NDArray[np.int64],
    visual: Matrix,
    lengths: Vector,
    previous: Vector,
    current: Vector,
) -> bool:
    """Put `feature` into `slot` of queue k and renew its visual prototype; True if the queue was empty.

    `previous` and `current` (d,) become the direction of the queue before and after, zero for an empty queue.
    """
    opens = counts[k] == 0
    previous[:] = 0.0
    if not opens:
        queue_mean(cache[k], counts[k], previous)
    cache[k, slot] = feature
    quality[k, slot] = uncertainty
    counts[k] = max(counts[k], slot + 1)
    lengths[k] = queue_mean(cache[k], counts[k], current)
    visual[k] = current
    return opens

"""InfoNCE between visual and text prototypes: its gradient, kept up to date as queues change (section IV-B).

The loss does not depend on the sample, only on the queues and the text prototypes, so its gradient is state. For
query m with key probabilities p_mj the two un-projected sums, without the common factor 1/(M T), are

    visual_sum_m = sum_j p_mj t_j - t_m            text_sum_j = sum_m p_mj v_m - v_j

over the open classes (those with a non-empty queue). When one queue changes, only its own row of probabilities does,
and a rank-two update of `text_sum` suffices. When a class opens, every row gains a key and shrinks a little: the
diagonal and `visual_sum` follow exactly, the off-diagonal part of `text_sum` is refreshed row by row once a row
has drifted by `_DRIFT`. The sums are float64, and recomputed in full every `REBUILD_AFTER` updates.
"""

import math

import numpy as np
from numpy.typing import NDArray

from .cache import queue_mean
from .compiled import inner, kernel

Vector = NDArray[np.float64]
Counts = NDArray[np.int64]
Wide = NDArray[np.float64]
Matrix = NDArray[np.float32]

REBUILD_AFTER = 1000
# With few open classes the full computation is cheap, and the mean over queries weighs each error more.
REBUILD_UP_TO = 16
# How much of a row's probability off the diagonal may be out of date, per open class: the mean over queries divides
# every error by their number, and a gradient is wanted to its ninth decimal.
_DRIFT = 4e-11
# Beyond so many open classes it may be more: the gradient's ninth decimal is then below a thousandth of its size.
_MANY = 128
# A correction that is this small a part of what it corrects need not be known better than in single precision, nor a
# weight that is this small beside that of the class itself.
_SMALL_DRIFT = 1e-3
_SMALL_WEIGHT = 1e-4
# Corrections below this weight cannot reach the ninth decimal of a gradient even when all of them add up.
_NEGLIGIBLE = 1e-12


# Queries per pass over the keys: each key row that is read serves this many of them.
_BLOCK = 4


@inner
def _dot(row: NDArray[np.floating], direction: Vector) -> float:
    total = 0.0
    for i in range(direction.shape[0]):
        total += row[i] * direction[i]
    return total


@inner
def _add(row: Vector, weight: float, direction: Vector) -> None:
    for i in range(row.shape[0]):
        row[i] += weight * direction[i]


def contrast_twin(
    queries: Wide,
    keys: Wide,
    asked: Counts,
    offered: Counts,
    temperature: float,
    query_sum: Wide,
    key_sum: Wide,
    normaliser: Vector,
    diagonal: Vector,
) -> None:
    own = np.einsum("md,md->m", queries[asked], keys[asked])
    weights = np.exp((queries[asked] @ keys[offered].T - own[:, None]) / temperature)
    totals = weights.sum(axis=1)
    weights /= totals[:, None]
    query_sum[asked] = weights @ keys[offered] - keys[asked]
    key_sum[offered] = weights.T @ queries[asked]
    key_sum[asked] -= queries[asked]
    normaliser[asked] = totals
    diagonal[asked] = own


@kernel(
    "void(float64[:,::1], float64[:,::1], int64[::1], int64[::1], float64, float64[:,::1], float64[:,::1], "
    "float64[::1], float64[::1])",
    twin=contrast_twin,
)
def contrast(
    queries: Wide,
    keys: Wide,
    asked: Counts,
    offered: Counts,
    temperature: float,
    query_sum: Wide,
    key_sum: Wide,
    normaliser: Vector,
    diagonal: Vector,
) -> None:
    """Both sums in full, for the unit rows `asked` of `queries` (K, d) and `offered` of `keys` (K, d).

    `normaliser` (K,) becomes each query's softmax denominator relative to its own key, `diagonal` (K,) its similarity
    with that key.
    """
    width = queries.shape[1]
    for j in offered:
        key_sum[j, :] = 0.0
    block = np.zeros((_BLOCK, width))
    sums = np.empty((_BLOCK, width))
    weights = np.empty((len(offered), _BLOCK))
    for first in range(0, len(asked), _BLOCK):
        size = min(_BLOCK, len(asked) - first)
        block[:] = 0.0
        sums[:] = 0.0
        for b in range(size):
            block[b] = queries[asked[first + b]]
        for at in range(len(offered)):
            j = offered[at]
            dot_0, dot_1, dot_2, dot_3 = 0.0, 0.0, 0.0, 0.0
            for i in range(width):
                dot_0 += block[0, i] * keys[j, i]
                dot_1 += block[1, i] * keys[j, i]
                dot_2 += block[2, i] * keys[j, i]
                dot_3 += block[3, i] * keys[j, i]
            weights[at, 0], weights[at, 1], weights[at, 2], weights[at, 3] = dot_0, dot_1, dot_2, dot_3
            for b in range(size):
                if asked[first + b] == j:
                    diagonal[j] = weights[at, b]
        for b in range(_BLOCK):
            m = asked[first + b] if b < size else -1
            total = 0.0
            for at in range(len(offered)):
                if m >= 0:
                    weights[at, b] = math.exp((weights[at, b] - diagonal[m]) / temperature) if offered[at] != m else 1.0
                else:
                    weights[at, b] = 0.0
                total += weights[at, b]
            if m >= 0:
                normaliser[m] = total
                weights[:, b] /= total
        for at in range(len(offered)):
            j = offered[at]
            w_0, w_1, w_2, w_3 = weights[at]
            for i in range(width):
                key = keys[j, i]
                sums[0, i] += w_0 * key
                sums[1, i] += w_1 * key
                sums[2, i] += w_2 * key
                sums[3, i] += w_3 * key
                key_sum[j, i] += w_0 * block[0, i] + w_1 * block[1, i] + w_2 * block[2, i] + w_3 * block[3, i]
        for b in range(size):
            m = asked[first + b]
            for i in range(width):
                query_sum[m, i] = sums[b, i] - keys[m, i]
                key_sum[m, i] -= block[b, i]


def shift_rows_twin(
    rows: Counts,
    gain: Vector,
    current: Vector,
    loss: Vector,
    previous: Vector,
    prototypes: Matrix,
    inverse_norms: Vector,
    text_sum: Wide,
    pull: Matrix,
) -> None:
    text_sum[rows] += gain[rows, None] * current - loss[rows, None] * previous
    unit = prototypes[rows] * inverse_norms[rows, None]
    along = np.einsum("kd,kd->k", unit, text_sum[rows])
    pull[rows] = (text_sum[rows] - along[:, None] * unit) * inverse_norms[rows, None]


@kernel(
    "void(int64[::1], float64[::1], float64[::1], float64[::1], float64[::1], float32[:,::1], float64[::1], "
    "float64[:,::1], float32[:,::1])",
    twin=shift_rows_twin,
)
def shift_rows(
    rows: Counts,
    gain: Vector,
    current: Vector,
    loss: Vector,
    previous: Vector,
    prototypes: Matrix,
    inverse_norms: Vector,
    text_sum: Wide,
    pull: Matrix,
) -> None:
    """Add `gain[j] * current - loss[j] * previous` to `text_sum` and renew `pull`, for each class j of `rows`.

    `pull` (K, d) is `text_sum` carried back through the normalisation of the text rows, still without 1/(M T). With
    `gain` and `loss` (K,) zero only `pull` is renewed, by the very same instructions, hence to the same bit.
    """
    for j in rows:
        added, dropped, inverse = gain[j], loss[j], inverse_norms[j]
        for i in range(current.shape[0]):
            text_sum[j, i] += added * current[i] - dropped * previous[i]
        along = _dot(prototypes[j], text_sum[j]) * inverse * inverse
        for i in range(current.shape[0]):
            pull[j, i] = (text_sum[j, i] - along * prototypes[j, i]) * inverse


@inner
def _refresh(
    k: int,
    stale: Counts,
    change: Vector,
    opened: Counts,
    cache: NDArray[np.float32],
    counts: Counts,
    prototypes: Matrix,
    inverse_norms: Vector,
    text_sum: Wide,
    diagonal: Vector,
    temperature: float,
    block: NDArray[np.floating],
) -> None:
    """Change by `change` the inverse normaliser with which the queries `stale` stand in `text_sum`.

    Their diagonal and the new key k are up to date already. `block` (4, d) sets the precision of the work.
    """
    weights, query = np.empty(_BLOCK), np.empty(prototypes.shape[1])
    for first in range(0, len(stale), _BLOCK):
        size = min(_BLOCK, len(stale) - first)
        block[:] = 0.0
        for b in range(size):
            queue_mean(cache[stale[first + b]], counts[stale[first + b]], query)
            block[b] = query
        for j in opened:
            dot_0 = dot_1 = dot_2 = dot_3 = block[0, 0] * np.float32(0.0)  # A zero of the block's own precision.
            for i in range(prototypes.shape[1]):
                dot_0 += block[0, i] * prototypes[j, i]
                dot_1 += block[1, i] * prototypes[j, i]
                dot_2 += block[2, i] * prototypes[j, i]
                dot_3 += block[3, i] * prototypes[j, i]
            weights[0], weights[1], weights[2], weights[3] = dot_0, dot_1, dot_2, dot_3
            largest = 0.0
            for b in range(_BLOCK):
                m = stale[first + b] if b < size else j
                if j == m or j == k:
                    weights[b] = 0.0
                else:
                    similarity = weights[b] * inverse_norms[j]
                    weights[b] = change[first + b] * math.exp((similarity - diagonal[m]) / temperature)
                    largest = max(largest, abs(weights[b]))
            if largest > _NEGLIGIBLE:
                w_0, w_1, w_2, w_3 = weights
                for i in range(prototypes.shape[1]):
                    text_sum[j, i] += w_0 * block[0, i] + w_1 * block[1, i] + w_2 * block[2, i] + w_3 * block[3, i]


@kernel(
    "void(int64, int64[::1], float32[:,:,::1], int64[::1], float32[:,::1], float64[::1], float64[:,::1], "
    "float64[:,::1], float64[::1], float64[::1], float64[::1], float64)"
)
def add_key(
    k: int,
    opened: Counts,
    cache: NDArray[np.float32],
    counts: Counts,
    prototypes: Matrix,
    inverse_norms: Vector,
    text_sum: Wide,
    visual_sum: Wide,
    normaliser: Vector,
    applied: Vector,
    diagonal: Vector,
    temperature: float,
) -> None:
    """Class k has just opened: every other open query sees one more key."""
    width, classes = prototypes.shape[1], len(opened)
    allowed = _DRIFT * classes * max(1.0, classes / _MANY)
    key, query = np.empty(width), np.empty(width)
    # Queries that have drifted: the few by much, whose correction must be exact, and the many by a little.
    far, near = np.empty(classes, dtype=np.int64), np.empty(classes, dtype=np.int64)
    far_change, near_change = np.empty(classes), np.empty(classes)
    many_far, many_near = 0, 0
    for i in range(width):
        key[i] = prototypes[k, i] * inverse_norms[k]
    for m in opened:
        if m == k:
            continue
        queue_mean(cache[m], counts[m], query)
        weight = math.exp((_dot(key, query) - diagonal[m]) / temperature)
        before = normaliser[m]
        normaliser[m] = before + weight
        _add(text_sum[m], 1.0 / normaliser[m] - 1.0 / before, query)
        share, inverse = weight / normaliser[m], inverse_norms[m]
        for i in range(width):
            visual_sum[m, i] += share * (key[i] - prototypes[m, i] * inverse - visual_sum[m, i])
        drift, change = normaliser[m] / applied[m] - 1.0, 1.0 / normaliser[m] - 1.0 / applied[m]
        if drift * (1.0 - 1.0 / normaliser[m]) > allowed:
            if drift > _SMALL_DRIFT:
                far[many_far], far_change[many_far] = m, change
                many_far += 1
            else:
                near[many_near], near_change[many_near] = m, change
                many_near += 1
            applied[m] = normaliser[m]
        _add(text_sum[k], weight / applied[m], query)
    double, single = np.empty((_BLOCK, width)), np.empty((_BLOCK, width), dtype=np.float32)
    _refresh(
        k, far[:many_far], far_change, opened, cache, counts, prototypes, inverse_norms, text_sum, diagonal,
        temperature, double,
    )  # fmt: skip
    _refresh(
        k, near[:many_near], near_change, opened, cache, counts, prototypes, inverse_norms, text_sum, diagonal,
        temperature, single,
    )  # fmt: skip


@kernel(
    "void(int64, boolean, int64[::1], float64[::1], float64[::1], float32[:,::1], float64[::1], float64[:,::1], "
    "float64[::1], float64[::1], float64[::1], float64, float64[::1], float64[::1])"
)
def change_query(
    k: int,
    opened: bool,
    keys: Counts,
    current: Vector,
    previous: Vector,
    prototypes: Matrix,
    inverse_norms: Vector,
    visual_sum: Wide,
    normaliser: Vector,
    applied: Vector,
    diagonal: Vector,
    temperature: float,
    gain: Vector,
    loss: Vector,
) -> None:
    """The direction of queue k has changed from `previous` to `current` (d,), or begun: renew its row of everything.

    Leaves in `gain` and `loss` (K,) what `shift_rows` must do to the text side.
    """
    width = prototypes.shape[1]
    own = _dot(prototypes[k], current) * inverse_norms[k]
    short, short_before = current.astype(np.float32), previous.astype(np.float32)
    rest = np.zeros(width, dtype=np.float32)
    rest_weight = 0.0
    for j in keys:
        if j == k:
            continue
        after, before = np.float32(0.0), np.float32(0.0)
        for i in range(width):
            after += prototypes[j, i] * short[i]
            before += prototypes[j, i] * short_before[i]
        gain[j] = math.exp((after * inverse_norms[j] - own) / temperature)
        loss[j] = 0.0 if opened else math.exp((before * inverse_norms[j] - diagonal[k]) / temperature)
        # The temperature magnifies the rounding of a similarity; where the result has weight it is taken exactly.
        if gain[j] > _SMALL_WEIGHT:
            gain[j] = math.exp((_dot(prototypes[j], current) * inverse_norms[j] - own) / temperature)
        if loss[j] > _SMALL_WEIGHT:
            loss[j] = math.exp((_dot(prototypes[j], previous) * inverse_norms[j] - diagonal[k]) / temperature)
        rest_weight += gain[j]
        weight = np.float32(gain[j] * inverse_norms[j])
        for i in range(width):
            rest[i] += weight * prototypes[j, i]
    total = 1.0 + rest_weight
    for j in keys:
        gain[j] /= total
        loss[j] /= applied[k]
    gain[k] = 1.0 / total - 1.0
    loss[k] = 0.0 if opened else 1.0 / normaliser[k] - 1.0
    for i in range(width):
        visual_sum[k, i] = (rest[i] - rest_weight * (prototypes[k, i] * inverse_norms[k])) / total
    normaliser[k] = total
    applied[k] = total
    diagonal[k] = own

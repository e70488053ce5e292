"""InfoNCE between visual and text prototypes: its gradient, kept up to date as queues change (section IV-B).

The loss does not depend on the sample, only on the queues and the text prototypes, so its gradient is state. For
query m with key probabilities p_mj the two sums, without the common factor 1/(M T), are

    visual_sum_m = sum_j p_mj t_j - t_m            text_sum_j = sum_m p_mj v_m - v_j

over the open classes (those with a non-empty queue). The text side is kept as `pull`, which is `text_sum` carried back
through the normalisation of the text rows: float32, with what the rounding cut off in `pull_rest`, so that thousands
of small changes do not wear it away. When one queue changes, only its own row of probabilities does, and a rank-two
update of `pull` suffices. When a class opens, every row gains a key and shrinks a little: the diagonal and
`visual_sum` follow exactly, the off-diagonal part of `pull` is refreshed row by row once a row has drifted by
`allowed_drift`. All of it is recomputed in full every `REBUILD_AFTER` updates.
"""

import math

import numpy as np
from numpy.typing import NDArray

from ..compiled import inner, kernel
from ..exponential import power_of_e
from .cache import queue_mean

Vector = NDArray[np.float64]
Counts = NDArray[np.int64]
Wide = NDArray[np.float64]
Row = NDArray[np.float32]
Matrix = NDArray[np.float32]

REBUILD_AFTER = 1000
# With few open classes the full computation is cheap, and the mean over queries weighs each error more.
REBUILD_UP_TO = 16
# How much of a row's probability off the diagonal may be out of date, per open class: the mean over queries divides
# every error by their number, and a gradient is wanted to its ninth decimal.
_DRIFT = 4e-11
# Beyond so many open classes it may be more: with 876 open on a real stream no element of the gradient is then off by
# more than 1e-8.
_MANY = 128
# A correction that is this small a part of what it corrects need not be known better than in single precision, nor a
# weight that is this small beside that of the class itself.
_SMALL_DRIFT = 1e-3
_SMALL_WEIGHT = 1e-4
_LARGE_WEIGHT = 1e-3
# Corrections below this weight cannot reach the ninth decimal of a gradient even when all of them add up.
_NEGLIGIBLE = 1e-12

# Queries per pass over the keys: each key row that is read serves this many of them.
_BLOCK = 4
# Text rows that the innermost cache of a processor holds beside what they are compared with; an even number.
_AT_HAND = 8


def allowed_drift(classes: int) -> float:
    """How far a query's row may drift, with so many open classes: relative drift times its share off the diagonal."""
    return _DRIFT * classes * max(1.0, classes / _MANY)


@inner
def _dot(row: NDArray[np.floating], direction: Vector) -> float:
    total = 0.0
    for i in range(direction.shape[0]):
        total += row[i] * direction[i]
    return total


@inner
def _add(row: Vector, weight: float, direction: NDArray[np.floating]) -> None:
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


def sums_in_full(
    prototypes: Matrix,
    inverse_norms: Vector,
    directions: Wide,
    asked: Counts,
    direction: str,
    temperature: float,
) -> tuple[Wide, Wide, Vector, Vector]:
    """The sums by text and by visual row, the normalisers and the diagonal, computed from nothing.

    For the keys' text rows `prototypes` (M, d) and the unit `directions` (M, d) of their queues, of which those at
    `asked` are compared with all.
    """
    text = prototypes * inverse_norms[:, None]
    text_sum, visual_sum = np.zeros_like(text), np.zeros_like(text)
    normaliser, diagonal = np.ones(len(text)), np.ones(len(text))
    every = np.arange(len(text))
    if direction == "visual-to-text":
        contrast(directions, text, asked, every, temperature, visual_sum, text_sum, normaliser, diagonal)
    else:
        contrast(text, directions, asked, every, temperature, text_sum, visual_sum, normaliser, diagonal)
    return text_sum, visual_sum, normaliser, diagonal


@inner
def _move(high: NDArray[np.float32], low: NDArray[np.float32], i: int, change: float) -> None:
    """Add `change` to the number kept as `high[i] + low[i]`."""
    value = np.float64(high[i]) + (np.float64(low[i]) + change)
    high[i] = value
    low[i] = value - np.float64(high[i])


def project_twin(
    rows: Counts, text_sum: Wide, prototypes: Matrix, inverse_norms: Vector, pull: Matrix, pull_rest: Matrix
) -> None:
    unit = prototypes[rows] * inverse_norms[rows, None]
    along = np.einsum("kd,kd->k", unit, text_sum[rows])
    exact = (text_sum[rows] - along[:, None] * unit) * inverse_norms[rows, None]
    pull[rows] = exact
    pull_rest[rows] = exact - pull[rows]


@kernel(
    "void(int64[::1], float64[:,::1], float32[:,::1], float64[::1], float32[:,::1], float32[:,::1])", twin=project_twin
)
def project(
    rows: Counts, text_sum: Wide, prototypes: Matrix, inverse_norms: Vector, pull: Matrix, pull_rest: Matrix
) -> None:
    """Carry `text_sum` (K, d) of the classes `rows` back through the normalisation of their text rows."""
    for j in rows:
        inverse = inverse_norms[j]
        along = _dot(prototypes[j], text_sum[j]) * inverse * inverse
        for i in range(prototypes.shape[1]):
            exact = (text_sum[j, i] - along * prototypes[j, i]) * inverse
            pull[j, i] = exact
            pull_rest[j, i] = exact - np.float64(pull[j, i])


@kernel(
    "void(int64[::1], float64[::1], float64[::1], float64[::1], float64[::1], float64[::1], float32[:,::1], "
    "float64[::1], float32[:,::1], float32[:,::1])",
    strict=True,
)
def shift_rows(
    rows: Counts,
    gain: Vector,
    current: Vector,
    loss: Vector,
    previous: Vector,
    back: Vector,
    prototypes: Matrix,
    inverse_norms: Vector,
    pull: Matrix,
    pull_rest: Matrix,
) -> None:
    """Add `gain[j] * current - loss[j] * previous`, projected, to `pull` of each class j of `rows`.

    `back` (K,) is what the projection takes away again, along the unit text row.
    """
    short, short_before = current.astype(np.float32), previous.astype(np.float32)
    for j in rows:
        inverse = inverse_norms[j]
        added, dropped, taken = gain[j] * inverse, loss[j] * inverse, back[j] * inverse * inverse
        if max(abs(added), abs(dropped)) > _LARGE_WEIGHT:
            for i in range(current.shape[0]):
                _move(pull[j], pull_rest[j], i, added * current[i] - dropped * previous[i] - taken * prototypes[j, i])
            continue
        # Kahan's summation, here and below: what the addition rounds away comes back with the next one.
        a, b, c = np.float32(added), np.float32(dropped), np.float32(taken)
        for i in range(current.shape[0]):
            change = (a * short[i] - b * short_before[i] - c * prototypes[j, i]) + pull_rest[j, i]
            before = pull[j, i]
            pull[j, i] = before + change
            pull_rest[j, i] = change - (pull[j, i] - before)


@kernel(
    "void(int64, float32[::1], float32[:,::1], float32[:,::1], float32[:,::1], float32[:,::1])",
    "void(int64, float64[::1], float64[:,::1], float32[:,::1], float32[:,::1], float32[:,::1])",
    strict=True,
)
def nudge(
    j: int,
    weights: NDArray[np.floating],
    block: NDArray[np.floating],
    prototypes: Matrix,
    pull: Matrix,
    pull_rest: Matrix,
) -> None:
    """Add four `weights` times the rows of `block` (4, d), less the fifth times the text row, to `pull[j]`."""
    w_0, w_1, w_2, w_3, taken = weights[0], weights[1], weights[2], weights[3], weights[4]
    for i in range(prototypes.shape[1]):
        added = w_0 * block[0, i] + w_1 * block[1, i] + w_2 * block[2, i] + w_3 * block[3, i]
        change = (added - taken * prototypes[j, i]) + pull_rest[j, i]
        before = pull[j, i]
        pull[j, i] = before + change
        pull_rest[j, i] = change - (pull[j, i] - before)


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
    pull: Matrix,
    pull_rest: Matrix,
    diagonal: Vector,
    temperature: float,
    block: NDArray[np.floating],
) -> None:
    """Change by `change` the inverse normaliser with which the queries `stale` stand in `pull`.

    Their diagonal and the new key k are up to date already. `block` (4, d) sets the precision of the work.
    """
    weights, query = np.empty(_BLOCK), np.empty(prototypes.shape[1])
    rounded = np.empty(_BLOCK + 1, dtype=block.dtype)
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
            largest, taken, inverse = 0.0, 0.0, inverse_norms[j]
            for b in range(_BLOCK):
                m = stale[first + b] if b < size else j
                if j == m or j == k:
                    weights[b] = 0.0
                else:
                    similarity = weights[b] * inverse
                    weights[b] = inverse * change[first + b] * math.exp((similarity - diagonal[m]) / temperature)
                    taken += weights[b] * similarity * inverse
                    largest = max(largest, abs(weights[b]))
            if largest > _NEGLIGIBLE:
                rounded[:_BLOCK] = weights
                rounded[_BLOCK] = taken
                nudge(j, rounded, block, prototypes, pull, pull_rest)


@kernel(
    "void(int64, int64[::1], float32[:,:,::1], int64[::1], float32[:,::1], float64[::1], float32[:,::1], "
    "float32[:,::1], float64[:,::1], float64[::1], float64[::1], float64[::1], float64, float64)"
)
def add_key(
    k: int,
    opened: Counts,
    cache: NDArray[np.float32],
    counts: Counts,
    prototypes: Matrix,
    inverse_norms: Vector,
    pull: Matrix,
    pull_rest: Matrix,
    visual_sum: Wide,
    normaliser: Vector,
    applied: Vector,
    diagonal: Vector,
    temperature: float,
    allowed: float,
) -> None:
    """Class k has just opened: every other open query sees one more key.

    Rows that have drifted by more than `allowed` are refreshed.
    """
    width, classes = prototypes.shape[1], len(opened)
    key, query, gathered = np.empty(width), np.empty(width), np.zeros(width)
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
        share, inverse = weight / normaliser[m], inverse_norms[m]
        lost = (1.0 / normaliser[m] - 1.0 / before) * inverse
        for i in range(width):
            own = prototypes[m, i] * inverse
            _move(pull[m], pull_rest[m], i, lost * (query[i] - diagonal[m] * own))
            visual_sum[m, i] += share * (key[i] - own - visual_sum[m, i])
        drift, change = normaliser[m] / applied[m] - 1.0, 1.0 / normaliser[m] - 1.0 / applied[m]
        if drift * (1.0 - 1.0 / normaliser[m]) > allowed:
            if drift > _SMALL_DRIFT:
                far[many_far], far_change[many_far] = m, change
                many_far += 1
            else:
                near[many_near], near_change[many_near] = m, change
                many_near += 1
            applied[m] = normaliser[m]
        _add(gathered, weight / applied[m], query)
    taken = _dot(gathered, key)
    for i in range(width):
        _move(pull[k], pull_rest[k], i, inverse_norms[k] * (gathered[i] - taken * key[i]))
    double, single = np.empty((_BLOCK, width)), np.empty((_BLOCK, width), dtype=np.float32)
    _refresh(
        k, far[:many_far], far_change, opened, cache, counts, prototypes, inverse_norms, pull, pull_rest, diagonal,
        temperature, double,
    )  # fmt: skip
    _refresh(
        k, near[:many_near], near_change, opened, cache, counts, prototypes, inverse_norms, pull, pull_rest, diagonal,
        temperature, single,
    )  # fmt: skip


@kernel("void(int64[::1], float32[::1], float32[::1], float32[:,::1], float64[::1], float64[::1], float64[::1])")
def _both_cosines(
    rows: Counts,
    one: Row,
    two: Row,
    prototypes: Matrix,
    inverse_norms: Vector,
    cosines: Vector,
    cosines_before: Vector,
) -> None:
    """Cosines of the text `rows` with two unit directions, in single precision."""
    whole = len(rows) - len(rows) % 2
    # Two rows at a time: they share the loads of the directions, and four sums do not wait for each other.
    for at in range(0, whole, 2):
        j, k = rows[at], rows[at + 1]
        by_one, by_two, also_by_one, also_by_two = np.float32(0.0), np.float32(0.0), np.float32(0.0), np.float32(0.0)
        for i in range(one.shape[0]):
            by_one += prototypes[j, i] * one[i]
            by_two += prototypes[j, i] * two[i]
            also_by_one += prototypes[k, i] * one[i]
            also_by_two += prototypes[k, i] * two[i]
        cosines[j], cosines_before[j] = by_one * inverse_norms[j], by_two * inverse_norms[j]
        cosines[k], cosines_before[k] = also_by_one * inverse_norms[k], also_by_two * inverse_norms[k]
    for at in range(whole, len(rows)):
        j = rows[at]
        by_one, by_two = np.float32(0.0), np.float32(0.0)
        for i in range(one.shape[0]):
            by_one += prototypes[j, i] * one[i]
            by_two += prototypes[j, i] * two[i]
        cosines[j], cosines_before[j] = by_one * inverse_norms[j], by_two * inverse_norms[j]


@kernel("void(int64[::1], float64[::1], float32[:,::1], float64[::1], float32[::1], float64[::1])")
def _add_rows(
    rows: Counts, weights: Vector, prototypes: Matrix, inverse_norms: Vector, light: Row, heavy: Vector
) -> None:
    """Add the unit text `rows` by their `weights` (K,) to `light` (d,), or to `heavy` (d,) if they weigh much."""
    short, last = np.zeros(_BLOCK, dtype=np.float32), len(rows) - 1
    for first in range(0, len(rows), _BLOCK):
        for b in range(_BLOCK):
            j = rows[min(first + b, last)]
            weight = weights[j] * inverse_norms[j] if first + b <= last else 0.0
            if weight > 1.0:  # Another class is nearer than the query's own: such a weight can exceed single precision.
                _add(heavy, weight, prototypes[j])
            short[b] = weight if _NEGLIGIBLE < weight <= 1.0 else 0.0
        j, k, m, n = rows[first], rows[min(first + 1, last)], rows[min(first + 2, last)], rows[min(first + 3, last)]
        w_0, w_1, w_2, w_3 = short[0], short[1], short[2], short[3]
        for i in range(light.shape[0]):
            light[i] = (
                light[i] + w_0 * prototypes[j, i] + w_1 * prototypes[k, i]
                + w_2 * prototypes[m, i] + w_3 * prototypes[n, i]
            )  # fmt: skip


@kernel(
    "void(int64, boolean, int64[::1], float64[::1], float64[::1], float32[:,::1], float64[::1], float32[:,::1], "
    "float32[:,::1], float64[:,::1], float64[::1], float64[::1], float64[::1], float64)"
)
def change_query(
    k: int,
    opened: bool,
    keys: Counts,
    current: Vector,
    previous: Vector,
    prototypes: Matrix,
    inverse_norms: Vector,
    pull: Matrix,
    pull_rest: Matrix,
    visual_sum: Wide,
    normaliser: Vector,
    applied: Vector,
    diagonal: Vector,
    temperature: float,
) -> None:
    """The direction of queue k has changed from `previous` to `current` (d,), or begun: bring everything up to date."""
    width, own = prototypes.shape[1], _dot(prototypes[k], current) * inverse_norms[k]
    cosines, cosines_before = np.zeros(prototypes.shape[0]), np.zeros(prototypes.shape[0])
    gain, loss, back = np.zeros(prototypes.shape[0]), np.zeros(prototypes.shape[0]), np.zeros(prototypes.shape[0])
    one, two, light = current.astype(np.float32), previous.astype(np.float32), np.zeros(width, dtype=np.float32)
    rest_weight = 0.0
    visual_sum[k, :] = 0.0
    # A few rows at a time: those that are compared are still at hand when they are added up.
    for first in range(0, len(keys), _AT_HAND):
        some = keys[first : first + _AT_HAND]
        _both_cosines(some, one, two, prototypes, inverse_norms, cosines, cosines_before)
        for j in range(some[0], some[-1] + 1):
            gain[j] = power_of_e((cosines[j] - own) / temperature)
            loss[j] = power_of_e((cosines_before[j] - diagonal[k]) / temperature)
        for j in some:
            # The temperature magnifies the rounding of a similarity; where the result has weight it is taken exactly.
            if gain[j] > _SMALL_WEIGHT and j != k:
                cosines[j] = _dot(prototypes[j], current) * inverse_norms[j]
                gain[j] = math.exp((cosines[j] - own) / temperature)
            if loss[j] > _SMALL_WEIGHT and j != k and not opened:
                cosines_before[j] = _dot(prototypes[j], previous) * inverse_norms[j]
                loss[j] = math.exp((cosines_before[j] - diagonal[k]) / temperature)
            gain[j] = 0.0 if j == k else gain[j]
            loss[j] = 0.0 if opened else loss[j] / applied[k]
            rest_weight += gain[j]
        _add_rows(some, gain, prototypes, inverse_norms, light, visual_sum[k])
    total = 1.0 + rest_weight
    for j in keys:
        gain[j] /= total
        back[j] = gain[j] * cosines[j] - loss[j] * cosines_before[j]
    gain[k] = 1.0 / total - 1.0
    loss[k] = 0.0 if opened else 1.0 / normaliser[k] - 1.0
    back[k] = gain[k] * own - loss[k] * diagonal[k]
    for i in range(width):
        visual_sum[k, i] += light[i]
        visual_sum[k, i] = (visual_sum[k, i] - rest_weight * (prototypes[k, i] * inverse_norms[k])) / total
    normaliser[k] = total
    applied[k] = total
    diagonal[k] = own
    shift_rows(keys, gain, current, loss, previous, back, prototypes, inverse_norms, pull, pull_rest)

"""Temporary prototypes: one AdamW step from zero residuals, fused with the re-scoring (equations 3 to 5).

From zero, AdamW's first step is `-rate * g / (|g| + eps)` element by element, and weight decay has nothing to act on.
So the adapted similarities need no adapted prototypes: each row is moved, normalised and compared in one pass, and
the full P'_t is written down only by the few samples that evolve (see `evolution`).
"""

import math

import numpy as np
from numpy.typing import NDArray

from ..compiled import inner, kernel

Vector = NDArray[np.float64]
Row = NDArray[np.float32]
Matrix = NDArray[np.float32]
Wide = NDArray[np.float64]


def text_gradient_twin(
    prototypes: Matrix,
    inverse_norms: Vector,
    pull: Matrix,
    scale: float,
    feature: Row,
    cosines: Vector,
    slopes: Vector,
    out: Matrix,
) -> None:
    toward = (slopes * inverse_norms).astype(np.float32)
    along = (slopes * cosines * inverse_norms**2).astype(np.float32)
    out[:] = toward[:, None] * feature - along[:, None] * prototypes + np.float32(scale) * pull


def rescore_twin(
    rows: NDArray[np.int64],
    prototypes: Matrix,
    inverse_norms: Vector,
    pull: Matrix,
    scale: float,
    feature: Row,
    cosines: Vector,
    slopes: Vector,
    rate: float,
    epsilon: float,
    out: Vector,
) -> None:
    chosen = prototypes[rows]
    gradient = np.empty_like(chosen)
    text_gradient_twin(
        chosen, inverse_norms[rows], pull[rows], scale, feature, cosines[rows], slopes[rows], gradient
    )  # fmt: skip
    moved = chosen - np.float32(rate) * gradient / (np.abs(gradient) + np.float32(epsilon))
    out[rows] = (moved @ feature) / np.linalg.norm(moved, axis=1)


@inner
def gradient_element(
    prototype: np.float32,
    feature: np.float32,
    pull: np.float32,
    toward: np.float32,
    along: np.float32,
    scale: np.float32,
) -> np.float32:
    """One element of the loss's gradient by a text residual.

    `toward` and `along` are the loss's slope by the row's cosine, divided by the row's norm, and that times the cosine
    and divided by the norm again; `scale * pull` is the part of the alignment loss.
    """
    return toward * feature - along * prototype + scale * pull


@inner
def moved_element(prototype: np.float32, gradient: np.float32, rate: np.float32, epsilon: np.float32) -> np.float32:
    """One element of a prototype after the first AdamW step."""
    return prototype - rate * gradient / (abs(gradient) + epsilon)


@kernel(
    "void(float32[:,::1], float64[::1], float32[:,::1], float64, float32[::1], float64[::1], float64[::1], "
    "float32[:,::1])",
    twin=text_gradient_twin,
)
def text_gradient(
    prototypes: Matrix,
    inverse_norms: Vector,
    pull: Matrix,
    scale: float,
    feature: Row,
    cosines: Vector,
    slopes: Vector,
    out: Matrix,
) -> None:
    """The gradient that `rescore` steps along, written down in full into `out` (K, d)."""
    for k in range(prototypes.shape[0]):
        toward = np.float32(slopes[k] * inverse_norms[k])
        along = np.float32(slopes[k] * cosines[k] * inverse_norms[k] * inverse_norms[k])
        for i in range(feature.shape[0]):
            out[k, i] = gradient_element(prototypes[k, i], feature[i], pull[k, i], toward, along, np.float32(scale))


@kernel(
    "void(int64[::1], float32[:,::1], float64[::1], float32[:,::1], float64, float32[::1], float64[::1], "
    "float64[::1], float64, float64, float64[::1])",
    twin=rescore_twin,
)
def rescore(
    rows: NDArray[np.int64],
    prototypes: Matrix,
    inverse_norms: Vector,
    pull: Matrix,
    scale: float,
    feature: Row,
    cosines: Vector,
    slopes: Vector,
    rate: float,
    epsilon: float,
    out: Vector,
) -> None:
    """Cosine of `feature` with the text prototypes `rows` after the step, into `out` (K,).

    `cosines` (K,) are those before the step, `slopes` (K,) the loss's derivative by each of them.
    """
    for k in rows:
        toward = np.float32(slopes[k] * inverse_norms[k])
        along = np.float32(slopes[k] * cosines[k] * inverse_norms[k] * inverse_norms[k])
        dot, square = np.float32(0.0), np.float32(0.0)
        for i in range(feature.shape[0]):
            gradient = gradient_element(prototypes[k, i], feature[i], pull[k, i], toward, along, np.float32(scale))
            moved = moved_element(prototypes[k, i], gradient, np.float32(rate), np.float32(epsilon))
            dot += moved * feature[i]
            square += moved * moved
        out[k] = dot / math.sqrt(np.float64(square))


@kernel("void(int64[::1], int64[::1], float64[::1], float64[::1])")
def spread_step(rows: NDArray[np.int64], opened: NDArray[np.int64], before: Vector, after: Vector) -> None:
    """Let the step reach classes that it was not computed for: all but `rows` change by the same in `after` (K,).

    Without a queue a class moves along the sample alone, and so by nearly the same as any other; the mean change of
    such `rows` stands for the rest, or that of all rows where each has a queue.
    """
    if len(rows) == len(before):
        return
    aligned, computed = np.zeros(before.shape[0], dtype=np.bool_), np.zeros(before.shape[0], dtype=np.bool_)
    aligned[opened] = True
    computed[rows] = True
    change, count, every = 0.0, 0, 0.0
    for k in rows:
        every += after[k] - before[k]
        if not aligned[k]:
            change += after[k] - before[k]
            count += 1
    change = change / count if count else every / len(rows)
    for k in range(before.shape[0]):
        if not computed[k]:
            after[k] = before[k] + change


def step_visual_twin(
    rows: NDArray[np.int64],
    visual: Matrix,
    lengths: Vector,
    visual_sum: Wide,
    feature: Row,
    cosines: Vector,
    slopes: Vector,
    scale: float,
    rate: float,
    epsilon: float,
    out: Matrix,
) -> None:
    unit, length = visual[rows].astype(np.float64), lengths[rows, None]
    along = np.einsum("kd,kd->k", visual_sum[rows], unit)[:, None]
    gradient = scale * (visual_sum[rows] - along * unit)
    gradient += slopes[rows, None] * (feature - cosines[rows, None] * unit)
    gradient /= length
    moved = length * unit - rate * gradient / (np.abs(gradient) + epsilon)
    out[rows] = moved / np.linalg.norm(moved, axis=1, keepdims=True)


@kernel(
    "void(int64[::1], float32[:,::1], float64[::1], float64[:,::1], float32[::1], float64[::1], float64[::1], "
    "float64, float64, float64, float32[:,::1])",
    twin=step_visual_twin,
)
def step_visual(
    rows: NDArray[np.int64],
    visual: Matrix,
    lengths: Vector,
    visual_sum: Wide,
    feature: Row,
    cosines: Vector,
    slopes: Vector,
    scale: float,
    rate: float,
    epsilon: float,
    out: Matrix,
) -> None:
    """P'_v of the open classes `rows` into `out` (K, d), unit rows.

    The step acts on the un-normalised queue means, `lengths[k] * visual[k]`. `slopes` (K,) are the loss's derivatives
    by the visual cosines `cosines` (K,), all zero unless the evidence is fused: then, and only then, P'_v depends on
    the sample.
    """
    width = feature.shape[0]
    short_rate, short_epsilon = np.float32(rate), np.float32(epsilon)
    for k in rows:
        along = 0.0
        for i in range(width):
            along += visual_sum[k, i] * visual[k, i]
        by_alignment, by_loss = scale / lengths[k], slopes[k] / lengths[k]
        back = by_alignment * along + by_loss * cosines[k]
        length = np.float32(lengths[k])
        total = np.float32(0.0)
        for i in range(width):
            gradient = np.float32(by_alignment * visual_sum[k, i] + by_loss * feature[i] - back * visual[k, i])
            moved = length * visual[k, i] - short_rate * gradient / (abs(gradient) + short_epsilon)
            out[k, i] = moved
            total += moved * moved
        inverse = np.float32(1.0) / np.float32(math.sqrt(np.float64(total)))
        for i in range(width):
            out[k, i] *= inverse

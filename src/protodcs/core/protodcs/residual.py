"""One AdamW step on zero residuals: gradients by un-normalised rows, and the rows after the step (equations 3 to 5).

From zero, AdamW's first step is `-rate * g / (|g| + eps)` element by element, and weight decay has no effect on it.
"""

from typing import TypeVar

import numpy as np

from ...arrays import Feature, Floats, Integers
from ..numerics.linalg import norms, products

AnyRows = TypeVar("AnyRows", Feature, Floats)

# Opposite features can cancel in a queue; a shorter mean than this has no direction left.
_SHORTEST_MEAN = 1e-12


def queue_means(cache: Feature, counts: Integers) -> tuple[Floats, Floats]:
    """Return direction (n, d) and length (n,) of the mean of each queue of `cache` (n, size, d).

    The first `counts` (n,) slots of a queue hold features, one or more; the others are zero.
    """
    return directions(cache.sum(axis=1, dtype=np.float64) / counts[:, None])


def directions(means: Floats) -> tuple[Floats, Floats]:
    """Return direction (n, d) and length (n,) of each of the `means` (n, d)."""
    lengths = np.maximum(norms(means), _SHORTEST_MEAN)
    return means / lengths[:, None], lengths


def project(gradient: Floats, unit: Floats, inverse_norms: Floats) -> Floats:
    """Return the gradient (n, d) by rows from the `gradient` (n, d) by their directions `unit` (n, d)."""
    projected = gradient - products(gradient, unit)[:, None] * unit
    projected *= inverse_norms[:, None]
    return projected


def text_gradient(
    text: Feature, inverse_norms: Floats, cosines: Floats, slopes: Floats, feature: Feature, alignment: Feature
) -> Feature:
    """Return the gradient (n, d) of the loss by the text residuals at zero: c_k (f - z_k p_k) for unit rows p_k.

    Args:
        text: (n, d) the text prototypes P_t.
        inverse_norms: (n,) 1 / ||P_t||.
        cosines: (n,) z.
        slopes: (n,) c, the derivative of the loss by each cosine.
        feature: (d,) f.
        alignment: (n, d) the part of InfoNCE.
    """
    toward = (slopes * inverse_norms).astype(np.float32)
    along = (slopes * cosines * inverse_norms**2).astype(np.float32)
    gradient: Feature = toward[:, None] * feature
    gradient -= along[:, None] * text
    gradient += alignment
    return gradient


def adam_step(rows: AnyRows, gradient: AnyRows, rate: float, epsilon: float) -> AnyRows:
    """Return `rows` (n, d) plus a zero residual after its first AdamW step along `gradient` (n, d)."""
    step: AnyRows = np.abs(gradient)
    step += epsilon
    np.divide(gradient, step, out=step)
    step *= -rate
    step += rows
    return step

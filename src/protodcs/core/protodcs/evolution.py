"""Evolution of the global text prototypes: a cumulative mean of the temporary ones (equation 11).

Only samples that both checks called known and that pass the quality gate move the prototypes, and each moves them
less than the one before.
"""

import math

import numpy as np
from numpy.typing import NDArray

from ..compiled import kernel
from .residual import gradient_element, moved_element, text_gradient_twin

Vector = NDArray[np.float64]
Row = NDArray[np.float32]
Matrix = NDArray[np.float32]


def evolve_twin(
    prototypes: Matrix,
    inverse_norms: Vector,
    pull: Matrix,
    scale: float,
    feature: Row,
    cosines: Vector,
    slopes: Vector,
    rate: float,
    epsilon: float,
    share: float,
    unit: bool,
) -> None:
    gradient = np.empty_like(prototypes)
    text_gradient_twin(prototypes, inverse_norms, pull, scale, feature, cosines, slopes, gradient)
    moved = (prototypes - np.float32(rate) * gradient / (np.abs(gradient) + np.float32(epsilon))).astype(np.float64)
    moved /= np.linalg.norm(moved, axis=1, keepdims=True)
    mean = (1.0 - share) * prototypes + share * moved
    norms = np.linalg.norm(mean, axis=1)
    prototypes[:] = mean / norms[:, None] if unit else mean


@kernel(
    "void(float32[:,::1], float64[::1], float32[:,::1], float64, float32[::1], float64[::1], float64[::1], "
    "float64, float64, float64, boolean)",
    twin=evolve_twin,
)
def evolve(
    prototypes: Matrix,
    inverse_norms: Vector,
    pull: Matrix,
    scale: float,
    feature: Row,
    cosines: Vector,
    slopes: Vector,
    rate: float,
    epsilon: float,
    share: float,
    unit: bool,
) -> None:
    """Move `prototypes` (K, d) by `share` towards the temporary prototypes of this sample, in place.

    `inverse_norms` are those before the move; the caller renews them.
    """
    width = feature.shape[0]
    moved = np.empty(width)
    for k in range(prototypes.shape[0]):
        toward = np.float32(slopes[k] * inverse_norms[k])
        along = np.float32(slopes[k] * cosines[k] * inverse_norms[k] * inverse_norms[k])
        square = 0.0
        for i in range(width):
            gradient = gradient_element(prototypes[k, i], feature[i], pull[k, i], toward, along, np.float32(scale))
            moved[i] = moved_element(prototypes[k, i], gradient, np.float32(rate), np.float32(epsilon))
            square += moved[i] * moved[i]
        norm = math.sqrt(square)
        square = 0.0
        for i in range(width):
            moved[i] = (1.0 - share) * prototypes[k, i] + share * (moved[i] / norm)
            square += moved[i] * moved[i]
        divisor = math.sqrt(square) if unit else 1.0
        for i in range(width):
            prototypes[k, i] = moved[i] / divisor

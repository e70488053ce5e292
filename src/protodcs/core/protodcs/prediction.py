"""The final prediction: text similarity and visual affinity together (equations 9 and 10)."""

import numpy as np
from numpy.typing import NDArray

from ..compiled import kernel
from ..evidence import softmax, softmax_twin, uncertainty, uncertainty_twin
from ..exponential import power_of_e
from ..vectors import products

Vector = NDArray[np.float64]
Row = NDArray[np.float32]
Matrix = NDArray[np.float32]


def affinities_twin(
    rows: NDArray[np.int64],
    visual: Matrix,
    feature: Row,
    weight: float,
    sharpness: float,
    cosines: Vector,
    out: Vector,
) -> None:
    cosines[:], out[:] = 0.0, 0.0
    cosines[rows] = visual[rows] @ feature
    out[rows] = weight * np.exp(-sharpness * (1.0 - cosines[rows]))


@kernel(
    "void(int64[::1], float32[:,::1], float32[::1], float64, float64, float64[::1], float64[::1])",
    twin=affinities_twin,
)
def affinities(
    rows: NDArray[np.int64],
    visual: Matrix,
    feature: Row,
    weight: float,
    sharpness: float,
    cosines: Vector,
    out: Vector,
) -> None:
    """`weight * exp(-sharpness (1 - cosine))` with the visual prototypes `rows` of `visual` (K, d) into `out` (K,).

    Every other class has cosine and affinity 0.
    """
    cosines[:] = 0.0
    out[:] = 0.0
    products(rows, visual, feature, cosines)
    for k in rows:
        out[k] = weight * power_of_e(-sharpness * (1.0 - cosines[k]))


def text_probabilities_twin(cosines: Vector, temperature: float, logits: Vector, out: Vector) -> float:
    np.divide(cosines, temperature, out=logits)
    return softmax_twin(logits, out)


@kernel("float64(float64[::1], float64, float64[::1], float64[::1])", twin=text_probabilities_twin)
def text_probabilities(cosines: Vector, temperature: float, logits: Vector, out: Vector) -> float:
    """Softmax of `cosines / temperature` into `out` (K,), the quotient into `logits` (K,); returns the entropy."""
    for k in range(cosines.shape[0]):
        logits[k] = cosines[k] / temperature
    return softmax(logits, out)


def conclude_twin(
    logits: Vector, cosines: Vector, affinity: Vector, temperature: float, scaled: Vector, text: Vector, scores: Vector
) -> tuple[int, float, float, float]:
    aleatoric, epistemic = uncertainty_twin(logits)
    entropy = text_probabilities_twin(cosines, temperature, scaled, text)
    np.add(text, affinity, out=scores)
    return int(scores.argmax()), aleatoric, epistemic, entropy


@kernel(
    "Tuple((int64, float64, float64, float64))(float64[::1], float64[::1], float64[::1], float64, float64[::1], "
    "float64[::1], float64[::1])",
    twin=conclude_twin,
)
def conclude(
    logits: Vector, cosines: Vector, affinity: Vector, temperature: float, scaled: Vector, text: Vector, scores: Vector
) -> tuple[int, float, float, float]:
    """Text probability plus affinity into `scores` (K,); returns the lowest best class, AU, EU and the text entropy.

    `logits` (K,) are those behind the evidence; `scaled` and `text` (K,) become the scaled cosines and their softmax.
    """
    aleatoric, epistemic = uncertainty(logits, text)
    entropy = text_probabilities(cosines, temperature, scaled, text)
    best = 0
    for k in range(cosines.shape[0]):
        scores[k] = text[k] + affinity[k]
        if scores[k] > scores[best]:
            best = k
    return best, aleatoric, epistemic, entropy

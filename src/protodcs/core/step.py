"""What most samples need, in as few calls as can be: the parts stand in the files of their names.

A call from Python costs about as much as a pass over fifty classes. `engine` and `memory` know the same parts one by
one, for every other reading of the paper and for what happens rarely.
"""

import numpy as np
from numpy.typing import NDArray

from .alignment import change_query
from .cache import place
from .compiled import kernel
from .evidence import largest, uncertainty, uncertainty_gradient
from .prediction import affinities, conclude, text_probabilities
from .residual import rescore, spread_step, step_visual

Vector = NDArray[np.float64]
Row = NDArray[np.float32]
Matrix = NDArray[np.float32]


@kernel(
    "Tuple((float64, int64, float64, float64, float64))("
    "int64[::1], float64, float64, float32[:,::1], float64[::1], float32[:,::1], float64, float32[::1], float64[::1], "
    "float64[::1], float64, float64, float64[::1], int64[::1], float32[:,::1], float64, float64, float64[::1], "
    "float64[::1], float64, float64[::1], float64[::1], float64[::1])"
)
def step_and_predict(
    rows: NDArray[np.int64],
    aleatoric_weight: float,
    epistemic_weight: float,
    text: Matrix,
    inverse_norms: Vector,
    pull: Matrix,
    pull_scale: float,
    feature: Row,
    before: Vector,
    slopes: Vector,
    rate: float,
    epsilon: float,
    after: Vector,
    opened: NDArray[np.int64],
    visual: Matrix,
    affinity_weight: float,
    sharpness: float,
    visual_cosines: Vector,
    affinity: Vector,
    temperature: float,
    logits: Vector,
    probabilities: Vector,
    scores: Vector,
) -> tuple[float, int, float, float, float]:
    """Openness S' after a step of the text `rows`, and what `prediction.conclude` finds: class, AU, EU and entropy.

    Without rows there is no step. The visual prototypes `opened` take part in the prediction; the other arrays are
    those of `Memory` and `Scratch`.
    """
    after[:] = before
    if len(rows):
        uncertainty_gradient(before, aleatoric_weight, epistemic_weight, slopes)
        rescore(rows, text, inverse_norms, pull, pull_scale, feature, before, slopes, rate, epsilon, after)
        spread_step(rows, opened, before, after)
    affinities(opened, visual, feature, affinity_weight, sharpness, visual_cosines, affinity)
    best, aleatoric, epistemic, entropy = conclude(after, after, affinity, temperature, logits, probabilities, scores)
    return 1.0 - largest(after), best, aleatoric, epistemic, entropy


@kernel(
    "Tuple((int64, float64, float64, float64))(float64[::1], float64[::1], float64, float64[::1], float64[::1], "
    "float64[::1], float64[::1])"
)
def predict_by_text(
    before: Vector,
    bias: Vector,
    temperature: float,
    after: Vector,
    logits: Vector,
    probabilities: Vector,
    scores: Vector,
) -> tuple[int, float, float, float]:
    """Class, AU, EU and entropy where no prototype moves and there are no visual ones; the bias (K,) adds to logits."""
    aleatoric, epistemic = uncertainty(before, probabilities)
    entropy = text_probabilities(before, temperature, logits, probabilities)
    best = 0
    for k in range(before.shape[0]):
        after[k] = before[k]
        scores[k] = logits[k] + bias[k]
    for k in range(before.shape[0]):
        if scores[k] > scores[best]:
            best = k
    return best, aleatoric, epistemic, entropy


@kernel(
    "void(int64, int64, float32[::1], float64, float32[:,:,::1], float64[:,::1], int64[::1], float32[:,::1], "
    "float64[::1], int64[::1], float32[:,::1], float64[::1], float32[:,::1], float32[:,::1], float64[:,::1], "
    "float64[::1], float64[::1], float64[::1], float64, float64, float64, float64, float32[:,::1])"
)
def renew_queue(
    k: int,
    slot: int,
    feature: Row,
    uncertainty: float,
    cache: NDArray[np.float32],
    quality: NDArray[np.float64],
    counts: NDArray[np.int64],
    visual: Matrix,
    lengths: Vector,
    keys: NDArray[np.int64],
    text: Matrix,
    inverse_norms: Vector,
    pull: Matrix,
    pull_rest: Matrix,
    visual_sum: NDArray[np.float64],
    normaliser: Vector,
    applied: Vector,
    diagonal: Vector,
    temperature: float,
    pull_scale: float,
    rate: float,
    epsilon: float,
    adapted: Matrix,
) -> None:
    """Put `feature` into `slot` of the open queue k, and bring its alignment and its temporary prototype up to date."""
    previous, current = np.empty(feature.shape[0]), np.empty(feature.shape[0])
    place(k, slot, feature, uncertainty, cache, quality, counts, visual, lengths, previous, current)
    change_query(
        k, False, keys, current, previous, text, inverse_norms, pull, pull_rest, visual_sum, normaliser, applied,
        diagonal, temperature,
    )  # fmt: skip
    none, row = np.zeros(counts.shape[0]), np.full(1, k)
    step_visual(row, visual, lengths, visual_sum, feature, none, none, pull_scale, rate, epsilon, adapted)

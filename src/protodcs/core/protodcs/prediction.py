"""Prediction: text similarity and visual affinity together (equations 9 and 10)."""

from typing import NamedTuple

import numpy as np

from ...arrays import Feature, Floats
from ..numerics.evidence import uncertainty
from ..numerics.linalg import products
from ..numerics.softmax import softmax
from .state import ProtoDCSState


class Prediction(NamedTuple):
    """The prediction with the temporary prototypes.

    Attributes:
        best: the class with the highest score; the first one of several.
        scores: (K,) text term plus affinity.
        aleatoric, epistemic: AU and EU.
        entropy: that of the logits that predict, in nats. Fused logits include the affinity.
    """

    best: int
    scores: Floats
    aleatoric: float
    epistemic: float
    entropy: float


def affinities(state: ProtoDCSState, visual: Feature, feature: Feature) -> Floats:
    """Return `alpha * exp(-beta (1 - P_v f))` (K,) for the unit rows `visual` (M, d) of the open classes.

    A class with an empty queue has the affinity 0.
    """
    config, found = state.config, np.zeros(len(state.counts))
    distances = 1.0 - products(visual, feature)
    found[state.opened] = config.affinity_weight * np.exp(-config.affinity_sharpness * distances)
    return found


def predict(state: ProtoDCSState, cosines: Floats, affinity: Floats) -> Prediction:
    """Predict from the text cosines P'_t f (K,) and the affinities (K,)."""
    config = state.config
    evidence = config.evidence_scale * cosines
    aleatoric, epistemic = uncertainty(evidence + affinity if config.evidence_logits == "fused" else evidence)
    similarities = cosines / config.temperature
    probabilities, entropy = softmax(similarities)
    if config.evidence_logits == "fused" or config.prediction_scale == "logit":
        _, entropy = softmax(similarities + affinity)
    scores = affinity + (probabilities if config.prediction_scale == "probability" else similarities)
    if not config.text_prototypes and len(state.opened):
        scores = affinity
    return Prediction(int(scores.argmax()), scores, aleatoric, epistemic, entropy)

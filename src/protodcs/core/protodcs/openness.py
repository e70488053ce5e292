"""How strange a sample looks by its cosines, in the three readings of the paper, and what range that has."""

import math

import numpy as np

from ...arrays import Floats
from .config import ProtoDCSConfig


def openness_of(config: ProtoDCSConfig, cosines: Floats) -> float:
    """Return the openness of a sample: one minus its largest cosine (K,), or minus the log of its largest probability.

    MCM is the softmax at temperature 1. Its probabilities differ in the fourth decimal, their logarithms as cosines do.
    """
    largest = float(cosines.max())
    if config.openness == "cosine":
        return 1.0 - largest
    temperature = config.temperature if config.openness == "softmax" else 1.0
    return math.log(float(np.exp((cosines - largest) / temperature).sum()))


def initial_threshold(config: ProtoDCSConfig) -> float:
    """Return Theta_c on the scale of `openness_of`."""
    if config.openness == "cosine":
        return config.cold_threshold
    return -math.log(max(1.0 - config.cold_threshold, np.finfo(np.float64).tiny))


def largest_openness(config: ProtoDCSConfig, classes: int) -> float:
    """Return the upper end of the range of `openness_of`; the lower one is 0."""
    return 2.0 if config.openness == "cosine" else math.log(classes)

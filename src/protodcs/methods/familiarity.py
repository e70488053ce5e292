"""The familiarity that methods report whose prediction is a vector of logits."""

import math
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Score = Literal["max", "softmax", "mcm", "energy"]
# What tables call those that do not depend on what a logit is.
PROBABLE = {"softmax": "softmax", "mcm": "MCM", "energy": "energy"}


def familiarity(logits: NDArray[np.float64], temperature: float, score: Score) -> float:
    """Of logits (K,): the largest times the temperature, its probability, that at temperature 1, or the free energy."""
    top = float(logits.max())
    if score == "max":
        return top * temperature
    partition = float(np.exp((logits - top) * (temperature if score == "mcm" else 1.0)).sum())
    return math.log(partition) + top if score == "energy" else 1.0 / partition

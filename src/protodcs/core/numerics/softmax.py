"""Softmax, its entropy, and the gradient of that entropy."""

import math

import numpy as np

from ...arrays import Floats


def softmax(logits: Floats) -> tuple[Floats, float]:
    """Return the softmax (K,) of `logits` (K,), and its entropy in nats."""
    shifted = logits - logits.max()
    powers = np.exp(shifted)
    total = float(powers.sum())
    probabilities: Floats = powers / total
    return probabilities, max(0.0, math.log(total) - float(probabilities @ shifted))


def entropy_gradient(probabilities: Floats, entropy: float) -> Floats:
    """Return the derivative (K,) of the entropy of a softmax by each of its logits."""
    # A probability of zero has the derivative zero, whatever stands for its logarithm.
    logs = np.log(np.maximum(probabilities, np.finfo(np.float64).tiny))
    slopes: Floats = -probabilities * (logs + entropy)
    return slopes


def confidence(logits: Floats, best: int, temperature: float) -> float:
    """Return the softmax probability of the class `best` under `logits / temperature`."""
    return float(1.0 / np.exp((logits - logits[best]) / temperature).sum())


def softmax_rows(logits: Floats) -> Floats:
    """Return the softmax of each row of `logits` (N, K)."""
    powers: Floats = np.exp(logits - logits.max(axis=1, keepdims=True))
    return powers / powers.sum(axis=1, keepdims=True)


def entropy_rows(probabilities: Floats) -> Floats:
    """Return the entropy (N,) in nats of each row of `probabilities` (N, K)."""
    logs = np.log(np.maximum(probabilities, np.finfo(np.float64).tiny))
    entropy: Floats = -(probabilities * logs).sum(axis=1)
    return entropy

"""Dirichlet uncertainty of a set of logits, and its gradient (equations 6 and 7).

Evidence is `a = ReLU(z) + 1`. Aleatoric uncertainty AU is the expected entropy of the Dirichlet, epistemic
uncertainty EU is `K / sum(a)`. All of it is float64: over a real stream AU varies by 0.005 around 4.2, and rounding it
to float32 would reorder the cache.
"""

import numpy as np

from ...arrays import Floats

# The asymptotic series below are exact to 1e-13 from here on.
_LARGE = 8.0
# Steps of the recurrences from the smallest argument, 1, to that.
_STEPS = np.arange(_LARGE - 1.0)[:, None]


def uncertainty(logits: Floats) -> tuple[float, float]:
    """Return AU = -sum a_k/S (psi(a_k + 1) - psi(S + 1)) and EU = K/S of `logits` (K,), with S = sum a."""
    evidence = np.maximum(logits, 0.0) + 1.0
    total = float(evidence.sum())
    psi = digamma(np.append(evidence, total) + 1.0)
    # AU of one class is zero; rounding errors must not rank its samples.
    aleatoric = 0.0 if len(evidence) == 1 else max(0.0, float(psi[-1] - evidence @ psi[:-1] / total))
    return aleatoric, len(evidence) / total


def uncertainty_gradient(logits: Floats, aleatoric_weight: float, epistemic_weight: float) -> Floats:
    """Return the derivative (K,) of `aleatoric_weight * AU + epistemic_weight * EU` by each of the `logits` (K,)."""
    evidence = np.maximum(logits, 0.0) + 1.0
    total = float(evidence.sum())
    psi = digamma(evidence + 1.0)
    psi_1 = trigamma(np.append(evidence, total) + 1.0)
    by_aleatoric = psi_1[-1] + (evidence @ psi / total - psi - evidence * psi_1[:-1]) / total
    slopes = aleatoric_weight * by_aleatoric - epistemic_weight * len(evidence) / total**2
    return np.where(logits > 0.0, slopes, 0.0)


def digamma(x: Floats) -> Floats:
    """Return psi(x) for x (n,), each 1 or more: recurrence to 8 and beyond, then the asymptotic series."""
    earlier = (1.0 / (x + _STEPS)).sum(axis=0)
    x = x + len(_STEPS)
    r = 1.0 / (x * x)
    tail = r * (1 / 12 - r * (1 / 120 - r * (1 / 252 - r * (1 / 240 - r * (1 / 132 - r * (691 / 32760))))))
    psi: Floats = np.log(x) - 0.5 / x - tail - earlier
    return psi


def trigamma(x: Floats) -> Floats:
    """Return psi'(x) for x (n,), each 1 or more, in the same way."""
    earlier = (1.0 / (x + _STEPS) ** 2).sum(axis=0)
    x = x + len(_STEPS)
    r = 1.0 / (x * x)
    tail = r * (1 / 6 - r * (1 / 30 - r * (1 / 42 - r * (1 / 30 - r * (5 / 66 - r * (691 / 2730))))))
    psi_1: Floats = 1.0 / x + 0.5 * r + tail / x + earlier
    return psi_1

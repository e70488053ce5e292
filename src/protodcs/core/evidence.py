"""Dirichlet uncertainty of a set of logits, and its gradient (equations 6 and 7).

Evidence is `a = ReLU(z) + 1`. Aleatoric uncertainty AU is the expected entropy of the Dirichlet, epistemic
uncertainty EU is `K / sum(a)`. All of it is float64: over a real stream AU moves by 0.005 around 4.2, and rounding it
to float32 would reorder the cache.
"""

import math

import numpy as np
from numpy.typing import NDArray

from .compiled import inner, kernel
from .exponential import power_of_e

Vector = NDArray[np.float64]

# Taylor coefficients of digamma around 2.5, psi^(n)(2.5)/n!. Cosine logits put the argument into [2, 3], where the
# series converges like 0.2^n: nineteen terms leave an error below 1e-14 and need no division.
_CENTRE = 2.5
_DIGAMMA = (
    0.70315664064524319,
    0.49035775610023486,
    -0.1181020258208637,
    0.037317641469542009,
    -0.013073166646113807,
    0.0048214098213931957,
    -0.0018305640382639378,
    0.00070738816518316098,
    -0.00027643925426264713,
    0.00010882584206868631,
    -4.3052688655542602e-5,
    1.7089167198843548e-5,
    -6.7989292319747948e-6,
    2.7092759794669097e-6,
    -1.0808116193449875e-6,
    4.315056529691794e-7,
    -1.7237026144441995e-7,
    6.8882254155130349e-8,
    -2.7534182401274526e-8,
)
_TRIGAMMA = tuple(n * c for n, c in enumerate(_DIGAMMA))[1:]
_DIGAMMA_TABLE = np.array(_DIGAMMA)
_TRIGAMMA_TABLE = np.array(_TRIGAMMA)
# The series holds beyond [2, 3] too; logits above this (text plus affinity) take the general functions.
_SERIES_LIMIT = 1.1


@inner
def digamma(x: float) -> float:
    """psi(x) for x > 0: recurrence up to 8, then the asymptotic series."""
    result = 0.0
    while x < 8.0:
        result -= 1.0 / x
        x += 1.0
    r = 1.0 / (x * x)
    tail = r * (1 / 12 - r * (1 / 120 - r * (1 / 252 - r * (1 / 240 - r * (1 / 132 - r * (691 / 32760))))))
    return result + math.log(x) - 0.5 / x - tail


@inner
def trigamma(x: float) -> float:
    """psi'(x) for x > 0, the same way."""
    result = 0.0
    while x < 8.0:
        result += 1.0 / (x * x)
        x += 1.0
    r = 1.0 / (x * x)
    tail = r * (1 / 6 - r * (1 / 30 - r * (1 / 42 - r * (1 / 30 - r * (5 / 66 - r * (691 / 2730))))))
    return result + 1.0 / x + 0.5 * r + tail / x


def uncertainty_twin(logits: Vector) -> tuple[float, float]:
    """AU and EU, as the equations read."""
    evidence = np.maximum(logits, 0.0) + 1.0
    total = float(evidence.sum())
    psi = np.array([digamma(a + 1.0) for a in evidence])
    return max(0.0, digamma(total + 1.0) - float(evidence @ psi) / total), len(evidence) / total


def uncertainty_gradient_twin(
    logits: Vector, aleatoric_weight: float, epistemic_weight: float, out: Vector
) -> tuple[float, float]:
    """AU, EU, and into `out` the derivative of `aleatoric_weight * AU + epistemic_weight * EU` by each logit."""
    evidence = np.maximum(logits, 0.0) + 1.0
    total = float(evidence.sum())
    psi = np.array([digamma(a + 1.0) for a in evidence])
    psi_1 = np.array([trigamma(a + 1.0) for a in evidence])
    mean = float(evidence @ psi) / total
    aleatoric_slope = trigamma(total + 1.0) + (mean - psi - evidence * psi_1) / total
    slope = aleatoric_weight * aleatoric_slope - epistemic_weight * len(evidence) / total**2
    out[:] = np.where(logits > 0.0, slope, 0.0)
    return max(0.0, digamma(total + 1.0) - mean), len(evidence) / total


@inner
def largest(values: Vector) -> float:
    """The largest of some values."""
    found = values[0]
    for value in values:
        found = max(found, value)
    return found


@inner
def _evidence_sums(logits: Vector, psi: Vector) -> tuple[float, float]:
    """Fill psi(a + 1) for each class; returns sum(a) and sum(a * psi(a + 1))."""
    if largest(logits) <= _SERIES_LIMIT:
        for k in range(logits.shape[0]):
            h = max(logits[k], 0.0) + 2.0 - _CENTRE
            value = 0.0
            for n in range(len(_DIGAMMA) - 1, -1, -1):
                value = value * h + _DIGAMMA_TABLE[n]
            psi[k] = value
    else:
        for k in range(logits.shape[0]):
            psi[k] = digamma(max(logits[k], 0.0) + 2.0)
    total, weighted = 0.0, 0.0
    for k in range(logits.shape[0]):
        a = max(logits[k], 0.0) + 1.0
        total += a
        weighted += a * psi[k]
    return total, weighted


def _uncertainty_twin(logits: Vector, scratch: Vector) -> tuple[float, float]:
    return uncertainty_twin(logits)


@kernel("UniTuple(float64, 2)(float64[::1], float64[::1])", twin=_uncertainty_twin)
def uncertainty(logits: Vector, scratch: Vector) -> tuple[float, float]:
    """AU and EU of `logits` (K,); `scratch` (K,) is overwritten."""
    total, weighted = _evidence_sums(logits, scratch)
    # Of one class AU is zero, up to a rounding that may fall on either side.
    return max(0.0, digamma(total + 1.0) - weighted / total), logits.shape[0] / total


@kernel("UniTuple(float64, 2)(float64[::1], float64, float64, float64[::1])", twin=uncertainty_gradient_twin)
def uncertainty_gradient(
    logits: Vector, aleatoric_weight: float, epistemic_weight: float, out: Vector
) -> tuple[float, float]:
    """AU and EU, and into `out` (K,) the loss's derivative by each logit."""
    classes = logits.shape[0]
    total, weighted = _evidence_sums(logits, out)
    mean = weighted / total
    common = aleatoric_weight * (trigamma(total + 1.0) + mean / total) - epistemic_weight * classes / (total * total)
    share = aleatoric_weight / total
    if largest(logits) <= _SERIES_LIMIT:
        for k in range(classes):
            z = max(logits[k], 0.0)
            h = z + 2.0 - _CENTRE
            value = 0.0
            for n in range(len(_TRIGAMMA) - 1, -1, -1):
                value = value * h + _TRIGAMMA_TABLE[n]
            slope = common - share * (out[k] + (z + 1.0) * value)
            out[k] = slope if z > 0.0 else 0.0
    else:
        for k in range(classes):
            z = max(logits[k], 0.0)
            slope = common - share * (out[k] + (z + 1.0) * trigamma(z + 2.0))
            out[k] = slope if z > 0.0 else 0.0
    return max(0.0, digamma(total + 1.0) - mean), classes / total


def softmax_twin(logits: Vector, out: Vector) -> float:
    shifted = logits - logits.max()
    np.exp(shifted, out=out)
    total = float(out.sum())
    out /= total
    return float(math.log(total) - shifted @ out)


@kernel("float64(float64[::1], float64[::1])", twin=softmax_twin)
def softmax(logits: Vector, out: Vector) -> float:
    """Write the softmax of `logits` (K,) into `out` (K,); returns its entropy in nats."""
    classes = logits.shape[0]
    top = largest(logits)
    # No loop both writes and sums. The compiler would guard such a loop by the distance between the two arrays, and sum
    # in another order where they happen to lie close together: equal input must give equal bits wherever it lies.
    for k in range(classes):
        out[k] = power_of_e(logits[k] - top)
    total = 0.0
    for k in range(classes):
        total += out[k]
    for k in range(classes):
        out[k] /= total
    mean = 0.0
    for k in range(classes):
        mean += out[k] * (logits[k] - top)
    return math.log(total) - mean


def entropy_gradient_twin(probabilities: Vector, entropy: float, out: Vector) -> None:
    logs = np.log(np.maximum(probabilities, np.finfo(np.float64).tiny))
    out[:] = -probabilities * (logs + entropy)


@kernel("void(float64[::1], float64, float64[::1])", twin=entropy_gradient_twin)
def entropy_gradient(probabilities: Vector, entropy: float, out: Vector) -> None:
    """Into `out` (K,) the derivative of the entropy by each logit of the softmax."""
    for k in range(probabilities.shape[0]):
        p = probabilities[k]
        out[k] = -p * (math.log(p) + entropy) if p > 0.0 else 0.0


def confidence_twin(logits: Vector, best: int, temperature: float) -> float:
    """Return the softmax probability of the class `best`, in numpy."""
    return float(1.0 / np.exp((logits - logits[best]) / temperature).sum())


@kernel("float64(float64[::1], int64, float64)", twin=confidence_twin)
def confidence(logits: Vector, best: int, temperature: float) -> float:
    """Return the softmax probability of the class `best` under `logits / temperature`."""
    total = 0.0
    for k in range(logits.shape[0]):
        total += power_of_e((logits[k] - logits[best]) / temperature)
    return 1.0 / total

"""A two-component Gaussian mixture over recent values, fitted by EM (equations 8 and 9).

The fit starts from the exact best two-means split of the sorted values, so it needs no randomness. It reports failure
if it does not converge, if a component is almost empty, or if a number is not finite; then the methods use a threshold
instead. Component 0 is known. Component 1, the one with the higher mean, is unknown.
"""

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import StateError
from .compiled import inner, kernel
from .exponential import power_of_e
from .windows import push

Vector = NDArray[np.float64]

# Layout of the parameter vector: weight, mean and variance of the known component, then of the unknown one.
PARAMETERS = 6
_HALF_LOG_TAU = 0.5 * math.log(2.0 * math.pi)
# Bisection halves the bracket each time; sixty halvings reach the last bit of any openness difference.
_BISECTIONS = 60
# Factors up to two whose product is still a number.
_FACTORS = 512
# A component of a state must be wide enough to divide by.
_LEAST_VARIANCE = 1e-280


@inner
def _split(ordered: Vector, size: int) -> int:
    """Where to cut the ordered values so that the sum of squares within the two parts is least; lowest on ties."""
    centre = 0.0
    for i in range(size):
        centre += ordered[i]
    centre /= size
    left, total = 0.0, 0.0
    for i in range(size):
        total += ordered[i] - centre
    best, best_gain = 1, -1.0
    for cut in range(1, size):
        left += ordered[cut - 1] - centre
        right = total - left
        gain = left * left / cut + right * right / (size - cut)
        if gain > best_gain:
            best, best_gain = cut, gain
    return best


@inner
def _describe(ordered: Vector, start: int, stop: int, size: int, floor: float, out: Vector) -> None:
    """Weight, mean and floored variance of one part of the ordered values."""
    count = stop - start
    mean = 0.0
    for i in range(start, stop):
        mean += ordered[i]
    mean /= count
    variance = 0.0
    for i in range(start, stop):
        variance += (ordered[i] - mean) ** 2
    out[0] = count / size
    out[1] = mean
    out[2] = max(variance / count, floor)


@inner
def _log_height(part: Vector) -> float:
    """log(weight * normal density) at the mean."""
    return math.log(part[0]) - _HALF_LOG_TAU - 0.5 * math.log(part[2])


@inner
def _log_density(value: float, part: Vector) -> float:
    """log(weight * normal density)."""
    return _log_height(part) - 0.5 * (value - part[1]) ** 2 / part[2]


@inner
def _log_odds(value: float, parameters: Vector) -> float:
    """Log of P(unknown) over P(known)."""
    return _log_density(value, parameters[3:]) - _log_density(value, parameters[:3])


@inner
def _sigmoid(x: float) -> float:
    if x >= 0.0:
        return 1.0 / (1.0 + math.exp(-x))
    grown = math.exp(x)
    return grown / (1.0 + grown)


@kernel("void(float64[::1], int64, float64, float64[::1])")
def start(ordered: Vector, size: int, floor: float, out: Vector) -> None:
    """The parameters EM starts from: the two parts of the best split of the first `size` ordered values."""
    cut = _split(ordered, size)
    _describe(ordered, 0, cut, size, floor, out[:3])
    _describe(ordered, cut, size, size, floor, out[3:])


@kernel("boolean(float64[::1], int64, float64, int64, float64, float64, float64[::1])")
def fit(
    ordered: Vector, size: int, tolerance: float, iterations: int, floor: float, least_weight: float, out: Vector
) -> bool:
    """EM on the first `size` ordered values into `out` (6,); False if the fit must not be used."""
    start(ordered, size, floor, out)
    previous = -math.inf
    converged = False
    for _ in range(iterations):
        likelihood, weight, first, second = 0.0, 0.0, 0.0, 0.0
        total, total_square = 0.0, 0.0
        # Moments are taken around the window's middle: openness varies by hundredths around 0.7.
        centre = 0.5 * (out[1] + out[4])
        known_height, unknown_height = _log_height(out[:3]), _log_height(out[3:])
        known_slope, unknown_slope = 0.5 / out[2], 0.5 / out[5]
        # The logarithms of many small factors are taken at once, of their product: a factor is at most two.
        for first_of in range(0, size, _FACTORS):
            product = 1.0
            for i in range(first_of, min(first_of + _FACTORS, size)):
                known = known_height - known_slope * (ordered[i] - out[1]) ** 2
                unknown = unknown_height - unknown_slope * (ordered[i] - out[4]) ** 2
                # The likelihood and the share of the unknown part from one power: e to the minus distance of the two.
                power = power_of_e(-abs(unknown - known))
                likelihood += max(known, unknown)
                product *= 1.0 + power
                share = (1.0 if unknown >= known else power) / (1.0 + power)
                x = ordered[i] - centre
                weight += share
                first += share * x
                second += share * x * x
                total += x
                total_square += x * x
            likelihood += math.log(product)
        rest = size - weight
        if not (weight > 0.0 and rest > 0.0):
            return False
        out[0], out[3] = rest / size, weight / size
        mean_known, mean_unknown = (total - first) / rest, first / weight
        out[1], out[4] = centre + mean_known, centre + mean_unknown
        out[2] = max((total_square - second) / rest - mean_known * mean_known, floor)
        out[5] = max(second / weight - mean_unknown * mean_unknown, floor)
        likelihood /= size
        if likelihood - previous < tolerance:
            converged = True
            break
        previous = likelihood
    if out[1] > out[4]:
        for i in range(3):
            out[i], out[i + 3] = out[i + 3], out[i]
    for i in range(PARAMETERS):
        if not math.isfinite(out[i]):
            return False
    return converged and min(out[0], out[3]) >= least_weight


@kernel("float64(float64[::1], float64)")
def posterior(parameters: Vector, value: float) -> float:
    """P(unknown | openness) under a fitted mixture."""
    return _sigmoid(_log_odds(value, parameters))


@kernel("float64(float64[::1], float64[::1], int64, float64[::1], float64)")
def take_in(arrivals: Vector, ordered: Vector, pushed: int, parameters: Vector, value: float) -> float:
    """Add `value` to the window behind the mixture, see `first_check.push`, and return its posterior."""
    push(arrivals, ordered, pushed, value)
    return posterior(parameters, value)


@kernel("float64(float64[::1])")
def boundary(parameters: Vector) -> float:
    """The openness between the two means where the posterior crosses one half, else their midpoint."""
    low, high = parameters[1], parameters[4]
    if _log_odds(low, parameters) >= 0.0 or _log_odds(high, parameters) <= 0.0:
        return 0.5 * (low + high)
    for _ in range(_BISECTIONS):
        middle = 0.5 * (low + high)
        if _log_odds(middle, parameters) < 0.0:
            low = middle
        else:
            high = middle
    return 0.5 * (low + high)


def described(parameters: Vector) -> dict[str, Any]:
    """A fitted mixture in names, JSON-ready."""
    weight, mean, variance, other_weight, other_mean, other_variance = parameters.tolist()
    return {
        "known": {"weight": weight, "mean": mean, "variance": variance},
        "unknown": {"weight": other_weight, "mean": other_mean, "variance": other_variance},
        "separation": (other_mean - mean) / math.sqrt(0.5 * (variance + other_variance)),
    }


def check(parameters: Vector, fitted: bool, reach: tuple[float, float], widest: float) -> None:
    """Refuse parameters of a state that no fit could have left: means within `reach`, variances below `widest`."""
    weight, mean, variance, other_weight, other_mean, other_variance = values = parameters.tolist()
    if not fitted:
        if any(values):
            raise StateError("the state holds parameters of a mixture that it says is not fitted")
        return
    possible = reach[0] < mean <= other_mean < reach[1] and min(variance, other_variance) > _LEAST_VARIANCE
    weighted = min(weight, other_weight) > 0 and abs(weight + other_weight - 1) < 1e-9
    if not (possible and weighted and max(variance, other_variance) < widest):
        raise StateError("the state's mixture is none: weights, means or variances are impossible")

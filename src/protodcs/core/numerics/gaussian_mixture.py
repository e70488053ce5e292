"""A two-component Gaussian mixture over recent values, fitted by EM (equations 8 and 9).

The fit starts from the exact best two-means split of the sorted values, so it needs no randomness. It fails if it does
not converge, if a component is almost empty, or if a number is not finite; then the methods use a threshold instead.
Component 0 is known. Component 1, the one with the higher mean, is unknown.
"""

import math
from typing import Any, NamedTuple

import numpy as np

from ...arrays import Floats
from ...errors import StateError

# Layout of the parameter vector: weight, mean and variance of the known component, then of the unknown one.
PARAMETERS = 6
_HALF_LOG_TAU = 0.5 * math.log(2.0 * math.pi)
# Bisection halves the bracket each time; sixty halvings reach the last bit of any openness difference.
_BISECTIONS = 60
# A component of a state must be wide enough to divide by.
_LEAST_VARIANCE = 1e-280


class Component(NamedTuple):
    """One Gaussian and its weight."""

    weight: float
    mean: float
    variance: float

    def log_density(self, values: Any) -> Any:
        """Return log(weight * density) at a number, or at numbers (n,)."""
        height = math.log(self.weight) - _HALF_LOG_TAU - 0.5 * math.log(self.variance)
        return height - 0.5 * (values - self.mean) ** 2 / self.variance


class Stop(NamedTuple):
    """When EM stops, and which fits count as failed.

    Attributes:
        tolerance: EM has converged if the mean log-likelihood gains less than this.
        iterations: the fit fails if EM has not converged after this many.
        floor: the smallest variance of a component.
        least_weight: the fit fails if a component weighs less.
    """

    tolerance: float
    iterations: int
    floor: float
    least_weight: float


def fit(ordered: Floats, stop: Stop) -> Floats | None:
    """Return the parameters (6,) of a mixture fitted to ascending values (n,), or None if the fit fails."""
    known, unknown = start(ordered, stop.floor)
    previous = -math.inf
    for _ in range(stop.iterations):
        likelihood, share = _expectation(ordered, known, unknown)
        if not 0.0 < share.sum() < len(ordered):
            return None
        known, unknown = _maximisation(ordered, share, 0.5 * (known.mean + unknown.mean), stop.floor)
        if likelihood - previous < stop.tolerance:
            break
        previous = likelihood
    else:
        return None
    if known.mean > unknown.mean:
        known, unknown = unknown, known
    parameters = np.array([*known, *unknown])
    usable = np.isfinite(parameters).all() and min(known.weight, unknown.weight) >= stop.least_weight
    return parameters if usable else None


def start(ordered: Floats, floor: float) -> tuple[Component, Component]:
    """Return the two parts of ascending values (n,) whose sum of squares around their means is least."""
    size = len(ordered)
    left = np.cumsum(ordered - ordered.mean())
    cuts = np.arange(1, size)
    gain = left[:-1] ** 2 / cuts + (left[-1] - left[:-1]) ** 2 / (size - cuts)
    cut = int(gain.argmax()) + 1
    low, high = (
        Component(len(part) / size, float(part.mean()), max(float(part.var()), floor))
        for part in (ordered[:cut], ordered[cut:])
    )
    return low, high


def _expectation(values: Floats, known: Component, unknown: Component) -> tuple[float, Floats]:
    """Return the mean log-likelihood, and the probability (n,) of each value to belong to the unknown component."""
    as_known, as_unknown = known.log_density(values), unknown.log_density(values)
    either = np.logaddexp(as_known, as_unknown)
    return float(either.mean()), np.exp(as_unknown - either)


def _maximisation(values: Floats, share: Floats, centre: float, floor: float) -> tuple[Component, Component]:
    """Return the components for these probabilities (n,) to belong to the unknown one."""
    # Moments are taken around the middle: openness varies by hundredths around 0.7.
    x = values - centre
    return _component(x, 1.0 - share, centre, floor), _component(x, share, centre, floor)


def _component(x: Floats, share: Floats, centre: float, floor: float) -> Component:
    weight = float(share.sum())
    mean = float(share @ x) / weight
    variance = float(share @ (x * x)) / weight - mean * mean
    return Component(weight / len(x), centre + mean, max(variance, floor))


def components(parameters: Floats) -> tuple[Component, Component]:
    """Return the known and the unknown component of fitted `parameters` (6,)."""
    values = parameters.tolist()
    return Component(*values[:3]), Component(*values[3:])


def posterior(parameters: Floats, value: float) -> float:
    """Return P(unknown | value) under a fitted mixture."""
    odds = _log_odds(value, *components(parameters))
    if odds >= 0.0:
        return 1.0 / (1.0 + math.exp(-odds))
    return math.exp(odds) / (1.0 + math.exp(odds))


def boundary(parameters: Floats) -> float:
    """Return the value between the two means where the posterior crosses one half, else their midpoint."""
    known, unknown = components(parameters)
    low, high = known.mean, unknown.mean
    if _log_odds(low, known, unknown) >= 0.0 or _log_odds(high, known, unknown) <= 0.0:
        return 0.5 * (low + high)
    for _ in range(_BISECTIONS):
        middle = 0.5 * (low + high)
        if _log_odds(middle, known, unknown) < 0.0:
            low = middle
        else:
            high = middle
    return 0.5 * (low + high)


def _log_odds(value: float, known: Component, unknown: Component) -> float:
    """Return the logarithm of P(unknown) over P(known)."""
    return float(unknown.log_density(value) - known.log_density(value))


def described(parameters: Floats) -> dict[str, Any]:
    """Return a fitted mixture by name, JSON-ready."""
    known, unknown = components(parameters)
    deviation = math.sqrt(0.5 * (known.variance + unknown.variance))
    return {
        "known": known._asdict(),
        "unknown": unknown._asdict(),
        "separation": (unknown.mean - known.mean) / deviation,
    }


def check(parameters: Floats, fitted: bool, reach: tuple[float, float], widest: float) -> None:
    """Raise StateError for parameters that no fit gives: means outside `reach`, variances of `widest` or more."""
    if not fitted:
        if parameters.any():
            raise StateError("the state holds parameters of a mixture that it says is not fitted")
        return
    known, unknown = components(parameters)
    variances = (known.variance, unknown.variance)
    possible = reach[0] < known.mean <= unknown.mean < reach[1] and min(variances) > _LEAST_VARIANCE
    weighted = min(known.weight, unknown.weight) > 0 and abs(known.weight + unknown.weight - 1) < 1e-9
    if not (possible and weighted and max(variances) < widest):
        raise StateError("the state's mixture has weights, means or variances that no fit gives")

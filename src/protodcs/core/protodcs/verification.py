"""Stage 3, final verification: the posterior of "unknown" under a mixture of recent openness S' (equation 8)."""

import math
from statistics import NormalDist

from ...arrays import Floats
from ..numerics.gaussian_mixture import Stop, boundary, components, fit, posterior
from .config import ProtoDCSConfig
from .state import ProtoDCSState

# The variance floor of a window of equal values.
_LEAST_FLOOR = 1e-12


def verify(state: ProtoDCSState, openness: float, trusted: bool) -> tuple[float, bool]:
    """Add S' to the window W_g. Return `p = P(unknown | S')`, and whether the sample counts as known.

    Until a mixture fits, the threshold Theta_c decides: `p = 1[S' >= Theta_c]`.
    """
    config = state.config
    state.mixture_window.push(openness)
    if not config.verification:
        return (0.0, True) if trusted else (1.0, False)
    if state.refit_due:
        refit(state)
    p_unknown = posterior(state.mixture, openness) if state.fitted else float(openness >= state.cold_threshold)
    return p_unknown, is_known(state, openness, p_unknown)


def is_known(state: ProtoDCSState, openness: float, p_unknown: float) -> bool:
    """Whether a sample counts as known: by Theta_p, or by the tail of the known component."""
    config = state.config
    if state.fitted and config.target_false_reject is not None:
        return openness < _tail(state, config.target_false_reject)
    return p_unknown < config.unknown_threshold


def known_limit(state: ProtoDCSState) -> float:
    """Return the openness between known and unknown. At the boundary of a mixture, P(unknown) is one half."""
    config = state.config
    if state.fitted and config.target_false_reject is not None:
        return _tail(state, config.target_false_reject)
    return state.cold_threshold


def refit(state: ProtoDCSState) -> None:
    """Fit the mixture to the window W_g. If it fits, its boundary becomes Theta_c."""
    parameters = fit_mixture(state.config, state.mixture_window.sorted)
    state.fitted = parameters is not None
    state.mixture[:] = 0.0
    if parameters is None:
        state.failed_fits += 1
    else:
        state.mixture[:] = parameters
        state.fits += 1
        state.cold_threshold = boundary(parameters)


def fit_mixture(config: ProtoDCSConfig, ordered: Floats) -> Floats | None:
    """Return the mixture (6,) of ascending openness (n,); None if none fits."""
    floor = config.mixture_floor
    if config.openness != "cosine":
        floor = max(config.mixture_relative_floor * float(ordered.var()), _LEAST_FLOOR)
    stop = Stop(config.mixture_tolerance, config.mixture_iterations, floor, config.mixture_weight)
    return fit(ordered, stop)


def _tail(state: ProtoDCSState, false_reject: float) -> float:
    """Return the openness above which the known component has the share `false_reject`."""
    known, _ = components(state.mixture)
    return known.mean + NormalDist().inv_cdf(1.0 - false_reject) * math.sqrt(known.variance)

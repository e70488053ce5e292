"""Stage 1, first check: the openness of a sample against two gates (equation 2).

Openness is `S = 1 - max z` with the cosines `z = P_t f`; the file `openness` has the other readings. The gates Theta_a
and Theta_b are quantiles of a window W_c of recent openness, which includes the sample itself.
"""

from typing import NamedTuple

from ...arrays import Feature, Floats
from ..numerics.evidence import uncertainty
from ..numerics.linalg import products
from ..numerics.softmax import softmax
from .config import ProtoDCSConfig
from .openness import openness_of
from .state import ProtoDCSState


class FirstCheck(NamedTuple):
    """The result of stage 1.

    Attributes:
        cosines: (K,) z, the cosines with the global text prototypes.
        nearest: the class with the largest one.
        openness: S.
        confident: S < Theta_a: the sample may enter the queue of its class.
        trusted: S < Theta_b: the sample may shape temporary prototypes.
        quality: the uncertainty to be stored with a confident sample; 0 for others.
    """

    cosines: Floats
    nearest: int
    openness: float
    confident: bool
    trusted: bool
    quality: float


def check_openness(state: ProtoDCSState, feature: Feature) -> FirstCheck:
    """Compare the openness of `feature` (d,) with both gates, after adding it to the window W_c."""
    config, window = state.config, state.gate_window
    cosines = products(state.unit_text, feature)
    nearest = int(cosines.argmax())
    openness = openness_of(config, cosines)
    window.push(openness)
    trusted = not config.first_check or openness < window.quantile(config.trust_quantile)
    confident = not config.first_check or openness < window.quantile(config.cache_quantile)
    confident = confident and config.visual_prototypes
    return FirstCheck(cosines, nearest, openness, confident, trusted, quality_of(config, cosines) if confident else 0.0)


def quality_of(config: ProtoDCSConfig, cosines: Floats) -> float:
    """Return the uncertainty of the cosines (K,) before any step. The lower it is, the better the sample."""
    if config.cache_quality == "aleatoric":
        return uncertainty(config.evidence_scale * cosines)[0]
    return softmax(cosines / config.temperature)[1]

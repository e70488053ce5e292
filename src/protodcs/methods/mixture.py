"""A plain mixture of two Gaussians over a zero-shot score: the baseline that every open-set method must beat.

    known if P(unknown | s) < 1/2,   s ~ w N(m, v) + (1 - w) N(m', v'),   fitted by EM to the recent scores

It has no paper: UniEnt, ProtoDCS and others fit such a mixture inside their methods. Here nothing else is learned. The
fit is renewed every `period` samples. The posterior is taken between the two means only, so that it never falls again
beyond one of them. Until the first fit succeeds, every sample counts as known.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
from pydantic import Field

from ..arrays import Feature, Floats
from ..core.arena import Layout
from ..core.numerics import gaussian_mixture
from ..errors import StateError
from .familiarity import PROBABLE, Score, familiarity
from .scored import Memory, ScoredConfig, ScoredMethod, Step

# EM stops at this gain of the mean log-likelihood. A component has this share of the variance of all scores at least.
_TOLERANCE, _ITERATIONS, _LEAST_SHARE = 1e-6, 200, 1e-3
_LEAST_WEIGHT = 0.01
# Below this spread all scores are the same but for rounding.
_LEAST_VARIANCE = 1e-18


class MixtureConfig(ScoredConfig):
    """The settings of the mixture."""

    score: Score = Field("mcm", description="The zero-shot score: see `zero_shot`. MCM was best on tuning streams.")
    temperature: float = Field(0.01, gt=0, le=100, description="Softmax temperature of 'softmax' and 'energy'.")
    period: int = Field(32, ge=1, le=100_000, description="The mixture is fitted again after so many samples.")
    start: int = Field(64, ge=8, le=5_000, description="The first fit takes place after so many samples.")


class Mixture(ScoredMethod):
    """Nearest prototype by cosine; known or unknown by a mixture of two Gaussians over the recent scores."""

    name: ClassVar[str] = "mixture"
    config_type = MixtureConfig
    score_names: ClassVar[Mapping[str, str]] = {"max": "max cosine", **PROBABLE}
    config: MixtureConfig

    def _layout(self, classes: int, width: int) -> Layout:
        return {"parameters": (np.float64, (gaussian_mixture.PARAMETERS,))}

    def _step(self, memory: Memory, feature: Feature, cosines: Floats) -> Step:
        temperature = self.config.temperature
        return Step(familiarity(cosines / temperature, temperature, self.config.score))

    def _p_unknown(self, memory: Memory, score: float) -> float:
        if self.config.threshold is not None:
            return super()._p_unknown(memory, score)
        # The window already has this score, and `learned` does not count it yet.
        seen = memory.learned + 1
        if seen >= self.config.start and (seen - self.config.start) % self.config.period == 0:
            self._refit(memory)
        parameters = memory["parameters"]
        if not parameters.any():
            return 0.0
        # The known component has the lower mean, so the score changes its sign.
        value = float(np.clip(-score, parameters[1], parameters[4]))
        return float(gaussian_mixture.posterior(parameters, value))

    def _refit(self, memory: Memory) -> None:
        values = -memory.window.sorted[::-1]
        variance = float(values.var())
        if variance < _LEAST_VARIANCE:
            return
        stop = gaussian_mixture.Stop(_TOLERANCE, _ITERATIONS, _LEAST_SHARE * variance, _LEAST_WEIGHT)
        fitted = gaussian_mixture.fit(values, stop)
        if fitted is not None:
            memory["parameters"][:] = fitted

    def _check(self, memory: Memory) -> None:
        parameters = memory["parameters"]
        weights, means, variances = parameters[[0, 3]], parameters[[1, 4]], parameters[[2, 5]]
        fitted = (weights > 0).all() and (variances > 0).all() and means[0] <= means[1]
        if parameters.any() and not (fitted and abs(weights.sum() - 1.0) < 1e-6):
            raise StateError("the state's parameters are not those of a mixture of two Gaussians")

    def _numbers(self) -> Mapping[str, Any]:
        parameters = self._memory["parameters"]
        return {"mixture": gaussian_mixture.described(parameters) if parameters.any() else None}

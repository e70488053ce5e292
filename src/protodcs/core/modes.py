"""Are there two kinds of samples in the stream, and to which does this one belong?

A mixture of two always fits something, also where there are no strangers at all. Two components are therefore believed
only where the lower one lies where strangers lie, the higher one where known samples lie, on the scale of what noise
reaches, and where two explain the scores better than one. All values here are strangeness, minus the familiarity, so
that the mixture reads as that of openness does. Without a proof `cold` decides.
"""

import copy
import math
from typing import Self

import numpy as np
from numpy.typing import NDArray

from . import mixture, state
from .base import Counters, counter, required, truth
from .compiled import kernel
from .concentration import Crowd
from .config import Config
from .first_check import mean_and_deviation

Vector = NDArray[np.float64]

# EM here runs on a few hundred values of unit size.
_TOLERANCE = 1e-4
_ITERATIONS = 200
_NARROWEST = 0.02
_LEAST_VARIANCE = 1e-12
# What two components must show: the share of each, how far apart they lie in standard deviations (Ashman's D), and how
# much likelier they make the scores than one Gaussian does, a sample and in all, in nats. Where the classes are filled
# as evenly as known samples fill them it takes more.
_LEAST_WEIGHT = 0.03
_SEPARATION = 1.3
_GAIN, _EVIDENCE, _GAIN_IF_EVEN = 0.03, 8.0, 0.12
# Known samples lie above so many levels, strangers below so many, the more of them the more classes there are. With few
# classes a heavy shift brings known samples down to little more than one level.
_FAMILIAR = 1.8
_STRANGE, _STRANGE_BY_CLASSES, _STRANGE_MOST = 0.62, 0.217, 1.62
# So many proofs in a row before two modes are believed for the first time, and for so many samples the last mixture
# stays in force without another. The second values hold where the stream comes in runs of one class; that of the proofs
# also where the encoder is never sure of a class, and that of the samples where known samples alone fill the classes.
_PROOFS = (2, 4)
_PATIENCE = (1536, 256)
# The components' weights count little beside where a sample lies: the stream's next part may be mixed otherwise.
_PRIOR_POWER = 0.25
# The estimated share of strangers: where it starts, how fast it follows a proof, and where it goes without any.
_SHARE, _SHARE_RATE, _SHARE_ALONE = 0.5, 0.2, 0.05
# Bisection halves the bracket each time: so many reach the last bit.
_BISECTIONS = 60
# No score of a state is larger.
STRANGEST = 1e9


@kernel("float64(float64[::1], float64)")
def monotone(parameters: Vector, strangeness: float) -> float:
    """P(unknown) by a mixture, with its weights tempered, and as at the nearer mean beyond the two means."""
    x = min(max(strangeness, parameters[1]), parameters[4])
    odds = (
        _PRIOR_POWER * math.log(parameters[3] / parameters[0])
        - 0.5 * math.log(parameters[5] / parameters[2])
        - 0.5 * (x - parameters[4]) ** 2 / parameters[5]
        + 0.5 * (x - parameters[1]) ** 2 / parameters[2]
    )
    return 1.0 / (1.0 + math.exp(min(-odds, 700.0)))


@kernel("UniTuple(float64, 2)(float64[::1], float64[::1], float64[::1])")
def text_means(parameters: Vector, strangeness: Vector, text: Vector) -> tuple[float, float]:
    """The mean familiarity by the text of the unknown and of the known component; of all where nothing fits."""
    shares = np.full(text.shape[0], 0.5)
    if parameters[2] > 0.0 and parameters[5] > 0.0:
        mixture.posteriors(parameters, strangeness, shares)
    unknown, known, weight = 0.0, 0.0, 0.0
    for i in range(text.shape[0]):
        unknown += shares[i] * text[i]
        known += (1.0 - shares[i]) * text[i]
        weight += shares[i]
    return unknown / weight, known / (text.shape[0] - weight)


class Modes:
    """What is known of the two kinds of samples.

    Attributes:
        parameters: (6,) float64, the mixture over strangeness, valid while `fitted`.
        proofs: how often in a row two modes were proven, up to now.
        unproven: samples since the last proof.
        fits, failed_fits: how often a mixture was taken over, and how often not.
        share: the estimated share of strangers in the stream.
    """

    SCALARS = ("fitted", "proofs", "unproven", "fits", "failed_fits")

    def __init__(self, config: Config):
        self.config = config
        self.parameters = np.zeros(mixture.PARAMETERS)
        self.fitted = False
        self.proofs = 0
        self.unproven = 0
        self.fits = 0
        self.failed_fits = 0
        self.share = _SHARE

    def posterior(self, strangeness: float) -> float:
        """P(unknown) by the mixture; it grows with strangeness and is flat beyond the two means."""
        return float(monotone(self.parameters, strangeness))

    def boundary(self, threshold: float) -> float:
        """The strangeness at which P(unknown) reaches a threshold, or the mean of the strangers."""
        low, high = self.parameters[[1, 4]].tolist()
        for _ in range(_BISECTIONS):
            middle = 0.5 * (low + high)
            low, high = (middle, high) if self.posterior(middle) < threshold else (low, middle)
        return float(high)

    def weigh(self, strangeness: Vector, text: Vector, level: float, classes: int, crowd: Crowd) -> bool:
        """Look for two kinds in recent samples, by their strangeness (n,) and the text's familiarity (n,).

        Returns whether a proof stands, so that `parameters` describe these very samples.
        """
        parameters = np.zeros(mixture.PARAMETERS)
        fitted, apart = self._fit(strangeness, _GAIN_IF_EVEN if crowd.even else _GAIN, parameters)
        strange, familiar = text_means(parameters, strangeness, text)
        limit = level * min(_STRANGE_MOST, _STRANGE + _STRANGE_BY_CLASSES * math.log(classes))
        proven = apart and strange <= limit and familiar >= _FAMILIAR * level if self.config.proof else fitted
        self.proofs = self.proofs + 1 if proven else 0
        self.unproven = 0 if proven else self.unproven + self.config.mixture_period
        if proven and (self.fitted or self.proofs >= _PROOFS[crowd.runs or crowd.unsure]):
            self.parameters, self.fitted = parameters, True
            self.fits += 1
            self.share += _SHARE_RATE * (float(parameters[3]) - self.share)
            return True
        self.failed_fits += 1
        if self.fitted:
            self.fitted = self.unproven <= _PATIENCE[crowd.runs or crowd.even]
        elif strange > limit:
            self.share += _SHARE_RATE * (_SHARE_ALONE - self.share)
        return False

    def rescale(self, slope: float, offset: float) -> None:
        """Follow a change of the scores' scale: strangeness x becomes slope * x + offset."""
        if self.fitted:
            weight, mean, variance, other_weight, other_mean, other_variance = self.parameters.tolist()
            self.parameters = np.array(
                [
                    weight, slope * mean + offset, max(slope * slope * variance, _LEAST_VARIANCE),
                    other_weight, slope * other_mean + offset, max(slope * slope * other_variance, _LEAST_VARIANCE),
                ]
            )  # fmt: skip

    def fork(self) -> Self:
        return copy.copy(self)

    def _fit(self, strangeness: Vector, least_gain: float, out: Vector) -> tuple[bool, bool]:
        """Fit two components; whether they fit at all, and whether they are apart and likelier than one."""
        ordered, variance = np.sort(strangeness), mean_and_deviation(strangeness)[1] ** 2 + 1e-9
        if not mixture.fit(ordered, len(ordered), _TOLERANCE, _ITERATIONS, _NARROWEST * variance, _LEAST_WEIGHT, out):
            return False, False
        gain = mixture.likelihood(out, ordered) + 0.5 * math.log(2.0 * math.pi * variance) + 0.5
        apart = (out[4] - out[1]) / math.sqrt(0.5 * (out[2] + out[5]))
        return True, bool(apart >= _SEPARATION and gain >= least_gain and gain * len(ordered) >= _EVIDENCE)

    # Export.

    def export(self) -> state.Arrays:
        return {"modes": self.parameters if self.fitted else np.zeros_like(self.parameters)}

    @classmethod
    def restored(cls, config: Config, counters: Counters, arrays: state.Arrays) -> Self:
        modes = cls(config)
        modes.fitted = truth(counters, "fitted")
        for name in ("proofs", "unproven", "fits", "failed_fits"):
            setattr(modes, name, counter(counters, name, high=2**62))
        modes.parameters = required(arrays, "modes", np.float64, (mixture.PARAMETERS,)).copy()
        mixture.check(modes.parameters, modes.fitted, (-STRANGEST, STRANGEST), STRANGEST * STRANGEST)
        return modes


def sigmoid(x: float) -> float:
    """1 / (1 + e^-x), for any x."""
    if x >= 0.0:
        return 1.0 / (1.0 + math.exp(-x))
    grown = math.exp(max(x, -700.0))
    return grown / (1.0 + grown)

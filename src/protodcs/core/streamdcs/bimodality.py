"""Bimodality: detect whether the stream has two groups of samples, and compute P(unknown) from them.

A mixture of two components always fits something, even if there are no unknown samples. It is used only if the lower
component is near the noise floor, the higher one well above it, and two components explain the scores better than one.
All values here are novelty, minus the familiarity. If the tests do not pass, `fallback` decides.
"""

import copy
import math
from typing import Self

import numpy as np
from numpy.typing import NDArray

from .. import mixture, state
from ..base import Counters, counter, required, truth
from ..compiled import kernel
from ..windows import mean_and_deviation
from .class_concentration import ClassConcentration
from .config import StreamDCSConfig

Vector = NDArray[np.float64]

# EM runs on a few hundred values of about unit size.
_TOLERANCE = 1e-4
_ITERATIONS = 200
_NARROWEST = 0.02
_LEAST_VARIANCE = 1e-12
# The tests on two components: weight of each, distance in standard deviations (Ashman's D), and gain in log-likelihood
# over one Gaussian, per sample and in all, in nats. If the classes are filled evenly, the gain must be larger.
_LEAST_WEIGHT = 0.03
_SEPARATION = 1.3
_GAIN, _EVIDENCE, _GAIN_IF_EVEN = 0.03, 8.0, 0.12
# The mean text score of the known component must be above this multiple of the noise floor. That of the unknown one
# must be below a multiple that increases with the number of classes: with few classes, a strong shift brings known
# samples down to little more than the noise floor.
_KNOWN_MIN = 1.8
_UNKNOWN_BASE, _UNKNOWN_BY_CLASSES, _UNKNOWN_MAX = 0.62, 0.217, 1.62
# Number of passes in a row before a mixture is first used, and number of samples for which the last mixture stays in
# use without another pass. The second values apply if the stream comes in runs of one class; the second number
# of passes also if the encoder is unsure, and the second number of samples also if the classes are filled evenly.
_PASSES = (2, 4)
_PATIENCE = (1536, 256)
# Power of the component weights in the posterior: the next part of the stream may be mixed differently.
_PRIOR_POWER = 0.25
# The estimated fraction of unknown samples: first value, rate of change, and its value if no unknown ones are found.
_SHARE, _SHARE_RATE, _SHARE_ALONE = 0.5, 0.2, 0.05
# Steps of a bisection; each halves the bracket, so this reaches the last bit.
_BISECTIONS = 60
# Largest score that a state may hold.
MAX_NOVELTY = 1e9


@kernel("float64(float64[::1], float64)")
def monotone_posterior(parameters: Vector, novelty: float) -> float:
    """Return P(unknown) by a mixture with tempered weights; constant beyond the two means."""
    x = min(max(novelty, parameters[1]), parameters[4])
    odds = (
        _PRIOR_POWER * math.log(parameters[3] / parameters[0])
        - 0.5 * math.log(parameters[5] / parameters[2])
        - 0.5 * (x - parameters[4]) ** 2 / parameters[5]
        + 0.5 * (x - parameters[1]) ** 2 / parameters[2]
    )
    return 1.0 / (1.0 + math.exp(min(-odds, 700.0)))


@kernel("UniTuple(float64, 2)(float64[::1], float64[::1], float64[::1])")
def text_means(parameters: Vector, novelty: Vector, text: Vector) -> tuple[float, float]:
    """Return the mean text score of the unknown and of the known component; of all samples if nothing fits."""
    shares = np.full(text.shape[0], 0.5)
    if parameters[2] > 0.0 and parameters[5] > 0.0:
        mixture.posteriors(parameters, novelty, shares)
    unknown, known, weight = 0.0, 0.0, 0.0
    for i in range(text.shape[0]):
        unknown += shares[i] * text[i]
        known += (1.0 - shares[i]) * text[i]
        weight += shares[i]
    return unknown / weight, known / (text.shape[0] - weight)


class Bimodality:
    """The two groups of samples.

    Attributes:
        parameters: (6,) float64, the mixture over novelty, valid if `fitted`.
        passes: number of passed tests in a row.
        since_pass: samples since the last passed test.
        fits, failed_fits: number of mixtures that were accepted and rejected.
        share: the estimated fraction of unknown samples in the stream.
    """

    SCALARS = ("fitted", "passes", "since_pass", "fits", "failed_fits")

    def __init__(self, config: StreamDCSConfig):
        self.config = config
        self.parameters = np.zeros(mixture.PARAMETERS)
        self.fitted = False
        self.passes = 0
        self.since_pass = 0
        self.fits = 0
        self.failed_fits = 0
        self.share = _SHARE

    def posterior(self, novelty: float) -> float:
        """Return P(unknown) by the mixture. It increases with novelty and is constant beyond the two means."""
        return float(monotone_posterior(self.parameters, novelty))

    def boundary(self, threshold: float) -> float:
        """Return the novelty at which P(unknown) reaches a threshold, or the mean of the unknown component."""
        low, high = self.parameters[[1, 4]].tolist()
        for _ in range(_BISECTIONS):
            middle = 0.5 * (low + high)
            low, high = (middle, high) if self.posterior(middle) < threshold else (low, middle)
        return float(high)

    def refit(
        self, novelty: Vector, text: Vector, noise_floor: float, classes: int, concentration: ClassConcentration
    ) -> bool:
        """Look for two groups in recent samples, given their novelty (n,) and text scores (n,).

        Return True if the tests passed and `parameters` describe these samples.
        """
        parameters = np.zeros(mixture.PARAMETERS)
        fitted, apart = self._fit(novelty, _GAIN_IF_EVEN if concentration.even else _GAIN, parameters)
        unknown, known = text_means(parameters, novelty, text)
        limit = noise_floor * min(_UNKNOWN_MAX, _UNKNOWN_BASE + _UNKNOWN_BY_CLASSES * math.log(classes))
        accepted = (
            apart and unknown <= limit and known >= _KNOWN_MIN * noise_floor if self.config.bimodality_test else fitted
        )
        self.passes = self.passes + 1 if accepted else 0
        self.since_pass = 0 if accepted else self.since_pass + self.config.mixture_period
        if accepted and (self.fitted or self.passes >= _PASSES[concentration.runs or concentration.unsure]):
            self.parameters, self.fitted = parameters, True
            self.fits += 1
            self.share += _SHARE_RATE * (float(parameters[3]) - self.share)
            return True
        self.failed_fits += 1
        if self.fitted:
            self.fitted = self.since_pass <= _PATIENCE[concentration.runs or concentration.even]
        elif unknown > limit:
            self.share += _SHARE_RATE * (_SHARE_ALONE - self.share)
        return False

    def rescale(self, slope: float, offset: float) -> None:
        """Adapt to a new scale of the scores: novelty x becomes slope * x + offset."""
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

    def _fit(self, novelty: Vector, least_gain: float, out: Vector) -> tuple[bool, bool]:
        """Fit two components. Return whether they fit at all, and whether they are separate and better than one."""
        ordered, variance = np.sort(novelty), mean_and_deviation(novelty)[1] ** 2 + 1e-9
        if not mixture.fit(ordered, len(ordered), _TOLERANCE, _ITERATIONS, _NARROWEST * variance, _LEAST_WEIGHT, out):
            return False, False
        gain = mixture.likelihood(out, ordered) + 0.5 * math.log(2.0 * math.pi * variance) + 0.5
        apart = (out[4] - out[1]) / math.sqrt(0.5 * (out[2] + out[5]))
        return True, bool(apart >= _SEPARATION and gain >= least_gain and gain * len(ordered) >= _EVIDENCE)

    # Export.

    def export(self) -> state.Arrays:
        return {"mixture": self.parameters if self.fitted else np.zeros_like(self.parameters)}

    @classmethod
    def restored(cls, config: StreamDCSConfig, counters: Counters, arrays: state.Arrays) -> Self:
        bimodality = cls(config)
        bimodality.fitted = truth(counters, "fitted")
        for name in ("passes", "since_pass", "fits", "failed_fits"):
            setattr(bimodality, name, counter(counters, name, high=2**62))
        bimodality.parameters = required(arrays, "mixture", np.float64, (mixture.PARAMETERS,)).copy()
        mixture.check(bimodality.parameters, bimodality.fitted, (-MAX_NOVELTY, MAX_NOVELTY), MAX_NOVELTY * MAX_NOVELTY)
        return bimodality


def sigmoid(x: float) -> float:
    """Return 1 / (1 + e^-x), for any x."""
    if x >= 0.0:
        return 1.0 / (1.0 + math.exp(-x))
    grown = math.exp(max(x, -700.0))
    return grown / (1.0 + grown)

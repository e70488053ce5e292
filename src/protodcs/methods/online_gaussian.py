"""One Gaussian per class with a shared covariance, fitted to the stream by online EM and added to the zero-shot logits.

This is the idea of FreeTTA with a diagonal covariance, so that a sample costs O(K d): means start at the prototypes,
each sample moves them by its responsibilities, and unsure samples count less, `w = exp(-beta H)`. It has no open-set
rule and none is made up here: every sample is known unless a threshold on the score is given, so
unknown samples move the means too. The prototypes are never written to.
"""

import math
from collections.abc import Mapping
from typing import Any, ClassVar, Literal, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from ..arrays import Feature, Floats
from ..core import state
from ..core.base import Capabilities, FeatureMethod
from ..core.decision import Decision, decision_from_cosines
from ..core.numerics.softmax import softmax
from ..core.settings import Settings
from ..core.state_checks import Counters, check_unit, counter, required
from ..core.vectors import cosines as compute_cosines
from ..core.vectors import inverse_norms
from ..errors import StateError
from .familiarity import PROBABLE, Score, familiarity

# A stream of one repeated image would shrink the variance to zero: it stays above this share of its start.
_LEAST_VARIANCE = 0.01
# A class with a smaller share of a sample is not moved by it: a million such samples would move it by 0.001 at most.
_NEGLIGIBLE = 1e-9
# Sums over a long stream are rounded; a state may be off by so much.
_TOLERANCE = 1e-5


class OnlineGaussianConfig(Settings):
    """The settings of the online Gaussian classifier."""

    gaussian_weight: float = Field(
        0.02, ge=0, le=1000, description="alpha: logits = f P / tau + alpha * Gaussian log-likelihood and prior."
    )
    entropy_penalty: float = Field(
        4.0, ge=0, le=1000, description="beta: a sample counts exp(-beta H), H its zero-shot entropy in nats."
    )
    prior_count: float = Field(
        16.0, gt=0, le=1e9, description="N_0: how many samples the prototype of a class counts for, in its mean."
    )
    variance: float = Field(
        0.5, gt=0, le=4, description="Trace of the shared covariance Sigma at the start, worth K N_0 samples."
    )
    covariance: Literal["diagonal", "isotropic"] = Field(
        "diagonal", description="Shape of Sigma: a variance for each coordinate, or one for all."
    )
    responsibility: Literal["zero_shot", "gaussian", "fused"] = Field(
        "zero_shot",
        description="gamma, the class shares of the E-step: of the frozen classifier, which cannot run away, of the "
        "Gaussians alone, or of the final logits.",
    )
    score: Score = Field(
        "softmax",
        description="The familiarity that is reported, of the final logits: the largest times the temperature, its "
        "softmax probability, that at temperature 1, or the free energy.",
    )
    temperature: float = Field(0.01, gt=0, le=100, description="tau, softmax temperature of the cosines.")
    threshold: float | None = Field(
        None, description="A sample is known if its score is at least this. None: every sample counts as known."
    )


def discriminate(means: Floats, counts: Floats, precision: Floats, feature: Feature, out: Floats) -> None:
    """Write each class's log-likelihood plus log prior to `out` (K,), minus their mean: only differences matter."""
    out[:] = np.log(counts) - 0.5 * (((feature - means) ** 2) @ precision)
    out -= out.mean()


def maximise(
    means: Floats, counts: Floats, variance: Floats, total: float, shares: Floats, feature: Feature, weight: float
) -> None:
    """Compute the M-step: move means (K, d), counts (K,) and variance (d,) by one sample of this weight and shares."""
    moved = np.flatnonzero(weight * shares > _NEGLIGIBLE)
    added = weight * shares[moved]
    gaps = feature - means[moved]
    variance += (added @ gaps**2 - added.sum() * variance) / (total + added.sum())
    counts[moved] += added
    means[moved] += (added / counts[moved])[:, None] * gaps


class Memory:
    """The prototypes, the Gaussians, and how many samples went by.

    Attributes:
        initial, means: (K, d) float32 and float64: the prototypes, and mu.
        counts: (K,) float64, N: the weight in each mean, the prior's included.
        variance: (d,) float64, the diagonal of Sigma.
        weight: of all samples; the variance is worth as much and the prior of every class.
    """

    def __init__(self, initial: Feature, config: OnlineGaussianConfig):
        classes, width = initial.shape
        self.initial = initial
        self.inverse_norms = inverse_norms(initial)
        self.means = initial.astype(np.float64)
        self.counts = np.full(classes, config.prior_count)
        self.variance = np.full(width, config.variance / width)
        self.weight = 0.0
        self.sequence = 0
        self.known = 0

    def fork(self) -> Self:
        """A copy to advance; every sample writes to the Gaussians, so they are copied at once."""
        copy = object.__new__(type(self))
        copy.__dict__.update(self.__dict__)
        copy.means, copy.counts, copy.variance = self.means.copy(), self.counts.copy(), self.variance.copy()
        return copy

    def export(self) -> tuple[Counters, state.Arrays]:
        """All there is."""
        counters: Counters = {"sequence": self.sequence, "known": self.known, "weight": self.weight}
        arrays: state.Arrays = {
            "initial_prototypes": self.initial,
            "means": self.means,
            "counts": self.counts,
            "variance": self.variance,
        }
        return counters, arrays


class OnlineGaussian(FeatureMethod):
    """Zero-shot logits plus those of class Gaussians that follow the stream; a sample is decided, then learned."""

    name: ClassVar[str] = "online_gaussian"
    capabilities: ClassVar[Capabilities] = Capabilities(
        batch_invariant=True, rotation_invariant=False, editable_classes=True, cost="prototypes"
    )
    config_type = OnlineGaussianConfig
    score_names: ClassVar[Mapping[str, str]] = {"max": "max logit", **PROBABLE}
    config: OnlineGaussianConfig
    _memory: Memory

    def _advance(self, memory: Memory, feature: Feature, scores: bool) -> Decision:
        config = self.config
        cosines, text, gaussian, logits = np.empty((4, len(self.classes)))
        compute_cosines(memory.initial, memory.inverse_norms, feature, cosines)
        np.divide(cosines, config.temperature, out=text)
        discriminate(memory.means, memory.counts, self._precision(memory), feature, gaussian)
        np.add(text, config.gaussian_weight * gaussian, out=logits)
        index = int(logits.argmax())
        score = self._score(logits)
        known = config.threshold is None or score >= config.threshold
        shares, entropy = softmax(text)
        weight = math.exp(-config.entropy_penalty * entropy)
        if config.responsibility != "zero_shot":
            shares, _ = softmax(gaussian if config.responsibility == "gaussian" else logits)
        self._learn(memory, feature, shares, weight)
        memory.sequence += 1
        memory.known += known
        # Times the temperature: without the Gaussians these are the cosines, as zero-shot gives them.
        final = logits * config.temperature if scores else None
        return decision_from_cosines(
            self.classes, index, cosines, final, score=score, sequence=memory.sequence - 1, known=known
        )

    def _precision(self, memory: Memory) -> Floats:
        """The diagonal of the inverse of Sigma."""
        least = _LEAST_VARIANCE * self.config.variance / len(memory.variance)
        precision: Floats = 1.0 / np.maximum(memory.variance, least)
        return precision

    def _learn(self, memory: Memory, feature: Feature, shares: Floats, weight: float) -> None:
        """The M-step of online EM."""
        total = self.config.prior_count * len(shares) + memory.weight
        maximise(memory.means, memory.counts, memory.variance, total, shares, feature, weight)
        memory.weight += weight
        if self.config.covariance == "isotropic":
            memory.variance[:] = memory.variance.mean()

    def _score(self, logits: Floats) -> float:
        return familiarity(logits, self.config.temperature, self.config.score)

    def _with_classes(self, memory: Memory, kept: NDArray[np.int64], added: Feature) -> Memory:
        copy = Memory(np.concatenate([memory.initial[kept], added]), self.config)
        copy.means[: len(kept)], copy.counts[: len(kept)] = memory.means[kept], memory.counts[kept]
        copy.variance, copy.weight = memory.variance, memory.weight
        copy.sequence, copy.known = memory.sequence, memory.known
        return copy

    def _new_memory(self, initial: Feature) -> Memory:
        return Memory(initial, self.config)

    def _restored_memory(self, counters: Counters, arrays: state.Arrays) -> Memory:
        if set(arrays) != {"initial_prototypes", "means", "counts", "variance"} or set(counters) != {
            "sequence",
            "known",
            "weight",
        }:
            raise StateError(
                "a state of the online Gaussians holds initial_prototypes, means, counts and variance; "
                f"given: {sorted(arrays)[:10]} and the counters {sorted(counters)[:10]}"
            )
        initial = required(arrays, "initial_prototypes", np.float32, (None, None))
        check_unit(initial, "initial_prototypes")
        classes, width = initial.shape
        required(arrays, "means", np.float64, (classes, width))
        required(arrays, "counts", np.float64, (classes,))
        required(arrays, "variance", np.float64, (width,))
        memory = Memory(initial, self.config)
        memory.sequence = counter(counters, "sequence", high=2**62)
        memory.known = counter(counters, "known", high=memory.sequence)
        memory.weight = _checked_weight(counters["weight"], memory.sequence)
        for name in ("means", "counts", "variance"):
            setattr(memory, name, arrays[name].copy())
        self._check_gaussians(memory)
        return memory

    def _check_gaussians(self, memory: Memory) -> None:
        """Means are averages of unit vectors that began at the prototypes, and variances are averages of squares."""
        learned = memory.counts - self.config.prior_count
        if not (learned >= 0).all() or learned.sum() > memory.weight * (1.0 + _TOLERANCE) + _TOLERANCE:
            raise StateError("the state's counts must be prior_count and what all samples weigh at most")
        lengths = np.linalg.norm(memory.means, axis=1)
        ways = np.linalg.norm(memory.means - memory.initial, axis=1)
        if not (lengths <= 1.0 + _TOLERANCE).all() or not (ways <= 2.0 * learned / memory.counts + _TOLERANCE).all():
            raise StateError("the state's means lie farther from the prototypes than their counts allow")
        variance = memory.variance
        if not ((variance > 0) & (variance <= 4.0 + _TOLERANCE)).all():
            raise StateError("the state's variances must lie from 0 to 4")
        if self.config.covariance == "isotropic" and not (variance == variance[0]).all():
            raise StateError("the state's variances must be equal, its covariance is isotropic")

    def _count_frozen(self, decision: Decision) -> None:
        super()._count_frozen(decision)
        self._memory.known += decision.known

    def _initial_prototypes(self, memory: Memory) -> Feature:
        return memory.initial

    def stats(self) -> dict[str, Any]:
        """Numbers for monitoring, JSON-ready."""
        memory = self._memory
        drift = np.linalg.norm(memory.means - memory.initial, axis=1)
        return {
            **super().stats(),
            "known": memory.known,
            "unknown": memory.sequence - memory.known,
            "learned_weight": float((memory.counts - self.config.prior_count).sum()),
            "variance": float(memory.variance.sum()),
            "mean_drift": float(drift.mean()),
            "mean_drift_max": float(drift.max()),
        }


def _checked_weight(weight: Any, sequence: int) -> float:
    """The weight of all samples, at most one each."""
    if not isinstance(weight, float) or not 0.0 <= weight <= sequence * (1.0 + _TOLERANCE):
        raise StateError(f"the state's counter 'weight' is {weight!r}, it must be a number from 0 to {sequence}")
    return weight

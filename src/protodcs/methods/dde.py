"""DDE: negative labels mined from the stream detect, and online Gaussians per class correct the classification.

    S(x) = sum_k e^{f.t_k / tau} / (sum_k e^{f.t_k / tau} + sum_{n mined} e^{f.t_n / tau})
    z_k = f.t_k / tau + a (f.L m_k - m_k.L m_k / 2),    a = min(rho * mean c_k, eta)

"Dual Distribution Estimation for Zero-shot Noisy Test-Time Adaptation with VLMs" (ECCV 2026, arXiv 2606.25758). The
mined names are those that unknown-looking samples use more than known-looking ones, as in `tanl`: looking known is
S > 0.5 + gap / 2, looking unknown S < 0.1. The Gaussian of a class has the mean m_k
and the count c_k; the best zero-shot class of each sample learns it with its probability as the weight. L is the
inverse of the mean covariance. A sample is unknown if 1 - S reaches the threshold of a grid of 0.01 that splits the
last 512 values into two groups of least variance.

Different from the authors' code, on purpose:

- It keeps a covariance (d, d) for each class, 1 MB each for CLIP, and uses only their mean. `covariance="class"` does
  so too. The default, "shared", updates that mean directly: the state of 1,000 classes is then 10 MB, not 1 GB.
- It inverts the covariance after each batch of 256. Here that is every `period` samples.
- Its second Gaussian, of runner-up classes, has the weight 0 in all of its scripts. It is left out.
- It starts the unknown-looking samples with 15 noise images. From features alone there are none, so the start is
  uniform over all labels.
- Of each kind it keeps the last 5,000 features. Here a mean forgets at that rate.
- It works in batches: a batch's own softmax counts 5 % in the means, for every sample of the batch. Here only the
  sample's own does. That makes a difference: see `docs/results/fidelity.md`.
- While all recent values of 1 - S are below 0.01, it rejects every sample. Here those samples are known.
- It has 10,000 WordNet names and more, and takes 5 for CIFAR-10, 10 for CIFAR-100, 100 for 200 classes, 500 for 1,000.
  Here the default is half as many as classes, and at least 5.
"""

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import numpy as np
from pydantic import Field

from ..arrays import Feature, Floats
from ..core.arena import Layout
from ..core.numerics.softmax import softmax
from ..errors import StateError
from .activation import WithActivation
from .negatives import NegativesConfig, class_share
from .rosita_gate import best_split
from .scored import Memory, Step

_LEAST_LABELS = 5
# Below this score a sample looks unknown.
_LOOKS_UNKNOWN = 0.10
# Samples of each kind that the authors keep.
_REMEMBERED = 5000
_GRID = 0.01
_TOLERANCE = 1e-6


class DDEConfig(NegativesConfig):
    """The settings of DDE."""

    labels: int | None = Field(
        None, ge=1, le=1_000_000, description="Mined negative labels; None: half as many as classes, but at least 5."
    )
    gap: float = Field(0.5, ge=0, le=1, description="A sample looks known if its score is above 0.5 + gap / 2.")
    rho: float = Field(0.005, ge=0, le=1000, description="How fast the Gaussians gain weight.")
    eta: float = Field(0.2, ge=0, le=1000, description="Largest weight of the Gaussians.")
    variance: float = Field(0.002, gt=0, le=10, description="Variance of each coordinate at the start.")
    shrinkage: float = Field(1e-4, gt=0, le=1, description="Weight of the identity in the covariance.")
    covariance: Literal["shared", "class"] = Field(
        "shared", description="Learn the mean covariance directly, or one for each class and then the mean."
    )
    period: int = Field(64, ge=1, le=100_000, description="The covariance is inverted after so many samples.")


class DDE(WithActivation):
    """Zero-shot logits plus online Gaussians; known if the softmax falls on classes, not on mined names."""

    name: ClassVar[str] = "dde"
    config_type = DDEConfig
    score_names: ClassVar[Mapping[str, str]] = {"": "share on classes"}
    config: DDEConfig

    def _layout(self, classes: int, width: int) -> Layout:
        several = {"covariances": (np.float32, (classes, width, width))} if self.config.covariance == "class" else {}
        return {
            **super()._layout(classes, width),
            "means": (np.float64, (classes, width)),
            "counts": (np.float64, (classes,)),
            "covariance": (np.float64, (width, width)),
            "directions": (np.float64, (classes, width)),
            "offsets": (np.float64, (classes,)),
            **several,
        }

    def _begin(self, memory: Memory) -> None:
        super()._begin(memory)
        memory["means"][:] = memory.initial
        memory["counts"][:] = 1.0
        start = self.config.variance * np.eye(memory.initial.shape[1])
        memory["covariance"][:] = start
        if self.config.covariance == "class":
            memory["covariances"][:] = start
        self._invert(memory)

    def _step(self, memory: Memory, feature: Feature, cosines: Floats) -> Step:
        config = self.config
        known = cosines / config.temperature
        prediction = self._classify(memory, feature, known)
        if not len(self._negatives):
            return Step(self._largest_probability(known), prediction * config.temperature)
        negative = self._logits(feature)
        count = config.labels or max(_LEAST_LABELS, len(known) // 2)
        first = class_share(known, negative[self._most_used(memory, count)])
        kind = 0 if first > 0.5 + 0.5 * config.gap else (1 if first < _LOOKS_UNKNOWN else None)
        use = self._own_use(known, negative)
        score = class_share(known, negative[self._most_used_with(memory, count, use, kind)])
        if kind is not None:
            self._remember_use(memory, use, kind, _REMEMBERED)
        return Step(score, prediction * config.temperature, kind is not None)

    def _classify(self, memory: Memory, feature: Feature, known: Floats) -> Floats:
        """Learn the Gaussian of the best class, and return the logits (K,) corrected by the Gaussians."""
        config, counts = self.config, memory["counts"]
        wide = feature.astype(np.float64)
        self._learn(memory, wide, int(known.argmax()), float(softmax(known)[0].max()))
        if (memory.learned + 1) % config.period == 0:
            self._invert(memory)
        gaussian = memory["directions"] @ wide - memory["offsets"]
        logits: Floats = known + min(config.rho * float(counts.mean()), config.eta) * gaussian
        return logits

    def _learn(self, memory: Memory, feature: Floats, k: int, weight: float) -> None:
        means, counts, mean = memory["means"], memory["counts"], memory["covariance"]
        share = weight / (counts[k] + weight)
        offset = feature - means[k]
        spread = np.outer(offset, offset)
        if self.config.covariance == "class":
            own = memory["covariances"][k]
            change = share * (spread - own)
            own += change
        else:
            change = share * (spread - mean)
        mean += change / len(counts)
        means[k] += share * offset
        counts[k] += weight

    def _invert(self, memory: Memory) -> None:
        """Set the direction and the offset of each class, by the inverse of the covariance."""
        part, width = self.config.shrinkage, len(memory["covariance"])
        inverse = np.linalg.inv((1.0 - part) * memory["covariance"] + part * np.eye(width))
        memory["directions"][:] = memory["means"] @ inverse
        memory["offsets"][:] = 0.5 * np.einsum("kd,kd->k", memory["means"], memory["directions"])

    def _p_unknown(self, memory: Memory, score: float) -> float:
        if self.config.threshold is not None:
            return super()._p_unknown(memory, score)
        values = 1.0 - memory.window.sorted[::-1]
        if values[0] == values[-1]:
            return 0.0
        threshold, _, upper = best_split(values, len(values), _GRID)
        # Without two groups on the grid, there is no reason to reject.
        return 1.0 if np.isfinite(upper) and 1.0 - score >= threshold else 0.0

    def _check(self, memory: Memory) -> None:
        super()._check(memory)
        counts, covariance = memory["counts"], memory["covariance"]
        if not (counts >= 1.0 - _TOLERANCE).all() or counts.sum() - len(counts) > memory.learned * (1.0 + _TOLERANCE):
            raise StateError("the state's Gaussians have learned more than all samples weigh")
        if not (np.linalg.norm(memory["means"], axis=1) <= 1.0 + _TOLERANCE).all():
            raise StateError("the state's means are longer than the features that they are means of")
        if not np.allclose(covariance, covariance.T, rtol=0, atol=_TOLERANCE) or not (np.diag(covariance) > 0).all():
            raise StateError("the state's covariance must be symmetric, with positive variances")

    def _numbers(self) -> Mapping[str, Any]:
        return {"names": len(self._negatives), "learned_weight": float((self._memory["counts"] - 1.0).sum())}

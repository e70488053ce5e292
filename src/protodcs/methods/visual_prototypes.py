"""Visual prototypes, learned online with the soft predictions of the texts as labels.

    v_l = mean of x weighted with p_l(x),   p(x) = softmax over classes and negative labels of x.t_l / tau
    S(x) = sum over classes of softmax_l(x.v_l / tau_v)

After "Respecting Modality Gap in Post-hoc Out-of-distribution Detection with Pre-trained Vision-Language Models"
(ICML 2026, arXiv 2605.26661). Its public text says: texts are the wrong prototypes, because images lie elsewhere; the
prototypes are learned in the space of images, online, from unlabeled test samples and the soft predictions of the
frozen model, with a proof that the online optimisation converges. We had neither its algorithm nor its code. So this
is the plainest method that fits the text: stochastic gradient steps on the weighted squared distance, with the step
size 1 / count, which is a weighted mean, and which converges. Read its figures as ours, not as the paper's.

These choices are ours: negative labels as in `neglabel`; a label starts at its text, moved by the difference of the
mean image and the mean text, with the weight `prior`; a count stops growing at `memory`, so that old samples fade.
Without a vocabulary there are no negative labels, and the score is the largest cosine with a prototype.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
from pydantic import Field

from ..arrays import Feature, Floats
from ..core.arena import Layout
from ..core.numerics.softmax import softmax
from ..errors import StateError
from .negatives import NegativesConfig, WithNegatives, class_share, farthest
from .scored import Memory, Step

_TOLERANCE = 1e-6


class VisualPrototypesConfig(NegativesConfig):
    """The settings of the visual prototypes."""

    share: float = Field(0.15, gt=0, le=1, description="The share of the vocabulary that becomes negative labels.")
    visual_temperature: float = Field(
        0.04, ge=0.001, le=100, description="tau_v: softmax temperature of cosines between images."
    )
    prior: float = Field(1.0, gt=0, le=1e6, description="Weight of a label's start. Samples.")
    memory: float = Field(1000.0, ge=1, le=1e9, description="Largest count of a label: about how many samples it has.")


class VisualPrototypes(WithNegatives):
    """The class of the nearest visual prototype; the score is the share of the softmax on those of the classes."""

    name: ClassVar[str] = "visual_prototypes"
    config_type = VisualPrototypesConfig
    score_names: ClassVar[Mapping[str, str]] = {"": "share on visual prototypes"}
    config: VisualPrototypesConfig

    def _names(self, prototypes: Feature, names: Feature) -> Feature:
        return names[np.sort(farthest(prototypes, names, 0.95, self.config.share))]

    def _layout(self, classes: int, width: int) -> Layout:
        labels = classes + len(self._negatives)
        return {
            "means": (np.float64, (labels, width)),
            "counts": (np.float64, (labels,)),
            "mean_image": (np.float64, (width,)),
        }

    def _step(self, memory: Memory, feature: Feature, cosines: Floats) -> Step:
        classes, wide = len(cosines), feature.astype(np.float64)
        self._learn(
            memory, wide, softmax(np.concatenate([cosines / self.config.temperature, self._logits(feature)]))[0]
        )
        near = self._cosines(memory, wide)
        logits = near / self.config.visual_temperature
        score = class_share(logits[:classes], logits[classes:]) if len(near) > classes else float(near.max())
        return Step(score, near[:classes], cached=True)

    def _learn(self, memory: Memory, feature: Floats, shares: Floats) -> None:
        counts, means = memory["counts"], memory["means"]
        memory["mean_image"][:] += (feature - memory["mean_image"]) / (memory.learned + 1)
        counts += shares
        with np.errstate(invalid="ignore", divide="ignore"):
            means += np.where(counts > 0, shares / counts, 0.0)[:, None] * (feature - means)
        np.minimum(counts, self.config.memory, out=counts)

    def _cosines(self, memory: Memory, feature: Floats) -> Floats:
        """Return the cosines (L,) of a feature with the prototype of each class and name."""
        texts = np.concatenate([memory.initial, self._negatives]).astype(np.float64)
        counts, prior = memory["counts"][:, None], self.config.prior
        starts = texts - texts.mean(axis=0) + memory["mean_image"]
        prototypes = prior * starts + counts * memory["means"]
        cosines: Floats = (prototypes @ feature) / np.maximum(np.linalg.norm(prototypes, axis=1), _TOLERANCE)
        return cosines

    def _check(self, memory: Memory) -> None:
        counts, limit = memory["counts"], 1.0 + _TOLERANCE
        if (
            not (counts >= 0).all()
            or counts.sum() > memory.learned * limit
            or counts.max() > self.config.memory * limit
        ):
            raise StateError("the state's labels have learned more than all samples weigh")
        if not (np.linalg.norm(memory["means"], axis=1) <= limit).all():
            raise StateError("the state's means are longer than the features that they are means of")
        if np.linalg.norm(memory["mean_image"]) > limit:
            raise StateError("the state's mean image is longer than the features that it is the mean of")

    def _numbers(self) -> Mapping[str, Any]:
        return {"names": len(self._negatives), "learned_weight": float(self._memory["counts"].sum())}

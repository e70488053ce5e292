"""Feature scores on the stream's own history: k-NN, Mahalanobis and ViM, with no training set to learn from.

The papers measure the distance to training images. Here the history takes their place: a sample joins it after it is
scored, if it is what ROSITA calls a reliable known sample. Its largest cosine then reaches the mean of the upper of
the two groups of least variance among the recent ones. The gate does not see the score, so no method confirms its own
decisions. The class is always that of the nearest prototype, and the recent scores set the threshold of the decision.

- `knn`: S(x) = k-th largest cosine with the history. "Out-of-Distribution Detection with Deep Nearest Neighbors"
  (ICML 2022). Until the history has k features, samples count as known, and the score is the largest cosine with a
  prototype.
- `mahalanobis`: S(x) = -min_k (x - m_k) . P (x - m_k), with class means by the nearest prototype and one covariance.
  "A Simple Unified Framework for Detecting Out-of-Distribution Samples" (NeurIPS 2018). A class mean starts at the mean
  of all images plus its prototype minus the mean prototype: images and texts lie in different places.
- `vim`: S(x) = log sum_k exp(x.t_k / tau) - alpha |x - B B'x|. "ViM: Out-Of-Distribution with Virtual-logit Matching"
  (CVPR 2022). B has the leading directions of the history, and alpha makes the mean residual as large as the mean of
  the largest logit. OpenOOD's ranking is the same: it reports the softmax of the residual as one more logit.

Different from OpenOOD's code, on purpose: the history is a stream, not training features of a trained network; the
distance of k-NN is a cosine, which ranks as its distance of normalised features does; the covariance is shrunk to a
multiple of the identity; directions and covariance are renewed every `period` samples of the history.
"""

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
from pydantic import Field

from ..arrays import Feature, Floats
from ..core.arena import Layout
from ..errors import StateError
from .familiarity import familiarity
from .scored import Memory, ScoredConfig, ScoredMethod, Step, check_filled, split

_TOLERANCE = 1e-6
# Squared distance of an image feature of CLIP from its class mean, about: the covariance starts with this trace.
_SPREAD = 0.4


def upper_mean(ordered: Floats) -> float:
    """Return the mean of the upper of the two groups of ascending values (n,) whose variance is least."""
    threshold = split(ordered)
    return float(ordered[0] if threshold == -np.inf else ordered[np.searchsorted(ordered, threshold) :].mean())


class HistoryMethod(ScoredMethod):
    """A method that scores samples by features of the stream that looked known."""

    score_names: ClassVar[Mapping[str, str]] = {"": "similarity to the history"}

    @abstractmethod
    def _score(self, memory: Memory, feature: Feature, cosines: Floats) -> float:
        """Return the score of a sample."""

    def _is_ready(self, memory: Memory) -> bool:
        """Return whether the history is long enough for scores that can be compared."""
        return True

    @abstractmethod
    def _join(self, memory: Memory, feature: Feature, cosines: Floats, joined: int) -> None:
        """Take a sample into the history, which `joined` samples have joined before."""

    def _layout(self, classes: int, width: int) -> Layout:
        return {"largest": (np.float64, (self.config.window,)), "joined": (np.int64, (1,))}

    def _step(self, memory: Memory, feature: Feature, cosines: Floats) -> Step:
        score, ready = self._score(memory, feature, cosines), self._is_ready(memory)
        recent, largest = memory["largest"], float(cosines.max())
        recent[memory.learned % len(recent)] = largest
        joins = largest >= upper_mean(np.sort(recent[: memory.learned + 1]))
        if joins:
            self._join(memory, feature, cosines, int(memory["joined"][0]))
            memory["joined"][0] += 1
        return Step(score, cached=joins, comparable=ready)

    def _check(self, memory: Memory) -> None:
        if not 0 <= memory["joined"][0] <= memory.learned:
            raise StateError("the state's history has more samples than came")
        if memory["largest"][memory.learned :].any() or not (np.abs(memory["largest"]) < 1.001).all():
            raise StateError("the state's largest cosines must lie from -1 to 1")

    def _numbers(self) -> Mapping[str, Any]:
        return {"history": int(self._memory["joined"][0])}


class KNNConfig(ScoredConfig):
    """The settings of k-NN."""

    neighbours: int = Field(1, ge=1, le=1000, description="k: which of the nearest features counts.")
    history: int = Field(
        1024, ge=1000, le=100_000, description="How many features are kept; the oldest one is replaced."
    )


class KNN(HistoryMethod):
    """Nearest prototype by cosine; the score is the k-th largest cosine with the stream's history."""

    name: ClassVar[str] = "knn"
    config_type = KNNConfig
    score_names: ClassVar[Mapping[str, str]] = {"": "k-th cosine with the history"}
    config: KNNConfig

    def _layout(self, classes: int, width: int) -> Layout:
        return {**super()._layout(classes, width), "history": (np.float32, (self.config.history, width))}

    def _score(self, memory: Memory, feature: Feature, cosines: Floats) -> float:
        history, k = memory["history"], self.config.neighbours
        if not self._is_ready(memory):
            return float(cosines.max())
        count = min(int(memory["joined"][0]), len(history))
        return float(np.partition(history[:count] @ feature, count - k)[count - k])

    def _is_ready(self, memory: Memory) -> bool:
        return bool(memory["joined"][0] >= self.config.neighbours)

    def _join(self, memory: Memory, feature: Feature, cosines: Floats, joined: int) -> None:
        memory["history"][joined % self.config.history] = feature

    def _check(self, memory: Memory) -> None:
        super()._check(memory)
        check_filled(memory["history"], min(int(memory["joined"][0]), self.config.history), "history")


class MahalanobisConfig(ScoredConfig):
    """The settings of the Mahalanobis score."""

    shrinkage: float = Field(64.0, gt=0, le=1e6, description="Weight of the covariance at the start. Samples.")
    period: int = Field(64, ge=1, le=100_000, description="Means and covariance are renewed after so many samples.")


class Mahalanobis(HistoryMethod):
    """Nearest prototype by cosine; the score is minus the distance to the nearest class mean of the history."""

    name: ClassVar[str] = "mahalanobis"
    config_type = MahalanobisConfig
    score_names: ClassVar[Mapping[str, str]] = {"": "minus the squared distance to a class mean"}
    config: MahalanobisConfig

    def _layout(self, classes: int, width: int) -> Layout:
        return {
            **super()._layout(classes, width),
            "sums": (np.float64, (classes, width)),
            "counts": (np.int64, (classes,)),
            "scatter": (np.float64, (width, width)),
            "precision": (np.float64, (width, width)),
            "directions": (np.float64, (classes, width)),
            "offsets": (np.float64, (classes,)),
        }

    def _begin(self, memory: Memory) -> None:
        self._renew(memory)

    def _score(self, memory: Memory, feature: Feature, cosines: Floats) -> float:
        wide = feature.astype(np.float64)
        nearest = float((memory["directions"] @ wide - memory["offsets"]).max())
        return 2.0 * nearest - float(wide @ memory["precision"] @ wide)

    def _join(self, memory: Memory, feature: Feature, cosines: Floats, joined: int) -> None:
        k, wide = int(cosines.argmax()), feature.astype(np.float64)
        count = int(memory["counts"][k])
        if count:
            offset = wide - memory["sums"][k] / count
            memory["scatter"][:] += (count / (count + 1.0)) * np.outer(offset, offset)
        memory["sums"][k] += wide
        memory["counts"][k] += 1
        if (joined + 1) % self.config.period == 0:
            self._renew(memory)

    def _means(self, memory: Memory) -> Floats:
        """Return the class means (K, d), each with the weight of one sample where its prototype points."""
        prototypes, counts = memory.initial.astype(np.float64), memory["counts"]
        total = int(counts.sum())
        places = prototypes - prototypes.mean(axis=0)
        if total:
            places += memory["sums"].sum(axis=0) / total
        else:
            places += prototypes.mean(axis=0)
        means: Floats = (memory["sums"] + places) / (counts + 1.0)[:, None]
        return means

    def _renew(self, memory: Memory) -> None:
        """Set the inverse covariance, and what the distance to each class mean needs."""
        width, prior = len(memory["scatter"]), self.config.shrinkage
        start = (prior * _SPREAD / width) * np.eye(width)
        free = max(int(memory["counts"].sum()) - int((memory["counts"] > 0).sum()), 0)
        memory["precision"][:] = np.linalg.inv((start + memory["scatter"]) / (prior + free))
        means = self._means(memory)
        memory["directions"][:] = means @ memory["precision"]
        memory["offsets"][:] = 0.5 * np.einsum("kd,kd->k", means, memory["directions"])

    def _check(self, memory: Memory) -> None:
        super()._check(memory)
        counts = memory["counts"]
        if not (counts >= 0).all() or counts.sum() != memory["joined"][0]:
            raise StateError("the state's class counts must add up to its history")
        if not (np.linalg.norm(memory["sums"], axis=1) <= counts + _TOLERANCE * (1.0 + counts)).all():
            raise StateError("the state's class sums are longer than the features in them")
        if not (np.diag(memory["scatter"]) >= 0).all() or not (np.diag(memory["precision"]) > 0).all():
            raise StateError("the state's scatter and precision must have positive diagonals")


class ViMConfig(ScoredConfig):
    """The settings of the ViM-like score."""

    share: float = Field(0.5, gt=0, lt=1, description="Leading directions, as a share of the feature's length.")
    period: int = Field(128, ge=1, le=100_000, description="The directions are renewed after so many samples.")
    temperature: float = Field(0.01, gt=0, le=100, description="tau, softmax temperature of the cosines.")


class ViM(HistoryMethod):
    """Nearest prototype by cosine; the score is the energy minus what the history's directions leave unexplained."""

    name: ClassVar[str] = "vim"
    config_type = ViMConfig
    score_names: ClassVar[Mapping[str, str]] = {"": "energy minus residual"}
    config: ViMConfig

    def _layout(self, classes: int, width: int) -> Layout:
        return {
            **super()._layout(classes, width),
            "moment": (np.float64, (width, width)),
            "directions": (np.float64, (max(1, int(self.config.share * width)), width)),
            "alpha": (np.float64, (1,)),
            "top_logits": (np.float64, (1,)),
        }

    def _score(self, memory: Memory, feature: Feature, cosines: Floats) -> float:
        temperature = self.config.temperature
        parts = memory["directions"] @ feature.astype(np.float64)
        residual = float(np.sqrt(max(0.0, 1.0 - float(parts @ parts))))
        return familiarity(cosines / temperature, temperature, "energy") - float(memory["alpha"][0]) * residual

    def _join(self, memory: Memory, feature: Feature, cosines: Floats, joined: int) -> None:
        wide = feature.astype(np.float64)
        memory["moment"][:] += np.outer(wide, wide)
        memory["top_logits"][0] += float(cosines.max()) / self.config.temperature
        if (joined + 1) % self.config.period == 0:
            self._renew(memory, joined + 1)

    def _renew(self, memory: Memory, joined: int) -> None:
        """Set the leading directions of the history, no more than half its samples, and alpha."""
        values, vectors = np.linalg.eigh(memory["moment"] / joined)
        directions = memory["directions"]
        count = max(1, min(len(directions), joined // 2))
        directions[:] = 0.0
        directions[:count] = vectors[:, ::-1][:, :count].T
        residual = max(float(values[: len(values) - count].sum()), _TOLERANCE)
        memory["alpha"][0] = max(float(memory["top_logits"][0]) / joined, 0.0) / np.sqrt(residual)

    def _check(self, memory: Memory) -> None:
        super()._check(memory)
        joined = int(memory["joined"][0])
        if abs(float(np.trace(memory["moment"])) - joined) > _TOLERANCE * (1.0 + joined):
            raise StateError("the state's second moment must be that of its history of unit vectors")
        products = memory["directions"] @ memory["directions"].T
        if not np.allclose(products, np.diag(np.diag(products).round()), rtol=0, atol=_TOLERANCE):
            raise StateError("the state's directions must be orthogonal")
        if memory["alpha"][0] < 0:
            raise StateError("the state's alpha must not be negative")

"""Negative labels: names that are far from the classes, chosen from a vocabulary, and scores over classes and names.

A score is the share of a softmax that falls on the classes. NegLabel, AdaNeg, TANL and DDE choose their names and
build their scores in different ways from the functions here.
"""

import math

import numpy as np
from pydantic import Field

from ..arrays import Feature, Floats, Integers
from ..core.numerics.softmax import softmax
from ..core.prototypes import Prototypes
from .scored import Memory, ScoredConfig, ScoredMethod

# A name whose cosine with a class is above this is that class, under the same or another name.
SAME = 0.95
# Names that are compared with the classes at once, to bound the memory for it.
_AT_ONCE = 512


class NegativesConfig(ScoredConfig):
    """The settings of methods with negative labels."""

    temperature: float = Field(0.01, ge=0.001, le=100, description="tau: softmax temperature of the cosines.")


def similarity(prototypes: Feature, names: Feature, quantile: float) -> Floats:
    """Return a quantile (V,) of the cosines of each name (V, d) with the prototypes (K, d); infinity for classes."""
    classes = prototypes.astype(np.float64).T
    found = np.empty(len(names))
    for first in range(0, len(names), _AT_ONCE):
        cosines = names[first : first + _AT_ONCE].astype(np.float64) @ classes
        part = np.quantile(cosines, quantile, axis=1)
        part[cosines.max(axis=1) > SAME] = math.inf
        found[first : first + _AT_ONCE] = part
    return found


def farthest(prototypes: Feature, names: Feature, quantile: float, share: float) -> Integers:
    """Return the share of the names (V, d) that are least similar to the classes, the least similar one first."""
    values = similarity(prototypes, names, quantile)
    order = np.argsort(values, kind="stable")[: int(share * len(names))]
    return order[np.isfinite(values[order])]


def class_share(known: Floats, negative: Floats) -> float:
    """Return the share of the softmax of all logits, those of classes (K,) and of names (M,), on the classes."""
    top = max(float(known.max()), float(negative.max()))
    mass = float(np.exp(known - top).sum())
    return mass / (mass + float(np.exp(negative - top).sum()))


def grouped_share(known: Floats, negative: Floats, groups: int) -> float:
    """Return the mean of `class_share` over groups of names; each group has every n-th name, so all are as large."""
    groups = max(1, min(groups, len(negative)))
    size = len(negative) // groups
    top = max(float(known.max()), float(negative.max()))
    mass = float(np.exp(known - top).sum())
    others = np.exp(negative[: size * groups] - top).reshape(size, groups).sum(axis=0)
    return float(np.mean(mass / (mass + others)))


class WithNegatives(ScoredMethod):
    """A method that compares each sample with its classes and with names of a vocabulary.

    Without a vocabulary there are no negative labels: the score is then the largest softmax probability.
    """

    uses_vocabulary = True
    config: NegativesConfig
    _negatives: Feature

    def _names(self, prototypes: Feature, names: Feature) -> Feature:
        """Return the names (M, d) that the method compares with, for these prototypes (K, d)."""
        return names[np.sort(farthest(prototypes, names, 1.0, 1.0))]

    def _empty_memory(self, initial: Feature) -> Memory:
        vocabulary = Prototypes.of(self._prototypes).vocabulary
        names = np.empty((0, initial.shape[1]), dtype=np.float32)
        self._negatives = names if vocabulary is None else self._names(initial, vocabulary.rows)
        return super()._empty_memory(initial)

    def _logits(self, feature: Feature) -> Floats:
        """Return the logits (M,) of the names."""
        cosines: Floats = (self._negatives @ feature).astype(np.float64)
        return cosines / self.config.temperature

    def _largest_probability(self, known: Floats) -> float:
        """Return the score without names, for the logits (K,) of the classes."""
        return float(softmax(known)[0].max())

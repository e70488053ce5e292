"""Corrections: labels that a person gave to samples, and what they change for similar samples.

Corrections change answers, never what the engine learns from the stream, so a wrong one stays local and can be
replaced. Similarity is the cosine after subtracting the middle of the stream, because features lie in a narrow cone.
A correction of a known class raises the logit of that class and the score of similar samples. One to "unknown" lowers
their score. For near-duplicates the correction decides.
"""

from typing import NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from ...arrays import Feature, Floats, Integers
from ...errors import StateError
from ..state import Arrays
from ..state_checks import check_unit, required
from ..vectors import cosines, inverse_norms
from .constants import CORRECTED_CLASS, CORRECTED_SCORE, NEAR_DUPLICATE, SAME_SAMPLE

# The label of a correction to "unknown".
NO_CLASS = -1
ARRAYS = frozenset(("correction_features", "correction_labels"))


class Influence(NamedTuple):
    """What the corrections say about one sample.

    Attributes:
        score: what to add to its score.
        classes: (m,) classes whose logit increases.
        cosines: (m,) by how much, as a cosine.
        label: the class of a near-duplicate, NO_CLASS if that is unknown; None if there is no near-duplicate.
    """

    score: float
    classes: Integers
    cosines: Floats
    label: int | None


class Corrections:
    """Features with the labels that a person gave them, the oldest first. It never changes: edits return another one.

    Attributes:
        features: (n, d) float32, unit rows.
        labels: (n,) int64, class of each, or NO_CLASS.
    """

    def __init__(self, features: Feature, labels: Integers):
        self.features = np.ascontiguousarray(features)
        self.labels = labels
        self._inverse_norms = inverse_norms(self.features) if len(labels) else np.empty(0)

    @classmethod
    def none(cls, dimension: int) -> Self:
        """Return an empty store."""
        return cls(np.empty((0, dimension), dtype=np.float32), np.empty(0, dtype=np.int64))

    def __len__(self) -> int:
        return len(self.labels)

    def contains(self, feature: Feature) -> bool:
        """Whether there is a correction of this sample."""
        return bool((self._cosines(feature) >= SAME_SAMPLE).any())

    def with_correction(self, feature: Feature, label: int, capacity: int) -> Self:
        """Return the store with another correction. It replaces those of the same sample; the oldest is dropped."""
        rest = self.without(feature)
        first = max(0, len(rest) + 1 - capacity)
        features, labels = rest.features[first:], rest.labels[first:]
        return type(self)(np.concatenate([features, feature[None]]), np.append(labels, label))

    def without(self, feature: Feature) -> Self:
        """Return the store without the corrections of a sample."""
        kept = np.flatnonzero(self._cosines(feature) < SAME_SAMPLE)
        return type(self)(self.features[kept], self.labels[kept])

    def with_classes(self, kept: NDArray[np.int64], added: Feature, prototypes: Feature) -> Self:
        """Return the store after an edit of the classes.

        What belonged to a removed class is now unknown. A correction to "unknown" is dropped if the best class of
        its feature is a new one, because it was made before that class was on the list.

        Args:
            kept: classes that stay, in their new order.
            added: prototypes of the new classes.
            prototypes: (K, d), those of all classes after the edit.
        """
        if not len(self):
            return self
        places = {int(old): new for new, old in enumerate(kept)}
        labels = np.array([places.get(label, NO_CLASS) for label in self.labels.tolist()], dtype=np.int64)
        best = (self.features @ prototypes.T).argmax(axis=1)
        stays = (labels != NO_CLASS) | (best < len(prototypes) - len(added))
        return type(self)(self.features[stays], labels[stays])

    def influence(self, feature: Feature, middle: Floats | None) -> Influence:
        """Return what the corrections say about a unit feature (d,).

        Args:
            feature: the feature.
            middle: (d,) the middle of the stream; None if it is not known yet. Then only near-duplicates count.
        """
        similar = self._similarities(feature, middle)
        known = self.labels != NO_CLASS
        fourth = np.square(np.square(similar))
        score = CORRECTED_SCORE * (_largest(fourth[known]) - _largest(fourth[~known]))
        raised = np.flatnonzero(known & (similar > 0.0))
        # In rising order, so that the most similar correction of a class is the last one to be written.
        raised = raised[np.argsort(similar[raised], kind="stable")]
        nearest = int(similar.argmax())
        label = int(self.labels[nearest]) if similar[nearest] >= NEAR_DUPLICATE else None
        return Influence(score, self.labels[raised], CORRECTED_CLASS * np.square(fourth[raised]), label)

    def _similarities(self, feature: Feature, middle: Floats | None) -> Floats:
        """Return the cosines (n,) of a feature with the corrections, after centring, at least 0."""
        found = self._cosines(feature)
        if middle is None:
            return np.where(found >= SAME_SAMPLE, 1.0, 0.0)
        row, sample = middle.astype(np.float32)[None], np.empty(1)
        cosines(row, np.ones(1), feature, sample)
        along, square = self._cosines(row[0]), inverse_norms(row) ** -2
        spread = (1.0 - 2.0 * along + square) * (1.0 - 2.0 * sample + square)
        centred = (found - along - sample + square) / np.sqrt(np.maximum(spread, 1e-12))
        return np.maximum(centred, 0.0)

    def _cosines(self, vector: Feature) -> Floats:
        """Return the product (n,) of each correction with a vector (d,)."""
        found = np.empty(len(self))
        if len(self):
            cosines(self.features, self._inverse_norms, vector, found)
        return found

    # Export and restore.

    def export(self) -> Arrays:
        """Return the arrays of a state; none if there are no corrections."""
        return {"correction_features": self.features, "correction_labels": self.labels} if len(self) else {}

    @classmethod
    def restored(cls, arrays: Arrays, shape: tuple[int, int], capacity: int) -> Self:
        """Return the exported corrections of an engine with prototypes of this shape. Raise StateError otherwise."""
        classes, dimension = shape
        if not arrays:
            return cls.none(dimension)
        labels = required(arrays, "correction_labels", np.int64, (None,))
        features = required(arrays, "correction_features", np.float32, (len(labels), dimension))
        if not 0 < len(labels) <= capacity or not ((labels >= NO_CLASS) & (labels < classes)).all():
            raise StateError(f"The state has {len(labels)} corrections, or corrections to classes that do not exist.")
        check_unit(features, "correction_features")
        return cls(features.copy(), labels.copy())


def _largest(values: Floats) -> float:
    return float(values.max()) if len(values) else 0.0

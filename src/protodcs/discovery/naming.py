"""Suggest names for clusters: the texts of a vocabulary that are most similar to the centre of a cluster.

The plain cosine between image centre and text ranks best. Centring both sides first names fewer clusters correctly.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..arrays import Features
from ..core.validation import class_names, unit_rows
from ..errors import InputError


@dataclass(frozen=True, slots=True)
class Suggestion:
    """A name for a cluster.

    Attributes:
        name: the name.
        cosine: cosine between the text and the centre of the cluster.
        margin: how much larger the cosine is than that of the next name. A small margin is a doubtful suggestion.
    """

    name: str
    cosine: float
    margin: float


class Vocabulary:
    """Names with their text features, made by the same encoder as the image features.

    Args:
        names: unique names, at least two.
        features: one text feature per name (n, d); normalised on entry.
    """

    def __init__(self, names: Sequence[str], features: NDArray[np.floating]):
        self.features = unit_rows(features, "the features of a vocabulary", least=2)
        self.names = class_names(names, len(self.features))

    def suggest(self, centre: Features, count: int = 3) -> list[Suggestion]:
        """Return the `count` most similar names of a unit vector (d,), the best first."""
        if centre.shape != self.features.shape[1:]:
            raise InputError(
                f"The vocabulary has features of {self.features.shape[1]} dimensions, the cluster of {len(centre)}. "
                "Use text features of the same encoder."
            )
        cosines = self.features.astype(np.float64) @ centre.astype(np.float64)
        order = np.argsort(-cosines, kind="stable")[: count + 1]
        best = cosines[order]
        margins = np.append(best[:-1] - best[1:], 0.0)
        return [
            Suggestion(self.names[i], float(cosines[i]), float(margin))
            for i, margin in zip(order[:count], margins, strict=False)
        ]

"""Centring: what the cosines of a sample are compared with, and in which unit.

An image has a similar cosine with every text, so only differences count. With many classes their mean is a good centre.
With few, it is mostly the best class itself. So the mean cosine with general names, which the user did not list, counts
as 20 more classes. The spread of the names is the unit of all scores: it hardly depends on the classes or the images.

The best class leads over the names by some units. The largest of n random names would lead by `sqrt(2 ln n)`. The lead
is given as a part of that, so that it means the same for every vocabulary.
"""

from typing import NamedTuple

from ...arrays import Feature, Floats
from ..prototypes import Prototypes
from ..vocabulary import Reference
from .constants import CLASSES_PRIOR, KNOWN_WIDTH, LEAST_NAMES, NAMES_PRIOR, RAW_PART, UNIT


class Centring(NamedTuple):
    """How an engine centres and scales cosines.

    Attributes:
        names: (d,) float64, mean of the general names; None without a vocabulary.
        many: 0 to 1, how far the number of classes counts as many.
        class_part: weight of the mean cosine with the classes in the centre.
        names_part: weight of the cosine with the mean of the names.
        unit: the cosine that counts as one unit of the score.
        noise: lead of the largest of the names in units; 0 if there are no names to lead over.
    """

    names: Floats | None
    many: float
    class_part: float
    names_part: float
    unit: float
    noise: float

    @classmethod
    def of(cls, prototypes: Prototypes) -> "Centring":
        """Return the centring for these classes. Without a vocabulary, the classes serve as names if they are many."""
        classes, reference = len(prototypes), prototypes.reference
        many = classes / (classes + NAMES_PRIOR)
        whole = 1.0 - RAW_PART * many
        if reference is not None:
            return cls(reference.mean, many, whole * many, whole * (1.0 - many), reference.deviation, reference.noise)
        if classes >= LEAST_NAMES:
            own = prototypes.follow(Reference.of)
            return cls(None, many, whole, 0.0, own.deviation, own.noise)
        return cls(None, many, whole * classes / (classes + CLASSES_PRIOR), 0.0, UNIT, 0.0)

    @property
    def width(self) -> float:
        """Expected width of the known scores, in units. It means nothing without names."""
        few, more = KNOWN_WIDTH
        return few + more * self.many

    def centre(self, feature: Feature, cosines: Floats) -> tuple[float, float]:
        """Return what to subtract from the cosines (K,) of a feature (d,), and how far the best class leads."""
        average = float(cosines.mean())
        with_names = average if self.names is None else float(feature.astype(float) @ self.names)
        centre = self.class_part * average + self.names_part * with_names
        lead = (float(cosines.max()) - with_names) / (self.unit * self.noise) if self.noise else 0.0
        return centre, lead

"""NegLabel: names that are far from all classes take part in the softmax, and unknown images fall on them.

    S(x) = mean over groups G of  sum_k exp(f.t_k / tau) / (sum_k exp(f.t_k / tau) + sum_{n in G} exp(f.t_n / tau))

"Negative Label Guided OOD Detection with Pretrained Vision-Language Models" (ICLR 2024). The names are the share of
the vocabulary whose 95 % quantile of cosines with the classes is least. It learns nothing from the stream.

Different from the authors' code, on purpose:

- It draws groups by a random permutation; here group g has every n-th name, in the order of the vocabulary.
- It takes 10,000 of 70,000 nouns and adjectives of WordNet. Here `share` counts, because vocabularies differ in size.
- A name with a cosine above 0.95 with a class is left out, as in CSP.
- The paper has no threshold but one for 95 % of the known images. Here the recent scores set it.

CSP ("Conjugated Semantic Pool", NeurIPS 2024) is this score with other names: "property + superclass", such as "white
creature". Pass such names as the vocabulary to have CSP. A vocabulary of objects has neither textures nor scenes:
images of those fall on whatever object is drawn nearest, or on a class.
"""

from collections.abc import Mapping
from typing import ClassVar

import numpy as np
from pydantic import Field

from ..arrays import Feature, Floats
from .negatives import NegativesConfig, WithNegatives, farthest, grouped_share
from .scored import Memory, Step


class NegLabelConfig(NegativesConfig):
    """The settings of NegLabel."""

    share: float = Field(0.15, gt=0, le=1, description="The share of the vocabulary that becomes negative labels.")
    quantile: float = Field(
        0.95, ge=0, le=1, description="eta: which quantile of its cosines with the classes tells how near a name is."
    )
    group_size: int = Field(100, ge=1, le=1_000_000, description="Names per group, about; fewer names are one group.")


class NegLabel(WithNegatives):
    """Nearest prototype by cosine; the score is the share of the softmax on classes, not on far names."""

    name: ClassVar[str] = "neglabel"
    config_type = NegLabelConfig
    score_names: ClassVar[Mapping[str, str]] = {"": "share on classes"}
    config: NegLabelConfig

    def _names(self, prototypes: Feature, names: Feature) -> Feature:
        return names[np.sort(farthest(prototypes, names, self.config.quantile, self.config.share))]

    def _step(self, memory: Memory, feature: Feature, cosines: Floats) -> Step:
        known = cosines / self.config.temperature
        if not len(self._negatives):
            return Step(self._largest_probability(known))
        groups = len(self._negatives) // self.config.group_size
        return Step(grouped_share(known, self._logits(feature), groups))

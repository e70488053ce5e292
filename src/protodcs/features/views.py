"""One feature of an image from many views of it: the mean of the views that the class names fit with least doubt.

DPE and TDA answer for such a feature on ImageNet and its variants. The views of an image depend on its place in its
source alone, so the feature does not depend on batches, shards and workers.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..arrays import Features
from ..core.numerics.softmax import entropy_rows, softmax_rows
from ..encoders import Encoder, Preprocessing
from ..methods.images.views import random_views

# The share of the views that is kept, at least one view.
_KEPT = 0.1


@dataclass(frozen=True)
class Views:
    """How many views an image has, and what chooses among them.

    Attributes:
        count: the plain image and random resized crops of it.
        prototypes: (K, d) text prototypes of the classes.
        logit_scale: of the encoder.
        prompts: hash of the class names.
    """

    count: int
    prototypes: Features
    logit_scale: float
    prompts: str

    @classmethod
    def of(cls, encoder: Encoder, classes: Sequence[str], count: int) -> "Views":
        """Return `count` views for the features of an encoder, chosen by these class names."""
        prompts = hashlib.sha256(json.dumps(list(classes)).encode()).hexdigest()[:16]
        return cls(count, encoder.prototypes(classes), encoder.logit_scale, prompts)

    def fingerprint(self, encoder: Encoder) -> str:
        """Return the fingerprint of an encoder with what else the features depend on."""
        return f"{encoder.fingerprint},views={self.count},classes={self.prompts}"

    def fitted(self, image: NDArray[np.uint8], preprocessing: Preprocessing, place: Sequence[int]) -> NDArray[np.uint8]:
        """Return the views (count, height, width, 3) of an image; `place` is its seed."""
        generator = np.random.default_rng(place)
        crops = random_views(image[None], self.count - 1, generator, size=preprocessing.shape[:2])
        return np.stack([preprocessing.fit(image), *(preprocessing.fit(crop) for crop in crops[0])])

    def averaged(self, rows: Features) -> Features:
        """Return the unit features (n, d) of images from those of their views (n * count, d)."""
        entropy = entropy_rows(softmax_rows(self.logit_scale * (rows @ self.prototypes.T).astype(np.float64)))
        # Of equally confident views, the earlier ones.
        order = np.argsort(entropy.reshape(-1, self.count), axis=1, kind="stable")
        kept = order[:, : max(1, int(_KEPT * self.count))]
        means = np.take_along_axis(rows.reshape(len(order), self.count, -1), kept[:, :, None], axis=1).mean(axis=1)
        found: Features = means / np.linalg.norm(means, axis=1, keepdims=True)
        return found

"""C-TPT: TPT that also spreads the class features, for better calibrated probabilities (Yoon and others, 2024).

From TPT's loss a multiple of the features' mean distance to their centroid is taken. As in TPT, nothing is carried
from image to image.
"""

from typing import ClassVar

import torch
from pydantic import Field
from torch import Tensor

from ...core.base import Capabilities
from .answer import Answer
from .prompt import PromptMethod, PromptSettings, averaged, log_probabilities
from .tower import entropy


class CTPTConfig(PromptSettings):
    """The settings of C-TPT."""

    dispersion_weight: float = Field(
        50.0, ge=0, le=1e6, description="Of the dispersion in the loss; its authors have 50, and 20 for ImageNet's kin."
    )


class CTPT(PromptMethod):
    """Calibrated test-time prompt tuning."""

    name: ClassVar[str] = "ctpt"
    capabilities: ClassVar[Capabilities] = Capabilities(
        batch_invariant=True, rotation_invariant=False, editable_classes=False, cost="backbone"
    )
    config_type = CTPTConfig
    config: CTPTConfig

    def _adapt(self, views: Tensor) -> Answer:
        return self._tuned_alone(views, self._objective)

    def _objective(self, views: Tensor, features: Tensor) -> Tensor:
        uncertainty = entropy(averaged(log_probabilities(views, features, self.temperature)))
        return uncertainty - self.config.dispersion_weight * dispersion(features)


def dispersion(features: Tensor) -> Tensor:
    """The mean distance of class features (K, dimension) to their centroid; that of one class is zero, and flat."""
    return torch.linalg.vector_norm(features - features.mean(dim=0), dim=1).mean()

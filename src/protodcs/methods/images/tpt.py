"""TPT: for each image a prompt of its own, tuned until its confident views agree (Shu and others, 2022).

Of random views those of lowest entropy are kept; the entropy of their mean probability is lowered by one AdamW step on
the context vectors, and the plain image is answered for with that prompt. Nothing is carried from image to image.
"""

from typing import ClassVar

from torch import Tensor

from ...core.base import Capabilities
from .answer import Answer
from .prompt import PromptMethod, PromptSettings, averaged, log_probabilities
from .tower import entropy


class TPTConfig(PromptSettings):
    """The settings of TPT."""


class TPT(PromptMethod):
    """Test-time prompt tuning."""

    name: ClassVar[str] = "tpt"
    capabilities: ClassVar[Capabilities] = Capabilities(
        batch_invariant=True, rotation_invariant=False, editable_classes=False, cost="backbone"
    )
    config_type = TPTConfig
    config: TPTConfig

    def _adapt(self, views: Tensor) -> Answer:
        return self._tuned_alone(views, self._objective)

    def _objective(self, views: Tensor, features: Tensor) -> Tensor:
        return entropy(averaged(log_probabilities(views, features, self.temperature)))

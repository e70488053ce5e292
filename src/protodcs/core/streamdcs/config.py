"""The settings of StreamDCS. The defaults are the recommended settings; there are no presets."""

from pydantic import Field

from ..settings import Settings


class StreamDCSConfig(Settings):
    """The settings of one StreamDCS engine. The defaults are what we recommend.

    >>> StreamDCSConfig().target_false_reject
    0.05
    """

    target_false_reject: float = Field(
        0.05, gt=0, lt=0.5, description="Fraction of known images that may be rejected. The one setting to choose."
    )
    review_rate: float = Field(
        0.0,
        ge=0,
        lt=1,
        description="Share of the samples that a person can look at. The samples closest to the threshold become "
        '"unsure". 0: none.',
    )
    max_corrections: int = Field(
        500,
        ge=1,
        le=10_000,
        description="Largest number of corrections that `feedback` stores. After that, the oldest is dropped.",
    )
    temperature: float = Field(0.01, gt=0, le=100, description="tau: softmax temperature of the text similarities.")
    history: int = Field(
        2048, ge=64, le=100_000, description="Number of recent samples whose scores the engine remembers. Samples."
    )
    linear_head: bool = Field(
        True, description="Use the direction between known-looking and unknown-looking samples, if it separates them."
    )
    class_bias: bool = Field(
        True,
        description="Correct the logit of each class for what a shift of the images adds to it, measured on verified "
        "samples of other classes. Needs three classes.",
    )
    class_bias_limit: int = Field(
        256,
        ge=3,
        le=10_000,
        description="With more classes there is no class bias, because it stores one number per pair of classes.",
    )

    def has_class_bias(self, classes: int) -> bool:
        """Whether an engine with this number of classes has a class bias."""
        return self.class_bias and 3 <= classes <= self.class_bias_limit

"""The settings of StreamDCS. The defaults are the recommended settings; there are no presets."""

from typing import Self

from pydantic import Field, model_validator

from ..settings import Settings


class StreamDCSConfig(Settings):
    """The settings of one StreamDCS engine. The defaults are what we recommend.

    >>> StreamDCSConfig().mixture_window
    512
    >>> StreamDCSConfig(target_false_reject=0.05).target_false_reject
    0.05
    """

    # Prediction.
    temperature: float = Field(0.01, gt=0, le=100, description="tau: softmax temperature of the text similarities.")
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

    # Class baseline: the score from the text alone.
    class_baseline: bool = Field(
        True, description="Compare the cosine of each class with its own mean and variance over the stream."
    )
    baseline_horizon: float = Field(
        2000.0, ge=10, le=1e9, description="Number of samples that the baseline of a class remembers. Samples."
    )
    baseline_prior: float = Field(
        20.0, gt=0, le=1e6, description="Weight of the baseline over all classes in the one of each class. Samples."
    )
    centred_weight: float = Field(
        0.6,
        ge=0,
        le=1,
        description="Weight of the centred cosines (those minus the sample's mean cosine) in the score from the text. "
        "The raw cosines have the rest.",
    )
    history: int = Field(
        2048,
        ge=64,
        le=1_000_000,
        description="Number of recent samples behind the tails of the text score and the class concentration. Samples.",
    )

    # Memory bank, linear head and signal weights: the score from samples seen before.
    unknown_memory: int = Field(384, ge=8, le=65_536, description="Number of stored samples that look unknown.")
    known_memory: int = Field(128, ge=8, le=65_536, description="Number of stored samples that look known.")
    neighbors: int = Field(
        5, ge=1, le=64, description="Number of nearest stored samples of each kind behind the contrast signal."
    )
    head_weight: float = Field(
        0.55, ge=0, le=10, description="Weight of the linear head between the two memories; 0 removes it."
    )
    head_rate: float = Field(0.2, gt=0, le=10, description="Learning rate of the linear head.")
    head_decay: float = Field(1e-3, ge=0, le=1, description="Weight decay of the linear head.")
    head_steps: int = Field(
        2, ge=1, le=64, description="Rows of each memory that the linear head trains on at every sample."
    )
    contrast_weight: float = Field(
        0.35,
        ge=0,
        le=10,
        description="Weight of the contrast between the nearest known and the nearest unknown samples; 0 removes it.",
    )
    nearest_unknown_weight: float = Field(
        0.2, ge=0, le=10, description="Weight of the similarity to the nearest unknown sample; 0 removes it."
    )
    adapt_weights: bool = Field(
        True,
        description="Reduce the weights of head and contrast if they do not separate the two tails of the text score.",
    )
    zero_weight_auroc: float = Field(
        0.92, ge=0.5, lt=1, description="AUROC between the tails up to which head and contrast have no weight."
    )
    full_weight_auroc: float = Field(
        0.97, gt=0.5, le=1, description="AUROC between the tails from which head and contrast have their full weight."
    )

    # Decision: a mixture of two components if the stream shows two groups, otherwise a fallback threshold.
    mixture_window: int = Field(
        512, ge=4, le=100_000, description="Number of recent samples that the mixture is fitted to. Samples."
    )
    mixture_start: int = Field(64, ge=4, le=100_000, description="Sample at which the mixture is first fitted.")
    mixture_period: int = Field(32, ge=1, le=100_000, description="Samples between refits.")
    class_concentration: bool = Field(
        True, description="Use how recent samples spread over the classes: unknown samples concentrate on few of them."
    )
    bimodality_test: bool = Field(
        True,
        description="Require the bimodality tests to pass before using the mixture. Off: use every mixture that fits.",
    )
    unknown_threshold: float = Field(
        0.5, gt=0, le=1, description="Posterior of 'unknown' at or above which a sample is rejected."
    )
    target_false_reject: float | None = Field(
        None,
        gt=0,
        lt=1,
        description="Fraction of known images that may be rejected. None: the posterior rule. Otherwise a sample is "
        "known below that upper tail of the known component, a skewed Gaussian.",
    )

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.head_rate * self.head_decay >= 1:
            raise ValueError(
                f"head_rate {self.head_rate} times head_decay {self.head_decay} must be below 1, or the head diverges"
            )
        if self.history < self.mixture_window:
            raise ValueError(f"history {self.history} must not be shorter than mixture_window {self.mixture_window}")
        if self.zero_weight_auroc >= self.full_weight_auroc:
            raise ValueError(
                f"zero_weight_auroc {self.zero_weight_auroc} must be below full_weight_auroc {self.full_weight_auroc}"
            )
        return self

    @property
    def uses_memory(self) -> bool:
        """Whether any signal compares a sample with stored ones."""
        return self.head_weight + self.contrast_weight + self.nearest_unknown_weight > 0

    def has_class_bias(self, classes: int) -> bool:
        """Whether an engine with this number of classes has a class bias."""
        return self.class_bias and 3 <= classes <= self.class_bias_limit

    def until_refit(self, seen: int) -> int:
        """Return the number of samples from the one after `seen` samples to the next refit, both included."""
        if seen < self.mixture_start:
            return self.mixture_start - seen
        return self.mixture_period - (seen - self.mixture_start) % self.mixture_period

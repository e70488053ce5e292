"""The settings of ProtoDCS: every number of the paper, and every place where the paper can be read in two ways.

Each such place is one named option, so that you can run and compare both readings. Field descriptions give the paper's
symbol, the unit and the source.
"""

from collections.abc import Mapping
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from ...errors import ConfigError
from ..settings import Settings

Preset = Literal["working", "paper"]

# What the presets set. They agree on all other settings.
PRESETS: Mapping[str, Mapping[str, Any]] = {
    # The paper, with the quality gate and the first update of its ancestor DPE, so that the text prototypes evolve.
    "working": {"evolution_gate": "entropy", "evolution_prior": 1},
    # The letter of the paper. Its quality gate cannot open with two or more classes.
    "paper": {"evolution_gate": "aleatoric", "evolution_prior": 0},
}
# The only place that says which preset is the default.
DEFAULT_PRESET: Preset = "working"
_DEFAULTS = PRESETS[DEFAULT_PRESET]


class ProtoDCSConfig(Settings):
    """The settings of one ProtoDCS engine. The defaults are those of the preset `working`.

    A preset is a name for some settings. Call `preset`, or pass `preset` among the options, as in
    `methods.create("protodcs", prototypes, preset="paper")` and in grids. Options beside it replace its settings.

    >>> ProtoDCSConfig() == ProtoDCSConfig.preset("working")
    True
    >>> ProtoDCSConfig.preset("paper", cache_size=3).evolution_gate
    'aleatoric'
    """

    # First check: openness and its two gates.
    first_check: bool = Field(
        True, description="Gate samples by openness. Off: every sample is cached and trusted (ablation 'Check')."
    )
    openness: Literal["cosine", "softmax", "mcm"] = Field(
        "cosine",
        description="S and S': one minus the largest cosine (stated three times in the paper), or minus the log of the "
        "largest probability of the softmax at tau (softmax) or at temperature 1 (mcm). In nats.",
    )
    gate_window: int = Field(
        100, ge=2, le=100_000, description="W_c: how many recent openness scores set the gates. Samples."
    )
    cache_quantile: float = Field(
        0.3, ge=0, le=1, description="Theta_a: samples below this quantile of the window are offered to the cache."
    )
    trust_quantile: float = Field(
        0.6, ge=0, le=1, description="Theta_b: samples below this quantile may shape temporary prototypes."
    )

    # The visual cache.
    visual_prototypes: bool = Field(
        True, description="P_v: keep a visual cache and use it. Off: text alone (ablation 'P_v')."
    )
    cache_admission: Literal["immediate", "verified", "buffered", "gated"] = Field(
        "immediate",
        description="When a confident sample enters its queue: at once (Algorithm 1), after both checks (main text), "
        "or held and flushed at each refit of the mixture, lowest uncertainty first (buffered). gated: known samples "
        "that pass the quality gate are held and flushed, confident or not (supplement).",
    )
    cache_size: int = Field(5, ge=1, le=64, description="l, N_cache: features kept per class.")
    cache_similarity: float = Field(
        0.9, ge=-1, le=1, description="tau_sim: cosine above which two cached features count as the same view."
    )
    cache_quality: Literal["aleatoric", "entropy"] = Field(
        "aleatoric",
        description="The lower it is, the better a cached sample: AU (supplement) or entropy (main text).",
    )

    # Temporary prototypes: one AdamW step from zero residuals.
    text_prototypes: bool = Field(
        True, description="P_t: adapt, evolve and predict with text prototypes. Off: visual alone (ablation 'P_t')."
    )
    uncertainty: Literal["evidence", "entropy"] = Field(
        "evidence", description="The loss: Dirichlet uncertainty (AU, EU) or softmax entropy (ablation)."
    )
    evidence_logits: Literal["text", "fused"] = Field(
        "text", description="Logits behind loss, reported uncertainty and quality gate: text, or text plus affinity."
    )
    evidence_scale: float = Field(
        1.0,
        gt=0,
        le=1000,
        description="Factor on the cosines before they become evidence: 1 (literal), 100 as for the logits of DPE.",
    )
    aleatoric_weight: float = Field(1.0, ge=0, le=100, description="lambda_AU: weight of AU in the loss; 0 ablates it.")
    epistemic_weight: float = Field(1.0, ge=0, le=100, description="Weight of EU in the loss; 0 ablates it.")
    alignment_weight: float = Field(
        0.2, ge=0, le=100, description="lambda_align: weight of the InfoNCE term; 0 ablates it."
    )
    alignment_temperature: float = Field(
        0.01, ge=0.005, le=10, description="Temperature of InfoNCE. Not given in the paper; its ancestor DPE has 0.01."
    )
    alignment_direction: Literal["visual-to-text", "text-to-visual"] = Field(
        "visual-to-text", description="Queries and keys of InfoNCE. Not given in the paper; DPE queries with visual."
    )
    alignment_keys: Literal["open", "all"] = Field(
        "open", description="Text rows that serve as keys: those of classes with a non-empty queue, or every class."
    )
    text_rate: float = Field(2.5e-4, ge=0, le=1, description="lr_t: AdamW learning rate of the text residual.")
    visual_rate: float = Field(7.5e-3, ge=0, le=1, description="lr_v: AdamW learning rate of the visual residual.")
    step_epsilon: float = Field(
        1e-8, ge=1e-12, le=1, description="AdamW eps: 1e-8 makes the first step a sign step, DPE's 1e-3 a scaled one."
    )

    candidates: int = Field(
        1024,
        ge=1,
        le=10_000_000,
        description="M: how many text prototypes, those most similar to the sample, a step moves where there are very "
        "many classes. Every class is scored in any case; with as many candidates as classes the step is exact.",
    )
    candidates_above: int = Field(
        10_000,
        ge=1,
        le=10_000_000,
        description="How many classes are very many: up to here a step works on all of them.",
    )

    # Final verification: the mixture.
    verification: bool = Field(
        True, description="Decide by the mixture. Off: known means trusted by the first check (ablation 'Verify')."
    )
    mixture_window: int = Field(
        100, ge=4, le=100_000, description="W_g: how many recent openness scores the mixture is fitted to. Samples."
    )
    mixture_start: int = Field(100, ge=4, le=100_000, description="Sample at which the mixture is first fitted.")
    mixture_period: int = Field(
        100, ge=1, le=100_000, description="Samples between refits: 100 (supplement) or 1 (Algorithm 1)."
    )
    mixture_tolerance: float = Field(
        1e-3, gt=0, le=1, description="EM stops when the mean log-likelihood gains less than this. Nats per sample."
    )
    mixture_iterations: int = Field(100, ge=1, le=10_000, description="EM gives up after so many iterations.")
    mixture_floor: float = Field(
        1e-6, gt=0, le=1, description="Smallest variance of a component, if openness is by cosine."
    )
    mixture_relative_floor: float = Field(
        1e-3,
        gt=0,
        le=1,
        description="The same for the other kinds of openness, as a share of the variance of the window. Cosines of "
        "CLIP vary so that 1e-6 is about this share.",
    )
    mixture_weight: float = Field(0.02, ge=0, lt=0.5, description="A fit with a lighter component counts as failed.")
    unknown_threshold: float = Field(
        0.5, gt=0, le=1, description="Theta_p: posterior of 'unknown' at or above which a sample is rejected."
    )
    cold_threshold: float = Field(
        0.7,
        ge=-1,
        le=3,
        description="Theta_c: openness that means unknown while there is no mixture, as one minus a cosine or one "
        "minus a probability. By MCM, all samples of four or more classes are above 0.7: call `calibrate` first.",
    )
    target_false_reject: float | None = Field(
        None,
        gt=0,
        lt=1,
        description="The share of known images that may be lost. None: the posterior rule. Otherwise a sample is known "
        "below that upper tail of the known component.",
    )

    # Prediction.
    temperature: float = Field(0.01, gt=0, le=100, description="tau: softmax temperature of the text similarities.")
    affinity_weight: float = Field(0.5, ge=0, le=100, description="alpha: weight of the visual affinity.")
    affinity_sharpness: float = Field(9.5, ge=0, le=1000, description="beta: how fast affinity falls with distance.")
    prediction_scale: Literal["probability", "logit"] = Field(
        "probability", description="Text term of the prediction: softmax (equation 9), or similarity over temperature."
    )
    score: Literal["openness", "openness_first", "posterior", "prediction"] = Field(
        "openness",
        description="The number behind AUROC: 1 - S', 1 - S, 1 - p, or the largest value of equation 9. Not given in "
        "the paper.",
    )

    # Evolution of the text prototypes.
    evolution_gate: Literal["aleatoric", "entropy", "quantile", "off"] = Field(
        _DEFAULTS["evolution_gate"],
        description="What a known sample must pass to evolve the text prototypes: AU below Theta_q (literal; it cannot "
        "fire with two or more classes), entropy below Theta_q (DPE), or AU below its own rolling quantile. Entropy is "
        "that of the logits that predict, in nats over log2 K: 0 to 0.69. Fused logits include the affinity.",
    )
    evolution_threshold: float = Field(
        0.1, ge=0, le=1000, description="Theta_q at first, of the gates 'aleatoric' and 'entropy'."
    )
    evolution_momentum: float = Field(0.01, ge=0, le=1, description="gamma: how fast Theta_q follows what passed.")
    evolution_quantile: float = Field(
        0.3, ge=0, le=1, description="The gate 'quantile' lets through AU below this quantile of known samples."
    )
    evolution_count: Literal["passed", "confirmed"] = Field(
        "passed", description="What n counts: samples that passed the gate (Algorithm 1) or all known ones (main text)."
    )
    evolution_prior: int = Field(
        _DEFAULTS["evolution_prior"],
        ge=0,
        le=1_000_000,
        description="Samples the initial prototypes are worth: 0 (literal: the first replaces), 1 (DPE: the first "
        "weighs one half).",
    )
    evolution_norm: Literal["unit", "raw"] = Field(
        "unit", description="Renormalise the text prototypes after each evolution, or keep the mean as it is (DPE)."
    )

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.cache_quantile > self.trust_quantile:
            raise ValueError(
                f"cache_quantile {self.cache_quantile} is above trust_quantile {self.trust_quantile}: what is cached "
                "must also be trusted; lower the first or raise the second"
            )
        if self.alignment_keys == "all" and self.alignment_direction == "text-to-visual":
            raise ValueError(
                "alignment_keys='all' needs alignment_direction='visual-to-text': classes without a queue have no "
                "visual prototype to be matched with"
            )
        if self.cache_admission == "gated" and (self.evolution_gate == "off" or not self.text_prototypes):
            raise ValueError(
                "cache_admission='gated' needs the quality gate: choose another evolution_gate than 'off', and leave "
                "text_prototypes on"
            )
        return self

    def until_refit(self, learned: int) -> int:
        """How many samples after the first `learned` ones come until the mixture is fitted, that sample included."""
        if learned < self.mixture_start:
            return self.mixture_start - learned
        return self.mixture_period - (learned - self.mixture_start) % self.mixture_period

    @model_validator(mode="before")
    @classmethod
    def _with_preset(cls, options: Any) -> Any:
        return resolved(options) if isinstance(options, Mapping) else options

    def replace(self, **options: Any) -> Self:
        """Return a copy with some options replaced, validated again. `preset` replaces what that preset sets."""
        return super().replace(**resolved(options))

    @classmethod
    def preset(cls, name: Preset = DEFAULT_PRESET, **options: Any) -> Self:
        """Return the settings of a preset with some options replaced.

        `working` is the paper with the quality gate of DPE, which can open. `paper` follows the paper to the letter.
        """
        return cls(**resolved({"preset": name, **options}))


def resolved(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options with the settings of their `preset` in its place."""
    if "preset" not in options:
        return dict(options)
    given = dict(options)
    name = given.pop("preset")
    if not isinstance(name, str) or name not in PRESETS:
        raise ConfigError(f"there is no preset {name!r}: choose one of {', '.join(PRESETS)}")
    return {**PRESETS[name], **given}

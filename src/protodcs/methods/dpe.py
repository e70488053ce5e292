"""DPE, dual prototype evolving: every sample shifts text and visual prototypes for itself, confident ones for good.

A sample enters a small queue of its class, takes one AdamW step on two zero residuals (prediction entropy plus an
alignment of text with visual prototypes), and is decided by the shifted prototypes. If that prediction is sure, the
text prototypes take the shift into a cumulative mean. DPE has no notion of the unknown and must be given none here:
whatever comes is learned from, which is how it was published.
"""

import math
from collections.abc import Mapping
from typing import Any, ClassVar, Literal, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from ..arrays import Feature, Floats
from ..core import state
from ..core.base import Capabilities, FeatureMethod
from ..core.decision import Decision
from ..core.numerics.evidence import uncertainty
from ..core.numerics.linalg import cosines as row_cosines
from ..core.numerics.linalg import inverse_norms, normalised, products, wide
from ..core.numerics.softmax import entropy_gradient, softmax, softmax_rows
from ..core.protodcs.alignment import contrast
from ..core.protodcs.evolution import move
from ..core.protodcs.residual import adam_step, project, queue_means, text_gradient
from ..core.settings import Settings
from ..core.state_checks import Counters, check_means, check_unit, counter, decided, required
from ..errors import StateError

_COUNTERS = ("sequence", "learned", "known", "cached", "evolved")
_SUMS = ("unknown", "skipped")
# What a fork shares until one of the two writes.
_LEARNED = (
    "text", "inverse_norms", "cache", "quality", "counts", "visual", "lengths", "text_alignment", "visual_sum",
)  # fmt: skip


class DPEConfig(Settings):
    """The settings of DPE; the defaults are those of ImageNet."""

    temperature: float = Field(0.01, ge=0.001, le=100, description="tau: temperature of the text logits.")
    cache_size: int = Field(3, ge=1, le=64, description="M: features kept per class, those of lowest entropy.")
    affinity_weight: float = Field(6.0, ge=0, le=1000, description="alpha: weight of the visual affinity, in logits.")
    affinity_sharpness: float = Field(5.0, ge=0, le=1000, description="beta: how fast affinity falls with distance.")
    alignment_weight: float = Field(0.5, ge=0, le=100, description="lambda: weight of the InfoNCE term; 0 ablates it.")
    alignment_temperature: float = Field(0.01, ge=0.005, le=10, description="Temperature of InfoNCE.")
    text_rate: float = Field(6e-4, ge=0, le=1, description="lr of the text residual in AdamW.")
    visual_rate: float = Field(6e-4, ge=0, le=1, description="lr of the visual residual in AdamW.")
    step_epsilon: float = Field(1e-3, ge=1e-12, le=1, description="AdamW eps: 1e-3 makes the step a scaled gradient.")
    evolution_threshold: float = Field(
        0.1, ge=0, le=2, description="tau_t: text prototypes evolve below this normalised entropy; 0 ablates it."
    )
    entropy_base: Literal["log2", "natural"] = Field(
        "log2",
        description="Normalised entropy is nats over the log of K: to base 2 as in the published figures, where it "
        "ends at 0.69, or natural, where it ends at 1.",
    )
    score: Literal["logit", "softmax", "max"] = Field(
        "logit", description="The familiarity after the step: largest logit, its probability, or largest text cosine."
    )
    threshold: float | None = Field(
        None, description="A sample is known if its score is at least this. None: every sample counts as known."
    )


class Memory:
    """Text prototypes that evolve, queues of features, and what follows from the two.

    Attributes:
        initial, text, inverse_norms: (K, d), (K, d) float32 and (K,): the given prototypes, the evolved ones, 1 / norm.
        cache, quality, counts: (K, size, d) float32, (K, size), (K,): the queues with the entropy of each feature.
        visual, lengths: (K, d) float32 and (K,): direction and length of the mean of each queue.
        text_alignment, visual_sum: (K, d) float32 and (K, d): the gradient of the alignment, see
            `core.protodcs.alignment`; valid unless `stale`.
    """

    def __init__(self, initial: Feature, config: DPEConfig):
        classes, width = initial.shape
        self.config = config
        self.initial = initial
        self.text = initial.copy()
        self.inverse_norms = inverse_norms(initial)
        self.cache = np.zeros((classes, config.cache_size, width), dtype=np.float32)
        self.quality = np.zeros((classes, config.cache_size))
        self.counts = np.zeros(classes, dtype=np.int64)
        self.opened = np.zeros(0, dtype=np.int64)
        self.visual = np.zeros((classes, width), dtype=np.float32)
        self.lengths = np.ones(classes)
        self.text_alignment = np.zeros((classes, width), dtype=np.float32)
        self.visual_sum = np.zeros((classes, width))
        self.sequence = 0
        self.learned = 0
        self.known = 0
        self.cached = 0
        self.evolved = 0
        self.stale = False
        self._shared = False

    def fork(self) -> Self:
        """A copy to advance; arrays are shared until the copy writes."""
        self.refresh()  # Otherwise every fork of a frozen engine computes the alignment again.
        copy = object.__new__(type(self))
        copy.__dict__.update(self.__dict__)
        copy._shared = True
        return copy

    def _own(self) -> None:
        if self._shared:
            for name in _LEARNED:
                setattr(self, name, getattr(self, name).copy())
            self._shared = False

    def offer(self, k: int, feature: Feature, entropy: float) -> bool:
        """Keep the feature in queue k if it has space or a less certain one; return whether it was stored."""
        count = int(self.counts[k])
        slot = count
        if count == self.config.cache_size:
            slot = int(self.quality[k].argmax())
            if entropy >= self.quality[k, slot]:
                return False
        self._own()
        self.cache[k, slot], self.quality[k, slot] = feature, entropy
        self.counts[k] = max(count, slot + 1)
        if not count:
            self.opened = np.flatnonzero(self.counts)
        self._find_visual(np.array([k]))
        self.cached += 1
        self.stale = True
        return True

    def take(self, feature: Feature, cosines: Floats, slopes: Floats) -> None:
        """Take the text step of this sample into the cumulative mean; the first one has the weight of the start."""
        self._own()
        self.evolved += 1
        moved = self.moved_text(feature, cosines, slopes)
        self.text = move(self.text, moved, 1.0 / (self.evolved + 1)).astype(np.float32)
        self.inverse_norms = inverse_norms(self.text)
        self.stale = True

    def moved_text(self, feature: Feature, cosines: Floats, slopes: Floats) -> Feature:
        """Return the text prototypes (K, d) after the step of a sample with these `cosines` (K,)."""
        gradient = text_gradient(self.text, self.inverse_norms, cosines, slopes, feature, self.text_alignment)
        return adam_step(self.text, gradient, self.config.text_rate, self.config.step_epsilon)

    def moved_visual(self, feature: Feature, slopes: Floats) -> NDArray[np.float64]:
        """Return the visual prototypes (M, d) of the open classes after it, for `slopes` (M,) by their cosines."""
        rows, config = self.opened, self.config
        visual, lengths = wide(self.visual[rows]), self.lengths[rows]
        gradient = self.alignment_scale * self.visual_sum[rows] + slopes[:, None] * feature
        by_mean = project(gradient, visual, 1.0 / lengths)
        moved = adam_step(lengths[:, None] * visual, by_mean, config.visual_rate, config.step_epsilon)
        return normalised(moved)

    @property
    def alignment_scale(self) -> float:
        """What the sums of the alignment must be multiplied by: lambda over queries and temperature."""
        return self.config.alignment_weight / (max(len(self.opened), 1) * self.config.alignment_temperature)

    def refresh(self) -> None:
        """Bring the gradient of the alignment up to date: visual prototypes ask, texts of the open classes answer."""
        if self.stale and self.config.alignment_weight > 0.0:
            self._realign()
        # Only now: an interrupted refresh is done again.
        self.stale = False

    def _realign(self) -> None:
        self._own()
        opened = self.opened
        text = normalised(self.text[opened])
        visual, _ = queue_means(self.cache[opened], self.counts[opened])
        visual_sum, text_sum = contrast(visual, text, np.arange(len(opened)), self.config.alignment_temperature)
        self.visual_sum[opened] = visual_sum
        self.text_alignment[opened] = self.alignment_scale * project(text_sum, text, self.inverse_norms[opened])

    def _find_visual(self, rows: NDArray[np.int64]) -> None:
        self.visual[rows], self.lengths[rows] = queue_means(self.cache[rows], self.counts[rows])

    def with_classes(self, rows: NDArray[np.int64], added: Feature) -> "Memory":
        """A memory that keeps the classes `rows`, followed by the new prototypes `added`."""
        copy = Memory(np.concatenate([self.initial[rows], added]), self.config)
        for name in ("text", "cache", "quality", "counts"):
            getattr(copy, name)[: len(rows)] = getattr(self, name)[rows]
        for name in _COUNTERS:
            setattr(copy, name, getattr(self, name))
        copy.derive()
        return copy

    def derive(self) -> None:
        """Compute what follows from text prototypes and queues."""
        self.inverse_norms = inverse_norms(self.text)
        self.opened = np.flatnonzero(self.counts)
        self._find_visual(self.opened)
        self.stale = True

    def export(self) -> tuple[Counters, state.Arrays]:
        """What the rest can be computed from."""
        filled = np.arange(self.config.cache_size) < self.counts[:, None]
        arrays: state.Arrays = {
            "initial_prototypes": self.initial,
            "counts": self.counts,
            "cache": self.cache[filled],
            "quality": self.quality[filled],
        }
        if self.evolved:
            arrays["text"] = self.text
        counters: Counters = {name: getattr(self, name) for name in _COUNTERS}
        # Sums that a broken state would contradict.
        counters |= {"unknown": self.learned - self.known, "skipped": self.sequence - self.learned}
        return counters, arrays


class Prediction(NamedTuple):
    """Logits (K,) of a sample, their softmax, its entropy in nats, and the affinity (M,) of each open class in it."""

    logits: Floats
    probabilities: Floats
    entropy: float
    affinity: Floats


class DPE(FeatureMethod):
    """Dual prototype evolving, one view per sample.

    DPE says nothing of unknown samples: `known` follows from `threshold` on `score` alone. `scores`
    are the final logits, `trusted` is always true because every sample shapes its own prototypes, and the uncertainties
    are those of the cosines before the step.
    """

    name: ClassVar[str] = "dpe"
    capabilities: ClassVar[Capabilities] = Capabilities(
        batch_invariant=True, rotation_invariant=False, editable_classes=True, cost="prototypes"
    )
    config_type = DPEConfig
    score_names: ClassVar[Mapping[str, str]] = {"logit": "max logit", "softmax": "softmax", "max": "max cosine"}
    config: DPEConfig
    _memory: Memory

    def _resize(self, classes: tuple[str, ...], width: int) -> None:
        super()._resize(classes, width)
        base = math.log2 if self.config.entropy_base == "log2" else math.log
        # A single class has no entropy to normalise.
        self._largest_entropy = base(len(classes)) if len(classes) > 1 else 1.0

    def _advance(self, memory: Memory, feature: Feature, scores: bool) -> Decision:
        cosines = products(memory.text, feature) * memory.inverse_norms
        first = int(cosines.argmax())
        aleatoric, epistemic = uncertainty(cosines)
        cached = memory.offer(first, feature, self._text_entropy(cosines))
        memory.refresh()
        before = self._prediction(memory, cosines, products(memory.visual[memory.opened], feature))
        moved, final, slopes = self._step(memory, feature, cosines, before)
        evolved = final.entropy / self._largest_entropy < self.config.evolution_threshold
        if evolved:
            memory.take(feature, cosines, slopes)
        score = self._score(moved, final)
        known = self.config.threshold is None or score >= self.config.threshold
        sequence = memory.sequence
        memory.sequence += 1
        memory.learned += 1
        memory.known += known
        index = int(final.logits.argmax())
        return Decision(
            known=known,
            index=index,
            label=self.classes[index] if known else None,
            p_unknown=0.0 if known else 1.0,
            openness=1.0 - float(moved.max()),
            openness_first=1.0 - float(cosines[first]),
            score=score,
            scores=final.logits.astype(np.float32) if scores else None,
            aleatoric=aleatoric,
            epistemic=epistemic,
            trusted=True,
            cached=cached,
            evolved=evolved,
            sequence=sequence,
        )

    def _text_entropy(self, cosines: Floats) -> float:
        return softmax(cosines / self.config.temperature)[1]

    def _prediction(self, memory: Memory, cosines: Floats, visual_cosines: Floats) -> Prediction:
        config = self.config
        logits = cosines / config.temperature
        affinity = config.affinity_weight * np.exp(-config.affinity_sharpness * (1.0 - visual_cosines))
        logits[memory.opened] += affinity
        return Prediction(logits, *softmax(logits), affinity)

    def _step(
        self, memory: Memory, feature: Feature, cosines: Floats, before: Prediction
    ) -> tuple[Floats, Prediction, Floats]:
        """The text cosines and the prediction after one AdamW step, and the slopes of the loss by text cosine."""
        config = self.config
        by_logit = entropy_gradient(before.probabilities, before.entropy)
        by_text = by_logit / config.temperature
        by_visual = by_logit[memory.opened] * config.affinity_sharpness * before.affinity
        moved = row_cosines(memory.moved_text(feature, cosines, by_text), feature)
        final = self._prediction(memory, moved, products(memory.moved_visual(feature, by_visual), feature))
        return moved, final, by_text

    def _score(self, moved: Floats, final: Prediction) -> float:
        if self.config.score == "max":
            return float(moved.max())
        return float((final.logits if self.config.score == "logit" else final.probabilities).max())

    def probabilities(self, scores: NDArray[np.floating]) -> NDArray[np.float64]:
        """(N, K) class probabilities for the `scores` of decisions, which are logits."""
        return softmax_rows(np.asarray(scores, dtype=np.float64))

    def _with_classes(self, memory: Memory, kept: NDArray[np.int64], added: Feature) -> Memory:
        return memory.with_classes(kept, added)

    def _new_memory(self, initial: Feature) -> Memory:
        return Memory(initial, self.config)

    def _restored_memory(self, counters: Counters, arrays: state.Arrays) -> Memory:
        checked = _proven(self.config, counters, arrays)
        try:
            memory = Memory(checked["initial_prototypes"], self.config)
        except MemoryError:
            raise StateError("the state asks for queues larger than this machine's memory") from None
        if "text" in checked:
            memory.text[:] = checked["text"]
        memory.counts[:] = checked["counts"]
        filled = np.arange(self.config.cache_size) < memory.counts[:, None]
        memory.cache[filled] = checked["cache"]
        memory.quality[filled] = checked["quality"]
        for name in _COUNTERS:
            setattr(memory, name, counters[name])
        memory.derive()
        return memory

    def _initial_prototypes(self, memory: Memory) -> Feature:
        return memory.initial

    def stats(self) -> dict[str, Any]:
        """Numbers for monitoring, JSON-ready."""
        memory = self._memory
        drift = 1.0 - np.einsum("kd,kd->k", memory.initial, memory.text) * memory.inverse_norms
        return {
            **super().stats(),
            "known": memory.known,
            "unknown": memory.learned - memory.known,
            "cached": memory.cached,
            "evolved": memory.evolved,
            "open_classes": len(memory.opened),
            "cached_features": int(memory.counts.sum()),
            "text_drift_mean": float(drift.mean()),
            "text_drift_max": float(drift.max()),
        }


def _proven(config: DPEConfig, counters: Counters, arrays: state.Arrays) -> state.Arrays:
    """The arrays of a state, each proven to be one that `export` could have written."""
    if set(counters) != {*_COUNTERS, *_SUMS}:
        raise StateError(
            f"the state's counters are {sorted(counters)[:20]}, they must be {sorted((*_COUNTERS, *_SUMS))}"
        )
    _, learned, _ = decided(counters)
    for name in ("cached", "evolved"):
        counter(counters, name, high=learned)
    evolved, cached = counter(counters, "evolved"), counter(counters, "cached")
    expected = {"initial_prototypes", "counts", "cache", "quality"} | ({"text"} if evolved else set())
    if set(arrays) != expected:
        raise StateError(f"the state's arrays are {sorted(arrays)[:20]}, they must be {sorted(expected)}")
    initial = required(arrays, "initial_prototypes", np.float32, (None, None))
    classes, width = initial.shape
    counts = required(arrays, "counts", np.int64, (classes,))
    if not ((counts >= 0) & (counts <= config.cache_size)).all() or int(counts.sum()) > cached:
        raise StateError(f"the state's queues must hold 0 to {config.cache_size} features each that once entered them")
    total = int(counts.sum())
    check_unit(initial, "initial_prototypes")
    check_unit(required(arrays, "cache", np.float32, (total, width)), "cache")
    if evolved:
        check_means(required(arrays, "text", np.float32, (classes, width)), "text", evolved)
    quality = required(arrays, "quality", np.float64, (total,))
    if not ((quality >= 0.0) & (quality < 1e3)).all():
        raise StateError("the state's entropies must be no less than 0 nats and finite")
    return arrays

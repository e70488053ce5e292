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

from ..arrays import Floats
from ..core import evidence, state
from ..core.base import Capabilities, Counters, Feature, FeatureMethod, counter, decided, required, softmax_rows
from ..core.decision import Decision
from ..core.protodcs import alignment
from ..core.protodcs.cache import place, queue_mean
from ..core.protodcs.evolution import evolve
from ..core.protodcs.residual import rescore, step_visual
from ..core.settings import Settings
from ..core.vectors import inverse_norms, invert_norms, similarities
from ..errors import StateError

_COUNTERS = ("sequence", "learned", "known", "cached", "evolved")
_SUMS = ("unknown", "skipped")
# What a fork shares until one of the two writes.
_LEARNED = (
    "text", "inverse_norms", "cache", "quality", "counts", "visual", "lengths", "pull", "pull_rest", "visual_sum",
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
        entry, text, inverse_norms: (K, d), (K, d) float32 and (K,): the given prototypes, the evolved ones, 1 / norm.
        cache, quality, counts: (K, size, d) float32, (K, size), (K,): the queues with the entropy of each feature.
        visual, lengths: (K, d) float32 and (K,): direction and length of the mean of each queue.
        pull, pull_rest, visual_sum: the gradient of the alignment, see `core.alignment`; valid unless `stale`.
    """

    def __init__(self, entry: Feature, config: DPEConfig):
        classes, width = entry.shape
        self.config = config
        self.entry = entry
        self.text = entry.copy()
        self.inverse_norms = inverse_norms(entry)
        self.cache = np.zeros((classes, config.cache_size, width), dtype=np.float32)
        self.quality = np.zeros((classes, config.cache_size))
        self.counts = np.zeros(classes, dtype=np.int64)
        self.opened = np.zeros(0, dtype=np.int64)
        self.visual = np.zeros((classes, width), dtype=np.float32)
        self.lengths = np.ones(classes)
        self.pull = np.zeros((classes, width), dtype=np.float32)
        self.pull_rest = np.zeros((classes, width), dtype=np.float32)
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
        self.refresh()  # Or every fork of a frozen engine would compute the alignment anew.
        twin = object.__new__(type(self))
        twin.__dict__.update(self.__dict__)
        twin._shared = True
        return twin

    def _own(self) -> None:
        if self._shared:
            for name in _LEARNED:
                setattr(self, name, getattr(self, name).copy())
            self._shared = False

    def offer(self, k: int, feature: Feature, entropy: float) -> bool:
        """Keep the feature in queue k if there is room or a less certain one to replace; True if it was kept."""
        count = int(self.counts[k])
        slot = count
        if count == self.config.cache_size:
            slot = int(self.quality[k].argmax())
            if entropy >= self.quality[k, slot]:
                return False
        self._own()
        opens = place(
            k, slot, feature, entropy, self.cache, self.quality, self.counts, self.visual, self.lengths,
            *np.empty((2, len(feature))),
        )  # fmt: skip
        if opens:
            self.opened = np.flatnonzero(self.counts)
        self.cached += 1
        self.stale = True
        return True

    def take(self, feature: Feature, cosines: Floats, slopes: Floats) -> None:
        """Take the text step of this sample into the cumulative mean; the first one has the weight of the start."""
        self._own()
        self.evolved += 1
        evolve(
            self.text, self.inverse_norms, self.pull, self.pull_scale, feature, cosines, slopes,
            self.config.text_rate, self.config.step_epsilon, 1.0 / (self.evolved + 1), False,
        )  # fmt: skip
        invert_norms(self.text, self.inverse_norms)
        self.stale = True

    @property
    def pull_scale(self) -> float:
        """What `pull` and `visual_sum` must be multiplied by: lambda over queries and temperature."""
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
        text = self.text[opened] * self.inverse_norms[opened, None]
        visual = np.empty_like(text)
        for row, k in enumerate(opened):
            queue_mean(self.cache[k], self.counts[k], visual[row])
        every, text_sum, visual_sum = np.arange(len(opened)), np.empty_like(text), np.empty_like(text)
        # By matrix products, ten times as fast at a thousand classes as the fixed-order kernel that ProtoDCS needs
        # once in a thousand updates, and DPE after nearly every sample.
        alignment.contrast_twin(
            visual, text, every, every, self.config.alignment_temperature, visual_sum, text_sum,
            *np.empty((2, len(opened))),
        )  # fmt: skip
        self.visual_sum[opened] = visual_sum
        gathered = np.zeros(self.text.shape)
        gathered[opened] = text_sum
        alignment.project(opened, gathered, self.text, self.inverse_norms, self.pull, self.pull_rest)

    def with_classes(self, rows: NDArray[np.int64], added: Feature) -> "Memory":
        """A memory that keeps the classes `rows`, followed by the new prototypes `added`."""
        twin = Memory(np.concatenate([self.entry[rows], added]), self.config)
        for name in ("text", "cache", "quality", "counts"):
            getattr(twin, name)[: len(rows)] = getattr(self, name)[rows]
        for name in _COUNTERS:
            setattr(twin, name, getattr(self, name))
        twin.derive()
        return twin

    def derive(self) -> None:
        """Compute what follows from text prototypes and queues."""
        invert_norms(self.text, self.inverse_norms)
        self.opened = np.flatnonzero(self.counts)
        direction = np.empty(self.text.shape[1])
        for k in self.opened:
            self.lengths[k] = queue_mean(self.cache[k], self.counts[k], direction)
            self.visual[k] = direction
        self.stale = True

    def export(self) -> tuple[Counters, state.Arrays]:
        """What the rest can be computed from."""
        filled = np.arange(self.config.cache_size) < self.counts[:, None]
        arrays: state.Arrays = {
            "entry": self.entry,
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

    def entropy_slopes(self) -> Floats:
        """The derivative of the entropy by each logit."""
        logs = np.log(np.maximum(self.probabilities, 1e-300))
        slopes: Floats = -self.probabilities * (logs + self.entropy)
        return slopes


class DPE(FeatureMethod):
    """Dual prototype evolving, one view per sample.

    DPE says nothing of unknown samples: as with zero-shot, `known` follows from `threshold` on `score` alone. `scores`
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
        self._adapted = np.zeros((len(classes), width), dtype=np.float32)
        self._ones = np.ones(len(classes))
        base = math.log2 if self.config.entropy_base == "log2" else math.log
        # A single class has no entropy to normalise.
        self._largest_entropy = base(len(classes)) if len(classes) > 1 else 1.0

    def _advance(self, memory: Memory, feature: Feature, scores: bool) -> Decision:
        cosines = np.empty(len(self.classes))
        first = similarities(memory.text, memory.inverse_norms, feature, cosines)
        aleatoric, epistemic = evidence.uncertainty(cosines, np.empty_like(cosines))
        cached = memory.offer(first, feature, self._text_entropy(cosines))
        memory.refresh()
        visual_cosines = self._visual_cosines(memory.visual, feature)
        before = self._predict(memory, cosines, visual_cosines)
        moved, final, slopes = self._step(memory, feature, cosines, visual_cosines, before)
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
        return _softmax_entropy(cosines / self.config.temperature)[1]

    def _visual_cosines(self, visual: Feature, feature: Feature) -> Floats:
        cosines = np.empty(len(self.classes))
        similarities(visual, self._ones, feature, cosines)
        return cosines

    def _predict(self, memory: Memory, cosines: Floats, visual_cosines: Floats) -> Prediction:
        config = self.config
        logits = cosines / config.temperature
        distance = 1.0 - visual_cosines[memory.opened]
        affinity = config.affinity_weight * np.exp(-config.affinity_sharpness * distance)
        logits[memory.opened] += affinity
        return Prediction(logits, *_softmax_entropy(logits), affinity)

    def _step(
        self, memory: Memory, feature: Feature, cosines: Floats, visual_cosines: Floats, before: Prediction
    ) -> tuple[Floats, Prediction, Floats]:
        """The text cosines and the prediction after one AdamW step, and the slopes of the loss by text cosine."""
        config = self.config
        by_logit = before.entropy_slopes()
        by_text = by_logit / config.temperature
        by_visual = np.zeros(len(cosines))
        by_visual[memory.opened] = by_logit[memory.opened] * config.affinity_sharpness * before.affinity
        moved = np.empty(len(cosines))
        rescore(
            np.arange(len(cosines)), memory.text, memory.inverse_norms, memory.pull, memory.pull_scale, feature,
            cosines, by_text, config.text_rate, config.step_epsilon, moved,
        )  # fmt: skip
        step_visual(
            memory.opened, memory.visual, memory.lengths, memory.visual_sum, feature, visual_cosines, by_visual,
            memory.pull_scale, config.visual_rate, config.step_epsilon, self._adapted,
        )  # fmt: skip
        final = self._predict(memory, moved, self._visual_cosines(self._adapted, feature))
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

    def _new_memory(self, entry: Feature) -> Memory:
        return Memory(entry, self.config)

    def _restored_memory(self, counters: Counters, arrays: state.Arrays) -> Memory:
        checked = _proven(self.config, counters, arrays)
        try:
            memory = Memory(checked["entry"], self.config)
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

    def _entry(self, memory: Memory) -> Feature:
        return memory.entry

    def stats(self) -> dict[str, Any]:
        """Numbers for monitoring, JSON-ready."""
        memory = self._memory
        drift = 1.0 - np.einsum("kd,kd->k", memory.entry, memory.text) * memory.inverse_norms
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


def _softmax_entropy(logits: Floats) -> tuple[Floats, float]:
    """Softmax of logits (K,), and its entropy in nats."""
    shifted = logits - logits.max()
    weights = np.exp(shifted)
    total = float(weights.sum())
    weights /= total
    return weights, max(0.0, math.log(total) - float((weights * shifted).sum()))


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
    expected = {"entry", "counts", "cache", "quality"} | ({"text"} if evolved else set())
    if set(arrays) != expected:
        raise StateError(f"the state's arrays are {sorted(arrays)[:20]}, they must be {sorted(expected)}")
    entry = required(arrays, "entry", np.float32, (None, None))
    classes, width = entry.shape
    counts = required(arrays, "counts", np.int64, (classes,))
    if not ((counts >= 0) & (counts <= config.cache_size)).all() or int(counts.sum()) > cached:
        raise StateError(f"the state's queues must hold 0 to {config.cache_size} features each that once entered them")
    total = int(counts.sum())
    _check_lengths(entry, "entry", 1.0 - 1e-5)
    _check_lengths(required(arrays, "cache", np.float32, (total, width)), "cache", 1.0 - 1e-5)
    if evolved:
        # A mean of unit vectors is no longer than they are, and one of zero length would have no direction.
        _check_lengths(required(arrays, "text", np.float32, (classes, width)), "text", 1e-12)
    quality = required(arrays, "quality", np.float64, (total,))
    if not ((quality >= 0.0) & (quality < 1e3)).all():
        raise StateError("the state's entropies must be no less than 0 nats and finite")
    return arrays


def _check_lengths(rows: Feature, name: str, least: float) -> None:
    squares = np.einsum("kd,kd->k", rows, rows)
    if not ((squares > least) & (squares < 1.0 + 1e-5)).all():
        raise StateError(f"the state's array {name!r} has rows that are not of the length they must have")

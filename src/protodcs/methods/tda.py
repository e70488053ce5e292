"""TDA, the training-free dynamic adapter: two small caches of past features correct the zero-shot logits.

A positive cache keeps the surest samples of each class, a negative cache some unsure ones with the classes they might
be; `logits = f P / tau + A_pos - A_neg`, where an affinity is `alpha exp(-beta (1 - f . key))` for each class of the
key. TDA has no open-set rule and none is made up here: every sample is known unless a threshold on the
score is given. The prototypes are never written to.
"""

import math
from collections.abc import Mapping
from typing import Any, ClassVar, Literal, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from ..arrays import Feature, Floats, Integers
from ..core import state
from ..core.base import Capabilities, FeatureMethod
from ..core.decision import Decision, decision_from_cosines
from ..core.numerics.softmax import softmax
from ..core.settings import Settings
from ..core.state_checks import Counters, check_unit, counter, required
from ..core.vectors import cosines as compute_cosines
from ..core.vectors import inverse_norms
from ..errors import StateError
from .familiarity import PROBABLE, Score, familiarity


class TDAConfig(Settings):
    """The settings of TDA; the defaults are the published ones for ImageNet."""

    positive_size: int = Field(3, ge=0, le=64, description="Features per class in the positive cache; 0: none.")
    positive_weight: float = Field(2.0, ge=0, le=1000, description="alpha of the positive cache, in logits.")
    positive_sharpness: float = Field(5.0, ge=0, le=1000, description="beta of the positive cache.")
    negative_size: int = Field(2, ge=0, le=64, description="Features per class in the negative cache; 0: none.")
    negative_weight: float = Field(0.117, ge=0, le=1000, description="alpha of the negative cache, in logits.")
    negative_sharpness: float = Field(1.0, ge=0, le=1000, description="beta of the negative cache.")
    entropy_low: float = Field(
        0.2, ge=0, le=2, description="tau_l: a sample enters the negative cache above this normalised entropy."
    )
    entropy_high: float = Field(0.5, ge=0, le=2, description="tau_h: and below this.")
    entropy_base: Literal["natural", "published"] = Field(
        "natural",
        description="Normalised entropy is nats / ln K, at most 1; the published code divides nats by log2 K, at most "
        "0.693, which moves both bounds.",
    )
    mask_low: float = Field(
        0.03, ge=0.01, lt=1, description="p_l: a negative key stands for the classes more probable than this."
    )
    mask_high: float = Field(1.0, gt=0, le=1, description="p_u: and less probable than this.")
    score: Score = Field(
        "softmax",
        description="The familiarity that is reported, of the final logits: the largest times the temperature, its "
        "softmax probability, that at temperature 1, or the free energy.",
    )
    temperature: float = Field(0.01, gt=0, le=100, description="tau, softmax temperature of the cosines.")
    threshold: float | None = Field(
        None, description="A sample is known if its score is at least this. None: every sample counts as known."
    )

    @model_validator(mode="after")
    def _bounds_in_order(self) -> Self:
        if self.entropy_low >= self.entropy_high or self.mask_low >= self.mask_high:
            raise ValueError("entropy_low must lie below entropy_high, and mask_low below mask_high")
        return self


def add_affinities(
    features: NDArray[np.float32], counts: Integers, masks: Integers, lengths: Integers, feature: Feature,
    sharpness: float, weight: float, logits: Floats,
) -> None:  # fmt: skip
    """Add to `logits` (K,) the affinity of each cached key, for each class that the key stands for."""
    filled = np.arange(features.shape[1]) < counts[:, None]
    keys, classes, sizes = features[filled], masks[filled], lengths[filled]
    affinities = weight * np.exp(-sharpness * (1.0 - (keys @ feature).astype(np.float64)))
    np.add.at(logits, classes[np.arange(masks.shape[2]) < sizes[:, None]], np.repeat(affinities, sizes))


class Queues:
    """One cache: for each class up to `size` features of low entropy, each with the classes it stands for.

    Attributes:
        features, entropies, counts: (K, size, d) float32, (K, size) float64, (K,) int64.
        masks, lengths: (K, size, most) and (K, size) int64: the classes of each feature, ascending.
        changes: how often a feature was placed.
    """

    _ARRAYS = ("features", "entropies", "counts", "masks", "lengths")

    def __init__(self, classes: int, size: int, width: int, most: int):
        self.features = np.zeros((classes, size, width), dtype=np.float32)
        self.entropies = np.zeros((classes, size))
        self.counts = np.zeros(classes, dtype=np.int64)
        self.masks = np.zeros((classes, size, most), dtype=np.int64)
        self.lengths = np.zeros((classes, size), dtype=np.int64)
        self.changes = 0
        self._shared = False

    def fork(self) -> Self:
        """A copy that shares its arrays until it writes."""
        copy = object.__new__(type(self))
        copy.__dict__.update(self.__dict__)
        copy._shared = True
        return copy

    def offer(self, k: int, feature: Feature, entropy: float, mask: Integers) -> bool:
        """Place a feature in the queue of class k if it has space or a less certain one; True if so."""
        slot, size = int(self.counts[k]), self.features.shape[1]
        if slot == size:
            slot = int(self.entropies[k].argmax()) if size else 0
            if not size or entropy >= self.entropies[k, slot]:
                return False
        if self._shared:
            for name in self._ARRAYS:
                setattr(self, name, getattr(self, name).copy())
            self._shared = False
        self.counts[k] = max(int(self.counts[k]), slot + 1)
        self.features[k, slot], self.entropies[k, slot] = feature, entropy
        self.lengths[k, slot] = len(mask)
        self.masks[k, slot, : len(mask)] = mask
        self.changes += 1
        return True

    def affect(self, feature: Feature, sharpness: float, weight: float, logits: Floats) -> None:
        """Add the affinities of all keys to the logits."""
        add_affinities(
            self.features, self.counts, self.masks, self.lengths, feature, sharpness, weight, logits
        )  # fmt: skip

    def with_classes(self, kept: Integers, added: int) -> "Queues":
        """The queues of the classes `kept`, and empty ones; keys no longer stand for a class that went."""
        size, width, most = self.features.shape[1], self.features.shape[2], self.masks.shape[2]
        copy = Queues(len(kept) + added, size, width, most)
        for name in self._ARRAYS:
            getattr(copy, name)[: len(kept)] = getattr(self, name)[kept]
        place = np.full(len(self.counts), -1)
        place[kept] = np.arange(len(kept))
        moved = place[copy.masks]
        stays = (np.arange(most) < copy.lengths[..., None]) & (moved >= 0)
        copy.masks = np.take_along_axis(moved, np.argsort(~stays, axis=2, kind="stable"), axis=2)
        copy.lengths = stays.sum(axis=2)
        copy.changes = self.changes
        return copy

    def export(self, name: str) -> state.Arrays:
        """What the queues hold, without empty places."""
        filled = np.arange(self.features.shape[1]) < self.counts[:, None]
        lengths = self.lengths[filled]
        return {
            name: self.features[filled],
            f"{name}_counts": self.counts,
            f"{name}_entropies": self.entropies[filled],
            f"{name}_lengths": lengths,
            f"{name}_masks": self.masks[filled][np.arange(self.masks.shape[2]) < lengths[:, None]],
        }

    def restore(self, arrays: state.Arrays, name: str, changes: int) -> None:
        """Fill new queues with what was exported, checking all of it first."""
        classes, size, width = self.features.shape
        counts = required(arrays, f"{name}_counts", np.int64, (classes,))
        if not ((counts >= 0) & (counts <= size)).all() or counts.sum() > changes:
            raise StateError(f"the state's {name} queues must hold 0 to {size} features each, and only what entered")
        total = int(counts.sum())
        features = required(arrays, name, np.float32, (total, width))
        entropies = required(arrays, f"{name}_entropies", np.float64, (total,))
        lengths = required(arrays, f"{name}_lengths", np.int64, (total,))
        if not ((lengths >= 0) & (lengths <= self.masks.shape[2])).all():
            raise StateError(f"the state's {name} keys must stand for 0 to {self.masks.shape[2]} classes each")
        masks = required(arrays, f"{name}_masks", np.int64, (int(lengths.sum()),))
        key = np.repeat(np.arange(total), lengths)
        # Within a key the classes ascend; key * K + class then ascends over the whole array.
        if not ((masks >= 0) & (masks < classes)).all() or not (np.diff(key * classes + masks) > 0).all():
            raise StateError(f"the state's {name} keys stand for classes that are not there, or not in order")
        check_unit(features, name)
        filled = np.arange(size) < counts[:, None]
        self.counts[:] = counts
        self.features[filled], self.entropies[filled], self.lengths[filled] = features, entropies, lengths
        self.masks[filled[..., None] & (np.arange(self.masks.shape[2]) < self.lengths[..., None])] = masks
        self.changes = changes


class Memory:
    """The prototypes, the two caches, and how many samples went by."""

    def __init__(self, initial: Feature, config: TDAConfig):
        classes, width = initial.shape
        self.initial = initial
        self.inverse_norms = inverse_norms(initial)
        self.positive = Queues(classes, config.positive_size, width, 1)
        # So many classes at most can each be more probable than mask_low.
        self.negative = Queues(classes, config.negative_size, width, math.ceil(1.0 / config.mask_low))
        self.sequence = 0
        self.known = 0

    def fork(self) -> Self:
        """A copy to advance; what it does not write to is shared."""
        copy = object.__new__(type(self))
        copy.__dict__.update(self.__dict__)
        copy.positive, copy.negative = self.positive.fork(), self.negative.fork()
        return copy

    def export(self) -> tuple[Counters, state.Arrays]:
        """All there is."""
        counters: Counters = {
            "sequence": self.sequence,
            "known": self.known,
            "positive_changes": self.positive.changes,
            "negative_changes": self.negative.changes,
        }
        caches = self.positive.export("positive") | self.negative.export("negative")
        return counters, {"initial_prototypes": self.initial, **caches}


class TDA(FeatureMethod):
    """Zero-shot logits corrected by a positive and a negative cache; a sample enters them before it is decided."""

    name: ClassVar[str] = "tda"
    capabilities: ClassVar[Capabilities] = Capabilities(
        batch_invariant=True, rotation_invariant=True, editable_classes=True, cost="scoring"
    )
    config_type = TDAConfig
    score_names: ClassVar[Mapping[str, str]] = {"max": "max logit", **PROBABLE}
    config: TDAConfig
    _memory: Memory

    def _advance(self, memory: Memory, feature: Feature, scores: bool) -> Decision:
        config = self.config
        cosines, logits = np.empty((2, len(self.classes)))
        first = compute_cosines(memory.initial, memory.inverse_norms, feature, cosines)
        np.divide(cosines, config.temperature, out=logits)
        probabilities, entropy = softmax(logits)
        cached = self._learn(memory, feature, first, entropy / self._largest_entropy(), probabilities)
        memory.positive.affect(feature, config.positive_sharpness, config.positive_weight, logits)
        memory.negative.affect(feature, config.negative_sharpness, -config.negative_weight, logits)
        index = int(logits.argmax())
        score = self._score(logits)
        known = config.threshold is None or score >= config.threshold
        memory.sequence += 1
        memory.known += known
        # Times the temperature: with empty caches these are the cosines, as zero-shot gives them.
        final = logits * config.temperature if scores else None
        return decision_from_cosines(
            self.classes, index, cosines, final, score=score, sequence=memory.sequence - 1, known=known, cached=cached
        )

    def _learn(self, memory: Memory, feature: Feature, first: int, entropy: float, probabilities: Floats) -> bool:
        """Offer the sample to the caches by its zero-shot class and entropy; True if one of them took it."""
        config = self.config
        cached = memory.positive.offer(first, feature, entropy, np.array([first]))
        if config.entropy_low < entropy < config.entropy_high:
            mask = np.flatnonzero((probabilities > config.mask_low) & (probabilities < config.mask_high))
            cached |= memory.negative.offer(first, feature, entropy, mask)
        return cached

    def _largest_entropy(self) -> float:
        """What an entropy in nats is divided by; of one class it is always zero, so any number does."""
        classes = max(len(self.classes), 2)
        return math.log2(classes) if self.config.entropy_base == "published" else math.log(classes)

    def _score(self, logits: Floats) -> float:
        return familiarity(logits, self.config.temperature, self.config.score)

    def _with_classes(self, memory: Memory, kept: Integers, added: Feature) -> Memory:
        copy = memory.fork()
        copy.initial = np.concatenate([memory.initial[kept], added])
        copy.inverse_norms = inverse_norms(copy.initial)
        copy.positive = memory.positive.with_classes(kept, len(added))
        copy.negative = memory.negative.with_classes(kept, len(added))
        return copy

    def _new_memory(self, initial: Feature) -> Memory:
        return Memory(initial, self.config)

    def _restored_memory(self, counters: Counters, arrays: state.Arrays) -> Memory:
        initial = required(arrays, "initial_prototypes", np.float32, (None, None))
        check_unit(initial, "initial_prototypes")
        try:
            memory = Memory(initial, self.config)
        except MemoryError:
            raise StateError("the state asks for caches larger than this machine's memory") from None
        expected_counters, expected = memory.export()
        if set(arrays) != set(expected) or set(counters) != set(expected_counters):
            raise StateError(f"a state of TDA holds the arrays {sorted(expected)}; given: {sorted(arrays)[:20]}")
        memory.sequence = counter(counters, "sequence", high=2**62)
        memory.known = counter(counters, "known", high=memory.sequence)
        for name, queues in (("positive", memory.positive), ("negative", memory.negative)):
            queues.restore(arrays, name, counter(counters, f"{name}_changes", high=memory.sequence))
        self._check_meaning(memory, arrays)
        return memory

    def _check_meaning(self, memory: Memory, arrays: state.Arrays) -> None:
        """A positive key stands for its own class; entropies are such as their cache takes in."""
        counts = memory.positive.counts
        own = np.repeat(np.arange(len(counts)), counts)
        if not np.array_equal(arrays["positive_masks"], own):
            raise StateError("the state's positive keys must each stand for the class of their queue")
        positive, negative = arrays["positive_entropies"], arrays["negative_entropies"]
        if not ((positive > -1e-9) & (positive < 1.0 + 1e-9)).all():
            raise StateError("the state's positive entropies must lie from 0 to 1")
        if not ((negative > self.config.entropy_low) & (negative < self.config.entropy_high)).all():
            raise StateError("the state's negative entropies must lie between entropy_low and entropy_high")

    def _count_frozen(self, decision: Decision) -> None:
        super()._count_frozen(decision)
        self._memory.known += decision.known

    def _initial_prototypes(self, memory: Memory) -> Feature:
        return memory.initial

    def stats(self) -> dict[str, Any]:
        """Numbers for monitoring, JSON-ready."""
        memory = self._memory
        return {
            **super().stats(),
            "known": memory.known,
            "unknown": memory.sequence - memory.known,
            "positive": int(memory.positive.counts.sum()),
            "negative": int(memory.negative.counts.sum()),
            "positive_changes": memory.positive.changes,
            "negative_changes": memory.negative.changes,
        }

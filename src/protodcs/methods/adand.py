"""AdaND: a small detector on the image feature learns to tell known from unknown, taught by the zero-shot classifier.

The zero-shot score and a threshold that follows the stream label each sample; a two-way linear head is trained on the
labels, with noise features mixed in as certain unknowns, and decides once it has seen enough. The class is always the
zero-shot one, and the labels never come from the head: it must not teach itself.
"""

import math
from collections.abc import Mapping
from typing import Any, ClassVar, Literal, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from ..arrays import Feature, Floats, Labels
from ..core import state
from ..core.base import Capabilities, FeatureMethod
from ..core.decision import Decision, decision_from_cosines
from ..core.numerics.windows import Window
from ..core.settings import Settings
from ..core.state_checks import Counters, check_unit, decided, required
from ..core.vectors import cosines as compute_cosines
from ..core.vectors import inverse_norms
from ..errors import StateError
from .rosita_gate import best_split

# Adam as it is always used.
_MOMENTUM = 0.9
_MEMORY = 0.999
_EPSILON = 1e-8
# No step of Adam with these is longer than this many times its rate (Cauchy-Schwarz on the two moments gives 7.3).
_LONGEST_STEP = 10.0
_COUNTERS = ("sequence", "learned", "known")
_SUMS = ("unknown", "skipped")


class AdaNDConfig(Settings):
    """The settings of AdaND."""

    label_score: Literal["softmax", "max"] = Field(
        "softmax", description="The zero-shot score that labels samples: largest probability, or largest cosine."
    )
    temperature: float = Field(0.01, ge=0.001, le=100, description="tau: softmax temperature of 'softmax'.")
    window: int = Field(512, ge=2, le=100_000, description="How many recent scores set the threshold. Samples.")
    step: float = Field(0.01, ge=1e-4, le=0.5, description="Thresholds tried are 0, step, 2 step, ... below 1.")
    queue_length: int = Field(64, ge=1, le=4096, description="Labelled features per training step of the head.")
    warmup: int = Field(
        10, ge=0, le=10**6, description="The zero-shot decision stands until the head has taken so many steps."
    )
    noise_period: int = Field(
        8, ge=0, le=10**6, description="A noise feature joins the queue after every so many samples; 0 for none."
    )
    rate: float = Field(5e-4, ge=0, le=1, description="lr: learning rate of Adam.")
    feature_length: float = Field(
        10.0,
        gt=0,
        le=1000,
        description="Length that features have for the head. The paper's head sees raw image features, and those of "
        "CLIP are of about this size.",
    )
    seed: int = Field(0, ge=0, lt=2**63, description="Which noise is drawn.")


def margin(weights: Floats, feature: Feature, length: float) -> float:
    """Return the head's logit of 'known' for a unit feature (d,); that of 'unknown' is its negative.

    Both rows of the two-way head start at zero, and their gradients are opposite, so Adam keeps them opposite: one row
    of `weights` (d + 1,), the bias last, is the whole head.
    """
    return float(length * (weights[:-1] @ feature) + weights[-1])


def add_gradient(weights: Floats, queue: Feature, labels: Labels, length: float, out: Floats) -> None:
    """Add to `out` (d + 1,) the gradient of the mean cross-entropy over `queue` (L, d); a label is 1 for known."""
    margins = length * (queue @ weights[:-1]) + weights[-1]
    # The probability of 'known' of two opposite logits a and -a is (1 + tanh a) / 2.
    errors = (0.5 * (1.0 + np.tanh(margins)) - labels) / len(queue)
    out[:-1] += length * (errors @ queue)
    out[-1] += errors.sum()


def noise(seed: int, place: int, width: int) -> Feature:
    """A random direction, the same whenever it is asked for: no generator is kept."""
    generator = np.random.Generator(np.random.Philox(key=np.array([seed, place], dtype=np.uint64)))
    row = generator.standard_normal(width)
    unit: Feature = (row / np.sqrt((row * row).sum())).astype(np.float32)
    return unit


class Memory:
    """The prototypes, recent scores, the queue of labelled features, and the head with the moments of Adam."""

    def __init__(self, initial: Feature, config: AdaNDConfig):
        width = initial.shape[1]
        self.config = config
        self.initial = initial
        self.inverse_norms = inverse_norms(initial)
        self.window = Window(config.window)
        self.queue = np.zeros((config.queue_length, width), dtype=np.float32)
        self.labels = np.zeros(config.queue_length, dtype=np.int64)
        self.queued = 0
        self.weights, self.first, self.second = np.zeros((3, width + 1))
        self.steps = 0
        self.sequence = 0
        self.learned = 0
        self.known = 0

    def fork(self) -> Self:
        """A copy to advance; the prototypes are shared."""
        copy = object.__new__(type(self))
        copy.__dict__.update(self.__dict__)
        copy.window = self.window.fork()
        for name in ("queue", "labels", "weights", "first", "second"):
            setattr(copy, name, getattr(self, name).copy())
        return copy

    def learn(self, feature: Feature, known: bool) -> None:
        """Queue a labelled sample, and noise if it is due."""
        self.learned += 1
        self._enqueue(feature, known)
        period = self.config.noise_period
        if period and self.learned % period == 0:
            self._enqueue(noise(self.config.seed, self.learned, len(feature)), False)

    def _enqueue(self, feature: Feature, known: bool) -> None:
        self.queue[self.queued] = feature
        self.labels[self.queued] = known
        self.queued += 1
        if self.queued == self.config.queue_length:
            self.queued = 0
            self._train()

    def _train(self) -> None:
        """One step of Adam on the full queue."""
        gradient = np.zeros_like(self.weights)
        add_gradient(self.weights, self.queue, self.labels, self.config.feature_length, gradient)
        self.steps += 1
        self.first = _MOMENTUM * self.first + (1.0 - _MOMENTUM) * gradient
        self.second = _MEMORY * self.second + (1.0 - _MEMORY) * gradient * gradient
        mean = self.first / (1.0 - _MOMENTUM**self.steps)
        size = np.sqrt(self.second / (1.0 - _MEMORY**self.steps))
        self.weights = self.weights - self.config.rate * mean / (size + _EPSILON)

    def export(self) -> tuple[Counters, state.Arrays]:
        """All there is; how often the head was trained follows from the number of samples."""
        counters: Counters = {name: getattr(self, name) for name in _COUNTERS}
        # Sums that a broken state would contradict.
        counters |= {"unknown": self.learned - self.known, "skipped": self.sequence - self.learned}
        return counters, {
            "initial_prototypes": self.initial,
            "window": self.window.arrivals[: self.window.size],
            "queue": self.queue[: self.queued],
            "labels": self.labels[: self.queued],
            "weights": self.weights,
            "first": self.first,
            "second": self.second,
        }


class AdaND(FeatureMethod):
    """Nearest prototype by cosine; known or unknown by a head that is trained on the stream.

    `score` is the head's logit of 'known' from the first sample on, although until the warm-up is over the zero-shot
    decision stands; `p_unknown` is 0 or 1 until then, and the head's probability afterwards. Each sample is decided
    before the head learns from it.
    """

    name: ClassVar[str] = "adand"
    capabilities: ClassVar[Capabilities] = Capabilities(
        batch_invariant=True, rotation_invariant=False, editable_classes=True, cost="scoring"
    )
    config_type = AdaNDConfig
    score_names: ClassVar[Mapping[str, str]] = {"": "logit of the head"}
    config: AdaNDConfig
    _memory: Memory

    def _advance(self, memory: Memory, feature: Feature, scores: bool) -> Decision:
        cosines = np.empty(len(self.classes))
        index = compute_cosines(memory.initial, memory.inverse_norms, feature, cosines)
        label = self._label(memory, self._score(cosines))
        logit = float(margin(memory.weights, feature, self.config.feature_length))
        known, p_unknown = label, 0.0 if label else 1.0
        if memory.steps >= self.config.warmup:
            known, p_unknown = logit >= 0.0, 0.5 * (1.0 - math.tanh(logit))
        memory.learn(feature, label)
        memory.known += known
        memory.sequence += 1
        return decision_from_cosines(
            self.classes,
            index,
            cosines,
            cosines if scores else None,
            score=logit,
            sequence=memory.sequence - 1,
            known=known,
            p_unknown=p_unknown,
        )

    def _score(self, cosines: Floats) -> float:
        """The zero-shot score that the label comes from."""
        top = float(cosines.max())
        if self.config.label_score == "max":
            return top
        return 1.0 / float(np.exp((cosines - top) / self.config.temperature).sum())

    def _label(self, memory: Memory, score: float) -> bool:
        """Whether the zero-shot classifier, with the threshold of the recent scores, calls the sample known."""
        memory.window.push(score)
        return score >= float(best_split(memory.window.ordered, memory.window.size, self.config.step)[0])

    def _with_classes(self, memory: Memory, kept: NDArray[np.int64], added: Feature) -> Memory:
        # What the head and the window know of the old list stays; they follow the new labels and scores.
        copy = memory.fork()
        copy.initial = np.concatenate([memory.initial[kept], added])
        copy.inverse_norms = inverse_norms(copy.initial)
        return copy

    def _new_memory(self, initial: Feature) -> Memory:
        return Memory(initial, self.config)

    def _restored_memory(self, counters: Counters, arrays: state.Arrays) -> Memory:
        steps, queued = _proven(self.config, counters, arrays)
        try:
            memory = Memory(arrays["initial_prototypes"], self.config)
        except MemoryError:
            raise StateError("the state asks for a queue larger than this machine's memory") from None
        for name in _COUNTERS:
            setattr(memory, name, counters[name])
        memory.steps, memory.queued = steps, queued
        memory.window.restore(arrays["window"], memory.learned)
        memory.queue[:queued], memory.labels[:queued] = arrays["queue"], arrays["labels"]
        for name in ("weights", "first", "second"):
            getattr(memory, name)[:] = arrays[name]
        return memory

    def _initial_prototypes(self, memory: Memory) -> Feature:
        return memory.initial

    def stats(self) -> dict[str, Any]:
        """Numbers for monitoring, JSON-ready."""
        memory, window = self._memory, self._memory.window
        threshold = best_split(window.ordered, window.size, self.config.step)[0] if window.size else None
        return {
            **super().stats(),
            "known": memory.known,
            "unknown": memory.learned - memory.known,
            "steps": memory.steps,
            "warm": memory.steps >= self.config.warmup,
            "threshold": threshold,
        }


def _proven(config: AdaNDConfig, counters: Counters, arrays: state.Arrays) -> tuple[int, int]:
    """Prove that `export` could have written the state; how often the head was trained, and how much is queued."""
    expected = {"initial_prototypes", "window", "queue", "labels", "weights", "first", "second"}
    if set(arrays) != expected or set(counters) != {*_COUNTERS, *_SUMS}:
        raise StateError(f"the state's arrays are {sorted(arrays)[:20]}, they must be {sorted(expected)}")
    _, learned, _ = decided(counters)
    came = learned + (learned // config.noise_period if config.noise_period else 0)
    steps, queued = divmod(came, config.queue_length)
    width = required(arrays, "initial_prototypes", np.float32, (None, None)).shape[1]
    required(arrays, "queue", np.float32, (queued, width))
    for name in ("initial_prototypes", "queue"):
        check_unit(arrays[name], name)
    length, reach = config.feature_length, _LONGEST_STEP * config.rate * steps
    # An element of a gradient is at most as large as a feature is long, or one for the bias.
    largest = max(length, 1.0) if steps else 0.0
    for name, shape, kind, low, high in (
        ("window", min(learned, config.window), np.float64, -1.001, 1.001),
        ("labels", queued, np.int64, 0, 1),
        ("weights", width + 1, np.float64, -reach, reach),
        ("first", width + 1, np.float64, -largest, largest),
        ("second", width + 1, np.float64, 0.0, largest**2),
    ):
        array = required(arrays, name, kind, (shape,))
        if not ((array >= low) & (array <= high)).all():
            raise StateError(f"the state's array {name!r} has values outside {low} to {high}")
    return steps, queued

"""AdaNeg: classes and negative labels get proxies from the stream's own features, and take part in a second softmax.

    S(x) = S_proxy(x) + lambda S_text(x),   each as in NegLabel, over groups of names

"AdaNeg: Adaptive Negative Proxy Guided OOD Detection with Vision-Language Models" (NeurIPS 2024). A sample with
S_text above t + gap (1 - t) enters the memory of its best class, one below t - gap t that of its best name; each
memory keeps the `shots` features of least entropy. The proxy of a label is the mean of its text and its features,
normalised: plain ("task"), or weighted with exp(-beta (1 - x.m)) for the sample x ("sample"). A sample enters before
it is scored. The class is the best of p_text + lambda p_proxy.

Different from the authors' code, on purpose:

- It works in batches of 256: later samples of a batch are in the memory when an earlier one is scored.
- It draws the groups of names by a random permutation; here group g has every n-th name.
- It has 10,000 WordNet names, five groups of 2,000. Here the groups have the names of your vocabulary.
- Its memory of 10 has one place for the text, and never uses another one of its 11. `shots` counts features: 9.
- Its scripts ask for beta = 5.5, and its code cuts that to 5, which is the default here.
- The paper has no threshold but one for 95 % of the known images. Here the recent scores set it.
"""

from collections.abc import Mapping
from typing import Any, ClassVar, Literal, Self

import numpy as np
from pydantic import Field

from ..arrays import Feature, Floats
from ..core import state
from ..core.arena import Layout
from ..core.numerics.softmax import softmax
from ..core.state_checks import Counters, counter
from ..errors import StateError
from .negatives import NegativesConfig, WithNegatives, grouped_share
from .scored import Memory, Step
from .tda import Queues

_ENTERED = "entered"
_CACHE = "cache"


class AdaNegConfig(NegativesConfig):
    """The settings of AdaNeg."""

    middle: float = Field(0.5, ge=0, le=1, description="t: the score between known and unknown.")
    gap: float = Field(0.5, ge=0, le=1, description="How far from t a score must be for the sample to be remembered.")
    shots: int = Field(9, ge=1, le=1000, description="Features per class and per name.")
    proxy: Literal["sample", "task"] = Field(
        "sample", description="Whether features count by their similarity with the sample, or all the same."
    )
    sharpness: float = Field(5.0, ge=0, le=1000, description="beta of the proxies by 'sample'.")
    text_weight: float = Field(0.1, ge=0, le=1000, description="lambda: weight of the score of the texts.")
    groups: int = Field(5, ge=1, le=1000, description="Groups of names, each compared with the classes alone.")


class ProxyMemory(Memory):
    """The memory of a `ScoredMethod`, and the features of each class and name."""

    def __init__(self, initial: Feature, layout: Layout, window: int, labels: int, shots: int):
        super().__init__(initial, layout, window)
        self.cache = Queues(labels, shots, initial.shape[1], 1)

    def fork(self) -> Self:
        """Return a copy to advance."""
        copy = super().fork()
        copy.cache = self.cache.fork()
        return copy

    def export(self) -> tuple[Counters, state.Arrays]:
        """Return everything."""
        counters, arrays = super().export()
        return {**counters, _ENTERED: self.cache.changes}, {**arrays, **self.cache.export(_CACHE)}


class AdaNeg(WithNegatives):
    """The class of texts and proxies together; the score is the share on classes, by proxies and by texts."""

    name: ClassVar[str] = "adaneg"
    config_type = AdaNegConfig
    score_names: ClassVar[Mapping[str, str]] = {"": "share on classes by proxies and texts"}
    config: AdaNegConfig
    _memory: ProxyMemory

    def _empty_memory(self, initial: Feature) -> ProxyMemory:
        super()._empty_memory(initial)
        labels = len(initial) + len(self._negatives)
        return ProxyMemory(initial, {}, self.config.window, labels, self.config.shots)

    def _step(self, memory: Memory, feature: Feature, cosines: Floats) -> Step:
        assert isinstance(memory, ProxyMemory)
        config, classes = self.config, len(cosines)
        negative = self._logits(feature)
        texts = np.concatenate([cosines / config.temperature, negative])
        by_text = self._share(texts, classes)
        cached = self._remember(memory, feature, texts, classes, by_text)
        proxies = texts.copy()
        used = np.flatnonzero(memory.cache.counts)
        proxies[used] = self._proxy_cosines(memory, feature, used, texts[used]) / config.temperature
        score = self._share(proxies, classes) + config.text_weight * by_text
        prediction = softmax(texts)[0][:classes] + config.text_weight * softmax(proxies)[0][:classes]
        return Step(score, prediction, cached)

    def _share(self, logits: Floats, classes: int) -> float:
        if len(logits) == classes:
            return self._largest_probability(logits)
        return grouped_share(logits[:classes], logits[classes:], self.config.groups)

    def _remember(self, memory: ProxyMemory, feature: Feature, texts: Floats, classes: int, score: float) -> bool:
        middle, gap = self.config.middle, self.config.gap
        if score > middle + gap * (1.0 - middle):
            first, kind = 0, texts[:classes]
        elif score < middle - gap * middle and len(texts) > classes:
            first, kind = classes, texts[classes:]
        else:
            return False
        label = first + int(kind.argmax())
        return memory.cache.offer(label, feature, softmax(kind)[1], np.array([label]))

    def _proxy_cosines(self, memory: ProxyMemory, feature: Feature, used: Any, texts: Floats) -> Floats:
        """Return the cosines (n,) of the sample with the proxies of the labels `used`, whose text logits are given."""
        everything = np.concatenate([memory.initial, self._negatives])[used]
        features = memory.cache.features[used]
        near = (features @ feature).astype(np.float64)
        filled = np.arange(features.shape[1]) < memory.cache.counts[used][:, None]
        own, beta = texts * self.config.temperature, self.config.sharpness
        if self.config.proxy == "task":
            weights, text_weight = filled.astype(np.float64), np.ones(len(used))
        else:
            weights, text_weight = filled * np.exp(-beta * (1.0 - near)), np.exp(-beta * (1.0 - own))
        proxies = np.einsum("nsd,ns->nd", features, weights) + text_weight[:, None] * everything
        cosines: Floats = (proxies @ feature) / np.linalg.norm(proxies, axis=1)
        return cosines

    def probabilities(self, scores: Any) -> Floats:
        """Return class probabilities (N, K): the decisions' scores are probabilities already, but for their sum."""
        values: Floats = np.asarray(scores, dtype=np.float64)
        return values / values.sum(axis=1, keepdims=True)

    def _restore_more(self, memory: Memory, counters: Counters, arrays: state.Arrays) -> None:
        assert isinstance(memory, ProxyMemory)
        memory.cache.restore(arrays, _CACHE, counter(counters, _ENTERED, high=memory.learned))
        counts = memory.cache.counts
        if not np.array_equal(arrays[f"{_CACHE}_masks"], np.repeat(np.arange(len(counts)), counts)):
            raise StateError("the state's cached features must each stand for their own label")
        if not (arrays[f"{_CACHE}_entropies"] > -1e-9).all():
            raise StateError("the state's entropies must not be negative")

    def _numbers(self) -> Mapping[str, Any]:
        counts, classes = self._memory.cache.counts, len(self.classes)
        return {"cached_known": int(counts[:classes].sum()), "cached_unknown": int(counts[classes:].sum())}

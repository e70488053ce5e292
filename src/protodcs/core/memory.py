"""Everything a ProtoDCS engine has learned, as contiguous arrays updated in place.

Big arrays are shared until they are written to: a fork costs nothing until it learns, and the text prototypes are the
entry prototypes themselves until they first evolve. What can be computed again to the bit from the rest (visual
prototypes, projected gradients, ordered windows) is not exported.
"""

import copy
import math
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from ..errors import StateError
from . import alignment, mixture, state
from .base import Counters, Feature
from .cache import choose_slot, place, queue_mean
from .compiled import KERNEL
from .config import Config
from .first_check import invert_norms, push, quantile
from .proof import SCALARS, proven
from .residual import step_visual

# The arrays of the samples that wait for the next refit, and by how many rows they grow.
_WAITING = ("buffer", "buffer_class", "buffer_quality")
_GROWTH = 32


class Window:
    """The most recent values of a number, by arrival and by size."""

    def __init__(self, capacity: int):
        self.arrivals = np.zeros(capacity)
        self.ordered = np.zeros(capacity)
        self.pushed = 0

    @property
    def size(self) -> int:
        return min(self.pushed, len(self.arrivals))

    def push(self, value: float) -> None:
        push(self.arrivals, self.ordered, self.pushed, value)
        self.pushed += 1

    def quantile(self, share: float) -> float:
        return quantile(self.ordered, self.size, share)

    def fork(self) -> "Window":
        twin = copy.copy(self)
        twin.arrivals, twin.ordered = self.arrivals.copy(), self.ordered.copy()
        return twin

    def restore(self, values: NDArray[np.float64], pushed: int) -> None:
        self.arrivals[: len(values)] = values
        self.ordered[: len(values)] = np.sort(values)
        self.pushed = pushed


class Memory:
    """The state of one engine with K classes of dimension d.

    Attributes:
        entry: (K, d) float32, the prototypes the engine was given; never written to.
        text: (K, d) float32, P_t.
        inverse_norms: (K,) float64, 1 / ||P_t||.
        cache, quality, counts: (K, size, d) float32, (K, size) float64, (K,) int64: the queues.
        visual, lengths: (K, d) float32 and (K,) float64, P_v: unit directions and lengths of the queue means.
        opened: the classes with a non-empty queue, ascending.
        adapted: (K, d) float32, P'_v, which no sample changes unless the evidence is fused.
        pull, pull_rest, visual_sum, normaliser, applied, diagonal: the alignment accumulators, see `alignment`.
        gate_window, mixture_window, quality_window: recent S, S' and AU of known samples.
        mixture: (6,) float64 parameters of the last fit, valid while `fitted`.
        buffer, buffer_class, buffer_quality: verified samples waiting for the next refit ("buffered" admission).
    """

    # What changes with a queue.
    _CACHED = (
        "cache", "quality", "counts", "visual", "lengths", "adapted",
        "pull", "pull_rest", "visual_sum", "normaliser", "applied", "diagonal",
    )  # fmt: skip
    # All that a fork shares until it writes.
    _BIG = (
        "text", "inverse_norms", *_CACHED, "mixture", *_WAITING,
    )  # fmt: skip

    def __init__(self, entry: Feature, config: Config):
        classes, width = entry.shape
        self.config = config
        self.entry = entry
        self.text = entry
        self.inverse_norms = np.empty(classes)
        invert_norms(entry, self.inverse_norms)
        self.cache = np.zeros((classes, config.cache_size, width), dtype=np.float32)
        self.quality = np.zeros((classes, config.cache_size))
        self.counts = np.zeros(classes, dtype=np.int64)
        self.opened = np.zeros(0, dtype=np.int64)
        self.visual = np.zeros((classes, width), dtype=np.float32)
        self.lengths = np.ones(classes)
        self.adapted = np.zeros((classes, width), dtype=np.float32)
        self.visual_sum = np.zeros((classes, width))
        self.normaliser = np.ones(classes)
        self.applied = np.ones(classes)
        self.diagonal = np.zeros(classes)
        self.pull = np.zeros((classes, width), dtype=np.float32)
        self.pull_rest = np.zeros((classes, width), dtype=np.float32)
        self.gate_window = Window(config.gate_window)
        self.mixture_window = Window(config.mixture_window)
        self.quality_window = Window(config.gate_window)
        self.mixture = np.zeros(mixture.PARAMETERS)
        self.fitted = False
        self.buffer = np.zeros((0, width), dtype=np.float32)
        self.buffer_class = np.zeros(0, dtype=np.int64)
        self.buffer_quality = np.zeros(0)
        self.buffered = 0
        # Thresholds that move, and counts of what happened.
        self.cold_threshold = config.cold_threshold
        self.evolution_threshold = config.evolution_threshold
        self.sequence = 0
        self.learned = 0
        self.known = 0
        self.trusted = 0
        self.cached = 0
        self.passed = 0
        self.evolved = 0
        self.fits = 0
        self.failed_fits = 0
        self.alignment_updates = 0
        self._shared: frozenset[str] = frozenset()

    # Copy on write.

    def fork(self) -> Self:
        twin = copy.copy(self)
        twin._shared = frozenset(self._BIG)
        for name in ("gate_window", "mixture_window", "quality_window"):
            setattr(twin, name, getattr(self, name).fork())
        return twin

    def own(self, *names: str) -> None:
        """Make these arrays this memory's own before they are written to."""
        if self._shared:
            for name in self._shared.intersection(names):
                setattr(self, name, getattr(self, name).copy())
            self._shared = self._shared.difference(names)

    def own_text(self) -> None:
        """The same for the text prototypes, which are the entry prototypes themselves until they first evolve."""
        self.own("text", "inverse_norms")
        if self.text is self.entry:
            self.text = self.entry.copy()

    # The cache, and the visual side that follows it.

    def offer(self, k: int, feature: Feature, uncertainty: float) -> bool:
        """Algorithm 2: offer a feature to the queue of class k; True if the queue changed."""
        threshold = self.config.cache_similarity
        slot = choose_slot(self.cache[k], self.quality[k], int(self.counts[k]), feature, uncertainty, threshold)
        if slot < 0:
            return False
        self.own(*self._CACHED)
        previous, current = np.empty((2, len(feature)))
        opens = place(
            k, slot, feature, uncertainty, self.cache, self.quality, self.counts, self.visual, self.lengths,
            previous, current,
        )  # fmt: skip
        if opens:
            self.opened = np.flatnonzero(self.counts)
        self.cached += 1
        self._realign(k, opens, previous, current)
        return True

    def wait(self, k: int, feature: Feature, uncertainty: float) -> None:
        """Hold a verified sample back until the next refit."""
        self.own(*_WAITING)
        if self.buffered == len(self.buffer):
            for name in _WAITING:
                array = getattr(self, name)
                setattr(self, name, np.concatenate([array, np.zeros((_GROWTH, *array.shape[1:]), dtype=array.dtype)]))
        self.buffer[self.buffered] = feature
        self.buffer_class[self.buffered] = k
        self.buffer_quality[self.buffered] = uncertainty
        self.buffered += 1

    def flush(self) -> bool:
        """Offer what was held back, lowest uncertainty first, at most a queue's size per class."""
        changed = False
        offered: dict[int, int] = {}
        for i in np.argsort(self.buffer_quality[: self.buffered], kind="stable"):
            k = int(self.buffer_class[i])
            offered[k] = offered.get(k, 0) + 1
            if offered[k] <= self.config.cache_size:
                changed |= self.offer(k, self.buffer[i], float(self.buffer_quality[i]))
        self.buffered = 0
        return changed

    # The alignment gradient.

    @property
    def pull_scale(self) -> float:
        """What `pull` and `visual_sum` must be multiplied by: lambda_align / (M T)."""
        return self.config.alignment_weight / (max(len(self.opened), 1) * self.config.alignment_temperature)

    def _keys(self) -> NDArray[np.int64]:
        """The classes whose text row the alignment compares with."""
        return np.arange(len(self.counts)) if self.config.alignment_keys == "all" else self.opened

    def _realign(self, k: int, opens: bool, previous: NDArray[np.float64], current: NDArray[np.float64]) -> None:
        """Queue k has changed its direction: bring the alignment up to date."""
        self.alignment_updates += 1
        config = self.config
        if (
            self.alignment_updates >= alignment.REBUILD_AFTER
            or (opens and len(self.opened) <= alignment.REBUILD_UP_TO)
            or config.alignment_direction == "text-to-visual"
            or KERNEL == "numpy"
        ):
            self.rebuild()
            return
        keys = self._keys()
        if opens and config.alignment_keys == "open":
            alignment.add_key(
                k, keys, self.cache, self.counts, self.text, self.inverse_norms, self.pull, self.pull_rest,
                self.visual_sum, self.normaliser, self.applied, self.diagonal, config.alignment_temperature,
                alignment.allowed_drift(len(keys)),
            )  # fmt: skip
        alignment.change_query(
            k, opens, keys, current, previous, self.text, self.inverse_norms, self.pull, self.pull_rest,
            self.visual_sum, self.normaliser, self.applied, self.diagonal, config.alignment_temperature,
        )  # fmt: skip
        # One class more changes the mean over queries, hence every step that is scaled by it.
        self._step_visual(self.opened if opens else np.array([k]))

    def rebuild(self) -> None:
        """Compute the alignment in full: after an evolution, a class edit, and every so many updates."""
        self.own("pull", "pull_rest", "visual_sum", "normaliser", "applied", "diagonal", "adapted")
        self.alignment_updates = 0
        text, visual = self.text * self.inverse_norms[:, None], self._directions()
        text_sum = np.zeros_like(text)
        forward = self.config.alignment_direction == "visual-to-text"
        queries, query_sum = (visual, self.visual_sum) if forward else (text, text_sum)
        keys, key_sum = (text, text_sum) if forward else (visual, self.visual_sum)
        alignment.contrast(
            queries, keys, self.opened, self._keys(), self.config.alignment_temperature,
            query_sum, key_sum, self.normaliser, self.diagonal,
        )  # fmt: skip
        self.applied[:] = self.normaliser
        alignment.project(self._keys(), text_sum, self.text, self.inverse_norms, self.pull, self.pull_rest)
        self._step_visual(self.opened)

    def _directions(self) -> NDArray[np.float64]:
        """P_v in float64, zero where a queue is empty."""
        directions = np.zeros(self.visual.shape)
        for k in self.opened:
            queue_mean(self.cache[k], self.counts[k], directions[k])
        return directions

    def _step_visual(self, rows: NDArray[np.int64]) -> None:
        none = np.zeros(len(self.counts))
        step_visual(
            rows, self.visual, self.lengths, self.visual_sum, self.entry[0], none, none,
            self.pull_scale, self.config.visual_rate, self.config.step_epsilon, self.adapted,
        )  # fmt: skip

    # Classes.

    def with_classes(self, rows: NDArray[np.int64], added: Feature) -> "Memory":
        """A memory that keeps the classes `rows`, followed by the new prototypes `added`."""

        def kept(array: NDArray[Any], fill: NDArray[Any] | float) -> NDArray[Any]:
            tail = np.empty((len(added), *array.shape[1:]), dtype=array.dtype)
            tail[:] = fill
            return np.concatenate([array[rows], tail])

        twin = Memory(kept(self.entry, added), self.config)
        if self.evolved:
            twin.text = kept(self.text, added)
            invert_norms(twin.text, twin.inverse_norms)
        for name in ("cache", "quality", "counts", "visual"):
            setattr(twin, name, kept(getattr(self, name), 0.0))
        twin.opened = np.flatnonzero(twin.counts)
        twin.lengths = kept(self.lengths, 1.0)
        for name in ("gate_window", "mixture_window", "quality_window", "mixture", *SCALARS):
            setattr(twin, name, getattr(self, name))
        place = np.full(len(self.counts), -1)
        place[rows] = np.arange(len(rows))
        waiting = np.flatnonzero(place[self.buffer_class[: self.buffered]] >= 0)
        twin.buffered = len(waiting)
        twin.buffer, twin.buffer_quality = self.buffer[waiting], self.buffer_quality[waiting]
        twin.buffer_class = place[self.buffer_class[waiting]]
        twin.rebuild()
        return twin

    def stats(self) -> dict[str, Any]:
        """What a person watching the stream wants to know."""
        gate, config = self.gate_window, self.config
        weight, mean, variance, other_weight, other_mean, other_variance = (float(x) for x in self.mixture)
        drift = 1.0 - np.einsum("kd,kd->k", self.entry, self.text) * self.inverse_norms if self.evolved else np.zeros(1)
        return {
            "learned": self.learned,
            "known": self.known,
            "unknown": self.learned - self.known,
            "trusted": self.trusted,
            "cached": self.cached,
            "passed": self.passed,
            "evolved": self.evolved,
            "open_classes": len(self.opened),
            "cached_features": int(self.counts.sum()),
            "waiting": self.buffered,
            "openness_median": gate.quantile(0.5) if gate.size else None,
            "cache_gate": gate.quantile(config.cache_quantile) if gate.size else None,
            "trust_gate": gate.quantile(config.trust_quantile) if gate.size else None,
            "evolution_threshold": self.evolution_threshold,
            "cold_threshold": self.cold_threshold,
            "fits": self.fits,
            "failed_fits": self.failed_fits,
            "mixture": {
                "known": {"weight": weight, "mean": mean, "variance": variance},
                "unknown": {"weight": other_weight, "mean": other_mean, "variance": other_variance},
                "separation": (other_mean - mean) / math.sqrt(0.5 * (variance + other_variance)),
            }
            if self.fitted
            else None,
            "text_drift_mean": float(drift.mean()),
            "text_drift_max": float(drift.max()),
        }

    # Export and restore.

    def export(self) -> tuple[Counters, state.Arrays]:
        filled = np.arange(self.cache.shape[1]) < self.counts[:, None]
        arrays: state.Arrays = {
            "entry": self.entry,
            "counts": self.counts,
            "cache": self.cache[filled],
            "quality": self.quality[filled],
            "pull": self.pull[self._keys()],
            "pull_rest": self.pull_rest[self._keys()],
            "visual_sum": self.visual_sum[self.opened],
            "normaliser": self.normaliser[self.opened],
            "applied": self.applied[self.opened],
            "diagonal": self.diagonal[self.opened],
            "mixture": self.mixture if self.fitted else np.zeros_like(self.mixture),
            "buffer": self.buffer[: self.buffered],
            "buffer_class": self.buffer_class[: self.buffered],
            "buffer_quality": self.buffer_quality[: self.buffered],
        }
        for name in ("gate_window", "mixture_window", "quality_window"):
            window = getattr(self, name)
            arrays[name] = window.arrivals[: window.size]
        if self.evolved:
            arrays["text"] = self.text
        counters: Counters = {name: getattr(self, name) for name in SCALARS}
        counters["confirmed"] = self.quality_window.pushed
        counters["unknown"] = self.learned - self.known
        counters["skipped"] = self.sequence - self.learned
        return counters, arrays

    @classmethod
    def restored(cls, config: Config, counters: Counters, arrays: state.Arrays) -> "Memory":
        """Rebuild an exported memory, checking everything that could be wrong before anything large is made."""
        checked = proven(config, counters, arrays)
        try:
            memory = cls(checked["entry"].copy(), config)
        except MemoryError:
            raise StateError("the state asks for queues larger than this machine's memory") from None
        if "text" in checked:
            memory.text = checked["text"].copy()
            invert_norms(memory.text, memory.inverse_norms)
        for name in SCALARS:
            setattr(memory, name, counters[name])
        memory.counts[:] = checked["counts"]
        memory.opened = np.flatnonzero(memory.counts)
        filled = np.arange(config.cache_size) < memory.counts[:, None]
        memory.cache[filled] = checked["cache"]
        memory.quality[filled] = checked["quality"]
        direction = np.empty(memory.entry.shape[1])
        for k in memory.opened:
            memory.lengths[k] = queue_mean(memory.cache[k], memory.counts[k], direction)
            memory.visual[k] = direction
        for name in ("pull", "pull_rest"):
            getattr(memory, name)[memory._keys()] = checked[name]
        for name in ("visual_sum", "normaliser", "applied", "diagonal"):
            getattr(memory, name)[memory.opened] = checked[name]
        memory.mixture[:] = checked["mixture"]
        for name in _WAITING:
            setattr(memory, name, checked[name].copy())
        memory.buffered = len(checked["buffer"])
        memory.gate_window.restore(checked["gate_window"], memory.learned)
        memory.mixture_window.restore(checked["mixture_window"], memory.learned)
        memory.quality_window.restore(checked["quality_window"], int(counters["confirmed"] or 0))
        memory._step_visual(memory.opened)
        return memory

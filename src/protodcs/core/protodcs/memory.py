"""Everything a ProtoDCS engine has learned, as contiguous arrays updated in place.

Big arrays are shared until they are written to: a fork costs nothing until it learns, the text prototypes are the
entry prototypes themselves until they first evolve, and all engines share the same empty queues. What can be computed
again to the bit from the rest (visual prototypes, projected gradients, ordered windows) is not exported.
"""

from functools import lru_cache
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from ...errors import StateError
from .. import mixture, state
from ..base import Counters, Feature
from ..book import Booked
from ..compiled import KERNEL
from ..prototypes import Prototypes
from ..vectors import inverse_norms, invert_norms
from ..windows import Window
from . import alignment, untouched
from .cache import place, queue_mean
from .config import ProtoDCSConfig
from .residual import step_visual
from .state_checks import SCALARS, proven
from .step import MEMORY, choose, settings

# The arrays of the samples that wait for the next refit, and by how many rows they grow.
_WAITING = ("buffer", "buffer_class", "buffer_quality")
_GROWTH = 32
# What holds features or sums of them for every class: large, and zero while its queue is empty.
_ROWS = frozenset({"cache", "visual", "adapted", "pull", "pull_rest", "visual_sum"})


@lru_cache(maxsize=16)
def _empty(classes: int, width: int, size: int) -> state.Arrays:
    """What changes with a queue, while all are empty: shared by every memory of these sizes that has cached nothing."""
    return {
        "cache": np.zeros((classes, size, width), dtype=np.float32),
        "quality": np.zeros((classes, size)),
        "counts": np.zeros(classes, dtype=np.int64),
        "visual": np.zeros((classes, width), dtype=np.float32),
        "lengths": np.ones(classes),
        "adapted": np.zeros((classes, width), dtype=np.float32),
        "pull": np.zeros((classes, width), dtype=np.float32),
        "pull_rest": np.zeros((classes, width), dtype=np.float32),
        "visual_sum": np.zeros((classes, width)),
        "normaliser": np.ones(classes),
        "applied": np.ones(classes),
        "diagonal": np.zeros(classes),
    }


@lru_cache(maxsize=16)
def _no_queues(width: int) -> state.Arrays:
    """What is exported of the queues while all are empty."""
    rows, wide, numbers = np.zeros((0, width), dtype=np.float32), np.zeros((0, width)), np.zeros(0)
    names = ("quality", "normaliser", "applied", "diagonal")
    return {"cache": rows, "pull": rows, "pull_rest": rows, "visual_sum": wide, **dict.fromkeys(names, numbers)}


class Memory(Booked):
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
        settings: the numbers of the config that kernels need, see `step.settings`.
        buffer, buffer_class, buffer_quality: verified samples waiting for the next refit ("buffered" admission).
    """

    layout = MEMORY
    # What changes with a queue.
    _CACHED = (
        "cache", "quality", "counts", "visual", "lengths", "adapted",
        "pull", "pull_rest", "visual_sum", "normaliser", "applied", "diagonal",
    )  # fmt: skip
    # All that a fork shares until it writes.
    _BIG = (
        "text", "inverse_norms", *_CACHED, "mixture", *_WAITING,
    )  # fmt: skip

    cache: NDArray[np.float32]
    quality: NDArray[np.float64]
    counts: NDArray[np.int64]
    visual: NDArray[np.float32]
    lengths: NDArray[np.float64]
    adapted: NDArray[np.float32]
    pull: NDArray[np.float32]
    pull_rest: NDArray[np.float32]
    visual_sum: NDArray[np.float64]
    normaliser: NDArray[np.float64]
    applied: NDArray[np.float64]
    diagonal: NDArray[np.float64]

    def __init__(self, prototypes: Prototypes, config: ProtoDCSConfig):
        entry = prototypes.unit
        classes, width = entry.shape
        self.config = config
        self.entry = entry
        self.text = entry
        self.inverse_norms = prototypes.follow(inverse_norms)
        self.__dict__.update(_empty(classes, width, config.cache_size))
        self.opened = np.zeros(0, dtype=np.int64)
        self.gate_window = Window(config.gate_window)
        self.mixture_window = Window(config.mixture_window)
        self.quality_window = Window(config.gate_window)
        self.mixture = np.zeros(mixture.PARAMETERS)
        self.settings = settings(config)
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
        self._shared = frozenset({"text", "inverse_norms", *self._CACHED})

    # Copy on write.

    def fork(self) -> Self:
        twin = self._shallow()
        twin._shared = frozenset(self._BIG)
        for name in ("gate_window", "mixture_window", "quality_window"):
            setattr(twin, name, getattr(self, name).fork())
        return twin

    def own(self, *names: str) -> None:
        """Make these arrays this memory's own before they are written to."""
        shared = self._shared.intersection(names)
        if shared:
            empty = _empty(*self.entry.shape, self.config.cache_size)
            for name in shared:
                array = getattr(self, name)
                unused = name in _ROWS and array is empty[name]
                setattr(self, name, untouched.zeros(array.shape, array.dtype) if unused else array.copy())
            self._shared = self._shared.difference(shared)
            self.outdated = True

    def own_text(self) -> None:
        """The same for the text prototypes, which are the entry prototypes themselves until they first evolve."""
        self.own("text", "inverse_norms")

    # The cache, and the visual side that follows it.

    def offer(self, k: int, feature: Feature, uncertainty: float) -> bool:
        """Algorithm 2: offer a feature to the queue of class k; True if the queue changed."""
        slot = self.choose(k, feature, uncertainty)
        if slot < 0:
            return False
        self.take(k, slot, feature, uncertainty)
        return True

    def choose(self, k: int, feature: Feature, uncertainty: float) -> int:
        """The slot of queue k that a feature should take, or -1 if it should not enter."""
        return choose(self.table, feature, k, uncertainty)

    def take(self, k: int, slot: int, feature: Feature, uncertainty: float) -> None:
        """Put a feature into a slot of queue k, and let everything follow."""
        self.own(*self._CACHED)
        previous, current = np.empty((2, len(feature)))
        opens = place(
            k, slot, feature, uncertainty, self.cache, self.quality, self.counts, self.visual, self.lengths,
            previous, current,
        )  # fmt: skip
        self.cached += 1
        if opens:
            self._open(k, previous, current)
        elif self._follows():
            self._change(k, False, previous, current)
            self._step_visual(np.array([k]))
        else:
            self.rebuild()

    @property
    def renews(self) -> bool:
        """Whether a kernel may put a feature into an open queue: it is the memory's own, and the alignment follows."""
        return "cache" not in self._shared and self._follows()

    def renewed(self) -> None:
        """Count a feature that came that way."""
        self.cached += 1
        self.alignment_updates += 1

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

    @property
    def keys(self) -> NDArray[np.int64]:
        """The classes whose text row the alignment compares with."""
        return np.arange(len(self.counts)) if self.config.alignment_keys == "all" else self.opened

    def _follows(self) -> bool:
        """Whether the alignment may follow the next change of a queue, or must be computed in full."""
        return (
            self.alignment_updates + 1 < alignment.REBUILD_AFTER
            and self.config.alignment_direction == "visual-to-text"
            and KERNEL == "numba"
        )

    def _open(self, k: int, previous: NDArray[np.float64], current: NDArray[np.float64]) -> None:
        """Queue k has its first feature: bring the alignment up to date."""
        config = self.config
        self.opened, self.outdated = np.flatnonzero(self.counts), True
        if not self._follows() or len(self.opened) <= alignment.REBUILD_UP_TO:
            self.rebuild()
            return
        keys = self.keys
        if config.alignment_keys == "open":
            alignment.add_key(
                k, keys, self.cache, self.counts, self.text, self.inverse_norms, self.pull, self.pull_rest,
                self.visual_sum, self.normaliser, self.applied, self.diagonal, config.alignment_temperature,
                alignment.allowed_drift(len(keys)),
            )  # fmt: skip
        self._change(k, True, previous, current)
        # One class more changes the mean over queries, hence every step that is scaled by it.
        self._step_visual(self.opened)

    def _change(self, k: int, opened: bool, previous: NDArray[np.float64], current: NDArray[np.float64]) -> None:
        """The direction of queue k has changed, or begun: let the alignment follow."""
        self.alignment_updates += 1
        alignment.change_query(
            k, opened, self.keys, current, previous, self.text, self.inverse_norms, self.pull, self.pull_rest,
            self.visual_sum, self.normaliser, self.applied, self.diagonal, self.config.alignment_temperature,
        )  # fmt: skip

    def rebuild(self) -> None:
        """Compute the alignment in full: after an evolution, a class edit, and every so many updates."""
        self.own("pull", "pull_rest", "visual_sum", "normaliser", "applied", "diagonal", "adapted")
        self.alignment_updates = 0
        keys, opened = self.keys, self.opened
        own = opened if len(keys) == len(self.counts) else np.arange(len(opened))  # Where each open class's key stands.
        prototypes, norms = np.ascontiguousarray(self.text[keys]), np.ascontiguousarray(self.inverse_norms[keys])
        directions = np.zeros(prototypes.shape)
        for row, k in zip(own, opened, strict=True):
            queue_mean(self.cache[k], self.counts[k], directions[row])
        text_sum, visual_sum, normaliser, diagonal = alignment.sums_in_full(
            prototypes, norms, directions, own, self.config.alignment_direction, self.config.alignment_temperature
        )
        self.visual_sum[opened] = visual_sum[own]
        self.normaliser[opened], self.diagonal[opened] = normaliser[own], diagonal[own]
        self.applied[:] = self.normaliser
        pull, rest = np.zeros_like(prototypes), np.zeros_like(prototypes)
        alignment.project(np.arange(len(keys)), text_sum, prototypes, norms, pull, rest)
        self.pull[keys], self.pull_rest[keys] = pull, rest
        self._step_visual(opened)

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

        entry = kept(self.entry, added)
        twin = Memory(Prototypes.of_unit(entry), self.config)
        if self.evolved:
            twin.text = kept(self.text, added)
            twin.inverse_norms = inverse_norms(twin.text)
        if len(self.opened):
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
        if len(self.opened):
            twin.rebuild()
        return twin

    def stats(self) -> dict[str, Any]:
        """What a person watching the stream wants to know."""
        gate, config = self.gate_window, self.config
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
            "mixture": mixture.described(self.mixture) if self.fitted else None,
            "text_drift_mean": float(drift.mean()),
            "text_drift_max": float(drift.max()),
        }

    # Export and restore.

    def export(self) -> tuple[Counters, state.Arrays]:
        arrays: state.Arrays = {
            "entry": self.entry,
            "counts": self.counts,
            **(self._exported_queues() if len(self.keys) else _no_queues(self.entry.shape[1])),
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
        return self.counters(), arrays

    def counters(self) -> Counters:
        """Return the numbers of a state beside its arrays."""
        counters: Counters = {name: getattr(self, name) for name in SCALARS}
        counters["confirmed"] = self.quality_window.pushed
        counters["unknown"] = self.learned - self.known
        counters["skipped"] = self.sequence - self.learned
        return counters

    def _exported_queues(self) -> state.Arrays:
        filled = np.arange(self.cache.shape[1]) < self.counts[:, None]
        return {
            "cache": self.cache[filled],
            "quality": self.quality[filled],
            "pull": self.pull[self.keys],
            "pull_rest": self.pull_rest[self.keys],
            "visual_sum": self.visual_sum[self.opened],
            "normaliser": self.normaliser[self.opened],
            "applied": self.applied[self.opened],
            "diagonal": self.diagonal[self.opened],
        }

    @classmethod
    def restored(
        cls, prototypes: Prototypes, config: ProtoDCSConfig, counters: Counters, arrays: state.Arrays
    ) -> "Memory":
        """Rebuild an exported memory, checking everything that could be wrong before anything large is made."""
        checked = proven(prototypes.unit, config, counters, arrays)
        try:
            memory = cls(prototypes, config)
        except MemoryError:
            raise StateError("the state asks for more than this machine's memory holds") from None
        if "text" in checked:
            memory.own_text()
            memory.text[:] = checked["text"]
            invert_norms(memory.text, memory.inverse_norms)
        for name in SCALARS:
            setattr(memory, name, counters[name])
        if checked["counts"].any() or checked["pull"].size:
            memory._fill(checked)
        memory.mixture[:] = checked["mixture"]
        for name in _WAITING:
            setattr(memory, name, checked[name].copy())
        memory.buffered = len(checked["buffer"])
        memory.gate_window.restore(checked["gate_window"], memory.learned)
        memory.mixture_window.restore(checked["mixture_window"], memory.learned)
        memory.quality_window.restore(checked["quality_window"], int(counters["confirmed"] or 0))
        return memory

    def _fill(self, checked: state.Arrays) -> None:
        """Take over the queues of a state, and the alignment that follows them."""
        self.opened = np.flatnonzero(checked["counts"])
        if 2 * len(self.opened) > len(self.counts):
            # Most of it will be touched: memory that was used before is then faster than new pages.
            self.__dict__.update({name: np.zeros_like(getattr(self, name)) for name in _ROWS})
            self._shared -= _ROWS
        self.own(*self._CACHED)
        self.counts[:] = checked["counts"]
        filled = np.arange(self.config.cache_size) < self.counts[:, None]
        self.cache[filled] = checked["cache"]
        self.quality[filled] = checked["quality"]
        direction = np.empty(self.entry.shape[1])
        for k in self.opened:
            self.lengths[k] = queue_mean(self.cache[k], self.counts[k], direction)
            self.visual[k] = direction
        for name in ("pull", "pull_rest"):
            getattr(self, name)[self.keys] = checked[name]
        for name in ("visual_sum", "normaliser", "applied", "diagonal"):
            getattr(self, name)[self.opened] = checked[name]
        self._step_visual(self.opened)

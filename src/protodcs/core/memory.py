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
from .base import Counters, Feature, counter, required
from .cache import choose_slot, queue_mean
from .compiled import KERNEL
from .config import Config
from .first_check import invert_norms, push, quantile
from .residual import step_visual

# How far the alignment sums of a state may lie from what its queues and prototypes make of them.
_DRIFT_TOLERANCE = 1e-5
# How many pairs of query and key a restore computes again to prove them: some milliseconds.
_PROVEN_PAIRS = 2**16
# Unit rows are rounded to float32: their squared length is one to about seven digits.
_UNIT_TOLERANCE = 1e-5


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
        text_sum, visual_sum, normaliser, applied, diagonal: the alignment accumulators, see `alignment`.
        pull: (K, d) float32, the alignment gradient of the text rows without its common factor.
        gate_window, mixture_window, quality_window: recent S, S' and AU of known samples.
        mixture: (6,) float64 parameters of the last fit, valid while `fitted`.
        buffer, buffer_class, buffer_quality: verified samples waiting for the next refit ("buffered" admission).
    """

    # What changes with a queue.
    _CACHED = (
        "cache", "quality", "counts", "visual", "lengths", "adapted",
        "text_sum", "visual_sum", "normaliser", "applied", "diagonal", "pull",
    )  # fmt: skip
    # All that a fork shares until it writes.
    _BIG = (
        "text", "inverse_norms", *_CACHED, "mixture", "buffer", "buffer_class", "buffer_quality",
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
        self.text_sum = np.zeros((classes, width))
        self.visual_sum = np.zeros((classes, width))
        self.normaliser = np.ones(classes)
        self.applied = np.ones(classes)
        self.diagonal = np.zeros(classes)
        self.pull = np.zeros((classes, width), dtype=np.float32)
        self.gate_window = Window(config.gate_window)
        self.mixture_window = Window(config.mixture_window)
        self.quality_window = Window(config.gate_window)
        self.mixture = np.zeros(mixture.PARAMETERS)
        self.fitted = False
        waiting = _buffer_size(config)
        self.buffer = np.zeros((waiting, width), dtype=np.float32)
        self.buffer_class = np.zeros(waiting, dtype=np.int64)
        self.buffer_quality = np.zeros(waiting)
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
        opens = bool(self.counts[k] == 0)
        previous, current = np.zeros(len(feature)), np.empty(len(feature))
        if not opens:
            queue_mean(self.cache[k], self.counts[k], previous)
        self.cache[k, slot] = feature
        self.quality[k, slot] = uncertainty
        if slot == self.counts[k]:
            self.counts[k] += 1
        if opens:
            self.opened = np.flatnonzero(self.counts)
        self.lengths[k] = queue_mean(self.cache[k], self.counts[k], current)
        self.visual[k] = current
        self.cached += 1
        self._realign(k, opens, previous, current)
        return True

    def wait(self, k: int, feature: Feature, uncertainty: float) -> None:
        """Hold a verified sample back until the next refit."""
        self.own("buffer", "buffer_class", "buffer_quality")
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
                k, keys, self.cache, self.counts, self.text, self.inverse_norms, self.text_sum, self.visual_sum,
                self.normaliser, self.applied, self.diagonal, config.alignment_temperature,
            )  # fmt: skip
        gain, loss = np.empty(len(self.counts)), np.empty(len(self.counts))
        alignment.change_query(
            k, opens, keys, current, previous, self.text, self.inverse_norms, self.visual_sum, self.normaliser,
            self.applied, self.diagonal, config.alignment_temperature, gain, loss,
        )  # fmt: skip
        alignment.shift_rows(
            keys, gain, current, loss, previous, self.text, self.inverse_norms, self.text_sum, self.pull
        )
        # One class more changes the mean over queries, hence every step that is scaled by it.
        self._step_visual(self.opened if opens else np.array([k]))

    def rebuild(self) -> None:
        """Compute the alignment in full: after an evolution, a class edit, and every so many updates."""
        self.own("text_sum", "visual_sum", "normaliser", "applied", "diagonal", "pull", "adapted")
        self.alignment_updates = 0
        text, visual = self.text * self.inverse_norms[:, None], self._directions()
        forward = self.config.alignment_direction == "visual-to-text"
        queries, query_sum = (visual, self.visual_sum) if forward else (text, self.text_sum)
        keys, key_sum = (text, self.text_sum) if forward else (visual, self.visual_sum)
        alignment.contrast(
            queries, keys, self.opened, self._keys(), self.config.alignment_temperature,
            query_sum, key_sum, self.normaliser, self.diagonal,
        )  # fmt: skip
        self.applied[:] = self.normaliser
        self._derive()

    def _directions(self) -> NDArray[np.float64]:
        """P_v in float64, zero where a queue is empty."""
        directions = np.zeros(self.visual.shape)
        for k in self.opened:
            queue_mean(self.cache[k], self.counts[k], directions[k])
        return directions

    def _derive(self) -> None:
        """All of `pull` and P'_v from the sums."""
        nothing, nowhere = np.zeros(len(self.counts)), np.zeros(self.entry.shape[1])
        alignment.shift_rows(
            self._keys(), nothing, nowhere, nothing, nowhere, self.text, self.inverse_norms, self.text_sum, self.pull
        )
        self._step_visual(self.opened)

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
        for name in ("gate_window", "mixture_window", "quality_window", "mixture", *_SCALARS):
            setattr(twin, name, getattr(self, name))
        place = np.full(len(self.counts), -1)
        place[rows] = np.arange(len(rows))
        waiting = np.flatnonzero(place[self.buffer_class[: self.buffered]] >= 0)
        twin.buffered = len(waiting)
        twin.buffer[: len(waiting)] = self.buffer[waiting]
        twin.buffer_class[: len(waiting)] = place[self.buffer_class[waiting]]
        twin.buffer_quality[: len(waiting)] = self.buffer_quality[waiting]
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
            "text_sum": self.text_sum[self._keys()],
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
        counters: Counters = {name: getattr(self, name) for name in _SCALARS}
        counters["confirmed"] = self.quality_window.pushed
        counters["unknown"] = self.learned - self.known
        counters["skipped"] = self.sequence - self.learned
        return counters, arrays

    @classmethod
    def restored(cls, config: Config, counters: Counters, arrays: state.Arrays) -> "Memory":
        """Rebuild an exported memory, checking everything that could be wrong before anything large is made."""
        checked = _checked(config, counters, arrays)
        memory = cls(checked["entry"].copy(), config)
        if "text" in checked:
            memory.text = checked["text"].copy()
            invert_norms(memory.text, memory.inverse_norms)
        for name in _SCALARS:
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
        memory.text_sum[memory._keys()] = checked["text_sum"]
        for name in ("visual_sum", "normaliser", "applied", "diagonal"):
            getattr(memory, name)[memory.opened] = checked[name]
        memory.mixture[:] = checked["mixture"]
        for name in ("buffer", "buffer_class", "buffer_quality"):
            getattr(memory, name)[: len(checked[name])] = checked[name]
        memory.buffered = len(checked["buffer"])
        memory.gate_window.restore(checked["gate_window"], memory.learned)
        memory.mixture_window.restore(checked["mixture_window"], memory.learned)
        memory.quality_window.restore(checked["quality_window"], int(counters["confirmed"] or 0))
        memory._derive()
        return memory


def _buffer_size(config: Config) -> int:
    """The most samples that can wait between two flushes, the first of which comes with the first fit."""
    return max(config.mixture_start, config.mixture_period) if config.cache_admission == "buffered" else 0


# Numbers beside the arrays, exported by name.
_SCALARS = (
    "fitted",
    "cold_threshold",
    "evolution_threshold",
    "sequence",
    "learned",
    "known",
    "trusted",
    "cached",
    "passed",
    "evolved",
    "fits",
    "failed_fits",
    "alignment_updates",
)


def _checked(config: Config, counters: Counters, arrays: state.Arrays) -> state.Arrays:
    """The arrays of an exported memory, each proven to be one that `export` could have written."""
    expected = {*_SCALARS, "confirmed", "unknown", "skipped"}
    if set(counters) != expected:
        raise StateError(f"the state's counters are {sorted(counters)[:20]}, they must be {sorted(expected)}")
    _check_counters(config, counters)
    learned, evolved = counter(counters, "learned"), counter(counters, "evolved")
    found = dict(arrays)
    checked: state.Arrays = {}

    def take(name: str, dtype: type, *shape: int | None) -> NDArray[Any]:
        checked[name] = required(found, name, dtype, shape)
        del found[name]
        return checked[name]

    classes, width = take("entry", np.float32, None, None).shape
    _check_unit(checked["entry"], "entry")
    if evolved:
        take("text", np.float32, classes, width)
        if config.evolution_norm == "unit":
            _check_unit(checked["text"], "text")
        else:
            # A mean of unit vectors is no longer than they are, and one of zero length would have no direction.
            _check_range(_squares(checked["text"]), "text", 1e-12, 1.0 + _UNIT_TOLERANCE)
    counts = take("counts", np.int64, classes)
    if not ((counts >= 0) & (counts <= config.cache_size)).all():
        raise StateError(f"the state's queues must hold 0 to {config.cache_size} features each")
    total, opened = int(counts.sum()), int(np.count_nonzero(counts))
    if total > counter(counters, "cached"):
        raise StateError(f"the state's queues hold {total} features, more than ever entered them")
    _check_unit(take("cache", np.float32, total, width), "cache")
    _check_range(take("quality", np.float64, total), "quality", 0.0, 1e6)
    take("text_sum", np.float64, classes if config.alignment_keys == "all" else opened, width)
    take("visual_sum", np.float64, opened, width)
    for name in ("normaliser", "applied"):
        _check_range(take(name, np.float64, opened), name, 1.0 - 1e-9, math.inf)
    _check_range(take("diagonal", np.float64, opened), "diagonal", -1.001, 1.001)
    for name, capacity, pushed in (
        ("gate_window", config.gate_window, learned),
        ("mixture_window", config.mixture_window, learned),
    ):
        _check_range(take(name, np.float64, min(capacity, pushed)), name, -0.001, 2.001)
    confirmed = counter(counters, "confirmed")
    _check_range(take("quality_window", np.float64, min(config.gate_window, confirmed)), "quality_window", 0.0, 1e6)
    _check_mixture(take("mixture", np.float64, mixture.PARAMETERS), bool(counters["fitted"]))
    capacity = _buffer_size(config)
    waiting = len(take("buffer", np.float32, None, width))
    if waiting > capacity:
        raise StateError(f"the state's buffer holds {waiting} samples, it has room for {capacity}")
    _check_unit(checked["buffer"], "buffer")
    _check_range(take("buffer_class", np.int64, waiting), "buffer_class", 0, classes - 1)
    _check_range(take("buffer_quality", np.float64, waiting), "buffer_quality", 0.0, 1e6)
    if found:
        raise StateError(f"the state holds arrays that do not belong there: {sorted(found)[:10]}")
    if opened:
        _check_alignment(config, checked)
    return checked


def _check_alignment(config: Config, checked: state.Arrays) -> None:
    """The accumulators must be what the queues and prototypes make of them.

    Up to `_PROVEN_PAIRS` pairs of query and key everything is computed again and compared. Beyond, so many queries
    are, and the rest must obey two identities: the probabilities of a query sum to one, so `key_sum` sums to zero over
    the keys, and both sums count the same similarities.
    """
    counts = checked["counts"]
    opened = np.flatnonzero(counts)
    every_key = config.alignment_keys == "all"
    keys = np.arange(len(counts)) if every_key else opened
    own = opened if every_key else np.arange(len(opened))  # Where the key of each open class stands.
    text = np.stack(
        [row / np.linalg.norm(row) for row in checked.get("text", checked["entry"])[keys].astype(np.float64)]
    )
    visual = np.zeros_like(text)
    queues = np.split(checked["cache"], np.cumsum(counts[opened])[:-1])
    for place, queue in zip(own, queues, strict=True):
        queue_mean(np.ascontiguousarray(queue), len(queue), visual[place])
    forward = config.alignment_direction == "visual-to-text"
    queries, offered = (visual, text) if forward else (text, visual)
    query_sum = np.zeros_like(text)
    query_sum[own] = checked["visual_sum"] if forward else checked["text_sum"]
    key_sum = np.zeros_like(text)
    key_sum[own if not forward else slice(None)] = checked["text_sum"] if forward else checked["visual_sum"]

    asked = np.ascontiguousarray(own[:: math.ceil(len(own) * len(keys) / _PROVEN_PAIRS)])
    right = [np.zeros_like(text), np.zeros_like(text), np.ones(len(text)), np.zeros(len(text))]
    alignment.contrast(queries, offered, asked, np.arange(len(text)), config.alignment_temperature, *right)
    places = {int(place): at for at, place in enumerate(own)}
    stored = [places[int(place)] for place in asked]
    same = (
        np.allclose(query_sum[asked], right[0][asked], rtol=_DRIFT_TOLERANCE, atol=_DRIFT_TOLERANCE)
        and np.allclose(checked["normaliser"][stored], right[2][asked], rtol=1e-6)
        and np.allclose(checked["diagonal"][stored], right[3][asked], atol=1e-9)
        and np.allclose(checked["applied"], checked["normaliser"], rtol=_DRIFT_TOLERANCE)
    )
    if len(asked) == len(own):
        same = same and np.allclose(key_sum, right[1], rtol=_DRIFT_TOLERANCE, atol=_DRIFT_TOLERANCE)
    else:
        allowed = _DRIFT_TOLERANCE * len(own)
        by_query, by_key = np.einsum("kd,kd->", query_sum, queries), np.einsum("kd,kd->", key_sum, offered)
        same = same and bool(np.abs(key_sum.sum(axis=0)).max() <= allowed and abs(by_query - by_key) <= allowed)
    if not same:
        raise StateError("the state's alignment sums contradict its queues and prototypes")


def _check_counters(config: Config, counters: Counters) -> None:
    sequence = counter(counters, "sequence", high=2**62)
    learned = counter(counters, "learned", high=sequence)
    known = counter(counters, "known", high=learned)
    if learned + counter(counters, "skipped") != sequence or known + counter(counters, "unknown") != learned:
        raise StateError("the state's known, unknown and skipped samples do not add up to all samples")
    for name in ("trusted", "cached", "fits", "failed_fits"):
        counter(counters, name, high=learned * config.cache_size)
    counter(counters, "evolved", high=counter(counters, "passed", high=known))
    counter(counters, "confirmed", high=known)
    counter(counters, "alignment_updates", high=alignment.REBUILD_AFTER - 1)
    if not isinstance(counters["fitted"], bool):
        raise StateError("the state does not say whether its mixture is fitted")
    if counters["fitted"] and not counters["fits"]:
        raise StateError("the state has a mixture that was never fitted")
    for name, high in (("cold_threshold", 2.001), ("evolution_threshold", 1e6)):
        value = counters[name]
        number = isinstance(value, float | int) and not isinstance(value, bool)
        if value != getattr(config, name) and not (number and -0.001 <= value <= high):  # type: ignore[operator]
            raise StateError(f"the state's {name} is {value!r}, it must lie from 0 to {high}")


def _check_range(array: NDArray[Any], name: str, low: float, high: float) -> None:
    if not ((array >= low) & (array <= high)).all():
        raise StateError(f"the state's array {name!r} has values outside {low} to {high}")


def _squares(rows: NDArray[np.float32]) -> NDArray[np.float32]:
    squares: NDArray[np.float32] = np.einsum("kd,kd->k", rows, rows)
    return squares


def _check_unit(rows: NDArray[np.float32], name: str) -> None:
    if not (np.abs(_squares(rows) - 1.0) < _UNIT_TOLERANCE).all():
        raise StateError(f"the state's array {name!r} has rows that are not of length one")


def _check_mixture(parameters: NDArray[np.float64], fitted: bool) -> None:
    if not fitted:
        if parameters.any():
            raise StateError("the state holds parameters of a mixture that it says is not fitted")
        return
    weights, variances = parameters[[0, 3]], parameters[[2, 5]]
    ordered = parameters[1] <= parameters[4]
    if not (ordered and (weights > 0).all() and abs(weights.sum() - 1) < 1e-9 and (variances > 0).all()):
        raise StateError("the state's mixture is none: weights, means or variances are impossible")

"""Engine slot: load one stream after another into the same arrays, without building an engine for each.

A slot needs a state with a class bias and an even number of feature dimensions. Other states go through
`StreamState.export` and `StreamState.restored`, and an image made here equals one made from those to the last bit.
Floating-point numbers are not checked, so a slot must only load states that this program has written itself.
"""

from collections.abc import Callable
from operator import is_
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .. import mixture, parcel
from ..base import decided
from ..compiled import kernel
from .bimodality import MAX_NOVELTY
from .class_bias import correction
from .class_concentration import ClassConcentration
from .signal_weights import TEXT
from .state import StreamState
from .verification import REMOVED

Words = NDArray[np.uint64]

# The arrays of a state without its prototypes: those that the engine keeps in another form, and its own ones.
_SMALL = ("fallback", "memory_added", "noise_maxima", "rules", "signal_scales")
_LIVE = (
    "baseline_moments", "baseline_pool", "baseline_seen", "bias_rows", "bias_sums", "bias_vectors", "confidences",
    "feature_mean", "head", "history", "known_memory", "mixture", "predicted", "signal_added", "signal_rings",
    "top_class", "unknown_memory",
)  # fmt: skip
_ARRAYS = len(_SMALL) + len(_LIVE)
_COUNTS = ("seen", "memory_ready_at", "passes", "since_pass", "fits", "failed_fits")
_FLAGS = ("refitted", "fitted")
_LARGEST = 2**56
# The arrays that grow with a stream, and the words in each of their rows; None is half the dimension of a feature.
_GROWING = (
    ("confidences", 1), ("history", 4), ("known_memory", None), ("predicted", 1), ("top_class", 1),
    ("unknown_memory", None),
)  # fmt: skip
_KNOWN, _UNKNOWN = 2, 5
# A slot may have at most this factor of the room that a stream needs, plus some rows: otherwise small streams would
# take as much memory as large ones.
_MAX_ROOM, _SPARE_SAMPLES, _SPARE_ROWS = 2, 256, 32
# Reserved sizes are those of `parcel`, here in words of 64 bits.
_WORD, _LEAST = 8, parcel.BLOCK // 8


@kernel("boolean(int64[::1], int64, int64)")
def all_within(values: NDArray[np.int64], low: int, high: int) -> bool:
    """Whether all values (n,) are from `low` to `high`."""
    right = True
    for i in range(values.shape[0]):
        right &= low <= values[i] <= high
    return right


@kernel("int64(int64)")
def room(size: int) -> int:
    """Return the words reserved for an array of `size` words."""
    if size == 0:
        return 0
    step = _LEAST
    while 8 * step <= size:
        step *= 2
    return step * (1 + size // step)


@kernel("int64(int64[::1])")
def extent(sizes: NDArray[np.int64]) -> int:
    """Return the words reserved for arrays of these sizes."""
    total = 0
    for i in range(sizes.shape[0]):
        total += room(sizes[i])
    return total


@kernel(f"void(UniTuple(uint64[::1], {_ARRAYS}), int64[::1], uint64[::1])")
def gather(parts: tuple[Words, ...], sizes: NDArray[np.int64], out: Words) -> None:
    """Write the first `sizes` words of each of the `parts` into `out`, each padded with zeros to its reserved size."""
    at = 0
    for i in range(len(parts)):
        size = sizes[i]
        end = at + room(size)
        out[at : at + size] = parts[i][:size]
        out[at + size : end] = 0
        at = end


@kernel(f"void(uint64[::1], int64[::1], UniTuple(uint64[::1], {_ARRAYS}))")
def scatter(data: Words, sizes: NDArray[np.int64], parts: tuple[Words, ...]) -> None:
    """Write what `gather` put together back into its parts."""
    at = 0
    for i in range(len(parts)):
        size = sizes[i]
        parts[i][:size] = data[at : at + size]
        at += room(size)


def fits_slot(memory: Any) -> bool:
    """Whether a state can be in a slot: it owns all its arrays, and they consist of whole words."""
    if not isinstance(memory, StreamState) or memory.class_bias is None:
        return False
    shared = memory.verification.bank._shared or memory.class_bias._shared
    return not shared and memory.prototypes.shape[1] % 2 == 0


class EngineSlot:
    """A state that can become that of one stream after the other.

    Attributes:
        names, kinds: of the arrays of a state, in their order in an image.
        shapes, sizes: their lengths along all axes, and their sizes in words, of the stream in this slot.
        small: the arrays that the engine keeps in another form.
    """

    def __init__(self, memory: StreamState):
        assert memory.class_bias is not None
        self.memory, self._verification, self._bias = memory, memory.verification, memory.class_bias
        counters, arrays = memory.export()
        del arrays["entry"]
        self._counters = tuple(counters)
        self.names = tuple(sorted(arrays))
        self.kinds = tuple((arrays[name].dtype, arrays[name].ndim) for name in self.names)
        self.shapes = [length for name in self.names for length in arrays[name].shape]
        self.sizes = np.array([arrays[name].nbytes // _WORD for name in self.names])
        self.small = {
            "fallback": np.zeros(12),
            "memory_added": np.zeros(2, dtype=np.int64),
            "noise_maxima": np.zeros(2),
            "rules": np.zeros(2),
            "signal_scales": np.zeros((4, 4)),
        }
        axis = {name: sum(axes for _, axes in self.kinds[:at]) for at, name in enumerate(self.names)}
        width = memory.prototypes.shape[1] // 2
        self._growing = [(axis[name], self.names.index(name), words or width) for name, words in _GROWING]
        self._known: list[NDArray[Any]] = []
        self._parts: tuple[Words, ...] = ()

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays of the stream in this slot."""
        return _WORD * int(self.sizes.sum())

    def image(self, header: dict[str, Any], blank: Callable[[int], parcel.Bytes]) -> parcel.Image:
        """Return the image of the stream in this slot, on blocks that `blank` returns, whatever they hold."""
        verification = self._verification
        self._bind()
        self._resize(_rows(verification.text.size, *verification.bank.held))
        self._write_small()
        front = parcel.front(header, self.names, self.kinds, self.shapes, self.memory.counters())
        blocks = blank((len(front) + _WORD * extent(self.sizes)) // parcel.BLOCK)
        flat = blocks.reshape(-1)
        flat[: len(front)] = np.frombuffer(front, dtype=np.uint8)
        gather(self._parts, self.sizes, flat[len(front) :].view(np.uint64))
        return parcel.Image(blocks, parcel.digests_of(blocks))

    def take(self, found: parcel.Front, blocks: parcel.Bytes) -> bool:
        """Load the stream of an image. Return False if it does not fit or is not valid.

        The stream that was here before is lost in any case.
        """
        counters = found.counters
        if found.said.names != self.names or found.said.kinds != self.kinds or tuple(counters) != self._counters:
            return False
        decided(counters)
        data = blocks.reshape(-1)[found.end :].view(np.uint64)
        if not _valid(counters) or not self._fits(found, len(data)):
            return False
        self._bind()
        scatter(data, self.sizes, self._parts)
        if not self._is_valid(counters):
            return False
        self._restore(counters)
        return True

    def _live(self) -> list[NDArray[Any]]:
        """Return the arrays of the state, in the order of `_LIVE`."""
        verification, bias = self._verification, self._bias
        baseline, bank, weights = verification.baseline, verification.bank, verification.signal_weights
        return [
            baseline.moments, baseline.pool, baseline.seen, bias.rows, bias.sums, bias.vectors,
            verification.confidences, bank.mean, verification.head.weights, verification.history, bank.known,
            verification.bimodality.parameters, verification.predicted, weights.added, weights.rings,
            verification.top_class, bank.unknown,
        ]  # fmt: skip

    def _bind(self) -> None:
        """Look up the arrays again if one was replaced by another."""
        live = self._live()
        if len(live) == len(self._known) and all(map(is_, live, self._known)):
            return
        arrays = {**self.small, **dict(zip(_LIVE, live, strict=True))}
        self._parts = tuple(arrays[name].reshape(-1).view(np.uint64) for name in self.names)
        self._known = live

    def _resize(self, rows: tuple[int, ...]) -> None:
        """Take the shapes of a stream with this many rows in the arrays of `_GROWING`."""
        for (axis, place, words), count in zip(self._growing, rows, strict=True):
            self.shapes[axis] = count
            self.sizes[place] = count * words

    def _write_small(self) -> None:
        """Bring the small arrays up to date."""
        small, verification = self.small, self._verification
        bank, weights, fallback = verification.bank, verification.signal_weights, verification.fallback
        small["fallback"][:] = (*fallback.sums.tolist(), fallback.cut, fallback.settled, *fallback.concentration)
        small["memory_added"][:] = bank.unknown_added, bank.known_added
        small["noise_maxima"][:] = verification.baseline.noise_maxima
        small["rules"][:] = verification.bimodality.share, verification.cut
        small["signal_scales"][:] = weights.places, weights.scales, weights.weights, weights.separation
        # `export` writes zeros for a mixture that is not in use.
        if not verification.bimodality.fitted:
            verification.bimodality.parameters[:] = 0.0

    def _fits(self, found: parcel.Front, words: int) -> bool:
        """Take the shapes of an image. Return False if they contradict its counters or there is no room for them."""
        bank = self._verification.bank
        rows = tuple(found.shapes[axis] for axis, _, _ in self._growing)
        known, unknown = rows[_KNOWN], rows[_UNKNOWN]
        held = min(found.counters["seen"], self.memory.config.history)
        if (
            rows != _rows(held, unknown, known)
            or not held <= len(self._verification.history) <= _MAX_ROOM * held + _SPARE_SAMPLES
            or not 0 <= unknown <= len(bank.unknown) <= _MAX_ROOM * unknown + _SPARE_ROWS
            or not 0 <= known <= len(bank.known) <= _MAX_ROOM * known + _SPARE_ROWS
        ):
            return False
        self._resize(rows)
        return tuple(self.shapes) == found.shapes and extent(self.sizes) <= words

    def _is_valid(self, counters: dict[str, Any]) -> bool:
        """Whether the integers in this slot are valid, and `noise_maxima` is that of the shared prototypes."""
        verification, small, config = self._verification, self.small, self.memory.config
        seen, classes = counters["seen"], len(self.memory.prototypes)
        held = min(seen, config.history)
        mixture.check(
            verification.bimodality.parameters, counters["fitted"], (-MAX_NOVELTY, MAX_NOVELTY), MAX_NOVELTY**2
        )
        unknown, known = small["memory_added"].tolist()
        return bool(
            self.shapes[self._growing[_UNKNOWN][0]] == min(unknown, config.unknown_memory)
            and self.shapes[self._growing[_KNOWN][0]] == min(known, config.known_memory)
            and max(unknown, known) <= seen
            and small["noise_maxima"].tolist() == verification.baseline.noise_maxima.tolist()
            and all_within(verification.predicted[:held], REMOVED, classes - 1)
            and all_within(verification.top_class[:held], REMOVED, classes - 1)
            and all_within(verification.signal_weights.added, 0, seen)
        )

    def _restore(self, counters: dict[str, Any]) -> None:
        """Set everything that follows from the arrays and the counters."""
        memory, bias, verification, small = self.memory, self._bias, self._verification, self.small
        memory.sequence, memory.learned, memory.known = (counters[name] for name in ("sequence", "learned", "known"))
        bias.beta = correction(bias.vectors, bias.sums, bias.temperature, bias.logits)
        verification.seen, verification.memory_ready_at = counters["seen"], counters["memory_ready_at"]
        verification.refitted = counters["refitted"]
        verification.latest[:] = 0.0
        held = min(verification.seen, memory.config.history)
        verification.text.restore(verification.history[:held, TEXT], verification.seen)
        verification.baseline.noise_floor = verification.baseline._measure_noise_floor()
        verification.bimodality.share, verification.cut = small["rules"].tolist()
        for name in verification.bimodality.SCALARS:
            setattr(verification.bimodality, name, counters[name])
        bank, weights, fallback = verification.bank, verification.signal_weights, verification.fallback
        bank.unknown_added, bank.known_added = small["memory_added"].tolist()
        bank.recount()
        weights.places[:], weights.scales[:], weights.weights[:], weights.separation[:] = small["signal_scales"]
        weights._update_coefficients()
        *sums, cut, settled, alarm, crowded, all_unknown, even, runs, unsure = small["fallback"].tolist()
        fallback.sums[:], fallback.cut, fallback.settled = sums, cut, bool(settled)
        flags = map(bool, (all_unknown, even, runs, unsure))
        fallback.concentration = ClassConcentration(alarm, crowded, *flags)


def _rows(held: int, unknown: int, known: int) -> tuple[int, ...]:
    """Return the number of rows of each of the arrays of `_GROWING`."""
    return held, held, known, held, held, unknown


def _valid(counters: dict[str, Any]) -> bool:
    """Whether the counters of the verification are valid."""
    for name in _COUNTS:
        if type(counters[name]) is not int or not 0 <= counters[name] < _LARGEST:
            return False
    if any(type(counters[name]) is not bool for name in _FLAGS):
        return False
    return bool(counters["learned"] <= counters["seen"] >= counters["memory_ready_at"])

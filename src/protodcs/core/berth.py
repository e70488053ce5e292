"""Where one stream after the other lies in the same arrays: far less work than to build an engine for each of them.

Only a memory without queues, with a class bias and with the text prototypes it started from, can lie so: that is what
the preset `default` has. What does not fit is left to `Memory.export` and `Memory.restored`, and an image made here is
the same to the last bit as theirs. Real numbers are taken as they are, so a state that comes here must be one's own.
"""

from collections.abc import Callable
from operator import is_
from typing import Any

import numpy as np
from numpy.typing import NDArray

from . import mixture, parcel
from .bias import correction
from .compiled import kernel
from .concentration import Crowd
from .memory import Memory
from .modes import STRANGEST
from .proof import SCALARS, check_counters
from .trust import TEXT
from .verification import GONE

Words = NDArray[np.uint64]

# The arrays of a state without its entry prototypes: those that are empty here - the queues, what waits for them, and a
# window that only verification by openness fills -, those that a memory keeps as something else, and its own.
_EMPTY = (
    "cache", "quality", "pull", "pull_rest", "visual_sum", "normaliser", "applied", "diagonal",
    "buffer", "buffer_class", "buffer_quality", "mixture_window",
)  # fmt: skip
_SMALL = ("counts", "stream_chance", "stream_cold", "stream_entered", "stream_rules", "stream_signal_scales")
_LIVE = (
    "bias_rows", "bias_sums", "bias_vectors", "gate_window", "mixture",
    "quality_window", "stream_confidences", "stream_familiars", "stream_foremost",
    "stream_head", "stream_history", "stream_mean", "stream_modes",
    "stream_moments", "stream_pool", "stream_predicted", "stream_ring_entered", "stream_rings", "stream_seen",
    "stream_strangers",
)  # fmt: skip
_ARRAYS = len(_EMPTY) + len(_SMALL) + len(_LIVE)
_COUNTS = tuple(f"stream_{name}" for name in ("seen", "silent", "proofs", "unproven", "fits", "failed_fits"))
_TRUTHS = ("stream_weighed", "stream_fitted")
_LARGEST = 2**56
# The arrays that grow with a stream, and how many words a row of them has; None is half of the width of a feature.
_GROWING = (
    ("gate_window", 1), ("quality_window", 1), ("stream_confidences", 1), ("stream_familiars", None),
    ("stream_foremost", 1), ("stream_history", 4), ("stream_predicted", 1), ("stream_strangers", None),
)  # fmt: skip
_FAMILIARS, _STRANGERS = 3, 7
# A berth may have so many times the room that a stream needs, and some rows more: else small streams would come to take
# as much as large ones.
_MOST_ROOM, _SPARE_SAMPLES, _SPARE_ROWS = 2, 256, 32
# An array gets room as in `parcel`, here in words of 64 bits.
_WORD, _LEAST = 8, parcel.BLOCK // 8


@kernel("boolean(int64[::1], int64, int64)")
def all_within(values: NDArray[np.int64], low: int, high: int) -> bool:
    """Whether all values (n,) lie from `low` to `high`."""
    right = True
    for i in range(values.shape[0]):
        right &= low <= values[i] <= high
    return right


@kernel("int64(int64)")
def room(size: int) -> int:
    """How many words an array of `size` words gets."""
    if size == 0:
        return 0
    step = _LEAST
    while 8 * step <= size:
        step *= 2
    return step * (1 + size // step)


@kernel("int64(int64[::1])")
def extent(sizes: NDArray[np.int64]) -> int:
    """How many words arrays of these sizes get in all."""
    total = 0
    for i in range(sizes.shape[0]):
        total += room(sizes[i])
    return total


@kernel(f"void(UniTuple(uint64[::1], {_ARRAYS}), int64[::1], uint64[::1])")
def gather(parts: tuple[Words, ...], sizes: NDArray[np.int64], out: Words) -> None:
    """The first `sizes` words of each of the `parts` into `out`, each in its room, and zeros after it."""
    at = 0
    for i in range(len(parts)):
        size = sizes[i]
        end = at + room(size)
        out[at : at + size] = parts[i][:size]
        out[at + size : end] = 0
        at = end


@kernel(f"void(uint64[::1], int64[::1], UniTuple(uint64[::1], {_ARRAYS}))")
def scatter(data: Words, sizes: NDArray[np.int64], parts: tuple[Words, ...]) -> None:
    """What `gather` put together, back into its parts."""
    at = 0
    for i in range(len(parts)):
        size = sizes[i]
        parts[i][:size] = data[at : at + size]
        at += room(size)


def can_lie(memory: Any) -> bool:
    """Whether a memory keeps nothing but what its verification, its bias and its windows hold, in their own arrays."""
    if not isinstance(memory, Memory) or memory.verification is None or memory.bias is None:
        return False
    if memory.verification.recall._shared or memory.bias._shared or memory.buffered or memory.entry.shape[1] % 2:
        return False
    quiet = memory.text is memory.entry and memory._shared.issuperset(memory._CACHED)
    return quiet and memory.config.alignment_keys == "open"


class Berth:
    """A memory that can become that of one stream after the other.

    Attributes:
        names, kinds: of the arrays of a state, in their order in an image.
        shapes, sizes: their lengths along all axes, and how many words each has, of the stream that lies here.
        small: arrays that a memory keeps as something else, or shares.
    """

    def __init__(self, memory: Memory):
        assert memory.verification is not None
        assert memory.bias is not None
        self.memory, self._verification, self._bias = memory, memory.verification, memory.bias
        counters, arrays = memory.export()
        del arrays["entry"]
        self._counters = tuple(counters)
        self.names = tuple(sorted(arrays))
        self.kinds = tuple((arrays[name].dtype, arrays[name].ndim) for name in self.names)
        self.shapes = [length for name in self.names for length in arrays[name].shape]
        self.sizes = np.array([arrays[name].nbytes // _WORD for name in self.names])
        self.small = {
            "counts": np.zeros_like(memory.counts),
            "stream_chance": np.zeros(2),
            "stream_cold": np.zeros(12),
            "stream_entered": np.zeros(2, dtype=np.int64),
            "stream_rules": np.zeros(2),
            "stream_signal_scales": np.zeros((4, 4)),
        }
        axis = {name: sum(axes for _, axes in self.kinds[:at]) for at, name in enumerate(self.names)}
        width = memory.entry.shape[1] // 2
        self._growing = [(axis[name], self.names.index(name), words or width) for name, words in _GROWING]
        self._known: list[NDArray[Any]] = []
        self._parts: tuple[Words, ...] = ()

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays of the stream that was last laid out or taken over."""
        return _WORD * int(self.sizes.sum())

    def image(self, header: dict[str, Any], blank: Callable[[int], parcel.Bytes]) -> parcel.Image:
        """Lay out the stream that lies here, on blocks that `blank` gives, whatever is on them."""
        memory, verification = self.memory, self._verification
        self._follow()
        held = verification.text.size, *verification.recall.held
        self._resize(_rows(*held, memory.gate_window.size, memory.quality_window.size))
        self._put_small()
        front = parcel.front(header, self.names, self.kinds, self.shapes, memory.counters())
        blocks = blank((len(front) + _WORD * extent(self.sizes)) // parcel.BLOCK)
        flat = blocks.reshape(-1)
        flat[: len(front)] = np.frombuffer(front, dtype=np.uint8)
        gather(self._parts, self.sizes, flat[len(front) :].view(np.uint64))
        return parcel.Image(blocks, parcel.digests_of(blocks))

    def take(self, found: parcel.Front, blocks: parcel.Bytes) -> bool:
        """Let the stream of an image lie here; False where it does not fit, or is none that could.

        What lay here before is lost in any case.
        """
        counters = found.counters
        if found.said.names != self.names or found.said.kinds != self.kinds or tuple(counters) != self._counters:
            return False
        check_counters(self.memory.config, counters)
        data = blocks.reshape(-1)[found.end :].view(np.uint64)
        if counters["evolved"] or not _whole(counters) or not self._fits(found, len(data)):
            return False
        self._follow()
        scatter(data, self.sizes, self._parts)
        if not self._is_right(counters):
            return False
        self._recover(counters)
        self._recover_verification(counters)
        return True

    def _live(self) -> list[NDArray[Any]]:
        """The arrays of the memory in which a state lies, in the order of `_LIVE`."""
        memory, verification, bias = self.memory, self._verification, self._bias
        background, recall, trust = verification.background, verification.recall, verification.trust
        return [
            bias.rows, bias.sums, bias.vectors, memory.gate_window.arrivals, memory.mixture,
            memory.quality_window.arrivals, verification.confidences, recall.familiars, verification.foremost,
            verification.head.weights, verification.history, recall.mean, verification.modes.parameters,
            background.moments, background.pool, verification.predicted, trust.entered, trust.rings, background.seen,
            recall.strangers,
        ]  # fmt: skip

    def _follow(self) -> None:
        """Look at the arrays again where one was replaced by another."""
        live = self._live()
        if len(live) == len(self._known) and all(map(is_, live, self._known)):
            return
        nothing = np.zeros(0, dtype=np.uint64)
        arrays = {**dict.fromkeys(_EMPTY, nothing), **self.small, **dict(zip(_LIVE, live, strict=True))}
        self._parts = tuple(arrays[name].reshape(-1).view(np.uint64) for name in self.names)
        self._known = live

    def _resize(self, rows: tuple[int, ...]) -> None:
        """Take on the shapes of a stream with so many rows in the arrays of `_GROWING`."""
        for (axis, place, words), count in zip(self._growing, rows, strict=True):
            self.shapes[axis] = count
            self.sizes[place] = count * words

    def _put_small(self) -> None:
        """Bring the small arrays up to date."""
        small, verification = self.small, self._verification
        recall, trust, cold = verification.recall, verification.trust, verification.cold
        small["counts"][:] = 0
        small["stream_chance"][:] = verification.background.chance
        small["stream_cold"][:] = (*cold.sums.tolist(), cold.cut, cold.settled, *cold.crowd)
        small["stream_entered"][:] = recall.strangers_seen, recall.familiars_seen
        small["stream_rules"][:] = verification.modes.share, verification.cut
        small["stream_signal_scales"][:] = trust.places, trust.scales, trust.weights, trust.separation
        # What is not in force is not kept: it is never looked at again.
        if not verification.modes.fitted:
            verification.modes.parameters[:] = 0.0
        if not self.memory.fitted:
            self.memory.mixture[:] = 0.0

    def _fits(self, found: parcel.Front, words: int) -> bool:
        """Whether an image has the shapes that its numbers ask for, and there is room for it; takes them on if so."""
        config, counters, recall = self.memory.config, found.counters, self._verification.recall
        rows = tuple(found.shapes[axis] for axis, _, _ in self._growing)
        familiars, strangers = rows[_FAMILIARS], rows[_STRANGERS]
        held = min(counters["stream_seen"], config.history)
        gated, confirmed = (min(config.gate_window, counters[name]) for name in ("learned", "confirmed"))
        samples = len(self._verification.history)
        if (
            rows != _rows(held, strangers, familiars, gated, confirmed)
            or not held <= samples <= _MOST_ROOM * held + _SPARE_SAMPLES
            or not 0 <= strangers <= len(recall.strangers) <= _MOST_ROOM * strangers + _SPARE_ROWS
            or not 0 <= familiars <= len(recall.familiars) <= _MOST_ROOM * familiars + _SPARE_ROWS
        ):
            return False
        self._resize(rows)
        return tuple(self.shapes) == found.shapes and extent(self.sizes) <= words

    def _is_right(self, counters: dict[str, Any]) -> bool:
        """Whether the whole numbers that now lie here are some that a stream could have.

        What noise reaches by chance must be what it is here, since engines share it.
        """
        verification, small, config = self._verification, self.small, self.memory.config
        seen, classes, modes = counters["stream_seen"], len(self.memory.counts), verification.modes
        held = min(seen, config.history)
        mixture.check(self.memory.mixture, counters["fitted"], (-0.001, 2.001), 1.001)
        mixture.check(modes.parameters, counters["stream_fitted"], (-STRANGEST, STRANGEST), STRANGEST * STRANGEST)
        strangers, familiars = small["stream_entered"].tolist()
        return bool(
            self.shapes[self._growing[_STRANGERS][0]] == min(strangers, config.strangers)
            and self.shapes[self._growing[_FAMILIARS][0]] == min(familiars, config.familiars)
            and max(strangers, familiars) <= seen
            and not small["counts"].any()
            and small["stream_chance"].tolist() == verification.background.chance.tolist()
            and all_within(verification.predicted[:held], GONE, classes - 1)
            and all_within(verification.foremost[:held], GONE, classes - 1)
            and all_within(verification.trust.entered, 0, seen)
        )

    def _recover(self, counters: dict[str, Any]) -> None:
        """What follows from the arrays in the memory itself and in its bias."""
        memory, bias = self.memory, self._bias
        for name in SCALARS:
            setattr(memory, name, counters[name])
        for window, pushed in ((memory.gate_window, memory.learned), (memory.quality_window, counters["confirmed"])):
            window.pushed = pushed
            window.ordered[: window.size] = np.sort(window.arrivals[: window.size])
        memory.mixture_window.pushed = 0
        bias.beta = correction(bias.vectors, bias.sums, bias.temperature, bias.logits)

    def _recover_verification(self, counters: dict[str, Any]) -> None:
        """The same in the verification and its parts."""
        verification, small = self._verification, self.small
        recall, trust, modes, cold = verification.recall, verification.trust, verification.modes, verification.cold
        verification.seen, verification.silent = counters["stream_seen"], counters["stream_silent"]
        verification.weighed = counters["stream_weighed"]
        verification.latest[:] = 0.0
        held = min(verification.seen, self.memory.config.history)
        verification.text.restore(verification.history[:held, TEXT], verification.seen)
        verification.background.level = verification.background._level()
        modes.share, verification.cut = small["stream_rules"].tolist()
        for name in modes.SCALARS:
            setattr(modes, name, counters[f"stream_{name}"])
        recall.strangers_seen, recall.familiars_seen = small["stream_entered"].tolist()
        recall.recount()
        trust.places[:], trust.scales[:], trust.weights[:], trust.separation[:] = small["stream_signal_scales"]
        trust._mix()
        *sums, cut, settled, alarm, crowded, strange, even, runs, unsure = small["stream_cold"].tolist()
        cold.sums[:], cold.cut, cold.settled = sums, cut, bool(settled)
        cold.crowd = Crowd(alarm, crowded, bool(strange), bool(even), bool(runs), bool(unsure))


def _rows(held: int, strangers: int, familiars: int, gated: int, confirmed: int) -> tuple[int, ...]:
    """How many rows each of the arrays of `_GROWING` has."""
    return gated, confirmed, held, familiars, held, held, held, strangers


def _whole(counters: dict[str, Any]) -> bool:
    """Whether the numbers of the verification are some that it could have."""
    for name in _COUNTS:
        if type(counters[name]) is not int or not 0 <= counters[name] < _LARGEST:
            return False
    if any(type(counters[name]) is not bool for name in _TRUTHS):
        return False
    return bool(counters["learned"] <= counters["stream_seen"] >= counters["stream_silent"])

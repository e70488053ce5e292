"""Lets an engine that is at hand become another stream, in its own arrays: far less work than to build it anew.

Only a memory without queues, and with the text prototypes it started from, can be taken over so: that is all that the
preset `default` ever has. What does not fit, or is not as it must be, is left to `Memory.restored`, which says so in
words; here it changes nothing. Real numbers are taken as they are, so a state that comes here must be one's own.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from . import mixture, state
from .bias import correction
from .compiled import kernel
from .concentration import Crowd
from .memory import Memory
from .modes import STRANGEST
from .proof import SCALARS, check_counters
from .recall import LEAST_ROWS
from .trust import TEXT
from .verification import GONE, Verification

Targets = dict[str, NDArray[Any]]

_REAL, _WHOLE = np.dtype(np.float64), np.dtype(np.int64)
# What must be empty: the queues, what waits for them, and a window that only verification by openness fills.
_EMPTY = (
    "cache", "quality", "pull", "pull_rest", "visual_sum", "normaliser", "applied", "diagonal",
    "buffer", "buffer_class", "buffer_quality", "mixture_window",
)  # fmt: skip
# Arrays that a memory keeps as something else, with their types and shapes.
_SMALL: dict[str, tuple[np.dtype[Any], tuple[int, ...]]] = {
    "stream_entered": (_WHOLE, (2,)),
    "stream_rules": (_REAL, (2,)),
    "stream_signal_scales": (_REAL, (4, 4)),
    "stream_cold": (_REAL, (12,)),
}
_OTHERS = frozenset((*_EMPTY, *_SMALL, "counts", "gate_window", "quality_window", "stream_chance"))
_COUNTS = tuple(f"stream_{name}" for name in ("seen", "silent", "proofs", "unproven", "fits", "failed_fits"))
_TRUTHS = ("stream_weighed", "stream_fitted")
_COUNTERS = frozenset((*SCALARS, "confirmed", "unknown", "skipped", *_COUNTS, *_TRUTHS))
_LARGEST = 2**56
# A memory may have so many times the room that a stream needs, and some rows more: else small streams would come to
# take as much as large ones.
_MOST_ROOM, _SPARE = 2, 256


@kernel("boolean(int64[::1], int64, int64)")
def all_within(values: NDArray[np.int64], low: int, high: int) -> bool:
    """Whether all values (n,) lie from `low` to `high`."""
    right = True
    for i in range(values.shape[0]):
        right &= low <= values[i] <= high
    return right


def refill(memory: Any, counters: dict[str, Any], arrays: state.Arrays) -> bool:
    """Let `memory` become the one that was exported, whose entry prototypes are its own.

    Returns False, with nothing changed, where that one must be built anew.
    """
    if not isinstance(memory, Memory) or not _is_quiet(memory) or counters.keys() != _COUNTERS:
        return False
    check_counters(memory.config, counters)
    if not _can_be(memory, counters, arrays):
        return False
    assert memory.verification is not None
    targets = _targets(memory, memory.verification, counters["stream_seen"], arrays["stream_entered"].tolist())
    if not _fit(memory, memory.verification, counters, targets, arrays):
        return False
    for name, target in targets.items():
        target[:] = arrays[name]
    _take_over(memory, counters, arrays)
    _take_over_verification(memory.verification, counters, arrays)
    return True


def _is_quiet(memory: Memory) -> bool:
    """Whether a memory keeps nothing but what its verification, its bias and its windows hold, in their own arrays."""
    verification, bias = memory.verification, memory.bias
    if verification is None or verification.recall._shared or (bias is not None and bias._shared):
        return False
    return memory.text is memory.entry and not memory.buffered and memory._shared.issuperset(memory._CACHED)


def _can_be(memory: Memory, counters: dict[str, Any], arrays: state.Arrays) -> bool:
    """Whether a state is of such a memory too, with numbers that it could have."""
    seen, silent, *counts = (counters[name] for name in _COUNTS)
    for count in (seen, silent, *counts):
        if type(count) is not int or not 0 <= count < _LARGEST:
            return False
    if any(type(counters[name]) is not bool for name in _TRUTHS) or not arrays.keys() >= _OTHERS:
        return False
    for name, (dtype, shape) in _SMALL.items():
        if arrays[name].dtype != dtype or arrays[name].shape != shape:
            return False
    queues = arrays["counts"]
    return bool(
        counters["learned"] <= seen >= silent
        and not counters["evolved"]
        and not any(arrays[name].size for name in _EMPTY)
        and queues.shape == memory.counts.shape
        and not queues.any()
        and all_within(arrays["stream_entered"], 0, seen)
    )


def _targets(memory: Memory, verification: Verification, seen: int, entered: list[int]) -> Targets:
    """Where the arrays of a state go, by their names in it.

    Those that grow with the stream are given as far as a state fills them, and shorter where there is no room for it.
    """
    background, recall, trust, config = verification.background, verification.recall, verification.trust, memory.config
    held = min(seen, config.history)
    targets: Targets = {
        "mixture": memory.mixture,
        "stream_seen": background.seen,
        "stream_moments": background.moments,
        "stream_pool": background.pool,
        "stream_mean": recall.mean,
        "stream_head": verification.head.weights,
        "stream_rings": trust.rings,
        "stream_ring_entered": trust.entered,
        "stream_modes": verification.modes.parameters,
        "stream_history": verification.history[:held],
        "stream_predicted": verification.predicted[:held],
        "stream_foremost": verification.foremost[:held],
        "stream_confidences": verification.confidences[:held],
        "stream_strangers": recall.strangers[: min(entered[0], config.strangers)],
        "stream_familiars": recall.familiars[: min(entered[1], config.familiars)],
    }
    if memory.bias is not None:
        targets |= {"bias_rows": memory.bias.rows, "bias_vectors": memory.bias.vectors, "bias_sums": memory.bias.sums}
    return targets


def _fit(
    memory: Memory, verification: Verification, counters: dict[str, Any], targets: Targets, arrays: state.Arrays
) -> bool:
    """Whether the arrays of a state have the types and shapes of those that they go to, with whole numbers that can be.

    What noise reaches by chance must be what it is here, since engines share it.
    """
    if len(arrays) != len(targets) + len(_OTHERS):
        return False
    for name, target in targets.items():
        source = arrays.get(name)
        if source is None or source.shape != target.shape or source.dtype != target.dtype:
            return False
    for name, pushed in (("gate_window", counters["learned"]), ("quality_window", counters["confirmed"])):
        window = arrays[name]
        if window.dtype != _REAL or window.shape != (min(memory.config.gate_window, pushed),):
            return False
    recall, classes, seen = verification.recall, len(memory.counts), counters["stream_seen"]
    mixture.check(arrays["mixture"], counters["fitted"], (-0.001, 2.001), 1.001)
    mixture.check(arrays["stream_modes"], counters["stream_fitted"], (-STRANGEST, STRANGEST), STRANGEST * STRANGEST)
    return bool(
        np.array_equal(arrays["stream_chance"], verification.background.chance)
        and all_within(arrays["stream_predicted"], GONE, classes - 1)
        and all_within(arrays["stream_foremost"], GONE, classes - 1)
        and all_within(arrays["stream_ring_entered"], 0, seen)
        and len(verification.history) <= _MOST_ROOM * len(targets["stream_history"]) + _SPARE
        and len(recall.strangers) <= _MOST_ROOM * len(targets["stream_strangers"]) + _SPARE // 8
        and len(recall.familiars) <= _MOST_ROOM * len(targets["stream_familiars"]) + _SPARE // 8
    )


def _take_over(memory: Memory, counters: dict[str, Any], arrays: state.Arrays) -> None:
    """What follows the arrays in a memory itself and in its bias."""
    for name in SCALARS:
        setattr(memory, name, counters[name])
    memory.gate_window.restore(arrays["gate_window"], memory.learned)
    memory.quality_window.restore(arrays["quality_window"], counters["confirmed"])
    memory.mixture_window.pushed = 0
    if (bias := memory.bias) is not None:
        bias.beta = correction(bias.vectors, bias.sums, bias.temperature, bias.logits)


def _take_over_verification(verification: Verification, counters: dict[str, Any], arrays: state.Arrays) -> None:
    """The same for the verification and its parts."""
    recall, trust, modes, cold = verification.recall, verification.trust, verification.modes, verification.cold
    verification.seen, verification.silent = counters["stream_seen"], counters["stream_silent"]
    verification.weighed = counters["stream_weighed"]
    verification.signals = (0.0, 0.0, 0.0, 0.0)
    verification.text.restore(arrays["stream_history"][:, TEXT], verification.seen)
    verification.background.level = verification.background._level()
    modes.share, verification.cut = arrays["stream_rules"].tolist()
    for name in modes.SCALARS:
        setattr(modes, name, counters[f"stream_{name}"])
    recall.strangers_seen, recall.familiars_seen = arrays["stream_entered"].tolist()
    recall.ready = min(recall.held) >= LEAST_ROWS
    scales = arrays["stream_signal_scales"]
    trust.places[:], trust.scales[:], trust.weights[:], trust.separation[:] = scales
    trust._mix()
    values = arrays["stream_cold"].tolist()
    cold.sums[:], cold.cut, cold.settled = values[:4], values[4], bool(values[5])
    cold.crowd = Crowd(values[6], values[7], *map(bool, values[8:]))

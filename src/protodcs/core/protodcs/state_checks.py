"""Proves that the numbers and arrays of a state are ones that a ProtoDCS memory could have exported.

A state may come from a stranger, with a right hash over wrong numbers. Everything is checked here, on the arrays as
they came, before anything larger is made of them.
"""

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...errors import StateError
from .. import mixture, state
from ..base import Counters, Feature, check_unit, counter, is_own, required, truth, within
from ..vectors import invert_norms
from . import alignment
from .cache import queue_mean
from .config import ProtoDCSConfig

# How far the alignment sums of a state may lie from what its queues and prototypes make of them.
_DRIFT_TOLERANCE = 1e-5
# How many pairs of query and key a restore computes again to prove them: some milliseconds.
_PROVEN_PAIRS = 2**16
# Unit rows are rounded to float32: their squared length is one to about seven digits.
_UNIT_TOLERANCE = 1e-5

# Numbers beside the arrays, exported by name.
SCALARS = (
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


def since_flush(config: ProtoDCSConfig, learned: int) -> int:
    """How many samples came since the buffer was last emptied, which happens with each fit of the mixture."""
    if config.cache_admission != "buffered":
        return 0
    return learned if learned < config.mixture_start else config.mixture_period - config.until_refit(learned)


def proven(entry: Feature, config: ProtoDCSConfig, counters: Counters, arrays: state.Arrays) -> state.Arrays:
    """The arrays of an exported memory, each proven to be one that `export` could have written.

    `entry` (K, d) are its entry prototypes, which were proven before.
    """
    expected = {*SCALARS, "confirmed", "unknown", "skipped"}
    if set(counters) != expected:
        raise StateError(f"the state's counters are {sorted(counters)[:20]}, they must be {sorted(expected)}")
    check_counters(config, counters)
    learned, evolved = counter(counters, "learned"), counter(counters, "evolved")
    found = {name: array for name, array in arrays.items() if name != "entry"}
    checked: state.Arrays = {"entry": entry}

    def take(name: str, dtype: type, *shape: int | None) -> NDArray[Any]:
        checked[name] = required(found, name, dtype, shape)
        del found[name]
        return checked[name]

    classes, width = entry.shape
    if evolved:
        take("text", np.float32, classes, width)
        if config.evolution_norm == "unit":
            check_unit(checked["text"], "text")
        else:
            # A mean of unit vectors is no longer than they are, and one of zero length would have no direction.
            within(_squares(checked["text"]), "text", 1e-12, 1.0 + _UNIT_TOLERANCE)
    counts = take("counts", np.int64, classes)
    if not ((counts >= 0) & (counts <= config.cache_size)).all():
        raise StateError(f"the state's queues must hold 0 to {config.cache_size} features each")
    total, opened = int(counts.sum()), int(np.count_nonzero(counts))
    if total > counter(counters, "cached"):
        raise StateError(f"the state's queues hold {total} features, more than ever entered them")
    check_unit(take("cache", np.float32, total, width), "cache")
    within(take("quality", np.float64, total), "quality", 0.0, 1e6)
    for name in ("pull", "pull_rest"):
        take(name, np.float32, classes if config.alignment_keys == "all" else opened, width)
    take("visual_sum", np.float64, opened, width)
    for name in ("normaliser", "applied"):
        within(take(name, np.float64, opened), name, 1.0 - 1e-9, math.inf)
    within(take("diagonal", np.float64, opened), "diagonal", -1.001, 1.001)
    for name, capacity, pushed in (
        ("gate_window", config.gate_window, learned),
        ("mixture_window", config.mixture_window, learned),
    ):
        within(take(name, np.float64, min(capacity, pushed)), name, -0.001, 2.001)
    confirmed = counter(counters, "confirmed")
    within(take("quality_window", np.float64, min(config.gate_window, confirmed)), "quality_window", 0.0, 1e6)
    mixture.check(take("mixture", np.float64, mixture.PARAMETERS), bool(counters["fitted"]), (-0.001, 2.001), 1.001)
    waiting = len(take("buffer", np.float32, None, width))
    if waiting > since_flush(config, learned):
        raise StateError(f"the state's buffer holds {waiting} samples, more than came since it was last emptied")
    check_unit(checked["buffer"], "buffer")
    within(take("buffer_class", np.int64, waiting), "buffer_class", 0, classes - 1)
    within(take("buffer_quality", np.float64, waiting), "buffer_quality", 0.0, 1e6)
    if found:
        raise StateError(f"the state holds arrays that do not belong there: {sorted(found)[:10]}")
    if opened and not is_own():
        _check_alignment(config, checked)
    return checked


def _check_alignment(config: ProtoDCSConfig, checked: state.Arrays) -> None:
    """The accumulators must be what the queues and prototypes make of them.

    Up to `_PROVEN_PAIRS` pairs of query and key everything is computed again and compared. Beyond that so many
    queries are, and of the text side only its size: a row of `pull` is a sum of as many unit vectors as there are
    queries at most, and it stands at right angles to its prototype.
    """
    counts = checked["counts"]
    opened = np.flatnonzero(counts)
    every_key = config.alignment_keys == "all"
    keys = np.arange(len(counts)) if every_key else opened
    own = opened if every_key else np.arange(len(opened))  # Where the key of each open class stands.
    prototypes = np.ascontiguousarray(checked.get("text", checked["entry"])[keys])
    inverse_norms = np.empty(len(keys))
    invert_norms(prototypes, inverse_norms)
    visual = np.zeros(prototypes.shape)
    queues = np.split(checked["cache"], np.cumsum(counts[opened])[:-1])
    for row, queue in zip(own, queues, strict=True):
        queue_mean(np.ascontiguousarray(queue), len(queue), visual[row])
    forward = config.alignment_direction == "visual-to-text"
    asked = np.ascontiguousarray(own[:: math.ceil(len(own) * len(keys) / _PROVEN_PAIRS)])
    text_sum, visual_sum, normaliser, diagonal = alignment.sums_in_full(
        prototypes, inverse_norms, visual, asked, config.alignment_direction, config.alignment_temperature
    )
    stored = np.searchsorted(own, asked)
    whole = len(asked) == len(own)
    same = (
        np.allclose(checked["normaliser"][stored], normaliser[asked], rtol=1e-6)
        and np.allclose(checked["diagonal"][stored], diagonal[asked], atol=1e-9)
        and _lags_as_allowed(checked["normaliser"], checked["applied"])
    )
    if forward or whole:
        same = same and _close(checked["visual_sum"][stored], visual_sum[asked])
    pull = checked["pull"] + checked["pull_rest"].astype(np.float64)
    if whole:
        right, rest = np.zeros_like(prototypes), np.zeros_like(prototypes)
        alignment.project(np.arange(len(keys)), text_sum, prototypes, inverse_norms, right, rest)
        same = same and _close(pull, right)
    else:
        same = same and bool(np.abs(np.einsum("kd,kd->k", pull, prototypes) * inverse_norms).max() <= _DRIFT_TOLERANCE)
        same = same and bool(np.abs(pull).max() <= len(own) * inverse_norms.max())
    if not same or not _close(checked["pull_rest"], np.zeros_like(pull)):
        raise StateError("the state's alignment sums contradict its queues and prototypes")


def _lags_as_allowed(normaliser: NDArray[np.float64], applied: NDArray[np.float64]) -> bool:
    """The drift that `alignment.add_key` leaves standing, with a little room for rounding."""
    allowed = alignment.allowed_drift(len(applied))
    drift = normaliser / applied - 1.0
    return bool((drift > -1e-9).all() and (drift * (1.0 - 1.0 / normaliser) <= 1.01 * allowed + 1e-12).all())


def _close(got: NDArray[Any], wanted: NDArray[Any]) -> bool:
    return bool(np.allclose(got, wanted, rtol=_DRIFT_TOLERANCE, atol=_DRIFT_TOLERANCE))


def check_counters(config: ProtoDCSConfig, counters: Counters) -> None:
    """Refuse numbers that contradict each other, or that no memory with these settings can hold."""
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
    if truth(counters, "fitted") and not counters["fits"]:
        raise StateError("the state has a mixture that was never fitted")
    for name, high in (("cold_threshold", 2.001), ("evolution_threshold", 1e6)):
        value = counters[name]
        number = isinstance(value, float | int) and not isinstance(value, bool)
        if value != getattr(config, name) and not (number and -0.001 <= value <= high):  # type: ignore[operator]
            raise StateError(f"the state's {name} is {value!r}, it must lie from 0 to {high}")


def _squares(rows: NDArray[np.float32]) -> NDArray[np.float32]:
    squares: NDArray[np.float32] = np.einsum("kd,kd->k", rows, rows)
    return squares

"""Check the numbers and arrays of an untrusted state.

A state may have a correct hash over wrong numbers. Everything is checked here, on the arrays as they are stored, before
larger ones are allocated.
"""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...arrays import Feature
from ...errors import StateError
from ..numerics import gaussian_mixture
from ..numerics.linalg import normalised
from ..state import Arrays
from ..state_checks import Counters, check_means, check_unit, counter, required, truth, within
from .alignment import REBUILD_AFTER, contrast
from .config import ProtoDCSConfig
from .openness import initial_threshold, largest_openness
from .residual import directions
from .state import NUMBERS

# Takes an array of a state by name, type and shape, and checks those.
Take = Callable[..., NDArray[Any]]

# How far the alignment sums of a state may lie from what its queues and prototypes make of them.
_DRIFT_TOLERANCE = 1e-5
# How many pairs of query and key a restore computes again at most: some tens of milliseconds.
_COMPARED_PAIRS = 2**17


def since_flush(config: ProtoDCSConfig, learned: int) -> int:
    """Return the number of samples since the last refit, which empties the buffer."""
    if config.cache_admission not in ("buffered", "gated"):
        return 0
    return learned if learned < config.mixture_start else config.mixture_period - config.until_refit(learned)


def checked_arrays(
    initial: Feature, config: ProtoDCSConfig, counters: Counters, arrays: Arrays, trusted: bool
) -> Arrays:
    """Return the arrays of a state. Raise StateError for numbers or arrays that `export` cannot have written.

    Args:
        initial: (K, d) the prototypes that the engine started from, checked before.
        config: the settings of the state.
        counters: its numbers.
        arrays: its arrays.
        trusted: skip the slowest check, that of the alignment.
    """
    expected = {*NUMBERS, "confirmed", "unknown", "skipped"}
    if set(counters) != expected:
        raise StateError(f"the state's counters are {sorted(counters)[:20]}, they must be {sorted(expected)}")
    check_counters(config, counters, len(initial))
    remaining = {name: array for name, array in arrays.items() if name != "initial_prototypes"}
    found: Arrays = {"initial_prototypes": initial}

    def take(name: str, dtype: type, *shape: int | None) -> NDArray[Any]:
        found[name] = required(remaining, name, dtype, shape)
        del remaining[name]
        return found[name]

    _check_prototypes(config, counters, initial, take)
    _check_windows(config, counters, len(initial), take)
    if remaining:
        raise StateError(f"the state holds arrays that do not belong there: {sorted(remaining)[:10]}")
    if found["counts"].any() and not trusted:
        _check_alignment(config, found)
    return found


def _check_prototypes(config: ProtoDCSConfig, counters: Counters, initial: Feature, take: Take) -> None:
    """Check text prototypes, queues, and the shapes of what follows from them."""
    classes, width = initial.shape
    if evolved := counter(counters, "evolved"):
        text = take("text", np.float32, classes, width)
        if config.evolution_norm == "unit":
            check_unit(text, "text")
        else:
            check_means(text, "text", evolved)
    counts = take("counts", np.int64, classes)
    if not ((counts >= 0) & (counts <= config.cache_size)).all():
        raise StateError(f"the state's queues must hold 0 to {config.cache_size} features each")
    total, opened = int(counts.sum()), int(np.count_nonzero(counts))
    if total > counter(counters, "cached"):
        raise StateError(f"the state's queues hold {total} features, more than ever entered them")
    check_unit(take("cache", np.float32, total, width), "cache")
    within(take("quality", np.float64, total), "quality", 0.0, 1e6)
    take("text_sum", np.float64, classes if config.alignment_keys == "all" else opened, width)
    take("visual_sum", np.float64, opened, width)
    waiting = take("buffer", np.float32, None, width)
    most = since_flush(config, counter(counters, "learned"))
    if len(waiting) > most:
        raise StateError(f"the state's buffer holds {len(waiting)} samples, more than came since it was last emptied")
    check_unit(waiting, "buffer")
    within(take("buffer_class", np.int64, len(waiting)), "buffer_class", 0, classes - 1)
    within(take("buffer_quality", np.float64, len(waiting)), "buffer_quality", 0.0, 1e6)


def _check_windows(config: ProtoDCSConfig, counters: Counters, classes: int, take: Take) -> None:
    """Check the windows and the mixture."""
    learned, confirmed = counter(counters, "learned"), counter(counters, "confirmed")
    largest = largest_openness(config, classes)
    for name, capacity in (("gate_window", config.gate_window), ("mixture_window", config.mixture_window)):
        within(take(name, np.float64, min(capacity, learned)), name, -0.001, largest + 0.001)
    within(take("quality_window", np.float64, min(config.gate_window, confirmed)), "quality_window", 0.0, 1e6)
    parameters = take("mixture", np.float64, gaussian_mixture.PARAMETERS)
    gaussian_mixture.check(parameters, bool(counters["fitted"]), (-0.001, largest + 0.001), largest**2 / 4 + 0.001)


def _check_alignment(config: ProtoDCSConfig, found: Arrays) -> None:
    """Compare the sums of the alignment with what queues and prototypes make of them.

    Up to `_COMPARED_PAIRS` pairs of query and key this computes everything again. Beyond that it does so for some
    queries, and uses that all rows of the keys' sum add up to zero, as the probabilities of each query add up to one.
    """
    counts = found["counts"]
    opened = np.flatnonzero(counts)
    starts = np.cumsum(counts[opened]) - counts[opened]
    text, every = found.get("text", found["initial_prototypes"]), config.alignment_keys == "all"
    queries, _ = directions(np.add.reduceat(found["cache"].astype(np.float64), starts))
    keys, own = normalised(text if every else text[opened]), opened if every else np.arange(len(opened))
    query_sum, key_sum = found["visual_sum"], found["text_sum"]
    if config.alignment_direction == "text-to-visual":
        queries, keys, query_sum, key_sum = keys, queries, key_sum, query_sum
    step = math.ceil(len(queries) * len(keys) / _COMPARED_PAIRS)
    wanted, by_key = contrast(queries[::step], keys, own[::step], config.alignment_temperature)
    same = _close(query_sum[::step], wanted) and _close(key_sum.sum(axis=0), np.zeros(keys.shape[1]))
    if step == 1:
        same = same and _close(key_sum, by_key)
    if not same or float(np.abs(key_sum).max()) > len(queries) + 1:
        raise StateError("the state's alignment sums contradict its queues and prototypes")


def _close(got: NDArray[Any], wanted: NDArray[Any]) -> bool:
    return bool(np.allclose(got, wanted, rtol=_DRIFT_TOLERANCE, atol=_DRIFT_TOLERANCE))


def check_counters(config: ProtoDCSConfig, counters: Counters, classes: int) -> None:
    """Raise StateError for numbers that contradict each other or the settings."""
    sequence = counter(counters, "sequence", high=2**62)
    learned = counter(counters, "learned", high=sequence)
    known = counter(counters, "known", high=learned)
    if learned + counter(counters, "skipped") != sequence or known + counter(counters, "unknown") != learned:
        raise StateError("the state's known, unknown and skipped samples do not add up to all samples")
    for name in ("trusted", "cached", "fits", "failed_fits"):
        counter(counters, name, high=learned * config.cache_size)
    # More samples may have passed as known than are counted as known, because a second pass decides again.
    counter(counters, "evolved", high=counter(counters, "passed", high=learned))
    counter(counters, "confirmed", high=learned)
    counter(counters, "alignment_updates", high=REBUILD_AFTER - 1)
    if truth(counters, "fitted") and not counters["fits"]:
        raise StateError("the state has a mixture that was never fitted")
    for name, initial, high in (
        ("cold_threshold", initial_threshold(config), largest_openness(config, classes) + 0.001),
        ("evolution_threshold", config.evolution_threshold, 1e6),
    ):
        value = counters[name]
        number = isinstance(value, float | int) and not isinstance(value, bool)
        if value != initial and not (number and -0.001 <= value <= high):  # type: ignore[operator]
            raise StateError(f"the state's {name} is {value!r}, it must lie from 0 to {high}")

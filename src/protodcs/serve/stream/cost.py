"""Estimate what a stream costs a worker: bytes in memory and in a snapshot, and the time of its steps.

A worker computes for many tenants, and nothing can interrupt a step of an engine. So the worker estimates the cost of a
stream's settings before it accepts them.

The unit of work is a nanosecond of one core of an Intel Xeon at 2.50 GHz, measured with 100 to 10,000 classes and 16 to
1,024 dimensions. The estimate counts the innermost operations of each part of a step and multiplies them by the
measured time of one operation. No test measures time.
"""

from operator import attrgetter
from typing import NamedTuple

from pydantic import BaseModel

from ...core.protodcs.alignment import REBUILD_AFTER
from ...core.protodcs.config import ProtoDCSConfig
from ...core.streamdcs import constants
from ...core.streamdcs.config import StreamDCSConfig
from ...errors import ConfigError
from ..guard import GuardSettings
from ..settings import ServeConfig
from .shared import MAX_NAMES

# Nanoseconds of one operation. Steps without any array.
_STREAMDCS_STEP, _PROTODCS_STEP, _CORRECTIONS = 160_000.0, 300_000.0, 100_000.0
# Per class: the scores, and with the class baseline. Per dimension: the linear head.
_PER_CLASS, _PER_CLASS_WITH_BASELINE, _HEAD = 60.0, 90.0, 10.0
# Per number of the prototypes: a cosine, the temporary step of the text prototypes, fused logits, a change of a cached
# feature with the alignment of all classes, and a move of the text prototypes.
_COSINE, _TEXT_STEP, _FUSED_STEP, _CHANGE, _EVOLUTION = 0.5, 3.5, 20.0, 12.0, 15.0
# Per pair of classes: rebuilding the class bias. Per pair and dimension: alignment in full, likeness of prototypes.
_BIAS_REBUILD, _ALIGNMENT, _LIKENESS = 4.0, 1.0, 0.5
# One EM iteration of the mixture, and per sample of its window; insertion into a sorted window, per sample.
_EM_CALLS, _EM, _INSERTION = 40_000.0, 60.0, 1.7
# A refit of StreamDCS, per sample of its window and of the history; a window of the guard, per sample.
_REFIT, _HISTORY, _GUARD_SAMPLE = 8000.0, 500.0, 30.0
# Names of a vocabulary compared with the classes, per number of the names; and per class and number.
_NAMES, _NAMES_WITH_CLASSES = 4.0, 0.04
# Per byte: a copy; a snapshot or its restore.
_COPY, _SNAPSHOT = 0.45, 10.0

# Usual EM iterations of a fit, with a tolerance like the default.
_USUAL_ITERATIONS, _USUAL_TOLERANCE = 25, 1e-4
# Guards compare a window with eight earlier ones by their quantiles, and hold so many states to go back to.
_GUARD_WINDOWS, _GUARD_STATES = 9, 2
# Share of the samples that pass DPE's gate at its usual threshold. It is 0.11 to 0.15 on `dtd`, `flowers` and `big`.
_USUAL_EVOLUTIONS, _USUAL_ENTROPY = 0.2, 0.1
# The smallest aleatoric uncertainty that two classes can have; more classes have more.
_LEAST_ALEATORIC = 0.5


class Part(NamedTuple):
    """The cost of one part of a stream, once all windows and memories are full.

    Attributes:
        options: the settings that determine it.
        memory: bytes in memory.
        snapshot: bytes in a snapshot.
        slowest: nanoseconds of its slowest step, on which everything falls that happens now and then.
        mean: nanoseconds of a step, on average.
    """

    options: tuple[str, ...]
    memory: float = 0.0
    snapshot: float = 0.0
    slowest: float = 0.0
    mean: float = 0.0


def total(parts: list[Part]) -> Part:
    """Return the sum of parts."""
    return Part((), *(sum(numbers) for numbers in zip(*(part[1:] for part in parts), strict=True)))


def estimate(
    config: BaseModel, classes: int, dimension: int, guard: GuardSettings | None, has_vocabulary: bool = False
) -> list[Part]:
    """Return the estimated cost of a stream by part; no parts if its method has no estimate.

    Args:
        config: the resolved settings of its engine.
        classes: number of classes.
        dimension: length of a feature.
        guard: the resolved settings of its guard; None if it has none.
        has_vocabulary: whether a class edit compares the classes with a vocabulary.
    """
    if isinstance(config, StreamDCSConfig):
        parts = _streamdcs(config, classes, dimension)
    elif isinstance(config, ProtoDCSConfig):
        parts = _protodcs(config, classes, dimension)
    else:
        return []
    # A frozen stream, and a question, work on a copy.
    parts = [part._replace(slowest=part.slowest + _COPY * part.memory) for part in parts]
    if guard is not None and guard.enabled:
        parts = _guarded(guard, parts)
    if has_vocabulary:
        # Streams share the vocabulary itself.
        compared = (_NAMES + _NAMES_WITH_CLASSES * classes) * MAX_NAMES * dimension
        parts.append(Part(("classes", "vocabulary"), slowest=compared))
    return parts


def _streamdcs(config: StreamDCSConfig, classes: int, dimension: int) -> list[Part]:
    """Return the cost of StreamDCS by part."""
    # Streams share their prototypes until a class is added or removed.
    numbers, size = float(classes * dimension), 4.0 * classes * dimension + 16 * dimension
    step = _STREAMDCS_STEP + _PER_CLASS_WITH_BASELINE * classes + _HEAD * dimension + _COSINE * numbers
    history = config.history + constants.REFIT_PERIOD
    refit = _REFIT * constants.WINDOW + _HISTORY * history
    # Each correction is compared with the sample and with the middle of the stream.
    corrected = float(config.max_corrections * dimension)
    compared = _CORRECTIONS + 2 * _COSINE * corrected
    parts = [
        Part(("classes",), size + 240 * classes, size + 90 * classes, step, step),
        Part(("history",), 48 * history, 48 * history, refit, refit / constants.REFIT_PERIOD),
        Part(("max_corrections",), 4 * corrected, 4 * corrected, compared, compared),
    ]
    if config.has_class_bias(classes):
        pairs = float(classes * classes)
        rebuild = _BIAS_REBUILD * pairs
        # Adding a class compares all prototypes with each other.
        added = rebuild + _LIKENESS * pairs * dimension
        options = ("class_bias", "class_bias_limit")
        parts.append(Part(options, 16 * pairs, 8 * pairs, added, rebuild / constants.BIAS_REBUILD))
    return parts


def _protodcs(config: ProtoDCSConfig, classes: int, dimension: int) -> list[Part]:
    """Return the cost of ProtoDCS by part."""
    numbers = float(classes * dimension)
    per_number = _COSINE + (_TEXT_STEP if config.text_prototypes and config.text_rate > 0 else 0.0)
    step = _PROTODCS_STEP + _PER_CLASS * classes + per_number * numbers
    gated = (2 if config.evolution_gate == "quantile" else 1) * _INSERTION * config.gate_window
    parts = [
        Part(("classes",), 4 * numbers + 200 * classes, 4 * numbers + 50 * classes, step, step),
        Part(("gate_window",), 32 * config.gate_window, 16 * config.gate_window, gated, gated),
    ]
    if config.visual_prototypes:
        parts += _visual(config, classes, dimension)
    if share := _evolving_share(config):
        moved = _EVOLUTION * numbers
        # Each move is followed by an alignment in full, which the slowest step has anyway.
        aligned = _ALIGNMENT * classes * numbers if config.visual_prototypes else 0.0
        mean = share * (moved + aligned)
        parts.append(Part(("evolution_gate", "evolution_threshold"), 4 * numbers, 4 * numbers, moved, mean))
    if config.verification:
        window, iterations = config.mixture_window, config.mixture_iterations
        usual = min(iterations, _USUAL_ITERATIONS) if config.mixture_tolerance >= _USUAL_TOLERANCE else iterations
        inserted, iteration = _INSERTION * window, _EM_CALLS + _EM * window
        slowest, mean = inserted + iteration * iterations, inserted + iteration * usual / config.mixture_period
        options = ("mixture_window", "mixture_iterations", "mixture_period")
        parts.append(Part(options, 16 * window, 8 * window, slowest, mean))
    return parts


def _visual(config: ProtoDCSConfig, classes: int, dimension: int) -> list[Part]:
    """Return the cost of the visual cache and of the alignment that follows it."""
    numbers, size = float(classes * dimension), config.cache_size
    change, in_full = _CHANGE * numbers, _ALIGNMENT * classes * numbers
    share = config.cache_quantile if config.first_check else 1.0
    follows = config.alignment_direction == "visual-to-text"
    fused = _FUSED_STEP * numbers if config.evidence_logits == "fused" else 0.0
    parts = [
        Part(
            ("cache_size",) if follows else ("alignment_direction", "cache_size"),
            memory=(4 * size + 28) * numbers + 8 * size * classes,
            snapshot=(4 * size + 16) * numbers + 8 * size * classes,
            slowest=change + in_full + fused,
            mean=share * (change + in_full / REBUILD_AFTER if follows else in_full) + fused,
        )
    ]
    if config.cache_admission in ("buffered", "gated"):
        rows = max(config.mixture_start, config.mixture_period)
        held = float(rows * (4 * dimension + 16))
        # A refit offers all samples that wait to their queues, at most a queue's size for each class.
        flush = min(rows, classes * size) * (change if follows else in_full)
        parts.append(Part(("cache_admission", "mixture_start", "mixture_period"), held, held, flush, _COPY * held / 32))
    return parts


def _evolving_share(config: ProtoDCSConfig) -> float:
    """Return the share of the samples that move the text prototypes; the alignment is then computed in full."""
    if config.evolution_gate == "off" or not config.text_prototypes:
        return 0.0
    if config.evolution_gate == "entropy" and config.evolution_threshold <= _USUAL_ENTROPY:
        return _USUAL_EVOLUTIONS
    literal = config.evolution_gate == "aleatoric" and config.evidence_logits == "text" and config.evidence_scale <= 1
    return 0.0 if literal and config.evolution_threshold < _LEAST_ALEATORIC else 1.0


def _guarded(guard: GuardSettings, parts: list[Part]) -> list[Part]:
    """Return the cost of a stream with a guard over an engine of these parts."""
    samples = _GUARD_WINDOWS * guard.window
    judging, saving = _GUARD_SAMPLE * samples, 0.0
    if guard.action == "roll back":
        # The guard holds earlier states of the engine. It saves one now and then, and restores one if it fires.
        saving = _SNAPSHOT * total(parts).snapshot / guard.keep_windows
        parts = [
            part._replace(
                memory=part.memory + _GUARD_STATES * part.snapshot,
                snapshot=part.snapshot + _GUARD_STATES * part.snapshot,
                slowest=part.slowest + _SNAPSHOT * part.snapshot,
            )
            for part in parts
        ]
    options = ("guard.window", "guard.keep_windows")
    return [*parts, Part(options, 9 * samples, 9 * samples, judging, (judging + saving) / guard.window)]


# The limits: the setting, what a message calls its unit, that unit, and the attribute of `Part` that it limits.
_LIMITS = (
    ("max_stream_bytes", "bytes", 1.0, "memory"),
    ("max_step_cost", "ms for its slowest step", 1e6, "slowest"),
    ("max_mean_step_cost", "ms for a step on average", 1e6, "mean"),
)


def check_cost(
    config: BaseModel,
    classes: int,
    dimension: int,
    guard: GuardSettings | None,
    limits: ServeConfig,
    has_vocabulary: bool = False,
) -> None:
    """Raise ConfigError if a stream costs more than `limits` allow. The other arguments are those of `estimate`."""
    parts = estimate(config, classes, dimension, guard, has_vocabulary)
    if not parts:
        return
    for setting, name, unit, attribute in _LIMITS:
        given, limit = getattr(total(parts), attribute) / unit, getattr(limits, setting)
        if given > limit:
            largest = max(parts, key=attrgetter(attribute))
            options = {**config.model_dump(), "classes": classes, "vocabulary": f"up to {MAX_NAMES} names"}
            if guard is not None:
                options |= {f"guard.{option}": value for option, value in guard.model_dump().items()}
            causes = ", ".join(f"`{option}`={options[option]}" for option in largest.options)
            raise ConfigError(
                f"The stream would need about {given:,.0f} {name}; the limit `{setting}` is "
                f"{limit:,.0f}. Most of it comes from {causes}. Choose less expensive values, or ask the "
                "operator to raise the limit."
            )

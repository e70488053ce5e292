"""Estimate what a stream costs a worker: bytes in memory and in a snapshot, and the time of its steps.

A worker computes for many tenants, and nothing can interrupt a step of an engine. So the worker estimates the cost of a
stream's settings before it accepts them.

The unit of work is a nanosecond of one core of the machine below. The estimate counts the innermost operations of each
part of a step and multiplies them by the measured time of one operation. No test measures time.

Measured on an Intel Xeon at 2.50 GHz, one thread, 100 to 10,000 classes, 16 to 1,024 dimensions:

| operation | ns |
|---|---|
| StreamDCS: step without any array | 60,000 |
| ProtoDCS: calls of numpy in a step | 300,000 |
| cosine with a prototype, per number | 0.5 |
| temporary step of the text prototypes, per number | 3.5 |
| change of a cached feature: alignment of all classes, per number of the prototypes | 12 |
| alignment in full: per pair of classes and dimension | 1.0 |
| one EM iteration of the mixture, and per sample of the window | 40,000; 60 |
| StreamDCS: calls of numpy in a step | 100,000 |
| StreamDCS: refit, per sample of its window; of the history | 8,000; 500 |
| StreamDCS: class baseline, per class; linear head, per dimension | 30; 10 |
| insertion into a sorted window, per sample of the window | 1.7 |
| names of a vocabulary compared with the classes, per number of the names; per class and number | 4; 0.04 |
| copy, per byte | 0.45 |
| snapshot or restore, per byte | 10 |
"""

from operator import attrgetter
from typing import NamedTuple, TypeGuard

from pydantic import BaseModel

from ...core.protodcs.alignment import REBUILD_AFTER
from ...core.protodcs.config import ProtoDCSConfig
from ...core.streamdcs import constants
from ...core.streamdcs.config import StreamDCSConfig
from ...errors import ConfigError
from ..guard import GuardSettings
from ..settings import ServeConfig
from .shared import MAX_NAMES

_STEP = 60_000.0
_COSINE, _TEXT_STEP, _FUSED_STEP = 0.5, 3.5, 20.0
_PER_CLASS = 60.0
_CHANGE, _ALIGNMENT, _EVOLUTION = 12.0, 1.0, 15.0
_EM, _EM_CALLS = 60.0, 40_000.0
_NUMPY_CALLS, _PROTODCS_CALLS = 100_000.0, 240_000.0
_REFIT, _HISTORY = 8000.0, 500.0
_BASELINE, _HEAD = 30.0, 10.0
# Usual EM iterations of a fit, with a tolerance like the default.
_USUAL_ITERATIONS = 25
_USUAL_TOLERANCE = 1e-4
_INSERTION = 1.7
_COPY, _SNAPSHOT = 0.45, 10.0
_LIKENESS, _BIAS_REBUILD = 0.5, 4.0
_NAMES, _NAMES_WITH_CLASSES = 4.0, 0.04
# Guards compare a window with eight earlier ones by their quantiles.
_GUARD_WINDOWS, _GUARD_SAMPLE = 9, 30.0
_GUARD_STATES = 2
# Share of the samples that pass DPE's gate at its usual threshold. It is 0.11 to 0.15 on `dtd`, `flowers` and `big`.
_USUAL_EVOLUTIONS = 0.2
_USUAL_ENTROPY = 0.1
# The smallest aleatoric uncertainty that two classes can have; more classes have more.
_LEAST_ALEATORIC = 0.5


class Part(NamedTuple):
    """The cost of one part of a stream.

    Attributes:
        options: the settings that determine it.
        memory: bytes in memory.
        snapshot: bytes in a snapshot.
        slowest: nanoseconds of its slowest step.
        mean: nanoseconds of a step, on average.
    """

    options: tuple[str, ...]
    memory: float = 0.0
    snapshot: float = 0.0
    slowest: float = 0.0
    mean: float = 0.0


class Estimate(NamedTuple):
    """The cost of a stream, in all and by part."""

    parts: tuple[Part, ...]

    @property
    def memory(self) -> float:
        """Bytes in memory, once all windows and memories are full."""
        return sum(part.memory for part in self.parts)

    @property
    def snapshot(self) -> float:
        """Bytes of a snapshot, once all windows and memories are full."""
        return sum(part.snapshot for part in self.parts)

    @property
    def slowest_step(self) -> float:
        """Milliseconds of the slowest step: everything that happens now and then falls on it."""
        return sum(part.slowest for part in self.parts) / 1e6

    @property
    def mean_step(self) -> float:
        """Milliseconds of a step, on average."""
        return sum(part.mean for part in self.parts) / 1e6


def has_estimate(config: BaseModel) -> TypeGuard[StreamDCSConfig | ProtoDCSConfig]:
    """Whether the cost of a stream with these settings can be estimated."""
    return isinstance(config, StreamDCSConfig | ProtoDCSConfig)


def estimate(
    config: StreamDCSConfig | ProtoDCSConfig,
    classes: int,
    dimension: int,
    guard: GuardSettings | None,
    has_vocabulary: bool = False,
) -> Estimate:
    """Return the estimated cost of a stream.

    Args:
        config: the resolved settings of its engine.
        classes: number of classes.
        dimension: length of a feature.
        guard: the resolved settings of its guard; None if it has none.
        has_vocabulary: whether a class edit compares the classes with a vocabulary.
    """
    if isinstance(config, StreamDCSConfig):
        parts = _streamdcs(config, classes, dimension)
    else:
        parts = _protodcs(config, classes, dimension)
    # A frozen stream, and a question, work on a copy.
    parts = [part._replace(slowest=part.slowest + _COPY * part.memory) for part in parts]
    if guard is not None and guard.enabled:
        parts = _guarded(guard, parts)
    if has_vocabulary:
        compared = (_NAMES + _NAMES_WITH_CLASSES * classes) * MAX_NAMES * dimension
        # Streams share the vocabulary itself.
        parts.append(Part(("classes", "vocabulary"), slowest=compared))
    return Estimate(tuple(parts))


def _streamdcs(config: StreamDCSConfig, classes: int, dimension: int) -> list[Part]:
    """Return the cost of StreamDCS by part."""
    parts = [_scoring(classes, dimension, _COSINE), *_stream_verification(config, classes, dimension)]
    # Each correction is compared with the sample and with the middle of the stream.
    corrected, compared = 4.0 * config.max_corrections * dimension, 2.0 * _COSINE * config.max_corrections * dimension
    parts.append(Part(("max_corrections",), corrected, corrected, _NUMPY_CALLS + compared, _NUMPY_CALLS + compared))
    if config.has_class_bias(classes):
        pairs = float(classes * classes)
        parts.append(
            Part(
                ("class_bias", "class_bias_limit"),
                memory=16 * pairs,
                snapshot=8 * pairs,
                # Adding a class compares all prototypes with each other.
                slowest=_BIAS_REBUILD * pairs + _LIKENESS * pairs * dimension,
                mean=_BIAS_REBUILD * pairs / constants.BIAS_REBUILD,
            )
        )
    return parts


def _protodcs(config: ProtoDCSConfig, classes: int, dimension: int) -> list[Part]:
    """Return the cost of ProtoDCS by part."""
    numbers = float(classes * dimension)
    steps = config.text_prototypes and config.text_rate > 0
    scoring = _scoring(classes, dimension, _COSINE + (_TEXT_STEP if steps else 0.0))
    scoring = scoring._replace(slowest=scoring.slowest + _PROTODCS_CALLS, mean=scoring.mean + _PROTODCS_CALLS)
    parts = [scoring, _gate_windows(config)]
    if config.visual_prototypes:
        parts += _visual(config, classes, dimension)
    if share := _evolving_share(config):
        moved = _EVOLUTION * numbers
        # Each move is followed by an alignment in full, which the slowest step has anyway.
        aligned = _ALIGNMENT * classes * numbers if config.visual_prototypes else 0.0
        mean = share * (moved + aligned)
        parts.append(Part(("evolution_gate", "evolution_threshold"), 4 * numbers, 4 * numbers, moved, mean))
    if config.verification:
        window = config.mixture_window
        fit = _EM_CALLS + _EM * window
        most = usual = config.mixture_iterations
        if config.mixture_tolerance >= _USUAL_TOLERANCE:
            usual = min(most, _USUAL_ITERATIONS)
        parts.append(
            Part(
                ("mixture_window", "mixture_iterations", "mixture_period"),
                memory=16 * window,
                snapshot=8 * window,
                slowest=window * _INSERTION + fit * most,
                mean=window * _INSERTION + fit * usual / config.mixture_period,
            )
        )
    return parts


def _scoring(classes: int, dimension: int, per_number: float) -> Part:
    numbers = float(classes * dimension)
    work = _STEP + _PER_CLASS * classes + per_number * numbers
    # Streams share their prototypes until a class is added or removed.
    return Part(("classes",), 4 * numbers + 200 * classes, 4 * numbers + 50 * classes, work, work)


def _gate_windows(config: ProtoDCSConfig) -> Part:
    windows = 2 if config.evolution_gate == "quantile" else 1
    insertion = windows * _INSERTION * config.gate_window
    return Part(("gate_window",), 32 * config.gate_window, 16 * config.gate_window, insertion, insertion)


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


def _stream_verification(config: StreamDCSConfig, classes: int, dimension: int) -> list[Part]:
    """Return the cost of the decision between known and unknown."""
    history, size = config.history + constants.REFIT_PERIOD, 40 * classes + 16 * dimension
    learning = _NUMPY_CALLS + _BASELINE * classes + _HEAD * dimension
    refit = _REFIT * constants.WINDOW + _HISTORY * history
    return [
        Part(("classes",), size, size, learning, learning),
        Part(("history",), 48 * history, 48 * history, refit, refit / constants.REFIT_PERIOD),
    ]


def _guarded(guard: GuardSettings, parts: list[Part]) -> list[Part]:
    """Return the cost of a stream with a guard over an engine of these parts."""
    samples = _GUARD_WINDOWS * guard.window
    judging, saving = _GUARD_SAMPLE * samples, 0.0
    if guard.action == "roll back":
        # The guard holds earlier states of the engine. It saves one now and then, and restores one if it fires.
        saving = _SNAPSHOT * sum(part.snapshot for part in parts) / guard.keep_windows
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


# The limits: the setting, its unit, and the attributes of `Estimate` and `Part` that it limits.
_LIMITS = (
    ("max_stream_bytes", "bytes", "memory", "memory"),
    ("max_step_cost", "ms for its slowest step", "slowest_step", "slowest"),
    ("max_mean_step_cost", "ms for a step on average", "mean_step", "mean"),
)


def check_cost(
    config: BaseModel,
    classes: int,
    dimension: int,
    guard: GuardSettings | None,
    limits: ServeConfig,
    has_vocabulary: bool = False,
) -> None:
    """Raise ConfigError if a stream costs more than the limits allow. Methods without an estimate have no limit.

    Args:
        config: the resolved settings of the engine.
        classes: number of classes.
        dimension: length of a feature.
        guard: the resolved settings of the guard; None if there is none.
        limits: the settings with what a stream may cost.
        has_vocabulary: whether it has a vocabulary.
    """
    if not has_estimate(config):
        return
    found = estimate(config, classes, dimension, guard, has_vocabulary)
    for setting, unit, whole, of_part in _LIMITS:
        given, limit = getattr(found, whole), getattr(limits, setting)
        if given > limit:
            largest = max(found.parts, key=attrgetter(of_part))
            options = {**config.model_dump(), "classes": classes, "vocabulary": f"up to {MAX_NAMES} names"}
            if guard is not None:
                options |= {f"guard.{name}": value for name, value in guard.model_dump().items()}
            causes = ", ".join(f"`{name}`={options[name]}" for name in largest.options)
            raise ConfigError(
                f"The stream would need about {given:,.0f} {unit}; the limit `{setting}` is "
                f"{limit:,.0f}. Most of it comes from {causes}. Choose less expensive values, or ask the "
                "operator to raise the limit."
            )

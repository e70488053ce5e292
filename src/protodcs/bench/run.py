"""A grid, executed: every cell that has no result yet, through joblib, on this machine or on a Ray cluster.

A cell that is done is a file, written in one step by the worker that ran it. So a run can be stopped at any moment and
started again, and a worker that dies costs the cell it was at. On a cluster all workers must see the folder of results.
"""

import os
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from queue import Empty, Queue
from threading import Thread
from typing import Any

from joblib import Parallel, delayed, parallel_config
from joblib.externals.loky.process_executor import TerminatedWorkerError
from threadpoolctl import threadpool_limits

from ..data.streams import Manifest
from ..errors import DataError, EncoderError, ProtoDCSError, UsageError
from . import rows, streams, traces
from .cells import Cell, CellResult, vocabulary_words
from .cells import run as run_cell
from .grid import Grid, ImageStream, Task
from .preparation import Extract, Report, store_for
from .published_sizes import TEMPERATURE, Size, size_of

# Runs one cell in a worker; says which, and what went wrong.
Attempt = Callable[[Path, Cell, dict[str, str]], tuple[Cell, str]]

# A machine that kills workers again and again, for want of memory for example, will not stop doing so.
_MOST_DEATHS = 3
# How often the files of results are looked at while Ray works. Seconds.
_GLANCE = 0.5


class WorkerDiedError(Exception):
    """A worker was killed; what it and its neighbours were at is to be done again."""


@dataclass(frozen=True)
class Failure:
    """A cell that raised an error: reported, and left out."""

    cell: Cell
    words: str


@dataclass(frozen=True)
class Plan:
    """All cells of a grid, and the folder of results."""

    folder: Path
    cells: list[Cell]
    manifests: dict[str, list[Manifest]]  # by name of the stream
    missing: tuple[str, ...] = ()  # what is not here; a plan with such can only be looked at

    def file(self, cell: Cell) -> Path:
        """Where the rows of a cell are."""
        return self.folder / "cells" / f"{cell.id}.parquet"

    def trace(self, cell: Cell) -> Path:
        """Where its trace is."""
        return self.folder / "traces" / f"{cell.id}.safetensors"

    def is_done(self, cell: Cell) -> bool:
        """Whether a cell has its rows, and its trace if it was asked for, as this version writes them."""
        return rows.is_whole(self.file(cell)) and (not cell.task.trace or traces.is_whole(self.trace(cell)))

    def todo(self) -> list[Cell]:
        """The cells without a result."""
        return [cell for cell in self.cells if not self.is_done(cell)]


def planned(grid: Grid, folder: Path, command: str = "") -> Plan:
    """Every cell of a grid, with the hashes of its stream and encoder; the command is what rows will name."""
    known: dict[tuple[str, str, int], Cell] = {}
    manifests: dict[str, list[Manifest]] = {}
    cells = []
    for task in grid.tasks():
        key = task.stream.name, task.protocol, task.seed
        if key not in known:
            known[key] = _described(task, manifests)
        _check_vocabulary(task, known[key].dimension)
        cells.append(replace(known[key], task=task, command=command, vocabulary=vocabulary_words(task)))
    return Plan(folder, cells, manifests)


def sketched(grid: Grid, folder: Path) -> Plan:
    """Return a plan to look at, not to run: streams whose data or weights are missing have their published sizes."""
    try:
        return planned(grid, folder)
    except (DataError, EncoderError) as problem:
        plan = _by_published_sizes(grid, folder)
        if not plan.missing:
            raise problem from None
        return plan


def _by_published_sizes(grid: Grid, folder: Path) -> Plan:
    sizes: dict[tuple[str, str], Size] = {}
    cells = []
    for task in grid.tasks():
        if not isinstance(task.stream, ImageStream):
            cells.append(_described(task, {}))
            continue
        # All seeds of a stream have one length.
        key = task.stream.name, task.protocol
        if key not in sizes:
            sizes[key] = size_of(task.stream, task.protocol, task.seed)
        size = sizes[key]
        cells.append(Cell(task, "", "", "", TEMPERATURE, size.samples, size.classes, size.dimension))
    missing = dict.fromkeys(words for size in sizes.values() for words in size.missing)
    return Plan(folder, cells, {}, tuple(missing))


def _check_vocabulary(task: Task, dimension: int) -> None:
    """Raise DataError if the vocabulary of a task cannot come from the encoder of its stream."""
    if task.vocabulary is None:
        return
    found = streams.vocabulary(task.stream, task.vocabulary).dimension
    if found != dimension:
        raise DataError(
            f"The vocabulary {task.vocabulary!r} has features of dimension {found}, and those of {task.stream.name!r} "
            f"have dimension {dimension}. Name a vocabulary from the same encoder."
        )


def _described(task: Task, manifests: dict[str, list[Manifest]]) -> Cell:
    stream = streams.opened(task.stream, task.protocol, task.seed)
    if isinstance(stream, streams.Imaged):
        manifests.setdefault(task.stream.name, []).append(stream.manifest)
    classes, dimension = stream.prototypes.shape
    samples = sum(len(part.labels) for part in stream.parts)
    proof = stream.hash, stream.fingerprint, stream.prompts
    return Cell(task, *proof, stream.temperature, samples, classes, dimension)


def prepared(plan: Plan, features: Path, extract: Extract, report: Report) -> list[Cell]:
    """The cells that are still to do, each with the store that it needs; what is missing is extracted."""
    stores: dict[str, Path] = {}
    ready = []
    for cell in plan.todo():
        words = cell.task.stream
        if isinstance(words, ImageStream) and cell.task.method_spec.sees == "features":
            if words.name not in stores:
                stores[words.name] = store_for(words, plan.manifests[words.name], features, extract, report)
            cell = replace(cell, store=stores[words.name].absolute())
        ready.append(cell)
    return ready


# Runs cells somewhere, and yields each when its result is kept; raises WorkerDiedError.
Workers = Callable[[Plan, Sequence[Cell]], Iterator[Cell | Failure]]


def execute(plan: Plan, cells: Sequence[Cell], workers: Workers) -> Iterator[Cell | Failure]:
    """Run cells, and yield each one after its result is saved, in any order. A worker that dies is replaced."""
    left, deaths = {cell.id: cell for cell in cells}, 0
    while left:
        try:
            for done in workers(plan, list(left.values())):
                cell = done.cell if isinstance(done, Failure) else done
                del left[cell.id]
                deaths = 0
                yield done
        except WorkerDiedError:
            deaths += 1
            if deaths == _MOST_DEATHS:
                names = ", ".join(sorted({cell.task.method_spec.title for cell in left.values()}))
                raise UsageError(
                    f"workers were killed {deaths} times without a result between, probably for want of memory; still "
                    f"to do: {names}. Run again with fewer --jobs"
                ) from None


def on_this_machine(jobs: int) -> Workers:
    """Workers that are processes here; one job needs none but this one."""

    def work(plan: Plan, cells: Sequence[Cell]) -> Iterator[Cell | Failure]:
        told = set()
        try:
            with parallel_config(backend="loky", inner_max_num_threads=1):
                for cell, words in _work(_attempt, plan, cells, jobs, return_as="generator_unordered"):
                    told.add(cell.id)
                    yield Failure(cell, words) if words else cell
        except TerminatedWorkerError:
            # Whoever was at work beside the one that died is lost too; what is kept is kept.
            yield from (cell for cell in cells if cell.id not in told and plan.is_done(cell))
            raise WorkerDiedError from None

    return work


def on_ray(jobs: int) -> Workers:
    """Workers of the Ray cluster that this process is connected to."""
    from ray.exceptions import RayError
    from ray.util.joblib import register_ray

    register_ray()

    def work(plan: Plan, cells: Sequence[Cell]) -> Iterator[Cell | Failure]:
        # The back-end returns all results at its end: a thread waits for that, and we watch the files.
        ended: Queue[list[tuple[Cell, str]] | BaseException] = Queue()
        Thread(target=_wait, args=(ended, plan, cells, jobs), daemon=True).start()
        waiting = {cell.id: cell for cell in cells}
        outcome: list[tuple[Cell, str]] | BaseException | None = None
        while outcome is None:
            with suppress(Empty):
                outcome = ended.get(timeout=_GLANCE)
            for cell in [cell for cell in waiting.values() if plan.is_done(cell)]:
                del waiting[cell.id]
                yield cell
        if isinstance(outcome, RayError):
            raise WorkerDiedError from outcome
        if isinstance(outcome, BaseException):
            raise outcome
        yield from (Failure(cell, words) for cell, words in outcome if words)

    return work


def _wait(ended: Queue[Any], plan: Plan, cells: Sequence[Cell], jobs: int) -> None:
    try:
        # The back-end's own actors only wait: what they wait for is done again elsewhere if its worker dies.
        with parallel_config(backend="ray", ray_remote_args={"num_cpus": 0}):
            ended.put(_work(_attempt_as_task, plan, cells, jobs))
    except BaseException as problem:  # whatever it is, the one who waits must hear of it
        ended.put(problem)


def _work(attempt: Attempt, plan: Plan, cells: Sequence[Cell], jobs: int, **options: Any) -> Any:
    workers = Parallel(n_jobs=jobs, batch_size=1, pre_dispatch="2*n_jobs", **options)
    return workers(delayed(attempt)(plan.folder.absolute(), cell, dict(_environment())) for cell in cells)


def _attempt_as_task(folder: Path, cell: Cell, environment: dict[str, str]) -> tuple[Cell, str]:
    """Run one cell as a task of Ray, which starts it again elsewhere if its worker dies."""
    import ray

    task = ray.remote(_attempt).options(num_cpus=1, max_retries=_MOST_DEATHS)
    done: tuple[Cell, str] = ray.get(task.remote(folder, cell, environment))
    return done


def _attempt(folder: Path, cell: Cell, environment: dict[str, str]) -> tuple[Cell, str]:
    """Run one cell in a worker and keep what comes of it. An error comes back as words: other cells still run."""
    os.environ.update(environment)
    _one_thread()
    try:
        # Workers are as many as cores; and the bits of a matrix product may depend on the number of threads.
        with threadpool_limits(1):
            _keep(Plan(folder, [], {}), cell, run_cell(cell))
    except ProtoDCSError as problem:
        return cell, f"{type(problem).__name__}: {problem}"
    except Exception as problem:
        place = traceback.extract_tb(problem.__traceback__)[-1]
        return cell, f"{type(problem).__name__}: {problem} ({Path(place.filename).name}, line {place.lineno})"
    return cell, ""


def _environment() -> Iterator[tuple[str, str]]:
    """What a worker elsewhere must know of this process to find the same data."""
    for name in ("PROTODCS_DATA", "PROTODCS_PACK", "PROTODCS_CACHE"):
        if name in os.environ:
            yield name, os.environ[name]


def _one_thread() -> None:
    try:
        import torch
    except ImportError:
        return
    torch.set_num_threads(1)


def _keep(plan: Plan, cell: Cell, outcome: CellResult) -> None:
    for file in (plan.file(cell), plan.trace(cell)):
        file.parent.mkdir(parents=True, exist_ok=True)
    # The trace first: whoever finds the rows finds it too.
    if outcome.trace is not None:
        traces.write(plan.trace(cell), outcome.trace)
    rows.write(plan.file(cell), outcome.rows)

"""The one thread of a files store: it does all the work, in the order in which it was asked.

Jobs that write and wait together make one group of the log, and so cost one write and one sync. A job is done as if the
log had its frames already; nobody is told before it has, and if it cannot take them all is taken back.
"""

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from ...errors import StoreError
from .log import Log
from .upkeep import Upkeep

_Answer = TypeVar("_Answer")


@dataclass(slots=True)
class _Job:
    """Something to do for a caller, who waits for `answer`; `writes` says that it adds to the next group of the log."""

    work: Callable[[], Any]
    answer: "Future[Any]"
    writes: bool


class Worker:
    """A thread and its jobs.

    Args:
        folder: of the store, for words.
        log: what jobs add frames to.
        upkeep: what is done between groups.

    Attributes:
        undo: what to do when the log cannot take the group that is being made, the last thing first; jobs add to it.
        fresh: files that the group made; jobs add to them.
    """

    def __init__(self, folder: Path, log: Log, upkeep: Upkeep):
        self._folder = folder
        self._log = log
        self._upkeep = upkeep
        self.undo: list[Callable[[], None]] = []
        self.fresh: list[Path] = []
        self.stopped = False
        self._jobs: deque[_Job] = deque()
        self._wake = threading.Condition()
        self._thread = threading.Thread(target=self._run, name=f"store {folder}", daemon=True)
        self._thread.start()

    async def asked(self, work: Callable[[], _Answer], *, writes: bool = False) -> _Answer:
        """The answer to a piece of work, when its turn has come; for one that writes, when the log has taken it."""
        answer: Future[_Answer] = Future()
        with self._wake:
            self._expect_running()
            self._jobs.append(_Job(work, answer, writes))
            self._wake.notify()
        return await asyncio.wrap_future(answer)

    def stop(self) -> None:
        """Take no more jobs; called by the last one."""
        with self._wake:
            self.stopped = True

    async def join(self) -> None:
        """Wait until the thread has ended."""
        await asyncio.to_thread(self._thread.join)

    def _expect_running(self) -> None:
        if self.stopped:
            raise StoreError(f"the store in {str(self._folder)!r} is closed: open it again")

    def _run(self) -> None:
        while not self.stopped:
            with self._wake:
                if not self._jobs:
                    self._wake.wait(self._upkeep.until_sync())
                jobs, self._jobs = self._jobs, deque()
            try:
                self._work_through(jobs)
                if not self.stopped:
                    self._upkeep.sync_if_due()
            except BaseException as problem:
                self._give_up(jobs, problem)
        self._work_through(self._jobs)  # They came while it was closed, and hear of it.

    def _give_up(self, jobs: Iterable[_Job], problem: BaseException) -> None:
        """Refuse all further work after a fault of the store itself: nobody may wait for ever for an answer."""
        self._log.broken = f"the store in {str(self._folder)!r} failed by a fault of its own: {problem!r}"
        for job in jobs:
            if not job.answer.done():
                job.answer.set_exception(StoreError(f"{self._log.broken}; open the store again"))

    def _work_through(self, jobs: Iterable[_Job]) -> None:
        group: list[tuple[_Job, Any]] = []
        for job in jobs:
            if not job.answer.set_running_or_notify_cancel():
                continue
            if job.writes:
                self._add_to(group, job)
            else:
                # It must see what was asked for before it, and nothing that the log may still refuse.
                self._finish(group)
                self._do(job)
        self._finish(group)

    def _do(self, job: _Job) -> None:
        try:
            self._expect_running()
            job.answer.set_result(job.work())
        except BaseException as problem:
            job.answer.set_exception(in_words(self._folder, problem))

    def _add_to(self, group: list[tuple[_Job, Any]], job: _Job) -> None:
        """Do a job as if the log had its frames already; if it fails on its way, it alone leaves no trace."""
        frames, steps, files = self._log.staged(), len(self.undo), len(self.fresh)
        try:
            self._expect_running()
            self._log.check()
            group.append((job, job.work()))
        except BaseException as problem:
            self._log.rewind(frames)
            self._take_back(steps, files)
            job.answer.set_exception(in_words(self._folder, problem))

    def _finish(self, group: list[tuple[_Job, Any]]) -> None:
        """Write the frames of a group of jobs, and tell the callers."""
        if not group:
            return
        try:
            self._log.write()
            self._upkeep.sync_written()
        except BaseException as problem:
            self._take_back(0, 0)
            for job, _ in group:
                job.answer.set_exception(in_words(self._folder, problem))
        else:
            self.undo.clear()
            self.fresh.clear()
            for job, answer in group:
                job.answer.set_result(answer)
            self._upkeep.tidy()
        group.clear()

    def _take_back(self, steps: int, files: int) -> None:
        while len(self.undo) > steps:
            self.undo.pop()()
        if self._log.broken is None:  # Else the disk may hold frames that name these files.
            for path in self.fresh[files:]:
                with suppress(OSError):
                    path.unlink()
        del self.fresh[files:]


def in_words(folder: Path, problem: BaseException) -> BaseException:
    """A failure of the operating system as one of the store; any other one is itself."""
    if not isinstance(problem, OSError) or isinstance(problem, StoreError):
        return problem
    error = StoreError(f"the store in {str(folder)!r} cannot read or write a file: {problem}; nothing has changed")
    error.__cause__ = problem
    return error

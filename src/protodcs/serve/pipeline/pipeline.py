"""The pipeline of a process: serve groups of requests on its streams, and reply when what they changed is durable.

The engine computes ahead of the journal, so that many streams share one write. If the write fails, the stream in memory
is discarded, and the requests are sent again. There is never a reply to a change that is not durable, or to a question
about one.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from contextlib import suppress
from functools import partial
from typing import Any

from ...errors import FencedError, ProtoDCSError, StoreError
from ..access import audit
from ..messages import Action, Reply, ReplyStatus, Request, internal_error
from ..telemetry import logs, traces
from ..telemetry.metrics import WorkerMetrics
from ..workers.changes import Changes
from ..workers.computing import Computing
from ..workers.lease import WorkerLease
from ..workers.loaded_stream import LoadedStream
from ..workers.loaded_streams import LoadedStreams
from ..workers.replies import error_reply
from .group import Group
from .steps import IN_MEMORY, Served, Steps
from .turns import SLICE, Turns

_log = logging.getLogger(__name__)

_CLASS_EDITS = (Action.ADD_CLASS, Action.REMOVE_CLASS)
_SUPERSEDED = Reply(ReplyStatus.LATER, "another process took over from this worker")


class Pipeline:
    """Serves requests on the streams of a process. All its functions are called from one event loop.

    Args:
        lease: of the worker. It must not have ended when a stream is used.
        streams: those in memory.
        steps: serves requests on one of them.
        changes: writes their records.
        computing: threads for slow streams.
        turns: shares the time of the event loop.
        metrics: where steps and guards are counted.
        audit_log: where guards are reported.
        special: serves what takes more than the stream in memory, by action.
    """

    def __init__(
        self,
        lease: WorkerLease,
        streams: LoadedStreams,
        steps: Steps,
        changes: Changes,
        computing: Computing,
        turns: Turns,
        metrics: WorkerMetrics,
        audit_log: audit.AuditLog,
        special: Mapping[str, Callable[[Request], Awaitable[Reply]]],
    ):
        self._lease = lease
        self._streams = streams
        self._steps = steps
        self._changes = changes
        self._computing = computing
        self._turns = turns
        self._metrics = metrics
        self._audit_log = audit_log
        self._special = special
        self._tasks: set[asyncio.Task[None]] = set()

    def begin(self, group: Group) -> None:
        """Serve a group, in the order in which groups of its stream begin."""
        refusal = self._refusal(group.stream)
        if refusal is not None:
            group.end_all(refusal)
        elif group.requests[0].action in IN_MEMORY:
            self._turns.begin(partial(self._slice, group))
        else:
            self._in_task(self._serve_special(group))

    async def serve(self, requests: list[Request]) -> list[Reply]:
        """Return the replies to the requests of one group, final or not."""
        replied = asyncio.Event()
        group = Group(requests, lambda _: replied.set())
        self.begin(group)
        await replied.wait()
        return group.replies

    async def close(self) -> None:
        """Stop serving, without replies."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _refusal(self, stream: str) -> Reply | None:
        """Return the reply to every request if this worker serves none."""
        placement = self._streams.placement
        if placement is not None and self._lease.worker not in placement.workers:
            return Reply(ReplyStatus.MOVED, placement.first(stream))
        return _SUPERSEDED if self._lease.superseded else self._streams.refusal

    # On the stream in memory.

    def _slice(self, group: Group, end: float) -> None:
        """Serve some requests until a time, if the stream is ready. Otherwise leave them to a task that can wait."""
        loaded = self._ready(group)
        if loaded is None:
            self._in_task(self._serve_waiting(group))
            return
        group.loaded, rest = loaded, group.rest
        try:
            with traces.shared_span("step", group.spans, requests=len(rest)), loaded.changing:
                first = loaded.live.position
                self._take(group, loaded, first, self._steps.serve(loaded, rest, end))
        except Exception as problem:
            _fail(group, problem)
            return
        if len(group.replies) < len(group.requests):
            self._turns.go_on(partial(self._slice, group))
        else:
            self._reply_when_durable(group)

    def _ready(self, group: Group) -> LoadedStream | None:
        """Return the stream of a group if nobody else uses it and its steps are short."""
        self._lease.check()
        loaded = self._streams.find(group.stream)
        if loaded is None or loaded.in_use.locked() or loaded.slow or group.requests[0].take_from:
            return None
        if group.loaded is not None and group.loaded is not loaded:
            return None
        return None if self._is_long(loaded, group) else loaded

    def _is_long(self, loaded: LoadedStream, group: Group) -> bool:
        """Whether a request takes long: a class edit compares all names of a vocabulary with all classes."""
        return loaded.live.spec.vocabulary is not None and any(one.action in _CLASS_EDITS for one in group.requests)

    def _take(self, group: Group, loaded: LoadedStream, first: int, served: Served) -> None:
        """Take what a slice did that began at the position `first`, and put its records into the next commit."""
        loaded.used = time.monotonic()
        for seconds, answers in served.steps:
            self._metrics.stepped(seconds, answers)
        events = loaded.live.events()
        group.events += events
        if served.records:
            notices = loaded.notice_maker.make(served.log, events)
            roll_backs = loaded.live.roll_backs()
            self._changes.put(group.stream, loaded, first, served.records, served.log, roll_backs, notices)
        group.replies += served.replies

    def _reply_when_durable(self, group: Group) -> None:
        if group.loaded is None:
            group.end()
        else:
            group.loaded.journal.when_settled(partial(self._reply, group, group.loaded))
            group.end_computing()

    def _reply(self, group: Group, loaded: LoadedStream) -> None:
        """Reply, because the journal of the stream has all records, or never will."""
        if loaded.journal.broken is not None:
            self._lose(group, loaded)
        elif group.events:
            self._in_task(self._report_guard(group))
        else:
            group.end()

    def _lose(self, group: Group, loaded: LoadedStream) -> None:
        """Discard a stream whose records are not durable."""
        self._streams.drop(group.stream, loaded)
        group.end_all(Reply(ReplyStatus.LATER, str(loaded.journal.broken)))

    async def _report_guard(self, group: Group) -> None:
        """Count and log what the guard of a stream did, then reply. Its record is durable."""
        for event in group.events:
            self._metrics.guards.labels(event.guard).inc()
            _log.warning("a guard acted", extra=logs.with_fields(stream=group.stream, **event._asdict()))
            try:
                await self._audit_log.write(audit.of_guard(group.stream, event))
            except OSError:
                _log.exception("the audit log cannot be written")
        group.end()

    # With waiting.

    async def _serve_waiting(self, group: Group) -> None:
        """Serve a group whose stream has to be loaded, is used by others, or has slow steps."""
        first = group.requests[0]
        try:
            await self._take_over(first)
            with traces.shared_span("step", group.spans, requests=len(group.rest)):
                while group.rest:
                    await self._slice_waiting(group, first.stand_in)
        except (FencedError, StoreError):
            # Slices before this one are lost, so it must not overtake them.
            assert group.loaded is not None
            self._lose(group, group.loaded)
        except Exception as problem:
            _fail(group, problem)
        else:
            self._reply_when_durable(group)

    async def _slice_waiting(self, group: Group, stand_in: bool) -> None:
        """Serve some requests as soon as the stream is ready, or none of the rest if it cannot be."""
        end = await self._turns.wait(goes_on=group.loaded is not None)
        # Again for each slice: the stream may have been unloaded, deleted or lost in the meantime.
        try:
            loaded = await self._streams.acquire(group.stream, stand_in)
        except ProtoDCSError as problem:
            group.replies += [error_reply(problem)] * len(group.rest)
            return
        try:
            await self._slice_acquired(group, loaded, end)
        finally:
            loaded.in_use.release()

    async def _slice_acquired(self, group: Group, loaded: LoadedStream, end: float) -> None:
        if group.loaded is not None and group.loaded is not loaded:
            await group.loaded.journal.wait_durable()
        group.loaded = loaded
        long = self._is_long(loaded, group)
        with loaded.changing:
            if long or loaded.slow:
                end = time.monotonic() + SLICE
            serve = partial(self._steps.serve, loaded, group.rest, end)
            first = loaded.live.position
            self._take(group, loaded, first, await self._computing.run(loaded, serve, long))

    async def _serve_special(self, group: Group) -> None:
        """Serve a request that takes more than the stream in memory."""
        request = group.requests[0]
        try:
            await self._take_over(request)
            with traces.shared_span("step", group.spans, requests=1):
                group.end_all(await self._special[request.action](request))
        except ProtoDCSError as problem:
            group.end_all(error_reply(problem))
        except Exception as problem:
            _fail(group, problem)

    async def _take_over(self, request: Request) -> None:
        """Take a stream from a worker that cannot be reached, if the request says so."""
        if request.take_from:
            # If this fails, the request gets the error.
            with suppress(ProtoDCSError):
                await self._streams.get(request.stream, request.stand_in, request.take_from)

    def _in_task(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _fail(group: Group, problem: Exception) -> None:
    _log.error("a request failed", exc_info=problem)
    group.end_all(internal_error(problem))

"""Find the process that holds a stream, and send groups of requests there, in one hop.

A process that is silent gets no requests until it passes a health check, and what it was asked is sent to others. So
does this one if it is cut off from the database. If a process fails repeatedly although its lease is valid, another one
takes over its streams.
"""

import asyncio
import logging
import time
from collections import defaultdict, deque
from collections.abc import AsyncIterator, Callable
from contextvars import Context
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from ..messages import Action, Reply, ReplyStatus, Request, WorkerLostError, internal_error
from ..pipeline.group import MAX_REQUESTS, Group
from ..pipeline.pipeline import Pipeline
from ..settings import ServeConfig
from ..telemetry.metrics import IngressMetrics
from ..workers.waiting import wait_at_most
from .partitions import PartitionMap

if TYPE_CHECKING:
    from .membership import Membership

_log = logging.getLogger(__name__)

# Calls to one process that share what arrives, at most. A call that takes longer than so many seconds does not count.
_MAX_CALLS, _SHORT = 2, 0.02
# Pause before a request is sent again whose stream moves to another process, in seconds.
_MOVING_PAUSE = 0.02
# Pauses between the health checks of a process that failed double from `lease_seconds / 10` to this, in seconds.
_MAX_BACK_OFF = 60.0
_NO_PROCESS = Reply(ReplyStatus.LATER, "no process serves yet")
_HEALTH_CHECK = Request("", Action.CHECK_HEALTH, "")
# What a process sends in place of replies while it works.
AT_WORK: tuple[int, list[Reply]] = (-1, [])
# Calls a process with groups of requests: see `peers.Calls.call`.
CallProcess = Callable[[str, list[list[Request]]], AsyncIterator[tuple[int, list[Reply]]]]


@dataclass(slots=True, eq=False)
class _Process:
    """What is known of a process.

    Attributes:
        waiting: groups that wait for a call.
        sent: groups that have no replies yet, and when they were sent.
        calls: all calls in progress.
        short_calls: those that count.
        scheduled: whether a call begins in the next turn of the event loop.
        failures: failures since it last served. The pauses between health checks grow with them.
        failures_in_a_row: the same since it last passed a health check.
        suspect: whether it gets no requests until it passes a health check.
        wanted: set to check it before the pause ends.
        checks: the task that checks its health; None before the first.
    """

    waiting: deque[Group] = field(default_factory=deque)
    sent: dict[Group, float] = field(default_factory=dict)
    calls: "set[asyncio.Task[None]]" = field(default_factory=set)
    short_calls: "set[asyncio.Task[None]]" = field(default_factory=set)
    scheduled: bool = False
    failures: int = 0
    failures_in_a_row: int = 0
    suspect: bool = False
    wanted: asyncio.Event = field(default_factory=asyncio.Event)
    checks: "asyncio.Task[None] | None" = None

    def fail(self) -> None:
        self.failures += 1
        self.failures_in_a_row += 1
        self.suspect = True


class Forwarding:
    """Sends each group to the process that holds its stream. `name` and `pipeline` are those of this process."""

    def __init__(
        self,
        name: str,
        pipeline: Pipeline,
        call: CallProcess,
        membership: "Membership",
        config: ServeConfig,
        metrics: IngressMetrics,
    ):
        self._name = name
        self._pipeline = pipeline
        self._call_process = call
        self._membership = membership
        self._placement = membership.placement
        self._config = config
        self._metrics = metrics
        metrics.suspect_workers.set_function(lambda: sum(found.suspect for found in self._processes.values()))
        self._processes: defaultdict[str, _Process] = defaultdict(_Process)
        # Who holds a stream, by the replies of others, if it is not the first of the placement.
        self._holders: dict[str, str] = {}
        self._watching: asyncio.Task[None] | None = None

    def begin(self, group: Group) -> None:
        """Send a group."""
        if self._watching is None:
            self._watching = asyncio.create_task(self._watch(), context=Context())
        placement = self._find_placement()
        if not placement.workers:
            self._membership.refresh()
            group.end_all(_NO_PROCESS)
            return
        name, take_from = self._target(placement, group.stream)
        stand_in = name != placement.first(group.stream)
        requests = group.requests
        if stand_in or take_from:
            requests = [request._replace(stand_in=stand_in, take_from=take_from) for request in requests]
        process = self._processes[name]
        sent = Group(requests, lambda done: self._replied(name, done, group))
        process.sent[sent] = time.monotonic()
        if name == self._name:
            self._pipeline.begin(sent)
        else:
            process.waiting.append(sent)
            self._schedule_call(name, process)

    def _target(self, placement: PartitionMap, stream: str) -> tuple[str, str]:
        """Return who holds the stream, or else the first by placement that is not suspect; and whom to take it from."""
        take_from = ""
        holder = self._holders.get(stream)
        if holder is not None:
            if not self._processes[holder].suspect:
                return holder, ""
            if self._processes[holder].failures_in_a_row >= self._config.takeover_failures:
                take_from = holder
        first = placement.first(stream)
        if self._processes[first].suspect:
            others = placement.order(stream)
            first = next((name for name in others if not self._processes[name].suspect), first)
        return first, take_from

    def _replied(self, name: str, sent: Group, group: Group) -> None:
        """Learn from the replies of a process, and give them to those who wait."""
        self._processes[name].sent.pop(sent, None)
        problem = next((reply for reply in sent.replies if not reply.status.final), None)
        if problem is None:
            self._forget_failures(name)
            if self._holders.get(group.stream) != name:
                # Another process took the stream over.
                self._holders.pop(group.stream, None)
        else:
            group.pause = self._pause(name, group, problem)
        group.end(sent.replies)

    def _pause(self, name: str, group: Group, problem: Reply) -> float:
        """Return how long to wait before a group that was not served is sent again."""
        stream = group.stream
        if problem.status is ReplyStatus.HELD:
            # Only the process that holds the stream, by the store, can serve it, wherever the stream belongs.
            self._holders[stream] = problem.message
            holder = self._processes[problem.message]
            if holder.suspect:
                holder.wanted.set()
        elif problem.status is ReplyStatus.MOVED:
            self._holders.pop(stream, None)
            placement = self._find_placement()
            if problem.message not in ("", name, placement.first(stream)):
                # The process may know of a change before this one does.
                self._holders[stream] = problem.message
            elif self._target(placement, stream)[0] != name:
                return 0.0
            # Otherwise it is for example one that drains and stands in for the first.
            self._membership.refresh()
            return _MOVING_PAUSE
        else:
            if self._holders.get(stream) == name or self._processes[name].suspect:
                self._holders.pop(stream, None)
            # It may be cut off from the store.
            self._check_health(name)
        return group.pause

    # Calls.

    def _schedule_call(self, name: str, process: _Process) -> None:
        """Call a process in the next turn of the event loop, so that groups of the same turn share the call."""
        if not process.scheduled and process.waiting and len(process.short_calls) < _MAX_CALLS:
            process.scheduled = True
            asyncio.get_running_loop().call_soon(self._start_call, name, process)

    def _start_call(self, name: str, process: _Process) -> None:
        process.scheduled = False
        groups: list[Group] = []
        room = MAX_REQUESTS
        while process.waiting and len(process.waiting[0].requests) <= room:
            groups.append(process.waiting.popleft())
            room -= len(groups[-1].requests)
        if groups:
            # In a context of its own: the call is made for several requests, and must not be part of the trace of one.
            call = asyncio.create_task(self._call(name, groups), context=Context())
            process.calls.add(call)
            process.short_calls.add(call)
            call.add_done_callback(process.calls.discard)
            call.add_done_callback(partial(self._end_short_call, name, process))
            asyncio.get_running_loop().call_later(_SHORT, self._end_short_call, name, process, call)
        self._schedule_call(name, process)

    def _end_short_call(self, name: str, process: _Process, call: "asyncio.Task[None]") -> None:
        process.short_calls.discard(call)
        self._schedule_call(name, process)

    async def _call(self, name: str, groups: list[Group]) -> None:
        """Call a process with some groups, and give them their replies."""
        limit = self._config.attempt_seconds
        try:
            async with asyncio.timeout(limit) as timeout:
                async for number, replies in self._call_process(name, [group.requests for group in groups]):
                    timeout.reschedule(asyncio.get_running_loop().time() + limit)
                    if replies:
                        groups[number].end(replies)
        except (WorkerLostError, TimeoutError) as problem:
            self._metrics.failed_calls.labels("lost" if isinstance(problem, WorkerLostError) else "silent").inc()
            self._suspect(name, f"{name}: {problem or 'no answer in time'}")
        except Exception as problem:
            # Whatever it is, the queues must go on.
            _log.exception("a call to %s failed", name)
            self._metrics.failed_calls.labels("error").inc()
            for group in groups:
                group.end_all(internal_error(problem))

    # The health of processes.

    async def _watch(self) -> None:
        """Check the health of this process if it owes replies for long."""
        limit = self._config.attempt_seconds / 2
        while True:
            await asyncio.sleep(limit / 2)
            now = time.monotonic()
            if now - next(iter(self._processes[self._name].sent.values()), now) > limit:
                self._check_health(self._name)

    def _suspect(self, name: str, problem: str) -> None:
        """Send nothing to a process until it is healthy, and send elsewhere what it was asked."""
        process = self._processes[name]
        # What failed together counts as one failure.
        if not process.suspect:
            process.wanted.clear()
            process.fail()
        self._check_health(name)
        self._membership.refresh()
        process.waiting.clear()
        for call in process.calls - {asyncio.current_task()}:
            call.cancel()
        for group in list(process.sent):
            self._holders.pop(group.stream, None)
            group.end_all(Reply(ReplyStatus.LATER, problem))

    def _forget_failures(self, name: str) -> None:
        process = self._processes[name]
        if not process.failures:
            return
        if process.checks is not None:
            process.checks.cancel()
        process.failures = 0
        self._trust(process)

    def _trust(self, process: _Process) -> None:
        """Send requests to a process. If it was suspect, check the others soon: the cause of it may be gone."""
        was_suspect, process.suspect, process.failures_in_a_row = process.suspect, False, 0
        if was_suspect:
            for other in self._processes.values():
                if other.suspect:
                    other.wanted.set()

    def _check_health(self, name: str) -> None:
        """Check a process in the background until it is healthy, unless that is in progress."""
        process = self._processes[name]
        if process.checks is None or process.checks.done():
            process.checks = asyncio.create_task(self._check_until_healthy(name, process), context=Context())

    async def _check_until_healthy(self, name: str, process: _Process) -> None:
        while True:
            if process.suspect:
                await self._back_off(process)
            healthy = await self._is_healthy(name)
            self._metrics.health_checks.labels("passed" if healthy else "failed").inc()
            if healthy:
                self._trust(process)
                return
            if process.suspect:
                process.fail()
            else:
                self._suspect(name, f"{name} is not healthy")

    async def _back_off(self, process: _Process) -> None:
        """Wait longer after each failure, but not while a stream waits for this process."""
        shortest = self._config.lease_seconds / 10
        await asyncio.sleep(shortest)
        longest = min(shortest * 2.0 ** min(process.failures - 1, 30), _MAX_BACK_OFF)
        await wait_at_most(process.wanted, longest - shortest)
        process.wanted.clear()

    async def _is_healthy(self, name: str) -> bool:
        try:
            async with asyncio.timeout(self._config.attempt_seconds):
                if name == self._name:
                    replies = await self._pipeline.serve([_HEALTH_CHECK])
                else:
                    found = [replies async for _, replies in self._call_process(name, [[_HEALTH_CHECK]]) if replies]
                    (replies,) = found
                return replies[0].status is ReplyStatus.DONE
        except (WorkerLostError, TimeoutError):
            return False
        except Exception:
            _log.exception("a health check of %s failed", name)
            return False

    def _find_placement(self) -> PartitionMap:
        """Return where streams belong. If that changed, forget who held them, and processes that ended."""
        placement = self._membership.placement
        if self._placement is not placement:
            self._placement = placement
            self._holders.clear()
            for gone in set(self._processes) - {*placement.workers, self._name}:
                self._forget_failures(gone)
                if not self._processes[gone].sent:
                    del self._processes[gone]
        return placement

    async def close(self) -> None:
        """Stop sending, without replies."""
        theirs = (task for process in self._processes.values() for task in (*process.calls, process.checks))
        tasks = [task for task in (*theirs, self._watching) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

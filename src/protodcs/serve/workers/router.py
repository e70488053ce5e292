"""Find the worker of a stream, and ask it, or another one, until there is an answer or the time is over.

Each stream has a queue. Its next requests are sent together after the ones before were answered, so their order is kept
whatever fails. Requests to one worker share calls. A request that was sent twice is applied once, because it has an
idempotency key. The router may therefore repeat whatever it is not sure of.

A worker that failed gets no requests until it passes a health check, so it costs each stream at most one timeout. If it
fails repeatedly although its lease is valid, the router asks another worker to take over its streams.
"""

import asyncio
import logging
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from contextvars import Context
from dataclasses import dataclass, field

from ...errors import ProtoDCSError
from ..messages import Action, Outcome, Reply, Request, internal_error
from ..settings import ServeConfig, tenant_of, tenant_queue_limit
from ..telemetry import logs, traces
from ..telemetry.metrics import IngressMetrics
from .placement import FindPlacement, Placement

_log = logging.getLogger(__name__)

Call = Callable[[str, list[Request]], Awaitable[list[Reply]]]

# Calls in progress to one worker, and requests in each, at most.
_MAX_CALLS, _MAX_REQUESTS = 2, 256
# Pause before a request is sent again, in seconds.
_PAUSE = 0.05
# The same, if the worker is still working on it.
_BUSY_PAUSE = 0.1
# How often the list of workers is read if nothing fails, in seconds.
_REFRESH = 2.0
# Pauses between the health checks of a worker that failed double from `lease_seconds / 10` to this, in seconds.
_MAX_BACK_OFF = 60.0
_HEALTH_CHECK = Request("", Action.CHECK_HEALTH, "")


class WorkerLostError(ProtoDCSError, ConnectionError):
    """A worker that died, is not there, or could not be reached. It may or may not have done what was asked."""


class OverloadedError(ProtoDCSError, RuntimeError):
    """More requests than may wait. Nothing was done."""


class LateError(ProtoDCSError, TimeoutError):
    """No answer in time. Whether the request was applied is not known; asking again with its key is safe."""


@dataclass(slots=True, eq=False)
class _Item:
    """A place in a queue. The request is None until it is ready."""

    request: Request | None
    future: "asyncio.Future[Reply]"


@dataclass(slots=True, eq=False)
class _StreamQueue:
    """The requests on one stream, in order.

    Attributes:
        stream: its id.
        name: what the router finds the queue by: the stream, or another object for questions outside of the order.
        items: the requests that have no reply yet.
        in_flight: whether the first of them were sent.
        target: the worker that holds the stream, if it is not the first of the placement.
        stand_in: whether another worker than the first of the placement is asked.
        take_from: the worker to take the stream from; empty: none.
        problem: of the last call, for the log.
    """

    stream: str
    name: object
    items: deque[_Item] = field(default_factory=deque)
    in_flight: bool = False
    target: str | None = None
    stand_in: bool = False
    take_from: str = ""
    problem: str = ""


@dataclass(slots=True, eq=False)
class _WorkerQueue:
    """The requests that wait for a call to one worker.

    Attributes:
        groups: of requests, with the queue of their stream.
        calls: number of calls in progress.
        scheduled: whether a call begins in the next turn of the event loop.
    """

    groups: deque[tuple[_StreamQueue, list[_Item]]] = field(default_factory=deque)
    calls: int = 0
    scheduled: bool = False


@dataclass(slots=True, eq=False)
class _Health:
    """What the router knows of a worker that failed.

    Attributes:
        failures: failed calls and health checks since the last call that it served. The pauses grow with them.
        failures_in_a_row: the same since it last passed a health check.
        suspect: whether it gets no requests until it passes a health check.
        wanted: set to check it before the pause ends.
        checks: the task that checks it; None before the first.
    """

    failures: int = 0
    failures_in_a_row: int = 0
    suspect: bool = False
    wanted: asyncio.Event = field(default_factory=asyncio.Event)
    checks: "asyncio.Task[None] | None" = None

    def fail(self) -> None:
        self.failures += 1
        self.failures_in_a_row += 1
        self.suspect = True


class Router:
    """Sends requests to workers.

    Args:
        call: sends requests to one worker. It raises WorkerLostError if it cannot reach it.
        find_placement: returns the present workers, and which streams belong to them.
        config: the settings of the service.
        local: the worker in this process, if any. Requests to other workers share calls, because these are expensive.
            Here, no stream waits for another.
    """

    def __init__(self, call: Call, find_placement: FindPlacement, config: ServeConfig, local: str | None = None):
        self._call = call
        self._find_placement = find_placement
        self._config = config
        self._local = local
        self._placement: Placement | None = None
        self._refreshed = 0.0
        self._refreshing: asyncio.Task[None] | None = None
        self._health: dict[str, _Health] = {}
        self._stream_queues: dict[object, _StreamQueue] = {}
        self._worker_queues: dict[str, _WorkerQueue] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self.waiting = 0
        # By tenant, so that none fills all of the places.
        self._waiting_of: Counter[str] = Counter()
        self.metrics = IngressMetrics(config.max_queued_requests)
        self.metrics.waiting.set_function(lambda: self.waiting)
        self.metrics.suspect_workers.set_function(lambda: sum(health.suspect for health in self._health.values()))

    async def ask(self, request: Request) -> Reply:
        """Return the final reply to one request."""
        (reply,) = await self.ask_many([request])
        return reply

    async def ask_many(self, requests: list[Request]) -> list[Reply]:
        """Return the final replies to requests on one stream, in their order."""
        marked = [traces.marked(request) for request in requests]
        return await self._ask(self._queue_of(requests[0].stream), marked)

    async def ask_at_once(self, requests: list[Request]) -> list[Reply]:
        """Return the final replies to questions on one stream; they do not wait for requests that came before them."""
        marked = [traces.marked(request) for request in requests]
        return await self._ask(self._new_queue(requests[0].stream, object()), marked)

    async def ask_when_made(
        self, stream: str, make: Callable[[], Awaitable[Sequence[Request | Reply]]], count: int
    ) -> list[Reply]:
        """Return the final replies to `count` requests that `make` returns later. Their places are taken now.

        `make` returns a reply in place of a request that needs none.
        """
        queue = self._queue_of(stream)
        with self._places(queue, [None] * count) as items:
            try:
                async with asyncio.timeout(self._config.request_seconds):
                    for item, made in zip(items, await make(), strict=True):
                        if isinstance(made, Reply):
                            item.future.set_result(made)
                        else:
                            item.request = traces.marked(made)
            except TimeoutError:
                self.metrics.gave_up("late")
                raise LateError("the images were not encoded in time: nothing was applied") from None
            self._send_next(queue)
            return await self._wait_for_replies(queue, items)

    async def _ask(self, queue: _StreamQueue, requests: list[Request]) -> list[Reply]:
        with self._places(queue, requests) as items:
            self._send_next(queue)
            return await self._wait_for_replies(queue, items)

    # Queues of streams.

    def _queue_of(self, stream: str) -> _StreamQueue:
        return self._stream_queues.get(stream) or self._new_queue(stream, stream)

    def _new_queue(self, stream: str, name: object) -> _StreamQueue:
        queue = self._stream_queues[name] = _StreamQueue(stream, name)
        return queue

    @contextmanager
    def _places(self, queue: _StreamQueue, requests: Sequence[Request | None]) -> Iterator[list[_Item]]:
        """Hold places in a queue for requests, and give them up at the end."""
        items: list[_Item] = []
        try:
            items = self._take_places(queue, requests)
            yield items
        finally:
            self._give_up_places(queue, items)

    def _take_places(self, queue: _StreamQueue, requests: Sequence[Request | None]) -> list[_Item]:
        """Take places in a queue for all of the requests, or for none."""
        if self._placement is None or time.monotonic() - self._refreshed > _REFRESH:
            self._refresh_workers()
        if self.waiting + len(requests) > self._config.max_queued_requests:
            self.metrics.gave_up("overloaded")
            raise OverloadedError(
                f"{self.waiting} requests are in progress, the limit is {self._config.max_queued_requests}; "
                f"given: {len(requests)} more. Retry later."
            )
        tenant = tenant_of(queue.stream)
        if tenant and self._waiting_of[tenant] + len(requests) > tenant_queue_limit(self._config):
            raise OverloadedError(
                f"{self._waiting_of[tenant]} requests of this tenant are in progress, the limit is "
                f"{tenant_queue_limit(self._config)}; given: {len(requests)} more. Retry later."
            )
        loop = asyncio.get_running_loop()
        items = [_Item(request, loop.create_future()) for request in requests]
        queue.items.extend(items)
        self.waiting += len(items)
        self._waiting_of[tenant] += len(items)
        return items

    def _give_up_places(self, queue: _StreamQueue, items: list[_Item]) -> None:
        for item in items:
            item.future.cancel()
        self.waiting -= len(items)
        tenant = tenant_of(queue.stream)
        self._waiting_of[tenant] -= len(items)
        if not self._waiting_of[tenant]:
            del self._waiting_of[tenant]
        self._send_next(queue)

    async def _wait_for_replies(self, queue: _StreamQueue, items: list[_Item]) -> list[Reply]:
        try:
            with traces.span("route"), self.metrics.answer.time():
                async with asyncio.timeout(self._config.request_seconds):
                    return [await item.future for item in items]
        except TimeoutError:
            self.metrics.gave_up("late")
            # The problem may name addresses and files, which the caller must not see.
            _log.warning("no answer in time", extra=logs.with_fields(stream=queue.stream, last=queue.problem))
            raise LateError(
                f"no answer within {self._config.request_seconds:g} seconds: whether it was applied is not known; "
                "ask again with the same key"
            ) from None

    def _send_next(self, queue: _StreamQueue) -> None:
        """Send the first requests of a queue, if none is in flight."""
        while queue.items and queue.items[0].future.done():
            queue.items.popleft()
        if queue.in_flight:
            return
        if not queue.items:
            # Somebody who was answered late may still hold a queue that was deleted and created again.
            if self._stream_queues.get(queue.name) is queue:
                del self._stream_queues[queue.name]
            return
        if self._placement is None:
            return
        group: list[_Item] = []
        for item in queue.items:
            if item.future.done():
                continue
            if item.request is None or len(group) == _MAX_REQUESTS:
                break
            group.append(item)
        if group:
            worker = self._target(queue)
            queue.in_flight = True
            pending = self._worker_queues.setdefault(worker, _WorkerQueue())
            pending.groups.append((queue, group))
            self._schedule_call(worker, pending)

    def _target(self, queue: _StreamQueue) -> str:
        """Return the worker that is known to hold the stream, or else the first by placement that is not suspect."""
        assert self._placement is not None
        queue.take_from = ""
        if queue.target is not None:
            if not self._is_suspect(queue.target):
                return queue.target
            if self._health[queue.target].failures_in_a_row >= self._config.takeover_failures:
                queue.take_from = queue.target
        first = found = self._placement.first(queue.stream)
        if self._is_suspect(first):
            others = self._placement.order(queue.stream)
            found = next((worker for worker in others if not self._is_suspect(worker)), first)
        queue.stand_in = found != first
        return found

    def _take_replies(self, worker: str, queue: _StreamQueue, group: list[_Item], replies: list[Reply]) -> None:
        """Set the final replies. The other requests stay in the queue and are sent again."""
        queue.in_flight = False
        problem: Reply | None = None
        for item, reply in zip(group, replies, strict=True):
            if reply.outcome.final:
                if not item.future.done():
                    item.future.set_result(reply)
            elif problem is None:
                problem = reply
        if problem is None:
            queue.problem = ""
            self._send_next(queue)
            return
        self.metrics.asked_again(problem.outcome.value)
        queue.problem = f"{worker}: {problem.outcome.value}: {problem.message}"
        pause = _PAUSE
        if problem.outcome is Outcome.BUSY:
            pause = _BUSY_PAUSE
        elif problem.outcome is Outcome.HELD:
            # Only the worker that holds the stream, by the store, can serve it, wherever the stream belongs.
            queue.target, queue.stand_in = problem.message, True
            if self._is_suspect(queue.target):
                self._health[queue.target].wanted.set()
        elif problem.outcome is Outcome.MOVED:
            first = None if self._placement is None else self._placement.first(queue.stream)
            # The worker may know of a change before this router does.
            queue.target = problem.message if problem.message not in ("", worker, first) else None
            queue.stand_in = queue.target is not None
            # The next one may be the same worker, for example one that drains and stands in for `first`.
            if first in (worker, None) or queue.target is not None or self._target(queue) == worker:
                self._refresh_workers()
            else:
                pause = 0.0
        elif self._is_suspect(worker) or queue.target == worker:
            queue.target = None
        queue.in_flight = True
        asyncio.get_running_loop().call_later(pause, self._retry, queue)

    def _retry(self, queue: _StreamQueue) -> None:
        queue.in_flight = False
        self._send_next(queue)

    # Calls to workers.

    def _schedule_call(self, worker: str, pending: _WorkerQueue) -> None:
        """Call a worker in the next turn of the event loop, so that requests of the same turn share the call."""
        has_room = worker == self._local or pending.calls < _MAX_CALLS
        if not pending.scheduled and pending.groups and has_room:
            pending.scheduled = True
            asyncio.get_running_loop().call_soon(self._start_call, worker, pending)

    def _start_call(self, worker: str, pending: _WorkerQueue) -> None:
        pending.scheduled = False
        if worker == self._local:
            while pending.groups:
                self._call_in_task(worker, pending, [pending.groups.popleft()])
            return
        groups: list[tuple[_StreamQueue, list[_Item]]] = []
        room = _MAX_REQUESTS
        while pending.groups and len(pending.groups[0][1]) <= room:
            groups.append(pending.groups.popleft())
            room -= len(groups[-1][1])
        if groups:
            self._call_in_task(worker, pending, groups)
        self._schedule_call(worker, pending)

    def _call_in_task(self, worker: str, pending: _WorkerQueue, groups: list[tuple[_StreamQueue, list[_Item]]]) -> None:
        pending.calls += 1
        # In a context of its own: the call is made for several requests, and must not be part of the trace of one.
        task = asyncio.create_task(self._call_with(worker, pending, groups), context=Context())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _call_with(
        self, worker: str, pending: _WorkerQueue, groups: list[tuple[_StreamQueue, list[_Item]]]
    ) -> None:
        """Call a worker with some groups of requests."""
        requests = [
            item.request._replace(stand_in=queue.stand_in, take_from=queue.take_from)
            if (queue.stand_in or queue.take_from) and item.request is not None
            else item.request
            for queue, group in groups
            for item in group
        ]
        try:
            with self.metrics.call.time():
                async with asyncio.timeout(self._config.attempt_seconds):
                    replies = await self._call(worker, requests)  # type: ignore[arg-type]
            if any(reply.outcome is Outcome.LATER for reply in replies):
                # It may be cut off from the store.
                self._check_health(worker)
            else:
                self._forget_failures(worker)
        except (WorkerLostError, TimeoutError) as problem:
            self._suspect(worker)
            self.metrics.call_failed("lost" if isinstance(problem, WorkerLostError) else "silent")
            replies = [Reply(Outcome.LATER, f"{worker}: {problem or 'no answer in time'}")] * len(requests)
        except Exception as problem:
            # Whatever it is, the queues must go on.
            _log.exception("a call to %s failed", worker)
            self.metrics.call_failed("error")
            replies = [internal_error(problem)] * len(requests)
        finally:
            pending.calls -= 1
        at = 0
        for queue, group in groups:
            self._take_replies(worker, queue, group, replies[at : at + len(group)])
            at += len(group)
        self._schedule_call(worker, pending)

    # The health of workers.

    def _is_suspect(self, worker: str) -> bool:
        return worker in self._health and self._health[worker].suspect

    def _suspect(self, worker: str) -> None:
        """Send nothing to a worker until it is healthy, and send elsewhere what waits for it."""
        health = self._health.setdefault(worker, _Health())
        # Calls that were in progress together count as one failure.
        if not health.suspect:
            health.wanted.clear()
            health.fail()
        self._check_health(worker)
        self._refresh_workers()
        pending = self._worker_queues.get(worker)
        while pending is not None and pending.groups:
            queue, _ = pending.groups.popleft()
            queue.in_flight = False
            queue.target = None
            asyncio.get_running_loop().call_soon(self._send_next, queue)

    def _forget_failures(self, worker: str) -> None:
        health = self._health.pop(worker, None)
        if health is None:
            return
        if health.checks is not None:
            health.checks.cancel()
        if health.suspect:
            self._check_suspects()

    def _check_suspects(self) -> None:
        """Check all suspects soon: a worker recovered, and the cause of their failures may be gone."""
        for health in self._health.values():
            if health.suspect:
                health.wanted.set()

    def _check_health(self, worker: str) -> None:
        """Check a worker in the background until it is healthy, unless that is in progress."""
        health = self._health.setdefault(worker, _Health())
        if health.checks is None or health.checks.done():
            health.checks = asyncio.create_task(self._checks(worker, health), context=Context())

    async def _checks(self, worker: str, health: _Health) -> None:
        while True:
            if health.suspect:
                await self._pause(health)
            healthy = await self._is_healthy(worker)
            self.metrics.checked_health(healthy)
            if healthy:
                recovered, health.suspect, health.failures_in_a_row = health.suspect, False, 0
                if recovered:
                    self._check_suspects()
                return
            if health.suspect:
                health.fail()
            else:
                self._suspect(worker)

    async def _pause(self, health: _Health) -> None:
        """Wait longer after each failure, but not while a stream waits for this worker."""
        shortest = self._config.lease_seconds / 10
        await asyncio.sleep(shortest)
        longest = min(shortest * 2.0 ** min(health.failures - 1, 30), _MAX_BACK_OFF)
        with suppress(TimeoutError):
            async with asyncio.timeout(longest - shortest):
                await health.wanted.wait()
        health.wanted.clear()

    async def _is_healthy(self, worker: str) -> bool:
        try:
            async with asyncio.timeout(self._config.attempt_seconds):
                (reply,) = await self._call(worker, [_HEALTH_CHECK])
            return reply.outcome is Outcome.DONE
        except (WorkerLostError, TimeoutError):
            return False
        except Exception:
            _log.exception("a health check of %s failed", worker)
            return False

    # Who the workers are.

    def _refresh_workers(self) -> None:
        """Read the list of workers in the background, unless that is in progress."""
        if self._refreshing is None or self._refreshing.done():
            self._refreshing = asyncio.create_task(self._read_workers(), context=Context())

    async def _read_workers(self) -> None:
        placement = await self._wait_for_workers()
        self._refreshed = time.monotonic()
        if self._placement != placement:
            first = self._placement is None
            self._placement = placement
            for gone in set(self._health) - set(placement.workers):
                self._forget_failures(gone)
            for queue in list(self._stream_queues.values()):
                queue.target = None
                if first:
                    self._send_next(queue)

    async def _wait_for_workers(self) -> Placement:
        """Return where streams belong as soon as there is a worker."""
        while True:
            with suppress(WorkerLostError, TimeoutError):
                async with asyncio.timeout(self._config.attempt_seconds):
                    placement = await self._find_placement()
                if placement.workers:
                    return placement
            await asyncio.sleep(_PAUSE)

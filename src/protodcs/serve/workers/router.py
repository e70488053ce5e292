"""Finds the worker of a stream, and asks again, here or elsewhere, until there is an answer or the time is up.

Requests on one stream stand in line: the next ones leave when the ones before are answered, all together, so their
order is kept whatever fails on the way. Requests to one worker share calls. A request that was sent twice is applied
once, because it carries a key; the router may therefore repeat whatever it is not sure of.

A worker that failed gets no requests until it passes a health check, so it costs each stream at most one timeout. If it
fails again and again though its lease lives, the router asks another worker to take its streams over.
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
from .ring import Ring

_log = logging.getLogger(__name__)

Call = Callable[[str, list[Request]], Awaitable[list[Reply]]]
View = Callable[[], Awaitable[list[str]]]

# Calls under way to one worker, and requests in each, at most.
_CALLS, _TOGETHER = 2, 256
# Pause before the same thing is asked again, in seconds.
_PAUSE = 0.05
# The same, if the worker is still at work on it.
_BUSY_PAUSE = 0.1
# How often the list of workers is looked up when nothing is wrong, in seconds.
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
    """One request on its way; without one while its content is in the making."""

    request: Request | None
    future: "asyncio.Future[Reply]"


@dataclass(slots=True, eq=False)
class _Line:
    """The requests on one stream, in order; `away` while the first of them are asked, `trouble` what was last heard.

    `name` is what the router finds it by: the stream, or an object of its own for questions outside of the order.
    """

    stream: str
    name: object
    items: deque[_Item] = field(default_factory=deque)
    away: bool = False
    target: str | None = None
    stand_in: bool = False
    take_from: str = ""
    trouble: str = ""


@dataclass(slots=True, eq=False)
class _Lane:
    """What waits to be asked of one worker."""

    groups: deque[tuple[_Line, list[_Item]]] = field(default_factory=deque)
    calls: int = 0
    soon: bool = False


@dataclass(slots=True, eq=False)
class _Health:
    """What the router knows of a worker that did not serve.

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
    """Asks workers.

    Args:
        call: asks one worker; raises WorkerLostError where it cannot.
        view: the names of the present workers.
        config: the settings of the service.
    """

    def __init__(self, call: Call, view: View, config: ServeConfig):
        self._call = call
        self._view = view
        self._config = config
        self._ring: Ring | None = None
        self._looked = 0.0
        self._looking: asyncio.Task[None] | None = None
        self._health: dict[str, _Health] = {}
        self._lines: dict[object, _Line] = {}
        self._lanes: dict[str, _Lane] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self.waiting = 0
        # By tenant, so that none fills all of the places.
        self._waiting_of: Counter[str] = Counter()
        self.metrics = IngressMetrics(config.max_queued_requests)
        self.metrics.waiting.set_function(lambda: self.waiting)
        self.metrics.suspect_workers.set_function(lambda: sum(health.suspect for health in self._health.values()))

    async def ask(self, request: Request) -> Reply:
        """The final answer to one request."""
        (reply,) = await self.ask_many([request])
        return reply

    async def ask_many(self, requests: list[Request]) -> list[Reply]:
        """The final answers to requests on one stream, in their order."""
        marked = [traces.marked(request) for request in requests]
        return await self._ask(self._line(requests[0].stream), marked)

    async def ask_at_once(self, requests: list[Request]) -> list[Reply]:
        """Return the final replies to questions on one stream; they do not wait for requests that came before them."""
        marked = [traces.marked(request) for request in requests]
        return await self._ask(self._new_line(requests[0].stream, object()), marked)

    async def ask_when_made(
        self, stream: str, make: Callable[[], Awaitable[Sequence[Request | Reply]]], count: int
    ) -> list[Reply]:
        """Return the final replies to `count` requests that `make` has yet to make; their place in line is taken now.

        `make` returns a reply in place of a request that needs none.
        """
        line = self._line(stream)
        with self._entered(line, [None] * count) as items:
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
            self._pump(line)
            return await self._answers(line, items)

    async def _ask(self, line: _Line, requests: list[Request]) -> list[Reply]:
        with self._entered(line, requests) as items:
            self._pump(line)
            return await self._answers(line, items)

    # Lines.

    def _line(self, stream: str) -> _Line:
        return self._lines.get(stream) or self._new_line(stream, stream)

    def _new_line(self, stream: str, name: object) -> _Line:
        line = self._lines[name] = _Line(stream, name)
        return line

    @contextmanager
    def _entered(self, line: _Line, requests: Sequence[Request | None]) -> Iterator[list[_Item]]:
        """Hold places in line for all of the requests, whatever happens meanwhile."""
        items: list[_Item] = []
        try:
            items = self._enter(line, requests)
            yield items
        finally:
            self._leave(line, items)

    def _enter(self, line: _Line, requests: Sequence[Request | None]) -> list[_Item]:
        """Take places in line for all of the requests, or for none."""
        if self._ring is None or time.monotonic() - self._looked > _REFRESH:
            self._look()
        if self.waiting + len(requests) > self._config.max_queued_requests:
            self.metrics.gave_up("overloaded")
            raise OverloadedError(
                f"{self.waiting} requests are in progress, the limit is {self._config.max_queued_requests}; "
                f"given: {len(requests)} more. Retry later."
            )
        tenant = tenant_of(line.stream)
        if tenant and self._waiting_of[tenant] + len(requests) > tenant_queue_limit(self._config):
            raise OverloadedError(
                f"{self._waiting_of[tenant]} requests of this tenant are in progress, the limit is "
                f"{tenant_queue_limit(self._config)}; given: {len(requests)} more. Retry later."
            )
        loop = asyncio.get_running_loop()
        items = [_Item(request, loop.create_future()) for request in requests]
        line.items.extend(items)
        self.waiting += len(items)
        self._waiting_of[tenant] += len(items)
        return items

    def _leave(self, line: _Line, items: list[_Item]) -> None:
        for item in items:
            item.future.cancel()
        self.waiting -= len(items)
        tenant = tenant_of(line.stream)
        self._waiting_of[tenant] -= len(items)
        if not self._waiting_of[tenant]:
            del self._waiting_of[tenant]
        self._pump(line)

    async def _answers(self, line: _Line, items: list[_Item]) -> list[Reply]:
        try:
            with traces.span("route"), self.metrics.answer.time():
                async with asyncio.timeout(self._config.request_seconds):
                    return [await item.future for item in items]
        except TimeoutError:
            self.metrics.gave_up("late")
            # It may name addresses and files, which are nothing for a caller.
            _log.warning("no answer in time", extra=logs.with_fields(stream=line.stream, last=line.trouble))
            raise LateError(
                f"no answer within {self._config.request_seconds:g} seconds: whether it was applied is not known; "
                "ask again with the same key"
            ) from None

    def _pump(self, line: _Line) -> None:
        """Send the first requests of a line, if none of it is away."""
        while line.items and line.items[0].future.done():
            line.items.popleft()
        if line.away:
            return
        if not line.items:
            # Who was answered late may hold a line that is over, while another one has begun.
            if self._lines.get(line.name) is line:
                del self._lines[line.name]
            return
        if self._ring is None:
            return
        group: list[_Item] = []
        for item in line.items:
            if item.future.done():
                continue
            if item.request is None or len(group) == _TOGETHER:
                break
            group.append(item)
        if group:
            worker = self._target(line)
            line.away = True
            lane = self._lanes.setdefault(worker, _Lane())
            lane.groups.append((line, group))
            self._kick(worker, lane)

    def _target(self, line: _Line) -> str:
        """Whom to ask: the one who is known to hold the stream, else the first around the ring that is not suspect."""
        assert self._ring is not None
        line.take_from = ""
        if line.target is not None:
            if not self._is_suspect(line.target):
                return line.target
            if self._health[line.target].failures_in_a_row >= self._config.takeover_failures:
                line.take_from = line.target
        around = self._ring.order(line.stream)
        found = next((worker for worker in around if not self._is_suspect(worker)), around[0])
        line.stand_in = found != around[0]
        return found

    def _settle(self, worker: str, line: _Line, group: list[_Item], replies: list[Reply]) -> None:
        """Hand out what is final; the rest stays in line and is asked again."""
        line.away = False
        trouble: Reply | None = None
        for item, reply in zip(group, replies, strict=True):
            if reply.outcome.final:
                if not item.future.done():
                    item.future.set_result(reply)
            elif trouble is None:
                trouble = reply
        if trouble is None:
            line.trouble = ""
            self._pump(line)
            return
        self.metrics.asked_again(trouble.outcome.value)
        line.trouble = f"{worker}: {trouble.outcome.value}: {trouble.message}"
        pause = _PAUSE
        if trouble.outcome is Outcome.BUSY:
            pause = _BUSY_PAUSE
        elif trouble.outcome is Outcome.HELD:
            # Only the worker that holds the stream, by the store, can serve it, wherever the stream belongs.
            line.target, line.stand_in = trouble.message, True
            if self._is_suspect(line.target):
                self._health[line.target].wanted.set()
        elif trouble.outcome is Outcome.MOVED:
            first = None if self._ring is None else self._ring.first(line.stream)
            # The worker may know of a change before this router does.
            line.target = trouble.message if trouble.message not in ("", worker, first) else None
            line.stand_in = line.target is not None
            # The next one may be the same worker, for example one that drains and stands in for `first`.
            if first in (worker, None) or line.target is not None or self._target(line) == worker:
                self._look()
            else:
                pause = 0.0
        elif self._is_suspect(worker) or line.target == worker:
            line.target = None
        line.away = True
        asyncio.get_running_loop().call_later(pause, self._again, line)

    def _again(self, line: _Line) -> None:
        line.away = False
        self._pump(line)

    # Lanes.

    def _kick(self, worker: str, lane: _Lane) -> None:
        """Ask soon: what comes within the same turn of the event loop goes together."""
        if not lane.soon and lane.groups and lane.calls < _CALLS:
            lane.soon = True
            asyncio.get_running_loop().call_soon(self._depart, worker, lane)

    def _depart(self, worker: str, lane: _Lane) -> None:
        lane.soon = False
        groups: list[tuple[_Line, list[_Item]]] = []
        room = _TOGETHER
        while lane.groups and len(lane.groups[0][1]) <= room:
            groups.append(lane.groups.popleft())
            room -= len(groups[-1][1])
        if groups:
            lane.calls += 1
            # In a context of its own: Ray cancels what was called on behalf of a request when its caller leaves, and
            # this call is made for others too.
            task = asyncio.create_task(self._travel(worker, lane, groups), context=Context())
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        self._kick(worker, lane)

    async def _travel(self, worker: str, lane: _Lane, groups: list[tuple[_Line, list[_Item]]]) -> None:
        """One call to one worker."""
        requests = [
            item.request._replace(stand_in=line.stand_in, take_from=line.take_from)
            if (line.stand_in or line.take_from) and item.request is not None
            else item.request
            for line, group in groups
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
            # Whatever it is, the lines must go on.
            _log.exception("a call to %s failed", worker)
            self.metrics.call_failed("error")
            replies = [internal_error(problem)] * len(requests)
        finally:
            lane.calls -= 1
        at = 0
        for line, group in groups:
            self._settle(worker, line, group, replies[at : at + len(group)])
            at += len(group)
        self._kick(worker, lane)

    # The health of workers.

    def _is_suspect(self, worker: str) -> bool:
        return worker in self._health and self._health[worker].suspect

    def _suspect(self, worker: str) -> None:
        """Send nothing to a worker until it is healthy, and send back to their lines what waits for it."""
        health = self._health.setdefault(worker, _Health())
        # Calls that were under way together count as one failure.
        if not health.suspect:
            health.wanted.clear()
            health.fail()
        self._check_health(worker)
        self._look()
        lane = self._lanes.get(worker)
        while lane is not None and lane.groups:
            line, _ = lane.groups.popleft()
            line.away = False
            line.target = None
            asyncio.get_running_loop().call_soon(self._pump, line)

    def _forget_failures(self, worker: str) -> None:
        health = self._health.pop(worker, None)
        if health is None:
            return
        if health.checks is not None:
            health.checks.cancel()
        if health.suspect:
            self._check_suspects()

    def _check_suspects(self) -> None:
        """Check all suspects soon: a worker recovered, and what made them fail may be over."""
        for health in self._health.values():
            if health.suspect:
                health.wanted.set()

    def _check_health(self, worker: str) -> None:
        """Check a worker in the background until it is healthy, unless that is under way."""
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

    def _look(self) -> None:
        """Look up the workers in the background, once at a time."""
        if self._looking is None or self._looking.done():
            self._looking = asyncio.create_task(self._see(), context=Context())

    async def _see(self) -> None:
        workers = await self._viewed()
        self._looked = time.monotonic()
        if self._ring is None or set(self._ring.workers) != set(workers):
            first = self._ring is None
            self._ring = Ring(workers)
            for gone in set(self._health) - set(workers):
                self._forget_failures(gone)
            for line in list(self._lines.values()):
                line.target = None
                if first:
                    self._pump(line)

    async def _viewed(self) -> list[str]:
        """The workers, as soon as there are any."""
        while True:
            with suppress(WorkerLostError, TimeoutError):
                async with asyncio.timeout(self._config.attempt_seconds):
                    workers = await self._view()
                if workers:
                    return workers
            await asyncio.sleep(_PAUSE)

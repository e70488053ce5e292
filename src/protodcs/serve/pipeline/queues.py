"""Requests wait here for their turn, each stream in a queue of its own, and are asked again until they are done.

The next group of a stream is sent when the one before has its replies, or is computed and only has to be written. If
writing fails, both are sent again, so the order is kept whatever fails. A request that was sent twice is applied once,
because it has an idempotency key. So whatever is not sure can be sent again.
"""

import asyncio
import logging
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from ...errors import ProtoDCSError
from ..messages import Reply, Request, internal_error
from ..settings import ServeConfig, tenant_of, tenant_queue_limit
from ..telemetry import logs, traces
from ..telemetry.metrics import IngressMetrics
from .group import MAX_REQUESTS, Group
from .steps import IN_MEMORY

_log = logging.getLogger(__name__)

# Groups of a stream in flight, at most: one that is written, and one that is computed meanwhile. More would make small
# groups of what comes in.
_MAX_IN_FLIGHT = 2


class OverloadedError(ProtoDCSError, RuntimeError):
    """More requests than may wait. Nothing was done."""


class LateError(ProtoDCSError, TimeoutError):
    """No answer in time. Whether the request was applied is not known; asking again with its key is safe."""


@dataclass(slots=True, eq=False)
class _StreamQueue:
    """The requests on one stream, in order.

    Attributes:
        stream: its id.
        tenant: whose stream it is; empty without tenants.
        name: what the queue is found by: the stream, or another object for questions outside of the order.
        calls: those that do not have all replies yet.
        in_flight: the groups that were sent, in order.
        failed: whether a group has replies that are not final. Nothing is sent until those in flight have replies.
        problem: of the last group, for the log.
    """

    stream: str
    tenant: str
    name: object
    calls: "deque[_Call]" = field(default_factory=deque)
    in_flight: "deque[_Sent]" = field(default_factory=deque)
    failed: bool = False
    problem: str = ""

    @property
    def has_unsent(self) -> bool:
        """Whether requests were not sent, or not made: then those of the last call were not."""
        last = self.calls[-1] if self.calls else None
        return last is not None and (last.requests is None or last.sent < len(last.requests))


@dataclass(slots=True, eq=False)
class _Call:
    """What a caller asks for, with a place in a queue for each request.

    Attributes:
        queue: of the stream.
        count: number of places.
        requests: those without a reply yet; None until they are made.
        future: gets the replies to all requests.
        replies: to the first requests.
        sent: how many of `requests` are in flight.
    """

    queue: _StreamQueue
    count: int
    requests: list[Request] | None
    future: "asyncio.Future[list[Reply]]"
    replies: list[Reply] = field(default_factory=list)
    sent: int = 0

    def take(self, replies: list[Reply]) -> Reply | None:
        """Take replies to the first requests. Return the first that is not final; the requests from there on stay."""
        assert self.requests is not None
        final = 0
        while final < len(replies) and replies[final].status.final:
            final += 1
        self.replies += replies[:final]
        self.requests = self.requests[final:]
        self.sent -= final
        if not self.requests and not self.future.done():
            self.future.set_result(self.replies)
        return replies[final] if final < len(replies) else None


class _Sent(NamedTuple):
    """A group in flight, with the calls that its requests belong to, how many are of each, and when it was sent."""

    group: Group
    parts: "list[tuple[_Call, int]]"
    time: float


class Queues:
    """The queues of all streams.

    Args:
        begin: serves a group, here or in another process.
        config: the settings of the service.
    """

    def __init__(self, begin: Callable[[Group], None], config: ServeConfig, metrics: IngressMetrics):
        self._begin = begin
        self._config = config
        self._queues: dict[object, _StreamQueue] = {}
        self.waiting = 0
        # By tenant, so that none fills all of the places.
        self._waiting_of: Counter[str] = Counter()
        self.metrics = metrics
        self.metrics.waiting.set_function(lambda: self.waiting)

    async def ask(self, request: Request) -> Reply:
        """Return the final reply to one request."""
        (reply,) = await self.ask_many([request])
        return reply

    async def ask_many(self, requests: list[Request], *, at_once: bool = False) -> list[Reply]:
        """Return the final replies to requests on one stream, in their order.

        With `at_once` they are questions that do not wait for requests that came before them.
        """
        stream = requests[0].stream
        call = self._enter(stream, object() if at_once else stream, len(requests), traces.marked(requests))
        try:
            self._send_next(call.queue)
            return await self._wait_for_replies(call)
        finally:
            self._leave(call)

    async def ask_at_once(self, request: Request) -> Reply:
        """Return the final reply to one question, which does not wait for requests that came before it."""
        (reply,) = await self.ask_many([request], at_once=True)
        return reply

    async def ask_when_made(
        self, stream: str, make: Callable[[], Awaitable[Sequence[Request | Reply]]], count: int
    ) -> list[Reply]:
        """Return the final replies to `count` requests that `make` returns later. Their places are taken now.

        `make` returns a reply in place of a request that needs none.
        """
        call = self._enter(stream, stream, count, None)
        try:
            try:
                async with asyncio.timeout(self._config.request_seconds):
                    made = await make()
            except TimeoutError:
                self.metrics.given_up.labels("late").inc()
                raise LateError("the images were not encoded in time: nothing was applied") from None
            call.requests = traces.marked([one for one in made if isinstance(one, Request)])
            if not call.requests:
                call.future.set_result([])
            self._send_next(call.queue)
            replies = iter(await self._wait_for_replies(call))
            return [one if isinstance(one, Reply) else next(replies) for one in made]
        finally:
            self._leave(call)

    def _enter(self, stream: str, name: object, count: int, requests: list[Request] | None) -> _Call:
        """Take places at the end of a queue. Raise OverloadedError if there are too few."""
        queue = self._queues.get(name)
        tenant = tenant_of(stream) if queue is None else queue.tenant
        if self.waiting + count > self._config.max_queued_requests:
            self.metrics.given_up.labels("overloaded").inc()
            raise OverloadedError(
                f"{self.waiting} requests are in progress, the limit is {self._config.max_queued_requests}; "
                f"given: {count} more. Retry later."
            )
        if tenant and self._waiting_of[tenant] + count > tenant_queue_limit(self._config):
            raise OverloadedError(
                f"{self._waiting_of[tenant]} requests of this tenant are in progress, the limit is "
                f"{tenant_queue_limit(self._config)}; given: {count} more. Retry later."
            )
        if queue is None:
            queue = self._queues[name] = _StreamQueue(stream, tenant, name)
        call = _Call(queue, count, requests, asyncio.get_running_loop().create_future())
        queue.calls.append(call)
        self.waiting += count
        self._waiting_of[tenant] += count
        return call

    def _leave(self, call: _Call) -> None:
        """Give up the places of a call."""
        tenant = call.queue.tenant
        self.waiting -= call.count
        self._waiting_of[tenant] -= call.count
        if not self._waiting_of[tenant]:
            del self._waiting_of[tenant]
        if not call.future.done():
            call.future.cancel()
            # Those behind it may be ready.
            self._send_next(call.queue)

    async def _wait_for_replies(self, call: _Call) -> list[Reply]:
        begin = time.monotonic()
        # `asyncio.timeout` would take longer than the other parts of a queue.
        timer = asyncio.get_running_loop().call_later(self._config.request_seconds, self._give_up, call)
        try:
            with traces.span("route"):
                return await call.future
        finally:
            timer.cancel()
            self.metrics.answer.observe(time.monotonic() - begin)

    def _give_up(self, call: _Call) -> None:
        """Tell the caller that there was no answer in time."""
        if call.future.done():
            return
        self.metrics.given_up.labels("late").inc()
        # The problem may name addresses and files, which the caller must not see.
        _log.warning("no answer in time", extra=logs.with_fields(stream=call.queue.stream, last=call.queue.problem))
        call.future.set_exception(
            LateError(
                f"no answer within {self._config.request_seconds:g} seconds: whether it was applied is not known; "
                "ask again with the same key"
            )
        )
        self._send_next(call.queue)

    def _send_next(self, queue: _StreamQueue) -> None:
        """Send the next requests of a queue, unless they have to wait for those in flight."""
        calls, in_flight = queue.calls, queue.in_flight
        if queue.failed or len(in_flight) == _MAX_IN_FLIGHT or (in_flight and not in_flight[-1].group.is_computed):
            return
        while calls and calls[0].future.done():
            calls.popleft()
        if not calls:
            # Somebody who was answered late may still hold a queue that was deleted and created again.
            if not in_flight and self._queues.get(queue.name) is queue:
                del self._queues[queue.name]
            return
        if not queue.has_unsent:
            return
        parts, requests = _next_requests(queue)
        if not requests:
            return
        replied = partial(self._take_replies, queue)
        group = Group(requests, replied, partial(self._send_next, queue))
        if in_flight:
            group.loaded = in_flight[-1].group.loaded
        for call, count in parts:
            call.sent += count
        in_flight.append(_Sent(group, parts, time.monotonic()))
        try:
            self._begin(group)
        except Exception as problem:
            # Whatever it is, the queue must go on.
            _log.exception("requests could not be sent")
            group.end_all(internal_error(problem))

    def _take_replies(self, queue: _StreamQueue, _: Group) -> None:
        """Take the final replies of the groups in flight, in order. The other requests stay, and are sent again."""
        loop, pause = asyncio.get_running_loop(), 0.0
        while queue.in_flight and queue.in_flight[0].group.ended:
            group, parts, sent = queue.in_flight.popleft()
            self.metrics.group.observe(time.monotonic() - sent)
            # Behind a reply that is not final, none counts.
            problem = None if queue.failed else _take(parts, group.replies)
            if problem is not None:
                self.metrics.retries.labels(problem.status.value).inc()
                queue.failed, queue.problem = True, f"{problem.status.value}: {problem.message}"
            pause = group.pause
        if not queue.failed:
            queue.problem = ""
            if queue.has_unsent:
                # Later, because a long queue of requests with replies at once must not become a deep stack.
                loop.call_soon(self._send_next, queue)
            else:
                self._send_next(queue)
        elif not queue.in_flight:
            for call in queue.calls:
                call.sent = 0
            loop.call_later(pause, self._send_again, queue)

    def _send_again(self, queue: _StreamQueue) -> None:
        queue.failed = False
        self._send_next(queue)


def _take(parts: list[tuple[_Call, int]], replies: list[Reply]) -> Reply | None:
    """Give replies to the calls that they belong to. Return the first that is not final."""
    first, problem = 0, None
    for call, count in parts:
        found = call.take(replies[first : first + count])
        first, problem = first + count, problem or found
    return problem


def _next_requests(queue: _StreamQueue) -> tuple[list[tuple[_Call, int]], list[Request]]:
    """Return the next requests that can be served together, and the calls that they belong to."""
    parts: list[tuple[_Call, int]] = []
    requests: list[Request] = []
    for call in queue.calls:
        if call.future.done():
            continue
        if call.requests is None or len(requests) == MAX_REQUESTS:
            break
        if call.requests[0].action not in IN_MEMORY:
            if requests or queue.in_flight:
                break
            return [(call, 1)], call.requests
        more = call.requests[call.sent : call.sent + MAX_REQUESTS - len(requests)]
        if more:
            requests += more
            parts.append((call, len(more)))
    return parts, requests

"""Requests wait here for their turn, each stream in a queue of its own, and are asked again until they are done.

The next group of a stream is sent after the one before has its replies, so the order is kept whatever fails. A request
that was sent twice is applied once, because it has an idempotency key. So whatever is not sure can be sent again.
"""

import asyncio
import itertools
import logging
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

from ...errors import ProtoDCSError
from ..messages import Reply, Request, internal_error
from ..settings import ServeConfig, tenant_of, tenant_queue_limit
from ..telemetry import logs, traces
from ..telemetry.metrics import IngressMetrics
from .group import MAX_REQUESTS, Group
from .steps import IN_MEMORY

_log = logging.getLogger(__name__)


class OverloadedError(ProtoDCSError, RuntimeError):
    """More requests than may wait. Nothing was done."""


class LateError(ProtoDCSError, TimeoutError):
    """No answer in time. Whether the request was applied is not known; asking again with its key is safe."""


@dataclass(slots=True, eq=False)
class _Item:
    """What a caller asks for, with a place in a queue for each request.

    Attributes:
        count: number of places.
        requests: those without a reply yet; None until they are made.
        replies: to the first requests.
        future: gets the replies to all requests.
    """

    count: int
    requests: list[Request] | None
    future: "asyncio.Future[list[Reply]]"
    replies: list[Reply] = field(default_factory=list)

    def take(self, replies: Iterator[Reply]) -> Reply | None:
        """Take replies to the first requests. Return the first that is not final; the requests from there on stay."""
        assert self.requests is not None
        taken = [reply for _, reply in zip(self.requests, replies, strict=False)]
        final = next((place for place, reply in enumerate(taken) if not reply.status.final), len(taken))
        self.replies += taken[:final]
        self.requests = self.requests[final:]
        if not self.requests and not self.future.done():
            self.future.set_result(self.replies)
        return taken[final] if final < len(taken) else None


@dataclass(slots=True, eq=False)
class _StreamQueue:
    """The requests on one stream, in order.

    Attributes:
        stream: its id.
        name: what the queue is found by: the stream, or another object for questions outside of the order.
        items: those that do not have all replies yet.
        in_flight: whether the first of them were sent.
        sending: whether that happens right now.
        problem: of the last group, for the log.
    """

    stream: str
    name: object
    items: deque[_Item] = field(default_factory=deque)
    in_flight: bool = False
    sending: bool = False
    problem: str = ""


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

    async def ask_many(self, requests: list[Request]) -> list[Reply]:
        """Return the final replies to requests on one stream, in their order."""
        marked = traces.marked(requests)
        return await self._ask(self._queue_of(requests[0].stream), marked)

    async def ask_at_once(self, requests: list[Request]) -> list[Reply]:
        """Return the final replies to questions on one stream; they do not wait for requests that came before them."""
        marked = traces.marked(requests)
        return await self._ask(self._new_queue(requests[0].stream, object()), marked)

    async def ask_when_made(
        self, stream: str, make: Callable[[], Awaitable[Sequence[Request | Reply]]], count: int
    ) -> list[Reply]:
        """Return the final replies to `count` requests that `make` returns later. Their places are taken now.

        `make` returns a reply in place of a request that needs none.
        """
        queue = self._queue_of(stream)
        with self._place(queue, count) as item:
            try:
                async with asyncio.timeout(self._config.request_seconds):
                    made = await make()
            except TimeoutError:
                self.metrics.given_up.labels("late").inc()
                raise LateError("the images were not encoded in time: nothing was applied") from None
            item.requests = traces.marked(one for one in made if isinstance(one, Request))
            if not item.requests:
                item.future.set_result([])
            self._send_next(queue)
            replies = iter(await self._wait_for_replies(queue, item))
            return [one if isinstance(one, Reply) else next(replies) for one in made]

    async def _ask(self, queue: _StreamQueue, requests: list[Request]) -> list[Reply]:
        with self._place(queue, len(requests), requests) as item:
            self._send_next(queue)
            return await self._wait_for_replies(queue, item)

    def _queue_of(self, stream: str) -> _StreamQueue:
        return self._queues.get(stream) or self._new_queue(stream, stream)

    def _new_queue(self, stream: str, name: object) -> _StreamQueue:
        queue = self._queues[name] = _StreamQueue(stream, name)
        return queue

    @contextmanager
    def _place(self, queue: _StreamQueue, count: int, requests: list[Request] | None = None) -> Iterator[_Item]:
        """Hold places in a queue for requests, and give them up at the end."""
        item: _Item | None = None
        try:
            item = self._take_places(queue, count, requests)
            yield item
        finally:
            self._give_up_places(queue, item)

    def _take_places(self, queue: _StreamQueue, count: int, requests: list[Request] | None) -> _Item:
        """Take places in a queue for all of the requests, or for none."""
        if self.waiting + count > self._config.max_queued_requests:
            self.metrics.given_up.labels("overloaded").inc()
            raise OverloadedError(
                f"{self.waiting} requests are in progress, the limit is {self._config.max_queued_requests}; "
                f"given: {count} more. Retry later."
            )
        tenant = tenant_of(queue.stream)
        if tenant and self._waiting_of[tenant] + count > tenant_queue_limit(self._config):
            raise OverloadedError(
                f"{self._waiting_of[tenant]} requests of this tenant are in progress, the limit is "
                f"{tenant_queue_limit(self._config)}; given: {count} more. Retry later."
            )
        item = _Item(count, requests, asyncio.get_running_loop().create_future())
        queue.items.append(item)
        self.waiting += count
        self._waiting_of[tenant] += count
        return item

    def _give_up_places(self, queue: _StreamQueue, item: _Item | None) -> None:
        if item is not None:
            item.future.cancel()
            self.waiting -= item.count
            tenant = tenant_of(queue.stream)
            self._waiting_of[tenant] -= item.count
            if not self._waiting_of[tenant]:
                del self._waiting_of[tenant]
        self._send_next(queue)

    async def _wait_for_replies(self, queue: _StreamQueue, item: _Item) -> list[Reply]:
        begin = time.monotonic()
        # `asyncio.timeout` would take longer than the other parts of a queue.
        timer = asyncio.get_running_loop().call_later(self._config.request_seconds, self._give_up, queue, item)
        try:
            with traces.span("route"):
                return await item.future
        finally:
            timer.cancel()
            self.metrics.answer.observe(time.monotonic() - begin)

    def _give_up(self, queue: _StreamQueue, item: _Item) -> None:
        """Tell the caller that there was no answer in time."""
        if item.future.done():
            return
        self.metrics.given_up.labels("late").inc()
        # The problem may name addresses and files, which the caller must not see.
        _log.warning("no answer in time", extra=logs.with_fields(stream=queue.stream, last=queue.problem))
        item.future.set_exception(
            LateError(
                f"no answer within {self._config.request_seconds:g} seconds: whether it was applied is not known; "
                "ask again with the same key"
            )
        )

    def _send_next(self, queue: _StreamQueue) -> None:
        """Send the first requests of a queue, if none is in flight."""
        while queue.items and queue.items[0].future.done():
            queue.items.popleft()
        if queue.in_flight:
            return
        if not queue.items:
            # Somebody who was answered late may still hold a queue that was deleted and created again.
            if self._queues.get(queue.name) is queue:
                del self._queues[queue.name]
            return
        items = _next_items(queue)
        if items:
            queue.in_flight = queue.sending = True
            replied = partial(self._take_replies, queue, items, time.monotonic())
            requests = itertools.chain.from_iterable(item.requests or () for item in items)
            group = Group(list(itertools.islice(requests, MAX_REQUESTS)), replied)
            try:
                self._begin(group)
            except Exception as problem:
                # Whatever it is, the queue must go on.
                _log.exception("requests could not be sent")
                group.end_all(internal_error(problem))
            finally:
                queue.sending = False

    def _take_replies(self, queue: _StreamQueue, items: list[_Item], sent: float, group: Group) -> None:
        """Take the final replies. The other requests stay in the queue and are sent again."""
        self.metrics.group.observe(time.monotonic() - sent)
        replies = iter(group.replies)
        problems = [item.take(replies) for item in items]
        problem = next(filter(None, problems), None)
        if problem is None:
            queue.problem = ""
            if queue.sending:
                # There were replies at once. A long queue of such requests must not become a deep stack.
                asyncio.get_running_loop().call_soon(self._go_on, queue)
            else:
                self._go_on(queue)
            return
        self.metrics.retries.labels(problem.status.value).inc()
        queue.problem = f"{problem.status.value}: {problem.message}"
        asyncio.get_running_loop().call_later(group.pause, self._go_on, queue)

    def _go_on(self, queue: _StreamQueue) -> None:
        queue.in_flight = False
        self._send_next(queue)


def _next_items(queue: _StreamQueue) -> list[_Item]:
    """Return the first items that can be served together, if they are ready."""
    items: list[_Item] = []
    count = 0
    for item in queue.items:
        if item.future.done():
            continue
        if item.requests is None or count >= MAX_REQUESTS:
            break
        if item.requests[0].action not in IN_MEMORY:
            return items or [item]
        items.append(item)
        count += len(item.requests)
    return items

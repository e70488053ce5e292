"""Limits of callers: bodies, classes and pixels of a request; requests per second, requests in progress and streams
of a tenant.

If a request states its size, it is rejected before anything is read. Otherwise the limit applies while the body comes
in. A tenant that sends too much must leave room for the others.
"""

import asyncio
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager

from starlette.requests import ClientDisconnect, HTTPConnection
from starlette.types import Message, Receive, Scope

from ...data.sanitize import SCREENS, kind_of
from ...errors import ImageError
from ..settings import ServeConfig, tenant_queue_limit
from .bucket import Bucket
from .headers import header_values
from .keys import Caller
from .problems import ProblemError, retry_later
from .rules import Rule

# The number of streams of a tenant is counted again after so many seconds.
_COUNT_SECONDS = 5.0
# In the state of a request if its whole body has arrived, so that no time limit is needed.
COMPLETE = "body is complete"
# Retry-After of a problem that only the deletion of a stream solves. Seconds.
_LONG = 60

# Checks the headers of images: the checksums of a large one take longer than others should wait. It is one thread, so
# that many images do not take the interpreter lock from the event loop in turn.
_IMAGE_THREAD = ThreadPoolExecutor(1, thread_name_prefix="image headers")
# Returns the number of streams of a tenant.
CountStreams = Callable[[str], Awaitable[int]]


class Limits:
    """What each tenant may do, and what it does. One per process that serves HTTP.

    Args:
        config: the settings of the service.
        count_streams: returns the number of streams of a tenant.
    """

    def __init__(self, config: ServeConfig, count_streams: CountStreams):
        self._config = config
        self._count_streams = count_streams
        self._buckets: dict[str, Bucket] = {}
        self._stream_counts: dict[str, _StreamCount] = {}
        self.in_progress: Counter[str] = Counter()
        # Bytes of bodies: of each tenant, and of all.
        self._held: Counter[str] = Counter()
        self.held = 0

    def of(self, caller: Caller | None) -> ServeConfig:
        """Return the settings with the limits of a caller."""
        return self._config if caller is None else self._config.of_tenant(caller.tenant)

    def max_body(self, caller: Caller | None, is_json: bool, rule: Rule) -> int:
        """Return how many bytes the body of a request may have."""
        most = self.of(caller).body_bytes
        if is_json:
            most = min(most, self._config.json_bytes)
        return most if rule.max_body is None else min(most, rule.max_body)

    def incoming(self, scope: Scope, receive: Receive) -> "IncomingBody":
        """Return the body of a request, which is in progress until the body ends. It is in the state, too.

        Raises:
            ProblemError: a tenant sends too much, or the body may not even be read.
        """
        state = scope["state"]
        caller: Caller | None = state.get("caller")
        rule: Rule = state["rule"]
        most = sys.maxsize if rule.streamed else self.max_body(caller, _is_json(scope), rule)
        if caller is not None:
            self.check_rate(caller)
        _check_announced(scope, most)
        seconds = self._config.stream_idle_seconds if rule.streamed else self._config.body_seconds
        tenant = "" if caller is None else caller.tenant
        state["body"] = body = IncomingBody(self, tenant, scope, receive, most, seconds, rule.streamed)
        return body

    def check_rate(self, caller: Caller) -> None:
        """Raise ProblemError if a tenant sends too many requests at once or per second."""
        # Also those whose body is still coming in, which are not queued yet.
        most = tenant_queue_limit(self._config)
        if self.in_progress[caller.tenant] >= most:
            raise retry_later("rate_limited", f"A tenant may have {most} requests in progress. Retry later.", 1)
        wait = self.take_token(caller)
        if wait:
            detail = f"A tenant may send {self.of(caller).rate:g} requests per second. Retry later."
            raise retry_later("rate_limited", detail, wait)

    def take_token(self, caller: Caller) -> float:
        """Count a request of a tenant and return 0. If it sends too many, return the seconds to wait."""
        bucket = self._buckets.get(caller.tenant)
        if bucket is None:
            allowed = self.of(caller)
            bucket = self._buckets[caller.tenant] = Bucket(allowed.rate, allowed.burst)
        return bucket.take(time.monotonic())

    def hold(self, tenant: str, size: int, own: int) -> None:
        """Count a piece of a body, behind `own` bytes of the same one. Raise ProblemError if bodies take too much.

        A body that is alone always has room: its maximum size is another limit.
        """
        most = self._config.bodies_bytes
        share = self._config.tenant_max_fraction * most if tenant else most
        others, of_tenant = self.held - own, self._held[tenant] - own
        self._held[tenant] += size
        self.held += size
        grown = own + size
        if (others and others + grown > most) or (of_tenant and of_tenant + grown > share):
            raise ProblemError("overloaded", "The bodies of requests in progress take too much memory. Retry later.")

    def let_go(self, tenant: str, size: int) -> None:
        """Forget a body of so many bytes."""
        self._held[tenant] -= size
        self.held -= size

    def check_classes(self, caller: Caller | None, classes: int) -> None:
        """Raise ProblemError if a stream would have too many classes."""
        most = self.of(caller).classes
        if classes > most:
            raise ProblemError("too_many_classes", f"A stream may have {most} classes; given: {classes}.")

    @asynccontextmanager
    async def reserved_stream(
        self, caller: Caller | None, exists: Callable[[], Awaitable[bool]]
    ) -> AsyncIterator[None]:
        """Create a stream inside of this. Raise ProblemError if a tenant may not have one more.

        A tenant that has as many streams as it may can still repeat the creation of one that `exists`.

        The count is trusted for a few seconds, and taken again before anything is rejected. Processes that serve HTTP
        count separately, so streams that they create in the same seconds may exceed the limit by as much.
        """
        if caller is None:
            yield
            return
        count = self._stream_counts.setdefault(caller.tenant, _StreamCount())
        most = self.of(caller).streams
        async with count.lock:
            if count.streams + count.reserved >= most or time.monotonic() - count.counted > _COUNT_SECONDS:
                count.streams, count.counted = await self._count_streams(caller.tenant), time.monotonic()
            if count.streams + count.reserved >= most and not await exists():
                detail = f"A tenant may have {most} streams, and has {count.streams}. Delete one first."
                raise retry_later("too_many_streams", detail, _LONG)
            count.reserved += 1
        try:
            yield
            count.streams += 1
        finally:
            count.reserved -= 1

    async def check_pixels(self, http: HTTPConnection, image: bytes) -> None:
        """Raise ProblemError if an image has too many pixels, by its header."""
        most = self.of(http.scope["state"]["caller"]).pixels
        pixels = await asyncio.get_running_loop().run_in_executor(_IMAGE_THREAD, _pixels, image)
        if pixels > most:
            detail = f"An image may have {most} pixels; given: {pixels}. Scale it down first."
            raise ProblemError("image_too_large", detail)


class _StreamCount:
    """How many streams a tenant has and is about to have, and when they were counted, by the monotonic clock."""

    def __init__(self) -> None:
        self.streams = 0
        self.reserved = 0
        self.counted = -float("inf")
        self.lock = asyncio.Lock()


def _pixels(image: bytes) -> int:
    """Return how many pixels an image has; 0 if there is no image, which the encoder reports."""
    try:
        found = SCREENS[kind_of(image)](image)
    except ImageError:
        return 0
    return found.width * found.height


class IncomingBody:
    """The body of a request as it comes in. `size` bytes of it count as held by the tenant.

    A body is held as a whole, unless it is too large or too slow, or there is no memory for it. One that is streamed is
    used row by row: only a long pause is too slow, and rows count as held until they are released.

    Args:
        limits: where it counts.
        tenant: whose request it is.
        scope: of the request.
        receive: returns the next message of the request.
        most: maximum bytes at once.
        seconds: how long it may take, or a pause of a streamed one.
        streamed: whether it is streamed.
    """

    def __init__(
        self, limits: Limits, tenant: str, scope: Scope, receive: Receive, most: int, seconds: float, streamed: bool
    ):
        self._limits = limits
        self._tenant = tenant
        self._state = scope["state"]
        self._receive = receive
        self._most = most
        self._seconds = seconds
        self._until = None if streamed else asyncio.get_running_loop().time() + seconds
        self._more = True
        self.size = 0
        limits.in_progress[tenant] += 1

    async def receive(self) -> Message:
        """Return the next message of a request. Raise ProblemError if it comes too late or is too much."""
        if not self._more:
            # After the body nothing is late: this is the end of the connection.
            return await self._receive()
        message = await (self._receive() if COMPLETE in self._state else self._receive_in_time())
        self._more = message.get("more_body", False)
        if piece := len(message.get("body", b"")):
            self.size += piece
            self._limits.hold(self._tenant, piece, self.size - piece)
            if self.size > self._most:
                raise _too_large(self._most)
        return message

    async def _receive_in_time(self) -> Message:
        try:
            async with asyncio.timeout_at(self._until or asyncio.get_running_loop().time() + self._seconds):
                return await self._receive()
        except TimeoutError:
            late = "No row arrived" if self._until is None else "The body did not arrive"
            raise ProblemError("request_timeout", f"{late} within {self._seconds:g} seconds.") from None

    async def read(self) -> bytes:
        """Return the whole body. Most come in one piece."""
        pieces: list[bytes] = []
        while True:
            message = await self.receive()
            if message["type"] == "http.disconnect":
                raise ClientDisconnect
            pieces.append(message.get("body", b""))
            if not message.get("more_body", False):
                return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def release(self, size: int) -> None:
        """Forget rows of so many bytes, which were answered."""
        # The last row may have no line break.
        size = min(size, self.size)
        self.size -= size
        self._limits.let_go(self._tenant, size)

    def end(self) -> None:
        """End the request, and hold nothing of its body any more. Rows that end later release nothing."""
        self._limits.in_progress[self._tenant] -= 1
        self.release(self.size)


def _is_json(scope: Scope) -> bool:
    """Return whether the body of a request is JSON, by one of its headers."""
    return any(b"json" in value.lower() for value in header_values(scope, b"content-type"))


def _check_announced(scope: Scope, most: int) -> None:
    """Raise ProblemError if a body is not even read, by the headers of its request."""
    lengths = header_values(scope, b"content-length")
    if lengths:
        length = lengths[0]
        if not length.isdigit() or any(other != length for other in lengths[1:]):
            raise ProblemError("bad_request", "Content-Length must be one number.")
        if len(length) > 18 or int(length) > most:
            raise _too_large(most)
    encodings = header_values(scope, b"content-encoding")
    if encodings and any(value.strip().lower() not in (b"", b"identity") for value in encodings):
        detail = "Send the body without a Content-Encoding."
        raise ProblemError("unsupported_media_type", detail, headers={"Accept-Encoding": "identity"})


def _too_large(most: int) -> ProblemError:
    return ProblemError("body_too_large", f"A body may have {most} bytes.")

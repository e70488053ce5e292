"""How much a caller may ask for: bodies, classes, pixels; and a tenant: requests a second, requests under way, streams.

What is too large is refused before it is read, decoded or parsed where its size is said beforehand, and while it comes
in where it is not. One tenant's flood must leave room for the others.
"""

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import NamedTuple

from starlette.exceptions import HTTPException
from starlette.requests import HTTPConnection
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ...data.screening import SCREENS, kind_of
from ...errors import ImageError
from ..settings import ServeConfig, limit_of, share_of
from .keys import Caller
from .refusals import not_now, refusal
from .rules import Rule, own

# For so long a list of the streams of a tenant is believed, in seconds.
_COUNTED = 5.0
# Maximum bytes of a body that holds a name or a number, or one prototype, by the action of its rule.
_SMALL_BODIES = {"snapshot": 2**16, "rollback": 2**16, "resize": 2**16, "add class": 2**19}
# When to ask again after something that only a deletion will change, in seconds.
_LONG = 60


class Bucket:
    """Tokens that come back at a steady rate: a request takes one, and is refused where there is none.

    >>> bucket = Bucket(rate=10, burst=1)
    >>> bucket.take(now=0.0), bucket.take(now=0.0)
    (0.0, 0.1)
    """

    def __init__(self, rate: float, burst: float):
        self._rate = rate
        self._burst = burst
        self._tokens = burst
        self._filled: float | None = None

    def take(self, now: float) -> float:
        """Take a token; else the seconds until there is one."""
        passed = 0.0 if self._filled is None else max(0.0, now - self._filled)
        self._tokens = min(self._burst, self._tokens + passed * self._rate)
        self._filled = now
        if self._tokens < 1:
            return (1 - self._tokens) / self._rate
        self._tokens -= 1
        return 0.0


class Allowed(NamedTuple):
    """The limits of one tenant: the settings of the same names."""

    rate: float
    burst: int
    streams: int
    classes: int
    pixels: int
    body_bytes: int


def allowed_for(config: ServeConfig, tenant: str) -> Allowed:
    """The limits of a tenant: its own where it has any, else those of all."""
    return Allowed(*(limit_of(config, tenant, name) for name in Allowed._fields))


class _Rooms:
    """The streams of one tenant, as far as they are known here; those that are just being created are `coming`."""

    def __init__(self) -> None:
        self.streams: set[str] = set()
        self.counted = -float("inf")
        self.coming: Counter[str] = Counter()
        self.counting = asyncio.Lock()


class Limits:
    """What each tenant may do, and what it does. One for each process that speaks HTTP.

    Args:
        config: the settings of the service.
        listed: gives the ids of all streams.
    """

    def __init__(self, config: ServeConfig, listed: Callable[[], Awaitable[list[str]]]):
        self._config = config
        self._listed = listed
        self._allowed: dict[str, Allowed] = {}
        self._buckets: dict[str, Bucket] = {}
        self._rooms: dict[str, _Rooms] = {}
        self.under_way: Counter[str] = Counter()
        self._held: Counter[str] = Counter()

    def of(self, caller: Caller | None) -> Allowed:
        """The limits of a caller."""
        tenant = "" if caller is None else caller.tenant
        if tenant not in self._allowed:
            self._allowed[tenant] = allowed_for(self._config, tenant)
        return self._allowed[tenant]

    def largest(self, caller: Caller | None, is_json: bool, rule: Rule | None) -> int:
        """Return how many bytes the body of a request may have."""
        most = self.of(caller).body_bytes
        if is_json:
            most = min(most, self._config.json_bytes)
        return most if rule is None else min(most, _SMALL_BODIES.get(rule.action, most))

    def too_many(self, caller: Caller) -> Response | None:
        """Whether a tenant asks too much at once or too often."""
        # Also those whose body is still coming in, which have no place in line yet.
        most = share_of(self._config)
        if self.under_way[caller.tenant] >= most:
            return not_now(f"{most} requests of a tenant may be under way: ask again when some are answered", 1)
        allowed = self.of(caller)
        bucket = self._buckets.get(caller.tenant)
        if bucket is None:
            # Each process that speaks HTTP gives out its part.
            parts = self._config.ingresses
            bucket = self._buckets[caller.tenant] = Bucket(allowed.rate / parts, max(1.0, allowed.burst / parts))
        wait = bucket.take(time.monotonic())
        if wait:
            return not_now(f"a tenant may make {allowed.rate:g} requests a second: ask again later", wait)
        return None

    def hold(self, tenant: str, size: int, own: int) -> None:
        """Take note of a piece of a body, behind `own` bytes of the same one; refused where bodies take too much.

        A body that is alone always has room: how large it may be is another limit.
        """
        most = self._config.bodies_bytes
        share = self._config.share * most if tenant else most
        others, of_tenant = self._held.total() - own, self._held[tenant] - own
        self._held[tenant] += size
        grown = own + size
        if (others and others + grown > most) or (of_tenant and of_tenant + grown > share):
            raise HTTPException(429, "the bodies of requests under way take too much: ask again when some are answered")

    def let_go(self, tenant: str, size: int) -> None:
        """Forget a body of so many bytes."""
        self._held[tenant] -= size

    @asynccontextmanager
    async def admitted(self, http: HTTPConnection, stream: str, classes: int) -> AsyncIterator[None]:
        """Refuse a new stream that has too many classes or is one too many; else create it inside of this."""
        caller: Caller | None = http.scope["state"]["caller"]
        allowed = self.of(caller)
        if classes > allowed.classes:
            raise HTTPException(413, f"a stream may have {allowed.classes} classes; given: {classes}")
        if caller is None:
            yield
            return
        rooms = self._rooms.setdefault(caller.tenant, _Rooms())
        if not await self._has_room(http, rooms, stream, allowed.streams):
            raise HTTPException(
                429, f"a tenant may have {allowed.streams} streams: delete one first", {"Retry-After": str(_LONG)}
            )
        try:
            yield
        finally:
            rooms.coming[stream] -= 1

    async def _has_room(self, http: HTTPConnection, rooms: "_Rooms", stream: str, most: int) -> bool:
        """Whether a tenant may have this stream; one that it has already may be created again.

        What was counted is believed for a while: with thousands of streams a list takes long. It is looked up again
        before anything is refused, because streams may have been deleted. Processes that speak HTTP do not know of one
        another's: what they create in the same seconds may be too many by as much.
        """
        async with rooms.counting:
            full = stream not in rooms.streams and len(rooms.streams) >= most
            if full or time.monotonic() - rooms.counted > _COUNTED:
                coming = {name for name, times in rooms.coming.items() if times}
                rooms.streams = coming.union(own(http, await self._listed()))
                rooms.coming = Counter({name: rooms.coming[name] for name in coming})
                rooms.counted = time.monotonic()
            if stream not in rooms.streams and len(rooms.streams) >= most:
                return False
            rooms.streams.add(stream)
            rooms.coming[stream] += 1
            return True

    async def look_at(self, http: HTTPConnection, image: bytes) -> None:
        """Refuse an image that has too many pixels, by its header."""
        allowed = self.of(http.scope["state"]["caller"])
        # In a thread: the check sums of a large image take longer than others should wait.
        pixels = await asyncio.to_thread(_pixels, image)
        if pixels > allowed.pixels:
            raise HTTPException(413, f"an image may have {allowed.pixels} pixels; given: {pixels}; scale it down first")


def _pixels(image: bytes) -> int:
    """How many pixels an image has; none where there is no image: the encoder says why."""
    try:
        found = SCREENS[kind_of(image)](image)
    except ImageError:
        return 0
    return found.width * found.height


class Limited:
    """Refuses requests that are too many, and bodies that are too long, too slow or packed."""

    def __init__(self, app: ASGIApp, limits: Limits, seconds: float):
        self._app = app
        self._limits = limits
        self._seconds = seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request, or refuse it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        caller: Caller | None = scope["state"].get("caller")
        most = self._limits.largest(caller, _is_json(scope), scope["state"].get("rule"))
        answer = (None if caller is None else self._limits.too_many(caller)) or _refused(scope, most)
        if answer is not None:
            await answer(scope, receive, send)
            return
        tenant = "" if caller is None else caller.tenant
        body = _Body(self._limits, tenant, most, self._seconds)
        self._limits.under_way[tenant] += 1
        try:
            await self._app(scope, body.bounded(receive), send)
        finally:
            self._limits.under_way[tenant] -= 1
            self._limits.let_go(tenant, body.size)


class _Body:
    """One body as it comes in, as long as it is neither too long nor too slow, and there is room for it."""

    def __init__(self, limits: Limits, tenant: str, most: int, seconds: float):
        self._limits = limits
        self._tenant = tenant
        self._most = most
        self._seconds = seconds
        self.size = 0

    def bounded(self, receive: Receive) -> Receive:
        """What gives the pieces of the body; the time begins now."""
        until = asyncio.get_running_loop().time() + self._seconds
        more = True

        async def bounded() -> Message:
            nonlocal more
            try:
                # Behind the body there is nothing to hurry for: what comes then is the end of the connection.
                async with asyncio.timeout_at(until if more else None):
                    message = await receive()
            except TimeoutError:
                raise HTTPException(408, f"the body did not come within {self._seconds:g} seconds") from None
            more = more and message.get("more_body", False)
            self._take(len(message.get("body", b"")))
            return message

        return bounded

    def _take(self, size: int) -> None:
        before = self.size
        self.size += size
        self._limits.hold(self._tenant, size, before)
        if self.size > self._most:
            raise _too_long(self._most)


def _is_json(scope: Scope) -> bool:
    """Whether a body says that it is JSON, of whatever kind."""
    return any(b"json" in value.lower() for name, value in scope["headers"] if name.lower() == b"content-type")


def _refused(scope: Scope, most: int) -> Response | None:
    """Why a body is not even read."""
    lengths = [value for name, value in scope["headers"] if name.lower() == b"content-length"]
    if any(not length.isdigit() for length in lengths) or len(set(lengths)) > 1:
        return refusal(400, "Content-Length must be one number")
    if lengths and (len(lengths[0]) > 18 or int(lengths[0]) > most):
        return refusal(413, _too_long(most).detail)
    packed = [value for name, value in scope["headers"] if name.lower() == b"content-encoding"]
    if any(value.strip().lower() not in (b"", b"identity") for value in packed):
        return refusal(415, "send the body as it is, without a Content-Encoding", {"Accept-Encoding": "identity"})
    return None


def _too_long(most: int) -> HTTPException:
    return HTTPException(413, f"a body may have {most} bytes")

"""Refuses what is too much at the very front: in Ray Serve's proxy, before a request costs anything behind it.

Behind the door all is checked again; it only keeps floods away, and lets pass whatever it is not sure of. It must never
read a body, and never wait for anything but its own clock. Ray Serve takes it by the environment variable `VARIABLE`.
"""

import asyncio
import logging
import random
import time
from collections.abc import Awaitable, Callable
from typing import NamedTuple

from starlette.datastructures import Headers
from starlette.middleware import Middleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ....errors import ConfigError
from ...access.keys import Keys
from ...access.limits import Bucket, allowed_for
from ...access.places import Places
from ...access.refusals import not_now
from ...access.rules import bearer, rules_of
from ...settings import ServeConfig
from ...telemetry import logs
from ...telemetry.metrics import DoorMetrics
from .threshold import Threshold

_log = logging.getLogger(__name__)

VARIABLE = "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH"
DOOR = "protodcs.serve.runtime.ray.door:middlewares"

# What those may do who have no good key, all together; and those who ask for nothing but health. A second, and at once.
_STRANGERS, _HEALTH = (20.0, 100.0), (50.0, 100.0)
_NOBODY, _ANYONE = "-strangers", "-health"
# A tenant is refused so many times a second, and so many times at once. Others hear it later, by at most so many
# seconds for each reason: a connection that waits for its answer sends nothing else.
_REFUSALS, _REFUSALS_AT_ONCE = 50.0, 50.0
_HELD = {"rate": 4.0, "full": 1.0}
# Pause before the settings are asked for again, in seconds.
_PAUSE = 1.0


class Paced:
    """When each refusal is sent, so that a flood of them costs little.

    >>> paced = Paced(rate=10, burst=1, longest=4)
    >>> [round(paced.delay(now=0.0), 3) for _ in range(3)]
    [0.0, 0.1, 0.2]
    """

    def __init__(self, rate: float, burst: float, longest: float):
        self._step = 1 / rate
        self._slack = burst / rate
        self._longest = longest
        self._next = -float("inf")

    def delay(self, now: float) -> float:
        """For how long the next one is held back, in seconds."""
        self._next = min(max(self._next, now - self._slack) + self._step, now + self._longest)
        return max(0.0, self._next - now)


class Refused(NamedTuple):
    """Why somebody does not come in, after how many seconds that is said, and when to ask again."""

    reason: str
    words: str
    again: float
    held: float


class Desk:
    """Knows who may come in.

    Args:
        config: the settings of the service.
    """

    def __init__(self, config: ServeConfig):
        self._config = config
        self._keys = None if config.keys is None else Keys.open(config.keys)
        self._buckets: dict[str, Bucket] = {}
        self._paced: dict[tuple[str, str], Paced] = {}
        self.places = None if config.slowdown is None else Places(config.slowdown)
        self.metrics = DoorMetrics(self.places)

    def who(self, scope: Scope) -> str | None:
        """Whose request it is, empty where there are no keys; None for one that comes in whatever there is."""
        if self._keys is None and self.places is None:
            return None
        _, rules, _ = rules_of(scope)
        rule = rules.get(scope["method"])
        if not rules or (self._keys is None and rule is not None and rule.role is None):
            return None
        if self._keys is None:
            return ""
        if rule is not None and rule.role is None:
            return _ANYONE
        caller = self._keys.caller(bearer(scope))
        return _NOBODY if caller is None else caller.tenant

    def refuses(self, who: str, now: float) -> Refused | None:
        """Why a request does not come in; one that does has taken its place, and has to leave it."""
        if who:
            wait = self._bucket(who).take(now)
            if wait:
                words = "more requests a second than you may make: ask again later"
                return Refused("rate", words, wait, self._held("rate", who, now))
        if self.places is not None and who != _ANYONE and not self.places.enter(who, now):
            words = "more requests than can be served well: nothing was done; ask again later"
            return Refused("full", words, 1.0, self._held("full", who, now))
        return None

    def _held(self, reason: str, who: str, now: float) -> float:
        if (reason, who) not in self._paced:
            self._paced[reason, who] = Paced(_REFUSALS, _REFUSALS_AT_ONCE, _HELD[reason])
        # Those that were held for the longest time would all come back at one moment, again and again.
        return self._paced[reason, who].delay(now) * random.uniform(0.5, 1.0)

    def _bucket(self, who: str) -> Bucket:
        if who not in self._buckets:
            allowed = allowed_for(self._config, who)
            special = {_NOBODY: _STRANGERS, _ANYONE: _HEALTH}
            self._buckets[who] = Bucket(*special.get(who, (allowed.rate, allowed.burst)))
        return self._buckets[who]


class Door:
    """The middleware; open until the settings are known.

    Args:
        app: what comes behind.
        learn: gives the desk of this service, as soon as there is one.
    """

    def __init__(self, app: ASGIApp, learn: Callable[[], Awaitable[Desk]]):
        self._app = app
        self._learn = learn
        self._learning: asyncio.Task[Desk] | None = None

    def _desk(self) -> Desk | None:
        if self._learning is None:
            self._learning = asyncio.create_task(_made(self._learn))
        return self._learning.result() if self._learning.done() else None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request, or refuse it."""
        desk = self._desk() if scope["type"] == "http" else None
        who = None if desk is None else desk.who(scope)
        if desk is None or who is None:
            await self._app(scope, receive, send)
            return
        start = time.monotonic()
        refused = desk.refuses(who, start)
        if refused is not None:
            await _refuse(desk, refused, scope, receive, send)
        elif desk.places is None or who == _ANYONE:
            await self._app(scope, receive, send)
        else:
            await self._serve(desk.places, who, start, scope, receive, send)

    async def _serve(self, places: Places, who: str, start: float, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request that has a place, and say how long it took."""
        mark = places.mark()
        seconds: float | None = None

        async def timed(message: Message) -> None:
            nonlocal seconds
            if message["type"] == "http.response.start" and message["status"] == 200:
                seconds = time.monotonic() - start
            await send(message)

        try:
            await self._app(scope, receive, timed)
        finally:
            places.leave(who, mark, time.monotonic(), seconds)


async def _refuse(desk: Desk, refused: Refused, scope: Scope, receive: Receive, send: Send) -> None:
    desk.metrics.refused(refused.reason)
    if refused.held:
        with desk.metrics.held.track_inprogress():
            await asyncio.sleep(refused.held)
    named = {"X-Request-Id": logs.request_id(Headers(scope=scope).get("x-request-id"))}
    await not_now(refused.words, refused.again, named)(scope, receive, send)


async def _made(learn: Callable[[], Awaitable[Desk]]) -> Desk:
    """The desk, however long it takes until there is one."""
    while True:
        try:
            return await learn()
        except ConfigError:
            # A machine without the file of keys: what stands behind the door has one.
            _log.exception("the door stays open")
            await asyncio.sleep(60 * _PAUSE)
        except Exception as problem:
            _log.debug("the door is still open", extra=logs.with_fields(problem=type(problem).__name__))
            await asyncio.sleep(_PAUSE)


async def _of_keeper() -> Desk:
    """The desk of the service on this Ray cluster."""
    from ..startup import freeze_startup_objects
    from .cluster import Calls, bring_numbers, process_name

    config = ServeConfig(**await Calls().settings())
    desk = Desk(config)
    bring_numbers(config, process_name("door"), desk.metrics.registry)
    freeze_startup_objects()
    return desk


def middlewares() -> list[Middleware]:
    """What Ray Serve puts before all else in each process that listens."""
    return [Middleware(Threshold), Middleware(Door, learn=_of_keeper)]

"""Follow one stream, or all streams of a tenant, as server-sent events."""

import asyncio
import json
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Annotated, Any, NoReturn

from fastapi import APIRouter, Header, Query, Response
from starlette.types import Receive, Scope, Send

from ...access.problems import ProblemError
from ...access.rules import requires
from ..context import Context, RequestContext
from ..openapi import problems
from ..schemas import StreamPath
from .feeds import Cursor

router = APIRouter(tags=["events"], responses=problems(404))

MEDIA_TYPE = "text/event-stream"
_HEADERS = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
# Browsers connect again after so many milliseconds.
_RETRY_MILLISECONDS = 1000
# A client that takes nothing for so long is disconnected. Seconds.
_SEND_SECONDS = 30.0
# After a restart, decisions may become durable this long after the time that they bear. Milliseconds.
_OVERLAP_MARGIN = 1000

_DESCRIPTION: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "Events: decision, stats, guard, warning and heartbeat. Their data are JSON objects.",
        "content": {MEDIA_TYPE: {"schema": {"type": "string"}}},
    }
}

LastEventId = Annotated[
    str | None, Header(alias="Last-Event-ID", max_length=100, description="Id of the last event that you have.")
]
After = Annotated[str | None, Query(max_length=100, description="The same as `Last-Event-ID`, which comes first.")]


class EventResponse(Response):
    """Sends events until the client disconnects."""

    media_type = MEDIA_TYPE

    # FastAPI reads the status of its documentation from the default.
    def __init__(
        self,
        context: RequestContext | None = None,
        events: AsyncGenerator[bytes, None] | None = None,
        status_code: int = 200,
    ):
        super().__init__(status_code=status_code, headers=_HEADERS)
        del self.headers["content-length"]
        self._context = context
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send events, and a heartbeat if there were none for a while."""
        assert self._events is not None
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        gone = asyncio.create_task(_disconnected(receive))
        sending = asyncio.create_task(self._send_all(send))
        try:
            await asyncio.wait([gone, sending], return_when=asyncio.FIRST_COMPLETED)
            if sending.done():
                sending.result()
        finally:
            for task in (gone, sending):
                task.cancel()
            await asyncio.gather(gone, sending, return_exceptions=True)
            self._leave()
        await send({"type": "http.response.body", "body": b""})

    async def _send_all(self, send: Send) -> None:
        assert self._context is not None
        assert self._events is not None
        heartbeat_seconds = self._context.services.config.heartbeat_seconds
        first = f"retry: {_RETRY_MILLISECONDS}\n\n".encode() + _heartbeat()
        await _send(send, first)
        sent = time.monotonic()
        async with aclosing(self._events) as events:
            async for content in events:
                if not self._is_allowed():
                    return
                if time.monotonic() - sent >= heartbeat_seconds:
                    content += _heartbeat()
                if content:
                    await _send(send, content)
                    sent = time.monotonic()

    def _is_allowed(self) -> bool:
        """Return whether the caller's key and session are still good."""
        assert self._context is not None
        sessions, caller = self._context.services.sessions, self._context.caller
        return sessions is None or caller is None or sessions.is_good(self._context.session, caller)

    def _leave(self) -> None:
        if self._context is not None:
            self._context.services.feeds.leave(self._context.tenant)


async def _send(send: Send, content: bytes) -> None:
    async with asyncio.timeout(_SEND_SECONDS):
        await send({"type": "http.response.body", "body": content, "more_body": True})


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _heartbeat() -> bytes:
    return f"event: heartbeat\ndata: {json.dumps({'time': int(1000 * time.time())})}\n\n".encode()


def _bad_id(given: str) -> NoReturn:
    raise ProblemError("invalid_request", f"`Last-Event-ID` must be the id of an event; given: {given[:100]!r}.")


@router.get("/v1/streams/{stream}/events", response_class=EventResponse, responses=_DESCRIPTION)
@requires("read", "events")
async def stream_events(
    stream: StreamPath, context: Context, last_event_id: LastEventId = None, after: After = None
) -> Response:
    """Follow a stream.

    Without an id, only events from now on are sent. The id of a decision is its position.
    """
    given = last_event_id or after
    try:
        cursor = None if given is None else Cursor.parse(given)
    except ValueError:
        _bad_id(given or "")
    feeds = context.services.feeds
    events = feeds.follow(context.scoped(stream), cursor)
    return await _begun(context, events)


@router.get("/v1/events", response_class=EventResponse, responses=_DESCRIPTION)
@requires("read", "events")
async def all_events(context: Context, last_event_id: LastEventId = None, after: After = None) -> Response:
    """Follow all streams of the caller.

    Ids are times in milliseconds. After a reconnection, events of the last seconds before the id are sent again; their
    `stream` and `position` say which they are.
    """
    given = last_event_id or after
    if given is not None and not (given.isdecimal() and given.isascii() and len(given) <= 15):
        _bad_id(given)
    config = context.services.config
    overlap = int(1000 * config.store_connect_timeout) + _OVERLAP_MARGIN
    since = None if given is None else max(0, int(given) - overlap)
    return await _begun(context, context.services.feeds.follow_all(context.tenant, since))


async def _begun(context: RequestContext, events: AsyncGenerator[bytes, None]) -> Response:
    """Return the response, after the first look at the stream, so that a stream that is not there is a 404."""
    context.services.feeds.enter(context.tenant)
    try:
        first = await anext(events, b"")
    except BaseException:
        context.services.feeds.leave(context.tenant)
        raise
    return EventResponse(context, _chained(first, events))


async def _chained(first: bytes, events: AsyncGenerator[bytes, None]) -> AsyncGenerator[bytes, None]:
    yield first
    async for content in events:
        yield content

"""Follow one stream, or all streams of a tenant, as server-sent events."""

import asyncio
import json
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Annotated

from fastapi import Header, Query, Response
from fastapi.responses import StreamingResponse
from starlette.types import Message, Receive, Scope, Send

from ...access.problems import ProblemError
from ...access.rules import requires
from ..context import Context, RequestContext
from ..openapi import Responses, resource
from ..schemas import StreamPath
from .feeds import Cursor

router = resource("events", 404)

MEDIA_TYPE = "text/event-stream"
_HEADERS = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
# Browsers connect again after so many milliseconds.
_RETRY_MILLISECONDS = 1000
# A client that takes nothing for so long is disconnected. Seconds.
_SEND_SECONDS = 30.0
# After a restart, decisions may become durable this long after the time that they bear. Milliseconds.
_OVERLAP_MARGIN = 1000

_DESCRIPTION: Responses = {
    200: {
        "description": "Events: decision, stats, guard, warning and heartbeat. Their data are JSON objects.",
        "content": {MEDIA_TYPE: {"schema": {"type": "string"}}},
    }
}

LastEventId = Annotated[
    str | None, Header(alias="Last-Event-ID", max_length=100, description="Id of the last event that you have.")
]
After = Annotated[str | None, Query(max_length=100, description="The same as `Last-Event-ID`, which comes first.")]


class EventResponse(StreamingResponse):
    """Sends events until the client disconnects, or takes nothing for too long."""

    media_type = MEDIA_TYPE
    body_iterator: AsyncGenerator[bytes, None]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events, and end their iterator."""

        async def send_in_time(message: Message) -> None:
            async with asyncio.timeout(_SEND_SECONDS):
                await send(message)

        async with aclosing(self.body_iterator):
            await super().__call__(scope, receive, send_in_time)


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
        raise _bad_id(given) from None
    return await _response(context, context.services.feeds.follow(context.scoped(stream), cursor))


@router.get("/v1/events", response_class=EventResponse, responses=_DESCRIPTION)
@requires("read", "events")
async def all_events(context: Context, last_event_id: LastEventId = None, after: After = None) -> Response:
    """Follow all streams of the caller.

    Ids are times in milliseconds. After a reconnection, events of the last seconds before the id are sent again; their
    `stream` and `position` say which they are.
    """
    given = last_event_id or after
    if given is not None and not (given.isdecimal() and given.isascii() and len(given) <= 15):
        raise _bad_id(given)
    overlap = int(1000 * context.services.config.store_connect_timeout) + _OVERLAP_MARGIN
    since = None if given is None else max(0, int(given) - overlap)
    return await _response(context, context.services.feeds.follow_all(context.tenant, since))


def _bad_id(given: str | None) -> ProblemError:
    return ProblemError(
        "invalid_request", f"`Last-Event-ID` must be the id of an event; given: {(given or '')[:100]!r}."
    )


async def _response(context: RequestContext, events: AsyncGenerator[bytes, None]) -> Response:
    """Return the response, after the first look at the stream, so that a stream that is not there is a 404."""
    content = _with_heartbeats(context, events)
    await anext(content)
    return EventResponse(content, headers=_HEADERS)


async def _with_heartbeats(context: RequestContext, events: AsyncGenerator[bytes, None]) -> AsyncGenerator[bytes, None]:
    """Yield nothing after the first look at the stream, then events, and a heartbeat if there were none for a while."""
    services = context.services
    with services.feeds.counted(context.tenant):
        async with aclosing(events):
            first = await anext(events, b"")
            yield b""
            yield f"retry: {_RETRY_MILLISECONDS}\n\n".encode() + _heartbeat() + first
            sent = time.monotonic()
            async for content in events:
                if not context.is_allowed():
                    return
                if time.monotonic() - sent >= services.config.heartbeat_seconds:
                    content += _heartbeat()
                if content:
                    yield content
                    sent = time.monotonic()


def _heartbeat() -> bytes:
    return f"event: heartbeat\ndata: {json.dumps({'time': int(1000 * time.time())})}\n\n".encode()

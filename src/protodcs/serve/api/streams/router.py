"""Create, list, look at, freeze, reset and delete streams."""

from typing import Annotated

from fastapi import Query

from ...access.rules import requires
from ...messages import Action
from ..context import Changing, Context
from ..openapi import LOCATION, location, resource
from ..schemas import Change, StreamPath
from .handler import create_stream, create_streams, delete_stream
from .listing import list_streams
from .schemas import BatchResults, CreatedStream, NewStream, NewStreams, Sort, StreamList, StreamStatus

router = resource("streams", 404, 409, 410)

_EXISTED = {"model": CreatedStream, "description": "The stream exists already with the same settings."}


@router.post("/v1/streams", status_code=201, responses={200: _EXISTED, 201: LOCATION})
@requires("admin", "create")
async def create(body: NewStream, context: Context) -> CreatedStream:
    """Create a stream. If it exists already with the same settings, return it with 200."""
    created, existed = await create_stream(body, context)
    context.response.headers["Location"] = location("streams", body.id)
    if existed:
        context.response.status_code = 200
    return created


@router.post("/v1/streams:batch")
@requires("admin", "create")
async def create_batch(body: NewStreams, context: Context) -> BatchResults:
    """Create up to 1,000 streams. Each is created or rejected on its own."""
    return BatchResults(results=await create_streams(body.streams, context))


@router.get("/v1/streams")
@requires("read", "list")
async def list_(
    context: Context,
    limit: int = Query(100, ge=1, le=1000, description="Maximum number of streams in the response."),
    cursor: str | None = Query(None, max_length=2000, description="`next_cursor` of the previous page."),
    sort: Annotated[Sort, Query(description="Order; `-` means descending.")] = "id",
    frozen: bool | None = Query(None, description="Return only streams that are frozen, or that are not."),
) -> StreamList:
    """Return a page of the caller's streams."""
    return await list_streams(context, limit, cursor, sort, frozen)


@router.get("/v1/streams/{stream}")
@requires("read", "status")
async def status(stream: StreamPath, context: Context) -> StreamStatus:
    """Return a stream and its condition."""
    reply = await context.ask(stream, Action.STATUS)
    return StreamStatus.model_validate({**(reply.facts or {}), "id": stream, "tenant": context.tenant or None})


@router.delete("/v1/streams/{stream}", status_code=204)
@requires("admin", "delete")
async def delete(
    stream: StreamPath,
    context: Changing,
    incarnation: str = Query("", max_length=100, description="Delete the stream only if it is this incarnation."),
) -> None:
    """Delete a stream and everything that it learned.

    `incarnation` is in the response to its creation and in its status. With it, a stream that was deleted and created
    again in the meantime is not deleted.
    """
    await delete_stream(stream, incarnation, context)


@router.post("/v1/streams/{stream}/freeze")
@requires("admin", "freeze")
async def freeze(stream: StreamPath, context: Changing) -> Change:
    """Stop learning. The stream goes on deciding."""
    return await context.change(stream, Action.FREEZE)


@router.post("/v1/streams/{stream}/unfreeze")
@requires("admin", "unfreeze")
async def unfreeze(stream: StreamPath, context: Changing) -> Change:
    """Learn again."""
    return await context.change(stream, Action.UNFREEZE)


@router.post("/v1/streams/{stream}/acknowledge")
@requires("admin", "acknowledge")
async def acknowledge(stream: StreamPath, context: Changing) -> Change:
    """End the warnings of the stream: what its latest samples show counts as usual."""
    return await context.change(stream, Action.ACKNOWLEDGE)


@router.post("/v1/streams/{stream}/reset")
@requires("admin", "reset")
async def reset(stream: StreamPath, context: Changing) -> Change:
    """Forget everything that was learned."""
    return await context.change(stream, Action.RESET)

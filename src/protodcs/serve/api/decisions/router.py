"""Read, export and purge the decision log of a stream."""

from typing import Annotated, Any

from fastapi import APIRouter, Depends, Query, Response
from fastapi.responses import StreamingResponse

from ...access.rules import requires
from ...log.entries import LogQuery, Purge
from ..context import Context
from ..openapi import BINARY, problems
from ..schemas import StreamPath
from .handler import export, milliseconds, position_after, purge, read_page, thumbnail
from .schemas import (
    MAX_PAGE,
    Format,
    ImageFilter,
    LabelFilter,
    LogPage,
    NearestFilter,
    OrderOfPage,
    OutcomeFilter,
    Position,
    Purged,
    Since,
    Until,
)

router = APIRouter(tags=["decisions"], responses=problems(404))

_MEDIA_TYPES: dict[Format, str] = {"ndjson": "application/x-ndjson", "parquet": "application/vnd.apache.parquet"}
_THUMBNAIL: dict[int | str, dict[str, Any]] = {
    200: {"description": "The thumbnail.", "content": {"image/jpeg": BINARY}}
}
_EXPORTED: dict[int | str, dict[str, Any]] = {
    200: {"description": "The file.", "content": dict.fromkeys(_MEDIA_TYPES.values(), BINARY)}
}


# A coroutine because FastAPI calls other functions in a thread.
async def _wanted(
    since: Since = None,
    until: Until = None,
    outcome: OutcomeFilter = None,
    label: LabelFilter = None,
    nearest_class: NearestFilter = None,
) -> LogQuery:
    return LogQuery(milliseconds(since), milliseconds(until), outcome, label, nearest_class)


Wanted = Annotated[LogQuery, Depends(_wanted)]


@router.get("/v1/streams/{stream}/decisions")
@requires("read", "decisions")
async def read_decisions(
    stream: StreamPath,
    context: Context,
    wanted: Wanted,
    limit: int = Query(100, ge=1, le=MAX_PAGE, description="Maximum number of decisions in the response."),
    cursor: str | None = Query(None, max_length=100, description="`next_cursor` of the previous page."),
    order: OrderOfPage = "newest",
) -> LogPage:
    """Return a page of the decision log.

    A cursor is the position of a decision: with `order=oldest`, the page begins with the next position.
    """
    query = wanted._replace(after=position_after(cursor), newest_first=order == "newest", limit=limit)
    return await read_page(context, stream, query)


@router.get("/v1/streams/{stream}/decisions:export", response_class=StreamingResponse, responses=_EXPORTED)
@requires("read", "export decisions")
async def export_decisions(
    stream: StreamPath,
    context: Context,
    wanted: Wanted,
    file_format: Annotated[Format, Query(alias="format", description="Format of the file.")] = "ndjson",
) -> StreamingResponse:
    """Return all decisions that exist now and match as one file, oldest first. Thumbnails are not part of it."""
    return StreamingResponse(await export(context, stream, wanted, file_format), media_type=_MEDIA_TYPES[file_format])


@router.get("/v1/streams/{stream}/decisions/{position}/thumbnail", response_class=Response, responses=_THUMBNAIL)
@requires("read", "thumbnail", images=True)
async def read_thumbnail(stream: StreamPath, position: Position, context: Context) -> Response:
    """Return the thumbnail of a decision. Every request is in the audit log."""
    context.http.scope["state"]["audit"] = {"position": position}
    image = await thumbnail(context, stream, position)
    return Response(image, media_type="image/jpeg", headers={"Cache-Control": "no-store"})


@router.delete("/v1/streams/{stream}/decisions")
@requires("admin", "purge")
async def purge_decisions(
    stream: StreamPath,
    context: Context,
    since: Since = None,
    until: Until = None,
    image_ref: ImageFilter = None,
) -> Purged:
    """Delete decisions from the log for good, with their thumbnails: all, a time range, or those about one image.

    What the stream learned stays.
    """
    return Purged(deleted=await purge(context, stream, Purge(milliseconds(since), milliseconds(until), image_ref)))

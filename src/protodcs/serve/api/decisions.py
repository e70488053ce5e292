"""The decision log of a stream: read, export and purge it."""

import asyncio
import json
import re
from collections.abc import AsyncIterator
from datetime import datetime, timedelta
from typing import Annotated, Any, Literal

from fastapi import Depends, Query, Response
from fastapi.responses import StreamingResponse
from pydantic import AwareDatetime, BaseModel, BeforeValidator, Field

from ...core.decision import Outcome
from ...decision_log import LoggedDecision
from ...errors import InputError
from ..access.problems import ProblemError
from ..access.rules import requires
from ..log.entries import MAX_IMAGE_REF, LogQuery, Order, Purge
from ..log.export import EPOCH, ParquetWriter, as_datetime, as_ndjson
from ..messages import Action
from .context import Context, RequestContext
from .openapi import BINARY, resource
from .schemas import PositionPath, StreamPath

router = resource("decisions", 404)

MAX_PAGE = 1000

_DATE_AND_TIME = re.compile(r"\d{4}-\d{2}-\d{2}[Tt ]\d{2}:")


def _check_moment(value: Any) -> Any:
    """Raise ValueError for plain numbers, which pydantic takes for seconds since 1970."""
    if isinstance(value, str) and not _DATE_AND_TIME.match(value):
        raise ValueError("a time must be like 2030-01-31T12:00:00Z")
    return value


_Moment = Annotated[AwareDatetime, BeforeValidator(_check_moment)]
_Since = Annotated[_Moment | None, Query(description="Only decisions from this time on, such as 2030-01-31T12:00:00Z.")]
_Until = Annotated[_Moment | None, Query(description="Only decisions before this time.")]
_Format = Literal["ndjson", "parquet"]
_MEDIA_TYPES: dict[_Format, str] = {"ndjson": "application/x-ndjson", "parquet": "application/vnd.apache.parquet"}
_THUMBNAIL: dict[int | str, dict[str, Any]] = {
    200: {"description": "The thumbnail.", "content": {"image/jpeg": BINARY}}
}
_EXPORTED: dict[int | str, dict[str, Any]] = {
    200: {"description": "The file.", "content": dict.fromkeys(_MEDIA_TYPES.values(), BINARY)}
}


class LogPage(BaseModel):
    """A page of the decision log."""

    items: list[LoggedDecision]
    next_cursor: str | None = Field(description="Send it as `cursor` to get the next page; null on the last page.")


class Purged(BaseModel):
    """What a purge did."""

    deleted: int = Field(description="Number of deleted entries.")


# A coroutine because FastAPI calls other functions in a thread.
async def _wanted(
    since: _Since = None,
    until: _Until = None,
    outcome: Annotated[Outcome | None, Query(description="Only decisions with this outcome.")] = None,
    label: Annotated[str | None, Query(max_length=1000, description="Only decisions with this label.")] = None,
    nearest_class: Annotated[
        str | None,
        Query(max_length=1000, description="Only decisions whose best class is this one, also unknown ones."),
    ] = None,
) -> LogQuery:
    return LogQuery(_milliseconds(since), _milliseconds(until), outcome, label, nearest_class)


_Wanted = Annotated[LogQuery, Depends(_wanted)]


@router.get("/v1/streams/{stream}/decisions")
@requires("read", "decisions")
async def read_decisions(
    stream: StreamPath,
    context: Context,
    wanted: _Wanted,
    limit: int = Query(100, ge=1, le=MAX_PAGE, description="Maximum number of decisions in the response."),
    cursor: str | None = Query(None, max_length=100, description="`next_cursor` of the previous page."),
    order: Annotated[Order, Query(description="Order of the decisions.")] = "newest",
) -> LogPage:
    """Return a page of the decision log.

    A cursor is the position of a decision: with `order=oldest`, the page begins with the next position.
    """
    if cursor is not None and (not cursor.isdecimal() or len(cursor) > 10):
        raise InputError(f"`cursor` must be `next_cursor` of an earlier page; given: {cursor[:100]!r}.")
    after = None if cursor is None else int(cursor)
    return await read_page(context, stream, wanted._replace(after=after, newest_first=order == "newest", limit=limit))


@router.get("/v1/streams/{stream}/decisions:export", response_class=StreamingResponse, responses=_EXPORTED)
@requires("read", "export decisions")
async def export_decisions(
    stream: StreamPath,
    context: Context,
    wanted: _Wanted,
    file_format: Annotated[_Format, Query(alias="format", description="Format of the file.")] = "ndjson",
) -> StreamingResponse:
    """Return all decisions that exist now and match as one file, oldest first. Thumbnails are not part of it."""
    writer = ParquetWriter() if file_format == "parquet" else None
    # Before the response begins, so that a stream that is not there is a 404.
    newest, _ = await _read_entries(context, stream, LogQuery(limit=1))
    end = newest[0]["position"] if newest else -1
    return StreamingResponse(_pieces(context, stream, wanted, end, writer), media_type=_MEDIA_TYPES[file_format])


@router.get("/v1/streams/{stream}/decisions/{position}/thumbnail", response_class=Response, responses=_THUMBNAIL)
@requires("read", "thumbnail", images=True)
async def read_thumbnail(stream: StreamPath, position: PositionPath, context: Context) -> Response:
    """Return the thumbnail of a decision. Every request is in the audit log."""
    context.http.scope["state"]["audit"] = {"position": position}
    if context.services.config.forbid_images:
        raise ProblemError("forbidden", "This service stores and returns no images (`forbid_images`).")
    reply = await context.ask_at_once(stream, Action.READ_THUMBNAIL, b"%d" % position)
    if not reply.answer:
        raise ProblemError("thumbnail_not_found", f"There is no thumbnail of a decision at position {position}.")
    return Response(reply.answer, media_type="image/jpeg", headers={"Cache-Control": "no-store"})


@router.delete("/v1/streams/{stream}/decisions")
@requires("admin", "purge")
async def purge_decisions(
    stream: StreamPath,
    context: Context,
    since: _Since = None,
    until: _Until = None,
    image_ref: Annotated[
        str | None, Query(max_length=MAX_IMAGE_REF, description="Only decisions about this image.")
    ] = None,
) -> Purged:
    """Delete decisions from the log for good, with their thumbnails: all, a time range, or those about one image.

    What the stream learned stays.
    """
    wanted = Purge(_milliseconds(since), _milliseconds(until), image_ref)
    reply = await context.ask_at_once(stream, Action.PURGE_LOG, json.dumps(wanted._asdict()).encode())
    return Purged.model_validate(reply.facts)


def _milliseconds(moment: datetime | None) -> int | None:
    """Return a time in milliseconds since 1970."""
    return None if moment is None else (moment - EPOCH) // timedelta(milliseconds=1)


async def read_page(context: RequestContext, stream: str, query: LogQuery) -> LogPage:
    """Return a page of the decision log."""
    entries, more = await _read_entries(context, stream, query)
    items = [LoggedDecision(**{**entry, "time": as_datetime(entry["time"])}) for entry in entries]
    return LogPage(items=items, next_cursor=str(items[-1].position) if more else None)


async def _read_entries(context: RequestContext, stream: str, query: LogQuery) -> tuple[list[dict[str, Any]], bool]:
    """Return entries with their times in milliseconds, and whether more follow."""
    reply = await context.ask_at_once(stream, Action.READ_LOG, json.dumps(query._asdict()).encode())
    facts = reply.facts or {}
    return facts["entries"], facts["more"]


async def _pieces(
    context: RequestContext, stream: str, query: LogQuery, end: int, writer: ParquetWriter | None
) -> AsyncIterator[bytes]:
    """Yield a file of the entries up to position `end` that match, oldest first: NDJSON without a writer."""
    wanted, more = query._replace(newest_first=False, limit=MAX_PAGE), end >= 0
    while more:
        entries, more = await _read_entries(context, stream, wanted)
        found = [entry for entry in entries if entry["position"] <= end]
        more = more and len(found) == len(entries)
        if found:
            yield await asyncio.to_thread(as_ndjson if writer is None else writer.add, found)
            wanted = wanted._replace(after=found[-1]["position"])
    if writer is not None:
        yield await asyncio.to_thread(writer.finish)

"""Ask the store for pages of the decision log."""

import asyncio
import json
from collections.abc import AsyncIterator
from datetime import datetime, timedelta
from typing import Any

from ....decision_log import LoggedDecision
from ....errors import InputError
from ...access.problems import ProblemError
from ...log.entries import LogQuery, Purge
from ...log.export import EPOCH, ParquetWriter, as_datetime, as_ndjson
from ...messages import Action
from ..context import RequestContext
from .schemas import MAX_PAGE, Format, LogPage


def milliseconds(moment: datetime | None) -> int | None:
    """Return a time in milliseconds since 1970."""
    return None if moment is None else (moment - EPOCH) // timedelta(milliseconds=1)


def position_after(cursor: str | None) -> int | None:
    """Return the position that a cursor names. Raise InputError if it is none."""
    if cursor is None:
        return None
    if not cursor.isdecimal() or len(cursor) > 10:
        raise InputError(f"`cursor` must be `next_cursor` of an earlier page; given: {cursor[:100]!r}.")
    return int(cursor)


async def read_page(context: RequestContext, stream: str, query: LogQuery) -> LogPage:
    """Return a page of the decision log."""
    entries, more = await read_entries(context, stream, query)
    items = [LoggedDecision(**{**entry, "time": as_datetime(entry["time"])}) for entry in entries]
    return LogPage(items=items, next_cursor=str(items[-1].position) if more else None)


async def read_entries(context: RequestContext, stream: str, query: LogQuery) -> tuple[list[dict[str, Any]], bool]:
    """Return entries with their times in milliseconds, and whether more follow."""
    reply = await context.ask_at_once(stream, Action.READ_LOG, json.dumps(query._asdict()).encode())
    facts = reply.facts or {}
    return facts["entries"], facts["more"]


async def export(context: RequestContext, stream: str, query: LogQuery, format_: Format) -> AsyncIterator[bytes]:
    """Return a file of all entries that exist now and match, oldest first, in pieces.

    Raises:
        InputError: pyarrow is not installed.
    """
    newest, _ = await read_entries(context, stream, LogQuery(limit=1))
    end = newest[0]["position"] if newest else -1
    writer = ParquetWriter() if format_ == "parquet" else None

    async def pieces() -> AsyncIterator[bytes]:
        wanted, more = query._replace(newest_first=False, limit=MAX_PAGE), end >= 0
        while more:
            entries, more = await read_entries(context, stream, wanted)
            found = [entry for entry in entries if entry["position"] <= end]
            more = more and len(found) == len(entries)
            if found:
                yield await asyncio.to_thread(as_ndjson if writer is None else writer.add, found)
                wanted = wanted._replace(after=found[-1]["position"])
        if writer is not None:
            yield await asyncio.to_thread(writer.finish)

    return pieces()


async def thumbnail(context: RequestContext, stream: str, position: int) -> bytes:
    """Return a thumbnail. Raise ProblemError if there is none."""
    if context.services.config.forbid_images:
        raise ProblemError("forbidden", "This service stores and returns no images (`forbid_images`).")
    reply = await context.ask_at_once(stream, Action.READ_THUMBNAIL, b"%d" % position)
    if not reply.answer:
        raise ProblemError("thumbnail_not_found", f"There is no thumbnail of a decision at position {position}.")
    return reply.answer


async def purge(context: RequestContext, stream: str, wanted: Purge) -> int:
    """Delete entries, and return how many."""
    reply = await context.ask_at_once(stream, Action.PURGE_LOG, json.dumps(wanted._asdict()).encode())
    return (reply.facts or {})["deleted"]

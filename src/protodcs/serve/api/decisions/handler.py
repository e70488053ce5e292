"""Ask the store for pages of the decision log."""

import json
from datetime import UTC, datetime, timedelta
from typing import Any

from ....errors import InputError
from ...log.entries import LogQuery, Purge
from ...messages import Action
from ..context import RequestContext
from .schemas import LoggedDecision, LogPage

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def milliseconds(moment: datetime | None) -> int | None:
    """Return a time in milliseconds since 1970."""
    return None if moment is None else (moment - _EPOCH) // timedelta(milliseconds=1)


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


def as_datetime(moment: int) -> datetime:
    """Return a time in milliseconds as a datetime."""
    return _EPOCH + timedelta(milliseconds=moment)


async def purge(context: RequestContext, stream: str, wanted: Purge) -> int:
    """Delete entries, and return how many."""
    reply = await context.ask_at_once(stream, Action.PURGE_LOG, json.dumps(wanted._asdict()).encode())
    deleted: int = (reply.facts or {})["deleted"]
    return deleted

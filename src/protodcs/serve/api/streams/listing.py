"""List the streams of a tenant in pages.

A page in the order of ids reads that page only. Another order or a filter reads what the store has of all streams of
the tenant, which is a few bytes each. Streams of other tenants are never read.
"""

import base64
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, NamedTuple

from ...access.problems import ProblemError
from ...settings import public_id, scoped_name
from ...store import values
from ...stream.summary import Summary
from ..context import RequestContext
from .schemas import ListedStream, Sort, StreamList

# Streams that are read at once.
_PAGE = 1000
# Returns streams of a tenant behind one of them, at most so many.
ListStreams = Callable[[str, str | None, int], Awaitable[list[values.ListedStream]]]


class _Row(NamedTuple):
    id: str
    created: float
    summary: Summary
    problem: str | None


async def list_streams(
    context: RequestContext, limit: int, cursor: str | None, sort: Sort, frozen: bool | None
) -> StreamList:
    """Return a page of streams, and a cursor for the next one."""
    after = None if cursor is None else _unpack_cursor(cursor, sort)
    is_by_id, descending = sort == "id", sort.startswith("-")
    # One more than are shown tells whether there is another page.
    count = limit + 1
    start = scoped_name(context.tenant, after[-1]) if is_by_id and after is not None else None
    read = count if is_by_id and frozen is None else None
    found: list[_Row] = []
    async for stream in streams_of(context.services.worker.list_streams, context.tenant, start, read):
        row = _Row(public_id(stream.id), stream.created, Summary.unpack(stream.summary), stream.problem)
        if frozen is not None and row.summary.frozen != frozen:
            continue
        key = key_of(row, sort)
        if after is None or (key < after if descending else key > after):
            found.append(row)
        if is_by_id and len(found) == count:
            break
        # There may be far more streams than fit into memory.
        if len(found) == count + _PAGE:
            found = _first(found, sort, count)
    found = _first(found, sort, count)
    page = [
        ListedStream(id=row.id, created=row.created, problem=row.problem, **row.summary._asdict())
        for row in found[:limit]
    ]
    return StreamList(streams=page, next_cursor=pack_cursor(found[limit - 1], sort) if len(found) > limit else None)


def _first(rows: list[_Row], sort: Sort, count: int) -> list[_Row]:
    return sorted(rows, key=lambda row: key_of(row, sort), reverse=sort.startswith("-"))[:count]


async def streams_of(
    list_streams: ListStreams, tenant: str, after: str | None = None, read: int | None = None
) -> AsyncIterator[values.ListedStream]:
    """Yield the streams of a tenant whose internal names come after `after`, in their order. Read so many at once."""
    read = _PAGE if read is None else read
    while True:
        page = await list_streams(tenant, after, read)
        for stream in page:
            yield stream
        if len(page) < read:
            return
        after = page[-1].id


def key_of(row: _Row | ListedStream, sort: Sort) -> list[Any]:
    """Return what streams are ordered by. Without a value, a stream comes first in ascending order."""
    if sort == "id":
        return [row.id]
    name = sort.lstrip("-")
    source = row.summary if isinstance(row, _Row) and name != "created" else row
    value = getattr(source, name)
    if value is not None and not isinstance(value, float):
        value = value.timestamp()
    return [-1.0 if value is None else value, row.id]


def pack_cursor(last: _Row | ListedStream, sort: Sort) -> str:
    """Return the cursor of the page behind a stream."""
    return base64.urlsafe_b64encode(json.dumps([sort, *key_of(last, sort)]).encode()).decode()


def _unpack_cursor(cursor: str, sort: Sort) -> list[Any]:
    try:
        made_for, *key = json.loads(base64.urlsafe_b64decode(cursor))
        numbers = [isinstance(value, float) for value in key[:-1]]
        if made_for != sort or numbers != [True] * (sort != "id") or not isinstance(key[-1], str):
            raise ValueError
        key[-1].encode()
    except (ValueError, TypeError, RecursionError):
        raise ProblemError(
            "invalid_request", "`cursor` must be the `next_cursor` of a response to a request with the same `sort`."
        ) from None
    return key

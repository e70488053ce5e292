"""List the streams of a tenant in pages.

A page in the order of ids reads that page only. Another order or a filter reads what the store has of all streams of
the tenant, which is a few bytes each. Streams of other tenants are never read.
"""

import base64
import json
from collections.abc import AsyncIterator
from typing import Any, NamedTuple

from ...access.problems import ProblemError
from ...settings import public_id, scoped_name
from ...stream.summary import Summary
from ..context import RequestContext
from .schemas import ListedStream, Sort, StreamList

_PAGE = 1000


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
    # One more than are shown tells whether there is another page.
    count = limit + 1
    found: list[_Row] = []
    if sort == "id":
        read = count if frozen is None else _PAGE
        async for row in _rows(context, None if after is None else after[-1], read):
            if frozen is None or row.summary.frozen == frozen:
                found.append(row)
            if len(found) == count:
                break
    else:
        async for row in _rows(context, None):
            if frozen is not None and row.summary.frozen != frozen:
                continue
            if after is None or _is_behind(key_of(row, sort), after, sort):
                found.append(row)
            # There may be far more streams than fit into memory.
            if len(found) == count + _PAGE:
                found = _first(found, sort, count)
        found = _first(found, sort, count)
    page = [
        ListedStream(id=row.id, created=row.created, problem=row.problem, **row.summary._asdict())
        for row in found[:limit]
    ]
    cursor = pack_cursor(key_of(found[limit - 1], sort), sort) if len(found) > limit else None
    return StreamList(streams=page, next_cursor=cursor)


def _first(rows: list[_Row], sort: Sort, count: int) -> list[_Row]:
    return sorted(rows, key=lambda row: key_of(row, sort), reverse=sort.startswith("-"))[:count]


def _is_behind(key: list[Any], other: list[Any], sort: Sort) -> bool:
    return key < other if sort.startswith("-") else key > other


async def _rows(context: RequestContext, after: str | None, read: int = _PAGE) -> AsyncIterator[_Row]:
    """Yield the streams of the caller whose ids come after `after`, in the order of their ids. Read so many at once."""
    last = None if after is None else scoped_name(context.tenant, after)
    while True:
        page = await context.services.worker.list_streams(context.tenant, last, read)
        for stream in page:
            summary = Summary.unpack(stream.summary)
            yield _Row(public_id(stream.id), stream.created, summary, stream.problem)
        if len(page) < read:
            return
        last = page[-1].id


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


def pack_cursor(key: list[Any], sort: Sort) -> str:
    """Return the cursor of the page behind a stream."""
    return base64.urlsafe_b64encode(json.dumps([sort, *key]).encode()).decode()


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

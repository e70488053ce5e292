"""List the streams of a tenant in pages.

A page in the order of ids reads that page only. Another order or a filter reads what the store has of all streams of
the tenant, which is a few bytes each. Streams of other tenants are never read.
"""

import base64
import json
from collections.abc import AsyncIterator
from typing import Any

from ...access.problems import ProblemError
from ...stream.summary import Summary
from ..context import RequestContext
from .schemas import ListedStream, Sort, StreamList

_PAGE = 1000


async def list_streams(
    context: RequestContext, limit: int, cursor: str | None, sort: Sort, frozen: bool | None
) -> StreamList:
    """Return a page of streams, and a cursor for the next one."""
    after = None if cursor is None else _unpack_cursor(cursor, sort)
    if sort == "id":
        found = []
        async for stream in _streams(context, None if after is None else after[-1]):
            if frozen is None or stream.frozen == frozen:
                found.append(stream)
            if len(found) > limit:
                break
    else:
        descending = sort.startswith("-")
        every = [stream async for stream in _streams(context, None) if frozen is None or stream.frozen == frozen]
        every.sort(key=lambda stream: key_of(stream, sort), reverse=descending)
        if after is not None:
            every = [stream for stream in every if _is_behind(key_of(stream, sort), after, descending)]
        found = every[: limit + 1]
    page = found[:limit]
    cursor = pack_cursor(key_of(page[-1], sort), sort) if len(found) > limit else None
    return StreamList(streams=page, next_cursor=cursor)


def _is_behind(key: list[Any], other: list[Any], descending: bool) -> bool:
    return key < other if descending else key > other


async def _streams(context: RequestContext, after: str | None) -> AsyncIterator[ListedStream]:
    """Yield the streams of the caller whose ids come after `after`, in the order of their ids."""
    prefix = f"{context.tenant}/" if context.tenant else ""
    last = None if after is None else prefix + after
    while True:
        page = await context.services.control.list_streams(context.tenant, last, _PAGE)
        for stream in page:
            summary = Summary.unpack(stream.summary)
            listed = summary._asdict() | {"created": stream.created, "problem": stream.problem}
            yield ListedStream(id=stream.id.removeprefix(prefix), **listed)
        if len(page) < _PAGE:
            return
        last = page[-1].id


def key_of(stream: ListedStream, sort: Sort) -> list[Any]:
    """Return what streams are ordered by. Without a value, a stream comes first in ascending order."""
    if sort == "id":
        return [stream.id]
    value = getattr(stream, sort.lstrip("-"))
    if value is not None and not isinstance(value, float):
        value = value.timestamp()
    return [-1.0 if value is None else value, stream.id]


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

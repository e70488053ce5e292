"""Observe rows as they arrive: one JSON object per line in, one per line out, in the same order.

Rows that have arrived together are decided together. At most two such groups are in progress; while they are, nothing
more is read, so a caller that sends faster than the stream decides has to wait. A row is an observe of its own, with
its own idempotency key: after a broken connection, the caller sends the rows again that it has no answer to.
"""

import asyncio
from collections.abc import AsyncIterator, Coroutine
from itertools import groupby
from typing import Any, NamedTuple, TypeVar

from fastapi import Request, Response
from pydantic_core import to_json
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from ....errors import ImageError, InputError, ProtoDCSError
from ...access.problems import ProblemError
from ...messages import Action, Reply, new_id
from ...messages import Request as WorkerRequest
from ...stream.answers import described
from ...stream.idempotency import digest_of
from ..context import RequestContext, checked, checked_key
from ..errors import as_problem
from ..features import MAX_WIDTH, from_base64
from ..json_parsing import parse_small
from .handler import checked_refs, decide_images

T = TypeVar("T")

MEDIA_TYPE = "application/x-ndjson"
MAX_GROUP = 256
_GROUPS = 2
# Groups of images are smaller: each image takes the encoder many times longer than a decision.
_MAX_IMAGES = 32
# The base64 of the longest feature, and room for the other fields.
_MAX_FEATURE_LINE = 4 * MAX_WIDTH * 4 // 3 + 2**13
_FIELDS = ("key", "feature", "image", "image_ref")
# Problems of one row. The rows behind it are served.
_ROW_STATUSES = (409, 410, 413, 422)
_STREAM_CODES = ("quota_exceeded",)


class LineResponse(Response):
    """A response whose lines are sent while the body of its request is read.

    `StreamingResponse` cannot do this: it reads the body itself to notice that the caller has gone.
    """

    media_type = MEDIA_TYPE

    # FastAPI reads the status of its documentation from the default.
    def __init__(self, first: bytes = b"", rest: AsyncIterator[bytes] | None = None, status_code: int = 200):
        # Proxies must not wait for more lines before they pass these on.
        super().__init__(first, status_code, headers={"X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._rest = rest

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the lines."""
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        await send({"type": "http.response.body", "body": self.body, "more_body": True})
        if self._rest is not None:
            async for lines in self._rest:
                await send({"type": "http.response.body", "body": lines, "more_body": True})
        await send({"type": "http.response.body", "body": b""})


class Row(NamedTuple):
    """One row of the body, or the problem with it.

    Attributes:
        number: from 0.
        key: its idempotency key.
        size: bytes of its line.
        feature: as float32; empty if it has an image or a problem.
        image: the file.
        image_ref: the caller's reference to the image.
        problem: why it cannot be observed.
    """

    number: int
    key: str
    size: int
    feature: bytes = b""
    image: bytes = b""
    image_ref: str | None = None
    problem: ProblemError | None = None


# The lines of some rows, and the problem that ends the request behind them, if there is one.
_Answers = tuple[bytes, ProblemError | None]


async def observe_rows(http: Request, stream: str) -> AsyncIterator[bytes]:
    """Yield the answers to the rows of a body, as lines.

    Raises:
        ProblemError: before the first line. Later the problem is the last line.
    """
    context = RequestContext(http, Response())
    stream = context.scoped(stream)
    # Groups in progress in their order, and what ended them: a problem, or None for the end of the body.
    groups: asyncio.Queue[asyncio.Task[_Answers] | Exception | None] = asyncio.Queue()
    tasks: set[asyncio.Task[Any]] = set()
    slots = asyncio.Semaphore(_GROUPS)

    def start(work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = asyncio.create_task(work)
        tasks.add(task)
        task.add_done_callback(tasks.discard)
        return task

    async def read() -> None:
        end: Exception | None = None
        try:
            async for rows in _groups(context):
                await slots.acquire()
                groups.put_nowait(start(_decide(context, stream, rows)))
        except ClientDisconnect:
            pass
        except Exception as problem:
            end = problem
        groups.put_nowait(end)

    async def stop() -> None:
        await context.services.stopping.wait()
        reading.cancel()
        groups.put_nowait(
            ProblemError("unavailable", "The service is being stopped. Send the rows without an answer again.")
        )

    reading = start(read())
    start(stop())
    begun = False
    try:
        while (group := await groups.get()) is not None:
            lines, problem = (b"", group) if isinstance(group, Exception) else await group
            if lines:
                yield lines
                begun = True
            if isinstance(problem, ProblemError) and begun:
                yield _line({"error": problem.document(http.scope["state"].get("request_id"))})
                return
            if problem is not None:
                raise problem
            slots.release()
    finally:
        for task in tasks:
            task.cancel()


async def _groups(context: RequestContext) -> AsyncIterator[list[Row]]:
    """Yield the rows of a body as they arrive. Raise ProblemError behind the last one that can be read."""
    services, body = context.services, context.http.scope["state"]["body"]
    max_line = _MAX_FEATURE_LINE
    if services.encoding is not None:
        max_line = max(max_line, min(services.limits.of(context.caller).body_bytes, services.config.json_bytes))
    number, rest = 0, bytearray()
    async for piece in context.http.stream():
        # The last piece is empty, and ends the last row.
        *lines, tail = (piece or b"\n").split(b"\n")
        if lines:
            lines[0] = bytes(rest) + lines[0]
            rest.clear()
        rest += tail
        rows: list[Row] = []
        images = 0
        for line in lines:
            if not line.strip():
                body.release(len(line) + 1)
                continue
            try:
                rows.append(_row(number, line))
            except ProblemError:
                if rows:
                    yield rows
                raise
            number += 1
            images += bool(rows[-1].image)
            if len(rows) == MAX_GROUP or images == _MAX_IMAGES:
                yield rows
                rows, images = [], 0
        if rows:
            yield rows
        if len(rest) > max_line:
            raise ProblemError("body_too_large", f"A row may have {max_line} bytes.")


def _row(number: int, line: bytes) -> Row:
    """Return the row of a line. Raise ProblemError if the line is not a JSON object."""
    try:
        given = parse_small(line)
    except (ValueError, RecursionError):
        raise ProblemError("invalid_json", f"Row {number} is not valid JSON. Send one object per line.") from None
    if not isinstance(given, dict):
        raise ProblemError("invalid_json", f"Row {number} is not a JSON object. Send one object per line.")
    key, size = given.get("key"), len(line) + 1
    try:
        key = new_id() if key is None else checked_key(key if isinstance(key, str) else "")
        key.encode()
        unknown = next((name for name in given if name not in _FIELDS), None)
        if unknown is not None:
            raise InputError(f"{unknown[:100]!r} is not known here: choose from {', '.join(_FIELDS)}.")
        image_ref = given.get("image_ref")
        if not isinstance(image_ref, str | None):
            raise InputError("`image_ref` must be text.")
        checked_refs([image_ref], 1)
        if ("feature" in given) == ("image" in given):
            raise InputError("A row needs either `feature` (float32 numbers) or `image` (a file), in base64.")
        name = "feature" if "feature" in given else "image"
        content = from_base64(given[name], name)
        if name == "image":
            return Row(number, key, size, image=content, image_ref=image_ref)
        # The engine checks it: each row is a request of its own.
        return Row(number, key, size, content, image_ref=image_ref)
    except (ProtoDCSError, UnicodeError) as problem:
        key = key if isinstance(key, str) and key.isprintable() else ""
        return Row(number, key, size, problem=_as_row_problem(problem))


def _as_row_problem(problem: Exception) -> ProblemError:
    if isinstance(problem, ProblemError):
        return problem
    return ProblemError("invalid_image" if isinstance(problem, ImageError) else "invalid_request", str(problem))


async def _decide(context: RequestContext, stream: str, rows: list[Row]) -> _Answers:
    """Return the lines of some rows, and the problem that ends the request behind them, if there is one."""
    lines: list[bytes] = []
    try:
        await _wait_allowed(context)
        for row, outcome in zip(rows, await _outcomes(context, stream, rows), strict=True):
            about = {"row": row.number, "key": row.key}
            if isinstance(outcome, Reply):
                lines.append(_line({**about, **described(outcome)}))
            elif outcome.status_code in _ROW_STATUSES and outcome.code not in _STREAM_CODES:
                lines.append(_line({**about, "error": outcome.document()}))
            else:
                return b"".join(lines), outcome
    except Exception as problem:
        return b"", as_problem(context.http, problem)
    finally:
        context.http.scope["state"]["body"].release(sum(row.size for row in rows))
    return b"".join(lines), None


async def _outcomes(context: RequestContext, stream: str, rows: list[Row]) -> list[Reply | ProblemError]:
    """Return the reply to each row, or its problem. Rows take their place in the stream's queue in their order."""
    works: list[asyncio.Task[list[Reply | ProblemError]]] = []
    for have_features, group in groupby((row for row in rows if row.problem is None), lambda row: bool(row.feature)):
        if have_features:
            works.append(asyncio.create_task(_observe_features(context, stream, [*group])))
        else:
            works += [asyncio.create_task(_observe_image(context, stream, row)) for row in group]
    outcomes = iter([outcome for work in works for outcome in await work])
    return [row.problem or next(outcomes) for row in rows]


async def _observe_features(context: RequestContext, stream: str, rows: list[Row]) -> list[Reply | ProblemError]:
    requests = [
        WorkerRequest(
            stream, Action.OBSERVE, row.key, row.feature, digest=digest_of(row.feature), image_ref=row.image_ref
        )
        for row in rows
    ]
    return [_checked(reply) for reply in await context.services.queues.ask_many(requests)]


async def _observe_image(context: RequestContext, stream: str, row: Row) -> list[Reply | ProblemError]:
    try:
        refs = [row.image_ref]
        return [*await decide_images(context.http, stream, Action.OBSERVE, row.key, [row.image], True, refs)]
    except (ProblemError, InputError, ImageError) as problem:
        return [_as_row_problem(problem)]


def _checked(reply: Reply) -> Reply | ProblemError:
    try:
        return checked(reply)
    except ProblemError as problem:
        return problem


async def _wait_allowed(context: RequestContext) -> None:
    """Wait until the tenant may send one more request. Raise ProblemError if the caller's key has ended."""
    if not context.is_allowed():
        raise ProblemError("unauthenticated", "The access key of this request has ended.")
    while context.caller is not None and (pause := context.services.limits.take_token(context.caller)):
        await asyncio.sleep(pause)


def _line(value: dict[str, Any]) -> bytes:
    return to_json(value) + b"\n"

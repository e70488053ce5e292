"""Observe rows as they arrive: one JSON object per line in, one per line out, in the same order.

Rows that have arrived together are decided together. At most two such groups are in progress; while they are, nothing
more is read, so a caller that sends faster than the stream decides has to wait. A row is an observe of its own, with
its own idempotency key: after a broken connection, the caller sends the rows again that it has no answer to.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from typing import Any, NamedTuple

from fastapi import Request, Response
from pydantic_core import to_json
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from ....errors import ImageError, InputError, ProtoDCSError
from ...access.authentication import scoped_id
from ...access.keys import Caller
from ...access.limits import StreamedBody
from ...access.problems import ProblemError
from ...messages import Action, Reply, new_id
from ...messages import Request as WorkerRequest
from ...stream.answers import described
from ...stream.idempotency import digest_of
from ..context import Services, checked, checked_key
from ..errors import as_problem
from ..features import MAX_WIDTH, from_base64
from ..json_parsing import parse_small
from .handler import checked_refs, decide_images

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
        feature: as float32; empty if it has an image or a problem.
        image: the file.
        image_ref: the caller's reference to the image.
        problem: why it cannot be observed.
        size: bytes of its line.
    """

    number: int
    key: str
    feature: bytes = b""
    image: bytes = b""
    image_ref: str | None = None
    problem: ProblemError | None = None
    size: int = 0


async def observe_rows(http: Request, stream: str) -> AsyncIterator[bytes]:
    """Yield the answers to the rows of a body, as lines.

    Raises:
        ProblemError: before the first line. Later the problem is the last line.
    """
    scoped = scoped_id(http, stream)
    begun = False
    async for lines in _answers(http, scoped):
        if isinstance(lines, ProblemError):
            if not begun:
                raise lines
            lines = _line({"error": lines.document(http.scope["state"].get("request_id"))})
        begun = True
        yield lines


async def _answers(http: Request, stream: str) -> AsyncIterator[bytes | ProblemError]:
    """Yield the lines of each group, and at last the problem that ended the request, if there is one."""
    services: Services = http.app.state.services
    groups, stopping = _Groups(http), asyncio.create_task(services.stopping.wait())
    reading: asyncio.Task[list[Row]] | None = asyncio.create_task(groups.next())
    working: deque[asyncio.Task[tuple[bytes, ProblemError | None]]] = deque()
    try:
        while reading is not None or working:
            if stopping.done() and reading is not None and not reading.done():
                raise ProblemError(
                    "unavailable", "The service is being stopped. Send the rows without an answer again."
                )
            waiting: list[asyncio.Task[Any]] = [*list(working)[:1]]
            if reading is not None and len(working) < _GROUPS:
                waiting += [reading, stopping]
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            if working and working[0].done():
                lines, problem = working.popleft().result()
                if lines:
                    yield lines
                if problem is not None:
                    yield problem
                    return
            elif reading is not None and reading.done():
                rows = reading.result()
                reading = None
                if rows:
                    working.append(asyncio.create_task(_decide(http, stream, rows)))
                    reading = asyncio.create_task(groups.next())
    except ClientDisconnect:
        return
    except ProblemError as problem:
        # What was read before the problem is answered first.
        for work in working:
            lines, other = await work
            yield lines
            if other is not None:
                yield other
                return
        yield problem
    finally:
        for task in (*working, stopping, *([] if reading is None else [reading])):
            task.cancel()


class _Groups:
    """Reads a body into groups of rows."""

    def __init__(self, http: Request):
        services: Services = http.app.state.services
        self._pieces = http.stream()
        self._body: StreamedBody = http.scope["state"]["body"]
        self._max_line = _MAX_FEATURE_LINE
        if services.encoding is not None:
            of_caller = services.limits.of(http.scope["state"]["caller"]).body_bytes
            self._max_line = max(self._max_line, min(of_caller, services.config.json_bytes))
        self._lines: deque[bytes] = deque()
        self._rest: list[bytes] = []
        self._rest_size = 0
        self._ended = False
        self._number = 0
        self._problem: ProblemError | None = None

    async def next(self) -> list[Row]:
        """Return the rows that have arrived, at least one; none at the end of the body.

        Raises:
            ProblemError: the rest of the body cannot be read. All rows before it were returned.
        """
        while not (self._lines or self._ended or self._problem):
            await self._read()
        rows: list[Row] = []
        images = 0
        while self._lines and len(rows) < MAX_GROUP and images < _MAX_IMAGES:
            line = self._lines.popleft()
            try:
                row = _row(self._number, line)
            except ProblemError as problem:
                self._problem = problem
                self._lines.clear()
                break
            images += bool(row.image)
            self._number += 1
            rows.append(row._replace(size=len(line) + 1))
        if not rows and self._problem is not None:
            raise self._problem
        return rows

    async def _read(self) -> None:
        """Read a piece of the body, and split it into lines."""
        piece = await anext(self._pieces, b"")
        if not piece:
            self._ended = True
            piece = b"\n"
        *lines, rest = piece.split(b"\n")
        for line in lines:
            whole = b"".join([*self._rest, line])
            self._rest, self._rest_size = [], 0
            if whole.strip():
                self._lines.append(whole)
            else:
                self._body.release(len(whole) + 1)
        if rest:
            self._rest.append(rest)
            self._rest_size += len(rest)
        if self._rest_size > self._max_line:
            self._problem = ProblemError("body_too_large", f"A row may have {self._max_line} bytes.")


def _row(number: int, line: bytes) -> Row:
    """Return the row of a line. Raise ProblemError if the line is not a JSON object."""
    try:
        given = parse_small(line)
    except (ValueError, RecursionError):
        raise ProblemError("invalid_json", f"Row {number} is not valid JSON. Send one object per line.") from None
    if not isinstance(given, dict):
        raise ProblemError("invalid_json", f"Row {number} is not a JSON object. Send one object per line.")
    key = given.get("key")
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
            return Row(number, key, image=content, image_ref=image_ref)
        # The engine checks it: each row is a request of its own.
        return Row(number, key, content, image_ref=image_ref)
    except (ProtoDCSError, UnicodeError) as problem:
        key = key if isinstance(key, str) and key.isprintable() else ""
        return Row(number, key, problem=_as_row_problem(problem))


def _as_row_problem(problem: Exception) -> ProblemError:
    if isinstance(problem, ProblemError):
        return problem
    return ProblemError("invalid_image" if isinstance(problem, ImageError) else "invalid_request", str(problem))


async def _decide(http: Request, stream: str, rows: list[Row]) -> tuple[bytes, ProblemError | None]:
    """Return the lines of some rows, and the problem that ends the request behind them, if there is one."""
    services: Services = http.app.state.services
    try:
        await _wait_allowed(http)
        outcomes = await _outcomes(http, services, stream, rows)
    except Exception as problem:
        return b"", as_problem(http, problem)
    finally:
        body: StreamedBody = http.scope["state"]["body"]
        body.release(sum(row.size for row in rows))
    lines = []
    for row, outcome in zip(rows, outcomes, strict=True):
        if isinstance(outcome, Reply):
            lines.append(_decision(row, outcome))
            continue
        if outcome.status_code not in _ROW_STATUSES or outcome.code in _STREAM_CODES:
            return b"".join(lines), outcome
        lines.append(_line({"row": row.number, "key": row.key, "error": outcome.document()}))
    return b"".join(lines), None


async def _outcomes(http: Request, services: Services, stream: str, rows: list[Row]) -> list[Reply | ProblemError]:
    """Return the reply to each row, or its problem. Rows take their place in the stream's queue in their order."""
    works: list[tuple[list[Row], asyncio.Task[list[Reply | ProblemError]]]] = []
    features: list[Row] = []
    for row in [*rows, None]:
        if row is not None and row.feature:
            features.append(row)
            continue
        if features:
            works.append((features, asyncio.create_task(_observe_features(services, stream, features))))
            features = []
        if row is not None and row.image:
            works.append(([row], asyncio.create_task(_observe_image(http, stream, row))))
    found: dict[int, Reply | ProblemError] = {row.number: row.problem for row in rows if row.problem is not None}
    for group, work in works:
        found.update(zip((row.number for row in group), await work, strict=True))
    return [found[row.number] for row in rows]


async def _observe_features(services: Services, stream: str, rows: list[Row]) -> list[Reply | ProblemError]:
    requests = [
        WorkerRequest(
            stream, Action.OBSERVE, row.key, row.feature, digest=digest_of(row.feature), image_ref=row.image_ref
        )
        for row in rows
    ]
    return [_checked(reply) for reply in await services.queues.ask_many(requests)]


async def _observe_image(http: Request, stream: str, row: Row) -> list[Reply | ProblemError]:
    try:
        refs = [row.image_ref]
        return [*await decide_images(http, stream, Action.OBSERVE, row.key, [row.image], True, refs)]
    except (ProblemError, InputError, ImageError) as problem:
        return [_as_row_problem(problem)]


def _checked(reply: Reply) -> Reply | ProblemError:
    try:
        return checked(reply)
    except ProblemError as problem:
        return problem


async def _wait_allowed(http: Request) -> None:
    """Wait until the tenant may send one more request. Raise ProblemError if the caller's key has ended."""
    services: Services = http.app.state.services
    caller: Caller | None = http.scope["state"]["caller"]
    if caller is None:
        return
    assert services.sessions is not None
    if not services.sessions.is_good(http.scope["state"].get("session"), caller):
        raise ProblemError("unauthenticated", "The access key of this request has ended.")
    while pause := services.limits.take_token(caller):
        await asyncio.sleep(pause)


def _decision(row: Row, reply: Reply) -> bytes:
    return _line({"row": row.number, "key": row.key, **described(reply)})


def _line(value: dict[str, Any]) -> bytes:
    return to_json(value) + b"\n"

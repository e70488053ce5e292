"""One address before several cells. A cell is a database with the processes that share it, and knows no other cell.

A stream is in the cell that a hash of its id names. The front stores nothing, so any number of them can run. Keys,
limits and bodies are checked by the cells. Requests about no single stream follow a rule each:

- create a stream: to the cell of the new id. Create a batch: split by cell, each part on its own.
- list streams: ask all cells for the same page, and merge. Without an answer of each cell there is no list.
- vocabularies: to all cells. It is there if it is in all of them.
- ready: if a cell is. Health, descriptions: any cell that answers.
- everything else (webhooks, events of all streams, sessions, the UI, workers): 404, because it belongs to one cell.
"""

import asyncio
import hashlib
import itertools
import json
import signal
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager, suppress
from typing import Any, Final
from urllib.parse import parse_qs

import aiohttp
from pydantic import Field
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.types import Message, Receive, Scope, Send
from yarl import URL

from ...core.settings import Settings
from ..access.problems import ProblemError
from ..api.streams.listing import key_of, pack_cursor
from ..api.streams.schemas import ListedStream
from ..runtime.preflight import bind
from ..runtime.server import Server

_CONNECT_SECONDS: Final = 2.0
# Requests have so much time to end after a signal.
_END_SECONDS: Final = 30
# Time for requests that several cells answer.
_MERGE_SECONDS: Final = 30.0
# Below the time after which a process closes an idle connection.
_IDLE_SECONDS: Final = 2.0
# Bodies that are read before they are sent on: new streams and vocabularies.
_MAX_BODY: Final = 64 << 20
# Headers of one connection. And no cell compresses a body, because bodies are merged.
_HOP_BY_HOP: Final = frozenset(
    (b"connection", b"keep-alive", b"te", b"trailer", b"transfer-encoding", b"upgrade", b"host", b"expect")
    + (b"accept-encoding",)
)
_ANY: Final = ("/v1/health", "/openapi.json", "/docs")


class CellsConfig(Settings):
    """The settings of a front: where it listens, and the addresses of the processes of each cell."""

    host: str = "127.0.0.1"
    port: int = Field(8000, ge=1, le=65_535)
    cells: dict[str, list[str]] = Field(min_length=1)


def cell_of(stream: str, cells: Iterable[str]) -> str:
    """Return the cell of a stream. With another list of cells, few streams have another cell.

    >>> [cell_of(f"camera-{number}", ["a", "b", "c"]) for number in range(6)]
    ['b', 'c', 'c', 'b', 'c', 'c']
    """

    def weight(cell: str) -> bytes:
        return hashlib.blake2b(f"{cell}\0{stream}".encode("utf-8", "surrogatepass"), digest_size=8).digest()

    return max(sorted(cells), key=weight)


class Front:
    """The application before the cells. `cells` has the addresses of each."""

    def __init__(self, cells: dict[str, list[str]]):
        self._cells = {name: [address.rstrip("/") for address in cells[name]] for name in sorted(cells)}
        self._turn = itertools.count()
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_IDLE_SECONDS),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_SECONDS),
            auto_decompress=False,
            skip_auto_headers=("User-Agent", "Content-Type", "Accept-Encoding"),
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        with suppress(ClientDisconnect):
            try:
                await self._route(scope, receive, send)
            except ProblemError as problem:
                await problem.response(scope)(scope, receive, send)

    async def close(self) -> None:
        """Close all connections."""
        await self._session.close()

    async def _route(self, scope: Scope, receive: Receive, send: Send) -> None:
        method, path = scope["method"], scope["path"]
        match path.split("/")[1:]:
            case ["v1", "streams", stream, *_]:
                await self._pass_on(cell_of(stream, self._cells), scope, receive, send)
                return
            case ["v1", "streams"] if method == "GET":
                response = await self._list(scope)
            case ["v1", "streams"] if method == "POST":
                # Every cell refuses a body that has no id.
                body = await _body(scope, receive)
                response = await self._ask(cell_of(_id_of(_parsed(body)) or "", self._cells), scope, body)
            case ["v1", "streams:batch"] if method == "POST":
                response = await self._create_batch(scope, await _body(scope, receive))
            case ["v1", "vocabularies", _]:
                answers = await self._ask_all(scope, dict.fromkeys(self._cells, await _body(scope, receive)))
                response = max(answers.values(), key=_status)
            case ["v1", "ready"]:
                response = await self._ready(scope)
            case _ if path in _ANY:
                answers = await self._ask_all(scope)
                response = min(answers.values(), key=_status)
            case _:
                raise ProblemError("not_found", f"{path[:200]} is about no single stream. Ask a process of one cell.")
        await response(scope, receive, send)

    # One cell.

    async def _pass_on(self, cell: str, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request and its response on while they come, until the caller leaves."""
        received = asyncio.Event()

        async def body() -> AsyncIterator[bytes]:
            more = True
            while more:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise ClientDisconnect
                more = message.get("more_body", False)
                if not more:
                    received.set()
                yield message.get("body", b"")

        async def leave() -> None:
            await received.wait()
            while (await receive())["type"] != "http.disconnect":
                pass

        names = {name for name, _ in scope["headers"]}
        data = body() if names & {b"content-length", b"transfer-encoding"} else None
        if data is None:
            received.set()
        passing = asyncio.create_task(self._send_on(cell, scope, data, send))
        leaving = asyncio.create_task(leave())
        try:
            await asyncio.wait((passing, leaving), return_when=asyncio.FIRST_COMPLETED)
            if passing.done():
                passing.result()
        finally:
            for task in (passing, leaving):
                task.cancel()
            await asyncio.gather(passing, leaving, return_exceptions=True)

    async def _send_on(self, cell: str, scope: Scope, data: AsyncIterator[bytes] | None, send: Send) -> None:
        async with self._asked(cell, scope, data) as response:
            start: Message = {"type": "http.response.start", "status": response.status}
            await send({**start, "headers": _passed(response.raw_headers)})
            with suppress(aiohttp.ClientError, OSError):
                async for chunk in response.content.iter_any():
                    await send({"type": "http.response.body", "body": chunk, "more_body": True})
                await send({"type": "http.response.body", "body": b""})
            # If the cell broke off, so does the server, because the end of the body was not sent.

    @asynccontextmanager
    async def _asked(
        self, cell: str, scope: Scope, data: AsyncIterator[bytes] | bytes | None
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """Yield the response of a process of a cell. Another one is asked only if nothing was sent to the first."""
        addresses = self._cells[cell]
        first = next(self._turn)
        target = scope["raw_path"].decode("latin-1") + ("?" + scope["query_string"].decode("latin-1")).rstrip("?")
        headers = [(name.decode("latin-1"), value.decode("latin-1")) for name, value in _passed(scope["headers"])]
        if data is None or isinstance(data, bytes):
            headers = [pair for pair in headers if pair[0] != "content-length"]
        for turn in range(len(addresses)):
            url = URL(addresses[(first + turn) % len(addresses)] + target, encoded=True)
            try:
                asking = self._session.request(scope["method"], url, data=data, headers=headers, allow_redirects=False)
                async with asking as response:
                    yield response
                    return
            except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError):
                continue
            except (aiohttp.ClientError, OSError) as problem:
                raise ProblemError(
                    "unavailable", f"The cell {cell!r} did not answer: {type(problem).__name__}. Try again."
                ) from None
        raise ProblemError("unavailable", f"No process of the cell {cell!r} can be reached. Try again.")

    # Several cells.

    async def _ask(self, cell: str, scope: Scope, body: bytes) -> Response:
        try:
            async with asyncio.timeout(_MERGE_SECONDS), self._asked(cell, scope, body or None) as found:
                response = Response(await found.read(), found.status)
                response.raw_headers = _passed(found.raw_headers)
                return response
        except TimeoutError:
            return ProblemError("timeout", f"The cell {cell!r} did not answer in time. Try again.").response(scope)
        except ProblemError as problem:
            return problem.response(scope)

    async def _ask_all(self, scope: Scope, bodies: dict[str, bytes] | None = None) -> dict[str, Response]:
        bodies = dict.fromkeys(self._cells, b"") if bodies is None else bodies
        answers = await asyncio.gather(*(self._ask(cell, scope, body) for cell, body in bodies.items()))
        return dict(zip(bodies, answers, strict=True))

    async def _ready(self, scope: Scope) -> Response:
        answers = await self._ask_all(scope)
        ready = {cell: answer.status_code == 200 for cell, answer in answers.items()}
        return JSONResponse({"ready": any(ready.values()), "cells": ready}, 200 if any(ready.values()) else 503)

    async def _list(self, scope: Scope) -> Response:
        answers = list((await self._ask_all(scope)).values())
        worst = max(answers, key=_status)
        if worst.status_code != 200:
            return worst
        query = parse_qs(scope["query_string"].decode("latin-1"))
        limit, sort = int(query.get("limit", ["100"])[-1]), query.get("sort", ["id"])[-1]
        pages = [_json(answer) for answer in answers]
        found = [ListedStream.model_validate(stream) for page in pages for stream in page["streams"]]
        found.sort(key=lambda stream: key_of(stream, sort), reverse=sort.startswith("-"))
        more = len(found) > limit or any(page["next_cursor"] for page in pages)
        # A cursor names a place in the order, so it means the same in every cell.
        cursor = pack_cursor(found[limit - 1], sort) if more else None
        streams = [stream.model_dump(mode="json") for stream in found[:limit]]
        return JSONResponse({"streams": streams, "next_cursor": cursor})

    async def _create_batch(self, scope: Scope, body: bytes) -> Response:
        parsed = _parsed(body)
        streams = parsed.get("streams") if isinstance(parsed, dict) else None
        ids = [_id_of(stream) for stream in streams] if isinstance(streams, list) else []
        if not ids or None in ids:
            return await self._ask(next(iter(self._cells)), scope, body)
        cells = [cell_of(id_ or "", self._cells) for id_ in ids]
        parts: dict[str, list[Any]] = {}
        for cell, stream in zip(cells, streams or (), strict=True):
            parts.setdefault(cell, []).append(stream)
        bodies = {cell: json.dumps({**parsed, "streams": part}).encode() for cell, part in parts.items()}
        answers = await self._ask_all(scope, bodies)
        good = {cell: answer for cell, answer in answers.items() if answer.status_code == 200}
        if not good:
            return next(iter(answers.values()))
        results = {cell: iter(_json(answer)["results"]) for cell, answer in good.items()}
        merged = [
            next(results[cell])
            if cell in results
            else {"id": id_, "status": answers[cell].status_code, "problem": _json(answers[cell])}
            for cell, id_ in zip(cells, ids, strict=True)
        ]
        return JSONResponse({"results": merged})


def _status(response: Response) -> int:
    return response.status_code


def _passed(headers: Iterable[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    """Return headers without those of one connection."""
    return [(name.lower(), value) for name, value in headers if name.lower() not in _HOP_BY_HOP]


def _parsed(body: bytes) -> Any:
    with suppress(ValueError, RecursionError):
        return json.loads(body)


def _json(answer: Response) -> Any:
    return json.loads(bytes(answer.body))


def _id_of(stream: Any) -> str | None:
    found = stream.get("id") if isinstance(stream, dict) else None
    return found if isinstance(found, str) else None


async def _body(scope: Scope, receive: Receive) -> bytes:
    body = bytearray()
    async for part in Request(scope, receive).stream():
        body += part
        if len(body) > _MAX_BODY:
            raise ProblemError("body_too_large", f"The front of the cells takes {_MAX_BODY} bytes for this.")
    return bytes(body)


def serve(config: CellsConfig, ready: Callable[[str], None]) -> None:
    """Pass requests on to the cells until SIGTERM or SIGINT. Raise ConfigError if the address cannot be listened on."""

    async def run() -> None:
        front = Front(config.cells)
        server = Server(front, _END_SECONDS)
        for name in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(name, setattr, server, "should_exit", True)
        serving = await server.start(listener)
        ready(f"http://{config.host}:{config.port}")
        try:
            await serving
        finally:
            await front.close()

    with bind(config.host, config.port, "port") as listener:
        asyncio.run(run())

"""Calls between processes: groups of requests go to another process in one HTTP call, packed.

The response has the replies to each group as soon as they are there, so no group waits for another. A call goes to the
pipeline of the other process, so no request is forwarded twice. The caller sends a token that only holders of the
store's secret can compute, and that only the called process accepts.
"""

import asyncio
import hashlib
import hmac
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import aiohttp
import msgspec
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from ..messages import Reply, Request, WorkerLostError
from ..pipeline.group import Group
from ..settings import ServeConfig
from ..workers.worker import Worker
from .forwarding import AT_WORK

if TYPE_CHECKING:
    from .membership import Membership

# Part of the path: processes that pack requests differently don't understand each other.
PROTOCOL = 2
_PREFIX = f"/internal/v{PROTOCOL}"
_CALLS, _FACTS = f"{_PREFIX}/calls", f"{_PREFIX}/facts"
# Before the packed replies to a group: its number, and their size.
_HEAD = struct.Struct("<iI")
_AT_WORK = _HEAD.pack(AT_WORK[0], 0)
_MAX_BODY = 2**30
_FACTS_SECONDS = 1.0
_HEADERS = [(b"content-type", b"application/msgpack")]

_pack = msgspec.msgpack.Encoder().encode
_unpack_groups = msgspec.msgpack.Decoder(list[list[Request]]).decode
_unpack_replies = msgspec.msgpack.Decoder(list[Reply]).decode


class Calls:
    """Calls to other processes, with the secret of the store."""

    def __init__(self, secret: bytes):
        self._secret = secret
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0),
            # Forwarding limits the time of a call.
            timeout=aiohttp.ClientTimeout(total=None),
            auto_decompress=False,
        )

    async def call(self, process: str, groups: list[list[Request]]) -> AsyncIterator[tuple[int, list[Reply]]]:
        """Yield the number and the replies of each group, and `AT_WORK` in between.

        Raises:
            WorkerLostError: the process cannot be reached.
        """
        missing = set(range(len(groups)))
        async with self._asked(process, "POST", _CALLS, _pack(groups)) as response:
            while missing:
                head = await response.content.readexactly(_HEAD.size)
                if head == _AT_WORK:
                    yield AT_WORK
                    continue
                number, size = _HEAD.unpack(head)
                replies = _unpack_replies(await response.content.readexactly(size))
                if number not in missing or len(replies) != len(groups[number]):
                    raise WorkerLostError(f"{process} sent {len(replies)} replies to group {number}")
                missing.remove(number)
                yield number, replies

    async def facts(self, process: str) -> dict[str, Any] | None:
        """Return what the worker of a process says of itself; None if it does not answer."""
        try:
            timeout = aiohttp.ClientTimeout(_FACTS_SECONDS)
            async with self._asked(process, "GET", _FACTS, timeout=timeout) as response:
                facts: dict[str, Any] = msgspec.msgpack.decode(await response.read())
        except WorkerLostError:
            return None
        return facts

    async def close(self) -> None:
        """Close all connections."""
        await self._session.close()

    @asynccontextmanager
    async def _asked(
        self, process: str, method: str, path: str, body: bytes = b"", **more: Any
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """Yield the response of a process. Raise WorkerLostError for everything that goes wrong until it is read."""
        headers = {"Authorization": f"Bearer {_token(self._secret, process)}"}
        try:
            async with self._session.request(method, process + path, data=body, headers=headers, **more) as response:
                if response.status != 200:
                    raise WorkerLostError(f"{process} answered a call with {response.status}")
                yield response
        except (aiohttp.ClientError, OSError, EOFError, msgspec.MsgspecError) as problem:
            raise WorkerLostError(f"{process} cannot be reached: {type(problem).__name__}") from None


class PeerMiddleware:
    """Serves the calls of other processes. All other requests go to the application."""

    def __init__(self, app: ASGIApp, worker: Worker, membership: "Membership", secret: bytes, config: ServeConfig):
        self._app = app
        self._beat_seconds = config.attempt_seconds / 4
        self._worker = worker
        self._membership = membership
        self._authorization = f"Bearer {_token(secret, worker.name)}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a call, or pass on any other request."""
        if scope["type"] != "http" or not scope["path"].startswith("/internal/"):
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        # Before the body is read.
        if not hmac.compare_digest(headers.get(b"authorization", b""), self._authorization):
            await _rejection(403)(scope, receive, send)
        elif (scope["method"], scope["path"]) == ("GET", _FACTS):
            await Response(_pack(self._worker.facts()))(scope, receive, send)
        elif (scope["method"], scope["path"]) != ("POST", _CALLS):
            await _rejection(404)(scope, receive, send)
        else:
            try:
                groups = _unpack_groups(await _body(HttpRequest(scope, receive)))
            except (msgspec.MsgspecError, ClientDisconnect, ValueError):
                await _rejection(400)(scope, receive, send)
            else:
                await self._serve(groups, send)

    async def _serve(self, groups: list[list[Request]], send: Send) -> None:
        """Send the replies to each group as soon as they are there."""
        served: asyncio.Queue[tuple[int, list[Reply]]] = asyncio.Queue()

        def put(number: int, group: Group) -> None:
            served.put_nowait((number, group.replies))

        placement = self._membership.placement
        if any(placement.first(requests[0].stream) != self._worker.name for requests in groups):
            # The caller may know of a change before this process does. It asks again if this comes too late.
            self._membership.refresh()
        for number, requests in enumerate(groups):
            self._worker.pipeline.begin(Group(requests, partial(put, number)))
        await send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
        open_groups = len(groups)
        while open_groups:
            try:
                async with asyncio.timeout(self._beat_seconds):
                    found = [await served.get()]
            except TimeoutError:
                if self._worker.is_connected:
                    await send({"type": "http.response.body", "body": _AT_WORK, "more_body": True})
                continue
            while not served.empty():
                found.append(served.get_nowait())
            open_groups -= len(found)
            parts = ((number, _pack(replies)) for number, replies in found)
            body = b"".join(_HEAD.pack(number, len(packed)) + packed for number, packed in parts)
            await send({"type": "http.response.body", "body": body, "more_body": True})
        await send({"type": "http.response.body", "body": b""})


def _rejection(status: int) -> Response:
    # The rest of the body was not read.
    return Response(status_code=status, headers={"connection": "close"})


async def _body(call: HttpRequest) -> bytes:
    parts, size = [], 0
    async for part in call.stream():
        parts.append(part)
        size += len(part)
        if size > _MAX_BODY:
            raise ValueError("the body is too large")
    return b"".join(parts)


def _token(secret: bytes, process: str) -> str:
    return hmac.new(secret, f"calls to {process}".encode(), hashlib.sha256).hexdigest()

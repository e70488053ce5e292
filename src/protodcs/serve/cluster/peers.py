"""Calls between processes: requests go to the worker of another process in one HTTP call, packed.

A call reaches the worker and no router, so no request is forwarded twice. The caller sends a token that only holders of
the store's secret can compute, and that only the called process accepts.
"""

import hashlib
import hmac
from typing import Any

import aiohttp
import msgspec
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ...errors import ProtoDCSError
from ..messages import Reply, Request
from ..workers.router import WorkerLostError
from ..workers.worker import Worker

# Part of the path: processes that pack requests differently don't understand each other.
PROTOCOL = 1
_PREFIX = f"/internal/v{PROTOCOL}"
_CALLS, _FACTS = f"{_PREFIX}/calls", f"{_PREFIX}/facts"
# The router has two calls to a process under way, and health checks beside them.
_CONNECTIONS = 8
_MAX_BODY = 2**30
_FACTS_SECONDS = 1.0

_pack = msgspec.msgpack.Encoder().encode
_unpack_requests = msgspec.msgpack.Decoder(list[Request]).decode
_unpack_replies = msgspec.msgpack.Decoder(list[Reply]).decode


class Calls:
    """Calls to other processes.

    Args:
        secret: of the store.
    """

    def __init__(self, secret: bytes):
        self._secret = secret
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, limit_per_host=_CONNECTIONS),
            # The router limits the time of a call.
            timeout=aiohttp.ClientTimeout(total=None),
            auto_decompress=False,
        )

    async def call(self, process: str, requests: list[Request]) -> list[Reply]:
        """Return the replies of the worker of a process. Raise WorkerLostError if it cannot be reached."""
        body = await self._ask(process, "POST", _CALLS, _pack(requests))
        try:
            replies = _unpack_replies(body)
        except msgspec.MsgspecError as problem:
            raise WorkerLostError(f"{process} sent no replies: {problem}") from None
        if len(replies) != len(requests):
            raise WorkerLostError(f"{process} sent {len(replies)} replies to {len(requests)} requests")
        return replies

    async def facts(self, process: str) -> dict[str, Any] | None:
        """Return what the worker of a process says of itself; None if it does not answer."""
        try:
            body = await self._ask(process, "GET", _FACTS, timeout=aiohttp.ClientTimeout(_FACTS_SECONDS))
            facts: dict[str, Any] = msgspec.msgpack.decode(body)
        except (WorkerLostError, msgspec.MsgspecError):
            return None
        return facts

    async def close(self) -> None:
        """Close all connections."""
        await self._session.close()

    async def _ask(self, process: str, method: str, path: str, body: bytes = b"", **more: Any) -> bytes:
        headers = {"Authorization": f"Bearer {_token(self._secret, process)}"}
        try:
            async with self._session.request(method, process + path, data=body, headers=headers, **more) as response:
                content = await response.read()
        except (aiohttp.ClientError, OSError) as problem:
            raise WorkerLostError(f"{process} cannot be reached: {type(problem).__name__}") from None
        except TimeoutError:
            raise WorkerLostError(f"{process} did not answer in time") from None
        if response.status != 200:
            raise WorkerLostError(f"{process} answered a call with {response.status}")
        return content


class PeerMiddleware:
    """Serves the calls of other processes. All other requests go to the application."""

    def __init__(self, app: ASGIApp, worker: Worker, secret: bytes):
        self._app = app
        self._worker = worker
        self._authorization = f"Bearer {_token(secret, worker.name)}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a call, or pass on any other request."""
        if scope["type"] != "http" or not scope["path"].startswith("/internal/"):
            await self._app(scope, receive, send)
            return
        status, body = await self._answer(scope, receive)
        headers = [(b"content-length", b"%d" % len(body)), (b"content-type", b"application/msgpack")]
        if status != 200:
            # The rest of the body was not read.
            headers.append((b"connection", b"close"))
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    async def _answer(self, scope: Scope, receive: Receive) -> tuple[int, bytes]:
        headers = dict(scope["headers"])
        # Before the body is read.
        if not hmac.compare_digest(headers.get(b"authorization", b""), self._authorization):
            return 403, b""
        if (scope["method"], scope["path"]) == ("GET", _FACTS):
            return 200, _pack(self._worker.facts())
        if (scope["method"], scope["path"]) != ("POST", _CALLS):
            return 404, b""
        try:
            requests = _unpack_requests(await _body(receive))
        except (msgspec.MsgspecError, _IncompleteError):
            return 400, b""
        return 200, _pack(await self._worker.handle(requests))


class _IncompleteError(ProtoDCSError):
    """The caller left, or sent too much."""


async def _body(receive: Receive) -> bytes:
    parts, size = [], 0
    while True:
        message: Message = await receive()
        if message["type"] == "http.disconnect":
            raise _IncompleteError("the caller left")
        parts.append(message.get("body", b""))
        size += len(parts[-1])
        if size > _MAX_BODY:
            raise _IncompleteError("the body is too large")
        if not message.get("more_body", False):
            return b"".join(parts)


def _token(secret: bytes, process: str) -> str:
    return hmac.new(secret, f"calls to {process}".encode(), hashlib.sha256).hexdigest()

"""The server of HTTP: uvicorn, with limits on the headers of a request."""

import asyncio
import json
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from ...errors import InputError
from ..access.limits import COMPLETE
from ..access.problems import MEDIA_TYPE, ProblemError

# Time for all headers of a request, in seconds, and how many bytes they may have together with the path.
_HEADER_SECONDS = 10.0
_MAX_HEADERS = 2**16
# Bytes of a header besides its name and value: colon, space and line break.
_SEPARATORS = 4
# What arrives behind headers that are too large is discarded for so many seconds. A connection that is closed before
# everything is read may lose the response.
_DISCARD_SECONDS = 1.0


class _HeaderLimits(HttpToolsProtocol):
    """An HTTP/1.1 connection that ends if the headers of a request are too large, or not complete in time.

    The parser holds a path, header or trailer until it is complete, however long it is. So all bytes count that arrive
    without a piece of a body.
    """

    _timer: asyncio.TimerHandle | None = None
    _unread_bytes = 0
    _rejected = False

    def connection_made(self, transport: Any) -> None:
        """Start the time for the first request."""
        super().connection_made(transport)
        self._limit()

    def data_received(self, data: bytes) -> None:
        """Read data. Between requests, uvicorn closes idle connections; half a request is ours to close."""
        if self._rejected:
            return
        self._unread_bytes += len(data)
        super().data_received(data)
        if self._unread_bytes > _MAX_HEADERS and not self._rejected:
            self._reject()
        self._limit()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the timer of the connection."""
        self._stop_timer()
        super().connection_lost(exc)

    def on_message_begin(self) -> None:
        """Start a request."""
        self._unread_bytes = 0
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        """Serve a request, unless what came in one piece with its body is too large."""
        if len(self.url) + sum([len(name) + len(value) + _SEPARATORS for name, value in self.headers]) > _MAX_HEADERS:
            self._reject()
            # This stops the parser.
            raise InputError("the headers are too large")
        self._unread_bytes = 0
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """Take a piece of the body."""
        self._unread_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        """Take the end of the body."""
        self.scope["state"][COMPLETE] = True
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        """Reject a request that cannot be read."""
        if not self._rejected:
            super().send_400_response(msg)

    def _reject(self) -> None:
        self._rejected = True
        if self.cycle is None or self.cycle.response_complete:
            detail = f"The path and the headers of a request may have {_MAX_HEADERS} bytes."
            body = json.dumps(ProblemError("headers_too_large", detail).document()).encode()
            head = (
                f"HTTP/1.1 431 Request Header Fields Too Large\r\ncontent-type: {MEDIA_TYPE}\r\n"
                f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
            )
            self.transport.write(head.encode() + body)
            self.loop.call_later(_DISCARD_SECONDS, self.transport.close)
        else:
            self.transport.close()

    def _limit(self) -> None:
        if self.cycle is not None and not self.cycle.response_complete:
            self._stop_timer()
        elif self._timer is None:
            self._timer = self.loop.call_later(_HEADER_SECONDS, self.transport.close)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class Server(uvicorn.Server):
    """A server of HTTP alone, which leaves signals to others. After `should_exit`, requests get `end_seconds`."""

    def __init__(self, app: ASGIApp, end_seconds: int, **options: Any):
        super().__init__(
            uvicorn.Config(
                app,
                http=_HeaderLimits,
                log_config=None,
                log_level="warning",
                access_log=False,
                lifespan="off",
                ws="none",
                proxy_headers=False,
                server_header=False,
                timeout_graceful_shutdown=end_seconds,
                **options,
            )
        )

    async def start(self, listener: socket.socket) -> "asyncio.Task[None]":
        """Return the task that serves, as soon as it listens or has failed."""
        serving = asyncio.create_task(self.serve(sockets=[listener]))
        while not (self.started or serving.done()):
            await asyncio.sleep(0.001)
        return serving

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Change no signal handler."""
        yield

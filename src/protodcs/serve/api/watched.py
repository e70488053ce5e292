"""Around every HTTP request: its id, its span, its time and status, and a line in the log.

It stands outside all else, so that what is refused is counted too. It passes bodies through and looks at none.
"""

import logging
import time
from typing import Any

from opentelemetry.trace import Span
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..telemetry import logs, traces
from ..telemetry.metrics import IngressMetrics

_log = logging.getLogger(__name__)

_ID = "x-request-id"
# What fleets of streams do all the time: well served it is counted, and written down only by the level debug.
_DECIDING = ("POST /v1/streams/{stream}/observe", "POST /v1/streams/{stream}/peek")
_LOOKING = ("GET /v1/health", "GET /v1/ready")
# Of a caller that went away before there was an answer: no status that anybody was sent.
_GONE = 499


class Watched:
    """Middleware that counts, traces and logs requests."""

    def __init__(self, app: ASGIApp, metrics: IngressMetrics):
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request, and note how it went."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        start, status = time.perf_counter(), _GONE
        headers = Headers(scope=scope)
        state: dict[str, Any] = scope.setdefault("state", {})
        state["request_id"] = logs.request_id(headers.get(_ID))

        async def noted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        with traces.request_span(headers, **{"request.id": state["request_id"]}) as span:
            problem: Exception | None = None
            try:
                await self._app(scope, receive, noted)
            except Exception as raised:
                problem = raised
                status = 500 if status == _GONE else status
                raise
            finally:
                self._note(scope, span, status, time.perf_counter() - start, problem)

    def _note(self, scope: Scope, span: Span, status: int, seconds: float, problem: Exception | None) -> None:
        route = _route(scope)
        self._metrics.requests.labels(route, str(status)).inc()
        if route in _DECIDING:
            self._metrics.total.observe(seconds)
        span.update_name(route)
        span.set_attribute("http.response.status_code", status)
        level = _level(route, status)
        if not _log.isEnabledFor(level):
            return
        about: dict[str, Any] = {"request": scope["state"]["request_id"], "route": route, "status": status}
        stream = scope.get("path_params", {}).get("stream")
        if stream is not None:
            about["stream"] = logs.hashed(stream)
        _log.log(level, "request", exc_info=problem, extra=logs.with_fields(**about, seconds=round(seconds, 6)))


def _route(scope: Scope) -> str:
    """The route by its pattern, also of a request that was refused before it came there: one of a few."""
    pattern = scope["state"].get("route") or getattr(scope.get("route"), "path", None)
    return "other" if pattern is None else f"{scope['method']} {pattern}"


def _level(route: str, status: int) -> int:
    if status >= 500:
        return logging.ERROR
    if status >= 400:
        return logging.WARNING
    return logging.DEBUG if route in (*_DECIDING, *_LOOKING) else logging.INFO

"""The outermost middleware: id, trace span, metrics and log line of every HTTP request.

It also sees requests that other middlewares reject. Of bodies it reads only problem documents, for the reason.
"""

import json
import logging
import time
from typing import Any

from opentelemetry.trace import Span
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..access.keys import without_keys
from ..telemetry import logs, traces
from ..telemetry.metrics import IngressMetrics

_log = logging.getLogger(__name__)

_ID = "x-request-id"
# Frequent requests: if they succeed, they have a line only at the level debug.
_FREQUENT = (
    "/v1/streams/{stream}/observe",
    "/v1/streams/{stream}/peek",
    "/v1/health",
    "/v1/ready",
)
# The status of a request whose caller disconnected before the response.
_DISCONNECTED = 499
_LONGEST_STREAM = 200


class RequestLogMiddleware:
    """Measure, trace and log requests."""

    def __init__(self, app: ASGIApp, metrics: IngressMetrics):
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request, and record its outcome."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        start, status, reason = time.perf_counter(), _DISCONNECTED, None
        headers = Headers(scope=scope)
        state: dict[str, Any] = scope.setdefault("state", {})
        state["request_id"] = logs.request_id(headers.get(_ID))

        async def recorded(message: Message) -> None:
            nonlocal status, reason
            if message["type"] == "http.response.start":
                status = message["status"]
            elif status >= 400 and reason is None:
                reason = _reason(message.get("body", b""))
            await send(message)

        with traces.request_span(headers, **{"request.id": state["request_id"]}) as span:
            problem: Exception | None = None
            try:
                await self._app(scope, receive, recorded)
            except Exception as raised:
                problem = raised
                status = 500 if status == _DISCONNECTED else status
                raise
            finally:
                self._record(scope, span, status, time.perf_counter() - start, reason, problem)

    def _record(
        self, scope: Scope, span: Span, status: int, seconds: float, reason: str | None, problem: Exception | None
    ) -> None:
        route, method = _route(scope), scope["method"] if scope["method"] in _METHODS else "other"
        caller = scope["state"].get("caller")
        self._metrics.requests.labels(route, method, str(status)).observe(seconds)
        if caller is not None:
            self._metrics.of_tenant(caller.tenant, status)
        span.update_name(f"{method} {route}")
        span.set_attribute("http.response.status_code", status)
        level = _level(route, status)
        if not _log.isEnabledFor(level):
            return
        fields: dict[str, Any] = {
            "request_id": scope["state"]["request_id"],
            "method": method,
            "route": route,
            "code": status,
            "seconds": round(seconds, 6),
            "tenant": None if caller is None else caller.tenant,
            "key": None if caller is None else caller.key,
            "stream": _stream(scope),
            "reason": reason,
            **traces.ids_of_caller(Headers(scope=scope)),
        }
        present = {name: value for name, value in fields.items() if value is not None}
        _log.log(level, "request", exc_info=problem, extra=logs.with_fields(**present))


_METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")


def _reason(body: bytes) -> str | None:
    """Return the code of a problem document, or its title if it has none."""
    try:
        problem = json.loads(body)
    except ValueError:
        return None
    if not isinstance(problem, dict):
        return None
    reason = problem.get("code") or problem.get("title")
    return reason if isinstance(reason, str) else None


def _stream(scope: Scope) -> str | None:
    """Return the stream of a request, short and without any API key that it contains."""
    stream = scope["state"].get("stream") or scope.get("path_params", {}).get("stream")
    return None if stream is None else without_keys(str(stream))[:_LONGEST_STREAM]


def _route(scope: Scope) -> str:
    """Return the pattern of the path, also for a request that was rejected before its route; "other" if none fits."""
    return scope["state"].get("route") or getattr(scope.get("route"), "path", None) or "other"


def _level(route: str, status: int) -> int:
    if status >= 500:
        return logging.ERROR
    if status >= 400:
        return logging.WARNING
    return logging.DEBUG if route in _FREQUENT else logging.INFO

"""Metrics, span attributes and the log line of every HTTP request, also of those that never reach a route."""

import json
import logging
from typing import Any

from opentelemetry.trace import Span
from starlette.datastructures import Headers
from starlette.types import Scope

from ..access.keys import logged_stream
from ..telemetry import logs, traces
from ..telemetry.metrics import IngressMetrics

_log = logging.getLogger(__name__)

# Frequent requests: if they succeed, they have a line only at the level debug.
_FREQUENT = (
    "/v1/streams/{stream}/observe",
    "/v1/streams/{stream}/peek",
    "/v1/health",
    "/v1/ready",
)
# The status of a request whose caller disconnected before the response.
DISCONNECTED = 499


class RequestLog:
    """Counts and logs requests."""

    def __init__(self, metrics: IngressMetrics):
        self._metrics = metrics

    def record(
        self, scope: Scope, span: Span, status: int, seconds: float, reason: str | None, problem: Exception | None
    ) -> None:
        """Record the outcome of a request: also why it was rejected, or which unexpected problem ended it."""
        route, method = _route(scope), scope["method"] if scope["method"] in _METHODS else "other"
        caller = scope["state"].get("caller")
        self._metrics.request(route, method, status, seconds)
        if caller is not None:
            self._metrics.of_tenant(caller.tenant, status)
        if span.is_recording():
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
            "stream": logged_stream(scope["state"].get("stream") or scope.get("path_params", {}).get("stream")),
            "reason": reason,
            **traces.ids_of_caller(Headers(scope=scope)),
        }
        present = {name: value for name, value in fields.items() if value is not None}
        _log.log(level, "request", exc_info=problem, extra=logs.with_fields(**present))


_METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")


def reason_of(body: bytes) -> str | None:
    """Return the code of a problem document, or its title if it has none."""
    try:
        problem = json.loads(body)
    except ValueError:
        return None
    if not isinstance(problem, dict):
        return None
    reason = problem.get("code") or problem.get("title")
    return reason if isinstance(reason, str) else None


def _route(scope: Scope) -> str:
    """Return the pattern of the path, also for a request that was rejected before its route; "other" if none fits."""
    return scope["state"].get("route") or getattr(scope.get("route"), "path", None) or "other"


def _level(route: str, status: int) -> int:
    if status >= 500:
        return logging.ERROR
    if status >= 400:
        return logging.WARNING
    return logging.DEBUG if route in _FREQUENT else logging.INFO

"""The middleware of the service: what every request passes, in this order.

1. A request id, a trace span, and metrics and a log line at the end (`request_log`).
2. The route of the path with its access rule, and the caller (`Access`).
3. The limits of the caller's tenant, and of the body (`Limits`).
4. The route. Those that fleets of streams call all the time are called directly: routing, dependency injection and
   exception handling of FastAPI take longer than a decision. They are in the application too, for its OpenAPI document.
5. A line of the audit log, durable before the response begins (`AuditTrail`).

It is around the whole application. Among the middlewares of FastAPI, each request would pass four more of them.
"""

import time
from collections.abc import Awaitable, Callable, Mapping

from fastapi import FastAPI, Request, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..access.audit import AuditTrail
from ..access.authentication import Access
from ..access.headers import header, index_headers
from ..access.limits import Limits
from ..access.problems import ProblemError
from ..telemetry import logs, traces
from .errors import as_response, unexpected
from .json_parsing import JsonRequest
from .request_log import DISCONNECTED, RequestLog, reason_of

_ID = b"x-request-id"
_NOT_WRITTEN = (
    "The audit log cannot be written, so the result of this request is unknown. Retry with the same idempotency key."
)

# Serves a request on a stream.
DirectEndpoint = Callable[[str, Request], Awaitable[Response]]


class ServiceMiddleware:
    """Identifies, checks, serves, audits and logs each request.

    Args:
        api: the application, which endpoints find in the scope.
        app: what serves a request behind it.
        access: who may do what.
        limits: of tenants and bodies.
        audit: where requests are audited.
        log: where requests are counted and logged.
        direct: endpoints that are called without the application, by path. All of them are POST.
    """

    def __init__(
        self,
        api: FastAPI,
        app: ASGIApp,
        access: Access,
        limits: Limits,
        audit: AuditTrail,
        log: RequestLog,
        direct: Mapping[str, DirectEndpoint],
    ):
        self._api = api
        self._app = app
        self._access = access
        self._limits = limits
        self._audit = audit
        self._log = log
        self._direct = direct

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request, and record its outcome."""
        if scope["type"] != "http":
            await (self._app(scope, receive, send) if scope["type"] == "lifespan" else _close(send))
            return
        start = time.perf_counter()
        # A server may share one state between requests.
        state = scope["state"] = {**scope.get("state", {})}
        index_headers(scope)
        state["request_id"] = logs.request_id(header(scope, _ID))
        with traces.request_span(scope, state["request_id"]) as span:
            response = _Sent(self._audit, scope, receive, send)
            problem: Exception | None = None
            try:
                await self._serve(scope, receive, response.send)
            except Exception as raised:
                problem = raised
                await response.fail(problem)
                raise
            except BaseException:
                await response.fail(None)
                raise
            finally:
                seconds = time.perf_counter() - start
                self._log.record(scope, span, response.status, seconds, response.reason, problem)

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self._access.check(scope)
            body = self._limits.incoming(scope, receive)
        except ProblemError as problem:
            await problem.response(scope)(scope, receive, send)
            return
        try:
            endpoint = self._direct.get(scope["state"]["route"])
            if endpoint is not None:
                stream = scope["state"]["stream"]
                scope["app"], scope["path_params"] = self._api, {"stream": stream}
                http = JsonRequest(scope, body.receive)
                try:
                    response = await endpoint(stream, http)
                except Exception as problem:
                    response = await as_response(http, problem)
                await response(scope, body.receive, send)
            elif scope["method"] == "HEAD":
                await self._app({**scope, "method": "GET"}, body.receive, _without_body(send))
            else:
                await self._app(scope, body.receive, send)
        finally:
            body.end()


class _Sent:
    """The response to a request, as it is sent.

    Attributes:
        status: of the response.
        reason: why a request was rejected.
    """

    def __init__(self, audit: AuditTrail, scope: Scope, receive: Receive, send: Send):
        self._audit = audit
        self._scope = scope
        self._receive = receive
        self._send = send
        self._started = self._replaced = False
        self.status = DISCONNECTED
        self.reason: str | None = None

    async def send(self, message: Message) -> None:
        """Send a part of the response. It begins only after the line of the audit log is durable."""
        if self._replaced:
            return
        if message["type"] == "http.response.start":
            self._started, self.status = True, message["status"]
            if self._audit.needs_line(self._scope, self.status) and not await self._audit.write(
                self._scope, self.status
            ):
                self._replaced = True
                await self._send_not_written()
                return
            message["headers"].append((_ID, self._scope["state"]["request_id"].encode()))
        elif self.status >= 400 and self.reason is None:
            self.reason = reason_of(message.get("body", b""))
        await self._send(message)

    async def fail(self, problem: Exception | None) -> None:
        """End a request that has no response of its own: by a problem, or because it was interrupted."""
        if self._started:
            return
        if problem is not None:
            await unexpected(self._scope).response(self._scope)(self._scope, self._receive, self.send)
        elif self._audit.needs_line(self._scope, None):
            await self._audit.write(self._scope, None)

    async def _send_not_written(self) -> None:
        problem = ProblemError("unavailable", _NOT_WRITTEN)
        self.status, self.reason = problem.status_code, problem.code
        response = problem.response(self._scope)
        response.headers[_ID.decode()] = self._scope["state"]["request_id"]
        await response(self._scope, self._receive, self._send)


def _without_body(send: Send) -> Send:
    async def send_without_body(message: Message) -> None:
        if message["type"] == "http.response.body":
            message = {**message, "body": b""}
        await send(message)

    return send_without_body


async def _close(send: Send) -> None:
    await send({"type": "websocket.close", "code": 1008})

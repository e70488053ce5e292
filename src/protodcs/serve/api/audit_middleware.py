"""Gives each request an id, and writes administrative and denied requests to the audit log.

The line is durable before the caller gets the response. If it cannot be written, the response is 503.
"""

import logging
import time
from collections import Counter

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..access.audit import DENIED, AuditLog, of_request
from ..access.keys import Caller
from ..access.limits import Bucket
from ..access.problems import ProblemError
from ..access.rules import Rule
from ..telemetry.logs import request_id

_log = logging.getLogger(__name__)

# Lines of denied requests per second, and at once, so that nobody can fill the disk with them.
_DENIED_RATE, _DENIED_BURST = 10, 100
_NOT_WRITTEN = (
    "The audit log cannot be written, so the result of this request is unknown. Retry with the same idempotency key."
)


class AuditMiddleware:
    """Gives each request an id, and writes the audit log."""

    def __init__(self, app: ASGIApp, log: AuditLog):
        self._app = app
        self._log = log
        self._denied: dict[str, Bucket] = {}
        self._left_out: Counter[str] = Counter()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request. The response waits until its line is durable."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        # A server may share one state between requests.
        state = scope["state"] = dict(scope.get("state", {}))
        # An outer middleware may have set the id.
        if "request_id" not in state:
            state["request_id"] = request_id(Headers(scope=scope).get("x-request-id"))
        started = replaced = False

        async def send_audited(message: Message) -> None:
            nonlocal started, replaced
            if message["type"] == "http.response.start":
                started = True
                if self._is_audited(scope, message["status"]) and not await self._write(scope, message["status"]):
                    replaced = True
                    named = {"X-Request-Id": state["request_id"]}
                    problem = ProblemError("unavailable", _NOT_WRITTEN, headers=named)
                    await problem.response(scope)(scope, receive, send)
                else:
                    MutableHeaders(scope=message)["X-Request-Id"] = state["request_id"]
            if not replaced:
                await send(message)

        try:
            await self._app(scope, receive, send_audited)
        except BaseException as problem:
            status = 500 if isinstance(problem, Exception) else None
            if not started and self._is_audited(scope, status):
                await self._write(scope, status)
            raise

    def _is_audited(self, scope: Scope, status: int | None) -> bool:
        """Return whether the audit log needs a line for a request."""
        rule: Rule | None = scope["state"].get("rule")
        return status in DENIED or (rule is not None and rule.audited)

    async def _write(self, scope: Scope, status: int | None) -> bool:
        """Write the line of a request. Return False if an action took place and its line cannot be written."""
        state = scope["state"]
        rule: Rule | None = state.get("rule")
        caller: Caller | None = state.get("caller")
        denied = status in DENIED
        tenant = "" if caller is None else caller.tenant
        if denied and not self._has_room(tenant):
            self._left_out[tenant] += 1
            return True
        entry = of_request(state, rule, caller, status)
        if denied and self._left_out[tenant]:
            entry["left_out"] = self._left_out.pop(tenant)
        try:
            await self._log.write(entry)
        except OSError:
            _log.exception("the audit log cannot be written")
            return denied
        return True

    def _has_room(self, tenant: str) -> bool:
        """Return whether the log may have one more denied request of a tenant, or of callers without a key."""
        bucket = self._denied.setdefault(tenant, Bucket(_DENIED_RATE, _DENIED_BURST))
        return bucket.take(time.monotonic()) == 0

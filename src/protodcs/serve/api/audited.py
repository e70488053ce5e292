"""Gives each request an id, and writes down in the audit log what was done.

A line is on the disk before the caller hears of the act; where it cannot be written, the caller is not told that all
went well.
"""

import asyncio
import logging
import time
from collections import Counter
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..access.audit import DENIED, AuditLog, of_request
from ..access.keys import Caller
from ..access.limits import Bucket
from ..access.refusals import refusal
from ..access.rules import Rule
from ..telemetry.logs import request_id

_log = logging.getLogger(__name__)

# Lines of denied attempts a second, and at once: nobody must be able to fill the disk with them.
_DENIED_RATE, _DENIED_BURST = 10, 100
# What only an admin may see, but changes nothing, takes nothing away, and is asked again and again.
_LOOKS = ("owners",)


class Audited:
    """Gives each request an id, and writes down what was done."""

    def __init__(self, app: ASGIApp, log: AuditLog):
        self._app = app
        self._log = log
        self._denied: dict[str, Bucket] = {}
        self._left_out: Counter[str] = Counter()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request; the answer waits for its line."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        # A server may hand the same state to all requests; what is found out here is of this one.
        state = scope["state"] = dict(scope.get("state", {}))
        # Whoever stands outside may have made it already.
        state.setdefault("request_id", request_id(Headers(scope=scope).get("x-request-id")))
        begun = unsaid = False

        async def telling(message: Message) -> None:
            nonlocal begun, unsaid
            if message["type"] == "http.response.start":
                begun = True
                unsaid = not await self._told(scope, message["status"])
                if unsaid:
                    await _not_written(scope)(scope, receive, send)
                MutableHeaders(scope=message)["X-Request-Id"] = state["request_id"]
            if not unsaid:
                await send(message)

        try:
            await self._app(scope, receive, telling)
        except BaseException as problem:
            if not begun:
                await self._told(scope, 500 if isinstance(problem, Exception) else None)
            raise

    async def _told(self, scope: Scope, status: int | None) -> bool:
        """Write down how a request went, if it is one to write down; False if that was not possible."""
        state = scope["state"]
        rule: Rule | None = state.get("rule")
        caller: Caller | None = state.get("caller")
        denied = status in DENIED
        act = rule is not None and rule.role == "admin" and rule.action not in _LOOKS
        if not (act or denied):
            return True
        tenant = "" if caller is None else caller.tenant
        if denied and not self._may_tell(tenant):
            self._left_out[tenant] += 1
            return True
        entry = of_request(state, rule, caller, status)
        if denied and self._left_out[tenant]:
            entry["left_out"] = self._left_out.pop(tenant)
        try:
            await asyncio.to_thread(self._log.write, entry)
        except OSError:
            _log.exception("the audit log cannot be written")
            return denied
        return True

    def _may_tell(self, tenant: str) -> bool:
        """Whether there is room for one more denied attempt of a tenant, or of those without a key."""
        bucket = self._denied.setdefault(tenant, Bucket(_DENIED_RATE, _DENIED_BURST))
        return bucket.take(time.monotonic()) == 0


def _not_written(scope: Scope) -> Any:
    words = "the audit log cannot be written: whether this was done is not known; ask again with the same key"
    return refusal(503, words, {"X-Request-Id": scope["state"]["request_id"]})

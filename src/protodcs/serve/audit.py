"""The audit log: one JSON line for each administrative act and each attempt that was denied, under a request's id.

A line is on the disk before the caller hears of the act. It says who did what to which stream and how it went; it must
never hold what was sent: no image, no feature, no key.
"""

import asyncio
import json
import logging
import os
import sys
import threading
import time
from collections import Counter
from datetime import UTC, datetime
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .access import Rule
from .keys import Caller, without_keys
from .limits import Bucket
from .logs import request_id
from .refusals import refusal

_log = logging.getLogger(__name__)

# Lines of denied attempts a second, and at once: nobody must be able to fill the disk with them.
_DENIED_RATE, _DENIED_BURST = 10, 100
# Of the name of a stream, which may be anything in a request that is refused.
_LONGEST_STREAM = 200
_DENIED = (401, 403)
# What only an admin may see, but changes nothing, takes nothing away, and is asked again and again.
_LOOKS = ("owners",)


class AuditLog:
    """Writes lines to a file, or to standard output where the place is "-".

    The file is opened for each line, so that it may be moved away at any time; a line is one write at its end, so that
    several processes of one machine may share it.
    """

    def __init__(self, place: str):
        self._place = place
        self._writing = threading.Lock()

    def write(self, entry: dict[str, Any]) -> None:
        """Write a line; in a file it is on the disk when this returns."""
        line = json.dumps(entry) + "\n"
        with self._writing:
            if self._place == "-":
                sys.stdout.write(line)
                sys.stdout.flush()
            else:
                self._append(line.encode())

    def _append(self, line: bytes) -> None:
        handle = os.open(self._place, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        try:
            if os.write(handle, line) < len(line):
                raise OSError("a line of the audit log was written in part: the disk may be full")
            os.fsync(handle)
        finally:
            os.close(handle)


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
        denied = status in _DENIED
        act = rule is not None and rule.role == "admin" and rule.action not in _LOOKS
        if not (act or denied):
            return True
        tenant = "" if caller is None else caller.tenant
        if denied and not self._may_tell(tenant):
            self._left_out[tenant] += 1
            return True
        entry = _entry(state, rule, caller, status)
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


def _entry(state: dict[str, Any], rule: Rule | None, caller: Caller | None, status: int | None) -> dict[str, Any]:
    stream: str | None = state.get("stream")
    entry: dict[str, Any] = {
        "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
        "request": state["request_id"],
        "tenant": None if caller is None else caller.tenant,
        "key": None if caller is None else caller.key,
        "role": None if caller is None else caller.role,
        "action": None if rule is None else rule.action,
        "stream": None if stream is None else without_keys(stream)[:_LONGEST_STREAM],
        "status": status,
        "outcome": _outcome(status),
    }
    # A key that was made once and is used though it has ended, or with another secret.
    if state.get("claimed") is not None:
        entry["claimed"] = state["claimed"]
    return entry


def _outcome(status: int | None) -> str:
    if status is None:
        return "interrupted"
    if status < 400:
        return "done"
    if status in _DENIED:
        return "denied"
    return "refused" if status < 500 else "failed"


def _not_written(scope: Scope) -> Any:
    words = "the audit log cannot be written: whether this was done is not known; ask again with the same key"
    return refusal(503, words, {"X-Request-Id": scope["state"]["request_id"]})

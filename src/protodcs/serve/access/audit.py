"""The audit log: one JSON line per administrative request, per denied request, and per action of a guard.

A line says who did what to which stream, and the result. It never contains what was sent: no image, feature or key.
"""

import asyncio
import json
import logging
import os
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from typing import Any

from starlette.types import Scope

from ..guard import GuardEvent
from ..settings import public_id, tenant_of
from .bucket import Bucket
from .keys import Caller, logged_stream
from .rules import Rule

_log = logging.getLogger(__name__)

DENIED = (401, 403)
# Lines of denied requests per second, and at once, so that nobody can fill the disk with them.
_DENIED_RATE, _DENIED_BURST = 10, 100
# Responses wait for their line, so it never queues behind other work.
_THREAD = ThreadPoolExecutor(1, thread_name_prefix="audit log")


class AuditLog:
    """Writes lines to a file, or to standard output if `place` is "-".

    The file is opened for each line, so you can move it away at any time. A line is one write at the end of the file,
    so several processes of one machine can share it.
    """

    def __init__(self, place: str):
        self._place = place

    async def write(self, entry: dict[str, Any]) -> None:
        """Write a line. In a file it is durable when this returns."""
        await asyncio.get_running_loop().run_in_executor(_THREAD, self._write, json.dumps(entry) + "\n")

    def _write(self, line: str) -> None:
        if self._place == "-":
            print(line, end="", flush=True)
            return
        handle = os.open(self._place, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        try:
            if os.write(handle, line.encode()) < len(line.encode()):
                raise OSError("a line of the audit log was written in part: the disk may be full")
            os.fsync(handle)
        finally:
            os.close(handle)


class AuditTrail:
    """Writes the lines of requests."""

    def __init__(self, log: AuditLog):
        self._log = log
        self._denied: dict[str, Bucket] = {}
        self._left_out: Counter[str] = Counter()

    def needs_line(self, scope: Scope, status: int | None) -> bool:
        """Return whether the audit log needs a line for a request."""
        rule: Rule | None = scope["state"].get("rule")
        return status in DENIED or (rule is not None and bool(rule.audited))

    async def write(self, scope: Scope, status: int | None) -> bool:
        """Write the line of a request. Return False if an action took place and its line cannot be written."""
        entry, denied = _of_request(scope["state"], status), status in DENIED
        tenant = entry["tenant"] or ""
        bucket = self._denied.setdefault(tenant, Bucket(_DENIED_RATE, _DENIED_BURST)) if denied else None
        if bucket is not None and bucket.take(time.monotonic()):
            self._left_out[tenant] += 1
            return True
        if denied and self._left_out[tenant]:
            entry["left_out"] = self._left_out.pop(tenant)
        try:
            await self._log.write(entry)
        except OSError:
            _log.exception("the audit log cannot be written")
            return denied
        return True


def _of_request(state: dict[str, Any], status: int | None) -> dict[str, Any]:
    """Return the line of a request."""
    rule: Rule | None = state.get("rule")
    caller: Caller | None = state.get("caller")
    entry: dict[str, Any] = {
        "time": _now(),
        "request_id": state["request_id"],
        "tenant": None if caller is None else caller.tenant,
        "key": None if caller is None else caller.key,
        "role": None if caller is None else caller.role,
        "action": None if rule is None else rule.action,
        "stream": logged_stream(state.get("stream")),
        "status": status,
        "outcome": _outcome(status),
        # What the route says of the request, such as the position of an image.
        **state.get("audit", {}),
    }
    # The id of a known key that has expired, was revoked, or came with a wrong secret.
    if state.get("claimed") is not None:
        entry["claimed"] = state["claimed"]
    return entry


def _outcome(status: int | None) -> str:
    if status is None:
        return "interrupted"
    if status < 400:
        return "done"
    if status in DENIED:
        return "denied"
    return "refused" if status < 500 else "failed"


def of_guard(stream: str, event: GuardEvent) -> dict[str, Any]:
    """Return the line of what a guard did to a stream."""
    return {
        "time": _now(),
        "request_id": None,
        "tenant": tenant_of(stream) or None,
        "key": None,
        "role": None,
        # The same name as in requests.
        "action": event.action.value.replace(" ", ""),
        "stream": public_id(stream),
        "status": None,
        "outcome": "done",
        "guard": event.guard,
        "position": event.position,
        "value": event.value,
        "threshold": event.threshold,
    }


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")

"""The audit log: one JSON line for each administrative act, each attempt that was denied, and each act of a guard.

A line says who did what to which stream and how it went; it must never hold what was sent: no image, no feature, no
key.
"""

import json
import os
import sys
import threading
from datetime import UTC, datetime
from typing import Any

from ..guard import Event
from .keys import Caller, without_keys
from .rules import Rule

# Of the name of a stream, which may be anything in a request that is refused.
_LONGEST_STREAM = 200
DENIED = (401, 403)


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


def of_request(state: dict[str, Any], rule: Rule | None, caller: Caller | None, status: int | None) -> dict[str, Any]:
    """The line of a request and how it ended."""
    stream: str | None = state.get("stream")
    entry: dict[str, Any] = {
        "time": _now(),
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
    if status in DENIED:
        return "denied"
    return "refused" if status < 500 else "failed"


def of_guard(stream: str, event: Event) -> dict[str, Any]:
    """The line of what a guard did to a stream; nobody asked for it."""
    tenant, _, name = stream.rpartition("/")
    return {
        "time": _now(),
        "request": None,
        "tenant": tenant or None,
        "key": None,
        "role": None,
        # In the word of those who do it by hand.
        "action": event.action.value.replace(" ", ""),
        "stream": name,
        "status": None,
        "outcome": "done",
        "guard": event.guard,
        "position": event.position,
        "value": event.value,
        "threshold": event.threshold,
    }


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")

"""What the processes of the service write to their logs: one JSON object on each line.

A line says what happened, when, on behalf of which request and of which stream. It must never hold what a caller sent:
no image, no feature, no name of a class; a stream appears as a hash of its id.
"""

import datetime
import hashlib
import json
import logging
import re
import sys
import uuid
from typing import Any, Literal

from ...errors import without_passwords
from ..access.keys import without_keys

_ROOT = "protodcs"
# What a request id may look like: whatever else a caller sends could forge lines of a log in text.
SAFE_ID = r"[A-Za-z0-9._:-]{1,128}"


def start(kind: Literal["json", "text", "off"], level: str, process: str) -> None:
    """Have all logs of this process written to its standard error, as a service of these settings does."""
    log = logging.getLogger(_ROOT)
    log.setLevel(level.upper())
    log.propagate = False
    handler: logging.Handler = logging.NullHandler()
    if kind != "off":
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(_AsJson(process) if kind == "json" else _AsText(process))
    log.handlers = [handler]
    # It has a line, in words of its own, for whatever is wrong with a form; the caller is told.
    logging.getLogger("python_multipart").setLevel(logging.CRITICAL)


def hashed(stream: str) -> str:
    """What a log calls a stream."""
    return hashlib.blake2b(stream.encode("utf-8", "surrogatepass"), digest_size=6).hexdigest()


def request_id(given: str | None) -> str:
    """The caller's id of a request if it can be used, or a new one; a key given by mistake cannot."""
    if given is None or not re.fullmatch(SAFE_ID, given) or without_keys(given) != given:
        return uuid.uuid4().hex
    return given


def with_fields(**fields: Any) -> dict[str, Any]:
    """What `extra` of a logger takes, so that a line has these fields."""
    return {"fields": fields}


class _AsJson(logging.Formatter):
    def __init__(self, process: str):
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        return json.dumps(self.line(record), default=str)

    def line(self, record: logging.LogRecord) -> dict[str, Any]:
        """The fields of a line, those that every line has first."""
        moment = datetime.datetime.fromtimestamp(record.created, datetime.UTC)
        line: dict[str, Any] = {
            "time": moment.isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "process": self._process,
            "event": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        return {name: without_passwords(value) if isinstance(value, str) else value for name, value in line.items()}


class _AsText(_AsJson):
    def format(self, record: logging.LogRecord) -> str:
        """The same fields for a person to read."""
        line = self.line(record)
        error = line.pop("error", None)
        first = " ".join(str(line.pop(name)) for name in ("time", "level", "process", "event"))
        rest = "".join(f" {name}={value}" for name, value in line.items())
        return first + rest + (f"\n{error}" if error else "")

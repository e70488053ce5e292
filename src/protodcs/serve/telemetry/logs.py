"""The log of the service: one JSON object or one line of text per event.

A line says what happened, when, and for which request, tenant, API key id and stream. It must never contain an image, a
feature, a class name or an API key.
"""

import datetime
import json
import logging
import re
import sys
from typing import Any, Literal

from ...errors import without_passwords
from ..access.keys import without_keys
from ..messages import new_id
from . import traces

_ROOT = "protodcs"
# What a request id may look like: whatever else a caller sends could forge lines of a log in text.
SAFE_ID = r"[A-Za-z0-9._:-]{1,128}"


def start(kind: Literal["json", "text", "off"], level: str, process: str) -> None:
    """Write all logs of this process to its standard output."""
    log = logging.getLogger(_ROOT)
    log.setLevel(level.upper())
    log.propagate = False
    handler: logging.Handler = logging.NullHandler()
    if kind != "off":
        handler = logging.StreamHandler(sys.stdout)
        handler.setFormatter(_AsJson(process) if kind == "json" else _AsText(process))
    log.handlers = [handler]
    # It logs a line for each invalid form. The response tells the caller already.
    logging.getLogger("python_multipart").setLevel(logging.CRITICAL)


def request_id(given: str | None) -> str:
    """Return the caller's id of a request, or a new one if it cannot be used. A key given by mistake cannot."""
    if given is None or not re.fullmatch(SAFE_ID, given) or without_keys(given) != given:
        return new_id()
    return given


def with_fields(**fields: Any) -> dict[str, Any]:
    """Return what `extra` of a logger takes, so that a line has these fields."""
    return {"fields": fields}


class _AsJson(logging.Formatter):
    def __init__(self, process: str):
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        return json.dumps(self.line(record), default=str)

    def line(self, record: logging.LogRecord) -> dict[str, Any]:
        """Return the fields of a line, those that every line has first."""
        moment = datetime.datetime.fromtimestamp(record.created, datetime.UTC)
        line: dict[str, Any] = {
            "time": moment.isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "process": self._process,
            "event": record.getMessage(),
            **getattr(record, "fields", {}),
            **traces.ids(),
        }
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        return {name: without_passwords(value) if isinstance(value, str) else value for name, value in line.items()}


class _AsText(_AsJson):
    def format(self, record: logging.LogRecord) -> str:
        """Return the same fields as a readable line."""
        line = self.line(record)
        error = line.pop("error", None)
        first = " ".join(str(line.pop(name)) for name in ("time", "level", "process", "event"))
        rest = "".join(f" {name}={_quoted(value)}" for name, value in line.items())
        return first + rest + (f"\n{error}" if error else "")


def _quoted(value: Any) -> str:
    """Return a value as one word, so that a name cannot look like another field or line."""
    text = str(value)
    return text if re.fullmatch(r"[^\s\"=\\\x00-\x1f\x7f]+", text) else json.dumps(text)

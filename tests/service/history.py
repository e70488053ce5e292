"""Record every request of a run, every attempt to send it, and every answer.

The checker knows a run only by its history and by the journals of the service. A history holds what the clients saw,
never a conclusion.
"""

import hashlib
import json
import re
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote

import httpx

OK, CONFLICT, GONE = 200, 409, 410
_OBSERVE = re.compile(r"/v1/streams/([^/]+)/(observe|freeze)$")


@dataclass(frozen=True, slots=True)
class Attempt:
    """One HTTP exchange.

    Attributes:
        start, end: by `time.monotonic`.
        status: of the response; None if there was none.
        answers: one per row of an accepted observe, as the service sent them.
        detail: why there was no answer.
    """

    start: float
    end: float
    status: int | None
    answers: Sequence[Mapping[str, Any]] = ()
    detail: str = ""


@dataclass(slots=True)
class Request:
    """One request under one idempotency key, with all attempts: retries of the client and deliberate repetitions.

    Attributes:
        stream: the stream it goes to.
        producer: which of the stream's producers sends it.
        number: its place in the order of this producer, from 0.
        key: its idempotency key.
        rows: how many samples it carries.
        payloads: the bytes of each row; None for images, whose features only the service knows.
        misuse: whether the key already belongs to another request, so that only 409 is right.
        attempts: in the order in which they ended.
    """

    stream: str
    producer: int
    number: int
    key: str
    rows: int
    payloads: Sequence[bytes] | None = None
    misuse: bool = False
    attempts: list[Attempt] = field(default_factory=list)

    @property
    def acknowledged(self) -> list[Attempt]:
        """Return the attempts that the service accepted."""
        return [attempt for attempt in self.attempts if attempt.status == OK]

    @property
    def expired(self) -> list[Attempt]:
        """Return the attempts answered with "applied before, answer no longer stored"."""
        return [attempt for attempt in self.attempts if attempt.status == GONE]

    @property
    def finished(self) -> bool:
        """Return whether the service said that the request is applied."""
        return any(attempt.status in (OK, GONE) for attempt in self.attempts)


class History:
    """Collect requests and attempts from many threads.

    Attributes:
        requests: in the order in which they were begun.
        applied_rows: rows of the requests that the service acknowledged so far, each request counted once.
    """

    def __init__(self) -> None:
        self.requests: list[Request] = []
        self.applied_rows = 0
        self._by_content: dict[tuple[str, str, str, bytes], Request] = {}
        self._lock = threading.Lock()

    def begin(self, request: Request, body: bytes, verb: str = "observe") -> None:
        """Announce a request before it is sent, by the body that identifies it."""
        with self._lock:
            self.requests.append(request)
            self._by_content[request.stream, verb, request.key, _digest(body)] = request

    def add(self, stream: str, verb: str, key: str, body: bytes, attempt: Attempt) -> None:
        """Record an attempt; raises KeyError if nobody announced its request."""
        with self._lock:
            request = self._by_content[stream, verb, key, _digest(body)]
            if attempt.status in (OK, GONE) and not request.misuse and not request.finished:
                self.applied_rows += request.rows
            request.attempts.append(attempt)


class RecordingTransport(httpx.BaseTransport):
    """Send requests with another transport and record each attempt of an announced request."""

    def __init__(self, history: History, inner: httpx.BaseTransport):
        self._history = history
        self._inner = inner

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        """Exchange one request; requests that are not part of the load pass unrecorded."""
        place = _OBSERVE.search(request.url.path)
        if place is None:
            return self._inner.handle_request(request)
        where = unquote(place[1]), place[2], request.headers["idempotency-key"], request.read()
        start = time.monotonic()
        try:
            response = self._inner.handle_request(request)
            response.read()
        except httpx.TransportError as error:
            self._history.add(*where, Attempt(start, time.monotonic(), None, detail=repr(error)))
            raise
        self._history.add(*where, _attempt(start, response))
        return response

    def close(self) -> None:
        """Close the connections."""
        self._inner.close()


def _attempt(start: float, response: httpx.Response) -> Attempt:
    end = time.monotonic()
    if response.status_code == OK:
        return Attempt(start, end, OK, json.loads(response.content).get("decisions", ()))
    return Attempt(start, end, response.status_code, detail=response.text[:300])


def _digest(body: bytes) -> bytes:
    return hashlib.sha256(body).digest()

"""Serve changes and questions on one stream in memory. Nothing here waits or writes, so it can run in a thread."""

import time
from typing import NamedTuple

from ...errors import InputError, ProtoDCSError
from ..log.entries import LogEntry
from ..messages import Action, Reply, ReplyStatus, Request
from ..stream.answers import log_entries
from ..stream.live_stream import LiveStream
from ..stream.records import Kind, Record
from ..workers.changes import content_digest
from ..workers.lease import WorkerLease
from ..workers.loaded_stream import LoadedStream
from ..workers.questions import QUESTIONS
from ..workers.quotas import Quotas, SizeLimits
from ..workers.replies import done_replies, done_reply, error_reply
from .turns import SLICE

_CHANGES = {
    Action.OBSERVE: Kind.OBSERVE,
    Action.FREEZE: Kind.FREEZE,
    Action.UNFREEZE: Kind.UNFREEZE,
    Action.ACKNOWLEDGE: Kind.ACKNOWLEDGE,
    Action.RESET: Kind.RESET,
    Action.ADD_CLASS: Kind.ADD_CLASS,
    Action.REMOVE_CLASS: Kind.REMOVE_CLASS,
    Action.FEEDBACK: Kind.FEEDBACK,
}
# Changes that need room in the store. The others need little, or free some.
_GROWING = (Kind.OBSERVE, Kind.ADD_CLASS, Kind.FEEDBACK)
# Was this change applied before? Asked before a costly step.
_LOOKUPS = {Action.LOOKUP: Kind.OBSERVE, Action.LOOKUP_CLASS: Kind.ADD_CLASS}
# Rows that are observed together take so long, roughly. They are at most 64: a row counts as at least so long.
_TOGETHER_SECONDS = 4 * SLICE
_SHORTEST_ROW = _TOGETHER_SECONDS / 64
_NOT_APPLIED = Reply(ReplyStatus.DONE)


class Served(NamedTuple):
    """What a stream did in one piece of work.

    Attributes:
        replies: to the first requests, one or more.
        records: for the journal, of the changes among them.
        steps: seconds of a row and all answers of each new observe.
        log: entry of each new observe.
    """

    replies: list[Reply]
    records: list[Record]
    steps: list[tuple[float, list[bytes]]]
    log: list[LogEntry]


class Steps:
    """Serves requests on streams in memory.

    Args:
        lease: of the worker; knows the time.
        quotas: of the tenants.
        sizes: the limits on a stream.
        logs_decisions: whether entries of the decision log are made.
    """

    def __init__(self, lease: WorkerLease, quotas: Quotas, sizes: SizeLimits, logs_decisions: bool):
        self._lease = lease
        self._quotas = quotas
        self._sizes = sizes
        self._logs_decisions = logs_decisions

    def serve(self, loaded: LoadedStream, requests: list[Request], until: float) -> Served:
        """Serve requests until a time, at least one of them."""
        served, live, now = Served([], [], [], []), loaded.live, time.thread_time()
        while True:
            start, first = now, len(served.replies)
            rows = _rows(requests, first, int(_TOGETHER_SECONDS / max(loaded.row_seconds, _SHORTEST_ROW)))
            if len(rows) == 1 or not self._serve_rows(live, rows, served):
                served.replies.append(self._serve_one(live, requests[first], served))
            now, done = time.thread_time(), len(served.replies)
            loaded.row_seconds += 0.2 * ((now - start) / (done - first) - loaded.row_seconds)
            if done == len(requests) or time.monotonic() >= until:
                return served

    def _serve_rows(self, live: LiveStream, rows: list[Request], served: Served) -> bool:
        """Observe rows of one request together. Return False, with nothing done, if that is not possible."""
        first = rows[0]
        if live.samples is not None or len(first.payload) != 4 * live.engine.dimension:
            return False
        try:
            if live.applied(Kind.OBSERVE, first.key, first.digest, first.row) is not None:
                return False
            if not live.has_begun(first.key):
                if first.row:
                    return False
                self._quotas.check(first.stream)
            start = time.perf_counter()
            payload = b"".join([row.payload for row in rows])
            record = live.change(Kind.OBSERVE_ROWS, first.key, payload, self._lease.now(), first.digest, first.row)
        except ProtoDCSError:
            return False
        self._note(live, record, rows, time.perf_counter() - start, served)
        served.records.append(record)
        served.replies.extend(done_replies(record))
        return True

    def _note(self, live: LiveStream, record: Record, rows: list[Request], seconds: float, served: Served) -> None:
        """Add the times and log entries of an observe to `served`."""
        served.steps.append((seconds / len(rows), record.answers))
        if self._logs_decisions:
            served.log.extend(log_entries(record, rows, live.engine.classes))

    def _serve_one(self, live: LiveStream, request: Request, served: Served) -> Reply:
        """Serve one change or question. The record of a change is added to `served`."""
        try:
            question = QUESTIONS.get(request.action)
            if question is not None:
                return question(live, self._lease, request.payload)
            kind = _LOOKUPS.get(request.action) or _CHANGES[request.action]
            digest = content_digest(request)
            found = live.applied(kind, request.key, digest, request.row)
            if found is not None:
                return done_reply(found, repeated=True)
            if kind is Kind.ADD_CLASS:
                engine = live.engine
                config, classes = engine.config.model_dump(), len(engine.classes) + 1
                self._sizes.check(request.stream, live.spec, config, classes, engine.dimension)
            # A request is applied completely or not at all, so its first row decides for the others.
            if kind in _GROWING and not live.has_begun(request.key):
                self._quotas.check(request.stream)
                if request.row and request.action not in _LOOKUPS:
                    raise InputError("The first row of the request was rejected. Nothing was applied.")
            if request.action in _LOOKUPS:
                return _NOT_APPLIED
            start = time.perf_counter()
            record = live.change(kind, request.key, request.payload, self._lease.now(), digest, request.row)
            if kind is Kind.OBSERVE:
                self._note(live, record, [request], time.perf_counter() - start, served)
        except ProtoDCSError as problem:
            return error_reply(problem)
        served.records.append(record)
        return done_reply(record)


def _rows(requests: list[Request], at: int, most: int) -> list[Request]:
    """Return the request at a place, with some of the next ones if all are rows of one observe."""
    first, rows = requests[at], [requests[at]]
    if at + 1 == len(requests) or first.action != Action.OBSERVE or not first.digest:
        return rows
    for request in requests[at + 1 : at + most]:
        same = request.key == first.key and request.action == first.action and request.digest == first.digest
        if not same or request.row != first.row + len(rows) or len(request.payload) != len(first.payload):
            break
        rows.append(request)
    return rows


# What is served on the stream in memory, without anything to wait for.
IN_MEMORY = frozenset({*_CHANGES, *_LOOKUPS, *QUESTIONS})

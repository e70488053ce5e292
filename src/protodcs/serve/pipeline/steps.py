"""Serve changes and questions on one stream in memory. Nothing here waits or writes, so it can run in a thread."""

import time
from typing import NamedTuple

from ...errors import InputError, ProtoDCSError
from ..log.entries import LogEntry
from ..messages import Action, Reply, ReplyStatus, Request
from ..stream.answers import log_entry
from ..stream.live_stream import LiveStream
from ..stream.records import Kind
from ..workers.changes import content_digest
from ..workers.lease import WorkerLease
from ..workers.questions import QUESTIONS
from ..workers.quotas import Quotas
from ..workers.replies import done_reply, error_reply
from ..workers.size_limits import SizeLimits

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
_NOT_APPLIED = Reply(ReplyStatus.DONE)


class Served(NamedTuple):
    """What a stream did in one piece of work.

    Attributes:
        replies: to the first requests, one or more.
        records: packed, of the changes among them.
        steps: seconds and answer of each new observe.
        log: entry of each new observe.
    """

    replies: list[Reply]
    records: list[bytes]
    steps: list[tuple[float, bytes]]
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

    def serve(self, live: LiveStream, requests: list[Request], until: float) -> Served:
        """Serve requests until a time, at least one of them."""
        served = Served([], [], [], [])
        for request in requests:
            served.replies.append(self._serve_one(live, request, served))
            if time.monotonic() >= until:
                break
        return served

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
                served.steps.append((time.perf_counter() - start, record.answer))
                if self._logs_decisions:
                    served.log.append(log_entry(record, live.engine.classes, request.image_ref, request.thumbnail))
        except ProtoDCSError as problem:
            return error_reply(problem)
        served.records.append(record.pack())
        return done_reply(record)


# What is served on the stream in memory, without anything to wait for.
IN_MEMORY = frozenset({*_CHANGES, *_LOOKUPS, *QUESTIONS})

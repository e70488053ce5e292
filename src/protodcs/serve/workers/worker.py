"""A worker: it holds streams in memory, writes every change to the journal, and replies when the change is durable.

The engine computes ahead of the journal, so that many requests share one round trip to the store. If a write fails, the
stream in memory is discarded and loaded again from the store. A worker never replies to a change that is not durable,
and never uses its memory after its lease may have ended.
"""

import asyncio
import heapq
import itertools
import logging
import secrets
import struct
import time
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple, TypeVar
from weakref import WeakValueDictionary

import numpy as np
from prometheus_client.core import Metric

from ...core.prototypes import Prototypes
from ...errors import (
    AnswerExpiredError,
    ConfigError,
    FencedError,
    HeldError,
    IdempotencyKeyError,
    InputError,
    ProtoDCSError,
    StateError,
    StoreError,
    UnknownClassError,
    UnknownClusterError,
    UnknownSampleError,
    UnknownSnapshotError,
    UnknownStreamError,
    UsageError,
)
from .. import guard
from ..access import audit
from ..guard import Event
from ..log.entries import LogEntry, Range
from ..log.notices import Notice, NoticeMaker
from ..messages import Action, Outcome, Reply, Request, internal_error
from ..settings import ServeConfig, classes_of, cost_limits_of
from ..store.base import AcquiredStream, Batch, Checkpoint, ListedStream, Store, Takeover
from ..stream.answers import log_entry
from ..stream.cost import check_cost, estimate, has_estimate
from ..stream.idempotency import Answer, Limits, digest_of
from ..stream.live_stream import LiveStream, StreamSpec, check_classes, check_state, imported_state
from ..stream.records import DIGEST_BYTES, Kind, Record
from ..stream.shared import unpack_prototypes
from ..telemetry import logs, traces
from ..telemetry.metrics import WorkerMetrics
from .decision_log import DecisionLog
from .group_commit import GroupCommit, Journal
from .quotas import QuotaError, Quotas
from .ring import Ring
from .stream_statistics import StreamStatistics

_log = logging.getLogger(__name__)

_CHANGES = {
    Action.OBSERVE: Kind.OBSERVE,
    Action.FREEZE: Kind.FREEZE,
    Action.UNFREEZE: Kind.UNFREEZE,
    Action.RESET: Kind.RESET,
    Action.ADD_CLASS: Kind.ADD_CLASS,
    Action.REMOVE_CLASS: Kind.REMOVE_CLASS,
    Action.FEEDBACK: Kind.FEEDBACK,
}
# Changes that need room in the store. The others need little, or free some.
_GROWING = (Kind.OBSERVE, Kind.ADD_CLASS, Kind.FEEDBACK)
# Changes that may take seconds, so that they run in a thread.
_LONG = (Kind.RESTORE, Kind.EDIT_CLUSTERS)
# Was this change applied before? Asked before a costly step.
_LOOKUPS = {Action.LOOKUP: Kind.OBSERVE, Action.LOOKUP_CLASS: Kind.ADD_CLASS}
# How often a worker looks which streams need a snapshot or should be unloaded, in seconds.
_ROUND = 1.0
# After so many leases a worker that stands in for another sends callers there again.
_STANDING_IN = 10
# Number of recent loads whose times a worker remembers.
_LOAD_TIMES = 1000
# A worker computes for so long before other tasks of its event loop get a turn, in seconds.
_SLICE = 0.001
# So many tasks with new work start in the next turn. Those for which there is no time left wait again.
_STARTS = 16
# A stream whose slowest step, or a step on average, may take longer is computed in a thread. Milliseconds, estimated.
_SLOW_STEP, _SLOW_MEAN_STEP = 100.0, 2.0
# So is what reads more bytes.
_LARGE = 4 * 2**20
_THREADS = 2
# So long a call waits for streams that are being loaded or have slow steps, in seconds: if other streams share the call
# and have their replies, and if none does.
_SHARED_WAIT, _ALONE_WAIT = 0.02, 0.5
# A result that nobody asked for is kept for so long, in seconds.
_RESULT_SECONDS = 60.0

T = TypeVar("T")
_Waiting = list[tuple[int, "asyncio.Future[None]"]]
_Signature = tuple[tuple[str, str, int, bytes], ...]


@dataclass(slots=True)
class _LoadedStream:
    """A stream in memory; when it was loaded, last used and last written whole, by the monotonic clock."""

    live: LiveStream
    journal: Journal = field(default_factory=Journal)
    loaded_at: float = field(default_factory=time.monotonic)
    used: float = field(default_factory=time.monotonic)
    written: float = field(default_factory=time.monotonic)
    # Bytes of the records behind the newest snapshot, and where that one ends, be it durable or on its way.
    journal_bytes: int = 0
    snapshot_end: int = field(init=False)
    # Held while a snapshot is saved or deleted, so that two requests cannot both find its name free; and while a whole
    # state is restored, so that the journal holds few of them.
    saving: asyncio.Lock = field(default_factory=asyncio.Lock)
    # Held while `live` is read or changed, because that may happen in a thread.
    in_use: asyncio.Lock = field(default_factory=asyncio.Lock)
    _slow: bool = False
    _slow_for: tuple[Any, int] | None = None

    notice_maker: NoticeMaker = field(init=False)

    def __post_init__(self) -> None:
        self.snapshot_end = self.live.covered
        self.notice_maker = NoticeMaker(self.live.warning, self.live.latest_known)

    @property
    def unsnapshotted_records(self) -> int:
        """How many records the newest snapshot does not cover."""
        return self.live.position - self.snapshot_end

    @property
    def slow(self) -> bool:
        """Whether a step of the stream may block the event loop for too long."""
        engine = self.live.engine
        config, classes = engine.config, len(engine.classes)
        if self._slow_for is None or self._slow_for[0] is not config or self._slow_for[1] != classes:
            self._slow, self._slow_for = _is_slow(self.live), (config, classes)
        return self._slow


@dataclass(slots=True)
class _Damage:
    """Why a stream cannot be loaded, and how often this was tried."""

    problem: str
    failures: int = 0


class _Slice(NamedTuple):
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


class Worker:
    """Holds streams loaded and serves requests on them. All its functions are called from one event loop.

    Args:
        name: which of the workers this is; its successor after a crash has the same one.
        store: where the streams are kept.
        config: the settings of the service.
    """

    def __init__(self, name: str, store: Store, config: ServeConfig):
        self.name = name
        self.incarnation = secrets.token_hex(8)
        self._store = store
        self._config = config
        self.counted = WorkerMetrics(guards=guard.NAMES)
        self._statistics = StreamStatistics()
        self._audit = audit.AuditLog(config.audit)
        self._commits = GroupCommit(store, config.store_connect_timeout, self.counted)
        self._quotas = Quotas(store, config)
        self._streams: OrderedDict[str, _LoadedStream] = OrderedDict()
        self._busy: dict[str, asyncio.Task[Any]] = {}
        self._damaged: dict[str, _Damage] = {}
        self._shared: WeakValueDictionary[str, Prototypes] = WeakValueDictionary()
        self._ring: Ring | None = None
        self._refusal: Reply | None = None
        self._renewed = -float("inf")
        # The store's clock minus the monotonic clock of this process.
        self._clock_offset = 0.0
        # The store that the streams in memory were read from.
        self._generation = store.generation
        self._superseded = False
        # How often the memory of all streams was discarded.
        self._discards = 0
        # Called as soon as records are durable: with their stream, the position of the first one, and whether there
        # are notices.
        self.on_commit: Callable[[str, int, bool], None] | None = None
        self._limits = Limits.of(config)
        self._decision_log = DecisionLog(store, config)
        self._tasks: list[asyncio.Task[None]] = []
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="state")
        # All slow streams share few threads, so that they leave cores to the other streams.
        self._slow_threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="slow streams")
        # Work that a call did not wait for, and since when, by stream and requests.
        self._unfinished: dict[str, dict[_Signature, tuple[asyncio.Task[list[Reply]], float]]] = {}
        # When this turn of the event loop has computed for long enough; None before it computes.
        self._turn_ends: float | None = None
        # Those who wait for a turn, by their place: with new work, and with work that goes on.
        self._waiting: _Waiting = []
        self._going_on: _Waiting = []
        self._places = itertools.count()
        self.loads = 0
        self._load_times: deque[float] = deque(maxlen=_LOAD_TIMES)

    # Start and stop.

    async def start(self) -> None:
        """Take over the lease from an earlier incarnation, and begin to work."""
        await self._renew(takes_over=True)
        await self._read_members()
        self._lease = asyncio.create_task(self._keep_lease())
        trimming = self._decision_log.trim_forever(self._incarnations)
        works = (self._commits.run(), self._maintain(), self._quotas.run(), trimming)
        self._tasks = [self._lease, *(asyncio.create_task(work) for work in works)]

    async def drain(self, refusal: Reply) -> None:
        """Reply to every further request with `refusal`, unload all streams, and give up the lease."""
        self._refusal = refusal
        while self._streams or self._busy:
            for stream in list(self._streams):
                self._begin_unload(stream)
            await asyncio.gather(*self._busy.values(), return_exceptions=True)
        # From here on nobody renews the lease, or it would come back after it was given up.
        self._lease.cancel()
        with suppress(StoreError):
            await self._store.resign(self.name, self.incarnation)

    async def close(self) -> None:
        """Stop working. What is loaded stays as it is in the store."""
        unfinished = [work for works in self._unfinished.values() for work, _ in works.values()]
        tasks = [*self._tasks, *self._busy.values(), *unfinished]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for pool in (self._threads, self._slow_threads):
            pool.shutdown(wait=False, cancel_futures=True)
        await self._store.close()

    def arrange(self, workers: Iterable[str]) -> None:
        """Take note of who the workers are now, and hand over the streams that belong to others."""
        self._ring = Ring(workers)
        if not self._ring.workers:
            self._ring = None
            return
        for stream in list(self._streams):
            if self._ring.first(stream) != self.name:
                self._begin_unload(stream)
        # Another worker may delete or restore the others.
        self._damaged = {
            stream: damage for stream, damage in self._damaged.items() if self._ring.first(stream) == self.name
        }

    async def list_streams(self, tenant: str, after: str | None, limit: int) -> list[ListedStream]:
        """Return streams of a tenant after an id, in the order of their ids."""
        return await self._store.list_streams(tenant, after, limit)

    async def count_streams(self, tenant: str) -> int:
        """Return how many streams a tenant has."""
        return await self._store.count_streams(tenant)

    async def session_secret(self) -> bytes:
        """Return the secret that signs the sessions of browsers. It is made once for each store."""
        return await self._store.add_document("secret", "sessions", secrets.token_bytes(32))

    def facts(self) -> dict[str, Any]:
        """Numbers for monitoring, JSON-ready."""
        return {
            "worker": self.name,
            "incarnation": self.incarnation,
            "loaded": len(self._streams),
            "loads": self.loads,
            "load_milliseconds": _quantiles(self._load_times),
            "commits": self._commits.groups,
            "writes": self._commits.writes,
            "draining": self._refusal is not None,
            "store_silence_seconds": self.counted.silence,
        }

    def metrics(self) -> list[Metric]:
        """The same and more, for Prometheus."""
        live = {stream: loaded.live for stream, loaded in self._streams.items()}
        behind = [stream.position - stream.covered for stream in live.values()]
        gauges = {
            "protodcs_worker_loaded_streams": len(live),
            "protodcs_worker_quarantined_streams": sum(map(self._is_quarantined, self._damaged)),
            "protodcs_worker_queued_writes": self._commits.queued,
            "protodcs_worker_unsnapshotted_records": sum(behind),
            "protodcs_worker_unsnapshotted_records_max": max(behind, default=0),
        }
        # Nobody may look at an engine that works in a thread.
        self._statistics.update(
            {name: found.live for name, found in self._streams.items() if not found.in_use.locked()}
        )
        return self.counted.families(gauges, self._statistics.families())

    # Requests.

    async def handle(self, requests: list[Request]) -> list[Reply]:
        """Serve requests; those on one stream in their order, and after one that is not final none behind it."""
        if self._ring is not None and self.name not in self._ring.workers:
            return [Reply(Outcome.MOVED, self._ring.first(request.stream)) for request in requests]
        if self._refusal is not None:
            return [self._refusal] * len(requests)
        if self._superseded:
            return [_SUPERSEDED] * len(requests)
        groups: dict[str, list[int]] = {}
        for place, request in enumerate(requests):
            groups.setdefault(request.stream, []).append(place)
        spans = [request.trace for request in requests if request.trace]
        # Without a task for it. If the caller gives up, such a run can be cancelled safely: it works in no thread.
        if len(groups) == 1 and self._is_ready(requests[0].stream) and not any(r.action in _SPECIAL for r in requests):
            with traces.shared_span("worker", spans, requests=len(requests), streams=1):
                try:
                    return await self._serve(requests[0].stream, requests)
                except Exception as problem:
                    return self._failed(problem, requests)
        replies: list[Reply] = [_LATER] * len(requests)
        with traces.shared_span("worker", spans, requests=len(requests), streams=len(groups)):
            asked = {stream: [requests[place] for place in places] for stream, places in groups.items()}
            works = {stream: self._work_on(some) for stream, some in asked.items()}
            await self._wait_for(works)
        for stream, places in groups.items():
            for place, answer in zip(places, self._result(works[stream], asked[stream]), strict=True):
                replies[place] = answer
        return replies

    def _work_on(self, requests: list[Request]) -> "asyncio.Task[list[Reply]]":
        """Begin to serve requests on one stream, or go on with what an earlier call of the same requests began."""
        stream = requests[0].stream
        works = self._unfinished.get(stream)
        if works is not None and (found := works.pop(_signature(requests), None)) is not None:
            return found[0]
        return asyncio.create_task(self._serve(stream, requests))

    def _is_ready(self, stream: str) -> bool:
        """Whether a stream is loaded and its steps are short."""
        return stream in self._streams and not self._streams[stream].slow and stream not in self._unfinished

    async def _wait_for(self, works: "dict[str, asyncio.Task[list[Reply]]]") -> None:
        """Wait for the work on some streams, but only shortly for those that take long: others need the replies."""
        ready = [work for stream, work in works.items() if self._is_ready(stream)]
        if ready:
            await asyncio.wait(ready)
        others = [work for work in works.values() if not work.done()]
        if others:
            await asyncio.wait(others, timeout=_SHARED_WAIT if ready else _ALONE_WAIT)

    def _result(self, work: "asyncio.Task[list[Reply]]", requests: list[Request]) -> list[Reply]:
        if not work.done():
            works = self._unfinished.setdefault(requests[0].stream, {})
            works[_signature(requests)] = work, time.monotonic()
            return [_BUSY] * len(requests)
        problem = work.exception()
        if problem is None:
            return work.result()
        return self._failed(problem, requests)

    def _failed(self, problem: BaseException, requests: list[Request]) -> list[Reply]:
        _log.error("a request failed", exc_info=problem)
        return [internal_error(problem)] * len(requests)

    async def _serve(self, stream: str, requests: list[Request]) -> list[Reply]:
        """Serve requests on one stream, in runs of those that need not wait for one another."""
        replies: list[Reply] = []
        if requests[0].take_from:
            # If this fails, the requests get the error.
            with suppress(ProtoDCSError):
                await self._loaded(stream, requests[0].stand_in, requests[0].take_from)
        while len(replies) < len(requests):
            rest = requests[len(replies) :]
            special = _SPECIAL.get(rest[0].action)
            if special is not None:
                replies.append(await self._as_reply(special(self, rest[0])))
            else:
                run = next((at for at, request in enumerate(rest) if request.action in _SPECIAL), len(rest))
                replies += await self._run(stream, rest[:run])
            if not replies[-1].outcome.final:
                replies += [_LATER] * (len(requests) - len(replies))
        return replies

    async def _run(self, stream: str, requests: list[Request]) -> list[Reply]:
        """Serve changes and questions on the stream in memory, in slices. Reply after all changes are durable."""
        replies: list[Reply] = []
        events: list[Event] = []
        thumbnails: list[LogEntry] = []
        last: _LoadedStream | None = None
        try:
            while len(replies) < len(requests):
                await self._wait_turn(goes_on=last is not None)
                # Again for each slice: the stream may have been unloaded, deleted or lost in the meantime.
                try:
                    loaded = await self._acquire(stream, requests[0].stand_in)
                except ProtoDCSError as problem:
                    replies += [_error_reply(problem)] * (len(requests) - len(replies))
                    break
                try:
                    if last is not None and last is not loaded:
                        # If the slices before are lost, this one must not overtake them.
                        await last.journal.wait_durable()
                    last = loaded
                    done, acted = await self._work(stream, loaded, requests[len(replies) :], thumbnails)
                    replies += done
                    events += acted
                finally:
                    loaded.in_use.release()
            if last is not None:
                await last.journal.wait_durable()
        except (FencedError, StoreError) as problem:
            if last is not None:
                self._drop(stream, last)
            return [Reply(Outcome.LATER, str(problem))] * len(requests)
        if last is not None:
            self._decision_log.write_thumbnails(stream, last.live.incarnation, thumbnails)
        await self._report_guard(stream, events)
        return replies

    async def _work(
        self, stream: str, loaded: _LoadedStream, requests: list[Request], thumbnails: list[LogEntry]
    ) -> tuple[list[Reply], list[Event]]:
        """Serve the first requests, until the turn ends, and put their records into the journal's queue.

        Returns the replies, and what the guard did. Log entries with thumbnails are added to `thumbnails`.
        """
        first = loaded.live.position
        try:
            done = await self._compute(loaded, partial(self._steps, loaded.live, requests, self._turn()))
        except BaseException:
            # The engine may be torn, and is ahead of its journal.
            loaded.journal.broken = StoreError("the stream was interrupted while it learned")
            raise
        loaded.used = time.monotonic()
        for seconds, answer in done.steps:
            self.counted.stepped(seconds, answer)
        events = loaded.live.events()
        if done.records:
            notices = loaded.notice_maker.make(done.log, events)
            self._put(stream, loaded, first, done.records, done.log, loaded.live.roll_backs(), notices)
            thumbnails += (entry for entry in done.log if entry.thumbnail)
        return done.replies, events

    def _steps(self, live: LiveStream, requests: list[Request], until: float) -> _Slice:
        """Serve requests until a time, at least one of them. This may run in a thread."""
        done = _Slice([], [], [], [])
        for request in requests:
            done.replies.append(self._step(live, request, done))
            if time.monotonic() >= until:
                break
        return done

    async def _report_guard(self, stream: str, events: list[Event]) -> None:
        """Count and log what the guard of a stream did. Its record is durable."""
        for event in events:
            self.counted.guarded(event.guard)
            _log.warning("a guard acted", extra=logs.with_fields(stream=stream, **event._asdict()))
            try:
                await asyncio.to_thread(self._audit.write, audit.of_guard(stream, event))
            except OSError:
                _log.exception("the audit log cannot be written")

    def _step(self, live: LiveStream, request: Request, done: _Slice) -> Reply:
        """Serve one change or question. The record of a change is added to `done`."""
        try:
            question = _QUESTIONS.get(request.action)
            if question is not None:
                return question(self, live, request.payload)
            kind = _LOOKUPS.get(request.action) or _CHANGES[request.action]
            digest = _digest(request)
            found = live.applied(kind, request.key, digest, request.row)
            if found is not None:
                return _done_reply(found, repeated=True)
            if kind is Kind.ADD_CLASS:
                engine = live.engine
                config, classes = engine.config.model_dump(), len(engine.classes) + 1
                self._check_size(request.stream, live.spec, config, classes, engine.dimension)
            if kind in _GROWING:
                self._quotas.check(request.stream)
            if request.action in _LOOKUPS:
                return _NOT_APPLIED
            start = time.perf_counter()
            record = live.change(kind, request.key, request.payload, self._now(), digest, request.row)
            if kind is Kind.OBSERVE:
                done.steps.append((time.perf_counter() - start, record.answer))
                if self._decision_log.is_on:
                    done.log.append(log_entry(record, live.engine.classes, request.image_ref, request.thumbnail))
        except ProtoDCSError as problem:
            return _error_reply(problem)
        done.records.append(record.pack())
        return _done_reply(record)

    def _check_size(self, stream: str, spec: StreamSpec, config: dict[str, Any], classes: int, dimension: int) -> None:
        """Raise an error if a stream may not have these settings and so many classes."""
        check_classes(classes, classes_of(self._config, stream))
        limits = cost_limits_of(self._config, stream)
        check_cost(spec.settings(config), classes, dimension, spec.guard, limits)

    # Long work.

    async def _wait_turn(self, goes_on: bool = False) -> None:
        """Wait until a turn of the event loop has time left to compute.

        Args:
            goes_on: this is no new work: it has computed in an earlier turn. It waits apart from new work, so that
                short work does not wait for long work.
        """
        waiting = self._going_on if goes_on else self._waiting
        must_wait, place = bool(waiting), next(self._places)
        while must_wait or time.monotonic() >= self._turn():
            turn = asyncio.get_running_loop().create_future()
            heapq.heappush(waiting, (place, turn))
            try:
                await turn
            finally:
                # Even if it is cancelled: the end of this turn starts the next ones that wait.
                self._turn()
            if goes_on:
                # Even if new work took all of the time, or it would never end.
                return
            must_wait = False

    def _turn(self) -> float:
        """Return when to stop computing in this turn of the event loop."""
        if self._turn_ends is None:
            self._turn_ends = time.monotonic() + _SLICE
            # This runs at the beginning of the next turn.
            asyncio.get_running_loop().call_soon(self._end_turn)
        return self._turn_ends

    def _end_turn(self) -> None:
        self._turn_ends = None
        _start(self._waiting, _STARTS)
        _start(self._going_on, 1)

    async def _compute(self, loaded: _LoadedStream, work: Callable[[], T], long: bool = False) -> T:
        """Work on a stream that nobody else uses: in a thread if the work, or any step of the stream, can take long."""
        if not (long or loaded.slow):
            return work()
        return await self._in_thread(work, self._slow_threads if loaded.slow else None)

    async def _in_thread(self, work: Callable[[], T], pool: ThreadPoolExecutor | None = None) -> T:
        return await asyncio.get_running_loop().run_in_executor(pool or self._threads, work)

    # Questions that the stream in memory answers.

    def _peek(self, live: LiveStream, payload: bytes) -> Reply:
        return Reply(Outcome.DONE, answer=live.peek(payload))

    def _explain(self, live: LiveStream, payload: bytes) -> Reply:
        return Reply(Outcome.DONE, facts=live.explain(payload))

    def _review(self, live: LiveStream, payload: bytes) -> Reply:
        return Reply(Outcome.DONE, facts={"positions": live.review(int(payload))})

    def _explain_sample(self, live: LiveStream, payload: bytes) -> Reply:
        return Reply(Outcome.DONE, facts=live.explain_sample(int(payload)))

    def _list_clusters(self, live: LiveStream, _: bytes) -> Reply:
        return Reply(Outcome.DONE, facts=live.clusters())

    def _export(self, live: LiveStream, _: bytes) -> Reply:
        return Reply(Outcome.DONE, answer=live.engine.snapshot(), facts={"etag": live.etag})

    def _status(self, live: LiveStream, _: bytes) -> Reply:
        stats = live.engine.stats()
        facts = {
            **{name: stats.pop(name) for name in ("method", "sequence")},
            "classes": list(live.engine.classes),
            "created": live.created,
            **live.summary()._asdict(),
            "worker": self.name,
            "incarnation": live.incarnation,
            "epoch": live.epoch,
            "position": live.position,
            "snapshot_position": live.covered,
            "replayed_differently": live.different,
            "guard": {"state": "off"} if live.guard is None else live.guard.status(),
            "stats": {name: value for name, value in stats.items() if name not in ("classes", "frozen")},
        }
        return Reply(Outcome.DONE, facts=facts)

    async def _as_reply(self, answer: Any) -> Reply:
        try:
            return await answer
        except ProtoDCSError as problem:
            return _error_reply(problem)

    # What takes more than the stream in memory.

    async def _create(self, request: Request) -> Reply:
        spec = StreamSpec.unpack(request.payload)
        await self._in_thread(partial(self._check_new, request, spec))
        # Before anything is put: prototypes that no stream uses stay for an hour.
        found = await self._created(request.stream, spec)
        if found is not None:
            return found
        self._quotas.check(request.stream)
        self._quotas.add(request.stream, len(request.shared))
        await self._store.put_shared(spec.prototypes, request.shared)
        try:
            return await self._begin_stream(request.stream, spec)
        except StoreError:
            # The blob may have gone meanwhile, with the last stream that used it.
            await self._store.put_shared(spec.prototypes, request.shared)
            return await self._begin_stream(request.stream, spec)

    def _check_new(self, request: Request, spec: StreamSpec) -> None:
        """Raise an error if a stream cannot be created. This runs in a thread."""
        prototypes = unpack_prototypes(request.shared)
        if prototypes.fingerprint != spec.prototypes:
            raise InputError("the prototypes of a new stream are not those that it names")
        self._check_size(request.stream, spec, spec.config, *prototypes.unit.shape)
        spec.engine(prototypes)

    async def _create_like(self, request: Request) -> Reply:
        """Create a stream as another one was, with the prototypes that it uses."""
        spec = StreamSpec.unpack((await self._store.describe(request.payload.decode())).spec)
        prototypes = await self._prototypes(spec.prototypes)
        self._check_size(request.stream, spec, spec.config, *prototypes.unit.shape)
        found = await self._created(request.stream, spec)
        if found is not None:
            return found
        self._quotas.check(request.stream)
        return await self._begin_stream(request.stream, spec)

    async def _begin_stream(self, stream: str, spec: StreamSpec) -> Reply:
        packed = spec.pack()
        created = await self._store.create(stream, packed, spec.prototypes)
        if created:
            self._damaged.pop(stream, None)
            self._quotas.add(stream, len(packed))
        found = await self._created(stream, spec)
        if found is None:
            raise UnknownStreamError(f"the stream {stream!r} was deleted as soon as it was created")
        return found._replace(repeated=found.repeated and not created)

    async def _created(self, stream: str, spec: StreamSpec) -> Reply | None:
        """Return the reply for a stream that exists already, or None if there is none."""
        try:
            found = await self._store.describe(stream)
        except UnknownStreamError:
            return None
        if found.spec != spec.pack():
            message = f"the stream {stream!r} already exists with different settings"
            return Reply(Outcome.CONFLICT, message, code="stream_exists")
        facts = {**spec.model_dump(), "incarnation": found.incarnation}
        return Reply(Outcome.DONE, repeated=True, facts=facts)

    async def _save_snapshot(self, request: Request) -> Reply:
        """Save the present state under a name."""
        loaded = await self._loaded(request.stream, request.stand_in)
        async with loaded.saving:
            found = await self._applied(loaded, Kind.SAVE_SNAPSHOT, request)
            if found is not None:
                return _done_reply(found, repeated=True)
            name = request.payload.decode()
            saved_before = await self._store.saved_snapshots(request.stream)
            if name not in saved_before and len(saved_before) >= self._config.max_snapshots:
                return Reply(
                    Outcome.CONFLICT,
                    f"The stream has {len(saved_before)} saved snapshots, which is the limit. Delete one first.",
                    code="too_many_snapshots",
                )
            saved = await self._store.saved_snapshot(request.stream, name) if name in saved_before else None
            # An earlier attempt at this request may have saved it before its worker died: that one stays.
            if saved is None or not _saved_by(saved, request.key):
                if saved is not None and not request.replace:
                    return Reply(
                        Outcome.CONFLICT,
                        f"The stream has a snapshot {name!r} already. Choose another name, or replace it explicitly.",
                        code="snapshot_exists",
                    )
                self._quotas.check(request.stream)
                # Taken before the wait, so that all of it is durable after the wait.
                async with loaded.in_use:
                    position = loaded.live.position
                    state = _save(await self._compute(loaded, loaded.live.state), position, request.key)
                await loaded.journal.wait_durable()
                await self._store.save_snapshot(request.stream, loaded.live.fence, name, state)
                self._quotas.add(request.stream, len(state))
            return await self._changed(loaded, Kind.SAVE_SNAPSHOT, request, request.payload)

    async def _delete_snapshot(self, request: Request) -> Reply:
        """Delete a saved snapshot."""
        loaded = await self._loaded(request.stream, request.stand_in)
        async with loaded.saving:
            found = await self._applied(loaded, Kind.DELETE_SNAPSHOT, request)
            if found is not None:
                return _done_reply(found, repeated=True)
            name = request.payload.decode()
            if name not in await self._store.saved_snapshots(request.stream):
                raise UnknownSnapshotError(f"the stream {request.stream!r} has no snapshot {name!r}")
            await self._store.delete_snapshot(request.stream, loaded.live.fence, name)
            return await self._changed(loaded, Kind.DELETE_SNAPSHOT, request, request.payload)

    async def _edit_clusters(self, request: Request) -> Reply:
        """Change the clusters of a stream. The payload says how."""
        loaded = await self._loaded(request.stream, request.stand_in)
        self._quotas.check(request.stream)
        return await self._changed(loaded, Kind.EDIT_CLUSTERS, request, request.payload)

    async def _list_snapshots(self, request: Request) -> Reply:
        # A damaged stream can be restored from these.
        with suppress(_DamagedError):
            await self._loaded(request.stream, request.stand_in)
        return Reply(Outcome.DONE, facts={"snapshots": await self._store.saved_snapshots(request.stream)})

    async def _describe_snapshot(self, request: Request) -> Reply:
        """Return what the stream would be after a roll-back. Nothing changes."""
        loaded = await self._loaded(request.stream, request.stand_in)
        live = loaded.live
        state = await self._saved_state(request, live.spec, live.engine.dimension)
        facts = await self._in_thread(partial(live.describe_state, state.state))
        return Reply(Outcome.DONE, facts={**facts, "position": state.position})

    async def _roll_back(self, request: Request) -> Reply:
        """Restore a saved snapshot; the journal goes on, so every acknowledged observe stays in it."""
        return await self._restore(request, self._saved_state)

    async def _import(self, request: Request) -> Reply:
        """Restore a state that the caller sent."""
        return await self._restore(request, self._sent_state)

    async def _restore(self, request: Request, find: "_FindState") -> Reply:
        """Restore the state that `find` returns, also if what is stored of the stream is damaged."""
        try:
            loaded = await self._loaded(request.stream, request.stand_in)
        except _DamagedError:
            self._quotas.check(request.stream)
            loaded = await self._repair(request, find)
        async with loaded.saving:
            found = await self._applied(loaded, Kind.RESTORE, request)
            if found is not None:
                return _done_reply(found, repeated=True)
            self._quotas.check(request.stream)
            found_state = await find(request, loaded.live.spec, loaded.live.engine.dimension)
            return await self._changed(loaded, Kind.RESTORE, request, found_state.state, found_state.position)

    async def _saved_state(self, request: Request, spec: StreamSpec, dimension: int) -> "_State":
        name = request.payload.decode()
        saved = await self._store.saved_snapshot(request.stream, name)
        if saved is None:
            raise UnknownSnapshotError(f"the stream {request.stream!r} has no snapshot {name!r}")
        state = _saved(saved)
        check_size = partial(self._check_size, request.stream)
        await self._in_thread(partial(check_state, state.state, spec, dimension, check_size))
        return state

    async def _sent_state(self, request: Request, spec: StreamSpec, dimension: int) -> "_State":
        check_size = partial(self._check_size, request.stream)
        return _State(await self._in_thread(partial(imported_state, request.payload, spec, dimension, check_size)))

    async def _describe(self, request: Request) -> Reply:
        """Return which incarnation of a stream exists and what it was created with, without loading it."""
        found = await self._store.describe(request.stream)
        return Reply(Outcome.DONE, answer=found.spec, facts={"incarnation": found.incarnation})

    async def _check_health(self, _: Request) -> Reply:
        """Reply if this worker can serve: it reaches the store and has its lease."""
        await self._renew()
        return Reply(Outcome.DONE)

    async def _delete(self, request: Request) -> Reply:
        """Delete the incarnation of a stream that the request names; if it does not exist, it is gone already."""
        loaded = None
        try:
            loaded = await self._loaded(request.stream, request.stand_in)
            fence, incarnation = loaded.live.fence, loaded.live.incarnation
        except UnknownStreamError:
            return Reply(Outcome.DONE, repeated=True)
        except _DamagedError:
            held = await self._store.acquire(request.stream, self.name, self.incarnation)
            fence, incarnation = held.fence, held.incarnation
        if incarnation.encode() != request.payload:
            return Reply(Outcome.DONE, repeated=True)
        if loaded is not None:
            with suppress(FencedError, StoreError):
                await loaded.journal.wait_durable()
            self._drop(request.stream, loaded)
            # A snapshot that is still queued is not needed any more.
            loaded.journal.broken = loaded.journal.broken or FencedError(f"the stream {request.stream!r} was deleted")
        await self._store.delete(request.stream, fence)
        await self._decision_log.delete_stream(request.stream)
        self._damaged.pop(request.stream, None)
        return Reply(Outcome.DONE)

    async def _applied(self, loaded: _LoadedStream, kind: Kind, request: Request) -> Answer | None:
        """Return the answer to a request that was applied before, as soon as it is durable."""
        async with loaded.in_use:
            found = loaded.live.applied(kind, request.key, _digest(request))
        if found is not None:
            await loaded.journal.wait_durable()
        return found

    async def _changed(
        self, loaded: _LoadedStream, kind: Kind, request: Request, payload: bytes, back_to: int | None = None
    ) -> Reply:
        """Apply one change and wait until it is durable. If a retry was faster, only wait.

        If the change restores an earlier state, `back_to` is the position that the state belongs to.
        """
        live, digest, long_journal = loaded.live, _digest(request), False
        async with loaded.in_use:
            found = live.applied(kind, request.key, digest)
            if found is None:
                if request.if_match and live.etag not in request.if_match:
                    raise _PreconditionError(f"The ETag of the state is {live.etag}. Read the state again.")
                change = partial(live.change, kind, request.key, payload, self._now(), digest)
                record = await self._compute(loaded, change, long=kind in _LONG)
                roll_backs = [] if back_to is None else [(back_to, record.position)]
                long_journal = self._put(
                    request.stream, loaded, record.position, [record.pack()], roll_backs=roll_backs
                )
        try:
            await loaded.journal.wait_durable()
            if long_journal:
                # The record may be a whole state. Wait for the snapshot that removes it from the journal. If that one
                # cannot be written, the record is durable all the same.
                with suppress(StoreError):
                    await loaded.journal.settle_snapshot()
        except (FencedError, StoreError):
            self._drop(request.stream, loaded)
            raise
        return _done_reply(record) if found is None else _done_reply(found, repeated=True)

    def _put(
        self,
        stream: str,
        loaded: _LoadedStream,
        position: int,
        records: list[bytes],
        log: Sequence[LogEntry] = (),
        roll_backs: Sequence[Range] = (),
        notices: Sequence[Notice] = (),
    ) -> bool:
        """Queue records. If the journal has become long, also queue a snapshot and return True."""
        summary, fence = loaded.live.summary().pack(), loaded.live.fence
        batch = Batch(stream, fence, position, records, summary, log, roll_backs, notices)
        written = None if self.on_commit is None else partial(self.on_commit, stream, position, bool(notices))
        self._commits.put(loaded.journal, batch, written)
        size = sum(map(len, records))
        loaded.journal_bytes += size
        self._quotas.add(stream, size)
        config = self._config
        if loaded.unsnapshotted_records < config.snapshot_records and loaded.journal_bytes < config.snapshot_bytes:
            return False
        self._queue_snapshot(stream, loaded)
        return True

    # Load, snapshot, unload.

    async def _loaded(self, stream: str, stand_in: bool, take_from: str = "") -> _LoadedStream:
        """Return the stream in memory; load it if this worker may, and take it from the worker `take_from`."""
        # Once, and not again after a load: a worker that cannot renew its lease would load without end.
        self._check_lease()
        while True:
            loaded = self._streams.get(stream)
            if loaded is not None and loaded.journal.broken is None:
                self._streams.move_to_end(stream)
                return loaded
            if stream in self._busy:
                # Another call loads or unloads it; that call reports the result.
                await asyncio.wait([self._busy[stream]])
                continue
            if self._refusal is not None:
                raise _RefusedError(self._refusal)
            if self._ring is not None:
                first = self._ring.first(stream)
                if self.name not in (self._ring.workers if stand_in else (first,)):
                    raise _MovedError(first)
            if self._is_quarantined(stream):
                raise _QuarantinedError(self._damaged[stream].problem)
            task = self._begin(stream, self._load_stream(stream, take_from))
            await asyncio.wait([task])
            task.result()

    async def _acquire(self, stream: str, stand_in: bool) -> _LoadedStream:
        """Return the stream in memory while nobody else uses it. Release its lock `in_use` afterwards."""
        checked = False
        while True:
            loaded = await self._loaded(stream, stand_in)
            await loaded.in_use.acquire()
            if not checked:
                # The wait may have been longer than the lease.
                self._check_lease()
                checked = True
            if self._streams.get(stream) is loaded and loaded.journal.broken is None:
                return loaded
            loaded.in_use.release()

    def _begin(self, stream: str, work: Any) -> "asyncio.Task[Any]":
        """Exclude other loads and unloads of a stream until the work is done."""
        task = self._busy[stream] = asyncio.create_task(work)
        task.add_done_callback(lambda done: self._ended(stream, done))
        return task

    def _ended(self, stream: str, task: "asyncio.Task[Any]") -> None:
        if self._busy.get(stream) is task:
            del self._busy[stream]
        if not task.cancelled():
            task.exception()

    async def _load_stream(self, stream: str, take_from: str) -> None:
        start, generation, discards = time.perf_counter(), self._store.generation, self._discards
        takeover = Takeover(take_from, _STANDING_IN * self._config.lease_seconds) if take_from else None
        held = await self._store.acquire(stream, self.name, self.incarnation, takeover)
        if take_from:
            self.counted.took_over()
            fields = logs.with_fields(stream=stream, holder=take_from)
            _log.warning("a stream was taken over", extra=fields)
        try:
            with _unusable():
                spec = StreamSpec.unpack(held.spec)
            prototypes = await self._prototypes(spec.prototypes)
            with _unusable():
                live = await self._load(held, prototypes)
        except _DamagedError as problem:
            raise self._damage(stream, problem) from None
        # Others may have changed the stream meanwhile.
        if (self._store.generation, self._discards) != (generation, discards):
            raise StoreError("The lease or the store was lost while the stream was loaded. Send the request again.")
        self._damaged.pop(stream, None)
        self._streams[stream] = _LoadedStream(live, journal_bytes=sum(map(len, held.tail)))
        self.loads += 1
        self._load_times.append(time.perf_counter() - start)
        self.counted.loaded(self._load_times[-1])
        self._make_room()

    def _damage(self, stream: str, problem: "_DamagedError") -> "_DamagedError":
        """Count a load that failed; quarantine the stream after some of them."""
        damage = self._damaged.setdefault(stream, _Damage(""))
        damage.failures += 1
        reason = str(problem).rstrip(".")
        damage.problem = (
            f"The stored data of the stream {stream!r} is damaged: {reason}. Delete the stream or restore a saved "
            "snapshot."
        )
        if damage.failures == self._config.quarantine_failures:
            fields = logs.with_fields(stream=stream, failures=damage.failures)
            _log.error("a damaged stream is quarantined", extra=fields, exc_info=problem.__cause__)
        return _DamagedError(damage.problem)

    def _is_quarantined(self, stream: str) -> bool:
        """Whether a stream is damaged and not loaded again."""
        damage = self._damaged.get(stream)
        return damage is not None and damage.failures >= self._config.quarantine_failures

    async def _repair(self, request: Request, find: "_FindState") -> _LoadedStream:
        """Load a damaged stream with the state that `find` returns."""
        stream = request.stream
        while stream in self._busy:
            await asyncio.wait([self._busy[stream]])
        if stream in self._streams:
            return self._streams[stream]
        task = self._begin(stream, self._replace(request, find))
        await asyncio.wait([task])
        loaded: _LoadedStream = task.result()
        return loaded

    async def _replace(self, request: Request, find: "_FindState") -> _LoadedStream:
        """Replace the stored data of a stream: a checkpoint at the end of its journal covers all that is damaged."""
        stream = request.stream
        held = await self._store.acquire(stream, self.name, self.incarnation)
        with _unusable():
            spec = StreamSpec.unpack(held.spec)
        prototypes = await self._prototypes(spec.prototypes)
        found = await find(request, spec, prototypes.unit.shape[1])
        repaired = partial(LiveStream.repaired, held, prototypes, self._limits, found.state)
        loaded = _LoadedStream(await self._in_thread(repaired))
        self._queue_snapshot(stream, loaded)
        await loaded.journal.settle_snapshot()
        self._damaged.pop(stream, None)
        self._streams[stream] = loaded
        self._make_room()
        return loaded

    async def _load(self, held: AcquiredStream, prototypes: Prototypes) -> LiveStream:
        """Restore the snapshot of a stream, and replay the records behind it in slices."""
        restore = partial(LiveStream, replace(held, tail=[]), prototypes, self._limits)
        large = len(held.snapshot or b"") + prototypes.unit.nbytes > _LARGE
        loaded = _LoadedStream(await self._in_thread(restore) if large else restore())
        at = 0
        while at < len(held.tail):
            await self._wait_turn(goes_on=at > 0)
            at = await self._compute(loaded, partial(_replay, loaded.live, held.tail, at, self._turn()))
        # The worker that wrote the records has reported these.
        loaded.live.events()
        loaded.live.roll_backs()
        return loaded.live

    def _make_room(self) -> None:
        """Unload the streams that were not used for longest, if too many are loaded."""
        too_many = len(self._streams) - self._config.max_loaded_streams
        for stream in list(itertools.islice(self._streams, max(0, too_many))):
            self._begin_unload(stream)

    async def _prototypes(self, name: str) -> Prototypes:
        found = self._shared.get(name)
        if found is None:
            data = await self._store.get_shared(name)
            unpack = partial(unpack_prototypes, data)
            with _unusable():
                found = await self._in_thread(unpack) if len(data) > _LARGE else unpack()
            self._shared[name] = found
        return found

    def _queue_snapshot(self, stream: str, loaded: _LoadedStream) -> None:
        """Queue a snapshot of all of a stream. It covers the records that were put before it is built."""
        live = loaded.live

        async def build() -> Checkpoint:
            async with loaded.in_use:
                snapshot = await self._compute(loaded, live.snapshot)
                loaded.snapshot_end, loaded.journal_bytes, loaded.written = live.position, 0, time.monotonic()
                return Checkpoint(stream, live.fence, live.position, snapshot)

        def durable(checkpoint: Checkpoint) -> None:
            live.covered = checkpoint.position

        self._commits.put_snapshot(loaded.journal, stream, build, durable)

    def _begin_unload(self, stream: str) -> None:
        """Begin to let go of a stream, unless it is on its way already."""
        if stream not in self._busy and stream in self._streams:
            self._begin(stream, self._unload(stream, self._streams.pop(stream)))

    async def _unload(self, stream: str, loaded: _LoadedStream) -> None:
        async with loaded.in_use:
            if loaded.unsnapshotted_records > self._config.unload_records:
                self._queue_snapshot(stream, loaded)
        # Without the snapshot, the next worker replays the records.
        with suppress(StoreError):
            await loaded.journal.settle_snapshot()
        await loaded.journal.wait_durable()
        await self._store.release(stream, loaded.live.fence)
        self.counted.unloaded()

    def _drop(self, stream: str, loaded: _LoadedStream) -> None:
        """Discard the stream in memory."""
        if self._streams.get(stream) is loaded:
            del self._streams[stream]

    async def _maintain(self) -> None:
        """Write snapshots and unload streams, by time."""
        while True:
            await asyncio.sleep(_ROUND)
            # Streams that were still loading when there were too many.
            self._make_room()
            self._forget_results()
            now = time.monotonic()
            for stream, loaded in list(self._streams.items()):
                self._maintain_stream(stream, loaded, now)

    def _forget_results(self) -> None:
        """Forget results that nobody asked for."""
        oldest = time.monotonic() - _RESULT_SECONDS
        for stream, works in list(self._unfinished.items()):
            for signature, (work, since) in list(works.items()):
                if work.done() and since < oldest:
                    del works[signature]
            if not works:
                del self._unfinished[stream]

    def _incarnations(self) -> list[tuple[str, str]]:
        """Return the loaded streams and their incarnations."""
        return [(stream, loaded.live.incarnation) for stream, loaded in self._streams.items()]

    def _maintain_stream(self, stream: str, loaded: _LoadedStream, now: float) -> None:
        if loaded.journal.broken is not None:
            self._drop(stream, loaded)
        elif loaded.in_use.locked():
            # It works in a thread; there is another round.
            return
        elif now - loaded.used > self._config.unload_seconds or self._stood_in_enough(stream, loaded, now):
            self._begin_unload(stream)
        elif now - loaded.written > self._config.snapshot_seconds and loaded.unsnapshotted_records:
            self._queue_snapshot(stream, loaded)

    def _stood_in_enough(self, stream: str, loaded: _LoadedStream, now: float) -> bool:
        """Whether it is time to see if the worker that the stream belongs to is back."""
        away = self._ring is not None and self._ring.first(stream) != self.name
        return away and now - loaded.loaded_at > _STANDING_IN * self._config.lease_seconds

    # The lease.

    async def _renew(self, takes_over: bool = False) -> None:
        before = time.monotonic()
        lease = await self._store.renew(self.name, self.incarnation, self._config.lease_seconds, takes_over)
        self._clock_offset = lease.time - time.monotonic()
        if lease.holder != self.incarnation:
            # The lease had ended, or the store lost it: others may have acquired and changed any stream.
            self._discard()
        self._check_lease()
        self._superseded = not takes_over and lease.holder not in (None, self.incarnation)
        if self._superseded:
            raise StoreError(f"another process has the lease of {self.name!r}: this one serves nothing")
        for stream, epoch in lease.taken.items():
            self._damaged.pop(stream, None)
            loaded = self._streams.get(stream)
            if loaded is not None and loaded.live.epoch < epoch:
                self._drop(stream, loaded)
        self._renewed = before
        self.counted.renewed()

    async def _read_members(self) -> None:
        """Follow the list of workers in the store, also while the controller is dead."""
        members = await self._store.members()
        if members is not None and (self._ring is None or set(members) != set(self._ring.workers)):
            self.arrange(members)

    def _check_lease(self) -> None:
        """Discard what is in memory if others may have changed it, or if the store may have lost it."""
        expired = time.monotonic() - self._renewed > self._config.lease_seconds
        if expired or self._store.generation != self._generation:
            self._discard()
            self._generation = self._store.generation

    def _discard(self) -> None:
        """Discard what is known of all streams."""
        self._discards += 1
        self._streams.clear()
        self._damaged.clear()

    def _now(self) -> float:
        """Return the time by the store's clock, in seconds since 1970."""
        return self._clock_offset + time.monotonic()

    async def _keep_lease(self) -> None:
        while True:
            try:
                await self._renew()
                await self._read_members()
            except StoreError as problem:
                self.counted.store_failed()
                _log.warning("the lease was not renewed", extra=logs.with_fields(problem=str(problem)))
            await asyncio.sleep(self._config.lease_seconds / 3)


class _MovedError(ProtoDCSError):
    """The stream belongs to another worker."""


class _DamagedError(ProtoDCSError):
    """The store can be reached, and what it holds of the stream cannot be used."""


class _PreconditionError(ProtoDCSError):
    """The state of a stream is not the one that a request expects."""


class _QuarantinedError(_DamagedError):
    """The same, and the worker does not try again."""


@contextmanager
def _unusable() -> Iterator[None]:
    """Raise every error as one of damaged data, except a lack of memory, which may pass."""
    try:
        yield
    except MemoryError:
        raise
    except Exception as problem:
        reason = str(problem) if isinstance(problem, ProtoDCSError) else repr(problem)
        raise _DamagedError(reason) from problem


class _RefusedError(ProtoDCSError):
    """A worker that drains loads no further stream."""

    def __init__(self, reply: Reply):
        super().__init__(reply.message)
        self.reply = reply


def _is_slow(live: LiveStream) -> bool:
    """Whether a step of a stream may block the event loop for too long."""
    engine = live.engine
    if not has_estimate(engine.config):
        return False
    cost = estimate(engine.config, len(engine.classes), engine.dimension, live.spec.guard)
    return cost.slowest_step > _SLOW_STEP or cost.mean_step > _SLOW_MEAN_STEP


def _start(waiting: _Waiting, most: int) -> None:
    """Start those who waited longest."""
    while waiting and most:
        _, turn = heapq.heappop(waiting)
        if not turn.done():
            turn.set_result(None)
            most -= 1


def _replay(live: LiveStream, records: list[bytes], at: int, until: float) -> int:
    """Replay records from `at` on until a time, at least one of them. Return where to go on."""
    for data in records[at:]:
        live.replay(Record.unpack(data))
        at += 1
        if time.monotonic() >= until:
            break
    return at


def _signature(requests: list[Request]) -> _Signature:
    """Return what tells requests on one stream, sent together, from others."""
    return tuple((request.action, request.key, request.row, _digest(request)) for request in requests)


def _digest(request: Request) -> bytes:
    """Return the digest of the content of a request, which a retry must repeat."""
    return request.digest or digest_of(request.action.encode(), request.payload)


class _State(NamedTuple):
    """A state to restore, and the position of the stream when it was saved; None if it comes from outside."""

    state: bytes
    position: int | None = None


# A saved snapshot begins with a digest of the idempotency key of the request that saved it, and the position.
_POSITION = struct.Struct("<Q")


def _save(state: bytes, position: int, key: str) -> bytes:
    return digest_of(key.encode()) + _POSITION.pack(position) + state


def _saved_by(saved: bytes, key: str) -> bool:
    return saved.startswith(digest_of(key.encode()))


def _saved(saved: bytes) -> _State:
    with _unusable():
        (position,) = _POSITION.unpack_from(saved, DIGEST_BYTES)
    return _State(saved[DIGEST_BYTES + _POSITION.size :], position)


def _done_reply(record: Record | Answer, repeated: bool = False) -> Reply:
    return Reply(Outcome.DONE, answer=record.answer, position=record.position, epoch=record.epoch, repeated=repeated)


def _quantiles(seconds: Iterable[float]) -> dict[str, float]:
    """The median and the 99th percentile, in milliseconds; nothing of nothing."""
    values = 1000 * np.asarray([*seconds])
    return {} if len(values) == 0 else {f"p{p}": float(np.percentile(values, p)) for p in (50, 99)}


_LATER = Reply(Outcome.LATER, "a request before this one was not served")
_BUSY = Reply(Outcome.BUSY, "the worker is still at work on this request")
_SUPERSEDED = Reply(Outcome.LATER, "another process took over from this worker")
_NOT_APPLIED = Reply(Outcome.DONE)

# The outcome of each error, and the code of the problem if the outcome alone does not say it.
_OUTCOMES: list[tuple[type[ProtoDCSError], Outcome, str]] = [
    (_MovedError, Outcome.MOVED, ""),
    (_QuarantinedError, Outcome.CONFLICT, "stream_damaged"),
    (_PreconditionError, Outcome.PRECONDITION, ""),
    (UnknownStreamError, Outcome.MISSING, ""),
    (UnknownSnapshotError, Outcome.MISSING, "snapshot_not_found"),
    (UnknownClassError, Outcome.MISSING, "class_not_found"),
    (UnknownClusterError, Outcome.MISSING, "cluster_not_found"),
    (UnknownSampleError, Outcome.MISSING, "sample_not_found"),
    (FencedError, Outcome.LATER, ""),
    (StoreError, Outcome.LATER, ""),
    (InputError, Outcome.WRONG, ""),
    (ConfigError, Outcome.WRONG, ""),
    (StateError, Outcome.WRONG, "invalid_state"),
    (IdempotencyKeyError, Outcome.CONFLICT, "idempotency_key_reused"),
    (UsageError, Outcome.CONFLICT, ""),
    (AnswerExpiredError, Outcome.EXPIRED, ""),
    (QuotaError, Outcome.OVER_QUOTA, ""),
]


def _error_reply(problem: ProtoDCSError) -> Reply:
    """What the caller is told of a problem."""
    if isinstance(problem, HeldError):
        return Reply(Outcome.HELD, problem.worker)
    if isinstance(problem, _RefusedError):
        return problem.reply
    found = next((found for found in _OUTCOMES if isinstance(problem, found[0])), None)
    return Reply(Outcome.FAILED, str(problem)) if found is None else Reply(found[1], str(problem), code=found[2])


# Returns the state that a request restores, for a stream created so and with features of this length.
_FindState = Callable[[Request, StreamSpec, int], Awaitable[_State]]

_QUESTIONS: dict[str, Callable[[Worker, LiveStream, bytes], Reply]] = {
    Action.PEEK: Worker._peek,
    Action.STATUS: Worker._status,
    Action.EXPLAIN: Worker._explain,
    Action.EXPLAIN_SAMPLE: Worker._explain_sample,
    Action.EXPORT: Worker._export,
    Action.REVIEW: Worker._review,
    Action.LIST_CLUSTERS: Worker._list_clusters,
}

_SPECIAL: dict[str, Callable[[Worker, Request], Any]] = {
    Action.CREATE: Worker._create,
    Action.CREATE_LIKE: Worker._create_like,
    Action.SAVE_SNAPSHOT: Worker._save_snapshot,
    Action.LIST_SNAPSHOTS: Worker._list_snapshots,
    Action.DESCRIBE_SNAPSHOT: Worker._describe_snapshot,
    Action.DELETE_SNAPSHOT: Worker._delete_snapshot,
    Action.EDIT_CLUSTERS: Worker._edit_clusters,
    Action.ROLLBACK: Worker._roll_back,
    Action.IMPORT: Worker._import,
    Action.DELETE: Worker._delete,
    Action.DESCRIBE: Worker._describe,
    Action.READ_LOG: lambda worker, request: worker._decision_log.read(request),
    Action.READ_EVENTS: lambda worker, request: worker._decision_log.read_events(request),
    Action.READ_THUMBNAIL: lambda worker, request: worker._decision_log.read_thumbnail(request),
    Action.PURGE_LOG: lambda worker, request: worker._decision_log.purge(request),
    Action.CHECK_HEALTH: Worker._check_health,
}

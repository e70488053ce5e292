"""A worker: it holds streams in memory, writes every change to the journal, and replies when the change is durable.

The engine computes ahead of the journal, so that many requests share one round trip to the store. If a write fails, the
stream in memory is discarded and loaded again from the store. A worker never replies to a change that is not durable,
and never uses its memory after its lease may have ended.
"""

import asyncio
import logging
import secrets
import time
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np
from prometheus_client.core import Metric

from ...diagnosis import diagnose
from ...errors import FencedError, ProtoDCSError, StoreError, UnknownStreamError
from .. import guard
from ..access import audit
from ..guard import Event
from ..messages import Action, Outcome, Reply, Request, internal_error
from ..settings import ServeConfig
from ..store.base import ListedStream, Store
from ..stream.records import Kind
from ..telemetry import logs, traces
from ..telemetry.metrics import WorkerMetrics
from .changes import Changes, content_digest
from .computing import Computing
from .creation import Creation
from .decision_log import DecisionLog
from .group_commit import GroupCommit
from .lease import WorkerLease
from .loaded_stream import LoadedStream
from .loaded_streams import LoadedStreams
from .placement import Placement
from .quotas import Quotas
from .replies import error_reply
from .size_limits import SizeLimits
from .snapshots import Snapshots
from .steps import Steps
from .stream_statistics import StreamStatistics

_log = logging.getLogger(__name__)

# How often a worker looks which streams need a snapshot or should be unloaded, in seconds.
_ROUND = 1.0
# So long a call waits for streams that are being loaded or have slow steps, in seconds: if other streams share the call
# and have their replies, and if none does.
_SHARED_WAIT, _ALONE_WAIT = 0.02, 0.5
# A result that nobody asked for is kept for so long, in seconds.
_RESULT_SECONDS = 60.0

_LATER = Reply(Outcome.LATER, "a request before this one was not served")
_BUSY = Reply(Outcome.BUSY, "the worker is still at work on this request")
_CLASS_EDITS = (Action.ADD_CLASS, Action.REMOVE_CLASS)
_SUPERSEDED = Reply(Outcome.LATER, "another process took over from this worker")

_Signature = tuple[tuple[str, str, int, bytes], ...]


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
        self._lease_seconds = config.lease_seconds
        self.counted = WorkerMetrics(guards=guard.NAMES)
        self._statistics = StreamStatistics()
        self._audit = audit.AuditLog(config.audit)
        self._commits = GroupCommit(store, config.store_connect_timeout, self.counted)
        self._quotas = Quotas(store, config)
        self._decision_log = DecisionLog(store, config)
        self._computing = Computing()
        self._lease = WorkerLease(name, self.incarnation, store, config, self.counted)
        self._changes = Changes(self._commits, self._quotas, self._computing, self._lease, config)
        self._streams = LoadedStreams(self._lease, store, config, self.counted, self._computing, self._changes)
        sizes = SizeLimits(config)
        self._steps = Steps(self._lease, self._quotas, sizes, self._decision_log.is_on)
        creation = Creation(store, self._quotas, sizes, self._streams, self._computing)
        snapshots = Snapshots(store, config, self._quotas, sizes, self._streams, self._changes, self._computing)
        # What takes more than the stream in memory.
        self._special: dict[str, Callable[[Request], Awaitable[Reply]]] = {
            Action.CREATE: creation.create,
            Action.CREATE_LIKE: creation.create_like,
            Action.FIND_VOCABULARY: creation.find_vocabulary,
            Action.PUT_VOCABULARY: creation.put_vocabulary,
            Action.SAVE_SNAPSHOT: snapshots.save,
            Action.LIST_SNAPSHOTS: snapshots.list_names,
            Action.DESCRIBE_SNAPSHOT: snapshots.describe,
            Action.DELETE_SNAPSHOT: snapshots.delete,
            Action.ROLLBACK: snapshots.roll_back,
            Action.IMPORT: snapshots.import_state,
            Action.EDIT_CLUSTERS: self._edit_clusters,
            Action.DIAGNOSE: self._diagnose,
            Action.DELETE: self._delete,
            Action.DESCRIBE: self._describe,
            Action.READ_LOG: self._decision_log.read,
            Action.READ_EVENTS: self._decision_log.read_events,
            Action.READ_THUMBNAIL: self._decision_log.read_thumbnail,
            Action.PURGE_LOG: self._decision_log.purge,
            Action.CHECK_HEALTH: self._check_health,
        }
        # One at a time: it takes a second, and others need the threads.
        self._diagnosing = asyncio.Semaphore(1)
        self._tasks: list[asyncio.Task[None]] = []
        # Work that a call did not wait for, and since when, by stream and requests.
        self._unfinished: dict[str, dict[_Signature, tuple[asyncio.Task[list[Reply]], float]]] = {}

    # Start and stop.

    async def start(self) -> None:
        """Take over the lease from an earlier incarnation, and begin to work."""
        await self._lease.renew(takes_over=True)
        self._renewals = asyncio.create_task(self._keep_lease())
        trimming = self._decision_log.trim_forever()
        works = (self._commits.run(), self._maintain(), self._quotas.run(), trimming)
        self._tasks = [self._renewals, *(asyncio.create_task(work) for work in works)]

    async def drain(self, refusal: Reply) -> None:
        """Reply to every further request with `refusal`, unload all streams, and give up the lease."""
        self._streams.refusal = refusal
        await self._streams.unload()
        # From here on nobody renews the lease, or it would come back after it was given up.
        self._renewals.cancel()
        with suppress(StoreError):
            await self._store.resign(self.name, self.incarnation)

    async def close(self) -> None:
        """Stop working. What is loaded stays as it is in the store."""
        unfinished = [work for works in self._unfinished.values() for work, _ in works.values()]
        tasks = [*self._tasks, *self._streams.busy.values(), *unfinished]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._computing.close()
        await self._store.close()

    def place(self, placement: Placement) -> None:
        """Take note of where streams belong now, and begin to unload those that belong to others."""
        self._streams.place(placement)

    async def unload(self, moves: Callable[[str], bool]) -> None:
        """Unload the streams for which `moves` is true. They should belong to others by now."""
        await self._streams.unload(moves)

    def on_commit(self, call: Callable[[str, int, bool], None]) -> None:
        """Have `call` called as soon as records are durable.

        It gets their stream, the position of the first one, and whether there are notices for webhooks.
        """
        self._changes.on_commit = call

    async def list_streams(self, tenant: str, after: str | None, limit: int) -> list[ListedStream]:
        """Return streams of a tenant after an id, in the order of their ids, with what this worker could not load."""
        failed = self._streams.failed
        listed = await self._store.list_streams(tenant, after, limit)
        return [stream._replace(problem=failed[stream.id]) if stream.id in failed else stream for stream in listed]

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
            "loaded": len(self._streams.loaded),
            "loads": self._streams.loads,
            "load_milliseconds": _quantiles(self._streams.load_times),
            "commits": self._commits.groups,
            "writes": self._commits.writes,
            "draining": self._streams.refusal is not None,
            "store_silence_seconds": self.counted.silence,
            "store_problem": self._store.problem,
        }

    def metrics(self) -> list[Metric]:
        """The same and more, for Prometheus."""
        streams = self._streams.loaded
        behind = [loaded.live.position - loaded.live.covered for loaded in streams.values()]
        gauges = {
            "protodcs_worker_loaded_streams": len(streams),
            "protodcs_worker_unloadable_streams": len(self._streams.failed),
            "protodcs_worker_queued_writes": self._commits.queued,
            "protodcs_worker_unsnapshotted_records": sum(behind),
            "protodcs_worker_unsnapshotted_records_max": max(behind, default=0),
        }
        # Nobody may look at an engine that works in a thread.
        self._statistics.update({name: found.live for name, found in streams.items() if not found.in_use.locked()})
        return self.counted.families(gauges, self._statistics.families())

    # Calls.

    async def handle(self, requests: list[Request]) -> list[Reply]:
        """Serve requests; those on one stream in their order, and after one that is not final none behind it."""
        placement = self._streams.placement
        if placement is not None and self.name not in placement.workers:
            return [Reply(Outcome.MOVED, placement.first(request.stream)) for request in requests]
        if self._streams.refusal is not None:
            return [self._streams.refusal] * len(requests)
        if self._lease.superseded:
            return [_SUPERSEDED] * len(requests)
        groups: dict[str, list[int]] = {}
        for place, request in enumerate(requests):
            groups.setdefault(request.stream, []).append(place)
        spans = [request.trace for request in requests if request.trace]
        # Without a task for it. If the caller gives up, such a run can be cancelled safely: it works in no thread.
        if len(groups) == 1 and self._is_ready(requests[0].stream) and not any(map(self._is_special, requests)):
            with traces.shared_span("worker", spans, requests=len(requests), streams=1):
                try:
                    return await self._serve(requests[0].stream, requests)
                except Exception as problem:
                    return _failed(problem, requests)
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
        loaded = self._streams.loaded.get(stream)
        return loaded is not None and not loaded.slow and stream not in self._unfinished

    def _is_special(self, request: Request) -> bool:
        return request.action in self._special

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
        return work.result() if problem is None else _failed(problem, requests)

    def _forget_results(self) -> None:
        """Forget results that nobody asked for."""
        oldest = time.monotonic() - _RESULT_SECONDS
        for stream, works in list(self._unfinished.items()):
            for signature, (work, since) in list(works.items()):
                if work.done() and since < oldest:
                    del works[signature]
            if not works:
                del self._unfinished[stream]

    # Requests on one stream.

    async def _serve(self, stream: str, requests: list[Request]) -> list[Reply]:
        """Serve requests on one stream, in runs of those that need not wait for one another."""
        replies: list[Reply] = []
        if requests[0].take_from:
            # If this fails, the requests get the error.
            with suppress(ProtoDCSError):
                await self._streams.get(stream, requests[0].stand_in, requests[0].take_from)
        while len(replies) < len(requests):
            rest = requests[len(replies) :]
            special = self._special.get(rest[0].action)
            if special is not None:
                try:
                    replies.append(await special(rest[0]))
                except ProtoDCSError as problem:
                    replies.append(error_reply(problem))
            else:
                run = next((at for at, request in enumerate(rest) if self._is_special(request)), len(rest))
                replies += await self._run(stream, rest[:run])
            if not replies[-1].outcome.final:
                replies += [_LATER] * (len(requests) - len(replies))
        return replies

    async def _run(self, stream: str, requests: list[Request]) -> list[Reply]:
        """Serve changes and questions on the stream in memory, in slices. Reply after all changes are durable."""
        replies: list[Reply] = []
        events: list[Event] = []
        last: LoadedStream | None = None
        try:
            while len(replies) < len(requests):
                await self._computing.wait_turn(goes_on=last is not None)
                # Again for each slice: the stream may have been unloaded, deleted or lost in the meantime.
                try:
                    loaded = await self._streams.acquire(stream, requests[0].stand_in)
                except ProtoDCSError as problem:
                    replies += [error_reply(problem)] * (len(requests) - len(replies))
                    break
                try:
                    if last is not None and last is not loaded:
                        # If the slices before are lost, this one must not overtake them.
                        await last.journal.wait_durable()
                    last = loaded
                    done, acted = await self._work(stream, loaded, requests[len(replies) :])
                    replies += done
                    events += acted
                finally:
                    loaded.in_use.release()
            if last is not None:
                await last.journal.wait_durable()
        except (FencedError, StoreError) as problem:
            if last is not None:
                self._streams.drop(stream, last)
            return [Reply(Outcome.LATER, str(problem))] * len(requests)
        await self._report_guard(stream, events)
        return replies

    async def _work(
        self, stream: str, loaded: LoadedStream, requests: list[Request]
    ) -> tuple[list[Reply], list[Event]]:
        """Serve the first requests, until the turn ends, and put their records into the journal's queue.

        Returns the replies, and what the guard did.
        """
        first = loaded.live.position
        serve = partial(self._steps.serve, loaded.live, requests, self._computing.turn_end())
        with loaded.changing():
            # A class edit compares all names of a vocabulary with all classes.
            long = loaded.live.spec.vocabulary is not None and any(one.action in _CLASS_EDITS for one in requests)
            served = await self._computing.run(loaded, serve, long)
        loaded.used = time.monotonic()
        for seconds, answer in served.steps:
            self.counted.stepped(seconds, answer)
        events = loaded.live.events()
        if served.records:
            notices = loaded.notice_maker.make(served.log, events)
            self._changes.put(stream, loaded, first, served.records, served.log, loaded.live.roll_backs(), notices)
        return served.replies, events

    async def _report_guard(self, stream: str, events: list[Event]) -> None:
        """Count and log what the guard of a stream did. Its record is durable."""
        for event in events:
            self.counted.guarded(event.guard)
            _log.warning("a guard acted", extra=logs.with_fields(stream=stream, **event._asdict()))
            try:
                await self._audit.write(audit.of_guard(stream, event))
            except OSError:
                _log.exception("the audit log cannot be written")

    async def _edit_clusters(self, request: Request) -> Reply:
        """Change the clusters of a stream. The payload says how."""
        loaded = await self._streams.get(request.stream, request.stand_in)
        self._quotas.check(request.stream)
        return await self._changes.apply(loaded, Kind.EDIT_CLUSTERS, request, request.payload)

    async def _diagnose(self, request: Request) -> Reply:
        """Estimate what a stream can and cannot decide, on a copy, so that its samples do not wait."""
        async with self._diagnosing:
            loaded = await self._streams.get(request.stream, request.stand_in)
            async with loaded.in_use:
                engine, features = await self._computing.run(loaded, loaded.live.copied, long=True)
            found = await self._computing.in_thread(partial(diagnose, engine, features), slow=True)
        return Reply(Outcome.DONE, facts=found.to_dict())

    async def _delete(self, request: Request) -> Reply:
        """Delete the incarnation of a stream that the request names; if it does not exist, it is gone already."""
        try:
            deleted = await self._streams.delete(request)
        except UnknownStreamError:
            deleted = False
        return Reply(Outcome.DONE, repeated=not deleted)

    async def _describe(self, request: Request) -> Reply:
        """Return which incarnation of a stream exists and what it was created with, without loading it."""
        found = await self._store.describe(request.stream)
        return Reply(Outcome.DONE, answer=found.spec, facts={"incarnation": found.incarnation})

    async def _check_health(self, _: Request) -> Reply:
        """Reply if this worker can serve: it reaches the store and has its lease."""
        await self._lease.renew()
        return Reply(Outcome.DONE)

    # In the background.

    async def _maintain(self) -> None:
        while True:
            await asyncio.sleep(_ROUND)
            self._streams.maintain()
            self._forget_results()

    async def _keep_lease(self) -> None:
        while True:
            try:
                await self._lease.renew()
            except StoreError as problem:
                self.counted.store_failed()
                _log.warning("the lease was not renewed", extra=logs.with_fields(problem=str(problem)))
            await asyncio.sleep(self._lease_seconds / 3)


def _failed(problem: BaseException, requests: list[Request]) -> list[Reply]:
    _log.error("a request failed", exc_info=problem)
    return [internal_error(problem)] * len(requests)


def _signature(requests: list[Request]) -> _Signature:
    """Return what tells requests on one stream, sent together, from others."""
    return tuple((request.action, request.key, request.row, content_digest(request)) for request in requests)


def _quantiles(seconds: Iterable[float]) -> dict[str, float]:
    """The median and the 99th percentile, in milliseconds; nothing of nothing."""
    values = 1000 * np.asarray([*seconds])
    return {} if len(values) == 0 else {f"p{p}": float(np.percentile(values, p)) for p in (50, 99)}

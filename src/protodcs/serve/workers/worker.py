"""A worker: the streams that one process holds in memory, their pipeline, and what is done beside it.

It never uses its memory after its lease may have ended.
"""

import asyncio
import logging
import secrets
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

from prometheus_client.core import Metric

from ...diagnosis import diagnose
from ...discovery.clustering import load_libraries
from ...errors import StoreError, UnknownStreamError
from .. import guard
from ..access import audit
from ..messages import Action, Reply, ReplyStatus, Request
from ..pipeline.commit import GroupCommit
from ..pipeline.pipeline import Pipeline
from ..pipeline.steps import Steps
from ..pipeline.turns import Turns
from ..settings import ServeConfig
from ..store.base import Store
from ..store.values import ListedStream
from ..stream.class_preview import class_question, preview
from ..stream.live_stream import LiveStream
from ..stream.records import Kind
from ..telemetry import logs
from ..telemetry.metrics import WorkerMetrics
from .changes import Changes
from .checkpoints import Checkpoints
from .computing import Computing
from .creation import Creation
from .decision_log import DecisionLog
from .lease import RENEWALS, WorkerLease
from .loaded_streams import LoadedStreams
from .quotas import Quotas, SizeLimits
from .snapshots import Snapshots
from .stream_statistics import StreamStatistics

_log = logging.getLogger(__name__)

# How often a worker looks which streams need a snapshot or should be unloaded, in seconds.
_ROUND = 1.0

T = TypeVar("T")
U = TypeVar("U")


class Worker:
    """Holds streams loaded and serves requests on them. All its functions are called from one event loop.

    Attributes:
        name: which of the workers this is; its successor after a crash has the same one.
        pipeline: serves requests.
        streams: those in memory.
        changes: writes what changed.
    """

    def __init__(self, name: str, store: Store, config: ServeConfig):
        self.name = name
        self.incarnation = secrets.token_hex(8)
        self._store = store
        self._lease_seconds = config.lease_seconds
        self.counted = WorkerMetrics(guards=guard.NAMES)
        self._statistics = StreamStatistics()
        self._commits = GroupCommit(store, config.store_connect_timeout, self.counted)
        self._quotas = Quotas(store, config)
        self._decision_log = DecisionLog(store, config)
        self._computing = Computing()
        self._lease = WorkerLease(name, self.incarnation, store, config, self.counted)
        self._checkpoints = Checkpoints(self._commits, self._computing)
        self.changes = Changes(self._commits, self._checkpoints, self._quotas, self._computing, self._lease, config)
        turns = Turns()
        self.streams = LoadedStreams(
            self._lease, store, config, self.counted, self._computing, turns, self._checkpoints
        )
        sizes = SizeLimits(config)
        creation = Creation(store, self._quotas, sizes, self.streams, self._computing)
        snapshots = Snapshots(store, config, self._quotas, sizes, self.streams, self.changes, self._computing)
        special: dict[str, Callable[[Request], Awaitable[Reply]]] = {
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
            Action.PREVIEW_CLASS: self._preview_class,
            Action.DELETE: self._delete,
            Action.DESCRIBE: self._describe,
            Action.READ_LOG: self._decision_log.read,
            Action.READ_EVENTS: self._decision_log.read_events,
            Action.READ_THUMBNAIL: self._decision_log.read_thumbnail,
            Action.PURGE_LOG: self._decision_log.purge,
            Action.CHECK_HEALTH: self._check_health,
        }
        self.pipeline = Pipeline(
            self._lease,
            self.streams,
            Steps(self._lease, self._quotas, sizes, logs_decisions=config.log_entries > 0),
            self.changes,
            self._computing,
            turns,
            self.counted,
            audit.AuditLog(config.audit),
            special,
        )
        # One at a time: each takes a second, and others need the threads.
        self._estimating = asyncio.Semaphore(1)
        self._tasks: list[asyncio.Task[None]] = []

    # Start and stop.

    async def start(self) -> None:
        """Take over the lease from an earlier incarnation, and begin to work."""
        await self._lease.renew(takes_over=True)
        self._renewals = asyncio.create_task(self._keep_lease())
        trimming = self._decision_log.trim_forever()
        works = (self._commits.run(), self._checkpoints.run(), self._maintain(), self._quotas.run(), trimming)
        self._tasks = [self._renewals, *(asyncio.create_task(work) for work in works)]

    async def drain(self, refusal: Reply) -> None:
        """Reply to every further request with `refusal`, unload all streams, and give up the lease."""
        self.streams.refusal = refusal
        await self.streams.unload()
        # From here on nobody renews the lease, or it would come back after it was given up.
        self._renewals.cancel()
        with suppress(StoreError):
            await self._store.resign(self.name, self.incarnation)

    async def close(self) -> None:
        """Stop working. What is loaded stays as it is in the store."""
        tasks = [*self._tasks, *self.streams.busy.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.pipeline.close()
        self._computing.close()
        await self._store.close()

    async def list_streams(self, tenant: str, after: str | None, limit: int) -> list[ListedStream]:
        """Return streams of a tenant after an id, in the order of their ids, with what this worker could not load."""
        failed = self.streams.failed
        listed = await self._store.list_streams(tenant, after, limit)
        return [
            stream._replace(problem=str(failed[stream.id].problem)) if stream.id in failed else stream
            for stream in listed
        ]

    async def count_streams(self, tenant: str) -> int:
        """Return how many streams a tenant has."""
        return await self._store.count_streams(tenant)

    async def session_secret(self) -> bytes:
        """Return the secret that signs the sessions of browsers. It is made once for each store."""
        return await self._store.add_document("secret", "sessions", secrets.token_bytes(32))

    @property
    def is_connected(self) -> bool:
        """Whether this worker reached the store lately."""
        return self._lease.is_fresh

    def facts(self) -> dict[str, Any]:
        """Numbers for monitoring, JSON-ready."""
        return {
            "worker": self.name,
            "incarnation": self.incarnation,
            "loaded": len(self.streams.loaded),
            "loads": self.streams.loads,
            "commits": self._commits.groups,
            "writes": self._commits.writes,
            "draining": self.streams.refusal is not None,
            "store_silence_seconds": self.counted.silence,
            "store_problem": self._store.problem,
        }

    def metrics(self) -> list[Metric]:
        """The same and more, for Prometheus."""
        streams = self.streams.loaded
        behind = [loaded.live.position - loaded.live.covered for loaded in streams.values()]
        gauges = {
            "protodcs_worker_loaded_streams": len(streams),
            "protodcs_worker_unloadable_streams": len(self.streams.failed),
            "protodcs_worker_queued_writes": self._commits.queued + self._checkpoints.queued,
            "protodcs_worker_unsnapshotted_records": sum(behind),
            "protodcs_worker_unsnapshotted_records_max": max(behind, default=0),
        }
        # Nobody may look at an engine that works in a thread.
        self._statistics.update({name: found.live for name, found in streams.items() if not found.in_use.locked()})
        return self.counted.families(gauges, self._statistics.families())

    # Requests.

    async def _edit_clusters(self, request: Request) -> Reply:
        """Change the clusters of a stream. The payload says how."""
        # Before the turn of the stream, whose samples would wait.
        await self._computing.in_thread(load_libraries, slow=True)
        loaded = await self.streams.get(request.stream, request.stand_in)
        self._quotas.check(request.stream)
        return await self.changes.apply(loaded, Kind.EDIT_CLUSTERS, request, request.payload)

    async def _diagnose(self, request: Request) -> Reply:
        """Estimate what a stream can and cannot decide."""
        found = await self._compute_on_copy(request, LiveStream.copied, lambda copied: diagnose(*copied))
        return Reply(ReplyStatus.DONE, facts=found.to_dict())

    async def _preview_class(self, request: Request) -> Reply:
        """Return what a cluster would become as a class, and its prototype. The payload says which one."""
        ask = partial(class_question, payload=request.payload)
        prototype, facts = await self._compute_on_copy(request, ask, preview)
        return Reply(ReplyStatus.DONE, answer=prototype.astype("<f4").tobytes(), facts=facts)

    async def _compute_on_copy(self, request: Request, copy: Callable[[LiveStream], T], work: Callable[[T], U]) -> U:
        """Copy what the work needs of a stream, and do it in a thread, so that its samples do not wait."""
        async with self._estimating:
            loaded = await self.streams.get(request.stream, request.stand_in)
            async with loaded.in_use:
                copied = await self._computing.run(loaded, partial(copy, loaded.live), long=True)
            return await self._computing.in_thread(partial(work, copied), slow=True)

    async def _delete(self, request: Request) -> Reply:
        """Delete the incarnation of a stream that the request names; if it does not exist, it is gone already."""
        try:
            deleted = await self.streams.delete(request)
        except UnknownStreamError:
            deleted = False
        return Reply(ReplyStatus.DONE, repeated=not deleted)

    async def _describe(self, request: Request) -> Reply:
        """Return which incarnation of a stream exists and what it was created with, without loading it."""
        found = await self._store.describe(request.stream)
        return Reply(ReplyStatus.DONE, answer=found.spec, facts={"incarnation": found.incarnation})

    async def _check_health(self, _: Request) -> Reply:
        """Reply if this worker can serve: it reaches the store and has its lease."""
        await self._lease.renew()
        return Reply(ReplyStatus.DONE)

    # In the background.

    async def _maintain(self) -> None:
        while True:
            await asyncio.sleep(_ROUND)
            self.streams.maintain()

    async def _keep_lease(self) -> None:
        while True:
            try:
                await self._lease.renew()
            except StoreError as problem:
                self.counted.store_errors.inc()
                _log.warning("the lease was not renewed", extra=logs.with_fields(problem=str(problem)))
            await asyncio.sleep(self._lease_seconds / RENEWALS)

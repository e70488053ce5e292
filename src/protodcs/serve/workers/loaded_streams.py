"""The streams that a worker holds in memory: loaded from the store when they are needed, and unloaded later."""

import asyncio
import itertools
import logging
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, Protocol, TypeVar
from weakref import WeakValueDictionary

from ...core.prototypes import Prototypes
from ...core.vocabulary import Vocabulary
from ...errors import FencedError, StoreError
from ..messages import Reply, Request
from ..pipeline.turns import Turns
from ..settings import ServeConfig
from ..store.base import Store
from ..store.values import AcquiredStream, Takeover
from ..stream.idempotency import IdempotencyLimits
from ..stream.live_stream import LiveStream, StreamSpec
from ..stream.shared import unpack_prototypes, unpack_vocabulary
from ..telemetry import logs
from ..telemetry.metrics import WorkerMetrics
from .checkpoints import Checkpoints
from .computing import Computing
from .lease import WorkerLease
from .loaded_stream import LoadedStream
from .replies import DamagedError, MovedError, NotLoadedError, RefusedError, load_errors

_log = logging.getLogger(__name__)

# After so many leases a worker that stands in for another sends callers there again.
_STANDING_IN = 10
# What reads more bytes runs in a thread.
_LARGE = 4 * 2**20

T = TypeVar("T")


class RestorableState(NamedTuple):
    """A state to restore, and the position of the stream when it was saved; None if it comes from outside."""

    state: bytes
    position: int | None = None


# Returns the state that a request restores, for a stream created so and with these prototypes.
FindState = Callable[[Request, StreamSpec, Prototypes], Awaitable[RestorableState]]


class Placement(Protocol):
    """Which worker each stream belongs to.

    It is a hint. The fences of the store make sure that no two workers write to one stream.
    """

    @property
    def workers(self) -> tuple[str, ...]:
        """Return the names of all workers."""
        ...

    def first(self, stream: str) -> str:
        """Return the worker that a stream belongs to."""
        ...


class FailedLoad(NamedTuple):
    """Why a stream cannot be loaded, and how often this was tried."""

    problem: NotLoadedError
    failures: int


class LoadedStreams:
    """Loads, holds and unloads streams. All streams are discarded if the lease is lost.

    Attributes:
        loaded: the streams in memory; the one that was used last is the last one.
        busy: loads and unloads under way.
        failed: the streams that could not be loaded when this was last tried.
        placement: which worker each stream belongs to; None: all belong to this one.
        refusal: the reply of a worker that drains.
        loads: how many there were.
    """

    def __init__(
        self,
        lease: WorkerLease,
        store: Store,
        config: ServeConfig,
        metrics: WorkerMetrics,
        computing: Computing,
        turns: Turns,
        checkpoints: Checkpoints,
    ):
        self._lease = lease
        self._store = store
        self._config = config
        self._limits = IdempotencyLimits.of(config)
        self._metrics = metrics
        self._computing = computing
        self._turns = turns
        self._checkpoints = checkpoints
        self.loaded: OrderedDict[str, LoadedStream] = OrderedDict()
        self.busy: dict[str, asyncio.Task[Any]] = {}
        self.failed: dict[str, FailedLoad] = {}
        # By the blobs that they are made of.
        self._shared: WeakValueDictionary[tuple[str, ...], Prototypes] = WeakValueDictionary()
        self._vocabularies: WeakValueDictionary[str, Vocabulary] = WeakValueDictionary()
        # Held while a vocabulary is read, so that many loads at once read it once.
        self._reading = asyncio.Lock()
        self.placement: Placement | None = None
        self.refusal: Reply | None = None
        # How often the memory of all streams was discarded.
        self._discards = 0
        self.loads = 0
        lease.on_lost, lease.on_taken = self.discard, self._drop_taken

    def find(self, stream: str) -> LoadedStream | None:
        """Return a stream that is in memory."""
        loaded = self.loaded.get(stream)
        if loaded is None or loaded.journal.broken is not None:
            return None
        self.loaded.move_to_end(stream)
        return loaded

    async def get(self, stream: str, stand_in: bool, take_from: str = "") -> LoadedStream:
        """Return the stream in memory; load it if this worker may, and take it from the worker `take_from`."""
        # Once, and not again after a load: a worker that cannot renew its lease would load without end.
        self._lease.check()
        while True:
            loaded = self.find(stream)
            if loaded is not None:
                return loaded
            if stream in self.busy:
                # Another call loads or unloads it; that call reports the result.
                await asyncio.wait([self.busy[stream]])
                continue
            if self.refusal is not None:
                raise RefusedError(self.refusal)
            if self.placement is not None:
                first = self.placement.first(stream)
                if self._lease.worker not in (self.placement.workers if stand_in else (first,)):
                    raise MovedError(first)
            failed = self.failed.get(stream)
            if failed is not None and failed.failures >= self._config.quarantine_failures:
                raise type(failed.problem)(str(failed.problem))
            task = self._begin(stream, self._load_stream(stream, take_from))
            await asyncio.wait([task])
            task.result()

    async def acquire(self, stream: str, stand_in: bool) -> LoadedStream:
        """Return the stream in memory while nobody else uses it. Release its lock `in_use` afterwards."""
        checked = False
        while True:
            loaded = await self.get(stream, stand_in)
            await loaded.in_use.acquire()
            if not checked:
                # The wait may have been longer than the lease.
                self._lease.check()
                checked = True
            if self.loaded.get(stream) is loaded and loaded.journal.broken is None:
                return loaded
            loaded.in_use.release()

    async def prototypes(self, spec: StreamSpec) -> Prototypes:
        """Return the prototypes that a stream shares with others, with its vocabulary if it has one."""
        found = self._shared.get(spec.blobs)
        if found is None:
            prototypes = await self._read(spec.prototypes, unpack_prototypes)
            vocabulary = None if spec.vocabulary is None else await self.vocabulary(spec.vocabulary)
            with load_errors():
                found = self._shared.setdefault(spec.blobs, prototypes.with_vocabulary(vocabulary))
        return found

    async def vocabulary(self, name: str) -> Vocabulary:
        """Return a vocabulary that streams share."""
        async with self._reading:
            found = self._vocabularies.get(name)
            if found is None:
                found = await self._read(name, partial(unpack_vocabulary, fingerprint=name))
                self._vocabularies[name] = found
            return found

    async def _read(self, name: str, unpack: Callable[[bytes], T]) -> T:
        """Return what a shared blob holds."""
        data = await self._store.get_shared(name)
        with load_errors():
            return await self._computing.in_thread(partial(unpack, data)) if len(data) > _LARGE else unpack(data)

    # Loading.

    async def _load_stream(self, stream: str, take_from: str) -> None:
        start, generation, discards = time.perf_counter(), self._store.generation, self._discards
        takeover = Takeover(take_from, _STANDING_IN * self._config.lease_seconds) if take_from else None
        held = await self._store.acquire(stream, self._lease.worker, self._lease.incarnation, takeover)
        if take_from:
            self._metrics.takeovers.inc()
            _log.warning("a stream was taken over", extra=logs.with_fields(stream=stream, holder=take_from))
        try:
            with load_errors():
                spec = StreamSpec.unpack(held.spec)
            prototypes = await self.prototypes(spec)
            with load_errors():
                live = await self._load(held, prototypes)
        except NotLoadedError as problem:
            raise self._note_failure(stream, problem) from None
        # Others may have changed the stream meanwhile.
        if (self._store.generation, self._discards) != (generation, discards):
            raise StoreError("The lease or the store was lost while the stream was loaded. Send the request again.")
        self._hold(stream, LoadedStream(live, journal_bytes=sum(map(len, held.tail))))
        self.loads += 1
        self._metrics.loads.observe(time.perf_counter() - start)

    async def _load(self, held: AcquiredStream, prototypes: Prototypes) -> LiveStream:
        """Restore the snapshot of a stream, and replay the records behind it in slices."""
        computing = self._computing
        restore = partial(LiveStream, replace(held, tail=[]), prototypes, self._limits)
        large = len(held.snapshot or b"") + prototypes.unit.nbytes > _LARGE
        # All names of a vocabulary are compared with all classes.
        large = large or prototypes.vocabulary is not None
        loaded = LoadedStream(await computing.in_thread(restore) if large else restore())
        at = 0
        while at < len(held.tail):
            until = await self._turns.wait(goes_on=at > 0)
            at = await computing.run(loaded, partial(_replay, loaded.live, held.tail, at, until))
        # The worker that wrote the records has reported these.
        loaded.live.events()
        loaded.live.roll_backs()
        return loaded.live

    def _hold(self, stream: str, loaded: LoadedStream) -> None:
        self.failed.pop(stream, None)
        self.loaded[stream] = loaded
        self.make_room()

    def _begin(self, stream: str, work: Coroutine[Any, Any, T]) -> "asyncio.Task[T]":
        """Exclude other loads and unloads of a stream until the work is done."""
        task = self.busy[stream] = asyncio.create_task(work)
        task.add_done_callback(lambda done: self._ended(stream, done))
        return task

    def _ended(self, stream: str, task: "asyncio.Task[Any]") -> None:
        if self.busy.get(stream) is task:
            del self.busy[stream]
        if not task.cancelled():
            task.exception()

    # Streams that cannot be loaded.

    def _note_failure(self, stream: str, problem: NotLoadedError) -> NotLoadedError:
        """Count a load that failed. Return the error for the caller."""
        reason = str(problem).rstrip(".")
        if isinstance(problem, DamagedError):
            told = (
                f"The stored data of the stream {stream!r} is damaged: {reason}. Restore a saved snapshot, import an "
                "exported state, or restore a backup of the store."
            )
        else:
            told = (
                f"This version of protodcs cannot load the stream {stream!r}: {reason}. Its stored data is kept. "
                "Export its state with the version that wrote it: see 'A stream that cannot be loaded' in "
                "Troubleshooting."
            )
        if stream not in self.failed:
            _log.error("a stream cannot be loaded", extra=logs.with_fields(stream=stream), exc_info=problem.__cause__)
        failures = 1 if stream not in self.failed else self.failed[stream].failures + 1
        self.failed[stream] = FailedLoad(type(problem)(told), failures)
        return type(problem)(told)

    async def repair(self, request: Request, find: FindState) -> LoadedStream:
        """Load a stream with the state that `find` returns, because it cannot be loaded from its own data."""
        stream = request.stream
        while stream in self.busy:
            await asyncio.wait([self.busy[stream]])
        found = self.find(stream)
        if found is not None:
            return found
        task = self._begin(stream, self._replace(request, find))
        await asyncio.wait([task])
        return task.result()

    async def _replace(self, request: Request, find: FindState) -> LoadedStream:
        """Replace the stored data of a stream: a checkpoint at the end of its journal covers all that is there."""
        stream = request.stream
        held = await self._store.acquire(stream, self._lease.worker, self._lease.incarnation)
        with load_errors():
            spec = StreamSpec.unpack(held.spec)
        prototypes = await self.prototypes(spec)
        found = await find(request, spec, prototypes)
        repaired = partial(LiveStream.repaired, held, prototypes, self._limits, found.state)
        loaded = LoadedStream(await self._computing.in_thread(repaired))
        self._checkpoints.put(stream, loaded)
        await loaded.journal.settle_snapshot()
        self._hold(stream, loaded)
        return loaded

    # Unloading.

    def place(self, placement: Placement) -> None:
        """Take note of where streams belong now, and begin to unload those that belong to others."""
        self.placement = placement
        for stream in list(self.loaded):
            if placement.first(stream) != self._lease.worker:
                self.begin_unload(stream)
        # Another worker may delete or restore the others.
        self.failed = {
            stream: failed for stream, failed in self.failed.items() if placement.first(stream) == self._lease.worker
        }

    async def unload(self, moves: Callable[[str], bool] = lambda _: True) -> None:
        """Unload all streams, or those for which `moves` is true, also while they are being loaded."""
        while streams := [stream for stream in (*self.loaded, *self.busy) if moves(stream)]:
            for stream in streams:
                self.begin_unload(stream)
            await asyncio.gather(*(self.busy[stream] for stream in streams), return_exceptions=True)

    def make_room(self) -> None:
        """Unload the streams that were not used for longest, if too many are loaded."""
        too_many = len(self.loaded) - self._config.max_loaded_streams
        for stream in list(itertools.islice(self.loaded, max(0, too_many))):
            self.begin_unload(stream)

    def begin_unload(self, stream: str) -> None:
        """Begin to unload a stream, unless it is being loaded or unloaded already."""
        if stream not in self.busy and stream in self.loaded:
            self._begin(stream, self._unload(stream, self.loaded.pop(stream)))

    async def _unload(self, stream: str, loaded: LoadedStream) -> None:
        async with loaded.in_use:
            if loaded.unsnapshotted_records > self._config.unload_records:
                self._checkpoints.put(stream, loaded)
        # Without the snapshot, the next worker replays the records.
        with suppress(StoreError):
            await loaded.journal.settle_snapshot()
        await loaded.journal.wait_durable()
        await self._store.release(stream, loaded.live.fence)
        self._metrics.unloads.inc()

    def drop(self, stream: str, loaded: LoadedStream) -> None:
        """Discard the stream in memory."""
        if self.loaded.get(stream) is loaded:
            del self.loaded[stream]

    def discard(self) -> None:
        """Discard what is known of all streams."""
        self._discards += 1
        self.loaded.clear()
        self.failed.clear()

    def _drop_taken(self, taken: Mapping[str, int]) -> None:
        """Discard the streams that other workers took over."""
        for stream, epoch in taken.items():
            self.failed.pop(stream, None)
            loaded = self.loaded.get(stream)
            if loaded is not None and loaded.live.epoch < epoch:
                self.drop(stream, loaded)

    async def delete(self, request: Request) -> bool:
        """Delete the incarnation of a stream that the request names. Return False if that one does not exist."""
        stream, loaded = request.stream, None
        try:
            loaded = await self.get(stream, request.stand_in)
            fence, incarnation = loaded.live.fence, loaded.live.incarnation
        except NotLoadedError:
            held = await self._store.acquire(stream, self._lease.worker, self._lease.incarnation)
            fence, incarnation = held.fence, held.incarnation
        if incarnation.encode() != request.payload:
            return False
        if loaded is not None:
            with suppress(FencedError, StoreError):
                await loaded.journal.wait_durable()
            self.drop(stream, loaded)
            # A snapshot that is still queued is not needed any more.
            loaded.journal.fail(FencedError(f"the stream {stream!r} was deleted"))
        await self._store.delete(stream, fence)
        self.failed.pop(stream, None)
        return True

    # Maintenance.

    def maintain(self) -> None:
        """Write snapshots and unload streams, by time."""
        # Streams that were still loading when there were too many.
        self.make_room()
        now = time.monotonic()
        for stream, loaded in list(self.loaded.items()):
            if loaded.journal.broken is not None:
                self.drop(stream, loaded)
            elif loaded.in_use.locked():
                # It works in a thread; there is another round.
                continue
            elif now - loaded.used > self._config.unload_seconds or self._stood_in_enough(stream, loaded, now):
                self.begin_unload(stream)
            elif now - loaded.written > self._config.snapshot_seconds and loaded.unsnapshotted_records:
                self._checkpoints.put(stream, loaded)

    def _stood_in_enough(self, stream: str, loaded: LoadedStream, now: float) -> bool:
        """Whether it is time to see if the worker that the stream belongs to is back."""
        away = self.placement is not None and self.placement.first(stream) != self._lease.worker
        return away and now - loaded.loaded_at > _STANDING_IN * self._config.lease_seconds


def _replay(live: LiveStream, records: list[bytes], at: int, until: float) -> int:
    """Replay records from `at` on until a time, at least one of them. Return where to go on."""
    for data in records[at:]:
        live.replay(data)
        at += 1
        if time.monotonic() >= until:
            break
    return at

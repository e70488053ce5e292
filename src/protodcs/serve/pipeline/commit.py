"""Group commit: writes that arrive while a round trip to the store is under way share the next one.

So durability costs a round trip per group and not per sample, and the busier the worker the larger the group. Records
and snapshots travel separately, so that no observe waits for a snapshot of another stream. Records of one stream keep
their order, and a snapshot is sent only after the records that it covers are durable. After records of a stream failed,
or a write was fenced, nothing behind it goes through. If a snapshot fails otherwise, the records are still there.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from ...errors import FencedError, StoreError
from ..store.base import Batch, Checkpoint, Store, Write
from ..telemetry import logs, traces
from ..telemetry.metrics import WorkerMetrics

_log = logging.getLogger(__name__)

# Pauses between attempts to reach a store, in seconds: they double from the first to the last.
_FIRST_PAUSE, _LAST_PAUSE = 0.02, 0.5
# Maximum bytes of a group. A store writes a group as a whole, and others wait meanwhile. A larger write travels alone.
_GROUP_BYTES = 4 << 20


@dataclass(slots=True)
class Journal:
    """The writes of one worker to one stream, under one epoch.

    Attributes:
        broken: why records or a fenced snapshot failed; from then on all writes do.
        queued, durable: how many times records were put, and how many of these are durable.
        snapshot: of the newest snapshot, queued or sent.
        snapshot_queued: the newest snapshot is not built yet.
    """

    broken: FencedError | StoreError | None = None
    queued: int = 0
    durable: int = 0
    snapshot: "asyncio.Future[None] | None" = None
    snapshot_queued: bool = False
    _waiting: deque[tuple[int, Callable[[], None]]] = field(default_factory=deque)

    @property
    def is_behind(self) -> bool:
        """Whether records that were put are not durable yet."""
        return self.broken is None and self.durable < self.queued

    def when_settled(self, call: Callable[[], None]) -> None:
        """Have `call` called as soon as all records that were put so far are durable, or one of them failed."""
        self._waiting.append((self.queued, call))
        self._call_back()

    def add_durable(self) -> None:
        """Take note that the oldest records that were not durable are."""
        self.durable += 1
        self._call_back()

    def fail(self, problem: FencedError | StoreError) -> None:
        """Write nothing more, because of a problem. The first one counts."""
        self.broken = self.broken or problem
        self._call_back()

    async def settle(self) -> None:
        """Wait until all records that were put so far are durable, or one of them failed."""
        if self.is_behind:
            settled = asyncio.Event()
            self.when_settled(settled.set)
            await settled.wait()

    async def wait_durable(self) -> None:
        """Wait until all records that were put so far are durable. Raise the error if a write failed."""
        await self.settle()
        if self.broken is not None:
            raise self.broken

    async def settle_snapshot(self) -> None:
        """Wait until the newest snapshot is durable, if there is one. Raise the error if it failed."""
        if self.snapshot is not None:
            await asyncio.shield(self.snapshot)

    def _call_back(self) -> None:
        while self._waiting and (self.broken is not None or self._waiting[0][0] <= self.durable):
            self._waiting.popleft()[1]()


class _Entry(NamedTuple):
    """A write.

    Attributes:
        journal: of the stream.
        write: what is sent.
        queued: when it was put, by the monotonic clock.
        span: of the request that it belongs to; empty if nobody records it.
        saved: of a snapshot: its outcome; None: these are records.
        written: called as soon as the write is durable.
    """

    journal: Journal
    write: Write
    queued: float
    span: str = ""
    saved: "asyncio.Future[None] | None" = None
    written: Callable[[], None] | None = None

    def end(self, problem: FencedError | StoreError | None) -> None:
        """Tell those who wait that the write is durable, or why it is not."""
        journal = self.journal
        if problem is None:
            if self.written is not None:
                self.written()
            if self.saved is None:
                journal.add_durable()
            else:
                self.saved.set_result(None)
            return
        if self.saved is None or isinstance(problem, FencedError):
            journal.fail(problem)
        if self.saved is not None:
            self.saved.set_exception(problem)


class _Unbuilt(NamedTuple):
    """A snapshot that waits for its turn. It is built only then, because it may have megabytes."""

    journal: Journal
    stream: str
    build: Callable[[], Awaitable[Checkpoint]]
    durable: Callable[[Checkpoint], None]
    future: "asyncio.Future[None]"
    queued: float


class GroupCommit:
    """The queues of all writes of one worker: one of records and one of snapshots.

    Args:
        store: where they go.
        retry_seconds: how long a write is retried if the store cannot be reached, counted from when it was queued.
        metrics: where groups are counted.
    """

    def __init__(self, store: Store, retry_seconds: float, metrics: WorkerMetrics):
        self._store = store
        self._retry_seconds = retry_seconds
        self._metrics = metrics
        self._batches: deque[_Entry] = deque()
        self._snapshots: deque[_Unbuilt] = deque()
        self._some_batches = asyncio.Event()
        self._some_snapshots = asyncio.Event()
        # When the groups that are being written were first sent.
        self._starts: list[float] = []
        self.groups = 0
        self.writes = 0

    def put(self, journal: Journal, batch: Batch, written: Callable[[], None] | None = None) -> None:
        """Queue records. `written` is called when they are durable, before those who wait for the journal."""
        journal.queued += 1
        self._batches.append(_Entry(journal, batch, time.monotonic(), traces.carried(), written=written))
        self._some_batches.set()

    def put_snapshot(
        self,
        journal: Journal,
        stream: str,
        build: Callable[[], Awaitable[Checkpoint]],
        durable: Callable[[Checkpoint], None],
    ) -> None:
        """Queue a snapshot, unless one is queued already. `journal.settle_snapshot` returns when it is durable.

        Args:
            journal: of the stream.
            stream: its id, for the log.
            build: returns the snapshot of the state that all records put so far led to. It is called when the snapshot
                can be sent, so that few snapshots are in memory at once.
            durable: called as soon as the snapshot is durable.
        """
        if journal.snapshot_queued:
            return
        journal.snapshot, journal.snapshot_queued = _new_future(), True
        self._snapshots.append(_Unbuilt(journal, stream, build, durable, journal.snapshot, time.monotonic()))
        self._some_snapshots.set()

    @property
    def queued(self) -> int:
        """How many writes wait for the groups under way to end."""
        return len(self._batches) + len(self._snapshots)

    async def run(self) -> None:
        """Send groups until it is cancelled."""
        await asyncio.gather(self._send_batches(), self._send_snapshots())

    async def _send_batches(self) -> None:
        while True:
            if not self._batches:
                self._some_batches.clear()
                await self._some_batches.wait()
            group = [self._batches.popleft()]
            size = _size(group[0].write)
            while self._batches:
                size += _size(self._batches[0].write)
                if size > _GROUP_BYTES:
                    break
                group.append(self._batches.popleft())
            await self._send(group)

    async def _send_snapshots(self) -> None:
        while True:
            if not self._snapshots:
                self._some_snapshots.clear()
                await self._some_snapshots.wait()
            group: list[_Entry] = []
            size = 0
            while self._snapshots and size < _GROUP_BYTES:
                entry = await _built(self._snapshots.popleft())
                if entry is not None:
                    group.append(entry)
                    size += _size(entry.write)
                    # A large snapshot takes long to build: let requests go on in between.
                    await asyncio.sleep(0)
            for entry in group:
                # A later record may overtake the snapshot, which cuts the journal only up to its own position.
                await entry.journal.settle()
            await self._send(group)

    async def _send(self, group: list[_Entry]) -> None:
        """Send a group, and tell those who wait for its writes."""
        sound = []
        for entry in group:
            if entry.journal.broken is None:
                sound.append(entry)
            else:
                entry.end(entry.journal.broken)
        if not sound:
            return
        outcomes: list[FencedError | StoreError | None]
        try:
            spans = [entry.span for entry in sound if entry.span]
            with traces.shared_span("commit", spans, writes=len(sound)):
                until = sound[-1].queued + self._retry_seconds
                outcomes = await self._persist([entry.write for entry in sound], until)
        except StoreError as problem:
            outcomes = [problem] * len(sound)
        except Exception as problem:
            # A mistake in a store must not end the queue: nothing would be written any more, and nobody told.
            _log.exception("a commit failed")
            outcomes = [StoreError(f"an error inside the store: {problem!r}")] * len(sound)
        self.groups += 1
        self.writes += len(sound)
        for entry, outcome in zip(sound, outcomes, strict=True):
            if isinstance(outcome, FencedError):
                self._metrics.fenced()
            try:
                entry.end(outcome)
            except Exception:
                # A mistake of those who wait must not end the queue.
                _log.exception("the end of a write could not be told")

    async def _persist(self, writes: list[Write], until: float) -> list[FencedError | StoreError | None]:
        """Commit, again and again while the store cannot be reached: a commit that is repeated is done once."""
        start, pause = time.monotonic(), _FIRST_PAUSE
        self._starts.append(start)
        self._metrics.writing = min(self._starts)
        try:
            while True:
                try:
                    outcomes = await self._store.commit(writes)
                    self._metrics.committed(start, len(writes))
                    return outcomes
                except StoreError:
                    self._metrics.store_failed()
                    if time.monotonic() + pause > until:
                        raise
                await asyncio.sleep(pause)
                pause = min(2 * pause, _LAST_PAUSE)
        finally:
            self._starts.remove(start)
            self._metrics.writing = min(self._starts, default=None)


def _size(write: Write) -> int:
    if isinstance(write, Batch):
        return sum(map(len, write.records)) + sum(len(entry.thumbnail) for entry in write.log)
    return len(write.snapshot)


async def _built(wanted: _Unbuilt) -> _Entry | None:
    """Return the snapshot to send, or None if it failed."""
    journal = wanted.journal
    try:
        if journal.broken is not None:
            wanted.future.set_exception(journal.broken)
            return None
        checkpoint = await wanted.build()
    except Exception as problem:
        fields = logs.with_fields(stream=wanted.stream)
        _log.exception("The snapshot of a stream could not be built.", extra=fields)
        # The engine may be damaged. The store is not: the stream has to be loaded again.
        journal.fail(StoreError(f"the snapshot of the stream could not be built: {problem!r}"))
        assert journal.broken is not None
        wanted.future.set_exception(journal.broken)
        return None
    finally:
        journal.snapshot_queued = False
    written = partial(wanted.durable, checkpoint)
    return _Entry(journal, checkpoint, wanted.queued, saved=wanted.future, written=written)


def _new_future() -> "asyncio.Future[None]":
    """Return a future whose outcome nobody has to look at: the next snapshot covers more."""
    future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    future.add_done_callback(lambda done: done.cancelled() or done.exception())
    return future

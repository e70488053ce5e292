"""Group commit: writes that arrive while a round trip to the store is under way share the next one.

So durability costs a round trip per group and not per sample, and the busier the worker the larger the group. Records
of one stream keep their order. After some of them failed, or a write was fenced, nothing behind it goes through.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from ...errors import FencedError, StoreError
from ..store.base import Store
from ..store.values import Batch, Write
from ..telemetry import traces
from ..telemetry.metrics import WorkerMetrics

_log = logging.getLogger(__name__)

# Pauses between attempts to reach a store, in seconds: they double from the first to the last.
_FIRST_PAUSE, _LAST_PAUSE = 0.02, 0.5
# Turns of the event loop before a group is sent, so that the requests that are computed in them share it. On a loaded
# service, 28 instead of 16 records share a commit, for a tenth less CPU time per observe.
_GATHERING_TURNS = 2
# Maximum bytes of a group. A store writes a group as a whole, and others wait meanwhile. A larger write travels alone.
GROUP_BYTES = 4 << 20


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
        if not self.is_behind:
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


class Entry(NamedTuple):
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


class GroupCommit:
    """The queue of the records of one worker.

    Args:
        store: where they go.
        retry_seconds: how long a write is retried if the store cannot be reached, counted from when it was queued.
        metrics: where groups are counted.
    """

    def __init__(self, store: Store, retry_seconds: float, metrics: WorkerMetrics):
        self._store = store
        self._retry_seconds = retry_seconds
        self._metrics = metrics
        self._batches: deque[Entry] = deque()
        self._some_batches = asyncio.Event()
        # When the groups that are being written were first sent.
        self._starts: list[float] = []
        self.groups = 0
        self.writes = 0

    def put(self, journal: Journal, batch: Batch, written: Callable[[], None] | None = None) -> None:
        """Queue records. `written` is called when they are durable, before those who wait for the journal."""
        journal.queued += 1
        self._batches.append(Entry(journal, batch, time.monotonic(), traces.carried(), written=written))
        self._some_batches.set()

    @property
    def queued(self) -> int:
        """How many writes wait for the group under way to end."""
        return len(self._batches)

    async def run(self) -> None:
        """Send groups until it is cancelled."""
        while True:
            if not self._batches:
                self._some_batches.clear()
                await self._some_batches.wait()
            for _ in range(_GATHERING_TURNS):
                await asyncio.sleep(0)
            group = [self._batches.popleft()]
            size = size_of(group[0].write)
            while self._batches:
                size += size_of(self._batches[0].write)
                if size > GROUP_BYTES:
                    break
                group.append(self._batches.popleft())
            await self.send(group)

    async def send(self, group: Sequence[Entry]) -> None:
        """Send writes together, and tell those who wait for them."""
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
                self._metrics.fenced.inc()
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
                    self._metrics.store_errors.inc()
                    if time.monotonic() + pause > until:
                        raise
                await asyncio.sleep(pause)
                pause = min(2 * pause, _LAST_PAUSE)
        finally:
            self._starts.remove(start)
            self._metrics.writing = min(self._starts, default=None)


def size_of(write: Write) -> int:
    """Return the bytes of a write."""
    if isinstance(write, Batch):
        return write.size + sum([len(entry.thumbnail) for entry in write.log])
    return len(write.snapshot)

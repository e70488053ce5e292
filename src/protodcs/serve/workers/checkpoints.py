"""The snapshots of streams, on their way to the store.

They travel beside the records, so that no observe waits for a snapshot of another stream. One is sent only after the
records that it covers are durable. If it fails, the records are still there.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable
from functools import partial
from typing import NamedTuple

from ...errors import StoreError
from ..pipeline.commit import GROUP_BYTES, Entry, GroupCommit, Journal, size_of
from ..store.values import Checkpoint
from ..telemetry import logs

_log = logging.getLogger(__name__)


class _Unbuilt(NamedTuple):
    """A snapshot that waits for its turn. It is built only then, because it may have megabytes."""

    journal: Journal
    stream: str
    build: Callable[[], Awaitable[Checkpoint]]
    durable: Callable[[Checkpoint], None]
    future: "asyncio.Future[None]"
    queued: float


class Checkpoints:
    """The queue of the snapshots of one worker."""

    def __init__(self, commits: GroupCommit):
        self._commits = commits
        self._snapshots: deque[_Unbuilt] = deque()
        self._some = asyncio.Event()

    def put(
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
        self._some.set()

    @property
    def queued(self) -> int:
        """How many snapshots wait for those under way."""
        return len(self._snapshots)

    async def run(self) -> None:
        """Send snapshots until it is cancelled."""
        while True:
            if not self._snapshots:
                self._some.clear()
                await self._some.wait()
            group: list[Entry] = []
            size = 0
            while self._snapshots and size < GROUP_BYTES:
                entry = await _built(self._snapshots.popleft())
                if entry is not None:
                    group.append(entry)
                    size += size_of(entry.write)
                    # A large snapshot takes long to build: let requests go on in between.
                    await asyncio.sleep(0)
            for entry in group:
                # A later record may overtake the snapshot, which cuts the journal only up to its own position.
                await entry.journal.settle()
            await self._commits.send(group)


async def _built(wanted: _Unbuilt) -> Entry | None:
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
    return Entry(journal, checkpoint, wanted.queued, saved=wanted.future, written=written)


def _new_future() -> "asyncio.Future[None]":
    """Return a future whose outcome nobody has to look at: the next snapshot covers more."""
    future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    future.add_done_callback(lambda done: done.cancelled() or done.exception())
    return future

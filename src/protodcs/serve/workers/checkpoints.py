"""The snapshots of streams, on their way to the store.

They travel beside the records, so that no observe waits for a snapshot of another stream. One is sent only after the
records that it covers are durable. If it fails, the records are still there.
"""

import asyncio
import logging
import time
from functools import partial

from ...errors import StoreError
from ..pipeline.commit import GROUP_BYTES, Entry, GroupCommit, size_of
from ..telemetry import logs
from .computing import Computing
from .loaded_stream import LoadedStream

_log = logging.getLogger(__name__)


class Checkpoints:
    """The queue of the snapshots of one worker. They are built when they can be sent, so few of them are in memory."""

    def __init__(self, commits: GroupCommit, computing: Computing):
        self._commits = commits
        self._computing = computing
        # Streams, and when their snapshot was queued.
        self._waiting: asyncio.Queue[tuple[str, LoadedStream, float]] = asyncio.Queue()

    def put(self, stream: str, loaded: LoadedStream) -> None:
        """Queue a snapshot of all of a stream, unless one is queued. `journal.settle_snapshot` waits for it."""
        journal = loaded.journal
        if not journal.snapshot_queued:
            journal.snapshot, journal.snapshot_queued = asyncio.get_running_loop().create_future(), True
            # Nobody has to look at its outcome: the next snapshot covers more.
            journal.snapshot.add_done_callback(lambda done: done.cancelled() or done.exception())
            self._waiting.put_nowait((stream, loaded, time.monotonic()))

    @property
    def queued(self) -> int:
        """How many snapshots wait for those under way."""
        return self._waiting.qsize()

    async def run(self) -> None:
        """Send snapshots until it is cancelled."""
        while True:
            group: list[Entry] = []
            size = 0
            while size < GROUP_BYTES and not (group and self._waiting.empty()):
                entry = await self._build(*await self._waiting.get())
                if entry is not None:
                    group.append(entry)
                    size += size_of(entry.write)
                    # A large snapshot takes long to build: let requests go on in between.
                    await asyncio.sleep(0)
            for entry in group:
                # A later record may overtake the snapshot, which cuts the journal only up to its own position.
                await entry.journal.settle()
            await self._commits.send(group)

    async def _build(self, stream: str, loaded: LoadedStream, queued: float) -> Entry | None:
        """Return the snapshot to send, or None if it failed. It covers the records that were put before."""
        journal, live, saved = loaded.journal, loaded.live, loaded.journal.snapshot
        assert saved is not None
        try:
            if journal.broken is None:
                async with loaded.in_use:
                    checkpoint = await self._computing.run(loaded, partial(live.checkpoint, stream))
                    loaded.snapshot_end, loaded.journal_bytes, loaded.written = live.position, 0, time.monotonic()
                return Entry(journal, checkpoint, queued, saved=saved, written=partial(live.stored, checkpoint))
        except Exception as problem:
            _log.exception("The snapshot of a stream could not be built.", extra=logs.with_fields(stream=stream))
            # The engine may be damaged. The store is not: the stream has to be loaded again.
            journal.fail(StoreError(f"the snapshot of the stream could not be built: {problem!r}"))
        finally:
            journal.snapshot_queued = False
        assert journal.broken is not None
        saved.set_exception(journal.broken)
        return None

"""Writes to a store in groups: whatever came while one round trip was under way goes together in the next.

So durability costs a round trip per group and not per sample, and the busier the owner the larger the group. Writes to
one stream keep their order; after one of them failed, none behind it goes through.
"""

import asyncio
import logging
import time
from dataclasses import dataclass

from ...errors import FencedError, StoreError
from ..store.base import Store, Write
from ..telemetry import traces
from ..telemetry.metrics import OwnerMetrics

_log = logging.getLogger(__name__)

# Pauses between attempts to reach a store, in seconds: they double from the first to the last.
_FIRST_PAUSE, _LAST_PAUSE = 0.02, 0.5


@dataclass(slots=True)
class Journal:
    """The writes of one owner to one stream, under one epoch.

    Attributes:
        broken: why one of them failed; from then on all do.
        last: of the newest one.
    """

    broken: FencedError | StoreError | None = None
    last: "asyncio.Future[None] | None" = None

    async def settle(self) -> None:
        """Wait until all that was put so far is durable; raises what one of them failed by."""
        if self.last is not None:
            await asyncio.shield(self.last)
        if self.broken is not None:
            raise self.broken


class Commits:
    """The queue of all writes of one owner.

    Args:
        store: where they go.
        patience: for how many seconds a store that cannot be reached is tried again.
        metrics: where groups are counted.
    """

    def __init__(self, store: Store, patience: float, metrics: OwnerMetrics):
        self._store = store
        self._patience = patience
        self._metrics = metrics
        self._waiting: list[tuple[Journal, Write, asyncio.Future[None]]] = []
        self._traced: list[str] = []
        self._some = asyncio.Event()
        self.groups = 0
        self.writes = 0

    def put(self, journal: Journal, write: Write) -> "asyncio.Future[None]":
        """Queue a write; the result comes when it is durable, or why it is not."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        # Nobody has to look at the outcome: a broken journal says it too.
        future.add_done_callback(_seen)
        journal.last = future
        self._waiting.append((journal, write, future))
        span = traces.carried()
        if span:
            self._traced.append(span)
        self._some.set()
        return future

    @property
    def queued(self) -> int:
        """How many writes wait for the group under way to end."""
        return len(self._waiting)

    async def run(self) -> None:
        """Send groups for ever."""
        while True:
            await self._some.wait()
            self._some.clear()
            group, self._waiting = self._waiting, []
            spans, self._traced = self._traced, []
            with traces.shared_span("commit", spans, writes=len(group)):
                await self._send(group)

    async def _send(self, group: list[tuple[Journal, Write, "asyncio.Future[None]"]]) -> None:
        sound = [entry for entry in group if not _refused(*entry)]
        if not sound:
            return
        outcomes: list[FencedError | StoreError | None]
        try:
            outcomes = await self._persist([write for _, write, _ in sound])
        except StoreError as problem:
            outcomes = [problem] * len(sound)
        except Exception as problem:
            # A mistake in a store must not end the queue: nothing would be written any more, and nobody told.
            _log.exception("a commit failed")
            outcomes = [StoreError(f"an error inside the store: {problem!r}")] * len(sound)
        self._metrics.writing = None
        self.groups += 1
        self.writes += len(sound)
        for (journal, _, future), outcome in zip(sound, outcomes, strict=True):
            if outcome is None:
                future.set_result(None)
            else:
                if isinstance(outcome, FencedError):
                    self._metrics.fenced()
                journal.broken = journal.broken or outcome
                future.set_exception(outcome)

    async def _persist(self, writes: list[Write]) -> list[FencedError | StoreError | None]:
        """Commit, again and again while the store cannot be reached: a commit that is repeated is done once."""
        start = self._metrics.writing = time.monotonic()
        until, pause = start + self._patience, _FIRST_PAUSE
        while True:
            try:
                outcomes: list[FencedError | StoreError | None] = list(await self._store.commit(writes))
                self._metrics.committed(start, len(writes))
                return outcomes
            except StoreError:
                self._metrics.store_failed()
                if time.monotonic() + pause > until:
                    raise
            await asyncio.sleep(pause)
            pause = min(2 * pause, _LAST_PAUSE)


def _refused(journal: Journal, _: Write, future: "asyncio.Future[None]") -> bool:
    """Whether an earlier write to the stream failed; then this one does too."""
    if journal.broken is None:
        return False
    future.set_exception(journal.broken)
    return True


def _seen(future: "asyncio.Future[None]") -> None:
    if not future.cancelled():
        future.exception()

"""The lease of a worker: while it lasts, no other worker changes the streams that this one holds."""

import time
from collections.abc import Callable, Mapping

from ...errors import StoreError
from ..settings import ServeConfig
from ..store.base import Store
from ..telemetry.metrics import WorkerMetrics

# Within the time of a lease.
RENEWALS = 3


class WorkerLease:
    """Renews the lease at the store, and knows the store's time.

    Attributes:
        worker: its name.
        incarnation: which of the processes with that name this is.
        superseded: whether another process with the same name has the lease now.
        on_lost: called if the lease has ended, or the store was replaced: others may have changed any stream.
        on_taken: called with the streams that other workers took over meanwhile, and their epochs.
    """

    def __init__(self, worker: str, incarnation: str, store: Store, config: ServeConfig, metrics: WorkerMetrics):
        self.worker = worker
        self.incarnation = incarnation
        self._store = store
        self._seconds = config.lease_seconds
        self._metrics = metrics
        self._renewed = -float("inf")
        # The store's clock minus the monotonic clock of this process.
        self._clock_offset = 0.0
        # The store that the streams in memory were read from.
        self._generation = store.generation
        self.superseded = False
        self.on_lost: Callable[[], None] = lambda: None
        self.on_taken: Callable[[Mapping[str, int]], None] = lambda taken: None

    async def renew(self, takes_over: bool = False) -> None:
        """Renew the lease; `takes_over`: also from an earlier process with the same name."""
        before = time.monotonic()
        found = await self._store.renew(self.worker, self.incarnation, self._seconds, takes_over)
        self._clock_offset = found.time - time.monotonic()
        if found.holder != self.incarnation:
            # The lease had ended, or the store lost it.
            self.on_lost()
        self.check()
        self.superseded = not takes_over and found.holder not in (None, self.incarnation)
        if self.superseded:
            raise StoreError(f"another process has the lease of {self.worker!r}: this one serves nothing")
        self.on_taken(found.taken)
        self._renewed = before
        self._metrics.renewed()

    def check(self) -> None:
        """Call `on_lost` if others may have changed what is in memory, or if the store may have lost it."""
        expired = time.monotonic() - self._renewed > self._seconds
        if expired or self._store.generation != self._generation:
            self.on_lost()
            self._generation = self._store.generation

    @property
    def is_fresh(self) -> bool:
        """Whether it was renewed lately: one renewal may be late."""
        return time.monotonic() - self._renewed < 2 * self._seconds / RENEWALS

    def now(self) -> float:
        """Return the time by the store's clock, in seconds since 1970."""
        return self._clock_offset + time.monotonic()

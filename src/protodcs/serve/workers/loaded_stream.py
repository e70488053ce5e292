"""A stream in the memory of a worker."""

import asyncio
import time
from dataclasses import dataclass, field
from typing import Any

from ...errors import ProtoDCSError, StoreError
from ..log.notices import NoticeMaker
from ..pipeline.commit import Journal
from ..stream.cost import estimate, total
from ..stream.live_stream import LiveStream

# A stream whose slowest step, or a step on average, may take longer is computed in a thread. Nanoseconds, estimated.
_SLOW_STEP, _SLOW_MEAN_STEP = 100e6, 2e6


class _Changing:
    """Has a stream loaded again from the store if a change is interrupted, or fails after it has begun."""

    def __init__(self, journal: Journal):
        self._journal = journal

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, problem: BaseException | None, _: object) -> None:
        # A ProtoDCSError rejects a change before it begins. After another one the engine may be inconsistent, and it is
        # ahead of its journal.
        if problem is not None and not isinstance(problem, ProtoDCSError):
            self._journal.fail(StoreError("the stream was interrupted while it learned"))


@dataclass(slots=True)
class LoadedStream:
    """A stream in memory, with its journal.

    Attributes:
        live: engine, guard, and what else the stream has learned.
        journal: the writes of this worker to the stream.
        loaded_at: when it was loaded, by the monotonic clock.
        used: when it was last used.
        written: when the last snapshot was built.
        journal_bytes: size of the records that the newest snapshot does not cover.
        snapshot_end: the position up to which the newest snapshot goes; it may not be durable yet.
        saving: held while a saved snapshot is written or deleted, so that two requests cannot both find its name free;
            and while a state is restored, so that the journal holds few whole states.
        row_seconds: CPU time of a request lately, or of a row of one. Waiting for a busy machine must not make groups
            of rows small, because small groups take longer.
        in_use: held while `live` is read or changed, because that may happen in a thread.
        notice_maker: finds what webhooks tell of the stream.
        changing: a context manager for every change to `live`.
    """

    live: LiveStream
    journal: Journal = field(default_factory=Journal)
    loaded_at: float = field(default_factory=time.monotonic)
    used: float = field(default_factory=time.monotonic)
    written: float = field(default_factory=time.monotonic)
    journal_bytes: int = 0
    snapshot_end: int = field(init=False)
    saving: asyncio.Lock = field(default_factory=asyncio.Lock)
    row_seconds: float = 0.001
    in_use: asyncio.Lock = field(default_factory=asyncio.Lock)
    notice_maker: NoticeMaker = field(init=False)
    changing: _Changing = field(init=False)
    # Whether it is slow with this config and so many classes.
    _slow: tuple[Any, int, bool] | None = None

    def __post_init__(self) -> None:
        self.snapshot_end = self.live.covered
        self.notice_maker = NoticeMaker(self.live.warnings)
        self.changing = _Changing(self.journal)

    @property
    def unsnapshotted_records(self) -> int:
        """How many records the newest snapshot does not cover."""
        return self.live.position - self.snapshot_end

    @property
    def slow(self) -> bool:
        """Whether a step of the stream may block the event loop for too long."""
        engine = self.live.engine
        config, classes = engine.config, len(engine.classes)
        if self._slow is None or self._slow[0] is not config or self._slow[1] != classes:
            cost = total(estimate(config, classes, engine.dimension, self.live.spec.guard))
            self._slow = config, classes, cost.slowest > _SLOW_STEP or cost.mean > _SLOW_MEAN_STEP
        return self._slow[2]

"""What a store takes and returns: fences and leases, streams, and what is written to them."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from ...errors import ConfigError
from ..log.entries import LogEntry, Range
from ..log.notices import Notice


class Fence(NamedTuple):
    """The right to write to a stream, given out by one acquisition.

    Attributes:
        epoch: grows with each acquisition.
        token: random, so that no other acquisition has the same fence.
    """

    epoch: int
    token: str = ""


class Takeover(NamedTuple):
    """A demand for a stream whose holder lives, because a process cannot reach that holder.

    Attributes:
        holder: the worker to take the stream from; the stream stays with any other one.
        pause: minimum seconds between two takeovers of a stream. Without it, two processes that reach different workers
            would move the stream back and forth with every request.
    """

    holder: str
    pause: float


@dataclass(frozen=True, slots=True)
class Lease:
    """The result of a renewal.

    Attributes:
        holder: the incarnation that held the lease before; None if nobody did. If it is another one than the caller's
            and still lives, the lease was not renewed.
        time: seconds since 1970 by the store's clock.
        taken: streams that others took from this worker by a `Takeover`, and the epochs of those acquisitions. Each is
            named for at least one lease.
    """

    holder: str | None
    time: float
    taken: Mapping[str, int] = field(default_factory=dict)


class KeySegment(NamedTuple):
    """Idempotency keys that one checkpoint of a stream stored.

    Attributes:
        position: of the checkpoint.
        data: the packed keys.
    """

    position: int
    data: bytes


@dataclass(frozen=True, slots=True)
class AcquiredStream:
    """A stream that was acquired, with all that is needed to load it.

    Attributes:
        fence: to be named in every write.
        spec: what the stream was created with.
        snapshot: the newest one; None before the first.
        start: the position of the first record of the tail: how many positions the snapshot covers.
        position: where the next record goes.
        tail: the packed records behind the snapshot, in order.
        incarnation: differs from that of every deleted stream with the same id.
        created: when, in seconds since 1970 by the store's clock.
        keys: the idempotency keys that the newest snapshot goes with, in order.
    """

    fence: Fence
    spec: bytes
    snapshot: bytes | None
    start: int
    position: int
    tail: list[bytes]
    incarnation: str = ""
    created: float = 0.0
    keys: Sequence[KeySegment] = ()

    @property
    def epoch(self) -> int:
        """The epoch of the fence."""
        return self.fence.epoch


# Not frozen: the constructor of a frozen class takes several times as long.
@dataclass(slots=True)
class Batch:
    """Packed records that follow one another.

    Attributes:
        stream: the id of the stream.
        fence: the right to write to it.
        position: of the first record.
        records: the packed records.
        summary: what lists show from then on.
        log: entries of the decision log, for those of the records that are decisions. They are written if and only if
            the records are.
        roll_backs: positions whose entries are marked as rolled back.
        notices: of the decisions among the records. They are written if and only if the records are.
        positions: how many positions each record covers; empty: each covers one.
        end: the position behind the last record.
        size: bytes of the records.
    """

    stream: str
    fence: Fence
    position: int
    records: Sequence[bytes]
    summary: bytes = b""
    log: Sequence[LogEntry] = ()
    roll_backs: Sequence[Range] = ()
    notices: Sequence[Notice] = ()
    positions: Sequence[int] = ()
    end: int = field(init=False)
    size: int = field(init=False)

    def __post_init__(self) -> None:
        self.end = self.position + (sum(self.positions) or len(self.records))
        self.size = sum(map(len, self.records))

    def rows(self) -> Iterator[tuple[int, int, bytes]]:
        """Yield the position of each record, how many positions it covers, and the record."""
        at = self.position
        for count, record in zip(self.positions or [1] * len(self.records), self.records, strict=True):
            yield at, count, record
            at += count


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A snapshot that covers all records before `position`; the journal is cut there, between two records.

    Attributes:
        stream: the id of the stream.
        fence: the right to write to it.
        position: how many records the snapshot covers.
        snapshot: replaces the one before.
        keys: a segment of idempotency keys to store; empty if there are no new ones.
        kept_keys: the first and the last position of the stored segments that stay; the others go.
    """

    stream: str
    fence: Fence
    position: int
    snapshot: bytes
    keys: bytes = b""
    kept_keys: Range = (0, 0)


Write = Batch | Checkpoint


class Described(NamedTuple):
    """What a store knows of a stream without loading it.

    Attributes:
        spec: what the stream was created with.
        incarnation: differs from that of every deleted stream with the same id.
    """

    spec: bytes
    incarnation: str


class ListedStream(NamedTuple):
    """A stream in a list.

    Attributes:
        id: its id.
        created: when, in seconds since 1970 by the store's clock.
        summary: of its newest batch of records; empty before the first.
        problem: why a worker could not load it; None unless it tried and failed. A store does not know this.
    """

    id: str
    created: float
    summary: bytes
    problem: str | None = None


class Totals(NamedTuple):
    """What a store holds.

    Attributes:
        streams: how many there are, of all tenants.
        bytes: that they use, without decision logs.
        log_bytes: of the decision logs, thumbnails included.
        file_bytes: of the files on the disk; this and the following are 0 if the store has no files here.
        free_bytes: free on that disk.
        disk_bytes: the size of that disk.
    """

    streams: int
    bytes: int
    log_bytes: int = 0
    file_bytes: int = 0
    free_bytes: int = 0
    disk_bytes: int = 0


def check_lease(seconds: float) -> None:
    """Refuse a lease that can not be."""
    if not (math.isfinite(seconds) and seconds > 0):
        raise ConfigError(f"a lease of {seconds} s: it must last for more than 0 s")

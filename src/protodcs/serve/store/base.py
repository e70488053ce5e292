"""What the service asks of a store, and no more: leases, journals, snapshots, and one order for all of it.

The rules that every store keeps:

- A write is durable when `commit` returns, as far as the store's setting promises; until then nobody is told of it.
- Each acquisition of a stream gives out a new fence: a higher epoch and a random token. Only the newest fence can
  write. The store rejects every other one with `FencedError` and keeps nothing of the write. The token matters if the
  store lost acknowledged writes, because it may then give out an epoch a second time. The fence alone decides: after a
  lease ran out, or a resignation or release, others may acquire the stream, and that is what fences its last worker.
- A stream that was deleted and begins again goes on above all its old epochs. A store that is opened again may also go
  on above all that it ever gave out, and so fence all who held a stream before.
- What a stream has learned is its snapshot and the records behind it. A journal is cut only behind a snapshot that is
  durable itself, in the same step.
- A commit that is repeated because its answer was lost is done once.
- Ids of streams and names of workers, blobs and saved snapshots may be any strings, including empty ones and halves of
  surrogate pairs.
"""

import math
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from ...errors import ConfigError, FencedError, StoreError
from ..log.entries import LogEntry, LogLimits, LogPage, LogQuery, Purge, Range
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
        start: the position of the first record of the tail: how many records the snapshot covers.
        tail: the packed records behind the snapshot, in order.
        incarnation: differs from that of every deleted stream with the same id.
        created: when, in seconds since 1970 by the store's clock.
        keys: the idempotency keys that the newest snapshot goes with, in order.
    """

    fence: Fence
    spec: bytes
    snapshot: bytes | None
    start: int
    tail: list[bytes]
    incarnation: str = ""
    created: float = 0.0
    keys: Sequence[KeySegment] = ()

    @property
    def epoch(self) -> int:
        """The epoch of the fence."""
        return self.fence.epoch

    @property
    def position(self) -> int:
        """Where the next record goes."""
        return self.start + len(self.tail)


@dataclass(frozen=True, slots=True)
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
    """

    stream: str
    fence: Fence
    position: int
    records: Sequence[bytes]
    summary: bytes = b""
    log: Sequence[LogEntry] = ()
    roll_backs: Sequence[Range] = ()
    notices: Sequence[Notice] = ()


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A snapshot that covers all records before `position`; the journal is cut there.

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


@dataclass(frozen=True, slots=True)
class Described:
    """What a store knows of a stream without loading it.

    Attributes:
        spec: what the stream was created with.
        epoch: of its newest worker.
        worker: who holds it and lives, by its lease; None if there is nobody.
        position: where its next record goes.
        start: how many records its snapshot covers.
        size: bytes of its spec, snapshot, keys, journal and saved snapshots.
        incarnation: differs from that of every deleted stream with the same id.
    """

    spec: bytes
    epoch: int
    worker: str | None
    position: int
    start: int
    size: int
    incarnation: str = ""


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


class Store(Protocol):
    """A store of streams, used by one worker. Every failure to reach it is a `StoreError`.

    Attributes:
        generation: changes if the store may have lost writes, for example because another server answers now. What an
            worker read before such a change may differ from what the store holds.
    """

    generation: str

    @property
    def problem(self) -> str:
        """Why writes fail at present, as far as the store knows; empty if they do not."""
        ...

    async def renew(self, worker: str, incarnation: str, seconds: float, takes_over: bool = False) -> Lease:
        """Renew the lease of a worker: until it ends nobody else takes the streams that this worker holds.

        A lease belongs to one incarnation of a worker. A new incarnation takes it from its predecessor with
        `takes_over`, which frees what the predecessor held. Without it, the lease of another incarnation stays.

        Raises:
            ConfigError: the time is not a number of seconds above 0.
        """
        ...

    async def resign(self, worker: str, incarnation: str) -> None:
        """Say that this worker holds nothing any more; nothing happens if its lease is of another incarnation."""
        ...

    async def create(self, stream: str, spec: bytes, *shared: str, start: int = 0) -> bool:
        """Begin a stream that uses the shared blobs of these names; False if it exists already, whatever its spec.

        Its first record has the position `start`. A stream that comes from another store goes on with its positions.

        Raises:
            StoreError: a blob is not there. It may have gone with the last stream that used it, after it was put:
                put it again and try again.
        """
        ...

    async def acquire(
        self, stream: str, worker: str, incarnation: str, takeover: Takeover | None = None
    ) -> AcquiredStream:
        """Become the one that may write to a stream.

        A worker takes what it, or an earlier incarnation of its name, holds; and what another one holds whose lease
        ran out. With `takeover` it also takes the stream from a holder that lives, whose next renewal says so. A store
        for one worker ignores `takeover`.

        Raises:
            UnknownStreamError: there is no such stream.
            HeldError: another worker holds it and lives.
        """
        ...

    async def commit(self, writes: Sequence[Write]) -> list[FencedError | StoreError | None]:
        """Make writes durable, in order, in one round trip. Return for each None, or why it failed.

        Each write stands or falls on its own; a refused one leaves no trace and does not touch its neighbours. A
        StoreError in the list says that what the store holds of this stream is damaged.

        All of a batch, or a snapshot older than the newest, that is there already from the same fence is a repetition,
        and fine. A batch that leaves a gap, or of which only a part is there, or something else, and a snapshot of more
        records than there are, or older than one of an earlier epoch, are refused as those of a stale epoch are:
        whoever sends one is wrong about the stream, and must throw its memory away and acquire it again.

        Raises:
            StoreError: the store cannot be reached or refuses all writes. Nobody knows what was done; the same commit
                may be sent again.
        """
        ...

    async def release(self, stream: str, fence: Fence) -> None:
        """Give a stream up, so that anyone can acquire it at once; nothing happens if it has another worker already.

        Until someone does, writes with this fence are still taken: one that the release overtook is not lost.
        """
        ...

    async def delete(self, stream: str, fence: Fence) -> None:
        """Forget a stream and all that belongs to it, and those shared blobs that no other stream uses.

        Raises:
            FencedError: the fence is not the newest, or there is no such stream.
        """
        ...

    async def describe(self, stream: str) -> Described:
        """What is known of a stream; raises UnknownStreamError."""
        ...

    def streams(self) -> AsyncIterator[str]:
        """The ids of all streams, in no particular order."""
        ...

    async def list_streams(self, tenant: str, after: str | None, limit: int) -> list[ListedStream]:
        """Return the streams of a tenant in the order of the bytes of their ids: all that come after `after`.

        The time that this takes does not depend on the streams of other tenants.
        """
        ...

    async def count_streams(self, tenant: str) -> int:
        """Return how many streams a tenant has."""
        ...

    async def usage(self) -> dict[str, int]:
        """Return the bytes that each tenant uses: specs, journals, snapshots, keys, saved snapshots and shared blobs.

        A shared blob counts once for each tenant that uses it. A tenant without streams may be missing. The tenant of a
        stream without a slash in its id is the empty string.
        """
        ...

    async def log_usage(self) -> dict[str, int]:
        """Return the bytes of the decision logs of each tenant; none if the store does not count them."""
        ...

    async def totals(self) -> Totals:
        """Return how many streams the store holds, and how much room they take."""
        ...

    async def save_snapshot(self, stream: str, fence: Fence, name: str, snapshot: bytes) -> None:
        """Save a snapshot under a name, beside the newest one. Replace one of the same name. Raises FencedError."""
        ...

    async def saved_snapshots(self, stream: str) -> list[str]:
        """Return the names of the saved snapshots, oldest first; none if there is no such stream."""
        ...

    async def saved_snapshot(self, stream: str, name: str) -> bytes | None:
        """Return a saved snapshot; None if there is none of this name, or no such stream."""
        ...

    async def delete_snapshot(self, stream: str, fence: Fence, name: str) -> None:
        """Delete a saved snapshot, if it is there. Raises FencedError."""
        ...

    async def put_shared(self, name: str, data: bytes) -> None:
        """Put a blob that many streams share; its name is a fingerprint of its content, so it never changes.

        If no stream uses it within an hour, or if many others are put meanwhile, it may go.
        """
        ...

    async def has_shared(self, name: str) -> bool:
        """Return whether there is a shared blob of this name."""
        ...

    async def get_shared(self, name: str) -> bytes:
        """A shared blob; a StoreError if it is missing."""
        ...

    async def add_document(self, kind: str, name: str, data: bytes) -> bytes:
        """Store a small document unless there is one of this kind and name. Return the one that is stored."""
        ...

    async def put_document(self, kind: str, name: str, data: bytes) -> None:
        """Store a small document in place of any other of this kind and name. It is durable when this returns."""
        ...

    async def documents(self, kind: str) -> dict[str, bytes]:
        """Return all documents of a kind, by name. Documents belong to the service and to no stream."""
        ...

    async def delete_document(self, kind: str, name: str) -> bool:
        """Delete a document. Return whether there was one."""
        ...

    async def read_log(self, stream: str, query: LogQuery) -> LogPage:
        """Return a page of the decision log of a stream, without what is not durable yet.

        Raises:
            UnknownStreamError: there is no such stream.
        """
        ...

    async def read_notices(self, stream: str, after: tuple[int, int] | None, since: int | None = None) -> list[Notice]:
        """Return the notices of a stream after a position and number, or from a time on, in order.

        A store keeps the newest ones. It returns nothing that is not durable. Raises UnknownStreamError.
        """
        ...

    async def read_tenant_notices(self, tenant: str, after: int, limit: int) -> list[tuple[int, str, Notice]]:
        """Return notices of a tenant whose ids are above `after`: id, stream and content, in the order of ids.

        Ids grow in the order in which the notices became durable.
        """
        ...

    async def newest_notice(self, tenant: str) -> int:
        """Return an id that no notice of a tenant exceeds, and that every later one will exceed."""
        ...

    async def read_thumbnail(self, stream: str, position: int) -> bytes | None:
        """Return the thumbnail of a decision; None if there is none. Raises UnknownStreamError."""
        ...

    async def purge_log(self, stream: str, wanted: Purge) -> int:
        """Delete entries of the decision log of a stream for good, and return how many. Raises UnknownStreamError."""
        ...

    async def delete_thumbnails(self) -> None:
        """Delete the thumbnails of all streams for good. The other fields of the decision log stay."""
        ...

    async def trim_log(self, limits: LogLimits, now: float | None) -> None:
        """Delete entries of the decision log that are beyond the limits of their stream.

        Args:
            limits: of each stream.
            now: the time, in seconds since 1970. None: it is not certain, so nothing is deleted because of its age.
        """
        ...

    async def close(self) -> None:
        """Let go of files and connections."""
        ...


def check_lease(seconds: float) -> None:
    """Refuse a lease that can not be."""
    if not (math.isfinite(seconds) and seconds > 0):
        raise ConfigError(f"a lease of {seconds} s: it must last for more than 0 s")

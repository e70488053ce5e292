"""A store in memory that several workers of one process share, with faults that a test asks for.

It keeps the rules of `protodcs.serve.store.base` in the plainest way, and is itself held against the contract tests.
"""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from protodcs.errors import FencedError, HeldError, StoreError, UnknownStreamError
from protodcs.serve.log.entries import LogEntry, LogLimits, LogPage, LogQuery, Purge, Range, marked
from protodcs.serve.log.notices import Notice
from protodcs.serve.settings import tenant_of
from protodcs.serve.store.transaction import to_bytes, to_text
from protodcs.serve.store.values import (
    AcquiredStream,
    Batch,
    Checkpoint,
    Described,
    Fence,
    KeySegment,
    Lease,
    ListedStream,
    Takeover,
    Totals,
    Write,
    check_lease,
)


@dataclass
class _Stream:
    spec: bytes
    shared: tuple[str, ...]
    fence: Fence
    incarnation: str
    # Where the newest epoch began, and the fence that wrote the snapshot.
    since: int = 0
    covered_by: Fence | None = None
    holder: tuple[str, str] | None = None
    snapshot: bytes | None = None
    start: int = 0
    # Position, number of positions, and record.
    journal: list[tuple[int, int, bytes]] = field(default_factory=list)
    keys: list[KeySegment] = field(default_factory=list)
    saved: dict[str, bytes] = field(default_factory=dict)
    created: float = field(default_factory=time.time)
    summary: bytes = b""
    log: list[LogEntry] = field(default_factory=list)
    notices: list[Notice] = field(default_factory=list)
    roll_backs: list[Range] = field(default_factory=list)

    @property
    def position(self) -> int:
        return self.start + sum(count for _, count, _ in self.journal)


def _size(stream: _Stream) -> int:
    keys = [data for _, data in stream.keys]
    records = [record for *_, record in stream.journal]
    return sum(map(len, [stream.spec, stream.snapshot or b"", *keys, *records, *stream.saved.values()]))


class MemoryStore:
    problem = ""

    def __init__(self) -> None:
        self.generation = ""
        # Added to the time of this machine.
        self.clock_offset = 0.0
        self._created = 0
        self._acquired = 0
        self.content: dict[str, _Stream] = {}
        self.leases: dict[str, tuple[str, float]] = {}
        # When each stream may be taken again from a holder that lives, and what was taken from each worker.
        self._takeovers: dict[str, float] = {}
        self._taken: dict[str, dict[str, int]] = {}
        self.shared: dict[str, bytes] = {}
        self.all_notices: list[tuple[str, Notice]] = []
        self.stored_documents: dict[str, dict[str, bytes]] = {}
        # An epoch above those of all streams that were deleted.
        self.past = 0
        self.down = False
        # GroupCommit wait until it is set.
        self.gate: asyncio.Event | None = None
        # The next so many commits are done, and their answer is lost.
        self.lose_answers = 0
        self.commits = 0
        # Writes that do not fit their journal: a worker must never send one.
        self.misfits: list[Write] = []

    def _reach(self) -> None:
        if self.down:
            raise StoreError("the store is down")

    def _own(self, stream: str, fence: Fence) -> _Stream:
        found = self.content.get(stream)
        if found is None or found.fence != fence:
            newest = "gone" if found is None else f"at {found.fence}"
            raise FencedError(f"a write of {fence} to the stream {stream!r}, which is {newest}")
        return found

    def _holder(self, found: _Stream) -> str | None:
        """Who holds a stream and lives."""
        if found.holder is None:
            return None
        worker, incarnation = found.holder
        lives, until = self.leases.get(worker, ("", 0.0))
        return worker if lives == incarnation and time.monotonic() < until else None

    async def renew(self, worker: str, incarnation: str, seconds: float, takes_over: bool = False) -> Lease:
        self._reach()
        check_lease(seconds)
        holder, until = self.leases.get(worker, (None, 0.0))
        if time.monotonic() >= until:
            holder = None
        if takes_over or holder in (None, incarnation):
            self.leases[worker] = (incarnation, time.monotonic() + seconds)
        return Lease(holder, time.time() + self.clock_offset, dict(self._taken.get(worker, {})))

    async def resign(self, worker: str, incarnation: str) -> None:
        self._reach()
        if self.leases.get(worker, ("", 0.0))[0] == incarnation:
            del self.leases[worker]

    async def create(self, stream: str, spec: bytes, *shared: str) -> bool:
        self._reach()
        if stream in self.content:
            return False
        if any(name not in self.shared for name in shared):
            raise StoreError(f"a shared blob of {shared} is missing: put it first")
        self._created += 1
        self.content[stream] = _Stream(spec, shared, Fence(self.past, "nobody"), str(self._created))
        return True

    async def acquire(
        self, stream: str, worker: str, incarnation: str, takeover: Takeover | None = None
    ) -> AcquiredStream:
        self._reach()
        found = self.content.get(stream)
        if found is None:
            raise UnknownStreamError(f"there is no stream {stream!r}")
        holder = self._holder(found)
        lives = holder is not None and holder != worker
        now = time.monotonic()
        if lives and (takeover is None or takeover.holder != holder or self._takeovers.get(stream, 0.0) > now):
            raise HeldError(f"{stream!r} is held by {holder!r}", holder)
        self._acquired += 1
        found.fence = Fence(found.fence.epoch + 1, str(self._acquired))
        if lives:
            self._takeovers[stream] = now + takeover.pause
            self._taken.setdefault(holder, {})[stream] = found.fence.epoch
        found.since, found.covered_by = found.position, None
        found.holder = (worker, incarnation)
        return AcquiredStream(
            found.fence,
            found.spec,
            found.snapshot,
            found.start,
            found.position,
            [record for *_, record in found.journal],
            found.incarnation,
            found.created,
            list(found.keys),
        )

    async def commit(self, writes: Sequence[Write]) -> list[FencedError | StoreError | None]:
        if self.gate is not None:
            await self.gate.wait()
        self._reach()
        self.commits += 1
        outcomes = [self._write(write) for write in writes]
        if self.lose_answers:
            self.lose_answers -= 1
            raise StoreError("the answer was lost")
        return outcomes

    def _write(self, write: Write) -> FencedError | None:
        try:
            found = self._own(write.stream, write.fence)
        except FencedError as problem:
            return problem
        fits = self._append(found, write) if isinstance(write, Batch) else self._cover(found, write)
        if fits:
            return None
        self.misfits.append(write)
        return FencedError(f"{write.stream!r}: a write at position {write.position}, and the next is {found.position}")

    def _append(self, found: _Stream, batch: Batch) -> bool:
        rows = list(batch.rows())
        if batch.position != found.position:
            there = [row for row in found.journal if batch.position <= row[0] < batch.end]
            expected = [row for row in rows if row[0] >= found.start]
            return found.since <= batch.position and batch.end <= found.position and there == expected
        found.journal += rows
        found.summary = batch.summary
        found.notices += batch.notices
        self.all_notices += ((batch.stream, notice) for notice in batch.notices)
        found.log += [entry._replace(has_thumbnail=bool(entry.thumbnail)) for entry in batch.log]
        found.roll_backs += batch.roll_backs
        return True

    def _cover(self, found: _Stream, checkpoint: Checkpoint) -> bool:
        if checkpoint.position < found.start:
            return found.covered_by == checkpoint.fence
        if checkpoint.position > found.position:
            return False
        if checkpoint.position not in {*(at for at, *_ in found.journal), found.position}:
            return False
        found.snapshot, found.covered_by = checkpoint.snapshot, checkpoint.fence
        first, last = checkpoint.kept_keys
        found.keys = [segment for segment in found.keys if first <= segment.position <= last]
        if checkpoint.keys:
            found.keys.append(KeySegment(checkpoint.position, checkpoint.keys))
        found.journal = [row for row in found.journal if row[0] >= checkpoint.position]
        found.start = checkpoint.position
        return True

    async def release(self, stream: str, fence: Fence) -> None:
        self._reach()
        found = self.content.get(stream)
        if found is not None and found.fence == fence:
            found.holder = None

    async def delete(self, stream: str, fence: Fence) -> None:
        self._reach()
        shared = self._own(stream, fence).shared
        del self.content[stream]
        self.past = max(self.past, fence.epoch + 1)
        for name in shared:
            if all(name not in other.shared for other in self.content.values()):
                del self.shared[name]

    async def describe(self, stream: str) -> Described:
        self._reach()
        found = self.content.get(stream)
        if found is None:
            raise UnknownStreamError(f"there is no stream {stream!r}")
        return Described(found.spec, found.incarnation)

    async def list_streams(self, tenant: str, after: str | None, limit: int) -> list[ListedStream]:
        self._reach()
        found = sorted((stream.encode("utf-8", "surrogatepass"), stream) for stream in self.content)
        start = None if after is None else after.encode("utf-8", "surrogatepass")
        rows = [
            ListedStream(stream, self.content[stream].created, self.content[stream].summary)
            for name, stream in found
            if (start is None or name > start) and tenant_of(stream) == tenant
        ]
        return rows[:limit]

    async def count_streams(self, tenant: str) -> int:
        self._reach()
        return sum(tenant_of(stream) == tenant for stream in self.content)

    async def add_document(self, kind: str, name: str, data: bytes) -> bytes:
        self._reach()
        return self.stored_documents.setdefault(kind, {}).setdefault(name, data)

    async def put_document(self, kind: str, name: str, data: bytes) -> None:
        self._reach()
        self.stored_documents.setdefault(kind, {})[name] = data

    async def documents(self, kind: str) -> dict[str, bytes]:
        self._reach()
        return dict(sorted(self.stored_documents.get(kind, {}).items()))

    async def delete_document(self, kind: str, name: str) -> bool:
        self._reach()
        return self.stored_documents.get(kind, {}).pop(name, None) is not None

    async def usage(self) -> dict[str, int]:
        self._reach()
        found: dict[str, int] = {}
        for stream, content in self.content.items():
            tenant = tenant_of(stream)
            found[tenant] = found.get(tenant, 0) + _size(content)
        used = {(tenant_of(stream), name) for stream, content in self.content.items() for name in content.shared}
        for tenant, name in used:
            found[tenant] += len(self.shared[name])
        return found

    async def log_usage(self) -> dict[str, int]:
        return {}

    async def totals(self) -> Totals:
        return Totals(len(self.content), sum((await self.usage()).values()))

    async def save_snapshot(self, stream: str, fence: Fence, name: str, snapshot: bytes) -> None:
        self._reach()
        saved = self._own(stream, fence).saved
        saved.pop(name, None)
        saved[name] = snapshot

    async def saved_snapshots(self, stream: str) -> list[str]:
        self._reach()
        return list(self.content[stream].saved) if stream in self.content else []

    async def saved_snapshot(self, stream: str, name: str) -> bytes | None:
        self._reach()
        return self.content[stream].saved.get(name) if stream in self.content else None

    async def delete_snapshot(self, stream: str, fence: Fence, name: str) -> None:
        self._reach()
        self._own(stream, fence).saved.pop(name, None)

    async def put_shared(self, name: str, data: bytes) -> None:
        self._reach()
        self.shared[name] = data

    async def has_shared(self, name: str) -> bool:
        self._reach()
        return name in self.shared

    async def get_shared(self, name: str) -> bytes:
        self._reach()
        if name not in self.shared:
            raise StoreError(f"there is no shared blob {name!r}")
        return self.shared[name]

    def _logged(self, stream: str) -> _Stream:
        self._reach()
        if stream not in self.content:
            raise UnknownStreamError(f"there is no stream {stream!r}")
        return self.content[stream]

    async def read_notices(self, stream: str, after: tuple[int, int] | None, since: int | None = None) -> list[Notice]:
        found = self._logged(stream)
        return [notice for notice in found.notices if notice[:2] > (after or (-1, 0)) and notice.time >= (since or 0)]

    async def read_tenant_notices(self, tenant: str, after: int, limit: int) -> list[tuple[int, str, Notice]]:
        found = enumerate(self.all_notices, 1)
        return [(at, stream, one) for at, (stream, one) in found if at > after and tenant_of(stream) == tenant][:limit]

    async def newest_notice(self, tenant: str) -> int:
        return len(self.all_notices)

    async def read_log(self, stream: str, query: LogQuery) -> LogPage:
        found = self._logged(stream)
        entries = sorted(found.log, key=lambda entry: entry.position, reverse=query.newest_first)
        entries = [
            entry._replace(thumbnail=b"")
            for entry in entries
            if not query.is_contradictory and _matches(query, entry) and _between(entry, query.since, query.until)
        ]
        if query.after is not None:
            entries = [
                entry
                for entry in entries
                if (entry.position < query.after if query.newest_first else entry.position > query.after)
            ]
        return LogPage(marked(entries[: query.limit], found.roll_backs), len(entries) > query.limit)

    async def read_thumbnail(self, stream: str, position: int) -> bytes | None:
        thumbnails = {entry.position: entry.thumbnail for entry in self._logged(stream).log}
        return thumbnails.get(position) or None

    async def purge_log(self, stream: str, wanted: Purge) -> int:
        found = self._logged(stream)
        left = [
            entry
            for entry in found.log
            if not (_between(entry, wanted.since, wanted.until) and wanted.image_ref in (None, entry.image_ref))
        ]
        count, found.log = len(found.log) - len(left), left
        return count

    async def delete_thumbnails(self) -> None:
        self._reach()
        for found in self.content.values():
            found.log = [entry._replace(thumbnail=b"", has_thumbnail=False) for entry in found.log]

    async def trim_log(self, limits: LogLimits, now: float | None) -> None:
        self._reach()
        for found in self.content.values():
            oldest = 0 if now is None else 1000 * (now - limits.seconds)
            found.log = [entry for entry in found.log if entry.time >= oldest][-limits.entries :]

    async def close(self) -> None:
        pass


async def stored_ids(store) -> list[str]:
    """Return the ids of all streams of a store of any kind."""
    if isinstance(store, MemoryStore):
        return sorted(store.content)
    return sorted(to_text(stream) for (stream,) in await store._ask("SELECT id FROM streams"))


class StoredStream(NamedTuple):
    """What a store holds of a stream: who acquired it last and lives, where it ends, and its bytes."""

    spec: bytes
    epoch: int
    worker: str | None
    start: int
    position: int
    size: int
    incarnation: str


async def stored_stream(store, stream: str) -> StoredStream:
    """Return what a store of any kind holds of a stream."""
    spec, incarnation = await store.describe(stream)
    if isinstance(store, MemoryStore):
        found = store.content[stream]
        place = found.fence.epoch, store._holder(found), found.start, found.position, _size(found)
        return StoredStream(spec, *place, incarnation)
    ((epoch, worker, start, position, size),) = await store._ask(
        "SELECT epoch, (SELECT worker FROM leases WHERE leases.worker = streams.worker "
        "AND leases.incarnation = streams.incarnation AND until > lease_clock()), "
        "start, finish, state_bytes + journal_bytes FROM streams WHERE id = ?",
        to_bytes(stream),
    )
    return StoredStream(spec, epoch, worker and to_text(worker), start, position, size, incarnation)


def _matches(query, entry):
    return entry.outcome_code in query.outcome_codes() and query.class_name() in (None, entry.nearest_class)


def _between(entry: LogEntry, since: int | None, until: int | None) -> bool:
    return (since is None or entry.time >= since) and (until is None or entry.time < until)

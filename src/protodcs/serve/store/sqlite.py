"""Streams in one SQLite database, for a service that is one process.

One thread does all the work. Calls that wait together share one transaction, and so one wait for the disk: group
commit. Nobody gets a reply before the transaction is durable (WAL, `synchronous=FULL`). Leases and holders are in
memory, because they end with the process: it holds a lock on the folder for as long as the store is open.
"""

import asyncio
import os
import secrets
import shutil
import sqlite3
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, suppress
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeVar

from ...atomic_io import lock_folder, sync_folder
from ...errors import FencedError, HeldError, InputError, StoreError, UnknownStreamError, UsageError
from ..log import sqlite as log_tables
from ..log.entries import LogLimits, LogPage, LogQuery, Purge
from ..log.notices import Notice
from ..log.notices_sqlite import SCHEMA as _NOTICES
from ..log.notices_sqlite import NoticeTable
from ..log.sqlite import POSITION_BITS, LogWriter, execute_with_rows, insert_rows
from ..settings import tenant_of
from .base import (
    AcquiredStream,
    Batch,
    Checkpoint,
    Described,
    Fence,
    Lease,
    ListedStream,
    Takeover,
    Totals,
    Write,
    check_lease,
)
from .commit_marks import CommitMarks, Mark, read_marks
from .inspection import DATABASE, LAYOUT, WAL, count_commits, refuse_fewer, refuse_loss
from .reserve import RESERVE, Reserve

T = TypeVar("T")

# Prepared statements in memory. Those with many rows of values differ by the number of rows.
_STATEMENTS: Final = 512
# Rows of streams in memory, at most.
_MAX_ROWS: Final = 10_000
_PAGE_BYTES: Final = 4096
# Unused pages go back to the disk if there are so many, and such a share of the database: a log that is trimmed all the
# time uses them again. So many go at once, because observes wait meanwhile.
_MIN_UNUSED: Final = 256
_MIN_UNUSED_SHARE: Final = 0.25
_PAGES_AT_ONCE: Final = 500
# How often that is done in a row to get the reserve back.
_VACUUMS_AT_ONCE: Final = 10
# Bytes of shared blobs that no stream uses yet. Beyond it, the oldest of them are deleted.
_MAX_UNUSED: Final = 1 << 28
# Free bytes with which writes should work again.
_ROOM: Final = 1 << 20
# Specs, snapshots and records are apart from `streams`, so that an append changes few pages.
_SCHEMA: Final = f"""
{log_tables.SCHEMA}
CREATE TABLE streams (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    id BLOB NOT NULL UNIQUE,
    tenant BLOB NOT NULL,
    epoch INTEGER NOT NULL,
    start INTEGER NOT NULL DEFAULT 0,
    finish INTEGER NOT NULL DEFAULT 0,
    base INTEGER NOT NULL DEFAULT 0,
    covered_by INTEGER,
    state_bytes INTEGER NOT NULL,
    journal_bytes INTEGER NOT NULL DEFAULT 0,
    created REAL NOT NULL,
    summary BLOB NOT NULL DEFAULT x''
) STRICT;
CREATE INDEX streams_by_tenant ON streams (tenant, id);
CREATE TABLE specs (stream INTEGER PRIMARY KEY, data BLOB NOT NULL) STRICT;
CREATE TABLE records (key INTEGER PRIMARY KEY, data BLOB NOT NULL) STRICT;
CREATE TABLE snapshots (stream INTEGER PRIMARY KEY, data BLOB NOT NULL) STRICT;
CREATE TABLE saved (
    stream INTEGER NOT NULL, name BLOB NOT NULL, place INTEGER NOT NULL, data BLOB NOT NULL, PRIMARY KEY (stream, name)
) STRICT;
CREATE TABLE blobs (name BLOB PRIMARY KEY, data BLOB NOT NULL) STRICT;
CREATE TABLE uses (
    blob BLOB NOT NULL, tenant BLOB NOT NULL, stream INTEGER NOT NULL, PRIMARY KEY (blob, tenant, stream)
) STRICT, WITHOUT ROWID;
CREATE INDEX uses_by_stream ON uses (stream);
CREATE TABLE unused (name BLOB PRIMARY KEY, size INTEGER NOT NULL) STRICT;
CREATE TABLE deleted (epoch INTEGER NOT NULL) STRICT;
INSERT INTO deleted VALUES (0);
CREATE TABLE documents (
    kind TEXT NOT NULL, name BLOB NOT NULL, data BLOB NOT NULL, PRIMARY KEY (kind, name)
) STRICT;
{_NOTICES}
CREATE TABLE commits (number INTEGER NOT NULL) STRICT;
INSERT INTO commits VALUES (0);
"""


class _Stream(NamedTuple):
    """A row of `streams`.

    Attributes:
        number: the name of the stream in the other tables; deleted streams keep theirs.
        epoch: of the newest acquisition.
        start: how many records the snapshot covers.
        finish: the position of the next record.
        base: the position where the epoch begins. Only records from there on can be a repetition by this epoch.
        covered_by: the epoch that wrote the snapshot; None before the first.
        tenant: whose stream it is.
        state_bytes: of its spec, snapshot and saved snapshots.
        journal_bytes: of its records behind the snapshot.
        created: when, in seconds since 1970.
    """

    number: int
    epoch: int
    start: int
    finish: int
    base: int
    covered_by: int | None
    tenant: bytes
    state_bytes: int
    journal_bytes: int
    created: float

    @property
    def size(self) -> int:
        """Bytes of all that belongs to the stream."""
        return self.state_bytes + self.journal_bytes

    def key(self, position: int) -> int:
        """Return the key of the record at a position: a journal is one range of one B-tree."""
        return (self.number << POSITION_BITS) + position

    def with_batch(self, batch: Batch) -> "_Stream":
        """Return the row after a batch was appended."""
        size = sum(map(len, batch.records))
        return self._replace(finish=self.finish + len(batch.records), journal_bytes=self.journal_bytes + size)


class _Append(NamedTuple):
    """Records that are appended to a stream, and its row before and after."""

    before: _Stream
    batch: Batch
    after: _Stream


class _Job(NamedTuple):
    """A call that waits for its turn. Those that free space may use the reserve if the disk is full."""

    work: Callable[[], Any]
    result: "Future[Any]"
    may_use_reserve: bool


class SqliteStore:
    """A store in a folder that one process uses.

    Args:
        folder: created if it does not exist.
        reserve_bytes: disk space that is kept for deletions.

    Attributes:
        failure: gets an error when the disk failed. From then on the store does nothing any more.

    Raises:
        StoreError: another process uses the folder, or it cannot be read or written.
    """

    # Nobody else can change the database while this object holds the folder.
    generation = ""

    def __init__(self, folder: str | os.PathLike[str], reserve_bytes: int = 0):
        self.folder = Path(folder)
        self._leases: dict[str, tuple[str, float]] = {}
        self._holders: dict[str, tuple[str, str]] = {}
        # The bytes that each tenant uses, and what the open transaction adds to them.
        self._usage: Counter[bytes] = Counter()
        self._added: Counter[bytes] = Counter()
        # Where journals end to which the open transaction appends.
        self._ends: dict[str, int] = {}
        # Rows of `streams` that were appended to, as they are in the database.
        self._rows: dict[str, _Stream] = {}
        self._closed = False
        self.failure: Future[BaseException] = Future()
        self._jobs: list[_Job] = []
        self._condition = threading.Condition()
        self._lock = _hold(self.folder)
        self._reserve = Reserve(self.folder, reserve_bytes)
        self._is_full = False
        try:
            if self._free_bytes() < _ROOM:
                # SQLite creates files when it opens a database.
                self._reserve.release()
            refuse_loss(self.folder)
            self._database = _open(self.folder)
            self._usage = _read_usage(self._database)
            self._commits = count_commits(self._database, self.folder) or 0
            self._marks = _open_marks(self.folder, self._commits)
            self._reserve.restore()
        except (sqlite3.Error, OSError) as problem:
            os.close(self._lock)
            raise self._as_error(problem) from problem
        except BaseException:
            os.close(self._lock)
            raise
        self._log = LogWriter(self._database)
        self._notices = NoticeTable(self._database)
        self._wal_has_deleted = False
        # Pages of the log are read beside the writes, in a thread and with a connection of their own.
        self._readers = ThreadPoolExecutor(1, thread_name_prefix="log reader")
        self._reader: sqlite3.Connection | None = None
        self._thread = threading.Thread(target=self._run, name="store", daemon=True)
        self._thread.start()

    # Leases.

    async def renew(self, worker: str, incarnation: str, seconds: float, takes_over: bool = False) -> Lease:
        """Renew the lease of a worker."""
        check_lease(seconds)
        # Through the thread, so that a store that hangs or failed renews nothing.
        return await self._call(lambda: self._renew(worker, incarnation, seconds, takes_over))

    def _renew(self, worker: str, incarnation: str, seconds: float, takes_over: bool) -> Lease:
        holder, until = self._leases.get(worker, (None, 0.0))
        if time.monotonic() >= until:
            holder = None
        if takes_over or holder in (None, incarnation):
            self._leases[worker] = (incarnation, time.monotonic() + seconds)
        return Lease(holder, time.time())

    async def resign(self, worker: str, incarnation: str) -> None:
        """End the lease of a worker, if it is of this incarnation."""
        await self._call(lambda: self._resign(worker, incarnation))

    def _resign(self, worker: str, incarnation: str) -> None:
        if worker in self._leases and self._leases[worker][0] == incarnation:
            del self._leases[worker]

    async def members(self) -> list[str] | None:
        """Return None: this store has one worker."""
        return None

    async def set_members(self, names: Sequence[str]) -> None:
        """Raise UsageError: this store has one worker."""
        raise UsageError(f"A SQLite store has one worker and stores no list of workers. Given: {list(names)}.")

    # Streams.

    async def create(self, stream: str, spec: bytes, *shared: str, start: int = 0) -> bool:
        """Create a stream; False if it exists already. Raise StoreError if a shared blob is missing."""
        return await self._call(lambda: self._create(stream, spec, [*map(_bytes, shared)], start))

    def _create(self, stream: str, spec: bytes, shared: list[bytes], start: int) -> bool:
        if self._find(stream) is not None:
            return False
        for name in shared:
            if not self._has_shared(name):
                raise self._missing(name)
        tenant = _bytes(tenant_of(stream))
        self._added[tenant] += len(spec) + sum(self._unused_blob(tenant, name) for name in shared)
        # Above the epochs of all deleted streams: who held one of the same name has no fence of this one.
        (epoch,) = self._database.execute("SELECT epoch FROM deleted").fetchone()
        number = self._database.execute(
            "INSERT INTO streams (id, tenant, epoch, start, finish, state_bytes, created) VALUES (?, ?, ?, ?, ?, ?, ?)",
            (_bytes(stream), tenant, epoch, start, start, len(spec), time.time()),
        ).lastrowid
        for name in shared:
            self._database.execute("INSERT INTO uses VALUES (?, ?, ?)", (name, tenant, number))
            self._database.execute("DELETE FROM unused WHERE name = ?", (name,))
        self._database.execute("INSERT INTO specs VALUES (?, ?)", (number, spec))
        return True

    async def acquire(
        self, stream: str, worker: str, incarnation: str, takeover: Takeover | None = None
    ) -> AcquiredStream:
        """Become the one that may write to a stream; `takeover` is ignored, because this store has one worker."""
        # A stream is acquired to delete it, too.
        return await self._call(lambda: self._acquire(stream, worker, incarnation), may_use_reserve=True)

    def _acquire(self, stream: str, worker: str, incarnation: str) -> AcquiredStream:
        self._rows.pop(stream, None)
        known = self._known(stream)
        holder = self._holder(stream)
        if holder is not None and holder != worker:
            raise HeldError(f"stream {stream!r} is held by {holder!r}, which lives: ask that worker", holder)
        spec = self._spec(known)
        snapshot = self._one("SELECT data FROM snapshots WHERE stream = ?", known.number)
        tail = self._records(known, known.start, known.finish)
        if len(tail) != known.finish - known.start:
            raise StoreError(f"{self._place} has lost records of the stream {stream!r}: restore a backup")
        self._database.execute(
            "UPDATE streams SET epoch = ?, base = finish, covered_by = NULL WHERE number = ?",
            (known.epoch + 1, known.number),
        )
        self._holders[stream] = worker, incarnation
        return AcquiredStream(
            Fence(known.epoch + 1), spec, snapshot, known.start, tail, str(known.number), known.created
        )

    async def release(self, stream: str, fence: Fence) -> None:
        """Give a stream up; nothing happens if it has another worker already."""
        await self._call(lambda: self._release(stream, fence.epoch))

    def _release(self, stream: str, epoch: int) -> None:
        known = self._find(stream)
        if known is not None and known.epoch == epoch:
            self._holders.pop(stream, None)

    async def delete(self, stream: str, fence: Fence) -> None:
        """Delete a stream and all that belongs to it, and its shared blobs if no other stream uses them."""
        await self._call(lambda: self._delete(stream, fence.epoch), may_use_reserve=True)

    def _delete(self, stream: str, epoch: int) -> None:
        known = self._fenced(stream, epoch)
        execute = self._database.execute
        execute("DELETE FROM streams WHERE number = ?", (known.number,))
        for table in ("specs", "snapshots", "saved"):
            execute(f"DELETE FROM {table} WHERE stream = ?", (known.number,))
        self._cut(known, known.finish)
        shared = [name for (name,) in execute("SELECT blob FROM uses WHERE stream = ?", (known.number,))]
        execute("DELETE FROM uses WHERE stream = ?", (known.number,))
        self._added[known.tenant] -= known.size + sum(self._unused_blob(known.tenant, name) for name in shared)
        self._log.delete_stream(known.number)
        self._notices.delete_stream(known.number)
        execute("UPDATE deleted SET epoch = max(epoch, ?)", (epoch + 1,))
        for name in shared:
            if not self._is_used(name):
                execute("DELETE FROM blobs WHERE name = ?", (name,))
        self._holders.pop(stream, None)

    async def describe(self, stream: str) -> Described:
        """Return what is known of a stream; its worker only while that one lives."""
        return await self._call(lambda: self._describe(stream))

    def _describe(self, stream: str) -> Described:
        known = self._known(stream)
        holder, created = self._holder(stream), str(known.number)
        return Described(self._spec(known), known.epoch, holder, known.finish, known.start, known.size, created)

    async def streams(self) -> AsyncIterator[str]:
        """Yield the ids of all streams that exist now."""
        for (stream,) in await self._call(lambda: self._database.execute("SELECT id FROM streams").fetchall()):
            yield _text(stream)

    async def list_streams(self, tenant: str, after: str | None, limit: int) -> list[ListedStream]:
        """Return streams of a tenant after an id, in the order of their ids."""
        start = "" if after is None else "AND id > ?"
        query = f"SELECT id, created, summary FROM streams WHERE tenant = ? {start} ORDER BY id LIMIT ?"
        values = (_bytes(tenant), *([] if after is None else [_bytes(after)]), limit)
        found = await self._call(lambda: self._database.execute(query, values).fetchall())
        return [ListedStream(_text(stream), created, summary) for stream, created, summary in found]

    async def count_streams(self, tenant: str) -> int:
        """Return how many streams a tenant has."""
        query = "SELECT count(*) FROM streams WHERE tenant = ?"
        count: int = await self._call(lambda: self._one(query, _bytes(tenant)))
        return count

    async def usage(self) -> dict[str, int]:
        """Return the bytes that each tenant uses, without reading the streams."""
        return await self._call(lambda: {_text(tenant): size for tenant, size in self._usage.items() if size})

    def _unused_blob(self, tenant: bytes, shared: bytes) -> int:
        """Return the bytes of a shared blob; 0 if a stream of the tenant uses it."""
        if self._one("SELECT 1 FROM uses WHERE blob = ? AND tenant = ? LIMIT 1", shared, tenant):
            return 0
        size: int = self._one("SELECT length(data) FROM blobs WHERE name = ?", shared)
        return size

    async def log_usage(self) -> dict[str, int]:
        """Return the bytes of the decision logs of each tenant."""
        found = await self._read(log_tables.log_bytes)
        return {_text(tenant): size for tenant, size in found}

    async def totals(self) -> Totals:
        """Return how many streams there are and how many bytes they, their logs and the files use."""
        streams, log_bytes = await self._call(
            lambda: (
                self._one("SELECT count(*) FROM streams"),
                self._one("SELECT ifnull(sum(bytes), 0) FROM log_sizes"),
            )
        )
        files = sum(file.stat().st_size for file in self.folder.iterdir() if file.name != RESERVE)
        disk = shutil.disk_usage(self.folder)
        return Totals(
            streams,
            sum(self._usage.values()),
            log_bytes=log_bytes,
            file_bytes=files,
            free_bytes=disk.free,
            disk_bytes=disk.total,
        )

    # Writes.

    async def commit(self, writes: Sequence[Write]) -> list[FencedError | StoreError | None]:
        """Make writes durable. After a StoreError, none of them was applied."""
        writes = list(writes)
        return await self._call(lambda: self._commit(writes))

    def _commit(self, writes: list[Write]) -> list[FencedError | StoreError | None]:
        outcomes: list[FencedError | StoreError | None] = []
        appends: list[_Append] = []
        for write in writes:
            outcome: FencedError | None = None
            try:
                known = self._fenced(write.stream, write.fence.epoch)
                if isinstance(write, Batch) and write.position == known.finish:
                    appends.append(_Append(known, write, known.with_batch(write)))
                    self._rows[write.stream] = appends[-1].after
                else:
                    # This reads what was appended before.
                    self._append(appends)
                    appends = []
                    outcome = (
                        self._repeated(known, write) if isinstance(write, Batch) else self._checkpoint(known, write)
                    )
            except FencedError as problem:
                outcome = problem
            outcomes.append(outcome)
        self._append(appends)
        if len(self._rows) > _MAX_ROWS:
            self._rows.clear()
        return outcomes

    def _append(self, appends: "list[_Append]") -> None:
        """Append batches of records. Those of all streams share few statements."""
        insert_rows(
            self._database,
            "records",
            [row for before, batch, _ in appends for row in enumerate(batch.records, before.key(batch.position))],
        )
        # A stream may have several batches. The last one counts.
        ends = {after.number: (after.finish, after.journal_bytes, batch.summary) for _, batch, after in appends}
        execute_with_rows(
            self._database,
            "UPDATE streams SET finish = column2, journal_bytes = column3, summary = column4 FROM (VALUES {rows}) "
            "WHERE number = column1",
            [(number, *end) for number, end in ends.items()],
        )
        self._log.append([(before.number, batch.log, batch.roll_backs) for before, batch, _ in appends])
        for before, batch, after in appends:
            self._ends[batch.stream] = after.finish
            self._added[before.tenant] += after.journal_bytes - before.journal_bytes
            if batch.notices:
                self._notices.append(before.number, _bytes(tenant_of(batch.stream)), batch.notices)

    def _repeated(self, known: _Stream, batch: Batch) -> FencedError | None:
        """Return None if this epoch wrote all of the batch before. Records behind a snapshot are not compared."""
        what, first, last = f"{len(batch.records)} records", batch.position, batch.position + len(batch.records)
        if first > known.finish:
            return _wrong(batch, what, f"the journal ends at {known.finish}: records between are missing")
        if first < known.base or last > known.finish:
            reason = f"this epoch began at {known.base} and the journal ends at {known.finish}"
            return _wrong(batch, what, f"{reason}: some of these positions are taken, and it is no repetition")
        seen = max(first, known.start)
        for position, record in enumerate(self._records(known, seen, last), seen):
            if record != batch.records[position - first]:
                return _wrong(batch, what, f"another record stands at {position} already")
        return None

    def _checkpoint(self, known: _Stream, checkpoint: Checkpoint) -> FencedError | None:
        position = checkpoint.position
        if position > known.finish:
            reason = f"the journal ends at {known.finish}: a snapshot cannot cover more"
            return _wrong(checkpoint, "a snapshot", reason)
        if position < known.start:
            if known.covered_by == checkpoint.fence.epoch:  # Sent again because its reply was lost.
                return None
            return _wrong(checkpoint, "a snapshot", f"one that covers {known.start} records is there already")
        before = self._one("SELECT length(data) FROM snapshots WHERE stream = ?", known.number) or 0
        self._database.execute("INSERT OR REPLACE INTO snapshots VALUES (?, ?)", (known.number, checkpoint.snapshot))
        grown = len(checkpoint.snapshot) - before
        self._cut(known, position)
        left = sum(map(len, self._records(known, position, known.finish)))
        self._database.execute(
            "UPDATE streams SET start = ?, covered_by = ?, state_bytes = state_bytes + ?, journal_bytes = ? "
            "WHERE number = ?",
            (position, known.epoch, grown, left, known.number),
        )
        self._added[known.tenant] += grown + left - known.journal_bytes
        return None

    def _records(self, known: _Stream, first: int, last: int) -> list[bytes]:
        found = self._database.execute(
            "SELECT data FROM records WHERE key >= ? AND key < ? ORDER BY key", (known.key(first), known.key(last))
        )
        return [data for (data,) in found]

    def _cut(self, known: _Stream, position: int) -> None:
        """Delete the records before a position."""
        self._database.execute(
            "DELETE FROM records WHERE key >= ? AND key < ?", (known.key(known.start), known.key(position))
        )

    # Saved snapshots and shared blobs.

    async def save_snapshot(self, stream: str, fence: Fence, name: str, snapshot: bytes) -> None:
        """Save a snapshot under a name, as the newest."""
        await self._call(lambda: self._save(stream, fence.epoch, _bytes(name), snapshot))

    def _save(self, stream: str, epoch: int, name: bytes, snapshot: bytes) -> None:
        known = self._fenced(stream, epoch)
        self._unsave(known, name)
        self._database.execute(
            "INSERT INTO saved SELECT ?1, ?2, ifnull(max(place), 0) + 1, ?3 FROM saved WHERE stream = ?1",
            (known.number, name, snapshot),
        )
        self._count(known, len(snapshot))

    async def saved_snapshots(self, stream: str) -> list[str]:
        """Return the names of the saved snapshots, oldest first."""
        return await self._call(lambda: self._saved(stream))

    def _saved(self, stream: str) -> list[str]:
        known = self._find(stream)
        if known is None:
            return []
        found = self._database.execute("SELECT name FROM saved WHERE stream = ? ORDER BY place", (known.number,))
        return [_text(name) for (name,) in found]

    async def saved_snapshot(self, stream: str, name: str) -> bytes | None:
        """Return a saved snapshot; None if there is none of this name."""
        return await self._call(lambda: self._saved_snapshot(stream, _bytes(name)))

    def _saved_snapshot(self, stream: str, name: bytes) -> bytes | None:
        known = self._find(stream)
        if known is None:
            return None
        found: bytes | None = self._one("SELECT data FROM saved WHERE stream = ? AND name = ?", known.number, name)
        return found

    async def delete_snapshot(self, stream: str, fence: Fence, name: str) -> None:
        """Delete a saved snapshot, if it is there."""
        await self._call(lambda: self._unsave(self._fenced(stream, fence.epoch), _bytes(name)), may_use_reserve=True)

    def _unsave(self, known: _Stream, name: bytes) -> None:
        where = "FROM saved WHERE stream = ? AND name = ?"
        size = self._one(f"SELECT length(data) {where}", known.number, name)
        if size is not None:
            self._database.execute(f"DELETE {where}", (known.number, name))
            self._count(known, -size)

    def _count(self, known: _Stream, size: int) -> None:
        self._added[known.tenant] += size
        self._database.execute(
            "UPDATE streams SET state_bytes = state_bytes + ? WHERE number = ?", (size, known.number)
        )

    async def put_shared(self, name: str, data: bytes) -> None:
        """Put a blob that many streams share. If none uses it, it is deleted when the store is opened again."""
        await self._call(lambda: self._put_shared(_bytes(name), data))

    def _put_shared(self, name: bytes, data: bytes) -> None:
        execute = self._database.execute
        execute("INSERT OR IGNORE INTO blobs VALUES (?, ?)", (name, data))
        if self._is_used(name):
            return
        execute("INSERT OR REPLACE INTO unused VALUES (?, ?)", (name, len(data)))
        newer = "SELECT name, size, sum(size) OVER (ORDER BY rowid DESC) AS total FROM unused"
        old = execute(f"SELECT name FROM ({newer}) WHERE total - size >= ?", (_MAX_UNUSED,)).fetchall()
        for table in ("unused", "blobs"):
            self._database.executemany(f"DELETE FROM {table} WHERE name = ?", old)

    async def has_shared(self, name: str) -> bool:
        """Return whether there is a shared blob of this name."""
        return await self._call(lambda: self._has_shared(_bytes(name)))

    def _has_shared(self, name: bytes) -> bool:
        return self._one("SELECT 1 FROM blobs WHERE name = ?", name) is not None

    def _is_used(self, name: bytes) -> bool:
        return self._one("SELECT 1 FROM uses WHERE blob = ? LIMIT 1", name) is not None

    async def get_shared(self, name: str) -> bytes:
        """Return a shared blob. Raise StoreError if it is missing."""
        return await self._call(lambda: self._get_shared(_bytes(name)))

    def _get_shared(self, name: bytes) -> bytes:
        data: bytes | None = self._one("SELECT data FROM blobs WHERE name = ?", name)
        if data is None:
            raise self._missing(name)
        return data

    # Documents.

    async def add_document(self, kind: str, name: str, data: bytes) -> bytes:
        """Store a document unless there is one of this name. Return the one that is stored."""
        return await self._call(lambda: self._add_document(kind, _bytes(name), data))

    def _add_document(self, kind: str, name: bytes, data: bytes) -> bytes:
        self._database.execute("INSERT OR IGNORE INTO documents VALUES (?, ?, ?)", (kind, name, data))
        stored: bytes = self._one("SELECT data FROM documents WHERE kind = ? AND name = ?", kind, name)
        return stored

    async def put_document(self, kind: str, name: str, data: bytes) -> None:
        """Store a document in place of any other of this name."""
        put = "INSERT OR REPLACE INTO documents VALUES (?, ?, ?)"
        await self._call(lambda: self._database.execute(put, (kind, _bytes(name), data)))

    async def documents(self, kind: str) -> dict[str, bytes]:
        """Return all documents of a kind, by name."""
        query = "SELECT name, data FROM documents WHERE kind = ? ORDER BY name"
        found = await self._call(lambda: self._database.execute(query, (kind,)).fetchall())
        return {_text(name): data for name, data in found}

    async def delete_document(self, kind: str, name: str) -> bool:
        """Delete a document. Return whether there was one."""
        delete = "DELETE FROM documents WHERE kind = ? AND name = ?"
        return await self._call(lambda: self._database.execute(delete, (kind, _bytes(name))).rowcount > 0)

    def _missing(self, shared: bytes) -> StoreError:
        return StoreError(f"{self._place} holds no shared blob {_text(shared)!r}: put it first")

    # The decision log.

    async def read_log(self, stream: str, query: LogQuery) -> LogPage:
        """Return a page of the decision log of a stream. Raise UnknownStreamError if there is no such stream."""
        return await self._read(lambda database: log_tables.read_page(database, _number(database, stream), query))

    async def read_notices(self, stream: str, after: tuple[int, int] | None, since: int | None = None) -> list[Notice]:
        """Return the notices of a stream after a position and number, or from a time on."""
        return await self._read(lambda database: NoticeTable(database).read(_number(database, stream), after, since))

    async def read_tenant_notices(self, tenant: str, after: int, limit: int) -> list[tuple[int, str, Notice]]:
        """Return notices of a tenant whose ids are above `after`: id, stream and content, in the order of ids."""
        return await self._call(lambda: self._tenant_notices(_bytes(tenant), after, limit))

    def _tenant_notices(self, tenant: bytes, after: int, limit: int) -> list[tuple[int, str, Notice]]:
        found = self._notices.read_tenant(tenant, after, limit)
        names = {number: self._one("SELECT id FROM streams WHERE number = ?", number) for _, number, _ in found}
        return [(place, _text(names[number]), notice) for place, number, notice in found]

    async def newest_notice(self, tenant: str) -> int:
        """Return the id of the newest notice. All tenants share the ids."""
        return await self._call(self._notices.newest)

    async def read_thumbnail(self, stream: str, position: int) -> bytes | None:
        """Return the thumbnail of a decision; None if there is none."""
        return await self._read(
            lambda database: log_tables.read_thumbnail(database, _number(database, stream), position)
        )

    async def purge_log(self, stream: str, wanted: Purge) -> int:
        """Delete entries of the decision log, a few thousand in each transaction, and overwrite them on the disk."""
        return await self._delete_for_good(lambda: self._log.purge(self._known(stream).number, wanted))

    async def delete_thumbnails(self) -> None:
        """Delete the thumbnails of all streams, and overwrite them on the disk."""
        await self._delete_for_good(self._log.delete_thumbnails)

    async def _delete_for_good(self, delete: Callable[[], int]) -> int:
        """Call `delete` until it deletes nothing any more, and return how many rows it deleted."""

        def delete_and_overwrite() -> int:
            self._database.execute("PRAGMA secure_delete = ON")
            try:
                return delete()
            finally:
                self._database.execute("PRAGMA secure_delete = OFF")

        deleted = 0
        while count := await self._call(delete_and_overwrite, may_use_reserve=True):
            deleted += count
        if deleted:
            await self._clear_wal()
        return deleted

    async def _clear_wal(self) -> None:
        """Have the write-ahead log, which still holds what was deleted, copied to the database and emptied."""

        def clear() -> None:
            self._wal_has_deleted = True

        await self._call(clear)
        # The thread clears the log of SQLite before it begins with this call.
        await self._call(lambda: None)

    async def trim_log(self, limits: LogLimits, now: float | None) -> None:
        """Delete entries of the decision log beyond the limits, a few thousand in each transaction.

        Space that is not used any more goes back to the disk, also that of deleted streams.
        """
        while await self._call(lambda: self._log.trim(limits, now), may_use_reserve=True):
            pass
        shrunk = False
        while await self._call(self._vacuum, may_use_reserve=True):
            shrunk = True
        if shrunk:
            await self._clear_wal()
        await self._call(self._note_space)

    async def _read(self, work: Callable[[sqlite3.Connection], T]) -> T:
        """Read beside the writes. What is found is durable."""
        if self._closed:
            raise StoreError(f"{self._place} is closed: open it again")
        return await asyncio.get_running_loop().run_in_executor(self._readers, self._read_in_thread, work)

    def _read_in_thread(self, work: Callable[[sqlite3.Connection], T]) -> T:
        try:
            if self._reader is None:
                self._reader = _open_reader(self.folder)
            # One transaction, so that all queries see the same moment.
            self._reader.execute("BEGIN")
            try:
                return work(self._reader)
            finally:
                self._reader.execute("COMMIT")
        except sqlite3.Error as problem:
            raise self._as_error(problem) from problem

    # Lookups.

    def _one(self, query: str, *values: Any) -> Any:
        """Return the first column of the first row; None if there is no row."""
        found = self._database.execute(query, values).fetchone()
        return None if found is None else found[0]

    def _find(self, stream: str) -> _Stream | None:
        found = self._database.execute(
            "SELECT number, epoch, start, finish, base, covered_by, tenant, state_bytes, journal_bytes, "
            "created FROM streams WHERE id = ?",
            (_bytes(stream),),
        ).fetchone()
        return None if found is None else _Stream(*found)

    def _known(self, stream: str) -> _Stream:
        known = self._find(stream)
        if known is None:
            raise UnknownStreamError(f"there is no stream {stream!r}: create it first")
        return known

    def _fenced(self, stream: str, epoch: int) -> _Stream:
        """Return a stream if this epoch may write to it. Raise FencedError otherwise."""
        # Whoever asks for it may change the row in the database.
        known = self._rows.pop(stream, None) or self._find(stream)
        if known is None:
            raise FencedError(f"stream {stream!r} does not exist any more: nothing was written for epoch {epoch}")
        if epoch != known.epoch:
            holder = self._holders.get(stream)
            by = "" if holder is None else f", of {holder[0]!r}"
            raise FencedError(
                f"stream {stream!r} is at epoch {known.epoch}{by}: nothing was written for epoch {epoch}; "
                "acquire the stream again"
            )
        return known

    def _spec(self, known: _Stream) -> bytes:
        spec: bytes = self._one("SELECT data FROM specs WHERE stream = ?", known.number)
        return spec

    def _holder(self, stream: str) -> str | None:
        """Return who holds a stream and lives. What a dead incarnation held is free though its successor lives."""
        if stream not in self._holders:
            return None
        worker, incarnation = self._holders[stream]
        found, until = self._leases.get(worker, ("", 0.0))
        return worker if found == incarnation and time.monotonic() < until else None

    # The thread.

    async def close(self) -> None:
        """Close the database, and let other processes use the folder."""
        with self._condition:
            self._closed = True
            self._condition.notify()
        await asyncio.to_thread(self._end)

    def _end(self) -> None:
        self._readers.shutdown()
        if self._reader is not None:
            self._reader.close()
            self._reader = None
        self._thread.join()

    async def _call(self, work: Callable[[], T], may_use_reserve: bool = False) -> T:
        """Return the result of a piece of work, when the transaction that it was part of is durable."""
        result: Future[T] = Future()
        with self._condition:
            if self._closed:
                raise StoreError(f"{self._place} is closed: open it again")
            self._jobs.append(_Job(work, result, may_use_reserve))
            self._condition.notify()
        return await asyncio.wrap_future(result)

    def _run(self) -> None:
        while jobs := self._waiting():
            self._work([job for job in jobs if job.result.set_running_or_notify_cancel()])
            if self._wal_has_deleted:
                self._wal_has_deleted = False
                self._empty_wal()
        self._database.close()
        self._marks.close()
        os.close(self._lock)

    def _waiting(self) -> list[_Job]:
        """Wait for calls, and return all that wait; none if the store was closed."""
        with self._condition:
            while not (self._jobs or self._closed):
                self._condition.wait()
            jobs, self._jobs = self._jobs, []
            return jobs

    def _work(self, jobs: list[_Job]) -> None:
        """Do some calls in one transaction; if that fails, each in its own, so that a bad one fails alone."""
        try:
            outcomes = self._transact(jobs) if jobs else []
        except Exception as problem:
            if len(jobs) > 1:
                for job in jobs:
                    self._work([job])
                return
            self._is_full = self._is_full or _is_full(problem)
            if _is_full(problem) and jobs[0].may_use_reserve:
                outcomes = self._retry_with_reserve(jobs)
            else:
                outcomes = [self._as_error(problem)]
        for job, outcome in zip(jobs, outcomes, strict=True):
            if isinstance(outcome, Exception):
                job.result.set_exception(outcome)
            else:
                job.result.set_result(outcome)

    def _retry_with_reserve(self, jobs: list[_Job]) -> list[Any]:
        """Do a call again with the space of the reserve, then give back what it freed, and take the reserve again."""
        self._reserve.release()
        try:
            # Small changes fit into an empty write-ahead log.
            self._empty_wal()
            return self._transact(jobs)
        except Exception as problem:
            return [self._as_error(problem)]
        finally:
            with suppress(sqlite3.Error):
                for _ in range(_VACUUMS_AT_ONCE):
                    self._vacuum()
            self._empty_wal()
            with suppress(sqlite3.Error):
                self._note_space()

    def _note_space(self) -> None:
        """Take the reserve again, and note whether writes should work, if there is space for that."""
        self._reserve.restore()
        if self._is_full:
            unused, _ = self._pages()
            self._is_full = unused * _PAGE_BYTES + self._free_bytes() < _ROOM

    def _empty_wal(self) -> None:
        """Copy the write-ahead log to the database and empty it, unless somebody reads from it."""
        with suppress(sqlite3.Error):
            self._database.execute("PRAGMA wal_checkpoint(TRUNCATE)")

    def _pages(self) -> tuple[int, int]:
        """Return how many pages of the database are unused, and how many there are."""
        return self._one("PRAGMA freelist_count"), self._one("PRAGMA page_count")

    def _vacuum(self) -> bool:
        """Give some unused pages back to the disk, if there are many. Return whether it did."""
        unused, pages = self._pages()
        if unused < _MIN_UNUSED or unused < _MIN_UNUSED_SHARE * pages:
            return False
        self._database.execute(f"PRAGMA incremental_vacuum({_PAGES_AT_ONCE})").fetchall()
        return True

    def _free_bytes(self) -> int:
        return shutil.disk_usage(self.folder).free

    @property
    def problem(self) -> str:
        """Why writes fail at present; empty if they do not."""
        if self._is_full and self._free_bytes() < _ROOM:
            return "the disk is full: delete streams, purge decision logs, or make room"
        return ""

    def _transact(self, jobs: list[_Job]) -> list[Any]:
        """Return the result of each call, or the error that it raised before it wrote anything."""
        if self.failure.done():
            raise StoreError(str(self.failure.result()))
        outcomes: list[Any] = []
        self._added.clear()
        self._ends.clear()
        changes, number = self._database.total_changes, self._commits
        self._database.execute("BEGIN")
        try:
            for job in jobs:
                try:
                    outcomes.append(job.work())
                except (FencedError, HeldError, StoreError, UnknownStreamError) as problem:
                    outcomes.append(problem)
            if self._database.total_changes != changes:
                number += 1
                self._database.execute("UPDATE commits SET number = ?", (number,))
            self._database.execute("COMMIT")
            self._usage.update(self._added)
            if number != self._commits:
                if not all(job.may_use_reserve for job in jobs):
                    self._is_full = False
                self._commits = number
                self._marks.write(Mark(number, self._ends))
        except BaseException as problem:
            with suppress(sqlite3.Error):
                self._database.execute("ROLLBACK")
            self._log.forget()
            self._rows.clear()
            if _is_io_error(problem):
                # After a failed sync nobody knows what is on the disk. Opening the database again finds it out.
                self.failure.set_result(self._as_error(problem))
            raise
        return outcomes

    @property
    def _place(self) -> str:
        return f"the store in {str(self.folder)!r}"

    def _as_error(self, problem: BaseException) -> BaseException:
        if _is_io_error(problem):
            return StoreError(f"{self._place} failed: {problem}; check the disk, and start again")
        if not isinstance(problem, sqlite3.Error):
            return problem
        return StoreError(f"{self._place} cannot be read or written: {problem}; nothing has changed")

    def __repr__(self) -> str:
        return f"SqliteStore({str(self.folder)!r})"


def back_up(folder: str | os.PathLike[str], target: str | os.PathLike[str]) -> None:
    """Copy a store to a new folder, also while a service uses it. The copy holds all that was durable at one moment.

    Raises:
        InputError: there is no store in `folder`, or `target` exists.
        StoreError: the copy cannot be written.
    """
    source, copy = Path(folder) / DATABASE, Path(target)
    if not source.exists():
        raise InputError(f"There is no store in {str(folder)!r}. Name the folder of a service.")
    if copy.exists():
        raise InputError(f"{str(copy)!r} exists already. Name a new folder.")
    draft = copy.with_name(f".{copy.name}.{secrets.token_hex(8)}.tmp")
    draft.mkdir(mode=0o700, parents=True)
    # Before the copy, which then holds all of the marked commits.
    marks = read_marks(Path(folder))
    try:
        with (
            closing(sqlite3.connect(f"{source.absolute().as_uri()}?mode=ro", uri=True)) as original,
            closing(sqlite3.connect(draft / DATABASE)) as written,
        ):
            original.backup(written)
            commits = count_commits(written, Path(folder)) or 0
        refuse_fewer(Path(folder), commits, marks)
        CommitMarks.create(draft, commits).close()
        sync_folder(draft)
        draft.rename(copy)
        sync_folder(copy.parent)
    except StoreError:
        raise
    except (sqlite3.Error, OSError) as problem:
        raise StoreError(f"The store in {str(folder)!r} cannot be copied to {str(copy)!r}: {problem}.") from problem
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _open(folder: Path) -> sqlite3.Connection:
    database = sqlite3.connect(
        folder / DATABASE, isolation_level=None, check_same_thread=False, cached_statements=_STATEMENTS
    )
    try:
        # It has an effect on a new database only.
        database.execute("PRAGMA auto_vacuum = INCREMENTAL")
        database.execute("PRAGMA journal_mode = WAL")
        database.execute("PRAGMA synchronous = FULL")
        if count_commits(database, folder) is None:
            # Before the tables: a database that has tables and no marks has lost them.
            CommitMarks.create(folder).close()
            database.executescript(f"BEGIN; {_SCHEMA} PRAGMA user_version = {LAYOUT}; COMMIT;")
            # SQLite does not sync the folder when it creates the database.
            sync_folder(folder)
            sync_folder(folder.parent)
        # Nobody waits to use them: a creation that failed left them behind.
        database.execute("DELETE FROM blobs WHERE name NOT IN (SELECT blob FROM uses)")
        database.execute("DELETE FROM unused")
    except BaseException:
        database.close()
        raise
    return database


def _open_marks(folder: Path, commits: int) -> CommitMarks:
    """Return the marks, with one for the newest commit. A crash may have come between a commit and its mark."""
    newest = read_marks(folder)[-1].number
    marks = CommitMarks(folder)
    if newest == commits:
        return marks
    # The process that wrote the newest commit may have been killed before it was synced.
    wal = os.open(folder / WAL, os.O_RDONLY)
    try:
        os.fsync(wal)
    finally:
        os.close(wal)
    marks.write(Mark(commits, None))
    return marks


def _read_usage(database: sqlite3.Connection) -> Counter[bytes]:
    """Return the bytes that each tenant uses, from all streams."""
    found = database.execute(
        "SELECT tenant, sum(size) FROM ("
        "SELECT tenant, state_bytes + journal_bytes AS size FROM streams UNION ALL "
        "SELECT tenant, length(data) FROM (SELECT DISTINCT tenant, blob FROM uses) JOIN blobs ON name = blob"
        ") GROUP BY tenant"
    )
    return Counter(dict(found))


def _open_reader(folder: Path) -> sqlite3.Connection:
    database = sqlite3.connect(folder / DATABASE, isolation_level=None, check_same_thread=False)
    database.execute("PRAGMA query_only = ON")
    return database


def _number(database: sqlite3.Connection, stream: str) -> int:
    """Return the number of a stream. Raise UnknownStreamError if there is no such stream."""
    found = database.execute("SELECT number FROM streams WHERE id = ?", (_bytes(stream),)).fetchone()
    if found is None:
        raise UnknownStreamError(f"there is no stream {stream!r}: create it first")
    number: int = found[0]
    return number


def _hold(folder: Path) -> int:
    try:
        return lock_folder(folder)
    except BlockingIOError as problem:
        raise StoreError(
            f"the store in {str(folder)!r} is {problem.strerror}: close it there, or choose another folder"
        ) from None
    except OSError as problem:
        raise StoreError(f"cannot use the folder {str(folder)!r}: {problem.strerror or problem}") from problem


def _is_io_error(problem: BaseException) -> bool:
    if isinstance(problem, StoreError):
        # It is an OSError too, but is about one stream or about the version of the store.
        return False
    # An OSError says that a mark could not be written.
    code = getattr(problem, "sqlite_errorcode", 0)
    return isinstance(problem, OSError) or (code & 0xFF == sqlite3.SQLITE_IOERR and not _is_full(problem))


def _is_full(problem: BaseException) -> bool:
    """Whether there was no space for the data, or for the shared memory file of SQLite."""
    full = (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR_SHMSIZE)
    return getattr(problem, "sqlite_errorcode", None) in full


def _wrong(write: Write, what: str, reason: str) -> FencedError:
    """Return the error for a write of one who is wrong about its stream."""
    return FencedError(
        f"{what} for position {write.position} of stream {write.stream!r}: {reason}; acquire the stream again"
    )


def _bytes(text: str) -> bytes:
    """Return a name as bytes; half a surrogate pair, which JSON can contain, is a name like any other."""
    return text.encode("utf-8", "surrogatepass")


def _text(name: bytes) -> str:
    return name.decode("utf-8", "surrogatepass")

"""The rules of a store in SQL, once for all databases: fences, leases, journals, snapshots, shared blobs, documents.

What every store promises:

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

A rule is a coroutine that gets a transaction. In PostgreSQL it waits for a server. In SQLite it runs in the thread of
the database and never waits. Whoever changes a stream locks its row first, so that a fence is checked and the stream
written as one thing.
"""

import secrets
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Final, NamedTuple, TypeVar

from ...errors import FencedError, HeldError, StoreError, UnknownStreamError
from ..log.entries import LogEntry, LogLimits, LogPage, LogQuery, Purge
from ..log.notices import Notice
from ..settings import tenant_of
from .log_tables import LogTables, append_notices, read_notices, read_page, read_tenant_notices
from .schema import POSITION_BITS
from .transaction import Rows, Rule, StaleError, Transaction, add_usage, to_bytes, to_text
from .values import (
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

T = TypeVar("T")

# How often a commit is tried again that relied on something that has changed. Once should do.
_RETRIES: Final = 3
# Rows of streams in memory, at most.
_MAX_ROWS: Final = 10_000
# Shared blobs that no stream uses are deleted after so many seconds, and the oldest of them beyond so many bytes.
_UNUSED_SECONDS: Final = 3600.0
_MAX_UNUSED: Final = 1 << 28


class Stream(NamedTuple):
    """A row of `streams`.

    Attributes:
        number: the name of the stream in the other tables; deleted streams keep theirs.
        tenant: whose stream it is.
        epoch, token: the fence of the newest acquisition.
        start: how many records the snapshot covers.
        finish: the position of the next record.
        base: the position where the epoch begins. Only records from there on can be a repetition by this epoch.
        covered_by: the epoch that wrote the snapshot; None if an earlier one did, or before the first.
        state_bytes: of its spec, snapshot, keys and saved snapshots.
        journal_bytes: of its records behind the snapshot.
        created: when, in seconds since 1970.
        worker, incarnation: who acquired it; None after a release.
        moved_until: by the clock of leases, until when nobody takes it from a holder that lives.
    """

    number: int
    tenant: bytes
    epoch: int
    token: str
    start: int
    finish: int
    base: int
    covered_by: int | None
    state_bytes: int
    journal_bytes: int
    created: float
    worker: bytes | None
    incarnation: bytes | None
    moved_until: float

    @property
    def fence(self) -> Fence:
        """Who may write."""
        return Fence(self.epoch, self.token)

    @property
    def size(self) -> int:
        """Bytes of all that belongs to the stream."""
        return self.state_bytes + self.journal_bytes

    def key(self, position: int) -> int:
        """Return the key of the record at a position."""
        return (self.number << POSITION_BITS) + position


_COLUMNS: Final = ", ".join(f"streams.{name}" for name in Stream._fields)
_FIND: Final = f"SELECT {_COLUMNS} FROM streams WHERE id = ?"
_LOCK: Final = f"{_FIND} /*+ FOR UPDATE */"
# The lease of the worker that holds a stream. The lock waits for a renewal that is under way.
_LEASE: Final = (
    "SELECT leases.incarnation, until FROM leases JOIN streams ON leases.worker = streams.worker WHERE id = ? "
    "/*+ FOR SHARE OF leases */"
)
_CLOCKS: Final = "SELECT lease_clock(), store_clock()"
# The shared blobs of a stream, their sizes, and whether other streams of its tenant use them.
_USES: Final = (
    "SELECT blob, coalesce((SELECT length(data) FROM blobs WHERE name = blob), 0), EXISTS ("
    "SELECT 1 FROM uses AS others WHERE others.blob = uses.blob AND others.tenant = uses.tenant "
    "AND others.stream <> uses.stream) "
    "FROM uses WHERE stream = ? ORDER BY blob"
)
_SPEC: Final = "SELECT data FROM specs JOIN streams ON number = stream WHERE id = ?"


class _Append(NamedTuple):
    """Records that are appended to a stream, and its row before."""

    before: Stream
    batch: Batch


class Store:
    """A store of streams in a database, used by one worker. Every failure to reach it is a `StoreError`.

    Attributes:
        generation: changes if the store may have lost writes, for example because another server answers now. What a
            worker read before such a change may differ from what the store holds.
    """

    generation = ""

    def __init__(self, log: LogTables | None = None) -> None:
        # Rows as this process left them. In PostgreSQL others may have changed them, which every use of them checks.
        self._rows: dict[str, Stream] = {}
        self._log = log or LogTables()

    # What a driver does.

    @property
    def problem(self) -> str:
        """Why writes fail at present, as far as the store knows; empty if they do not."""
        return ""

    @property
    def _place(self) -> str:
        raise NotImplementedError

    async def _write(self, work: Rule[T], *, may_use_reserve: bool = False, counts: bool = True) -> T:
        """Return the result of a rule when its transaction is durable. A rule may be called more than once.

        Args:
            work: it may raise an error only before its first change.
            may_use_reserve: it frees space.
            counts: whether it changes what has to be durable.
        """
        raise NotImplementedError

    async def _read(self, work: Rule[T]) -> T:
        """Return what a rule reads at one moment beside the writes. It is durable."""
        raise NotImplementedError

    async def close(self) -> None:
        """Let go of files and connections."""
        raise NotImplementedError

    # Leases.

    async def renew(self, worker: str, incarnation: str, seconds: float, takes_over: bool = False) -> Lease:
        """Renew the lease of a worker: until it ends nobody else takes the streams that this worker holds.

        A lease belongs to one incarnation of a worker. A new incarnation takes it from its predecessor with
        `takes_over`, which frees what the predecessor held. Without it, the lease of another incarnation stays.

        Raises:
            ConfigError: the time is not a number of seconds above 0.
        """
        check_lease(seconds)

        async def renew(tx: Transaction) -> Lease:
            name, own = to_bytes(worker), to_bytes(incarnation)
            lease, ((now, time),) = await tx.rows_of_all(
                ("SELECT incarnation, until FROM leases WHERE worker = ? /*+ FOR UPDATE */", name), (_CLOCKS,)
            )
            holder = lease[0][0] if lease and lease[0][1] > now else None
            if takes_over or holder in (None, own):
                await tx.run(
                    "INSERT INTO leases VALUES (?, ?, ?) ON CONFLICT (worker) DO UPDATE "
                    "SET incarnation = excluded.incarnation, until = excluded.until",
                    name,
                    own,
                    now + seconds,
                )
            await tx.run("DELETE FROM taken WHERE worker = ? AND until <= ?", name, now)
            taken = await tx.rows("SELECT stream, epoch FROM taken WHERE worker = ?", name)
            streams = {to_text(stream): epoch for stream, epoch in taken}
            return Lease(None if holder is None else to_text(holder), time, streams)

        return await self._write(renew, counts=False)

    async def resign(self, worker: str, incarnation: str) -> None:
        """Say that this worker holds nothing any more; nothing happens if its lease is of another incarnation."""
        delete = "DELETE FROM leases WHERE worker = ? AND incarnation = ?"
        await self._write(lambda tx: tx.run(delete, to_bytes(worker), to_bytes(incarnation)), counts=False)

    # Streams.

    async def create(self, stream: str, spec: bytes, *shared: str) -> bool:
        """Begin a stream that uses the shared blobs of these names; False if it exists already, whatever its spec.

        Raises:
            StoreError: a blob is not there. It may have gone with the last stream that used it, after it was put:
                put it again and try again.
        """
        return await self._write(lambda tx: self._create(tx, stream, spec, [*map(to_bytes, shared)]))

    async def _create(self, tx: Transaction, stream: str, spec: bytes, shared: list[bytes]) -> bool:
        name, tenant = to_bytes(stream), to_bytes(tenant_of(stream))
        found, ((epoch,),) = await tx.rows_of_all(
            ("SELECT 1 FROM streams WHERE id = ?", name),
            # Above the epochs of all deleted streams: who held one of the same name has no fence of this one.
            ("SELECT epoch FROM deleted",),
        )
        if found:
            return False
        size = len(spec)
        for blob in sorted(shared):
            size += await self._new_bytes(tx, tenant, blob)
        inserted = await tx.rows(
            "INSERT INTO streams (id, tenant, epoch, state_bytes, created) "
            "VALUES (?, ?, ?, ?, store_clock()) ON CONFLICT (id) DO NOTHING RETURNING number",
            *(name, tenant, epoch, len(spec)),
        )
        if not inserted:
            return False
        ((number,),) = inserted
        await tx.run("INSERT INTO specs VALUES (?, ?)", number, spec)
        for blob in shared:
            await tx.run("INSERT INTO uses VALUES (?, ?, ?)", blob, tenant, number)
            await tx.run("DELETE FROM unused WHERE name = ?", blob)
        add_usage(tx, tenant, streams=1, size=size)
        return True

    async def _new_bytes(self, tx: Transaction, tenant: bytes, blob: bytes) -> int:
        """Return the bytes of a shared blob; 0 if a stream of the tenant uses it. Nobody can delete it meanwhile."""
        size, used = await tx.rows_of_all(
            ("SELECT length(data) FROM blobs WHERE name = ? /*+ FOR UPDATE */", blob),
            ("SELECT 1 FROM uses WHERE blob = ? AND tenant = ? LIMIT 1", blob, tenant),
        )
        if not size:
            raise self._missing(blob)
        return 0 if used else int(size[0][0])

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
        token = secrets.token_hex(8)
        # A stream is acquired to delete it, too.
        return await self._write(
            lambda tx: self._acquire(tx, stream, to_bytes(worker), to_bytes(incarnation), token, takeover),
            may_use_reserve=True,
        )

    async def _acquire(
        self, tx: Transaction, stream: str, worker: bytes, incarnation: bytes, token: str, takeover: Takeover | None
    ) -> AcquiredStream:
        self._rows.pop(stream, None)
        name = to_bytes(stream)
        found, lease, ((now, _),), spec, snapshot, tail, keys = await tx.rows_of_all(
            (_LOCK, name),
            (_LEASE, name),
            (_CLOCKS,),
            (_SPEC, name),
            ("SELECT data FROM snapshots JOIN streams ON number = stream WHERE id = ?", name),
            (
                f"SELECT positions, data FROM streams JOIN records ON key >= (number << {POSITION_BITS}) + start "
                f"AND key < (number << {POSITION_BITS}) + finish WHERE id = ? ORDER BY key",
                name,
            ),
            (
                "SELECT position, data FROM request_keys JOIN streams ON number = stream WHERE id = ? "
                "ORDER BY position",
                name,
            ),
        )
        known = _only(stream, found)
        holder = _living(known, lease, now)
        is_taken = holder is not None and holder != worker
        if is_taken and (takeover is None or to_bytes(takeover.holder) != holder or now < known.moved_until):
            by = to_text(holder or b"")
            raise HeldError(f"stream {stream!r} is held by {by!r}, which lives: ask that worker", by)
        if sum(positions for positions, _ in tail) != known.finish - known.start:
            raise StoreError(f"{self._place} has lost records of the stream {stream!r}: restore a backup")
        until = now + takeover.pause if is_taken and takeover is not None else known.moved_until
        after = known._replace(
            epoch=known.epoch + 1,
            token=token,
            base=known.finish,
            covered_by=None,
            worker=worker,
            incarnation=incarnation,
            moved_until=until,
        )
        await tx.run(
            "UPDATE streams SET epoch = ?, token = ?, base = finish, covered_by = NULL, worker = ?, incarnation = ?, "
            "moved_until = ? WHERE number = ?",
            *(after.epoch, token, worker, incarnation, until, known.number),
        )
        if is_taken:
            # The holder's next renewal names it, so that it stops answering from memory.
            await tx.run(
                "INSERT INTO taken VALUES (?, ?, ?, ?) ON CONFLICT (worker, stream) DO UPDATE "
                "SET epoch = excluded.epoch, until = excluded.until",
                *(holder, name, after.epoch, until),
            )
        self._remember({stream: after})
        return AcquiredStream(
            after.fence,
            spec[0][0],
            _first(snapshot),
            known.start,
            known.finish,
            [data for _, data in tail],
            str(known.number),
            known.created,
            [KeySegment(*row) for row in keys],
        )

    async def release(self, stream: str, fence: Fence) -> None:
        """Give a stream up, so that anyone can acquire it at once; nothing happens if it has another worker already.

        Until someone does, writes with this fence are still taken: one that the release overtook is not lost.
        """
        free = "UPDATE streams SET worker = NULL, incarnation = NULL WHERE id = ? AND epoch = ? AND token = ?"
        await self._write(lambda tx: tx.run(free, to_bytes(stream), *fence))

    async def delete(self, stream: str, fence: Fence) -> None:
        """Forget a stream and all that belongs to it, and those shared blobs that no other stream uses.

        Raises:
            FencedError: the fence is not the newest, or there is no such stream.
        """
        await self._write(lambda tx: self._delete(tx, stream, fence), may_use_reserve=True)

    async def _delete(self, tx: Transaction, stream: str, fence: Fence) -> None:
        known = await self._fenced(tx, stream, fence)
        number, tenant = known.number, known.tenant
        _, shared, log_size = await tx.rows_of_all(
            ("SELECT 1 FROM blobs JOIN uses ON name = blob WHERE stream = ? /*+ FOR UPDATE OF blobs */", number),
            (_USES, number),
            ("SELECT CAST(sum(bytes) AS BIGINT) FROM log_sizes WHERE stream = ?", number),
        )
        await tx.run("DELETE FROM streams WHERE number = ?", number)
        for table in ("specs", "snapshots", "request_keys", "saved", "uses", "notices"):
            await tx.run(f"DELETE FROM {table} WHERE stream = ?", number)
        await tx.run("DELETE FROM records WHERE key >= ? AND key < ?", known.key(0), known.key(known.finish))
        # The log may be long, so it is deleted in portions.
        await tx.run("INSERT INTO log_deleted VALUES (?)", number)
        await tx.run("UPDATE deleted SET epoch = ?1 WHERE epoch < ?1", fence.epoch + 1)
        size = known.size + sum(size for _, size, others in shared if not others)
        await self._delete_unused_blobs(tx, [blob for blob, *_ in shared])
        add_usage(tx, tenant, streams=-1, size=-size, log_size=-(_first(log_size) or 0))

    async def describe(self, stream: str) -> Described:
        """Return what is known of a stream. Raise UnknownStreamError if there is none."""
        name = to_bytes(stream)

        async def describe(tx: Transaction) -> Described:
            found, spec = await tx.rows_of_all((_FIND, name), (_SPEC, name))
            return Described(incarnation=str(_only(stream, found).number), spec=spec[0][0])

        return await self._write(describe)

    async def list_streams(self, tenant: str, after: str | None, limit: int) -> list[ListedStream]:
        """Return the streams of a tenant in the order of the bytes of their ids: all that come after `after`.

        The time that this takes does not depend on the streams of other tenants.
        """
        where = "id >= ?" if after is None else "id > ?"
        query = f"SELECT id, created, summary FROM streams WHERE tenant = ? AND {where} ORDER BY id LIMIT ?"
        found = await self._ask(query, to_bytes(tenant), to_bytes(after or ""), limit)
        return [ListedStream(to_text(stream), created, summary) for stream, created, summary in found]

    async def count_streams(self, tenant: str) -> int:
        """Return how many streams a tenant has."""
        return int((await self._ask("SELECT count(*) FROM streams WHERE tenant = ?", to_bytes(tenant)))[0][0])

    async def usage(self) -> dict[str, int]:
        """Return the bytes that each tenant uses: specs, journals, snapshots, keys, saved snapshots and shared blobs.

        A shared blob counts once for each tenant that uses it. A tenant without streams may be missing. The tenant of a
        stream without a slash in its id is the empty string.
        """
        return await self._usage("bytes")

    async def log_usage(self) -> dict[str, int]:
        """Return the bytes of the decision logs of each tenant; none if the store does not count them."""
        return await self._usage("log_bytes")

    async def _usage(self, column: str) -> dict[str, int]:
        found = await self._ask(f"SELECT tenant, CAST(sum({column}) AS BIGINT) FROM usage GROUP BY tenant")
        return {to_text(tenant): size for tenant, size in found if size}

    async def totals(self) -> Totals:
        """Return how many streams the store holds, and how much room they take."""
        columns = ", ".join(f"CAST(coalesce(sum({name}), 0) AS BIGINT)" for name in ("streams", "bytes", "log_bytes"))
        ((streams, size, log_bytes),) = await self._ask(f"SELECT {columns} FROM usage")
        return Totals(streams, size, log_bytes=log_bytes)

    # Writes.

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
        writes = list(writes)
        if not writes:
            return []
        entries = [entry for write in writes if isinstance(write, Batch) for entry in write.log]
        if unknown := self._log.unknown_classes(entries):
            # In a transaction of its own: others may use the numbers of classes as soon as they are known.
            await self._write(lambda tx: self._log.add_classes(tx, unknown))
        for trusting in (True, *[False] * _RETRIES):
            with suppress(StaleError):
                await self._add_months(entries, again=not trusting)
                return await self._write(partial(self._commit, writes=writes, trusting=trusting))
        raise StoreError(f"{self._place} changed again and again while it was written")

    async def _add_months(self, entries: Sequence[LogEntry], again: bool = False) -> None:
        """Create what the months of some entries need. With `again`, do not rely on memory."""

    async def _commit(
        self, tx: Transaction, writes: list[Write], trusting: bool
    ) -> list[FencedError | StoreError | None]:
        rows = await self._rows_for(tx, writes, trusting)
        outcomes: list[FencedError | StoreError | None] = []
        appends: list[_Append] = []
        for write in writes:
            try:
                known = _checked(write.stream, rows.get(write.stream), write.fence)
                if isinstance(write, Batch) and write.position == known.finish:
                    appends.append(_Append(known, write))
                    grown = known.journal_bytes + write.size
                    rows[write.stream] = known._replace(finish=write.end, journal_bytes=grown)
                else:
                    # This reads what was appended before.
                    await self._append(tx, appends)
                    appends = []
                    if isinstance(write, Batch):
                        await self._check_repetition(tx, known, write)
                    else:
                        rows[write.stream] = await self._checkpoint(tx, known, write)
                outcomes.append(None)
            except FencedError as problem:
                outcomes.append(problem)
        await self._append(tx, appends)
        self._remember(rows)
        return outcomes

    async def _rows_for(self, tx: Transaction, writes: list[Write], trusting: bool) -> dict[str, Stream]:
        """Return the rows of streams: from memory if only new records come, or else from the database, locked."""
        rows: dict[str, Stream] = {}
        ends: dict[str, int] = {}
        missing: dict[str, None] = {}
        for write in writes:
            known = self._rows.get(write.stream) if trusting else None
            end = ends.get(write.stream, -1 if known is None else known.finish)
            if isinstance(write, Batch) and known and known.fence == write.fence and write.position == end:
                rows[write.stream] = known
                ends[write.stream] = write.end
            else:
                missing[write.stream] = None
        found = await tx.rows_of_many(
            f"SELECT id, {_COLUMNS} FROM {{rows}} JOIN streams ON id = column1 ORDER BY number "
            "/*+ FOR UPDATE OF streams */",
            "bytea",
            [(to_bytes(stream),) for stream in missing],
        )
        for stream in missing:
            rows.pop(stream, None)
            self._rows.pop(stream, None)
        return rows | {to_text(row[0]): Stream(*row[1:]) for row in found}

    def _remember(self, rows: dict[str, Stream]) -> None:
        """Keep rows as they are if the transaction succeeds."""
        if len(self._rows) > _MAX_ROWS:
            self._rows.clear()
        self._rows.update(rows)

    async def _append(self, tx: Transaction, appends: list[_Append]) -> None:
        """Append batches of records. Those of all streams share few statements."""
        if not appends:
            return
        ends: dict[int, tuple[Any, ...]] = {}
        for before, batch in appends:
            number = before.number
            # A stream may have several batches. The summary of the last one counts.
            first, grown = (ends[number][3], ends[number][5]) if number in ends else (before.finish, 0)
            tx.ends[batch.stream] = batch.end
            ends[number] = (number, *before.fence, first, batch.end, grown + batch.size, batch.summary)
            add_usage(tx, before.tenant, size=batch.size)
        await tx.change_all(
            "UPDATE streams SET finish = column5, journal_bytes = journal_bytes + column6, summary = column7 "
            "FROM {rows} WHERE number = column1 AND epoch = column2 AND token = column3 AND finish = column4",
            "bigint bigint text bigint bigint bigint bytea",
            list(ends.values()),
        )
        await tx.run_many(
            "INSERT INTO records SELECT * FROM {rows}",
            "bigint bigint bytea",
            [(before.key(at), count, data) for before, batch in appends for at, count, data in batch.rows()],
        )
        for before, batch in appends:
            if batch.notices:
                await append_notices(tx, before.number, before.tenant, batch.notices)
        await self._log.append(
            tx, [(before.number, before.tenant, batch.log, batch.roll_backs) for before, batch in appends]
        )

    async def _check_repetition(self, tx: Transaction, known: Stream, batch: Batch) -> None:
        """Raise FencedError unless this epoch wrote all of the batch before. A snapshot hides what it covers."""
        what, first, last = f"{len(batch.records)} records", batch.position, batch.end
        if first > known.finish:
            raise _wrong(batch, what, f"the journal ends at {known.finish}: records between are missing")
        if first < known.base or last > known.finish:
            reason = f"this epoch began at {known.base} and the journal ends at {known.finish}"
            raise _wrong(batch, what, f"{reason}: some of these positions are taken, and it is no repetition")
        found = await tx.rows(
            "SELECT key, positions, data FROM records WHERE key >= ? AND key < ? ORDER BY key",
            *(known.key(max(first, known.start)), known.key(last)),
        )
        expected = [(known.key(at), count, data) for at, count, data in batch.rows() if at >= known.start]
        if found != expected:
            raise _wrong(batch, what, "other records stand there already")

    async def _checkpoint(self, tx: Transaction, known: Stream, checkpoint: Checkpoint) -> Stream:
        """Replace the snapshot of a stream, and cut its journal. Return its row after that."""
        position, data = checkpoint.position, checkpoint.snapshot
        if position > known.finish:
            reason = f"the journal ends at {known.finish}: a snapshot cannot cover more"
            raise _wrong(checkpoint, "a snapshot", reason)
        if position < known.start:
            if known.covered_by == known.epoch:  # Sent again because its reply was lost.
                return known
            raise _wrong(checkpoint, "a snapshot", f"one that covers {known.start} records is there already")
        dropped_keys = "request_keys WHERE stream = ? AND (position < ? OR position > ?)"
        before, dropped, ((left, behind),) = await tx.rows_of_all(
            ("SELECT length(data) FROM snapshots WHERE stream = ?", known.number),
            (f"SELECT length(data) FROM {dropped_keys}", known.number, *checkpoint.kept_keys),
            (
                "SELECT CAST(coalesce(sum(length(data)), 0) AS BIGINT), CAST(coalesce(sum(positions), 0) AS BIGINT) "
                "FROM records WHERE key >= ? AND key < ?",
                *(known.key(position), known.key(known.finish)),
            ),
        )
        if behind != known.finish - position:
            raise _wrong(checkpoint, "a snapshot", "it ends within a record, or records behind it are missing")
        grown = len(data) + len(checkpoint.keys) - (_first(before) or 0) - sum(size for (size,) in dropped)
        await tx.run(
            "INSERT INTO snapshots VALUES (?, ?) ON CONFLICT (stream) DO UPDATE SET data = excluded.data",
            *(known.number, data),
        )
        await tx.run(f"DELETE FROM {dropped_keys}", known.number, *checkpoint.kept_keys)
        if checkpoint.keys:
            await tx.run("INSERT INTO request_keys VALUES (?, ?, ?)", known.number, position, checkpoint.keys)
        await self._delete_records(tx, known.key(known.start), known.key(position))
        await tx.run(
            "UPDATE streams SET start = ?, covered_by = epoch, state_bytes = state_bytes + ?, journal_bytes = ? "
            "WHERE number = ?",
            *(position, grown, left, known.number),
        )
        add_usage(tx, known.tenant, size=grown + left - known.journal_bytes)
        return known._replace(
            start=position, covered_by=known.epoch, state_bytes=known.state_bytes + grown, journal_bytes=left
        )

    async def _delete_records(self, tx: Transaction, first: int, end: int) -> None:
        """Delete the records between two keys, at once or soon. Nobody reads them any more."""
        await tx.run("DELETE FROM records WHERE key >= ? AND key < ?", first, end)

    # Saved snapshots and shared blobs.

    async def save_snapshot(self, stream: str, fence: Fence, name: str, snapshot: bytes) -> None:
        """Save a snapshot under a name, beside the newest one. Replace one of the same name. Raises FencedError."""

        async def save(tx: Transaction) -> None:
            known = await self._fenced(tx, stream, fence)
            await self._unsave(tx, known, to_bytes(name))
            await tx.run(
                "INSERT INTO saved SELECT ?1, ?2, coalesce(max(place), 0) + 1, ?3 FROM saved WHERE stream = ?1",
                *(known.number, to_bytes(name), snapshot),
            )
            await self._grow(tx, known, len(snapshot))

        await self._write(save)

    async def saved_snapshots(self, stream: str) -> list[str]:
        """Return the names of the saved snapshots, oldest first; none if there is no such stream."""
        query = "SELECT name FROM saved JOIN streams ON number = stream WHERE id = ? ORDER BY place"
        return [to_text(name) for (name,) in await self._ask(query, to_bytes(stream))]

    async def saved_snapshot(self, stream: str, name: str) -> bytes | None:
        """Return a saved snapshot; None if there is none of this name, or no such stream."""
        query = "SELECT data FROM saved JOIN streams ON number = stream WHERE id = ? AND name = ?"
        found: bytes | None = _first(await self._ask(query, to_bytes(stream), to_bytes(name)))
        return found

    async def delete_snapshot(self, stream: str, fence: Fence, name: str) -> None:
        """Delete a saved snapshot, if it is there. Raises FencedError."""

        async def delete(tx: Transaction) -> None:
            await self._unsave(tx, await self._fenced(tx, stream, fence), to_bytes(name))

        await self._write(delete, may_use_reserve=True)

    async def _unsave(self, tx: Transaction, known: Stream, name: bytes) -> None:
        deleted = await tx.rows(
            "DELETE FROM saved WHERE stream = ? AND name = ? RETURNING length(data)", known.number, name
        )
        if deleted:
            await self._grow(tx, known, -deleted[0][0])

    async def _grow(self, tx: Transaction, known: Stream, size: int) -> None:
        add_usage(tx, known.tenant, size=size)
        await tx.run("UPDATE streams SET state_bytes = state_bytes + ? WHERE number = ?", size, known.number)

    async def put_shared(self, name: str, data: bytes) -> None:
        """Put a blob that many streams share; its name is a fingerprint of its content, so it never changes.

        If no stream uses it within an hour, or if many others are put meanwhile, it may go.
        """
        await self._write(lambda tx: self._put_shared(tx, to_bytes(name), data))

    async def _put_shared(self, tx: Transaction, name: bytes, data: bytes) -> None:
        await tx.run("INSERT INTO blobs VALUES (?, ?) ON CONFLICT DO NOTHING", name, data)
        if await tx.rows("SELECT 1 FROM uses WHERE blob = ? LIMIT 1", name):
            return
        await tx.run(
            "INSERT INTO unused VALUES (?, ?, store_clock()) ON CONFLICT (name) DO UPDATE SET put = excluded.put",
            *(name, len(data)),
        )
        newer = "SELECT name, size, put, sum(size) OVER (ORDER BY put DESC, name) AS total FROM unused"
        old = await tx.rows(
            f"SELECT name FROM ({newer}) AS newer WHERE total - size >= ? OR put < store_clock() - ?",
            *(_MAX_UNUSED, _UNUSED_SECONDS),
        )
        await self._delete_unused_blobs(tx, sorted(blob for (blob,) in old))

    async def _delete_unused_blobs(self, tx: Transaction, names: list[bytes]) -> None:
        """Delete those of some shared blobs that no stream uses."""
        for name in names:
            await tx.run("SELECT 1 FROM blobs WHERE name = ? /*+ FOR UPDATE */", name)
            await tx.run("DELETE FROM unused WHERE name = ?", name)
            # After a creation that held the lock: its use of the blob counts.
            unused = "NOT EXISTS (SELECT 1 FROM uses WHERE blob = name)"
            await tx.run(f"DELETE FROM blobs WHERE name = ? AND {unused}", name)

    async def has_shared(self, name: str) -> bool:
        """Return whether there is a shared blob of this name."""
        return bool(await self._ask("SELECT 1 FROM blobs WHERE name = ?", to_bytes(name)))

    async def get_shared(self, name: str) -> bytes:
        """A shared blob; a StoreError if it is missing."""
        found = await self._ask("SELECT data FROM blobs WHERE name = ?", to_bytes(name))
        if not found:
            raise self._missing(to_bytes(name))
        data: bytes = found[0][0]
        return data

    def _missing(self, shared: bytes) -> StoreError:
        return StoreError(f"{self._place} holds no shared blob {to_text(shared)!r}: put it first")

    # Documents.

    async def add_document(self, kind: str, name: str, data: bytes) -> bytes:
        """Store a small document unless there is one of this kind and name. Return the one that is stored."""

        async def add(tx: Transaction) -> bytes:
            await tx.run("INSERT INTO documents VALUES (?, ?, ?) ON CONFLICT DO NOTHING", kind, to_bytes(name), data)
            found = await tx.rows("SELECT data FROM documents WHERE kind = ? AND name = ?", kind, to_bytes(name))
            stored: bytes = found[0][0]
            return stored

        return await self._write(add)

    async def put_document(self, kind: str, name: str, data: bytes) -> None:
        """Store a small document in place of any other of this kind and name. It is durable when this returns."""
        put = "INSERT INTO documents VALUES (?, ?, ?) ON CONFLICT (kind, name) DO UPDATE SET data = excluded.data"
        await self._write(lambda tx: tx.run(put, kind, to_bytes(name), data))

    async def documents(self, kind: str) -> dict[str, bytes]:
        """Return all documents of a kind, by name. Documents belong to the service and to no stream."""
        found = await self._ask("SELECT name, data FROM documents WHERE kind = ? ORDER BY name", kind)
        return {to_text(name): data for name, data in found}

    async def delete_document(self, kind: str, name: str) -> bool:
        """Delete a document. Return whether there was one."""
        delete = "DELETE FROM documents WHERE kind = ? AND name = ? RETURNING 1"
        return bool(await self._ask(delete, kind, to_bytes(name)))

    # The decision log.

    async def read_log(self, stream: str, query: LogQuery) -> LogPage:
        """Return a page of the decision log of a stream, without what is not durable yet.

        Raises:
            UnknownStreamError: there is no such stream.
        """
        return await self._read_of(stream, lambda tx, number: read_page(tx, number, query))

    async def read_notices(self, stream: str, after: tuple[int, int] | None, since: int | None = None) -> list[Notice]:
        """Return the notices of a stream after a position and number, or from a time on, in order.

        A store keeps the newest ones. It returns nothing that is not durable. Raises UnknownStreamError.
        """
        return await self._read_of(stream, lambda tx, number: read_notices(tx, number, after, since))

    async def read_tenant_notices(self, tenant: str, after: int, limit: int) -> list[tuple[int, str, Notice]]:
        """Return notices of a tenant whose ids are above `after`: id, stream and content, in the order of ids.

        Ids grow in the order in which the notices became durable.
        """
        return await self._write(lambda tx: read_tenant_notices(tx, to_bytes(tenant), after, limit))

    async def newest_notice(self, tenant: str) -> int:
        """Return an id that no notice of a tenant exceeds, and that every later one will exceed."""
        query = "SELECT coalesce(max(id), 0) FROM notices WHERE tenant = ?"
        return int((await self._ask(query, to_bytes(tenant)))[0][0])

    async def read_thumbnail(self, stream: str, position: int) -> bytes | None:
        """Return the thumbnail of a decision; None if there is none. Raises UnknownStreamError."""

        async def read(tx: Transaction, number: int) -> bytes | None:
            key = (number << POSITION_BITS) + position
            found: bytes | None = _first(await tx.rows("SELECT data FROM log_thumbnails WHERE key = ?", key))
            return found

        return await self._read_of(stream, read)

    async def purge_log(self, stream: str, wanted: Purge) -> int:
        """Delete entries of the decision log of a stream for good, and return how many. Raises UnknownStreamError."""

        async def purge(tx: Transaction) -> int:
            known = _only(stream, await tx.rows(_FIND, to_bytes(stream)))
            return await self._log.purge(tx, known.number, known.tenant, wanted)

        return await self._delete_for_good(purge)

    async def delete_thumbnails(self) -> None:
        """Delete the thumbnails of all streams for good. The other fields of the decision log stay."""
        await self._delete_for_good(self._log.delete_thumbnails)

    async def _delete_for_good(self, delete: Rule[int]) -> int:
        """Call `delete` until it deletes nothing any more, and return how many rows it deleted."""
        deleted = 0
        while count := await self._write(delete, may_use_reserve=True):
            deleted += count
        return deleted

    async def trim_log(self, limits: LogLimits, now: float | None) -> None:
        """Delete entries of the decision log that are beyond the limits of their stream.

        Args:
            limits: of each stream.
            now: the time, in seconds since 1970. None: it is not certain, so nothing is deleted because of its age.
        """
        while (month := await self._write(lambda tx: self._log.month_to_delete(tx, limits, now))) is not None:
            if not await self._delete_month(month):
                break
        while await self._write(lambda tx: self._log.trim(tx, limits, now), may_use_reserve=True):
            pass

    async def _delete_month(self, month: int) -> bool:
        """Delete a month of the logs of all streams. Return whether it is gone."""
        while await self._write(lambda tx: self._log.delete_month(tx, month), may_use_reserve=True):
            pass
        return True

    # Helpers.

    async def _read_of(self, stream: str, work: Callable[[Transaction, int], Awaitable[T]]) -> T:
        """Return what is read of the stream with a number. Raise UnknownStreamError if there is no such stream."""

        async def read(tx: Transaction) -> T:
            return await work(tx, _only(stream, await tx.rows(_FIND, to_bytes(stream))).number)

        return await self._read(read)

    async def _ask(self, statement: str, *values: Any) -> Rows:
        """Return the rows of one statement."""
        return await self._write(lambda tx: tx.rows(statement, *values))

    async def _fenced(self, tx: Transaction, stream: str, fence: Fence) -> Stream:
        """Return a stream if this fence may write to it. Raise FencedError otherwise."""
        # Whoever asks for it may change the row in the database.
        self._rows.pop(stream, None)
        found = await tx.rows(_LOCK, to_bytes(stream))
        return _checked(stream, Stream(*found[0]) if found else None, fence)

    def __repr__(self) -> str:
        return f"<{self._place}>"


def _only(stream: str, found: Rows) -> Stream:
    if not found:
        raise UnknownStreamError(f"there is no stream {stream!r}: create it first")
    return Stream(*found[0])


def _first(found: Rows) -> Any:
    """Return the first column of the first row; None if there is no row."""
    return found[0][0] if found else None


def _living(known: Stream, lease: Rows, now: float) -> bytes | None:
    """Return who holds a stream and lives. What a dead incarnation held is free though its successor lives."""
    if known.worker is None or not lease or lease[0][0] != known.incarnation or lease[0][1] <= now:
        return None
    return known.worker


def _checked(stream: str, known: Stream | None, fence: Fence) -> Stream:
    """Return the row of a stream if this fence may write to it. Raise FencedError otherwise."""
    if known is None:
        raise FencedError(f"stream {stream!r} does not exist any more: nothing was written for epoch {fence.epoch}")
    if known.fence != fence:
        by = "" if known.worker is None else f", of {to_text(known.worker)!r}"
        if known.epoch == fence.epoch:
            by += ", given out a second time after the store lost writes"
        raise FencedError(
            f"stream {stream!r} is at epoch {known.epoch}{by}: nothing was written for epoch {fence.epoch}; "
            "acquire the stream again"
        )
    return known


def _wrong(write: Write, what: str, reason: str) -> FencedError:
    """Return the error for a write of one who is wrong about its stream."""
    return FencedError(
        f"{what} for position {write.position} of stream {write.stream!r}: {reason}; acquire the stream again"
    )

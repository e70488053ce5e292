"""The decision log and the notices in the tables of a SQL store.

Entries of one stream are ordered by time too: a time is found by bisection, and needs no index. The entries with one
outcome or class of one stream are one range of an index. The time for a page therefore does not depend on the number of
entries.
"""

import math
import re
import time
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any, Final

from ...core.decision import REASONS
from ..log.entries import OUTCOMES, LogEntry, LogLimits, LogPage, LogQuery, Purge, Range, marked
from ..log.notices import MAX_NOTICES, Notice
from .months import month_of, range_of
from .schema import ENTRY_BYTES, ENTRY_SIZE, POSITION_BITS
from .transaction import Transaction, add_usage, to_bytes, to_text

_COLUMNS: Final = "key, time, request, image_ref, outcome, name, p_unknown, score, reason, thumbnail"
# Entries that one transaction deletes, at most. Observes wait meanwhile.
_CHUNK: Final = 2000
# Bytes of entries that one transaction purges. SQLite overwrites them, so they pass through its write-ahead log.
_CHUNK_BYTES: Final = 2 << 20
# How often the logs of tenants are added up, in seconds.
_TENANTS_SECONDS: Final = 10.0
# The share of its limit to which the logs of a tenant are cut, so that it takes a while until they are cut again.
_TENANT_SHARE: Final = 0.95
# Streams whose oldest entry is looked at in one call of `trim`.
_STREAMS_AT_ONCE: Final = 100
# Most keys are 16 random bytes in hexadecimal. They are stored as bytes. Others are text, behind a byte that no text
# contains if it would have 16 bytes too.
_HEXADECIMAL: Final = re.compile("[0-9a-f]{32}")
_TEXT: Final = b"\xff"
_ALL_TIMES: Final = (-(1 << 63), (1 << 63) - 1)


class LogTables:
    """Writes to the log tables of one database."""

    # Whether each month has tables of its own. Then entries that are too old are deleted with their month.
    _has_month_tables = False

    def __init__(self) -> None:
        # Numbers of class names that are durable.
        self._classes: dict[str, int] = {}
        # Streams that have got entries since they were last trimmed.
        self._grown: set[int] = set()
        # When no tenant had too much, by the monotonic clock.
        self._tenants_checked = -math.inf
        # The stream after which `trim` goes on.
        self._last_trimmed = 0

    def unknown_classes(self, entries: Iterable[LogEntry]) -> list[str]:
        """Return the class names of entries that `append` would not know."""
        return sorted({entry.nearest_class for entry in entries} - self._classes.keys())

    async def add_classes(self, tx: Transaction, names: list[str]) -> None:
        """Give class names a number. It must be durable before they are used."""
        rows = [(to_bytes(name),) for name in names]
        insert = "INSERT INTO log_classes (name) SELECT * FROM {rows} WHERE true ON CONFLICT DO NOTHING"
        await tx.run_many(insert, "bytea", rows)
        known = "SELECT name, number FROM {rows} JOIN log_classes ON name = column1"
        found = await tx.rows_of_many(known, "bytea", rows)
        self._classes.update((to_text(name), number) for name, number in found)

    async def append(
        self, tx: Transaction, added: "Sequence[tuple[int, bytes, Sequence[LogEntry], Sequence[Range]]]"
    ) -> None:
        """Add entries to the logs of streams of tenants, and mark earlier ones as rolled back."""
        rows: list[tuple[Any, ...]] = []
        sizes: dict[tuple[int, int], list[int]] = {}
        thumbnails = []
        for stream, tenant, entries, _ in added:
            base, total, moment, size = stream << POSITION_BITS, 0, -1, [0, 0]
            for entry in entries:
                key, thumbnail, image_ref = base + entry.position, entry.thumbnail, entry.image_ref
                if entry.time != moment:
                    moment = entry.time
                    size = sizes.setdefault((stream, month_of(moment)), [0, 0])
                rows.append(
                    (
                        key,
                        moment,
                        _packed_key(entry.key),
                        image_ref,
                        entry.outcome_code,
                        self._classes[entry.nearest_class],
                        entry.p_unknown,
                        entry.score,
                        None if entry.reason is None else REASONS.index(entry.reason),
                        len(thumbnail),
                    )
                )
                if thumbnail:
                    thumbnails.append((key, thumbnail, moment))
                grown = ENTRY_BYTES + len(thumbnail) + (0 if image_ref is None else len(image_ref.encode()))
                size[0] += 1
                size[1] += grown
                total += grown
            add_usage(tx, tenant, log_size=total)
        types = "bigint bigint bytea text bigint bigint float8 float8 bigint bigint"
        await tx.run_many("INSERT INTO log SELECT * FROM {rows}", types, rows)
        await tx.run_many("INSERT INTO log_thumbnails SELECT * FROM {rows}", "bigint bytea bigint", thumbnails)
        await tx.run_many(
            "INSERT INTO log_sizes SELECT * FROM {rows} WHERE true ON CONFLICT (stream, month) DO UPDATE "
            "SET entries = log_sizes.entries + excluded.entries, bytes = log_sizes.bytes + excluded.bytes",
            "bigint bigint bigint bigint",
            # In the order in which they are trimmed.
            [(*name, *size) for name, size in sorted(sizes.items())],
        )
        self._grown.update(stream for stream, _ in sizes)
        await tx.run_many(
            "INSERT INTO log_roll_backs SELECT * FROM {rows} WHERE true ON CONFLICT DO NOTHING",
            "bigint bigint bigint",
            [(stream, first, last) for stream, _, _, roll_backs in added for first, last in roll_backs],
        )

    async def purge(self, tx: Transaction, stream: int, tenant: bytes | None, wanted: Purge) -> int:
        """Delete some of the entries that match. Return how many; 0 if none is left. A deleted stream has no tenant."""
        await self._lock(tx, stream)
        low, high = await _range_of_times(tx, stream, wanted.since, wanted.until)
        if wanted.image_ref is None:
            chosen = f"SELECT key, {ENTRY_SIZE} FROM log WHERE key >= ? AND key < ? ORDER BY key LIMIT ?"
            keys: list[int] = []
            size = 0
            for key, row_size in await tx.rows(chosen, low, high, _CHUNK):
                size += row_size
                if keys and size > _CHUNK_BYTES:
                    break
                keys.append(key)
            return await self._delete(tx, stream, tenant, [(keys[0], keys[-1])]) if keys else 0
        # Without the hint SQLite may read the whole range of times.
        chosen = "SELECT key FROM log INDEXED BY log_by_image WHERE image_ref = ? AND key >= ? AND key < ? LIMIT ?"
        found = await tx.rows(chosen, wanted.image_ref, low, high, _CHUNK)
        return await self._delete(tx, stream, tenant, [(key, key) for (key,) in found])

    async def delete_thumbnails(self, tx: Transaction) -> int:
        """Delete some of the thumbnails. Return how many; 0 if none is left."""
        rows = await tx.rows("SELECT key, time, length(data) FROM log_thumbnails LIMIT ?", _CHUNK)
        keys = [(key,) for key, *_ in rows]
        await tx.run_many("DELETE FROM log_thumbnails WHERE key IN (SELECT column1 FROM {rows})", "bigint", keys)
        await tx.run_many("UPDATE log SET thumbnail = 0 WHERE key IN (SELECT column1 FROM {rows})", "bigint", keys)
        deleted: dict[int, list[tuple[int, int]]] = {}
        for key, written, size in rows:
            deleted.setdefault(key >> POSITION_BITS, []).append((written, size))
        tenants: dict[int, bytes] = dict(await tx.rows_of_many(_TENANTS, "bigint", [(stream,) for stream in deleted]))
        for stream, sizes in sorted(deleted.items()):
            await self._shrink(tx, stream, tenants.get(stream), sizes, entries=0)
        return len(rows)

    async def month_to_delete(self, tx: Transaction, limits: LogLimits, now: float | None) -> int | None:
        """Return the oldest month if all of it is too old, or if the logs of all streams take too much; else None.

        The current month is never returned.
        """
        month = await self._oldest_month(tx)
        if month is None or now is None:
            return None
        # Streams of all processes are concerned. One whose clock is ahead must not delete them.
        ((clock,),) = await tx.rows("SELECT store_clock()")
        now = min(now, clock)
        if month >= month_of(int(1000 * now)):
            return None
        if self._has_month_tables and range_of(month)[1] <= 1000 * (now - limits.seconds):
            return month
        if limits.total_size:
            ((size,),) = await tx.rows("SELECT CAST(coalesce(sum(log_bytes), 0) AS BIGINT) FROM usage")
            if size > limits.total_size:
                return month
        return None

    async def _oldest_month(self, tx: Transaction) -> int | None:
        """Return the oldest month of which anything is left."""
        month: int | None
        ((month,),) = await tx.rows("SELECT min(month) FROM log_sizes")
        return month

    async def delete_month(self, tx: Transaction, month: int) -> bool:
        """Delete a month of the logs of all streams, at most a few thousand entries. Return whether more is left."""
        found = await tx.rows(
            "SELECT stream, tenant, entries FROM log_sizes LEFT JOIN streams ON number = stream "
            "WHERE month = ? LIMIT 1",
            month,
        )
        if not found:
            return False
        ((stream, tenant, entries),) = found
        # The number of entries ends the search where the month ends.
        keys = await tx.rows(
            "SELECT key FROM log WHERE key >= ? AND key < ? AND time >= ? AND time < ? ORDER BY key LIMIT ?",
            *(*_whole_range(stream), *range_of(month), min(entries, _CHUNK)),
        )
        if keys:
            await self._delete(tx, stream, tenant, [(keys[0][0], keys[-1][0])], range_of(month))
            await self._delete_roll_backs(tx, stream)
        else:
            await tx.run("DELETE FROM log_sizes WHERE stream = ? AND month = ?", stream, month)
        return True

    async def trim(self, tx: Transaction, limits: LogLimits, now: float | None) -> bool:
        """Delete entries beyond the limits, at most a few thousand. Return whether more may be left.

        If `now` is None, no entry is too old. None is if the log has tables of months, which are dropped as a whole.
        """
        if self._has_month_tables:
            now = None
        deleted = await tx.rows("SELECT stream FROM log_deleted LIMIT 1")
        if deleted:
            return await self._delete_rest(tx, deleted[0][0])
        # Some of those that have grown, and in turn some of all streams, whose entries may be too old.
        chosen = [self._grown.pop() for _ in range(min(len(self._grown), _STREAMS_AT_ONCE))]
        found = await tx.rows(
            "SELECT DISTINCT stream FROM log_sizes WHERE stream > ? ORDER BY stream LIMIT ?",
            *(self._last_trimmed, _STREAMS_AT_ONCE),
        )
        self._last_trimmed = found[-1][0] if len(found) == _STREAMS_AT_ONCE else 0
        # In one order, because two processes may lock several of them.
        chosen = sorted({*chosen, *(stream for (stream,) in found)})
        tenants: dict[int, bytes] = dict(await tx.rows_of_many(_TENANTS, "bigint", [(stream,) for stream in chosen]))
        for at, stream in enumerate(chosen):
            if stream in tenants and await self._trim_stream(tx, stream, tenants[stream], limits, now):
                self._grown.update(chosen[at:])
                return True
        # Others that have grown wait for the next call: under steady load there are always some.
        return await self._trim_tenants(tx, limits, now)

    async def _trim_tenants(self, tx: Transaction, limits: LogLimits, now: float | None) -> bool:
        """Delete the oldest entries of the largest logs of tenants that have too much. Return whether more are left."""
        if not limits.tenant_size or time.monotonic() < self._tenants_checked + _TENANTS_SECONDS:
            return False
        for (tenant,) in await tx.rows(
            "SELECT tenant FROM usage GROUP BY tenant HAVING sum(log_bytes) > ?", limits.tenant_size
        ):
            sizes = await tx.rows(
                "SELECT CAST(sum(bytes) AS BIGINT) AS size, stream FROM log_sizes JOIN streams ON number = stream "
                "WHERE tenant = ? GROUP BY stream ORDER BY size",
                tenant,
            )
            if not sizes:
                continue
            largest = _largest_size([size for size, _ in sizes], int(_TENANT_SHARE * limits.tenant_size))
            size, stream = sizes[-1]
            # One at a time: observes wait meanwhile.
            await self._trim_stream(tx, stream, tenant, limits._replace(size=largest), now)
            if (await self._lock(tx, stream))[1] < size:
                return True
        self._tenants_checked = time.monotonic()
        return False

    async def _trim_stream(
        self, tx: Transaction, stream: int, tenant: bytes, limits: LogLimits, now: float | None
    ) -> bool:
        """Delete the oldest entries of a stream if it has too many. Return whether more may be left."""
        low, high = _whole_range(stream)
        newest_time = None if now is None else int(1000 * now)
        oldest_time = 0 if now is None else int(1000 * (now - limits.seconds))
        entries, size = await self._lock(tx, stream, waits=False)
        following: int | None = None
        keys: list[int] = []
        # The first entry shows whether there is anything to do.
        for limit in (1, _CHUNK):
            chosen = f"SELECT key, time, {ENTRY_SIZE} FROM log WHERE key >= ? AND key < ? ORDER BY key LIMIT ?"
            if limit > 1:
                # Not before, because commits of this stream wait meanwhile.
                entries, size = await self._lock(tx, stream)
            left, bytes_left = entries, size
            keys = []
            for key, written, row_size in await tx.rows(chosen, low, high, limit):
                if newest_time is None or written <= newest_time:
                    following = None
                else:
                    # Written while the clock was ahead. It must not keep those behind it, so it is as old as they are.
                    if following is None:
                        following = await self._time_behind(tx, key, high, newest_time)
                    written = following
                if left <= limits.entries and bytes_left <= limits.size and written >= oldest_time:
                    break
                keys.append(key)
                left -= 1
                bytes_left -= row_size
            if not keys:
                return False
        await self._delete(tx, stream, tenant, [(keys[0], keys[-1])])
        await self._delete_roll_backs(tx, stream)
        return len(keys) == _CHUNK

    async def _time_behind(self, tx: Transaction, key: int, high: int, newest_time: int) -> int:
        """Return the time of the first later entry that is not in the future; now, if there is none."""
        found = await tx.rows(
            "SELECT time FROM log WHERE key > ? AND key < ? AND time <= ? ORDER BY key LIMIT 1", key, high, newest_time
        )
        return int(found[0][0]) if found else newest_time

    async def _delete_rest(self, tx: Transaction, stream: int) -> bool:
        """Delete some of the entries of a stream that does not exist any more."""
        if not await self.purge(tx, stream, None, Purge()):
            for table in ("log_roll_backs", "log_sizes", "log_deleted"):
                await tx.run(f"DELETE FROM {table} WHERE stream = ?", stream)
            self._grown.discard(stream)
        return True

    async def _lock(self, tx: Transaction, stream: int, waits: bool = True) -> tuple[int, int]:
        """Return the number of entries and bytes of a log, which nobody else changes until the transaction ends.

        If `waits` is false, others may change them.
        """
        lock = "/*+ FOR UPDATE */" if waits else ""
        found = await tx.rows(f"SELECT entries, bytes FROM log_sizes WHERE stream = ? ORDER BY month {lock}", stream)
        return sum(entries for entries, _ in found), sum(size for _, size in found)

    async def _delete(
        self,
        tx: Transaction,
        stream: int,
        tenant: bytes | None,
        ranges: Sequence[tuple[int, int]],
        times: tuple[int, int] = _ALL_TIMES,
    ) -> int:
        """Delete the entries between pairs of keys, ends included, if their times are in a range. Return how many."""
        deleted: list[tuple[int, int]] = []
        where = "WHERE key >= ? AND key <= ? AND time >= ? AND time < ?"
        for ends in ranges:
            rows = await tx.rows(f"DELETE FROM log {where} RETURNING time, {ENTRY_SIZE}", *ends, *times)
            await tx.run(f"DELETE FROM log_thumbnails {where}", *ends, *times)
            deleted += [(written, size) for written, size in rows]
        await self._shrink(tx, stream, tenant, deleted)
        return len(deleted)

    async def _delete_roll_backs(self, tx: Transaction, stream: int) -> None:
        """Delete what is known of roll-backs before the oldest entry of a stream."""
        await tx.run(
            "DELETE FROM log_roll_backs WHERE stream = ?1 AND last <= "
            "coalesce((SELECT min(key) FROM log WHERE key >= ?2 AND key < ?3) - ?2, last)",
            *(stream, *_whole_range(stream)),
        )

    async def _shrink(
        self,
        tx: Transaction,
        stream: int,
        tenant: bytes | None,
        deleted: Sequence[tuple[int, int]],
        entries: int = 1,
    ) -> None:
        """Count what was deleted from the log of a stream. What a deleted stream leaves behind counts for no tenant.

        Args:
            tx: the transaction.
            stream: the number of the stream.
            tenant: whose stream it is; None if it was deleted.
            deleted: the time and the bytes of each entry.
            entries: how many entries each of them is; 0 if only thumbnails were deleted.
        """
        sizes: dict[int, list[int]] = {}
        for written, size in deleted:
            total = sizes.setdefault(month_of(written), [0, 0])
            total[0] += entries
            total[1] += size
        for month, (count, size) in sorted(sizes.items()):
            await tx.run(
                "UPDATE log_sizes SET entries = entries - ?, bytes = bytes - ? WHERE stream = ? AND month = ?",
                *(count, size, stream, month),
            )
            await tx.run("DELETE FROM log_sizes WHERE stream = ? AND month = ? AND entries <= 0", stream, month)
        if tenant is not None:
            add_usage(tx, tenant, log_size=-sum(size for _, size in deleted))


_TENANTS: Final = "SELECT number, tenant FROM {rows} JOIN streams ON number = column1"


def _largest_size(sizes: Sequence[int], total: int) -> int:
    """Return the size to which the largest logs are cut, so that all of them have a total size.

    Args:
        sizes: of the logs, smallest first.
        total: less than their sum.
    """
    left = total
    for place, size in enumerate(sizes):
        share = left // (len(sizes) - place)
        if size > share:
            return share
        left -= size
    return total


async def read_page(tx: Transaction, stream: int, query: LogQuery) -> LogPage:
    """Return a page of the log of a stream."""
    if query.is_contradictory:
        return LogPage([], False)
    low, high = await _range_of_times(tx, stream, query.since, query.until)
    base = stream << POSITION_BITS
    if query.after is not None and query.newest_first:
        high = min(high, base + query.after)
    elif query.after is not None:
        low = max(low, base + query.after + 1)
    found = await _read(tx, query, low, high)
    entries = [_entry(row) for row in found[: query.limit]]
    positions = [entry.position for entry in entries]
    ranges: list[Any] = []
    if positions:
        ranges = await tx.rows(
            "SELECT first, last FROM log_roll_backs WHERE stream = ? AND first <= ? AND last > ?",
            *(stream, max(positions), min(positions)),
        )
    return LogPage(marked(entries, ranges), len(found) > query.limit)


async def _read(tx: Transaction, query: LogQuery, low: int, high: int) -> list[tuple[Any, ...]]:
    """Return the rows of a page, and one more if there are more."""
    order, limit = "DESC" if query.newest_first else "ASC", query.limit + 1
    joined = f"SELECT {_COLUMNS} FROM log JOIN log_classes ON number = nearest"
    name = query.class_name()
    if name is None and query.outcome is None:
        return await tx.rows(f"{joined} WHERE key >= ? AND key < ? ORDER BY key {order} LIMIT ?", low, high, limit)
    if name is None:
        index, fixed, values = "log_by_outcome", "", ()
    else:
        found = await tx.rows("SELECT number FROM log_classes WHERE name = ?", to_bytes(name))
        if not found:
            return []
        index, fixed, values = "log_by_class", "nearest = ? AND", found[0]
    # One range of the index for each outcome. Each is in the order of the keys.
    keys: list[int] = []
    for code in query.outcome_codes():
        chosen = (
            f"SELECT key FROM log INDEXED BY {index} WHERE {fixed} outcome = ? AND key >= ? AND key < ? "
            f"ORDER BY key {order} LIMIT ?"
        )
        keys += (key for (key,) in await tx.rows(chosen, *values, code, low, high, limit))
    wanted = [(key,) for key in sorted(keys, reverse=query.newest_first)[:limit]]
    rows = await tx.rows_of_many(
        f"SELECT {_COLUMNS} FROM {{rows}} JOIN log ON key = column1 JOIN log_classes ON number = nearest",
        "bigint",
        wanted,
    )
    return sorted(rows, reverse=query.newest_first, key=lambda row: int(row[0]))


async def _range_of_times(tx: Transaction, stream: int, since: int | None, until: int | None) -> tuple[int, int]:
    """Return the keys between two times."""
    low, high = _whole_range(stream)
    if since is None and until is None:
        return low, high
    where = "FROM log WHERE key >= ? AND key < ?"
    # Two queries, because SQLite reads the whole range for a minimum and a maximum at once.
    ((first,),) = await tx.rows(f"SELECT min(key) {where}", low, high)
    ((last,),) = await tx.rows(f"SELECT max(key) {where}", low, high)
    if first is None:
        return low, low
    begin = first if since is None else await _first_key(tx, first, last + 1, since)
    end = high if until is None else await _first_key(tx, first, last + 1, until)
    return begin, end


async def _first_key(tx: Transaction, low: int, high: int, moment: int) -> int:
    """Return a key in [low, high] that divides the entries before a time from the others."""
    while low < high:
        middle = (low + high) // 2
        found = await tx.rows("SELECT key, time FROM log WHERE key >= ? AND key < ? ORDER BY key LIMIT 1", middle, high)
        if not found or found[0][1] >= moment:
            high = middle
        else:
            low = found[0][0] + 1
    return low


def _whole_range(stream: int) -> tuple[int, int]:
    return stream << POSITION_BITS, (stream + 1) << POSITION_BITS


def _entry(row: tuple[Any, ...]) -> LogEntry:
    key, written, request, image_ref, code, name, p_unknown, score, reason, thumbnail = row
    outcome, known = OUTCOMES[code]
    return LogEntry(
        key & ((1 << POSITION_BITS) - 1),
        written,
        _unpacked_key(request),
        image_ref,
        outcome,
        known,
        to_text(name),
        p_unknown,
        score,
        None if reason is None else REASONS[reason],
        bool(thumbnail),
    )


# Rows of one request have the same key.
@lru_cache(maxsize=64)
def _packed_key(key: str) -> bytes:
    """Return an idempotency key as it is stored."""
    if _HEXADECIMAL.fullmatch(key):
        return bytes.fromhex(key)
    data = key.encode()
    return _TEXT + data if len(data) == 16 else data


def _unpacked_key(data: bytes) -> str:
    return data.hex() if len(data) == 16 else data.removeprefix(_TEXT).decode()


async def append_notices(tx: Transaction, stream: int, tenant: bytes, notices: Sequence[Notice]) -> None:
    """Add notices of a stream, and delete the oldest if it has too many. Their ids grow as they become durable."""
    await tx.wait_turn(tenant)
    await tx.run_many(
        "INSERT INTO notices (tenant, stream, position, number, time, kind, content) SELECT * FROM {rows}",
        "bytea bigint bigint bigint bigint text text",
        [(tenant, stream, *notice) for notice in notices],
    )
    await tx.run(
        "DELETE FROM notices WHERE stream = ?1 AND id <= "
        "(SELECT id FROM notices WHERE stream = ?1 ORDER BY position DESC, number DESC LIMIT 1 OFFSET ?2)",
        *(stream, MAX_NOTICES),
    )


async def read_notices(tx: Transaction, stream: int, after: tuple[int, int] | None, since: int | None) -> list[Notice]:
    """Return the notices of a stream after a position and number, or from a time on."""
    found = await tx.rows(
        "SELECT position, number, time, kind, content FROM notices "
        "WHERE stream = ? AND (position, number) > (?, ?) AND time >= ? ORDER BY position, number",
        *(stream, *(after or (-1, 0)), since or 0),
    )
    return [Notice(*row) for row in found]


async def read_tenant_notices(tx: Transaction, tenant: bytes, after: int, limit: int) -> list[tuple[int, str, Notice]]:
    """Return id, stream and content of notices of a tenant after an id."""
    found = await tx.rows(
        "SELECT notices.id, streams.id, position, notices.number, time, kind, content "
        "FROM notices JOIN streams ON streams.number = stream WHERE notices.tenant = ? AND notices.id > ? "
        "ORDER BY notices.id LIMIT ?",
        *(tenant, after, limit),
    )
    return [(number, to_text(stream), Notice(*row)) for number, stream, *row in found]

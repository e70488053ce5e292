"""The decision log in the tables of a SQLite store.

The rowid of an entry is the number of its stream and its position, so that the log of a stream is one range. Entries of
one stream are ordered by time too: a time is found by bisection, and needs no index. An index in SQLite ends with the
rowid, so the entries with one outcome or class of one stream are one range of an index. The time for a page therefore
does not depend on the number of entries.

All functions run inside a transaction of the caller.
"""

import math
import re
import sqlite3
import time
from collections.abc import Iterator, Sequence
from typing import Any, Final

from ...core.decision import REASONS
from .entries import OUTCOMES, LogEntry, LogLimits, LogPage, LogQuery, Purge, Range, marked

SCHEMA: Final = """
CREATE TABLE log_classes (number INTEGER PRIMARY KEY, name TEXT NOT NULL UNIQUE) STRICT;
CREATE TABLE log (
    key INTEGER PRIMARY KEY,
    time INTEGER NOT NULL,
    request ANY NOT NULL,
    image_ref TEXT,
    outcome INTEGER NOT NULL,
    nearest INTEGER NOT NULL,
    p_unknown REAL,
    score REAL,
    reason INTEGER,
    thumbnail INTEGER NOT NULL
) STRICT;
CREATE INDEX log_by_outcome ON log (outcome);
CREATE INDEX log_by_class ON log (nearest, outcome);
CREATE INDEX log_by_image ON log (image_ref) WHERE image_ref IS NOT NULL;
CREATE TABLE log_thumbnails (key INTEGER PRIMARY KEY, data BLOB NOT NULL) STRICT;
CREATE TABLE log_roll_backs (
    stream INTEGER NOT NULL, first INTEGER NOT NULL, last INTEGER NOT NULL, PRIMARY KEY (stream, first, last)
) STRICT, WITHOUT ROWID;
CREATE TABLE log_sizes (stream INTEGER PRIMARY KEY, entries INTEGER NOT NULL, bytes INTEGER NOT NULL) STRICT;
CREATE TABLE log_deleted (stream INTEGER PRIMARY KEY) STRICT;
"""
POSITION_BITS: Final = 32
_COLUMNS: Final = "key, time, request, image_ref, outcome, name, p_unknown, score, reason, thumbnail"
# Bytes of an entry beside its image reference and thumbnail, indexes included.
_ENTRY_BYTES: Final = 110
_SIZE: Final = f"{_ENTRY_BYTES} + ifnull(length(CAST(image_ref AS BLOB)), 0) + thumbnail"
# Entries that one transaction deletes, at most. Observes wait meanwhile.
_CHUNK: Final = 2000
# Bytes of entries that one transaction purges. They are overwritten, and so pass through the write-ahead log.
_CHUNK_BYTES: Final = 2 << 20
# How often the logs of tenants are added up, in seconds.
_TENANTS_SECONDS: Final = 10.0
# The share of its limit to which the logs of a tenant are cut, so that it takes a while until they are cut again.
_TENANT_SHARE: Final = 0.95
# Streams whose oldest entry is looked at in one call of `trim`.
_STREAMS_AT_ONCE: Final = 100
# Rows that one statement inserts.
_ROWS_AT_ONCE: Final = 64
# Most keys are 16 random bytes in hexadecimal. They are stored as bytes.
_HEXADECIMAL: Final = re.compile("[0-9a-f]{32}")


class LogWriter:
    """Writes to the log tables of one database.

    Args:
        database: a connection that only one thread uses.
    """

    def __init__(self, database: sqlite3.Connection):
        self._database = database
        # Numbers of class names. They hold as long as no transaction is rolled back.
        self._classes: dict[str, int] = {}
        # Streams that have got entries since they were last trimmed.
        self._grown: set[int] = set()
        # When no tenant had too much, by the monotonic clock.
        self._tenants_checked = -math.inf
        # The stream after which `trim` goes on.
        self._last_trimmed = 0

    def forget(self) -> None:
        """Forget what the last transaction wrote, because it was rolled back."""
        self._classes.clear()

    def append(self, added: "Sequence[tuple[int, Sequence[LogEntry], Sequence[Range]]]") -> None:
        """Add entries to the logs of streams, and mark earlier ones as rolled back."""
        rows: list[tuple[Any, ...]] = []
        sizes: dict[int, list[int]] = {}
        thumbnails = []
        for stream, entries, _ in added:
            base = stream << POSITION_BITS
            for entry in entries:
                key, thumbnail = base + entry.position, entry.thumbnail
                rows.append(
                    (
                        key,
                        entry.time,
                        _packed_key(entry.key),
                        entry.image_ref,
                        entry.outcome_code,
                        self._class_number(entry.nearest_class),
                        entry.p_unknown,
                        entry.score,
                        None if entry.reason is None else REASONS.index(entry.reason),
                        len(thumbnail),
                    )
                )
                size = sizes.setdefault(stream, [0, 0])
                size[0] += 1
                size[1] += _ENTRY_BYTES + len((entry.image_ref or "").encode()) + len(thumbnail)
                if thumbnail:
                    thumbnails.append((key, thumbnail))
        insert_rows(self._database, "log", rows)
        insert_rows(self._database, "log_thumbnails", thumbnails)
        execute_with_rows(
            self._database,
            "INSERT INTO log_sizes VALUES {rows} "
            "ON CONFLICT DO UPDATE SET entries = entries + excluded.entries, bytes = bytes + excluded.bytes",
            [(stream, *size) for stream, size in sizes.items()],
        )
        self._grown.update(sizes)
        marks = [(stream, first, last) for stream, _, roll_backs in added for first, last in roll_backs]
        self._database.executemany("INSERT OR IGNORE INTO log_roll_backs VALUES (?, ?, ?)", marks)

    def _class_number(self, name: str) -> int:
        number = self._classes.get(name)
        if number is None:
            self._database.execute("INSERT OR IGNORE INTO log_classes (name) VALUES (?)", (name,))
            (number,) = self._database.execute("SELECT number FROM log_classes WHERE name = ?", (name,)).fetchone()
            self._classes[name] = number
        return number

    def delete_stream(self, stream: int) -> None:
        """Have `trim` delete the log of a stream that does not exist any more."""
        self._database.execute("INSERT INTO log_deleted VALUES (?)", (stream,))

    def purge(self, stream: int, wanted: Purge) -> int:
        """Delete some of the entries that match. Return how many; 0 if none is left."""
        low, high = _range_of_times(self._database, stream, wanted.since, wanted.until)
        if wanted.image_ref is None:
            chosen = f"SELECT key, {_SIZE} FROM log WHERE key >= ? AND key < ? ORDER BY key LIMIT ?"
            keys: list[int] = []
            size = 0
            for key, row_size in self._database.execute(chosen, (low, high, _CHUNK)):
                size += row_size
                if keys and size > _CHUNK_BYTES:
                    break
                keys.append(key)
            return self._delete(stream, [(keys[0], keys[-1])]) if keys else 0
        # Without the hint SQLite may read the whole range of times.
        chosen = "SELECT key FROM log INDEXED BY log_by_image WHERE image_ref = ? AND key >= ? AND key < ? LIMIT ?"
        found = self._database.execute(chosen, (wanted.image_ref, low, high, _CHUNK))
        return self._delete(stream, [(key, key) for (key,) in found])

    def delete_thumbnails(self) -> int:
        """Delete some of the thumbnails. Return how many; 0 if none is left."""
        execute = self._database.execute
        rows = execute("SELECT key, length(data) FROM log_thumbnails LIMIT ?", (_CHUNK,)).fetchall()
        for key, size in rows:
            execute("DELETE FROM log_thumbnails WHERE key = ?", (key,))
            execute("UPDATE log SET thumbnail = 0 WHERE key = ?", (key,))
            execute("UPDATE log_sizes SET bytes = bytes - ? WHERE stream = ?", (size, key >> POSITION_BITS))
        return len(rows)

    def trim(self, limits: LogLimits, now: float | None) -> bool:
        """Delete entries beyond the limits, at most a few thousand. Return whether more may be left.

        If `now` is None, no entry is too old.
        """
        deleted = self._database.execute("SELECT stream FROM log_deleted LIMIT 1").fetchone()
        if deleted is not None:
            return self._delete_rest(deleted[0])
        # Some of those that have grown, and in turn some of all streams, whose entries may be too old.
        chosen = [self._grown.pop() for _ in range(min(len(self._grown), _STREAMS_AT_ONCE))]
        found = self._database.execute(
            "SELECT stream FROM log_sizes WHERE stream > ? ORDER BY stream LIMIT ?",
            (self._last_trimmed, _STREAMS_AT_ONCE),
        ).fetchall()
        self._last_trimmed = found[-1][0] if len(found) == _STREAMS_AT_ONCE else 0
        chosen += [stream for (stream,) in found]
        for at, stream in enumerate(chosen):
            if self._trim_stream(stream, limits, now):
                self._grown.update(chosen[at:])
                return True
        # Others that have grown wait for the next call: under steady load there are always some.
        return self._trim_tenants(limits, now)

    def _trim_tenants(self, limits: LogLimits, now: float | None) -> bool:
        """Delete the oldest entries of the largest logs of tenants that have too much. Return whether more are left."""
        if not limits.tenant_size or time.monotonic() < self._tenants_checked + _TENANTS_SECONDS:
            return False
        for (tenant,) in self._database.execute(
            "SELECT tenant FROM log_sizes JOIN streams ON number = stream GROUP BY tenant HAVING sum(bytes) > ?",
            (limits.tenant_size,),
        ).fetchall():
            sizes = self._database.execute(
                "SELECT bytes, stream FROM log_sizes JOIN streams ON number = stream WHERE tenant = ? ORDER BY bytes",
                (tenant,),
            ).fetchall()
            largest = _largest_size([size for size, _ in sizes], int(_TENANT_SHARE * limits.tenant_size))
            size, stream = sizes[-1]
            # One at a time: observes wait meanwhile.
            self._trim_stream(stream, limits._replace(size=largest), now)
            if self._sizes(stream)[1] < size:
                return True
        self._tenants_checked = time.monotonic()
        return False

    def _trim_stream(self, stream: int, limits: LogLimits, now: float | None) -> bool:
        """Delete the oldest entries of a stream if it has too many. Return whether more may be left."""
        low, high = _whole_range(stream)
        entries, size = self._sizes(stream)
        newest_time = None if now is None else int(1000 * now)
        oldest_time = 0 if now is None else int(1000 * (now - limits.seconds))
        rows = self._database.execute(
            f"SELECT key, time, {_SIZE} FROM log WHERE key >= ? AND key < ? ORDER BY key LIMIT ?", (low, high, _CHUNK)
        )
        keys = []
        following: int | None = None
        for key, written, row_size in rows:
            if newest_time is None or written <= newest_time:
                following = None
            else:
                # Written while the clock was ahead. It must not keep those behind it, so it is as old as they are.
                if following is None:
                    following = self._time_behind(key, high, newest_time)
                written = following
            if entries <= limits.entries and size <= limits.size and written >= oldest_time:
                break
            keys.append(key)
            entries -= 1
            size -= row_size
        rows.close()
        if keys:
            self._delete(stream, [(keys[0], keys[-1])])
            last = keys[-1] - (stream << POSITION_BITS)
            self._database.execute("DELETE FROM log_roll_backs WHERE stream = ? AND last <= ?", (stream, last))
        return len(keys) == _CHUNK

    def _time_behind(self, key: int, high: int, newest_time: int) -> int:
        """Return the time of the first later entry that is not in the future; now, if there is none."""
        found = self._database.execute(
            "SELECT time FROM log WHERE key > ? AND key < ? AND time <= ? ORDER BY key LIMIT 1",
            (key, high, newest_time),
        ).fetchone()
        return newest_time if found is None else int(found[0])

    def _delete_rest(self, stream: int) -> bool:
        """Delete some of the entries of a stream that does not exist any more."""
        execute = self._database.execute
        if not self.purge(stream, Purge()):
            execute("DELETE FROM log_roll_backs WHERE stream = ?", (stream,))
            execute("DELETE FROM log_sizes WHERE stream = ?", (stream,))
            execute("DELETE FROM log_deleted WHERE stream = ?", (stream,))
            self._grown.discard(stream)
        return True

    def _sizes(self, stream: int) -> tuple[int, int]:
        found = self._database.execute("SELECT entries, bytes FROM log_sizes WHERE stream = ?", (stream,)).fetchone()
        return found or (0, 0)

    def _delete(self, stream: int, ranges: Sequence[tuple[int, int]]) -> int:
        """Delete the entries between pairs of keys, ends included. Return how many."""
        entries = size = 0
        where = "WHERE key >= ? AND key <= ?"
        for ends in ranges:
            count, total = self._database.execute(f"SELECT count(*), sum({_SIZE}) FROM log {where}", ends).fetchone()
            self._database.execute(f"DELETE FROM log_thumbnails {where}", ends)
            self._database.execute(f"DELETE FROM log {where}", ends)
            entries += count
            size += total or 0
        self._database.execute(
            "UPDATE log_sizes SET entries = entries - ?, bytes = bytes - ? WHERE stream = ?", (entries, size, stream)
        )
        return entries


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


def log_bytes(database: sqlite3.Connection) -> list[tuple[bytes, int]]:
    """Return the bytes of the logs of each tenant."""
    return database.execute(
        "SELECT tenant, sum(bytes) FROM log_sizes JOIN streams ON number = stream GROUP BY tenant"
    ).fetchall()


def insert_rows(database: sqlite3.Connection, table: str, rows: Sequence[tuple[Any, ...]]) -> None:
    """Insert rows into a table, many with each statement."""
    execute_with_rows(database, f"INSERT INTO {table} VALUES {{rows}}", rows)


def execute_with_rows(database: sqlite3.Connection, statement: str, rows: Sequence[tuple[Any, ...]]) -> None:
    """Execute a statement for rows of values, many at a time. They take the place of `{rows}` behind VALUES.

    Python's sqlite3 module releases the interpreter lock during a statement. With one statement per row, the threads of
    the service would pass the lock to each other for every row.
    """
    for first in range(0, len(rows), _ROWS_AT_ONCE):
        chunk = rows[first : first + _ROWS_AT_ONCE]
        row = f"({', '.join('?' * len(chunk[0]))})"
        values = [value for one in chunk for value in one]
        database.execute(statement.format(rows=", ".join([row] * len(chunk))), values)


def read_page(database: sqlite3.Connection, stream: int, query: LogQuery) -> LogPage:
    """Return a page of the log of a stream."""
    if query.is_contradictory:
        return LogPage([], False)
    low, high = _range_of_times(database, stream, query.since, query.until)
    base = stream << POSITION_BITS
    if query.after is not None and query.newest_first:
        high = min(high, base + query.after)
    elif query.after is not None:
        low = max(low, base + query.after + 1)
    found = list(_read(database, query, low, high))
    entries = [_entry(row) for row in found[: query.limit]]
    positions = [entry.position for entry in entries]
    ranges: list[Range] = []
    if positions:
        ranges = database.execute(
            "SELECT first, last FROM log_roll_backs WHERE stream = ? AND first <= ? AND last > ?",
            (stream, max(positions), min(positions)),
        ).fetchall()
    return LogPage(marked(entries, ranges), len(found) > query.limit)


def _read(database: sqlite3.Connection, query: LogQuery, low: int, high: int) -> Iterator[tuple[Any, ...]]:
    """Yield the rows of a page, and one more if there are more."""
    order, limit = "DESC" if query.newest_first else "ASC", query.limit + 1
    joined = f"SELECT {_COLUMNS} FROM log JOIN log_classes ON number = nearest"
    name = query.class_name()
    if name is None and query.outcome is None:
        where = "WHERE key >= ? AND key < ?"
        yield from database.execute(f"{joined} {where} ORDER BY key {order} LIMIT ?", (low, high, limit))
        return
    if name is None:
        index, fixed, values = "log_by_outcome", "", ()
    else:
        found = database.execute("SELECT number FROM log_classes WHERE name = ?", (name,)).fetchone()
        if found is None:
            return
        index, fixed, values = "log_by_class", "nearest = ? AND", found
    # One range of the index for each outcome. Each is in the order of the keys.
    keys: list[int] = []
    for code in query.outcome_codes():
        chosen = (
            f"SELECT key FROM log INDEXED BY {index} WHERE {fixed} outcome = ? AND key >= ? AND key < ? "
            f"ORDER BY key {order} LIMIT ?"
        )
        given = (*values, code, low, high, limit)
        keys += (key for (key,) in database.execute(chosen, given))
    for key in sorted(keys, reverse=query.newest_first)[:limit]:
        yield database.execute(f"{joined} WHERE key = ?", (key,)).fetchone()


def read_thumbnail(database: sqlite3.Connection, stream: int, position: int) -> bytes | None:
    """Return the thumbnail at a position; None if there is none."""
    found = database.execute(
        "SELECT data FROM log_thumbnails WHERE key = ?", ((stream << POSITION_BITS) + position,)
    ).fetchone()
    return None if found is None else found[0]


def _range_of_times(database: sqlite3.Connection, stream: int, since: int | None, until: int | None) -> tuple[int, int]:
    """Return the keys between two times."""
    low, high = _whole_range(stream)
    if since is None and until is None:
        return low, high
    where = "FROM log WHERE key >= ? AND key < ?"
    # Two queries, because SQLite reads the whole range for a minimum and a maximum at once.
    (first,) = database.execute(f"SELECT min(key) {where}", (low, high)).fetchone()
    (last,) = database.execute(f"SELECT max(key) {where}", (low, high)).fetchone()
    if first is None:
        return low, low
    begin = first if since is None else _first_key(database, first, last + 1, since)
    end = high if until is None else _first_key(database, first, last + 1, until)
    return begin, end


def _first_key(database: sqlite3.Connection, low: int, high: int, moment: int) -> int:
    """Return a key in [low, high] that divides the entries before a time from the others."""
    while low < high:
        middle = (low + high) // 2
        found = database.execute(
            "SELECT key, time FROM log WHERE key >= ? AND key < ? ORDER BY key LIMIT 1", (middle, high)
        ).fetchone()
        if found is None or found[1] >= moment:
            high = middle
        else:
            low = found[0] + 1
    return low


def _whole_range(stream: int) -> tuple[int, int]:
    return stream << POSITION_BITS, (stream + 1) << POSITION_BITS


def _entry(row: tuple[Any, ...]) -> LogEntry:
    key, written, request, image_ref, code, name, p_unknown, score, reason, thumbnail = row
    outcome, known = OUTCOMES[code]
    return LogEntry(
        key & ((1 << POSITION_BITS) - 1),
        written,
        request.hex() if isinstance(request, bytes) else request,
        image_ref,
        outcome,
        known,
        name,
        p_unknown,
        score,
        None if reason is None else REASONS[reason],
        bool(thumbnail),
    )


def _packed_key(key: str) -> str | bytes:
    return bytes.fromhex(key) if _HEXADECIMAL.fullmatch(key) else key

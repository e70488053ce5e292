"""Streams in PostgreSQL, for any number of processes.

A transaction is sent as a pipeline: as long as a rule reads nothing, all of it is one round trip, the commit included.
Time is the clock of the server. This module must never read another one, except to give up a call that takes too long.
"""

import asyncio
import math
import os
import random
import socket
import struct
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from functools import cache
from typing import Any, Final, NamedTuple, Self, TypeVar

import psycopg
from psycopg.adapt import Dumper
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from psycopg.types.numeric import FloatBinaryDumper, Int8BinaryDumper
from psycopg.types.string import StrBinaryDumper

from ...errors import ConfigError, StoreError, without_passwords
from ..log.entries import LogEntry
from .base import Store
from .log_tables import LogTables
from .months import month_of, range_of
from .schema import (
    GAPS,
    LAYOUT,
    POSITION_BITS,
    POSTGRES,
    USAGE,
    for_postgres,
    other_layout,
    query_for_postgres,
)
from .transaction import Rows, Rule, StaleError, Transaction, add_to_usage, add_usage, to_text

T = TypeVar("T")
Connection = psycopg.AsyncConnection[Any]

# Usage of a tenant is counted in so many rows. Each connection uses one of them, so commits seldom wait for another.
_SHARDS: Final = 256
# What the lock is called that is held while tables are created.
_TABLES_LOCK: Final = 0x50726F746F444353
_OLDEST: Final = 150_000
# Tables that have one of their own for each month.
_MONTHLY: Final = ("log", "log_thumbnails")
# The tables of a month are created so many milliseconds before it begins.
_AHEAD: Final = 7 * 86_400_000
# Dropping the tables of a month needs a moment in which nobody uses the log. Observes wait for so many milliseconds at
# most. If that was not enough, for example because of a backup, it is tried again after so many seconds.
_LOCK_MILLISECONDS: Final = 50
_DROP_SECONDS: Final = 60.0
# Unless these are on, PostgreSQL can lose acknowledged writes.
_SAFE_SETTINGS: Final = ("fsync", "full_page_writes")

_WRONG_USAGE: Final = f"""
SELECT tenant FROM (
    SELECT tenant, streams, bytes, log_bytes FROM usage
    UNION ALL SELECT tenant, -streams, -bytes, -log_bytes
        FROM ({USAGE}) AS counted (tenant, shard, streams, bytes, log_bytes)
) AS both_ways GROUP BY tenant HAVING sum(streams) <> 0 OR sum(bytes) <> 0 OR sum(log_bytes) <> 0 LIMIT 10
"""


# A row is not as it was, the tables of a month were dropped, or others use a table that is to be dropped.
_STALE: Final = (psycopg.errors.DivisionByZero, psycopg.errors.CheckViolation, psycopg.errors.LockNotAvailable)


class _Transaction(Transaction):
    """A transaction of one connection.

    Changes of many rows wait until something is read, or until the end. If nothing was read by then, all of them are
    sent as one statement, which is a transaction of its own. Such changes never depend on each other.
    """

    def __init__(self, connection: Connection):
        super().__init__()
        self._connection = connection
        self._pipeline = AsyncExitStack()
        self._begun = False
        self._changes: list[_Change] = []

    async def _send(self, statement: str, values: Sequence[Any]) -> "psycopg.AsyncRawCursor[Any]":
        cursor = psycopg.AsyncRawCursor(self._connection)
        await cursor.execute(statement, values, prepare=True, binary=True)
        return cursor

    async def begin(self, mode: str = "") -> None:
        """Send what waits as a part of a transaction that goes on."""
        if not self._begun:
            self._begun = True
            await self._pipeline.enter_async_context(self._connection.pipeline())
            await self._send(f"BEGIN {mode}", ())
        changes, self._changes = self._changes, []
        for change in changes:
            await self._send(_combined((change.text,)), change.values)

    async def end(self) -> None:
        """Make the changes durable."""
        if self._begun:
            await self.begin()
            await self._send("COMMIT", ())
            await self._pipeline.aclose()
        elif self._changes:
            values = [value for change in self._changes for value in change.values]
            await self._send(_combined(tuple(change.text for change in self._changes)), values)

    async def abort(self) -> None:
        """Leave the pipeline after an error."""
        with suppress(psycopg.Error):
            await self._pipeline.aclose()

    async def rows_of_all(self, *statements: tuple[Any, ...]) -> list[Rows]:
        await self.begin()
        sent = [await self._send(query_for_postgres(statement), values) for statement, *values in statements]
        return [await cursor.fetchall() for cursor in sent]

    async def run(self, statement: str, *values: Any) -> None:
        await self.begin()
        await self._send(query_for_postgres(statement), values)

    async def run_many(self, statement: str, types: str, rows: Sequence[tuple[Any, ...]]) -> None:
        if rows:
            self._changes.append(_Change(_Text(statement, types), _arrays(types, rows)))

    async def change_all(self, statement: str, types: str, rows: Sequence[tuple[Any, ...]]) -> None:
        self._changes.append(_Change(_Text(statement, types, counts=True), [*_arrays(types, rows), len(rows)]))

    async def rows_of_many(self, statement: str, types: str, rows: Sequence[tuple[Any, ...]]) -> Rows:
        if not rows:
            return []
        await self.begin()
        return await (await self._send(_with_table(_Text(statement, types)), _arrays(types, rows))).fetchall()

    async def wait_turn(self, tenant: bytes) -> None:
        await self.run("SELECT pg_advisory_xact_lock(hashtextextended(encode(?, 'hex'), 0))", tenant)


class _Text(NamedTuple):
    """A statement for any number of rows of values.

    Attributes:
        statement: with `{rows}`.
        types: of the columns.
        counts: whether it must change one row for each row of values. Their number is then the last value.
    """

    statement: str
    types: str
    counts: bool = False


class _Change(NamedTuple):
    text: _Text
    values: list[Any]


@cache
def _with_table(text: _Text, first: int = 1) -> str:
    """Return a statement that gets an array of each column. The number of its first parameter is given."""
    names = text.types.split()
    arrays = ", ".join(f"${number}::{name}[]" for number, name in enumerate(names, first))
    columns = ", ".join(f"column{number}" for number in range(1, len(names) + 1))
    return query_for_postgres(text.statement.format(rows=f"unnest({arrays}) AS given ({columns})"))


@cache
def _combined(texts: tuple[_Text, ...]) -> str:
    """Return one statement that makes some changes. A wrong count is a division by zero, which undoes all of them."""
    changes, checks, first = [], ["1"], 1
    for number, text in enumerate(texts):
        changes.append(f"change{number} AS ({_with_table(text, first)} RETURNING 1)")
        first += len(text.types.split())
        if text.counts:
            checks.append(f"1 / CAST((SELECT count(*) FROM change{number}) = ${first} AS int)")
            first += 1
    return f"WITH {', '.join(changes)} SELECT {', '.join(checks)}"


class _Array(bytes):
    """An array in the binary format of PostgreSQL. psycopg would send text, and choose the type of integers itself."""


class _ArrayDumper(Dumper):
    format = psycopg.pq.Format.BINARY

    def dump(self, obj: bytes) -> bytes:
        return obj


_DUMPERS: Final[dict[type, type[Dumper]]] = {
    _Array: _ArrayDumper,
    int: Int8BinaryDumper,
    str: StrBinaryDumper,
    float: FloatBinaryDumper,
}
# For each type its number, and how an element is packed; empty for bytes behind their length.
_ELEMENTS: Final = {"bigint": (20, ">iq"), "float8": (701, ">id"), "bytea": (17, ""), "text": (25, "")}
_NULL: Final = struct.pack(">i", -1)


def _arrays(types: str, rows: Sequence[tuple[Any, ...]]) -> list[Any]:
    """Return an array of each column."""
    return [_array(name, column) for name, column in zip(types.split(), zip(*rows, strict=True), strict=True)]


def _array(name: str, values: tuple[Any, ...]) -> _Array:
    number, form = _ELEMENTS[name]
    if name == "text":
        values = tuple(None if value is None else value.encode() for value in values)
    parts = [struct.pack(">5i", 1, 1, number, len(values), 1)]
    for value in values:
        if value is None:
            parts.append(_NULL)
        elif form:
            parts.append(struct.pack(form, 8, value))
        else:
            parts += (struct.pack(">i", len(value)), value)
    return _Array(b"".join(parts))


class _MonthlyLog(LogTables):
    """A log with tables for each month, which are dropped as a whole."""

    _has_month_tables = True

    async def _oldest_month(self, tx: Transaction) -> int | None:
        month: int | None
        ((month,),) = await tx.rows(
            "SELECT CAST(min(substr(relname, 5)) AS bigint) FROM pg_inherits JOIN pg_class ON oid = inhrelid "
            "WHERE inhparent = CAST('log' AS regclass)"
        )
        return month

    async def delete_month(self, tx: Transaction, month: int) -> bool:
        await tx.run(f"SET LOCAL lock_timeout = {_LOCK_MILLISECONDS}")
        await tx.run(f"LOCK TABLE {', '.join(_MONTHLY)} IN ACCESS EXCLUSIVE MODE")
        # Nobody writes to the log now, so these are all.
        sizes = await tx.rows(
            "SELECT tenant, CAST(sum(bytes) AS bigint) FROM log_sizes JOIN streams ON number = stream "
            "WHERE month = ? GROUP BY tenant",
            month,
        )
        for tenant, size in sizes:
            add_usage(tx, tenant, log_size=-size)
        await tx.run("DELETE FROM log_sizes WHERE month = ?", month)
        await tx.run(f"DROP TABLE IF EXISTS {', '.join(_tables_of(month))}")
        return False


def _tables_of(month: int) -> list[str]:
    return [f"{table}_{month}" for table in _MONTHLY]


async def add_months(connection: Connection, months: set[int]) -> None:
    """Create the tables of months that have none. The connection must be in a transaction."""
    await connection.execute(f"SELECT pg_advisory_xact_lock({_TABLES_LOCK})")
    for month in sorted(months):
        begin, end = range_of(month)
        for table, new in zip(_MONTHLY, _tables_of(month), strict=True):
            if await (await connection.execute(f"SELECT 1 WHERE to_regclass('{new}') IS NULL")).fetchone():
                # Attaching a table blocks nobody. Creating it as a part of the other one would.
                await connection.execute(f"CREATE TABLE {new} (LIKE {table} INCLUDING STORAGE)")
                await connection.execute(
                    f"ALTER TABLE {table} ATTACH PARTITION {new} FOR VALUES FROM ({begin}) TO ({end})"
                )


class PostgresStore(Store):
    """A store in one database of PostgreSQL 15 or later.

    Args:
        url: `postgresql://USER:PASSWORD@HOST:PORT/DATABASE`, with parameters of libpq. Several hosts are fine.
        timeout: seconds that one call waits for its result, connecting included.
        connections: how many are open at most; calls beyond that wait for one.
        replicas: how many standbys must confirm a write; checked against the settings of the server.

    Raises:
        ConfigError: the address is invalid.
    """

    def __init__(self, url: str, *, timeout: float = 5.0, connections: int = 8, replicas: int = 0):
        super().__init__(_MonthlyLog())
        try:
            given = conninfo_to_dict(url)
        except psycopg.ProgrammingError:
            # The message may quote the password.
            given = {"host": "@"}
        # A password with @ or / that is not escaped ends up in these, and messages quote them.
        if "@" in f"{given.get('host', '')}{given.get('dbname', '')}":
            raise ConfigError(
                "the address of a PostgreSQL is postgresql://USER@HOST:PORT/DATABASE; "
                f"given: {without_passwords(url)!r}"
            )
        self._host = f"{given.get('host', 'localhost')}:{given.get('port', 5432)}/{given.get('dbname', '')}"
        milliseconds = max(1, int(1000 * timeout))
        # A process that hangs must not hold the lock of a row for longer than a call lasts.
        limits = {"statement_timeout": milliseconds, "idle_in_transaction_session_timeout": milliseconds, "jit": "off"}
        options = " ".join(f"-c {name}={value}" for name, value in limits.items())
        self._address = make_conninfo(
            url,
            **{
                "application_name": "protodcs",
                "target_session_attrs": "read-write",
                **given,
                "options": f"{options} {given.get('options', '')}",
            },
        )
        self._timeout, self._replicas = timeout, replicas
        self._room = asyncio.Semaphore(connections)
        self._idle: list[Connection] = []
        self._shards: dict[Connection, int] = {}
        self._closed = False
        # Months whose tables are there, unless somebody dropped them. When to drop one again, by the monotonic clock.
        self._months: set[int] = set()
        self._next_drop = -math.inf

    @property
    def _place(self) -> str:
        return f"PostgreSQL at {self._host}"

    async def prepare(self) -> Self:
        """Check the settings of the server, and create the tables if there are none. Return the store.

        Raises:
            StoreError: the server cannot be reached, could lose acknowledged writes, or has tables of another layout.
        """
        async with self._connected() as connection:
            problems = await self._unsafe_settings(connection)
            if problems:
                raise StoreError(f"{self._place} could lose acknowledged writes: {'; '.join(problems)}")
            await _create_tables(connection, self._place)
        return self

    async def _unsafe_settings(self, connection: Connection) -> list[str]:
        names = (*_SAFE_SETTINGS, "synchronous_commit", "synchronous_standby_names", "server_version_num")
        row = await (
            await connection.execute("SELECT " + ", ".join(f"current_setting('{name}')" for name in names))
        ).fetchone()
        found = dict(zip(names, row or (), strict=True))
        problems = [f"`{name}` is `{found[name]}` (set it to `on`)" for name in _SAFE_SETTINGS if found[name] != "on"]
        if found["synchronous_commit"] == "off" or (self._replicas and found["synchronous_commit"] == "local"):
            problems.append(f"`synchronous_commit` is `{found['synchronous_commit']}` (set it to `on`)")
        if self._replicas and not found["synchronous_standby_names"]:
            problems.append(f"`synchronous_standby_names` is empty (name {self._replicas} standbys)")
        if int(found["server_version_num"]) < _OLDEST:
            problems.append("it is older than PostgreSQL 15")
        return problems

    async def find_problems(self) -> list[str]:
        """Return what is wrong: settings that can lose writes, streams that lack something, and wrong counts.

        Nothing is changed, and a service may use the store meanwhile.
        """

        async def find(tx: Transaction) -> list[str]:
            gaps = await tx.rows(GAPS)
            problems = [f"{what} of the stream {to_text(stream)!r} are missing" for stream, what in gaps]
            wrong = await tx.rows(_WRONG_USAGE)
            return problems + [f"the usage of the tenant {to_text(tenant)!r} is counted wrongly" for (tenant,) in wrong]

        async with self._connected() as connection:
            unsafe = await self._unsafe_settings(connection)
        return unsafe + await self._read(find)

    async def close(self) -> None:
        """Close all connections."""
        self._closed = True
        while self._idle:
            await self._idle.pop().close()

    # The decision log.

    async def _add_months(self, entries: Sequence[LogEntry], again: bool = False) -> None:
        if again:
            self._months.clear()
        months = {month_of(moment) for entry in entries for moment in (entry.time, entry.time + _AHEAD)} - self._months
        if months:
            async with self._connected() as connection, connection.transaction():
                await add_months(connection, months)
            self._months |= months

    async def _delete_month(self, month: int) -> bool:
        if time.monotonic() < self._next_drop:
            return False
        try:
            await super()._delete_month(month)
        except StaleError:
            self._next_drop = time.monotonic() + _DROP_SECONDS * (1 + random.random())
            return False
        self._months.discard(month)
        await self._ask(
            f"DELETE FROM log_roll_backs WHERE NOT EXISTS (SELECT 1 FROM log WHERE key >= (stream << {POSITION_BITS}) "
            f"AND key < (stream << {POSITION_BITS}) + last) RETURNING 1"
        )
        return True

    # Transactions.

    async def _write(self, work: Rule[T], *, may_use_reserve: bool = False, counts: bool = True) -> T:
        async with self._transaction() as (tx, connection):
            result = await work(tx)
            await add_to_usage(tx, self._shards[connection])
            return result

    async def _read(self, work: Rule[T]) -> T:
        async with self._transaction() as (tx, _):
            await tx.begin("ISOLATION LEVEL REPEATABLE READ READ ONLY")
            return await work(tx)

    @asynccontextmanager
    async def _transaction(self) -> AsyncIterator[tuple[_Transaction, Connection]]:
        async with self._connected() as connection:
            tx = _Transaction(connection)
            try:
                yield tx, connection
                await tx.end()
            except _STALE as problem:
                raise StaleError from problem
            finally:
                await tx.abort()

    async def _ask(self, statement: str, *values: Any) -> Rows:
        async with self._connected() as connection:
            cursor = psycopg.AsyncRawCursor(connection)
            await cursor.execute(query_for_postgres(statement), values, prepare=True, binary=True)
            return await cursor.fetchall()

    # Connections.

    @asynccontextmanager
    async def _connected(self) -> AsyncIterator[Connection]:
        """Yield a connection that nobody else uses. It is used again unless it broke."""
        if self._closed:
            raise StoreError(f"{self._place} is closed: open it again")
        connection: Connection | None = None
        timer = None
        async with self._room:
            try:
                connection = self._idle.pop() if self._idle else await self._connect()
                timer = asyncio.get_running_loop().call_later(self._timeout, cut, connection)
                yield connection
            except psycopg.Error as problem:
                # The others may have lost the same server.
                while self._idle and isinstance(problem, psycopg.OperationalError):
                    await self._discard(self._idle.pop())
                raise StoreError(f"{self._place} cannot be read or written: {_words(problem)}") from problem
            finally:
                if connection is not None:
                    await self._put_back(connection)
                if timer is not None:
                    timer.cancel()

    async def _put_back(self, connection: Connection) -> None:
        """Keep a connection for the next call, if it works and holds nothing."""
        status = connection.info.transaction_status
        if status in (psycopg.pq.TransactionStatus.INTRANS, psycopg.pq.TransactionStatus.INERROR):
            with suppress(psycopg.Error):
                await connection.execute("ROLLBACK")
            status = connection.info.transaction_status
        if status == psycopg.pq.TransactionStatus.IDLE and not (connection.closed or self._closed):
            self._idle.append(connection)
        else:
            await self._discard(connection)

    async def _discard(self, connection: Connection) -> None:
        self._shards.pop(connection, None)
        cut(connection)
        await connection.close()

    async def _connect(self) -> Connection:
        connecting = psycopg.AsyncConnection.connect(self._address, autocommit=True, connect_timeout=2)
        try:
            connection = await asyncio.wait_for(connecting, self._timeout)
        except TimeoutError:
            raise psycopg.OperationalError(f"no connection within {self._timeout:g} seconds") from None
        for kind, dumper in _DUMPERS.items():
            connection.adapters.register_dumper(kind, dumper)
        connection.prepared_max = 500
        self._shards[connection] = random.randrange(_SHARDS)
        try:
            # After a fail-over or a restored backup, another timeline answers.
            cursor = await connection.execute("SELECT substr(pg_walfile_name(pg_current_wal_lsn()), 1, 8)")
            self.generation = (await cursor.fetchone() or ("",))[0]
        except BaseException:
            await self._discard(connection)
            raise
        return connection


def cut(connection: Connection) -> None:
    """End a connection whose server may not respond, so that whoever waits for it gets an error."""
    with suppress(OSError, psycopg.Error), socket.socket(fileno=os.dup(connection.fileno())) as copy:
        copy.shutdown(socket.SHUT_RDWR)


def _words(problem: psycopg.Error) -> str:
    return " ".join(str(problem).split()) or type(problem).__name__


async def _create_tables(connection: Connection, place: str) -> None:
    """Create the tables, unless they are there. Another process that does the same waits for the lock."""
    async with connection.transaction():
        # Without a timeout: the lock may be held for long.
        await connection.execute("SET LOCAL statement_timeout = 0")
        await connection.execute(f"SELECT pg_advisory_xact_lock({_TABLES_LOCK})")
        await connection.execute("CREATE TABLE IF NOT EXISTS layout (number int NOT NULL)")
        found = await (await connection.execute("SELECT number FROM layout")).fetchone()
        if found is None:
            await connection.execute(for_postgres(POSTGRES))
            await connection.execute(f"INSERT INTO layout VALUES ({LAYOUT})")
        elif found[0] != LAYOUT:
            raise other_layout(place, found[0])

"""Copy everything of a SQL store to a new one: streams, logs, thumbnails, notices, documents.

The copy appears as a whole or not at all: PostgreSQL gets one transaction, SQLite a folder that is renamed at the end.
Streams keep their fences, and requests can be repeated with their idempotency keys.
"""

import sqlite3
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from ...errors import InputError, StoreError, without_passwords
from .base import Store
from .commit_marks import CommitMarks
from .inspection import DATABASE
from .months import month_of
from .schema import LAYOUT, SQLITE, USAGE
from .sqlite import SqliteStore, new_folder, prepare_new
from .transaction import Rows, to_bytes

if TYPE_CHECKING:
    from .postgres import PostgresStore

# The tables, and the first columns of each, which name a row. The usage is counted again.
_TABLES: Final = {
    "streams": "number", "specs": "stream", "records": "key", "snapshots": "stream",
    "request_keys": "stream, position", "saved": "stream, name",
    "blobs": "name", "uses": "blob, tenant, stream", "documents": "kind, name", "notices": "id",
    "log_classes": "number", "log": "key", "log_thumbnails": "key", "log_roll_backs": "stream, first, last",
    "log_sizes": "stream, month", "log_deleted": "stream", "unused": "name",
}  # fmt: skip
# Where rows have the time that says in which table of PostgreSQL they are.
_TIMES: Final = {"log": 1, "log_thumbnails": 2}
# Rows that are in memory at once; snapshots have megabytes.
_FEW_ROWS: Final = {"snapshots": 16, "request_keys": 64, "saved": 16, "blobs": 4}
_ROWS: Final = 2000
# A copy to PostgreSQL is one transaction. Seconds.
_LONGEST: Final = 7 * 86_400.0
_IS_HELD: Final = "SELECT 1 FROM leases WHERE until > lease_clock() LIMIT 1"

Write = Callable[[str, Rows], Awaitable[None]]


async def copy_store(source: str, target: str, tenant: str = "") -> int:
    """Copy a store that no service uses. Return how many streams it has.

    Args:
        source: its address.
        target: a new folder, or a database of PostgreSQL without streams.
        tenant: the new tenant of streams that have none; empty to leave them without.

    Raises:
        InputError: `target` is not empty, an address is of another kind, or two streams would have the same id.
        StoreError: a service uses a store, or it failed. Nothing was copied.
    """
    store = await _opened(source)
    try:
        if await store._ask(_IS_HELD):
            raise StoreError(f"{store!r} is in use: stop its service, and wait until its leases end")
        (epoch,) = await store._ask("SELECT epoch FROM deleted")
        numbers = [(await _newest_number(store, table))[0] for table in ("streams", "notices")]
        writing = _to_sqlite if target.startswith("sqlite:") else _to_postgres
        async with writing(target, (*epoch, *numbers)) as write:
            for table in _TABLES:
                async for rows in _pages(store, table):
                    await write(table, [_changed(table, row, tenant) for row in rows])
        return (await store.totals()).streams
    finally:
        await store.close()


async def _opened(address: str) -> Store:
    if not address.startswith("sqlite:"):
        return await _postgres(address).prepare()
    folder = Path(address.removeprefix("sqlite:"))
    if not (folder / DATABASE).exists():
        raise InputError(f"There is no store in {str(folder)!r}. Name the folder of a service.")
    return SqliteStore(folder)


def _postgres(address: str) -> "PostgresStore":
    if not address.startswith(("postgresql:", "postgres:")):
        raise InputError(
            f"A store that can be copied is sqlite:FOLDER or postgresql://HOST/DATABASE. "
            f"Given: {without_passwords(address)!r}."
        )
    from .postgres import PostgresStore

    return PostgresStore(address, timeout=_LONGEST)


async def _newest_number(store: Store, table: str) -> tuple[int]:
    """Return the newest number that a table gave out, also if its row is gone."""
    if isinstance(store, SqliteStore):
        found = await store._ask("SELECT seq FROM sqlite_sequence WHERE name = ?", table)
    else:
        sequence = f"{table}_{_TABLES[table]}_seq"
        found = await store._ask(f"SELECT last_value - CAST(NOT is_called AS int) FROM {sequence}")
    return found[0] if found else (0,)


async def _pages(store: Store, table: str) -> AsyncIterator[Rows]:
    """Yield the rows of a table in the order of their names."""
    key, limit = _TABLES[table], _FEW_ROWS.get(table, _ROWS)
    count = key.count(",") + 1
    where: str = ""
    last: tuple[Any, ...] = ()
    while rows := await store._ask(f"SELECT * FROM {table} {where} ORDER BY {key} LIMIT ?", *last, limit):
        yield rows
        where, last = f"WHERE ({key}) > ({', '.join('?' * count)})", rows[-1][:count]


def _changed(table: str, row: tuple[Any, ...], tenant: str) -> tuple[Any, ...]:
    """Return a row with the new tenant, if it has none."""
    if tenant and table == "streams" and not row[2]:
        return (row[0], to_bytes(f"{tenant}/") + row[1], to_bytes(tenant), *row[3:])
    if tenant and table in ("uses", "notices") and not row[1]:
        return (row[0], to_bytes(tenant), *row[2:])
    return row


def _same_id(problem: Exception) -> InputError:
    return InputError(f"Two streams would have the same id: {problem}. Choose another tenant.")


@asynccontextmanager
async def _to_sqlite(address: str, numbers: tuple[int, ...]) -> AsyncIterator[Write]:
    """Yield what writes rows of tables to a new folder."""
    with new_folder(Path(address.removeprefix("sqlite:"))) as draft:
        with closing(sqlite3.connect(draft / DATABASE, isolation_level=None)) as database:
            prepare_new(database)
            database.executescript(f"BEGIN; {SQLITE}")

            async def write(table: str, rows: Rows) -> None:
                values = ", ".join("?" * len(rows[0]))
                database.executemany(f"INSERT INTO {table} VALUES ({values})", rows)

            try:
                yield write
            except sqlite3.IntegrityError as problem:
                raise _same_id(problem) from problem
            epoch, *newest = numbers
            database.execute("UPDATE deleted SET epoch = ?", (epoch,))
            for table, number in zip(("streams", "notices"), newest, strict=True):
                database.execute("DELETE FROM sqlite_sequence WHERE name = ?", (table,))
                database.execute("INSERT INTO sqlite_sequence VALUES (?, ?)", (table, number))
            database.execute(f"INSERT INTO usage {USAGE}")
            database.execute(f"PRAGMA user_version = {LAYOUT}")
            database.execute("COMMIT")
        CommitMarks.create(draft, 0).close()


@asynccontextmanager
async def _to_postgres(address: str, numbers: tuple[int, ...]) -> AsyncIterator[Write]:
    """Yield what writes rows of tables to a database that has no streams."""
    from psycopg.errors import UniqueViolation

    from .postgres import add_months

    store = await _postgres(address).prepare()
    try:
        async with store._connected() as connection, connection.transaction():
            # Nobody starts to use it meanwhile.
            await connection.execute("LOCK TABLE streams, leases")
            for what, query in (("has streams", "SELECT 1 FROM streams LIMIT 1"), ("is in use", _IS_HELD)):
                if await (await connection.execute(query)).fetchone():
                    raise InputError(f"{store!r} {what}. Name another database.")
            await connection.execute(f"TRUNCATE {', '.join(_TABLES)}, usage")

            async def write(table: str, rows: Rows) -> None:
                if table in _TIMES:
                    await add_months(connection, {month_of(row[_TIMES[table]]) for row in rows})
                async with connection.cursor() as cursor, cursor.copy(f"COPY {table} FROM STDIN") as copy:
                    for row in rows:
                        await copy.write_row(row)

            try:
                yield write
            except UniqueViolation as problem:
                raise _same_id(problem) from problem
            epoch, *newest = numbers
            await connection.execute(f"UPDATE deleted SET epoch = {epoch}")
            for table, number in zip(("streams", "notices", "log_classes"), (*newest, 0), strict=True):
                column = _TABLES[table]
                newest_row = f"(SELECT coalesce(max({column}), 0) FROM {table})"
                await connection.execute(
                    f"SELECT setval('{table}_{column}_seq', 1 + greatest({number}, {newest_row}), false)"
                )
            await connection.execute(f"INSERT INTO usage {USAGE}")
    finally:
        await store.close()

"""Streams in one SQLite database, for a service that is one process.

One thread does all the work. Calls that wait together share one transaction, and so one wait for the disk: group
commit. Nobody gets a reply before the transaction is durable (WAL, `synchronous=FULL`). Leases are in memory, because
they end with the process: it holds a lock on the folder for as long as the store is open.
"""

import asyncio
import os
import secrets
import shutil
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeVar

from ...atomic_io import lock_folder, sync_folder
from ...errors import FencedError, HeldError, InputError, StoreError, UnknownStreamError
from ..log.entries import LogLimits
from .base import Store
from .commit_marks import CommitMarks, Mark, read_marks
from .inspection import DATABASE, WAL, connect_read_only, count_commits, refuse_fewer, refuse_loss
from .reserve import RESERVE, Reserve
from .schema import LAYOUT, LEASES, SQLITE
from .transaction import Rows, Rule, Transaction, add_to_usage
from .values import AcquiredStream, Fence, Totals

T = TypeVar("T")

# Prepared statements in memory. Those with many rows of values differ by the number of rows.
_STATEMENTS: Final = 512
# Rows that one statement gets.
_ROWS_AT_ONCE: Final = 64
# Half of SQLite's default. A record of 512 numbers would fill a page of 4 kB by more than half. Then each page has one
# row, and its deletion writes the pages beside it again: three times as much as with this size.
_PAGE_BYTES: Final = 2048
# Records that a snapshot covers are deleted in portions, because observes wait meanwhile: at least so many in each
# transaction, and as many as rows were changed.
_RECORDS_AT_ONCE: Final = 64
# Unused pages go back to the disk if there are so many, and such a share of the database. So many go at once, because
# observes wait meanwhile.
_MIN_UNUSED: Final = 512
_MIN_UNUSED_SHARE: Final = 0.25
_PAGES_AT_ONCE: Final = 1000
# Journals and logs use pages again. So only pages go back that were unused at so many trims in a row.
_MIN_UNUSED_TRIMS: Final = 120
# The write-ahead log is copied to the database after so many changed rows: those of some 150 observes, which are 2 MB.
# With more, commits wait longer for it. If it reaches so many pages before that, because rows are large, SQLite copies
# it as part of a commit.
_COPIED_CHANGES: Final = 600
_MAX_WAL_PAGES: Final = 8192
# How often that is done in a row to get the reserve back.
_VACUUMS_AT_ONCE: Final = 10
# Free bytes with which writes should work again.
_ROOM: Final = 1 << 20


class _Transaction(Transaction):
    """A transaction of a connection that one thread uses. Nothing here ever waits for another coroutine."""

    def __init__(self, database: sqlite3.Connection):
        super().__init__()
        self._database = database
        # Ranges of keys of records to delete when it is durable, and those that it leaves of earlier transactions.
        self.new_ranges: list[tuple[int, int]] = []
        self.left_ranges: list[tuple[int, int]] | None = None

    async def rows_of_all(self, *statements: tuple[Any, ...]) -> list[Rows]:
        return [self._database.execute(statement, values).fetchall() for statement, *values in statements]

    async def run(self, statement: str, *values: Any) -> None:
        self._database.execute(statement, values)

    async def run_many(self, statement: str, types: str, rows: Sequence[tuple[Any, ...]]) -> None:
        await self.rows_of_many(statement, types, rows)

    async def rows_of_many(self, statement: str, types: str, rows: Sequence[tuple[Any, ...]]) -> Rows:
        # Python's sqlite3 module releases the interpreter lock during a statement. With one statement per row, the
        # threads of the service would pass the lock to each other for every row.
        found: Rows = []
        for first in range(0, len(rows), _ROWS_AT_ONCE):
            chunk = rows[first : first + _ROWS_AT_ONCE]
            row = f"({', '.join('?' * len(chunk[0]))})"
            values = [value for one in chunk for value in one]
            table = f"(VALUES {', '.join([row] * len(chunk))})"
            found += self._database.execute(statement.format(rows=table), values).fetchall()
        return found

    # Nobody else writes, so rows in memory are as they are in the database, and ids grow with each commit.
    change_all = run_many

    async def wait_turn(self, tenant: bytes) -> None:
        pass


def _result(rule: Rule[T], tx: Transaction) -> T:
    """Return the result of a rule that never waits."""
    try:
        rule(tx).__await__().send(None)
    except StopIteration as end:
        result: T = end.value
        return result
    raise RuntimeError("a rule of the store waits for something else than SQLite")


class _Job(NamedTuple):
    """A call that waits for its turn. Those that free space may use the reserve if the disk is full."""

    work: Rule[Any]
    result: "Future[Any]"
    may_use_reserve: bool
    counts: bool


class SqliteStore(Store):
    """A store in a folder that one process uses.

    Args:
        folder: created if it does not exist.
        reserve_bytes: disk space that is kept for deletions.

    Attributes:
        failure: gets an error when the disk failed. From then on the store does nothing any more.

    Raises:
        StoreError: another process uses the folder, or it cannot be read or written.
    """

    def __init__(self, folder: str | os.PathLike[str], reserve_bytes: int = 0):
        super().__init__()
        self.folder = Path(folder)
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
            self._commits = count_commits(self._database, self.folder) or 0
            self._marks = _open_marks(self.folder, self._commits)
            self._reserve.restore()
        except (sqlite3.Error, OSError) as problem:
            os.close(self._lock)
            raise self._as_error(problem) from problem
        except BaseException:
            os.close(self._lock)
            raise
        self._wal_has_deleted = False
        # Ranges of keys of records that snapshots cover.
        self._ranges_to_delete: list[tuple[int, int]] = []
        # Rows that were changed since the write-ahead log was copied.
        self._uncopied = 0
        # Whether streams or logs were deleted since unused pages went back to the disk, and how many were unused since.
        self._has_deleted = False
        self._unused: list[int] = []
        # Pages of the log are read beside the writes, in a thread and with a connection of their own.
        self._readers = ThreadPoolExecutor(1, thread_name_prefix="log reader")
        self._reader: sqlite3.Connection | None = None
        self._thread = threading.Thread(target=self._run, name="store", daemon=True)
        self._thread.start()

    async def totals(self) -> Totals:
        """Return how many streams there are and how many bytes they, their logs and the files use."""
        found = await super().totals()
        files = sum(file.stat().st_size for file in self.folder.iterdir() if file.name != RESERVE)
        disk = shutil.disk_usage(self.folder)
        return found._replace(file_bytes=files, free_bytes=disk.free, disk_bytes=disk.total)

    async def delete(self, stream: str, fence: Fence) -> None:
        """Forget a stream, as every store does. Its space goes back to the disk when logs are trimmed."""
        await super().delete(stream, fence)
        self._has_deleted = True

    # The decision log.

    async def _delete_for_good(self, delete: Rule[int]) -> int:
        """Delete rows, and overwrite them on the disk."""

        async def delete_and_overwrite(tx: Transaction) -> int:
            await tx.run("PRAGMA secure_delete = ON")
            try:
                return await delete(tx)
            finally:
                await tx.run("PRAGMA secure_delete = OFF")

        deleted = await super()._delete_for_good(delete_and_overwrite)
        if deleted:
            self._has_deleted = True
            await self._clear_wal()
        return deleted

    async def _clear_wal(self) -> None:
        """Have the write-ahead log, which still holds what was deleted, copied to the database and emptied."""
        self._wal_has_deleted = True
        # The thread does that before it begins with this call.
        await self._in_thread(lambda: None)

    async def trim_log(self, limits: LogLimits, now: float | None) -> None:
        """Delete entries of the decision log beyond the limits.

        Space that is not used any more goes back to the disk, also that of deleted streams.
        """
        await super().trim_log(limits, now)
        await self._delete_records_now()
        spare = await self._in_thread(self._spare_pages)
        if spare:
            while spare > 0 and await self._in_thread(self._vacuum):
                spare -= _PAGES_AT_ONCE
            await self._clear_wal()
        await self._in_thread(self._note_space)

    async def _in_thread(self, call: Callable[[], T]) -> T:
        """Return the result of a call in the thread of the database. It may use the reserve."""

        async def work(_: Transaction) -> T:
            return call()

        return await self._write(work, may_use_reserve=True)

    async def _read(self, work: Rule[T]) -> T:
        """Read in a thread and with a connection of its own."""
        if self._closed:
            raise StoreError(f"{self._place} is closed: open it again")
        return await asyncio.get_running_loop().run_in_executor(self._readers, self._read_in_thread, work)

    def _read_in_thread(self, work: Rule[T]) -> T:
        try:
            if self._reader is None:
                self._reader = _open_reader(self.folder)
            # One transaction, so that all queries see the same moment.
            self._reader.execute("BEGIN")
            try:
                return _result(work, _Transaction(self._reader))
            finally:
                self._reader.execute("COMMIT")
        except sqlite3.Error as problem:
            raise self._as_error(problem) from problem

    # The thread.

    async def close(self) -> None:
        """Close the database, and let other processes use the folder."""
        # If this fails, the next acquisitions of the streams do it.
        with suppress(StoreError):
            await self._delete_records_now()
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

    async def _write(self, work: Rule[T], *, may_use_reserve: bool = False, counts: bool = True) -> T:
        """Return the result of a rule, when the transaction that it was part of is durable."""
        result: Future[T] = Future()
        with self._condition:
            if self._closed:
                raise StoreError(f"{self._place} is closed: open it again")
            self._jobs.append(_Job(work, result, may_use_reserve, counts))
            self._condition.notify()
        return await asyncio.wrap_future(result)

    def _run(self) -> None:
        while jobs := self._waiting():
            if self._wal_has_deleted:
                self._wal_has_deleted = False
                if self._is_full:
                    # The database may have to grow for what is copied to it.
                    self._reserve.release()
                self._empty_wal()
                self._note_space()
            self._work([job for job in jobs if job.result.set_running_or_notify_cancel()])
            self._copy_wal()
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
                    with _transaction(self._database):
                        if not self._vacuum():
                            break
                    self._empty_wal()
            self._empty_wal()
            self._note_space()

    def _note_space(self) -> None:
        """Take the reserve again, and note whether writes should work, if there is space for that."""
        self._reserve.restore()
        if self._is_full:
            with suppress(sqlite3.Error):
                unused, _ = self._pages()
                self._is_full = unused * _PAGE_BYTES + self._free_bytes() < _ROOM

    def _empty_wal(self) -> None:
        """Copy the write-ahead log to the database and empty it, unless somebody reads from it."""
        with suppress(sqlite3.Error):
            self._database.execute("PRAGMA wal_checkpoint(TRUNCATE)")

    def _copy_wal(self) -> None:
        """Copy the write-ahead log to the database, if it is time.

        Nobody waits for a reply meanwhile, as they would if SQLite did it at the end of a commit. A second connection
        could do it beside the writes, but SQLite before 3.51.3 may then lose commits.
        """
        if self._uncopied >= _COPIED_CHANGES:
            self._uncopied = 0
            # A disk that is full or fails is noticed by the next commit. Until then the log has everything.
            with suppress(sqlite3.Error):
                self._database.execute("PRAGMA wal_checkpoint(PASSIVE)")

    def _pages(self) -> tuple[int, int]:
        """Return how many pages of the database are unused, and how many there are."""
        unused, pages = (
            self._database.execute(f"PRAGMA {name}").fetchone()[0] for name in ("freelist_count", "page_count")
        )
        return unused, pages

    def _spare_pages(self) -> int:
        """Return how many unused pages nobody needs: those of deleted streams and logs, or those unused for long."""
        unused, _ = self._pages()
        self._unused.append(unused)
        if not self._has_deleted and len(self._unused) < _MIN_UNUSED_TRIMS:
            return 0
        spare = unused if self._has_deleted else min(self._unused)
        self._has_deleted = False
        self._unused.clear()
        return spare

    def _vacuum(self) -> bool:
        """Give some unused pages back to the disk, if there are many. Return whether it did."""
        unused, pages = self._pages()
        if unused < _MIN_UNUSED or unused < _MIN_UNUSED_SHARE * pages:
            return False
        # Each call gives one page back, whatever number it names: Python takes one step of a statement without columns.
        for _ in range(min(_PAGES_AT_ONCE, unused)):
            self._database.execute("PRAGMA incremental_vacuum(1)")
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
        tx = _Transaction(self._database)
        number, changes = self._commits, 0
        self._database.execute("BEGIN")
        try:
            for job in jobs:
                before = self._database.total_changes
                try:
                    outcomes.append(_result(job.work, tx))
                except (FencedError, HeldError, StoreError, UnknownStreamError) as problem:
                    outcomes.append(problem)
                if job.counts:
                    changes += self._database.total_changes - before
            if changes:
                number += 1
                _result(lambda tx: add_to_usage(tx, 0), tx)
                self._delete_portion(tx, changes)
                self._database.execute("UPDATE commits SET number = ?", (number,))
            self._database.execute("COMMIT")
            if number != self._commits:
                if not all(job.may_use_reserve for job in jobs):
                    self._is_full = False
                self._commits = number
                self._uncopied += changes
                self._marks.write(Mark(number, tx.ends))
            if tx.left_ranges is not None:
                self._ranges_to_delete = tx.left_ranges
            self._ranges_to_delete += tx.new_ranges
        except BaseException as problem:
            with suppress(sqlite3.Error):
                self._database.execute("ROLLBACK")
            self._rows.clear()
            if _is_io_error(problem):
                # After a failed sync nobody knows what is on the disk. Opening the database again finds it out.
                self.failure.set_result(self._as_error(problem))
            raise
        return outcomes

    async def _acquire(self, tx: Transaction, stream: str, *more: Any) -> AcquiredStream:
        held = await super()._acquire(tx, stream, *more)
        # A killed process may have left some behind.
        await self._delete_records(tx, self._rows[stream].key(0), self._rows[stream].key(held.start))
        return held

    async def _delete_records(self, tx: Transaction, first: int, end: int) -> None:
        assert isinstance(tx, _Transaction)
        tx.new_ranges.append((first, end))

    def _delete_portion(self, tx: _Transaction, count: int) -> None:
        """Delete some of the records that snapshots of earlier transactions cover, about as many as `count`."""
        left = max(count, _RECORDS_AT_ONCE)
        ranges = self._ranges_to_delete if tx.left_ranges is None else tx.left_ranges
        chosen = "FROM records WHERE key >= ? AND key < ?"
        for at, (first, end) in enumerate(ranges):
            if left <= 0:
                tx.left_ranges = ranges[at:]
                return
            behind = f"SELECT key {chosen} ORDER BY key LIMIT 1 OFFSET ?"
            next_key = self._database.execute(behind, (first, end, left)).fetchone()
            if next_key is not None:
                self._database.execute(f"DELETE {chosen}", (first, next_key[0]))
                tx.left_ranges = [(next_key[0], end), *ranges[at + 1 :]]
                return
            left -= self._database.execute(f"DELETE {chosen}", (first, end)).rowcount
        tx.left_ranges = []

    async def _delete_records_now(self) -> None:
        """Delete all records that snapshots cover."""

        async def delete(tx: Transaction) -> None:
            assert isinstance(tx, _Transaction)
            self._delete_portion(tx, 10 * _RECORDS_AT_ONCE)

        while self._ranges_to_delete:
            await self._write(delete, may_use_reserve=True)

    @property
    def _place(self) -> str:
        return f"the store in {str(self.folder)!r}"

    def _as_error(self, problem: BaseException) -> BaseException:
        if _is_io_error(problem):
            return StoreError(f"{self._place} failed: {problem}; check the disk, and start again")
        if not isinstance(problem, sqlite3.Error):
            return problem
        return StoreError(f"{self._place} cannot be read or written: {problem}; nothing has changed")


def back_up(folder: str | os.PathLike[str], target: str | os.PathLike[str]) -> None:
    """Copy a store to a new folder, also while a service uses it. The copy holds all that was durable at one moment.

    Raises:
        InputError: there is no store in `folder`, or `target` exists.
        StoreError: the store cannot be read, or the copy cannot be written.
    """
    source = Path(folder)
    if not (source / DATABASE).exists():
        raise InputError(f"There is no store in {str(folder)!r}. Name the folder of a service.")
    with new_folder(Path(target)) as draft:
        # Before the copy, which then holds all of the marked commits.
        marks = read_marks(source)
        with closing(connect_read_only(source)) as original, closing(sqlite3.connect(draft / DATABASE)) as written:
            original.backup(written)
            commits = count_commits(written, source) or 0
        refuse_fewer(source, commits, marks)
        CommitMarks.create(draft, commits).close()


@contextmanager
def new_folder(target: Path) -> Iterator[Path]:
    """Yield a folder for a store. It becomes `target` at the end, and is deleted after an error.

    Raises:
        InputError: `target` exists.
        StoreError: the store cannot be written.
    """
    if target.exists():
        raise InputError(f"{str(target)!r} exists already. Name a new folder.")
    draft = target.with_name(f".{target.name}.{secrets.token_hex(8)}.tmp")
    draft.mkdir(mode=0o700, parents=True)
    try:
        yield draft
        sync_folder(draft)
        draft.rename(target)
        sync_folder(target.parent)
    except StoreError:
        raise
    except (sqlite3.Error, OSError) as problem:
        raise StoreError(f"The store in {str(target)!r} cannot be written: {problem}.") from problem
    finally:
        shutil.rmtree(draft, ignore_errors=True)


@contextmanager
def _transaction(database: sqlite3.Connection) -> Iterator[None]:
    """Commit what is done inside as one thing."""
    database.execute("BEGIN")
    try:
        yield
    except BaseException:
        with suppress(sqlite3.Error):
            database.execute("ROLLBACK")
        raise
    database.execute("COMMIT")


def _connect(folder: Path) -> sqlite3.Connection:
    return sqlite3.connect(
        folder / DATABASE, isolation_level=None, check_same_thread=False, cached_statements=_STATEMENTS
    )


def _open(folder: Path) -> sqlite3.Connection:
    database = _connect(folder)
    try:
        prepare_new(database)
        database.execute("PRAGMA journal_mode = WAL")
        database.execute("PRAGMA synchronous = FULL")
        database.execute(f"PRAGMA wal_autocheckpoint = {_MAX_WAL_PAGES}")
        if count_commits(database, folder) is None:
            # Before the tables: a database that has tables and no marks has lost them.
            CommitMarks.create(folder).close()
            database.executescript(f"BEGIN; {SQLITE} PRAGMA user_version = {LAYOUT}; COMMIT;")
            # SQLite does not sync the folder when it creates the database.
            sync_folder(folder)
            sync_folder(folder.parent)
        _add_functions(database)
        database.executescript(f"PRAGMA temp_store = MEMORY; {LEASES.replace('CREATE', 'CREATE TEMP')}")
        # Nobody waits to use them: a creation that failed left them behind.
        database.execute("DELETE FROM blobs WHERE name NOT IN (SELECT blob FROM uses)")
        database.execute("DELETE FROM unused")
    except BaseException:
        database.close()
        raise
    return database


def prepare_new(database: sqlite3.Connection) -> None:
    """Set how a database stores its pages. This has an effect on a new one only."""
    database.execute(f"PRAGMA page_size = {_PAGE_BYTES}")
    database.execute("PRAGMA auto_vacuum = INCREMENTAL")


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


def _add_functions(database: sqlite3.Connection) -> None:
    """Add the functions that the rules use. Leases end by a clock that nobody sets."""
    database.create_function("store_clock", 0, lambda: time.time())
    database.create_function("lease_clock", 0, lambda: time.monotonic())
    # SQLite has it since 3.43.
    database.create_function(
        "octet_length", 1, lambda text: None if text is None else len(text.encode()), deterministic=True
    )


def _open_reader(folder: Path) -> sqlite3.Connection:
    database = _connect(folder)
    database.execute("PRAGMA query_only = ON")
    return database


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

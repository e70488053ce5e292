"""Whether a SQLite store holds all that was acknowledged, and how to go on if it does not.

Nothing here changes a store, except `repair_store`. SQLite deletes a damaged write-ahead log when a connection that may
write closes. So the check uses a connection that cannot.
"""

import os
import shutil
import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from ...atomic_io import lock_folder
from ...errors import InputError, StoreError
from .commit_marks import MARKS, CommitMarks, Mark, read_marks
from .schema import GAPS, LAYOUT, other_layout
from .transaction import to_text

DATABASE: Final = "streams.db"
WAL: Final = f"{DATABASE}-wal"
# Problems of the database that a report names, at most.
_MAX_PROBLEMS: Final = 10


@dataclass(frozen=True)
class StoreReport:
    """What a check of a store found.

    Attributes:
        streams: how many there are.
        commits: how many commits the database holds.
        lost_commits: acknowledged commits that it does not hold any more.
        lost: the first and the last lost position of each stream.
        all_named: whether `lost` names every stream that lost records.
        has_marks: whether there are marks. Without them, nobody knows what is lost.
        problems: damage of the database that no repair can mend.
    """

    streams: int = 0
    commits: int = 0
    lost_commits: int = 0
    lost: dict[str, tuple[int, int]] = field(default_factory=dict)
    all_named: bool = True
    has_marks: bool = True
    problems: tuple[str, ...] = ()

    @property
    def is_good(self) -> bool:
        """Whether the store can be opened."""
        return not (self.lost_commits or self.problems) and self.has_marks


def refuse_loss(folder: Path) -> None:
    """Raise StoreError if a store lacks commits that were acknowledged, or its marks. It must not be in use.

    A store that does not exist, or whose creation was interrupted, is fine.
    """
    marks = read_marks(folder)
    with _read_only(folder) as database:
        commits = 0 if database is None else count_commits(database, folder)
    exists = database is not None and commits is not None
    refuse_fewer(folder, commits or 0, marks, exists)


def refuse_fewer(folder: Path, commits: int, marks: list[Mark], exists: bool = True) -> None:
    """Raise StoreError if there are fewer commits than marked ones, or no marks for a store that exists."""
    where, advice = f"the store in {str(folder)!r}", f"run `protodcs store check {folder}`"
    if exists and not marks:
        raise StoreError(
            f"{where} may have lost acknowledged commits: {MARKS} is missing or unreadable. Restore it from the same "
            f"backup as {DATABASE}, or {advice}"
        )
    lost = marks[-1].number - commits if marks else 0
    if lost > 0:
        raise StoreError(
            f"{where} has lost {lost} acknowledged commit{'s' if lost > 1 else ''}: {DATABASE} ends at commit "
            f"{commits} of {marks[-1].number}. {WAL} is damaged, cut or missing, or {DATABASE} is an older copy. "
            f"Restore a backup, or {advice}: it says what is lost"
        )


def count_commits(database: sqlite3.Connection, folder: Path) -> int | None:
    """Return the number of the newest commit; None if the database is still empty."""
    (layout,) = database.execute("PRAGMA user_version").fetchone()
    if layout == 0:
        return None
    if layout != LAYOUT:
        raise other_layout(f"the store in {str(folder)!r}", layout)
    (number,) = database.execute("SELECT number FROM commits").fetchone()
    return int(number)


def check_store(folder: str | os.PathLike[str]) -> StoreReport:
    """Check a store that no service uses, and change nothing.

    Raises:
        InputError: there is no store in the folder.
        StoreError: a service uses it, or it has another layout.
    """
    with _held(Path(folder)) as place:
        return _check(place)


def repair_store(folder: str | os.PathLike[str]) -> StoreReport:
    """Let a store go on without the commits that it has lost. Return what the check found before.

    A damaged write-ahead log is kept under another name.

    Raises:
        InputError: there is no store in the folder.
        StoreError: a service uses it, it has another layout, or the database itself is damaged.
    """
    with _held(Path(folder)) as place:
        report = _check(place)
        if report.problems:
            raise StoreError(
                f"the database in {str(place)!r} is damaged and cannot be repaired: {report.problems[0]}. Restore a "
                "backup"
            )
        if report.is_good:
            return report
        number = max([report.commits, *(mark.number for mark in read_marks(place))]) + 1
        if (place / WAL).exists():
            shutil.copy2(place / WAL, place / f"{WAL}.damaged-{int(time.time())}")
        with closing(sqlite3.connect(place / DATABASE, isolation_level=None)) as database:
            database.execute("PRAGMA synchronous = FULL")
            database.execute("UPDATE commits SET number = ?", (number,))
            # All of it is in the database before the mark says so.
            database.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        CommitMarks.create(place, number).close()
        return report


@contextmanager
def _held(folder: Path) -> Iterator[Path]:
    if not any((folder / name).exists() for name in (DATABASE, MARKS)):
        raise InputError(f"There is no store in {str(folder)!r}. Name the folder of a service.")
    try:
        lock = lock_folder(folder)
    except BlockingIOError as problem:
        raise StoreError(f"the store in {str(folder)!r} is {problem.strerror}: stop the service first") from None
    try:
        yield folder
    except sqlite3.Error as problem:
        raise StoreError(f"the store in {str(folder)!r} cannot be read: {problem}. Restore a backup") from problem
    finally:
        os.close(lock)


@contextmanager
def _read_only(folder: Path) -> Iterator[sqlite3.Connection | None]:
    """Yield a connection that changes nothing; None if there is no database."""
    if not (folder / DATABASE).exists():
        yield None
        return
    with closing(connect_read_only(folder)) as database:
        yield database


def connect_read_only(folder: Path) -> sqlite3.Connection:
    """Return a connection to the database of a store that never changes it."""
    return sqlite3.connect(f"{(folder / DATABASE).absolute().as_uri()}?mode=ro", uri=True)


def _check(folder: Path) -> StoreReport:
    marks = read_marks(folder)
    with _read_only(folder) as database:
        commits = None if database is None else count_commits(database, folder)
        if database is None or commits is None:
            positions: dict[str, int] = {}
            problems = [f"{DATABASE} is missing or empty"]
        else:
            positions = {to_text(name): finish for name, finish in database.execute("SELECT id, finish FROM streams")}
            problems = _problems(database)
    commits = commits or 0
    newer = [mark for mark in marks if mark.number > commits]
    ends = {stream: end for mark in newer for stream, end in (mark.ends or {}).items()}
    lost_commits = marks[-1].number - commits if newer else 0
    return StoreReport(
        streams=len(positions),
        commits=commits,
        lost_commits=lost_commits,
        lost={
            stream: (positions.get(stream, 0), end - 1)
            for stream, end in sorted(ends.items())
            if end > positions.get(stream, 0)
        },
        all_named=len(newer) == lost_commits and all(mark.ends is not None for mark in newer),
        has_marks=bool(marks),
        problems=tuple(problems[:_MAX_PROBLEMS]),
    )


def _problems(database: sqlite3.Connection) -> list[str]:
    """Return what is wrong with the pages of a database, and which streams lack something."""
    try:
        found = [line for (line,) in database.execute(f"PRAGMA integrity_check({_MAX_PROBLEMS})") if line != "ok"]
        if found:
            return found
        gaps = database.execute(GAPS)
        return [f"{what} of the stream {to_text(stream)!r} are missing" for stream, what in gaps]
    except sqlite3.DatabaseError as problem:
        return [str(problem)]

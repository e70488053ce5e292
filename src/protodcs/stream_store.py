"""StreamStore: the SQLite database of a `StreamPool`, with its settings and one row per unloaded stream.

Killing the process cannot damage the database. Only `sync` waits for the disk, so a power cut may lose what was written
since, but nothing else.
"""

import json
import sqlite3
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .errors import StateError, UsageError

_FILE = "streams.sqlite"
# If a state keeps its size, SQLite writes only the pages that changed. With larger pages it would write more.
PAGE_BYTES = 4096
# SQLite waits for the disk once per so many pages of its log, about 64 MB.
_PAGES_PER_SYNC = 16_000


class StreamStore:
    """An open database. One process at a time can have it open; the lock ends with the process.

    Args:
        folder: where the database is; created if missing.
    """

    def __init__(self, folder: Path):
        self.path = folder / _FILE
        self._lock = threading.Lock()
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._database = sqlite3.connect(self.path, timeout=0, isolation_level=None, check_same_thread=False)
        except (OSError, sqlite3.Error) as problem:
            raise StateError(f"Cannot open {self.path}: {problem}.") from problem
        try:
            for statement in (
                f"PRAGMA page_size = {PAGE_BYTES}",
                # The lock of the first statement stays until the connection is closed or the process ends.
                "PRAGMA locking_mode = EXCLUSIVE",
                "PRAGMA journal_mode = WAL",
                "PRAGMA synchronous = NORMAL",
                f"PRAGMA wal_autocheckpoint = {_PAGES_PER_SYNC}",
                "CREATE TABLE IF NOT EXISTS settings (value TEXT NOT NULL)",
                "CREATE TABLE IF NOT EXISTS streams (id TEXT NOT NULL UNIQUE, state BLOB NOT NULL)",
            ):
                self._database.execute(statement)
        except sqlite3.Error as problem:
            self._database.close()
            if "locked" in str(problem):
                raise UsageError(
                    f"The folder {str(folder)!r} is in use by another pool. Close that pool, or choose another folder."
                ) from None
            raise StateError(f"Cannot use {self.path}: {problem}. Choose another folder.") from problem

    def settings(self, new: dict[str, Any]) -> dict[str, Any]:
        """Return the stored settings; store the `new` ones first if there are none."""
        found = self._run("SELECT value FROM settings").fetchone()
        if found is None:
            self._run("INSERT INTO settings VALUES (?)", json.dumps(new))
            return new
        stored: dict[str, Any] = json.loads(found[0])
        return stored

    def read(self, stream: str) -> bytes | None:
        """Return the stored state of a stream; None if there is none."""
        found = self._run("SELECT state FROM streams WHERE id = ?", stream).fetchone()
        return None if found is None else bytes(found[0])

    def write(self, stream: str, data: bytes | bytearray) -> None:
        """Store the state of a stream."""
        try:
            self._run(
                "INSERT INTO streams VALUES (?, ?) ON CONFLICT (id) DO UPDATE SET state = excluded.state", stream, data
            )
        except StateError as problem:
            raise StateError(f"Cannot store the stream {stream!r}: {problem} It stays loaded.") from problem

    def delete(self, stream: str) -> None:
        """Delete the stored state of a stream, if there is one."""
        self._run("DELETE FROM streams WHERE id = ?", stream)

    def sync(self) -> None:
        """Wait until everything written is on disk."""
        self._run("PRAGMA wal_checkpoint(FULL)").fetchall()

    def close(self) -> None:
        """Release the database."""
        with self._lock:
            self._database.close()

    def __contains__(self, stream: str) -> bool:
        return self._run("SELECT 1 FROM streams WHERE id = ?", stream).fetchone() is not None

    def __len__(self) -> int:
        return int(self._run("SELECT count(*) FROM streams").fetchone()[0])

    def __iter__(self) -> Iterator[str]:
        last = 0
        while True:
            # A page at a time, so that other threads can use the database in between.
            page = self._run("SELECT rowid, id FROM streams WHERE rowid > ? ORDER BY rowid LIMIT 1000", last).fetchall()
            if not page:
                return
            yield from (stream for _, stream in page)
            last = page[-1][0]

    def _run(self, statement: str, *values: Any) -> sqlite3.Cursor:
        try:
            with self._lock:
                return self._database.execute(statement, values)
        except sqlite3.Error as problem:
            raise StateError(f"{self.path}: {problem}.") from problem

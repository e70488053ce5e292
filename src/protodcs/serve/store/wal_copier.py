"""Copies the write-ahead log to the database beside the writes, so that no commit waits for it.

SQLite writes a commit to the end of its write-ahead log (WAL), and begins at its start again as soon as all of it was
copied to the database. By itself it copies at the end of a commit, which then takes three times as long.
"""

import sqlite3
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Final

# A pass begins after so many changed rows: those of some 250 observes, which are 4 MB.
_CHANGES: Final = 1000
# The writer itself copies a WAL of so many pages. A pass beside writes may never get to the end, where SQLite begins
# again.
_MAX_PAGES: Final = 8192


class WalCopier:
    """Copies in a thread and with a connection of its own.

    Args:
        database: a connection that nobody else uses. `close` closes it.

    Attributes:
        is_behind: whether the WAL has become so long that the writer should call `catch_up`.
    """

    def __init__(self, database: sqlite3.Connection):
        self._database = database
        self.is_behind = False
        # Rows that were changed since the last pass was asked for.
        self._changes = 0
        self._has_work = threading.Event()
        self._closed = False
        # Held during a pass.
        self._copying = threading.Lock()
        self._thread = threading.Thread(target=self._copy_forever, name="wal copier", daemon=True)
        self._thread.start()

    def committed(self, changes: int) -> None:
        """Take note of a commit that changed so many rows."""
        self._changes += changes
        if self._changes >= _CHANGES:
            self._changes = 0
            self._has_work.set()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Wait for a pass under way, and begin no other one meanwhile."""
        with self._copying:
            yield

    def catch_up(self) -> None:
        """Copy all of the WAL, because nobody writes meanwhile."""
        self._copy()
        self.is_behind = False

    def close(self) -> None:
        """Stop, and close the connection."""
        self._closed = True
        self._has_work.set()
        self._thread.join()
        self._database.close()

    def _copy_forever(self) -> None:
        while True:
            self._has_work.wait()
            self._has_work.clear()
            if self._closed:
                return
            self.is_behind = self._copy() > _MAX_PAGES

    def _copy(self) -> int:
        """Copy what was committed so far. Return how many pages the WAL has."""
        # A disk that is full or fails is noticed by the next commit. Until then the WAL has everything.
        with self.paused(), suppress(sqlite3.Error):
            _, pages, _ = self._database.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()
            return int(pages)
        return 0

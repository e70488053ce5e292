"""The notices of all streams in a SQLite database. Their ids grow in the order in which they became durable."""

import sqlite3
from collections.abc import Sequence
from typing import Final

from .notices import MAX_NOTICES, Notice

SCHEMA: Final = """
CREATE TABLE notices (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    tenant BLOB NOT NULL,
    stream INTEGER NOT NULL,
    position INTEGER NOT NULL,
    number INTEGER NOT NULL,
    time INTEGER NOT NULL,
    kind TEXT NOT NULL,
    content TEXT NOT NULL,
    UNIQUE (stream, position, number)
) STRICT;
CREATE INDEX notices_by_tenant ON notices (tenant, id);
"""


class NoticeTable:
    """Reads and writes notices.

    Args:
        database: a connection that only one thread uses.
    """

    def __init__(self, database: sqlite3.Connection):
        self._database = database

    def append(self, stream: int, tenant: bytes, notices: Sequence[Notice]) -> None:
        """Add notices of a stream, and delete the oldest if it has too many."""
        rows = [(tenant, stream, *notice) for notice in notices]
        self._database.executemany(
            "INSERT INTO notices (tenant, stream, position, number, time, kind, content) VALUES (?, ?, ?, ?, ?, ?, ?)",
            rows,
        )
        self._database.execute(
            "DELETE FROM notices WHERE stream = ?1 AND id <= "
            "(SELECT id FROM notices WHERE stream = ?1 ORDER BY position DESC, number DESC LIMIT 1 OFFSET ?2)",
            (stream, MAX_NOTICES),
        )

    def read(self, stream: int, after: tuple[int, int] | None, since: int | None) -> list[Notice]:
        """Return the notices of a stream after a position and number, or from a time on."""
        found = self._database.execute(
            "SELECT position, number, time, kind, content FROM notices "
            "WHERE stream = ? AND (position, number) > (?, ?) AND time >= ? ORDER BY position, number",
            (stream, *(after or (-1, 0)), since or 0),
        )
        return [Notice(*row) for row in found]

    def read_tenant(self, tenant: bytes, after: int, limit: int) -> list[tuple[int, int, Notice]]:
        """Return id, stream and content of notices of a tenant after an id."""
        found = self._database.execute(
            "SELECT id, stream, position, number, time, kind, content FROM notices WHERE tenant = ? AND id > ? "
            "ORDER BY id LIMIT ?",
            (tenant, after, limit),
        )
        return [(number, stream, Notice(*row)) for number, stream, *row in found]

    def newest(self) -> int:
        """Return the id of the newest notice of all tenants, also if it was deleted."""
        found = self._database.execute("SELECT seq FROM sqlite_sequence WHERE name = 'notices'").fetchone()
        return 0 if found is None else int(found[0])

    def delete_stream(self, stream: int) -> None:
        """Delete the notices of a stream."""
        self._database.execute("DELETE FROM notices WHERE stream = ?", (stream,))

"""EventRecord: which events a bridge has answered, in an SQLite file.

Killing the process cannot damage it. A power cut may lose the last entries: the sub labels of their events then show
that they were answered.
"""

import sqlite3
import time
import uuid
from pathlib import Path
from typing import Any, NamedTuple, Self

from ..errors import StateError

# Longer than any time for which an event may be seen again.
_KEPT_SECONDS = 30 * 86400.0


class Answer(NamedTuple):
    """What was decided on an event.

    Attributes:
        event: its id.
        camera: its camera.
        label: its sub label.
        score: the probability of the sub label.
        message: the decision as JSON, for subscribers.
    """

    event: str
    camera: str
    label: str
    score: float
    message: str


class EventRecord:
    """An open record. It belongs to one thread. A context manager.

    Args:
        file: created if missing.

    Attributes:
        identifier: a name of this record that no other one has.
        since: when it was created, in seconds since 1970.
    """

    def __init__(self, file: Path) -> None:
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            self._database = sqlite3.connect(file, isolation_level=None)
            for statement in (
                "PRAGMA journal_mode = WAL",
                "PRAGMA synchronous = NORMAL",
                "CREATE TABLE IF NOT EXISTS record (identifier TEXT NOT NULL, since REAL NOT NULL)",
                "CREATE TABLE IF NOT EXISTS events (id TEXT PRIMARY KEY, start REAL NOT NULL, camera TEXT NOT NULL, "
                "label TEXT, score REAL, message TEXT, posted INTEGER NOT NULL, published INTEGER NOT NULL)",
                "CREATE INDEX IF NOT EXISTS unpublished ON events (published) WHERE NOT published",
                "CREATE INDEX IF NOT EXISTS by_start ON events (start)",
            ):
                self._database.execute(statement)
            self._database.execute("DELETE FROM events WHERE start < ?", (time.time() - _KEPT_SECONDS,))
            # One statement, so that two processes make one entry.
            self._database.execute(
                "INSERT INTO record SELECT ?, ? WHERE NOT EXISTS (SELECT * FROM record)",
                (f"protodcs-{uuid.uuid4().hex[:12]}", time.time()),
            )
            found = self._database.execute("SELECT identifier, since FROM record").fetchone()
        except (OSError, sqlite3.Error) as problem:
            raise StateError(f"Cannot use {file}: {problem}.") from None
        self.identifier: str = found[0]
        self.since: float = found[1]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._database.close()

    def is_posted(self, event: str) -> bool:
        """Return whether nothing more has to be sent to Frigate about an event."""
        return bool(self._rows("SELECT 1 FROM events WHERE id = ? AND posted", event))

    def answer(self, event: str) -> Answer | None:
        """Return what was decided on an event; None if it was not decided."""
        rows = self._rows("SELECT id, camera, label, score, message FROM events WHERE id = ?", event)
        return Answer(*rows[0]) if rows and rows[0][2] is not None else None

    def decide(self, answer: Answer, start: float) -> None:
        """Store a decision, before it is sent to anyone."""
        self._rows(
            "INSERT INTO events VALUES (?, ?, ?, ?, ?, ?, 0, 0)",
            answer.event, start, answer.camera, answer.label, answer.score, answer.message,
        )  # fmt: skip

    def skip(self, event: str, camera: str, start: float) -> None:
        """Store that an event needs no answer, or no further one."""
        self._rows(
            "INSERT INTO events VALUES (?, ?, ?, NULL, NULL, NULL, 1, 1) ON CONFLICT DO UPDATE SET posted = 1",
            event, start, camera,
        )  # fmt: skip

    def mark_posted(self, event: str) -> None:
        """Store that the sub label of an event is set."""
        self._rows("UPDATE events SET posted = 1 WHERE id = ?", event)

    def mark_published(self, event: str) -> None:
        """Store that the decision on an event was published."""
        self._rows("UPDATE events SET published = 1 WHERE id = ?", event)

    def unpublished(self) -> list[Answer]:
        """Return the decisions that were not published, in their order."""
        wanted = "SELECT id, camera, label, score, message FROM events WHERE NOT published AND posted ORDER BY rowid"
        return [Answer(*row) for row in self._rows(wanted)]

    def cameras(self) -> list[str]:
        """Return the cameras of all decisions."""
        return [camera for (camera,) in self._rows("SELECT DISTINCT camera FROM events WHERE label IS NOT NULL")]

    def latest(self) -> float:
        """Return the start of the latest event; `since` if there is none."""
        ((start,),) = self._rows("SELECT max(start) FROM events")
        return self.since if start is None else max(self.since, start)

    def _rows(self, statement: str, *values: Any) -> list[tuple[Any, ...]]:
        try:
            return self._database.execute(statement, values).fetchall()
        except sqlite3.Error as problem:
            raise StateError(f"Cannot store which events are answered: {problem}.") from None

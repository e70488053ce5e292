"""A small service over real HTTP, honest or with one bug, to test the load and the checker.

The honest one refuses requests now and then, answers late, and changes its epoch, but never loses or repeats anything.
It has no engine: a decision is a digest of the feature and of all features before it, so order and repetition show.
"""

import asyncio
import hashlib
import random
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse

from .checker import Final, Replay
from .journal import Entry

# The chance of each event at a request.
_REFUSED_BEFORE, _REFUSED_AFTER, _LATE, _TAKEOVER, _BUG = 0.05, 0.05, 0.02, 0.1, 0.2


class Bug(StrEnum):
    """What is wrong with the fake."""

    NONE = "nothing"
    LOSES = "a takeover drops the last record, though it was acknowledged"
    FORGETS_KEYS = "a takeover forgets all idempotency keys"
    REVERSES_ROWS = "the rows of a request are applied in reverse order"
    STALE = "a record is written with an old epoch"
    WRONG_ANSWER = "an answer is not the one in the journal"
    ACCEPTS_REUSED_KEYS = "a key is accepted for another request"
    EXPIRES = "an answer is said to have expired at once"
    SILENT = "a request is taken and never answered"


@dataclass
class _Stream:
    journal: list[Entry] = field(default_factory=list)
    bodies: dict[str, bytes] = field(default_factory=dict)
    epoch: int = 1


class Fake:
    """The streams of the service, without HTTP."""

    def __init__(self, bug: Bug, seed: int, stored_answers: int):
        self.bug = bug
        self.strikes = 0
        self._rng = random.Random(seed)
        self._stored_answers = stored_answers
        self._streams: dict[str, _Stream] = {}

    def create(self, stream: str) -> None:
        """Create a stream unless it exists."""
        self._streams.setdefault(stream, _Stream())

    async def handle(self, name: str, verb: str, key: str, body: bytes, rows: int, late: float) -> Response:
        """Answer, refuse or be late, before or after the records are written."""
        stream, chance = self._streams[name], self._rng.random()
        if chance < _REFUSED_BEFORE:
            return _problem(503, "refused before")
        if self._rng.random() < _TAKEOVER:
            self._take_over(stream)
        if verb != "observe" or (stream.bodies.get(key, body) != body and not self._strikes(Bug.ACCEPTS_REUSED_KEYS)):
            return _problem(409, "another request has this key")
        response = self._apply(stream, key, body, rows)
        if self._strikes(Bug.SILENT):
            await asyncio.sleep(100 * late)
        if chance > 1 - _LATE:
            await asyncio.sleep(late)
        elif chance > 1 - _LATE - _REFUSED_AFTER:
            return _problem(503, "applied, but refused")
        return response

    def journals(self) -> dict[str, list[Entry]]:
        """Return all records."""
        return {name: stream.journal for name, stream in self._streams.items()}

    def finals(self) -> dict[str, Final]:
        """Return what it holds at the end."""
        return {name: Final(len(s.journal), _last(s.journal)) for name, s in self._streams.items()}

    def replays(self) -> dict[str, Replay]:
        """Return the undisturbed run of each journal."""
        found = {}
        for name, stream in self._streams.items():
            fresh: list[Entry] = []
            for entry in stream.journal:
                fresh.append(_entry(fresh, entry.epoch, entry.key, entry.row, entry.payload or b""))
            found[name] = Replay([entry.answer for entry in fresh], _last(fresh))
        return found

    def _strikes(self, bug: Bug) -> bool:
        struck = self.bug is bug and self._rng.random() < _BUG
        self.strikes += struck
        return struck

    def _take_over(self, stream: _Stream) -> None:
        stream.epoch += 1
        if stream.journal and self._strikes(Bug.LOSES):
            stream.bodies.pop(stream.journal.pop().key, None)
        if self._strikes(Bug.FORGETS_KEYS):
            stream.bodies.clear()

    def _apply(self, stream: _Stream, key: str, body: bytes, rows: int) -> Response:
        repeated = key in stream.bodies
        if not repeated:
            self._append(stream, key, body, rows)
        entries = [entry for entry in stream.journal if entry.key == key][-rows:]
        expired = len(stream.journal) - 1 - entries[0].position >= self._stored_answers
        if repeated and (expired or self._strikes(Bug.EXPIRES)):
            return _problem(410, "applied before")
        entries.sort(key=lambda entry: entry.row)
        places = [{"position": entry.position, "epoch": entry.epoch, "repeated": repeated} for entry in entries]
        told = [{**entry.answer, **place} for entry, place in zip(entries, places, strict=True)]
        if self._strikes(Bug.WRONG_ANSWER):
            told[-1]["score"] += 1e-9
        return JSONResponse({"decisions": told})

    def _append(self, stream: _Stream, key: str, body: bytes, rows: int) -> None:
        stream.bodies[key] = body
        size = len(body) // rows
        order = range(rows - 1, -1, -1) if self._strikes(Bug.REVERSES_ROWS) else range(rows)
        for row in order:
            epoch = stream.epoch - 2 * self._strikes(Bug.STALE)
            stream.journal.append(_entry(stream.journal, epoch, key, row, body[row * size : (row + 1) * size]))


def _entry(journal: list[Entry], epoch: int, key: str, row: int, payload: bytes) -> Entry:
    digest = hashlib.sha256(_last(journal).encode() + payload).hexdigest()
    names = ("p_unknown", "openness", "openness_first", "score", "aleatoric", "epistemic")
    numbers = {name: int(digest[8 * i : 8 * i + 8], 16) / 2**32 for i, name in enumerate(names)}
    flags = {
        name: bool(int(digest[-1 - i], 16) % 2) for i, name in enumerate(("known", "trusted", "cached", "evolved"))
    }
    answer: dict[str, Any] = {**numbers, **flags, "label": digest, "index": 0, "sequence": len(journal), "reason": None}
    answer["unsure"] = False
    return Entry(len(journal), epoch, True, key, row, payload, answer)


def _last(journal: list[Entry]) -> str:
    return str(journal[-1].answer["label"]) if journal else ""


def _problem(status: int, detail: str) -> Response:
    return JSONResponse({"detail": detail}, status)


@contextmanager
def serving(bug: Bug, seed: int, late: float, stored_answers: int) -> Iterator[tuple[str, Fake]]:
    """Serve a fake on a free port; yields its address and the fake itself.

    Args:
        bug: what is wrong with it.
        seed: of everything that happens to requests.
        late: seconds by which a late answer is late.
        stored_answers: how many records may follow a request before its answer expires.
    """
    fake = Fake(bug, seed, stored_answers)
    server = uvicorn.Server(uvicorn.Config(_app(fake, late), log_level="critical", ws="none", lifespan="off"))
    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{listening.getsockname()[1]}", fake
        finally:
            # Requests that are never answered must not keep it.
            server.should_exit = server.force_exit = True
            thread.join(300)
            assert not thread.is_alive()


def _app(fake: Fake, late: float) -> FastAPI:
    app = FastAPI()

    @app.post("/v1/streams")
    async def create(request: Request) -> Response:
        stream = (await request.json())["id"]
        fake.create(stream)
        return JSONResponse({"id": stream}, 201)

    @app.post("/v1/streams/{stream}/{verb}")
    async def handle(stream: str, verb: str, request: Request) -> Response:
        rows = int(request.query_params.get("count", "1"))
        return await fake.handle(stream, verb, request.headers["Idempotency-Key"], await request.body(), rows, late)

    return app

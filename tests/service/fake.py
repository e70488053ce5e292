"""A service small enough to be seen through, over real HTTP: honest, or with one bug that the real one must not have.

Honest means disturbed but true: it refuses now and then, answers too late, and changes owners, and yet never loses or
repeats anything. It exists to try the client and the checker, and must never stand in for the real one anywhere else.
"""

import asyncio
import random
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

import numpy as np
import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse

from protodcs import ProtoDCS

from .checker import Final, digest_of

# How often something happens to a request.
_REFUSED_BEFORE, _REFUSED_AFTER, _LATE, _TAKEOVER, _BUG = 0.03, 0.03, 0.01, 0.05, 0.2


class Bug(StrEnum):
    """What is wrong with the fake."""

    NONE = "nothing"
    LOSES = "a new owner forgets the last record, though it was acknowledged"
    TWICE = "a new owner does not know the keys of the old one"
    REORDERS = "a feature is acknowledged and let in behind the next one"
    STALE = "an old owner goes on answering"
    WRONG = "an answer that the engine did not give"
    SILENT = "a request is taken and never answered"


@dataclass
class _Owner:
    """One stream in the hands of one owner."""

    engine: ProtoDCS
    epoch: int = 1
    position: int = 0
    answers: dict[str, dict[str, Any]] = field(default_factory=dict)
    # What LOSES goes back to, and what REORDERS holds back.
    before: bytes = b""
    held: np.ndarray | None = None

    def observe(self, key: str, feature: np.ndarray) -> dict[str, Any]:
        """Decide, learn and keep the answer."""
        self.before = self.engine.snapshot()
        decision = self.engine.observe(feature).to_dict()
        del decision["scores"]
        return self.keep(key, decision, self.position)

    def keep(self, key: str, decision: dict[str, Any], position: int) -> dict[str, Any]:
        """Write a decision into the journal."""
        self.answers[key] = {**decision, "position": position, "epoch": self.epoch, "repeated": False}
        self.position += 1
        return self.answers[key]

    def successor(self) -> "_Owner":
        """The next owner, woken from what this one wrote."""
        engine = ProtoDCS.restore(self.engine.snapshot())
        return replace(self, engine=engine, epoch=self.epoch + 1, answers=dict(self.answers))


class Fake:
    """The service's streams, without HTTP; one request is in it at a time."""

    def __init__(self, bug: Bug, seed: int):
        self.bug = bug
        self.buggy = 0
        self._rng = random.Random(seed)
        self._owners: dict[str, _Owner] = {}
        self._stale: dict[str, _Owner] = {}

    def create(self, stream: str, prototypes: list[list[float]]) -> bool:
        """Begin a stream; False if it is there already."""
        if stream in self._owners:
            return False
        self._owners[stream] = _Owner(ProtoDCS(np.array(prototypes, dtype=np.float32)))
        return True

    async def observe(self, stream: str, key: str, feature: np.ndarray, late: float) -> Response:
        """Answer, refuse, or be late, before or after the record is written."""
        fate = self._rng.random()
        if fate < _REFUSED_BEFORE:
            return JSONResponse({"error": "not now"}, 503)
        if self._rng.random() < _TAKEOVER:
            self._take_over(stream)
        answer = self._answer(stream, key, feature)
        if answer is None:
            await asyncio.sleep(10 * late)
        if fate > 1 - _LATE:
            await asyncio.sleep(late)
        elif fate > 1 - _LATE - _REFUSED_AFTER:
            return JSONResponse({"error": "written, and not said so"}, 503)
        return JSONResponse({"decisions": [answer]})

    def finals(self) -> dict[str, Final]:
        """What it holds."""
        return {
            stream: Final(owner.position, owner.engine.stats()["sequence"], digest_of(owner.engine.snapshot()))
            for stream, owner in self._owners.items()
        }

    def _strikes(self, bug: Bug) -> bool:
        struck = self.bug is bug and self._rng.random() < _BUG
        self.buggy += struck
        return struck

    def _take_over(self, stream: str) -> None:
        owner = self._owners[stream]
        successor = self._owners[stream] = owner.successor()
        if self.bug is Bug.STALE:
            self._stale[stream] = owner
        if self.bug is Bug.TWICE:
            successor.answers.clear()
            self.buggy += 1
        if self.bug is Bug.LOSES and owner.before:
            successor.engine, successor.before = ProtoDCS.restore(owner.before), b""
            successor.position -= 1
            successor.answers.popitem()
            self.buggy += 1

    def _answer(self, stream: str, key: str, feature: np.ndarray) -> dict[str, Any] | None:
        owner = self._owners[stream]
        if key in owner.answers:
            return {**owner.answers[key], "repeated": True}
        if stream in self._stale and self._strikes(Bug.STALE):
            return self._stale[stream].observe(key, feature)
        if self._strikes(Bug.SILENT):
            return None
        if owner.held is not None:
            return self._overtake(owner, owner.held, key, feature)
        if self._strikes(Bug.REORDERS):
            return self._hold_back(owner, key, feature)
        answer = owner.observe(key, feature)
        if self._strikes(Bug.WRONG):
            answer["p_unknown"] = np.nextafter(answer["p_unknown"], 0.5).item()
        return answer

    @staticmethod
    def _hold_back(owner: _Owner, key: str, feature: np.ndarray) -> dict[str, Any]:
        """Answer as if the next position were this feature's, and leave it to the next one."""
        owner.held = feature
        decision = owner.engine.peek(feature).to_dict()
        del decision["scores"]
        return owner.keep(key, decision, owner.position + 1)

    @staticmethod
    def _overtake(owner: _Owner, held: np.ndarray, key: str, feature: np.ndarray) -> dict[str, Any]:
        """Let a feature in at the position of the one that was held back, and that one behind it."""
        decision = owner.engine.observe(feature).to_dict()
        owner.engine.observe(held)
        owner.held = None
        del decision["scores"]
        return owner.keep(key, decision, owner.position - 1)


@contextmanager
def serving(bug: Bug, seed: int, late: float) -> Iterator[tuple[str, Fake]]:
    """The fake behind HTTP on a free port of this machine: its address, and its inside.

    Args:
        bug: what is wrong with it.
        seed: of all that happens to requests.
        late: seconds by which an answer that is late is late.
    """
    fake = Fake(bug, seed)
    config = uvicorn.Config(_app(fake, late), log_level="critical", ws="none", lifespan="off")
    server = uvicorn.Server(config)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{listening.getsockname()[1]}", fake
        finally:
            # Requests that are never answered must not keep it.
            server.should_exit = server.force_exit = True
            thread.join(30)
            assert not thread.is_alive()


def _app(fake: Fake, late: float) -> FastAPI:
    app = FastAPI()

    @app.post("/v1/streams")
    async def create(request: Request) -> Response:
        body = await request.json()
        if fake.create(body["id"], body["prototypes"]):
            return JSONResponse({"id": body["id"]}, 201)
        return JSONResponse({"error": "it exists"}, 409)

    @app.post("/v1/streams/{stream}/observe")
    async def observe(stream: str, request: Request) -> Response:
        feature = np.frombuffer(await request.body(), dtype="<f4")
        return await fake.observe(stream, request.headers["Idempotency-Key"], feature, late)

    return app

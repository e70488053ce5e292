"""What a client of the service writes down: every request, every attempt at it, and what came of each.

A history is all that the checker knows of a run, so it holds what the client saw and never what anyone concluded. It
goes to a file line by line while the run lasts: a client that is killed loses at most the attempt it was in.
"""

import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, Self

# The fields of an answer that say where it stands in the journal; all the others are the decision.
_PLACE = ("position", "epoch", "repeated")


class Outcome(StrEnum):
    """How an attempt ended."""

    ACKNOWLEDGED = "acknowledged"
    REFUSED = "refused"  # an answer that is no acknowledgement
    BROKEN = "broken"  # no connection, or one that ended without an answer
    TIMED_OUT = "timed out"  # no answer in the client's time


@dataclass(frozen=True, slots=True)
class Answer:
    """What an acknowledged request was told.

    Attributes:
        position: of its record in the stream's journal.
        epoch: of the owner that wrote the record.
        repeated: whether the service says that it had answered this key before.
        decision: all other fields, as they came.
    """

    position: int
    epoch: int
    repeated: bool
    decision: dict[str, Any]

    @property
    def sequence(self) -> int:
        """Which sample of its stream the engine took it for."""
        return int(self.decision["sequence"])

    @classmethod
    def of(cls, fields: dict[str, Any]) -> Self:
        """The answer in one entry of the service's `decisions`; a KeyError where what the checker needs is missing."""
        decision = {name: value for name, value in fields.items() if name not in _PLACE}
        int(decision["sequence"])
        return cls(int(fields["position"]), int(fields["epoch"]), bool(fields["repeated"]), decision)


@dataclass(frozen=True, slots=True)
class Attempt:
    """One try at a request.

    Attributes:
        start, end: by `time.monotonic`.
        outcome: how it ended.
        answer: what was told; None unless it was acknowledged.
        words: why it failed, for the reader.
    """

    start: float
    end: float
    outcome: Outcome
    answer: Answer | None = None
    words: str = ""


@dataclass(slots=True)
class Request:
    """One feature that a client wants observed, under one key however often it tries.

    Attributes:
        stream: where it goes.
        key: its idempotency key.
        index: which feature it is, in the stream's own order, from 0.
        attempts: in the order they were made; those behind the first acknowledgement are deliberate repetitions.
    """

    stream: str
    key: str
    index: int
    attempts: list[Attempt] = field(default_factory=list)

    @property
    def answers(self) -> list[Answer]:
        """All that it was told, in order: more than one where it was repeated."""
        return [attempt.answer for attempt in self.attempts if attempt.answer is not None]

    @property
    def acknowledged_at(self) -> float | None:
        """When the client first had its answer."""
        return next((attempt.end for attempt in self.attempts if attempt.answer is not None), None)


def key_of(stream: str, index: int) -> str:
    """The idempotency key under which the client sends a feature."""
    return f"{stream}/{index}"


def to_lines(requests: Iterable[Request]) -> Iterator[str]:
    """A history as JSON lines."""
    for request in requests:
        yield _begun(request)
        for attempt in request.attempts:
            yield _tried(request, attempt)


def from_lines(text: str) -> list[Request]:
    """The history that was written as lines. What a killed client left of its last line is not looked at."""
    requests: dict[tuple[str, str], Request] = {}
    for line in text.split("\n")[:-1]:
        entry = json.loads(line)
        place = entry["stream"], entry["key"]
        if "index" in entry:
            requests[place] = Request(*place, entry["index"])
        else:
            requests[place].attempts.append(_attempt(entry["attempt"]))
    return list(requests.values())


class History:
    """A history while it is made; with a path, each line is in the file before the client goes on.

    Attributes:
        requests: so far, in the order they were begun.
        acknowledged: how many of them were answered.
    """

    def __init__(self, path: Path | None = None):
        self.requests: list[Request] = []
        self.acknowledged = 0
        # Unbuffered but for the line: the file outlives the client.
        self._file = None if path is None else path.open("w", buffering=1, encoding="utf-8")

    def begin(self, stream: str, index: int) -> Request:
        """Write down that a feature is about to be sent."""
        request = Request(stream, key_of(stream, index), index)
        self.requests.append(request)
        self._write(_begun(request))
        return request

    def add(self, request: Request, attempt: Attempt) -> None:
        """Write down an attempt that has ended."""
        self.acknowledged += attempt.answer is not None and not request.answers
        request.attempts.append(attempt)
        self._write(_tried(request, attempt))

    def close(self) -> None:
        """Let go of the file."""
        if self._file is not None:
            self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _write(self, line: str) -> None:
        if self._file is not None:
            self._file.write(line)


def _begun(request: Request) -> str:
    return json.dumps({"stream": request.stream, "key": request.key, "index": request.index}) + "\n"


def _tried(request: Request, attempt: Attempt) -> str:
    return json.dumps({"stream": request.stream, "key": request.key, "attempt": asdict(attempt)}) + "\n"


def _attempt(entry: dict[str, Any]) -> Attempt:
    answer = entry["answer"]
    return Attempt(
        entry["start"],
        entry["end"],
        Outcome(entry["outcome"]),
        None if answer is None else Answer(**answer),
        entry["words"],
    )

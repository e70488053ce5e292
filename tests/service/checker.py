"""Check that a run of the service kept its promises.

The evidence is what the clients saw, every journal record that the store ever took, and what the store holds at the
end. Nothing here touches a network, a file or a clock.
"""

import hashlib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise
from typing import Any

import numpy as np

from protodcs import methods
from protodcs.core.prototypes import Prototypes
from protodcs.core.state import leaves_out_prototypes
from protodcs.serve.guard import GuardAction
from protodcs.serve.messages import Reply, ReplyStatus
from protodcs.serve.stream.answers import described, pack_decision
from protodcs.serve.stream.live_stream import StreamSpec

from .history import CONFLICT, Attempt, Request
from .journal import Entry, decision_of


class Kind(StrEnum):
    """The promise that was broken."""

    LOST = "lost"
    DOUBLE = "applied twice"
    REORDER = "order changed"
    GAP = "gap"
    FORK = "two records at one position"
    STALE = "written by a fenced worker"
    FOREIGN = "record that nobody sent"
    PAYLOAD = "other content"
    ANSWER = "other answer"
    EXPIRED = "answer expired too early"
    MISUSE = "reused key accepted"
    UNANSWERED = "unanswered"
    HANG = "no response"
    STATE = "other final state"
    PROGRAM = "client program failed"


@dataclass(frozen=True, slots=True)
class Violation:
    """One broken promise; `key` is None if it concerns a whole stream."""

    kind: Kind
    stream: str
    key: str | None
    detail: str

    def __str__(self) -> str:
        place = self.stream if self.key is None else f"{self.stream}, key {self.key}"
        return f"{self.kind}: stream {place}: {self.detail}"


@dataclass(frozen=True, slots=True)
class Final:
    """What the store holds of a stream at the end: its next position, and a digest of engine and guard."""

    position: int
    digest: str


@dataclass(frozen=True, slots=True)
class Replay:
    """The undisturbed run of a journal: each decision as a client gets it, and a digest of engine and guard."""

    answers: Sequence[Mapping[str, Any]]
    digest: str
    guard_events: int = 0


def state_digest(engine: Any, guard: Any) -> str:
    """Return a digest of the whole state of a stream."""
    return hashlib.sha256(engine.snapshot() + (b"" if guard is None else guard.pack())).hexdigest()


def shown(answer: bytes) -> dict[str, Any]:
    """Return a packed decision as a response shows it, without what belongs to the reply."""
    response = described(Reply(ReplyStatus.DONE, answer=answer))
    return {name: value for name, value in response.items() if name not in ("position", "epoch", "repeated")}


def replay(spec: StreamSpec, prototypes: Prototypes, payloads: Iterable[bytes]) -> Replay:
    """Run features through a new engine with a new guard: no journal, no snapshot, no fault."""
    engine, guard = spec.engine(prototypes), spec.watcher(prototypes)
    answers, events = [], 0
    for position, payload in enumerate(payloads):
        decision = engine.observe(np.frombuffer(payload, dtype="<f4"))
        answers.append(shown(pack_decision(decision)))
        event = None if guard is None else guard.watch(engine.latest, decision, engine, position)
        if guard is None or event is None:
            continue
        events += 1
        good = guard.good_state
        if event.action == GuardAction.ROLL_BACK and good is None:
            engine.reset()
        elif event.action == GuardAction.ROLL_BACK:
            shared = prototypes if leaves_out_prototypes(good) else None
            engine = methods.restore(good, spec.encoder, shared, prototypes.vocabulary)
        engine.unfreeze() if event.action == GuardAction.UNFREEZE else engine.freeze()
    return Replay(answers, state_digest(engine, guard), events)


def check(
    requests: Iterable[Request],
    journals: Mapping[str, Sequence[Entry]],
    finals: Mapping[str, Final],
    replays: Mapping[str, Replay],
    stored_answers: int,
    outages: Sequence[tuple[float, float]] = (),
) -> list[Violation]:
    """Return all broken promises; none if the run was right.

    Args:
        requests: what the clients recorded.
        journals: every record of each stream, in the order in which the store took them.
        finals: what the store held at the end.
        replays: the undisturbed run of each journal.
        stored_answers: how many answers the service stores for repeated requests.
        outages: from when to when the whole service was down, by `time.monotonic`; then nobody answers.
    """
    by_stream: defaultdict[str, list[Request]] = defaultdict(list)
    for request in requests:
        by_stream[request.stream].append(request)
    found: list[Violation] = []
    for stream in sorted({*by_stream, *journals, *finals}):
        case = _Case(stream, by_stream[stream], journals.get(stream, ()), stored_answers, outages)
        for rule in (_positions, _epochs, _rows, _order, _repetitions, _expiry, _misuse, _silence):
            found += rule(case)
        found += _end(case, finals.get(stream), replays.get(stream))
    return found


class _Case:
    """One stream: the requests that were sent, the misuse of their keys, and the journal by key and row."""

    def __init__(
        self,
        stream: str,
        requests: Sequence[Request],
        journal: Sequence[Entry],
        stored_answers: int,
        outages: Sequence[tuple[float, float]],
    ):
        self.stream = stream
        self.outages = outages
        self.sent = [request for request in requests if not request.misuse]
        self.misused = [request for request in requests if request.misuse]
        self.journal = journal
        self.stored_answers = stored_answers
        self.places: defaultdict[tuple[str, int], list[Entry]] = defaultdict(list)
        for entry in journal:
            self.places[entry.key, entry.row].append(entry)

    def positions(self, request: Request) -> list[int]:
        """Return where the rows of a request stand first; rows that are missing are left out."""
        places = (self.places.get((request.key, row)) for row in range(request.rows))
        return [entries[0].position for entries in places if entries]

    def violation(self, kind: Kind, key: str | None, detail: str) -> Violation:
        return Violation(kind, self.stream, key, detail)


# The journal by itself.


def _positions(case: _Case) -> Iterator[Violation]:
    due = 0
    for entry in case.journal:
        if entry.position < due:
            yield case.violation(Kind.FORK, entry.key, f"a second record at position {entry.position}")
        elif entry.position > due:
            yield case.violation(Kind.GAP, entry.key, f"the record after {due - 1} is at position {entry.position}")
        due = max(due, entry.position + 1)
    sent = {(request.key, row) for request in case.sent for row in range(request.rows)}
    for entry in case.journal:
        if not entry.observe or (entry.key, entry.row) not in sent:
            yield case.violation(Kind.FOREIGN, entry.key, f"row {entry.row} at position {entry.position}")


def _epochs(case: _Case) -> Iterator[Violation]:
    for before, entry in pairwise(case.journal):
        if entry.epoch < before.epoch:
            detail = f"position {entry.position} has epoch {entry.epoch}, the record before it {before.epoch}"
            yield case.violation(Kind.STALE, entry.key, detail)


# The journal and the answers.


def _rows(case: _Case) -> Iterator[Violation]:
    for request in case.sent:
        stands = 0
        for row in range(request.rows):
            entries = case.places.get((request.key, row), [])
            stands += bool(entries)
            if len(entries) > 1:
                positions = [entry.position for entry in entries]
                yield case.violation(Kind.DOUBLE, request.key, f"row {row} stands at the positions {positions}")
            for entry in entries:
                if request.payloads is not None and entry.payload != request.payloads[row]:
                    detail = f"row {row} at position {entry.position} is not what was sent"
                    yield case.violation(Kind.PAYLOAD, request.key, detail)
        if stands < request.rows and (request.finished or stands):
            detail = f"{stands} of {request.rows} rows are in the journal, acknowledged: {request.finished}"
            yield case.violation(Kind.LOST, request.key, detail)
        for attempt in request.acknowledged:
            yield from _answers(case, request, attempt)


def _answers(case: _Case, request: Request, attempt: Attempt) -> Iterator[Violation]:
    """Compare the answers to one attempt with the journal; the first difference is enough."""
    if len(attempt.answers) != request.rows:
        yield case.violation(Kind.ANSWER, request.key, f"{len(attempt.answers)} answers to {request.rows} rows")
        return
    for row, answer in enumerate(attempt.answers):
        entries = case.places.get((request.key, row), [])
        entry = next((entry for entry in entries if entry.position == answer["position"]), None)
        if entry is None and entries:
            detail = f"row {row} was acknowledged at position {answer['position']}, where it is not"
            yield case.violation(Kind.LOST, request.key, detail)
            return
        wanted = None if entry is None else {**entry.answer, "epoch": entry.epoch}
        if wanted is not None and (different := _different(wanted, {**decision_of(answer), "epoch": answer["epoch"]})):
            yield case.violation(Kind.ANSWER, request.key, f"row {row} differs from the journal: {different}")
            return


def _order(case: _Case) -> Iterator[Violation]:
    last: dict[int, tuple[int, int]] = {}
    for request in sorted(case.sent, key=lambda request: request.number):
        positions = case.positions(request)
        if positions != sorted(positions):
            yield case.violation(Kind.REORDER, request.key, "its rows are not in order")
        if not positions:
            continue
        number, position = last.get(request.producer, (-1, -1))
        if min(positions) < position:
            detail = f"begins at position {min(positions)}, but request {number} of its producer ends at {position}"
            yield case.violation(Kind.REORDER, request.key, detail)
        last[request.producer] = request.number, max(positions)


def _repetitions(case: _Case) -> Iterator[Violation]:
    for request in case.sent:
        attempts = [attempt for attempt in request.acknowledged if len(attempt.answers) == request.rows]
        for row in range(request.rows):
            answers = [attempt.answers[row] for attempt in attempts]
            if sum(not answer["repeated"] for answer in answers) > 1:
                yield case.violation(Kind.DOUBLE, request.key, f"row {row} was answered as new more than once")
                break
        for attempt in attempts[1:]:
            pairs = zip(attempts[0].answers, attempt.answers, strict=True)
            texts = (_different({**one, "repeated": True}, {**other, "repeated": True}) for one, other in pairs)
            different = next(filter(None, texts), "")
            if different:
                yield case.violation(Kind.ANSWER, request.key, f"a repeated answer differs from the first: {different}")


def _expiry(case: _Case) -> Iterator[Violation]:
    """Accept 410 only if so many records can have followed the request that its answers are no longer stored."""
    ends = [(min(a.start for a in r.attempts), max(case.positions(r), default=0)) for r in case.sent if r.attempts]
    for request in case.sent:
        for attempt in request.expired:
            positions = case.positions(request)
            # What was first sent after this attempt ended cannot be why the answer had expired.
            newest = max(position for start, position in ends if start <= attempt.end)
            if positions and newest - min(positions) < case.stored_answers:
                detail = (
                    f"at most {newest - min(positions)} newer records, and {case.stored_answers} answers are stored"
                )
                yield case.violation(Kind.EXPIRED, request.key, detail)


def _misuse(case: _Case) -> Iterator[Violation]:
    for request in case.misused:
        statuses = [attempt.status for attempt in request.attempts]
        if CONFLICT not in statuses or any(status in (200, 410) for status in statuses):
            detail = f"a different request under a used key was answered with {statuses}, not 409"
            yield case.violation(Kind.MISUSE, request.key, detail)


def _silence(case: _Case) -> Iterator[Violation]:
    for request in case.sent:
        if not request.finished:
            statuses = [attempt.status or attempt.detail for attempt in request.attempts]
            yield case.violation(Kind.UNANSWERED, request.key, f"no acknowledgement: {statuses[-5:]}")
    for request in (*case.sent, *case.misused):
        for attempt in request.attempts:
            down = any(attempt.start <= end and start <= attempt.end for start, end in case.outages)
            # The client waits longer than the service may take to answer with an error.
            if attempt.status is None and "ReadTimeout" in attempt.detail and not down:
                took = attempt.end - attempt.start
                yield case.violation(Kind.HANG, request.key, f"no response of any kind within {took:.0f} s")


# The end.


def _end(case: _Case, final: Final | None, expected: Replay | None) -> Iterator[Violation]:
    if final is None or expected is None:
        if case.journal:
            yield case.violation(Kind.LOST, None, f"the stream with {len(case.journal)} records is not in the store")
        return
    highest = max((entry.position for entry in case.journal), default=-1)
    if final.position != highest + 1:
        detail = f"the stream ends at position {final.position}, its journal at {highest + 1}"
        yield case.violation(Kind.LOST if final.position <= highest else Kind.GAP, None, detail)
    elif final.digest != expected.digest:
        detail = f"state {final.digest[:12]}, after an undisturbed replay of the journal {expected.digest[:12]}"
        yield case.violation(Kind.STATE, None, detail)
    observes = [entry for entry in case.journal if entry.observe]
    for entry, answer in zip(observes, expected.answers, strict=False):
        if different := _different(answer, entry.answer):
            yield case.violation(Kind.ANSWER, entry.key, f"row {entry.row} differs from the replay: {different}")
            return


def _different(wanted: Mapping[str, Any], given: Mapping[str, Any]) -> str:
    """Name the fields that differ to the bit; nothing if none does. Fields beyond the wanted ones do not matter."""
    names = [name for name in wanted if repr(wanted[name]) != repr(given.get(name, ...))]
    return ", ".join(f"{name} is {given.get(name, 'missing')!r} instead of {wanted[name]!r}" for name in names)


# How much a run was disturbed.


@dataclass(frozen=True, slots=True)
class Stress:
    """What happened in a run. A run that was not disturbed proves nothing, so `missing` must be empty.

    Attributes:
        faults: injected by the rig.
        retries: attempts after one that failed.
        repeated_keys: requests that the service recognized as already applied.
        expired: requests of which the answer was no longer stored.
        misuses: keys that were used again for another request.
        fences: streams that were taken from a worker which had not released them.
        guard_events: how often a guard acted.
    """

    faults: int
    retries: int
    repeated_keys: int
    expired: int
    misuses: int
    fences: int
    guard_events: int

    @classmethod
    def of(cls, requests: Sequence[Request], faults: int, fences: int, replays: Mapping[str, Replay]) -> "Stress":
        """Count from the histories; faults, fences and guard events come from elsewhere."""
        failed = [[a.status not in (200, 409, 410) for a in request.attempts[:-1]] for request in requests]
        repeated = [any(a["repeated"] for t in request.acknowledged for a in t.answers) for request in requests]
        return cls(
            faults,
            sum(map(sum, failed)),
            sum(repeated),
            sum(bool(request.expired) for request in requests),
            sum(request.misuse for request in requests),
            fences,
            sum(run.guard_events for run in replays.values()),
        )

    def missing(self, *required: str) -> list[str]:
        """Return which of the named counts are zero."""
        return [name for name in required if not getattr(self, name)]

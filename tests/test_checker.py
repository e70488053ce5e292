"""The checker: it finds each kind of violation, planted alone into an honest run, and nothing in the honest run.

Places are drawn from seeds that pytest prints in the name of each test.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np
import pytest

from conftest import random_stream
from made_service import LIMITS, acquired
from protodcs import StreamDCSConfig
from protodcs.core.prototypes import Prototypes
from protodcs.serve.guard import GuardSettings
from protodcs.serve.stream.live_stream import LiveStream, StreamSpec
from protodcs.serve.stream.records import Kind as RecordKind
from service import checker
from service.checker import Final, Kind, Replay, Stress, Violation, check, state_digest
from service.history import CONFLICT, GONE, OK, Attempt, Request
from service.journal import Entry, journal_from_answers

STREAMS, REQUESTS = 3, 30
STORED_ANSWERS = 10


@dataclass
class Case:
    """A run as the checker gets it."""

    rng: random.Random
    requests: dict[str, list[Request]] = field(default_factory=dict)
    journals: dict[str, list[Entry]] = field(default_factory=dict)
    finals: dict[str, Final] = field(default_factory=dict)
    replays: dict[str, Replay] = field(default_factory=dict)

    def violations(self, *outages: tuple[float, float]) -> list[Violation]:
        requests = [request for sent in self.requests.values() for request in sent]
        self.rng.shuffle(requests)
        return check(requests, self.journals, self.finals, self.replays, STORED_ANSWERS, outages)

    def stream(self) -> str:
        return self.rng.choice(list(self.requests))

    def request(self, fits: Callable[[Request], bool] = lambda _: True) -> Request:
        """Return a request that is no misuse."""
        sent = self.requests[self.stream()]
        return self.rng.choice([request for request in sent if not request.misuse and fits(request)])

    def entry(self, request: Request, row: int = 0) -> Entry:
        return next(e for e in self.journals[request.stream] if (e.key, e.row) == (request.key, row))

    def change(self, entry: Entry, stream: str, **changes: object) -> None:
        journal = self.journals[stream]
        journal[journal.index(entry)] = replace(entry, **changes)

    def append(self, stream: str, **changes: object) -> None:
        """Append a copy of the last record, changed, and let the final state follow."""
        journal, run = self.journals[stream], self.replays[stream]
        journal.append(replace(journal[-1], position=len(journal), **changes))
        self.finals[stream] = replace(self.finals[stream], position=len(journal))
        self.replays[stream] = replace(run, answers=[entry.answer for entry in journal])


def honest(seed: int) -> Case:
    """Return a run without a violation, in which much happened."""
    case = Case(random.Random(seed))
    for number in range(STREAMS):
        stream = f"stream-{number}"
        _honest_stream(case, stream)
        journal = case.journals[stream]
        case.finals[stream] = Final(len(journal), "digest")
        case.replays[stream] = Replay([entry.answer for entry in journal], "digest", 1)
    return case


def _honest_stream(case: Case, stream: str) -> None:
    rng, now, epoch = case.rng, 0.0, 1
    sent, journal, numbers = [], [], [0, 0]
    for _ in range(REQUESTS):
        producer = rng.randrange(2)
        key, rows = f"{stream}~{producer}~{numbers[producer]}", rng.choice((1, 1, 2, 7))
        payloads = [rng.randbytes(8) for _ in range(rows)]
        request = Request(stream, producer, numbers[producer], key, rows, payloads)
        numbers[producer] += 1
        epoch += rng.random() < 0.2
        answers = []
        for row, payload in enumerate(payloads):
            decision = {"known": rng.random() < 0.5, "score": rng.random(), "sequence": len(journal)}
            journal.append(Entry(len(journal), epoch, True, key, row, payload, decision))
            answers.append({**decision, "position": journal[-1].position, "epoch": epoch, "repeated": False})
        failures = rng.choice((0, 0, 1, 2))
        for status in rng.choices((503, None), k=failures):
            request.attempts.append(Attempt(now, now + 1, status, detail="ConnectError"))
            now += 1
        # An attempt that failed for the client may have succeeded in the service.
        known = bool(failures) and rng.random() < 0.5
        request.attempts.append(Attempt(now, now + 1, OK, _repeated(answers, known)))
        now += 1
        sent.append(request)
        now = _repetitions(rng, sent, journal, now)
    case.requests[stream], case.journals[stream] = sent, journal


def _repetitions(rng: random.Random, sent: list[Request], journal: list[Entry], now: float) -> float:
    """Send an earlier request again, or misuse its key."""
    old = rng.choice([request for request in sent if not request.misuse])
    first = old.acknowledged[0].answers
    if rng.random() < 0.4:
        expired = len(journal) - 1 - first[0]["position"] >= STORED_ANSWERS
        old.attempts.append(Attempt(now, now + 1, GONE) if expired else Attempt(now, now + 1, OK, _repeated(first)))
    elif rng.random() < 0.2:
        misuse = replace(old, payloads=[b"other"], rows=1, misuse=True, attempts=[])
        misuse.attempts = [Attempt(now, now + 1, status) for status in (503, CONFLICT)]
        sent.append(misuse)
    return now + 1


def _repeated(answers, repeated=True):
    return [{**answer, "repeated": repeated} for answer in answers]


def retell(request: Request, **changes: object) -> None:
    """Change the first row in every answer to a request."""
    request.attempts = [
        replace(attempt, answers=[{**attempt.answers[0], **changes}, *attempt.answers[1:]])
        if attempt.answers
        else attempt
        for attempt in request.attempts
    ]


def repeat(request: Request, **changes: object) -> None:
    """Answer a request once more, with changes to the first row."""
    answers = _repeated(request.acknowledged[0].answers)
    end = request.attempts[-1].end
    request.attempts.append(Attempt(end, end, OK, [{**answers[0], **changes}, *answers[1:]]))


# Each plants one violation and returns the stream and the key at which it must be found; None for a whole stream.


def last_records_are_gone(case):
    stream = case.stream()
    gone = case.journals[stream].pop()
    case.finals[stream] = replace(case.finals[stream], position=len(case.journals[stream]))
    return stream, gone.key


def stream_is_gone(case):
    stream = case.stream()
    del case.finals[stream]
    return stream, None


def store_ends_before_its_journal(case):
    stream = case.stream()
    case.finals[stream] = replace(case.finals[stream], position=case.finals[stream].position - 1)
    return stream, None


def answer_names_another_position(case):
    request = case.request()
    retell(request, position=len(case.journals[request.stream]) + 5)
    return request.stream, request.key


def request_is_applied_again(case):
    request = case.request()
    entry = case.entry(request)
    case.append(request.stream, key=entry.key, row=0, payload=entry.payload, answer=entry.answer)
    return request.stream, request.key


def request_is_new_twice(case):
    request = case.request()
    retell(request, repeated=False)
    repeat(request, repeated=False)
    return request.stream, request.key


def requests_of_a_producer_are_swapped(case):
    stream = case.stream()
    ones = [r for r in case.requests[stream] if r.rows == 1 and not (r.misuse or r.expired) and r.producer == 0]
    at = case.rng.randrange(len(ones) - 1)
    _swap(case, ones[at], 0, ones[at + 1], 0)
    return stream, ones[at + 1].key


def rows_of_a_request_are_swapped(case):
    request = case.request(lambda request: request.rows == 7)
    _swap(case, request, 2, request, 4)
    return request.stream, request.key


def _swap(case, one, row, other, other_row):
    """Exchange two rows in the journal and in all answers."""
    first, second = case.entry(one, row), case.entry(other, other_row)
    for request, at, here, there in ((one, row, first, second), (other, other_row, second, first)):
        case.change(here, one.stream, key=there.key, row=there.row, payload=there.payload)
        for number, attempt in enumerate(request.attempts):
            answers = list(attempt.answers)
            if answers:
                answers[at] = {**there.answer, "position": there.position, "epoch": there.epoch, "repeated": True}
                request.attempts[number] = replace(attempt, answers=answers)


def positions_leave_a_gap(case):
    stream = case.stream()
    case.journals[stream] = journal = [
        replace(e, position=e.position + (e.position > 9)) for e in case.journals[stream]
    ]
    case.finals[stream] = replace(case.finals[stream], position=len(journal) + 1)
    for request in case.requests[stream]:
        request.attempts = [
            replace(a, answers=[{**r, "position": r["position"] + (r["position"] > 9)} for r in a.answers])
            for a in request.attempts
        ]
    return stream, journal[10].key


def two_records_share_a_position(case):
    stream = case.stream()
    entry = case.rng.choice(case.journals[stream])
    case.journals[stream].append(replace(entry, epoch=case.journals[stream][-1].epoch))
    return stream, entry.key


def epoch_decreases(case):
    stream = case.stream()
    journal = case.journals[stream]
    request = next(r for r in case.requests[stream] if r.key == journal[-1].key)
    case.change(journal[-1], stream, epoch=0)
    for number, attempt in enumerate(request.attempts):
        if attempt.answers:
            answers = [*attempt.answers[:-1], {**attempt.answers[-1], "epoch": 0}]
            request.attempts[number] = replace(attempt, answers=answers)
    return stream, request.key


def record_of_nobody(case):
    stream = case.stream()
    case.append(stream, key="nobody", row=0)
    return stream, "nobody"


def freeze_of_nobody(case):
    stream = case.stream()
    case.append(stream, key="frozen", observe=False)
    return stream, "frozen"


def record_holds_other_content(case):
    request = case.request()
    case.change(case.entry(request), request.stream, payload=b"other")
    return request.stream, request.key


def answer_differs_in_the_last_bit(case):
    request = case.request()
    retell(request, score=float(np.nextafter(case.entry(request).answer["score"], 2.0)))
    return request.stream, request.key


def answer_lacks_a_field(case):
    request = case.request()
    for attempt in request.acknowledged:
        del attempt.answers[0]["known"]
    return request.stream, request.key


def answers_are_missing(case):
    request = case.request(lambda request: request.rows > 1)
    request.attempts = [replace(attempt, answers=attempt.answers[:-1]) for attempt in request.attempts]
    return request.stream, request.key


def repeated_answer_differs(case):
    request = case.request()
    repeat(request, score=0.5)
    return request.stream, request.key


def journal_differs_from_the_replay(case):
    stream = case.stream()
    answers = list(case.replays[stream].answers)
    at = case.rng.randrange(len(answers))
    answers[at] = {**answers[at], "known": not answers[at]["known"]}
    case.replays[stream] = replace(case.replays[stream], answers=answers)
    return stream, case.journals[stream][at].key


def answer_expires_too_early(case):
    stream = case.stream()
    last = [request for request in case.requests[stream] if not request.misuse][-1]
    end = last.attempts[0].end
    last.attempts.append(Attempt(end, end, GONE))
    return stream, last.key


def reused_key_is_accepted(case):
    request = case.request()
    misuse = replace(request, payloads=[b"more"], rows=1, misuse=True)
    misuse.attempts = [Attempt(0, 1, OK, _repeated(request.acknowledged[0].answers))]
    case.requests[request.stream].append(misuse)
    return request.stream, request.key


def reused_key_is_only_ignored(case):
    request = case.request()
    case.requests[request.stream].append(replace(request, misuse=True, attempts=[Attempt(0, 1, 503)]))
    return request.stream, request.key


def request_is_never_answered(case):
    request = case.request()
    request.attempts = [Attempt(0, 1, 503)]
    return request.stream, request.key


def attempt_gets_no_response(case):
    request = case.request()
    request.attempts.insert(0, Attempt(0, 30, None, detail="ReadTimeout('timed out')"))
    return request.stream, request.key


def final_state_differs(case):
    stream = case.stream()
    case.finals[stream] = replace(case.finals[stream], digest="another")
    return stream, None


PLANTED = {
    last_records_are_gone: Kind.LOST,
    stream_is_gone: Kind.LOST,
    store_ends_before_its_journal: Kind.LOST,
    answer_names_another_position: Kind.LOST,
    request_is_applied_again: Kind.DOUBLE,
    request_is_new_twice: Kind.DOUBLE,
    requests_of_a_producer_are_swapped: Kind.REORDER,
    rows_of_a_request_are_swapped: Kind.REORDER,
    positions_leave_a_gap: Kind.GAP,
    two_records_share_a_position: Kind.FORK,
    epoch_decreases: Kind.STALE,
    record_of_nobody: Kind.FOREIGN,
    freeze_of_nobody: Kind.FOREIGN,
    record_holds_other_content: Kind.PAYLOAD,
    answer_differs_in_the_last_bit: Kind.ANSWER,
    answer_lacks_a_field: Kind.ANSWER,
    answers_are_missing: Kind.ANSWER,
    repeated_answer_differs: Kind.ANSWER,
    journal_differs_from_the_replay: Kind.ANSWER,
    answer_expires_too_early: Kind.EXPIRED,
    reused_key_is_accepted: Kind.MISUSE,
    reused_key_is_only_ignored: Kind.MISUSE,
    request_is_never_answered: Kind.UNANSWERED,
    attempt_gets_no_response: Kind.HANG,
    final_state_differs: Kind.STATE,
}
# A second record at a position is also a second record of its key.
ALSO = {two_records_share_a_position: {Kind.DOUBLE}}
SEEDS = range(6)


@pytest.mark.parametrize("seed", SEEDS)
def test_an_honest_run_has_no_violation(seed):
    case = honest(seed)
    assert case.violations() == []
    requests = [request for sent in case.requests.values() for request in sent]
    stress = Stress.of(requests, 1, 1, case.replays)
    assert not stress.missing("retries", "repeated_keys", "expired", "misuses", "guard_events"), stress


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("plant", PLANTED, ids=lambda plant: plant.__name__)
def test_a_planted_violation_is_found_at_its_place_and_no_other(plant, seed):
    case = honest(seed)
    stream, key = plant(case)
    found = case.violations()
    kinds = {violation.kind for violation in found}
    assert PLANTED[plant] in kinds
    assert kinds <= {PLANTED[plant], *ALSO.get(plant, ())}, found
    assert {violation.stream for violation in found} == {stream}
    assert key in {violation.key for violation in found}
    assert all(stream in str(violation) and str(violation.key or "") in str(violation) for violation in found)


def test_an_attempt_without_a_response_is_fine_while_the_service_is_down():
    case = honest(0)
    attempt_gets_no_response(case)
    assert case.violations((29.0, 40.0)) == []
    assert {violation.kind for violation in case.violations((31.0, 40.0))} == {Kind.HANG}


def test_every_kind_of_violation_is_planted():
    # The test of a whole run reports a client program that failed: the checker does not see it.
    assert set(PLANTED.values()) == set(Kind) - {Kind.PROGRAM}


def test_a_run_without_stress_is_reported():
    calm = Stress(faults=3, retries=0, repeated_keys=1, expired=0, misuses=1, fences=0, guard_events=1)
    assert calm.missing("faults", "retries", "repeated_keys", "fences") == ["retries", "fences"]


@pytest.mark.parametrize("seed", SEEDS)
def test_a_journal_can_be_built_from_the_answers(seed):
    case = honest(seed)
    for stream, requests in case.requests.items():
        assert journal_from_answers(requests) == case.journals[stream]


def test_the_replay_is_what_the_service_computes_with_guard_and_snapshots():
    """The replay has code of its own for the guard, so that a mistake of the service does not hide in it."""
    rows, features, _ = random_stream(classes=12, width=32, samples=700, seed=1)
    prototypes = Prototypes(rows)
    settings = {"window": 32, "keep_windows": 1, "freeze_windows": 2}
    spec = StreamSpec(
        method="streamdcs",
        config=StreamDCSConfig().model_dump(),
        classes=[str(number) for number in range(12)],
        prototypes=prototypes.fingerprint,
        guard=GuardSettings(**settings, duplicate_threshold=0.926),
    )
    live, start = LiveStream(acquired(spec.pack()), prototypes, LIMITS), 0
    payloads = [feature.astype("<f4").tobytes() for feature in features]
    answers = []
    for number, payload in enumerate(payloads):
        answers.append(live.change(RecordKind.OBSERVE, f"key-{number}", payload, 0.0).answer)
        if number % 100 == 50:
            start = live.position
            live = LiveStream(acquired(spec.pack(), live.checkpoint("s"), start), prototypes, LIMITS)
    run = checker.replay(spec, prototypes, payloads)
    assert run.digest == state_digest(live.engine, live.guard)
    assert run.answers == [checker.shown(answer) for answer in answers]
    assert run.guard_events > 1
    assert checker.replay(spec, prototypes, payloads[::-1]).digest != run.digest

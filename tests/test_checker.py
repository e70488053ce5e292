"""The checker of the service: each fault, planted alone into a history without one, is found and called by its name.

Places are drawn from seeds that pytest prints in the name of each test.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np
import pytest

from conftest import random_stream
from protodcs import ProtoDCS
from service.checker import Expected, Fault, Final, Kind, check, digest_of, reference
from service.history import Answer, Attempt, Outcome, Request, key_of

STREAMS, SAMPLES = 4, 25
DEADLINE, SLACK = 2.0, 0.5
PROTOTYPES, FEATURES, _ = random_stream(classes=5, width=16, samples=STREAMS * SAMPLES, seed=2)
LOAD = {f"stream-{number}": rows for number, rows in enumerate(np.split(FEATURES, STREAMS))}


@pytest.fixture(scope="module")
def undisturbed():
    return reference(LOAD, lambda stream: ProtoDCS(PROTOTYPES))


@dataclass
class Case:
    """A run as the checker is given it."""

    rng: random.Random
    reference: dict[str, Expected]
    history: dict[str, list[Request]] = field(default_factory=dict)
    finals: dict[str, Final] = field(default_factory=dict)

    def faults(self) -> list[Fault]:
        intended = {stream: [key_of(stream, index) for index in range(SAMPLES)] for stream in LOAD}
        # Streams go on side by side, so their requests stand in the history in any order.
        requests = [request for stream in self.history.values() for request in stream]
        self.rng.shuffle(requests)
        return check(requests, intended, self.finals, self.reference, DEADLINE, SLACK)

    def stream(self) -> str:
        return self.rng.choice(list(self.history))

    def request(self, first: int = 0, last: int = SAMPLES - 1) -> Request:
        return self.history[self.stream()][self.rng.randint(first, last)]


def honest(seed: int, expected: dict[str, Expected]) -> Case:
    """A run without a fault, but with all that may happen on the way."""
    case = Case(random.Random(seed), expected)
    for stream in LOAD:
        case.history[stream] = _honest_stream(case.rng, stream, expected[stream])
        case.finals[stream] = Final(SAMPLES, SAMPLES, expected[stream].digest)
    return case


def _honest_stream(rng: random.Random, stream: str, expected: Expected) -> list[Request]:
    now, epoch, requests = rng.uniform(0, 100), rng.randint(1, 5), []
    for index, decision in enumerate(expected.decisions):
        epoch += rng.random() < 0.2
        request = Request(stream, key_of(stream, index), index)
        answer = Answer(index, epoch, False, dict(decision))
        outcomes = rng.choices([Outcome.REFUSED, Outcome.BROKEN, Outcome.TIMED_OUT], k=rng.choice([0, 0, 0, 1, 3]))
        # A try that failed for the client may have succeeded in the service, which then says that it repeats itself.
        answers = [replace(answer, repeated=bool(outcomes) and rng.random() < 0.5)]
        answers += [replace(answer, repeated=True)] * rng.choice([0, 0, 0, 1, 2])
        tries = [*((outcome, None) for outcome in outcomes), *((Outcome.ACKNOWLEDGED, told) for told in answers)]
        for outcome, told in tries:
            end = now + (DEADLINE if outcome is Outcome.TIMED_OUT else rng.uniform(0, DEADLINE))
            request.attempts.append(Attempt(now, end, outcome, told))
            now = end + rng.uniform(0, 0.2)
        requests.append(request)
    return requests


def retell(request: Request, change: Callable[[Answer], Answer]) -> None:
    """Let every answer to a request have been another one."""
    request.attempts = [
        attempt if attempt.answer is None else replace(attempt, answer=change(attempt.answer))
        for attempt in request.attempts
    ]


def repeat(request: Request, **changes: object) -> None:
    """Let a request have been answered once more, with these changes to its first answer."""
    last, answer = request.attempts[-1], replace(request.answers[0], repeated=True)
    # Within the moment the last one ended, so that it stays before the next request.
    request.attempts.append(Attempt(last.end, last.end, Outcome.ACKNOWLEDGED, replace(answer, **changes)))


def changed(decision: dict[str, object], rng: random.Random) -> dict[str, object]:
    """A decision with one field changed as little as it can be."""
    name = rng.choice(list(decision))
    value = decision[name]
    if isinstance(value, bool):
        value = not value
    elif isinstance(value, float):
        value = float(np.nextafter(value, 2.0))
    elif isinstance(value, int):
        value += 1
    else:
        value = "another" if value is None else None
    return {**decision, name: value}


def state_after(rows: np.ndarray) -> str:
    engine = ProtoDCS(PROTOTYPES)
    for row in rows:
        engine.observe(row)
    return digest_of(engine.snapshot())


# Each plants one fault and returns the stream and key at which it must be found; the key is None for a whole stream.


def last_record_is_gone(case):
    stream = case.stream()
    case.finals[stream] = Final(SAMPLES - 1, SAMPLES - 1, state_after(LOAD[stream][:-1]))
    return stream, key_of(stream, SAMPLES - 1)


def sample_is_gone_though_its_record_is_there(case):
    stream, gone = case.stream(), case.rng.randrange(SAMPLES)
    case.finals[stream] = Final(SAMPLES, SAMPLES - 1, state_after(np.delete(LOAD[stream], gone, axis=0)))
    return stream, None


def stream_is_gone(case):
    stream = case.stream()
    del case.finals[stream]
    return stream, None


def sample_is_applied_twice_and_nobody_is_told(case):
    stream, twice = case.stream(), case.rng.randrange(SAMPLES)
    rows = np.insert(LOAD[stream], twice, LOAD[stream][twice], axis=0)
    case.finals[stream] = Final(SAMPLES + 1, SAMPLES + 1, state_after(rows))
    return stream, None


def key_has_two_positions(case):
    request = case.request()
    newest = max(other.answers[0].epoch for other in case.history[request.stream])
    repeat(request, position=SAMPLES, epoch=newest)
    case.finals[request.stream] = replace(case.finals[request.stream], position=SAMPLES + 1)
    return request.stream, request.key


def repeated_answer_differs(case):
    request = case.request()
    repeat(request, decision=changed(request.answers[0].decision, case.rng))
    return request.stream, request.key


def key_is_new_twice(case):
    request = case.request()
    retell(request, lambda answer: replace(answer, repeated=False))
    repeat(request, repeated=False)
    return request.stream, request.key


def two_keys_are_swapped(case):
    second = case.request(first=1)
    first = case.history[second.stream][second.index - 1]
    one, other = ((r.answers[0].position, r.answers[0].epoch) for r in (first, second))
    retell(first, lambda answer: replace(answer, position=other[0], epoch=other[1]))
    retell(second, lambda answer: replace(answer, position=one[0], epoch=one[1]))
    return second.stream, second.key


def record_that_nobody_sent(case):
    stream, hole = case.stream(), case.rng.randrange(SAMPLES)
    for request in case.history[stream][hole:]:
        retell(request, lambda answer: replace(answer, position=answer.position + 1))
    case.finals[stream] = replace(case.finals[stream], position=SAMPLES + 1)
    return stream, None


def record_that_nobody_sent_at_the_end(case):
    stream = case.stream()
    case.finals[stream] = replace(case.finals[stream], position=SAMPLES + 1)
    return stream, None


def epoch_goes_down(case):
    request = case.request(first=1)
    before = case.history[request.stream][request.index - 1].answers[0].epoch
    retell(request, lambda answer: replace(answer, epoch=before - 1))
    return request.stream, request.key


def two_epochs_claim_one_position(case):
    request = case.request()
    repeat(request, epoch=request.answers[0].epoch + case.rng.choice([-1, 1]))
    return request.stream, request.key


def attempt_takes_too_long(case):
    request = case.request()
    number = case.rng.randrange(len(request.attempts))
    # Everything later in the stream moves back by as much, as it would have.
    late = DEADLINE + SLACK + case.rng.uniform(0.01, 5)
    hanging = request.attempts[number]
    request.attempts[number] = replace(hanging, end=hanging.start + late)
    request.attempts[number + 1 :] = [_later(attempt, late) for attempt in request.attempts[number + 1 :]]
    for other in case.history[request.stream][request.index + 1 :]:
        other.attempts = [_later(attempt, late) for attempt in other.attempts]
    return request.stream, request.key


def _later(attempt: Attempt, seconds: float) -> Attempt:
    return replace(attempt, start=attempt.start + seconds, end=attempt.end + seconds)


def last_key_is_never_answered(case):
    request = case.history[case.stream()][-1]
    request.attempts = [replace(request.attempts[0], outcome=Outcome.TIMED_OUT, answer=None)]
    return request.stream, request.key


def last_key_is_never_sent(case):
    request = case.history[case.stream()].pop()
    case.finals[request.stream] = Final(SAMPLES - 1, SAMPLES - 1, state_after(LOAD[request.stream][:-1]))
    return request.stream, request.key


def final_state_has_one_other_sample(case):
    stream, other = case.stream(), case.rng.randrange(SAMPLES)
    rows = LOAD[stream].copy()
    rows[other] = rows[other][::-1]
    case.finals[stream] = Final(SAMPLES, SAMPLES, state_after(rows))
    return stream, None


def answer_differs_in_one_field(case):
    request = case.request()
    decision = changed(request.answers[0].decision, case.rng)
    retell(request, lambda answer: replace(answer, decision=decision))
    return request.stream, request.key


def answer_lacks_a_field(case):
    request = case.request()
    missing = case.rng.choice([name for name in request.answers[0].decision if name != "sequence"])
    kept = {name: value for name, value in request.answers[0].decision.items() if name != missing}
    retell(request, lambda answer: replace(answer, decision=kept))
    return request.stream, request.key


def client_does_not_wait(case):
    request = case.request(first=1)
    before = case.history[request.stream][request.index - 1]
    request.attempts[0] = replace(request.attempts[0], start=before.acknowledged_at - 0.001, end=before.acknowledged_at)
    return request.stream, request.key


def key_that_was_not_to_be_sent(case):
    stream = case.stream()
    case.history[stream].append(Request(stream, key_of(stream, SAMPLES), SAMPLES))
    return stream, key_of(stream, SAMPLES)


PLANTED = {
    last_record_is_gone: Kind.LOST,
    sample_is_gone_though_its_record_is_there: Kind.LOST,
    stream_is_gone: Kind.LOST,
    sample_is_applied_twice_and_nobody_is_told: Kind.DOUBLE,
    key_has_two_positions: Kind.DOUBLE,
    repeated_answer_differs: Kind.DOUBLE,
    key_is_new_twice: Kind.DOUBLE,
    two_keys_are_swapped: Kind.REORDER,
    record_that_nobody_sent: Kind.GAP,
    record_that_nobody_sent_at_the_end: Kind.GAP,
    epoch_goes_down: Kind.STALE,
    two_epochs_claim_one_position: Kind.STALE,
    attempt_takes_too_long: Kind.HANG,
    last_key_is_never_answered: Kind.UNANSWERED,
    last_key_is_never_sent: Kind.UNANSWERED,
    final_state_has_one_other_sample: Kind.STATE,
    answer_differs_in_one_field: Kind.ANSWER,
    answer_lacks_a_field: Kind.ANSWER,
    client_does_not_wait: Kind.HISTORY,
    key_that_was_not_to_be_sent: Kind.HISTORY,
}
SEEDS = range(6)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_run_without_a_fault_has_none_whatever_happened_on_the_way(seed, undisturbed):
    case = honest(seed, undisturbed)
    assert case.faults() == []
    requests = [request for stream in case.history.values() for request in stream]
    assert {attempt.outcome for request in requests for attempt in request.attempts} == set(Outcome)
    assert any(len(request.answers) > 1 for request in requests)
    assert any(request.answers[0].repeated for request in requests)
    assert any(stream[-1].answers[0].epoch > stream[0].answers[0].epoch for stream in case.history.values())


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("plant", PLANTED, ids=lambda plant: plant.__name__)
def test_a_planted_fault_is_found_where_it_is_and_no_other(plant, seed, undisturbed):
    case = honest(seed, undisturbed)
    stream, key = plant(case)
    faults = case.faults()
    assert {fault.kind for fault in faults} == {PLANTED[plant]}
    assert {fault.stream for fault in faults} == {stream}
    assert key in {fault.key for fault in faults}
    assert all(stream in str(fault) and str(fault.key or "") in str(fault) for fault in faults)


def test_every_kind_of_fault_is_planted():
    assert set(PLANTED.values()) == set(Kind)


# Faults as they come in life, where one thing that goes wrong shows in more than one way.


def taken(case, stream, order, positions, epochs):
    """Let the engine of a stream have seen its features in this order, and its keys have been told of these places.

    `order` has an entry per sample that the final engine saw; a key's answer is the last the engine gave for it.
    """
    engine, answers = ProtoDCS(PROTOTYPES), {}
    for index in order:
        answers[index] = engine.observe(LOAD[stream][index]).to_dict()
        del answers[index]["scores"]
    case.finals[stream] = Final(len(order), len(order), digest_of(engine.snapshot()))
    for index, request in enumerate(case.history[stream]):
        decision = answers.get(index, request.answers[0].decision)
        place = {"position": positions[index], "epoch": epochs[index]}
        retell(request, lambda answer, decision=decision, place=place: replace(answer, decision=decision, **place))


@pytest.mark.parametrize("seed", SEEDS)
def test_an_owner_that_dies_with_what_it_had_acknowledged_is_found(seed, undisturbed):
    """It answered before its record was durable: the next owner gives the position away again."""
    case = honest(seed, undisturbed)
    stream, lost = case.stream(), case.rng.randrange(SAMPLES - 1)
    order = [index for index in range(SAMPLES) if index != lost]
    positions = [index - (index > lost) for index in range(SAMPLES)]
    taken(case, stream, order, positions, [1 + (index > lost) for index in range(SAMPLES)])
    assert {fault.kind for fault in case.faults()} >= {Kind.LOST, Kind.STALE}


@pytest.mark.parametrize("seed", SEEDS)
def test_an_owner_that_loses_a_record_and_keeps_its_epoch_is_found(seed, undisturbed):
    case = honest(seed, undisturbed)
    stream, lost = case.stream(), case.rng.randrange(SAMPLES - 1)
    order = [index for index in range(SAMPLES) if index != lost]
    taken(case, stream, order, [index - (index > lost) for index in range(SAMPLES)], [1] * SAMPLES)
    kinds = {fault.kind for fault in case.faults()}
    assert Kind.LOST in kinds
    assert Kind.STALE not in kinds


@pytest.mark.parametrize("seed", SEEDS)
def test_a_retry_that_is_applied_again_is_found(seed, undisturbed):
    """The answer to the first application was lost on the way, so the client knows of one position only."""
    case = honest(seed, undisturbed)
    stream, twice = case.stream(), case.rng.randrange(SAMPLES)
    order = sorted([*range(SAMPLES), twice])
    taken(case, stream, order, [index + (index >= twice) for index in range(SAMPLES)], [1] * SAMPLES)
    assert {fault.kind for fault in case.faults()} >= {Kind.DOUBLE, Kind.GAP, Kind.ANSWER}


@pytest.mark.parametrize("seed", SEEDS)
def test_a_loss_and_a_repetition_that_make_up_for_each_other_are_found(seed, undisturbed):
    """All counts are right at the end, and nobody was told anything that was not so."""
    case = honest(seed, undisturbed)
    stream = case.stream()
    lost, twice = case.rng.sample(range(SAMPLES), 2)
    rows = LOAD[stream][sorted([*(index for index in range(SAMPLES) if index != lost), twice])]
    case.finals[stream] = Final(SAMPLES, SAMPLES, state_after(rows))
    assert {fault.kind for fault in case.faults()} == {Kind.STATE}

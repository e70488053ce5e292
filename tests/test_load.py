"""Load and checker together, over real HTTP: they find every bug of a fake service, and none in an honest one."""

import random
import threading
import time

import httpx
import pytest

from conftest import random_stream
from protodcs.errors import ServiceError
from service.checker import Kind, Stress, check
from service.fake import Bug, serving
from service.history import Attempt, History, Request
from service.load import Habits, Load, feature_programs, image_programs, request_sizes

STREAMS, ROWS = 4, 150
# The client's time limit for an attempt, in seconds; the fake's late answers are later.
TIMEOUT, LATE = 1.0, 1.5
STORED_ANSWERS = 40
_, FEATURES, _ = random_stream(classes=5, width=16, samples=400, seed=11)


def programs(seed):
    rng = random.Random(seed)
    planned = [p for n in range(STREAMS) for p in feature_programs(rng, f"features-{n}", FEATURES, ROWS, 64)]
    images = [b"image %d" % number for number in range(20)]
    return planned + image_programs(rng, "images-0", images, 40)


def run(bug, give_up=60.0, timeout=TIMEOUT):
    """Run a load against a fake; returns the load, the fake and all violations."""
    planned = programs(5)
    with serving(bug, 3, LATE, STORED_ANSWERS) as (address, fake):
        creations = {program.stream: {"prototypes": FEATURES[:2]} for program in planned}
        habits = Habits(repeat_last=0.2, repeat_old=0.3, misuse=0.2)
        load = Load([address, address], creations, planned, timeout, give_up, seed=5, habits=habits)
        load.run()
        requests = load.history.requests
        violations = check(requests, fake.journals(), fake.finals(), fake.replays(), STORED_ANSWERS)
        return load, fake, violations


def not_hangs(violations):
    """The fake's late answers are hangs to the checker, as they are later than the client waits."""
    return [violation for violation in violations if violation.kind is not Kind.HANG]


def test_an_honest_service_that_refuses_is_late_and_changes_epochs_has_no_violation():
    load, fake, violations = run(Bug.NONE)
    assert load.errors == []
    assert not_hangs(violations) == []
    assert load.history.applied_rows == load.rows == sum(map(len, fake.journals().values()))
    stress = Stress.of(load.history.requests, 0, 0, fake.replays())
    assert not stress.missing("retries", "repeated_keys", "expired", "misuses"), stress


FOUND_AS = {
    Bug.LOSES: Kind.LOST,
    Bug.FORGETS_KEYS: Kind.DOUBLE,
    Bug.REVERSES_ROWS: Kind.REORDER,
    Bug.STALE: Kind.STALE,
    Bug.WRONG_ANSWER: Kind.ANSWER,
    Bug.ACCEPTS_REUSED_KEYS: Kind.MISUSE,
    Bug.EXPIRES: Kind.EXPIRED,
}


@pytest.mark.parametrize("bug", FOUND_AS, ids=lambda bug: bug.name)
def test_a_service_with_a_bug_is_found(bug):
    _, fake, violations = run(bug)
    assert fake.strikes
    kinds = {violation.kind for violation in not_hangs(violations)}
    assert FOUND_AS[bug] in kinds
    if bug in (Bug.STALE, Bug.EXPIRES):
        # The journal and all answers are consistent, so nothing else is wrong.
        assert kinds == {FOUND_AS[bug]}


def test_a_service_that_never_answers_is_found():
    load, fake, violations = run(Bug.SILENT, give_up=1.0, timeout=0.2)
    assert fake.strikes
    kinds = {violation.kind for violation in violations}
    assert {Kind.HANG, Kind.UNANSWERED} >= kinds >= {Kind.HANG}
    # A client gives up only if its retries are not answered either, which is rare.
    assert load.errors or Kind.UNANSWERED not in kinds
    assert all(isinstance(error, ServiceError) for _, error in load.errors)


def test_every_bug_is_tried():
    assert set(FOUND_AS) | {Bug.NONE, Bug.SILENT} == set(Bug)


@pytest.mark.parametrize("seed", range(5))
def test_request_sizes_are_mostly_small_and_sometimes_largest(seed):
    sizes = request_sizes(random.Random(seed), 30_000)
    assert sum(sizes) == 30_000
    assert min(sizes) == 1
    assert 512 < max(sizes) <= 1024
    assert sorted(sizes)[len(sizes) // 2] <= 8


def test_an_attempt_that_nobody_announced_is_an_error():
    history = History()
    history.begin(Request("s", 0, 0, "key", 1), b"body")
    history.add("s", "observe", "key", b"body", Attempt(0, 1, 503))
    with pytest.raises(KeyError):
        history.add("s", "observe", "key", b"other", Attempt(0, 1, 503))
    assert len(history.requests[0].attempts) == 1


def test_a_client_program_that_fails_is_reported():
    planned = programs(5)[:1]
    with serving(Bug.NONE, 0, LATE, STORED_ANSWERS) as (address, _):
        load = Load([address], {planned[0].stream: {"prototypes": FEATURES[:2]}}, planned, TIMEOUT, 0.2)
        load.creations, creations = {}, load.creations
        httpx.post(f"{address}/v1/streams", json={"id": next(iter(creations))})
    load.run()
    assert [type(error) for _, error in load.errors] == [ServiceError]


def test_stop_ends_programs_that_would_retry_for_long():
    planned = programs(5)[:1]
    with serving(Bug.NONE, 0, LATE, STORED_ANSWERS) as (address, _):
        pass
    load = Load([address], {}, planned, TIMEOUT, 600.0)
    running = threading.Thread(target=load.run, daemon=True)
    running.start()
    while not any(request.attempts for request in list(load.history.requests)):
        time.sleep(0.01)
    load.stop()
    running.join(60)
    assert not running.is_alive()
    assert len(load.errors) == 1

"""Client and checker together, over real HTTP: every bug of a fake service is found, and none in an honest one."""

import asyncio
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from conftest import random_stream
from protodcs import ProtoDCS
from service.checker import Kind, check, reference
from service.client import Repetitions, drive
from service.fake import Bug, serving
from service.history import History, Outcome, from_lines, key_of, to_lines

STREAMS, SAMPLES = 8, 40
# The client's time for an attempt; a late answer of the fake is later than that.
TIMEOUT, LATE = 0.5, 0.75
PROTOTYPES, FEATURES, _ = random_stream(classes=5, width=16, samples=STREAMS * SAMPLES, seed=11)
LOAD = {f"stream-{number}": rows for number, rows in enumerate(np.split(FEATURES, STREAMS))}
INTENDED = {stream: [key_of(stream, index) for index in range(SAMPLES)] for stream in LOAD}
# What a busy machine may add to an attempt, in seconds.
NOISE = 10.0


def birth(stream):
    return {"prototypes": PROTOTYPES.tolist()}


@pytest.fixture(scope="module")
def undisturbed():
    return reference(LOAD, lambda stream: ProtoDCS(PROTOTYPES))


async def load(address, history, give_up=20.0, share=0.15):
    await drive(
        address,
        LOAD,
        birth=birth,
        history=history,
        concurrency=8,
        timeout=TIMEOUT,
        give_up=give_up,
        repetitions=Repetitions(share=share),
        seed=5,
    )


def run(bug, history, seed=3, **options):
    """A whole run against the fake: what it holds in the end, and how often its bug struck."""
    with serving(bug, seed, LATE) as (address, fake):
        asyncio.run(load(address, history, **options))
        return fake.finals(), fake.buggy


@pytest.fixture(scope="module")
def honest(tmp_path_factory):
    """A run against the honest fake: its history, what is in its file, and what the fake held in the end."""
    path = tmp_path_factory.mktemp("honest") / "history.jsonl"
    with History(path) as history:
        finals, _ = run(Bug.NONE, history)
    return history, path.read_text(), finals


def test_an_honest_service_that_refuses_is_late_and_changes_owners_has_no_fault(honest, undisturbed):
    history, _, finals = honest
    assert check(history.requests, INTENDED, finals, undisturbed, deadline=TIMEOUT, slack=NOISE) == []
    # It was worth checking: every kind of trouble came up, and keys were repeated by need and on purpose.
    attempts = [attempt for request in history.requests for attempt in request.attempts]
    assert {Outcome.ACKNOWLEDGED, Outcome.REFUSED, Outcome.TIMED_OUT} <= {attempt.outcome for attempt in attempts}
    assert any(request.answers[0].repeated for request in history.requests)
    assert any(len(request.answers) > 1 for request in history.requests)
    assert max(request.answers[0].epoch for request in history.requests) > 1
    assert history.acknowledged == STREAMS * SAMPLES


FOUND_AS = {
    Bug.LOSES: Kind.LOST,
    Bug.TWICE: Kind.DOUBLE,
    Bug.REORDERS: Kind.REORDER,
    Bug.STALE: Kind.STALE,
    Bug.WRONG: Kind.ANSWER,
}


@pytest.mark.parametrize("bug", FOUND_AS, ids=lambda bug: bug.name)
def test_a_service_with_a_bug_is_found_out(bug, undisturbed):
    history = History()
    finals, struck = run(bug, history)
    assert struck
    faults = check(history.requests, INTENDED, finals, undisturbed, deadline=TIMEOUT, slack=NOISE)
    print(*faults, sep="\n")
    assert FOUND_AS[bug] in {fault.kind for fault in faults}
    if bug is Bug.WRONG:  # The state is as it should be, so nothing else is wrong.
        assert {fault.kind for fault in faults} == {Kind.ANSWER}


def test_a_service_that_takes_a_request_and_never_answers_is_found_out(undisturbed):
    history = History()
    finals, struck = run(Bug.SILENT, history, give_up=0.1)
    assert struck
    faults = check(history.requests, INTENDED, finals, undisturbed, deadline=TIMEOUT / 4, slack=TIMEOUT / 4)
    assert {fault.kind for fault in faults} == {Kind.HANG, Kind.UNANSWERED}


def test_a_service_that_is_not_there_is_given_up_and_every_key_is_unanswered(undisturbed):
    with serving(Bug.NONE, 0, LATE) as (address, _):
        pass
    history = History()
    asyncio.run(load(address, history, give_up=0.1))
    faults = check(history.requests, INTENDED, {}, undisturbed, deadline=TIMEOUT, slack=NOISE)
    assert {fault.kind for fault in faults} == {Kind.UNANSWERED}
    assert [fault.key for fault in faults] == [key for keys in INTENDED.values() for key in keys]


def test_a_history_comes_back_from_its_lines_as_it_was(honest):
    history, text, _ = honest
    assert from_lines("".join(to_lines(history.requests))) == history.requests
    assert from_lines(text) == history.requests
    # What is left of a torn line is not looked at; all before it is.
    assert from_lines(text + text.splitlines()[-1][:-1]) == history.requests


def test_a_history_survives_a_client_that_is_killed(tmp_path):
    path = tmp_path / "history.jsonl"
    with serving(Bug.NONE, 4, LATE) as (address, fake):
        history = f"client.History(client.Path({str(path)!r}))"
        script = f"import asyncio, test_load_client as client; asyncio.run(client.load({address!r}, {history}))"
        client = subprocess.Popen([sys.executable, "-c", script], cwd=Path(__file__).parent)
        try:
            end = time.monotonic() + 60
            while not path.exists() or path.read_text().count('"acknowledged"') < 50:
                assert client.poll() is None
                assert time.monotonic() < end
                time.sleep(0.01)
        finally:
            client.kill()
            client.wait()
    requests = from_lines(path.read_text())
    assert sum(len(request.answers) for request in requests) >= 50
    # Each stream had at most one key under way, so the service is at most that one ahead of what was written down.
    for stream, final in fake.finals().items():
        told = sum(bool(request.answers) for request in requests if request.stream == stream)
        assert final.sequence - told in (0, 1)

"""Several processes that share streams in PostgreSQL: real processes, a real database, and faults.

The faults come from a printed seed; set PROTODCS_FAULT_SEED to repeat a run.
"""

import asyncio
import itertools
import threading
import time
from collections import Counter
from contextlib import ExitStack

import httpx
import pytest

from protodcs import Client, StreamDCS
from protodcs.errors import ProtoDCSError
from protodcs.serve.settings import ServeConfig
from protodcs.serve.store import open_store
from service.checker import Stress
from service.faults import describe, plan
from service.journal import journal_from_answers
from service.peers import FAULTS, PeersRig
from test_durable_streams import (
    FEATURES,
    PROTOTYPES,
    SETTINGS,
    check_log,
    fault_seed,
    judge,
    mixed_load,
    report,
    required,
    run,
)

# Of the database, where it can be filled.
DISK = "1g"


def owners(rig):
    """Return who owns partitions, and how many."""
    return dict(rig.postgres.sql("SELECT owner, count(*) FROM partitions GROUP BY owner"))


def wait_for_owners(rig, count):
    """Wait until so many processes share the partitions."""
    end = time.monotonic() + 300
    while len(owners(rig)) != count:
        assert time.monotonic() < end, owners(rig)
        time.sleep(0.02)


def test_requests_through_any_process_are_those_of_a_bare_engine(tmp_path):
    bare = StreamDCS(PROTOTYPES)
    with PeersRig(tmp_path, 3, lease_seconds=3.0) as rig, ExitStack() as stack:
        wait_for_owners(rig, 3)
        clients = itertools.cycle([stack.enter_context(Client(url)) for url in rig.base_urls])
        for number in range(6):
            next(clients).create(f"s{number}", prototypes=PROTOTYPES)
        expected = bare.observe_many(FEATURES[:100])
        for position, (feature, wanted) in enumerate(zip(FEATURES[:100], expected, strict=True)):
            for number in range(6):
                found = next(clients).stream(f"s{number}").observe(feature)
                assert (found.position, found.decision.score, found.decision.label) == (
                    position,
                    wanted.score,
                    wanted.label,
                )
            # Another process for the same stream next time.
            next(clients)
        names = httpx.get(f"{rig.base_urls[0]}/v1/workers").json()
        assert sorted(names["names"]) == sorted(worker["worker"] for worker in names["workers"])
        assert len(names["names"]) == 3
        # Event streams and logs of any stream through any process.
        for url in rig.base_urls:
            with Client(url) as client:
                assert len(list(client.stream("s0").log(limit=1000))) == 100
            with httpx.stream("GET", f"{url}/v1/streams/s1/events", headers={"Last-Event-ID": "98"}) as events:
                lines = events.iter_lines()
                assert next(line for line in lines if line.startswith("id:")) == "id: 99"


def test_only_processes_with_the_secret_of_the_store_may_call(tmp_path):
    with PeersRig(tmp_path, 1, lease_seconds=3.0) as rig:
        for path in ("/internal/v1/calls", "/internal/v1/facts", "/internal/"):
            for headers in ({}, {"Authorization": "Bearer x"}):
                assert httpx.post(rig.base_urls[0] + path, content=b"x", headers=headers).status_code == 403


def test_the_streams_of_a_killed_process_answer_again_and_lose_nothing(tmp_path):
    with PeersRig(tmp_path, 2, lease_seconds=1.5) as rig:
        wait_for_owners(rig, 2)
        with Client(rig.base_urls[0]) as client:
            streams = [client.create(f"s{number}", prototypes=PROTOTYPES) for number in range(20)]
            for stream in streams:
                stream.observe(FEATURES[:5])
            rig.services[1].kill()
            for stream in streams:
                assert stream.observe(FEATURES[5]).position == 5
        wait_for_owners(rig, 1)


def test_a_rolling_restart_under_load_fails_no_request(tmp_path):
    statuses, problems, stopped = Counter(), [], threading.Event()

    class Transport(httpx.HTTPTransport):
        def handle_request(self, request):
            answer = super().handle_request(request)
            statuses[answer.status_code] += 1
            return answer

    def observe(url, name):
        with Client(url, transport=Transport()) as client:
            stream = client.stream(name)
            for position in itertools.count():
                if stopped.is_set():
                    return
                try:
                    assert stream.observe(FEATURES[position]).position == position
                except (AssertionError, ProtoDCSError) as problem:
                    problems.append(problem)
                    return

    with PeersRig(tmp_path, 3, lease_seconds=2.0) as rig:
        wait_for_owners(rig, 3)
        with Client(rig.base_urls[0]) as client:
            for number in range(12):
                client.create(f"s{number}", prototypes=PROTOTYPES)
        threads = [
            threading.Thread(target=observe, args=(url, f"s{4 * at + number}"))
            for at, url in enumerate(rig.base_urls)
            for number in range(4)
        ]
        for thread in threads:
            thread.start()
        for service in rig.services:
            time.sleep(0.5)
            service.stop()
            assert "stopped" in service.said[-1]
            time.sleep(0.5)
            service.start()
        wait_for_owners(rig, 3)
        stopped.set()
        for thread in threads:
            thread.join()
    assert problems == []
    # What arrived was answered, also by a process that handed its streams over. Clients connect again by themselves.
    assert set(statuses) == {200}
    assert statuses[200] > 100


def under_faults(tmp_path, processes, streams, samples, counts):
    """Load processes, inject the faults, and check every promise."""
    seed, done = fault_seed(), []
    # No answer expires, because the answers are all that is known of the journal.
    with PeersRig(tmp_path, processes, DISK, **{**SETTINGS, "idempotency_answers": 100_000}) as rig:
        load = mixed_load(rig.client_urls, seed, streams, samples, 128)
        planned = plan(seed, counts, load.rows)
        print(describe(seed, planned))
        start = time.monotonic()
        asyncio.run(run(load, rig, planned, done))
        print(f"{load.history.applied_rows} of {load.rows} rows in {time.monotonic() - start:.0f} s")
        for service in rig.services:
            service.stop()
        sent = load.history.requests
        journals = {stream: journal_from_answers(r for r in sent if r.stream == stream) for stream in load.creations}
        violations, replays = judge(load, journals, rig.services[0].streams(), rig.outages)
        check_log(asyncio.run(open_store(ServeConfig(**rig.services[0].settings))), journals)
    for fault in done:
        print(fault)
    epochs = sum(len({entry.epoch for entry in journal}) - 1 for journal in journals.values())
    stress = Stress.of(sent, len(done), epochs, replays)
    print(stress)
    assert not violations, report(violations)
    assert len(done) == len(planned)
    assert not stress.missing("faults", *required(samples, "fences")), stress


def test_every_acknowledged_observe_is_applied_once_by_processes_under_faults(tmp_path):
    under_faults(tmp_path, 3, 6, 1200, dict.fromkeys(FAULTS, 1))


@pytest.mark.long
def test_every_acknowledged_observe_is_applied_once_by_processes_under_60_faults(tmp_path):
    counts = {**dict.fromkeys(FAULTS, 5), "kill process": 12, "pause process": 8}
    under_faults(tmp_path, 4, 50, 30_000, counts)

"""The service as a whole under faults: every acknowledged observe is applied exactly once, in order, and never lost.

A real process with SQLite. tests/test_shared_streams.py does the same with several processes and PostgreSQL. The
faults come from a printed seed; set PROTODCS_FAULT_SEED to repeat a run.
"""

import asyncio
import os
import random
import time
from collections import Counter
from functools import partial

import httpx
import numpy as np
import pytest

from conftest import random_stream
from protodcs import StreamDCSConfig
from protodcs.serve.guard import GuardSettings
from protodcs.serve.log.entries import LogQuery
from protodcs.serve.store.sqlite import SqliteStore
from service.checker import Kind, Stress, Violation, check, replay
from service.faults import describe, inject, plan, until
from service.journal import journal_from_answers
from service.load import Load, feature_programs
from service.local_faults import LocalRig
from service.rig import Service

LEASE = 1.5
REQUEST = 20.0
# Only a service that hangs takes so long.
HANG = 600.0
STORED_ANSWERS = 64
PROTOTYPES, FEATURES, _ = random_stream(classes=12, width=32, samples=5000, seed=1)


SETTINGS = {
    "lease_seconds": LEASE,
    "attempt_seconds": 2.0,
    "request_seconds": REQUEST,
    "store_connect_timeout": 5.0,
    # Small, so that streams are saved, cut, unloaded and loaded all the time.
    "snapshot_records": 40,
    "snapshot_seconds": 2.0,
    "unload_seconds": 1.5,
    "unload_records": 10,
    "max_loaded_streams": 12,
    "idempotency_answers": STORED_ANSWERS,
    # Above the time for which a producer sends old requests again.
    "idempotency_seconds": 1800.0,
    # It acts now and then on these features.
    "guard": {
        "window": 32,
        "keep_windows": 1,
        "freeze_windows": 2,
        "recovery_windows": 1,
        "duplicate_threshold": 0.926,
    },
}


def fault_seed():
    return int(os.environ.get("PROTODCS_FAULT_SEED", time.time()))


def mixed_load(base_urls, seed, streams, samples, largest):
    """Plan streams of features that share `samples` evenly."""
    rng, creations, programs = random.Random(seed), {}, []
    each = samples // streams
    for number in range(streams):
        stream = f"features-{number}"
        creations[stream] = {"prototypes": PROTOTYPES}
        programs += feature_programs(rng, stream, FEATURES, each, largest)
    return Load(base_urls, creations, programs, timeout=REQUEST + 40, give_up=900.0, seed=seed)


async def run(load, rig, planned, done):
    """Run the load while the faults are injected; faults that are still due when the load ends are injected then."""
    loading = asyncio.create_task(asyncio.to_thread(load.run))
    try:
        await inject(planned, rig, lambda: load.rows if loading.done() else load.history.applied_rows, done)
    except BaseException:
        load.stop()
        raise
    await loading


def judge(load, journals, streams, outages=()):
    """Return all violations and the replays, from complete journals and what the store holds at the end."""
    replays = {
        stream: replay(spec, prototypes, [entry.payload for entry in journals.get(stream, ()) if entry.observe])
        for stream, (_, spec, prototypes) in streams.items()
    }
    finals = {stream: final for stream, (final, _, _) in streams.items()}
    violations = check(load.history.requests, journals, finals, replays, STORED_ANSWERS, outages)
    for program, error in load.errors:
        detail = f"producer {program.producer} ended with {error!r}"
        violations.append(Violation(Kind.PROGRAM, program.stream, None, detail))
    return violations, replays


def check_log(store, journals):
    """The decision log has one entry for each observe of the journals: none missing, doubled or out of order."""

    async def read():
        try:
            query = LogQuery(newest_first=False, limit=1_000_000)
            return {stream: (await store.read_log(stream, query)).entries for stream in journals}
        finally:
            await store.close()

    for stream, entries in asyncio.run(read()).items():
        observes = [entry for entry in journals[stream] if entry.observe]
        assert [(entry.position, entry.key, entry.score) for entry in entries] == [
            (entry.position, entry.key, entry.answer["score"]) for entry in observes
        ]
        times = [entry.time for entry in entries]
        assert times == sorted(times)


def report(violations):
    """Return the violations as text: how many of each kind, and a few of each."""
    counts = Counter(violation.kind for violation in violations)
    few = [[v for v in violations if v.kind is kind][:3] for kind in counts]
    return "\n".join([f"{dict(counts)}", *(str(violation) for some in few for violation in some)])


def required(samples, *more):
    """Return what must have happened in a run. In a short one, faults may hit no open request, and no guard may act."""
    return ["repeated_keys", "misuses", *(["retries", "guard_events", *more] if samples >= 10_000 else [])]


def in_one_process(tmp_path, streams, samples, counts, beside=None):
    """Load a service in one process, inject the faults, and check every promise."""
    seed, done = fault_seed(), []
    # No answer expires, because the answers are all that is known of the journal.
    rig = LocalRig(tmp_path, **{**SETTINGS, "idempotency_answers": 100_000})

    async def run_both():
        await asyncio.gather(run(load, rig, planned, done), *([] if beside is None else [beside(rig, load)]))

    with rig:
        load = mixed_load([rig.service.base_url], seed, streams, samples, 128)
        planned = plan(seed, counts, load.rows)
        print(describe(seed, planned))
        asyncio.run(run_both())
    sent = load.history.requests
    journals = {stream: journal_from_answers(r for r in sent if r.stream == stream) for stream in load.creations}
    violations, replays = judge(load, journals, rig.service.streams(), rig.outages)
    check_log(SqliteStore(tmp_path / "streams"), journals)
    for fault in done:
        print(fault)
    stress = Stress.of(sent, len(done), 1, replays)
    print(stress)
    assert not violations, report(violations)
    assert len(done) == len(planned)
    assert not stress.missing(*required(samples)), stress


def test_every_acknowledged_observe_is_applied_once_in_one_process_under_faults(tmp_path):
    in_one_process(tmp_path, 6, 1200, {"kill service": 6, "pause service": 1})


@pytest.mark.long
def test_every_acknowledged_observe_is_applied_once_in_one_process_that_is_killed_50_times(tmp_path):
    in_one_process(tmp_path, 50, 20_000, {"kill service": 50})


def test_a_service_in_one_process_is_stopped_in_mid_work_and_started_again(tmp_path):
    unsnapshotted = {}

    def stop(service):
        service.stop()
        assert "stopped" in service.said[-1]
        unsnapshotted.update(asyncio.run(service.unsnapshotted_records()))

    async def restart(rig, load):
        await until(lambda: load.history.applied_rows > load.rows / 3, "a third of the run", HANG)
        await rig.restart(partial(stop, rig.service))

    in_one_process(tmp_path, 6, 1200, {}, restart)
    # The stop unloaded every stream: at most so many records of each are not in its snapshot.
    assert len(unsnapshotted) == 6
    assert max(unsnapshotted.values()) <= SETTINGS["unload_records"]


@pytest.mark.long
async def test_ten_minutes_of_load_do_not_make_it_grow(tmp_path, clip_stream):
    """Once streams have learned as much as they hold, it grows by no more than a tenth."""
    seconds = float(os.environ.get("PROTODCS_STEADY_SECONDS", 600))
    prototypes, features, _ = clip_stream("dtd")
    rng = np.random.default_rng(7)
    streams = {f"camera {number}": features[rng.choice(len(features), 500)].astype("<f4") for number in range(8)}
    # Until the memories of an engine are full, and both good states that its guard keeps are of such an engine.
    guard = GuardSettings()
    learned = StreamDCSConfig().history + 2 * guard.keep_windows * guard.window
    samples, sent = [], []

    async def camera(client, stream, goes_on):
        turn = 0
        while goes_on(turn):
            body = streams[stream][turn % 500].tobytes()
            answer = await client.post(f"/v1/streams/{stream}/observe", content=body)
            assert answer.status_code == 200, answer.text
            turn += 1
        return turn

    async def watch(until):
        while time.monotonic() < until:
            samples.append(service.memory())
            await asyncio.sleep(seconds / 60)

    # Keys of requests are held for so long. With the default of five minutes, they would grow for half of the run.
    service = Service(
        tmp_path,
        store=f"sqlite:{tmp_path / 'streams'}",
        snapshot_records=100,
        unload_seconds=30.0,
        idempotency_seconds=10.0,
    )
    with service:
        async with httpx.AsyncClient(base_url=service.base_url, timeout=60) as client:
            for stream in streams:
                created = await client.post("/v1/streams", json={"id": stream, "prototypes": prototypes.tolist()})
                assert created.status_code == 201, created.text
            await asyncio.gather(*(camera(client, stream, lambda turn: turn < learned) for stream in streams))
            until = time.monotonic() + seconds
            cameras = (camera(client, stream, lambda _: time.monotonic() < until) for stream in streams)
            _, *turns = await asyncio.gather(watch(until), *cameras)
            sent.extend(turns)
    print(f"{sum(sent)} samples in {seconds:.0f} s, after {learned} for each of {len(streams)} streams")
    third = len(samples) // 3
    first, *later = (np.mean(part) for part in (samples[:third], samples[third : 2 * third], samples[2 * third :]))
    print(f"{first:.0f}, {later[0]:.0f} and {later[1]:.0f} MiB in the thirds of the run")
    assert max(later) < 1.1 * first + 5

"""The service as a whole under faults: nothing that was acknowledged is lost, doubled or reordered, and nothing hangs.

Real processes: Ray, four owners, Redis that waits for its disk. The faults come at random moments from a printed seed.
"""

import asyncio
import os
import time

import httpx
import numpy as np
import psutil
import pytest

from protodcs import Config, ProtoDCS
from protodcs.serve.guard import GuardSettings
from redis_server import RedisServer
from service.checker import check, reference
from service.client import Repetitions, drive
from service.faults import in_words, inflict, plan, until
from service.history import History, key_of
from service.rig import Service, ServiceRig

LEASE = 1.5
REQUEST = 20.0
SETTINGS = {
    "lease_seconds": LEASE,
    "attempt_seconds": 2.0,
    "request_seconds": REQUEST,
    "store_patience": 5.0,
    # Small, so that streams are written whole, cut, put to sleep and woken all the time.
    "snapshot_records": 40,
    "snapshot_seconds": 2.0,
    "sleep_seconds": 1.5,
    "sleep_records": 10,
    "awake": 12,
    # The undisturbed run that they are held against has none.
    "guard": {"enabled": False},
}


def real_streams(clip_stream, count, length):
    """So many streams of real CLIP features, and the prototypes of all of them."""
    prototypes, features, _ = clip_stream("dtd")
    rng = np.random.default_rng(7)
    rows = [rng.choice(len(features), length, replace=length > len(features)) for _ in range(count)]
    return prototypes, {f"camera {number}": features[row].astype(np.float32) for number, row in enumerate(rows)}


async def nothing(_):
    """No fault beside those of the plan."""


def run(service, redis, prototypes, streams, counts, seed, beside=nothing):
    """Load the service and inflict the faults; the history, and what was inflicted."""
    length = sum(len(features) for features in streams.values())
    planned = plan(seed, counts, length, pauses=(1.2 * LEASE, 3 * LEASE))
    print(in_words(seed, planned))
    history, done = History(), []
    body = {"prototypes": prototypes.tolist()}

    async def load(rig):
        faults = asyncio.gather(inflict(planned, rig, lambda: history.acknowledged, done), beside(history))
        await drive(
            service.base_url,
            streams,
            birth=lambda _: body,
            history=history,
            concurrency=len(streams),
            timeout=REQUEST + 10,
            give_up=300.0,
            repetitions=Repetitions(share=0.05),
            seed=seed,
        )
        await asyncio.wait_for(faults, 120)

    start = time.monotonic()
    with ServiceRig(service, redis) as rig:
        asyncio.run(load(rig))
    print(f"{history.acknowledged} acknowledged in {time.monotonic() - start:.0f} s")
    for fault in done:
        print(fault)
    return history, done


def judge(service, prototypes, streams, history):
    """All promises that were broken, by what the store holds in the end."""
    expected = reference(streams, lambda _: ProtoDCS(prototypes))
    intended = {stream: [key_of(stream, number) for number in range(len(rows))] for stream, rows in streams.items()}
    return check(history.requests, intended, service.finals(), expected, deadline=REQUEST)


def fault_seed():
    return int(os.environ.get("PROTODCS_FAULT_SEED", time.time()))


def over_redis(tmp_path, clip_stream, count, length, counts):
    prototypes, streams = real_streams(clip_stream, count, length)
    with RedisServer(tmp_path) as redis:
        service = Service(tmp_path, store=redis.url, owners=4, **SETTINGS)
        with service:
            history, done = run(service, redis, prototypes, streams, counts, fault_seed())
        faults = judge(service, prototypes, streams, history)
        assert not faults, faults[:10]
        assert len(done) == sum(counts.values())


def over_files(tmp_path, clip_stream, count, length, kills):
    prototypes, streams = real_streams(clip_stream, count, length)
    service = Service(tmp_path, store=f"files:{tmp_path / 'streams'}", **SETTINGS)
    with service:
        history, done = run(service, None, prototypes, streams, {"kill owner": kills}, fault_seed())
    faults = judge(service, prototypes, streams, history)
    assert not faults, faults[:10]
    assert len(done) == kills


def test_nothing_is_lost_while_owners_die_hang_come_and_go_and_redis_dies(tmp_path, clip_stream):
    counts = {"kill owner": 3, "pause owner": 2, "kill store": 1, "add owner": 1, "remove owner": 1}
    over_redis(tmp_path, clip_stream, 10, 120, counts)


@pytest.mark.long
def test_nothing_is_lost_of_20000_samples_over_50_streams(tmp_path, clip_stream):
    counts = {"kill owner": 20, "pause owner": 10, "kill store": 3, "add owner": 3, "remove owner": 2}
    over_redis(tmp_path, clip_stream, 50, 400, counts)


@pytest.mark.long
def test_nothing_is_lost_over_files_while_their_process_is_killed_50_times(tmp_path, clip_stream):
    over_files(tmp_path, clip_stream, 50, 400, 50)


def test_a_service_on_files_is_stopped_and_killed_in_mid_work_and_started_again(tmp_path, clip_stream):
    prototypes, streams = real_streams(clip_stream, 6, 100)
    service = Service(tmp_path, store=f"files:{tmp_path / 'streams'}", **SETTINGS)

    async def restart(history):
        await until(lambda: history.acknowledged > 200, "a third of the run", 120)
        await asyncio.to_thread(service.stop)
        await asyncio.to_thread(service.start)
        await until(lambda: history.acknowledged > 400, "two thirds of the run", 120)
        await asyncio.to_thread(service.kill)
        await asyncio.to_thread(service.start)

    with service:
        history, done = run(service, None, prototypes, streams, {"kill owner": 2}, fault_seed(), restart)
    faults = judge(service, prototypes, streams, history)
    assert not faults, faults[:10]
    assert len(done) == 2
    said = {attempt.words for request in history.requests for attempt in request.attempts}
    assert any("the service is being stopped" in words for words in said), said


@pytest.mark.long
def test_ten_minutes_of_load_do_not_make_it_grow(tmp_path, clip_stream):
    """Once streams have learned as much as they hold, no process grows by more than a tenth."""
    seconds = float(os.environ.get("PROTODCS_STEADY_SECONDS", 600))
    prototypes, streams = real_streams(clip_stream, 8, 500)
    # Until the memories of an engine are full, and both good states that its guard keeps are of such an engine.
    guard = GuardSettings()
    learned = Config.preset("default").history + 2 * guard.keep_windows * guard.window
    samples, sent = [], []

    async def load():
        async with httpx.AsyncClient(base_url=service.base_url, timeout=60) as client:
            for stream in streams:
                created = await client.post("/v1/streams", json={"id": stream, "prototypes": prototypes.tolist()})
                assert created.status_code == 201, created.text
            await asyncio.gather(*(camera(client, stream, lambda turn: turn < learned) for stream in streams))
            until = time.monotonic() + seconds
            cameras = (camera(client, stream, lambda _: time.monotonic() < until) for stream in streams)
            _, *turns = await asyncio.gather(watch(until), *cameras)
            sent.extend(turns)

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
            samples.append({**service.memory(), "redis": psutil.Process(redis.pid).memory_info().rss / 2**20})
            await asyncio.sleep(seconds / 60)

    with RedisServer(tmp_path) as redis:
        service = Service(tmp_path, store=redis.url, owners=4, snapshot_records=100, sleep_seconds=30.0)
        with service:
            asyncio.run(load())
    print(f"{sum(sent)} samples in {seconds:.0f} s, after {learned} for each of {len(streams)} streams")
    third = len(samples) // 3
    for kind in samples[0]:
        first, *later = (
            np.mean([sample[kind] for sample in part if kind in sample])
            for part in (samples[:third], samples[third : 2 * third], samples[2 * third :])
        )
        print(f"{kind}: {first:.0f}, {later[0]:.0f} and {later[1]:.0f} MiB in the thirds of the run")
        assert max(later) < 1.1 * first + 5, kind

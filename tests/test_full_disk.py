"""A service whose disk is full: it says so, and streams and logs can be deleted to make room."""

import time

import httpx
import pytest

from conftest import random_stream
from memory_store import stored_ids
from ports import free_port
from protodcs import Client
from protodcs.errors import StoreError
from protodcs.serve.log.entries import LogEntry, LogLimits, Purge
from protodcs.serve.store.sqlite import DATABASE, SqliteStore
from protodcs.serve.store.values import Batch
from service.rig import Service
from small_disk import fill, free
from test_sqlite_store import content_of, created

ROWS, FEATURES, _ = random_stream(samples=50, seed=3)
RESERVE = 4 << 20
NO_LIMITS = LogLimits(1e9, 10**9, 1 << 40)


def entry(position):
    return LogEntry(position, 1000, "key", None, "known", True, "cat", 0.0, 1.0, None, thumbnail=bytes(8000))


async def store_on(disk, streams=3, records=40):
    """Return a store with some streams of 0.7 MB each, and their fences."""
    store = SqliteStore(disk / "store", reserve_bytes=RESERVE)
    fences = {}
    for number in range(streams):
        name = f"s{number}"
        fences[name] = await created(store, name)
        for position in range(records):
            batch = Batch(name, fences[name], position, [bytes(10_000)], b"", [entry(position)])
            assert await store.commit([batch]) == [None]
    return store, fences


async def assert_full(store, fences):
    with pytest.raises(StoreError, match="full"):
        await store.commit([Batch("s0", fences["s0"], 40, [bytes(8 << 20)])])
    assert "the disk is full" in store.problem


async def test_a_stream_can_be_deleted_on_a_full_disk_and_then_others_go_on(disk_of_24_mb):
    store, fences = await store_on(disk_of_24_mb)
    assert store.problem == ""
    fill(disk_of_24_mb)
    await assert_full(store, fences)
    await store.renew("me", "1", 5.0)
    assert store.problem, "a call that writes nothing says nothing about the disk"
    for name in ("s1", "s2"):
        await store.delete(name, fences[name])
    await store.trim_log(NO_LIMITS, None)
    assert store.problem == ""
    assert await store.commit([Batch("s0", fences["s0"], 40, [bytes(1000)])]) == [None]
    await store.close()
    assert {name: len(records) for name, records in (await content_of(disk_of_24_mb / "store")).items()} == {"s0": 41}


async def test_a_log_can_be_purged_on_a_full_disk(disk_of_24_mb):
    store, fences = await store_on(disk_of_24_mb)
    fill(disk_of_24_mb)
    await assert_full(store, fences)
    for name in fences:
        assert await store.purge_log(name, Purge()) == 40
    assert store.problem == ""
    assert await store.commit([Batch("s0", fences["s0"], 40, [bytes(1000)])]) == [None]
    await store.close()


async def test_many_deletions_in_a_row_on_a_full_disk_need_one_reserve(disk_of_24_mb):
    store, fences = await store_on(disk_of_24_mb, streams=30, records=4)
    fill(disk_of_24_mb)
    for name in fences:
        held = await store.acquire(name, "me", "2")
        await store.delete(name, held.fence)
    assert await stored_ids(store) == []
    await store.close()


async def test_a_store_opens_on_a_full_disk_and_takes_its_reserve_again_when_there_is_room(disk_of_24_mb):
    store, _ = await store_on(disk_of_24_mb)
    await store.close()
    fill(disk_of_24_mb)
    store = SqliteStore(disk_of_24_mb / "store", reserve_bytes=RESERVE)
    fence = (await store.acquire("s1", "me", "2")).fence
    await store.delete("s1", fence)
    free(disk_of_24_mb)
    await store.trim_log(NO_LIMITS, None)
    assert (disk_of_24_mb / "store" / "reserve").stat().st_blocks * 512 >= RESERVE
    await store.close()


async def test_the_file_shrinks_after_streams_were_deleted(tmp_path):
    store, fences = await store_on(tmp_path, streams=10)
    await store.trim_log(NO_LIMITS, None)
    full = (tmp_path / "store" / DATABASE).stat().st_size
    assert full > 5_000_000
    for name, fence in fences.items():
        await store.delete(name, fence)
    await store.trim_log(NO_LIMITS, None)
    assert (tmp_path / "store" / DATABASE).stat().st_size < 1_500_000
    assert not (tmp_path / "store" / f"{DATABASE}-wal").stat().st_size
    # A stream that comes later is complete.
    fence = await created(store, "later")
    assert await store.commit([Batch("later", fence, 0, [b"0"])]) == [None]
    await store.close()
    assert await content_of(tmp_path / "store") == {"later": [b"0"]}


def test_a_service_on_a_full_disk_is_not_ready_and_streams_can_be_deleted(disk_of_24_mb, tmp_path):
    metrics = free_port()
    service = Service(
        tmp_path,
        store=f"sqlite:{disk_of_24_mb / 'streams'}",
        reserve_bytes=RESERVE,
        log_format="off",
        audit=str(tmp_path / "audit"),
        store_connect_timeout=0.2,
        request_seconds=5.0,
        metrics_port=metrics,
    )

    def metric(name):
        page = httpx.get(f"http://127.0.0.1:{metrics}/metrics").text
        return next((float(line.split()[-1]) for line in page.splitlines() if line.startswith(name)), None)

    def wait_for(reached):
        for _ in range(300):
            if reached():
                return
            time.sleep(0.1)
        raise AssertionError("the service did not get there")

    others = [f"other-{number}" for number in range(6)]
    with service, Client(service.base_url, give_up=2.0) as client:
        for name in ("a", *others):
            stream = client.create(name, prototypes=ROWS)
            for number in range(10):
                stream.observe(FEATURES)
                stream.snapshot(f"snapshot {number}")
        wait_for(lambda: metric("protodcs_ready{") is not None)
        fill(disk_of_24_mb)
        observed = 0

        def refuses():
            nonlocal observed
            reply = httpx.post(
                f"{service.base_url}/v1/streams/a/observe",
                json={"features": FEATURES.tolist()},
                headers={"Idempotency-Key": str(observed)},
                timeout=60,
            )
            observed += 1
            # SQLite may have given space back in the meantime.
            fill(disk_of_24_mb)
            return reply.status_code == 503

        wait_for(refuses)
        wait_for(lambda: httpx.get(f"{service.base_url}/v1/ready").status_code == 503)
        assert "store: the disk is full" in httpx.get(f"{service.base_url}/v1/ready").json()["detail"]
        wait_for(lambda: metric('protodcs_ready{part="store"') == 0)
        wait_for(lambda: metric("protodcs_store_free_bytes") < 1 << 20)
        assert metric("protodcs_store_disk_bytes") == 24 << 20
        client.stream("a").purge_log()
        for name in others:
            client.stream(name).delete()
        wait_for(lambda: httpx.get(f"{service.base_url}/v1/ready").status_code == 200)
        client.stream("a").observe(FEATURES[0])

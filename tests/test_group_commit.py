"""Group commit: groups have a limit in bytes, and snapshots travel apart from records."""

import asyncio

import pytest

from made_service import (
    ask,
    create,
    delete,
    done,
    engine_of,
    handled,
    learned,
    observe,
    one,
    started,
)
from memory_store import MemoryStore
from protodcs.errors import StoreError
from protodcs.serve.messages import Action, Reply, ReplyStatus
from protodcs.serve.pipeline import commit as commits_module
from protodcs.serve.pipeline.commit import GroupCommit, Journal
from protodcs.serve.store.values import Batch, Checkpoint
from protodcs.serve.stream.live_stream import LiveStream
from protodcs.serve.telemetry.metrics import WorkerMetrics
from protodcs.serve.workers import checkpoints as checkpoints_module

pytestmark = pytest.mark.usefixtures("virtual_time")

STOPPED = Reply(ReplyStatus.CLOSED, "the service is being stopped")


class SlowSnapshots(MemoryStore):
    """GroupCommit with snapshots wait for `snapshot_gate`. GroupCommit of records do not."""

    def __init__(self):
        super().__init__()
        self.snapshot_gate = asyncio.Event()
        self.snapshots_sent = 0
        self.groups = []

    async def commit(self, writes):
        self.groups.append(list(writes))
        if any(isinstance(write, Checkpoint) for write in writes):
            self.snapshots_sent += 1
            await self.snapshot_gate.wait()
        return await super().commit(writes)


async def until(condition):
    """Wait for a condition that must come true."""
    async with asyncio.timeout(300):
        while not condition():
            await asyncio.sleep(0.005)


def journal_bytes(store, stream="s"):
    return sum(len(record) for *_, record in store.content[stream].journal)


# Groups.


async def test_a_group_of_records_has_at_most_so_many_bytes(monkeypatch):
    monkeypatch.setattr(commits_module, "GROUP_BYTES", 1000)

    async with asyncio.timeout(300):
        store = SlowSnapshots()
        await store.put_shared("blob", b"")
        sizes = [300, 300, 300, 300, 2500, 300, 700, 1]
        commits = GroupCommit(store, 1.0, WorkerMetrics())
        journals = []
        for number, size in enumerate(sizes):
            await store.create(str(number), b"", "blob")
            fence = (await store.acquire(str(number), "one", "1")).fence
            journals.append(Journal())
            commits.put(journals[-1], Batch(str(number), fence, 0, [bytes(size)]))
        task = asyncio.create_task(commits.run())
        for journal in journals:
            await journal.wait_durable()
        task.cancel()
        sent = [[len(write.records[0]) for write in group] for group in store.groups]
        assert sent == [[300, 300, 300], [300], [2500], [300, 700], [1]]


async def test_draining_many_streams_holds_few_snapshots_in_memory(monkeypatch):
    """The peak counts snapshots from when they are built until their commit has ended."""
    held = peak = largest = 0
    build = LiveStream.checkpoint

    def counted(live, stream):
        nonlocal held, peak, largest
        checkpoint = build(live, stream)
        held += len(checkpoint.snapshot)
        peak, largest = max(peak, held), max(largest, len(checkpoint.snapshot))
        return checkpoint

    class Counting(MemoryStore):
        async def commit(self, writes):
            nonlocal held
            await asyncio.sleep(0.001)
            outcomes = await super().commit(writes)
            held -= sum(len(write.snapshot) for write in writes if isinstance(write, Checkpoint))
            return outcomes

    monkeypatch.setattr(LiveStream, "checkpoint", counted)
    monkeypatch.setattr(checkpoints_module, "GROUP_BYTES", 20_000)

    async with asyncio.timeout(300):
        store = Counting()
        streams = [f"s{number}" for number in range(40)]
        async with started(store, streams=streams, unload_records=0) as worker:
            await done(worker, *(observe(number, stream) for number in range(3) for stream in streams))
            await worker.drain(STOPPED)
            assert [store.content[stream].start for stream in streams] == [3] * 40
            assert {store.content[stream].holder for stream in streams} == {None}
    assert 0 < peak <= 20_000 + largest
    assert held == 0


# Snapshots apart from records.


async def test_records_are_committed_while_snapshots_are_under_way():
    async with asyncio.timeout(300):
        store = SlowSnapshots()
        async with started(store, streams=["s", "t"], snapshot_records=2) as worker:
            await done(worker, observe(0), observe(1))
            await until(lambda: store.snapshots_sent == 1)
            # Neither another stream nor the stream itself waits for the snapshot.
            await done(worker, observe(0, "t"), observe(2), ask(Action.STATUS))
            assert [len(store.content[stream].journal) for stream in "st"] == [3, 1]
            store.snapshot_gate.set()
            await until(lambda: (store.content["s"].start, len(store.content["s"].journal)) == (2, 1))
            async with started(store, streams=()) as successor:
                await done(successor, observe(3))
                assert engine_of(successor) == learned(4)
        assert store.misfits == []


async def test_a_snapshot_waits_for_the_records_that_it_covers():
    class SlowRecords(MemoryStore):
        async def commit(self, writes):
            if isinstance(writes[0], Batch):
                await asyncio.sleep(0.1)
            return await super().commit(writes)

    async with asyncio.timeout(300):
        store = SlowRecords()
        async with started(store, snapshot_records=1) as worker:
            for number in range(5):
                await done(worker, observe(number))
            await until(lambda: store.content["s"].start == 5)
        assert store.misfits == []


async def test_a_stream_is_released_only_after_its_snapshot_is_durable():
    async with asyncio.timeout(300):
        store = SlowSnapshots()
        async with started(store, snapshot_records=3, unload_records=3) as worker:
            await done(worker, observe(0), observe(1), observe(2))
            await until(lambda: store.snapshots_sent == 1)
            # No records are behind this snapshot, so unloading the stream needs no other one.
            worker.streams.begin_unload("s")
            await asyncio.sleep(0.1)
            assert store.content["s"].holder is not None
            store.snapshot_gate.set()
            await until(lambda: store.content["s"].holder is None)
            assert store.content["s"].start == 3
            assert store.snapshots_sent == 1


async def test_a_stream_can_be_deleted_while_its_snapshot_is_queued():
    async with asyncio.timeout(300):
        store = SlowSnapshots()
        async with started(store, streams=["s", "t"], snapshot_records=1) as worker:
            await done(worker, observe(0))
            await until(lambda: store.snapshots_sent == 1)
            await done(worker, observe(0, "t"))
            await done(worker, await delete(worker, "t"))
            await done(worker, create("t"), observe(0, "t"))
            store.snapshot_gate.set()
            await until(lambda: store.content["t"].start == store.content["s"].start == 1)
            assert engine_of(worker, "t") == learned(1)
        assert store.misfits == []


async def test_a_stream_stays_in_memory_if_its_snapshot_cannot_be_written():
    class NoSnapshots(MemoryStore):
        async def commit(self, writes):
            if isinstance(writes[0], Checkpoint):
                raise StoreError("no room for a snapshot")
            return await super().commit(writes)

    async with asyncio.timeout(300):
        store = NoSnapshots()
        async with started(store, snapshot_records=2, unload_records=0, store_connect_timeout=0.1) as worker:
            for number in range(9):
                await done(worker, observe(number))
                await asyncio.sleep(0.2)
            assert worker.facts()["loads"] == 1
            facts = (await one(worker, ask(Action.STATUS))).facts
            assert (facts["position"], facts["snapshot_position"]) == (9, 0)
            await worker.drain(STOPPED)
            # The next worker replays the records.
            assert store.content["s"].holder is None
            assert len(store.content["s"].journal) == 9


async def test_a_stream_that_the_store_cannot_write_fails_alone():
    class OneDamaged(MemoryStore):
        async def commit(self, writes):
            outcomes = await super().commit(writes)
            damaged = StoreError("a key has the wrong type")
            return [
                damaged if write.stream == "s" else outcome for write, outcome in zip(writes, outcomes, strict=True)
            ]

    async with asyncio.timeout(300):
        async with started(OneDamaged(), streams=["s", "t"]) as worker:
            bad, good = await handled(worker, [observe(0), observe(0, "t")])
            assert (bad.status, good.status) == (ReplyStatus.LATER, ReplyStatus.DONE)
            assert "wrong type" in bad.message


# Snapshots by bytes.


@pytest.mark.parametrize("action", [Action.IMPORT, Action.ROLLBACK])
async def test_whole_states_do_not_pile_up_in_the_journal(action):
    class Watched(MemoryStore):
        peak = 0

        async def commit(self, writes):
            outcomes = await super().commit(writes)
            self.peak = max(self.peak, journal_bytes(self))
            return outcomes

    async with asyncio.timeout(300):
        store = Watched()
        limit = 2 * len(learned(20))
        async with started(store, snapshot_bytes=limit) as worker:
            await done(worker, *(observe(number) for number in range(20)))
            await done(worker, ask(Action.SAVE_SNAPSHOT, "keep", b"x"))
            payload = b"x" if action == Action.ROLLBACK else learned(20)
            calls = [done(worker, ask(action, f"k{number}", payload)) for number in range(12)]
            await asyncio.gather(*calls)
            assert limit <= store.peak <= limit + len(learned(20)) + 1000
            assert engine_of(worker) == learned(20)
        assert store.misfits == []


async def test_a_stream_is_snapshotted_by_the_bytes_of_its_records():
    async with asyncio.timeout(300):
        store = MemoryStore()
        async with started(store, snapshot_bytes=5000) as worker:
            for number in range(100):
                await done(worker, observe(number))
            await until(lambda: journal_bytes(store) < 5000)
            assert store.content["s"].start > 50
            # A stream that is loaded again counts the records that it finds.
            found = journal_bytes(store)
        async with started(store, streams=(), snapshot_bytes=found + 1) as successor:
            await done(successor, observe(100))
            await until(lambda: journal_bytes(store) == 0)

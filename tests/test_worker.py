"""A worker: it answers when a change is durable, keeps nothing it cannot trust, and loads streams bit-exact."""

import asyncio
import random
import threading
import time
import zlib
from functools import partial

import pytest

from made_service import (
    FEATURES,
    PROTOTYPES,
    SHARED,
    SPEC,
    ask,
    create,
    delete,
    done,
    engine_of,
    feature,
    handled,
    learned,
    observe,
    one,
    placement_of,
    settings,
    spec_of,
    started,
)
from memory_store import MemoryStore, stored_ids
from protodcs import StreamDCS
from protodcs.errors import StateError, StoreError
from protodcs.serve.guard import Guard, GuardSettings
from protodcs.serve.messages import Action, Reply, ReplyStatus, Request
from protodcs.serve.store.values import KeySegment
from protodcs.serve.stream import live_stream as live_stream_module
from protodcs.serve.stream.answers import pack_decision
from protodcs.serve.stream.cost import Part
from protodcs.serve.stream.idempotency import digest_of
from protodcs.serve.stream.live_stream import LiveStream, StreamSpec, pack_class
from protodcs.serve.stream.records import Kind, Record
from protodcs.serve.workers import loaded_stream, loaded_streams
from protodcs.serve.workers import worker as worker_module
from protodcs.serve.workers.worker import Worker

pytestmark = pytest.mark.usefixtures("virtual_time")

STOPPED = Reply(ReplyStatus.CLOSED, "the service is being stopped")


async def idle():
    """Let everybody else go on until they wait: only then the virtual clock moves."""
    await asyncio.sleep(0.001)


async def until(condition, seconds=300.0):
    """Wait for something that must come true."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not come true"
        await asyncio.sleep(0.005)


def looks_often(monkeypatch):
    """Have workers look after their streams all the time."""
    monkeypatch.setattr(worker_module, "_ROUND", 0.01)


def journal_of(store, stream="s"):
    return [Record.unpack(data) for *_, data in store.content[stream].journal]


# Answers, and when they come.


async def test_a_worker_answers_and_learns_as_the_engine_alone():
    engine = StreamDCS(PROTOTYPES)
    async with started() as worker:
        for number in range(30):
            peeked, told = await done(worker, ask(Action.PEEK, payload=feature(number)), observe(number))
            assert peeked.answer == pack_decision(engine.peek(FEATURES[number]))
            assert told.answer == pack_decision(engine.observe(FEATURES[number]))
            assert (told.position, told.epoch, told.repeated, peeked.position) == (number, 1, False, -1)
        assert engine_of(worker) == learned(30)


async def test_no_answer_comes_before_the_change_is_durable():
    store = MemoryStore()
    async with started(store) as worker:
        await done(worker, observe(0))
        store.gate = asyncio.Event()
        asked = [asyncio.create_task(handled(worker, [request])) for request in (observe(1), ask(Action.FREEZE, "f"))]
        await idle()
        # What would be answered from a change that is on its way waits for it too: peeks and repetitions.
        asked += [
            asyncio.create_task(handled(worker, [request]))
            for request in (observe(1), ask(Action.PEEK, payload=feature(2)), ask(Action.STATUS))
        ]
        await asyncio.sleep(0.05)
        assert [task.done() for task in asked] == [False] * 5
        assert len(journal_of(store)) == 1
        store.gate.set()
        replies = [(await task)[0] for task in asked]
        assert [reply.status for reply in replies] == [ReplyStatus.DONE] * 5
        assert [reply.position for reply in replies] == [1, 2, 1, -1, -1]
        assert replies[2].repeated
        assert len(journal_of(store)) == 3


async def test_many_requests_on_many_streams_in_one_call_are_one_commit():
    store = MemoryStore()
    streams = [f"s{number}" for number in range(7)]
    async with started(store, streams=streams) as worker:
        await done(worker, *(ask(Action.STATUS, stream=stream) for stream in streams))
        before = store.commits
        requests = [observe(number, stream) for number in range(20) for stream in streams]
        replies = await done(worker, *requests)
        assert store.commits == before + 1
        assert [reply.position for reply in replies] == [number for number in range(20) for _ in streams]
        assert {engine_of(worker, stream) for stream in streams} == {learned(20)}


async def test_calls_that_come_while_a_commit_is_under_way_share_the_next():
    store = MemoryStore()
    async with started(store) as worker:
        await done(worker, observe(0))
        store.gate, before = asyncio.Event(), store.commits
        calls = [asyncio.create_task(handled(worker, [observe(number)])) for number in range(1, 101)]
        await idle()
        store.gate.set()
        replies = await asyncio.gather(*calls)
        assert [reply.position for (reply,) in replies] == list(range(1, 101))
        assert store.commits - before <= 3
        assert worker.facts()["writes"] == 101
        assert worker.facts()["commits"] == store.commits


async def test_an_observe_that_is_refused_stops_none_of_its_neighbours():
    async with started() as worker:
        bad = ask(Action.OBSERVE, "bad", feature(0)[:-4])
        odd = ask(Action.OBSERVE, "odd", feature(0)[:-1])
        long = observe(0, key="k" * 201)
        replies = await handled(worker, [observe(0), bad, observe(1), odd, long, observe(2)])
        outcomes = [reply.status.name for reply in replies]
        assert outcomes == ["DONE", "WRONG", "DONE", "WRONG", "WRONG", "DONE"]
        assert "shape (32,)" in replies[1].message
        assert engine_of(worker) == learned(3)


async def test_a_repeated_request_is_answered_as_the_first_time_and_applied_once():
    async with started() as worker:
        first = await done(worker, *(observe(number) for number in range(5)))
        again = await done(worker, *(observe(number) for number in range(5)), observe(4))
        assert [reply._replace(repeated=False) for reply in again] == [*first, first[4]]
        assert all(reply.repeated for reply in again)
        twice = await done(worker, observe(5), observe(5))
        assert [reply.repeated for reply in twice] == [False, True]
        assert engine_of(worker) == learned(6)
        other = await one(worker, observe(7, key="key-5"))
        assert other.status is ReplyStatus.CONFLICT
        assert "Use a new key" in other.message


async def test_what_is_not_there_is_missing():
    async with started() as worker:
        for action in (
            Action.OBSERVE,
            Action.STATUS,
            Action.SAVE_SNAPSHOT,
            Action.LIST_SNAPSHOTS,
            Action.ROLLBACK,
            Action.FREEZE,
        ):
            assert (await one(worker, ask(action, stream="nobody"))).status is ReplyStatus.MISSING


async def test_the_status_says_where_the_stream_stands():
    async with started(snapshot_records=4) as worker:
        await done(worker, *(observe(number) for number in range(3)))
        await done(worker, observe(3), ask(Action.FREEZE, "f"), observe(4))
        # The snapshot is written beside other requests.
        await idle()
        facts = (await one(worker, ask(Action.STATUS))).facts
        assert (facts["position"], facts["snapshot_position"], facts["epoch"]) == (6, 6, 1)
        assert (facts["worker"], facts["frozen"], facts["replayed_differently"]) == ("worker-0", True, 0)
        assert facts["sequence"] == 5


# A store that fails.


async def test_a_fenced_worker_drops_its_memory_and_the_next_request_goes_on_to_the_bit():
    store = MemoryStore()
    async with started(store) as worker:
        await done(worker, *(observe(number) for number in range(10)))
        async with started(store, name="worker-0", streams=()) as successor:
            await done(successor, *(observe(number) for number in range(10, 20)))
            fenced = await one(worker, observe(20))
            assert fenced.status is ReplyStatus.LATER
            assert "epoch" in fenced.message
            assert "s" not in worker.streams.loaded
            assert (await done(worker, observe(20)))[0].position == 20
            assert engine_of(worker) == learned(21)
    assert store.misfits == []


async def test_a_store_that_is_down_for_less_than_the_patience_is_not_noticed():
    store = MemoryStore()
    async with started(store) as worker:
        await done(worker, observe(0))
        store.down = True
        call = asyncio.create_task(handled(worker, [observe(1)]))
        await asyncio.sleep(0.1)
        assert not call.done()
        store.down = False
        assert (await call)[0].status is ReplyStatus.DONE
        assert engine_of(worker) == learned(2)


async def test_a_store_that_is_down_for_longer_gives_later_and_nothing_is_lost():
    store = MemoryStore()
    async with started(store, store_connect_timeout=0.05) as worker:
        await done(worker, *(observe(number) for number in range(5)))
        store.down = True
        for _ in range(3):
            replies = await handled(worker, [observe(number) for number in range(5, 8)])
            assert {reply.status for reply in replies} == {ReplyStatus.LATER}
            assert "down" in replies[0].message
        for action in (Action.PEEK, Action.STATUS, Action.SAVE_SNAPSHOT, Action.DELETE):
            assert (await one(worker, ask(action, payload=feature(0)))).status is ReplyStatus.LATER
        assert (await one(worker, create("other"))).status is ReplyStatus.LATER
        store.down = False
        again = await done(worker, *(observe(number) for number in range(8)))
        assert [reply.position for reply in again] == list(range(8))
        assert [reply.repeated for reply in again] == [True] * 5 + [False] * 3
        assert engine_of(worker) == learned(8)


@pytest.mark.parametrize("patience", [0.0, 10.0])
async def test_a_write_whose_answer_was_lost_is_applied_once(patience):
    store = MemoryStore()
    async with started(store, store_connect_timeout=patience, snapshot_records=4) as worker:
        for number in range(12):
            store.lose_answers = 1
            reply = await one(worker, observe(number))
            while reply.status is ReplyStatus.LATER:
                reply = await one(worker, observe(number))
            assert (reply.status, reply.position) == (ReplyStatus.DONE, number)
            assert reply.repeated == (patience == 0.0)
        assert engine_of(worker) == learned(12)
    assert store.misfits == []


async def test_an_error_that_no_store_should_raise_does_not_silence_the_worker():
    class Broken(MemoryStore):
        errors = 0

        async def commit(self, writes):
            if self.errors:
                self.errors -= 1
                raise ValueError("a bug in the store")
            return await super().commit(writes)

    store = Broken()
    async with started(store) as worker:
        await done(worker, observe(0))
        store.errors = 1
        async with asyncio.timeout(300):
            reply = await one(worker, observe(1))
        assert reply.status is ReplyStatus.LATER
        assert "a bug in the store" in reply.message
        await done(worker, observe(1))
        assert engine_of(worker) == learned(2)


async def test_an_error_inside_the_engine_is_told_and_the_stream_goes_on_from_the_store(monkeypatch, caplog):
    store = MemoryStore()
    async with started(store) as worker:
        await done(worker, *(observe(number) for number in range(3)))
        engine = worker.streams.loaded["s"].live.engine
        advance = engine._advance

        def torn(memory, row, scores):
            if memory.sequence == 4:
                raise ZeroDivisionError("a bug in the engine")
            return advance(memory, row, scores)

        monkeypatch.setattr(engine, "_advance", torn)
        replies = await handled(worker, [observe(3), observe(4), observe(5), create("t")])
        assert [reply.status.name for reply in replies] == ["FAILED", "FAILED", "FAILED", "DONE"]
        assert "a bug" not in replies[1].message
        assert len(journal_of(store)) == 3
        replies = await done(worker, *(observe(number) for number in range(3, 6)))
        assert [reply.position for reply in replies] == [3, 4, 5]
        assert engine_of(worker) == learned(6)
    assert "a bug in the engine" in caplog.text


GUARDED = StreamSpec.unpack(SPEC).model_copy(
    update={"guard": GuardSettings(window=32, keep_windows=1, disagreement=1.0, rejection=1.0)}
)


def failing_once(monkeypatch, owner, name, error):
    """Let the next call of a method fail, and those after it go on as before."""
    method, errors = getattr(owner, name), [error]

    def call(*given):
        if errors:
            raise errors.pop()
        return method(*given)

    monkeypatch.setattr(owner, name, call)


async def test_a_stream_whose_roll_back_failed_is_loaded_again_from_the_store(monkeypatch, caplog):
    """The engine has learned the sample by then, and its journal has no record of it."""
    store = MemoryStore()
    async with started(store, streams=()) as worker:
        await done(worker, create(spec=GUARDED.pack()))
        # A good window, whose state is saved, and one of the same sample again and again, which fires.
        await done(worker, *(observe(number) for number in range(32)))
        same = [observe(0, key=f"same-{number}") for number in range(32)]
        await done(worker, *same[:-1])
        failing_once(monkeypatch, LiveStream, "_restored", StateError("the saved state cannot be read"))
        assert (await one(worker, same[-1])).status is ReplyStatus.FAILED
        assert len(journal_of(store)) == 63
        status = (await done(worker, ask(Action.STATUS)))[0].facts
        assert (status["position"], status["sequence"]) == (63, 63)
        (reply,) = await done(worker, same[-1])
        assert (reply.position, reply.repeated) == (63, False)
        status = (await done(worker, ask(Action.STATUS)))[0].facts
        assert (status["position"], status["sequence"], status["guard_reason"]) == (64, 32, "duplicates")
    assert "the saved state cannot be read" in caplog.text


async def test_a_stream_whose_restore_failed_halfway_is_loaded_again_from_the_store(monkeypatch):
    store = MemoryStore()
    async with started(store, streams=()) as worker:
        await done(worker, create(spec=GUARDED.pack()), observe(0), save_snapshot("good"), observe(1))
        failing_once(monkeypatch, Guard, "begin", ZeroDivisionError("a bug in the guard"))
        assert (await one(worker, roll_back("good"))).status is ReplyStatus.FAILED
        status = (await done(worker, ask(Action.STATUS)))[0].facts
        assert (status["position"], status["sequence"]) == (3, 2)
        assert engine_of(worker) == learned(2)
        await done(worker, roll_back("good"))
        assert engine_of(worker) == learned(1)


# Several workers.


async def test_what_another_worker_holds_is_left_to_it_while_it_lives():
    store = MemoryStore()
    async with started(store, "one") as first, started(store, "two", streams=()) as second:
        await done(first, observe(0))
        refused = await handled(second, [observe(1), observe(2)])
        assert [reply.status for reply in refused] == [ReplyStatus.HELD, ReplyStatus.HELD]
        assert refused[0].message == "one"
        await done(first, observe(1))
        assert engine_of(first) == learned(2)


async def test_what_a_silent_worker_holds_is_taken_over_when_its_lease_ran_out():
    store = MemoryStore()
    async with (
        started(store, "one", lease_seconds=1.0) as first,
        started(store, "two", streams=(), lease_seconds=1.0) as second,
    ):
        await done(first, *(observe(number) for number in range(5)))
        for task in first._tasks:
            task.cancel()
        assert (await one(second, observe(5))).status is ReplyStatus.HELD
        await asyncio.sleep(1.1)
        (reply,) = await done(second, observe(5))
        assert (reply.position, reply.epoch) == (5, 2)
        assert engine_of(second) == learned(6)


async def test_what_an_earlier_incarnation_held_is_taken_at_once():
    store = MemoryStore()
    async with started(store, "one") as first:
        await done(first, *(observe(number) for number in range(5)))
        async with started(store, "one", streams=()) as successor:
            (reply,) = await done(successor, observe(5))
            assert (reply.position, reply.epoch) == (5, 2)
            assert engine_of(successor) == learned(6)


@pytest.mark.parametrize("renewed_first", [False, True])
async def test_a_paused_worker_whose_lease_ran_out_does_not_answer_from_stale_memory(renewed_first):
    """Its lease runs out, another one goes on with the stream, and it comes back: to a request, or to its lease."""
    store = MemoryStore()
    async with started(store, "one", lease_seconds=1.0) as first, started(store, "two", streams=()) as second:
        await done(first, *(observe(number) for number in range(5)))
        first._renewals.cancel()
        await asyncio.sleep(1.1)
        await done(second, *(observe(number) for number in range(5, 40)))
        if renewed_first:
            await first._lease.renew()
        for question in (ask(Action.PEEK, payload=feature(40)), ask(Action.STATUS)):
            reply = await one(first, question)
            assert (reply.status, reply.message) == (ReplyStatus.HELD, "two")


async def test_a_worker_that_could_not_renew_in_time_and_lost_nothing_goes_on():
    store = MemoryStore()
    async with started(store, lease_seconds=1.0) as worker:
        await done(worker, *(observe(number) for number in range(5)))
        store.down = True
        await asyncio.sleep(1.1)
        assert (await one(worker, ask(Action.PEEK, payload=feature(5)))).status is ReplyStatus.LATER
        store.down = False
        await done(worker, observe(5))
        assert engine_of(worker) == learned(6)


async def test_streams_are_handed_over_when_the_workers_change():
    store = MemoryStore()
    streams = [f"s{number}" for number in range(20)]
    both, ring = ["one", "two"], placement_of(["one", "two"])
    async with started(store, "one", streams=streams) as first, started(store, "two", streams=()) as second:
        first.streams.place(placement_of(["one"]))
        await done(first, *(observe(number, stream) for number in range(5) for stream in streams))
        for worker in (first, second):
            worker.streams.place(placement_of(both))
        theirs = [stream for stream in streams if ring.first(stream) == "two"]
        assert 0 < len(theirs) < 20
        assert set(first.streams.loaded) == set(streams) - set(theirs)
        await until(lambda: not first.streams.busy)
        for stream in theirs:
            moved = await one(first, observe(5, stream))
            assert (moved.status, moved.message) == (ReplyStatus.MOVED, "two")
            await done(second, observe(5, stream))
            assert engine_of(second, stream) == learned(6)
        stays = next(stream for stream in streams if stream not in theirs)
        assert (await one(second, observe(5, stays))).status is ReplyStatus.MOVED
        # Whoever asked its worker in vain may ask another one.
        assert (await one(second, observe(5, stays, stand_in=True))).status is ReplyStatus.HELD


async def test_one_who_stands_in_gives_the_stream_back_after_a_while(monkeypatch):
    looks_often(monkeypatch)
    monkeypatch.setattr(loaded_streams, "_STANDING_IN", 1)
    store = MemoryStore()
    stream = next(f"s{number}" for number in range(100) if placement_of(["one", "two"]).first(f"s{number}") == "two")
    async with started(store, "one", streams=[stream], lease_seconds=1.0) as worker:
        worker.streams.place(placement_of(["one", "two"]))
        await done(worker, observe(0, stream, stand_in=True))
        assert store.content[stream].holder is not None
        await until(lambda: store.content[stream].holder is None)
        assert (await one(worker, observe(1, stream))).status is ReplyStatus.MOVED


async def test_before_anybody_said_who_the_workers_are_every_stream_is_served():
    async with started() as worker:
        await done(worker, observe(0))


# Sleep and snapshots.


async def test_an_unused_stream_goes_to_sleep_and_wakes_to_the_bit(monkeypatch):
    looks_often(monkeypatch)
    store = MemoryStore()
    async with started(store, streams=["s", "t"], unload_seconds=0.1, unload_records=3) as worker:
        await done(worker, *(observe(number) for number in range(5)))
        await done(worker, *(observe(number, "t") for number in range(3)))
        await until(lambda: not worker.streams.loaded and not worker.streams.busy)
        assert [store.content[stream].holder for stream in "st"] == [None, None]
        # The one with few records behind its snapshot sleeps without a new one.
        assert [(store.content[stream].start, len(journal_of(store, stream))) for stream in "st"] == [
            (5, 0),
            (0, 3),
        ]
        for stream, seen in (("s", 5), ("t", 3)):
            await done(worker, observe(seen, stream))
            assert engine_of(worker, stream) == learned(seen + 1)
        assert worker.facts()["loads"] == 4


async def test_streams_beyond_the_limit_are_unloaded_and_load_bit_exact():
    store = MemoryStore()
    streams = [f"s{number}" for number in range(6)]
    async with started(store, streams=streams, max_loaded_streams=2) as worker:
        for number in range(10):
            for stream in streams:
                await done(worker, observe(number, stream))
                assert len(worker.streams.loaded) <= 2
                assert engine_of(worker, stream) == learned(number + 1)
        await done(worker, observe(0, "s0"), observe(0, "s1"))
        await until(lambda: not worker.streams.busy)
        assert sorted(worker.streams.loaded) == ["s0", "s1"]


@pytest.mark.parametrize("limit", [1, 2])
async def test_more_streams_at_once_than_may_be_loaded_are_all_served(limit):
    streams = [f"s{number}" for number in range(8)]
    async with started(streams=streams, max_loaded_streams=limit) as worker:

        async def client(stream):
            for number in range(10):
                await done(worker, observe(number, stream))

        async with asyncio.timeout(300):
            await asyncio.gather(*(client(stream) for stream in streams))
            for stream in streams:
                await done(worker, ask(Action.STATUS, stream=stream))
                assert engine_of(worker, stream) == learned(10)


async def test_a_stream_is_written_whole_after_so_many_records_and_its_journal_is_cut():
    store = MemoryStore()
    async with started(store, snapshot_records=3) as worker:
        for number in range(20):
            await done(worker, observe(number))
            await until(lambda number=number: len(journal_of(store)) == (number + 1) % 3)
        assert store.content["s"].start == 18
        # Each snapshot is a commit of its own.
        assert store.commits == 26
        assert (await done(worker, observe(3)))[0].repeated
        async with started(store, streams=()) as successor:
            await done(successor, observe(20))
            assert engine_of(successor) == learned(21)
            assert (await done(successor, observe(3)))[0].repeated


async def test_streams_of_one_rate_write_their_snapshots_at_different_times():
    store, streams = MemoryStore(), [f"camera-{number}" for number in range(12)]
    async with started(store, streams=streams, snapshot_records=40) as worker:
        begun = {}
        for number in range(40):
            await done(worker, *(observe(number, stream) for stream in streams))
            await idle()
            begun |= {stream: number + 1 for stream in streams if store.content[stream].start and stream not in begun}
        assert set(begun) == set(streams)
        assert min(begun.values()) > 30
        assert len(set(begun.values())) > 4


async def test_a_stream_that_changed_is_written_whole_by_time(monkeypatch):
    looks_often(monkeypatch)
    store = MemoryStore()
    async with started(store, snapshot_seconds=0.05) as worker:
        await done(worker, *(observe(number) for number in range(5)))
        assert store.content["s"].start == 0
        await until(lambda: store.content["s"].start == 5)
        written = store.commits
        await asyncio.sleep(0.15)
        assert store.commits == written
        async with started(store, streams=()) as successor:
            await done(successor, observe(5))
            assert engine_of(successor) == learned(6)


async def test_a_stream_that_cannot_be_written_whole_does_not_hold_up_the_others(monkeypatch):
    looks_often(monkeypatch)
    store = MemoryStore()
    async with started(store, streams=["bad", "good"], snapshot_seconds=0.05) as worker:
        await done(worker, observe(0, "bad"), observe(0, "good"))

        def broken(stream):
            raise ZeroDivisionError("a bug")

        monkeypatch.setattr(worker.streams.loaded["bad"].live, "checkpoint", broken)
        await until(lambda: store.content["good"].start == 1)
        await done(worker, observe(1, "bad"))
        assert engine_of(worker, "bad") == learned(2)


async def test_a_stream_that_remembers_no_answers_is_written_whole_too():
    async with started(
        idempotency_answers=0, idempotency_entries=0, idempotency_seconds=0, snapshot_records=3
    ) as worker:
        for number in range(10):
            await done(worker, observe(number))
        assert engine_of(worker) == learned(10)


async def test_prototypes_that_no_stream_in_memory_uses_are_let_go():
    async with started() as worker:
        await done(worker, observe(0))
        assert len(worker.streams._shared) == 1
        await done(worker, await delete(worker))
        await idle()
        assert len(worker.streams._shared) == 0


# The end.


async def test_a_drain_refuses_in_words_and_releases_everything():
    store = MemoryStore()
    streams = [f"s{number}" for number in range(6)]
    async with started(store, streams=streams, unload_records=2, lease_seconds=1.5) as worker:
        await done(worker, *(observe(number, stream) for number in range(5) for stream in streams))
        store.gate = asyncio.Event()
        under_way = asyncio.create_task(handled(worker, [observe(5, "s0")]))
        await idle()
        drain = asyncio.create_task(worker.drain(STOPPED))
        await idle()
        assert await handled(worker, [observe(6), create("new")]) == [STOPPED, STOPPED]
        store.gate.set()
        await drain
        assert (await under_way)[0].status is ReplyStatus.DONE
        assert {store.content[stream].holder for stream in streams} == {None}
        assert [store.content[stream].start for stream in streams] == [6, 5, 5, 5, 5, 5]
        assert "worker-0" not in store.leases
        await asyncio.sleep(0.6)
        assert "worker-0" not in store.leases
        assert await handled(worker, [observe(6)]) == [STOPPED]
    async with started(store, "other", streams=()) as other:
        await done(other, observe(6, "s0", key="key-6"))


async def test_a_request_that_waits_while_its_worker_drains_does_not_wake_the_stream_again():
    store = MemoryStore()
    async with started(store) as worker:
        await done(worker, observe(0))
        store.gate = asyncio.Event()
        first = asyncio.create_task(handled(worker, [observe(1)]))
        await idle()
        worker.streams.place(placement_of(["worker-0"]))
        worker.streams.begin_unload("s")
        waits = [asyncio.create_task(handled(worker, [observe(2)])) for _ in range(3)]
        await idle()
        drain = asyncio.create_task(worker.drain(STOPPED))
        await idle()
        store.gate.set()
        await drain
        assert (await first)[0].status is ReplyStatus.DONE
        assert [await wait for wait in waits] == [[STOPPED]] * 3
        assert (store.content["s"].holder, worker.streams.loaded, worker.streams.busy) == (None, {}, {})


async def test_a_drain_ends_though_the_store_is_down():
    store = MemoryStore()
    async with started(store, store_connect_timeout=0.05, unload_records=0) as worker:
        await done(worker, observe(0))
        store.down = True
        async with asyncio.timeout(300):
            await worker.drain(STOPPED)
        store.down = False
    async with started(store, streams=()) as successor:
        await done(successor, observe(1))
        assert engine_of(successor) == learned(2)


async def test_a_worker_can_be_closed_in_the_midst_of_its_work():
    store = MemoryStore()
    worker = Worker("one", store, settings(unload_records=0))
    await worker.start()
    await done(worker, create(), observe(0))
    store.gate = asyncio.Event()
    worker.streams.begin_unload("s")
    await idle()
    async with asyncio.timeout(300):
        await worker.close()


# Creation, kept snapshots, deletion.


async def test_a_stream_is_created_once_and_told_so():
    async with started(streams=()) as worker:
        assert not (await one(worker, create())).repeated
        await done(worker, observe(0))
        again = await one(worker, create())
        assert (again.status, again.repeated) == (ReplyStatus.DONE, True)
        otherwise = await one(worker, create(spec=spec_of(target_false_reject=0.1).pack()))
        assert otherwise.status is ReplyStatus.CONFLICT
        assert "already exists with different settings" in otherwise.message
        assert engine_of(worker) == learned(1)
        assert await stored_ids(worker._store) == ["s"]


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        (SPEC.replace(b'"0","1"', b'"0","0"'), "unique"),
        (SPEC.replace(b'"0","1",', b'"1",'), "7"),
        (SPEC.replace(PROTOTYPES.fingerprint.encode(), b"0" * 64), "prototypes"),
    ],
)
async def test_what_cannot_be_created_is_refused_in_words_and_leaves_no_trace(spec, words):
    async with started(streams=()) as worker:
        reply = await one(worker, Request("s", Action.CREATE, "k", spec, SHARED))
        assert reply.status is ReplyStatus.WRONG
        assert words in reply.message
        assert await stored_ids(worker._store) == []


def save_snapshot(name, key=None, replace=False):
    return ask(Action.SAVE_SNAPSHOT, f"keep {name}" if key is None else key, name.encode(), replace=replace)


def roll_back(name, key=None):
    return ask(Action.ROLLBACK, f"back to {name}" if key is None else key, name.encode())


async def test_a_stream_goes_back_to_what_was_kept_and_on_from_there():
    store = MemoryStore()
    async with started(store) as worker:
        await done(worker, *(observe(number) for number in range(5)), save_snapshot("five"), observe(5), observe(6))
        replies = await done(worker, save_snapshot("seven"), roll_back("five"))
        assert [reply.position for reply in replies] == [8, 9]
        assert engine_of(worker) == learned(5)
        assert (await one(worker, ask(Action.LIST_SNAPSHOTS))).facts == {"snapshots": ["five", "seven"]}
        (reply,) = await done(worker, observe(5, key="again"))
        assert reply.position == 10
        # What was answered before the rollback was answered: it is not taken back.
        assert (await done(worker, observe(6)))[0].repeated
        assert engine_of(worker) == learned(6)
        async with started(store, streams=()) as successor:
            await done(successor, ask(Action.STATUS))
            assert engine_of(successor) == learned(6)
            await done(successor, roll_back("seven"))
            assert engine_of(successor) == learned(7)


async def test_repeated_keeps_and_rollbacks_are_done_once():
    async with started() as worker:
        await done(worker, *(observe(number) for number in range(3)))
        first = await done(worker, save_snapshot("three"), observe(3), roll_back("three"))
        await done(worker, observe(3, key="again"))
        again = await done(worker, save_snapshot("three"), roll_back("three"))
        assert [reply._replace(repeated=False) for reply in again] == [first[0], first[2]]
        assert [reply.repeated for reply in again] == [True, True]
        assert engine_of(worker) == learned(4)


@pytest.mark.parametrize(
    "request_of", [partial(save_snapshot, replace=True), roll_back], ids=["save_snapshot", "roll_back"]
)
async def test_a_keep_or_rollback_that_is_asked_again_while_it_is_under_way_is_done_once(request_of):
    """As by a router whose first attempt took too long."""

    class Slow(MemoryStore):
        async def saved_snapshots(self, stream):
            await asyncio.sleep(0.01)
            return await super().saved_snapshots(stream)

        async def saved_snapshot(self, stream, name):
            await asyncio.sleep(0.01)
            return await super().saved_snapshot(stream, name)

    store = Slow()
    async with started(store) as worker:
        await done(worker, observe(0), save_snapshot("a", "kept before"))
        replies = await asyncio.gather(*(one(worker, request_of("a")) for _ in range(3)))
        assert {reply.status for reply in replies} == {ReplyStatus.DONE}
        assert {reply.position for reply in replies} == {2}
        assert sorted(reply.repeated for reply in replies) == [False, True, True]
        assert len(journal_of(store)) == 3


async def test_a_snapshot_that_is_saved_slowly_is_not_replaced_by_its_retry():
    class AcquiredStream(MemoryStore):
        waits = None

        async def saved_snapshots(self, stream):
            if self.waits is not None:
                waits, self.waits = self.waits, None
                await waits.wait()
            return await super().saved_snapshots(stream)

    store = AcquiredStream()
    async with started(store) as worker:
        await done(worker, observe(0))
        release = store.waits = asyncio.Event()
        first, retry = (asyncio.create_task(one(worker, save_snapshot("a"))) for _ in range(2))
        await idle()
        release.set()
        assert not (await first).repeated
        await done(worker, observe(1))
        assert (await retry).repeated
        await done(worker, roll_back("a"))
        assert engine_of(worker) == learned(1)


async def test_too_many_saved_snapshots_are_an_error_and_one_may_be_replaced():
    async with started(max_snapshots=2) as worker:
        await done(worker, save_snapshot("a"), observe(0), save_snapshot("b"))
        full = await one(worker, save_snapshot("c"))
        assert full.status is ReplyStatus.CONFLICT
        assert "2 saved snapshots, which is the limit" in full.message
        await done(worker, observe(1), save_snapshot("a", "anew", replace=True), observe(2), roll_back("a"))
        assert engine_of(worker) == learned(2)
        assert (await one(worker, ask(Action.LIST_SNAPSHOTS))).facts == {"snapshots": ["b", "a"]}


async def test_a_rollback_to_what_was_never_kept_is_refused_and_changes_nothing():
    store = MemoryStore()
    async with started(store) as worker:
        await done(worker, observe(0))
        reply = await one(worker, roll_back("nothing"))
        assert reply.status is ReplyStatus.MISSING
        assert "no snapshot 'nothing'" in reply.message
        assert engine_of(worker) == learned(1)
        assert len(journal_of(store)) == 1


async def test_a_deleted_stream_is_gone_and_may_be_deleted_and_created_again():
    store = MemoryStore()
    async with started(store) as worker:
        await done(worker, observe(0), save_snapshot("a"))
        first, again = await done(worker, *[await delete(worker, key=key) for key in "ab"])
        assert (first.repeated, again.repeated) == (False, True)
        assert (await one(worker, observe(1))).status is ReplyStatus.MISSING
        assert (store.content, store.shared) == ({}, {})
        await done(worker, create())
        (reply,) = await done(worker, observe(0))
        assert (reply.position, reply.repeated) == (0, False)
        assert (await one(worker, ask(Action.LIST_SNAPSHOTS))).facts == {"snapshots": []}


async def test_after_one_that_must_be_asked_again_none_behind_it_is_served():
    store = MemoryStore()
    async with started(store) as worker:
        await done(worker, observe(0))
        works = store.save_snapshot

        async def fails(*_):
            raise StoreError("not now")

        store.save_snapshot = fails
        replies = await handled(worker, [observe(1), save_snapshot("a"), observe(2), observe(3)])
        assert [reply.status.name for reply in replies] == ["DONE", "LATER", "LATER", "LATER"]
        assert engine_of(worker) == learned(2)
        store.save_snapshot = works
        await done(worker, save_snapshot("a"), observe(2), observe(3))
        assert engine_of(worker) == learned(4)


async def test_a_saved_snapshot_is_deleted_and_another_one_is_missing():
    store = MemoryStore()
    async with started(store) as worker:
        await done(worker, observe(0), ask(Action.SAVE_SNAPSHOT, "k", b"first"))
        await done(worker, ask(Action.DELETE_SNAPSHOT, "f", b"first"))
        missing = await one(worker, ask(Action.DELETE_SNAPSHOT, "g", b"never"))
        assert (missing.status, missing.code) == (ReplyStatus.MISSING, "snapshot_not_found")
        (reply,) = await done(worker, ask(Action.LIST_SNAPSHOTS))
        assert reply.facts == {"snapshots": []}


# Retries.


async def test_a_second_snapshot_of_the_same_name_needs_an_explicit_replacement():
    store = MemoryStore()
    async with started(store) as worker:
        await done(worker, observe(0), save_snapshot("a", "first"), observe(1))
        refused = await one(worker, save_snapshot("a", "second"))
        assert refused.status is ReplyStatus.CONFLICT
        assert "a snapshot 'a' already" in refused.message
        await done(worker, roll_back("a", "back"))
        assert engine_of(worker) == learned(1)
        await done(worker, observe(1, key="again"), save_snapshot("a", "third", replace=True), observe(2))
        await done(worker, roll_back("a", "back to the third"))
        assert engine_of(worker) == learned(2)


async def test_two_snapshots_of_one_name_at_the_same_time_do_not_both_succeed():
    async with started() as worker:
        await done(worker, observe(0))
        replies = await asyncio.gather(*(one(worker, save_snapshot("a", f"key of {number}")) for number in range(5)))
        assert sorted(reply.status.name for reply in replies) == ["CONFLICT"] * 4 + ["DONE"]


async def test_a_snapshot_whose_worker_died_before_it_answered_is_saved_once():
    """The retry must neither be a conflict with itself nor save what was learned since."""

    class Dying(MemoryStore):
        async def save_snapshot(self, *arguments):
            await super().save_snapshot(*arguments)
            raise StoreError("the worker died here")

    store = Dying()
    async with started(store) as worker:
        await done(worker, observe(0))
        assert (await one(worker, save_snapshot("a"))).status is ReplyStatus.LATER
        await done(worker, observe(1))
        # The retry does not save again, so it does not fail again.
        await done(worker, save_snapshot("a"), roll_back("a"))
        assert engine_of(worker) == learned(1)


async def test_a_delayed_delete_leaves_a_stream_alone_that_was_created_again():
    async with started() as worker:
        await done(worker, observe(0))
        delayed = await delete(worker, key="delayed")
        await done(worker, await delete(worker), create(), observe(0))
        (reply,) = await done(worker, delayed)
        assert reply.repeated
        assert engine_of(worker) == learned(1)


async def test_a_delayed_deletion_of_a_snapshot_leaves_one_alone_that_was_saved_again():
    async with started() as worker:
        await done(
            worker,
            observe(0),
            save_snapshot("a"),
            ask(Action.DELETE_SNAPSHOT, "f", b"a"),
            save_snapshot("a", "second"),
        )
        (reply,) = await done(worker, ask(Action.DELETE_SNAPSHOT, "f", b"a"))
        assert reply.repeated
        assert (await one(worker, ask(Action.LIST_SNAPSHOTS))).facts == {"snapshots": ["a"]}


@pytest.mark.parametrize(
    "action", [Action.ROLLBACK, Action.IMPORT, Action.SAVE_SNAPSHOT, Action.DELETE_SNAPSHOT, Action.ADD_CLASS]
)
async def test_a_key_with_other_content_is_a_conflict_for_every_verb(action):
    async with started() as worker:
        await done(worker, observe(0), save_snapshot("a"), save_snapshot("b"))
        payload = {
            Action.ROLLBACK: b"a",
            Action.IMPORT: learned(1),
            Action.SAVE_SNAPSHOT: b"c",
            Action.DELETE_SNAPSHOT: b"a",
            Action.ADD_CLASS: pack_class(feature(0), "owl"),
        }[action]
        first = (await done(worker, ask(action, "same key", payload)))[0]
        again = (await done(worker, ask(action, "same key", payload)))[0]
        assert again == first._replace(repeated=True)
        other = learned(2) if action == Action.IMPORT else payload[:-1] + b"b"
        before = engine_of(worker)
        for changed in (ask(action, "same key", other), observe(1, key="same key")):
            assert (await one(worker, changed)).status is ReplyStatus.CONFLICT
        assert engine_of(worker) == before


async def test_a_roll_back_and_an_import_of_the_same_bytes_are_different_requests():
    async with started() as worker:
        await done(worker, observe(0), save_snapshot("a"), roll_back("a", "same key"))
        assert (await one(worker, ask(Action.IMPORT, "same key", b"a"))).status is ReplyStatus.CONFLICT


def large(rows, key="large"):
    """Return a request of many rows, as the ingress sends it."""
    digest = digest_of(*map(feature, range(rows)))
    return [observe(row, key=key, digest=digest, row=row) for row in range(rows)]


@pytest.mark.parametrize("others", [0, 1, 29])
async def test_a_request_with_more_rows_than_answers_are_stored_can_be_retried(others):
    """Snapshots drop old answers: those of a request are dropped together, after as many later records."""
    store = MemoryStore()
    async with started(store, snapshot_records=10, idempotency_answers=30, idempotency_entries=50) as worker:
        first = await done(worker, *large(100))
        for number in range(100, 100 + others):
            await done(worker, observe(number))
        await unload(worker)
        async with started(store, streams=()) as successor:
            again = await done(successor, *large(100))
            assert again == [reply._replace(repeated=True) for reply in first]
            assert engine_of(successor) == learned(100 + others)


async def test_the_answers_of_a_request_expire_together():
    store = MemoryStore()
    async with started(store, snapshot_records=10, idempotency_answers=30, idempotency_entries=200) as worker:
        await done(worker, *large(100))
        for number in range(100, 150):
            await done(worker, observe(number))
        outcomes = {reply.status for reply in await handled(worker, large(100))}
        assert outcomes == {ReplyStatus.EXPIRED}
        assert engine_of(worker) == learned(150)


async def test_the_rest_of_a_request_that_was_applied_in_part_is_applied():
    store = MemoryStore()
    async with started(store, snapshot_records=3) as worker:
        await done(worker, *large(20)[:7])
        async with started(store, streams=()) as successor:
            replies = await done(successor, *large(20))
            assert [reply.repeated for reply in replies] == [True] * 7 + [False] * 13
            assert engine_of(successor) == learned(20)


async def test_a_worker_whose_clock_is_wrong_forgets_no_key(monkeypatch):
    store = MemoryStore()
    async with started(store, snapshot_records=1, idempotency_entries=0) as worker:
        await done(worker, observe(0))
        monkeypatch.setattr(time, "time", lambda: 9e9)
        await done(worker, observe(1), observe(2))
        (reply,) = await done(worker, observe(0))
        assert reply.repeated


async def test_a_key_expires_by_the_clock_of_the_store():
    store = MemoryStore()
    changes = {"snapshot_records": 1, "idempotency_entries": 0, "idempotency_seconds": 300.0}
    async with started(store, **changes) as worker:
        await done(worker, observe(0))
        for number in (1, 2, 3):
            store.clock_offset += 140.0
            await worker._lease.renew()
            await done(worker, observe(number))
        (reply,) = await done(worker, observe(0))
        assert not reply.repeated


# The lease.


async def test_a_worker_whose_lease_was_lost_discards_its_streams_before_it_answers():
    """As after a fail-over that lost the lease: another worker may have written meanwhile."""
    store = MemoryStore()
    async with started(store) as worker, started(store, name="worker-1", streams=()) as other:
        await done(worker, observe(0))
        store.leases.pop("worker-0")
        await done(other, observe(1)._replace(stand_in=True))
        await other.drain(Reply(ReplyStatus.CLOSED, "over"))
        await worker._lease.renew()
        status = await one(worker, ask(Action.STATUS))
        assert status.facts["position"] == 2


async def test_a_worker_that_was_replaced_serves_nothing_until_its_successor_is_gone():
    store = MemoryStore()
    async with started(store) as worker, started(store, streams=()) as successor:
        with pytest.raises(StoreError, match="another process has the lease"):
            await worker._lease.renew()
        reply = await one(worker, ask(Action.STATUS))
        assert reply.status is ReplyStatus.LATER
        await done(successor, observe(0))
        await successor.drain(Reply(ReplyStatus.CLOSED, "over"))
        await worker._lease.renew()
        await done(worker, observe(1))
        assert engine_of(worker) == learned(2)


async def test_a_store_that_was_replaced_makes_a_worker_read_its_streams_again():
    """As after the promotion of a replica that had not received the last record."""
    store = MemoryStore()
    async with started(store) as worker:
        await done(worker, observe(0), observe(1))
        store.content["s"].journal.pop()
        store.generation = "the promoted replica"
        peeked = await one(worker, ask(Action.STATUS))
        assert peeked.facts["position"] == 1
        await done(worker, observe(1))
        assert engine_of(worker) == learned(2)


async def test_a_stream_whose_lease_was_lost_while_it_was_loaded_is_loaded_again():
    store = MemoryStore()
    async with started(store) as worker, started(store, name="worker-1", streams=()) as other:
        await done(worker, observe(0))
        worker.streams.loaded.clear()
        load = worker.streams._load

        async def load_slowly(held, prototypes):
            live = await load(held, prototypes)
            worker.streams._load = load
            store.leases.pop("worker-0")
            await done(other, observe(1)._replace(stand_in=True))
            await other.drain(Reply(ReplyStatus.CLOSED, "over"))
            await worker._lease.renew()
            return live

        worker.streams._load = load_slowly
        first, second = [await one(worker, ask(Action.STATUS)) for _ in range(2)]
        assert first.status is ReplyStatus.LATER
        assert second.facts["position"] == 2


# Long work.


def slow_steps(monkeypatch, clock, seconds):
    """Have every observe take so long, by the virtual clock, and return the positions of the observes so far."""
    positions, learn = [], LiveStream._observe

    def observe_slowly(live, payload):
        clock.now += seconds
        positions.append(live.position)
        return learn(live, payload)

    monkeypatch.setitem(live_stream_module._CHANGES, Kind.OBSERVE, observe_slowly)
    return positions


async def test_a_long_run_lets_other_streams_and_the_lease_have_their_turn(monkeypatch, virtual_time):
    store = MemoryStore()
    async with started(store, streams=["s", "t"], lease_seconds=1.0) as worker:
        await done(worker, observe(0, "t"))
        steps = slow_steps(monkeypatch, virtual_time, 0.1)
        long = asyncio.create_task(handled(worker, [observe(number) for number in range(100)]))
        await until(lambda: steps)
        await done(worker, ask(Action.PEEK, payload=feature(1), stream="t"), observe(1, "t"))
        assert len(steps) < 30
        replies = await long
        assert [reply.position for reply in replies] == list(range(100))
        assert engine_of(worker) == learned(100)
        # Ten seconds have passed: without renewals the stream would have been loaded again, with another epoch.
        assert {reply.epoch for reply in replies} == {1}
        holder, end = store.leases["worker-0"]
        assert (holder, end > time.monotonic()) == (worker.incarnation, True)
    assert store.misfits == []


async def test_a_short_run_does_not_wait_for_many_long_ones(monkeypatch, virtual_time):
    long_ones = [f"s{number}" for number in range(20)]
    async with started(streams=[*long_ones, "t"]) as worker:
        await done(worker, *(observe(0, stream) for stream in [*long_ones, "t"]))
        steps = slow_steps(monkeypatch, virtual_time, 0.1)
        runs = [
            asyncio.create_task(handled(worker, [observe(number, stream) for number in range(1, 20)]))
            for stream in long_ones
        ]
        # All have begun: new work goes before theirs.
        await until(lambda: steps.count(1) == len(long_ones))
        before = len(steps)
        await done(worker, observe(1, "t"))
        assert len(steps) - before < 10
        for replies in await asyncio.gather(*runs):
            assert [reply.position for reply in replies] == list(range(1, 20))


async def test_runs_of_many_streams_in_one_call_let_the_lease_have_its_turn(monkeypatch, virtual_time):
    streams = [f"s{number}" for number in range(100)]
    async with started(streams=streams, lease_seconds=1.0) as worker:
        await done(worker, *(ask(Action.STATUS, stream=stream) for stream in streams))
        slow_steps(monkeypatch, virtual_time, 0.1)
        replies = await done(worker, *(observe(0, stream) for stream in streams))
        assert {reply.epoch for reply in replies} == {1}


@pytest.mark.parametrize(("slowest", "mean", "slow"), [(90, 1, False), (90, 5, True), (110, 1, True)])
async def test_a_stream_is_computed_in_a_thread_if_some_steps_or_all_take_long(slowest, mean, slow, monkeypatch):
    cost = [Part((), slowest=slowest * 1e6, mean=mean * 1e6)]
    monkeypatch.setattr(loaded_stream, "estimate", lambda *_: cost)
    async with started() as worker:
        await done(worker, observe(0))
        assert worker.streams.loaded["s"].slow is slow


async def test_a_stream_that_is_unloaded_or_lost_in_the_middle_of_a_run_is_learned_once(monkeypatch, virtual_time):
    store = MemoryStore()
    async with started(store, lease_seconds=1.0) as worker:
        await done(worker, observe(0))
        steps = slow_steps(monkeypatch, virtual_time, 0.1)
        long = asyncio.create_task(handled(worker, [observe(number) for number in range(1, 60)]))
        await until(lambda: len(steps) > 5)
        worker.streams.begin_unload("s")
        await until(lambda: len(steps) > 20)
        worker.streams.loaded.clear()
        replies = await long
        assert [reply.status for reply in replies] == [ReplyStatus.DONE] * 59
        assert [reply.position for reply in replies] == list(range(1, 60))
        assert len({reply.epoch for reply in replies}) == 3
        assert engine_of(worker) == learned(60)
        assert [record.position for record in journal_of(store)] == list(range(60))
    assert store.misfits == []


async def test_a_slice_does_not_overtake_rows_that_were_lost(monkeypatch, virtual_time):
    """The lease ends in the middle of a run, while the rows before are on their way to the store."""
    store = MemoryStore()
    async with started(store, lease_seconds=1.0) as worker:
        await done(worker, observe(0))
        store.gate = asyncio.Event()
        steps = slow_steps(monkeypatch, virtual_time, 0.1)
        long = asyncio.create_task(handled(worker, [observe(number) for number in range(1, 60)]))
        await until(lambda: len(steps) > 5)
        worker.streams.discard()
        await until(lambda: len(worker.streams.loaded) == 1)
        store.gate.set()
        assert {reply.status for reply in await long} == {ReplyStatus.LATER}
        assert [record.key for record in journal_of(store)] == ["key-0"]
        await done(worker, *(observe(number) for number in range(1, 60)))
        assert engine_of(worker) == learned(60)
    assert store.misfits == []


async def test_a_run_ends_early_if_its_stream_is_deleted(monkeypatch, virtual_time):
    async with started(lease_seconds=1.0) as worker:
        await done(worker, observe(0))
        deletion = await delete(worker)
        steps = slow_steps(monkeypatch, virtual_time, 0.1)
        long = asyncio.create_task(handled(worker, [observe(number) for number in range(1, 60)]))
        await until(lambda: len(steps) > 5)
        await done(worker, deletion)
        # Depending on how much was durable before the deletion.
        assert (await long)[-1].status in (ReplyStatus.LATER, ReplyStatus.MISSING)
        assert (await one(worker, observe(1))).status is ReplyStatus.MISSING
        assert len(steps) < 60


async def test_a_long_journal_is_replayed_in_slices(monkeypatch, virtual_time):
    store = MemoryStore()
    async with started(store, streams=["s", "t"], lease_seconds=1.0) as worker:
        await done(worker, *(observe(number) for number in range(100)), observe(0, "t"))
        worker.streams.loaded.clear()
        steps = slow_steps(monkeypatch, virtual_time, 0.1)
        load = asyncio.create_task(handled(worker, [ask(Action.STATUS)]))
        await until(lambda: steps)
        await done(worker, ask(Action.PEEK, payload=feature(1), stream="t"))
        assert 0 < len(steps) < 30
        ((reply,),) = (await load,)
        assert (reply.status, reply.facts["epoch"], len(steps)) == (ReplyStatus.DONE, 2, 101)
        assert engine_of(worker) == learned(100)


def paused_step(monkeypatch, position):
    """Have the observe at a position wait for an event; returns the event that it sets first, and that one."""
    begun, release = threading.Event(), threading.Event()
    learn = LiveStream._observe

    def observe_slowly(live, payload):
        if live.position == position:
            begun.set()
            assert release.wait(60)
        return learn(live, payload)

    monkeypatch.setitem(live_stream_module._CHANGES, Kind.OBSERVE, observe_slowly)
    return begun, release


async def test_a_step_that_takes_long_is_computed_in_a_thread(monkeypatch):
    """Nothing can interrupt a step, so other streams are served beside it."""
    monkeypatch.setattr(loaded_stream, "_SLOW_STEP", 0.0)
    store = MemoryStore()
    async with started(store, streams=["s", "t"]) as worker:
        await done(worker, observe(0, "t"))
        begun, release = paused_step(monkeypatch, 3)
        long = asyncio.create_task(handled(worker, [observe(number) for number in range(10)]))
        waiting = asyncio.create_task(handled(worker, [ask(Action.STATUS)]))
        while not begun.is_set():
            await asyncio.sleep(0)
        await done(worker, observe(1, "t"), ask(Action.SAVE_SNAPSHOT, "k", b"kept", "t"))
        worker.metrics()
        assert not long.done()
        assert not waiting.done()
        release.set()
        assert [reply.position for reply in await long] == list(range(10))
        assert (await waiting)[0].status is ReplyStatus.DONE
        await done(worker, save_snapshot("a"), observe(10), roll_back("a"))
        assert engine_of(worker) == learned(10)
        worker.streams.begin_unload("s")
        await done(worker, observe(10, key="again"))
        assert engine_of(worker) == learned(11)
    assert store.misfits == []


async def test_streams_that_compute_in_threads_equal_their_journals(monkeypatch):
    """Whatever is asked at the same time, what is in memory is what the records in the store tell."""
    monkeypatch.setattr(loaded_stream, "_SLOW_STEP", 0.0)
    chance = random.Random(5)

    async def client(worker, name):
        for number in range(25):
            stream = chance.choice("st")
            key = f"{name}-{number}"
            requests = chance.choice(
                [
                    [observe(row, stream, key=f"{key}-{row}") for row in range(chance.randrange(1, 8))],
                    [ask(Action.PEEK, key, feature(3), stream), ask(Action.STATUS, stream=stream)],
                    [ask(Action.SAVE_SNAPSHOT, key, b"kept", stream, replace=True)],
                    [
                        ask(Action.SAVE_SNAPSHOT, key, b"kept", stream, replace=True),
                        ask(Action.ROLLBACK, f"{key} b", b"kept", stream),
                    ],
                    [ask(Action.EXPLAIN, key, feature(4), stream), ask(Action.EXPORT, stream=stream)],
                ]
            )
            outcomes = {ReplyStatus.LATER}
            while ReplyStatus.LATER in outcomes:
                outcomes = {reply.status for reply in await handled(worker, requests)}
            assert outcomes == {ReplyStatus.DONE}
            if chance.random() < 0.1:
                worker.streams.begin_unload(stream)
            worker.metrics()

    store = MemoryStore()
    async with started(store, streams=["s", "t"], snapshot_records=7, unload_records=3) as worker:
        await asyncio.gather(*(client(worker, name) for name in "abcdef"))
        await done(worker, *(ask(Action.STATUS, stream=stream) for stream in "st"))
        async with started(store, streams=()) as successor:
            for stream in "st":
                (reply,) = await done(successor, ask(Action.STATUS, stream=stream))
                assert reply.facts["position"] == worker.streams.loaded[stream].live.position
                assert reply.facts["replayed_differently"] == 0
                assert engine_of(successor, stream) == engine_of(worker, stream)
    assert store.misfits == []


async def test_a_caller_that_goes_away_does_not_interrupt_a_stream_that_computes_in_a_thread(monkeypatch):
    monkeypatch.setattr(loaded_stream, "_SLOW_STEP", 0.0)
    store = MemoryStore()
    async with started(store) as worker:
        await done(worker, observe(0))
        begun, release = paused_step(monkeypatch, 1)
        gone = asyncio.create_task(handled(worker, [observe(1)]))
        while not begun.is_set():
            await asyncio.sleep(0)
        gone.cancel()
        with pytest.raises(asyncio.CancelledError):
            await gone
        release.set()
        (reply,) = await done(worker, observe(1))
        assert (reply.position, reply.epoch) == (1, 1)
        assert engine_of(worker) == learned(2)
    assert store.misfits == []


# Damaged streams.


class CountingStore(MemoryStore):
    """A store that counts how often streams are read."""

    def __init__(self):
        super().__init__()
        self.reads = 0

    async def acquire(self, *arguments):
        self.reads += 1
        return await super().acquire(*arguments)


async def unload(worker, stream="s"):
    worker.streams.begin_unload(stream)
    await until(lambda: not worker.streams.busy)


def damaged(data):
    """Return the bytes with one bit changed."""
    changed = bytearray(data)
    changed[len(changed) // 2] ^= 1
    return bytes(changed)


async def damage(worker, store):
    """Have a stream learn five samples, save a snapshot, unload, learn three more, and damage its newest snapshot."""
    await done(worker, *(observe(number) for number in range(5)), save_snapshot("good"))
    await unload(worker)
    await done(worker, *(observe(number) for number in range(5, 8)))
    worker.streams.loaded.clear()
    store.content["s"].snapshot = damaged(store.content["s"].snapshot)


def unloadable(worker):
    families = {family.name: family for family in worker.metrics()}
    return families["protodcs_worker_unloadable_streams"].samples[0].value


async def listed_problems(worker):
    return {stream.id: stream.problem for stream in await worker.list_streams("", None, 10)}


async def test_a_damaged_stream_is_not_read_again_after_some_attempts(caplog):
    store = CountingStore()
    async with started(store, streams=["s", "t"], unload_records=0) as worker:
        await damage(worker, store)
        assert (unloadable(worker), await listed_problems(worker)) == (0, {"s": None, "t": None})
        reads = store.reads
        for request in (observe(8), ask(Action.STATUS), save_snapshot("a"), ask(Action.FREEZE)):
            reply = await one(worker, request)
            assert (reply.status, reply.code) == (ReplyStatus.CONFLICT, "stream_damaged")
            assert "does not match its checksum: it is damaged. Restore a saved snapshot" in reply.message
            assert (unloadable(worker), await listed_problems(worker)) == (1, {"s": reply.message, "t": None})
        assert store.reads == reads + 3
        await done(worker, observe(0, "t"))
    assert [record.message for record in caplog.records].count("a stream cannot be loaded") == 1


def another_format(data):
    """Return a snapshot or a record as a version with another format would have written it."""
    body = bytes([data[0] + 1]) + data[1:-4]
    return body + zlib.crc32(body).to_bytes(4, "little")


def refuse_values(monkeypatch, content):
    """As if a check of the state's values fails in this version."""

    def refuse(*_, **__):
        raise StateError("the state's array 'bias_sums' has values outside 0.0 to 1000")

    monkeypatch.setattr(live_stream_module.methods, "restore", refuse)
    return "has values outside"


def fail_in_replay(monkeypatch, content):
    """As if this version has a bug."""
    monkeypatch.setattr(LiveStream, "replay", lambda *_: 1 / 0)
    return "ZeroDivisionError"


def change_snapshot_format(monkeypatch, content):
    monkeypatch.setattr(content, "snapshot", another_format(content.snapshot))
    return "The snapshot of the stream was written by another version"


def change_record_format(monkeypatch, content):
    monkeypatch.setattr(content, "journal", [(*where, another_format(data)) for *where, data in content.journal])
    return "A journal record was written by another version"


def change_spec(monkeypatch, content):
    monkeypatch.setattr(content, "spec", StreamSpec.unpack(SPEC).model_copy(update={"schema_version": 99}).pack())
    return "The stream was written by another version"


@pytest.mark.parametrize(
    "refuse", [refuse_values, fail_in_replay, change_snapshot_format, change_record_format, change_spec]
)
async def test_a_stream_that_this_version_cannot_load_is_kept_and_not_called_damaged(monkeypatch, refuse):
    """All checksums are right: another version may read it, and so does this one after the cause is gone."""
    store = MemoryStore()
    async with started(store, unload_records=0) as worker:
        await done(worker, *(observe(number) for number in range(5)))
        await unload(worker)
        await done(worker, *(observe(number) for number in range(5, 8)))
        worker.streams.loaded.clear()
        content = store.content["s"]
        with monkeypatch.context() as patched:
            reason = refuse(patched, content)
            before = content.spec, content.snapshot, list(content.journal)
            for request in (observe(8), ask(Action.STATUS), ask(Action.EXPORT), observe(8)):
                reply = await one(worker, request)
                assert (reply.status, reply.code) == (ReplyStatus.CONFLICT, "stream_not_loaded")
                assert reason in reply.message
                assert "Its stored data is kept. Export its state with the version that wrote it" in reply.message
                assert not {"damaged", "delete"} & set(reply.message.lower().replace(".", " ").split())
                assert (unloadable(worker), await listed_problems(worker)) == (1, {"s": reply.message})
            assert (content.spec, content.snapshot, content.journal) == before
        # As a process that was started again.
        worker.streams.discard()
        await done(worker, observe(8))
        assert engine_of(worker) == learned(9)
        assert (unloadable(worker), await listed_problems(worker)) == (0, {"s": None})


async def test_errors_that_pass_are_no_reason_not_to_load_a_stream_again():
    store = MemoryStore()
    async with (
        started(store, "one", quarantine_failures=1) as worker,
        started(store, "two", streams=(), quarantine_failures=1) as other,
    ):
        await done(worker, observe(0))
        assert (await one(other, observe(1))).status is ReplyStatus.HELD
        worker.streams.loaded.clear()
        store.down = True
        assert (await one(worker, observe(1))).status is ReplyStatus.LATER
        store.down = False
        shared = store.shared.popitem()
        assert (await one(worker, observe(1))).status is ReplyStatus.LATER
        store.shared.update([shared])
        await done(worker, observe(1))
        assert (unloadable(worker), unloadable(other)) == (0, 0)


@pytest.mark.parametrize("attempts", [0, 5])
async def test_a_damaged_stream_can_be_deleted_and_created_again(attempts):
    store = MemoryStore()
    async with started(store, unload_records=0) as worker:
        await damage(worker, store)
        for _ in range(attempts):
            await one(worker, observe(8))
        await done(worker, await delete(worker))
        assert (await one(worker, observe(8))).status is ReplyStatus.MISSING
        await done(worker, create(), observe(0))
        assert (engine_of(worker), unloadable(worker)) == (learned(1), 0)


@pytest.mark.parametrize("attempts", [0, 5])
async def test_a_damaged_stream_can_be_rolled_back(attempts):
    store = MemoryStore()
    async with started(store, unload_records=0) as worker:
        await damage(worker, store)
        for _ in range(attempts):
            await one(worker, observe(8))
        (names,) = await done(worker, ask(Action.LIST_SNAPSHOTS))
        assert names.facts == {"snapshots": ["good"]}
        # Five observes, one saved snapshot and three observes are in the journal.
        (reply,) = await done(worker, roll_back("good"))
        assert (reply.position, unloadable(worker)) == (9, 0)
        assert engine_of(worker) == learned(5)
        # The answers of the damaged snapshot are lost, and not its keys.
        replies = [await one(worker, observe(number)) for number in range(5)]
        assert [reply.status for reply in replies] == [ReplyStatus.EXPIRED] * 5
        # The records behind the damaged snapshot still tell of their requests.
        retries = await done(worker, *(observe(number) for number in (5, 6, 7)))
        assert [(retry.position, retry.repeated) for retry in retries] == [(6, True), (7, True), (8, True)]
        assert (await done(worker, roll_back("good")))[0].repeated
        await done(worker, observe(5, key="again"))
        async with started(store, streams=()) as successor:
            (reply,) = await done(successor, observe(6, key="once more"))
            assert reply.position == 11
            assert engine_of(successor) == learned(7)
    assert store.misfits == []


async def test_a_stream_with_a_damaged_record_keeps_its_other_keys_when_it_is_restored():
    store = MemoryStore()
    async with started(store, unload_records=0) as worker:
        await damage(worker, store)
        content = store.content["s"]
        content.snapshot = damaged(content.snapshot)
        *where, data = content.journal[1]
        content.journal[1] = (*where, damaged(data))
        assert (await one(worker, observe(8))).status is ReplyStatus.CONFLICT
        (reply,) = await done(worker, ask(Action.IMPORT, "import", learned(20)))
        assert reply.position == 9
        assert engine_of(worker) == learned(20)
        # The key of the damaged record is lost, and the answers before it have expired.
        replies = [await one(worker, observe(number)) for number in range(8)]
        assert [reply.status for reply in replies] == [ReplyStatus.EXPIRED] * 6 + [ReplyStatus.DONE] * 2
        assert [reply.repeated for reply in replies[6:]] == [False, True]


async def test_a_stream_with_damaged_keys_forgets_those_and_no_others_when_it_is_restored():
    store = MemoryStore()
    async with started(store, unload_records=0) as worker:
        await done(worker, *(observe(number) for number in range(5)), save_snapshot("good"))
        await unload(worker)
        await done(worker, *(observe(number) for number in range(5, 8)))
        worker.streams.loaded.clear()
        content = store.content["s"]
        ((position, keys),) = content.keys
        content.keys = [KeySegment(position, damaged(keys))]
        reply = await one(worker, observe(8))
        assert (reply.status, reply.code) == (ReplyStatus.CONFLICT, "stream_damaged")
        assert "idempotency keys do not match their checksum: they are damaged" in reply.message
        await done(worker, roll_back("good"))
        replies = await done(worker, *(observe(number) for number in (6, 7, 0)))
        assert [reply.repeated for reply in replies] == [True, True, False]


async def test_a_damaged_saved_snapshot_is_an_error_and_changes_nothing():
    store = MemoryStore()
    async with started(store, unload_records=0) as worker:
        await damage(worker, store)
        content = store.content["s"]
        content.saved["good"] = damaged(content.saved["good"])
        before = content.snapshot, list(content.journal)
        for _ in range(5):
            reply = await one(worker, roll_back("good"))
            assert reply.status is ReplyStatus.WRONG
            assert "does not match its hash" in reply.message
        assert (await one(worker, roll_back("never saved"))).status is ReplyStatus.MISSING
        assert (content.snapshot, content.journal) == before
        assert (await one(worker, observe(8))).status is ReplyStatus.CONFLICT


async def test_a_damaged_saved_snapshot_does_not_harm_a_stream_that_is_not_damaged():
    store = MemoryStore()
    async with started(store) as worker:
        await done(worker, observe(0), save_snapshot("a"), observe(1))
        store.content["s"].saved["a"] = damaged(store.content["s"].saved["a"])
        assert (await one(worker, roll_back("a"))).status is ReplyStatus.WRONG
        assert engine_of(worker) == learned(2)


async def test_a_worker_forgets_what_it_could_not_load_with_its_lease():
    store = MemoryStore()
    async with started(store, unload_records=0, quarantine_failures=1) as worker:
        await damage(worker, store)
        await one(worker, observe(8))
        assert (await one(worker, observe(8))).status is ReplyStatus.CONFLICT
        store.content["s"].snapshot = damaged(store.content["s"].snapshot)
        worker._lease._renewed = -float("inf")
        await done(worker, observe(8))

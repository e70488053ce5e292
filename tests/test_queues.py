"""Requests of many callers on one stream: what is computed while others are written, and in which order."""

import asyncio
from contextlib import asynccontextmanager

import pytest

from made_service import ask, engine_of, learned, observe, settings, started
from memory_store import MemoryStore
from protodcs.serve.messages import Action, ReplyStatus
from protodcs.serve.pipeline.queues import Queues
from protodcs.serve.stream.records import Record
from protodcs.serve.telemetry.metrics import IngressMetrics

pytestmark = pytest.mark.usefixtures("virtual_time")


def queues_of(worker):
    config = settings(request_seconds=60.0)
    return Queues(worker.pipeline.begin, config, IngressMetrics(config.max_queued_requests))


def keys_in(store, stream="s"):
    return [Record.unpack(data).key for *_, data in store.content[stream].journal]


@asynccontextmanager
async def waiting():
    """A store that writes nothing until its gate opens, a worker with a stream of one sample, and its queues."""
    store = MemoryStore()
    async with started(store) as worker:
        queues = queues_of(worker)
        await queues.ask(observe(0))
        store.gate = asyncio.Event()
        yield store, worker, queues
    assert store.misfits == []


async def asked(queues, *requests):
    """Ask for each of them, in this order, without waiting for a reply."""
    tasks = []
    for request in requests:
        tasks.append(asyncio.create_task(queues.ask(request)))
        # Let it compute. The clock is virtual.
        await asyncio.sleep(0.001)
    return tasks


async def test_a_request_is_computed_while_the_one_before_is_written():
    async with waiting() as (store, worker, queues):
        tasks = await asked(queues, *(observe(number) for number in range(1, 6)))
        # One is written, one is computed, and the others become the next group.
        assert worker.streams.loaded["s"].live.position == 3
        assert not any(task.done() for task in tasks)
        store.gate.set()
        replies = [await task for task in tasks]
        assert [reply.position for reply in replies] == [1, 2, 3, 4, 5]
        assert engine_of(worker) == learned(6)


async def test_requests_are_sent_again_in_their_order_if_a_write_fails():
    store = MemoryStore()
    async with started(store, store_connect_timeout=0.5) as worker:
        queues = queues_of(worker)
        await queues.ask(observe(0))
        store.down = True
        tasks = await asked(queues, *(observe(number) for number in range(1, 9)))
        await asyncio.sleep(5.0)
        assert not any(task.done() for task in tasks)
        store.down = False
        replies = [await task for task in tasks]
        assert {reply.status for reply in replies} == {ReplyStatus.DONE}
        assert keys_in(store) == [f"key-{number}" for number in range(9)]
        assert engine_of(worker) == learned(9)
    assert store.misfits == []


@pytest.mark.parametrize("moment", [0.0, 0.002, 0.004])
async def test_a_request_does_not_overtake_one_that_was_lost(moment):
    async with waiting() as (store, worker, queues):
        tasks = await asked(queues, *(observe(number) for number in range(1, 4)))
        # Others may have changed the stream, so it is read again: that fences what is on its way.
        worker.streams.discard()
        tasks += await asked(queues, *(observe(number) for number in range(4, 8)))
        await asyncio.sleep(moment)
        store.gate.set()
        replies = [await task for task in tasks]
        assert {reply.status for reply in replies} == {ReplyStatus.DONE}
        assert keys_in(store) == [f"key-{number}" for number in range(8)]
        assert engine_of(worker) == learned(8)


async def test_what_takes_more_than_the_stream_in_memory_waits_for_all_before_it():
    async with waiting() as (store, worker, queues):
        tasks = await asked(
            queues, observe(1), observe(2), ask(Action.SAVE_SNAPSHOT, "saved", b"name"), observe(3), observe(4)
        )
        assert worker.streams.loaded["s"].live.position == 3
        store.gate.set()
        replies = [await task for task in tasks]
        assert [reply.position for reply in replies] == [1, 2, 3, 4, 5]


async def test_a_caller_that_goes_away_leaves_its_places_and_the_order_of_the_others():
    async with waiting() as (store, _, queues):
        tasks = await asked(queues, *(observe(number) for number in range(1, 8)))
        # In flight, and not sent yet.
        tasks[0].cancel()
        tasks[4].cancel()
        await asyncio.sleep(0.001)
        assert queues.waiting == 5
        store.gate.set()
        found = await asyncio.gather(*tasks, return_exceptions=True)
        # What was sent is applied; what was not is not.
        assert keys_in(store) == ["key-0", "key-1", "key-2", "key-3", "key-4", "key-6", "key-7"]
        assert sum(isinstance(reply, asyncio.CancelledError) for reply in found) == 2
        await asyncio.sleep(0.001)
        assert queues.waiting == 0


async def test_requests_that_are_made_later_do_not_hold_up_those_before_them():
    made = asyncio.Event()

    async def make():
        await made.wait()
        return [observe(3)]

    async with waiting() as (store, worker, queues):
        (first, second) = await asked(queues, observe(1), observe(2))
        third = asyncio.create_task(queues.ask_when_made("s", make, 1))
        (last,) = await asked(queues, observe(4))
        store.gate.set()
        assert [(await task).position for task in (first, second)] == [1, 2]
        assert not last.done()
        made.set()
        assert [(await third)[0].position, (await last).position] == [3, 4]
        assert engine_of(worker) == learned(5)

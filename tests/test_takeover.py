"""Workers that an ingress cannot reach: health checks, takeovers of their streams, and the list of members."""

import asyncio
import random
import time
from contextlib import AsyncExitStack, asynccontextmanager, suppress

import pytest

from made_service import (
    ask,
    create,
    done,
    engine_of,
    feature,
    forwarding_queues,
    handled,
    learned,
    observe,
    one,
    placement_of,
    settings,
    started,
)
from memory_store import MemoryStore
from protodcs.errors import StoreError
from protodcs.serve.messages import Action, Reply, ReplyStatus, Request, WorkerLostError
from protodcs.serve.pipeline.queues import LateError
from protodcs.serve.workers.worker import Worker

pytestmark = pytest.mark.usefixtures("virtual_time")

CHECK = Request("", Action.CHECK_HEALTH, "")
PEEK = ask(Action.PEEK, payload=feature(50))
LEASE = 3.0


def take(request, holder="one"):
    """Return a request that takes its stream from a holder."""
    return request._replace(stand_in=True, take_from=holder)


def two_workers(store):
    """Return two workers on a store: "one" with the stream "s", and "two"."""
    return started(store, "one", lease_seconds=LEASE), started(store, "two", streams=(), lease_seconds=LEASE)


# Takeovers.


REQUESTS = {"observe": observe, "keep": lambda number: ask(Action.SAVE_SNAPSHOT, payload=b"name")}


@pytest.mark.parametrize("action", REQUESTS)
async def test_a_worker_takes_a_stream_from_a_live_holder_on_demand(action):
    request = REQUESTS[action](5)
    store = MemoryStore()
    first, second = two_workers(store)
    async with first as first, second as second:
        await done(first, *(observe(number) for number in range(5)))
        assert (await one(second, request._replace(stand_in=True))).status is ReplyStatus.HELD
        (reply,) = await done(second, take(request))
        assert (reply.position, reply.epoch) == (5, 2)
        # The first worker still has the stream in memory: its write is rejected, and it loads the stream again.
        assert (await one(first, observe(6))).status is ReplyStatus.LATER
        reply = await one(first, observe(6))
        assert (reply.status, reply.message) == (ReplyStatus.HELD, "two")
        assert store.misfits == []


async def test_nothing_is_lost_or_applied_twice_by_a_takeover():
    store = MemoryStore()
    first, second = two_workers(store)
    async with first as first, second as second:
        store.gate = asyncio.Event()
        await done(second, CHECK)
        under_way = asyncio.create_task(handled(first, [observe(0)]))
        await asyncio.sleep(0.1)
        taken = asyncio.create_task(handled(second, [take(observe(0))]))
        await asyncio.sleep(0.1)
        store.gate.set()
        (refused,), (applied,) = await under_way, await taken
        assert (refused.status, applied.status) == (ReplyStatus.LATER, ReplyStatus.DONE)
        assert engine_of(second) == learned(1)


async def test_a_worker_unloads_a_stream_that_was_taken_when_it_next_renews_its_lease():
    store = MemoryStore()
    first, second = two_workers(store)
    async with first as first, second as second:
        await done(first, observe(0))
        await done(second, take(observe(1)))
        # It cannot know yet.
        assert (await one(first, PEEK)).status is ReplyStatus.DONE
        await asyncio.sleep(LEASE / 3 + 0.1)
        assert (await one(first, PEEK)).status is ReplyStatus.HELD


async def test_a_worker_that_got_its_stream_back_keeps_it():
    store = MemoryStore()
    first, second = two_workers(store)
    async with first as first, second as second:
        await done(first, observe(0))
        await done(second, take(observe(1)))
        await second.drain(Reply(ReplyStatus.CLOSED, "over"))
        await asyncio.sleep(LEASE)
        await done(first, observe(2))
        loaded = first.streams.loads
        await asyncio.sleep(LEASE)
        await done(first, observe(3))
        assert first.streams.loads == loaded
        assert engine_of(first) == learned(4)


# Health checks.


async def test_a_worker_passes_a_health_check_only_while_it_reaches_the_store():
    store = MemoryStore()
    async with started(store) as worker:
        await done(worker, CHECK)
        store.down = True
        assert (await one(worker, CHECK)).status is ReplyStatus.LATER
        store.down = False
        await done(worker, CHECK)


async def test_a_worker_whose_lease_another_process_has_fails_its_health_check():
    store = MemoryStore()
    async with started(store) as worker, started(store, streams=()):
        assert (await one(worker, CHECK)).status is ReplyStatus.LATER


# Members.


async def test_a_worker_that_is_not_a_member_says_where_its_streams_are_and_serves_nothing():
    store = MemoryStore()
    async with started(store, "one", streams=()) as first, started(store, "two", streams=()) as second:
        for worker in (first, second):
            worker.streams.place(placement_of(["one", "two"]))
        streams = [f"s{number}" for number in range(30)]
        mine = [stream for stream in streams if placement_of(["one", "two"]).first(stream) == "one"]
        await done(first, *(create(stream) for stream in mine))
        await done(first, *(observe(0, stream) for stream in mine))
        for worker in (first, second):
            worker.streams.place(placement_of(["two"]))
        await asyncio.sleep(1)
        for request in (observe(1, mine[0]), observe(1, mine[0], stand_in=True), CHECK):
            assert await one(first, request) == Reply(ReplyStatus.MOVED, "two")
        assert first.facts()["loaded"] == 0
        await done(second, *(observe(1, stream) for stream in mine))


# Several ingresses.

WORKERS = ["one", "two", "three"]
SETTINGS = {"lease_seconds": LEASE, "attempt_seconds": 2.0, "request_seconds": 20.0, "store_connect_timeout": 1.0}


class Connection:
    """The connection of one worker to the shared store; while it is cut, every call times out."""

    def __init__(self, store):
        self._store, self.cut, self.timeout = store, False, 5.0

    def __getattr__(self, name):
        found = getattr(self._store, name)

        async def call(*arguments):
            if self.cut:
                await asyncio.sleep(self.timeout)
                raise StoreError("the store did not answer")
            return await found(*arguments)

        return call if asyncio.iscoroutinefunction(found) else found


class Network:
    """Workers on one store, and routers that cannot reach some of them.

    Attributes:
        connections: of each worker to the store.
        cut: pairs of a router's name and a worker's name between which calls are lost.
    """

    def __init__(self):
        self.store = MemoryStore()
        self.connections = {name: Connection(self.store) for name in WORKERS}
        self.workers = {name: Worker(name, self.connections[name], settings(**SETTINGS)) for name in WORKERS}
        self.cut = set()

    async def start(self, stack):
        for worker in self.workers.values():
            worker.streams.place(placement_of(WORKERS))
            await worker.start()
            stack.push_async_callback(worker.close)

    def router(self, name, **changes):
        """Return a router; the calls that are cut off never return."""

        async def call(worker, requests):
            await asyncio.sleep(0.001)
            if (name, worker) in self.cut:
                await asyncio.sleep(3600)
            if worker not in self.workers:
                raise WorkerLostError("no such worker")
            return await handled(self.workers[worker], requests)

        async def view():
            return WORKERS

        config = settings(**{**SETTINGS, **changes})
        return forwarding_queues(call, view, config)[0]

    def takeovers(self):
        """Return how many streams workers took from live ones."""
        return sum(worker.counted.takeovers._value.get() for worker in self.workers.values())


async def send(router, stream, numbers, pause, waits):
    """Send one observe after another, each until it is applied; add the seconds that each took to `waits`."""
    for number in numbers:
        start = time.monotonic()
        while True:
            with suppress(LateError):
                reply = await router.ask(observe(number % 200, stream, key=f"{id(router)}-{number}"))
                assert reply.status is ReplyStatus.DONE
                break
        waits.append(time.monotonic() - start)
        await asyncio.sleep(pause)


@asynccontextmanager
async def made_network():
    """A network with 20 streams."""
    async with AsyncExitStack() as stack:
        network = Network()
        await network.start(stack)
        await done(network.workers["one"], *(create(f"s{number}") for number in range(20)))
        yield network
        assert network.store.misfits == []


def stream_of(worker):
    """Return one of the streams that belong to a worker."""
    return next(f"s{number}" for number in range(20) if placement_of(WORKERS).first(f"s{number}") == worker)


async def test_an_ingress_that_cannot_reach_the_holder_is_served_by_another_worker():
    async with made_network() as network:
        router, stream, waits = network.router("ingress"), stream_of("one"), []
        await send(router, stream, range(3), 1.0, [])
        network.cut = {("ingress", "one")}
        await send(router, stream, range(3, 60), 1.0, waits)
        # One call and two checks time out, then a stand-in has the stream.
        assert max(waits) < SETTINGS["request_seconds"]
        assert sorted(waits)[-2] < 1.0
        assert network.takeovers() == 1
        network.cut = set()
        await send(router, stream, range(60, 200), 1.0, waits)
        status = await router.ask(ask(Action.STATUS, stream=stream))
        assert (status.facts["worker"], status.facts["position"]) == ("one", 200)


@pytest.mark.parametrize("store_timeout", [0.0, 5.0], ids=["refused", "silent"])
async def test_a_worker_that_is_cut_off_from_the_store_stalls_each_stream_once(store_timeout):
    async with made_network() as network:
        router, streams = network.router("ingress"), [f"s{number}" for number in range(20)]
        waits = {stream: [] for stream in streams}
        network.connections["one"].timeout = store_timeout
        await asyncio.gather(*(send(router, stream, range(3), 1.0, []) for stream in streams))
        network.connections["one"].cut = True
        await asyncio.gather(*(send(router, stream, range(3, 200), 1.0, waits[stream]) for stream in streams))
        network.connections["one"].cut = False
        assert [sum(wait > 0.5 for wait in waits[stream]) for stream in streams] == [
            int(placement_of(WORKERS).first(stream) == "one") for stream in streams
        ]
        longest = SETTINGS["attempt_seconds"] + LEASE + 1.0
        assert max(max(stalls) for stalls in waits.values()) < longest


async def test_an_ingress_that_reaches_all_workers_follows_a_takeover():
    async with made_network() as network:
        first, second = network.router("first"), network.router("second")
        stream, waits = stream_of("one"), []
        network.cut = {("first", "one")}
        await asyncio.gather(send(first, stream, range(25), 1.0, []), send(second, stream, range(25), 1.0, waits))
        assert max(waits) < 1.0
        assert network.takeovers() == 1


async def test_two_ingresses_that_reach_different_workers_take_a_stream_from_each_other_rarely():
    """No worker of the two can serve both; each takes the stream at most once in ten leases."""
    async with made_network() as network:
        first, second = network.router("first"), network.router("second")
        stream = stream_of("one")
        stand_in, third = placement_of(WORKERS).order(stream)[1:]
        network.cut = {("first", "one"), ("second", stand_in), ("first", third), ("second", third)}
        start = time.monotonic()
        await asyncio.gather(send(first, stream, range(40), 0.5, []), send(second, stream, range(40), 0.5, []))
        seconds = time.monotonic() - start
        assert 1 <= network.takeovers() <= seconds / (10 * LEASE) + 1


@pytest.mark.parametrize("seed", range(4))
async def test_every_request_is_applied_once_whatever_the_ingresses_cannot_reach(seed):
    print("seed", seed)
    chance = random.Random(seed)
    async with made_network() as network:
        names = ["first", "second"]

        async def change_network():
            while True:
                pairs = [(name, worker) for name in names for worker in WORKERS]
                network.cut = set(chance.sample(pairs, chance.randint(0, 3)))
                await asyncio.sleep(chance.uniform(1, 30))

        changing = asyncio.create_task(change_network())
        routers = [network.router(name) for name in names]
        streams = [f"s{number}" for number in range(20)]
        await asyncio.gather(*(send(router, stream, range(30), 0.5, []) for router in routers for stream in streams))
        changing.cancel()
        network.cut = set()
        for stream in streams:
            status = await routers[0].ask(ask(Action.STATUS, stream=stream))
            assert (status.facts["position"], status.facts["replayed_differently"]) == (60, 0)

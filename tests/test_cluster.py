"""Processes that share streams: partitions, membership in a real PostgreSQL, and calls between processes."""

import asyncio
import itertools
import time
from collections import Counter

import pytest
import uvloop

from protodcs.errors import ConfigError, StoreError
from protodcs.serve.cluster import membership as memberships
from protodcs.serve.cluster.membership import Membership, SupersededError
from protodcs.serve.cluster.partitions import COUNT, PartitionMap, best_owners, partition_of
from protodcs.serve.settings import ServeConfig
from service.postgres import PostgresServer, shared_postgres

LEASE = 1.0
NOBODY = (None,) * COUNT


# Partitions.


@pytest.mark.parametrize("count", [1, 2, 3, 10, 100])
def test_a_process_more_moves_only_the_partitions_that_it_gets(count):
    before = best_owners(tuple(f"http://10.0.0.{number}:8000" for number in range(count)))
    after = best_owners(tuple(f"http://10.0.0.{number}:8000" for number in range(count + 1)))
    moved = {new for old, new in zip(before, after, strict=True) if old != new}
    assert moved == {f"http://10.0.0.{count}:8000"}
    number = sum(old != new for old, new in zip(before, after, strict=True))
    assert number / COUNT <= 1 / (count + 1) + 0.05
    assert min(Counter(after).values()) > 0.4 * COUNT / (count + 1)


def test_the_order_of_processes_does_not_matter():
    assert best_owners(("a", "b", "c")) == best_owners(("c", "a", "b"))
    assert best_owners(()) == ("",) * COUNT


def test_streams_spread_evenly_and_stay_in_their_partition():
    counts = Counter(partition_of(f"tenant/camera-{number}") for number in range(100_000))
    assert len(counts) == COUNT
    assert max(counts.values()) < 60
    # Running processes agree on this, so it must not change.
    assert [partition_of(stream) for stream in ("", "camera-7", "\ud800")] == [692, 3174, 3432]


def test_a_stream_belongs_to_its_live_owner_and_else_to_the_process_that_should_take_it():
    stream = "s"
    best = PartitionMap(("a", "b"), ("a", "b"), NOBODY).first(stream)
    other = {"a": "b", "b": "a"}[best]
    owners = [*NOBODY]
    owners[partition_of(stream)] = other
    owners = tuple(owners)
    assert PartitionMap(("a", "b"), ("a", "b"), owners).first(stream) == other
    assert PartitionMap((best,), (best,), owners).first(stream) == best
    assert PartitionMap(("a", "b"), ("a", "b"), owners).order(stream) == [other, best]
    assert PartitionMap((), (), owners).first(stream) == ""


# Membership.


class Owner:
    """The worker of a process, and its streams, of which there are none: what it was told."""

    def __init__(self, name, incarnation="1"):
        self.name = name
        self.incarnation = incarnation
        self.streams = self
        self.placement = None
        self.unloads = 0
        self.hold = None

    def place(self, placement):
        self.placement = placement

    async def unload(self, moves):
        assert not any(self.placement.owners[number] == self.name for number in range(COUNT) if moves(_in(number)))
        self.unloads += 1
        if self.hold is not None:
            await self.hold.wait()


def _in(number):
    """Return a stream of a partition."""
    return _STREAMS[number]


_STREAMS = {}
for _stream in itertools.count():
    _STREAMS.setdefault(partition_of(f"s{_stream}"), f"s{_stream}")
    if len(_STREAMS) == COUNT:
        break


@pytest.fixture
def url():
    return shared_postgres().database()


async def process(url, name, incarnation="1", lease=LEASE):
    """Start a process that has no streams."""
    found = Membership(url, Owner(name, incarnation), ServeConfig(lease_seconds=lease))
    await found.open()
    await found.join()
    return found


async def settled(*processes, seconds=180.0):
    """Wait until all processes agree that each partition belongs where it should."""
    names = tuple(sorted(found._owner.name for found in processes))
    end = time.monotonic() + seconds
    while not all(found.placement.owners == best_owners(names) for found in processes):
        assert time.monotonic() < end, [Counter(found.placement.owners) for found in processes]
        await asyncio.sleep(0.02)


async def refreshed(found):
    """Return where streams belong after a process has asked the database again."""
    found.refresh()
    await found._reading
    return found.placement


async def close(*processes):
    for found in processes:
        await found.close()


async def die(found):
    """End a process without a word to the database."""
    found._beating.cancel()
    await asyncio.gather(found._beating, return_exceptions=True)
    await found._disconnect()


async def test_processes_join_and_leave_and_share_all_partitions(url):
    one = await process(url, "one")
    await settled(one)
    two, three = await asyncio.gather(process(url, "two"), process(url, "three"))
    await settled(one, two, three)
    assert one._owner.unloads >= 0.5 * COUNT / memberships._BATCH
    for _ in range(2):
        await two.leave()
        # The others learn of it with their next beat.
        while "two" in one.placement.best:
            await asyncio.sleep(0.02)
        assert two._mine() == []
    await two.close()
    await settled(one, three)
    await close(one, three)


async def test_the_last_process_leaves_at_once_and_its_partitions_are_taken_later(url):
    one = await process(url, "one")
    await settled(one)
    await asyncio.wait_for(one.leave(), 5)
    await one.close()
    two = await process(url, "two")
    await settled(two)
    await two.close()


async def test_the_partitions_of_a_process_that_died_are_taken_after_its_lease(url):
    one, two = await process(url, "one"), await process(url, "two")
    await settled(one, two)
    await die(two)
    died = time.monotonic()
    mine = len(one._mine())
    await asyncio.sleep(0.5 * LEASE)
    assert len(one._mine()) == mine
    await settled(one)
    assert time.monotonic() - died < LEASE + 10
    await one.close()


async def test_a_process_that_was_paused_beyond_its_lease_gets_its_partitions_back(url):
    one, two = await process(url, "one"), await process(url, "two")
    await settled(one, two)
    await die(two)
    await settled(one)
    two._beating = asyncio.create_task(two._beat_forever())
    await settled(one, two)
    await close(one, two)


async def test_a_process_that_starts_again_at_its_address_has_its_partitions_at_once(url):
    one, two = await process(url, "one", lease=60.0), await process(url, "two", lease=60.0)
    await settled(one, two)
    await die(two)
    again = await process(url, "two", "2", lease=60.0)
    assert len(again._mine()) == Counter(best_owners(("one", "two")))["two"]
    await close(one, again)


async def test_a_second_process_with_the_same_address_ends_the_first(url):
    first = await process(url, "one")
    second = await process(url, "one", "2")
    found = await asyncio.wait_for(first.ended, 10)
    assert isinstance(found, SupersededError)
    # It must not change anything any more.
    await first._change(memberships._HAND_OVER, numbers=[0], owners=["two"])
    await first.close()
    await settled(second)
    await second.close()


async def test_a_process_whose_row_was_lost_goes_on(url):
    one, two = await process(url, "one"), await process(url, "two")
    await settled(one, two)
    # As a crash of the database may lose it, or as others forget a machine that slept.
    async with one._connected() as connection:
        await connection.execute("DELETE FROM processes WHERE name = 'one'")
    await one._beat()
    assert not one.ended.done()
    await two._beat()
    assert two.placement.workers == ("one", "two")
    await settled(one, two)
    await close(one, two)


async def test_nothing_is_accepted_for_partitions_that_move_and_requests_do_not_bring_them_back(url):
    one = await process(url, "one")
    await settled(one)
    one._owner.hold = asyncio.Event()
    two = await process(url, "two")
    while not one._moving:
        await asyncio.sleep(0.01)
    moving = dict(one._moving)
    assert 0 < len(moving) <= memberships._BATCH
    one._read = 0.0
    placement = await refreshed(one)
    assert all(placement.first(_in(number)) == "two" for number in moving)
    assert all(one._owner.placement.first(_in(number)) == "two" for number in moving)
    one._owner.hold.set()
    await settled(one, two)
    await close(one, two)


async def test_a_version_that_packs_requests_differently_cannot_join(url, monkeypatch):
    one = await process(url, "one")
    monkeypatch.setattr(memberships, "PROTOCOL", memberships.PROTOCOL + 1)
    with pytest.raises(ConfigError, match="cannot share streams with the running version of one"):
        await process(url, "two")
    await one.close()
    two = await process(url, "two")
    await two.close()


async def test_processes_go_on_after_the_database_was_killed():
    with PostgresServer() as server:
        one, two = await process(server.url, "one"), await process(server.url, "two")
        await settled(one, two)
        await asyncio.to_thread(server.kill)
        with pytest.raises(StoreError, match="does not answer"):
            await one._beat()
        # Requests are still sent where they were.
        placement = await refreshed(one)
        assert set(placement.owners) == {"one", "two"}
        await asyncio.to_thread(server.start)
        three = await process(server.url, "three")
        await settled(one, two, three)
        await close(one, two, three)


def test_a_database_that_is_silent_stops_nobody_for_longer_than_a_lease():
    async def run(server):
        one = await process(server.url, "one")
        await settled(one)
        server.pause()
        try:
            for _ in range(2):
                with pytest.raises(StoreError, match="does not answer"):
                    await asyncio.wait_for(one._beat(), 60)
        finally:
            server.resume()
        await settled(one)
        await one._beat()
        await one.close()

    # The event loop of the service, which ends the process if a file that it watches is closed.
    with PostgresServer() as server, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(run(server))

"""The journals that the harness reads from Redis' append-only file: complete, whatever snapshots cut off."""

import asyncio

import pytest

from made_service import SHARED, SPEC
from protodcs.serve.store.base import Batch, Checkpoint
from protodcs.serve.store.redis import RedisStore
from protodcs.serve.stream.live_stream import StreamSpec
from protodcs.serve.stream.records import Kind, Record
from redis_server import RedisServer
from service.journal import AOF_OPTIONS, entry_of, journals_from_aof, merged, takeovers


def record(position, epoch=1, key=None, row=0):
    """A record of a request of one row."""
    return Record(Kind.FREEZE, position, epoch, 0, key or f"key-{position}", b"", b"", b"d" * 16, row)


@pytest.fixture
def redis(tmp_path):
    with RedisServer(tmp_path, **AOF_OPTIONS) as server:
        yield server


async def created(store, *streams):
    shared = StreamSpec.unpack(SPEC).prototypes
    await store.put_shared(shared, SHARED)
    for stream in streams:
        assert await store.create(stream, SPEC, shared)


def with_store(redis, work):
    async def run():
        store = RedisStore(redis.url)
        try:
            return await work(store)
        finally:
            await store.close()

    return asyncio.run(run())


async def append(store, stream, fence, positions):
    records = [record(position, fence.epoch) for position in positions]
    assert await store.commit([Batch(stream, fence, positions[0], [r.pack() for r in records])]) == [None]
    return records


def test_journals_hold_what_snapshots_cut_off_and_survive_a_kill(redis):
    async def first(store):
        await created(store, "a", "b\u20ac")
        fence = (await store.acquire("a", "w", "1")).fence
        a = await append(store, "a", fence, range(5))
        b = await append(store, "b\u20ac", (await store.acquire("b\u20ac", "w", "1")).fence, range(2))
        assert await store.commit([Checkpoint("a", fence, 5, b"a snapshot\r\n*1\r\n$1")]) == [None]
        return a, b

    async def second(store):
        return await append(store, "a", (await store.acquire("a", "w", "1")).fence, range(5, 7))

    a, b = with_store(redis, first)
    redis.kill()
    redis.start()
    a += with_store(redis, second)
    assert journals_from_aof(redis.folder) == {"a": a, "b\u20ac": b}
    assert journals_from_aof(redis.folder, "another") == {}


def test_a_deleted_stream_has_no_journal_and_a_new_one_begins_again(redis):
    async def work(store):
        await created(store, "a")
        held = await store.acquire("a", "w", "1")
        await append(store, "a", held.fence, range(3))
        await store.delete("a", held.fence)
        await created(store, "a")
        return await append(store, "a", (await store.acquire("a", "w", "1")).fence, range(1))

    records = with_store(redis, work)
    assert journals_from_aof(redis.folder) == {"a": records}


def test_a_torn_transaction_at_the_end_is_left_out(redis):
    async def work(store):
        await created(store, "a")
        return await append(store, "a", (await store.acquire("a", "w", "1")).fence, range(2))

    records = with_store(redis, work)
    (file,) = redis.folder.glob("appendonlydir/*.incr.aof")
    more = record(2).pack()
    push = b"*3\r\n$5\r\nRPUSH\r\n$18\r\nprotodcs:journal:a\r\n$%d\r\n%b\r\n" % (len(more), more)
    whole = file.read_bytes()
    for tail in (push[:-3], b"*1\r\n$5\r\nMULTI\r\n" + push):
        file.write_bytes(whole + tail)
        assert journals_from_aof(redis.folder) == {"a": records}
    file.write_bytes(whole + push)
    assert journals_from_aof(redis.folder) == {"a": [*records, record(2)]}


def test_takeovers_are_counted_and_releases_are_not(redis):
    async def work(store):
        await created(store, "a")
        held = await store.acquire("a", "one", "1")
        await store.release("a", held.fence)
        held = await store.acquire("a", "two", "2")
        await store.acquire("a", "two", "2")

    async def fence(store):
        await store.acquire("a", "three", "3")

    with_store(redis, work)
    assert takeovers(redis.folder) == 0
    with_store(redis, fence)
    assert takeovers(redis.folder) == 1


def test_journals_of_a_primary_and_its_replica_are_joined():
    one, two, other = record(0), record(1), record(1, key="other")
    assert merged([{"a": [one, two]}, {"a": [two, record(2)]}]) == {"a": [one, two, record(2)]}
    assert merged([{"a": [one, two]}, {"a": [one, other]}, {"b": [one]}]) == {"a": [one, two, other], "b": [one]}


def test_an_entry_names_the_request_and_the_row():
    single, third = entry_of(record(0)), entry_of(record(0, key="key", row=2))
    assert (single.key, single.row, third.key, third.row) == ("key-0", 0, "key", 2)
    assert not single.observe

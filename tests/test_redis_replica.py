"""Redis with a real replica: what an acknowledged write survives when the replica is promoted."""

import asyncio
import time
from contextlib import asynccontextmanager

import pytest
import redis

from protodcs.errors import FencedError, StoreError
from protodcs.serve.store.base import Batch
from protodcs.serve.store.redis import RedisStore
from redis_server import RedisServer
from store_contract import BLOB, begun


@asynccontextmanager
async def pair(folder, **options):
    """A primary and a replica that is in sync with it."""
    (folder / "primary").mkdir()
    (folder / "replica").mkdir()
    with RedisServer(folder / "primary", **options) as primary:
        follow = {"replicaof": f"127.0.0.1 {primary.port}", "repl-diskless-sync-delay": "0", **options}
        with RedisServer(folder / "replica", **follow) as replica:
            await until(lambda: asked(replica, "INFO", "replication")["master_link_status"] == "up")
            yield primary, replica


def asked(server, *command):
    """Return the reply of a server to a command."""
    with redis.Redis.from_url(server.url) as client:
        return client.execute_command(*command)


async def until(condition):
    """Wait until something holds; only a hang meets the limit."""
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        await asyncio.sleep(0.01)


def promote(replica):
    """Make the replica the primary."""
    assert replica.command("REPLICAOF", "NO", "ONE") == b"+OK"


async def records_of(store):
    """Return the journal of the stream "s"."""
    return (await store.acquire("s", "reader", "1")).tail


def test_what_a_replica_confirmed_is_there_after_its_promotion(tmp_path):
    async def run():
        async with pair(tmp_path) as (primary, replica):
            store = RedisStore(primary.url, replicas=1, timeout=60.0)
            await store.put_shared(BLOB, b"blob")
            fence = await begun(store)
            written = [b"%d" % position for position in range(200)]
            for position, record in enumerate(written):
                assert await store.commit([Batch("s", fence, position, [record])]) == [None]
            primary.kill()
            promote(replica)
            promoted = RedisStore(replica.url)
            assert await records_of(promoted) == written
            await store.close()
            await promoted.close()

    asyncio.run(run())


def test_a_write_that_no_replica_confirmed_is_not_acknowledged_and_may_be_repeated(tmp_path):
    async def run():
        async with pair(tmp_path) as (primary, replica):
            store = RedisStore(primary.url, replicas=1, timeout=60.0)
            impatient = RedisStore(primary.url, replicas=1, timeout=4.0)
            await store.put_shared(BLOB, b"blob")
            fence = await begun(store)
            replica.pause()
            batch = Batch("s", fence, 0, [b"0"])
            for _ in range(2):
                # Also the retry, which writes nothing any more.
                with pytest.raises(StoreError, match="0 of 1 replicas confirmed it"):
                    await impatient.commit([batch])
            replica.resume()
            await until(lambda: asked(primary, "INFO", "replication")["connected_slaves"] == 1)
            assert await store.commit([batch]) == [None]
            await impatient.close()
            primary.kill()
            promote(replica)
            promoted = RedisStore(replica.url)
            assert await records_of(promoted) == [b"0"]
            await store.close()
            await promoted.close()

    asyncio.run(run())


def test_without_waiting_for_replicas_a_promotion_loses_writes_and_fences_their_writer(tmp_path):
    """The old primary takes writes after the promotion, and dies with them. Nobody goes on from what was lost."""

    async def run():
        async with pair(tmp_path) as (primary, replica):
            store = RedisStore(primary.url)
            await store.put_shared(BLOB, b"blob")
            await store.create("s", b"spec", BLOB)
            await until(lambda: asked(replica, "EXISTS", "protodcs:meta:s"))
            promote(replica)
            lost = (await store.acquire("s", "one", "1")).fence
            assert await store.commit([Batch("s", lost, 0, [b"lost"])]) == [None]
            primary.kill()
            promoted = RedisStore(replica.url)
            held = await promoted.acquire("s", "two", "1")
            assert (held.epoch, held.tail) == (lost.epoch, [])
            (refused,) = await promoted.commit([Batch("s", lost, 0, [b"of the first"])])
            assert isinstance(refused, FencedError)
            await store.close()
            await promoted.close()

    asyncio.run(run())


@pytest.mark.parametrize(
    ("options", "problem"),
    [({}, "min-replicas-to-write"), ({"min-replicas-to-write": "2"}, "replicas connected: 1, needed: 2")],
    ids=["a primary that writes without replicas", "too few replicas"],
)
def test_a_redis_that_cannot_wait_for_so_many_replicas_is_refused(tmp_path, options, problem):
    async def run():
        async with pair(tmp_path, **options) as (primary, _):
            store = RedisStore(primary.url, replicas=2 if options else 1)
            with pytest.raises(StoreError, match=problem):
                await store.check()
            await store.close()

    asyncio.run(run())


def test_a_redis_with_enough_replicas_is_accepted(tmp_path):
    async def run():
        async with pair(tmp_path, **{"min-replicas-to-write": "1"}) as (primary, _):
            store = RedisStore(primary.url, replicas=1)
            await store.check()
            await store.close()

    asyncio.run(run())

"""Streams whose data in Redis was damaged: not loaded, restored, deleted."""

import asyncio

import pytest
import redis

from made_service import ask, delete, done, engine_of, learned, observe, one, started
from protodcs.serve.messages import Action, Outcome
from protodcs.serve.store.redis import RedisStore
from redis_server import RedisServer


def overwrite(client):
    client.set("protodcs:snapshot:s", b"garbage")


def remove(client):
    client.delete("protodcs:snapshot:s")


def damage_record(client):
    client.lset("protodcs:journal:s", 0, b"garbage")


@pytest.mark.parametrize("break_data", [overwrite, remove, damage_record])
def test_a_stream_that_is_damaged_in_redis_is_not_loaded_until_it_is_restored(tmp_path, break_data):
    async def run(server):
        async with started(RedisStore(server.url), snapshot_records=4, quarantine_failures=2) as worker:
            # The snapshot covers four records; three are behind it.
            await done(
                worker, *(observe(number) for number in range(3)), ask(Action.SAVE_SNAPSHOT, "k", b"good"), observe(3)
            )
            await done(worker, observe(4), observe(5))
            worker._streams.loaded.clear()
            client = redis.Redis(port=server.port)
            assert client.exists("protodcs:snapshot:s")
            assert client.llen("protodcs:journal:s") == 3
            break_data(client)
            outcomes = [(await one(worker, observe(6))).outcome for _ in range(3)]
            assert outcomes == [Outcome.CONFLICT] * 3
            assert (await one(worker, ask(Action.LIST_SNAPSHOTS))).facts == {"snapshots": ["good"]}
            (reply,) = await done(worker, ask(Action.ROLLBACK, "back", b"good"))
            assert reply.position == 7
            assert engine_of(worker) == learned(3)
            assert (await done(worker, observe(5)))[0].repeated
            async with started(RedisStore(server.url), streams=()) as successor:
                (reply,) = await done(successor, observe(3, key="again"))
                assert reply.position == 8
                assert engine_of(successor) == learned(4)
                break_data(client)
                successor._streams.loaded.clear()
                await done(successor, await delete(successor))
                assert list(client.scan_iter("*:s")) == []

    with RedisServer(tmp_path) as server:
        asyncio.run(run(server))

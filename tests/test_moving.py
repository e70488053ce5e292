"""`protodcs streams move`: streams go from SQLite to Redis with all that they hold, and exist in one store only."""

import asyncio

import pytest
from typer.testing import CliRunner

from made_service import SPEC, ask, create, done, engine_of, learned, observe, settings
from protodcs.cli import app
from protodcs.errors import InputError
from protodcs.serve.log.entries import LogQuery
from protodcs.serve.messages import STOPPING, Action
from protodcs.serve.store.redis import RedisStore
from protodcs.serve.store.sqlite import SqliteStore
from protodcs.serve.stream.moving import move_streams
from protodcs.serve.workers.worker import Worker
from redis_server import RedisServer


@pytest.fixture
def redis(tmp_path_factory):
    with RedisServer(tmp_path_factory.mktemp("redis")) as server:
        yield server


async def served(store, work, **changes):
    """Run `work` with a worker on a store, then stop the worker as a service does."""
    worker = Worker("worker-0", store, settings(**changes))
    await worker.start()
    try:
        return await work(worker)
    finally:
        await worker.drain(STOPPING)
        await worker.close()


def fill(folder):
    """Store a stream with a snapshot and records behind it, one that was only created, and return the answers."""

    async def work(worker):
        await done(worker, create("new"), create("s"), *(observe(number) for number in range(30)))
        await done(worker, ask(Action.SAVE_SNAPSHOT, "saving", b"before"))
        await done(worker, *(observe(number, key=f"lost {number}") for number in range(3)))
        await done(worker, ask(Action.ROLLBACK, "back to before", b"before"))
        return await done(worker, *(observe(number) for number in range(30, 50)))

    return asyncio.run(served(SqliteStore(folder), work, unload_records=10, snapshot_records=40))


async def log_of(store, stream):
    try:
        return await store.read_log(stream, LogQuery(newest_first=False, limit=100))
    finally:
        await store.close()


def ids(store):
    async def read():
        found = [stream async for stream in store.streams()]
        await store.close()
        return sorted(found)

    return asyncio.run(read())


def test_a_moved_stream_goes_on_where_it_was(tmp_path, redis):
    answers = fill(tmp_path / "streams")
    log = asyncio.run(log_of(SqliteStore(tmp_path / "streams"), "s"))
    assert [entry.rolled_back for entry in log.entries] == [False] * 30 + [True] * 3 + [False] * 20
    moved = CliRunner().invoke(
        app, ["streams", "move", f"sqlite:{tmp_path / 'streams'}", redis.url, "--tenant", "acme"]
    )
    assert moved.exit_code == 0, moved.output
    assert "2" in moved.output
    assert ids(SqliteStore(tmp_path / "streams")) == []
    assert ids(RedisStore(redis.url)) == ["acme/new", "acme/s"]
    assert asyncio.run(log_of(RedisStore(redis.url), "acme/s")) == log

    async def work(worker):
        repeated = await done(worker, *(observe(number, "acme/s") for number in range(30, 50)))
        assert all(reply.repeated for reply in repeated)
        assert [reply.answer for reply in repeated] == [reply.answer for reply in answers]
        (after,) = await done(worker, observe(50, "acme/s"))
        # Among the records are the saved snapshot, the roll-back and what it took back.
        assert after.position == 55
        assert engine_of(worker, "acme/s") == learned(51)
        (saved,) = await done(worker, ask(Action.LIST_SNAPSHOTS, stream="acme/s"))
        assert saved.facts == {"snapshots": ["before"]}
        await done(worker, ask(Action.ROLLBACK, "back", b"before", stream="acme/s"), observe(0, "acme/new"))
        assert engine_of(worker, "acme/s") == learned(30)
        assert engine_of(worker, "acme/new") == learned(1)

    asyncio.run(served(RedisStore(redis.url), work))


def test_an_interrupted_move_can_be_repeated(tmp_path, redis):
    fill(tmp_path / "streams")

    async def run():
        source, target = SqliteStore(tmp_path / "streams"), RedisStore(redis.url)
        commit, moved = target.commit, []

        async def fails(writes):
            raise ConnectionError("interrupted")

        target.commit = fails
        with pytest.raises(ConnectionError):
            await move_streams(source, target, "", moved.append)
        target.commit = commit
        assert moved == []
        # The streams that were begun are written now.
        await move_streams(source, target, "", moved.append)
        assert sorted(moved) == ["new", "s"]
        assert (await target.describe("s")).position == 55
        await source.close()
        await target.close()

    asyncio.run(run())


def test_a_stream_with_other_content_is_not_replaced(tmp_path, redis):
    fill(tmp_path / "streams")

    async def work(worker):
        await done(worker, create("s"), observe(7))

    asyncio.run(served(RedisStore(redis.url), work))

    async def run():
        source, target = SqliteStore(tmp_path / "streams"), RedisStore(redis.url)
        with pytest.raises(InputError, match="'s' exists with other content"):
            await move_streams(source, target, "", lambda _: None)
        assert (await source.describe("s")).position == 55
        assert (await target.describe("s")).position == 1
        assert (await target.describe("s")).spec == SPEC
        await source.close()
        await target.close()

    asyncio.run(run())

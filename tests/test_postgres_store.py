"""The PostgreSQL store: many processes share it, and what was committed is there, whatever happens to the server."""

import asyncio
import random
import subprocess
import sys
import time
from contextlib import asynccontextmanager

import psycopg
import pytest

from memory_store import stored_ids, stored_stream
from protodcs.errors import ConfigError, FencedError, HeldError, StoreError
from protodcs.serve.log.entries import LogEntry, LogLimits, LogQuery
from protodcs.serve.log.notices import Notice
from protodcs.serve.settings import ServeConfig
from protodcs.serve.store import open_store, postgres, schema
from protodcs.serve.store.postgres import PostgresStore
from protodcs.serve.store.values import Batch
from service.postgres import PostgresServer, shared_postgres
from store_contract import BLOB, begun


@pytest.fixture
def url():
    return shared_postgres().database()


@asynccontextmanager
async def opened(url, **options):
    store = PostgresStore(url, **options)
    try:
        await store.prepare()
        yield store
    finally:
        await store.close()


async def refused(url):
    async with opened(url):
        pass


async def created(store, stream="s"):
    """Create a stream that worker "one" holds, and return its fence."""
    await store.renew("one", "1", 60)
    await store.put_shared(BLOB, b"blob")
    return await begun(store, stream)


async def records_of(store):
    """Return all records of each stream; the snapshots of these tests hold the records that they cover."""
    found = {}
    for stream in await stored_ids(store):
        held = await store.acquire(stream, "reader", "1")
        covered = (held.snapshot or b"").split()
        assert held.start == len(covered)
        found[stream] = covered + held.tail
    return found


def entry(position, text):
    return LogEntry(position, 1000, "key", text, "known", True, "cat", 0.0, 1.0, None)


# Several processes.


async def test_two_processes_write_their_streams_and_see_those_of_the_other(url):
    async with opened(url) as one, opened(url) as two:
        fence = await created(one, "acme/a")
        await two.renew("two", "1", 60)
        assert await two.create("acme/b", b"spec", BLOB)
        other = (await two.acquire("acme/b", "two", "1")).fence
        with pytest.raises(HeldError, match="'one'"):
            await two.acquire("acme/a", "two", "1")
        for position in range(5):
            batches = (
                [Batch("acme/a", fence, position, [b"%d" % position])],
                [Batch("acme/b", other, position, [b"x"])],
            )
            assert await asyncio.gather(one.commit(batches[0]), two.commit(batches[1])) == [[None], [None]]
        assert await two.usage() == await one.usage() == {"acme": 8 + 10 + 4}
        assert (await one.totals()).streams == 2


async def test_a_process_that_remembers_a_stream_is_fenced_by_another_that_took_it(url):
    async with opened(url) as one, opened(url) as two:
        fence = await created(one)
        assert await one.commit([Batch("s", fence, 0, [b"0"])]) == [None]
        await one.release("s", fence)
        held = await two.acquire("s", "two", "1")
        # From memory the row of the first process still fits.
        good = await begun(one, "good")
        outcomes = await one.commit([Batch("s", fence, 1, [b"bad"]), Batch("good", good, 0, [b"0"])])
        assert [type(outcome) for outcome in outcomes] == [FencedError, type(None)]
        assert await two.commit([Batch("s", held.fence, 1, [b"1"])]) == [None]
        assert (await two.acquire("s", "two", "1")).tail == [b"0", b"1"]
        assert (await two.acquire("good", "one", "1")).tail == [b"0"]


async def test_an_epoch_that_is_given_out_twice_fences_its_first_worker(url):
    """A restored backup, or a standby that lacks the last commits, undoes an acquisition, so its epoch comes again."""
    sql = shared_postgres().sql
    async with opened(url) as one, opened(url) as two, opened(url) as three:
        await one.release("s", await created(one))
        sql("CREATE TABLE backup AS SELECT * FROM streams", url)
        first = (await two.acquire("s", "two", "1")).fence
        names = ("epoch", "token", "worker", "incarnation")
        sql(f"UPDATE streams SET {', '.join(f'{name} = backup.{name}' for name in names)} FROM backup", url)
        second = (await three.acquire("s", "three", "1")).fence
        assert second.epoch == first.epoch
        # The position that both write to is free: only the token tells them apart.
        (outcome,) = await two.commit([Batch("s", first, 0, [b"of the first"])])
        assert isinstance(outcome, FencedError)
        assert await three.commit([Batch("s", second, 0, [b"of the second"])]) == [None]
        assert (await three.acquire("s", "three", "1")).tail == [b"of the second"]


async def test_a_stream_that_another_process_deleted_is_fenced(url):
    async with opened(url) as one, opened(url) as two:
        fence = await created(one)
        assert await one.commit([Batch("s", fence, 0, [b"0"])]) == [None]
        await two.delete("s", fence)
        assert isinstance((await one.commit([Batch("s", fence, 1, [b"1"])]))[0], FencedError)
        await two.put_shared(BLOB, b"blob")
        again = await begun(two)
        assert again.epoch > fence.epoch


async def test_a_commit_without_reads_is_one_statement(url, monkeypatch):
    async with opened(url) as store:
        fence = await created(store)
        sent = []
        send = postgres._Transaction._send

        async def spy(self, statement, values):
            sent.append(statement)
            return await send(self, statement, values)

        await store.commit([Batch("s", fence, 0, [b"0"], b"", [entry(0, "a")])])
        monkeypatch.setattr(postgres._Transaction, "_send", spy)
        await store.commit([Batch("s", fence, 1, [b"1"], b"", [entry(1, "b")])])
        assert len(sent) == 1
        assert [one.image_ref for one in (await store.read_log("s", LogQuery())).entries] == ["b", "a"]


async def test_readers_of_notices_miss_none_though_processes_write_at_once(url):
    async with opened(url) as one, opened(url) as two:
        stores, seen, after, ended = {"a": one, "b": two}, [], 0, asyncio.Event()
        fences = {name: await created(store, f"acme/{name}") for name, store in stores.items()}

        async def write(name):
            for position in range(60):
                notice = Notice(position, 1, 1000, "guard", "{}")
                batch = Batch(f"acme/{name}", fences[name], position, [b"r"], notices=[notice])
                assert await stores[name].commit([batch]) == [None]

        async def read():
            nonlocal after
            while True:
                last = ended.is_set()
                found = await one.read_tenant_notices("acme", after, 1000)
                seen.extend((stream, notice.position) for _, stream, notice in found)
                after = found[-1][0] if found else after
                if last:
                    return

        reading = asyncio.create_task(read())
        await asyncio.gather(*map(write, stores))
        ended.set()
        await reading
        assert sorted(seen) == [(f"acme/{name}", position) for name in "ab" for position in range(60)]


async def test_a_blob_that_one_process_deletes_while_another_uses_it_is_there_or_missing_as_the_creation_says(url):
    async with opened(url) as one, opened(url) as two:
        for number in range(30):
            fence = await created(one, f"old{number}")
            made, _ = await asyncio.gather(
                two.create(f"new{number}", b"spec", BLOB), one.delete(f"old{number}", fence), return_exceptions=True
            )
            assert made is True or isinstance(made, StoreError)
            assert await two.has_shared(BLOB) == (made is True)
            if made is True:
                await two.delete(f"new{number}", (await two.acquire(f"new{number}", "one", "1")).fence)
        assert await one.usage() == {}


# Layouts.


async def test_trimming_a_log_waits_for_no_commit_unless_it_deletes_something(url):
    """Commits of all streams of all processes would wait for trims too, and trims for each other."""
    limits = LogLimits(3600.0, 2, 2**20, 0)
    async with opened(url) as store, await psycopg.AsyncConnection.connect(url) as other:
        fence = await created(store)
        await store.commit([Batch("s", fence, 0, [b"a"], log=[entry(0, "a")])])
        # As another process that is writing to the stream.
        await other.execute("SELECT * FROM log_sizes FOR UPDATE")
        await store.trim_log(limits, now=None)
        await other.rollback()
        await store.commit([Batch("s", fence, 1, [b"b", b"c"], log=[entry(1, "b"), entry(2, "c")])])
        await other.execute("SELECT * FROM log_sizes FOR UPDATE")
        trim = asyncio.create_task(store.trim_log(limits, now=None))
        while not shared_postgres().sql("SELECT 1 FROM pg_stat_activity WHERE wait_event_type = 'Lock'"):
            assert not trim.done()
            await asyncio.sleep(0.01)
        await other.rollback()
        await trim
        assert [found.position for found in (await store.read_log("s", LogQuery())).entries] == [2, 1]


async def test_processes_that_start_at_once_create_the_tables_once(url):
    stores = [PostgresStore(url) for _ in range(5)]
    await asyncio.gather(*(store.prepare() for store in stores))
    await created(stores[0])
    assert [(await stored_stream(store, "s")).position for store in stores] == [0] * 5
    for store in stores:
        await store.close()


async def test_a_database_in_another_layout_is_left_alone(url):
    async with opened(url) as store:
        await created(store)
    shared_postgres().sql("UPDATE layout SET number = 99", url)
    for _ in range(2):
        with pytest.raises(StoreError, match=f"has layout 99, and this one reads {schema.LAYOUT}. Nothing is lost"):
            await refused(url)
    shared_postgres().sql(f"UPDATE layout SET number = {schema.LAYOUT}", url)
    async with opened(url) as store:
        assert (await stored_stream(store, "s")).position == 0


async def test_a_start_that_fails_creates_no_table(url, monkeypatch):
    with monkeypatch.context() as broken:
        broken.setattr(postgres, "POSTGRES", f"{schema.POSTGRES}; SELECT nothing")
        with pytest.raises(StoreError, match="nothing"):
            await refused(url)
    async with opened(url) as store:
        await created(store)


# Addresses and settings.


async def test_addresses_and_servers_that_cannot_be_used_are_clear_errors(url):
    with pytest.raises(ConfigError, match="postgresql://USER@HOST:PORT/DATABASE") as problem:
        PostgresStore("postgresql://me:secret@[host/x")
    assert "secret" not in str(problem.value)
    with pytest.raises(StoreError, match=r"PostgreSQL at 127\.0\.0\.1:1/x cannot be read or written") as problem:
        await open_store(ServeConfig(store="postgresql://me:secret@127.0.0.1:1/x"))
    assert "secret" not in str(problem.value)
    with pytest.raises(StoreError, match="synchronous_standby_names"):
        await open_store(ServeConfig(store=url, store_replicas=1))
    with pytest.raises(StoreError, match="`synchronous_commit` is `off`"):
        await open_store(ServeConfig(store=f"{url}?options=-csynchronous_commit%3Doff"))


async def test_a_server_that_may_lose_writes_is_refused():
    with (
        PostgresServer(fsync="off", full_page_writes="off") as server,
        pytest.raises(StoreError, match=r"could lose acknowledged writes: `fsync` is `off`.*`full_page_writes`"),
    ):
        await refused(server.url)


# Faults.

CHILD = """
import asyncio, random, sys
from protodcs.errors import StoreError
from protodcs.serve.log.entries import LogEntry
from protodcs.serve.store.values import Batch, Checkpoint
from protodcs.serve.store.postgres import PostgresStore

async def again(call):
    while True:
        try:
            return await call()
        except StoreError:
            await asyncio.sleep(0.02)

async def stream(store, name):
    await again(lambda: store.put_shared("blob", b"shared"))
    await again(lambda: store.create(name, b"spec", "blob"))
    held = await again(lambda: store.acquire(name, "child", "1"))
    said = (held.snapshot or b"").split() + held.tail
    while True:
        records = [b"%s:%d" % (name.encode(), len(said) + index) for index in range(random.randint(1, 3))]
        log = [
            LogEntry(len(said) + index, 1000, "key", record.decode(), "known", True, "cat", 0.0, 1.0, None)
            for index, record in enumerate(records)
        ]
        writes = [Batch(name, held.fence, len(said), records, b"", log)]
        said += records
        if random.random() < 0.3:
            writes.append(Checkpoint(name, held.fence, len(said), b" ".join(said)))
        assert await again(lambda: store.commit(writes)) == [None] * len(writes)
        print(name, len(said), flush=True)

async def main():
    store = PostgresStore(sys.argv[1], timeout=2.0)
    await again(store.prepare)
    await asyncio.gather(*(stream(store, f"s{index}") for index in range(5)))

asyncio.run(main())
"""


class Writer:
    """A process that commits to five streams and says what is durable."""

    def __init__(self, url):
        self.acknowledged = {}
        command = [sys.executable, "-c", CHILD, url]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)

    def read(self, lines):
        for _ in range(lines):
            stream, count = self._process.stdout.readline().split()
            self.acknowledged[stream] = int(count)

    def kill(self):
        self._process.kill()
        for line in self._process.communicate()[0].splitlines(keepends=True):
            if line.endswith("\n"):
                stream, count = line.split()
                self.acknowledged[stream] = int(count)


async def check(url, acknowledged):
    """Nothing that was acknowledged is lost, nothing is doubled or out of order, and the log says the same."""
    async with opened(url) as store:
        found = await records_of(store)
        query = LogQuery(newest_first=False, limit=100_000)
        log = {stream: (await store.read_log(stream, query)).entries for stream in found}
        sums = await store._ask("SELECT CAST(sum(state_bytes + journal_bytes) AS bigint) FROM streams")
        blobs = await store._ask("SELECT sum(length(data)) FROM blobs")
        assert sum((await store.usage()).values()) == sums[0][0] + blobs[0][0]
    for stream, count in acknowledged.items():
        assert len(found[stream]) >= count, stream
    for stream, records in found.items():
        assert records == [f"{stream}:{index}".encode() for index in range(len(records))]
        assert [one.image_ref.encode() for one in log[stream]] == records
        assert [one.position for one in log[stream]] == list(range(len(records)))


async def test_kills_of_the_server_and_of_processes_lose_and_double_nothing():
    dice, acknowledged = random.Random(7), {}
    with PostgresServer() as server:
        for _ in range(4):
            writer = Writer(server.url)
            for _ in range(3):
                writer.read(dice.randint(5, 120))
                time.sleep(dice.random() * 0.01)
                server.kill()
                server.start()
            # The process went on by itself.
            writer.read(30)
            writer.kill()
            acknowledged |= writer.acknowledged
            await check(server.url, acknowledged)
    assert sum(acknowledged.values()) > 300


async def test_a_fail_over_to_a_synchronous_standby_loses_nothing():
    with PostgresServer() as primary, primary.standby() as standby:
        hosts = f"127.0.0.1:{primary.port},127.0.0.1:{standby.port}"
        writer = Writer(f"postgresql://postgres@{hosts}/postgres")
        writer.read(100)
        primary.kill()
        standby.promote()
        writer.read(60)
        writer.kill()
        await check(standby.url, writer.acknowledged)


async def test_a_fail_over_changes_the_generation():
    with PostgresServer() as primary, primary.standby() as standby:
        hosts = f"127.0.0.1:{primary.port},127.0.0.1:{standby.port}"
        async with opened(f"postgresql://postgres@{hosts}/postgres") as store:
            before = store.generation
            primary.kill()
            standby.promote()
            with pytest.raises(StoreError):
                await store.usage()
            await store.usage()
            assert before
            assert store.generation not in ("", before)


async def test_a_server_that_does_not_respond_is_given_up_and_used_again_when_it_does():
    with PostgresServer() as server:
        async with opened(server.url, timeout=1.0) as store:
            fence = await created(store)
            server.pause()
            with pytest.raises(StoreError, match="cannot be read or written"):
                await store.commit([Batch("s", fence, 0, [b"0"])])
            server.resume()
            for _ in range(100):
                try:
                    assert await store.commit([Batch("s", fence, 0, [b"0"])]) == [None]
                    break
                except StoreError:
                    await asyncio.sleep(0.1)
            assert (await store.acquire("s", "one", "1")).tail == [b"0"]


async def test_a_cancelled_call_leaves_the_store_usable(url):
    async with opened(url, connections=1) as store:
        fence = await created(store)
        for delay in (0, 0.0005, 0.002, 0.005, 0.02):
            call = asyncio.create_task(store.commit([Batch("s", fence, 0, [bytes(1 << 20)])]))
            await asyncio.sleep(delay)
            call.cancel()
            await asyncio.wait([call])
        assert await store.commit([Batch("s", fence, 0, [bytes(1 << 20)])]) == [None]
        assert (await stored_stream(store, "s")).position == 1


async def test_a_server_to_which_no_connection_comes_about_in_time_is_a_store_error(monkeypatch):
    async def never(*_, **__):
        await asyncio.sleep(3600)

    monkeypatch.setattr(psycopg.AsyncConnection, "connect", never)
    with pytest.raises(StoreError, match="no connection within"):
        await PostgresStore("postgresql://user:secret@127.0.0.1/none", timeout=0.05).prepare()

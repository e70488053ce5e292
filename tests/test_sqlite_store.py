"""The SQLite store: what was committed is there, once and in order, whatever happens to the process and the disk."""

import asyncio
import os
import random
import sqlite3
import stat
import subprocess
import sys
import time

import pytest

from memory_store import stored_ids
from power_loss import PowerLoss
from protodcs.errors import FencedError, InputError, StoreError
from protodcs.serve.log.entries import LogLimits, LogQuery
from protodcs.serve.store import base, sqlite
from protodcs.serve.store.sqlite import DATABASE, SqliteStore, back_up
from protodcs.serve.store.values import Batch, Checkpoint


async def created(store, stream="s"):
    """Create a stream, and return its fence."""
    await store.put_shared("blob", b"shared")
    assert await store.create(stream, b"spec", "blob")
    return (await store.acquire(stream, "me", "1")).fence


async def records_of(store):
    """Return all records of each stream; the snapshots of these tests hold the records that they cover."""
    found = {}
    for stream in await stored_ids(store):
        held = await store.acquire(stream, "reader", "1")
        covered = (held.snapshot or b"").split()
        assert held.start == len(covered)
        found[stream] = covered + held.tail
    return found


async def content_of(folder):
    """Return all records of each stream of the store in a folder."""
    store = SqliteStore(folder)
    try:
        return await records_of(store)
    finally:
        await store.close()


async def test_a_second_process_gets_an_error_that_names_the_first(tmp_path):
    store = SqliteStore(tmp_path)
    code = f"from protodcs.serve.store.sqlite import SqliteStore; SqliteStore({str(tmp_path)!r})"
    second = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert f"StoreError: the store in {str(tmp_path)!r} is in use by process {os.getpid()}:" in second.stderr
    await store.close()
    await SqliteStore(tmp_path).close()


async def test_only_the_owner_can_read_a_store_and_its_copy(tmp_path):
    await SqliteStore(tmp_path / "streams").close()
    back_up(tmp_path / "streams", tmp_path / "copy")
    for name in ("streams", "copy"):
        assert stat.S_IMODE((tmp_path / name).stat().st_mode) == 0o700


async def test_a_closed_store_says_so_and_can_be_closed_again(tmp_path):
    store = SqliteStore(tmp_path)
    await store.close()
    await store.close()
    with pytest.raises(StoreError, match="closed"):
        await store.create("s", b"", "")


async def test_calls_that_were_made_before_a_close_are_done(tmp_path):
    store = SqliteStore(tmp_path)
    fence = await created(store)
    commit = asyncio.create_task(store.commit([Batch("s", fence, 0, [b"0"])]))
    await asyncio.sleep(0)
    await store.close()
    assert await commit == [None]
    assert await content_of(tmp_path) == {"s": [b"0"]}


async def test_commits_that_wait_together_share_a_transaction(tmp_path):
    store = SqliteStore(tmp_path)
    fences = [await created(store, f"s{number}") for number in range(200)]
    statements = []
    store._database.set_trace_callback(statements.append)
    await asyncio.gather(
        *(store.commit([Batch(f"s{number}", fence, 0, [b"0"])]) for number, fence in enumerate(fences))
    )
    store._database.set_trace_callback(None)
    await store.close()
    assert statements.count("COMMIT") <= 10


async def test_a_call_with_an_error_of_its_own_fails_alone(tmp_path):
    store = SqliteStore(tmp_path)
    fence = await created(store)
    outcomes = await asyncio.gather(
        store.commit([Batch("s", fence, 0, [b"0"])]),
        store.commit([Batch("s", fence, 1, ["a record must be bytes"])]),
        store.commit([Batch("s", fence, 1, [b"1"])]),
        return_exceptions=True,
    )
    assert (outcomes[0], outcomes[2]) == ([None], [None])
    assert isinstance(outcomes[1], StoreError)
    await store.close()
    assert await content_of(tmp_path) == {"s": [b"0", b"1"]}


async def test_a_stream_that_has_lost_records_fails_alone_and_does_not_end_the_store(tmp_path):
    store = SqliteStore(tmp_path)
    fence = await created(store, "damaged")
    await created(store, "other")
    await store.commit([Batch("damaged", fence, 0, (b"first", b"second"))])
    await store.close()
    with sqlite3.connect(tmp_path / DATABASE) as database:
        database.execute("DELETE FROM records WHERE key = (SELECT min(key) FROM records)")
    database.close()
    store = SqliteStore(tmp_path)
    with pytest.raises(StoreError, match=r"has lost records of the stream 'damaged': restore a backup$"):
        await store.acquire("damaged", "w", "1")
    assert not store.failure.done()
    assert await store.acquire("other", "w", "1") is not None
    await store.close()


async def rows_of(store):
    """Return how many rows the journals of all streams have, with those that are to be deleted."""
    return (await store._ask("SELECT count(*) FROM records"))[0][0]


async def append(store, fence, count, position=0, stream="s"):
    """Append records, a commit each."""
    for at in range(position, position + count):
        assert await store.commit([Batch(stream, fence, at, [b"%d" % at])]) == [None]


def snapshot_of(count):
    """Return a snapshot that covers so many records, as `records_of` reads it."""
    return b" ".join(b"%d" % at for at in range(count))


async def test_records_that_a_snapshot_covers_are_deleted_in_portions(tmp_path, monkeypatch):
    monkeypatch.setattr(sqlite, "_RECORDS_AT_ONCE", 10)
    store = SqliteStore(tmp_path)
    fence = await created(store)
    await store.commit([Batch("s", fence, 0, [b"%d" % at for at in range(35)])])
    assert await store.commit([Checkpoint("s", fence, 30, snapshot_of(30))]) == [None]
    left = []
    for at in range(35, 40):
        left.append(await rows_of(store))
        await append(store, fence, 1, at)
    # Each commit deletes ten of the thirty covered ones, and adds one.
    assert left == [35, 26, 17, 8, 9]
    assert await records_of(store) == {"s": [b"%d" % at for at in range(40)]}
    await store.close()


async def test_deletions_keep_up_with_commits_of_many_records(tmp_path):
    store = SqliteStore(tmp_path)
    fences = {f"s{number}": await created(store, f"s{number}") for number in range(100)}
    rows = []
    for end in range(10, 210, 10):
        for name, fence in fences.items():
            assert await store.commit([Batch(name, fence, end - 10, [b"0"] * 10)]) == [None]
        await store.commit([Checkpoint(name, fence, end, b"") for name, fence in fences.items()])
        rows.append(await rows_of(store))
    # A thousand come in each round.
    assert max(rows) <= 2000
    await store.close()


async def test_covered_records_that_a_killed_process_left_are_deleted_by_the_next_one(tmp_path):
    store = SqliteStore(tmp_path)
    fence = await created(store)
    await append(store, fence, 200)
    assert await store.commit([Checkpoint("s", fence, 200, snapshot_of(200))]) == [None]
    # As a kill leaves them.
    store._ranges_to_delete.clear()
    await store.close()
    store = SqliteStore(tmp_path)
    assert await rows_of(store) == 200
    fence = (await store.acquire("s", "me", "2")).fence
    await append(store, fence, 5, 200)
    await store.close()
    store = SqliteStore(tmp_path)
    assert await rows_of(store) == 5
    await store.close()
    assert await content_of(tmp_path) == {"s": [b"%d" % at for at in range(205)]}


async def test_a_snapshot_that_is_not_written_deletes_no_records(tmp_path):
    store = SqliteStore(tmp_path)
    fence = await created(store)
    await append(store, fence, 20)
    bad = Batch("s", fence, 20, ["a record must be bytes"])
    with pytest.raises(StoreError):
        await store.commit([Checkpoint("s", fence, 20, snapshot_of(20)), bad])
    await append(store, fence, 3, 20)
    assert await rows_of(store) == 23
    await store.close()
    assert await content_of(tmp_path) == {"s": [b"%d" % at for at in range(23)]}


async def test_pages_that_journals_use_again_stay_and_those_unused_for_long_go_back(tmp_path, monkeypatch):
    monkeypatch.setattr(sqlite, "_MIN_UNUSED_TRIMS", 5)
    store, limits = SqliteStore(tmp_path), LogLimits(1e9, 10**9, 1 << 40)

    async def size_after_trim():
        await store.trim_log(limits, None)
        return (await store._in_thread(store._pages))[1]

    fence, at = await created(store), 0
    for _ in range(6):
        for _ in range(10):
            assert await store.commit([Batch("s", fence, at, [bytes(5000)] * 50)]) == [None]
            at += 50
        assert await store.commit([Checkpoint("s", fence, at, b"")]) == [None]
        grown = await size_after_trim()
    assert grown > 1000
    sizes = [await size_after_trim() for _ in range(12)]
    assert sizes[0] == grown
    assert sizes[-1] < grown / 2
    await store.close()


async def test_the_write_ahead_log_stays_short_whatever_is_written(tmp_path):
    store = SqliteStore(tmp_path)
    fence = await created(store)
    wal = tmp_path / f"{DATABASE}-wal"
    for at in range(0, 20_000, 50):
        assert await store.commit([Batch("s", fence, at, [bytes(4000)] * 50)]) == [None]
    # 80 MB of records were written, and now as much in few rows.
    assert wal.stat().st_size < 20_000_000
    for number in range(20):
        await store.put_shared(f"blob {number}", bytes(4_000_000))
    assert wal.stat().st_size < 40_000_000
    await store.close()
    assert not wal.exists()


async def test_a_blob_that_no_stream_uses_is_gone_when_the_store_is_opened_again(tmp_path):
    store = SqliteStore(tmp_path)
    await created(store)
    await store.put_shared("unused", b"data")
    await store.close()
    store = SqliteStore(tmp_path)
    assert await store.get_shared("blob") == b"shared"
    with pytest.raises(StoreError, match="no shared blob"):
        await store.get_shared("unused")
    await store.close()


async def test_a_store_in_another_layout_is_left_alone(tmp_path):
    await SqliteStore(tmp_path).close()
    with sqlite3.connect(tmp_path / DATABASE) as database:
        database.execute("PRAGMA user_version = 99")
    database.close()
    with pytest.raises(StoreError, match="layout 99"):
        SqliteStore(tmp_path)


async def test_blobs_that_no_stream_uses_have_a_limit_and_go_when_the_store_is_opened_again(tmp_path, monkeypatch):
    monkeypatch.setattr(base, "_MAX_UNUSED", 1000)
    store = SqliteStore(tmp_path)
    await created(store)
    for name in "abcba":
        await store.put_shared(name, bytes(600))
    # Two of 600 bytes reach the limit, and the one that was put last is the newest.
    assert [await store.has_shared(name) for name in ("a", "b", "c", "blob")] == [True, True, False, True]
    await store.put_shared("large", bytes(5000))
    await store.put_shared("blob", b"shared")
    assert [await store.has_shared(name) for name in ("a", "b", "large", "blob")] == [False, False, True, True]
    await store.close()
    store = SqliteStore(tmp_path)
    assert [await store.has_shared(name) for name in ("large", "blob")] == [False, True]
    await store.close()


def test_a_file_that_is_no_database_is_an_error_and_stays(tmp_path):
    (tmp_path / DATABASE).write_bytes(b"this is not a database" * 100)
    with pytest.raises(StoreError, match="not a database"):
        SqliteStore(tmp_path)
    assert (tmp_path / DATABASE).read_bytes() == b"this is not a database" * 100


CHILD = """
import asyncio, random, sys
from protodcs.serve.log.entries import LogEntry
from protodcs.serve.store.values import Batch, Checkpoint
from protodcs.serve.store.sqlite import SqliteStore

async def stream(store, name):
    await store.put_shared("blob", b"shared")
    await store.create(name, b"spec", "blob")
    held = await store.acquire(name, "child", "1")
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
        assert await store.commit(writes) == [None] * len(writes)
        print(name, len(said), flush=True)

async def main():
    store = SqliteStore(sys.argv[1])
    await asyncio.gather(*(stream(store, f"s{index}") for index in range(5)))

asyncio.run(main())
"""


def killed_in_mid_work(folder, dice, acknowledged, environment=None):
    """Run a process that commits, kill it at a random moment, and note what it was told to be durable."""
    command = [sys.executable, "-c", CHILD, str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as child:
        for _ in range(dice.randint(1, 200)):
            stream, count = child.stdout.readline().split()
            acknowledged[stream] = int(count)
        time.sleep(dice.random() * 0.01)
        child.kill()
        for line in child.stdout.read().splitlines(keepends=True):
            if line.endswith("\n"):
                stream, count = line.split()
                acknowledged[stream] = int(count)


def check(found, acknowledged):
    """Nothing that was acknowledged is lost, and nothing is doubled or out of order."""
    for stream, count in acknowledged.items():
        records = found.get(stream, [])
        assert len(records) >= count, stream
        assert records == [f"{stream}:{index}".encode() for index in range(len(records))]


async def check_log(folder, found):
    """The decision log has one entry for each record, in order."""
    store = SqliteStore(folder)
    try:
        query = LogQuery(newest_first=False, limit=100_000)
        log = {stream: (await store.read_log(stream, query)).entries for stream in found}
    finally:
        await store.close()
    for stream, entries in log.items():
        assert [entry.image_ref.encode() for entry in entries] == found[stream]
        assert [entry.position for entry in entries] == list(range(len(found[stream])))


async def test_ten_kills_during_commits_lose_and_double_nothing(tmp_path):
    acknowledged, dice = {}, random.Random(7)
    for _ in range(10):
        killed_in_mid_work(tmp_path, dice, acknowledged)
        check(await content_of(tmp_path), acknowledged)
        await check_log(tmp_path, await content_of(tmp_path))


async def test_ten_power_cuts_during_commits_lose_and_double_nothing(tmp_path):
    # The simulation knows appended bytes only. Closing the store empties its write-ahead log, and a run is so short
    # that the next checkpoint does not come.
    acknowledged, dice, folder = {}, random.Random(8), tmp_path / "store"
    folder.mkdir()
    power = PowerLoss(folder)
    for _ in range(10):
        killed_in_mid_work(folder, dice, acknowledged, {**os.environ, **power.begin()})
        power.cut(dice)
        check(await content_of(folder), acknowledged)
        await check_log(folder, await content_of(folder))
    power.close()
    assert sum(acknowledged.values()) > 100


async def test_a_full_disk_applies_nothing_of_a_commit_and_goes_on_when_there_is_room(small_disk):
    store = SqliteStore(small_disk / "store")
    fence = await created(store)
    with pytest.raises(StoreError, match="full"):
        await store.commit([Batch("s", fence, 0, [b"first"]), Batch("s", fence, 1, [bytes(3 << 20)])])
    assert await store.commit([Batch("s", fence, 0, [b"0"]), Checkpoint("s", fence, 1, b"0")]) == [None, None]
    await store.close()
    assert await content_of(small_disk / "store") == {"s": [b"0"]}


class BrokenDisk:
    """A database whose disk fails at the next COMMIT."""

    def __init__(self, database):
        self._database = database

    def execute(self, statement, *values):
        if statement == "COMMIT":
            problem = sqlite3.OperationalError("disk I/O error")
            problem.sqlite_errorcode = sqlite3.SQLITE_IOERR_FSYNC
            raise problem
        return self._database.execute(statement, *values)

    def __getattr__(self, name):
        return getattr(self._database, name)


async def test_after_a_failed_sync_the_store_does_nothing_any_more(tmp_path):
    store = SqliteStore(tmp_path)
    fence = await created(store)
    working, store._database = store._database, BrokenDisk(store._database)
    with pytest.raises(StoreError, match="disk I/O error"):
        await store.commit([Batch("s", fence, 0, [b"0"])])
    store._database = working
    assert "check the disk" in str(store.failure.result(0))
    for call in (store.commit([Batch("s", fence, 0, [b"0"])]), store.renew("me", "1", 5), store.describe("s")):
        with pytest.raises(StoreError, match="check the disk"):
            await call
    await store.close()
    assert await content_of(tmp_path) == {"s": []}


async def test_a_backup_of_a_store_in_use_holds_all_that_was_durable_when_it_began(tmp_path):
    store = SqliteStore(tmp_path / "store")
    fence = await created(store)
    assert await store.commit([Batch("s", fence, 0, [b"0", b"1"]), Checkpoint("s", fence, 1, b"0")]) == [None] * 2
    copying = asyncio.create_task(asyncio.to_thread(back_up, tmp_path / "store", tmp_path / "backup"))
    position = 2
    while not copying.done():
        assert await store.commit([Batch("s", fence, position, [b"%d" % position])]) == [None]
        position += 1
    await copying
    await store.close()
    found = (await content_of(tmp_path / "backup"))["s"]
    assert 2 <= len(found) <= position
    assert found == [b"%d" % number for number in range(len(found))]


@pytest.mark.parametrize(("folder", "message"), [("store", "exists already"), ("nothing", "no store")])
async def test_a_backup_replaces_nothing_and_needs_a_store(tmp_path, folder, message):
    await SqliteStore(tmp_path / "store").close()
    (tmp_path / "there").mkdir()
    with pytest.raises(InputError, match=message):
        back_up(tmp_path / folder, tmp_path / "there")


async def test_a_deleted_stream_that_is_created_again_after_a_restart_fences_its_old_worker(tmp_path):
    store = SqliteStore(tmp_path)
    fence = await created(store)
    await store.delete("s", fence)
    await store.close()
    store = SqliteStore(tmp_path)
    again = await created(store)
    assert again.epoch > fence.epoch
    (outcome,) = await store.commit([Batch("s", fence, 0, [b"0"])])
    assert isinstance(outcome, FencedError)
    await store.close()


async def test_the_usage_of_tenants_is_known_without_reading_streams(tmp_path):
    store = SqliteStore(tmp_path)
    fence = await created(store, "mine/s")
    await store.commit([Batch("mine/s", fence, 0, [bytes(100)])])
    statements = []
    store._database.set_trace_callback(statements.append)
    usage = await store.usage()
    assert not [statement for statement in statements if "FROM streams" in statement]
    await store.close()
    again = SqliteStore(tmp_path)
    assert await again.usage() == usage
    await again.close()


async def test_writes_that_failed_do_not_count(small_disk):
    store = SqliteStore(small_disk / "streams")
    fence = await created(store, "mine/s")
    usage = await store.usage()
    with pytest.raises(StoreError):
        await store.commit([Batch("mine/s", fence, 0, [bytes(4 * 2**20)])])
    assert await store.usage() == usage
    await store.close()

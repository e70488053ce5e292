"""`protodcs store copy`: everything is there afterwards, also if a process was killed."""

import asyncio
import json
import shutil
import sqlite3
import subprocess
import sys
from contextlib import asynccontextmanager, closing

import pytest
from typer.testing import CliRunner

from made_service import ask, create, done, engine_of, learned, observe, settings
from memory_store import stored_ids, stored_stream
from protodcs.cli import app
from protodcs.errors import InputError, StoreError
from protodcs.serve.log.entries import LogEntry, LogQuery
from protodcs.serve.log.notices import Notice
from protodcs.serve.messages import STOPPING, Action
from protodcs.serve.settings import ServeConfig
from protodcs.serve.store import open_store
from protodcs.serve.store.copying import _TABLES, copy_store
from protodcs.serve.store.schema import ENTRY_BYTES
from protodcs.serve.store.values import Batch, Checkpoint
from protodcs.serve.workers.worker import Worker
from service.postgres import shared_postgres


@pytest.fixture
def url():
    return shared_postgres().database()


# Of all kinds: most have 32 hexadecimal digits, which are stored in another form.
KEYS = ["0123456789abcdef" * 2, "a key", "sixteen letters!", "seventeen letters"]


async def fill(store):
    """Fill a store with something in every table, and with what a deleted stream left behind."""
    await store.renew("one", "1", 60)
    await store.put_shared("blob", b"shared")
    fences = {}
    for stream in ("acme/a", "acme/b", "plain", "acme/gone"):
        assert await store.create(stream, f"spec of {stream}".encode(), "blob")
        fences[stream] = (await store.acquire(stream, "one", "1")).fence
    fence = fences["acme/a"]
    log = [
        LogEntry(place, 1000, key, None, "known", True, "cat" if place % 2 else "c\0t", 0.5, 1.0, None)
        for place, key in enumerate(KEYS)
    ]
    log[1] = log[1]._replace(image_ref="image", thumbnail=b"jpeg")
    notice = Notice(2, 1, 1000, "warning", "{}")
    writes = [
        Batch("acme/a", fence, 0, [b"0", b"1"], b"", log[:2]),
        Batch("acme/a", fence, 2, [b"2", b"3 to 5"], b"summary", log[2:], [(1, 2)], [notice], positions=[1, 3]),
        Checkpoint("acme/a", fence, 3, b"snapshot", b"keys", (0, 0)),
        Batch("acme/gone", fences["acme/gone"], 0, [b"0"], b"", log[:1]),
    ]
    assert await store.commit(writes) == [None] * len(writes)
    await store.save_snapshot("acme/a", fence, "first", b"saved")
    await store.put_document("webhook", "acme/hook", b"{}")
    await store.put_shared("unused", b"")
    await store.delete("acme/gone", fences["acme/gone"])


@pytest.fixture
def old(tmp_path):
    """The folder of a process that was killed."""

    async def copy_while_open():
        async with opened(f"sqlite:{tmp_path / 'open'}") as store:
            await fill(store)
            shutil.copytree(tmp_path / "open", tmp_path / "streams")

    asyncio.run(copy_while_open())
    return tmp_path / "streams"


@asynccontextmanager
async def opened(address):
    store = await open_store(ServeConfig(store=str(address)))
    try:
        yield store
    finally:
        await store.close()


async def rows_of(address):
    """Return everything that a store has, by table."""
    async with opened(address) as store:
        usage = await store.usage(), await store.log_usage(), (await store.totals())[:2]
        rows = {table: await store._ask(f"SELECT * FROM {table} ORDER BY {key}") for table, key in _TABLES.items()}
        return rows, usage


async def check_old(store):
    """The store has what it was filled with."""
    assert await stored_ids(store) == ["acme/a", "acme/b", "plain"]
    contents = [b"spec of acme/a", b"spec of acme/b", b"snapshot", b"keys", b"saved", b"3 to 5", b"shared"]
    assert await store.usage() == {"": len(b"spec of plain" + b"shared"), "acme": sum(map(len, contents))}
    assert await store.log_usage() == {"acme": 4 * ENTRY_BYTES + len(b"image" + b"jpeg")}
    await store.renew("one", "2", 60, takes_over=True)
    held = await store.acquire("acme/a", "one", "2")
    assert (held.spec, held.snapshot, held.keys) == (b"spec of acme/a", b"snapshot", [(3, b"keys")])
    assert (held.start, held.tail, held.position, held.epoch) == (3, [b"3 to 5"], 6, 2)
    assert await store.saved_snapshot("acme/a", "first") == b"saved"
    assert (await store.list_streams("acme", None, 1))[0].summary == b"summary"
    entries = (await store.read_log("acme/a", LogQuery(newest_first=False))).entries
    assert [entry.key for entry in entries] == KEYS
    assert [entry.nearest_class for entry in entries] == ["c\0t", "cat", "c\0t", "cat"]
    assert [entry.rolled_back for entry in entries] == [False, True, False, False]
    assert [entry.position for entry in (await store.read_log("acme/a", LogQuery(label="c\0t"))).entries] == [2, 0]
    assert await store.read_thumbnail("acme/a", 1) == b"jpeg"
    ((number, stream, notice),) = await store.read_tenant_notices("acme", 0, 10)
    assert (number, stream, notice.position) == (1, "acme/a", 2)
    assert await store.documents("webhook") == {"acme/hook": b"{}"}
    assert await store.get_shared("blob") == b"shared"
    # Above the epoch of the deleted stream.
    assert await store.create("acme/gone", b"", "blob")
    assert (await stored_stream(store, "acme/gone")).epoch == 2
    assert (await stored_stream(store, "acme/gone")).incarnation == "5"


async def test_a_copy_to_postgresql_and_back_is_the_same(old, url, tmp_path):
    assert await copy_store(f"sqlite:{old}", url) == 3
    assert await copy_store(url, f"sqlite:{tmp_path / 'back'}") == 3
    first = await rows_of(f"sqlite:{old}")
    assert await rows_of(url) == first
    assert await rows_of(f"sqlite:{tmp_path / 'back'}") == first
    for address in (url, f"sqlite:{tmp_path / 'back'}"):
        async with opened(address) as store:
            await check_old(store)


async def test_a_copy_needs_a_stopped_source_and_an_empty_target(old, url, tmp_path):
    async with opened(f"sqlite:{old}"):
        with pytest.raises(StoreError, match="in use"):
            await copy_store(f"sqlite:{old}", url)
    with pytest.raises(InputError, match="exists already"):
        await copy_store(f"sqlite:{old}", f"sqlite:{old}")
    with pytest.raises(InputError, match="no store"):
        await copy_store(f"sqlite:{tmp_path / 'nothing'}", url)
    with pytest.raises(InputError, match="sqlite:FOLDER or postgresql"):
        await copy_store(f"sqlite:{old}", "redis://localhost")
    await copy_store(f"sqlite:{old}", url)
    with pytest.raises(InputError, match="has streams"):
        await copy_store(f"sqlite:{old}", url)
    async with opened(url) as store:
        await store.renew("one", "1", 60)
        with pytest.raises(StoreError, match="in use"):
            await copy_store(url, f"sqlite:{tmp_path / 'new'}")
    assert not (tmp_path / "new").exists()


INTERRUPTED = """
import asyncio, os, sys
from protodcs.serve.store import copying
changed = copying._changed
left = int(sys.argv[3])

def kill(table, row, tenant):
    global left
    left -= 1
    if left == 0:
        os.kill(os.getpid(), 9)
    return changed(table, row, tenant)

copying._changed = kill
asyncio.run(copying.copy_store(sys.argv[1], sys.argv[2]))
"""


@pytest.mark.parametrize("kind", ["sqlite", "postgres"])
async def test_a_copy_that_is_killed_leaves_nothing_and_can_be_repeated(old, url, tmp_path, kind):
    target = url if kind == "postgres" else f"sqlite:{tmp_path / 'new'}"
    for rows in (1, 8, 15, 25):
        command = [sys.executable, "-c", INTERRUPTED, f"sqlite:{old}", target, str(rows)]
        killed = subprocess.run(command, capture_output=True, text=True, check=False)
        assert killed.returncode == -9, killed.stderr
    assert not (tmp_path / "new").exists()
    assert await copy_store(f"sqlite:{old}", target) == 3
    assert (await rows_of(target))[1] == (await rows_of(f"sqlite:{old}"))[1]


async def served(address, work, **changes):
    """Run `work` with a worker on a store, then stop the worker as a service does."""
    store = await open_store(ServeConfig(store=address))
    worker = Worker("worker-0", store, settings(**changes))
    await worker.start()
    try:
        return await work(worker)
    finally:
        await worker.drain(STOPPING)
        await worker.close()


def test_a_copied_stream_goes_on_where_it_was(tmp_path, url):
    async def fill(worker):
        await done(worker, create("new"), create("s"), *(observe(number) for number in range(30)))
        await done(worker, ask(Action.SAVE_SNAPSHOT, "saving", b"before"))
        await done(worker, *(observe(number, key=f"lost {number}") for number in range(3)))
        await done(worker, ask(Action.ROLLBACK, "back to before", b"before"))
        return await done(worker, *(observe(number) for number in range(30, 50)))

    source = f"sqlite:{tmp_path / 'streams'}"
    answers = asyncio.run(served(source, fill, unload_records=10, snapshot_records=40))
    copied = CliRunner().invoke(app, ["store", "copy", source, url, "--tenant", "acme"])
    assert copied.exit_code == 0, copied.output
    assert "2" in copied.output

    async def go_on(worker):
        repeated = await done(worker, *(observe(number, "acme/s") for number in range(30, 50)))
        assert all(reply.repeated for reply in repeated)
        assert [reply.answer for reply in repeated] == [reply.answer for reply in answers]
        (after,) = await done(worker, observe(50, "acme/s"))
        # Among the records are the saved snapshot, the roll-back and what it took back.
        assert after.position == 55
        assert engine_of(worker, "acme/s") == learned(51)
        await done(worker, ask(Action.ROLLBACK, "back", b"before", stream="acme/s"), observe(0, "acme/new"))
        assert engine_of(worker, "acme/s") == learned(30)
        assert engine_of(worker, "acme/new") == learned(1)

    asyncio.run(served(url, go_on))


def test_a_check_of_postgresql_names_what_is_missing_and_what_is_counted_wrongly(old, url):
    asyncio.run(copy_store(f"sqlite:{old}", url))
    good = CliRunner().invoke(app, ["store", "check", url])
    assert (good.exit_code, "The store is complete." in good.output) == (0, True)
    for statement in (
        "DELETE FROM records WHERE key = (SELECT max(key) FROM records)",
        "DELETE FROM blobs",
        "UPDATE usage SET bytes = bytes + 1 WHERE tenant = 'acme'",
    ):
        shared_postgres().sql(statement, url)
    bad = CliRunner().invoke(app, ["store", "check", url, "--json"])
    assert bad.exit_code == 1
    found = json.loads(bad.output)
    assert found["streams"] == 3
    assert [problem for problem in found["problems"] if "records" in problem] == [
        "records of the stream 'acme/a' are missing"
    ]
    assert "prototypes of the stream 'plain' are missing" in found["problems"]
    assert "the usage of the tenant 'acme' is counted wrongly" in found["problems"]


def test_a_check_of_sqlite_names_what_is_missing(old):
    with closing(sqlite3.connect(old / "streams.db")) as database, database:
        database.execute("DELETE FROM records WHERE key = (SELECT max(key) FROM records)")
        database.execute("DELETE FROM blobs")
    bad = CliRunner().invoke(app, ["store", "check", str(old), "--json"])
    assert bad.exit_code == 1
    problems = json.loads(bad.output)["problems"]
    assert "records of the stream 'acme/a' are missing" in problems
    assert "prototypes of the stream 'plain' are missing" in problems

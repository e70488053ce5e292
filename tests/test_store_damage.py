"""A damaged SQLite store: no acknowledged commit is lost without an error, and no good store is refused."""

import json
import os
import shutil
import subprocess
import sys
import threading

import pytest
from typer.testing import CliRunner

from protodcs.cli import app
from protodcs.errors import StoreError
from protodcs.serve.store.sqlite import DATABASE, SqliteStore, back_up
from protodcs.serve.store.values import Batch
from test_sqlite_store import content_of, created

WAL = f"{DATABASE}-wal"
MARKS = "streams.mark"

# Three streams with 40 commits each, acknowledged; then the process is killed.
CHILD = """
import asyncio, os, signal, sys
from protodcs.serve.store.values import Batch
from protodcs.serve.store.sqlite import SqliteStore

async def main():
    store = SqliteStore(sys.argv[1])
    await store.put_shared("blob", b"shared")
    fences = {}
    for name in ("a", "b", "c"):
        await store.create(name, b"spec", "blob")
        fences[name] = (await store.acquire(name, "child", "1")).fence
    for position in range(40):
        for name, fence in fences.items():
            assert await store.commit([Batch(name, fence, position, [b"%d" % position])]) == [None]
    os.kill(os.getpid(), signal.SIGKILL)

asyncio.run(main())
"""
ALL = {name: [b"%d" % position for position in range(40)] for name in ("a", "b", "c")}


@pytest.fixture(scope="module")
def killed_store(tmp_path_factory):
    folder = tmp_path_factory.mktemp("killed") / "store"
    subprocess.run([sys.executable, "-c", CHILD, str(folder)], check=False)
    return folder


@pytest.fixture
def killed(killed_store, tmp_path):
    """The folder of a store whose process was killed."""
    return shutil.copytree(killed_store, tmp_path / "store")


def change_a_byte(file, share):
    data = bytearray(file.read_bytes())
    data[int(share * len(data))] ^= 1
    file.write_bytes(data)


def cut(file, share):
    os.truncate(file, int(share * file.stat().st_size))


def cut_everything(file, share):
    cut(file, 0)


def delete(file, share):
    file.unlink()


def files_of(folder):
    """Return the content of all files that hold data; SQLite may create an empty write-ahead log."""
    files = {path.name: path.read_bytes() for path in folder.iterdir() if not path.name.endswith(("-shm", "lock"))}
    return {name: data for name, data in files.items() if data}


def command(*arguments):
    return CliRunner().invoke(app, ["store", *map(str, arguments)])


async def test_a_store_whose_process_was_killed_is_complete(killed):
    assert await content_of(killed) == ALL


@pytest.mark.parametrize("share", [0.0001, 0.3, 0.6, 0.95])
@pytest.mark.parametrize("damage", [change_a_byte, cut, cut_everything, delete])
def test_damage_in_the_write_ahead_log_is_refused_and_nothing_is_changed(killed, damage, share):
    damage(killed / WAL, share)
    before = files_of(killed)
    for _ in range(2):
        with pytest.raises(StoreError, match=r"has lost \d+ acknowledged commits.*protodcs store"):
            SqliteStore(killed)
    assert files_of(killed) == before


def test_a_damaged_last_commit_is_refused(killed):
    data = bytearray((killed / WAL).read_bytes())
    data[-100] ^= 1
    (killed / WAL).write_bytes(data)
    with pytest.raises(StoreError, match="has lost 1 acknowledged commit:"):
        SqliteStore(killed)


def test_a_deleted_database_is_not_replaced_by_an_empty_one(killed):
    for name in (DATABASE, WAL):
        (killed / name).unlink()
    with pytest.raises(StoreError, match="has lost"):
        SqliteStore(killed)
    assert not (killed / DATABASE).exists()


@pytest.mark.parametrize("damage", [cut_everything, delete])
async def test_a_store_without_its_marks_is_refused_and_repaired(killed, damage):
    damage(killed / MARKS, 0)
    with pytest.raises(StoreError, match=r"streams\.mark is missing or unreadable"):
        SqliteStore(killed)
    assert command("check", killed).exit_code == 1
    repaired = command("repair", killed)
    assert repaired.exit_code == 0
    assert "cannot be known" in repaired.output
    assert await content_of(killed) == ALL


async def test_a_change_in_the_newest_mark_refuses_nothing(killed):
    data = (killed / MARKS).read_bytes()
    at = data.rindex(b"PDCS")
    (killed / MARKS).write_bytes(data[: at + 20] + b"\xff" + data[at + 21 :])
    assert await content_of(killed) == ALL


async def test_a_store_that_was_closed_needs_no_write_ahead_log(killed):
    assert await content_of(killed) == ALL
    assert not (killed / WAL).exists()
    assert await content_of(killed) == ALL
    assert command("check", killed).exit_code == 0


async def test_a_database_that_is_older_than_the_marks_is_refused(killed):
    old = shutil.copytree(killed, killed.with_name("old"))
    await content_of(old)
    await content_of(killed)
    await append(killed, "a", 40)
    shutil.copy(old / DATABASE, killed / DATABASE)
    with pytest.raises(StoreError, match="has lost"):
        SqliteStore(killed)


async def append(folder, stream, position):
    store = SqliteStore(folder)
    fence = (await store.acquire(stream, "me", "1")).fence
    assert await store.commit([Batch(stream, fence, position, [b"%d" % position])]) == [None]
    await store.close()


async def test_the_check_says_which_positions_are_lost_and_the_repair_goes_on_without_them(killed):
    cut(killed / WAL, 0.5)
    damaged = (killed / WAL).read_bytes()
    checked = command("check", killed, "--json")
    assert checked.exit_code == 1
    report = json.loads(checked.output)
    assert report["lost_commits"] > 30
    assert json.loads(command("repair", killed, "--json").output)["lost"] == report["lost"]
    found = await content_of(killed)
    for stream, records in ALL.items():
        first, last = report["lost"][stream]
        assert last == 39
        assert found[stream] == records[:first]
    (kept,) = killed.glob(f"{WAL}.damaged-*")
    assert kept.read_bytes() == damaged
    await append(killed, "a", len(found["a"]))
    assert command("check", killed).exit_code == 0
    assert "nothing to repair" in command("repair", killed).output.lower()


def test_the_repair_names_a_stream_that_is_lost_as_a_whole(killed):
    delete(killed / WAL, 0)
    report = json.loads(command("check", killed, "--json").output)
    assert report["lost"] == {name: [0, 39] for name in ALL}


async def test_a_store_in_use_is_not_checked(tmp_path):
    store = SqliteStore(tmp_path)
    for name in ("check", "repair"):
        result = command(name, tmp_path)
        assert result.exit_code != 0
        assert "in use by process" in result.output
    await store.close()


async def test_a_check_finds_pages_of_the_database_that_are_damaged_and_a_repair_leaves_them(killed):
    await content_of(killed)
    data = bytearray((killed / DATABASE).read_bytes())
    data[4096 * 4 : 4096 * 5] = b"\x05" * 4096
    (killed / DATABASE).write_bytes(data)
    assert command("check", killed).exit_code == 1
    repaired = command("repair", killed)
    assert repaired.exit_code != 0
    assert "backup" in repaired.output
    assert (killed / DATABASE).read_bytes() == data


def test_a_backup_of_a_damaged_store_is_refused_and_leaves_nothing(killed, tmp_path):
    cut(killed / WAL, 0.5)
    with pytest.raises(StoreError, match="has lost"):
        back_up(killed, tmp_path / "copies" / "copy")
    assert not list((tmp_path / "copies").iterdir())


async def test_a_backup_has_marks_of_its_own(killed, tmp_path):
    back_up(killed, tmp_path / "copy")
    assert command("check", tmp_path / "copy").exit_code == 0
    assert await content_of(tmp_path / "copy") == ALL


@pytest.fixture
async def moments(tmp_path):
    """Copies of a store in use after each of some acknowledged commits, oldest first."""
    store = SqliteStore(tmp_path / "live")
    names = ["s0", *(f"stream of a long name, number {number}" for number in range(50))]
    fences = {name: await created(store, name) for name in names}
    copies = []
    for position in range(4):
        # One commit writes a mark of one sector, and the next one a mark of several.
        streams = fences if position % 2 else {"s0": fences["s0"]}
        batches = [
            Batch(name, fence, position if name == "s0" else position // 2, [b"%d" % position])
            for name, fence in streams.items()
        ]
        assert await store.commit(batches) == [None] * len(batches)
        copies.append(shutil.copytree(tmp_path / "live", tmp_path / f"copy{position}"))
    await store.close()
    return copies


@pytest.mark.parametrize("later", [1, 2, 3])
async def test_a_crash_between_a_commit_and_its_mark_refuses_nothing_however_the_mark_is_torn(moments, later, tmp_path):
    before, after = ((moments[at] / MARKS).read_bytes() for at in (later - 1, later))
    changed = [at for at in range(len(after)) if before[at] != after[at]]
    assert changed[-1] - changed[0] > (1000 if later % 2 else 30)
    for torn in (*range(changed[0], changed[-1], 97), changed[-1]):
        for mark in (after[:torn] + before[torn:], before[:torn] + after[torn:]):
            folder = shutil.copytree(moments[later], tmp_path / "crashed")
            (folder / MARKS).write_bytes(mark)
            assert len((await content_of(folder))["s0"]) == later + 1
            shutil.rmtree(folder)


@pytest.mark.parametrize(("now", "marked"), [(1, 0), (2, 0), (2, 1), (3, 0), (3, 1), (3, 2)])
async def test_marks_that_a_power_cut_has_set_back_refuse_nothing(moments, now, marked):
    shutil.copy(moments[marked] / MARKS, moments[now] / MARKS)
    assert len((await content_of(moments[now]))["s0"]) == now + 1


@pytest.mark.parametrize("later", [1, 2, 3])
async def test_a_commit_that_has_its_mark_and_is_gone_is_refused(moments, later):
    shutil.copy(moments[later] / MARKS, moments[later - 1] / MARKS)
    with pytest.raises(StoreError, match="has lost 1 acknowledged commit:"):
        SqliteStore(moments[later - 1])


async def test_a_commit_that_was_found_after_a_crash_has_its_mark_once_the_store_is_open(moments, tmp_path):
    """Others may have read it by then."""
    shutil.copy(moments[1] / MARKS, moments[2] / MARKS)
    store = SqliteStore(moments[2])
    crashed = shutil.copytree(moments[2], tmp_path / "crashed")
    await store.close()
    cut(crashed / WAL, 0.9)
    with pytest.raises(StoreError, match="has lost"):
        SqliteStore(crashed)


async def test_the_marks_wrap_around(tmp_path):
    store = SqliteStore(tmp_path / "store")
    fence = await created(store)
    for position in range(1200):
        assert await store.commit([Batch("s", fence, position, [b"%d" % position])]) == [None]
    shutil.copytree(tmp_path / "store", tmp_path / "copy")
    await store.close()
    assert len((await content_of(tmp_path / "copy"))["s"]) == 1200
    assert (tmp_path / "copy" / MARKS).stat().st_size == (tmp_path / "store" / MARKS).stat().st_size


async def test_calls_that_only_read_write_no_mark(tmp_path):
    store = SqliteStore(tmp_path)
    await created(store)
    before = (tmp_path / MARKS).read_bytes()
    await store.renew("me", "1", 5.0)
    await store.describe("s")
    await store.usage()
    assert (tmp_path / MARKS).read_bytes() == before
    await store.close()


async def append_until_it_fails(store, fence, synced):
    for position in range(1000):
        await store.commit([Batch("s", fence, position, [b"%d" % position])])
        assert synced.wait(60)


async def test_a_store_whose_marks_cannot_be_synced_does_nothing_any_more(tmp_path, monkeypatch):
    store = SqliteStore(tmp_path)
    fence = await created(store)
    synced = threading.Event()

    def fail(_):
        synced.set()
        raise OSError(5, "Input/output error")

    # It may fail before the first commit, because an earlier mark is not synced yet.
    monkeypatch.setattr("protodcs.serve.store.commit_marks._sync", fail)
    for _ in range(2):
        with pytest.raises(StoreError, match=r"Input/output error.*check the disk"):
            await append_until_it_fails(store, fence, synced)
    assert "check the disk" in str(store.failure.result(0))
    monkeypatch.undo()
    await store.close()
    records = (await content_of(tmp_path))["s"]
    assert records == [b"%d" % position for position in range(len(records))]

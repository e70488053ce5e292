"""The store in plain files: what was committed is there, once and in order, whatever happens to process and disk."""

import asyncio
import errno
import os
import random
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, rule

from protodcs.errors import ConfigError, FencedError, StoreError
from protodcs.serve.store.base import Batch, Checkpoint, Fence
from protodcs.serve.store.files import FileStore
from protodcs.serve.store.upkeep import Upkeep
from store_contract import MEMORY, StoreMachine

run = asyncio.run


@pytest.fixture
def memory_path():
    """A folder in memory, where there is one: for tests that open hundreds of stores and cut no power."""
    with tempfile.TemporaryDirectory(dir=MEMORY) as folder:
        yield Path(folder)


async def settled(store):
    """Wait until the store has done all that follows its last answer."""
    await store.resign("nobody", "0")


def killed(folder, target):
    """The folder as a killed process would leave it now."""
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(folder, target)
    return target


async def content(store):
    """All that a store holds: birth, snapshot, start and tail of each stream."""
    found = {}
    async for stream in store.streams():
        held = await store.acquire(stream, "reader", "1")
        found[stream] = held.birth, held.snapshot, held.start, held.tail
    return found


def content_of(folder, **options):
    """All that the store in a folder holds, by opening it."""

    async def read():
        store = FileStore(folder, **options)
        try:
            return await content(store)
        finally:
            await store.close()

    with ThreadPoolExecutor(1) as another:  # Where a test calls this, a loop may be running.
        return another.submit(run, read()).result()


@contextmanager
def instead(monkeypatch, name, function):
    """`os.<name>` is `function(real, *arguments)` for a while."""
    real = getattr(os, name)
    with monkeypatch.context() as patch:
        patch.setattr(os, name, lambda *arguments, **named: function(real, *arguments, **named))
        yield


async def created(store, stream, birth, shared):
    """Create a stream whose shared blob may not be there yet."""
    await store.put_shared(shared, b"shared")
    assert await store.create(stream, birth, shared)


# Using it.


def test_a_deleted_stream_leaves_no_file_behind(tmp_path):
    async def use():
        store = FileStore(tmp_path)
        await created(store, "s", b"birth", "blob")
        await created(store, "t", b"birth", "blob")
        fences = {stream: (await store.acquire(stream, "me", "1")).fence for stream in ("s", "t")}
        fence = fences["s"]
        await store.commit([Batch("s", fence, 0, [b"a"]), Checkpoint("s", fence, 1, b"snapshot")])
        await store.keep("s", fence, "../../n", b"kept")
        assert len(list((tmp_path / "streams").glob("*/*"))) == 4
        await store.delete("s", fence)
        (left,) = (tmp_path / "streams").glob("*/*")
        assert left.suffix == ".birth"
        await store.delete("t", fences["t"])
        assert not [*(tmp_path / "streams").glob("*/*"), *(tmp_path / "shared").iterdir()]
        await store.close()

    run(use())


def test_a_closed_store_says_so_and_can_be_closed_again(tmp_path):
    async def use():
        store = FileStore(tmp_path)
        await store.close()
        await store.close()
        with pytest.raises(StoreError, match="closed"):
            await store.create("s", b"", "")

    run(use())


@pytest.mark.parametrize("options", [{"sync": "sometimes"}, {"interval": 0}, {"segment_bytes": 0}])
def test_settings_outside_their_range_are_refused(tmp_path, options):
    with pytest.raises(ConfigError, match=next(iter(options))):
        FileStore(tmp_path, **options)


# Opening again.


@pytest.mark.parametrize("after", ["closing", "a kill"])
@pytest.mark.parametrize("segment_bytes", [1, 300, 1 << 20])
def test_all_is_there_after_each_operation_and_opening_again(memory_path, after, segment_bytes):
    steps = iter(range(1000))

    async def again(store):
        target = memory_path / str(next(steps))
        if after == "closing":
            await store.close()
            return FileStore(store.folder, segment_bytes=segment_bytes)
        await settled(store)
        copy = FileStore(killed(store.folder, target), segment_bytes=segment_bytes)
        await store.close()
        return copy

    async def use():
        store = await again(FileStore(memory_path / "store", segment_bytes=segment_bytes))
        await store.put_shared("blob", b"shared")
        store = await again(store)
        assert await store.get_shared("blob") == b"shared"
        assert await store.create("s", b"birth", "blob")
        fences = [Fence(0)]
        for position in range(6):
            store = await again(store)
            held = await store.acquire("s", "me", "1")
            assert held.fence > fences[-1]
            fences.append(held.fence)
            assert held.tail == [b"%d" % each for each in range(held.start, position)]
            assert await store.commit([Batch("s", held.fence, position, [b"%d" % position])]) == [None]
            store = await again(store)
            assert isinstance((await store.commit([Batch("s", held.fence, position + 1, [b"x"])]))[0], FencedError)
            held = await store.acquire("s", "me", "1")
            if position % 3 == 2:
                assert await store.commit([Checkpoint("s", held.fence, position, b"to %d" % position)]) == [None]
                await store.keep("s", held.fence, "n", b"at %d" % position)
        store = await again(store)
        held = await store.acquire("s", "me", "1")
        assert (held.snapshot, held.start, held.tail) == (b"to 5", 5, [b"5"])
        assert (await store.kept("s"), await store.kept_snapshot("s", "n")) == (["n"], b"at 5")
        await store.forget("s", held.fence, "n")
        store = await again(store)
        held = await store.acquire("s", "me", "1")
        assert await store.kept("s") == []
        await store.delete("s", held.fence)
        store = await again(store)
        assert [stream async for stream in store.streams()] == []
        with pytest.raises(StoreError):
            await store.get_shared("blob")
        await store.close()

    run(use())


def test_a_second_process_is_refused_in_words_that_name_the_first(tmp_path):
    store = FileStore(tmp_path)
    code = f"from protodcs.serve.store.files import FileStore; FileStore({str(tmp_path)!r})"
    second = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert f"StoreError: the store in {str(tmp_path)!r} is in use by process {os.getpid()}:" in second.stderr
    run(store.close())
    run(FileStore(tmp_path).close())


CHILD = """
import asyncio, random, sys
from protodcs.serve.store.base import Batch, Checkpoint
from protodcs.serve.store.files import FileStore

async def stream(store, name):
    await store.put_shared("blob", b"shared")
    await store.create(name, b"birth", "blob")
    held = await store.acquire(name, "child", "1")
    said = (held.snapshot or b"").split() + held.tail
    while True:
        records = [b"%s:%d" % (name.encode(), len(said) + index) for index in range(random.randint(1, 3))]
        writes = [Batch(name, held.fence, len(said), records)]
        said += records
        if random.random() < 0.3:
            writes.append(Checkpoint(name, held.fence, len(said), b" ".join(said)))
        assert await store.commit(writes) == [None] * len(writes)
        print(name, len(said), flush=True)

async def main():
    store = FileStore(sys.argv[1], sync=sys.argv[2], interval=0.01, segment_bytes=3000)
    await asyncio.gather(*(stream(store, f"s{index}") for index in range(5)))

asyncio.run(main())
"""


def test_fifteen_kills_in_mid_work_lose_no_commit_that_returned_and_repeat_none(tmp_path):
    said = {f"s{index}": 0 for index in range(5)}
    dice = random.Random(7)
    for kill in range(15):
        command = [sys.executable, "-c", CHILD, str(tmp_path), ("always", "interval", "never")[kill % 3]]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
            for _ in range(dice.randint(1, 200)):
                stream, count = child.stdout.readline().split()
                said[stream] = int(count)
            time.sleep(dice.random() * 0.01)
            child.send_signal(signal.SIGKILL)
            for line in child.stdout.read().splitlines(keepends=True):
                if line.endswith("\n"):
                    stream, count = line.split()
                    said[stream] = int(count)
        found = content_of(tmp_path, segment_bytes=3000)
        for stream, count in said.items():
            if stream not in found:
                assert count == 0
                continue
            _, snapshot, start, records = found[stream]
            records = (snapshot or b"").split() + records
            assert len(records) >= count, (kill, stream)
            assert records == [f"{stream}:{index}".encode() for index in range(len(records))]
            assert start == len((snapshot or b"").split())


# Damage.


@pytest.fixture
def written(memory_path):
    """A folder as it was before and after its last commit, whose process was killed then."""

    def make(writes):
        async def use():
            store = FileStore(memory_path / "store")
            for stream in ("s", "t"):
                await created(store, stream, b"birth", "blob")
            fences = {stream: (await store.acquire(stream, "me", "1")).fence for stream in ("s", "t")}
            await store.commit([Batch("s", fences["s"], 0, [b"a" * 50, b"b" * 50]), Batch("t", fences["t"], 0, [b"c"])])
            before = killed(store.folder, memory_path / "before")
            await store.commit(writes(fences["s"]))
            after = killed(store.folder, memory_path / "after")
            await store.close()
            return before, after

        return run(use())

    return make


def log_of(folder):
    (only,) = (folder / "journal").glob("*.log")
    return only


@pytest.mark.parametrize(
    "writes",
    [
        lambda fence: [Batch("s", fence, 2, [b"last"])],
        lambda fence: [Batch("s", fence, 2, [b"x", b"y"]), Checkpoint("s", fence, 3, b"snapshot")],
    ],
    ids=["one frame", "many frames"],
)
def test_a_log_cut_at_any_byte_of_its_last_commit_opens_with_all_before(written, memory_path, writes):
    before, after = written(writes)
    whole, kept = log_of(after).read_bytes(), content_of(killed(before, memory_path / "copy"))
    for end in range(log_of(before).stat().st_size, len(whole)):
        for rest in (b"", bytes(len(whole) - end)):  # cut off, and as long as it was but never filled
            copy = killed(after, memory_path / "copy")
            log_of(copy).write_bytes(whole[:end] + rest)
            if whole[:end] + rest == whole:
                continue
            assert content_of(copy) == kept, end
            assert content_of(copy) == kept, end  # what is cut off stays off
    assert content_of(after) != kept


def test_a_log_whose_last_write_kept_its_end_but_lost_its_middle_opens_with_all_before(written, memory_path):
    before, after = written(lambda fence: [Batch("s", fence, 2, [b"x" * 100, b"y" * 100, b"z" * 100])])
    begin = log_of(before).stat().st_size
    data = bytearray(log_of(after).read_bytes())
    data[begin + 20 : begin + 200] = bytes(180)
    log_of(after).write_bytes(data)
    assert content_of(after) == content_of(before)


def test_a_log_that_was_closed_and_is_shorter_now_is_damaged(tmp_path):
    async def use():
        store = FileStore(tmp_path)
        await created(store, "s", b"birth", "blob")
        await store.close()

    run(use())
    data = log_of(tmp_path).read_bytes()
    log_of(tmp_path).write_bytes(data[:-1])
    with pytest.raises(StoreError, match=r"0000000001\.log is damaged at offset \d+"):
        FileStore(tmp_path)
    log_of(tmp_path).unlink()
    with pytest.raises(StoreError, match="missing"):
        FileStore(tmp_path)


def test_damage_in_front_of_the_last_commit_names_the_file_and_the_offset(written):
    _, after = written(lambda fence: [Batch("s", fence, 2, [b"last"])])
    log = log_of(after)
    data = bytearray(log.read_bytes())
    data[data.index(b"a" * 50)] ^= 1
    log.write_bytes(data)
    with pytest.raises(StoreError, match=r"0000000001\.log is damaged at offset \d+"):
        FileStore(after)
    assert log.read_bytes() == data


@pytest.mark.parametrize("closed", [True, False])
def test_a_flipped_byte_anywhere_is_noticed_or_harmless(memory_path, closed):
    async def use():
        store = FileStore(memory_path / "store", segment_bytes=2000)
        dice = random.Random(1)
        for index in range(4):
            stream = f"stream {index}"
            await created(store, stream, b"birth %d" % index, "blob")
            held = await store.acquire(stream, "me", "1")
            for position in range(12):
                await store.commit([Batch(stream, held.fence, position, [dice.randbytes(60)])])
            await store.commit([Checkpoint(stream, held.fence, 5 + index, b"snapshot %d" % index)])
        folder = killed(store.folder, memory_path / "killed")
        await store.close()
        return store.folder if closed else folder

    folder = run(use())
    paths = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != "lock")
    whole = content_of(killed(folder, memory_path / "copy"))
    dice = random.Random(2)
    noticed = 0
    for _ in range(300):
        copy = killed(folder, memory_path / "copy")
        path = copy / dice.choice(paths).relative_to(folder)
        data = bytearray(path.read_bytes())
        data[dice.randrange(len(data))] ^= 1 << dice.randrange(8)
        path.write_bytes(data)
        try:
            found = content_of(copy)
        except StoreError:
            noticed += 1
            continue
        if found != whole:
            # Only the last commit of a killed process can be taken for one that it did not finish.
            assert not closed
            assert path.name == max(each.name for each in paths if each.suffix == ".log")
            changed = {stream: each for stream, each in found.items() if each != whole[stream]}
            assert list(changed) == ["stream 3"]
            assert changed["stream 3"][3][-4:] == whole["stream 3"][3]
    assert noticed > 250


@pytest.mark.parametrize("name", ["journal/0000000001.log", "store", "streams/*/*.birth"])
def test_a_newer_version_is_refused_in_words(tmp_path, name):
    async def use():
        store = FileStore(tmp_path)
        await created(store, "s", b"birth", "blob")
        await store.close()

    run(use())
    (path,) = tmp_path.glob(name)
    data = bytearray(path.read_bytes())
    struct.pack_into("<H", data, 8, 2)
    path.write_bytes(data)
    with pytest.raises(StoreError, match=r"version 2, this protodcs reads 1: upgrade"):
        content_of(tmp_path)


# Disks that are full or fail.


async def fill(store, held):
    """Commit records until the store refuses one; how many it took, and what it said."""
    for position in range(10_000):
        try:
            assert await store.commit([Batch("s", held.fence, position, [b"%6d" % position * 500])]) == [None]
        except StoreError as problem:
            return position, str(problem)
    raise AssertionError("the disk is never full")


@pytest.mark.parametrize("segment_bytes", [100_000, 64 << 20])
def test_a_full_disk_refuses_commits_in_words_and_takes_them_again_when_there_is_room(small_disk, segment_bytes):
    ballast = small_disk / "ballast"
    ballast.write_bytes(bytes(500_000))

    async def use():
        store = FileStore(small_disk / "store", segment_bytes=segment_bytes)
        await created(store, "s", b"birth", "blob")
        held = await store.acquire("s", "me", "1")
        count, words = await fill(store, held)
        assert "No space left" in words
        with pytest.raises(StoreError):
            await store.commit([Checkpoint("s", held.fence, count, bytes(100_000))])
        with pytest.raises(StoreError):
            await created(store, "t", bytes(100_000), "blob")
        ballast.unlink()
        for position in range(count, count + 20):
            record = b"%6d" % position * 500
            assert await store.commit([Batch("s", held.fence, position, [record])]) == [None]
        assert await store.commit([Checkpoint("s", held.fence, count, bytes(100_000))]) == [None]
        found = await content(store)
        await store.close()
        assert found == content_of(small_disk / "store")
        assert list(found) == ["s"]
        assert found["s"][2:] == (count, [b"%6d" % position * 500 for position in range(count, count + 20)])

    run(use())


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_a_write_that_stops_short_counts_for_nothing(tmp_path, monkeypatch, share):
    taken = []

    def short(real, handle, data, offset):
        if taken:
            raise OSError(errno.ENOSPC, "No space left on device")
        taken.append(real(handle, data[: int(share * (len(data) - 1))], offset) if share else 0)
        return taken[0]

    async def use():
        store = FileStore(tmp_path / "store")
        await created(store, "s", b"birth", "blob")
        held = await store.acquire("s", "me", "1")
        await store.commit([Batch("s", held.fence, 0, [b"first"])])
        writes = [Batch("s", held.fence, 1, [b"x" * 100, b"y" * 100]), Checkpoint("s", held.fence, 2, b"snapshot")]
        with instead(monkeypatch, "pwrite", short), pytest.raises(StoreError, match=r"No space left|stopped short"):
            await store.commit(writes)
        assert content_of(killed(store.folder, tmp_path / "copy"))["s"] == (b"birth", None, 0, [b"first"])
        assert await store.commit([Batch("s", held.fence, 1, [b"second"])]) == [None]
        assert await store.commit([Checkpoint("s", held.fence, 1, b"covers one")]) == [None]
        files = sorted(path.suffix for path in (store.folder / "streams").glob("*/*"))
        assert files == [".birth", ".snapshot"]
        found = await content(store)
        await store.close()
        assert found == content_of(store.folder) == {"s": (b"birth", b"covers one", 1, [b"second"])}

    run(use())


def test_a_write_in_several_parts_is_as_good_as_one(tmp_path, monkeypatch):
    async def use():
        store = FileStore(tmp_path)
        await created(store, "s", b"birth", "blob")
        held = await store.acquire("s", "me", "1")
        with instead(monkeypatch, "pwrite", lambda real, handle, data, offset: real(handle, data[:7], offset)):
            assert await store.commit([Batch("s", held.fence, 0, [b"a" * 100])]) == [None]
        await store.close()

    run(use())
    assert content_of(tmp_path)["s"][3] == [b"a" * 100]


@pytest.mark.parametrize("failing", ["fsync", "ftruncate"])
def test_after_a_failed_sync_or_truncation_nothing_is_written_until_the_store_is_opened_again(
    tmp_path, monkeypatch, failing
):
    def fail(real, *arguments):
        raise OSError(errno.EIO, "Input/output error")

    async def use():
        store = FileStore(tmp_path)
        await created(store, "s", b"birth", "blob")
        held = await store.acquire("s", "me", "1")
        await store.commit([Batch("s", held.fence, 0, [b"first"])])
        with (
            instead(monkeypatch, failing, fail),
            instead(
                monkeypatch, "pwrite", fail if failing == "ftruncate" else lambda real, *arguments: real(*arguments)
            ),
            pytest.raises(StoreError, match="Input/output error"),
        ):
            await store.commit([Batch("s", held.fence, 1, [b"second"])])
        for call in (
            store.commit([Batch("s", held.fence, 1, [b"second"])]),
            store.create("t", b"", "blob"),
            store.acquire("s", "me", "1"),
            store.keep("s", held.fence, "n", b""),
        ):
            with pytest.raises(StoreError, match="open the store again"):
                await call
        await store.close()

    run(use())
    assert content_of(tmp_path)["s"][3] in ([b"first"], [b"first", b"second"])


def test_a_fault_of_the_store_itself_leaves_nobody_waiting(tmp_path, monkeypatch):
    def fault(store):
        raise KeyError("fault")

    async def use():
        store = FileStore(tmp_path)
        await created(store, "s", b"birth", "blob")
        held = await store.acquire("s", "me", "1")
        with monkeypatch.context() as patch:
            patch.setattr(Upkeep, "tidy", fault)
            assert await store.commit([Batch("s", held.fence, 0, [b"first"])]) == [None]
            with pytest.raises(StoreError, match=r"fault.*open the store again"):
                await asyncio.wait_for(store.commit([Batch("s", held.fence, 1, [b"second"])]), 300)
        await store.close()

    run(use())
    assert content_of(tmp_path)["s"][3] == [b"first"]


def test_a_snapshot_that_cannot_be_written_fails_its_own_commit_only(tmp_path, monkeypatch):
    async def use():
        store = FileStore(tmp_path / "store")
        for stream in ("s", "t"):
            await created(store, stream, b"", "blob")
        held = {stream: await store.acquire(stream, "me", "1") for stream in ("s", "t")}

        def fail(real, source, target):
            raise OSError(errno.ENOSPC, "No space left on device")

        fence = held["s"].fence
        with instead(monkeypatch, "replace", fail):
            answers = await asyncio.gather(
                store.commit([Batch("s", fence, 0, [b"a"]), Checkpoint("s", fence, 1, b"snapshot")]),
                store.commit([Batch("t", held["t"].fence, 0, [b"b"])]),
                return_exceptions=True,
            )
        assert isinstance(answers[0], StoreError)
        assert answers[1] == [None]
        found = await content(store)
        await store.close()
        assert found == content_of(store.folder) == {"s": (b"", None, 0, []), "t": (b"", None, 0, [b"b"])}

    run(use())


# Syncing.


def test_commits_that_wait_together_share_a_sync(tmp_path, monkeypatch):
    calls, waiting, unfinished = [], set(), set()

    def counted(real, handle):
        """A disk that takes its time, until all others have to wait."""
        calls.append(handle)
        end = time.monotonic() + 300
        while waiting != unfinished and time.monotonic() < end:
            time.sleep(0.001)
        real(handle)

    async def use():
        store = FileStore(tmp_path)
        streams = [f"s{index}" for index in range(100)]
        for stream in streams:
            await created(store, stream, b"", "blob")
        held = {stream: await store.acquire(stream, "me", "1") for stream in streams}

        unfinished.update(streams)

        async def commits(stream):
            for position in range(3):
                waiting.add(stream)
                assert await store.commit([Batch(stream, held[stream].fence, position, [b"r"])]) == [None]
                waiting.discard(stream)
            unfinished.discard(stream)

        with instead(monkeypatch, "fsync", counted):
            await asyncio.gather(*(commits(stream) for stream in streams))
        await store.close()

    run(use())
    assert 3 <= len(calls) <= 30  # of 300 commits
    assert all(each[3] == [b"r"] * 3 for each in content_of(tmp_path).values())


def test_the_loop_goes_on_while_the_disk_is_slow(tmp_path, monkeypatch):
    async def use():
        store = FileStore(tmp_path)
        await created(store, "s", b"", "blob")
        held = await store.acquire("s", "me", "1")
        ticks, ticked, heard = 0, threading.Event(), []
        with instead(monkeypatch, "fsync", lambda real, handle: (heard.append(ticked.wait(300)), real(handle))):
            commit = asyncio.ensure_future(store.commit([Batch("s", held.fence, 0, [b"r"])]))
            while not commit.done():
                ticks += 1
                if ticks > 5:
                    ticked.set()
                await asyncio.sleep(0.005)
        await store.close()
        return heard

    assert run(use()) == [True]


@pytest.mark.parametrize(("sync", "most"), [("always", 50), ("interval", 3), ("never", 0)])
def test_the_setting_says_how_often_commits_are_synced(tmp_path, monkeypatch, sync, most):
    calls = []

    async def use():
        store = FileStore(tmp_path, sync=sync, interval=3600.0 if sync == "interval" else 1.0)
        await created(store, "s", b"", "blob")
        held = await store.acquire("s", "me", "1")
        with instead(monkeypatch, "fsync", lambda real, handle: (calls.append(handle), real(handle))):
            for position in range(50):
                await store.commit([Batch("s", held.fence, position, [b"r"])])
        copied = content_of(killed(store.folder, tmp_path / "copy"))
        assert len(copied["s"][3]) == 50
        await store.close()

    run(use())
    assert len(calls) == most if sync != "interval" else len(calls) <= most


def test_a_quiet_store_is_synced_once_within_its_interval(tmp_path, monkeypatch):
    calls = []

    async def use():
        store = FileStore(tmp_path, sync="interval", interval=0.05)
        await created(store, "s", b"", "blob")
        held = await store.acquire("s", "me", "1")
        await asyncio.sleep(0.1)
        with instead(monkeypatch, "fsync", lambda real, handle: (calls.append(handle), real(handle))):
            await store.commit([Batch("s", held.fence, 0, [b"r"])])
            await store.commit([Batch("s", held.fence, 1, [b"r"])])
            while store._log.unsynced:
                await asyncio.sleep(0.02)
            assert 1 <= len(calls) <= 2
            # No time is set for another one.
            assert store._upkeep.until_sync() is None
        await store.close()

    run(use())


# Segments.


def segments(folder):
    return sorted(int(path.stem) for path in (folder / "journal").glob("*.log"))


def test_segments_that_nothing_needs_are_deleted(tmp_path):
    async def use():
        store = FileStore(tmp_path, segment_bytes=1000)
        await created(store, "s", b"", "blob")
        held = await store.acquire("s", "me", "1")
        for position in range(60):
            await store.commit([Batch("s", held.fence, position, [b"r" * 100])])
        assert len(segments(tmp_path)) > 5
        await store.commit([Checkpoint("s", held.fence, 60, b"snapshot")])
        await settled(store)
        assert len(segments(tmp_path)) <= 2
        await store.delete("s", held.fence)
        for index in range(30):
            await created(store, f"t{index}", b"", "blob")
            await store.delete(f"t{index}", (await store.acquire(f"t{index}", "me", "1")).fence)
        await settled(store)
        assert len(segments(tmp_path)) <= 3
        await store.close()

    run(use())
    assert content_of(tmp_path) == {}


async def pinned(folder):
    """A store with old segments of which each holds little that is needed; and what is in it."""
    store = FileStore(folder, segment_bytes=2000)
    fences = {}
    for stream in ("busy", "quiet", "gone"):
        await created(store, stream, stream.encode(), "blob")
        fences[stream] = (await store.acquire(stream, "me", "1")).fence
    await store.commit([Batch("gone", fences["gone"], 0, [b"g" * 100])])
    position = 0
    for turn in range(3):
        await store.commit([Batch("quiet", fences["quiet"], turn, [b"quiet %d" % turn])])
        for _ in range(20):
            await store.commit([Batch("busy", fences["busy"], position, [b"%d" % position * 50])])
            position += 1
        if turn == 1:
            await store.delete("gone", fences["gone"])
    return store, fences, position


def test_old_segments_that_few_records_pin_are_copied_forward(tmp_path):
    async def use():
        store, fences, position = await pinned(tmp_path)
        before = segments(tmp_path)
        await store.commit([Checkpoint("busy", fences["busy"], position - 1, b"snapshot")])
        await settled(store)
        after = segments(tmp_path)
        assert len(before) > 4
        assert len(after) <= 2
        assert after[0] >= before[-1]
        found = await content(store)
        await store.close()
        assert found == content_of(tmp_path, segment_bytes=2000)
        assert found["quiet"] == (b"quiet", None, 0, [b"quiet 0", b"quiet 1", b"quiet 2"])
        assert found["busy"] == (b"busy", b"snapshot", position - 1, [b"%d" % (position - 1) * 50])
        assert set(found) == {"quiet", "busy"}

    run(use())


def test_a_snapshot_and_a_deletion_outlive_the_segment_that_first_named_them(tmp_path):
    async def use():
        store = FileStore(tmp_path, segment_bytes=2000)
        streams = ("pin", "covered", "gone", "busy")
        for stream in streams:
            await created(store, stream, b"", "blob")
        fences = {stream: (await store.acquire(stream, "me", "1")).fence for stream in streams}
        await store.commit([Batch("covered", fences["covered"], 0, [b"c"]), Batch("gone", fences["gone"], 0, [b"g"])])
        await store.commit([Batch("pin", fences["pin"], 0, [b"p" * 2000])])  # Most of the first segment is needed.
        for last in (
            store.commit([Checkpoint("covered", fences["covered"], 1, b"snapshot")]),
            store.delete("gone", fences["gone"]),
        ):
            await last
            position = (await store.describe("busy")).position
            records = [b"b" * 200] * 10  # Fill that segment with what is not needed soon.
            await store.commit([Batch("busy", fences["busy"], position, records)])
            await store.commit([Batch("busy", fences["busy"], position + 10, [b"b"])])
        await store.commit([Checkpoint("busy", fences["busy"], 22, b"")])
        await settled(store)
        assert segments(tmp_path) == [1, 4]
        await store.close()

    run(use())
    found = content_of(tmp_path)
    assert set(found) == {"pin", "covered", "busy"}
    assert found["covered"] == (b"", b"snapshot", 1, [])


def test_a_crash_at_any_step_of_copying_forward_loses_nothing_and_brings_nothing_back(memory_path, monkeypatch):
    copies = []

    def watched(real, *arguments, **named):
        copies.append(killed(memory_path / "store", memory_path / f"{len(copies)}"))
        answer = real(*arguments, **named)
        copies.append(killed(memory_path / "store", memory_path / f"{len(copies)}"))
        return answer

    def torn(real, handle, data, offset):
        """A write in two parts, so that there is a step in its middle."""
        return watched(real, handle, data[: max(1, len(data) // 2)], offset)

    async def use():
        store, fences, position = await pinned(memory_path / "store")
        await settled(store)
        before = content_of(killed(store.folder, memory_path / "before"))
        with (
            instead(monkeypatch, "pwrite", torn),
            instead(monkeypatch, "fsync", watched),
            instead(monkeypatch, "unlink", watched),
            instead(monkeypatch, "replace", watched),
        ):
            await store.commit([Checkpoint("busy", fences["busy"], position - 1, b"snapshot")])
            await settled(store)
        found = await content(store)
        await store.close()
        return before, found

    before, after = run(use())
    assert len(copies) > 20
    assert before != after
    seen = []
    for copy in copies:
        found = content_of(copy, segment_bytes=2000)
        assert found in (before, after)
        assert content_of(copy, segment_bytes=2000) == found
        seen.append(found == after)
    assert seen == sorted(seen)  # once the commit is there it stays
    assert seen[0] is False
    assert seen[-1] is True


def test_a_damaged_record_that_should_be_copied_forward_keeps_its_segment_and_fails_its_stream_only(tmp_path):
    async def use():
        store, fences, position = await pinned(tmp_path)
        first = tmp_path / "journal" / "0000000001.log"
        data = bytearray(first.read_bytes())
        data[data.index(b"quiet 0")] ^= 1
        first.write_bytes(data)
        for _ in range(3):
            await store.commit([Checkpoint("busy", fences["busy"], position, b"snapshot")])
        await settled(store)
        assert first.exists()
        assert (await store.acquire("busy", "me", "1")).snapshot == b"snapshot"
        with pytest.raises(StoreError, match=r"0000000001\.log is damaged at offset"):
            await store.acquire("quiet", "me", "1")
        await store.close()

    run(use())


def test_without_syncs_the_snapshot_before_stays_until_the_disk_holds_the_log(tmp_path):
    async def use():
        store = FileStore(tmp_path, sync="never", segment_bytes=10_000)
        await created(store, "s", b"", "blob")
        held = await store.acquire("s", "me", "1")
        most = 0
        for position in range(30):
            writes = [Batch("s", held.fence, position, [b"r"]), Checkpoint("s", held.fence, position + 1, b"s" * 3000)]
            assert await store.commit(writes) == [None, None]
            await settled(store)
            most = max(most, len(list((tmp_path / "streams").glob("*/*.snapshot"))))
        await store.close()
        return most

    # More than the newest, or a power cut could leave none; not all, or the disk would fill.
    assert 2 <= run(use()) <= 6
    assert len(list((tmp_path / "streams").glob("*/*.snapshot"))) == 1


# Anything, in any order, whatever the size of a segment and whenever it is synced.


class AnyOrder(StoreMachine):
    """The machine that all stores are held against, with small segments, and kills in place of closing."""

    name = "files"

    def __init__(self):
        self.folders, self.options = 0, {}
        super().__init__()

    def open(self):
        self.store = FileStore(Path(self.folder.name) / str(self.folders), **self.options)
        self.now(self.store.renew("one", "1", 600))

    @initialize(
        segment_bytes=st.sampled_from([1, 200, 1500, 1 << 20]), sync=st.sampled_from(["always", "interval", "never"])
    )
    def choose(self, segment_bytes, sync):
        self.now(self.store.close())
        self.options = {"segment_bytes": segment_bytes, "sync": sync, "interval": 0.001}
        self.open()

    @rule()
    def kill(self):
        self.now(settled(self.store))
        self.folders += 1
        killed(self.store.folder, Path(self.folder.name) / str(self.folders))
        self.open_again()

    @invariant()
    def every_segment_knows_how_much_of_it_is_needed(self):
        self.now(settled(self.store))
        for number, segment in self.store._log._segments.items():
            assert segment.live == sum(place.size for place, _ in self.store._catalogue.moves_from(number))


AnyOrder.TestCase.settings = settings(max_examples=60, stateful_step_count=30)
TestAnythingInAnyOrder = AnyOrder.TestCase

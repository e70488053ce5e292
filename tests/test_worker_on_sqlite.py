"""A worker over a SQLite store: a full disk and a version that cannot read it lose nothing that was acknowledged."""

import shutil

from made_service import ask, create, done, engine_of, learned, observe, one, settings
from protodcs.serve.messages import STOPPING, Action, ReplyStatus
from protodcs.serve.store.sqlite import SqliteStore, back_up
from protodcs.serve.stream import snapshots
from protodcs.serve.workers.worker import Worker


async def worker_on(folder, **changes):
    worker = Worker("worker-0", SqliteStore(folder), settings(store_connect_timeout=0.05, **changes))
    await worker.start()
    return worker


async def test_a_full_disk_is_reported_and_loses_nothing(small_disk):
    worker = await worker_on(small_disk / "store")
    await done(worker, create())
    # Space for some more records, whatever the store needs for itself.
    ballast = small_disk / "ballast"
    ballast.write_bytes(bytes(shutil.disk_usage(small_disk).free - 400_000))
    reached = 0
    while (reply := await one(worker, observe(reached))).status is ReplyStatus.DONE:
        reached += 1
    assert reply.status is ReplyStatus.LATER
    assert "full" in reply.message
    assert reached > 5
    ballast.unlink()
    # The one that was refused is asked again, and the stream goes on as if nothing had been.
    for number in range(reached, reached + 20):
        await done(worker, observe(number))
    assert engine_of(worker) == learned(reached + 20)
    await worker.close()
    worker = await worker_on(small_disk / "store")
    (reply,) = await done(worker, observe(reached))
    assert reply.repeated
    assert engine_of(worker) == learned(reached + 20)
    await worker.close()


async def test_a_stream_that_a_version_refuses_to_load_comes_back_with_the_version_that_wrote_it(tmp_path, monkeypatch):
    """The steps of the page on troubleshooting: copy the store, export from the copy with the old version, import."""
    old = await worker_on(tmp_path / "store", unload_records=0)
    await done(old, create(), *(observe(number) for number in range(20)))
    await old.drain(STOPPING)
    await old.close()
    with monkeypatch.context() as newer:
        newer.setattr(snapshots, "VERSION", snapshots.VERSION + 1)
        new = await worker_on(tmp_path / "store")
        reply = await one(new, ask(Action.EXPORT))
        assert (reply.status, reply.code) == (ReplyStatus.CONFLICT, "stream_not_loaded")
        # The decision log needs no engine.
        (log,) = await done(new, ask(Action.READ_LOG, payload=b"{}"))
        assert len(log.facts["entries"]) == 20
        back_up(tmp_path / "store", tmp_path / "copy")
    old = await worker_on(tmp_path / "copy")
    (exported,) = await done(old, ask(Action.EXPORT))
    await old.close()
    assert exported.answer == learned(20)
    with monkeypatch.context() as newer:
        newer.setattr(snapshots, "VERSION", snapshots.VERSION + 1)
        (reply,) = await done(new, ask(Action.IMPORT, "import", exported.answer))
        assert reply.position == 20
        await done(new, observe(20))
        assert engine_of(new) == learned(21)
        assert [stream.problem for stream in await new.list_streams("", None, 10)] == [None]
        await new.close()

"""A worker over a SQLite store: a full disk loses nothing that was acknowledged."""

import asyncio
import shutil

from made_service import create, done, engine_of, learned, observe, one, settings
from protodcs.serve.messages import Outcome
from protodcs.serve.store.sqlite import SqliteStore
from protodcs.serve.workers.worker import Worker


async def worker_on(folder, **changes):
    worker = Worker("worker-0", SqliteStore(folder), settings(store_connect_timeout=0.05, **changes))
    await worker.start()
    return worker


def test_a_full_disk_is_reported_and_loses_nothing(small_disk):
    async def run():
        worker = await worker_on(small_disk / "store")
        await done(worker, create())
        # Space for some more records, whatever the store needs for itself.
        ballast = small_disk / "ballast"
        ballast.write_bytes(bytes(shutil.disk_usage(small_disk).free - 400_000))
        reached = 0
        while (reply := await one(worker, observe(reached))).outcome is Outcome.DONE:
            reached += 1
        assert reply.outcome is Outcome.LATER
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

    asyncio.run(run())

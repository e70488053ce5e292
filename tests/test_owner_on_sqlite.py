"""A worker over a SQLite store: a full disk loses nothing that was acknowledged."""

import asyncio
import shutil

from made_service import create, done, engine_of, learned, observe, one, settings
from protodcs.serve.messages import Outcome
from protodcs.serve.owners.owner import Owner
from protodcs.serve.store.sqlite import SqliteStore


async def owner_on(folder, **changes):
    owner = Owner("owner-0", SqliteStore(folder), settings(store_patience=0.05, **changes))
    await owner.start()
    return owner


def test_a_full_disk_is_told_in_words_and_loses_nothing(small_disk):
    async def run():
        owner = await owner_on(small_disk / "store")
        await done(owner, create())
        # Room for some records more, whatever the store takes for itself.
        ballast = small_disk / "ballast"
        ballast.write_bytes(bytes(shutil.disk_usage(small_disk).free - 100_000))
        reached = 0
        while (reply := await one(owner, observe(reached))).outcome is Outcome.DONE:
            reached += 1
        assert reply.outcome is Outcome.LATER
        assert "full" in reply.words
        assert reached > 5
        ballast.unlink()
        # The one that was refused is asked again, and the stream goes on as if nothing had been.
        for number in range(reached, reached + 20):
            await done(owner, observe(number))
        assert engine_of(owner) == learned(reached + 20)
        await owner.close()
        owner = await owner_on(small_disk / "store")
        (reply,) = await done(owner, observe(reached))
        assert reply.repeated
        assert engine_of(owner) == learned(reached + 20)
        await owner.close()

    asyncio.run(run())

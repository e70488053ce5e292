"""An owner over a files store: a full disk and a torn record lose nothing that was acknowledged."""

import asyncio
import shutil

import pytest

from made_service import create, done, engine_of, learned, observe, one, settings
from protodcs.serve.messages import Outcome
from protodcs.serve.owners.owner import Owner
from protodcs.serve.store.files import FileStore


async def owner_on(folder, **changes):
    owner = Owner("owner-0", FileStore(folder), settings(store_patience=0.05, **changes))
    await owner.start()
    return owner


def test_a_full_disk_is_told_in_words_and_loses_nothing(small_disk):
    async def run():
        owner = await owner_on(small_disk / "store")
        await done(owner, create())
        # Room for some records more, whatever the store takes for itself.
        ballast = small_disk / "ballast"
        ballast.write_bytes(bytes(shutil.disk_usage(small_disk).free - 20_000))
        reached = 0
        while (reply := await one(owner, observe(reached))).outcome is Outcome.DONE:
            reached += 1
        assert reply.outcome is Outcome.LATER
        assert "No space left" in reply.words
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


@pytest.mark.parametrize("torn", [1, 20, 150])
def test_a_torn_last_record_is_not_there_and_all_before_it_are(tmp_path, torn):
    async def run():
        store = tmp_path / "store"
        owner = await owner_on(store)
        await done(owner, create(), *(observe(number) for number in range(10)))
        before = {path: path.stat().st_size for path in (store / "journal").iterdir()}
        await done(owner, observe(10))
        # As a process leaves it that was killed while it wrote the eleventh: nobody was told of that one.
        crashed = tmp_path / "crashed"
        shutil.copytree(store, crashed, ignore=shutil.ignore_patterns("lock"))
        await owner.close()
        for path, size in before.items():
            with (crashed / "journal" / path.name).open("r+b") as file:
                file.truncate(size + torn)
        owner = await owner_on(crashed)
        (reply,) = await done(owner, observe(9))
        assert reply.repeated
        assert engine_of(owner) == learned(10)
        (reply,) = await done(owner, observe(10))
        assert not reply.repeated
        assert engine_of(owner) == learned(11)
        await owner.close()

    asyncio.run(run())

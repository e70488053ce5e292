"""Stores that older versions wrote are opened by this one: every stream wakes where it was, answers as it would have,
and goes on.

The folders in `golden` were written by `scripts/make_golden_store.py`, once for each version, and never change.
"""

import asyncio
import hashlib
import json
import shutil
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import pytest

from protodcs.serve.store.base import Batch
from protodcs.serve.store.files import FileStore
from protodcs.serve.store.redis import RedisStore
from protodcs.serve.stream.answers import unpack_decision
from protodcs.serve.stream.hosted import Birth, Hosted
from protodcs.serve.stream.records import Kind
from protodcs.serve.stream.shared import unpack_prototypes
from redis_server import RedisServer

GOLDEN = Path(__file__).parent / "golden"
EXPECTED = {
    path.stem.removeprefix("expected-"): json.loads(path.read_text()) for path in GOLDEN.glob("expected-*.json")
}


@asynccontextmanager
async def files_of(version, folder):
    store = FileStore(shutil.copytree(GOLDEN / f"store-{version}", folder / "store"))
    try:
        yield store
    finally:
        await store.close()


@asynccontextmanager
async def redis_of(version, folder):
    with RedisServer(shutil.copytree(GOLDEN / f"redis-{version}", folder / "redis")) as server:
        store = RedisStore(server.url)
        try:
            yield store
        finally:
            await store.close()


OPENED = {"files": files_of, "redis": redis_of}


async def woken(store, stream):
    """A stream as its next owner wakes it: what the store gave, and the stream."""
    held = await store.acquire(stream, "owner-0", "of the next version")
    prototypes = unpack_prototypes(await store.get_shared(Birth.unpack(held.birth).prototypes))
    return held, Hosted(held, prototypes, 2, 3600.0)


async def digest_of(store, stream, held):
    """All that the store holds of a stream, to the bit."""
    kept = [await store.kept_snapshot(stream, name) for name in await store.kept(stream)]
    return hashlib.sha256(b"".join([held.birth, held.snapshot, *held.tail, *kept])).hexdigest()


@pytest.mark.parametrize("version", EXPECTED)
@pytest.mark.parametrize("kind", OPENED)
def test_streams_of_an_older_version_wake_where_they_were_and_go_on(version, kind, tmp_path):
    async def run():
        async with OPENED[kind](version, tmp_path) as store:
            assert sorted([stream async for stream in store.streams()]) == sorted(EXPECTED[version][kind])
            for stream, expected in EXPECTED[version][kind].items():
                held, hosted = await woken(store, stream)
                assert held.epoch > expected["epoch"]
                assert (held.start, held.position) == (expected["start"], expected["position"])
                assert await digest_of(store, stream, held) == expected["stored"]
                assert await store.kept(stream) == expected["kept"]
                assert (hosted.engine.sequence, hosted.engine.frozen) == (expected["sequence"], expected["frozen"])
                records = [answered_as(each, hosted) for each in expected["next"]]
                assert await store.commit([Batch(stream, held.epoch, held.position, records)]) == [None]
                assert (await woken(store, stream))[1].state() == hosted.state()

    asyncio.run(run())


def answered_as(expected, hosted):
    """The packed record of a further feature, whose answer must be the expected one."""
    feature = np.array(expected["feature"], dtype="<f4").tobytes()
    record = hosted.change(Kind.OBSERVE, f"next {hosted.position}", feature, 0.0)
    decision = unpack_decision(record.answer).to_dict()
    for name, value in expected["decision"].items():
        # Another type of processor may differ in the last digits.
        assert decision[name] == (pytest.approx(value, abs=1e-5) if isinstance(value, float) else value), name
    return record.pack()


@pytest.mark.parametrize("version", EXPECTED)
def test_files_and_redis_of_an_older_version_wake_the_same_streams_to_the_bit(version, tmp_path):
    async def run():
        async with files_of(version, tmp_path) as files, redis_of(version, tmp_path) as redis:
            for stream in EXPECTED[version]["files"]:
                one, other = [(await woken(store, stream))[1] for store in (files, redis)]
                assert one.state() == other.state()

    asyncio.run(run())


def test_there_are_golden_stores_and_they_stay_small():
    written = [path for kind in ("store", "redis") for path in GOLDEN.glob(f"{kind}-*/**/*") if path.is_file()]
    assert "1" in EXPECTED
    assert sum(path.stat().st_size for path in written) < 100_000 * len(EXPECTED)

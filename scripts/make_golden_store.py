"""Writes the stores that `tests/test_upgrade.py` wakes streams from: one of files, one of Redis, with the same content.

Run it once for each version of a format, into new folders, and commit what it wrote:

    PYTHONPATH=tests python scripts/make_golden_store.py 1

It must never be run again for an old version: those folders are what users of that version have on their disks, and
what this version would write in their place proves nothing.
"""

import asyncio
import hashlib
import json
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from protodcs import Config
from protodcs.core.prototypes import Prototypes
from protodcs.serve.store.base import Batch, Checkpoint, Held, Store
from protodcs.serve.store.files import FileStore
from protodcs.serve.store.redis import RedisStore
from protodcs.serve.stream.answers import unpack_decision
from protodcs.serve.stream.hosted import Birth, Hosted
from protodcs.serve.stream.records import Kind
from protodcs.serve.stream.shared import pack_prototypes
from redis_server import RedisServer

GOLDEN = Path(__file__).parent.parent / "tests" / "golden"
CLASSES, WIDTH = ["ant", "bee", "c\u00e9tacean"], 8
KEPT_AT, SNAPSHOT_AT, FROZEN_AT, END = 5, 12, 13, 17
# Each stream and its preset; half of a surrogate pair is an id like any other.
LEARNING, FROZEN = "learning", "frozen \ud83d"
STREAMS = {LEARNING: "paper", FROZEN: "default"}
BEGUN = 1_700_000_000.0


def features(count: int, seed: int) -> list[bytes]:
    """Features near the prototypes, as they come over the wire."""
    rng = np.random.default_rng(seed)
    rows = np.eye(len(CLASSES), WIDTH)[rng.integers(len(CLASSES), size=count)] + rng.normal(0, 0.3, (count, WIDTH))
    return [row.astype("<f4").tobytes() for row in rows]


async def write_stream(store: Store, stream: str, seed: int, prototypes: Prototypes) -> Held:
    """A stream with a snapshot and records behind it; one has a kept snapshot too, the other is frozen in the end."""
    config = Config.preset(STREAMS[stream]).model_dump()
    birth = Birth(config=config, classes=CLASSES, prototypes=prototypes.fingerprint)
    await store.put_shared(prototypes.fingerprint, pack_prototypes(prototypes))
    assert await store.create(stream, birth.pack(), prototypes.fingerprint)
    held = await store.acquire(stream, "owner-0", "golden")
    hosted = Hosted(held, prototypes, 2, 3600.0)
    for number, feature in enumerate(features(END, seed)):
        kind, payload = Kind.OBSERVE, feature
        if number == KEPT_AT and stream == LEARNING:
            kind, payload = Kind.KEEP, b"before noon"
            await store.keep(stream, held.epoch, payload.decode(), hosted.state())
        elif number == FROZEN_AT and stream == FROZEN:
            kind, payload = Kind.FREEZE, b""
        record = hosted.change(kind, f"key {number}", payload, BEGUN + number)
        assert await store.commit([Batch(stream, held.epoch, number, [record.pack()])]) == [None]
        if hosted.position == SNAPSHOT_AT:
            checkpoint = Checkpoint(stream, held.epoch, SNAPSHOT_AT, hosted.snapshot())
            assert await store.commit([checkpoint]) == [None]
    return await store.acquire(stream, "owner-0", "golden")


async def written(store: Store) -> dict[str, Any]:
    """Fill a store; what is expected of each of its streams when it is woken."""
    prototypes = Prototypes(np.eye(len(CLASSES), WIDTH) + 0.1)
    expected = {}
    for seed, stream in enumerate(STREAMS):
        held = await write_stream(store, stream, seed, prototypes)
        hosted = Hosted(held, prototypes, 2, 3600.0)
        kept = {name: await store.kept_snapshot(stream, name) for name in await store.kept(stream)}
        parts = [held.birth, held.snapshot, *held.tail, *kept.values()]
        expected[stream] = {
            "epoch": held.epoch,
            "start": held.start,
            "position": held.position,
            "sequence": hosted.engine.sequence,
            "frozen": hosted.engine.frozen,
            "kept": list(kept),
            "stored": hashlib.sha256(b"".join(part for part in parts if part is not None)).hexdigest(),
            "next": [next_decision(hosted, number, feature) for number, feature in enumerate(features(2, seed + 100))],
        }
    await store.close()
    return expected


def next_decision(hosted: Hosted, number: int, feature: bytes) -> dict[str, Any]:
    """A further feature, and what it is answered with."""
    answer = unpack_decision(hosted.change(Kind.OBSERVE, f"next {number}", feature, BEGUN + 100).answer).to_dict()
    return {"feature": np.frombuffer(feature, "<f4").tolist(), "decision": answer}


def main(version: str) -> None:
    """Write the folders of one version."""
    files, redis = GOLDEN / f"store-{version}", GOLDEN / f"redis-{version}"
    if files.exists() or redis.exists():
        raise SystemExit(f"{files} or {redis} is there already: an old version is never written again")
    expected = {"files": asyncio.run(written(FileStore(files)))}
    (files / "lock").unlink()
    with tempfile.TemporaryDirectory() as folder:
        with RedisServer(Path(folder), **{"aof-use-rdb-preamble": "no"}) as server:
            expected["redis"] = asyncio.run(written(RedisStore(server.url)))
        shutil.copytree(Path(folder) / "appendonlydir", redis / "appendonlydir")
    (GOLDEN / f"expected-{version}.json").write_text(json.dumps(expected, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1])

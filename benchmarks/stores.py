"""Measure commits of 20 records of 2.3 kB with log entries on SQLite and PostgreSQL, and the bytes that they take.

`python -m benchmarks.stores FOLDER` or `python -m benchmarks.stores postgresql://HOST/DATABASE` (an empty one).
"""

import argparse
import asyncio
import random
import time
from pathlib import Path

import numpy as np

from protodcs.serve.log.entries import LogEntry
from protodcs.serve.store.base import Store
from protodcs.serve.store.values import Batch, Checkpoint

_RECORD, _ROWS = 2300, 20


async def opened(place: str) -> Store:
    if place.startswith("postgres"):
        from protodcs.serve.store.postgres import PostgresStore

        return await PostgresStore(place).prepare()
    from protodcs.serve.store.sqlite import SqliteStore

    return SqliteStore(place)


async def size_of(store: Store, place: str) -> int:
    if place.startswith("postgres"):
        return int((await store._ask("SELECT pg_database_size(current_database())"))[0][0])
    return sum(file.stat().st_size for file in Path(place).iterdir())


async def measure(place: str, commits: int, streams: int) -> None:
    dice = random.Random(0)
    store = await opened(place)
    await store.renew("one", "1", 3600)
    await store.put_shared("blob", b"blob")
    held = []
    for number in range(streams):
        await store.create(f"bench/{number}", b"spec", "blob")
        held.append((await store.acquire(f"bench/{number}", "one", "1")).fence)
    before, seconds, each = await size_of(store, place), [], _ROWS // streams
    for commit in range(commits):
        writes = []
        for number, fence in enumerate(held):
            first = each * commit
            log = [
                LogEntry(first + row, 0, f"{dice.getrandbits(128):032x}", None, "known", True, "cat", 0.1, 1.0, None)
                for row in range(each)
            ]
            records = [dice.randbytes(_RECORD) for _ in range(each)]
            writes.append(Batch(f"bench/{number}", fence, first, records, b"summary", log))
        began = time.perf_counter()
        if await store.commit(writes) != [None] * streams:
            raise RuntimeError("a write failed")
        seconds.append(time.perf_counter() - began)
    grown = await size_of(store, place) - before
    p50, p99 = np.percentile(seconds, [50, 99]) * 1000
    rate = _ROWS * commits / sum(seconds)
    print(
        f"{streams} streams: {rate:,.0f} records/s, commit p50 {p50:.2f} ms, p99 {p99:.2f} ms, "
        f"{grown / (_ROWS * commits):,.0f} bytes on disk per record"
    )
    for number, fence in enumerate(held):
        snapshot = Checkpoint(f"bench/{number}", fence, each * commits, bytes(100_000))
        if await store.commit([snapshot]) != [None]:
            raise RuntimeError("a snapshot failed")
        await store.delete(f"bench/{number}", fence)
    await store.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("place")
    parser.add_argument("--commits", type=int, default=1000)
    options = parser.parse_args()
    for streams in (1, _ROWS):
        asyncio.run(measure(options.place, options.commits, streams))


if __name__ == "__main__":
    main()

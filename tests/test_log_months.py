"""Months of the decision log: what is deleted with them, what a limit for all logs deletes, and what stays."""

import asyncio
import time
from collections import Counter
from contextlib import suppress
from datetime import UTC, datetime

import pytest

from made_service import create, done, handled, observe, one, settings
from protodcs.errors import StoreError
from protodcs.serve.log.entries import OUTCOMES, LogEntry, LogLimits, LogQuery, Purge
from protodcs.serve.messages import ReplyStatus
from protodcs.serve.settings import ServeConfig, log_limits
from protodcs.serve.store.months import month_of, range_of
from protodcs.serve.store.postgres import PostgresStore
from protodcs.serve.store.schema import USAGE
from protodcs.serve.store.sqlite import SqliteStore
from protodcs.serve.store.values import Batch
from protodcs.serve.workers.worker import Worker
from service.postgres import shared_postgres
from store_contract import BLOB, STORES, begun, of_stores

DAY = 86_400.0
ALL = LogQuery(limit=200_000, newest_first=False)
# No limit but that of the test.
NO_LIMIT = LogLimits(1e12, 10**9, 1 << 50)


def at(year, month, day=1, hour=0):
    """Return a time in seconds since 1970."""
    return datetime(year, month, day, hour, tzinfo=UTC).timestamp()


def entry(position, moment, thumbnail=b""):
    return LogEntry(
        position,
        int(1000 * moment),
        "0123456789abcdef" * 2,
        None,
        *OUTCOMES[position % 4],
        "cat" if position % 3 else "dog",
        0.25,
        1.5,
        None,
        thumbnail=thumbnail,
    )


async def logged(store, stream, times, thumbnail=b""):
    """Create a stream whose entries have these times. Return its fence."""
    fence = await begun(store, stream)
    for first in range(0, len(times), 5000):
        log = [entry(place, moment, thumbnail) for place, moment in enumerate(times[first : first + 5000], first)]
        assert await store.commit([Batch(stream, fence, first, [b""] * len(log), b"", log)]) == [None]
    return fence


async def positions(store, stream, query=ALL):
    return [found.position for found in (await store.read_log(stream, query)).entries]


async def check_counts(store):
    """The sizes and the usage are those of the rows that are there."""
    rows = await store._ask("SELECT key, time, thumbnail FROM log")
    counted = Counter()
    for key, moment, thumbnail in rows:
        counted[key >> 32, month_of(moment), "entries"] += 1
        counted[key >> 32, month_of(moment), "bytes"] += 110 + thumbnail
    sizes = Counter()
    for stream, month, entries, size in await store._ask("SELECT stream, month, entries, bytes FROM log_sizes"):
        sizes[stream, month, "entries"], sizes[stream, month, "bytes"] = entries, size
    assert sizes == counted
    recounted = {tenant.decode(): size for tenant, *_, size in await store._ask(USAGE) if size}
    assert await store.log_usage() == recounted
    thumbnails = await store._ask("SELECT length(data) FROM log_thumbnails")
    assert sum(size for (size,) in thumbnails) == sum(thumbnail for *_, thumbnail in rows)


async def tables_of(store):
    """Return the months that have tables in PostgreSQL."""
    found = await store._ask("SELECT CAST(inhrelid AS regclass)::text FROM pg_inherits ORDER BY 1")
    return sorted({name for (name,) in found if name.startswith("log") and "_pkey" not in name and "idx" not in name})


def test_months_follow_each_other_without_a_gap():
    month, seen = 197001, []
    while month < 210001:
        begin, end = range_of(month)
        assert (month_of(begin), month_of(end - 1)) == (month, month)
        seen.append((month, begin, end))
        month = month_of(end)
    assert len(seen) == 130 * 12
    assert [begin for _, begin, _ in seen[1:]] == [end for *_, end in seen[:-1]]


# Three months, with entries at the edges of the second.
SPAN = [
    at(2022, 1, 5),
    at(2022, 1, 31, 23),
    at(2022, 2),
    at(2022, 2, 14),
    at(2022, 2, 28, 23),
    at(2022, 3),
    at(2022, 3),
]


@of_stores("sqlite", "postgres")
async def test_pages_filters_and_purges_see_one_log_over_all_months(store):
    times = [moment for moment in SPAN for _ in range(20)]
    await logged(store, "a/s", times, b"jpeg")
    entries = [entry(position, moment) for position, moment in enumerate(times)]
    for newest_first in (True, False):
        seen, query, more = [], LogQuery(limit=9, newest_first=newest_first), True
        while more:
            page = await store.read_log("a/s", query)
            seen += [found.position for found in page.entries]
            more, query = page.more, query._replace(after=seen[-1])
        assert seen == sorted(range(140), reverse=newest_first)
    for since, until in ((None, at(2022, 2)), (at(2022, 2), at(2022, 3)), (at(2022, 2, 28), None)):
        for outcome, name in ((None, None), ("unknown", None), ("known", "dog")):
            query = ALL._replace(
                since=since and int(1000 * since),
                until=until and int(1000 * until),
                outcome=outcome,
                nearest_class=name,
            )
            assert await positions(store, "a/s", query) == [
                found.position
                for found in entries
                if (since or 0) <= found.time / 1000 < (until or 1e12)
                and outcome in (None, found.outcome)
                and name in (None, found.nearest_class)
            ]
    assert await store.purge_log("a/s", Purge(int(1000 * at(2022, 1, 31)), int(1000 * at(2022, 2, 15)))) == 60
    assert await positions(store, "a/s") == [*range(20), *range(80, 140)]
    await check_counts(store)
    await store.trim_log(NO_LIMIT._replace(entries=70), None)
    assert await positions(store, "a/s") == [*range(10, 20), *range(80, 140)]
    assert await store.read_thumbnail("a/s", 9) is None
    assert await store.read_thumbnail("a/s", 80) == b"jpeg"
    await check_counts(store)
    await store.delete_thumbnails()
    await check_counts(store)


@of_stores("postgres")
async def test_postgresql_deletes_a_month_when_all_of_it_is_too_old(store):
    for stream in ("a/s", "b/s"):
        await logged(store, stream, SPAN, b"jpeg")
    gone = await logged(store, "a/gone", SPAN)
    await store.delete("a/gone", gone)
    limits = NO_LIMIT._replace(seconds=30 * DAY)
    await store.trim_log(limits, at(2022, 3, 2, 23))
    assert await positions(store, "a/s") == list(range(7))
    # The clock is not certain.
    await store.trim_log(limits, None)
    assert await positions(store, "a/s") == list(range(7))
    await store.trim_log(limits, at(2022, 3, 3))
    for stream in ("a/s", "b/s"):
        assert await positions(store, stream) == [2, 3, 4, 5, 6]
        assert await store.read_thumbnail(stream, 1) is None
        assert await store.read_thumbnail(stream, 2) == b"jpeg"
    # The last entry of February is less than a week before March.
    assert await tables_of(store) == ["log_202202", "log_202203", "log_thumbnails_202202", "log_thumbnails_202203"]
    await check_counts(store)
    assert await store.find_problems() == []
    # Never the current month, however little is retained.
    await store.trim_log(NO_LIMIT._replace(seconds=1.0), at(2022, 3, 31, 23))
    assert await positions(store, "a/s") == [5, 6]
    # A process whose clock is years ahead deletes nothing that is recent by the clock of the database.
    fence = (await store.acquire("b/s", "one", "1")).fence
    now = datetime.now(UTC).timestamp()
    assert await store.commit([Batch("b/s", fence, 7, [b""], b"", [entry(7, now)])]) == [None]
    await store.trim_log(limits._replace(total_size=1), now + 1000 * DAY)
    assert await positions(store, "b/s") == [7]


async def test_a_process_that_knew_a_month_writes_to_it_though_another_one_dropped_it():
    url = shared_postgres().database()
    one, two = [await PostgresStore(url).prepare() for _ in range(2)]
    try:
        await one.renew("one", "1", 600)
        await one.put_shared(BLOB, b"blob")
        fence = await logged(one, "a/s", [at(2022, 1, 2), at(2022, 3)])
        await two.trim_log(NO_LIMIT._replace(seconds=DAY), at(2022, 3, 2))
        assert await positions(one, "a/s") == [1]
        # The clock of the machine was set back.
        log = [entry(2, at(2022, 1, 3)), entry(3, at(2022, 3, 2))]
        assert await one.commit([Batch("a/s", fence, 2, [b"2", b"3"], b"", log)]) == [None]
        assert await positions(two, "a/s") == [1, 2, 3]
        assert (await one.acquire("a/s", "one", "1")).tail == [b"", b"", b"2", b"3"]
        await check_counts(one)
        await two.trim_log(NO_LIMIT._replace(seconds=DAY), at(2022, 3, 2))
        assert await positions(one, "a/s") == [1, 3]
        await check_counts(one)
    finally:
        await one.close()
        await two.close()


@of_stores("postgres")
async def test_tables_of_the_next_month_are_there_a_week_before(store):
    fence = await logged(store, "s", [at(2022, 1, 20)])
    assert await tables_of(store) == ["log_202201", "log_thumbnails_202201"]
    log = [entry(1, at(2022, 1, 25))]
    assert await store.commit([Batch("s", fence, 1, [b""], b"", log)]) == [None]
    assert "log_202202" in await tables_of(store)


@of_stores("postgres")
async def test_who_reads_for_long_delays_the_drop_of_a_month_and_no_observe(store):
    fence = await logged(store, "s", SPAN)
    limits = NO_LIMIT._replace(seconds=DAY)
    async with store._connected() as reader, reader.transaction():
        # As a backup does.
        await reader.execute("SELECT count(*) FROM log")
        await store.trim_log(limits, at(2022, 3, 2))
        log = [entry(7, at(2022, 4))]
        assert await store.commit([Batch("s", fence, 7, [b""], b"", log)]) == [None]
        assert await positions(store, "s") == list(range(8))
    # It tries again after a minute or two.
    await store.trim_log(limits, at(2022, 3, 2))
    assert await positions(store, "s") == list(range(8))
    store._next_drop = 0.0
    await store.trim_log(limits, at(2022, 3, 2))
    assert await positions(store, "s") == [5, 6, 7]
    await check_counts(store)


@of_stores("postgres")
async def test_a_month_is_dropped_while_streams_are_written_and_trimmed(store):
    """Nothing fails but what is tried again, and all counts are right afterwards."""
    names, ended = ["a/s", "b/s", "b/t"], asyncio.Event()
    other = PostgresStore(store._address)

    async def write(name, fence):
        position = len(SPAN)
        while not ended.is_set():
            log = [entry(position, at(2022, 1 + position % 3, 2), b"jpeg")]
            with suppress(StoreError):
                assert await store.commit([Batch(name, fence, position, [b""], b"", log)]) == [None]
                position += 1

    fences = [await logged(store, name, SPAN) for name in names]
    writing = [asyncio.create_task(write(*each)) for each in zip(names, fences, strict=True)]
    for _ in range(30):
        await asyncio.gather(
            store.trim_log(NO_LIMIT._replace(seconds=DAY, entries=30), at(2022, 3, 5)),
            other.trim_log(NO_LIMIT._replace(seconds=DAY, entries=20), at(2022, 3, 5)),
        )
        await asyncio.sleep(0.01)
    ended.set()
    await asyncio.gather(*writing)
    await other.close()
    await check_counts(store)
    assert await store.find_problems() == []


@of_stores("sqlite", "postgres")
async def test_a_limit_for_all_logs_deletes_the_oldest_months_of_all_streams(store):
    times = [at(2022, month, 3) for month in range(1, 7) for _ in range(500)]
    await logged(store, "a/s", times, bytes(90))
    await logged(store, "b/s", times[:1000])
    total = 3000 * 200 + 1000 * 110
    assert sum((await store.log_usage()).values()) == total
    for limits, now in (
        (NO_LIMIT._replace(total_size=total), at(2022, 6, 4)),
        (NO_LIMIT, at(2022, 6, 4)),
        # The clock is not certain.
        (NO_LIMIT._replace(total_size=1), None),
    ):
        await store.trim_log(limits, now)
        assert await positions(store, "a/s") == list(range(3000))
    # January and February are 155,000 bytes each.
    await store.trim_log(NO_LIMIT._replace(total_size=total - 155_001), at(2022, 6, 4))
    assert await positions(store, "a/s") == list(range(1000, 3000))
    assert await positions(store, "b/s") == []
    await check_counts(store)
    # The current month stays, although it alone is too large.
    await store.trim_log(NO_LIMIT._replace(total_size=1), at(2022, 6, 4))
    assert await positions(store, "a/s") == list(range(2500, 3000))
    await check_counts(store)


@of_stores("sqlite", "postgres")
async def test_the_clock_may_jump_between_the_entries_of_a_stream(store):
    """A month is deleted exactly, wherever its entries are."""
    times = [at(2022, month, 3) for month in (3, 1, 3, 2, 1, 4, 1) for _ in range(7)]
    await logged(store, "s", times)
    size = 49 * 110
    for deleted, left in ((1, (3, 2, 4)), (2, (3, 4))):
        size -= times.count(at(2022, deleted, 3)) * 110
        await store.trim_log(NO_LIMIT._replace(total_size=size), at(2022, 5))
        wanted = [place for place, moment in enumerate(times) if moment in [at(2022, month, 3) for month in left]]
        assert await positions(store, "s") == wanted
        await check_counts(store)


@of_stores("sqlite", "postgres")
async def test_a_hundred_thousand_entries_over_a_year(store):
    streams = {f"{tenant}/{number}": 2500 for tenant in ("a", "b") for number in range(20)}
    for name, count in streams.items():
        step = 365 * DAY / count
        await logged(store, name, [at(2022, 1) + place * step for place in range(count)])
    assert await store.log_usage() == {"a": 50_000 * 110, "b": 50_000 * 110}
    # What is left is what is not older than the first of October.
    await store.trim_log(NO_LIMIT._replace(total_size=26_000 * 110), at(2022, 12, 31))
    october = (at(2022, 10) - at(2022, 1)) / DAY
    for name, count in streams.items():
        first = -int(-october * count // 365)
        assert await positions(store, name) == list(range(first, count))
    await check_counts(store)
    await store.trim_log(NO_LIMIT._replace(entries=100), None)
    for name, count in streams.items():
        assert await positions(store, name) == list(range(count - 100, count))
    await check_counts(store)


async def test_logs_count_for_the_quota_of_a_tenant_and_a_purge_makes_room(tmp_path):
    store = SqliteStore(tmp_path)
    worker = Worker("one", store, settings(tenant_bytes=40_000))
    await worker.start()
    try:
        await done(worker, create("acme/s"))
        number = 0
        while not (replies := await handled(worker, [observe(number, "acme/s")]))[0].message:
            number += 1
            await worker._quotas.read()
        assert "decision logs" in replies[0].message
        used = await store.usage(), await store.log_usage()
        assert sum(size["acme"] for size in used) >= 40_000 > used[0]["acme"]
        assert await store.purge_log("acme/s", Purge()) == number
        await worker._quotas.read()
        await done(worker, observe(number, "acme/s"))
    finally:
        await worker.close()


def test_the_settings_of_the_log_reach_the_store():
    config = ServeConfig(log_days=2.0, total_log_bytes=7, tenant_log_bytes=5, log_bytes=3, log_entries=1)
    assert log_limits(config) == LogLimits(2 * DAY, 1, 3, 5, 7)


@pytest.mark.parametrize("name", ["sqlite", "postgres"])
async def test_a_service_whose_clock_moves_on_by_months_logs_everything(name, tmp_path, monkeypatch):
    steps, now = [0.0], time.time

    async def move(store: SqliteStore | PostgresStore, seconds: float) -> None:
        steps.append(seconds)
        if isinstance(store, PostgresStore):
            clock = f"SELECT CAST(extract(epoch FROM clock_timestamp()) + {sum(steps)} AS double precision)"
            async with store._connected() as connection:
                await connection.execute(
                    f"CREATE OR REPLACE FUNCTION store_clock() RETURNS float8 LANGUAGE sql VOLATILE AS '{clock}'"
                )

    monkeypatch.setattr(time, "time", lambda: now() + sum(steps))
    store = await STORES[name](tmp_path)
    worker = Worker("worker-0", store, settings(lease_seconds=0.3))
    await worker.start()
    try:
        await done(worker, create())
        for number in range(4):
            # The lease ended when the clock moved, and is taken again.
            while (reply := await one(worker, observe(number))).status is ReplyStatus.LATER:
                await asyncio.sleep(0.1)
            assert reply.status is ReplyStatus.DONE
            await move(store, 32 * DAY)
            await asyncio.sleep(0.5)
        entries = (await store.read_log("s", ALL)).entries
        assert [found.position for found in entries] == [0, 1, 2, 3]
        assert len({month_of(found.time) for found in entries}) == 4
        await check_counts(store)
    finally:
        await worker.close()

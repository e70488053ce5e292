"""A clock that is wrong for a while deletes no decision log, and keys expire as before."""

import asyncio
import time

import pytest

from made_service import create, done, observe, settings
from protodcs.serve.log.entries import LogEntry, LogLimits, LogQuery
from protodcs.serve.store.sqlite import SqliteStore
from protodcs.serve.store.values import Batch
from protodcs.serve.workers import decision_log
from protodcs.serve.workers.decision_log import STEADY_SECONDS, SteadyClock
from protodcs.serve.workers.worker import Worker
from test_idempotency import cache_of, found, record
from test_sqlite_store import created

DAY = 86400.0


class Clocks:
    """A wall clock that can be set, and a monotonic one."""

    def __init__(self):
        self.passed = 0.0
        self.ahead = 1_700_000_000.0

    def wall(self):
        return self.passed + self.ahead

    def monotonic(self):
        return self.passed

    def run(self, clock, seconds, step=2.0):
        """Let time pass, and return what a clock said every two seconds."""
        said = []
        for _ in range(int(seconds / step)):
            self.passed += step
            said.append(clock.now())
        return said


@pytest.fixture
def clocks():
    return Clocks()


@pytest.fixture
def steady(clocks):
    """A clock that is trusted."""
    clock = SteadyClock(clocks.wall, clocks.monotonic)
    clocks.run(clock, STEADY_SECONDS)
    assert clock.now() == clocks.wall()
    return clock


def test_a_clock_is_trusted_an_hour_after_the_start(clocks):
    clock = SteadyClock(clocks.wall, clocks.monotonic)
    assert set(clocks.run(clock, STEADY_SECONDS - 2)) == {None}
    assert None not in clocks.run(clock, 600)


@pytest.mark.parametrize("jump", [32 * DAY, 120.0, -120.0, -32 * DAY])
@pytest.mark.parametrize("seconds", [2, 8, 1000])
def test_a_jump_is_not_followed_and_neither_is_the_way_back(clocks, steady, jump, seconds):
    clocks.ahead += jump
    assert set(clocks.run(steady, seconds)) == {None}
    clocks.ahead -= jump
    assert set(clocks.run(steady, STEADY_SECONDS)) == {None}
    assert clocks.run(steady, 2) == [clocks.wall()]


def test_a_jump_that_lasts_is_followed_after_an_hour(clocks, steady):
    clocks.ahead += 32 * DAY
    assert set(clocks.run(steady, STEADY_SECONDS)) == {None}
    assert clocks.run(steady, 2) == [clocks.wall()]


def test_a_clock_that_a_time_server_slews_is_trusted(clocks, steady):
    for _ in range(1000):
        clocks.ahead += 1.0
        assert clocks.run(steady, 2) == [clocks.wall()]


@pytest.fixture
def stepped(monkeypatch):
    """A list whose sum is added to the wall clock of this process, and short rounds of trimming."""
    steps, now = [], time.time
    monkeypatch.setattr(time, "time", lambda: now() + sum(steps))
    monkeypatch.setattr(decision_log, "_TRIM_SECONDS", 0.01)
    return steps


class CountingStore(SqliteStore):
    """Counts the rounds of trimming."""

    rounds = 0

    async def trim_log(self, *arguments):
        await super().trim_log(*arguments)
        self.rounds += 1

    async def wait_for_rounds(self, count):
        end = self.rounds + count
        while self.rounds < end:
            await asyncio.sleep(0.001)


async def positions(store):
    return [entry.position for entry in (await store.read_log("s", LogQuery(newest_first=False, limit=1000))).entries]


async def test_a_clock_that_is_32_days_ahead_for_a_while_deletes_no_log(tmp_path, stepped, monkeypatch):
    store = CountingStore(tmp_path)
    worker = Worker("worker-0", store, settings(log_days=30.0, lease_seconds=0.3))
    await worker.start()
    await done(worker, create())
    for number in range(5):
        await done(worker, observe(number))
    stepped.append(32 * DAY)
    await store.wait_for_rounds(5)
    await done(worker, observe(5))
    stepped.append(-32 * DAY)
    await store.wait_for_rounds(5)
    await done(worker, observe(6))
    assert await positions(store) == list(range(7))
    # The same, if the clock needs no time to be trusted.
    monkeypatch.setattr(decision_log, "STEADY_SECONDS", 0.0)
    stepped.append(32 * DAY)
    await store.wait_for_rounds(5)
    assert len(await positions(store)) < 5
    await worker.close()


def entry(position, moment):
    return LogEntry(position, int(1000 * moment), "key", None, "known", True, "cat", 0.0, 1.0, None)


@pytest.mark.parametrize("ahead", [1, 10, 3000])
async def test_entries_that_were_written_while_the_clock_was_ahead_do_not_keep_those_behind_them(tmp_path, ahead):
    store = SqliteStore(tmp_path)
    fence, start, limits = await created(store), 1_700_000_000.0, LogLimits(30 * DAY, 10**6, 1 << 30)
    times = [start] * 10 + [start + 32 * DAY] * ahead + [start + 60] * 10 + [start + 20 * DAY] * 10
    log = [entry(position, moment) for position, moment in enumerate(times)]
    assert await store.commit([Batch("s", fence, 0, [b""] * len(log), b"", log)]) == [None]
    await store.trim_log(limits, start + 29 * DAY)
    assert len(await positions(store)) == min(len(times), 1000)
    await store.trim_log(limits, None)
    assert len(await positions(store)) == min(len(times), 1000)
    await store.trim_log(limits, start + 31 * DAY)
    assert await positions(store) == list(range(20 + ahead, 30 + ahead))
    await store.close()


def stored_keys(times, seconds=300.0):
    """Return which of some records, one request each, are still known by their keys."""
    records = [record(position, time=int(1000 * moment)) for position, moment in enumerate(times)]
    cache = cache_of(records, answers=10, entries=10, seconds=seconds)
    cache.trim()
    return [position for position in range(len(times)) if found(cache, f"key-{position}") is not None]


def test_keys_expire_again_after_the_clock_was_ahead_for_a_while():
    before = [float(second) for second in range(100)]
    ahead = [32 * DAY + 100 + second for second in range(8)]
    after = [108.0 + second for second in range(2000)]
    assert stored_keys(before + ahead + after) == list(range(2108 - 301, 2108))


def test_keys_outlive_a_jump_of_the_clock():
    times = [float(second) for second in range(100)] + [32 * DAY + second for second in range(100, 130)]
    assert stored_keys(times) == list(range(130))

"""The planner of faults: the same plan from the same seed, each fault when it is due."""

import asyncio
import random
import subprocess
import sys
import time
from contextlib import contextmanager

import psutil
import pytest

from service import faults
from service.faults import Target, describe, inject, plan, until

COUNTS = {"kill": 5, "pause": 4, "resize": 2}
LENGTH = 1000


@pytest.fixture(autouse=True)
def paper_faults(monkeypatch):
    """Faults that only write down what they would do; a pause takes a while."""

    async def kill(rig, rng):
        return rig.note("kill", rng)

    async def resize(rig, rng):
        return rig.note("resize", rng)

    async def pause(rig, rng):
        rig.under_way += 1
        rig.most_under_way = max(rig.most_under_way, rig.under_way)
        await asyncio.sleep(0.05)
        rig.under_way -= 1
        return rig.note("pause", rng)

    monkeypatch.setattr(faults, "FAULTS", {})
    for function in (kill, resize, pause):
        faults.fault(function.__name__)(function)


class PaperRig:
    """What the faults are written down on."""

    def __init__(self):
        self.notes = []
        self.under_way = self.most_under_way = 0

    def note(self, kind, rng):
        self.notes.append((kind, rng.random()))
        return Target(kind, 1)


class Climb:
    """A run that has one more acknowledged row each time it is asked."""

    def __init__(self):
        self.now = 0

    def __call__(self):
        self.now += 1
        return self.now


@contextmanager
def sleepers(count):
    """Processes that do nothing."""
    waiting = [sys.executable, "-c", "import time; time.sleep(600)"]
    children = [subprocess.Popen(waiting) for _ in range(count)]
    try:
        yield [psutil.Process(child.pid) for child in children]
    finally:
        for child in children:
            child.kill()
            child.wait()


@pytest.mark.parametrize("seed", range(20))
def test_a_plan_has_the_requested_faults_in_order_within_the_run(seed):
    planned = plan(seed, COUNTS, LENGTH)
    assert {kind: sum(entry.kind == kind for entry in planned) for kind in COUNTS} == COUNTS
    moments = [entry.after for entry in planned]
    assert moments == sorted(moments)
    assert moments[0] > 0
    assert moments[-1] < LENGTH
    assert str(seed) in describe(seed, planned)
    assert "5 x kill" in describe(seed, planned)


def test_a_seed_gives_the_same_plan_again_and_another_seed_another_plan():
    shuffled = dict(reversed(COUNTS.items()))
    assert plan(7, COUNTS, LENGTH) == plan(7, shuffled, LENGTH)
    assert plan(7, COUNTS, LENGTH) != plan(8, COUNTS, LENGTH)


def test_a_plan_has_the_same_proportions_in_a_short_run_and_in_a_long_one():
    short, long = plan(3, COUNTS, 1000), plan(3, COUNTS, 1_000_000)
    assert [entry.after for entry in short] == [entry.after // 1000 for entry in long]
    assert [entry.seed for entry in short] == [entry.seed for entry in long]


def test_plan_rejects_an_unknown_kind():
    with pytest.raises(ValueError, match="burn worker"):
        plan(0, {"burn worker": 1}, LENGTH)


async def test_inject_does_every_fault_when_it_is_due():
    planned, rig, done = plan(1, COUNTS, 200), PaperRig(), []
    await inject(planned, rig, Climb(), done)
    assert {entry.planned for entry in done} == set(planned)
    assert all(entry.acknowledged >= entry.planned.after for entry in done)
    assert all(entry.due <= entry.target.struck <= entry.done for entry in done)
    assert all(str(entry.target.pid) in str(entry) for entry in done)
    # Each fault chooses by its own seed.
    assert {draw for _, draw in rig.notes} == {random.Random(entry.seed).random() for entry in planned}


async def test_faults_may_overlap():
    rig = PaperRig()
    await inject(plan(1, {"pause": 30}, 40), rig, Climb(), [])
    assert rig.most_under_way > 1


async def test_inject_does_no_fault_before_it_is_due():
    planned, rig, done = plan(1, {"kill": 10}, LENGTH), PaperRig(), []
    task = asyncio.create_task(inject(planned, rig, lambda: planned[2].after, done))
    await until(lambda: len(done) == 3, "three faults", 300)
    await asyncio.sleep(0.1)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert {entry.planned for entry in done} == set(planned[:3])


async def test_until_returns_when_the_condition_holds():
    end = time.monotonic() + 0.05
    await until(lambda: time.monotonic() > end, "the end", 60)
    assert time.monotonic() > end

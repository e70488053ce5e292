"""The planner of faults: the same plan from the same seed, each fault when it is due, on processes that run."""

import asyncio
import random
import subprocess
import sys
import time
from contextlib import contextmanager

import psutil
import pytest

from service import faults
from service.faults import Processes, Target, describe, inject, plan, until

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


def test_inject_does_every_fault_when_it_is_due():
    planned, rig, done = plan(1, COUNTS, 200), PaperRig(), []
    asyncio.run(inject(planned, rig, Climb(), done))
    assert {entry.planned for entry in done} == set(planned)
    assert all(entry.acknowledged >= entry.planned.after for entry in done)
    assert all(entry.due <= entry.target.struck <= entry.done for entry in done)
    assert all(str(entry.target.pid) in str(entry) for entry in done)
    # Each fault chooses by its own seed.
    assert {draw for _, draw in rig.notes} == {random.Random(entry.seed).random() for entry in planned}


def test_faults_may_overlap():
    rig = PaperRig()
    asyncio.run(inject(plan(1, {"pause": 30}, 40), rig, Climb(), []))
    assert rig.most_under_way > 1


def test_inject_does_no_fault_before_it_is_due():
    planned, rig, done = plan(1, {"kill": 10}, LENGTH), PaperRig(), []

    async def stuck():
        task = asyncio.create_task(inject(planned, rig, lambda: planned[2].after, done))
        await until(lambda: len(done) == 3, "three faults", 10)
        await asyncio.sleep(0.1)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    asyncio.run(stuck())
    assert {entry.planned for entry in done} == set(planned[:3])


def test_a_fault_without_a_target_is_an_error():
    processes = Processes(lambda _: [], timeout=0.05)
    with pytest.raises(TimeoutError, match="a worker that runs"):
        asyncio.run(processes.kill("worker", random.Random(0)))


def test_until_returns_when_the_condition_holds():
    end = time.monotonic() + 0.05
    asyncio.run(until(lambda: time.monotonic() > end, "the end", 60))
    assert time.monotonic() > end


@pytest.mark.parametrize("seed", range(3))
def test_kill_ends_one_process_of_the_role(seed):
    with sleepers(2) as workers, sleepers(1) as others:
        roles = {"worker": workers, "ingress": others}
        target = asyncio.run(Processes(roles.__getitem__).kill("worker", random.Random(seed)))
        dead = {p.pid for p in workers + others if p.status() == psutil.STATUS_ZOMBIE}
        assert dead == {target.pid} <= {p.pid for p in workers}


def test_a_dead_process_is_not_killed_again():
    with sleepers(3) as workers:
        processes = Processes(lambda _: workers)
        killed = [asyncio.run(processes.kill("worker", random.Random(0))).pid for _ in workers]
        assert sorted(killed) == sorted(p.pid for p in workers)


def paused(processes, workers, seconds, act=None):
    """Pause a process, act while it stands still, and return it after the pause."""

    async def run():
        pausing = asyncio.create_task(processes.pause("worker", random.Random(0), seconds))
        stopped = [None]

        def stands():
            stopped[0] = next((p for p in workers if p.status() == psutil.STATUS_STOPPED), None)
            return stopped[0] is not None

        await until(stands, "a process that stands still", 10)
        if act is not None:
            await act(pausing)
        await asyncio.gather(pausing, return_exceptions=True)
        return stopped[0]

    return asyncio.run(run())


def test_a_paused_process_goes_on():
    with sleepers(2) as workers:
        process = paused(Processes(lambda _: workers), workers, 0.2)
        assert process.status() != psutil.STATUS_STOPPED


def test_a_paused_process_goes_on_if_the_pause_is_cancelled():
    async def cancel(pausing):
        pausing.cancel()

    with sleepers(1) as workers:
        process = paused(Processes(lambda _: workers), workers, 600, cancel)
        assert process.status() != psutil.STATUS_STOPPED


def test_kill_chooses_a_process_that_is_not_paused():
    with sleepers(2) as workers:
        processes, killed = Processes(lambda _: workers), []

        async def kill(_):
            killed.append((await processes.kill("worker", random.Random(0))).pid)

        process = paused(processes, workers, 0.2, kill)
        assert {process.pid, *killed} == {p.pid for p in workers}

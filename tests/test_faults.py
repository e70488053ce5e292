"""The scheduler of faults: the same plan from the same seed, each fault in its turn, on living processes."""

import asyncio
import random
import subprocess
import sys
import time
from contextlib import contextmanager

import psutil
import pytest

from service.faults import Kind, Processes, Target, in_words, inflict, plan, until

COUNTS = {"kill owner": 5, "pause owner": 4, "kill store": 3, "add owner": 2, "remove owner": 1}
LENGTH = 1000


@contextmanager
def owners(*names):
    """Processes that do nothing but live, by name."""
    waiting = [sys.executable, "-c", "import time; time.sleep(600)"]
    children = {name: subprocess.Popen(waiting) for name in names}
    try:
        yield {name: child.pid for name, child in children.items()}
    finally:
        for child in children.values():
            child.kill()
            child.wait()


class Paper:
    """A rig on which faults are only written down; a pause lasts a while."""

    def __init__(self):
        self.said = []
        self.open = 0
        self.most_open = 0

    async def kill_owner(self, rng):
        return self._say("kill owner", rng)

    async def pause_owner(self, rng, seconds):
        self.open += 1
        self.most_open = max(self.most_open, self.open)
        await asyncio.sleep(0.05)
        self.open -= 1
        return self._say(f"pause owner {seconds}", rng)

    async def kill_store(self):
        return self._say("kill store", None)

    async def add_owner(self):
        return self._say("add owner", None)

    async def remove_owner(self, rng):
        return self._say("remove owner", rng)

    def _say(self, what, rng):
        self.said.append((what, rng and rng.random()))
        return Target(what, 1)


class Climb:
    """A run that has one more acknowledged request each time it is asked."""

    def __init__(self):
        self.now = 0

    def __call__(self):
        self.now += 1
        return self.now


@pytest.mark.parametrize("seed", range(20))
def test_a_plan_has_the_faults_that_were_asked_for_in_order_and_within_the_run(seed):
    planned = plan(seed, COUNTS, LENGTH, pauses=(1.0, 2.0))
    print(in_words(seed, planned))
    assert {kind.value: sum(fault.kind is kind for fault in planned) for kind in Kind} == COUNTS
    moments = [fault.after for fault in planned]
    assert moments == sorted(moments)
    assert moments[0] > 0
    assert moments[-1] < LENGTH
    assert all(1.0 <= fault.seconds <= 2.0 for fault in planned if fault.kind is Kind.PAUSE_OWNER)
    assert all(fault.seconds == 0 for fault in planned if fault.kind is not Kind.PAUSE_OWNER)


def test_a_seed_gives_the_same_plan_again_and_another_seed_another_one():
    shuffled = dict(reversed(COUNTS.items()))
    assert plan(7, COUNTS, LENGTH) == plan(7, shuffled, LENGTH)
    assert plan(7, COUNTS, LENGTH) != plan(8, COUNTS, LENGTH)


def test_a_plan_is_the_same_share_of_a_short_run_and_of_a_long_one():
    short, long = plan(3, COUNTS, 1000), plan(3, COUNTS, 1_000_000)
    assert [fault.after for fault in short] == [fault.after // 1000 for fault in long]
    assert [fault.seed for fault in short] == [fault.seed for fault in long]


def test_a_kind_that_nobody_knows_is_refused():
    with pytest.raises(ValueError, match="burn owner"):
        plan(0, {"burn owner": 1}, LENGTH)


def test_every_fault_is_inflicted_when_it_is_due_and_written_down():
    planned, rig, done = plan(1, COUNTS, 200), Paper(), []
    asyncio.run(inflict(planned, rig, Climb(), done))
    assert sorted(fault.planned.after for fault in done) == [fault.after for fault in planned]
    assert {fault.planned for fault in done} == set(planned)
    assert all(fault.acknowledged >= fault.planned.after for fault in done)
    assert all(fault.due <= fault.target.struck <= fault.done for fault in done)
    assert all(str(fault.target.pid) in str(fault) for fault in done)
    # The victim of each fault is drawn from its own seed.
    chosen = [fault for fault in planned if fault.kind not in (Kind.KILL_STORE, Kind.ADD_OWNER)]
    drawn = {random.Random(fault.seed).random() for fault in chosen}
    assert {draw for _, draw in rig.said if draw is not None} == drawn


def test_faults_overlap_where_the_plan_says_so():
    rig = Paper()
    asyncio.run(inflict(plan(1, {"pause owner": 30}, 40), rig, Climb(), []))
    assert rig.most_open > 1


def test_no_fault_comes_before_it_is_due():
    planned, rig, done = plan(1, COUNTS, LENGTH), Paper(), []

    async def stuck():
        task = asyncio.create_task(inflict(planned, rig, lambda: planned[2].after, done))
        await asyncio.sleep(0.3)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    asyncio.run(stuck())
    assert {fault.planned for fault in done} == set(planned[:3])


def test_a_fault_that_cannot_be_inflicted_is_an_error_and_not_silence():
    processes = Processes(dict, patience=0.05)
    with pytest.raises(TimeoutError, match="an owner that runs"):
        asyncio.run(processes.kill_owner(random.Random(0)))


def test_waiting_for_what_comes_ends_when_it_comes():
    end = time.monotonic() + 0.05
    asyncio.run(until(lambda: time.monotonic() > end, "the end", 60))
    assert time.monotonic() > end


@pytest.mark.parametrize("seed", range(3))
def test_a_killed_owner_is_gone_and_the_others_live(seed):
    with owners("a", "b", "c") as pids:
        target = asyncio.run(Processes(lambda: pids).kill_owner(random.Random(seed)))
        assert pids[target.name] == target.pid
        assert psutil.Process(target.pid).status() == psutil.STATUS_ZOMBIE
        assert all(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE for pid in pids.values() if pid != target.pid)


def test_an_owner_that_died_before_is_not_killed_again():
    with owners("a", "b", "c") as pids:
        processes = Processes(lambda: pids)
        killed = [asyncio.run(processes.kill_owner(random.Random(0))).name for _ in pids]
    assert sorted(killed) == ["a", "b", "c"]


def paused_owner(processes, seconds, *meanwhile):
    """Pause an owner, act while it stands still, wait for the end of the pause: the pid of the owner."""

    async def run():
        pausing = asyncio.create_task(processes.pause_owner(random.Random(0), seconds))
        await until(lambda: bool(processes._paused), "a pause", 10)
        pid = next(iter(processes._paused))
        await until(lambda: psutil.Process(pid).status() == psutil.STATUS_STOPPED, "a process that stands still", 10)
        for act in meanwhile:
            await act(pausing)
        await asyncio.gather(pausing, return_exceptions=True)
        return pid

    return asyncio.run(run())


def test_a_paused_owner_stands_still_and_goes_on():
    with owners("a", "b") as pids:
        pid = paused_owner(Processes(lambda: pids), 0.2)
        assert psutil.Process(pid).status() != psutil.STATUS_STOPPED


def test_a_paused_owner_goes_on_though_the_pause_is_cancelled():
    async def cancel(pausing):
        pausing.cancel()

    with owners("a") as pids:
        pid = paused_owner(Processes(lambda: pids), 600, cancel)
        assert psutil.Process(pid).status() != psutil.STATUS_STOPPED


def test_another_owner_is_killed_while_one_is_paused():
    with owners("a", "b") as pids:
        processes, killed = Processes(lambda: pids), []

        async def kill(pausing):
            killed.append((await processes.kill_owner(random.Random(0))).pid)

        paused = paused_owner(processes, 0.2, kill)
        assert {paused, *killed} == set(pids.values())

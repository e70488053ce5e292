"""Faults and when they come: drawn from a seed, placed by how much of the run is acknowledged, never by the clock.

So a plan means the same on a fast machine and on a slow one. What was really done, to which process and when, is
written down. It must never signal a process that its rig did not name.
"""

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

import psutil

# The share of a run in which faults come: it has begun before the first, and can recover after the last.
_FIRST, _LAST = 0.03, 0.95
# How often the state of processes and the progress of the run are looked at, in seconds.
_LOOK = 0.01


class Kind(StrEnum):
    """What can be done to a service."""

    KILL_OWNER = "kill owner"
    PAUSE_OWNER = "pause owner"
    KILL_STORE = "kill store"
    ADD_OWNER = "add owner"
    REMOVE_OWNER = "remove owner"


@dataclass(frozen=True, slots=True)
class Planned:
    """One fault to come.

    Attributes:
        after: how many acknowledged requests it waits for.
        kind: what it is.
        seconds: how long a pause lasts; 0 for the others.
        seed: of the choice of its victim, so that it does not depend on what came before.
    """

    after: int
    kind: Kind
    seconds: float
    seed: int


@dataclass(frozen=True, slots=True)
class Target:
    """What a fault was done to.

    Attributes:
        name: of an owner, or of the store.
        pid: of its process; None where it has none.
        struck: when, by `time.monotonic`, as in a history; now, unless told otherwise.
    """

    name: str
    pid: int | None
    struck: float = field(default_factory=time.monotonic)


@dataclass(frozen=True, slots=True)
class Done:
    """One fault that was inflicted.

    Attributes:
        planned: which one.
        target: on what, and when it struck.
        due, done: when it was to strike and when it was over, by `time.monotonic`.
        acknowledged: requests when it was over.
    """

    planned: Planned
    target: Target
    due: float
    done: float
    acknowledged: int

    def __str__(self) -> str:
        planned, target = self.planned, self.target
        waited, took = target.struck - self.due, self.done - target.struck
        when = f"due after {planned.after} acknowledged, struck {waited:.2f} s later at {target.struck:.3f}"
        over = f"over {took:.2f} s later after {self.acknowledged} acknowledged"
        return f"{planned.kind} {target.name} (pid {target.pid}): {when}, {over}"


class Rig(Protocol):
    """A service that faults can be inflicted on. Each method first waits until the service is able to take its fault.

    Faults overlap where the plan says so: an owner may be paused while the store is killed. But, for example, a store
    that is down is not killed again before it is up, and the last owner is not removed.
    """

    async def kill_owner(self, rng: random.Random) -> Target:
        """Kill an owner's process."""
        ...

    async def pause_owner(self, rng: random.Random, seconds: float) -> Target:
        """Stop an owner's process and let it go on, as if nothing had been, after so long."""
        ...

    async def kill_store(self) -> Target:
        """Kill the store's process and start it again."""
        ...

    async def add_owner(self) -> Target:
        """Have one owner more."""
        ...

    async def remove_owner(self, rng: random.Random) -> Target:
        """Have one owner less, in an orderly way."""
        ...


def plan(seed: int, counts: Mapping[str, int], length: int, pauses: tuple[float, float] = (0.5, 5.0)) -> list[Planned]:
    """So many faults of each kind at random moments of a run of `length` requests, in order.

    Args:
        seed: the same one gives the same plan.
        counts: how many of each `Kind`, by its value.
        length: requests of the run.
        pauses: shortest and longest pause, in seconds.
    """
    rng = random.Random(seed)
    planned = []
    for kind in sorted(Kind(name) for name, count in counts.items() for _ in range(count)):
        after = int(length * rng.uniform(_FIRST, _LAST))
        seconds = rng.uniform(*pauses) if kind is Kind.PAUSE_OWNER else 0.0
        planned.append(Planned(after, kind, seconds, rng.getrandbits(32)))
    return sorted(planned, key=lambda fault: fault.after)


def in_words(seed: int, planned: Sequence[Planned]) -> str:
    """A plan for the log, with the seed that gives it again."""
    moments = ", ".join(f"{fault.kind} after {fault.after}" for fault in planned)
    return f"{len(planned)} faults of seed {seed}: {moments}"


async def inflict(planned: Sequence[Planned], rig: Rig, progress: Callable[[], int], done: list[Done]) -> None:
    """Inflict each fault when it is due, and return when the last is over.

    A run that ends before all faults are due leaves this waiting: cancel it then. Processes that are paused go on.

    Args:
        planned: what `plan` gives.
        rig: on what.
        progress: how many requests are acknowledged.
        done: each fault is added here as soon as it is over.
    """
    async with asyncio.TaskGroup() as group:
        for fault in planned:
            while progress() < fault.after:
                await asyncio.sleep(_LOOK)
            group.create_task(_inflict_one(fault, rig, progress, done))


async def _inflict_one(fault: Planned, rig: Rig, progress: Callable[[], int], done: list[Done]) -> None:
    due, rng = time.monotonic(), random.Random(fault.seed)
    ways: dict[Kind, Callable[[], Awaitable[Target]]] = {
        Kind.KILL_OWNER: lambda: rig.kill_owner(rng),
        Kind.PAUSE_OWNER: lambda: rig.pause_owner(rng, fault.seconds),
        Kind.KILL_STORE: rig.kill_store,
        Kind.ADD_OWNER: rig.add_owner,
        Kind.REMOVE_OWNER: lambda: rig.remove_owner(rng),
    }
    target = await ways[fault.kind]()
    done.append(Done(fault, target, due, time.monotonic(), progress()))


async def until(condition: Callable[[], bool], what: str, patience: float) -> None:
    """Wait until something holds; a TimeoutError that says what was waited for after `patience` seconds."""
    end = time.monotonic() + patience
    while not condition():
        if time.monotonic() > end:
            raise TimeoutError(f"waited {patience:g} s for this and it did not come: {what}")
        await asyncio.sleep(_LOOK)


class Processes:
    """The faults that need only the processes of owners: the two methods of a `Rig` that kill and pause.

    A process is held by more than its number: one that ended and left its number to a stranger is not touched.

    Args:
        owners: gives the name and the pid of each owner there is now.
        patience: how long to wait for an owner that runs, in seconds.
    """

    def __init__(self, owners: Callable[[], Mapping[str, int]], patience: float = 60.0):
        self._owners = owners
        self._patience = patience
        self._paused: set[int] = set()

    async def kill_owner(self, rng: random.Random) -> Target:
        """SIGKILL one of the owners that run, and wait until it is gone."""
        target, process = await self._strike(rng, psutil.Process.kill)
        await until(lambda: not _lives(process), f"the end of {target.name}, pid {target.pid}", self._patience)
        return target

    async def pause_owner(self, rng: random.Random, seconds: float) -> Target:
        """SIGSTOP one of the owners that run, and SIGCONT after so long, whatever happens meanwhile."""
        target, process = await self._strike(rng, psutil.Process.suspend)
        self._paused.add(process.pid)
        try:
            await asyncio.sleep(seconds)
        finally:
            self._paused.discard(process.pid)
            # It may have been killed meanwhile, by another fault or by whoever looks after it.
            with suppress(psutil.NoSuchProcess):
                process.resume()
        return target

    async def _strike(
        self, rng: random.Random, signal: Callable[[psutil.Process], None]
    ) -> tuple[Target, psutil.Process]:
        """Signal one of the owners that run and are not paused; waits until there is one."""
        while True:
            await until(lambda: bool(self._running()), "an owner that runs", self._patience)
            # One that ends by itself between the look and the signal is not a victim.
            with suppress(psutil.NoSuchProcess, IndexError):
                name, process = rng.choice(self._running())
                signal(process)
                return Target(name, process.pid), process

    def _running(self) -> list[tuple[str, psutil.Process]]:
        """In the order of their names, so that a seed chooses the same one."""
        found = []
        for name, pid in sorted(self._owners().items()):
            try:
                process = psutil.Process(pid)
            except psutil.NoSuchProcess:
                continue
            if pid not in self._paused and _lives(process):
                found.append((name, process))
        return found


def _lives(process: psutil.Process) -> bool:
    """A killed child that nobody has waited for is still listed, but it does nothing any more."""
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False

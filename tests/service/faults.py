"""Plan faults from a seed and inject them when the run has made enough progress.

A plan places faults by acknowledged rows, never by the clock, so it means the same on a fast and on a slow machine.
Each kind of fault is one function, registered by name with `fault`. It gets the rig and a random generator of its own.
"""

import asyncio
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

# The part of a run in which faults begin: the run is under way before the first and can recover after the last.
_FIRST, _LAST = 0.03, 0.95
# How often conditions are checked, in seconds.
_POLL = 0.01


@dataclass(frozen=True, slots=True)
class Target:
    """What a fault was done to: its name, the process if there is one, and when by `time.monotonic`."""

    name: str
    pid: int | None = None
    struck: float = field(default_factory=time.monotonic)


Fault = Callable[[Any, random.Random], Awaitable[Target]]
FAULTS: dict[str, Fault] = {}


def fault(name: str) -> Callable[[Fault], Fault]:
    """Register a kind of fault under a name.

    The function first waits until the rig can take the fault, returns when the fault is over, and undoes it even if it
    is cancelled.
    """

    def register(function: Fault) -> Fault:
        FAULTS[name] = function
        return function

    return register


@dataclass(frozen=True, slots=True)
class Planned:
    """One fault to come.

    Attributes:
        after: how many acknowledged rows it waits for.
        kind: the name of the fault.
        seed: of its own choices, so that they do not depend on the faults before it.
    """

    after: int
    kind: str
    seed: int


@dataclass(frozen=True, slots=True)
class Done:
    """One fault that was injected: when it was due and when it was over, and the acknowledged rows at its end."""

    planned: Planned
    target: Target
    due: float
    done: float
    acknowledged: int

    def __str__(self) -> str:
        planned, target = self.planned, self.target
        waited, took = target.struck - self.due, self.done - target.struck
        when = f"due after {planned.after} rows, injected {waited:.2f} s later"
        return f"{planned.kind}: {target.name} (pid {target.pid}): {when}, over {took:.2f} s later"


def plan(seed: int, counts: Mapping[str, int], length: int) -> list[Planned]:
    """Draw so many faults of each kind at random places of a run of `length` rows, in order.

    Args:
        seed: the same seed gives the same plan.
        counts: how many faults of each kind, by name.
        length: rows of the run.
    """
    unknown = sorted(set(counts) - set(FAULTS))
    if unknown:
        raise ValueError(f"unknown faults: {', '.join(unknown)}. Choose from: {', '.join(sorted(FAULTS))}")
    rng = random.Random(seed)
    kinds = sorted(kind for kind, count in counts.items() for _ in range(count))
    planned = [Planned(int(length * rng.uniform(_FIRST, _LAST)), kind, rng.getrandbits(32)) for kind in kinds]
    return sorted(planned, key=lambda entry: entry.after)


def describe(seed: int, planned: Sequence[Planned]) -> str:
    """Return a plan as text for the log, with the seed that gives it again."""
    counts = ", ".join(f"{count} x {kind}" for kind, count in sorted(Counter(p.kind for p in planned).items()))
    return f"seed {seed}: {len(planned)} faults: {counts}"


async def inject(planned: Sequence[Planned], rig: Any, progress: Callable[[], int], done: list[Done]) -> None:
    """Inject each fault when it is due, and return when the last is over. Faults may overlap.

    Args:
        planned: what `plan` returned.
        rig: what the functions of the faults get.
        progress: returns how many rows are acknowledged.
        done: each fault is added as soon as it is over.
    """
    async with asyncio.TaskGroup() as group:
        for entry in planned:
            while progress() < entry.after:
                await asyncio.sleep(_POLL)
            group.create_task(_inject_one(entry, rig, progress, done))


async def _inject_one(entry: Planned, rig: Any, progress: Callable[[], int], done: list[Done]) -> None:
    due = time.monotonic()
    target = await FAULTS[entry.kind](rig, random.Random(entry.seed))
    done.append(Done(entry, target, due, time.monotonic(), progress()))


async def until(condition: Callable[[], bool], what: str, timeout: float) -> None:
    """Wait until a condition holds; raises TimeoutError after `timeout` seconds."""
    end = time.monotonic() + timeout
    while not condition():
        if time.monotonic() > end:
            raise TimeoutError(f"waited {timeout:g} s for {what}")
        await asyncio.sleep(_POLL)

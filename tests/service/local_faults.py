"""A service in one process, and the faults that can be injected into it."""

import asyncio
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from .faults import Target, fault
from .rig import Service


class LocalRig:
    """A service in one process that faults can be injected into; a context manager.

    Args:
        folder: for all files.
        settings: of the service.
    """

    def __init__(self, folder: Path, **settings: Any):
        self.service = Service(folder, store=f"sqlite:{folder / 'streams'}", **settings)
        self.lease = float(settings["lease_seconds"])
        self.outages: list[tuple[float, float]] = []
        self._lock = asyncio.Lock()

    def __enter__(self) -> "LocalRig":
        self.service.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.service.stop()

    async def kill(self) -> Target:
        """SIGKILL the process, and start it again."""
        async with self._lock:
            target = Target("service", self.service.pid)
            await self.restart(self.service.kill)
            return target

    async def pause(self, seconds: float) -> Target:
        """SIGSTOP the process, and SIGCONT after so long."""
        async with self._lock:
            target, process = Target("service", self.service.pid), psutil.Process(self.service.pid)
            process.suspend()
            try:
                await asyncio.sleep(seconds)
            finally:
                process.resume()
            self.outages.append((target.struck, time.monotonic()))
            return target

    async def restart(self, end: Callable[[], object]) -> None:
        """End the process, and start it again."""
        start = time.monotonic()
        await asyncio.to_thread(end)
        await asyncio.to_thread(self.service.start)
        self.outages.append((start, time.monotonic()))


@fault("kill service")
async def kill_service(rig: LocalRig, rng: random.Random) -> Target:
    return await rig.kill()


@fault("pause service")
async def pause_service(rig: LocalRig, rng: random.Random) -> Target:
    return await rig.pause(rng.uniform(1.2, 3.0) * rig.lease)

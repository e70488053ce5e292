"""Several processes of `protodcs serve` that share a PostgreSQL, and the faults that can be injected into them.

Each process reaches the database through a proxy of its own, and is reached by the others through a second one.
"""

import asyncio
import random
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import psutil

from ports import free_port

from . import faults
from .faults import Target, fault, until
from .postgres import PostgresServer
from .proxy import Proxy
from .rig import Service


class PeersRig:
    """Processes that share streams; a context manager.

    Args:
        folder: for all files.
        count: how many processes.
        disk: size of the disk of the database, if a fault may fill it.
        settings: of each.

    Attributes:
        postgres: the present primary.
        services: the processes.
        to_database, to_peer, to_clients: the proxies of each process: between it and the database, before it for the
            other processes, and before it for clients.
        lease: seconds after which a silent process loses its partitions.
        outages: from when to when nobody could be answered, by `time.monotonic`.
        changing: held by a fault that changes a process or the database. A process that starts needs its database.
    """

    def __init__(self, folder: Path, count: int, disk: str = "", **settings: Any):
        self.postgres = PostgresServer(disk=disk)
        self.lease = float(settings["lease_seconds"])
        self.outages: list[tuple[float, float]] = []
        self.changing = asyncio.Lock()
        self.services, self.to_database, self.to_peer, self.to_clients = [], [], [], []
        self.clocks = folder / "clocks"
        self.clocks.mkdir()
        for number in range(count):
            port = free_port()
            self.to_database.append(Proxy(free_port(), ("127.0.0.1", self.postgres.port)))
            self.to_peer.append(Proxy(free_port(), ("127.0.0.1", port)))
            self.to_clients.append(Proxy(free_port(), ("127.0.0.1", port)))
            store = self.postgres.url.replace(str(self.postgres.port), str(self.to_database[-1].port))
            address = f"http://127.0.0.1:{self.to_peer[-1].port}"
            (folder / f"process-{number}").mkdir()
            own = {"store": store, "address": address, "port": port}
            service = Service(folder / f"process-{number}", **own, **settings)
            service.environment.update(self._clock_of(number))
            self.services.append(service)
        self._stack = ExitStack()

    @property
    def base_urls(self) -> list[str]:
        """Where the processes listen."""
        return [service.base_url for service in self.services]

    @property
    def client_urls(self) -> list[str]:
        """Where clients reach the processes if their answers can get lost."""
        return [f"http://127.0.0.1:{proxy.port}" for proxy in self.to_clients]

    def __enter__(self) -> "PeersRig":
        with ExitStack() as stack:
            # Not this one: another may be the primary by then.
            stack.callback(lambda: self.postgres.close())
            self.postgres.start()
            for proxy in (*self.to_database, *self.to_peer, *self.to_clients):
                stack.enter_context(proxy)
            for service in self.services:
                stack.enter_context(service)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def choose(self, rng: random.Random) -> int:
        """Return the number of a process that serves."""
        return rng.choice([number for number, service in enumerate(self.services) if service.serving])

    def _clock_of(self, number: int) -> dict[str, str]:
        """Return the environment of a process that reads an offset of its wall clock from a file, by libfaketime."""
        libraries = sorted(Path("/usr/lib").glob("*/faketime/libfaketimeMT.so.1"))
        if not libraries:
            return {}
        file = self.clocks / str(number)
        file.write_text("+0\n")
        return {
            "LD_PRELOAD": str(libraries[0]),
            "FAKETIME_TIMESTAMP_FILE": str(file),
            "FAKETIME_DONT_FAKE_MONOTONIC": "1",
            "FAKETIME_CACHE_DURATION": "1",
        }


# Processes.


@fault("kill process")
async def kill_process(rig: PeersRig, rng: random.Random) -> Target:
    """SIGKILL a process, and start it again before or after its lease ends."""
    async with rig.changing:
        service = rig.services[rig.choose(rng)]
        target = Target(service.base_url, service.pid)
        await asyncio.to_thread(service.kill)
        await asyncio.sleep(rng.uniform(0, 2) * rig.lease)
        await asyncio.to_thread(service.start)
        return target


@fault("end process")
async def end_process(rig: PeersRig, rng: random.Random) -> Target:
    """SIGTERM a process, and start it again."""
    async with rig.changing:
        service = rig.services[rig.choose(rng)]
        target = Target(service.base_url, service.pid)
        await asyncio.to_thread(service.stop)
        await asyncio.to_thread(service.start)
        return target


@fault("pause process")
async def pause_process(rig: PeersRig, rng: random.Random) -> Target:
    """Stop a process for longer than its lease: others take its partitions while it has their streams in memory."""
    async with rig.changing:
        service = rig.services[rig.choose(rng)]
        target, process = Target(service.base_url, service.pid), psutil.Process(service.pid)
        process.suspend()
        try:
            await asyncio.sleep(rng.uniform(1.2, 3.0) * rig.lease)
        finally:
            process.resume()
        return target


@fault("step clock of process")
async def step_clock(rig: PeersRig, rng: random.Random) -> Target:
    """Set the wall clock of a process forward or back by hours; its monotonic clock goes on."""
    number = rng.randrange(len(rig.services))
    hours = rng.choice((-1, 1)) * rng.uniform(0.5, 48)
    (rig.clocks / str(number)).write_text(f"{3600 * hours:+.0f}\n")
    return Target(f"clock of process {number} by {hours:+.1f} h")


# The network.


@fault("cut process off from database")
async def cut_off_from_database(rig: PeersRig, rng: random.Random) -> Target:
    async with rig.changing:
        return await _block(rig, rng, rig.to_database[rig.choose(rng)])


@fault("cut process off from others")
async def cut_off_from_others(rig: PeersRig, rng: random.Random) -> Target:
    """Block requests of the other processes. It still renews its lease, and clients reach it."""
    return await _block(rig, rng, rig.to_peer[rig.choose(rng)])


async def _block(rig: PeersRig, rng: random.Random, proxy: Proxy) -> Target:
    target = Target(f"network at port {proxy.port}")
    proxy.blocked = True
    try:
        await asyncio.sleep(rng.choice((rng.uniform(0.2, 0.8), rng.uniform(1.2, 3.0))) * rig.lease)
    finally:
        # What was held back is lost.
        proxy.cut()
        proxy.blocked = False
    return target


@fault("lose replies of database")
async def lose_replies(rig: PeersRig, rng: random.Random) -> Target:
    """Drop what the database answers to a process: it commits, but the process does not know."""
    async with rig.changing:
        proxy = rig.to_database[rig.choose(rng)]
        target = Target(f"network at port {proxy.port}")
        proxy.drop_replies = True
        try:
            await asyncio.sleep(rng.uniform(0.2, 2.0) * rig.lease)
        finally:
            proxy.drop_replies = False
            proxy.cut()
        return target


@fault("lose replies to clients")
async def lose_replies_to_clients(rig: PeersRig, rng: random.Random) -> Target:
    """Drop what a process answers: it applies requests, but the clients do not know, and retry."""
    proxy = rng.choice(rig.to_clients)
    target = Target(f"network at port {proxy.port}")
    proxy.lost, proxy.drop_replies = 0, True
    try:
        # The run may have ended, so not for ever.
        with suppress(TimeoutError):
            await until(lambda: proxy.lost > 0, "an answer to lose", 10)
    finally:
        proxy.drop_replies = False
        proxy.cut()
    return target


# The database.


@fault("kill database")
async def kill_database(rig: PeersRig, rng: random.Random) -> Target:
    async with rig.changing:
        target = Target("database")
        await asyncio.to_thread(rig.postgres.kill)
        await asyncio.sleep(rng.uniform(0, 1.0))
        await asyncio.to_thread(rig.postgres.start)
        return target


@fault("pause database")
async def pause_database(rig: PeersRig, rng: random.Random) -> Target:
    """Stop the database for a part of the lease, or for longer than the lease."""
    async with rig.changing:
        target = Target("database")
        rig.postgres.pause()
        try:
            await asyncio.sleep(rig.lease * rng.choice((rng.uniform(0.2, 0.8), rng.uniform(1.2, 2.5))))
        finally:
            rig.postgres.resume()
        return target


@fault("fill disk of database")
async def fill_disk(rig: PeersRig, rng: random.Random) -> Target:
    """Leave the database no space for a part of the lease, or for longer than the lease."""
    async with rig.changing:
        postgres = rig.postgres
        target = Target("disk of the database")
        await asyncio.to_thread(postgres.fill_disk)
        try:
            await asyncio.sleep(rig.lease * rng.uniform(0.2, 2.0))
        finally:
            await asyncio.to_thread(postgres.free_disk)
        return target


@fault("fail over")
async def fail_over(rig: PeersRig, rng: random.Random) -> Target:
    """Kill the database while a synchronous standby follows it, and promote that."""
    async with rig.changing:
        old = rig.postgres
        new = await asyncio.to_thread(old.standby)
        # Some commits of the old one should have waited for the standby.
        await asyncio.sleep(rng.uniform(0.2, 1.0))
        target = Target("database")
        await asyncio.to_thread(old.kill)
        await asyncio.to_thread(new.promote)
        for proxy in rig.to_database:
            proxy.target = "127.0.0.1", new.port
            proxy.cut()
        rig.postgres = new
        await asyncio.to_thread(old.close)
        return target


# The faults of this module.
FAULTS = [kind for kind, function in faults.FAULTS.items() if function.__module__ == __name__]

"""The faults that can be injected on one machine. Each function gets a `Rig` and waits until the rig can take it."""

import asyncio
import os
import random
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import psutil

from protodcs.errors import ProtoDCSError
from protodcs.serve.store.redis import RedisStore

from . import faults
from .faults import Target, fault, until
from .proxy import Proxy
from .rig import Rig

_TIMEOUT = 120.0


# Processes of the service.


@fault("kill worker")
async def kill_worker(rig: Rig, rng: random.Random) -> Target:
    return await rig.attack.kill("worker", rng)


@fault("pause worker")
async def pause_worker(rig: Rig, rng: random.Random) -> Target:
    """Stop a worker for longer than the lease: others take its streams while it still has them in memory."""
    return await rig.attack.pause("worker", rng, rng.uniform(1.2, 3.0) * rig.lease)


@fault("kill ingress")
async def kill_ingress(rig: Rig, rng: random.Random) -> Target:
    return await rig.attack.kill("ingress", rng)


@fault("kill encoder")
async def kill_encoder(rig: Rig, rng: random.Random) -> Target:
    return await rig.attack.kill("encoder", rng)


@fault("add worker")
async def add_worker(rig: Rig, rng: random.Random) -> Target:
    async with rig.workers_lock:
        return Target(", ".join(await rig.resize(1)))


@fault("remove worker")
async def remove_worker(rig: Rig, rng: random.Random) -> Target:
    async with rig.workers_lock:
        return Target(", ".join(await rig.resize(-1)))


@fault("kill controller during resize")
async def kill_controller(rig: Rig, rng: random.Random) -> Target:
    async with rig.workers_lock:
        resizing = asyncio.create_task(rig.resize(rng.choice((-1, 1))))
        await asyncio.sleep(rng.uniform(0, 1.0))
        target = await rig.attack.kill("controller", rng)
        await resizing
        return target


@fault("restart ray")
async def restart_ray(rig: Rig, rng: random.Random) -> Target:
    """Kill the head of the Ray cluster, then everything else, and start the service again: its state is in Redis."""
    # A service that starts needs its store.
    async with rig.workers_lock, rig.redis_lock:
        target = await rig.attack.kill("ray head", rng)
        await asyncio.sleep(rng.uniform(0, 1.0))
        await asyncio.to_thread(rig.service.kill_all)
        await asyncio.to_thread(rig.service.start)
        rig.outages.append((target.struck, time.monotonic()))
        return target


@fault("fence worker")
async def fence_worker(rig: Rig, rng: random.Random) -> Target:
    """End leases early and acquire up to three streams, while their workers still have them in memory."""
    async with rig.redis_lock:
        store = RedisStore(f"redis://127.0.0.1:{rig.redis.port}/0")
        try:
            streams = sorted([stream async for stream in store.streams()])
            for stream in rng.sample(streams, min(3, len(streams))):
                holder = (await store.describe(stream)).worker
                if holder is not None:
                    rig.redis.command("DEL", f"protodcs:lease:{holder}")
                # The worker may renew its lease between the two commands.
                with suppress(ProtoDCSError):
                    held = await store.acquire(stream, "intruder", "intruder")
                    await store.release(stream, held.fence)
            return Target("leases")
        finally:
            await store.close()


# Redis.


@fault("kill redis")
async def kill_redis(rig: Rig, rng: random.Random) -> Target:
    async with rig.redis_lock:
        target = Target("redis", rig.redis.pid)
        await asyncio.to_thread(rig.redis.kill)
        await asyncio.sleep(rng.uniform(0, 1.0))
        await asyncio.to_thread(rig.redis.start)
        return target


@fault("cut power")
async def cut_power(rig: Rig, rng: random.Random) -> Target:
    """Kill Redis and remove what it has not synced, as a power loss does."""
    async with rig.redis_lock:
        target = Target("redis", rig.redis.pid)
        await asyncio.to_thread(rig.redis.cut_power, rng)
        await asyncio.to_thread(rig.redis.start)
        return target


@fault("pause redis")
async def pause_redis(rig: Rig, rng: random.Random) -> Target:
    """Stop Redis for a part of the lease, or for longer than the lease."""
    async with rig.redis_lock:
        target = Target("redis", rig.redis.pid)
        rig.redis.pause()
        try:
            await asyncio.sleep(rig.lease * rng.choice((rng.uniform(0.2, 0.8), rng.uniform(1.2, 2.5))))
        finally:
            rig.redis.resume()
        return target


@fault("slow disk")
async def slow_disk(rig: Rig, rng: random.Random) -> Target:
    """Stop Redis for 50 to 200 ms again and again, as a slow fsync does."""
    async with rig.redis_lock:
        target = Target("redis", rig.redis.pid)
        for _ in range(15):
            rig.redis.pause()
            try:
                await asyncio.sleep(rng.uniform(0.05, 0.2))
            finally:
                rig.redis.resume()
            await asyncio.sleep(0.02)
        return target


@fault("redis out of memory")
async def out_of_memory(rig: Rig, rng: random.Random) -> Target:
    """Refuse writes because of `maxmemory` for a while; in half of the cases, Redis is killed meanwhile."""
    async with rig.redis_lock:
        target = Target("redis", rig.redis.pid)
        rig.redis.command("CONFIG", "SET", "maxmemory", "1mb")
        await asyncio.sleep(rng.uniform(0.5, 2.0))
        if rng.random() < 0.5:
            await asyncio.to_thread(rig.redis.kill)
            await asyncio.to_thread(rig.redis.start)
        rig.redis.command("CONFIG", "SET", "maxmemory", "0")
        return target


@fault("disk full")
async def disk_full(rig: Rig, rng: random.Random) -> Target:
    """Fill the file system of the append-only file until Redis ends, which `appendfsync always` makes it do."""
    assert rig.disk is not None, "this fault needs a file system of its own: pass `disk` to the rig"
    async with rig.redis_lock:
        target = Target("redis", rig.redis.pid)
        assert target.pid is not None
        ballast = rig.disk / "ballast"
        try:
            _fill(ballast)
            with suppress(TimeoutError):
                # The run may have ended: then nobody writes any more.
                await until(lambda: not psutil.pid_exists(target.pid) or rig.redis.ended, "the end of Redis", 10)
        finally:
            ballast.unlink(missing_ok=True)
        await asyncio.to_thread(rig.redis.kill)
        await asyncio.to_thread(rig.redis.start)
        return target


def _fill(file: Path) -> None:
    """Take all free space of a file system: first most of it at once, then block by block."""
    free = os.statvfs(file.parent)
    with suppress(OSError), file.open("wb", buffering=0) as opened:
        os.posix_fallocate(opened.fileno(), 0, max(1, free.f_bavail - 256) * free.f_frsize)
        opened.seek(0, os.SEEK_END)
        while True:
            opened.write(bytes(free.f_frsize))


@fault("promote replica")
async def promote_replica(rig: Rig, rng: random.Random) -> Target:
    """Replace the primary by a replica that has everything. The service follows by the proxy."""
    async with rig.redis_lock:
        old = rig.redis
        new = rig.new_redis(f"redis-{len(rig.folders)}", rig.disk)
        await asyncio.to_thread(new.start)
        try:
            old.command("CONFIG", "SET", "repl-diskless-sync-delay", "0")
            new.command("REPLICAOF", "127.0.0.1", str(old.port))
            await until(lambda: _synchronized(new), "the synchronization of the replica", _TIMEOUT)
            rig.proxy.blocked = True
            try:
                await until(lambda: _offset(old) == _offset(new), "the last writes on the replica", _TIMEOUT)
                await asyncio.to_thread(old.kill)
                new.command("REPLICAOF", "NO", "ONE")
                rig.redis, rig.proxy.target = new, ("127.0.0.1", new.port)
                rig.folders.append(new.folder)
            finally:
                # What was held back must not reach the new primary from a connection to the old one.
                rig.proxy.cut()
                rig.proxy.blocked = False
        except BaseException:
            if rig.redis is not new:
                new.kill()
            raise
        return Target(new.folder.name, new.pid)


def _synchronized(replica) -> bool:
    facts = replica.info()
    wanted = {"master_link_status": "up", "aof_rewrite_in_progress": "0", "aof_rewrite_scheduled": "0"}
    return {name: facts.get(name) for name in wanted} == wanted


def _offset(server) -> str:
    return server.info().get("master_repl_offset", "")


# The network.


@fault("slow network")
async def slow_network(rig: Rig, rng: random.Random) -> Target:
    async with rig.redis_lock, _network(rig.proxy) as target:
        rig.proxy.delay = rng.uniform(0.05, 0.5)
        await asyncio.sleep(rng.uniform(0.5, 2.0) * rig.lease)
        return target


@fault("lose replies of redis")
async def lose_replies(rig: Rig, rng: random.Random) -> Target:
    """Drop what Redis answers: it writes, but the workers do not know."""
    return await _drop(rig, rng, "drop_replies")


@fault("lose requests to redis")
async def lose_requests(rig: Rig, rng: random.Random) -> Target:
    return await _drop(rig, rng, "drop_requests")


async def _drop(rig: Rig, rng: random.Random, what: str) -> Target:
    """Have the proxy before Redis drop something for a while."""
    async with rig.redis_lock, _network(rig.proxy) as target:
        setattr(rig.proxy, what, True)
        await asyncio.sleep(rng.uniform(0.2, 2.0) * rig.lease)
        return target


@fault("lose replies to clients")
async def lose_replies_to_clients(rig: Rig, rng: random.Random) -> Target:
    """Drop what the service answers: it applies requests, but the clients do not know, and retry."""
    entrance = rng.choice(rig.entrances)
    async with _network(entrance) as target:
        entrance.drop_replies = True
        # Until an answer is lost; the run may have ended, so not for ever.
        with suppress(TimeoutError):
            await until(lambda: entrance.lost > 0, "an answer to lose", 10)
        return target


@asynccontextmanager
async def _network(proxy: Proxy) -> AsyncIterator[Target]:
    """Heal the network in the end; connections that lost data are closed."""
    proxy.lost = 0
    try:
        yield Target(f"network at port {proxy.port}")
    finally:
        proxy.delay, proxy.drop_replies, proxy.drop_requests = 0.0, False, False
        proxy.cut()


# Clocks.


@fault("step clock")
async def step_clock(rig: Rig, rng: random.Random) -> Target:
    """Set the wall clock of one worker forward or back by hours; its monotonic clock goes on."""
    assert rig.clocks is not None, "this fault needs libfaketime: see `Rig.fake_clocks`"
    process = await rig.attack.choose("worker", rng)
    hours = rng.choice((-1, 1)) * rng.uniform(0.5, 48)
    (rig.clocks / str(process.pid)).write_text(f"{3600 * hours:+.0f}\n")
    return Target(f"clock by {hours:+.1f} h", process.pid)


# The faults of this module.
FAULTS = [kind for kind, function in faults.FAULTS.items() if function.__module__ == __name__]

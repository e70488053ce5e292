"""Partitions as faults: each function chooses its victims with `rng`, blocks packets, waits, and heals.

Each returns one sentence that says what it did. They may overlap: packets flow again when the last one ends.
"""

import asyncio
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from .hosts import MultiHostService
from .network import Host

Partition = Callable[[MultiHostService, random.Random, float], Awaitable[str]]


@dataclass(frozen=True, slots=True)
class _Worker:
    name: str
    host: Host
    pid: int


async def cut_worker_from_store(service: MultiHostService, rng: random.Random, seconds: float) -> str:
    """Drop all packets between a worker's host and Redis."""
    worker = await _choose_worker(service, rng)
    return await _hold(service, f"{_about(worker)} and the store", seconds, _both(worker.host, service.store))


async def block_worker_to_store(service: MultiHostService, rng: random.Random, seconds: float) -> str:
    """Drop all packets from a worker's host to Redis."""
    worker = await _choose_worker(service, rng)
    return await _hold(service, f"{_about(worker)} to the store", seconds, [(worker.host, service.store)])


async def block_store_to_worker(service: MultiHostService, rng: random.Random, seconds: float) -> str:
    """Drop all packets from Redis to a worker's host."""
    worker = await _choose_worker(service, rng)
    return await _hold(service, f"the store to {_about(worker)}", seconds, [(service.store, worker.host)])


async def cut_ingress_from_worker(service: MultiHostService, rng: random.Random, seconds: float) -> str:
    """Drop all packets between the host of an ingress and the host of a worker."""
    ingress, worker = await _choose_pair(service, rng)
    about = f"the ingress on {ingress.name} and {_about(worker)}"
    return await _hold(service, about, seconds, _both(ingress, worker.host))


async def block_ingress_to_worker(service: MultiHostService, rng: random.Random, seconds: float) -> str:
    """Drop all packets from the host of an ingress to the host of a worker."""
    ingress, worker = await _choose_pair(service, rng)
    about = f"the ingress on {ingress.name} to {_about(worker)}"
    return await _hold(service, about, seconds, [(ingress, worker.host)])


async def block_worker_to_ingress(service: MultiHostService, rng: random.Random, seconds: float) -> str:
    """Drop all packets from the host of a worker to the host of an ingress."""
    ingress, worker = await _choose_pair(service, rng)
    about = f"{_about(worker)} to the ingress on {ingress.name}"
    return await _hold(service, about, seconds, [(worker.host, ingress)])


STORE_PARTITIONS: dict[str, Partition] = {
    "cut worker from store": cut_worker_from_store,
    "block worker to store": block_worker_to_store,
    "block store to worker": block_store_to_worker,
}
INGRESS_PARTITIONS: dict[str, Partition] = {
    "cut ingress from worker": cut_ingress_from_worker,
    "block ingress to worker": block_ingress_to_worker,
    "block worker to ingress": block_worker_to_ingress,
}
PARTITIONS = STORE_PARTITIONS | INGRESS_PARTITIONS


async def _hold(service: MultiHostService, about: str, seconds: float, pairs: list[tuple[Host, Host]]) -> str:
    with service.network.blocked(*pairs):
        await asyncio.sleep(seconds)
    return f"Dropped packets from {about}" if len(pairs) == 1 else f"Dropped packets between {about}"


async def _choose_worker(service: MultiHostService, rng: random.Random) -> _Worker:
    """Choose by name from all workers that respond, so that a seed chooses the same one again."""
    workers = await asyncio.to_thread(service.workers)
    name = rng.choice(sorted(workers))
    return _Worker(name, *workers[name])


async def _choose_pair(service: MultiHostService, rng: random.Random) -> tuple[Host, _Worker]:
    """Choose a worker and the host of an ingress elsewhere: packets within one host cannot be dropped."""
    worker = await _choose_worker(service, rng)
    hosts = [node for node in service.nodes if node is not worker.host]
    return rng.choice(hosts), worker


def _both(one: Host, other: Host) -> list[tuple[Host, Host]]:
    return [(one, other), (other, one)]


def _about(worker: _Worker) -> str:
    return f"worker {worker.name} (host {worker.host.name}, pid {worker.pid})"

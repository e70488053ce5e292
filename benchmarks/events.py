"""Follow one stream with many clients: `python -m benchmarks.events`.

The service in one process, the sender and all clients run on this machine. The delay of an event is the time from the
decision, by the clock of the store, until a client has read it, the wait for the disk included.
"""

import argparse
import asyncio
import json
import os
import re
import tempfile
import time
from pathlib import Path

import numpy as np

from benchmarks.load import Connection
from benchmarks.local_service import _SERVICE, HOST, running
from benchmarks.timing import RESULTS, machine

PORT = 8477
CLASSES, DIMENSION = 100, 512
SENDERS = 8
_EVENT = re.compile(rb'id: (\d+)\nevent: decision\ndata: \{"stream": "s", "position": \d+, "time": (\d+)')


def memory(process):
    """Resident memory of a process, in MB."""
    pages = int(Path(f"/proc/{process.pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


class Follower:
    """A client: the positions that it saw, and how late."""

    def __init__(self):
        self.positions = []
        self.delays = []

    async def connect(self):
        """Follow the stream from now on."""
        self._reader, self._writer = await asyncio.open_connection(HOST, PORT, limit=2**22)
        self._writer.write(f"GET /v1/streams/s/events HTTP/1.1\r\nHost: {HOST}\r\n\r\n".encode())
        await self._reader.readuntil(b"event: heartbeat")

    async def follow(self, count):
        """Read so many events."""
        rest = b""
        while len(self.positions) < count:
            piece = await self._reader.read(2**18)
            if not piece:
                raise RuntimeError(f"disconnected after {len(self.positions)} of {count} events")
            now, rest = 1000 * time.time(), rest + piece
            end = 0
            for found in _EVENT.finditer(rest):
                self.positions.append(int(found[1]))
                self.delays.append(now - int(found[2]))
                end = found.end()
            rest = rest[end:]
        self._writer.close()


async def send(features, rate):
    """Observe features at a rate, over some connections that take turns."""
    start = time.perf_counter()

    async def send_some(first):
        connection = Connection(HOST, PORT)
        for number in range(first, len(features), SENDERS):
            await asyncio.sleep(start + number / rate - time.perf_counter())
            body = features[number].tobytes()
            status, answer = await connection.post("/v1/streams/s/observe", body, "application/octet-stream")
            if status != 200:
                raise RuntimeError(answer)

    await asyncio.gather(*map(send_some, range(SENDERS)))
    return len(features) / (time.perf_counter() - start)


async def measure(process, clients, rate, seconds):
    random = np.random.default_rng(0)
    prototypes = random.normal(size=(CLASSES, DIMENSION)).astype(np.float32)
    count = int(rate * seconds)
    near = prototypes[random.integers(CLASSES, size=count)]
    features = (near + random.normal(size=near.shape)).astype("<f4")
    body = json.dumps({"id": "s", "prototypes": prototypes.tolist()}).encode()
    status, answer = await Connection(HOST, PORT).post("/v1/streams", body, "application/json")
    if status != 201:
        raise RuntimeError(answer)
    followers = [Follower() for _ in range(clients)]
    await asyncio.gather(*(follower.connect() for follower in followers))
    following = asyncio.gather(*(follower.follow(count) for follower in followers))
    memories = []

    async def watch():
        while True:
            memories.append(memory(process))
            await asyncio.sleep(1)

    watching = asyncio.create_task(watch())
    reached = await send(features, rate)
    await following
    watching.cancel()
    wrong = sum(follower.positions != list(range(count)) for follower in followers)
    delays = np.concatenate([follower.delays for follower in followers])
    # The engine and the idempotency cache grow during the first samples.
    settled = memories[len(memories) // 3 :]
    return {
        "clients": clients,
        "events": count,
        "rate": reached,
        "wrong": wrong,
        "p50": float(np.percentile(delays, 50)),
        "p99": float(np.percentile(delays, 99)),
        "max": float(delays.max()),
        "memory": (memories[0], settled[0], memories[-1]),
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", type=int, default=200, help="Clients that follow the stream (default: 200).")
    parser.add_argument("--rate", type=float, default=50.0, help="Observes per second (default: 50).")
    parser.add_argument("--seconds", type=float, default=60.0, help="Length of the measurement (default: 60).")
    parser.add_argument("--write", action="store_true", help="Write docs/results/events.md.")
    chosen = parser.parse_args()
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as folder, running(_SERVICE, folder, PORT) as process:
        found = asyncio.run(measure(process, chosen.clients, chosen.rate, chosen.seconds))
    about = machine()
    memories = " / ".join(f"{one:.0f}" for one in found["memory"])
    text = f"""# Events

`python -m benchmarks.events --write`, {about["cores"]} cores of {about["machine"]},
Python {about["versions"]["python"]}. Load average before the run: {load:.1f}.

{found["clients"]} clients follow one stream of the service in one process with server-sent events. A sender observes
{chosen.rate:g} features per second for {chosen.seconds:g} seconds, so each client gets {found["events"]:,} events.
Random features (seed 0), {CLASSES} classes, {DIMENSION} dimensions, StreamDCS with its default settings. Service,
sender and clients share the machine. The delay of an event is the time from its decision until a client has read it,
the wait for the disk included. A wrong event is lost, doubled or out of order. Memory: of the service, at the start,
after a third of the time, and at the end.

| observes per second | clients with a wrong event | p50 delay (ms) | p99 delay (ms) | max (ms) | memory (MB) |
|---|---|---|---|---|---|
| {found["rate"]:.1f} | {found["wrong"]} | {found["p50"]:.0f} | {found["p99"]:.0f} | {found["max"]:.0f} | {memories} |
"""
    print(text)
    if chosen.write:
        (RESULTS / "events.md").write_text(text)


if __name__ == "__main__":
    main()

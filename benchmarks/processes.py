"""Measure processes that share streams: owner lookup, a process that joins and leaves, and a rolling upgrade.

`python -m benchmarks.processes [lookup|join|upgrade ...] [--json FILE]`. `upgrade` restarts four processes behind
HAProxy with the configuration in deploy/haproxy, one after the other, while the asynchronous client observes. Quiet
rounds and rounds with an upgrade take turns. The new version is the same code.
"""

import argparse
import asyncio
import json
import os
import sys
import tempfile
import time
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np

from benchmarks.timing import ROOT, machine

PARTS = ("lookup", "join", "upgrade")
PROCESSES = 4
CLASSES, DIMENSION, STREAMS = 20, 512, 40
# Observes per second and stream of the rolling upgrade.
RATE = 0.5


# Owner lookup.


def names_of(count):
    """Return addresses of processes."""
    return tuple(f"http://10.0.{number // 250}.{number % 250}:8000" for number in range(count))


def lookup(processes=1000, lookups=100_000):
    """Return the time of an owner lookup, and how many partitions move if a process joins or leaves."""
    from protodcs.serve.cluster.partitions import COUNT, PartitionMap, best_owners

    names = names_of(processes)
    start = time.perf_counter()
    best = best_owners(names)
    first_map = time.perf_counter() - start
    streams = [f"tenant/camera-{number}" for number in range(lookups)]
    placement = PartitionMap(names, names, best)
    placement.first("")
    times = []
    for stream in streams:
        start = time.perf_counter()
        placement.first(stream)
        times.append(time.perf_counter() - start)
    start = time.perf_counter()
    PartitionMap(names, names, best).first("")
    again = time.perf_counter() - start
    moved = {}
    for count in (2, 3, 4, 8, 16, 64, 256, 999):
        before, after = best_owners(names[:count]), best_owners(names[: count + 1])
        fraction = sum(a != b for a, b in zip(before, after, strict=True)) / COUNT
        moved[count + 1] = {"fraction": fraction, "limit": 1 / (count + 1) + 0.05}
    return {
        "processes": processes,
        "lookup_p50_us": 1e6 * float(np.quantile(times, 0.5)),
        "lookup_p99_us": 1e6 * float(np.quantile(times, 0.99)),
        "new_map_ms": 1000 * first_map,
        "changed_owners_ms": 1000 * again,
        "moved": moved,
    }


# Processes.


@contextmanager
def cluster(count):
    """Run processes that share a database. Yield the database, a function that starts one more, and the processes."""
    sys.path.insert(0, str(ROOT / "tests"))
    import psycopg

    from service.postgres import PostgresServer
    from service.rig import Service

    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        postgres = stack.enter_context(PostgresServer())
        url = postgres.database()

        def start(name):
            (folder / name).mkdir()
            more = {"audit": str(folder / name / "audit"), "log_level": "warning"}
            return stack.enter_context(Service(folder / name, store=url, **more))

        services = [start(f"process-{number}") for number in range(count)]
        # One connection: a new one for each look would take time from what is measured.
        connection = stack.enter_context(psycopg.connect(url, autocommit=True))

        def owners():
            """Return the owner of each partition, and the processes that live."""
            living = connection.execute("SELECT name FROM processes WHERE expires > clock_timestamp()")
            found = connection.execute("SELECT owner FROM partitions ORDER BY number")
            return tuple(owner for (owner,) in found), tuple(name for (name,) in living)

        wait_until_shared(owners, count)
        yield folder, owners, start, services


def wait_until_shared(owners, count):
    """Wait until each partition belongs to the process that should own it. Return the owners."""
    from protodcs.serve.cluster.partitions import best_owners

    end = time.monotonic() + 60
    while True:
        found, living = owners()
        if len(living) == count and found == best_owners(living):
            return found
        if time.monotonic() > end:
            raise RuntimeError("the partitions are not shared")
        time.sleep(0.2)


def join(rounds=5):
    """Return seconds until a fifth process owns its share, and until it has left, and the partitions that moved."""
    from protodcs.serve.cluster.partitions import COUNT

    rows = []
    with cluster(PROCESSES) as (_, owners, start, _services):
        for turn in range(rounds):
            before = wait_until_shared(owners, PROCESSES)
            began = time.monotonic()
            service = start(f"joining-{turn}")
            ready = time.monotonic() - began
            after = wait_until_shared(owners, PROCESSES + 1)
            joined = time.monotonic() - began
            began = time.monotonic()
            service.stop()
            wait_until_shared(owners, PROCESSES)
            rows.append(
                {
                    "ready_seconds": ready,
                    "join_seconds": joined,
                    "leave_seconds": time.monotonic() - began,
                    "moved": sum(a != b for a, b in zip(before, after, strict=True)) / COUNT,
                    "limit": 1 / (PROCESSES + 1) + 0.05,
                    "load": os.getloadavg()[0],
                }
            )
            print(json.dumps(rows[-1]), flush=True)
    return rows


# A rolling upgrade.


async def observe_all(gateway, features, until):
    """Observe at a steady rate in each stream until `until` is done. Return seconds, failures and counts by stream."""
    from protodcs import AsyncClient
    from protodcs.errors import ProtoDCSError

    times, failures, counts = [], [], {}
    start = time.perf_counter()

    async def work(client, number):
        name, count = f"s{number}", 0
        stream = client.stream(name)
        while not until.done():
            due = start + (count + number / STREAMS) / RATE
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            try:
                await stream.observe(features[(count + number) % len(features)])
                times.append(time.perf_counter() - due)
            except ProtoDCSError as problem:
                failures.append(str(problem))
            count += 1
        counts[name] = count

    async with AsyncClient(gateway.base_url, connections=STREAMS, verify=gateway.trust) as client:
        await asyncio.gather(*(work(client, number) for number in range(STREAMS)))
    return times, failures, counts


def restart_all(services, owners):
    """Restart each process, one after the other. Return the seconds that each took to stop and to come back."""
    found = []
    for service in services:
        stopped = service.stop()
        began = time.monotonic()
        service.start()
        wait_until_shared(owners, len(services))
        found.append({"stop_seconds": stopped, "start_seconds": time.monotonic() - began})
    return found


def upgrade(rounds=2):
    """Return the rounds: p50 and p99 without and with an upgrade, failures, and responses that HAProxy saw."""
    random = np.random.default_rng(0)
    prototypes = random.standard_normal((CLASSES, DIMENSION)).astype(np.float32)
    features = prototypes[random.integers(CLASSES, size=500)] + random.standard_normal((500, DIMENSION)).astype("f4")
    rows, observed = [], dict.fromkeys((f"s{number}" for number in range(STREAMS)), 0)
    with cluster(PROCESSES) as (folder, owners, _, services):
        from haproxy_gateway import Gateway
        from protodcs import Client

        ports = [service.settings["port"] for service in services]
        with Gateway(folder, *ports, source_requests=10**6, key_requests=10**6) as gateway:
            trust = {"verify": gateway.trust}
            with Client(gateway.base_url, **trust) as client:
                for name in observed:
                    client.create(name, prototypes=prototypes)

            def run(work):
                """Observe while `work` runs. Return what both found."""

                async def both():
                    working = asyncio.get_running_loop().run_in_executor(None, work)
                    times, failures, counts = await observe_all(gateway, features, working)
                    for name, count in counts.items():
                        observed[name] += count
                    return await working, times, failures

                return asyncio.run(both())

            run(lambda: time.sleep(10))
            for _ in range(rounds):
                row = {}
                for name, work in (
                    ("quiet", lambda: time.sleep(20)),
                    ("upgrade", lambda: restart_all(services, owners)),
                ):
                    lines = len(gateway.log().splitlines())
                    restarts, times, failures = run(work)
                    codes = [
                        json.loads(line)["code"] for line in gateway.log().splitlines()[lines:] if '"code":' in line
                    ]
                    row[name] = {
                        "observes": len(times),
                        "failures": failures,
                        "not_200_at_gateway": {code: codes.count(code) for code in set(codes) - {200}},
                        "p50_ms": 1000 * float(np.quantile(times, 0.5)),
                        "p99_ms": 1000 * float(np.quantile(times, 0.99)),
                        "worst_ms": 1000 * max(times),
                        "restarts": restarts,
                        "load": os.getloadavg()[0],
                    }
                row["ratio"] = row["upgrade"]["p99_ms"] / row["quiet"]["p99_ms"]
                rows.append(row)
                print(json.dumps(row), flush=True)
            with Client(gateway.base_url, **trust) as client:
                for name, count in observed.items():
                    position = client.stream(name).peek(features[0]).decision.sequence
                    if position != count:
                        raise RuntimeError(f"{name} has {position} samples instead of {count}")
    return rows


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", choices=[*PARTS, []], help="which; all without a name")
    parser.add_argument("--json", type=Path, help="Write the results to this file.")
    given = parser.parse_args()
    results = {part: globals()[part]() for part in given.parts or PARTS}
    print(json.dumps(results, indent=1))
    if given.json is not None:
        given.json.write_text(json.dumps({**machine(), **results}, indent=1) + "\n")

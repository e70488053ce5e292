"""Compare one process with SQLite, one with PostgreSQL, and several behind HAProxy that share one PostgreSQL.

All take turns on this machine, with the same load of durable observes of features. Several processes are measured
three times. If HAProxy takes them in turn, most requests are forwarded. With a hash of the stream, as in
deploy/haproxy, they are forwarded too, but all of a stream by the same process. If HAProxy knows the owner of each
stream, none is.

`processor_ms` is the time of all processes together, the database and HAProxy included. It depends less than the rate
on what else the machine does. `wal_bytes` is what PostgreSQL writes to its write-ahead log. All are for one observe.
"""

import argparse
import asyncio
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

import numpy as np

from benchmarks.load import closed_loop
from benchmarks.local_service import HOST, STREAMS, bodies_of, create, processor_seconds
from benchmarks.timing import ROOT, machine

SQLITE, POSTGRES = "SQLite", "PostgreSQL"
TURNS, HASH, OWNER = "several, in turn", "several, by hash", "several, at the owner"
_HAPROXY = """
defaults
    mode http
    timeout connect 2s
    timeout client 65s
    timeout server 65s
    option httpchk GET /v1/ready

listen turns
    bind 127.0.0.1:{turns}
    balance roundrobin
{servers}

listen hash
    bind 127.0.0.1:{hashed}
    balance hash path,field(4,/)
    hash-type consistent
{servers}

listen owner
    bind 127.0.0.1:{owner}
    use-server %[path,field(4,/),map({owners})] if TRUE
{servers}
"""


def balancer(folder, turns, hashed, owner, servers, owners):
    """Start HAProxy with a port that takes servers in turn, one by a hash, and one that takes the stream's owner."""
    (folder / "owners").write_text("".join(f"{stream} s{port}\n" for stream, port in owners.items()))
    lines = "\n".join(f"    server s{port} 127.0.0.1:{port} check inter 1s" for port in servers)
    file = folder / "haproxy.cfg"
    file.write_text(_HAPROXY.format(turns=turns, hashed=hashed, owner=owner, servers=lines, owners=folder / "owners"))
    return subprocess.Popen([shutil.which("haproxy") or "/usr/sbin/haproxy", "-db", "-f", str(file)])


def measure(processes=4, connections=64, seconds=10.0, rounds=5):
    """Yield a row for each round; the first round warms up and is left out."""
    sys.path.insert(0, str(ROOT / "tests"))
    import psutil

    from ports import free_port
    from protodcs.serve.cluster.partitions import partition_of
    from service.postgres import PostgresServer
    from service.rig import Service

    chance = np.random.default_rng(0)
    bodies, first = bodies_of("features", chance)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        postgres = stack.enter_context(PostgresServer())
        shared = postgres.database()

        services = []

        def start(name, store):
            (folder / name).mkdir()
            more = {"audit": str(folder / name / "audit"), "log_level": "warning"}
            service = stack.enter_context(Service(folder / name, store=store, **more))
            services.append(service)
            return service.settings["port"]

        ports = {
            SQLITE: start("sqlite", f"sqlite:{folder / 'streams'}"),
            POSTGRES: start("alone", postgres.database()),
            TURNS: free_port(),
            HASH: free_port(),
            OWNER: free_port(),
        }
        servers = [start(f"process-{number}", shared) for number in range(processes)]
        while True:
            found = dict(postgres.sql("SELECT number, owner FROM partitions", shared))
            if len(set(found.values())) == processes:
                break
            time.sleep(0.1)
        owners = {f"s{number}": int(found[partition_of(f"s{number}")].rpartition(":")[2]) for number in range(STREAMS)}
        haproxy = balancer(folder, ports[TURNS], ports[HASH], ports[OWNER], servers, owners)
        stack.callback(haproxy.wait)
        stack.callback(haproxy.kill)
        time.sleep(3)
        for name in (SQLITE, POSTGRES, TURNS):
            asyncio.run(create(first, ports[name]))

        def observe(worker):
            body = bodies[chance.integers(len(bodies))]
            return f"/v1/streams/s{worker % STREAMS}/observe", body, "application/octet-stream"

        def seconds_of(pid):
            # Processes of the database come and go.
            try:
                return processor_seconds(psutil.Process(pid))
            except (psutil.NoSuchProcess, FileNotFoundError):
                return 0.0

        def used():
            """Return the seconds of all processes, and the bytes that the database wrote to its log."""
            groups = {
                "service": [service.pid for service in services],
                "database": postgres._processes(),
                "haproxy": [haproxy.pid],
            }
            found = {f"{name}_ms": 1000 * sum(map(seconds_of, pids)) for name, pids in groups.items()}
            ((written,),) = postgres.sql("SELECT pg_wal_lsn_diff(pg_current_wal_lsn(), '0/0')")
            return {"processor_ms": sum(found.values()), **found, "wal_bytes": float(written)}

        for turn in range(rounds + 1):
            row = {}
            for name, port in ports.items():
                before = used()
                times, took = asyncio.run(closed_loop(HOST, port, observe, connections, seconds))
                row[name] = {
                    "per_second": len(times) / took,
                    **{what: (value - before[what]) / len(times) for what, value in used().items()},
                    "p50_ms": 1000 * float(np.median(times)),
                    "p99_ms": 1000 * float(np.quantile(times, 0.99)),
                }
            if turn:
                yield row


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--processes", type=int, default=4, help="Processes that share streams (default: 4).")
    parser.add_argument("--seconds", type=float, default=10.0, help="Seconds per turn (default: 10).")
    parser.add_argument("--rounds", type=int, default=5, help="Rounds after the warm-up (default: 5).")
    parser.add_argument("--json", type=Path, help="Write the rounds to this file.")
    given = parser.parse_args()
    found = []
    for measured in measure(given.processes, seconds=given.seconds, rounds=given.rounds):
        print(json.dumps(measured), flush=True)
        found.append(measured)
    if given.json is not None:
        given.json.write_text(json.dumps({**machine(), "load": os.getloadavg(), "rounds": found}, indent=1) + "\n")
    for name, first in found[0].items():
        print(name, {figure: round(float(np.median([row[name][figure] for row in found])), 2) for figure in first})

"""Latency of two tenants behind the gateway, while clients with slow connections and a third tenant attack it.

The service runs in one process behind HAProxy with the configuration in deploy/haproxy. The attack is 1,000 connections
whose headers or bodies never end, and one tenant that sends 50 times its rate. Quiet and attacked rounds take turns.
"""

import argparse
import asyncio
import contextlib
import json
import multiprocessing
import os
import re
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import numpy as np

from benchmarks.load import Sender, any_certificate
from benchmarks.timing import ROOT, clip_stream

# Requests per second of each calm tenant, and its connections.
PROBE, PROBE_CONNECTIONS = 20.0, 8
# Requests per second that the greedy tenant may send, and how many times that it sends.
RATE, EXCESS, GREEDY_CONNECTIONS = 20.0, 50, 100
SLOW_CONNECTIONS, SOURCES = 1000, 10
TENANTS = ("first", "second", "greedy")
# The attackers run on the same cores, so they yield to the service and to the tenants that are measured.
_NICENESS = 19


async def slow_connections(port):
    """Hold slow connections open from many addresses; open a new one for each that the gateway closes."""
    heads = (b"GET /v1/health HTTP/1.1\r\nHost: g\r\n", b"POST /v1/streams HTTP/1.1\r\nContent-Length: 1000\r\n\r\n")

    async def hold(number):
        source = (f"127.0.1.{1 + number % SOURCES}", 0)
        while True:
            with contextlib.suppress(OSError, EOFError):
                reader, writer = await asyncio.open_connection(
                    "127.0.0.1", port, ssl=any_certificate(), local_addr=source
                )
                try:
                    writer.write(heads[number % 2])
                    while not reader.at_eof():
                        writer.write(b"X-A: b\r\n" if number % 2 == 0 else b"x")
                        with contextlib.suppress(TimeoutError):
                            await asyncio.wait_for(reader.read(1000), 2.0)
                finally:
                    writer.close()
            await asyncio.sleep(0.5)

    await asyncio.gather(*(hold(number) for number in range(SLOW_CONNECTIONS)))


def p99(told):
    """Return the p99 latency of the requests that were served, in milliseconds."""
    return 1000 * float(np.quantile([seconds for _, status, seconds in told if status == 200], 0.99))


def p50(told):
    """Return their median latency in milliseconds."""
    return 1000 * float(np.median([seconds for _, status, seconds in told if status == 200]))


def statuses(told):
    """Return how many requests had which outcome."""
    return dict(Counter(str(status) for _, status, _ in told))


def _hold(port):
    os.nice(_NICENESS)
    asyncio.run(slow_connections(port))


@contextlib.contextmanager
def slow_clients(gateway):
    """Hold slow connections in a process of their own. Wait until most of them are open."""
    process = multiprocessing.get_context("spawn").Process(target=_hold, args=(gateway.port,), daemon=True)
    process.start()
    try:
        until = time.monotonic() + 60
        while sessions(gateway) < 0.9 * SLOW_CONNECTIONS and time.monotonic() < until:
            time.sleep(0.5)
        yield
    finally:
        process.kill()
        process.join()


def sessions(gateway):
    """Return how many connections the gateway has, by its own metrics."""
    import httpx

    page = httpx.get(f"http://127.0.0.1:{gateway.metrics_port}/metrics", timeout=60).text
    (value,) = re.findall(r'^haproxy_frontend_current_sessions\{proxy="api"\} (\d+)', page, re.MULTILINE)
    return int(value)


def senders_of(service, gateway, tokens):
    """Create eight streams per tenant and return {tenant: Sender of observes through the gateway}."""
    import httpx

    prototypes, features = clip_stream("dtd")
    bodies = [row.astype("<f4").tobytes() for row in features[:500]]
    senders = {}
    for tenant, token in tokens.items():
        with httpx.Client(
            base_url=service.base_url, headers={"authorization": f"Bearer {token}"}, timeout=60
        ) as client:
            for number in range(8):
                made = client.post("/v1/streams", json={"id": f"s-{number}", "prototypes": prototypes.tolist()})
                made.raise_for_status()
        paths = [f"/v1/streams/s-{number}/observe" for number in range(8)]
        headers = [f"authorization: Bearer {token}\r\n"] * 8
        senders[tenant] = Sender("127.0.0.1", gateway.port, paths, bodies, headers, tls=True)
    return senders


def probe(senders, seconds):
    """Send the requests of both calm tenants at once and return their outcomes together."""
    first, second = senders["first"], senders["second"]
    with second.beside(PROBE, PROBE_CONNECTIONS, seconds, niceness=0) as outcome:
        return first.send(PROBE, PROBE_CONNECTIONS, seconds) + outcome()


def measure(rounds=5, seconds=20.0):
    """Return the rounds: p50 and p99 without and with the attack, and what became of it."""
    sys.path.insert(0, str(ROOT / "tests"))
    from haproxy_gateway import Gateway
    from protodcs.serve.access.keys import create_key
    from service.rig import Service

    turns = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        tokens = {tenant: create_key(folder / "keys.json", tenant, "admin")[1] for tenant in TENANTS}
        limits = {"greedy": {"rate": RATE, "burst": int(RATE)}}
        settings = {
            "keys": str(folder / "keys.json"),
            "tenants": limits,
            "log_format": "off",
            "audit": str(folder / "audit"),
        }
        service = Service(folder, store=f"sqlite:{folder / 'streams'}", **settings)
        with (
            service,
            Gateway(
                folder, service.settings["port"], key_flood=600, key_requests=int(10 * max(RATE, PROBE) * 1.5)
            ) as gateway,
        ):
            senders = senders_of(service, gateway, tokens)
            probe(senders, 5.0)
            for _ in range(rounds):
                load = os.getloadavg()[0]
                quiet = probe(senders, seconds)
                with (
                    slow_clients(gateway),
                    senders["greedy"].beside(RATE * EXCESS, GREEDY_CONNECTIONS, seconds + 3, _NICENESS) as outcome,
                ):
                    # Until the flood is beyond its burst.
                    time.sleep(2)
                    attacked, slow = probe(senders, seconds), sessions(gateway)
                    greedy = outcome()
                turns.append(
                    {
                        "load": load,
                        "quiet": {"p50": p50(quiet), "p99": p99(quiet), **statuses(quiet)},
                        "attacked": {"p50": p50(attacked), "p99": p99(attacked), **statuses(attacked)},
                        "ratio": p99(attacked) / p99(quiet),
                        "greedy": statuses(greedy),
                        "connections": slow,
                    }
                )
                print(json.dumps(turns[-1]), flush=True)
    return turns


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=20.0, help="of each part of a round")
    given = parser.parse_args()
    ratios = [turn["ratio"] for turn in measure(given.rounds, given.seconds)]
    print(f"p99 with the attack / p99 without: median {np.median(ratios):.2f}, {min(ratios):.2f} to {max(ratios):.2f}")

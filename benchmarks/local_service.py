"""Compare a durable observe of the service in one process with a bare FastAPI app that echoes the same body.

Both run on this machine and take turns, so that the ratio depends little on what else the machine does.
"""

import argparse
import asyncio
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np

from benchmarks.load import Connection, closed_loop

HOST, SERVICE_PORT, ECHO_PORT = "127.0.0.1", 8474, 8475
CLASSES, DIMENSION, STREAMS = 100, 512, 50
_BYTES = "application/octet-stream"

_SERVICE = """
import sys
from protodcs.serve.runtime.local.service import serve
from protodcs.serve.settings import ServeConfig
folder, port = sys.argv[1:]
config = ServeConfig(store=f"sqlite:{folder}/streams", audit=f"{folder}/audit", port=int(port), log_format="off")
serve(config, lambda _: None)
"""
_ECHO = """
import sys
import uvicorn
from fastapi import FastAPI, Request, Response
api = FastAPI()

@api.post("/v1/streams/{stream}/observe")
async def echo(stream: str, request: Request):
    return Response(await request.body(), media_type="application/octet-stream")

uvicorn.run(api, port=int(sys.argv[2]), log_level="warning", access_log=False)
"""


@contextmanager
def running(program, folder, port):
    """A process that listens on a port."""
    process = subprocess.Popen([sys.executable, "-c", program, folder, str(port)], stdout=subprocess.DEVNULL)
    try:
        for _ in range(600):
            with socket.socket() as probe:
                if probe.connect_ex((HOST, port)) == 0:
                    break
            time.sleep(0.1)
        yield process
    finally:
        process.kill()
        process.wait()


def processor_seconds(process):
    """The time that a process has used."""
    with Path(f"/proc/{process.pid}/stat").open() as file:
        fields = file.read().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def create(prototypes, port=SERVICE_PORT):
    """Create the streams."""
    connection = Connection(HOST, port)
    for number in range(STREAMS):
        body = {"like": "s0"} if number else {"prototypes": prototypes.tolist()}
        status, answer = await connection.post(
            "/v1/streams", json.dumps({"id": f"s{number}", **body}).encode(), "application/json"
        )
        if status != 201:
            raise RuntimeError(answer)
    connection.close()


def measure(connections=64, seconds=10.0, rounds=5):
    """Yield a row for each round; the first round warms up and is left out."""
    chance = np.random.default_rng(0)
    bodies = [row.astype("<f4").tobytes() for row in chance.normal(size=(256, DIMENSION))]
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        service = stack.enter_context(running(_SERVICE, folder, SERVICE_PORT))
        echo = stack.enter_context(running(_ECHO, folder, ECHO_PORT))
        asyncio.run(create(chance.normal(size=(CLASSES, DIMENSION))))

        def observe(worker):
            return f"/v1/streams/s{worker % STREAMS}/observe", bodies[chance.integers(len(bodies))], _BYTES

        for turn in range(rounds + 1):
            row = {}
            for name, port, process in (("echo", ECHO_PORT, echo), ("observe", SERVICE_PORT, service)):
                before = processor_seconds(process)
                times, took = asyncio.run(closed_loop(HOST, port, observe, connections, seconds))
                row[name] = {
                    "per_second": len(times) / took,
                    "p99_ms": 1000 * float(np.quantile(times, 0.99)),
                    "processor_ms": 1000 * (processor_seconds(process) - before) / len(times),
                }
            if turn:
                row["rate_ratio"] = row["observe"]["per_second"] / row["echo"]["per_second"]
                row["p99_ratio"] = row["observe"]["p99_ms"] / row["echo"]["p99_ms"]
                yield row


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=10.0, help="Seconds per turn (default: 10).")
    parser.add_argument("--rounds", type=int, default=5, help="Rounds after the warm-up (default: 5).")
    given = parser.parse_args()
    found = []
    for measured in measure(seconds=given.seconds, rounds=given.rounds):
        print(json.dumps(measured), flush=True)
        found.append(measured)
    for ratio in ("rate_ratio", "p99_ratio"):
        print(f"{ratio}: median {np.median([row[ratio] for row in found]):.2f}")

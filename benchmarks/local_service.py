"""Compare a durable observe of the service in one process with a bare FastAPI app that gets the same body.

With features, the bare app echoes them. With images, it only encodes them, in batches as the service does. Both run on
this machine and take turns, so that the ratio depends little on what else the machine does.
"""

import argparse
import asyncio
import io
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

HOST, SERVICE_PORT, BARE_PORT = "127.0.0.1", 8474, 8475
CLASSES, DIMENSION, STREAMS = 100, 512, 50
ENCODER = "mini"
_TYPES = {"features": "application/octet-stream", "images": "image/png"}

_SERVICE = """
import sys
from protodcs.serve.runtime.service import serve
from protodcs.serve.settings import ServeConfig
folder, port, *encoder = sys.argv[1:]
store, audit = f"sqlite:{folder}/streams", f"{folder}/audit"
serve(ServeConfig(store=store, audit=audit, port=port, log_format="off", encoder=(*encoder, None)[0]), lambda _: None)
"""
_BARE = """
import sys
import uvicorn
from fastapi import FastAPI, Request, Response
folder, port, *encoder = sys.argv[1:]
api = FastAPI()
if encoder:
    from protodcs import encoders
    from protodcs.serve.encoder.encoding import SharedEncoder
    from protodcs.serve.encoder.micro_batcher import MicroBatcher
    from protodcs.serve.settings import ServeConfig
    images = ServeConfig().batch_size
    shared = SharedEncoder(encoders.load(*encoder, batch_size=images))
    batches = MicroBatcher(shared.encode, calls=1, images=images)

@api.post("/v1/streams/{stream}/observe")
async def observe(stream: str, request: Request):
    body = await request.body()
    return Response(await batches.encode(body) if encoder else body, media_type="application/octet-stream")

uvicorn.run(api, port=int(port), log_level="warning", access_log=False)
"""


@contextmanager
def running(program, folder, port, *more):
    """A process that listens on a port."""
    arguments = [sys.executable, "-c", program, folder, str(port), *more]
    process = subprocess.Popen(arguments, stdout=subprocess.DEVNULL)
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


async def create(first, port=SERVICE_PORT):
    """Create the streams: one with what `first` says, and others like it."""
    connection = Connection(HOST, port)
    for number in range(STREAMS):
        body = {"id": f"s{number}", **({"like": "s0"} if number else first)}
        status, answer = await connection.post("/v1/streams", json.dumps(body).encode(), "application/json")
        if status != 201:
            raise RuntimeError(answer)
    connection.close()


def bodies_of(kind, chance=None):
    """Return the bodies of observes, and what a stream for them is created with."""
    if kind == "features":
        bodies = [row.astype("<f4").tobytes() for row in chance.normal(size=(256, DIMENSION))]
        return bodies, {"prototypes": chance.normal(size=(CLASSES, DIMENSION)).tolist()}
    from PIL import Image

    from protodcs.data import open_source

    bodies = []
    for pixels in open_source("cifar10-test").read(range(500)):
        file = io.BytesIO()
        Image.fromarray(pixels).save(file, "PNG")
        bodies.append(file.getvalue())
    return bodies, {"classes": "cifar10"}


def measure(kind="features", connections=64, seconds=10.0, rounds=5):
    """Yield a row for each round; the first round warms up and is left out."""
    chance = np.random.default_rng(0)
    bodies, first = bodies_of(kind, chance)
    encoder = [ENCODER] if kind == "images" else []
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        service = stack.enter_context(running(_SERVICE, folder, SERVICE_PORT, *encoder))
        bare = stack.enter_context(running(_BARE, folder, BARE_PORT, *encoder))
        asyncio.run(create(first))

        def observe(worker):
            return f"/v1/streams/s{worker % STREAMS}/observe", bodies[chance.integers(len(bodies))], _TYPES[kind]

        for turn in range(rounds + 1):
            row = {}
            for name, port, process in (("bare", BARE_PORT, bare), ("observe", SERVICE_PORT, service)):
                before = processor_seconds(process)
                times, took = asyncio.run(closed_loop(HOST, port, observe, connections, seconds))
                row[name] = {
                    "per_second": len(times) / took,
                    "p99_ms": 1000 * float(np.quantile(times, 0.99)),
                    "processor_ms": 1000 * (processor_seconds(process) - before) / len(times),
                }
            if turn:
                row["rate_ratio"] = row["observe"]["per_second"] / row["bare"]["per_second"]
                row["p99_ratio"] = row["observe"]["p99_ms"] / row["bare"]["p99_ms"]
                yield row


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kind", choices=[*_TYPES], nargs="?", default="features", help="What is observed.")
    parser.add_argument("--seconds", type=float, default=10.0, help="Seconds per turn (default: 10).")
    parser.add_argument("--rounds", type=int, default=5, help="Rounds after the warm-up (default: 5).")
    given = parser.parse_args()
    found = []
    for measured in measure(given.kind, seconds=given.seconds, rounds=given.rounds):
        print(json.dumps(measured), flush=True)
        found.append(measured)
    for ratio in ("rate_ratio", "p99_ratio"):
        print(f"{ratio}: median {np.median([row[ratio] for row in found]):.2f}")

"""Compare rows and frames sent to the service in one process with the bare engine: `python -m benchmarks.streaming`.

Rounds of all take turns on this machine, so that the ratio depends little on what else the machine does. The sender is
another process than the service, and its rows are encoded before the clock starts.
"""

import argparse
import asyncio
import base64
import json
import os
import statistics
import tempfile
import time

import numpy as np

from benchmarks.load import Connection
from benchmarks.local_service import _SERVICE, HOST, running
from benchmarks.timing import RESULTS, machine
from protodcs import StreamDCS

PORT = 8476
CLASSES, DIMENSION, BATCH = 100, 512, 256


def bare_rate(engine, features):
    """Rows per second of the engine, in batches."""
    start = time.perf_counter()
    for first in range(0, len(features), BATCH):
        engine.observe_many(features[first : first + BATCH])
    return len(features) / (time.perf_counter() - start)


def chunks(features, name):
    """The body of a request, in chunks of one batch."""
    lines = [
        json.dumps({"key": f"{name}-{number}", "feature": base64.b64encode(row.tobytes()).decode()}).encode() + b"\n"
        for number, row in enumerate(features)
    ]
    for first in range(0, len(lines), BATCH):
        body = b"".join(lines[first : first + BATCH])
        yield b"%x\r\n%b\r\n" % (len(body), body)
    yield b"0\r\n\r\n"


async def streamed_rate(stream, body, rows):
    """Rows per second from the first byte sent to the last answer."""
    reader, writer = await asyncio.open_connection(HOST, PORT, limit=2**20)
    start = time.perf_counter()
    writer.write(
        f"POST /v1/streams/{stream}/observe:stream HTTP/1.1\r\nHost: {HOST}\r\n"
        "Content-Type: application/x-ndjson\r\nTransfer-Encoding: chunked\r\n\r\n".encode()
    )

    async def send():
        for chunk in body:
            writer.write(chunk)
            await writer.drain()

    sending = asyncio.create_task(send())
    answers = 0
    while answers < rows:
        piece = await reader.read(2**18)
        if not piece:
            raise RuntimeError(f"{answers} of {rows} rows were answered")
        answers += piece.count(b'"position"')
    seconds = time.perf_counter() - start
    await sending
    writer.close()
    return rows / seconds


async def framed_rate(stream, frames, rows, name):
    """Rows per second of binary frames with a key each, two under way at any time."""
    waiting = iter(enumerate(frames))

    async def send():
        connection = Connection(HOST, PORT)
        for number, frame in waiting:
            path = f"/v1/streams/{stream}/observe?count={BATCH}"
            status, answer = await connection.post(path, frame, "application/x-float32", f"{name}-{number}")
            if status != 200:
                raise RuntimeError(answer)
        connection.close()

    start = time.perf_counter()
    await asyncio.gather(send(), send())
    return rows / (time.perf_counter() - start)


async def create(prototypes):
    connection = Connection(HOST, PORT)
    body = json.dumps({"id": "s", "prototypes": prototypes.tolist()}).encode()
    status, answer = await connection.post("/v1/streams", body, "application/json")
    if status != 201:
        raise RuntimeError(answer)


def ratio_of(rates, column):
    """The median ratio to the bare engine, the lowest and the highest, as cells of a table."""
    ratios = sorted(row[column] / row[0] for row in rates)
    return f"{statistics.median(ratios):.2f} | {ratios[0]:.2f} to {ratios[-1]:.2f}"


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="Rounds of all (default: 5).")
    parser.add_argument("--rows", type=int, default=10_240, help="Rows in each round (default: 10,240).")
    parser.add_argument("--write", action="store_true", help="Write docs/results/streaming.md.")
    chosen = parser.parse_args()
    load = os.getloadavg()[0]
    random = np.random.default_rng(0)
    prototypes = random.normal(size=(CLASSES, DIMENSION)).astype(np.float32)
    near = prototypes[random.integers(CLASSES, size=chosen.rows)]
    features = (near + random.normal(size=near.shape)).astype("<f4")
    engine = StreamDCS(prototypes)
    rates = []
    with tempfile.TemporaryDirectory() as folder, running(_SERVICE, folder, PORT):
        asyncio.run(create(prototypes))
        for number in range(chosen.rounds):
            body = list(chunks(features, f"round-{number}"))
            frames = [features[first : first + BATCH].tobytes() for first in range(0, len(features), BATCH)]
            bare = bare_rate(engine, features)
            streamed = asyncio.run(streamed_rate("s", body, chosen.rows))
            framed = asyncio.run(framed_rate("s", frames, chosen.rows, f"frames-{number}"))
            rates.append((bare, streamed, framed))
            print(f"rows/s: bare engine {bare:,.0f}, NDJSON {streamed:,.0f}, frames {framed:,.0f}", flush=True)
    about = machine()
    bare, streamed, framed = (statistics.median(column) for column in zip(*rates, strict=True))
    text = f"""# Streamed observe

`python -m benchmarks.streaming --write`, {about["cores"]} cores of {about["machine"]}, Python
{about["versions"]["python"]}, compiled step. Load average before the run: {load:.1f}.

![Rows per second of the bare engine, NDJSON and frames, and their ratios to it with the target](streaming.png)

Features are random (seed 0): a prototype plus noise. {CLASSES} classes, {DIMENSION} dimensions, StreamDCS with its
default settings, the service in one process. Each of {chosen.rounds} rounds sends {chosen.rows:,} rows in batches of
{BATCH}: as NDJSON over one connection, with a key for each row, and as frames of float32 numbers over two connections,
with a key for each frame. The bare engine runs `observe_many` on the same batches in the process of the sender. Each
answer comes after its row is durable in SQLite (`synchronous=FULL`). Medians of the rounds, also of the ratio in each.

| | rows per second | of the bare engine | low to high |
|---|---:|---:|---:|
| bare engine | {bare:,.0f} | | |
| NDJSON | {streamed:,.0f} | {ratio_of(rates, 1)} |
| frames | {framed:,.0f} | {ratio_of(rates, 2)} |
"""
    print(text)
    if chosen.write:
        (RESULTS / "streaming.md").write_text(text)


if __name__ == "__main__":
    main()

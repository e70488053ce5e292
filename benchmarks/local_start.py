"""Measure start, memory, idle load and stop of the service in one process: `protodcs serve --encoder demo`."""

import argparse
import io
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import httpx
import numpy as np
from PIL import Image

from benchmarks.local_service import processor_seconds

PORT = 8476
URL = f"http://127.0.0.1:{PORT}"
CLASSES = ["anchor", "bell", "cup", "fish", "house", "key", "leaf", "moon", "star", "tree"]


def descendants(process):
    """Return the number of processes below this one."""
    found, parents = 0, [process.pid]
    while parents:
        tasks = Path(f"/proc/{parents.pop()}/task").glob("*/children")
        children = [int(child) for task in tasks for child in task.read_text().split()]
        found += len(children)
        parents += children
    return found


def proportional_megabytes(process):
    """Return the proportional set size of a process in MB."""
    lines = Path(f"/proc/{process.pid}/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("Pss:")) * 1024 / 1e6


def wait_until_ready(process, client):
    """Wait until the service is ready."""
    while process.poll() is None:
        try:
            if client.get("/v1/ready").status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.02)
    raise RuntimeError(f"The service ended with status {process.returncode}.")


def measure(idle_seconds=30.0):
    """Start and stop the service once. Return what was measured."""
    program = shutil.which("protodcs", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    load = os.getloadavg()[0]
    with (
        tempfile.TemporaryDirectory() as folder,
        (Path(folder) / "log").open("w+") as log,
        httpx.Client(base_url=URL, timeout=60) as client,
    ):
        command = [program, "serve", "--encoder", "demo", "--port", str(PORT), "--store", f"sqlite:{folder}/streams"]
        started = time.monotonic()
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        try:
            wait_until_ready(process, client)
            ready, used = time.monotonic() - started, processor_seconds(process)
            client.post("/v1/streams", json={"id": "s", "classes": CLASSES}).raise_for_status()
            image = io.BytesIO()
            Image.fromarray(np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)).save(image, "PNG")
            headers = {"Content-Type": "image/png"}
            client.post("/v1/streams/s/observe", content=image.getvalue(), headers=headers).raise_for_status()
            row = {
                "load_average": load,
                "ready_seconds": ready,
                "ready_processor_seconds": used,
                "pss_megabytes": proportional_megabytes(process),
                "processes": 1 + descendants(process),
            }
            before = processor_seconds(process)
            time.sleep(idle_seconds)
            row["idle_percent"] = 100 * (processor_seconds(process) - before) / idle_seconds
            written = log.tell()
            process.send_signal(signal.SIGINT)
            stopped = time.monotonic()
            row["exit_status"] = process.wait(60)
            row["exit_seconds"] = time.monotonic() - stopped
            log.seek(written)
            row["printed"] = log.read().splitlines()
            return row
        finally:
            process.kill()
            process.wait()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--starts", type=int, default=5, help="Number of starts (default: 5).")
    parser.add_argument("--idle", type=float, default=30.0, help="Seconds of each idle measurement (default: 30).")
    given = parser.parse_args()
    rows = []
    for _ in range(given.starts):
        rows.append(measure(given.idle))
        print(json.dumps(rows[-1]), flush=True)
    for name in (
        "ready_seconds",
        "ready_processor_seconds",
        "pss_megabytes",
        "processes",
        "idle_percent",
        "exit_seconds",
    ):
        print(f"{name}: median {statistics.median(row[name] for row in rows):.2f}")

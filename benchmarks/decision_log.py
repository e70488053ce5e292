"""Measure the decision log of the service in one process: pages of a large log, its size, purges, and its cost.

`python -m benchmarks.decision_log --write` fills a log with ten million entries, which takes some minutes and 2 GB.
"""

import argparse
import asyncio
import json
import os
import random
import shutil
import sqlite3
import tempfile
import time
from contextlib import ExitStack, closing
from datetime import datetime
from pathlib import Path

import httpx
import numpy as np

from benchmarks.load import closed_loop
from benchmarks.local_service import CLASSES, DIMENSION, HOST, STREAMS, create, processor_seconds, running
from benchmarks.timing import RESULTS, machine
from protodcs.serve.log.entries import LogEntry, LogQuery, Purge
from protodcs.serve.log.export import as_datetime
from protodcs.serve.store.sqlite import DATABASE, SqliteStore
from protodcs.serve.store.values import Batch, Checkpoint

PORTS = {"with the log": 8494, "without the log": 8496}
BATCH = 256
_AT_ONCE = 5000
# Entries that are written through the store. SQLite copies them to get the others, which is faster.
_WRITTEN = 500_000
_PAGES = 300
_SERVICE = """
import sys
from protodcs.serve.runtime.service import serve
from protodcs.serve.settings import ServeConfig
folder, port = sys.argv[1:]
config = ServeConfig(
    store=f"sqlite:{folder}/streams",
    audit=f"{folder}/audit",
    port=int(port),
    log_format="off",
    log_entries=ENTRIES,
    log_bytes=1 << 40,
)
serve(config, lambda _: None)
"""


def entries(first, count, start, chance):
    """Return log entries of one stream, ten per second: 100 classes, 20 % unknown, 0.1 % unsure, each with an image."""
    classes, dice = chance.integers(0, CLASSES, count), chance.random(count)
    p_unknown, score = chance.random(count), chance.normal(size=count)
    return [
        LogEntry(
            first + row,
            start + 100 * (first + row),
            f"{first + row:032x}",
            f"camera-7/{first + row:09d}.jpg",
            "unknown" if dice[row] < 0.2 else "unsure" if dice[row] < 0.201 else "known",
            bool(dice[row] >= 0.2),
            f"class {classes[row]}",
            float(p_unknown[row]),
            float(score[row]),
            None,
        )
        for row in range(count)
    ]


async def fill(folder, rows, start):
    """Write a log, its first part through the store. Return the seconds for an entry of that part."""
    chance, began = np.random.default_rng(0), time.perf_counter()
    store = SqliteStore(folder)
    await store.put_shared("blob", b"blob")
    await store.create("s", b"spec", "blob")
    fence = (await store.acquire("s", "benchmark", "1")).fence
    written = min(rows, _WRITTEN)
    for first in range(0, written, _AT_ONCE):
        count = min(_AT_ONCE, written - first)
        log = entries(first, count, start, chance)
        writes = [Batch("s", fence, first, [b""] * count, b"", log), Checkpoint("s", fence, first + count, b"")]
        if await store.commit(writes) != [None, None]:
            raise RuntimeError("a write failed")
    await store.close()
    seconds = (time.perf_counter() - began) / written
    copy(folder, written, rows)
    return seconds


def copy(folder, written, rows):
    """Copy the first entries inside SQLite until the log has so many; each copy is later and has other images."""
    with closing(sqlite3.connect(folder / DATABASE, isolation_level=None)) as database:
        (base,) = database.execute("SELECT min(key) FROM log").fetchone()
        for first in range(written, rows, written):
            database.execute(
                "INSERT INTO log SELECT key + ?1, time + 100 * ?1, randomblob(16), "
                "printf('camera-7/%09d.jpg', key + ?1 - ?2), outcome, nearest, p_unknown, score, reason, thumbnail "
                "FROM log WHERE key >= ?2 AND key < ?2 + ?3 ORDER BY key",
                (first, base, min(written, rows - first)),
            )
            print(f"{first + written:,} entries", flush=True)
        database.execute("DELETE FROM log_sizes")
        database.execute(
            "INSERT INTO log_sizes SELECT key >> 32, CAST(strftime('%Y%m', time / 1000, 'unixepoch') AS INTEGER) "
            "AS month, count(*), sum(110 + length(image_ref)) FROM log GROUP BY key >> 32, month"
        )


def pages(rows, start, dice):
    """Yield the kind and the query of pages at random places of the log."""

    def moment():
        return as_datetime(start + 100 * dice.randrange(rows)).isoformat()

    while True:
        yield "newest", {}
        yield "at a position", {"cursor": dice.randrange(rows)}
        yield "from a time on, oldest first", {"since": moment(), "order": "oldest"}
        yield "unknown before a time", {"until": moment(), "outcome": "unknown"}
        yield "one label before a time", {"until": moment(), "label": f"class {dice.randrange(CLASSES)}"}
        yield "unsure, of one class", {"nearest_class": f"class {dice.randrange(CLASSES)}", "outcome": "unsure"}
        yield "a class without entries", {"label": "nothing"}


def read_pages(client, rows, start):
    """Return the milliseconds of pages of 100 entries over HTTP, by kind."""
    times, others, made = {}, [], pages(rows, start, random.Random(0))
    for _ in range(_PAGES):
        for _ in range(7):
            kind, query = next(made)
            began = time.perf_counter()
            answer = client.get("/v1/streams/s/decisions", params=query)
            times.setdefault(kind, []).append(1000 * (time.perf_counter() - began))
            answer.raise_for_status()
        began = time.perf_counter()
        client.get("/v1/health").raise_for_status()
        others.append(1000 * (time.perf_counter() - began))
    return {**times, "all pages": np.concatenate(list(times.values())), "`GET /v1/health`, for comparison": others}


async def store_reads(folder, rows, start):
    """Return the milliseconds of processor time of the same pages inside the store, by kind, without HTTP."""
    times, made, store = {}, pages(rows, start, random.Random(0)), SqliteStore(folder)
    for _ in range(7 * _PAGES):
        kind, given = next(made)
        query = LogQuery(
            since=_milliseconds(given.get("since")),
            until=_milliseconds(given.get("until")),
            outcome=given.get("outcome"),
            label=given.get("label"),
            nearest_class=given.get("nearest_class"),
            after=given.get("cursor"),
            newest_first="order" not in given,
        )
        began = time.process_time()
        await store.read_log("s", query)
        times.setdefault(kind, []).append(1000 * (time.process_time() - began))
    await store.close()
    return {**times, "all pages": np.concatenate(list(times.values()))}


def _milliseconds(moment):
    return None if moment is None else int(1000 * datetime.fromisoformat(moment).timestamp())


async def purges(folder, rows, start):
    """Return the seconds of purges of one image, of a hundredth and of a tenth of the log, and how many entries."""
    store, found = SqliteStore(folder), []
    middle = start + 50 * rows
    for name, wanted in (
        ("one image", Purge(image_ref=f"camera-7/{rows // 3:09d}.jpg")),
        ("1 % of the log, by time", Purge(since=middle, until=middle + rows)),
        ("10 % of the log, by time", Purge(until=start + 10 * rows)),
    ):
        began = time.perf_counter()
        deleted = await store.purge_log("s", wanted)
        found.append({"purge": name, "entries": deleted, "seconds": time.perf_counter() - began})
        print(json.dumps(found[-1]), flush=True)
    await store.close()
    return found


def fill_log(rows, folder):
    """Fill a log in a folder, unless it is there. Return its entries, its first time, and seconds per entry."""
    made = Path(folder) / "made.json"
    if not made.exists():
        start = int(1000 * time.time()) - 100 * rows
        seconds = asyncio.run(fill(Path(folder) / "streams", rows, start))
        made.write_text(json.dumps([rows, start, seconds]))
    return json.loads(made.read_text())


def large_log(rows, folder):
    """Return the figures of a large log in a folder."""
    streams = Path(folder) / "streams"
    rows, start, seconds = fill_log(rows, folder)
    size = sum(file.stat().st_size for file in streams.iterdir() if file.name.startswith(DATABASE))
    program = _SERVICE.replace("ENTRIES", str(10 * rows))
    with (
        running(program, folder, PORTS["with the log"]),
        httpx.Client(base_url=f"http://{HOST}:{PORTS['with the log']}", timeout=60) as client,
    ):
        times = read_pages(client, rows, start)
    inside = asyncio.run(store_reads(streams, rows, start))
    found = {
        "rows": rows,
        "write_seconds_per_entry": seconds,
        "bytes": size,
        "pages": [
            {
                "page": kind,
                "p50_ms": float(np.quantile(some, 0.5)),
                "p99_ms": float(np.quantile(some, 0.99)),
                "store_p99_ms": float(np.quantile(inside[kind], 0.99)) if kind in inside else None,
            }
            for kind, some in times.items()
        ],
    }
    print(json.dumps(found), flush=True)
    return {**found, "purges": asyncio.run(purges(streams, rows, start))}


def cost(seconds, rounds):
    """Return observed features per second with and without the log; both services run and take turns."""
    chance = np.random.default_rng(0)
    features = chance.normal(size=(64 * BATCH, DIMENSION)).astype("<f4")
    bodies = [features[at : at + BATCH].tobytes() for at in range(0, len(features), BATCH)]
    prototypes = chance.normal(size=(CLASSES, DIMENSION))
    rows, processes = [], {}
    with ExitStack() as stack:
        for name, port in PORTS.items():
            folder = stack.enter_context(tempfile.TemporaryDirectory())
            entries_of = "1_000_000" if name == "with the log" else "0"
            processes[name] = stack.enter_context(running(_SERVICE.replace("ENTRIES", entries_of), folder, port))
            asyncio.run(create({"prototypes": prototypes.tolist()}, port))
        for samples, connections in ((BATCH, 4), (1, 64)):

            def observe(worker, samples=samples):
                body = bodies[chance.integers(len(bodies))][: 4 * DIMENSION * samples]
                return f"/v1/streams/s{worker % STREAMS}/observe?count={samples}", body, "application/octet-stream"

            rates, busy = ({name: [] for name in PORTS} for _ in range(2))
            for turn in range(rounds + 1):
                for name, port in PORTS.items():
                    before = processor_seconds(processes[name])
                    times, took = asyncio.run(closed_loop(HOST, port, observe, connections, seconds))
                    if turn:
                        rates[name].append(samples * len(times) / took)
                        used = processor_seconds(processes[name]) - before
                        busy[name].append(1e6 * used / (samples * len(times)))
            ratios = np.asarray(rates["with the log"]) / np.asarray(rates["without the log"])
            low, middle, high = np.quantile(ratios, (0.25, 0.5, 0.75))
            rows.append(
                {
                    "samples": samples,
                    "with_log": float(np.median(rates["with the log"])),
                    "without_log": float(np.median(rates["without the log"])),
                    "processor_with_log": float(np.median(busy["with the log"])),
                    "processor_without_log": float(np.median(busy["without the log"])),
                    "ratio": float(middle),
                    "low": float(low),
                    "high": float(high),
                }
            )
            print(json.dumps(rows[-1]), flush=True)
    return rows


def as_markdown(found):
    """Return the page."""
    log, about = found["log"], found["machine"]
    lines = [
        "# The decision log\n",
        f"`python -m benchmarks.decision_log --write`, {about['cores']} cores of {about['machine']}. Seed 0, synthetic "
        f"entries and features. Load average before the run: {found['load']:.1f}.\n",
        "![Latency of nine kinds of requests to a log of ten million entries, and the throughput with the "
        "log over that without it](decision-log.png)\n",
        f"A log of {log['rows']:,} entries of one stream in SQLite: 100 classes, 20 % unknown, 0.1 % unsure, an image "
        f"reference of 22 bytes each, no thumbnails. It takes {log['bytes'] / 1e9:.2f} GB on disk, "
        f"{log['bytes'] / log['rows']:.0f} bytes per entry. The store wrote the first entries, and "
        "SQLite copied them to get the others. Pages of 100 entries are read over HTTP, one request at a time, "
        f"{_PAGES} of each kind. The last column is the processor time of the same pages inside the store:\n",
        "| page | p50 ms | p99 ms | processor time in the store, p99 ms |\n|---|---|---|---|",
        *(
            f"| {row['page']} | {row['p50_ms']:.1f} | {row['p99_ms']:.1f} | "
            f"{'' if row['store_p99_ms'] is None else format(row['store_p99_ms'], '.1f')} |"
            for row in log["pages"]
        ),
        "\nPurges, which overwrite the entries on disk:\n",
        "| purge | entries | seconds |\n|---|---|---|",
        *(f"| {row['purge']} | {row['entries']:,} | {row['seconds']:.2f} |" for row in log["purges"]),
    ]
    if found["cost"]:
        lines += [
            "\nObserved features per second with the log and without it (`log_entries: 0`). Two services of one "
            f"process each, {CLASSES} classes, {DIMENSION} dimensions, take turns on this machine, with the load. "
            f"Medians of {found['rounds']} rounds of {found['seconds']:.0f} s. *Low to high*: the quartiles of "
            "the ratios. *Processor*: the processor time of the service per sample.\n",
            "| samples per request | with the log | without | ratio | low to high | processor with the log | without |"
            "\n|---|---|---|---|---|---|---|",
            *(
                f"| {row['samples']} | {row['with_log']:,.0f} | {row['without_log']:,.0f} | {row['ratio']:.2f} | "
                f"{row['low']:.2f} to {row['high']:.2f} | {row['processor_with_log']:.0f} µs | "
                f"{row['processor_without_log']:.0f} µs |"
                for row in found["cost"]
            ),
        ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=10_000_000, help="Entries of the large log (default: 10,000,000).")
    parser.add_argument("--seconds", type=float, default=5.0, help="Seconds per turn of the cost (default: 5).")
    parser.add_argument("--rounds", type=int, default=5, help="Rounds of the cost after the warm-up (default: 5).")
    parser.add_argument("--folder", help="Folder of the large log, deleted at the end (default: a temporary one).")
    parser.add_argument("--fill", action="store_true", help="Only fill the large log; a later run measures it.")
    parser.add_argument("--write", action="store_true", help="Write docs/results/decision-log.md.")
    given = parser.parse_args()
    folder = given.folder or tempfile.mkdtemp(prefix="decision-log-")
    if given.fill:
        Path(folder).mkdir(parents=True, exist_ok=True)
        fill_log(given.rows, folder)
        raise SystemExit
    result = {"machine": machine(), "rounds": given.rounds, "seconds": given.seconds, "load": os.getloadavg()[0]}
    result["cost"] = cost(given.seconds, given.rounds)
    result["log"] = large_log(given.rows, folder)
    shutil.rmtree(folder)
    print(as_markdown(result))
    if given.write:
        (RESULTS / "decision-log.md").write_text(as_markdown(result))
        (RESULTS / "decision-log.json").write_text(json.dumps(result, indent=1) + "\n")

"""Measure a million streams in PostgreSQL: bytes, memory, pages of the list, loading, and the death of a process.

`python -m benchmarks million_streams [--quick] [--write]`. It takes about twenty minutes and needs 10 GB of disk.

Two streams are made through the service: a new one, and one with 20 samples. SQL copies their rows, so that all streams
are as the service would have stored them; the service's own check of the store confirms it. Then several processes
serve them. Streams are chosen with seed 0.
"""

import asyncio
import base64
import json
import os
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import numpy as np

from benchmarks.load import Connection
from benchmarks.timing import ROOT, clip_stream, table

NAME = "million_streams"
CLASSES, SAMPLES, STREAM = 20, 20, "dtd"
STREAMS, QUICK, ACTIVE = 1_000_000, 10_000, 0.01
PROCESSES = 4
# How many pages of the list, and how many loads of streams, are measured.
PAGES, LOADS = 300, 900
# Requests under way at once after a process was killed.
CONNECTIONS = 256
# Streams that are copied by one statement.
_STEP = 100_000
_POSTGRES = {"shared_buffers": "1GB", "max_wal_size": "8GB", "checkpoint_timeout": "15min"}
_FEATURE = "application/octet-stream"


class Measured:
    """A service of several processes with many streams; a context manager.

    Args:
        streams: how many there are. Those with the first numbers are active.
    """

    def __init__(self, streams):
        self.streams, self.active = streams, int(ACTIVE * streams)
        self._stack = ExitStack()

    def __enter__(self):
        sys.path.insert(0, str(ROOT / "tests"))
        from service.postgres import PostgresServer

        self._folder = Path(self._stack.enter_context(tempfile.TemporaryDirectory()))
        self.postgres = self._stack.enter_context(PostgresServer(**_POSTGRES))
        self.url = self.postgres.database()
        return self

    def __exit__(self, *_):
        self._stack.close()

    def start(self, name):
        """Start a process, and return it."""
        from service.rig import Service

        folder = self._folder / name
        folder.mkdir(exist_ok=True)
        service = Service(folder, store=self.url, audit=str(folder / "audit"), log_level="warning")
        return self._stack.enter_context(service)

    def sql(self, statement):
        """Execute one statement. Return its rows."""
        return self.postgres.sql(statement, self.url)

    def size(self):
        """Return the bytes of the database."""
        return self.sql("SELECT pg_database_size(current_database())")[0][0]

    def sizes(self):
        """Return the bytes of each table, its indexes included."""
        query = "SELECT relname, pg_total_relation_size(relid) FROM pg_stat_user_tables ORDER BY 2 DESC"
        return dict(self.sql(query))

    def id_of(self, number):
        """Return the id of a stream."""
        return f"s{number:07d}"


def fill(measured):
    """Make a new stream and an active one, and copy their rows. Return the features of the active one."""
    from protodcs import Client
    from protodcs.serve.store.schema import POSITION_BITS, USAGE, for_postgres

    prototypes, features = clip_stream(STREAM, CLASSES)
    service = measured.start("template")
    with Client(service.base_url) as client:
        client.create("new", prototypes=prototypes)
        active = client.create("active", prototypes=prototypes)
        for feature in features[:SAMPLES]:
            active.observe(feature)
    service.stop()
    columns = (
        "SELECT table_name, column_name FROM information_schema.columns WHERE table_schema = 'public' "
        # Leases of streams are none of what is stored of them, and rows of a month are copied with those of the log.
        "AND table_name <> 'taken' AND table_name !~ '_[0-9]{6}$'"
    )
    tables = {}
    for name, column in measured.sql(f"{columns} ORDER BY table_name, ordinal_position"):
        tables.setdefault(name, []).append(column)
    first_active, first_new = 10, 10 + measured.active
    for template, start, stop in (
        ("active", first_active, first_new),
        ("new", first_new, first_active + measured.streams),
    ):
        ((number,),) = measured.sql(f"SELECT number FROM streams WHERE id = '{template}'")
        for low in range(start, stop, _STEP):
            high = min(low + _STEP, stop) - 1
            changed = {
                "number": "n",
                "stream": "n",
                "id": f"convert_to('s' || lpad((n - {first_active})::text, 7, '0'), 'UTF8')",
                "key": f"key - ({number}::bigint << {POSITION_BITS}) + (n::bigint << {POSITION_BITS})",
            }
            for name, names in tables.items():
                if name == "streams":
                    condition = f"number = {number}"
                elif "stream" in names:
                    condition = f"stream = {number}"
                elif "key" in names:
                    condition = f"key >> {POSITION_BITS} = {number}"
                else:
                    continue
                # The ids of notices are given out by the database.
                names = [column for column in names if column != "id" or name == "streams"]
                values = ", ".join(changed.get(column, column) for column in names)
                measured.sql(
                    f"INSERT INTO {name} ({', '.join(names)}) OVERRIDING SYSTEM VALUE SELECT {values} "
                    f"FROM {name}, generate_series({low}, {high}) AS n WHERE {condition}"
                )
    measured.sql("SELECT setval(pg_get_serial_sequence('streams', 'number'), max(number)) FROM streams")
    measured.sql("DELETE FROM usage")
    measured.sql(f"INSERT INTO usage {for_postgres(USAGE)}")
    measured.sql("VACUUM ANALYZE")
    measured.sql("CHECKPOINT")
    return features


def bytes_of_streams(measured):
    """Return what a new stream takes, and what each sample adds: sizes of tables by counts of rows."""
    sizes = measured.sizes()
    of_samples = {name for name in sizes if name == "records" or name.startswith("log")}
    samples = measured.active * SAMPLES
    return {
        "database_bytes": measured.size(),
        "bytes_per_stream": sum(size for name, size in sizes.items() if name not in of_samples) / measured.streams,
        "record_bytes": sizes["records"] / samples,
        "log_bytes": sum(size for name, size in sizes.items() if name.startswith("log")) / samples,
        "tables": {name: size for name, size in sizes.items() if size > 0.001 * measured.size()},
    }


def pages(measured, client, random):
    """Return milliseconds of the first page, the last one and pages between, with 100 streams each."""
    after = {
        "first": [{}] * PAGES,
        "last": [cursor_after(measured.id_of(measured.streams - 101))] * PAGES,
        "any": [cursor_after(measured.id_of(number)) for number in random.integers(measured.streams, size=PAGES)],
    }
    found = {}
    for name, cursors in after.items():
        times = []
        for cursor in cursors:
            start = time.perf_counter()
            page = client.get("/v1/streams", params={"limit": 100, **cursor}).raise_for_status().json()
            times.append(time.perf_counter() - start)
        if name == "last" and (len(page["streams"]), page["next_cursor"]) != (100, None):
            raise RuntimeError("this is not the last page")
        found[name] = quantiles(times)
    start = time.perf_counter()
    client.get("/v1/streams", params={"limit": 100, "sort": "-last_seen"}).raise_for_status()
    found["by last_seen"] = {"seconds": time.perf_counter() - start}
    return found


def cursor_after(stream):
    """Return the parameter with which the list goes on after a stream."""
    return {"cursor": base64.urlsafe_b64encode(json.dumps(["id", stream]).encode()).decode()}


def loads(measured, client, features, random):
    """Return milliseconds of a peek into streams that are not loaded: new ones and active ones in turns."""
    numbers = {
        "active": random.choice(measured.active, min(LOADS // 2, measured.active // 2), replace=False),
        "new": measured.active + random.choice(measured.streams - measured.active, LOADS // 2, replace=False),
    }
    times = {"active": [], "new": [], "loaded": []}
    for pair in zip(*numbers.values(), strict=False):
        for kind, number in zip(numbers, pair, strict=True):
            stream = client.stream(measured.id_of(number))
            start = time.perf_counter()
            found = stream.peek(features[SAMPLES])
            times[kind].append(time.perf_counter() - start)
            if found.decision.sequence != (SAMPLES if kind == "active" else 0):
                raise RuntimeError(f"stream {number} has not what it should have: {found}")
        start = time.perf_counter()
        stream.peek(features[SAMPLES])
        times["loaded"].append(time.perf_counter() - start)
    return {kind: quantiles(found) for kind, found in times.items()}


async def ask_all(ports, streams, body, until):
    """Ask for a peek into each stream until it gets one, over some connections.

    Return the seconds until each answered, and the retries.
    """
    waiting, answered, retries = list(streams), [], 0
    start = time.perf_counter()

    async def work(number):
        nonlocal retries
        connection = Connection("127.0.0.1", ports[number % len(ports)])
        while waiting:
            stream = waiting.pop()
            try:
                status, answer = await connection.post(f"/v1/streams/{stream}/peek", body, _FEATURE)
            except (OSError, EOFError):
                status, answer = 0, b""
                connection.close()
            if status == 200:
                answered.append(time.perf_counter() - start)
            elif status in (0, 409, 429, 503, 504) and time.perf_counter() - start < until:
                retries += 1
                waiting.insert(0, stream)
                await asyncio.sleep(0.05)
            else:
                raise RuntimeError(f"{stream}: {status} {answer[:300]!r}")
        connection.close()

    await asyncio.gather(*(work(number) for number in range(CONNECTIONS)))
    return answered, retries


def kill_one(measured, services, features):
    """Load all active streams, kill a process, and return the seconds until its active streams answer again."""
    from protodcs.serve.cluster.partitions import partition_of

    wait_until_shared(measured, len(services))
    owners = dict(measured.sql("SELECT number, owner FROM partitions"))
    victim = services[-1]
    mine = [
        name
        for name in map(measured.id_of, range(measured.active))
        if owners[partition_of(name)].endswith(f":{victim.settings['port']}")
    ]
    body = features[SAMPLES].astype("<f4").tobytes()
    ports = [service.settings["port"] for service in services[:-1]]
    before = processor_seconds(measured, services)
    loading, _ = asyncio.run(ask_all(ports, mine, body, 300.0))
    used = processor_seconds(measured, services) - before
    (held,) = [found for (found,) in measured.sql("SELECT count(*) FROM streams WHERE worker IS NOT NULL")]
    start = time.perf_counter()
    victim.kill()
    answered, retries = asyncio.run(ask_all(ports, mine, body, 300.0))
    wait_until_shared(measured, len(services) - 1)
    return {
        "processes": len(services),
        "asked": len(mine),
        "loaded_before": held,
        "seconds_before": max(loading),
        "processor_ms_per_load": 1000 * used / len(mine),
        "seconds_until_all": max(answered),
        "seconds_median": float(np.median(answered)),
        "retries": retries,
        "partitions_seconds": time.perf_counter() - start,
    }


def processor_seconds(measured, services):
    """Return the processor time of some processes and of the database."""
    import psutil

    pids = [*measured.postgres._processes(), *(service.pid for service in services)]
    return sum(sum(psutil.Process(pid).cpu_times()[:2]) for pid in pids)


def wait_until_shared(measured, processes):
    """Wait until each partition belongs to the living process that should own it."""
    from protodcs.serve.cluster.partitions import best_owners

    end = time.monotonic() + 120
    while True:
        living = tuple(name for (name,) in measured.sql("SELECT name FROM processes WHERE expires > clock_timestamp()"))
        owners = tuple(owner for (owner,) in measured.sql("SELECT owner FROM partitions ORDER BY number"))
        if len(living) == processes and owners == best_owners(living):
            return
        if time.monotonic() > end:
            raise RuntimeError(f"the partitions are not shared by {living}")
        time.sleep(0.05)


def memory(service):
    """Return the proportional set size of a process in bytes."""
    import psutil

    return psutil.Process(service.pid).memory_full_info().pss


def quantiles(seconds):
    """Return p50 and p99 in milliseconds, and how many there are."""
    p50, p99 = 1000 * np.quantile(seconds, (0.5, 0.99))
    return {"p50_ms": float(p50), "p99_ms": float(p99), "count": len(seconds)}


def measure(quick=False):
    """Return one row with all figures."""
    import httpx

    from protodcs import Client
    from protodcs.serve.store.postgres import PostgresStore

    random = np.random.default_rng(0)
    with Measured(QUICK if quick else STREAMS) as measured:
        start = time.perf_counter()
        features = fill(measured)
        row = {
            "streams": measured.streams,
            "active": measured.active,
            "load_before": os.getloadavg()[0],
            "fill_seconds": time.perf_counter() - start,
            **bytes_of_streams(measured),
        }

        async def problems():
            store = await PostgresStore(measured.url, timeout=600.0).prepare()
            found = await store.find_problems()
            await store.close()
            return found

        if found := asyncio.run(problems()):
            raise RuntimeError(f"the streams are not as the service stores them: {found}")
        start = time.perf_counter()
        first = measured.start("process-0")
        row["start_seconds"] = time.perf_counter() - start
        row["memory_at_start"] = memory(first)
        with httpx.Client(base_url=first.base_url, timeout=600) as client:
            row["pages"] = pages(measured, client, random)
        with Client(first.base_url) as client:
            row["memory_after_lists"] = memory(first)
            row["loads"] = loads(measured, client, features, random)
            row["memory_after_loads"] = memory(first)
        with ThreadPoolExecutor() as pool:
            others = list(pool.map(measured.start, [f"process-{number}" for number in range(1, PROCESSES)]))
        row["kill"] = kill_one(measured, [first, *others], features)
        row["memory_at_end"] = memory(first)
        row["load_after"] = os.getloadavg()[0]
    return [row]


def as_markdown(rows):
    (row,) = rows
    pages_, loads_, kill = row["pages"], row["loads"], row["kill"]
    mega = 2**20
    lines = [
        "![Latency of six requests to a million streams, and the bytes of a stream, a sample and an entry "
        "of the decision log](million_streams.png)",
        "",
        f"{row['streams']:,} streams with {CLASSES} classes and features of 512 numbers (`{STREAM}`, CLIP ViT-B/32). "
        f"{row['active']:,} of them have {SAMPLES} samples each. The rows were copied by SQL in "
        f"{row['fill_seconds']:.0f} s.",
        "",
        *table(
            ("what", "measured"),
            (
                ("database", f"{row['database_bytes'] / 1e9:.2f} GB"),
                ("a new stream, indexes included", f"{row['bytes_per_stream']:,.0f} bytes"),
                ("a sample in the journal, until the next snapshot", f"{row['record_bytes']:,.0f} bytes"),
                ("an entry of the decision log, indexes included", f"{row['log_bytes']:,.0f} bytes"),
                ("start of a process", f"{row['start_seconds']:.1f} s"),
                ("memory of a process at its start", f"{row['memory_at_start'] / mega:.0f} MB (PSS)"),
                (f"after {3 * PAGES} pages of the list", f"{row['memory_after_lists'] / mega:.0f} MB"),
                (
                    f"with {loads_['active']['count'] + loads_['new']['count']} streams loaded",
                    f"{row['memory_after_loads'] / mega:.0f} MB",
                ),
            ),
        ),
        "",
        *table(
            ("request", "p50", "p99", "requests"),
            (
                (name, f"{found['p50_ms']:.1f} ms", f"{found['p99_ms']:.1f} ms", found["count"])
                for name, found in (
                    ("first page of the list, 100 streams", pages_["first"]),
                    ("last page", pages_["last"]),
                    ("a page after any stream", pages_["any"]),
                    ("peek into a new stream that is not loaded", loads_["new"]),
                    (f"the same with {SAMPLES} samples in the journal", loads_["active"]),
                    ("peek into a loaded stream", loads_["loaded"]),
                )
            ),
        ),
        "",
        f"A page that is sorted by anything but the id reads all streams: {pages_['by last_seen']['seconds']:.1f} s.",
        "",
        f"One of {kill['processes']} processes was killed with SIGKILL. It owned {kill['asked']:,} of the active "
        f"streams, and all processes together had {kill['loaded_before']:,} streams loaded. Then each of its active "
        f"streams was asked for a peek, {CONNECTIONS} at a time, through the other processes. Half of the streams "
        f"answered after {kill['seconds_median']:.1f} s, and all of them after {kill['seconds_until_all']:.1f} s "
        f"({kill['retries']:,} retries). All partitions belonged to living processes after "
        f"{kill['partitions_seconds']:.1f} s at the latest. Before the kill, the same requests took "
        f"{kill['seconds_before']:.1f} s and {kill['processor_ms_per_load']:.1f} ms of CPU each, the database "
        "included. Most of them loaded a stream.",
        "",
        f"Load average of the machine: {row['load_before']:.1f} before and {row['load_after']:.1f} after the run.",
    ]
    return "\n".join(lines) + "\n"

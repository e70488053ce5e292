"""Many streams on one machine: `python -m benchmarks streams`; by itself it takes numbers, as `--streams 3000`.

Every stream sees 200 samples of a real CLIP stream with K = 100 classes, each from another place on, and is unloaded.
Then single samples come to streams drawn by Zipf's law, in blocks. After each block, in the same run and on the same
thread, one plain engine observes as many samples. This is done with 1,000 streams loaded, and with a sixth of all.
Each process has one thread and its part of the streams, and all processes work at the same time. Compare the ratios:
the times depend on the machine. The folder is emptied again.
"""

import argparse
import gc
import json
import multiprocessing
import os
import queue
import shutil
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.timing import clip_stream, one_thread, table

one_thread()

import numpy as np  # noqa: E402 - the thread limits above must come first

from protodcs import ProtoDCS, Prototypes, StreamPool, methods  # noqa: E402

NAME = "streams"
CLASSES = 100
SAMPLES = 200
EXPONENTS = (1.0, 1.2)
# Visits in one block.
BLOCK = 500
# The options of each method.
OPTIONS = {"streamdcs": {}, "protodcs": {"preset": "paper"}}
# Where every queue is full there are fewer streams: a state weighs some megabytes.
SIZES = {"streamdcs": 100_000, "protodcs": 10_000}
QUICK = {"streamdcs": 600, "protodcs": 150}
# In the second run, one stream in so many is loaded.
LARGE_PART = 6
# One for each core.
PROCESSES = 2
# The folder may take about so much of the disk.
MOST_BYTES = 30e9


def resident():
    """Bytes of this process in memory."""
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def full_queues(features, prototypes):
    """The state of an engine in which every class's queue is full."""
    engine = ProtoDCS.from_options(prototypes, **OPTIONS["protodcs"])
    engine.observe_many(features)
    rng = np.random.default_rng(0)
    rows, width = prototypes.rows, prototypes.rows.shape[1]
    while len(thin := np.flatnonzero(engine._memory.counts < engine.config.cache_size)):
        # A class that the stream leaves thin is filled by made-up samples near its prototype.
        k = thin[rng.integers(len(thin))]
        noise = rng.normal(size=width) / np.sqrt(width)
        engine.observe(0.5 * rows[k] + features[rng.integers(len(features))] + 0.6 * noise)
    return engine.difference()


def fill(streams, numbers, features, prototypes, begun, folder):
    """Let the streams of these numbers begin: return bytes in memory per loaded and per stored stream, and seconds.

    There are as many places to begin from as features: after that the states come again, and are read from `folder`.
    """
    before, start, count = resident(), time.perf_counter(), len(numbers)
    marks = {}
    for i, number in enumerate(numbers):
        at = (37 * i) % len(features)
        kept = folder / str(at)
        with streams.engine(f"stream {number}") as engine:
            if i >= len(features):
                engine._memory = methods.restore(kept.read_bytes(), prototypes=prototypes, trusted=True)._memory
            else:
                if begun is not None:
                    engine._memory = methods.restore(begun, prototypes=prototypes, trusted=True)._memory
                engine.observe_many(np.take(features, range(at, at + SAMPLES), axis=0, mode="wrap"))
                if i + len(features) < count:
                    kept.write_bytes(engine.difference())
        if i + 1 in (streams.max_loaded, count // 2, count):
            marks[i + 1] = resident()
    loaded = (marks[streams.max_loaded] - before) / streams.max_loaded
    # As many are loaded at both marks, so the process grew by what stored streams take.
    stored = max(0, marks[count] - marks[count // 2]) / (count - count // 2)
    return {"loaded_bytes": loaded, "stored_bytes": stored, "fill_seconds": time.perf_counter() - start}


def load_some(streams, numbers):
    """Unload all streams, and load some of them until no more fit."""
    for name in list(streams._streams):
        streams.unload(name)
    for number in np.random.default_rng(1).permutation(numbers):
        before = len(streams._streams)
        streams.stats(f"stream {number}")
        if len(streams._streams) <= before:
            return


def zipf(count, exponent, visits, rng):
    """The streams that are visited, the most popular ones anywhere among them."""
    shares = np.cumsum(np.arange(1, count + 1) ** -exponent)
    ranks = np.searchsorted(shares, rng.random(visits) * shares[-1])
    return rng.permutation(count)[ranks]


def mix(streams, visited, features, single, together):
    """Visits to streams, and as many samples of one engine, block by block; the first half is to get there."""
    rng = np.random.default_rng(len(visited))
    half = len(visited) // 2
    for number in visited[:half]:
        streams.observe(f"stream {number}", features[rng.integers(len(features))])
    pooled, alone, loads = 0.0, 0.0, []
    together.wait()
    for first in range(half, len(visited), BLOCK):
        block = visited[first : first + BLOCK]
        samples = features[rng.integers(len(features), size=len(block))]
        for number, feature in zip(block, samples, strict=True):
            name = f"stream {number}"
            hit = name in streams._streams
            start = time.perf_counter()
            streams.observe(name, feature)
            seconds = time.perf_counter() - start
            pooled += seconds
            if not hit:
                loads.append(seconds)
        start = time.perf_counter()
        for feature in samples:
            single.observe(feature)
        alone += time.perf_counter() - start
    return {"visits": len(visited) - half, "pooled": pooled, "alone": alone, "loads": loads}


def summed(exponent, mixes):
    """What the processes did with one mix, each with its part of the visits."""
    visits, alone = sum(mixed["visits"] for mixed in mixes), sum(mixed["alone"] for mixed in mixes)
    pooled, step = sum(mixed["pooled"] for mixed in mixes), alone / visits
    loads = np.concatenate([mixed["loads"] for mixed in mixes]) - step
    # All visits are done when the last process is through with its own.
    per_second = visits / max(mixed["pooled"] for mixed in mixes)
    return {
        "exponent": exponent,
        "visits": visits,
        "hit_rate": 1.0 - len(loads) / visits,
        "per_second": per_second,
        "single_per_second": 1.0 / step,
        "ratio_of_a_core": alone / pooled,
        "ratio": per_second * step,
        # What a visit to an unloaded stream takes beyond a step: loading it, and unloading another one.
        "load_p50_us": 1e6 * float(np.median(loads)),
        "load_p99_us": 1e6 * float(np.quantile(loads, 0.99)),
        "load_worst_us": 1e6 * float(np.max(loads)),
    }


def disk(folder):
    """Return the bytes that the streams take on disk."""
    return sum(path.stat().st_blocks * 512 for path in Path(folder).rglob("streams.sqlite*"))


def check_room(count, state, folder):
    """Stop before the disk is full."""
    need = len(state) * count
    if need > MOST_BYTES * 1.1 or need > 0.9 * shutil.disk_usage(folder).free:
        sys.exit(f"error: {count} streams would take about {need / 1e9:.0f} GB of the disk: choose fewer, or a folder")


def visits_of(part, parts, count, exponent, visits, seed):
    """The streams of one part among those that are visited, twice as many as are measured."""
    # Others are the popular ones each time, so that none of them is at hand from the time before.
    visited = zipf(count, exponent, 2 * visits, np.random.default_rng([int(100 * exponent), seed]))
    return visited[visited % parts == part]


def run_part(part, parts, method, count, loaded, visits, folder, together, results):
    """What one process does with its part of the streams."""
    prototypes, features = clip_stream("dtd", CLASSES)
    prototypes = Prototypes(prototypes)
    single = methods.create(method, prototypes, **OPTIONS[method])
    single.observe_many(features[:SAMPLES])
    begun = full_queues(features, prototypes) if method == "protodcs" else None
    check_room(count, begun or single.difference(), folder)
    numbers, place = range(part, count, parts), folder / str(part)
    place.mkdir()
    with StreamPool(
        prototypes, config=single.config, method=method, folder=place / "pool", max_loaded=loaded // parts
    ) as streams:
        filled, rows = fill(streams, numbers, features, prototypes, begun, place), []
        for streams.max_loaded in (loaded // parts, max(loaded, count // LARGE_PART) // parts):
            load_some(streams, numbers)
            mixes = []
            for exponent in EXPONENTS:
                visited = visits_of(part, parts, count, exponent, visits, streams.max_loaded)
                mixes.append(mix(streams, visited, features, single, together))
            rows.append({"loaded": len(streams._streams), "mixes": mixes, "resident": resident()})
    results.put({**filled, "rows": rows, "disk": disk(place)})


def run(method, count, loaded, visits, parts, folder):
    start = multiprocessing.get_context("spawn")
    together, results = start.Barrier(parts), start.Queue()
    shared = (parts, method, count, loaded, visits, folder, together, results)
    processes = [start.Process(target=run_part, args=(part, *shared)) for part in range(parts)]
    for process in processes:
        process.start()
    found = []
    while len(found) < parts:
        try:
            found.append(results.get(timeout=1))
        except queue.Empty:
            if any(process.exitcode for process in processes):
                for process in processes:
                    process.terminate()
                    process.join()
                sys.exit("error: a process of the benchmark failed; see above")
    for process in processes:
        process.join()
    common = {
        "method": method,
        "streams": count,
        "processes": parts,
        "loaded_bytes": float(np.mean([one["loaded_bytes"] for one in found])),
        "stored_bytes": float(np.mean([one["stored_bytes"] for one in found])),
        "disk_bytes": sum(one["disk"] for one in found) / count,
        "fill_seconds": max(one["fill_seconds"] for one in found),
    }
    rows = []
    for ones in zip(*(one["rows"] for one in found), strict=True):
        mixes = [summed(exponent, [one["mixes"][i] for one in ones]) for i, exponent in enumerate(EXPONENTS)]
        loaded, memory = (sum(one[name] for one in ones) for name in ("loaded", "resident"))
        rows.append({**common, "loaded": loaded, "resident_bytes": memory, "mixes": mixes})
    return rows


def measure(quick: bool = False, sizes=None, loaded=1000, visits=None, processes=PROCESSES, folder=None) -> list[dict]:
    sizes = sizes or (QUICK if quick else SIZES)
    rows = []
    for method, count in sizes.items():
        path = Path(tempfile.mkdtemp(prefix="streams-", dir=folder))
        try:
            here = min(loaded, max(count // 10, processes))
            rows += run(method, count, here, visits or (2_000 if quick else 20_000), processes, path)
        finally:
            shutil.rmtree(path)
    return rows


def as_markdown(rows):
    processes = rows[0]["processes"]
    lines = [
        "![Samples per second over those of one engine, with the targets, and the time to load a stream](streams.png)",
        "",
        f"Real CLIP ViT-B/32 features, K = {CLASSES}, d = 512; each stream has seen {SAMPLES} samples, with `protodcs` "
        f"(preset `paper`) upon full queues. {processes} processes of one thread, each with its part of the streams.",
        "",
    ]
    lines += table(
        ("method", "streams", "loaded", "a loaded stream", "a stored one", "on disk", "all processes"),
        (
            (
                f"`{row['method']}`", f"{row['streams']:,}", f"{row['loaded']:,}",
                f"{row['loaded_bytes'] / 1e3:,.0f} kB", f"{row['stored_bytes']:,.0f} B",
                f"{row['disk_bytes'] / 1e3:,.0f} kB", f"{row['resident_bytes'] / 2**30:.2f} GiB",
            )
            for row in rows
        ),
    )  # fmt: skip
    lines += [
        "",
        "`max_loaded` is smaller in the first row of a method than in the second.",
        "",
        "Samples come one at a time to streams drawn by Zipf's law. A single engine on one core observes as many in",
        'the same run. The ratio to it is given for one core, and for all processes together. "Load" is the time that',
        "a sample of an unloaded stream takes beyond a step; it includes unloading another stream.",
        "",
    ]
    lines += table(
        ["method", "loaded", "exponent", "found loaded", "samples/s", "one engine", "ratio, one core"]
        + ["ratio, together", "load p50", "p99", "worst"],
        (
            (
                f"`{row['method']}`", f"{row['loaded']:,}", mixed["exponent"], f"{mixed['hit_rate']:.0%}",
                f"{mixed['per_second']:,.0f}", f"{mixed['single_per_second']:,.0f}", f"{mixed['ratio_of_a_core']:.2f}",
                f"{mixed['ratio']:.2f}", f"{mixed['load_p50_us']:,.0f} us", f"{mixed['load_p99_us']:,.0f} us",
                f"{mixed['load_worst_us']:,.0f} us",
            )
            for row in rows
            for mixed in row["mixes"]
        ),
    )  # fmt: skip
    return "\n".join(lines) + "\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, help="how many; both methods have their own number else")
    parser.add_argument("--loaded", type=int, default=1000, help="how many stay in memory, a tenth of all at most")
    parser.add_argument("--visits", type=int, help="how many are measured")
    parser.add_argument("--processes", type=int, default=PROCESSES, help="one for each core")
    parser.add_argument("--method", choices=list(SIZES), help="one of them alone")
    parser.add_argument("--folder", type=Path, help="where unloaded streams are stored; it is emptied again")
    parser.add_argument("--quick", action="store_true", help="a few hundred streams")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    arguments = parser.parse_args()
    sizes = dict(QUICK if arguments.quick else SIZES)
    if arguments.method:
        sizes = {arguments.method: sizes[arguments.method]}
    if arguments.streams:
        sizes = {method: min(arguments.streams, SIZES[method]) for method in sizes}
    rows = measure(
        arguments.quick, sizes, arguments.loaded, arguments.visits, arguments.processes, arguments.folder
    )  # fmt: skip
    print(json.dumps({"benchmark": NAME, "rows": rows}) if arguments.json else as_markdown(rows))


if __name__ == "__main__":
    main()

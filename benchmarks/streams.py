"""Many streams in one process: `python -m benchmarks streams`; by itself it takes numbers, as `--streams 3000`.

Every stream sees 200 samples of a real CLIP stream with K = 100 classes, each from another place on, and goes to sleep.
Then single samples come to streams drawn by Zipf's law, in blocks; after each block, in the same run and on the same
thread, one plain engine observes as many samples: first with memory for about a fifth of the streams, then with a fixed
number of them awake. Times are of this machine; the ratios are what to look at. The folder is emptied again.
"""

import argparse
import gc
import json
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.timing import clip_stream, one_thread, table

one_thread()

import numpy as np  # noqa: E402 - the thread limits above must come first

from protodcs import Config, ProtoDCS, Prototypes, Streams  # noqa: E402

NAME = "streams"
CLASSES = 100
SAMPLES = 200
EXPONENTS = (1.0, 1.2)
# Visits in one block.
BLOCK = 500
# Where every queue is full there are fewer streams: a state weighs some megabytes.
SIZES = {"default": 100_000, "paper": 10_000}
QUICK = {"default": 600, "paper": 150}
# Bytes of memory for awake streams where there are so many streams; fewer streams get as much less.
MEMORY = 7 * 2**30
# The folder may take about so much of the disk.
MOST_BYTES = 30e9


def resident():
    """Bytes of this process in memory."""
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def full_queues(config, features, prototypes):
    """The state of an engine in which every class's queue is full."""
    engine = ProtoDCS(prototypes, config=config)
    engine.observe_many(features)
    rng = np.random.default_rng(0)
    rows, width = prototypes.rows, prototypes.rows.shape[1]
    while len(thin := np.flatnonzero(engine._memory.counts < config.cache_size)):
        # A class that the stream leaves thin is filled by made-up samples near its prototype.
        k = thin[rng.integers(len(thin))]
        noise = rng.normal(size=width) / np.sqrt(width)
        engine.observe(0.5 * rows[k] + features[rng.integers(len(features))] + 0.6 * noise)
    return engine.difference()


def fill(streams, count, features, prototypes, begun, folder):
    """Let so many streams begin: bytes in memory per awake stream and per sleeping one, and seconds.

    There are as many places to begin from as features: after that the states come again, and are read from `folder`.
    """
    before, start = resident(), time.perf_counter()
    marks = {}
    for number in range(count):
        at = (37 * number) % len(features)
        kept = folder / str(at)
        with streams.engine(f"stream {number}") as engine:
            if number >= len(features):
                engine._memory = ProtoDCS.load(kept, prototypes=prototypes)._memory
            else:
                if begun is not None:
                    engine._memory = ProtoDCS.restore(begun, prototypes=prototypes)._memory
                engine.observe_many(np.take(features, range(at, at + SAMPLES), axis=0, mode="wrap"))
                if number + len(features) < count:
                    kept.write_bytes(engine.difference())
        if number + 1 in (streams.awake, count // 2, count):
            marks[number + 1] = resident()
    awake = (marks[streams.awake] - before) / streams.awake
    # As many are awake at both marks: what the process grew by belongs to those that sleep.
    asleep = max(0, marks[count] - marks[count // 2]) / (count - count // 2)
    return awake, asleep, time.perf_counter() - start


def wake_some(streams, count):
    """Put all streams to sleep, and wake up any of them until no more stay awake."""
    for name in list(streams._streams):
        streams.sleep(name)
    for number in np.random.default_rng(1).permutation(count):
        before = len(streams._streams)
        streams.stats(f"stream {number}")
        if len(streams._streams) <= before:
            return


def zipf(count, exponent, visits, rng):
    """The streams that are visited, the most popular ones anywhere among them."""
    shares = np.cumsum(np.arange(1, count + 1) ** -exponent)
    ranks = np.searchsorted(shares, rng.random(visits) * shares[-1])
    return rng.permutation(count)[ranks]


def mix(streams, count, exponent, visits, features, single):
    """Visits by Zipf's law, and as many samples of one engine, block by block."""
    # Others are the popular ones each time, so that none of them is at hand from the time before.
    rng = np.random.default_rng([int(100 * exponent), streams.memory])
    visited = zipf(count, exponent, 2 * visits, rng)
    for number in visited[:visits]:
        streams.observe(f"stream {number}", features[rng.integers(len(features))])
    pooled, alone, wakes, hits, ratios, working = 0.0, 0.0, [], 0, [], []
    for first in range(visits, 2 * visits, BLOCK):
        block = visited[first : first + BLOCK]
        samples = features[rng.integers(len(features), size=len(block))]
        in_block, began = 0.0, time.thread_time()
        for number, feature in zip(block, samples, strict=True):
            name = f"stream {number}"
            hit = name in streams._streams
            start = time.perf_counter()
            streams.observe(name, feature)
            seconds = time.perf_counter() - start
            in_block += seconds
            hits += hit
            if not hit:
                wakes.append(seconds)
        between, start = time.thread_time(), time.perf_counter()
        for feature in samples:
            single.observe(feature)
        seconds = time.perf_counter() - start
        pooled, alone = pooled + in_block, alone + seconds
        ratios.append(seconds / in_block)
        working.append((time.thread_time() - between) / (between - began))
    step = alone / visits
    return {
        "exponent": exponent,
        "visits": visits,
        "hit_rate": hits / visits,
        "per_second": visits / pooled,
        "single_per_second": visits / alone,
        "ratio": float(np.median(ratios)),
        # The same in time of the processor alone: without waiting for the disk, or for other processes.
        "working_ratio": float(np.median(working)),
        # What a visit to a sleeping stream takes beyond a step: the wake-up, and putting another one to sleep.
        "wake_p50_us": 1e6 * (float(np.median(wakes)) - step),
        "wake_p99_us": 1e6 * (float(np.quantile(wakes, 0.99)) - step),
        "wake_worst_us": 1e6 * (float(np.max(wakes)) - step),
    }


def disk(folder):
    """Bytes that the streams take on the disk, and how many files there are."""
    sizes = [path.stat().st_blocks * 512 for path in Path(folder).rglob("*.stream")]
    return sum(sizes), len(sizes)


def check_room(count, state, visits, folder):
    """Stop before the disk is full: a file weighs about as much as a state, and every visit may add a twentieth."""
    need = len(state) * (count + len(EXPONENTS) * 2 * visits / 20)
    if need > MOST_BYTES * 1.1 or need > 0.9 * shutil.disk_usage(folder).free:
        sys.exit(f"error: {count} streams would take about {need / 1e9:.0f} GB of the disk: choose fewer, or a folder")


def run(preset, count, awake, visits, folder):
    prototypes, features = clip_stream("dtd", CLASSES)
    prototypes, config = Prototypes(prototypes), Config.preset(preset)
    single = ProtoDCS(prototypes, config=config)
    single.observe_many(features[:SAMPLES])
    begun = full_queues(config, features, prototypes) if preset == "paper" else None
    check_room(count, begun or single.difference(), visits, Path(folder).parent)
    memory = MEMORY * count // SIZES[preset]
    folder.mkdir()
    with Streams(prototypes, config=config, folder=folder / "pool", awake=awake) as streams:
        awake_bytes, asleep_bytes, seconds = fill(streams, count, features, prototypes, begun, folder)
        rows = []
        for streams.memory in (memory, 0):
            wake_some(streams, count)
            mixes = [mix(streams, count, exponent, visits, features, single) for exponent in EXPONENTS]
            rows.append({"memory": streams.memory, "awake": len(streams._streams), "mixes": mixes})
            rows[-1]["resident_bytes"] = resident()
    taken, files = disk(folder)
    common = {
        "preset": preset,
        "streams": count,
        "awake_bytes": awake_bytes,
        "asleep_bytes": asleep_bytes,
        "disk_bytes": taken / files,
        "fill_seconds": seconds,
    }
    return [{**common, **row} for row in rows]


def measure(quick: bool = False, sizes=None, awake=1000, visits=None, folder=None) -> list[dict]:
    sizes = sizes or (QUICK if quick else SIZES)
    rows = []
    for preset, count in sizes.items():
        path = Path(tempfile.mkdtemp(prefix="streams-", dir=folder))
        try:
            here = min(awake, max(count // 10, 1))
            rows += run(preset, count, here, visits or (2_000 if quick else 20_000), path / "streams")
        finally:
            shutil.rmtree(path)
    return rows


def as_markdown(rows):
    lines = [
        f"Real CLIP ViT-B/32 features, K = {CLASSES}, d = 512; each stream has seen {SAMPLES} samples, with `paper` "
        "upon full queues. One thread.",
        "",
    ]
    lines += table(
        ("preset", "streams", "awake", "an awake stream", "a sleeping one", "on disk", "the process"),
        (
            (
                f"`{row['preset']}`", f"{row['streams']:,}", f"{row['awake']:,}", f"{row['awake_bytes'] / 1e3:,.0f} kB",
                f"{row['asleep_bytes']:,.0f} B", f"{row['disk_bytes'] / 1e3:,.0f} kB",
                f"{row['resident_bytes'] / 2**30:.2f} GiB",
            )
            for row in rows
        ),
    )  # fmt: skip
    lines += [
        "",
        "The first row of a preset is with `memory` for awake streams, the second with a fixed number of them.",
        "",
        "Visits of one sample each, to streams drawn by Zipf's law, against a single engine in the same run; the",
        "second ratio is of the processor's time, without waiting for the disk or for other processes. A wake-up is",
        "what a visit to a sleeping stream takes beyond a step, with putting another one to sleep:",
        "",
    ]
    lines += table(
        ["preset", "awake", "exponent", "awake when visited", "visits/s", "one engine", "ratio", "of the processor"]
        + ["wake-up p50", "p99", "worst"],
        (
            (
                f"`{row['preset']}`", f"{row['awake']:,}", mixed["exponent"], f"{mixed['hit_rate']:.0%}",
                f"{mixed['per_second']:,.0f}", f"{mixed['single_per_second']:,.0f}", f"{mixed['ratio']:.2f}",
                f"{mixed['working_ratio']:.2f}", f"{mixed['wake_p50_us']:,.0f} us", f"{mixed['wake_p99_us']:,.0f} us",
                f"{mixed['wake_worst_us']:,.0f} us",
            )
            for row in rows
            for mixed in row["mixes"]
        ),
    )  # fmt: skip
    return "\n".join(lines) + "\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, help="how many; both presets have their own number else")
    parser.add_argument("--awake", type=int, default=1000, help="how many stay in memory, a tenth of all at most")
    parser.add_argument("--visits", type=int, help="how many are measured")
    parser.add_argument("--preset", choices=list(SIZES), help="one of them alone")
    parser.add_argument("--folder", type=Path, help="where the streams sleep; it is emptied again")
    parser.add_argument("--quick", action="store_true", help="a few hundred streams")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    arguments = parser.parse_args()
    sizes = dict(QUICK if arguments.quick else SIZES)
    if arguments.preset:
        sizes = {arguments.preset: sizes[arguments.preset]}
    if arguments.streams:
        sizes = {preset: min(arguments.streams, SIZES[preset]) for preset in sizes}
    rows = measure(arguments.quick, sizes, arguments.awake, arguments.visits, arguments.folder)
    print(json.dumps({"benchmark": NAME, "rows": rows}) if arguments.json else as_markdown(rows))


if __name__ == "__main__":
    main()

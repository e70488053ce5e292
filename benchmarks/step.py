"""The cost of one step: `python -m benchmarks step`.

For each number of classes, both methods observe a real CLIP stream from its start, block by block. After each block,
the bare `prototypes @ feature` scores the same samples on the same thread. The second half of the stream is the steady
state. Samples that put a first feature into the queue of a class are counted separately there. The slow oracle of the
tests runs in a pass of its own.
"""

from benchmarks.timing import ROOT, clip_stream, load, one_thread, table, timed

one_thread()

import numpy as np  # noqa: E402 - the thread limits above must come first

from protodcs import methods  # noqa: E402

NAME = "step"
# Classes -> stream, and how many samples the oracle is timed on.
STREAMS = {10: ("dtd", 2000), 100: ("dtd", 3000), 200: ("flowers", 4000), 1000: ("big", 100)}
# Samples that one of them does in a row, so that each finds its own arrays in the cache as it would alone.
BLOCK = 50
# Each with its options.
METHODS = {"protodcs": {"preset": "paper"}, "streamdcs": {}}
PATHS = ("not trusted", "trusted", "trusted, queue changed", "trusted, queue opened")
OPENED = 3


def measure(quick=False):
    import torch

    torch.set_num_threads(1)
    oracle_type = load(ROOT / "tests" / "oracle.py", "oracle").Oracle
    sizes = (10, 100) if quick else STREAMS
    return [row for classes in sizes for row in measure_one(classes, oracle_type, 600 if quick else None)]


def measure_one(classes, oracle_type, samples):
    name, limit = STREAMS[classes]
    prototypes, features = clip_stream(name, classes)
    features = features[:samples]
    engines = {method: methods.create(method, prototypes, **options) for method, options in METHODS.items()}
    times, paths = {name: [] for name in (*METHODS, "bare")}, []
    for block in blocks(features):
        for method, engine in engines.items():
            for feature in block:
                opened = len(engine._memory.opened) if method == "protodcs" else 0
                seconds, decision = timed(engine.observe, feature)
                times[method].append(seconds)
                if method == "protodcs":
                    opens = len(engine._memory.opened) > opened
                    paths.append(OPENED if opens else 2 if decision.cached else int(decision.trusted))
        times["bare"] += [timed(prototypes.__matmul__, feature)[0] for feature in block]
    times = {name: np.array(values) for name, values in times.items()}
    about = {"classes": classes, "stream": name, "samples": len(features)}
    against = oracle_over_observe(prototypes, features, oracle_type, limit)
    return [about | summary(method, times, np.array(paths), engines[method]) | against[method] for method in METHODS]


def blocks(features):
    return [features[first : first + BLOCK] for first in range(0, len(features), BLOCK)]


def oracle_over_observe(prototypes, features, oracle_type, limit):
    """How much longer the oracle takes; in a pass of its own, for it leaves nothing of the others in the cache."""
    engines = {method: methods.create(method, prototypes, **options) for method, options in METHODS.items()}
    oracle = oracle_type(engines["protodcs"]._memory.text, engines["protodcs"].config)
    times = {name: [] for name in (*METHODS, "oracle")}
    for block in blocks(features[:limit]):
        for method, engine in engines.items():
            times[method] += [timed(engine.observe, feature)[0] for feature in block]
        times["oracle"] += [timed(oracle.step, feature)[0] for feature in block]
    # Where it came to the end of the stream, its second half.
    steady = limit >= len(features)
    half = len(times["oracle"]) // 2 if steady else 0
    return {
        method: {
            "oracle_over_observe": float(np.median(times["oracle"][half:]) / np.median(times[method][half:])),
            "oracle_in_steady_state": steady,
        }
        for method in METHODS
    }


def summary(method, times, paths, engine):
    """One method on one stream: its cost over the bare scoring, in the steady state, as it starts, and by path."""
    steady = np.arange(len(paths)) >= len(paths) // 2
    open_already = steady & (paths < OPENED)
    own, bare = times[method], times["bare"]
    return {
        "method": method,
        "bare_us": 1e6 * float(np.median(bare)),
        "observe_us": 1e6 * float(np.median(own[steady])),
        "p99_us": 1e6 * float(np.quantile(own[steady], 0.99)),
        "mean_us": 1e6 * float(own[steady].mean()),
        "ratio": total(own, bare, open_already),
        "ratio_with_openings": total(own, bare, steady),
        "ratio_whole_stream": total(own, bare, np.ones(len(own), dtype=bool)),
        **by_blocks(own, bare, open_already),
        "state_bytes": len(engine.snapshot()),
        "paths": by_path(own, paths, steady) if method == "protodcs" else {},
    }


def total(own, bare, chosen):
    """Total time over total time."""
    return float(own[chosen].sum() / bare[chosen].sum())


def by_blocks(own, bare, chosen):
    """The same block by block, as quartiles: a pause of the machine spoils one block and not the total."""
    blocks = np.arange(len(own)) // BLOCK
    ratios = [
        own[(blocks == block) & chosen].sum() / bare[(blocks == block) & chosen].sum()
        for block in np.unique(blocks[chosen])
    ]
    low, middle, high = np.quantile(ratios, (0.25, 0.5, 0.75))
    return {"block_ratio": float(middle), "low": float(low), "high": float(high)}


def by_path(own, paths, steady):
    return {
        name: {
            "share": float((paths[steady] == at).mean()),
            "p50_us": 1e6 * float(np.median(own[steady & (paths == at)])),
            "p99_us": 1e6 * float(np.quantile(own[steady & (paths == at)], 0.99)),
        }
        for at, name in enumerate(PATHS)
        if (steady & (paths == at)).any()
    }


def as_markdown(rows):
    lines = [
        "Real CLIP ViT-B/32 features (feature pack of the test data, stream order of seed 0, split `all`, d = 512), "
        "on one thread. `protodcs` is the preset `paper`. "
        "In one run, observe and bare scoring take turns in blocks of samples. The steady state is the "
        'second half of the stream. "Ratio" is the total time of observe over the total time of '
        "`prototypes @ feature`, without samples that put a first feature into the queue of a class. The next columns "
        "have the median and quartiles over blocks, the ratio with those samples, and the ratio over the whole stream. "
        "The oracle is the slow reference of the tests (torch autograd), median over median on the same samples, in a "
        "pass of its own.",
        "",
    ]
    head = (
        "K, method, bare, observe p50, p99, mean, ratio, blocks, with openings, whole stream, oracle / observe, state"
    )
    lines += table(
        head.split(", "),
        (
            (
                row["classes"], f"`{row['method']}`", f"{row['bare_us']:.1f} us", f"{row['observe_us']:.1f} us",
                f"{row['p99_us']:.0f} us", f"{row['mean_us']:.1f} us", f"{row['ratio']:.1f}",
                f"{row['block_ratio']:.1f} ({row['low']:.1f}-{row['high']:.1f})", f"{row['ratio_with_openings']:.1f}",
                f"{row['ratio_whole_stream']:.1f}",
                f"{row['oracle_over_observe']:.0f}" + ("" if row["oracle_in_steady_state"] else " (start)"),
                f"{row['state_bytes'] / 1e6:.2f} MB",
            )
            for row in rows
        ),
    )  # fmt: skip
    lines += ["", "By path of `protodcs` in the steady state:", ""]
    lines += table(
        ("K", "path", "share", "p50", "p99"),
        (
            (row["classes"], name, f"{path['share']:.0%}", f"{path['p50_us']:.0f} us", f"{path['p99_us']:.0f} us")
            for row in rows
            for name, path in row["paths"].items()
        ),
    )
    lines += [
        "",
        "Targets: `protodcs` at most 6 times a bare scoring with 100, 200 and 1,000 classes, `streamdcs` at most 1.6 "
        "times with 10, 100 and 1,000. What limits them:",
        "",
        "- `protodcs`: a trusted sample moves every text row, with a division for each element. A change of a queue "
        "compares and sums the text rows, and moves the alignment of each. The alignment is stored as two float32 "
        "numbers per element: 20 bytes are read or written where a scoring reads 4. From about 200 classes on, text, "
        "alignment and visual prototypes do not fit together into the second cache of a core.",
        "- `streamdcs`: the mean is above the median, because the threshold is fitted again every 32 samples. The "
        "class bias reads a row of K numbers for each class that it corrects. With few classes, most of the median is "
        "the call from Python and the checks of the input.",
    ]
    return "\n".join(lines) + "\n"

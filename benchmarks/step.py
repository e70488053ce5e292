"""The cost of one step: `python -m benchmarks step`.

For each number of classes, all methods observe a real CLIP stream from its start, block by block. After each block, the
bare `prototypes @ feature` scores the same samples on the same thread. ProtoDCS also runs without its compiled part.
The second half of the stream is the steady state. Times are CPU times, since others may use the machine.
"""

import time

from benchmarks.timing import clip_stream, one_thread, table

one_thread()

import numpy as np  # noqa: E402 - the thread limits above must come first

from benchmarks import charts  # noqa: E402
from protodcs import methods  # noqa: E402

NAME = "step"
# Classes -> stream, and how many of its samples.
STREAMS = {10: ("dtd", None), 100: ("dtd", None), 200: ("flowers", None), 1000: ("big", 4000)}
# Samples that one of them does in a row, so that each finds its own arrays in the cache as it would alone.
BLOCK = 50
WORKING, PAPER, STREAMDCS = "ProtoDCS (working)", "ProtoDCS (paper)", "StreamDCS"
METHODS = {
    WORKING: ("protodcs", {"preset": "working"}),
    PAPER: ("protodcs", {"preset": "paper"}),
    STREAMDCS: ("streamdcs", {}),
}
ON_NUMPY = " on numpy"
NOTES = (
    "StreamDCS has no vocabulary here. Its mean is above its median because the threshold is fitted again every 32 "
    "samples. With few classes, most of the median is the call from Python and the checks of the input.",
    "",
    "What makes ProtoDCS slow:",
    "",
    "- **Evolutions and openings compute InfoNCE in full**: three products of K x K x d, and passes over arrays of K x "
    "d in float64. An evolution moves all text prototypes, and the first feature of a queue is a new key for all "
    "queries. With 100 and 200 classes, about a tenth of the samples evolve, and take more than 80 % of the time.",
    "- **The preset `paper` never evolves.** So it costs less, and so do streams on which few images pass the gate. "
    "Real features do not cost more than random ones on the same path: what differs is how often queues open and "
    "prototypes evolve. A ratio without those samples looks far better than what a user waits for.",
    "- **A trusted sample** moves every text row, with a division for each element. A changed queue moves the "
    "alignment of each row.",
    "",
    "The compiled part stays, although it has no part in evolutions and openings. Without it, the default preset takes "
    "1.5 to 2.1 times as long with 100 classes and more, but 7.6 times with 10. Evolutions are not compiled: their "
    "products are already BLAS, and the results must stay the same to the bit. ProtoDCS misses our target of six bare "
    "scorings with every number of classes. StreamDCS costs a fraction of it.",
)
PATHS = ("not trusted", "trusted", "trusted, queue changed", "trusted, queue opened", "evolved")


def measure(quick=False):
    sizes = (10, 100) if quick else STREAMS
    return [row for classes in sizes for row in measure_one(classes, 600 if quick else None)]


def measure_one(classes, samples):
    name, most = STREAMS[classes]
    prototypes, features = clip_stream(name, classes)
    features = features[: samples or most]
    engines = created(prototypes)
    for method in (WORKING, PAPER):
        engines[method + ON_NUMPY] = created(prototypes)[method]
        engines[method + ON_NUMPY]._compiled = False
    times, paths = {name: [] for name in (*engines, "bare")}, {method: [] for method in engines}
    for block in blocks(features):
        for method, engine in engines.items():
            for feature in block:
                opened = opened_classes(engine)
                seconds, decision = timed(engine.observe, feature)
                times[method].append(seconds)
                paths[method].append(path(decision, opened_classes(engine) > opened))
        # One time for all of them: reading the clock would take a part of such a short one.
        seconds, _ = timed(lambda rows: [prototypes @ feature for feature in rows], block)
        times["bare"] += [seconds / len(block)] * len(block)
    times = {name: np.array(values) for name, values in times.items()}
    about = {"classes": classes, "stream": name, "samples": len(features)}
    return [about | summary(method, times, np.array(paths[method]), engines[method]) for method in METHODS]


def timed(function, *arguments):
    """CPU seconds of this thread, and the result."""
    start = time.thread_time()
    result = function(*arguments)
    return time.thread_time() - start, result


def created(prototypes):
    return {label: methods.create(name, prototypes, **options) for label, (name, options) in METHODS.items()}


def opened_classes(engine):
    """How many classes have a visual prototype."""
    return len(getattr(engine._memory, "opened", ()))


def path(decision, opens):
    return 4 if decision.evolved else 3 if opens else 2 if decision.cached else int(decision.trusted)


def blocks(features):
    return [features[first : first + BLOCK] for first in range(0, len(features), BLOCK)]


def summary(method, times, paths, engine):
    """One method on one stream: its cost over the bare scoring, in the steady state and in all, and by path."""
    steady = np.arange(len(paths)) >= len(paths) // 2
    own, bare, reference = times[method], times["bare"], times.get(method + ON_NUMPY)
    row = {
        "method": method,
        "bare_us": 1e6 * float(np.median(bare)),
        "observe_us": 1e6 * float(np.median(own[steady])),
        "p99_us": 1e6 * float(np.quantile(own[steady], 0.99)),
        "mean_us": 1e6 * float(own[steady].mean()),
        "ratio": total(own, bare, steady),
        "ratio_whole_stream": total(own, bare, np.ones(len(own), dtype=bool)),
        "state_bytes": len(engine.snapshot()),
        "paths": by_path(own, paths, steady) if reference is not None else {},
    }
    if reference is not None:
        row["numpy_ratio"] = total(reference, bare, steady)
        row["numpy_over_native"] = total(reference, own, np.ones(len(own), dtype=bool))
    return row


def total(own, base, chosen):
    """Total time over total time."""
    return float(own[chosen].sum() / base[chosen].sum())


def by_path(own, paths, steady):
    return {
        name: {
            "share": float((paths[steady] == at).mean()),
            "p50_us": 1e6 * float(np.median(own[steady & (paths == at)])),
            "time": float(own[steady & (paths == at)].sum() / own[steady].sum()),
        }
        for at, name in enumerate(PATHS)
        if (steady & (paths == at)).any()
    }


def plot(rows, file):
    """Draw the time of a usual and of a slow step, by the number of classes."""
    figure, all_axes = charts.panels(2, share_y=True)
    for axes, (key, title) in zip(all_axes, (("observe_us", "median"), ("p99_us", "p99")), strict=True):
        for name, colour in zip(dict.fromkeys(row["method"] for row in rows), charts.COLOURS, strict=False):
            mine = [row for row in rows if row["method"] == name]
            axes.plot([row["classes"] for row in mine], [row[key] for row in mine], "o-", color=colour, label=name)
        bare = {row["classes"]: row["bare_us"] for row in rows}
        axes.plot(list(bare), list(bare.values()), "--", color=charts.GREY, label="prototypes @ feature")
        axes.set(xscale="log", yscale="log", xlabel="classes")
        axes.set_title(title, fontsize=10)
    all_axes[0].set_ylabel("microseconds of one step")
    all_axes[0].legend(frameon=False, fontsize=8)
    charts.save(figure, file)


def as_markdown(rows):
    lines = [
        "Real CLIP ViT-B/32 features (feature pack of the test data, stream order of seed 0, split `all`, d = 512), "
        "on one thread, in CPU time. All methods and the bare scoring `prototypes @ feature` take turns in blocks of "
        "samples. The median, p99, mean and first ratio are about the second half of the stream. A ratio is the total "
        "time of observe over the total time of bare scoring.",
        "",
        "![Time of a median and of a p99 step by the number of classes](step.png)",
        "",
    ]
    head = "K, method, bare, observe p50, p99, mean, ratio, whole stream, state"
    lines += table(
        head.split(", "),
        (
            (
                row["classes"], row["method"], f"{row['bare_us']:.1f} us", f"{row['observe_us']:.1f} us",
                f"{row['p99_us']:.0f} us", f"{row['mean_us']:.1f} us", f"{row['ratio']:.1f}",
                f"{row['ratio_whole_stream']:.1f}", f"{row['state_bytes'] / 1e6:.2f} MB",
            )
            for row in rows
        ),
    )  # fmt: skip
    lines += [
        "",
        "ProtoDCS with its compiled part and with numpy alone, on the same samples:",
        "",
    ]
    lines += table(
        ("K", "stream", "samples", "method", "ratio, compiled", "ratio, numpy", "numpy / compiled, whole stream"),
        (
            (
                row["classes"], f"`{row['stream']}`", row["samples"], row["method"], f"{row['ratio']:.1f}",
                f"{row['numpy_ratio']:.1f}", f"{row['numpy_over_native']:.2f}",
            )
            for row in rows
            if "numpy_ratio" in row
        ),
    )  # fmt: skip
    lines += ["", "Where the time of ProtoDCS goes, in the second half of the stream:", ""]
    lines += table(
        ("K", "method", "path", "samples", "p50", "time"),
        (
            (
                row["classes"],
                row["method"],
                name,
                f"{path['share']:.1%}",
                f"{path['p50_us']:.0f} us",
                f"{path['time']:.0%}",
            )
            for row in rows
            for name, path in row["paths"].items()
        ),
    )
    lines += ["", *NOTES]
    return "\n".join(lines) + "\n"

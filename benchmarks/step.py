"""What one step costs: `python -m benchmarks.step`, with `--write` to keep the result in docs/results.

For each number of classes a real CLIP stream is observed once from its start, block by block. After each block, in the
same run and on the same thread, the bare `prototypes @ feature` is timed on the same samples, and on the first blocks
the slow oracle of the tests. Times are of this machine; the ratios are what to look at.
"""

import argparse
import importlib.util
import json
import os
import platform
import sys
import time
from pathlib import Path

for _variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(_variable, "1")

import numba  # noqa: E402 - the thread limits above must come first
import numpy as np  # noqa: E402

from protodcs import Config, ProtoDCS  # noqa: E402

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "docs" / "results"
# Classes -> stream and how many samples the oracle is timed on.
STREAMS = {10: ("dtd", 150), 100: ("dtd", 150), 200: ("flowers", 100), 1000: ("big", 50)}
# Samples that one of the three does in a row, so that each finds its own arrays in the cache as it would alone.
BLOCK = 50
PATHS = ("not trusted", "trusted", "trusted, queue changed", "trusted, queue opened")


def load(file, name):
    spec = importlib.util.spec_from_file_location(name, file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def stream(classes):
    """Text prototypes and features of a real stream with so many known classes."""
    if "PROTODCS_DATA" not in os.environ:
        sys.exit("error: set PROTODCS_DATA to the folder of the test data: the streams are real CLIP features")
    tool = Path(os.environ["PROTODCS_DATA"]).parent / "tools" / "clip_streams.py"
    prototypes, features, labels = load(tool, "clip_streams").stream(STREAMS[classes][0])
    keep = labels < classes
    return np.ascontiguousarray(prototypes[:classes]), np.ascontiguousarray(features[keep])


def measure(classes, oracle_type):
    prototypes, features = stream(classes)
    engine, default = (ProtoDCS(prototypes, config=Config.preset(name)) for name in ("paper", "default"))
    oracle = oracle_type(engine._memory.text, engine.config)
    observe, by_default, bare, slow, paths = [], [], [], [], []
    for first in range(0, len(features), BLOCK):
        block = features[first : first + BLOCK]
        for feature in block:
            opened = len(engine._memory.opened)
            seconds, decision = timed(engine.observe, feature)
            opens = len(engine._memory.opened) > opened
            observe.append(seconds)
            paths.append(3 if opens else 2 if decision.cached else 1 if decision.trusted else 0)
        by_default += [timed(default.observe, feature)[0] for feature in block]
        bare += [timed(prototypes.__matmul__, feature)[0] for feature in block]
        if len(slow) < STREAMS[classes][1]:
            slow += [timed(oracle.step, feature)[0] for feature in block]
    sizes = {"paper_bytes": len(engine.snapshot()), "default_bytes": len(default.snapshot())}
    times = (np.array(values) for values in (observe, by_default, bare, slow))
    return summary(classes, *times, np.array(paths)) | sizes


def timed(function, argument):
    start = time.perf_counter()
    result = function(argument)
    return time.perf_counter() - start, result


def summary(classes, observe, by_default, bare, slow, paths):
    settled = paths < 3
    rows = {
        name: {
            "samples": int((paths == at).sum()),
            "p50_us": 1e6 * float(np.median(observe[paths == at])),
            "p99_us": 1e6 * float(np.quantile(observe[paths == at], 0.99)),
        }
        for at, name in enumerate(PATHS)
        if (paths == at).any()
    }
    return {
        "classes": classes,
        "stream": STREAMS[classes][0],
        "samples": len(observe),
        "bare_us": 1e6 * float(bare.mean()),
        "observe_us": 1e6 * float(observe.mean()),
        "ratio": float(observe.sum() / bare.sum()),
        "ratio_once_open": float(observe[settled].sum() / bare[settled].sum()),
        "default_us": 1e6 * float(by_default.mean()),
        "default_p50_us": 1e6 * float(np.median(by_default)),
        "default_p99_us": 1e6 * float(np.quantile(by_default, 0.99)),
        "default_ratio": float(by_default.sum() / bare.sum()),
        "default_over_paper": float(by_default.sum() / observe.sum()),
        "default_over_paper_once_open": float(by_default[settled].sum() / observe[settled].sum()),
        "oracle_us": 1e6 * float(slow.mean()),
        "oracle_over_observe": float(slow.mean() / observe[: len(slow)].mean()),
        "paths": rows,
    }


def as_markdown(rows):
    lines = [
        "# What one step costs",
        "",
        "`python -m benchmarks.step --write`: the `paper` preset over real CLIP ViT-B/32 features (the feature pack of",
        "the test data, stream order of seed 0, split `all`, d = 512), one thread, observe, bare scoring and oracle",
        "interleaved in blocks of one run. Ratios are total time over total time. "
        '"Once open" leaves out the samples that put',
        "a first feature into a class's queue, each of which changes the alignment of every open class.",
        "",
        "| K | stream | samples | `prototypes @ feature` | observe | ratio | ratio once open | oracle / observe |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        lines.append(
            f"| {row['classes']} | {row['stream']} | {row['samples']} | {row['bare_us']:.1f} us "
            f"| {row['observe_us']:.1f} us | {row['ratio']:.1f} | {row['ratio_once_open']:.1f} "
            f"| {row['oracle_over_observe']:.0f} |"
        )
    lines += [
        "",
        "The `default` preset on the same samples of the same run, and what a state of either weighs at the end:",
        "",
        "| K | observe | p50 | p99 | over `prototypes @ feature` | over `paper` | over `paper` once open "
        "| state, `paper` | state, `default` |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        lines.append(
            f"| {row['classes']} | {row['default_us']:.1f} us | {row['default_p50_us']:.0f} us "
            f"| {row['default_p99_us']:.0f} us | {row['default_ratio']:.1f} | {row['default_over_paper']:.2f} "
            f"| {row['default_over_paper_once_open']:.2f} | {row['paper_bytes'] / 1e6:.2f} MB "
            f"| {row['default_bytes'] / 1e6:.2f} MB |"
        )
    lines += [
        "",
        "By path of the `paper` preset, in microseconds:",
        "",
        "| K | path | samples | p50 | p99 |",
        "|---|---|---|---|---|",
    ]
    for row in rows:
        for name, path in row["paths"].items():
            lines.append(
                f"| {row['classes']} | {name} | {path['samples']} | {path['p50_us']:.0f} | {path['p99_us']:.0f} |"
            )
    return "\n".join(lines) + "\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--classes", type=int, nargs="*", default=list(STREAMS), choices=list(STREAMS))
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--write", action="store_true", help="keep the result in docs/results")
    arguments = parser.parse_args()
    import torch

    torch.set_num_threads(1)
    oracle_type = load(ROOT / "tests" / "oracle.py", "oracle").Oracle
    rows = []
    for classes in arguments.classes:
        rows.append(measure(classes, oracle_type))
        if not arguments.json:
            print(
                f"K={classes}: bare {rows[-1]['bare_us']:.1f} us, observe {rows[-1]['observe_us']:.1f} us, ratio "
                f"{rows[-1]['ratio']:.1f} ({rows[-1]['ratio_once_open']:.1f} once open), oracle "
                f"{rows[-1]['oracle_over_observe']:.0f} times slower",
                flush=True,
            )
    versions = {"python": platform.python_version(), "numpy": np.__version__, "numba": numba.__version__}
    result = {"benchmark": "step", "preset": "paper", "machine": platform.machine(), "versions": versions, "rows": rows}
    if arguments.json:
        print(json.dumps(result))
    else:
        print()
        print(as_markdown(rows))
    if arguments.write:
        RESULTS.mkdir(parents=True, exist_ok=True)
        (RESULTS / "step.md").write_text(as_markdown(rows))
        (RESULTS / "step.json").write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()

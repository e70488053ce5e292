"""Feature extraction on Ray Data against a plain loop: `python -m benchmarks.features`, `--write` to keep the result.

Both do the same decoding, corruption, preprocessing and encoding, and write the same shards. In one run they take turns
over several rounds, each on images of its own; the loop has all cores through torch's threads, Ray has one worker per
core. A rate leaves out the first shard of each worker, so that starting workers and loading encoders does not count;
what that costs is given beside it.
"""

import argparse
import json
import os
import platform
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from statistics import median

import torch

from benchmarks.models import vision_transformer
from protodcs import encoders
from protodcs.data import open_source
from protodcs.data.streams import build
from protodcs.features.on_ray import on_ray
from protodcs.features.run import Extraction, in_a_loop

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "docs" / "results"
CORRUPTIONS = ["gaussian_noise", "glass_blur", "elastic_transform", "jpeg_compression"]
# Encoder -> images per shard, shards of a turn for each of the two.
SIZES = {"mini": (400, 16), "ViT-B/16": (16, 8)}
ROUNDS = 3


def turn(extraction, todo, how, workers):
    """Images per second once every worker has done a shard, and the seconds until then."""
    started = time.perf_counter()
    times = [(time.perf_counter(), shard.last - shard.first) for shard in how(extraction, todo)]
    begun = times[workers - 1][0]
    images = sum(count for _, count in times[workers:])
    return {"rate": images / (times[-1][0] - begun), "seconds_to_first": begun - started}


def measure(name, model, folder, cores):
    size, shards = SIZES[name]
    known = open_source("cifar10-test")
    manifest = build("whole", known, [], 0, CORRUPTIONS)
    batch_size = min(100, size)
    extraction = Extraction.planned(
        folder / name.replace("/", "-"),
        manifest,
        [known],
        encoders.load(model, device="cpu"),
        shard_size=size,
        batch_size=batch_size,
    )
    todo = extraction.open()
    # Each turn takes its shards evenly from all corruptions.
    todo = [
        shard for part in range(len(todo) // len(CORRUPTIONS)) for shard in todo[part :: len(todo) // len(CORRUPTIONS)]
    ]
    rounds = []
    for _ in range(ROUNDS):
        mine, todo = todo[:shards], todo[shards:]
        loop = turn(extraction, mine, in_a_loop, 1)
        mine, todo = todo[:shards], todo[shards:]
        rounds.append({"loop": loop, "ray": turn(extraction, mine, on_ray, cores)})
    return {
        "encoder": name,
        "images_per_turn": size * shards,
        "loop": median(r["loop"]["rate"] for r in rounds),
        "ray": median(r["ray"]["rate"] for r in rounds),
        "ratio": median(r["ray"]["rate"] / r["loop"]["rate"] for r in rounds),
        "loop_start": median(r["loop"]["seconds_to_first"] for r in rounds),
        "ray_start": median(r["ray"]["seconds_to_first"] for r in rounds),
        "rounds": rounds,
    }


def as_markdown(result):
    lines = [
        "# Features on Ray",
        "",
        f"`python -m benchmarks.features --write`: CIFAR-10 test images under {', '.join(CORRUPTIONS)}",
        f"at severity 5, on {result['cores']} cores without a GPU. A plain loop and `protodcs features` on Ray Data",
        f"take turns {ROUNDS} times in one run, on images of their own; medians. The encoder of the size of",
        "ViT-B/16 has random weights. Ray runs one process per core with one thread each; the loop gives torch all",
        "cores for the encoder, and decodes and corrupts on one. Starting Ray itself is not in these numbers.",
        "",
        "![Images per second of a plain loop and of Ray Data with two encoders, and the time until the "
        "first shards](features.png)",
        "",
        "| encoder | images a turn | loop, images/s | Ray, images/s | Ray / loop | first shards: loop | Ray |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in result["rows"]:
        rates = f"{row['loop']:.1f} | {row['ray']:.1f} | {row['ratio']:.2f}"
        starts = f"{row['loop_start']:.1f} s | {row['ray_start']:.1f} s"
        lines.append(f"| {row['encoder']} | {row['images_per_turn']:,} | {rates} | {starts} |")
    return "\n".join([*lines, ""])


def main():
    import ray

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--encoders", nargs="*", default=list(SIZES), choices=list(SIZES))
    parser.add_argument("--write", action="store_true", help="keep the result in docs/results")
    arguments = parser.parse_args()
    cores = os.cpu_count() or 1
    torch.set_num_threads(cores)
    ray.init(num_cpus=cores, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        models = {"mini": "mini"}
        if "ViT-B/16" in arguments.encoders:
            models["ViT-B/16"] = vision_transformer(folder / "model")
        rows = [measure(encoder, models[encoder], folder, cores) for encoder in arguments.encoders]
    ray.shutdown()
    versions = {package: version(package) for package in ("ray", "torch", "transformers", "numpy", "pillow")}
    result = {
        "benchmark": "features",
        "cores": cores,
        "machine": platform.machine(),
        "versions": {"python": platform.python_version(), **versions},
        "rows": rows,
    }
    print(as_markdown(result))
    if arguments.write:
        (RESULTS / "features.md").write_text(as_markdown(result), encoding="utf-8")
        (RESULTS / "features.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

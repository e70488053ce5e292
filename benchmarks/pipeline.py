"""What adaptation costs from images to decisions: `python -m benchmarks pipeline`.

The same images go through the bare encoder and through `OpenSetClassifier.stream`, from arrays in memory and from JPEG
files, with torch on one thread and on all. They take turns in one run; a ratio is the median over the rounds of bare
time over time with adaptation, with its quartiles. Times are of this machine; the ratios are what to look at.
"""

import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.timing import one_thread, ratio, table

one_thread()

import numpy as np  # noqa: E402 - the thread limits above must come first
import torch  # noqa: E402
from PIL import Image  # noqa: E402

from benchmarks import charts  # noqa: E402
from benchmarks.models import vision_transformer  # noqa: E402
from protodcs import OpenSetClassifier, encoders  # noqa: E402
from protodcs.data import open_source  # noqa: E402
from protodcs.encoders import Encoder  # noqa: E402

NAME = "pipeline"
# Where Linux tells how long the cores have worked.
STATISTICS = Path("/proc/stat")
# Each with its options.
METHODS = {"streamdcs": {}, "protodcs": {"preset": "paper"}}
# What the product promises: the least ratio, by encoder.
TARGETS = {"mini": 0.97, "ViT-B/16": 0.995}


@dataclass(frozen=True)
class Case:
    """One encoder, its classes, and how much it is given.

    Attributes:
        known: the image set of its classes.
        whole: also from JPEG files, with all threads, and without the thread that runs ahead. Left out where a step
            costs less than a thousandth of an image, and all of it would only show the noise of the machine.
    """

    encoder: str
    classes: str
    known: str
    batch_size: int
    images: int
    rounds: int
    whole: bool


CASES = (
    Case("mini", "cifar10", "cifar10-test", batch_size=32, images=640, rounds=5, whole=True),
    Case("ViT-B/16", "cifar100", "tiny-imagenet-val", batch_size=32, images=32, rounds=7, whole=False),
)
QUICK = (
    Case("mini", "cifar10", "cifar10-test", batch_size=32, images=128, rounds=2, whole=True),
    Case("ViT-B/16", "cifar100", "tiny-imagenet-val", batch_size=2, images=4, rounds=1, whole=False),
)


def measure(quick: bool = False) -> list[dict[str, Any]]:
    """One row for each encoder, kind of image, number of threads and method."""
    if "PROTODCS_DATA" not in os.environ:
        sys.exit("error: set PROTODCS_DATA to the folder of the test data: images and the mini encoder are there")
    cores = os.cpu_count() or 1
    rows = []
    before = torch.get_num_threads()
    with tempfile.TemporaryDirectory() as name:
        for case in QUICK if quick else CASES:
            encoder = loaded(case, Path(name) / "model")
            pixels = images(case)
            given_as = {"arrays": pixels}
            if case.whole:
                given_as["JPEG files"] = as_files(pixels, Path(name) / case.classes)
            for source, given in given_as.items():
                for threads in sorted({1, cores if case.whole else 1}):
                    torch.set_num_threads(threads)
                    rows += compared(case, encoder, given, {"source": source, "threads": threads})
                    for done in rows[-len(METHODS) :]:
                        print(f"{done['name']}: {shown(done)}", file=sys.stderr, flush=True)
    torch.set_num_threads(before)
    return rows


def loaded(case: Case, folder: Path) -> Encoder:
    model = "mini" if case.encoder == "mini" else vision_transformer(folder)
    return encoders.load(model, device="cpu", batch_size=case.batch_size)


def images(case: Case) -> list[np.ndarray]:
    """As many images as all rounds need, each of them new: half of the known classes and half digits, mixed."""
    half = case.images * case.rounds // 2
    pixels = [*open_source(case.known).read(range(half)), *open_source("svhn-test").read(range(half))]
    return [pixels[at] for at in np.random.default_rng(0).permutation(len(pixels))]


def as_files(pixels: Sequence[np.ndarray], folder: Path) -> list[Path]:
    folder.mkdir()
    files = [folder / f"{number:05d}.jpg" for number in range(len(pixels))]
    for file, image in zip(files, pixels, strict=True):
        Image.fromarray(image).save(file, quality=95)
    return files


def compared(case: Case, encoder: Encoder, given: Sequence[Any], about: dict[str, Any]) -> list[dict[str, Any]]:
    """The rows of one encoder, kind of image and number of threads, one for each method."""
    # Each way has an engine of its own, which goes on from round to round as in one long stream.
    ways: dict[str, Callable[[Sequence[Any]], Any]] = {"bare": lambda part: [*encoded(encoder, part)]}
    for method in METHODS:
        ways[method] = streamed(adapting(case, encoder, method))
        if case.whole:
            ways[f"{method}, sequential"] = one_after_the_other(adapting(case, encoder, method))
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    others = []
    for way in ways.values():
        way(given[: case.batch_size])
    for number in range(case.rounds):
        part = given[number * case.images : (number + 1) * case.images]
        # Each round begins with another way, so that none always comes after the same one.
        order = [*ways][number % len(ways) :] + [*ways][: number % len(ways)]
        begun, strange = time.perf_counter(), of_others()
        for name in order:
            started = time.perf_counter()
            ways[name](part)
            seconds[name].append(time.perf_counter() - started)
        others.append((of_others() - strange) / (time.perf_counter() - begun))
    times = {name: np.array(values) for name, values in seconds.items()}
    return [row(case, method, times, {**about, "others": others}) for method in METHODS]


def of_others() -> float:
    """Seconds that the cores of this machine have worked for other processes; NaN where the system does not tell."""
    if not STATISTICS.exists():
        return float("nan")
    user, nice, system, _, _, *rest = map(int, STATISTICS.read_text().split("\n")[0].split()[1:9])
    return (user + nice + system + sum(rest)) / os.sysconf("SC_CLK_TCK") - time.process_time()


def adapting(case: Case, encoder: Encoder, method: str) -> OpenSetClassifier:
    return OpenSetClassifier.with_encoder(encoder, case.classes, method=method, **METHODS[method])


def encoded(encoder: Encoder, part: Sequence[Any]) -> Iterator[np.ndarray]:
    """Features batch by batch, in one thread: what a program does that only encodes."""
    encode = encoder.encode_pixels if isinstance(part[0], np.ndarray) else encoder.encode
    for first in range(0, len(part), encoder.batch_size):
        yield encode(part[first : first + encoder.batch_size])


def streamed(classifier: OpenSetClassifier) -> Callable[[Sequence[Any]], Any]:
    return lambda part: [decision.known for decision in classifier.stream(part)]


def one_after_the_other(classifier: OpenSetClassifier) -> Callable[[Sequence[Any]], Any]:
    observe = classifier.engine.observe
    return lambda part: [
        observe(feature).known for features in encoded(classifier.encoder, part) for feature in features
    ]


def row(case: Case, method: str, times: dict[str, np.ndarray], about: dict[str, Any]) -> dict[str, Any]:
    classes = {"cifar10": 10, "cifar100": 100}[case.classes]
    plural = "" if about["threads"] == 1 else "s"
    result = {
        "name": f"{case.encoder}, K = {classes}, {method}, {about['source']}, {about['threads']} thread{plural}",
        "encoder": case.encoder,
        "classes": classes,
        "method": method,
        "source": about["source"],
        "threads": about["threads"],
        "batch_size": case.batch_size,
        "images": case.images,
        "rounds": case.rounds,
        "bare_per_second": case.images / float(np.median(times["bare"])),
        "adapted_per_second": case.images / float(np.median(times[method])),
        **ratio(times["bare"], times[method]),
        "target": TARGETS[case.encoder],
        # How many cores other processes kept busy, and the ratio, in each round: what overlaps needs a free core.
        "others": about["others"],
        "each": (times["bare"] / times[method]).tolist(),
    }
    if case.whole:
        sequential = times[f"{method}, sequential"]
        result["sequential"] = ratio(times["bare"], sequential)
        result["over_sequential"] = ratio(sequential, times[method])
    return result


def plot(rows: Sequence[dict[str, Any]], file: Path) -> None:
    """Draw the ratio of each row with its quartiles, and its target."""
    figure, (axes,) = charts.panels(1, height=0.6 + 0.3 * len(rows))
    places = np.arange(len(rows))[::-1]
    ratios = np.array([(row["ratio"], row["low"], row["high"]) for row in rows])
    spread = np.abs(ratios[:, 1:] - ratios[:, :1]).T
    axes.errorbar(
        ratios[:, 0], places, xerr=spread, fmt="o", color=charts.BLUE, capsize=3, label="median and quartiles"
    )
    axes.plot([row["target"] for row in rows], places, "|", color=charts.ORANGE, markersize=14, label="target")
    axes.set_yticks(places, [row["name"] for row in rows], fontsize=8)
    axes.set_xlabel("images per second with adaptation / without")
    axes.legend(frameon=False, fontsize=8)
    charts.save(figure, file)


def as_markdown(rows: Sequence[dict[str, Any]]) -> str:
    lines = [
        "The figures are images per second of `OpenSetClassifier.stream`, with adaptation, over those of the bare "
        "encoder on the same images. Both take turns in one run, with new images in each round. "
        "`protodcs` is the preset `paper`. Half of the images are "
        "of no known class. Ratios "
        "are medians over the rounds, with quartiles. Without overlap is the same work in one thread, each batch "
        "encoded and then decided on. The encoder of the size of ViT-B/16 has random weights: only its speed is real. "
        "Others is how many cores other processes kept busy meanwhile (median): what overlaps needs a free core.",
        "",
        "![Images per second with adaptation over those without, and the target](pipeline.png)",
        "",
    ]
    head = "encoder, K, method, images, torch threads, images x rounds, bare images/s, adapted / bare, target, without overlap, others"  # noqa: E501
    lines += table(
        head.split(", "),
        (
            (
                row["encoder"], row["classes"], f"`{row['method']}`", row["source"], row["threads"],
                f"{row['images']} x {row['rounds']}", f"{row['bare_per_second']:.1f}", shown(row), row["target"],
                shown(row["sequential"]) if "sequential" in row else "", f"{np.median(row['others']):.1f}",
            )
            for row in rows
        ),
    )  # fmt: skip
    return "\n".join([*lines, ""])


def shown(row: dict[str, Any]) -> str:
    return f"{row['ratio']:.3f} ({row['low']:.3f} to {row['high']:.3f})"

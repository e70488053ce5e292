"""Feedback: what corrections bring on later samples of a stream, and what wrong corrections cost.

`python -m benchmarks.feedback --write` judges on the `judge` split; `python -m benchmarks.feedback tune` measures the
same on the split on which the rule was chosen. Features are those of CLIP ViT-B/32.
"""

import json
import os
import sys
from pathlib import Path

from benchmarks.timing import one_thread, table

one_thread()

import numpy as np  # noqa: E402 - the thread limits above must come first
from safetensors.numpy import load_file  # noqa: E402

from benchmarks import charts  # noqa: E402
from protodcs import StreamDCS  # noqa: E402
from protodcs.discovery import review_order  # noqa: E402
from protodcs.metrics import auroc  # noqa: E402

# Known ImageNet classes, the set of unknown images (None: other ImageNet classes), and at most so many of them.
STREAMS = {
    "dtd": (100, "dtd", None),
    "ucf": (100, "ucf101", 2000),
    "flowers": (200, "oxford_flowers", None),
    "sun": (100, "sun397", 2000),
    "near": (100, None, 1800),
}
SEEDS = {"tune": (0, 1, 2, 3, 4), "judge": (31, 32, 33, 34, 35)}
COUNTS = (10, 50, 200)
WRONG = 0.1
FIGURES = ("accuracy", "auroc", "decisions")
# The two-sided 95 % quantile of Student's t distribution with four degrees of freedom.
STUDENT = 2.776
RESULTS = Path(__file__).parents[1] / "docs" / "results"


def unit(rows):
    """Rows of length one, as float32."""
    rows = rows.astype(np.float32)
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


class Pack:
    """The feature pack: streams of one split."""

    def __init__(self, split):
        self.split, self.parity = split, int(split == "judge")
        self._content = load_file(Path(os.environ["PROTODCS_DATA"]) / "clip_vitb32_features.safetensors")

    def stream(self, name, seed):
        """Text prototypes, features and labels of a stream; unknown samples have the label -1."""
        rng, content = np.random.default_rng(seed), self._content
        count, unknown, most = STREAMS[name]
        numbers = content["imagenet_y"].astype(int)
        known = rng.permutation(np.arange(self.parity, 1000, 2))[:count]
        places = np.full(1000, -1)
        places[known] = np.arange(count)
        inside = places[numbers] >= 0
        if unknown is None:
            others = content["imagenet_x"][~inside & (numbers % 2 == self.parity)]
        else:
            part = "val" if self.split == "tune" or f"{unknown}_test_x" not in content else "test"
            others = content[f"{unknown}_{part}_x"][content[f"{unknown}_{part}_y"].astype(int) % 2 == self.parity]
        others = others[rng.permutation(len(others))[:most]]
        features = unit(np.concatenate([content["imagenet_x"][inside], others]))
        labels = np.concatenate([places[numbers[inside]], np.full(len(others), -1)])
        order = rng.permutation(len(features))
        return unit(content["text_imagenet1000"][known]), features[order], labels[order]


def judged(decisions, labels):
    """Accuracy on known samples, AUROC, and the share of right decisions, in percent."""
    known = labels >= 0
    right = decisions.index == labels
    return {
        "accuracy": 100 * right[known].mean(),
        "auroc": 100 * auroc(-decisions.score[~known], -decisions.score[known]),
        "decisions": 100 * np.where(known, decisions.known & right, ~decisions.known).mean(),
    }


def with_errors(labels, classes, rng):
    """The labels, a tenth of them wrong: another class, or unknown instead of a class."""
    labels = labels.copy()
    for place in np.flatnonzero(rng.random(len(labels)) < WRONG):
        if labels[place] >= 0 and rng.random() < 0.5:
            labels[place] = -1
        else:
            labels[place] = (labels[place] + 1 + rng.integers(classes - 1)) % classes
    return labels


def measure_stream(pack, name, seed):
    """Rows on one stream: corrections of the first half, judged on the second."""
    prototypes, features, labels = pack.stream(name, seed)
    half, rng = len(features) // 2, np.random.default_rng(seed)
    engine = StreamDCS(prototypes)
    first = engine.observe_many(features[:half], scores=True)
    saved, later = engine.snapshot(), labels[half:]
    ignored = judged(engine.observe_many(features[half:]), later)
    yield {"stream": name, "seed": seed, "chosen": "ignored", "count": 0, "wrong": 0.0, **ignored}
    confidence = engine.probabilities(first.scores).max(axis=1)
    orders = {
        "queue": review_order(first.p_unknown, confidence, features[:half], max(COUNTS)),
        "random": rng.permutation(half)[: max(COUNTS)],
    }
    for chosen, order in orders.items():
        mistaken = with_errors(labels[order], len(prototypes), rng)
        for wrong, said in ((0.0, labels[order]), (WRONG, mistaken)):
            for count in COUNTS:
                corrected = StreamDCS.restore(saved)
                for place, label in zip(order[:count], said[:count], strict=True):
                    corrected.feedback(features[place], None if label < 0 else str(label))
                figures = judged(corrected.observe_many(features[half:]), later)
                row = {"stream": name, "seed": seed, "chosen": chosen, "count": count, "wrong": wrong}
                yield {**row, **figures}


def measure(split, seeds=None):
    """All rows."""
    pack = Pack(split)
    for name in STREAMS:
        for seed in seeds or SEEDS[split]:
            yield from measure_stream(pack, name, seed)


def differences(rows, name, chosen, count, wrong, figure):
    """By seed, how much better a figure is than without corrections."""
    before = {row["seed"]: row[figure] for row in rows if row["stream"] == name and row["chosen"] == "ignored"}
    return np.array(
        [
            row[figure] - before[row["seed"]]
            for row in rows
            if (row["stream"], row["chosen"], row["count"], row["wrong"]) == (name, chosen, count, wrong)
        ]
    )


def shown(values):
    """Mean and 95 % confidence interval."""
    return f"{values.mean():+.2f} ± {STUDENT * values.std(ddof=1) / np.sqrt(len(values)):.2f}"


def as_markdown(rows):
    """The tables."""
    lines = []
    for wrong, title in ((0.0, "Right corrections"), (WRONG, "One correction in ten is wrong")):
        lines += [f"## {title}", ""]
        cells = []
        for name in STREAMS:
            before = [row for row in rows if row["stream"] == name and row["chosen"] == "ignored"]
            means = [f"{np.mean([row[figure] for row in before]):.1f}" for figure in FIGURES]
            cells.append((name, "ignored", 0, *means))
            for chosen in ("queue", "random"):
                for count in COUNTS:
                    found = [differences(rows, name, chosen, count, wrong, figure) for figure in FIGURES]
                    cells.append((name, chosen, count, *map(shown, found)))
        lines += [*table(("stream", "corrections", "number", "accuracy", "AUROC", "right decisions"), cells), ""]
    return "\n".join(lines)


def plot(rows, file):
    """Draw what right corrections add to the share of right decisions, by their number."""
    figure, all_axes = charts.panels(2, share_y=True)
    for axes, chosen in zip(all_axes, ("queue", "random"), strict=True):
        for name, colour in zip(STREAMS, charts.COLOURS, strict=True):
            values = [differences(rows, name, chosen, count, 0.0, FIGURES[-1]) for count in COUNTS]
            means = [0, *(value.mean() for value in values)]
            spread = [0, *(STUDENT * value.std(ddof=1) / np.sqrt(len(value)) for value in values)]
            axes.errorbar([0, *COUNTS], means, spread, fmt="o-", color=colour, capsize=3, label=name)
        axes.set(xlabel="corrections")
        axes.set_title("chosen by the review queue" if chosen == "queue" else "of random samples", fontsize=10)
    all_axes[0].set_ylabel("right decisions, points more")
    all_axes[0].legend(frameon=False, fontsize=8)
    charts.save(figure, file)


if __name__ == "__main__":
    stored = RESULTS / "feedback.json"
    draw = "--draw" in sys.argv
    found = json.loads(stored.read_text()) if draw else list(measure("tune" if "tune" in sys.argv else "judge"))
    print(as_markdown(found))
    if "--write" in sys.argv:
        stored.write_text(json.dumps(found, indent=1) + "\n")
    if draw or "--write" in sys.argv:
        plot(found, stored.with_suffix(".png"))

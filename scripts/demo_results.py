"""Print the tables of docs/results/demo.md: `python scripts/demo_results.py`. Takes a few minutes on one CPU core."""

import argparse

import numpy as np

from protodcs import encoders, methods, metrics
from protodcs.demo import KNOWN, SHIFTS, DemoStream
from protodcs.demo.comparison import zero_shot_threshold

SHARES = (0.02, 0.1, 0.5)
STREAMS = {"without a shift": {"shifts": ("clean",)}, "with shifts": {"shifts": SHIFTS, "shift_length": 100}}
# Sizes of folders that are decided in two passes, as by `protodcs evaluate`, and their shares of unknown images.
FOLDERS, FOLDER_SHARES = (400, 1600), (0.0, 0.1, 0.3)
FIGURES = ("AUROC", "known images rejected", "unknown images found", "nearest class right")


def decided(encoder, features, threshold):
    """Return the decisions of each method on the features of one stream."""
    prototypes = encoder.prototypes(KNOWN)
    settings = {
        "zero_shot": {"threshold": threshold},
        "protodcs": {"preset": "paper", "temperature": 1 / encoder.logit_scale},
        "streamdcs": {"temperature": 1 / encoder.logit_scale},
    }
    return {
        name: methods.create(name, prototypes, KNOWN, **given).observe_many(features)
        for name, given in settings.items()
    }


def figures(labels, decisions):
    """Return AUROC, false reject, unknown recall and accuracy."""
    known = labels >= 0
    return (
        metrics.auroc(decisions.score[known], decisions.score[~known]),
        metrics.false_reject(labels, decisions.known),
        metrics.unknown_recall(labels, decisions.known),
        metrics.known_accuracy(decisions.index, labels),
    )


def folder_figures(encoder, features, labels):
    """Return false reject, unknown recall, and the lower side of the known scores over the upper side."""
    engine = methods.create("streamdcs", encoder.prototypes(KNOWN), KNOWN, temperature=1 / encoder.logit_scale)
    decisions = engine.observe_many(features, two_pass=True)
    low, middle, high = np.quantile(decisions.score[labels >= 0], (0.05, 0.5, 0.95))
    ratio = (middle - low) / (high - middle)
    return metrics.false_reject(labels, decisions.known), metrics.unknown_recall(labels, decisions.known), ratio


def folder_rows(encoder, share, streams):
    """Yield a row for each size of a folder. `streams` are the features and labels of some streams."""
    for images in FOLDERS:
        values = np.array(
            [
                folder_figures(encoder, features[start : start + images], labels[start : start + images])
                for features, labels in streams
                for start in range(0, len(labels), images)
            ]
        )
        (rejected, found, ratio), every = values.mean(axis=0), values[:, 0]
        found = f"{found:.1%}" if share else "-"
        rejected = f"{rejected:.1%} ({every.min():.1%} to {every.max():.1%})"
        yield f"| {share:.0%} | {images} | {len(values)} | {rejected} | {found} | {ratio:.2f} |"


def print_folders(encoder):
    """Print the table of folders: means, and the least and the largest fraction of rejected images."""
    print("\nFolders:\n\n| unknown | images | folders | known rejected | unknown found | lower over upper side |")
    print("|---|---|---|---|---|---|")
    for share in FOLDER_SHARES:
        streams = [DemoStream(max(FOLDERS), unknown=share, seed=seed) for seed in range(4)]
        encoded = [(encoder.encode(sample.image for sample in stream), stream.labels) for stream in streams]
        for row in folder_rows(encoder, share, encoded):
            print(row, flush=True)


def main():
    """Print one table for each kind of stream: means over the seeds, and the least and the largest value."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--images", type=int, default=1200, help="Images of a stream (default: 1200).")
    parser.add_argument("--seeds", type=int, default=5, help="Number of seeds, from 100 on (default: 5).")
    options = parser.parse_args()
    encoder = encoders.load("demo")
    threshold = zero_shot_threshold(encoder)
    for title, shifts in STREAMS.items():
        print(f"\nStreams {title}:\n\n| unknown | method | {' | '.join(FIGURES)} |\n|---|---|{'---|' * len(FIGURES)}")
        for share in SHARES:
            rows = {}
            for seed in range(100, 100 + options.seeds):
                stream = DemoStream(options.images, unknown=share, seed=seed, **shifts)
                features = encoder.encode(sample.image for sample in stream)
                for name, decisions in decided(encoder, features, threshold).items():
                    rows.setdefault(name, []).append(figures(stream.labels, decisions))
            for name, values in rows.items():
                cells = [
                    f"{mean:.1%} ({least:.1%} to {largest:.1%})"
                    for mean, least, largest in zip(
                        np.mean(values, axis=0), np.min(values, axis=0), np.max(values, axis=0), strict=True
                    )
                ]
                print(f"| {share:.0%} | {name} | {' | '.join(cells)} |", flush=True)
    print_folders(encoder)


if __name__ == "__main__":
    main()

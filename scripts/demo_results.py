"""Print the tables of docs/results/demo.md: `python scripts/demo_results.py`. Takes a few minutes on one CPU core."""

import argparse
from collections import Counter

import numpy as np

from protodcs import OpenSetClassifier, encoders, methods, metrics
from protodcs.core.prototypes import Prototypes
from protodcs.demo import KNOWN, SHIFTS, DemoStream
from protodcs.demo.comparison import Comparison, zero_shot_threshold
from protodcs.discovery import DiscoveryConfig
from protodcs.serve.stream.class_preview import ClassQuestion, preview
from protodcs.serve.stream.samples import StreamSamples

SHARES = (0.02, 0.1, 0.5)
STREAMS = {"without a shift": {"shifts": ("clean",)}, "with shifts": {"shifts": SHIFTS, "shift_length": 100}}
# Sizes of folders that are decided in two passes, as by `protodcs evaluate`, and their shares of unknown images.
FOLDERS, FOLDER_SHARES = (400, 1600), (0.0, 0.1, 0.3)
# Of a cluster that the web UI shows first, at least.
LARGE = 15
# Of the browser demo: title, first image and the one after the last.
PHASES = (("first 200 images", 0, 200), ("clear", 200, 400), ("fog", 400, 800), ("clear again", 800, 1200))
FIGURES = ("AUROC", "known images rejected", "unknown images found", "nearest class right")


def decided(encoder, features, threshold):
    """Return the decisions of each method on the features of one stream."""
    prototypes = encoder.prototypes(KNOWN)
    settings = {
        "zero_shot": {"threshold": threshold},
        "protodcs": {"preset": "paper", "temperature": 1 / encoder.logit_scale},
        "streamdcs": {"temperature": 1 / encoder.logit_scale},
    }
    vocabulary = {"streamdcs": encoder.vocabulary(classes=KNOWN)}
    return {
        name: methods.create(name, Prototypes(prototypes, vocabulary.get(name)), KNOWN, **given).observe_many(features)
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
    engine = OpenSetClassifier.with_encoder(encoder, KNOWN).engine
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


def rates(steps, decision_of):
    """Return the fraction of unknown images that were found, and of known ones that were rejected."""
    known = np.array([step.sample.label >= 0 for step in steps])
    rejected = np.array([not decision_of(step).known for step in steps])
    return np.array([rejected[~known].mean(), rejected[known].mean()])


def phase_rows(seeds):
    """Yield a row for each phase of the browser demo: StreamDCS, zero-shot, and both balanced accuracies."""
    runs = [
        list(Comparison(DemoStream(1200, unknown=0.3, shifts=("clean", "fog", "clean"), seed=seed))) for seed in seeds
    ]
    for title, start, end in PHASES:
        ours, theirs = (
            np.array([rates(steps[start:end], lambda step, name=name: getattr(step, name)) for steps in runs])
            for name in ("decision", "frozen")
        )
        for values in zip(
            ("mean", *map(str, seeds)), [ours.mean(axis=0), *ours], [theirs.mean(axis=0), *theirs], strict=True
        ):
            seed, (found, rejected), (zero_found, zero_rejected) = values
            balanced, zero_balanced = (1 + found - rejected) / 2, (1 + zero_found - zero_rejected) / 2
            yield (
                f"| {title} | {seed} | {found:.1%} | {rejected:.1%} | {zero_found:.1%} | {zero_rejected:.1%} | "
                f"{balanced:.1%} | {zero_balanced:.1%} |"
            )


def naming_rows(encoder, seeds):
    """Yield a row for each seed: a cluster becomes a class as in the web UI, and other images are judged."""
    prototypes = Prototypes(encoder.prototypes(KNOWN), encoder.vocabulary(classes=KNOWN))
    for seed in seeds:
        engine = methods.create("streamdcs", prototypes, KNOWN, temperature=1 / encoder.logit_scale)
        samples = StreamSamples(encoder.dimension, DiscoveryConfig(), None)
        shown = list(DemoStream(800, unknown=0.3, seed=seed))
        features = encoder.encode(sample.image for sample in shown)
        for place, feature in enumerate(features):
            samples.add(place, feature, engine.observe(feature))
        samples.edit(samples.with_groups(b'{"action": "update"}'), engine)
        clear = [one for one in samples.facts()["clusters"] if one["size"] >= LARGE]
        cluster = max(clear, key=lambda one: one["similarity"])
        kinds = Counter(shown[place].kind for place in cluster["positions"])
        kind = kinds.most_common(1)[0][0]
        tried = samples.prototypes(cluster["id"], prototypes.unit, encoder.prototypes([kind])[0])
        prototype, facts = preview(ClassQuestion(engine, kind, tried, samples.positions[-500:], features[-500:]))
        engine.add_class(kind, prototype)
        later = list(DemoStream(1200, unknown=0.3, seed=seed + 1000))
        decisions = engine.observe_many(encoder.encode(sample.image for sample in later))
        named = decisions.known & (decisions.index == len(KNOWN))
        new = np.array([sample.kind == kind for sample in later])
        purity = kinds[kind] / sum(kinds.values())
        changed = f"{facts['would_change']}, {facts['known_today']}"
        yield (
            f"| {seed} | {kind} | {cluster['size']} | {purity:.0%} | {changed} | {named[new].mean():.1%} | "
            f"{named[~new].mean():.2%} |"
        )


def print_story(encoder, seeds):
    """Print what a viewer of the browser demo sees."""
    print("\nPhases:\n\n| phase | seed | found | rejected | zero-shot: found | rejected | balanced | zero-shot |")
    print("|---|---|---|---|---|---|---|---|")
    for row in phase_rows(seeds):
        print(row, flush=True)
    print("\nNaming:\n\n| seed | kind | images | of this kind | preview: would change, known | recognised | others |")
    print("|---|---|---|---|---|---|---|")
    for row in naming_rows(encoder, seeds):
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
    print_story(encoder, range(500, 500 + options.seeds))


if __name__ == "__main__":
    main()

"""Discovery: how pure clusters are, how soon classes are found, and what naming them costs.

`python -m benchmarks discovery` judges on the `judge` split; `python -m benchmarks.discovery tune` measures the same on
the split on which the settings were chosen. The unknown samples are real CLIP features of DTD, UCF101 and Oxford
Flowers. `python -m benchmarks.discovery pixels FOLDER` writes images, and the contact sheets of their clusters.
"""

import collections
import csv
import io
import json
import os
import resource
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.timing import one_thread, table, timed

one_thread()

import numpy as np  # noqa: E402 - the thread limits above must come first
import pyarrow.parquet as parquet  # noqa: E402
from PIL import Image  # noqa: E402
from safetensors.numpy import load_file  # noqa: E402
from sklearn import cluster, metrics  # noqa: E402
from typer.testing import CliRunner  # noqa: E402

from benchmarks import charts  # noqa: E402
from protodcs import StreamDCS  # noqa: E402
from protodcs.cli import app  # noqa: E402
from protodcs.discovery import Discovery, DiscoveryConfig  # noqa: E402
from protodcs.metrics import auroc  # noqa: E402

NAME = "discovery"
SETS = {
    "dtd": ("dtd",),
    "ucf": ("ucf101",),
    "flowers": ("oxford_flowers",),
    "mix": ("dtd", "ucf101", "oxford_flowers"),
}
SEEDS = {"tune": (1, 2, 3), "judge": (21, 22, 23)}
FALSE_REJECTS = 0.09
CAPACITY = 2000
KNOWN_CLASSES = 100
# Labels of known classes start here, so that they differ from those of unknown ones.
KNOWN = 100_000
# A class is discovered if a cluster of this size has this share of its samples.
LEAST_SIZE, LEAST_PURITY = 10, 0.6
PARTS = ("clusters", "until", "naming", "pixels", "passes")
# Known samples that `Discovery` sees beside rejected ones.
NOTED = 1000
# What we saw on the contact sheets of `python -m benchmarks.discovery pixels FOLDER`. Look again if the table changes.
PIXELS_SEEN = """\
We looked at the ten contact sheets that `python -m benchmarks.discovery pixels FOLDER` writes:

- **demo**: clocks, spiders, hammers, guitars and ghosts have rows of their own. Bells and snowmen are often grouped by
  colour, and some rows mix ladders with anchors. 69 of 74 clusters have 60 % of one kind. Suggested names are of no
  use: the encoder does not know these words.
- **mini**: stockings, arches, lighthouses, scorpions, jellyfish and acorns have clean rows. Pictures of people form
  clusters whatever they hold, such as oboes and drumsticks. 69 of 101 clusters have 60 % of one class. 30 of the 34
  names with a margin of at least 0.04 are right, and 29 of the 67 others.
- A class is often in two or three rows, such as lighthouses, bells and trilobites. Rows are ordered by size, and
  no image is there twice.
"""


def unit(rows):
    """Rows of length one, as float32."""
    rows = rows.astype(np.float32)
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


class Pack:
    """The feature pack: labelled samples of one split."""

    def __init__(self, split):
        self.split = split
        self.parity = int(split == "judge")
        self._content = load_file(Path(os.environ["PROTODCS_DATA"]) / "clip_vitb32_features.safetensors")
        self.texts = unit(self._content["text_imagenet1000"])

    def unknown(self, name):
        """Features and class numbers of the unknown samples of a set."""
        features, labels = [], []
        part = "val" if self.split == "tune" else "test"
        for i, source in enumerate(SETS[name]):
            numbers = self._content[f"{source}_{part}_y"].astype(int)
            chosen = numbers % 2 == self.parity
            features.append(unit(self._content[f"{source}_{part}_x"][chosen]))
            labels.append(1000 * i + numbers[chosen])
        return np.concatenate(features), np.concatenate(labels)

    def known(self):
        """Features and class numbers of ImageNet samples."""
        numbers = self._content["imagenet_y"].astype(int)
        chosen = numbers % 2 == self.parity
        return unit(self._content["imagenet_x"][chosen]), numbers[chosen]

    def rejected(self, name, seed):
        """Unknown samples of a set mixed with falsely rejected known ones, in random order; other known samples."""
        rng = np.random.default_rng(seed)
        features, labels = self.unknown(name)
        others, numbers = self.known()
        chosen, accepted = np.split(
            rng.permutation(len(others)), [round(len(features) * FALSE_REJECTS / (1 - FALSE_REJECTS))]
        )
        features = np.concatenate([features, others[chosen]])
        labels = np.concatenate([labels, KNOWN + numbers[chosen]])
        order = rng.permutation(len(features))
        return features[order], labels[order], others[accepted]


# Quality of clusters.


def majority(labels):
    """The most frequent label and its share."""
    values, counts = np.unique(labels, return_counts=True)
    return int(values[counts.argmax()]), counts.max() / len(labels)


def discovered(groups, labels):
    """The class of each cluster that discovers one."""
    found = []
    for group in np.unique(groups[groups >= 0]):
        members = labels[groups == group]
        name, share = majority(members)
        if len(members) >= LEAST_SIZE and share >= LEAST_PURITY and name < KNOWN:
            found.append(name)
    return found


def quality(groups, labels):
    """Figures of one clustering; -1 is no cluster. Purity, NMI and ARI are over the samples in clusters."""
    inside = groups >= 0
    found = discovered(groups, labels)
    pure = sum(majority(labels[groups == g])[1] * (groups == g).sum() for g in np.unique(groups[inside]))
    _, sizes = np.unique(labels[labels < KNOWN], return_counts=True)
    return {
        "clusters": len(np.unique(groups[inside])),
        "purity": pure / max(1, inside.sum()),
        "coverage": inside.mean(),
        "nmi": metrics.normalized_mutual_info_score(labels[inside], groups[inside]),
        "ari": metrics.adjusted_rand_score(labels[inside], groups[inside]),
        "discovered": len(set(found)),
        "classes": int((sizes >= LEAST_SIZE).sum()),
        "per class": len(found) / max(1, len(set(found))),
    }


def centred(features):
    """Unit directions from the mean."""
    return unit(features - features.mean(axis=0))


def reduced(features, count=64):
    """Centred features in their first principal components."""
    rows = centred(features).astype(np.float64)
    _, vectors = np.linalg.eigh(rows.T @ rows)
    return unit(rows @ vectors[:, ::-1][:, :count]).astype(np.float64)


def with_discovery(features, known=(), algorithm="hdbscan"):
    """The clusters of `Discovery`; None if the algorithm is not installed."""
    found = Discovery(features.shape[1], DiscoveryConfig(capacity=CAPACITY, interval=0, algorithm=algorithm))
    for feature in known[:NOTED]:
        found.note_known(feature)
    found.add_many(features)
    try:
        found.update()
    except ModuleNotFoundError:
        return None
    groups = np.full(len(features), -1)
    for one in found.clusters():
        groups[one.keys] = one.id
    return groups


def with_evoc(features, *_):
    """EVoC, the finest layer; None if it is not installed."""
    try:
        from evoc import EVoC
    except ImportError:
        return None
    model = EVoC(random_state=0)
    model.fit(centred(features))
    return np.asarray(model.cluster_layers_[0])


def with_dbstream(features, *_):
    """DBSTREAM of river; None if it is not installed."""
    try:
        from river.cluster import DBSTREAM
    except ImportError:
        return None
    model = DBSTREAM(clustering_threshold=0.9, fading_factor=0.001, cleanup_interval=1000, minimum_weight=2.0)
    rows = [dict(enumerate(row)) for row in reduced(features, 32)]
    for row in rows:
        model.learn_one(row)
    return np.array([model.predict_one(row) for row in rows])


def with_default_hdbscan(features, *_):
    """HDBSCAN with its default way to select clusters."""
    return cluster.HDBSCAN(min_cluster_size=5, min_samples=2, copy=True).fit_predict(reduced(features))


METHODS = {
    "Discovery": lambda x, _, known: with_discovery(x, known),
    "Discovery, rejected samples only": lambda x, *_: with_discovery(x),
    'Discovery, algorithm="evoc"': lambda x, _, known: with_discovery(x, known, "evoc"),
    "HDBSCAN, default selection": with_default_hdbscan,
    "k-means, true k": lambda x, k, _: cluster.KMeans(k, n_init=1, random_state=0).fit_predict(centred(x)),
    "BIRCH, threshold 0.5, true k": lambda x, k, _: cluster.Birch(threshold=0.5, n_clusters=k).fit_predict(reduced(x)),
    "EVoC": with_evoc,
    "DBSTREAM": with_dbstream,
}


def clusterings(pack, names, seeds):
    """Rows on the quality of each method with the last 2,000 rejected samples."""
    for name in names:
        for method, find in METHODS.items():
            figures, seconds = [], []
            for seed in seeds:
                features, labels, known = pack.rejected(name, seed)
                features, labels = features[-CAPACITY:], labels[-CAPACITY:]
                taken, groups = timed(find, features, len(np.unique(labels[labels < KNOWN])), known)
                if groups is not None:
                    figures.append(quality(groups, labels))
                    seconds.append(taken)
            if figures:
                means = {key: float(np.mean([row[key] for row in figures])) for key in figures[0]}
                yield {
                    "part": "clusters",
                    "set": name,
                    "method": method,
                    **means,
                    "seconds": float(np.mean(seconds)),
                    "seeds": len(figures),
                }


def until_discovery(pack, names, seeds):
    """Rows on how many samples of a class arrive until it is discovered, in streams with the default settings."""
    for name in names:
        waits, count = [], []
        for seed in seeds:
            features, labels, known = pack.rejected(name, seed)
            found, seen, passes = Discovery(features.shape[1]), {}, 0
            for i, feature in enumerate(features):
                found.note_known(known[i % len(known)])
                found.add(feature)
                if found.stats()["passes"] > passes or i == len(features) - 1:
                    passes = found.stats()["passes"]
                    groups = np.full(i + 1, -1)
                    for one in found.clusters():
                        groups[one.keys] = one.id
                    for label in discovered(groups, labels[: i + 1]):
                        seen.setdefault(label, int((labels[: i + 1] == label).sum()))
            waits += seen.values()
            count.append(len(seen))
        low, middle, high = np.quantile(waits, (0.25, 0.5, 0.75)) if waits else (np.nan,) * 3
        yield {
            "part": "until",
            "set": name,
            "discovered": float(np.mean(count)),
            "low": low,
            "median": middle,
            "high": high,
        }


# From cluster to class.


def naming(pack, name, seed):
    """Name the ten largest clusters of the first half of a stream with their true names; judge on the second half."""
    rng = np.random.default_rng(seed)
    others, numbers = pack.known()
    chosen = rng.permutation(np.unique(numbers))[:KNOWN_CLASSES]
    inside = np.isin(numbers, chosen)
    unknown, names = pack.unknown(name)
    features = np.concatenate([others[inside], unknown])
    labels = np.concatenate([KNOWN + numbers[inside], names])
    order = rng.permutation(len(features))
    features, labels = features[order], labels[order]
    half = len(features) // 2

    engine = StreamDCS(pack.texts[chosen], [str(KNOWN + number) for number in chosen])
    first = engine.observe_many(features[:half])
    found = Discovery(features.shape[1], DiscoveryConfig(interval=0))
    note_or_add(found, features[:half], first.known)
    found.update()
    plain = StreamDCS.restore(engine.snapshot())
    added = {}
    for one in found.clusters():
        label, _ = majority(labels[one.keys])
        if len(added) < 10 and label < KNOWN and label not in added.values():
            engine.add_class(str(label), found.prototype(one.id, pack.texts[chosen]))
            found.name(one.id, str(label))
            added[one.id] = label
    new = list(added.values())
    decisions = plain.observe_many(features[half:])
    joined = note_or_add(found, features[half:], decisions.known)
    named = np.array([added.get(number, -1) for number in joined])
    is_new = np.isin(labels[half:], new)
    return {
        "added": len(new),
        "before": judged(decisions, labels[half:], new),
        "after": judged(engine.observe_many(features[half:]), labels[half:], new),
        "by cluster": 100 * (named == labels[half:])[is_new].mean(),
        "wrong": 100 * (named >= 0)[~is_new & (labels[half:] < KNOWN)].mean(),
    }


def note_or_add(found, features, known):
    """Show a stream to a discovery. Return the cluster of each sample; None for known ones."""
    joined = []
    for i, feature in enumerate(features):
        joined.append(found.note_known(feature) if known[i] else found.add(feature, i))
    return joined


def judged(decisions, labels, added):
    """Accuracy on the new classes, and accuracy and AUROC on all others."""
    new, known = np.isin(labels, added), labels >= KNOWN
    unknown = ~new & ~known
    right = np.array([decisions.classes[i] for i in decisions.index]) == labels.astype(str)
    return {
        "new": 100 * (right & decisions.known)[new].mean(),
        "accuracy": 100 * right[known].mean(),
        "auroc": 100 * auroc(decisions.openness[unknown], decisions.openness[known]),
    }


def namings(pack, names, seeds):
    """Rows on what naming ten clusters brings and costs."""
    for name in names:
        # Streams without any cluster have nothing to name.
        results = [result for result in (naming(pack, name, seed) for seed in seeds) if result["added"]]
        if not results:
            continue
        row = {"part": "naming", "set": name, "added": float(np.mean([result["added"] for result in results]))}
        for key in ("new", "accuracy", "auroc"):
            for when in ("before", "after"):
                row[f"{key} {when}"] = float(np.mean([result[when][key] for result in results]))
        for key in ("by cluster", "wrong"):
            row[key] = float(np.mean([result[key] for result in results]))
        yield row


def offered(count, chunk=10_000):
    """Yield chunks of random features: directions around 200 centres."""
    rng = np.random.default_rng(0)
    centres, shared = rng.normal(size=(200, 512)), 2 * rng.normal(size=512)
    for _ in range(0, count, chunk):
        rows = centres[rng.integers(200, size=chunk)] + rng.normal(size=(chunk, 512)) + shared
        yield rows.astype(np.float32)


def passes(sizes, count):
    """Rows on the CPU time of one pass with a full storage: the last of four while `count` samples are offered."""
    for size in sizes:
        found = Discovery(512, DiscoveryConfig(capacity=size, interval=0))
        adding, done = 0.0, 0
        for rows in offered(count):
            started = time.process_time()
            found.add_many(rows)
            adding, done = adding + time.process_time() - started, done + len(rows)
            if 4 * done // count > 4 * (done - len(rows)) // count:
                started = time.process_time()
                found.update()
                seconds = time.process_time() - started
        stats = found.stats()
        yield {
            "part": "passes",
            "size": size,
            "offered": done,
            "clusters": stats["clusters"],
            "seconds": seconds,
            "add": 1e6 * adding / done,
            "memory": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        }


# From pixels. The kind of an image is in the name of its file: NUMBER-KIND.png.


def drawn(folder, seed):
    """Write 400 drawn images, half of them unknown. Return the encoder, the known classes and a vocabulary."""
    from protodcs.demo import EXTRA, KNOWN, UNKNOWN, DemoStream

    for number, sample in enumerate(DemoStream(400, unknown=0.5, seed=seed)):
        Image.fromarray(sample.image).save(folder / f"{number:03d}-{sample.kind}.png")
    return "demo", KNOWN, (*UNKNOWN, *EXTRA)


def photos(folder, seed):
    """Write 400 images of CIFAR-10, which are known, and 600 of 12 classes of Tiny-ImageNet."""
    rng = np.random.default_rng(seed)
    known, classes = labelled("cifar10_test")
    unknown, names = labelled("tiny_imagenet_val")
    kinds = {names[i] for i in rng.permutation(len(names))[:12]}
    chosen = [known[i] for i in rng.permutation(len(known))[:400]] + [row for row in unknown if row[0] in kinds]
    for number, i in enumerate(rng.permutation(len(chosen))):
        kind, content = chosen[i]
        with Image.open(io.BytesIO(content)) as image:
            image.convert("RGB").save(folder / f"{number:03d}-{kind}.png")
    return "mini", classes, names


def labelled(name):
    """Return (class, encoded image) of each row of a dataset, and the class names."""
    rows = parquet.read_table(Path(os.environ["PROTODCS_DATA"]) / f"{name}.parquet")
    classes = json.loads(rows.schema.metadata[b"classes"])
    return [(classes[row["label"]], row["image"]) for row in rows.to_pylist()], classes


def from_pixels(folder, seeds=range(5)):
    """Rows on the clusters of `protodcs discover` on folders of images."""
    for write in (drawn, photos):
        for seed in seeds:
            images, out = folder / f"{write.__name__}-{seed}", folder / f"{write.__name__}-{seed}-clusters"
            images.mkdir(parents=True)
            encoder, classes, vocabulary = write(images, seed)
            for name, lines in (("classes", classes), ("vocabulary", vocabulary)):
                (folder / f"{name}.txt").write_text("\n".join(lines))
            options = ("--classes", folder / "classes.txt", "--vocabulary", folder / "vocabulary.txt")
            command = ["discover", images, *options, "--model", encoder, "--out", out, "--json"]
            result = CliRunner().invoke(app, [str(part) for part in command])
            assert result.exit_code == 0, result.output
            with (out / "clusters.csv").open(newline="") as lines:
                yield {"part": "pixels", "encoder": encoder, "seed": seed, **judged_rows(list(csv.DictReader(lines)))}


def judged_rows(rows):
    """Figures of one clusters.csv."""
    kinds, clusters = [row["sample"].split("-", 1)[1].removesuffix(".png") for row in rows], {}
    for kind, row in zip(kinds, rows, strict=True):
        if row["cluster"]:
            clusters.setdefault((row["cluster"], row["suggestion"]), []).append(kind)
    most = {cluster: collections.Counter(members).most_common(1)[0] for cluster, members in clusters.items()}
    inside = sum(map(len, clusters.values()))
    return {
        "rejected": len(rows),
        "clusters": len(clusters),
        "coverage": inside / len(rows),
        "purity": sum(count for _, count in most.values()) / max(1, inside),
        "kinds": len({kind for kind, _ in most.values()}),
        "named": sum(suggestion == kind for (_, suggestion), (kind, _) in most.items()) / max(1, len(clusters)),
    }


def measure(quick, split="judge"):
    """All rows."""
    pack, seeds = Pack(split), SEEDS[split][:1] if quick else SEEDS[split]
    names = ("dtd",) if quick else tuple(SETS)
    with tempfile.TemporaryDirectory() as folder:
        pixels = list(from_pixels(Path(folder), range(1 if quick else 5)))
    return [
        *clusterings(pack, names, seeds),
        *until_discovery(pack, names, seeds),
        *namings(pack, names, seeds),
        *pixels,
        *(passes((500,), 10_000) if quick else passes((2000, 10_000, 50_000), 1_000_000)),
    ]


# Columns of the table on images: the figure and its format.
PIXEL_COLUMNS = (
    ("rejected", ".0f"),
    ("coverage", ".2f"),
    ("clusters", ".0f"),
    ("purity", ".2f"),
    ("kinds", ".0f"),
    ("named", ".2f"),
)


def spread(rows, encoder, figure, form):
    """Mean, least and largest value of a figure."""
    values = [row[figure] for row in rows if row["encoder"] == encoder]
    return f"{np.mean(values):{form}} ({min(values):{form}} to {max(values):{form}})"


def as_markdown(rows):
    """The page."""
    by = {part: [row for row in rows if row["part"] == part] for part in PARTS}
    lines = [
        "Unknown samples are real CLIP ViT-B/32 features with 9 % falsely rejected ImageNet samples among them. A",
        "class is discovered if a cluster of at least 10 samples has 60 % of one class. Figures are means over seeds.",
        "",
        "## Clusters of the last 2,000 samples",
        "",
        "Purity, NMI and ARI are over the samples in clusters, so they are not comparable between methods that leave",
        "out different samples. `Discovery` was tuned on another split, the other methods were not tuned. k-means and",
        "BIRCH are told the true number of classes. HDBSCAN with default selection has the same PCA and the same two",
        "sizes as `Discovery`. DBSTREAM works on 32 principal components.",
        "",
        *table(
            ("set", "method", "clusters", "purity", "in clusters", "NMI", "ARI", "discovered", "per class", "seeds"),
            [
                (
                    row["set"],
                    row["method"],
                    f"{row['clusters']:.0f}",
                    f"{row['purity']:.2f}",
                    f"{row['coverage']:.2f}",
                    f"{row['nmi']:.2f}",
                    f"{row['ari']:.2f}",
                    f"{row['discovered']:.1f} of {row['classes']:.0f}",
                    f"{row['per class']:.2f}",
                    row["seeds"],
                )
                for row in by["clusters"]
            ],
        ),
        "",
        "## Samples of a class until it is discovered",
        "",
        *table(
            ("set", "discovered", "median", "quartiles"),
            [
                (row["set"], f"{row['discovered']:.1f}", f"{row['median']:.0f}", f"{row['low']:.0f}-{row['high']:.0f}")
                for row in by["until"]
            ],
        ),
        "",
        "## Ten clusters become classes",
        "",
        "The ten largest clusters of the first half of a stream get their true names. The second half is judged, in",
        'percent. `name`: the engine stays as it is, and named clusters label what it rejects. "Wrong" is the share',
        "of other unknown samples that get a name. `add_class`: the engine gets the prototypes of the clusters.",
        "Accuracy and AUROC are those on all other classes.",
        "",
        "![Later samples that get the name of their cluster, rightly or wrongly, and as added classes](discovery.png)",
        "",
        *table(
            (
                "set",
                "new classes",
                "`name`: accuracy",
                "wrong",
                "`add_class`: accuracy",
                "known: accuracy before",
                "after",
                "AUROC before",
                "after",
            ),
            [
                (
                    row["set"],
                    f"{row['added']:.1f}",
                    *(f"{row[key]:.1f}" for key in ("by cluster", "wrong", "new after")),
                    *(
                        f"{row[key]:.1f}"
                        for key in ("accuracy before", "accuracy after", "auroc before", "auroc after")
                    ),
                )
                for row in by["naming"]
            ],
        ),
        "",
        "## Clusters of images",
        "",
        "`protodcs discover` on folders of images. `demo`: 400 drawn images, 200 of them",
        "of 10 unknown kinds. `mini`: 400 images of the ten known classes of CIFAR-10, and 600 of 12 classes of",
        "Tiny-ImageNet. The demo encoder has never seen the unknown kinds, neither images nor words. The mini encoder",
        "was trained on both sets. A kind counts if it is the most frequent one of a cluster. A name is right if it is",
        "that kind. Means over seeds 0 to 4, with the least and the largest value.",
        "",
        *table(
            ("encoder", "rejected", "in clusters", "clusters", "purity", "kinds", "right names"),
            [
                (encoder, *(spread(by["pixels"], encoder, *column) for column in PIXEL_COLUMNS))
                for encoder in ("demo", "mini")
            ],
        ),
        "",
        PIXELS_SEEN,
        "## Time of one pass",
        "",
        "1,000,000 made-up features of 512 dimensions are offered, and a pass runs after each quarter. The storage is",
        "full. Times are CPU seconds of one thread. Memory is the peak of the process.",
        "",
        *table(
            ("capacity", "offered", "clusters", "last pass (s)", "one `add` (µs)", "memory (MB)"),
            [
                (
                    f"{row['size']:,}",
                    f"{row['offered']:,}",
                    f"{row['clusters']:,}",
                    f"{row['seconds']:.1f}",
                    f"{row['add']:.0f}",
                    f"{row['memory']:.0f}",
                )
                for row in by["passes"]
            ],
        ),
    ]
    return "\n".join(lines) + "\n"


def plot(rows, file):
    """Draw what naming the ten largest clusters brings, and what it costs."""
    mine = [row for row in rows if row["part"] == "naming"]
    bars = (("by cluster", "named: found"), ("wrong", "named: wrong"), ("new after", "added as classes: right"))
    figure, (axes,) = charts.panels(1, width=7)
    for side, ((key, label), colour) in enumerate(zip(bars, charts.COLOURS, strict=False)):
        drawn = axes.bar(
            np.arange(len(mine)) + 0.27 * side, [row[key] for row in mine], 0.25, color=colour, label=label
        )
        axes.bar_label(drawn, fmt="%.0f", fontsize=8, padding=1)
    axes.set_xticks(np.arange(len(mine)) + 0.27, [row["set"] for row in mine])
    axes.set_ylabel("% of the samples")
    axes.set_ylim(0, 115)
    axes.legend(frameon=False, fontsize=8, ncols=3, loc="upper left")
    charts.save(figure, file)


if __name__ == "__main__":
    if "pixels" in sys.argv:
        for row in from_pixels(Path(sys.argv[-1])):
            print(row, flush=True)
    else:
        print(as_markdown(measure(quick="quick" in sys.argv, split="tune" if "tune" in sys.argv else "judge")))

"""Warnings about cameras, some with a surge of unknown images, some in fog: `python -m benchmarks scene`.

Each camera is a stream of the service with its guard, over CLIP's features of `user_streams`: one of eight sets of
classes and unknown images, 1 to 15 % unknown, half of them with two frequent classes. One sample a second for twenty
minutes. After eight minutes, 40 % of the images of some cameras are unknown, and the features of others are blended
with one common direction, just as much as lowers the zero-shot accuracy by ten points. The direction is random, or the
feature of one image. Everything is shown twice: with shuffled images, and in runs of eight of one class, which the
unknown images come in, too. Of 267 usual cameras, at most three should be warned about wrongly. Split `judge`, seed
100; the rule was chosen on `tune`.
"""

from benchmarks.timing import one_thread, table

one_thread()

import numpy as np  # noqa: E402 - the thread limits above must come first

from benchmarks import charts, guards  # noqa: E402
from protodcs import StreamDCSConfig  # noqa: E402
from protodcs.bench import user_streams  # noqa: E402
from protodcs.bench.feature_pack import unit  # noqa: E402
from protodcs.serve.guard import GuardSettings  # noqa: E402
from protodcs.serve.stream.records import Kind  # noqa: E402

NAME = "scene"
SPLIT, SEED = "judge", 100
CAMERAS = {"usual": 267, "surge": 60, "fog": 40}
SETS = (
    ("wild", "near"), ("wild", "objects"), ("wild", "ucf"), ("pets", "near"), ("pets", "objects"), ("pets", "sun"),
    ("catdog", "near"), ("catdog", "dtd"),
)  # fmt: skip
LENGTH, ONSET = 1200, 480
SURGE, LOSS = 0.40, 0.10


def camera(kind, run, split, random):
    """Prototypes and features of one camera."""
    family, unknown = SETS[random.integers(len(SETS))]
    usual, seed = random.uniform(0.01, 0.15), int(random.integers(1 << 30))
    known = user_streams.stream(family, unknown, "0", seed, split, bool(random.integers(2)), run, LENGTH)
    others = user_streams.stream(family, unknown, "1", seed, split).features
    shares = np.where(np.arange(LENGTH) < ONSET, usual, SURGE if kind == "surge" else usual)
    strange = in_runs(shares, run, random)
    place = np.where(strange, np.cumsum(strange), np.cumsum(~strange)) - 1
    images = np.where(strange[:, None], others[place % len(others)], known.features[place % len(known.features)])
    labels = np.where(strange, -1, known.labels[place % len(known.labels)])
    features = unit(images.astype(np.float32))
    if kind == "fog":
        features[ONSET:] = foggy(features[ONSET:], labels[ONSET:], known.prototypes, random)
    return known.prototypes, features


def in_runs(shares, run, random):
    """Which samples are unknown (n,), by the share at each place."""
    strange, at = np.zeros(len(shares), dtype=bool), 0
    while at < len(shares):
        length = 1 if run == 1 else int(random.geometric(1 / run))
        strange[at : at + length] = random.random() < shares[at]
        at += length
    return strange


def foggy(features, labels, prototypes, random):
    """The features, blended with one direction until the accuracy has fallen far enough."""
    drawn = random.normal(size=features.shape[1]) if random.integers(2) else features[random.integers(len(features))]
    direction, clear = unit(drawn.astype(np.float32)), accuracy(features, labels, prototypes)
    for share in np.arange(0.02, 1.0, 0.02):
        blended = unit((1.0 - share) * features + share * direction)
        if accuracy(blended, labels, prototypes) <= clear - LOSS:
            break
    return blended


def accuracy(features, labels, prototypes):
    """Zero-shot accuracy on known images."""
    known = labels >= 0
    return float(((features[known] @ prototypes.T).argmax(axis=1) == labels[known]).mean())


def watched(prototypes, features):
    """What the service says of a stream after each sample: the warning or the guard; None if all is well."""
    live, said = guards.live(prototypes, StreamDCSConfig(), GuardSettings()), []
    for number, feature in enumerate(features):
        live.change(Kind.OBSERVE, f"key {number}", feature.astype("<f4").tobytes(), 0.0)
        summary = live.summary()
        said.append(summary.warning or summary.guard_reason)
    return said


def measure(quick=False, split=SPLIT, seed=SEED, cameras=CAMERAS):
    """A row for each kind of camera, shuffled and in runs."""
    rows = []
    for run in (1, 8):
        random = np.random.default_rng(seed)
        for kind, count in cameras.items():
            found = [watched(*camera(kind, run, split, random)) for _ in range(count // 10 + 1 if quick else count)]
            firsts = [next((n for n, one in enumerate(said[ONSET:], 1) if one), None) for said in found]
            row = {
                "order": "shuffled" if run == 1 else "runs of 8",
                "cameras": kind,
                "count": len(found),
                "before": sum(any(said[:ONSET]) for said in found),
                "after": sum(any(said[ONSET:]) for said in found),
                "at_the_end": sum(said[-1] is not None for said in found),
                "seconds": None if kind == "usual" else float(np.median([n for n in firsts if n] or [np.nan])),
                "said": sorted({one for said in found for one in said[ONSET:] if one}),
            }
            rows.append(row)
    return rows


def as_markdown(rows):
    head = ("images", "cameras", "number", "warned before", "warned after", "still at the end", "seconds until", "as")
    lines = table(
        head,
        [
            (
                row["order"],
                row["cameras"],
                row["count"],
                row["before"],
                row["after"],
                row["at_the_end"],
                "" if row["seconds"] is None else f"{row['seconds']:.0f}",
                ", ".join(row["said"]),
            )
            for row in rows
        ],
    )
    picture = "![Share of the cameras that are warned about, before and after the change](scene.png)"
    return "\n".join([*__doc__.split("\n\n", 1)[1].splitlines(), "", picture, "", *lines, ""])


def plot(rows, file):
    """Draw the share of cameras that were warned about before and after the change."""
    orders = list(dict.fromkeys(row["order"] for row in rows))
    figure, all_axes = charts.panels(len(orders), share_y=True)
    for axes, order in zip(all_axes, orders, strict=True):
        mine = [row for row in rows if row["order"] == order]
        for side, (name, colour) in enumerate((("before", charts.GREY), ("after", charts.ORANGE))):
            shares = [100 * row[name] / row["count"] for row in mine]
            bars = axes.bar(np.arange(len(mine)) + 0.38 * side, shares, 0.36, color=colour, label=name)
            axes.bar_label(bars, [f"{share:.0f} %" for share in shares], fontsize=8, padding=1)
        axes.set_xticks(np.arange(len(mine)) + 0.19, [f"{row['cameras']} ({row['count']})" for row in mine])
        axes.set_ylim(0, 112)
        axes.set_title(f"images {order}" if order == "shuffled" else f"images in {order}", fontsize=10)
    all_axes[0].set_ylabel("cameras warned about, in %")
    all_axes[0].legend(frameon=False, fontsize=8, loc="upper left")
    charts.save(figure, file)

"""Guards: streams that try to poison, and how often the guards fire on honest ones. `python -m benchmarks guards`.

Every stream runs through a live stream of the service, guard and all. Honest streams are the benchmark's: CLIP's
features on the judge split, and where `PROTODCS_FEATURES` names a folder of features of the mini encoder at severity 5,
as `protodcs bench run --features` takes it, those too. A stream on which no guard fires is answered as without one.
"""

import os
from pathlib import Path

from benchmarks.timing import in_turns, one_thread, ratio, spread, table

one_thread()

import numpy as np  # noqa: E402 - the thread limits above must come first

from benchmarks import attacks  # noqa: E402
from protodcs import ProtoDCSConfig, Prototypes, StreamDCSConfig, metrics  # noqa: E402
from protodcs.bench import feature_pack, streams  # noqa: E402
from protodcs.bench.grid import ImageStream  # noqa: E402
from protodcs.serve.guard import GuardAction, GuardSettings  # noqa: E402
from protodcs.serve.store.values import AcquiredStream, Fence  # noqa: E402
from protodcs.serve.stream.answers import unpack_decision  # noqa: E402
from protodcs.serve.stream.idempotency import IdempotencyLimits  # noqa: E402
from protodcs.serve.stream.live_stream import LiveStream, StreamSpec  # noqa: E402
from protodcs.serve.stream.records import Kind  # noqa: E402

NAME = "guards"
CONFIGS = {"streamdcs": StreamDCSConfig(), "protodcs": ProtoDCSConfig.preset("paper")}
# Neither method predicted wrong classes under attack. These settings, which nobody should use, do.
RECKLESS = {"evolution_gate": "quantile", "evolution_quantile": 1.0, "text_rate": 0.02}
ATTACKED = ("dtd", "ucf", "flowers", "sun", "near")
SEEDS = (10, 11, 12)
SHARES = ("1/10", "1/5", "3/10", "2/5", "3/5", "7/10", "4/5")
MINI = {
    "CIFAR-10-C + SVHN-C": ("cifar10-test", "svhn-test", "cifar10"),
    "Tiny-ImageNet-C + DTD-C": ("tiny-imagenet-val", "dtd10-64", "tiny-imagenet"),
}
# By what the rows call them: protocol and options.
MINI_PROTOCOLS = {
    "continual": ("continual", {"known_count": 1000, "unknown_count": 1000}),
    "reset": ("reset", {"known_count": 1000, "unknown_count": 1000}),
    "no unknown": ("no-unknown", {"known_count": 1000}),
    "all unknown": ("all-unknown", {"unknown_count": 1000}),
    "9/10 unknown": ("continual", {"ratio": "9/10", "total": 1300}),
    "bursts": ("bursty", {"known_count": 1000, "unknown_count": 1000, "mean_burst": "1000"}),
    "correlated": ("correlated", {"known_count": 1000, "unknown_count": 1000}),
}


def live(prototypes, config, guard=None):
    """A stream in memory, with a guard of these settings or with none."""
    shared = prototypes if isinstance(prototypes, Prototypes) else Prototypes(prototypes)
    classes = [str(number) for number in range(len(shared))]
    method = "streamdcs" if isinstance(config, StreamDCSConfig) else "protodcs"
    spec = StreamSpec(
        method=method, config=config.model_dump(), classes=classes, prototypes=shared.fingerprint, guard=guard
    )
    return LiveStream(AcquiredStream(Fence(1), spec.pack(), None, 0, 0, []), shared, IdempotencyLimits(0, 0, 0.0))


def through(stream, features, resets=()):
    """What a stream answers: index, known and score of each sample, and what its guard did."""
    count = len(features)
    index, known, score = np.empty(count, dtype=int), np.empty(count, dtype=bool), np.empty(count)
    for number, feature in enumerate(features):
        if number in resets:
            stream.change(Kind.RESET, f"reset {number}", b"", 0.0)
        answer = stream.change(Kind.OBSERVE, f"key {number}", feature.astype("<f4").tobytes(), 0.0).answer
        decision = unpack_decision(answer)
        index[number], known[number], score[number] = decision.index, decision.known, decision.score
    return index, known, score, stream.events()


def fired(events):
    """The guards that fired, in order."""
    return [event.guard for event in events if event.action != GuardAction.UNFREEZE]


# Attacks.


def attack(name, recipe, seed, title, config):
    """One attack on one stream: what it did to known samples behind it, with a guard and without."""
    made = feature_pack.stream(recipe, seed, "judge")
    tried = attacks.attacked(name, made.prototypes, made.features, made.labels, seed)
    behind = np.flatnonzero((np.arange(len(tried.labels)) >= tried.end) & (tried.labels >= 0))
    truth = tried.labels[behind]
    shadow = (tried.features[behind] @ made.prototypes.T).argmax(axis=1)
    row = {"attack": name, "config": title, "stream": recipe, "seed": seed, "known_behind": len(behind)}
    row["shadow"] = float((shadow == truth).mean())
    for which, guard in (("without", None), ("with", GuardSettings())):
        stream = live(made.prototypes, config, guard)
        index, known, _, events = through(stream, tried.features)
        row[f"accuracy_{which}"] = float((index[behind] == truth).mean())
        row[f"false_reject_{which}"] = float(1.0 - known[behind].mean())
        before = (np.arange(len(index)) < tried.start) & (tried.labels >= 0)
        row["false_reject_before"] = float(1.0 - known[before].mean())
        if guard is not None:
            row["fired"], row["windows"] = fired(events), stream.guard.windows
    return row


def attacked(quick):
    recipes, seeds = (("dtd",), SEEDS[:1]) if quick else (ATTACKED, SEEDS)
    configs = [(method, config, seeds) for method, config in CONFIGS.items()]
    configs.append(("reckless", ProtoDCSConfig(**RECKLESS), SEEDS[:1]))
    return [
        attack(name, recipe, seed, title, config)
        for title, config, some in configs
        for name in attacks.ATTACKS
        for recipe in recipes
        for seed in some
    ]


# Honest streams.


def packs(quick):
    """The streams of CLIP's features: name, protocol, and what makes them."""
    for name in ("dtd",) if quick else feature_pack.STREAMS:
        split = "all" if name == "big" else "judge"
        shares = ("0", "1/2", "9/10", "1") + (SHARES if name in ("dtd", "sun", "near") else ())
        protocols = {order: (None, order) for order in ("shuffled", "bursts", "sorted")}
        protocols |= {f"{share} unknown": (share, "shuffled") for share in shares}
        for protocol, (unknown, order) in protocols.items():
            for seed in SEEDS[:1] if quick or name == "big" else SEEDS:
                made = feature_pack.stream(name, seed, split, unknown, order)
                yield name, protocol, seed, made.prototypes, made.features, made.labels, (), 0.01


def minis(quick, folder):
    """Those of the mini encoder at severity 5."""
    for name, (known, unknown, classes) in MINI.items():
        for title, (protocol, options) in MINI_PROTOCOLS.items():
            words = ImageStream(
                name=name, encoder="mini", known=known, unknown=[unknown], classes=classes, protocols=[protocol],
                corruptions=["fog", "contrast"] if quick else "standard", severity=5, options=options,
            )  # fmt: skip
            made = streams.Imaged(words, protocol, SEEDS[0], Path(folder) / known)
            parts = [made.features(number) for number in range(len(made.parts))]
            labels = np.concatenate([part.labels for part in made.parts])
            starts = np.cumsum([0, *map(len, parts)])[:-1]
            resets = {int(start) for start, part in zip(starts, made.parts, strict=True) if part.reset and start}
            yield name, title, SEEDS[0], made.prototypes, np.concatenate(parts), labels, resets, made.temperature


def honest_row(name, protocol, seed, prototypes, features, labels, resets, temperature, method):
    config = CONFIGS[method].replace(temperature=temperature)
    stream = live(prototypes, config, GuardSettings())
    index, known, score, events = through(stream, features, resets)
    row = {"stream": name, "protocol": protocol, "seed": seed, "method": method, "samples": len(labels)}
    row |= {"windows": stream.guard.windows, "fired": fired(events)}
    if row["fired"]:
        row["with"] = judged(labels, index, known, score)
        index, known, score, _ = through(live(prototypes, config), features, resets)
        row["without"] = judged(labels, index, known, score)
    return row


def judged(labels, index, known, score):
    """The figures of a stream; None where it lacks known or unknown samples."""
    inside = labels >= 0
    both = inside.any() and not inside.all()
    return {
        "accuracy": float((index == labels)[inside].mean()) if inside.any() else None,
        "auroc": float(metrics.auroc(score[inside], score[~inside])) if both else None,
        "false_reject": float(1.0 - known[inside].mean()) if inside.any() else None,
    }


def honest(quick):
    folder = os.environ.get("PROTODCS_FEATURES")
    makers = [packs(quick)] + ([minis(quick, folder)] if folder else [])
    return [honest_row(*made, method) for maker in makers for made in maker for method in CONFIGS]


# Cost.


def cost(quick):
    """What the guard adds to a hosted observe, K = 100 and d = 512, with kept states and all."""
    made = feature_pack.stream("dtd", SEEDS[0], "judge")
    shared, rows = Prototypes(made.prototypes), []
    payloads = [feature.astype("<f4").tobytes() for feature in made.features]
    for method in CONFIGS:
        config = CONFIGS[method]
        both = {"without": live(shared, config), "with": live(shared, config, GuardSettings())}
        at = dict.fromkeys(both, 0)

        def block(which, both=both, at=at):
            for _ in range(GuardSettings().window * GuardSettings().keep_windows):
                both[which].change(Kind.OBSERVE, "key", payloads[at[which] % len(payloads)], 0.0)
                at[which] += 1

        times = in_turns({which: lambda which=which: block(which) for which in both}, 3 if quick else 12)
        # The first rounds have no two kept states yet.
        sizes = {f"snapshot_{which}": len(stream.checkpoint("s").snapshot) for which, stream in both.items()}
        rows.append({"method": method, **ratio(times["with"][2:], times["without"][2:]), **sizes})
    return rows


def measure(quick: bool = False) -> list[dict]:
    return [{"cost": cost(quick), "attacks": attacked(quick), "honest": honest(quick)}]


# The page.


def points(value):
    return f"{100 * value:+.1f}"


def as_markdown(rows):
    found = rows[0]
    picture = (
        "![Accuracy that five attacks cost reckless, and known images that reckless and streamdcs reject after them, "
        "without and with guards](guards.png)",
    )
    parts = picture, attack_lines(found["attacks"]), honest_lines(found["honest"]), cost_lines(found["cost"])
    return "\n\n".join("\n".join(lines) for lines in parts) + "\n"


def attack_lines(rows):
    lines = [
        "## Streams that try to poison",
        "",
        f"Judge split, {', '.join(ATTACKED)}, seeds {', '.join(map(str, SEEDS))} (`reckless`: "
        f"{SEEDS[0]}). Each stream is a third of its samples, "
        f"{attacks.LENGTH:,} samples of the attack, and another third. Accuracy is that of the best class on known "
        "samples after the attack, minus that of the frozen baseline, in points: mean, and the worst stream. "
        "False rejects are shares of known samples before the attack, and after it without and with guards.",
        "",
    ]
    body = []
    for title in dict.fromkeys(row["config"] for row in rows):
        for name in attacks.ATTACKS:
            some = [row for row in rows if (row["config"], row["attack"]) == (title, name)]
            gains = {w: np.array([row[f"accuracy_{w}"] - row["shadow"] for row in some]) for w in ("without", "with")}
            reject = {w: np.mean([row[f"false_reject_{w}"] for row in some]) for w in ("before", "without", "with")}
            hit = sum(bool(row["fired"]) for row in some)
            names = sorted({guard for row in some for guard in row["fired"]})
            body.append(
                (
                    f"`{title}`", name, *(f"{points(g.mean())} ({points(g.min())})" for g in gains.values()),
                    f"{hit} of {len(some)}", ", ".join(names) or "none", *(f"{100 * r:.0f} %" for r in reject.values()),
                )
            )  # fmt: skip
    head = ["config", "attack", "without guards", "with guards", "streams fired on", "guards"]
    return lines + table([*head, "false rejects before", "behind, without", "behind, with"], body)


def honest_lines(rows):
    lines = ["## Honest streams", "", "Windows in which a guard fired, of all windows.", ""]
    body = []
    for method in CONFIGS:
        for name in dict.fromkeys(row["stream"] for row in rows):
            some = [row for row in rows if (row["method"], row["stream"]) == (method, name)]
            body.append((f"`{method}`", name, len(some), *_rate(some), _protocols(some)))
        body.append((f"`{method}`", "all", *_total(rows, method), ""))
    lines += table(["method", "stream", "runs", "windows", "fired", "share", "where"], body)
    hit = [row for row in rows if row["fired"]]
    lines += ["", "What it cost where one fired, in points with guards less without:", ""]
    body = [
        (
            f"`{row['method']}`", row["stream"], row["protocol"], row["seed"], ", ".join(row["fired"]),
            *(_cost(row, figure) for figure in ("accuracy", "auroc", "false_reject")),
        )
        for row in hit
    ]  # fmt: skip
    return lines + table(["method", "stream", "protocol", "seed", "fired", "Acc", "AUROC", "false rejects"], body)


def _rate(rows):
    windows, hits = sum(row["windows"] for row in rows), sum(len(row["fired"]) for row in rows)
    return windows, hits, f"{100 * hits / max(windows, 1):.2f} %"


def _total(rows, method):
    some = [row for row in rows if row["method"] == method]
    return len(some), *_rate(some)


def _protocols(rows):
    return ", ".join(dict.fromkeys(row["protocol"] for row in rows if row["fired"]))


def _cost(row, figure):
    after, before = row["with"][figure], row["without"][figure]
    return "" if after is None else points(after - before)


def cost_lines(rows):
    what = "A hosted observe with a guard, as a multiple of one without; K = 100, d = 512. Kept states are in it."
    body = (
        (f"`{row['method']}`", spread(row), *(f"{row[f'snapshot_{w}'] / 1e6:.1f} MB" for w in ("without", "with")))
        for row in rows
    )
    head = ["method", "median (quartiles)", "a snapshot without", "with its guard"]
    return ["## What watching costs", "", what, "", *table(head, body)]

"""Print how far an attacker gets by the number of samples sent: `python scripts/attacks_by_samples.py`.

Honest traffic comes from the feature pack (`dtd`, split judge, 400 classes, 5 % unknown). After 1,000 honest samples an
attacker sends a share of the traffic:

- "object": views of one unknown object that the engine rejects at first, from another set. The attacker succeeds if
  the engine calls a view known.
- "class": blends of the images of one class with unknown images. They raise the cosine that the engine expects from
  unknown images with this class. The attacker succeeds if the engine rejects honest images of the class.
"""

import argparse
from collections.abc import Iterator
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from protodcs import StreamDCS
from protodcs.bench import feature_pack

Features = NDArray[np.float32]

BEFORE = 1000
# Attack samples after which success is measured; each column covers those since the one before.
SENT = (10, 50, 250)
SHARES = (0.02, 0.05)
# Length of the noise between two views of one object, relative to its feature.
NOISES = {"near-duplicates": 0.05, "varied views": 0.6}
VICTIMS = 3


def main() -> None:
    """Run the attacks and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[30, 31], help="seeds (default: 30 31)")
    seeds = parser.parse_args().seeds
    head = " | ".join(["before", *(f"up to {sent} sent" for sent in SENT)])
    print(f"| attack | share of traffic | {head} |\n|{'---|' * (3 + len(SENT))}")
    for share in SHARES:
        for name, noise in NOISES.items():
            runs = [success for seed in seeds for success in attack_objects(seed, share, noise)]
            print(_line(f"object called known, {name}", share, runs))
        runs = [success for seed in seeds for success in attack_classes(seed, share)]
        print(_line("class rejected", share, runs), flush=True)


def attack_objects(seed: int, share: float, noise: float) -> list[list[float]]:
    """Return for some objects the fraction of their views that the engine calls known, by samples sent."""
    rng = np.random.default_rng(seed)
    honest, prepared = _prepared(seed, rng)
    unknown = feature_pack.stream("sun", seed, "judge", "1/2", classes=400)
    candidates = unknown.features[unknown.labels < 0]
    rejected = [feature for feature in candidates[:50] if not prepared.peek(feature).known][:VICTIMS]
    successes = []
    for victim in rejected:
        views = _unit(victim + noise * _unit(rng.normal(size=(SENT[-1], len(victim)))))
        engine, called = StreamDCS.restore(prepared.snapshot()), []
        for count, sample in _mixed(honest, views, share, rng):
            known = engine.observe(sample).known
            if count:
                called.append(known)
        bounds = (0, *SENT)
        successes.append([0.0, *(float(np.mean(called[a:b])) for a, b in pairwise(bounds))])
    return successes


def attack_classes(seed: int, share: float) -> list[list[float]]:
    """Return for some classes the fraction of their honest images that the engine rejects, by samples sent."""
    rng = np.random.default_rng(seed)
    honest, prepared = _prepared(seed, rng)
    stream = feature_pack.stream("dtd", seed, "judge", "1/20", classes=400)
    unknown = stream.features[stream.labels < 0]
    successes = []
    for victim in rng.choice(400, VICTIMS, replace=False):
        images = stream.features[stream.labels == victim]
        blends = _unit(
            images[rng.integers(len(images), size=SENT[-1])] + unknown[rng.integers(len(unknown), size=SENT[-1])]
        )
        engine = StreamDCS.restore(prepared.snapshot())
        rejected = [_rejected(engine, images)]
        for count, sample in _mixed(honest, blends, share, rng):
            engine.observe(sample)
            if count in SENT:
                rejected.append(_rejected(engine, images))
        successes.append(rejected)
    return successes


def _prepared(seed: int, rng: np.random.Generator) -> tuple[Features, StreamDCS]:
    """Return honest samples, and an engine that has seen the first of them."""
    stream = feature_pack.stream("dtd", seed, "judge", "1/20", classes=400)
    engine = StreamDCS(stream.prototypes)
    engine.observe_many(stream.features[:BEFORE])
    return stream.features[rng.permutation(len(stream.features))], engine


def _mixed(
    honest: Features, attack: Features, share: float, rng: np.random.Generator
) -> Iterator[tuple[int, Features]]:
    """Yield samples, each with the number of attack samples sent so far, or 0 for an honest one."""
    place, sent = 0, 0
    while sent < len(attack):
        if rng.random() < share:
            sent += 1
            yield sent, attack[sent - 1]
        else:
            place += 1
            yield 0, honest[place % len(honest)]


def _rejected(engine: StreamDCS, images: Features) -> float:
    return float(np.mean([not engine.peek(image).known for image in images]))


def _unit(rows: NDArray[np.floating]) -> Features:
    return (rows / np.linalg.norm(rows, axis=-1, keepdims=True)).astype(np.float32)


def _line(name: str, share: float, runs: list[list[float]]) -> str:
    cells = " | ".join(f"{100 * mean:.0f}" for mean in np.mean(runs, axis=0))
    return f"| {name} | {share:.0%} | {cells} |"


if __name__ == "__main__":
    main()

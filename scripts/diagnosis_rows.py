"""Compare what `protodcs.diagnosis` estimates without labels with what labels show, on the `tune` split.

`PROTODCS_DATA=FOLDER python scripts/diagnosis_rows.py --vocabulary FILE` prints these tables (20 minutes):

- for each kind of stream, what was found and possible, beside the estimates. "Missing" is the estimate for a missing
  class, and "truly missing" the same for up to three classes that are left out in earnest.
- by each of the two estimates: the fraction of the unknown images that was found.
- by the estimate for single classes: how many of their images were called unknown when they were left out.

Streams have at most 2,000 images. Figures of two passes are those of a collection, and of one pass those of a stream.
"""

import argparse
import itertools
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import user_rows
from numpy.typing import NDArray

from protodcs import methods
from protodcs.bench import feature_pack, user_streams
from protodcs.diagnosis import Diagnosis, diagnose

SHARES = ("0", "1/50", "1/10", "1/4", "1/2")
MOST = 2000
LEFT_OUT = 3
# A stream is looked at as the service does: with its latest images.
RECENT = 1000
BINS = (0.0, 0.5, 0.7, 0.85, 0.95, 1.01)


class Kind(NamedTuple):
    """What streams of one row have in common."""

    classes: str
    unknown: str
    share: str


class Measured(NamedTuple):
    """What labels show, and what is estimated without them, for one stream and one or two passes."""

    rejected: float
    found: float
    possible: float
    diagnosis: Diagnosis


def streams(seeds: Sequence[int]) -> Iterator[tuple[Kind, feature_pack.Packed]]:
    """Return the streams of all rows."""
    for seed in seeds:
        for share in SHARES:
            for family in ("wild", "pets", "catdog"):
                for words in user_rows.ORDERS.values():
                    yield Kind(family, "near", share), user_streams.stream(family, "near", share, seed, "tune", **words)
                yield Kind(family, "other", share), user_streams.stream(family, "sun", share, seed, "tune")
            for name in ("dtd", "ucf", "near") if share != "0" else ():
                for count in (20, 100):
                    kind = Kind(f"ImageNet, {count}", "near" if name == "near" else "other", share)
                    yield kind, feature_pack.stream(name, seed, "tune", unknown=share, classes=count)


def measured(stream: feature_pack.Packed, options: dict[str, Any], method: str, two_pass: bool) -> Measured:
    """Run a method over a stream, and diagnose it."""
    engine = methods.create(method, stream.prototypes, **options)
    decisions = engine.observe_many(stream.features, two_pass=two_pass)
    known, unknown = np.asarray(decisions.known), stream.labels < 0
    one = user_rows.Run(
        stream.labels, known, np.asarray(decisions.score), user_rows.zero_shot_scores(stream), [b""] * len(known)
    )
    rejected = float((~known[~unknown]).mean())
    mixed = bool(unknown.any())
    diagnosis = (
        diagnose(engine, stream.features, decisions) if two_pass else diagnose(engine, stream.features[-RECENT:])
    )
    return Measured(
        rejected,
        float((~known[unknown]).mean()) if mixed else np.nan,
        user_rows.possible(one, rejected) if mixed else np.nan,
        diagnosis,
    )


def left_out(
    stream: feature_pack.Packed, options: dict[str, Any], method: str, names: Sequence[str]
) -> dict[str, float]:
    """Return for some classes how many of their images are called unknown if the class is left out in earnest."""
    found = {}
    for name in names:
        place = int(name)
        engine = methods.create(method, np.delete(stream.prototypes, place, axis=0), **options)
        known = np.asarray(engine.observe_many(stream.features, two_pass=True).known)
        found[name] = float((~known[stream.labels == place]).mean())
    return found


def binned(title: str, estimates: Sequence[float], values: Sequence[float]) -> str:
    """Return a table of the values by estimate."""
    estimate, value = np.array(estimates), np.array(values)
    error = np.abs(estimate - value).mean()
    lines = [
        f"{title}: {len(value)}, mean absolute error {100 * error:.0f} points",
        "| estimate | n | mean | 10 % to 90 % |",
    ]
    lines.append("|---|---|---|---|")
    for low, high in itertools.pairwise(BINS):
        inside: NDArray[np.float64] = value[(estimate >= low) & (estimate < high)]
        if len(inside):
            ends = " to ".join(f"{100 * end:.0f}" for end in np.quantile(inside, [0.1, 0.9]))
            lines.append(f"| {low:.0%} to {min(high, 1.0):.0%} | {len(inside)} | {inside.mean():.0%} | {ends} |")
    return "\n".join(lines)


def mean(values: Sequence[float | None]) -> str:
    """Return the mean of the values that exist, in percent."""
    there = [value for value in values if value is not None and not np.isnan(value)]
    return f"{100 * np.mean(there):.0f}" if there else "-"


def main() -> None:
    """Run the streams and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--method", default="streamdcs", help="registered method (default: streamdcs)")
    parser.add_argument("--vocabulary", type=Path, help="safetensors file with the features of general names as `text`")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1], help="seeds (default: 0 1)")
    chosen = parser.parse_args()
    options = {} if chosen.vocabulary is None else {"vocabulary": feature_pack.read_vocabulary(chosen.vocabulary)}
    rows: dict[Kind, list[tuple[Measured, Measured, dict[str, float]]]] = defaultdict(list)
    for kind, whole in streams(chosen.seeds):
        stream = feature_pack.Packed(whole.prototypes, whole.features[:MOST], whole.labels[:MOST], whole.hash)
        one, two = (measured(stream, options, chosen.method, passes) for passes in (False, True))
        names = [found.name for found in two.diagnosis.classes if (stream.labels == int(found.name)).any()]
        # The closest, the middle and the farthest class.
        some = [names[place] for place in sorted({0, len(names) // 2, len(names) - 1})][:LEFT_OUT] if names else []
        rows[kind].append((one, two, left_out(stream, options, chosen.method, some)))
    _print(rows)


def _print(rows: dict[Kind, list[tuple[Measured, Measured, dict[str, float]]]]) -> None:
    write = sys.stdout.write
    heads = ("classes", "unknown", "share", "one pass: found, estimate", "two passes: found, estimate", "possible")
    write(f"| {' | '.join((*heads, 'two groups', 'missing', 'closest'))} |\n|{9 * '---|'}\n")
    for kind, found in sorted(rows.items()):
        one, two = [entry[0] for entry in found], [entry[1] for entry in found]
        cells = [
            f"{mean([run.found for run in runs])}, {mean([run.diagnosis.unknown_found for run in runs])}"
            for runs in (one, two)
        ]
        closest = [run.diagnosis.classes[0].unknown for run in two if run.diagnosis.classes]
        groups = f"{sum(bool(run.diagnosis.two_groups) for run in two)} of {len(two)}"
        missing = mean([run.diagnosis.missing_class for run in two])
        cells += [mean([run.possible for run in two]), groups, missing, mean(closest)]
        write(f"| {' | '.join((*kind, *cells))} |\n")
    entries = [entry for found in rows.values() for entry in found]
    for passes, runs in (("One pass", [one for one, _, _ in entries]), ("Two passes", [two for _, two, _ in entries])):
        mixed = [run for run in runs if not np.isnan(run.found)]
        for name in ("unknown_found", "missing_class"):
            pairs = [(getattr(run.diagnosis, name), run.found) for run in mixed]
            pairs = [pair for pair in pairs if pair[0] is not None]
            write(f"\n{binned(f'{passes}: unknown images found, by {name}', *zip(*pairs, strict=True))}\n")
    left = [
        (one.unknown, truth[one.name])
        for _, two, truth in entries
        for one in two.diagnosis.classes
        if one.name in truth
    ]
    write(f"\n{binned('Classes left out, by their estimate', *zip(*left, strict=True))}\n")


if __name__ == "__main__":
    main()

"""Print how a method decides on streams with few classes: `python scripts/user_rows.py --split tune`.

A row is a family of classes, with near or other unknown images, in one order, at one share of unknown images. Samples
of all seeds and unknown sets are pooled. The table has, for each row:

- rejected: known images called unknown, with a 95 % interval by bootstrap over images.
- found: unknown images called unknown, with an interval.
- possible: what a threshold finds that was chosen with labels and rejects as many known images, at least 3 %, on the
  better of the method's score and the best zero-shot score.
- AUROC over the best zero-shot score of each stream, as the mean over streams.
- rejected and found among the first 100 samples of the streams.
"""

import argparse
import hashlib
import json
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple, get_args

import numpy as np
from numpy.typing import NDArray

from protodcs import methods
from protodcs.bench import cells, feature_pack, user_streams
from protodcs.metrics import auroc

SHARES = ("1/50", "1/20", "1/10", "1/4", "1/2", "9/10")
ORDERS = {"shuffled": {}, "tail": {"tail": True}, "runs": {"run": 8}}
# Smallest rate of rejected images at which a threshold with labels is compared.
LEAST_REJECTED = 0.03
SAMPLES = 1000
# A stream begins with so many samples.
FIRST = 100


class Place(NamedTuple):
    """What the samples of a row have in common."""

    family: str
    unknown: str
    order: str
    share: str


class Run(NamedTuple):
    """A stream with its decisions: labels, known or not, score, zero-shot scores, and a number for each image."""

    labels: NDArray[np.int64]
    known: NDArray[np.bool_]
    score: NDArray[np.float64]
    zero_shot: list[NDArray[np.float64]]
    images: list[bytes]


class Row(NamedTuple):
    """The figures of a row. Rates have a mean and the ends of their interval."""

    rejected: tuple[float, float, float]
    found: tuple[float, float, float]
    possible: float
    auroc_gain: float
    first_rejected: tuple[float, float, float]
    first_found: tuple[float, float, float]
    known_samples: int
    unknown_samples: int


def runs(
    method: str,
    options: Mapping[str, object],
    split: user_streams.Split,
    seeds: Iterable[int],
    shares: Sequence[str],
    two_pass: bool = False,
) -> Iterator[tuple[Place, Run]]:
    """Run a method over all streams; `two_pass` takes each of them as a whole collection."""
    for family in get_args(user_streams.Family):
        for unknown in get_args(user_streams.Unknown):
            for order, words in ORDERS.items():
                for share in shares:
                    for seed in seeds:
                        made = user_streams.stream(family, unknown, share, seed, split, **words)
                        place = Place(family, "near" if unknown == "near" else "other", order, share)
                        yield place, run(method, options, made, two_pass)


def run(method: str, options: Mapping[str, object], stream: feature_pack.Packed, two_pass: bool = False) -> Run:
    """Run a method over one stream."""
    decisions = methods.create(method, stream.prototypes, **options).observe_many(stream.features, two_pass=two_pass)
    # A hash, because hundreds of streams would keep gigabytes of features.
    images = [hashlib.blake2b(row.tobytes(), digest_size=8).digest() for row in stream.features]
    return Run(
        stream.labels, np.asarray(decisions.known), np.asarray(decisions.score), zero_shot_scores(stream), images
    )


def zero_shot_scores(stream: feature_pack.Packed) -> list[NDArray[np.float64]]:
    """Return the four zero-shot scores of all samples: largest cosine, softmax, MCM and energy."""
    return cells.zero_shot_scores(stream.features, stream.prototypes, feature_pack.TEMPERATURE)


def rate(runs: Sequence[Run], unknown: bool, count: int = SAMPLES) -> tuple[float, float, float]:
    """Return how often samples of a kind are called unknown, with a 95 % interval by bootstrap over images."""
    flags: dict[bytes, list[bool]] = defaultdict(list)
    for one in runs:
        for place in np.flatnonzero((one.labels < 0) == unknown):
            flags[one.images[place]].append(not one.known[place])
    if not flags:
        return np.nan, np.nan, np.nan
    sums, sizes = np.array([(sum(found), len(found)) for found in flags.values()], dtype=float).T
    random = np.random.default_rng(0)
    drawn = random.integers(len(sums), size=(count, len(sums)))
    low, high = np.quantile(sums[drawn].sum(axis=1) / sizes[drawn].sum(axis=1), [0.025, 0.975])
    return float(sums.sum() / sizes.sum()), float(low), float(high)


def possible(one: Run, rejected: float) -> float:
    """Return the share of unknown samples that a threshold with labels finds, on the best of the scores."""
    unknown = one.labels < 0
    return max(
        float((score[unknown] < np.quantile(score[~unknown], max(rejected, LEAST_REJECTED))).mean())
        for score in (one.score, *one.zero_shot)
    )


def _auroc(one: Run, score: NDArray[np.float64]) -> float:
    return auroc(score[one.labels >= 0], score[one.labels < 0])


def _beginning(one: Run) -> Run:
    labels, known, score = one.labels[:FIRST], one.known[:FIRST], one.score[:FIRST]
    return Run(labels, known, score, [values[:FIRST] for values in one.zero_shot], one.images[:FIRST])


def row(runs: Sequence[Run]) -> Row:
    """Return the figures of the runs of one row."""
    rejected, found = rate(runs, unknown=False), rate(runs, unknown=True)
    mixed = [one for one in runs if 0 < (one.labels < 0).sum() < len(one.labels)]
    counts = [int((one.labels < 0).sum()) for one in mixed]
    first = [_beginning(one) for one in runs]
    gains = [_auroc(one, one.score) - max(_auroc(one, score) for score in one.zero_shot) for one in mixed]
    return Row(
        rejected,
        found,
        float(np.average([possible(one, rejected[0]) for one in mixed], weights=counts)) if mixed else np.nan,
        float(np.mean(gains)) if gains else np.nan,
        rate(first, unknown=False),
        rate(first, unknown=True),
        sum(int((one.labels >= 0).sum()) for one in runs),
        sum(int((one.labels < 0).sum()) for one in runs),
    )


def table(rows: Mapping[Place, Row]) -> str:
    """Return a Markdown table."""
    lines = [
        "| classes | unknown images | order | share | known rejected | unknown found | possible | AUROC gain "
        "| first 100: rejected | found |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for place, figures in rows.items():
        share = f"{float(Fraction(place.share)):.0%}"
        lines.append(
            f"| {place.family} | {place.unknown} | {place.order} | {share} | {_percent(figures.rejected)} "
            f"| {_percent(figures.found)} | {_or_dash(figures.possible, '.0%')} "
            f"| {_or_dash(100.0 * figures.auroc_gain, '+.1f')} "
            f"| {_percent(figures.first_rejected)} | {_percent(figures.first_found)} |"
        )
    return "\n".join(lines)


def _or_dash(value: float, form: str) -> str:
    return "-" if np.isnan(value) else format(value, form)


def write(file: Path, rows: Mapping[Place, Row], source: Mapping[str, object]) -> None:
    """Write the figures as JSON to a file, and the table to one beside it that ends with `.md`."""
    listed = [{**place._asdict(), **_without_nan(figures._asdict())} for place, figures in rows.items()]
    content = {**source, "encoder": feature_pack.ENCODER, "score": "the method's", "rows": listed}
    file.write_text(json.dumps(content, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    file.with_suffix(".md").write_text(table(rows) + "\n", encoding="utf-8")


def _without_nan(figures: Mapping[str, Any]) -> dict[str, Any]:
    """Return figures with None in place of those that a row does not have."""
    return {name: None if np.isnan(value).any() else value for name, value in figures.items()}


def _percent(interval: tuple[float, float, float]) -> str:
    if np.isnan(interval).any():
        return "-"
    middle, low, high = (100.0 * value for value in interval)
    return f"{middle:.1f} ({low:.1f} to {high:.1f})"


def main() -> None:
    """Run the streams, print the table, and write it with `--out`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--method", default="streamdcs", help="registered method (default: streamdcs)")
    parser.add_argument("--options", type=json.loads, default={}, help="options of the method, as JSON")
    parser.add_argument("--vocabulary", type=Path, help="safetensors file with the features of general names as `text`")
    parser.add_argument("--split", choices=get_args(user_streams.Split), required=True)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1], help="seeds (default: 0 1)")
    parser.add_argument("--shares", nargs="+", default=SHARES, help="shares of unknown images, as fractions")
    parser.add_argument("--two-pass", action="store_true", help="take each stream as a whole collection")
    parser.add_argument("--out", type=Path, help="file for the figures, as JSON; a table is written beside it")
    chosen = parser.parse_args()
    options = dict(chosen.options)
    if chosen.vocabulary is not None:
        options["vocabulary"] = feature_pack.read_vocabulary(chosen.vocabulary)
    gathered: dict[Place, list[Run]] = defaultdict(list)
    for place, one in runs(chosen.method, options, chosen.split, chosen.seeds, chosen.shares, chosen.two_pass):
        gathered[place].append(one)
    rows = {place: row(found) for place, found in gathered.items()}
    if chosen.out is not None:
        write(chosen.out, rows, {"command": " ".join(["python", *sys.argv]), "seeds": chosen.seeds})
    sys.stdout.write(table(rows) + "\n")


if __name__ == "__main__":
    main()

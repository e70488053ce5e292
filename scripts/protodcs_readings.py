"""Print how readings of ProtoDCS compare: `python scripts/protodcs_readings.py RESULTS... [--against LABEL]`.

RESULTS are folders that `protodcs bench run` has filled with `grids/protodcs-*.yaml`. A table has the streams with the
same kind of classes and the same share of unknown samples. Its figures are means over the streams, then over seeds, in
percent. AUROC has two columns: by openness, which is the score of the rows, and by the largest value of equation 9.
FPR95 and OSCR by that score need an entry `NAME, by Eq. 9`. Accuracy is compared with zero-shot. With `--against` all
figures are differences to that entry. Differences are paired: seed by seed with a 95 % interval over seeds. If there is
one seed, they are paired stream by stream with an interval over streams. Less than three pairs have no interval.
`--seed` leaves out the other seeds, `--only` the other entries.
"""

import argparse
import json
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from typing import NamedTuple

from protodcs.bench import rows
from protodcs.bench.statistics import Estimate, estimate, paired

ZERO_SHOT = "zero-shot, max cosine"
BY_PREDICTION = ", by Eq. 9"
# Two pairs give intervals that tell nothing.
_LEAST_PAIRS = 3


class Figure(NamedTuple):
    """A column: its head, the key in rows, whether it is a share, and whether it needs an entry with Eq. 9 as score."""

    head: str
    key: str
    is_share: bool = True
    by_prediction: bool = False


ACCURACY = Figure("accuracy", "known_accuracy")
AUROC = Figure("AUROC by openness", "auroc")
AUROC_PREDICTION = Figure("AUROC by Eq. 9", "auroc_class_score")
DECISIONS = (
    Figure("updates", "evolved_samples", is_share=False),
    Figure("known rejected", "false_reject"),
    Figure("unknown found", "unknown_recall"),
)
RANKINGS = (
    Figure("FPR95 by openness", "fpr95_known_positive"),
    Figure("FPR95 by Eq. 9", "fpr95_known_positive", by_prediction=True),
    Figure("OSCR by openness", "oscr"),
    Figure("OSCR by Eq. 9", "oscr", by_prediction=True),
)

# By group and entry: the rows of each seed, of all streams.
Groups = dict[str, dict[str, dict[int, list[rows.Row]]]]


def grouped(results: Iterable[rows.Row]) -> Groups:
    """Return the rows by group of streams, label and seed. Streams are compared with all their samples together."""
    found: Groups = defaultdict(lambda: defaultdict(lambda: defaultdict(list)))
    for row in results:
        if row["segment"] == rows.MEAN:
            found[group_of(row)][row["label"]][row["seed"]].append(row)
    return found


def group_of(row: rows.Row) -> str:
    """Return the name of the group that a row belongs to: the kind of its classes, and its share of unknown samples."""
    share = re.search(r"([0-9]+/[0-9]+) unknown", row["stream"])
    if share is None:
        return str(row["stream"])
    split = re.search("tune|judge", row["stream"])
    kind = "few classes" if row["stream"].startswith(("wild", "pets", "catdog")) else f"{row['classes']} classes"
    return f"{kind}, {float(Fraction(share[1])):.0%} unknown, split {split[0] if split else 'all'}"


def by_seed(entry: Mapping[int, Sequence[rows.Row]], key: str) -> dict[int, float]:
    """Return the mean of a figure over the streams for each seed; for one seed, the figure of each stream."""
    if len(entry) == 1:
        (found,) = entry.values()
        return {place: row[key] for place, row in enumerate(sorted(found, key=lambda row: row["stream"]))}
    return {seed: sum(row[key] for row in found) / len(found) for seed, found in entry.items()}


def readings(entries: Mapping[str, object]) -> list[str]:
    """Return the entries of a group without those that only change the score."""
    return [label for label in entries if not label.endswith(BY_PREDICTION)]


def values(entries: Mapping[str, Mapping[int, Sequence[rows.Row]]], label: str, figure: Figure) -> dict[int, float]:
    """Return a figure of a reading for each seed; empty if it was not run with this score, or has none."""
    if "zero-shot" in label and figure.head.endswith("Eq. 9"):
        return {}
    name = label + BY_PREDICTION if figure.by_prediction else label
    return by_seed(entries[name], figure.key) if name in entries else {}


def means(entries: Mapping[str, Mapping[int, Sequence[rows.Row]]]) -> str:
    """Return a Markdown table of the readings of a group."""
    figures = (ACCURACY, AUROC, AUROC_PREDICTION, *DECISIONS)
    heads = [figures[0].head, "over zero-shot", *(figure.head for figure in figures[1:])]
    lines = []
    for label in ordered(entries):
        cells = [shown(figure, estimate(list(values(entries, label, figure).values()))) for figure in figures]
        gain = paired(values(entries, label, ACCURACY), values(entries, ZERO_SHOT, ACCURACY))
        lines.append([label, cells[0], difference(ACCURACY, gain), *cells[1:]])
    return table(["reading", *heads], lines)


def differences(entries: Mapping[str, Mapping[int, Sequence[rows.Row]]], against: str) -> str:
    """Return a Markdown table of the differences between the readings of a group and one of them."""
    figures = [ACCURACY, AUROC, AUROC_PREDICTION, *RANKINGS, *DECISIONS]
    if not any(label.endswith(BY_PREDICTION) for label in entries):
        figures = [figure for figure in figures if not figure.by_prediction]
    lines = []
    for label in ordered(entries):
        if label != against:
            found = (paired(values(entries, label, one), values(entries, against, one)) for one in figures)
            lines.append([label, *(difference(one, gain) for one, gain in zip(figures, found, strict=True))])
    return table(["reading", *(figure.head for figure in figures)], lines)


def ordered(entries: Mapping[str, object]) -> list[str]:
    """Return the readings: zero-shot first, then the presets, then the others by name."""
    first = {"paper": 1, "working": 2, "full": 2}
    return sorted(readings(entries), key=lambda name: (0 if "zero-shot" in name else first.get(name, 3), name))


def shown(figure: Figure, of: Estimate) -> str:
    """Return a mean for a table."""
    if not of.seeds:
        return "-"
    return f"{100 * of.mean:.2f}" if figure.is_share else f"{of.mean:.0f}"


def difference(figure: Figure, of: Estimate) -> str:
    """Return a difference for a table, with half of its interval."""
    if not of.seeds:
        return "-"
    scale, digits = (100, 2) if figure.is_share else (1, 0)
    half = f" ± {scale * of.half:.{digits}f}" if of.seeds >= _LEAST_PAIRS else ""
    return f"{scale * of.mean:+.{digits}f}{half}"


def table(heads: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table."""
    return "\n".join(f"| {' | '.join(cells)} |" for cells in [heads, ["---"] * len(heads), *lines])


def mistakes(groups: Groups) -> list[str]:
    """Return what makes the tables unfair: entries that lack streams or seeds, and scores that are not as labelled."""
    told = []
    for name, entries in groups.items():
        whole = {(row["stream"], seed) for found in entries.values() for seed, some in found.items() for row in some}
        for label, found in entries.items():
            own = {(row["stream"], seed) for seed, some in found.items() for row in some}
            if own != whole:
                told.append(f"{name}: {label!r} has {len(own)} of {len(whole)} cells")
            scores = {json.loads(row["config"])["score"] for some in found.values() for row in some}
            if "zero-shot" not in label and scores != {"prediction" if label.endswith(BY_PREDICTION) else "openness"}:
                told.append(f"{name}: {label!r} is scored by {', '.join(sorted(scores))}")
    return told


def main() -> None:
    """Read the folders and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("results", type=Path, nargs="+", help="folders that `protodcs bench run` has filled")
    parser.add_argument("--against", help="print differences to this entry")
    parser.add_argument("--seed", type=int, action="append", help="only this seed; may be repeated")
    parser.add_argument("--only", action="append", help="only this entry; may be repeated")
    chosen = parser.parse_args()
    found = (row for folder in chosen.results for row in rows.read_folder(folder))
    groups = grouped(
        row
        for row in found
        if (chosen.seed is None or row["seed"] in chosen.seed) and (chosen.only is None or row["label"] in chosen.only)
    )
    for problem in mistakes(groups):
        raise SystemExit(f"{problem}. Run the grid again, or use another folder.")
    for name, entries in sorted(groups.items()):
        streams = sorted({row["stream"] for found in entries.values() for some in found.values() for row in some})
        seeds = sorted({seed for found in entries.values() for seed in found})
        told = f"seeds {seeds[0]} to {seeds[-1]}" if len(seeds) > 1 else f"seed {seeds[0]}"
        print(f"**{name}** ({len(streams)} streams, {told})\n")
        print((differences(entries, chosen.against) if chosen.against else means(entries)) + "\n")


if __name__ == "__main__":
    main()

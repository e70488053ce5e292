"""Print figures by the share of unknown samples: `python scripts/by_share.py RESULTS [--cells]`.

RESULTS is a folder that `protodcs bench run` has filled with one of `grids/streamdcs-shares*.yaml`, or with
`grids/streamdcs-orders-tune.yaml`. Then each order of the samples has its own rows. A cell is one stream with one
number of classes at one share. Its figures are means over seeds. AUROC is the difference to the best zero-shot score of
the cell, chosen once by its mean over seeds. With `--cells` a second table shows every cell, with the 95 % interval of
the difference over seeds. A method that has several vocabularies, or one on some streams only, has rows for each.
"""

import argparse
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from typing import NamedTuple

import numpy as np

from protodcs.bench import rows
from protodcs.bench.comparison import vocabulary_of
from protodcs.bench.statistics import Estimate, estimate

ZERO_SHOT = "zero_shot"
# A rejected share of known samples is on target within this distance.
TARGET, TOLERANCE = 0.05, 0.02


class Figures(NamedTuple):
    """The figures of one method at one share over all cells."""

    auroc_mean: float
    auroc_least: float
    rejected_mean: float
    rejected_most: float
    on_target: float
    found: float


class Cell(NamedTuple):
    """The figures of one method in one cell: AUROC of zero-shot and of the method, their difference, decisions."""

    best: float
    auroc: float
    gain: Estimate
    rejected: float
    found: float


def by_share(cells: Mapping[tuple[str, str, Fraction], Cell]) -> dict[tuple[str, Fraction], Figures]:
    """Return the figures of each method, by its label with the order of the samples, and the share of unknown ones."""
    gathered = defaultdict(list)
    for (label, cell, share), found in cells.items():
        order = re.search("bursts|sorted", cell)
        place = f"{label}, {order[0]}" if order else label
        gathered[place, share].append((found.gain.mean, found.rejected, found.found))
    return {place: _figures(np.array(figures)) for place, figures in gathered.items()}


def _located(results: Iterable[rows.Row]) -> Iterator[tuple[rows.Row, str, Fraction]]:
    """Yield the rows of whole streams with their cell and their share of unknown samples."""
    for row in results:
        found = re.search(r"([0-9/]+) unknown", row["stream"])
        if row["segment"] == rows.POOLED and found:
            yield row, re.sub(r", [0-9/]+ unknown", "", row["stream"]), Fraction(found[1])


def _mean(seeds: Mapping[int, rows.Row], name: str) -> float:
    return float(np.mean([row[name] for row in seeds.values()]))


def vocabularies(results: Iterable[rows.Row]) -> dict[str, set[str]]:
    """Return the vocabularies of each method by its label. An empty one stands for results without a vocabulary."""
    found = defaultdict(set)
    for row, _, _ in _located(results):
        found[row["label"]].add(vocabulary_of(row))
    return found


def by_cell(results: Sequence[rows.Row]) -> dict[tuple[str, str, Fraction], Cell]:
    """Return the figures of each method by its label, the cell and the share of unknown samples.

    The label names the vocabulary if the method has several, so that their results are never mixed.
    """
    several = {label for label, found in vocabularies(results).items() if len(found) > 1}
    methods: dict[tuple[str, str, Fraction], dict[int, rows.Row]] = defaultdict(dict)
    zero_shot: dict[tuple[str, Fraction], dict[str, dict[int, rows.Row]]] = defaultdict(lambda: defaultdict(dict))
    for row, cell, share in _located(results):
        if row["method"] == ZERO_SHOT:
            zero_shot[cell, share][row["label"]][row["seed"]] = row
        else:
            label = row["label"]
            if label in several:
                vocabulary = vocabulary_of(row)
                label += f" (vocabulary {vocabulary})" if vocabulary else " (no vocabulary)"
            methods[label, cell, share][row["seed"]] = row
    cells = {}
    for (label, cell, share), own in methods.items():
        # The best score is chosen once for the cell, by its mean over seeds.
        best = max(zero_shot[cell, share].values(), key=lambda some: _mean(some, "auroc"))
        cells[label, cell, share] = Cell(
            _mean(best, "auroc"),
            _mean(own, "auroc"),
            estimate([own[seed]["auroc"] - best[seed]["auroc"] for seed in own]),
            _mean(own, "false_reject"),
            _mean(own, "unknown_recall"),
        )
    return cells


def cell_table(cells: Mapping[tuple[str, str, Fraction], Cell]) -> str:
    """Return a Markdown table of all cells, in percent."""
    lines = [
        "| method | cell | unknown | best zero-shot AUROC | AUROC | difference | known rejected | unknown found |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for (label, cell, share), found in sorted(cells.items()):
        auroc, recall = "- | - | -", "-"
        if share:
            auroc = f"{100 * found.best:.1f} | {100 * found.auroc:.1f} | "
            auroc += f"{100 * found.gain.mean:+.1f} ± {100 * found.gain.half:.1f}"
            recall = f"{100 * found.found:.0f}"
        lines.append(f"| {label} | {cell} | {float(share):.0%} | {auroc} | {100 * found.rejected:.1f} | {recall} |")
    return "\n".join(lines)


def _figures(cells: np.ndarray) -> Figures:
    gains, rejected, found = cells.T
    on_target = float((np.abs(rejected - TARGET) <= TOLERANCE + 1e-12).mean())
    return Figures(gains.mean(), gains.min(), rejected.mean(), rejected.max(), on_target, found.mean())


def table(figures: Mapping[tuple[str, Fraction], Figures]) -> str:
    """Return a Markdown table, in percent."""
    lines = [
        "| method | unknown | AUROC over best zero-shot: mean, worst cell | known rejected: mean, most | "
        f"cells within {TOLERANCE:.0%} of {TARGET:.0%} | unknown found |",
        "|---|---|---|---|---|---|",
    ]
    for (label, share), found in sorted(figures.items()):
        auroc = "-" if np.isnan(found.auroc_mean) else f"{100 * found.auroc_mean:+.1f}, {100 * found.auroc_least:+.1f}"
        recall = "-" if np.isnan(found.found) else f"{found.found:.0%}"
        rejected = f"{100 * found.rejected_mean:.1f}, {100 * found.rejected_most:.1f}"
        lines.append(f"| {label} | {float(share):.0%} | {auroc} | {rejected} | {found.on_target:.0%} | {recall} |")
    return "\n".join(lines)


def main() -> None:
    """Read the folders and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("results", type=Path, nargs="+", help="folders that `protodcs bench run` has filled")
    parser.add_argument("--cells", action="store_true", help="print every cell, too")
    chosen = parser.parse_args()
    found = [row for folder in chosen.results for row in rows.read_folder(folder)]
    cells = by_cell(found)
    print(table(by_share(cells)))
    if chosen.cells:
        print("\n" + cell_table(cells))
    for label, names in sorted(vocabularies(found).items()):
        if len(names) == 1 and "" not in names:
            print(f"\nVocabulary of {label}: {names.pop()}.")


if __name__ == "__main__":
    main()

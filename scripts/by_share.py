"""Print figures by the share of unknown samples: `python scripts/by_share.py RESULTS [--cells]`.

RESULTS is a folder that `protodcs bench run` has filled with one of `grids/streamdcs-shares*.yaml`. A cell is one
stream with one number of classes at one share. Its figures are means over seeds. AUROC is the difference to the best
zero-shot score of the cell, chosen once by its mean over seeds. With `--cells` a second table shows every cell, with
the 95 % interval of the difference over seeds.
"""

import argparse
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from fractions import Fraction
from pathlib import Path
from typing import NamedTuple

import numpy as np

from protodcs.bench import rows
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


def by_share(results: Iterable[rows.Row]) -> dict[tuple[str, Fraction], Figures]:
    """Return the figures of each method, by its label and the share of unknown samples."""
    cells: dict[tuple[str, Fraction, str], list[rows.Row]] = defaultdict(list)
    methods = {}
    for row, cell, share in _located(results):
        cells[row["label"], share, cell].append(row)
        methods[row["label"]] = row["method"]
    best: dict[tuple[Fraction, str], float] = {}
    for (label, share, cell), some in cells.items():
        if methods[label] == ZERO_SHOT:
            best[share, cell] = max(best.get((share, cell), -np.inf), _mean(some, "auroc"))
    gathered = defaultdict(list)
    for (label, share, cell), some in cells.items():
        gain = _mean(some, "auroc") - best.get((share, cell), np.nan)
        gathered[label, share].append((gain, _mean(some, "false_reject"), _mean(some, "unknown_recall")))
    return {place: _figures(np.array(figures)) for place, figures in gathered.items()}


def _located(results: Iterable[rows.Row]) -> Iterator[tuple[rows.Row, str, Fraction]]:
    """Yield the rows of whole streams with their cell and their share of unknown samples."""
    for row in results:
        found = re.search(r"([0-9/]+) unknown", row["stream"])
        if row["segment"] == rows.POOLED and found:
            yield row, re.sub(r", [0-9/]+ unknown", "", row["stream"]), Fraction(found[1])


def _mean(some: list[rows.Row], name: str) -> float:
    return float(np.mean([row[name] for row in some]))


class Cell(NamedTuple):
    """The figures of one method in one cell: AUROC of zero-shot and of the method, their difference, decisions."""

    best: float
    auroc: float
    gain: Estimate
    rejected: float
    found: float


def by_cell(results: Iterable[rows.Row]) -> dict[tuple[str, str, Fraction], Cell]:
    """Return the figures of each method by its label, the cell and the share of unknown samples."""
    seeds: dict[tuple[str, str, Fraction], dict[int, rows.Row]] = defaultdict(dict)
    for row, cell, share in _located(results):
        seeds[row["label"], cell, share][row["seed"]] = row
    cells = {}
    for (label, cell, share), own in seeds.items():
        if not share or next(iter(own.values()))["method"] == ZERO_SHOT:
            continue
        others = [
            some
            for (_, other, at), some in seeds.items()
            if (other, at) == (cell, share) and next(iter(some.values()))["method"] == ZERO_SHOT
        ]
        best = max(others, key=lambda some: _mean(list(some.values()), "auroc"))
        gain = estimate([own[seed]["auroc"] - best[seed]["auroc"] for seed in own])
        every = list(own.values())
        cells[label, cell, share] = Cell(
            _mean(list(best.values()), "auroc"),
            _mean(every, "auroc"),
            gain,
            _mean(every, "false_reject"),
            _mean(every, "unknown_recall"),
        )
    return cells


def cell_table(cells: Mapping[tuple[str, str, Fraction], Cell]) -> str:
    """Return a Markdown table of all cells, in percent."""
    lines = [
        "| method | cell | unknown | best zero-shot AUROC | AUROC | difference | known rejected | unknown found |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for (label, cell, share), found in sorted(cells.items()):
        lines.append(
            f"| {label} | {cell} | {float(share):.0%} | {100 * found.best:.1f} | {100 * found.auroc:.1f} | "
            f"{100 * found.gain.mean:+.1f} ± {100 * found.gain.half:.1f} | {100 * found.rejected:.1f} | "
            f"{100 * found.found:.0f} |"
        )
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
    print(table(by_share(found)))
    if chosen.cells:
        print("\n" + cell_table(by_cell(found)))


if __name__ == "__main__":
    main()

"""Print figures by the share of unknown samples: `python scripts/by_share.py RESULTS`.

RESULTS is a folder that `protodcs bench run` has filled with `grids/streamdcs-shares-tune.yaml` or
`grids/streamdcs-shares.yaml`. A cell is one stream with one number of classes at one share. Its figures are means over
seeds. AUROC is the difference to the best zero-shot score of the cell, chosen once by its mean over seeds.
"""

import argparse
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from fractions import Fraction
from pathlib import Path
from typing import NamedTuple

import numpy as np

from protodcs.bench import rows

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
    for row in results:
        found = re.search(r"([0-9/]+) unknown", row["stream"])
        if row["segment"] == "clean" and found:
            cell = re.sub(r", [0-9/]+ unknown", "", row["stream"])
            cells[row["label"], Fraction(found[1]), cell].append(row)
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


def _mean(some: list[rows.Row], name: str) -> float:
    return float(np.mean([row[name] for row in some]))


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
    folders = parser.parse_args().results
    print(table(by_share(row for folder in folders for row in rows.read_folder(folder))))


if __name__ == "__main__":
    main()

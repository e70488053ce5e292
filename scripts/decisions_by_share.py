"""Print how good decisions are by the share of unknown samples: `python scripts/decisions_by_share.py GRID`.

GRID is a file such as `grids/streamdcs-shares.yaml`. Its streams must be from the feature pack. StreamDCS runs on each
of them, with the vocabulary of the grid. The table has two figures by share, as means over streams, each the mean over
seeds:

- ECE of `p_unknown`: the mean distance between `p_unknown` and the fraction of unknown samples, over ten equal bins.
- Unknown samples found, relative to a threshold on the same score that is chosen with labels and rejects as many known
  samples.
"""

import argparse
from collections import defaultdict
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from protodcs import Decisions, StreamDCS
from protodcs.bench import feature_pack, grid
from protodcs.metrics import ece

_BINS = 10


class Figures(NamedTuple):
    """The figures of one stream: ECE of `p_unknown`, unknown samples found, and found by a labelled threshold."""

    ece: float
    found: float
    possible: float


def figures(decisions: Decisions, unknown: NDArray[np.bool_]) -> Figures:
    """Return the figures of the decisions (N,) on samples of which `unknown` (N,) belong to no class."""
    calibration = ece(decisions.p_unknown, unknown, bins=_BINS)
    if not unknown.any():
        return Figures(calibration, np.nan, np.nan)
    rejected = np.mean(~decisions.known[~unknown])
    threshold = np.quantile(decisions.score[~unknown], rejected)
    return Figures(
        calibration,
        float(np.mean(~decisions.known[unknown])),
        float(np.mean(decisions.score[unknown] < threshold)),
    )


def by_share(file: Path, seeds: Sequence[int]) -> dict[Fraction, list[Figures]]:
    """Return the figures of each stream of a grid, each the mean over seeds, by the share of unknown samples."""
    gathered = defaultdict(list)
    loaded = grid.load(file)
    vocabulary = None if loaded.vocabulary is None else feature_pack.vocabulary(loaded.vocabulary)
    for words in loaded.streams:
        if not isinstance(words, grid.PackStream) or words.unknown is None:
            raise SystemExit(f"{words.name} is not a stream of the feature pack with a share of unknown samples.")
        runs = []
        for seed in seeds:
            stream = feature_pack.stream(words.pack, seed, words.split, words.unknown, words.order, words.classes)
            decisions = StreamDCS(stream.prototypes, vocabulary=vocabulary).observe_many(stream.features)
            runs.append(figures(decisions, stream.labels < 0))
        gathered[Fraction(words.unknown)].append(Figures(*np.mean(runs, axis=0)))
    return gathered


def table(gathered: dict[Fraction, list[Figures]]) -> str:
    """Return a Markdown table."""
    lines = ["| unknown | ECE of p_unknown: mean, most | found of possible: mean, least |", "|---|---|---|"]
    for share, cells in sorted(gathered.items()):
        errors, ratio = np.array([cell.ece for cell in cells]), "-"
        if share:
            ratios = np.array([cell.found / max(cell.possible, 1e-9) for cell in cells])
            ratio = f"{ratios.mean():.2f}, {ratios.min():.2f}"
        lines.append(f"| {float(share):.0%} | {100 * errors.mean():.1f}, {100 * errors.max():.1f} | {ratio} |")
    return "\n".join(lines)


def main() -> None:
    """Run the streams and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("grid", type=Path, help="file with streams from the feature pack")
    parser.add_argument("--seeds", type=int, nargs="+", default=[30, 31, 32], help="seeds (default: 30 31 32)")
    chosen = parser.parse_args()
    print(table(by_share(chosen.grid, chosen.seeds)))


if __name__ == "__main__":
    main()

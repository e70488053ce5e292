"""Print what each part of StreamDCS adds by the share of unknown samples: `python scripts/ablation_by_share.py`.

The script runs `grids/streamdcs-ablation-tune.yaml` once with StreamDCS as it is, and once without each part. A part is
left out by a setting, or by constants that give it no effect. Results are kept in a folder for each part, so that an
interrupted run continues. The first table has the ten streams of CLIP features, the others one stream each.
"""

import argparse
import multiprocessing
import re
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).parent.parent
GRID = ROOT / "grids" / "streamdcs-ablation-tune.yaml"
# What is compared: AUROC, known samples rejected, unknown samples found, accuracy.
FIGURES = ("auroc", "false_reject", "unknown_recall", "known_accuracy")
# A part that changes no figure of any cell by more than this adds nothing. Points.
NOTHING = 0.2

# The figures of one run: (len(FIGURES),) means over seeds by the stream and its share of unknown samples.
Run = Mapping[tuple[str, Fraction], np.ndarray]


@dataclass(frozen=True)
class Variant:
    """StreamDCS without a part: the settings and constants that differ."""

    name: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    constants: Mapping[str, Any] = field(default_factory=dict)


WHOLE = Variant("StreamDCS")
VARIANTS = (
    Variant("linear head", {"linear_head": False}),
    Variant("gate of the linear head", constants={"HEAD_AUROC": (-2.0, -1.0)}),
    Variant("head in the probabilities behind the threshold", constants={"HEAD_ODDS": 0.0}),
    Variant("class baseline", constants={"BASELINE_PRIOR": 1e12}),
    Variant("choice of unknown-looking samples for it", constants={"REST_WEIGHT": 1.0}),
    Variant("more centring with few classes", constants={"RAW_PART": 0.0}),
    Variant("two groups", constants={"GAIN": 1e12}),
    Variant("expected width of the known scores", constants={"WIDTH_PRIOR": 0.0}),
    Variant("doubt about large groups", constants={"DOUBT": 0.0}),
    Variant("lower groups of known samples", constants={"HARD_KNOWN": (1e12, 2e12)}),
    Variant("unknown samples alone", constants={"ALONE": (-2e12, -1e12)}),
    Variant("wider lower side of the known scores", constants={"SKEW": 1.0}),
    Variant("lower threshold with few scores", constants={"CAUTION": 0.0}),
    Variant("test of the first samples", constants={"FIRST_LEAD": -1e12}),
    Variant("shifts", constants={"SHIFT_DEVIATIONS": 1e12}),
    Variant("class bias", {"class_bias": False}),
)


def run(variant: Variant, file: Path, seeds: int | None, out: Path, features: Path) -> None:
    """Run a grid with a variant of StreamDCS. It must run in a new process: constants are read at import."""
    from protodcs.core.streamdcs import constants

    if "protodcs.core.streamdcs.engine" in sys.modules:
        raise RuntimeError("StreamDCS is already imported, so its constants cannot change any more.")
    for name, value in variant.constants.items():
        if not hasattr(constants, name):
            raise ValueError(f"StreamDCS has no constant {name!r}.")
        setattr(constants, name, value)
    from protodcs.bench import grid
    from protodcs.bench.run import Failure, execute, on_this_machine, planned, prepared
    from protodcs.features.run import in_a_loop
    from protodcs.methods.spec import MethodSpec

    chosen = grid.load(file)
    methods = [MethodSpec(method="streamdcs", label=WHOLE.name, options=dict(variant.settings))]
    chosen = chosen.model_copy(update={"methods": methods, "seeds": chosen.seeds[:seeds]})
    plan = planned(chosen, out, f"python scripts/{Path(__file__).name}")
    cells = prepared(plan, features, in_a_loop, lambda name, done, total: None)
    for done in execute(plan, cells, on_this_machine(1)):
        if isinstance(done, Failure):
            raise RuntimeError(done.words)


def folder_of(variant: Variant, out: Path) -> Path:
    """Return the folder of results of a variant."""
    return out / re.sub("[^a-z0-9]+", "-", variant.name.lower())


def read(folder: Path) -> Run:
    """Return the figures of each stream of a folder of results."""
    from protodcs.bench import rows
    from protodcs.errors import DataError

    gathered = defaultdict(list)
    settings = defaultdict(set)
    for row in rows.read_folder(folder):
        found = re.search(r"([0-9/]+) unknown", row["stream"])
        if row["segment"] == rows.POOLED and found:
            stream = re.sub(r", [0-9/]+ unknown", "", row["stream"])
            gathered[stream, Fraction(found[1])].append([row[name] for name in FIGURES])
            settings[row["stream"]].add(row["config"])
    for name, several in settings.items():
        if len(several) > 1:
            raise DataError(
                f"{folder} has results of {len(several)} settings on {name!r}, perhaps with and without a vocabulary. "
                "Delete the folder and run it again."
            )
    return {cell: np.mean(figures, axis=0) for cell, figures in gathered.items()}


def table(whole: Run, runs: Mapping[str, Run]) -> str:
    """Return a Markdown table: the figures of the whole method, and how they change without each part. In percent."""
    shares = sorted({share for _, share in whole})
    unknown = [share for share in shares if share]
    heads = [f"{name} at {_percents(some)}" for name, some in _columns(shares, unknown)]
    lines = [
        f"| without | {' | '.join(heads)} | accuracy | most of any cell |",
        "|---" * (len(heads) + 3) + "|",
        f"| (nothing) | {' | '.join(_means(whole, shares, unknown, ''))} | |",
    ]
    for name, run in runs.items():
        change = {cell: run[cell] - whole[cell] for cell in whole}
        largest = 100 * np.nanmax(np.abs(list(change.values())))
        most = f"{largest:.1f}" if largest > NOTHING else f"**{largest:.2f}**"
        lines.append(f"| {name} | {' | '.join(_means(change, shares, unknown, '+'))} | {most} |")
    return "\n".join(lines)


def _columns(shares: Sequence[Fraction], unknown: Sequence[Fraction]) -> list[tuple[str, Sequence[Fraction]]]:
    return [("AUROC", unknown), ("known rejected", shares), ("unknown found", unknown)]


def _percents(shares: Iterable[Fraction]) -> str:
    return " / ".join(f"{float(100 * share):g}" for share in shares) + " %"


def _means(run: Run, shares: Sequence[Fraction], unknown: Sequence[Fraction], sign: str) -> list[str]:
    """Return the mean figures over the streams: of each share, and the accuracy of all."""
    cells = []
    for place, (_, some) in enumerate(_columns(shares, unknown)):
        means = [np.mean([found[place] for (_, share), found in run.items() if share == one]) for one in some]
        cells.append(" / ".join(f"{100 * mean:{sign}.1f}" for mean in means))
    return [*cells, f"{100 * np.mean([found[-1] for found in run.values()]):{sign}.1f}"]


def without_effect(whole: Run, runs: Mapping[str, Run]) -> list[str]:
    """Return the parts that change no figure of any cell by more than `NOTHING`."""
    return [
        name
        for name, run in runs.items()
        if all(100 * np.nanmax(np.abs(run[cell] - whole[cell])) <= NOTHING for cell in whole)
    ]


def main() -> None:
    """Run what is missing, and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--grid", type=Path, default=GRID, help="grid with the streams")
    parser.add_argument("--seeds", type=int, help="only this many of the seeds of the grid")
    parser.add_argument("--out", type=Path, default=Path("results/ablation"), help="folder of results")
    parser.add_argument("--features", type=Path, help="folder of features (default: OUT/features)")
    chosen = parser.parse_args()
    runs = {}
    for variant in (WHOLE, *VARIANTS):
        folder = folder_of(variant, chosen.out)
        given = variant, chosen.grid, chosen.seeds, folder, chosen.features or chosen.out / "features"
        process = multiprocessing.get_context("spawn").Process(target=run, args=given)
        process.start()
        process.join()
        if process.exitcode:
            raise SystemExit(f"The run without {variant.name} failed.")
        runs[variant.name] = read(folder)
    print(page(runs.pop(WHOLE.name), runs))


def page(whole: Run, runs: Mapping[str, Run]) -> str:
    """Return all tables, and the parts without effect."""
    groups: dict[str, set[str]] = {"CLIP features, mean of ten cells": set()}
    for stream, _ in whole:
        title = stream if "mini" in stream else next(iter(groups))
        groups.setdefault(title, set()).add(stream)
    lines = []
    for title, streams in groups.items():
        parts = {name: _only(run, streams) for name, run in runs.items()}
        lines += [f"**{title}**", "", table(_only(whole, streams), parts), ""]
    nothing = ", ".join(without_effect(whole, runs)) or "none"
    return "\n".join([*lines, f"Parts that change no figure of any cell by more than {NOTHING} points: {nothing}."])


def _only(run: Run, streams: set[str]) -> Run:
    return {cell: found for cell, found in run.items() if cell[0] in streams}


if __name__ == "__main__":
    main()

"""Made-up seasons of camera traps: `python -m benchmarks.camera_traps`, `--write` to keep the result.

Each seed is a season of four cameras and 600 events, 5 % of them of one species that is on no list. A season goes
through `protodcs classify --megadetector`, and its files are compared with what its images show.
"""

import argparse
import csv
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

from benchmarks import charts
from protodcs.demo.season import SPECIES, UNLISTED, make_season
from protodcs.metrics.evaluation import proportion

RESULTS = Path(__file__).parent.parent / "docs" / "results"
LEVELS = ("box", "event")


def season(folder, events, seed):
    """Make one season and classify it; return what it shows and what was decided, by level."""
    make_season(folder, events, seed)
    words = ["classify", "--megadetector", "results.json", "--classes", "species.txt", "--model", "demo"]
    command = [sys.executable, "-m", "protodcs", *words, "--out", "species.json"]
    subprocess.run(command, cwd=folder, check=True, capture_output=True)
    with (folder / "truth.csv").open(newline="") as lines:
        shows = {row["file"]: row["shows"] for row in csv.DictReader(lines)}
    results = json.loads((folder / "species.json").read_text())
    names = results["classification_categories"]
    boxes = [
        (shows[image["file"]], names[box["classifications"][0][0]])
        for image in results["images"]
        for box in image["detections"]
        if "classifications" in box
    ]
    first = {image["file"].removesuffix(".jpg"): shows[image["file"]] for image in results["images"]}
    with (folder / "species.events.csv").open(newline="") as lines:
        rows = [row for row in csv.DictReader(lines) if row["p_unknown"]]
    started = [f"{row['camera']}/{row['start'].translate({45: None, 58: None, 84: '-'})}" for row in rows]
    decided = [(first[start], row["label"] or "unknown") for start, row in zip(started, rows, strict=True)]
    return dict(zip(LEVELS, (boxes, decided), strict=True))


def figures(decided):
    """Return how many of the unlisted are found, and how many of the listed are rejected and right."""
    unlisted = [answer for shown, answer in decided if shown == UNLISTED]
    listed = [(shown, answer) for shown, answer in decided if shown in SPECIES]
    return {
        "unlisted": len(unlisted),
        "found": unlisted.count("unknown"),
        "listed": len(listed),
        "rejected": sum(answer == "unknown" for _, answer in listed),
        "right": sum(shown == answer for shown, answer in listed),
    }


def measure(seeds, events):
    """Return a row for each seed and level."""
    rows = []
    for seed in seeds:
        with tempfile.TemporaryDirectory() as folder:
            decided = season(Path(folder), events, seed)
        rows += [{"seed": seed, "level": level, **figures(decided[level])} for level in LEVELS]
        print(json.dumps(rows[-2:]), file=sys.stderr, flush=True)
    return rows


def as_markdown(rows):
    """Return a table of both levels, over all seeds and for each."""
    lines = ["| | unlisted found | listed rejected | listed with the right species |", "|---|---|---|---|"]
    seeds = sorted({row["seed"] for row in rows})
    for level in LEVELS:
        mine = [row for row in rows if row["level"] == level]
        total = {name: sum(row[name] for row in mine) for name in figures([])}
        lines.append(f"| **{level}, all seeds** | {_shares(total, level == 'event')} |")
        if level == "event":
            lines += [f"| event, seed {row['seed']} | {_shares(row, False)} |" for row in mine]
    return f"Seeds {seeds[0]} to {seeds[-1]}.\n\n" + "\n".join(lines) + "\n"


def plot(rows, file):
    """Draw the share of each season that was found and rejected, by event, with its interval."""
    mine = [row for row in rows if row["level"] == "event"]
    figure, all_axes = charts.panels(2)
    for axes, (part, whole, title, colour) in zip(
        all_axes,
        (
            ("found", "unlisted", "unlisted animals found", charts.BLUE),
            ("rejected", "listed", "listed animals rejected", charts.ORANGE),
        ),
        strict=True,
    ):
        shares = [proportion(np.arange(row[whole]) < row[part]) for row in mine]
        values = 100 * np.array([(share.value, share.low, share.high) for share in shares])
        spread = np.abs(values[:, 1:] - values[:, :1]).T
        axes.errorbar(range(len(mine)), values[:, 0], spread, fmt="o", color=colour, capsize=3)
        axes.set_xticks(range(len(mine)), [row["seed"] for row in mine])
        axes.set_ylim(0, 1.1 * values.max())
        axes.set(xlabel="season (seed)", ylabel="% of the events")
        axes.set_title(title, fontsize=10)
    charts.save(figure, file)


def _shares(row, interval):
    cells = []
    for part, whole in (("found", "unlisted"), ("rejected", "listed"), ("right", "listed")):
        share = proportion(np.arange(row[whole]) < row[part])
        spread = f" ({100 * share.low:.1f} to {100 * share.high:.1f})" if interval else ""
        cells.append(f"{100 * share.value:.1f} %{spread}")
    return " | ".join(cells)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4, 5])
    parser.add_argument("--events", type=int, default=600)
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--draw", action="store_true", help="only draw the stored rows again")
    given = parser.parse_args()
    stored = RESULTS / "camera-traps.json"
    rows = json.loads(stored.read_text()) if given.draw else measure(given.seeds, given.events)
    print(as_markdown(rows))
    if given.write:
        stored.write_text(json.dumps(rows, indent=1) + "\n")
    if given.write or given.draw:
        plot(rows, stored.with_suffix(".png"))


if __name__ == "__main__":
    main()

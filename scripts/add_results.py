"""Add later results to published tables: `python scripts/add_results.py NAME RESULTS... [--remove STREAM]`.

NAME is a folder in docs/results that `publish_results.py` wrote, RESULTS are folders that `protodcs bench run` filled.
Their rows replace published rows of the same method, stream and seed. The main tables and those of the streams are
written again from both, if a page mentions them. So a new method does not need a second run of all others. Figures and
the paper's tables stay as they are.
"""

import argparse
import csv
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from publish_results import RESULTS, short, shown_of

from protodcs.bench import leaderboard, rows, summaries
from protodcs.bench.comparison import Comparison, comparisons
from protodcs.bench.paper_tables import without_ablations
from protodcs.bench.rows import FIGURES, GATHERED, IDENTITY, MEAN, MEASURED, POOLED, Row
from protodcs.bench.tables import Table, to_csv, to_markdown

_KEYS = {name: key for key, name in summaries.CSV_NAMES.items()}
_NUMBERS = {*FIGURES, "seconds", "peak_memory_mb"}
_WHOLE_NUMBERS = {"seed", "classes", "dimension"}


def published(folder: Path) -> list[Row]:
    """Return the published rows: the averages of every seed, and empty ones that name the segments."""
    with (folder / "results.csv").open(newline="") as file:
        found = [_row(line) for line in csv.DictReader(file)]
    segments: dict[tuple[str, str, str], dict[str, None]] = {}
    for line in _lines(folder / "summary.csv"):
        if line["segment"] not in GATHERED:
            place = line["stream"], line["protocol"], line["encoder"]
            segments.setdefault(place, {})[line["segment"]] = None
    nothing = dict.fromkeys(FIGURES, math.nan)
    for row in [row for row in found if row["segment"] == MEAN]:
        names = segments[row["stream"], row["protocol"], row["encoder"]]
        found += [{**row, **nothing, "segment": name, "position": place} for place, name in enumerate(names)]
    return found


def _lines(file: Path) -> list[dict[str, str]]:
    with file.open(newline="") as given:
        return list(csv.DictReader(given))


def _row(line: dict[str, str]) -> Row:
    """Return the row of a line of `results.csv`. What the file leaves out is empty."""
    row: dict[str, Any] = {**dict.fromkeys([*IDENTITY, *MEASURED], ""), **dict.fromkeys(FIGURES, math.nan)}
    for name, text in line.items():
        key = _KEYS.get(name, name)
        row[key] = (float(text) if text else math.nan) if key in _NUMBERS else text
    row |= {key: int(row[key]) for key in _WHOLE_NUMBERS}
    if math.isnan(row["balanced_accuracy"]):
        # Older files leave it out.
        row["balanced_accuracy"] = (1.0 - row["false_reject"] + row["unknown_recall"]) / 2.0
    return {**row, "position": GATHERED[row["segment"]]}


def joined(old: Sequence[Row], new: Sequence[Row], remove: Iterable[str] = ()) -> list[Row]:
    """Return the new rows, and the old ones that they do not replace.

    The streams to `remove` are left out if they come from a grid that was run again.
    """
    replaced = {(*_place(row), row["label"], row["seed"]) for row in new}
    prompts = {_place(row): row["prompts"] for row in new}
    removed = {(row["grid"], stream) for row in new for stream in remove}
    kept = [row for row in old if (*_place(row), row["label"], row["seed"]) not in replaced]
    kept = [row for row in kept if (row["grid"], row["stream"]) not in removed]
    # Published rows have no hash of the prompts.
    return [*({**row, "prompts": prompts.get(_place(row), "")} for row in kept), *new]


def _place(row: Mapping[str, Any]) -> tuple[str, str, str]:
    return row["stream"], row["protocol"], row["encoder"]


def tables(compared: Sequence[Comparison]) -> list[Table]:
    """Return the leaderboard, the main tables and those of the streams."""
    found = [summaries.overview(compared, metric, MEAN) for metric in leaderboard.BY_STREAM]
    if any(entry.method == leaderboard.OWN for comparison in compared for entry in comparison.entries):
        found += [leaderboard.behind_table(compared, metric) for metric in leaderboard.BEHIND]
    return [leaderboard.summary(compared), *found] + [
        summaries.stream_table(comparison, segment) for comparison in compared for segment in comparison.averages
    ]


def write(folder: Path, everything: Sequence[Row], new: Sequence[Row]) -> None:
    """Write the tables, `results.csv` and `summary.csv`. The lines of the summary that are not new stay."""
    compared, is_shown = without_ablations(comparisons(everything)), shown_of(folder.name)
    for old in [*folder.glob("main-*"), *folder.glob("stream-*")]:
        old.unlink()
    for table in tables(compared):
        markdown, csv_file = folder / f"{table.name}.md", folder / f"{table.name}.csv"
        if is_shown(markdown) or is_shown(csv_file):
            markdown.write_text(to_markdown(table), encoding="utf-8")
            csv_file.write_text(to_csv(table), encoding="utf-8")
    averages = [row for row in everything if row["segment"] in (MEAN, POOLED)]
    _write(folder / "results.csv", csv.DictReader(summaries.long_csv(averages).splitlines()))
    fresh = list(csv.DictReader(summaries.summary_csv(comparisons(new)).splitlines()))
    for line in fresh:
        del line["config"]
    told, wanted = {_entry(line) for line in fresh}, {_entry(row) for row in everything}
    kept = [line for line in _lines(folder / "summary.csv") if _entry(line) in wanted - told]
    for line in kept:
        line.pop("config", None)
    _write(folder / "summary.csv", [*kept, *fresh])


def _entry(line: Mapping[str, Any]) -> tuple[str, ...]:
    return tuple(line[name] for name in ("label", "stream", "protocol", "encoder"))


def _write(file: Path, lines: Iterable[dict[str, str]]) -> None:
    found = list(lines)
    with file.open("w", newline="") as out:
        # Older lines may have fewer columns.
        writer = csv.DictWriter(out, list(found[-1]), restval="", lineterminator="\n")
        writer.writeheader()
        for line in found:
            writer.writerow({name: short(value) for name, value in line.items()})


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", help="folder in docs/results")
    parser.add_argument("results", type=Path, nargs="+", help="folders that `protodcs bench run` filled")
    parser.add_argument("--remove", nargs="*", default=[], help="streams to leave out from now on")
    chosen = parser.parse_args()
    folder = RESULTS / chosen.name
    new = [row for one in chosen.results for row in rows.read_folder(one)]
    write(folder, joined(published(folder), new, chosen.remove), new)


if __name__ == "__main__":
    main()

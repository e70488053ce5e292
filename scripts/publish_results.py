"""Copy what a report says into the documentation: `python scripts/publish_results.py REPORT NAME`.

REPORT is the folder that `protodcs report` wrote. The leaderboard, the main tables, those of the streams and those of
the paper go to docs/results/NAME as CSV and Markdown, the figures that the pages show as PNG. `results.csv` has the
averages of every seed, `summary.csv` single corruptions over seeds, both with six digits.
"""

import csv
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

RESULTS = Path(__file__).parent.parent / "docs" / "results"
AVERAGES = ("mean", "pooled")
TABLES = ("leaderboard", "behind-", "main-", "stream-", "table-")
# The figures that the documentation shows. All others are in the report itself.
SHOWN = ("found-by-share",)


def main(report: Path, place: Path) -> None:
    """Replace what the documentation holds by what this report says."""
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    for table in sorted((report / "tables").glob("*.md")):
        if table.name.startswith(TABLES):
            for file in (table, table.with_suffix(".csv")):
                shutil.copyfile(file, place / file.name)
    shorten(report / "tables" / "results.csv", place / "results.csv", lambda row: row["segment"] in AVERAGES)
    # The settings of every method are in the other file.
    shorten(report / "tables" / "summary.csv", place / "summary.csv", lambda row: row.pop("config"))
    for figure in sorted((report / "figures").glob("*.png")):
        if figure.stem.startswith(SHOWN):
            shutil.copyfile(figure, place / figure.name)


def shorten(source: Path, target: Path, keep: Callable[[dict[str, str]], object]) -> None:
    """Copy the rows that are to be kept, with numbers of six digits."""
    with source.open(newline="") as given:
        rows = [row for row in csv.DictReader(given) if keep(row)]
    with target.open("w") as taken:
        writer = csv.DictWriter(taken, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows({name: short(value) for name, value in row.items()} for row in rows)


def short(value: str) -> str:
    """A number with six digits; whatever else as it is."""
    try:
        return f"{float(value):.6g}" if "." in value else value
    except ValueError:
        return value


if __name__ == "__main__":
    main(Path(sys.argv[1]), RESULTS / sys.argv[2])

"""Copy what a report says into the documentation: `python scripts/publish_results.py REPORT NAME`.

REPORT is the folder that `protodcs report` wrote. What a page mentions of it goes to docs/results/NAME: tables as CSV
and Markdown, figures as PNG. `results.csv` has the averages of every seed, `summary.csv` single corruptions over seeds,
both with six digits.
"""

import csv
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

DOCS = Path(__file__).parent.parent / "docs"
RESULTS = DOCS / "results"
AVERAGES = ("mean", "pooled")


def main(report: Path, name: str) -> None:
    """Replace what the documentation holds by what this report says."""
    place, is_shown = RESULTS / name, shown_of(name)
    for old in place.glob("*.*"):
        old.unlink()
    place.mkdir(parents=True, exist_ok=True)
    tables = report / "tables"
    for table in sorted(tables.glob("*.md")):
        both = table, table.with_suffix(".csv")
        if any(map(is_shown, both)):
            for file in both:
                shutil.copyfile(file, place / file.name)
    for figure in filter(is_shown, sorted((report / "figures").glob("*.png"))):
        shutil.copyfile(figure, place / figure.name)
    if is_shown(tables / "results.csv"):
        shorten(tables / "results.csv", place / "results.csv", lambda row: row["segment"] in AVERAGES)
    if is_shown(tables / "summary.csv"):
        # The settings of every method are in the other file.
        shorten(tables / "summary.csv", place / "summary.csv", lambda row: row.pop("config"))


def shown_of(name: str) -> Callable[[Path], bool]:
    """Return whether a page mentions a file of docs/results/NAME."""
    pages = "".join(page.read_text() for page in DOCS.rglob("*.md"))
    return lambda file: f"{name}/{file.name}" in pages


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
    main(Path(sys.argv[1]), sys.argv[2])

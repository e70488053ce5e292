"""Copy what a report says into the documentation: `python scripts/publish_results.py REPORT NAME`.

REPORT is the folder that `protodcs report` wrote. Of its tables and figures, those that a page mentions go to
docs/results/NAME: tables as CSV and Markdown, figures as PNG. `results.csv` has the averages of every seed,
`summary.csv` single corruptions over seeds, both with six digits.
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
    place, pages = RESULTS / name, "".join(page.read_text() for page in DOCS.rglob("*.md"))
    for old in place.glob("*.*"):
        old.unlink()
    place.mkdir(parents=True, exist_ok=True)
    for table in sorted((report / "tables").glob("*.md")):
        if any(f"/{place.name}/{table.stem}{ending}" in pages for ending in (".md", ".csv")):
            for file in (table, table.with_suffix(".csv")):
                shutil.copyfile(file, place / file.name)
    for figure in sorted((report / "figures").glob("*.png")):
        if f"{place.name}/{figure.name}" in pages:
            shutil.copyfile(figure, place / figure.name)
    shorten(report / "tables" / "results.csv", place / "results.csv", lambda row: row["segment"] in AVERAGES)
    # The settings of every method are in the other file.
    shorten(report / "tables" / "summary.csv", place / "summary.csv", lambda row: row.pop("config"))


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

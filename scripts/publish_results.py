"""Copy what a report says into the documentation: `python scripts/publish_results.py REPORT`.

REPORT is the folder that `protodcs report` wrote. Tables go to docs/results/benchmark as CSV and Markdown, a few
figures as PNG. `results.csv` keeps the averages of every seed; single corruptions are in `summary.csv`, over seeds.
"""

import csv
import shutil
import sys
from pathlib import Path

PLACE = Path(__file__).parent.parent / "docs" / "results" / "benchmark"
AVERAGES = ("mean", "pooled")
# Of every kind of figure the ones of these streams; all are in the report itself.
SHOWN = ("cifar-10-c-svhn-c-continual", "dtd-shuffled")


def main(report: Path) -> None:
    """Replace what the documentation holds by what this report says."""
    shutil.rmtree(PLACE, ignore_errors=True)
    PLACE.mkdir(parents=True)
    for table in sorted((report / "tables").iterdir()):
        if table.suffix in (".csv", ".md") and table.name != "results.csv":
            shutil.copyfile(table, PLACE / table.name)
    with (report / "tables" / "results.csv").open(newline="") as source, (PLACE / "results.csv").open("w") as target:
        rows = csv.DictReader(source)
        writer = csv.DictWriter(target, rows.fieldnames or [], lineterminator="\n")
        writer.writeheader()
        writer.writerows(row for row in rows if row["segment"] in AVERAGES)
    for figure in sorted((report / "figures").glob("*.png")):
        if figure.stem in ("accuracy-auroc", "uncertainty-landscape") or any(name in figure.stem for name in SHOWN):
            shutil.copyfile(figure, PLACE / figure.name)


if __name__ == "__main__":
    main(Path(sys.argv[1]))

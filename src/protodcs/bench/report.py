"""From folders of results to one page, tables and figures.

It reads what `protodcs bench run` wrote, and runs nothing. Equal folders give equal bytes: no clock, no machine, no
path of this computer enters.
"""

import json
import math
import shlex
from collections.abc import Iterable, Sequence
from pathlib import Path

from ..atomic_io import replace_file
from ..errors import DataError
from . import drawing, leaderboard, page, paper_tables, rows, summaries, traces
from .captions import Picture, by_share, pictures
from .comparison import MAIN, Comparison, comparisons, distinct
from .rows import MEAN, Row
from .summaries import encoder_words
from .tables import Table, to_csv, to_html, to_latex, to_markdown


def write_report(folders: Sequence[Path], out: Path, paper: bool | None = None) -> Path:
    """Write report.html, tables/ and figures/ into `out`; returns the page.

    Args:
        folders: of results, as `protodcs bench run --out` makes them. A cell that lies in two of them counts once.
        out: is made if it is not there; files of the same names are replaced.
        paper: whether to show the tables of the ProtoDCS paper that were run; None: if its grids were run.
    """
    if not folders:
        raise DataError("a report needs at least one folder of results: `protodcs bench run` writes them")
    found = [row for folder in folders for row in rows.read_folder(folder)]
    kept = [trace for folder in folders for trace in traces.read_folder(folder)]
    for folder in (out, out / "tables", out / "figures"):
        folder.mkdir(parents=True, exist_ok=True)
    everything = comparisons(found)
    if paper is None:
        paper = bool({row["grid"] for row in found} & paper_tables.grids())
    command = shlex.join(["protodcs", "report", *map(_shown, folders), "--out", _shown(out)])
    writer = _Writer(out)
    # A folder with ablations alone compares their variants.
    compared = paper_tables.without_ablations(everything) or everything
    sections = [
        ("Streams on which another method is better than StreamDCS", _behind(writer, compared)),
        (
            "Every stream, by metric",
            [writer.table(summaries.overview(compared, m, MEAN)) for m in leaderboard.BY_STREAM],
        ),
        ("Stream by stream", _streams(writer, compared)),
        ("The paper's tables, beside what came out here", _paper(writer, everything) if paper else []),
        ("More figures", _pictures(writer, pictures(compared, kept, command, paper))),
        ("What was run", _run(found, command)),
    ]
    lead = [writer.table(leaderboard.summary(compared)), *_pictures(writer, [by_share(compared, command)])]
    writer.file("tables/results.csv", summaries.long_csv(found).encode())
    writer.file("tables/summary.csv", summaries.summary_csv(everything).encode())
    folded = [page.folded(title, parts) for title, parts in sections if parts]
    words = leaderboard.headline(compared)
    return writer.file("report.html", page.page("Leaderboard", words, [*lead, *folded]).encode())


def _shown(path: Path) -> str:
    """A folder as it was given; of one that is given from the root on, the last part."""
    return path.name if path.is_absolute() else path.as_posix()


class _Writer:
    """Puts files into the folder of the report."""

    def __init__(self, out: Path):
        self.out = out

    def file(self, name: str, data: bytes) -> Path:
        target = self.out / name
        replace_file(target, data)
        return target

    def table(self, table: Table) -> str:
        """Write a table in its three formats; returns the fourth, for the page."""
        for ending, text in (("csv", to_csv(table)), ("md", to_markdown(table)), ("tex", to_latex(table))):
            self.file(f"tables/{table.name}.{ending}", text.encode())
        return to_html(table)


def _run(found: Sequence[Row], command: str) -> list[str]:
    cells = {row["cell"]: row for row in found}
    # Averages carry the seconds of their whole cell: one of them for each.
    seconds = math.fsum(row["seconds"] or 0.0 for row in distinct(found) if row["segment"] == MEAN)
    started = sorted(row["started"] for row in cells.values())
    runs = sorted({row["command"] for row in found if row["command"]})
    streams = dict.fromkeys(
        f"{r['stream']} ({r['protocol']}): {r['known']} known, {r['unknown'] or 'nothing'} unknown" for r in found
    )
    pairs = [
        ("Grids", "; ".join(sorted({row["grid"] for row in found}))),
        ("Runs", "; ".join(f"`{run}`" for run in runs) or "not recorded"),
        ("This page", f"`{command}`"),
        ("Encoders", "; ".join(sorted({encoder_words(row["encoder"]) for row in found}))),
        ("Streams", "; ".join(streams)),
        ("Methods", "; ".join(dict.fromkeys(row["label"] for row in found))),
        ("Seeds", ", ".join(str(seed) for seed in sorted({row["seed"] for row in found}))),
        ("Cells", f"{len(cells):,}, {seconds:,.0f} seconds of method time without reading data"),
        ("Started", f"first {started[0]}, last {started[-1]} (UTC)" if started else "not recorded"),
        ("Versions", "; ".join(sorted({_versions(row["versions"]) for row in found}))),
        ("Machine", ", ".join(sorted({row["machine"] or "not recorded" for row in found}))),
    ]
    return [
        page.facts(pairs),
        page.paragraph(
            "Tables and figures are beside this page in `tables/` (CSV with shares from 0 to 1, Markdown and LaTeX in "
            "percent) and `figures/` (PNG, SVG). `tables/results.csv` has every row of every seed with its settings, "
            "manifest and cell. `tables/summary.csv` has means and intervals."
        ),
    ]


def _versions(words: str | None) -> str:
    return ", ".join(f"{name} {version}" for name, version in sorted(json.loads(words or "{}").items()))


def _behind(writer: _Writer, compared: Sequence[Comparison]) -> list[str]:
    if not any(entry.method == leaderboard.OWN for comparison in compared for entry in comparison.entries):
        return []
    return [writer.table(leaderboard.behind_table(compared, metric)) for metric in leaderboard.BEHIND]


def _streams(writer: _Writer, compared: Sequence[Comparison]) -> list[str]:
    parts = []
    for comparison in compared:
        inside = [writer.table(summaries.stream_table(comparison, segment)) for segment in comparison.averages]
        if len(comparison.segments) > 1:
            inside += [writer.table(summaries.corruption_table(comparison, metric)) for metric in MAIN]
        parts.append(page.folded(comparison.setting.title, inside))
    return parts


def _paper(writer: _Writer, everything: Sequence[Comparison]) -> list[str]:
    intro = (
        "Published figures are those printed in the paper. No code and no raw results were published with it, and some "
        "of its figures cannot be: OSCR always lies between Acc + AUROC - 100 % and Acc. Such rows are cited with a "
        "footnote. Where the encoder or the data here differ from the paper's, the heads say so."
    )
    tables = [paper_tables.beside(table, everything) for table in paper_tables.run(everything)]
    return [page.paragraph(intro), *map(writer.table, tables)] if tables else []


def _pictures(writer: _Writer, drawn: Iterable[Picture]) -> list[str]:
    parts = []
    for picture in drawn:
        png = drawing.to_png(picture.figure)
        writer.file(f"figures/{picture.name}.png", png)
        writer.file(f"figures/{picture.name}.svg", drawing.to_svg(picture.figure))
        parts.append(page.picture(picture.name, picture.title, picture.caption, png))
    return parts

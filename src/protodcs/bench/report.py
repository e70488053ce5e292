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
from . import drawing, page, paper_tables, rows, summaries, traces
from .captions import missing, pictures
from .comparison import MAIN, Comparison, comparisons, distinct
from .page import Section
from .rows import MEAN, Row
from .summaries import encoder_words
from .tables import Table, to_csv, to_html, to_latex, to_markdown
from .traces import Trace

_EXAMPLE = "protodcs bench run grids/clip-features.yaml --out results"


def write_report(folders: Sequence[Path], out: Path) -> Path:
    """Write report.html, tables/ and figures/ into `out`; returns the page.

    Args:
        folders: of results, as `protodcs bench run --out` makes them. A cell that lies in two of them counts once.
        out: is made if it is not there; files of the same names are replaced.
    """
    if not folders:
        raise DataError("a report needs at least one folder of results: `protodcs bench run` writes them")
    found = [row for folder in folders for row in rows.read_folder(folder)]
    kept = [trace for folder in folders for trace in traces.read_folder(folder)]
    for folder in (out, out / "tables", out / "figures"):
        folder.mkdir(parents=True, exist_ok=True)
    everything = comparisons(found)
    command = shlex.join(["protodcs", "report", *map(_shown, folders), "--out", _shown(out)])
    writer = _Writer(out)
    compared = paper_tables.without_ablations(everything)
    sections = [
        Section("run", "What was run", _front(found, command)),
        Section("main", "Main tables", _main(writer, compared)),
        Section("streams", "Stream by stream", _streams(writer, compared)),
        Section("paper", "The paper's tables, beside what came out here", _paper(writer, everything)),
        Section("figures", "Figures", _figures(writer, compared, kept, command)),
        Section("provenance", "Provenance", _provenance(everything)),
    ]
    writer.file("tables/results.csv", summaries.long_csv(found).encode())
    writer.file("tables/summary.csv", summaries.summary_csv(everything).encode())
    lead = "Open-set test-time adaptation: every method on the same streams, sample by sample in the same order."
    return writer.file("report.html", page.page("ProtoDCS benchmark report", lead, sections).encode())


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


def _front(found: Sequence[Row], command: str) -> list[str]:
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
            "Tables and figures lie beside this page in `tables/` (CSV with shares from 0 to 1, Markdown and LaTeX in "
            "percent) and `figures/` (PNG, SVG). `tables/results.csv` has every row of every seed, "
            "`tables/summary.csv` the means and intervals."
        ),
    ]


def _versions(words: str | None) -> str:
    return ", ".join(f"{name} {version}" for name, version in sorted(json.loads(words or "{}").items()))


def _main(writer: _Writer, compared: Sequence[Comparison]) -> list[str]:
    if not compared:
        return [page.paragraph(f"Nothing but ablations was run. To fill this: `{_EXAMPLE}`")]
    parts = [writer.table(summaries.overview(compared, metric, MEAN)) for metric in MAIN]
    headline = summaries.headline(compared)
    return [*parts, writer.table(headline)] if headline.rows else parts


def _streams(writer: _Writer, compared: Sequence[Comparison]) -> list[str]:
    parts = []
    for comparison in compared:
        parts.append(page.heading(comparison.setting.title))
        parts += [writer.table(summaries.stream_table(comparison, segment)) for segment in comparison.averages]
        tables = [summaries.differences(comparison, segment) for segment in comparison.averages]
        inside = [writer.table(table) for table in tables if table]
        if inside:
            parts.append(page.folded("Paired differences", inside))
        if len(comparison.segments) > 1:
            inside = [writer.table(summaries.corruption_table(comparison, metric)) for metric in MAIN]
            parts.append(page.folded("Corruption by corruption", inside))
    return parts or [page.paragraph(f"No stream was run. To fill this: `{_EXAMPLE}`")]


def _paper(writer: _Writer, everything: Sequence[Comparison]) -> list[str]:
    intro = (
        "Published figures are those printed in the paper. No code and no raw results were published with it, and some "
        "of its figures cannot be: OSCR always lies between Acc + AUROC - 100 % and Acc. Such rows are cited with a "
        "footnote. Where the encoder or the data here differ from the paper's, the heads say so."
    )
    return [page.paragraph(intro), *(writer.table(paper_tables.beside(t, everything)) for t in paper_tables.tables())]


def _figures(writer: _Writer, compared: Sequence[Comparison], kept: Sequence[Trace], command: str) -> list[str]:
    parts = []
    for picture in pictures(compared, kept, command):
        png = drawing.to_png(picture.figure)
        writer.file(f"figures/{picture.name}.png", png)
        writer.file(f"figures/{picture.name}.svg", drawing.to_svg(picture.figure))
        parts.append(page.picture(picture.name, picture.title, picture.caption, png))
    return [*parts, *(page.paragraph(words) for words in missing(compared, kept))]


def _provenance(everything: Iterable[Comparison]) -> list[str]:
    """What every figure depends on: manifests, cells and settings, folded away."""
    parts = [
        page.paragraph(
            "A manifest hash fixes which samples came in which order; a cell is the hash of method, settings, stream, "
            "order and encoder. Equal cells give equal figures."
        )
    ]
    for comparison in everything:
        inside = []
        for entry in comparison.entries:
            cells = {row["seed"]: row for row in entry.rows}
            lines = [f"seed {seed}: cell {r['cell']}, manifest {r['manifest']}" for seed, r in sorted(cells.items())]
            lines += [f"grid: {entry.first['grid']}", f"encoder: {entry.first['fingerprint']}"]
            inside.append(page.folded(entry.label, [page.raw("\n".join([*lines, entry.first["config"]]))]))
        parts.append(page.folded(f"{comparison.setting.title}: {encoder_words(comparison.setting.encoder)}", inside))
    return parts

"""`protodcs report`: one page, tables and figures from folders of results."""

from pathlib import Path

import typer

from .screen import explained, tell


@explained
def report(
    folders: list[Path] = typer.Argument(..., help="Folders of results, written by `protodcs bench run`."),
    out: Path = typer.Option(..., help="Folder for report.html, tables/ and figures/."),
    paper: bool | None = typer.Option(
        None, "--paper/--no-paper", help="Show the tables of the ProtoDCS paper (default: if a grid of it was run)."
    ),
    as_json: bool = typer.Option(False, "--json", help="Print one JSON object for scripts."),
) -> None:
    """Write a self-contained HTML page, LaTeX, Markdown and CSV tables, and PNG and SVG figures."""
    from ..bench.report import write_report

    page = write_report(folders, out, paper)
    told = {
        "report": str(page),
        "bytes": page.stat().st_size,
        "tables": len({file.stem for file in (out / "tables").iterdir()}),
        "figures": len({file.stem for file in (out / "figures").iterdir()}),
    }
    tell(told, as_json)

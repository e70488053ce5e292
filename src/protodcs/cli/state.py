"""`protodcs state`: look into a state file without writing a program."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from ..errors import ProtoDCSError
from .screen import console, new_table

if TYPE_CHECKING:
    from rich.table import Table

app = typer.Typer(help="Inspect state files.", no_args_is_help=True)


@app.callback()
def main() -> None:
    """Inspect state files."""


@app.command()
def show(
    file: Path = typer.Argument(..., help="State file, as written by `engine.save` or `protodcs classify`."),
    as_json: bool = typer.Option(False, "--json", help="Print one JSON object for scripts."),
) -> None:
    """Print a readable summary of a state file, after checking it."""
    try:
        report = _report(file)
    except ProtoDCSError as problem:
        typer.echo(f"error: {problem}", err=True)
        raise typer.Exit(1) from None
    if as_json:
        typer.echo(json.dumps(report))
    else:
        _print(report)


def _report(file: Path) -> dict[str, Any]:
    from .. import methods
    from ..core import state as container

    data = container.read(file)
    header, arrays = container.unpack(data)
    return {
        "file": file.name,
        "bytes": len(data),
        **header.model_dump(exclude={"classes", "counters"}),
        "dimension": int(arrays["initial_prototypes"].shape[1])
        if "initial_prototypes" in arrays and arrays["initial_prototypes"].ndim == 2
        else None,
        "classes": header.classes,
        # What happened in a state without its prototypes only an engine beside them can tell.
        "stats": methods.restore(data).stats() if header.prototypes is None else dict(header.counters),
        "arrays": {name: {"shape": list(a.shape), "type": str(a.dtype)} for name, a in sorted(arrays.items())},
    }


def _print(report: dict[str, Any]) -> None:
    names = report["classes"]
    shown = ", ".join(names[:8]) + (f", ... ({len(names) - 8} more)" if len(names) > 8 else "")
    about = {
        "method": report["method"] + (" (frozen)" if report["frozen"] else ""),
        "written by": f"protodcs {report['package']}, schema {report['schema_version']}, backend {report['backend']}",
        "size": f"{report['bytes']:,} bytes",
        "classes": f"{len(names)}: {shown}",
        "dimension": str(report["dimension"]),
        "encoder": report["encoder"] or "not recorded",
        "prototypes": f"left out: {report['prototypes']}" if report["prototypes"] else "held",
        "content hash": report["content_hash"],
    }
    console().print(_table(f"State {report['file']}", about))
    stats = {k: v for k, v in report["stats"].items() if k not in ("method", "classes", "frozen")}
    mixture = stats.pop("mixture", None)
    if mixture:
        for side in ("known", "unknown"):
            # StreamDCS has only the distance between the two.
            if (part := mixture.get(side)) is None:
                continue
            stats[f"mixture, {side}"] = (
                f"weight {part['weight']:.3f}, mean {part['mean']:.4f}, variance {part['variance']:.2e}"
            )
        stats["mixture, separation"] = mixture["separation"]
    for key in [key for key, value in stats.items() if isinstance(value, dict)]:
        stats |= {f"{key}, {part}": value for part, value in stats.pop(key).items()}
    console().print(_table("What happened", {key.replace("_", " "): _number(value) for key, value in stats.items()}))
    console().print(_table("Configuration", {key: str(value) for key, value in report["config"].items()}))


def _number(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.5g}" if isinstance(value, float) else str(value)


def _table(title: str, rows: dict[str, str]) -> "Table":
    table = new_table(title=title, show_header=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for key, value in rows.items():
        table.add_row(key, value)
    return table

"""`protodcs store`: check, repair and copy the streams of a stopped service."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from .screen import explained, tell

if TYPE_CHECKING:
    from ..serve.store.inspection import StoreReport

app = typer.Typer(help="Check, repair and copy the store of a stopped service.", no_args_is_help=True)

# A check reads all streams.
_CHECK_SECONDS = 86_400.0
_FOLDER = typer.Argument(..., help="The folder of the streams, such as protodcs-streams.")
_AS_JSON = typer.Option(False, "--json", help="Print one JSON object for scripts.")


@app.command()
@explained
def check(
    store: str = typer.Argument(..., help="The folder of the streams, such as protodcs-streams, or postgresql://..."),
    as_json: bool = _AS_JSON,
) -> None:
    """Check that a store holds everything that was acknowledged. Exit with 1 if it does not. Nothing is changed.

    A service may use a PostgreSQL store meanwhile. Settings of the server that can lose writes are an error.
    """
    from ..serve.store.inspection import check_store

    if store.startswith(("postgresql:", "postgres:")):
        _check_postgres(store, as_json)
        return
    folder = Path(store.removeprefix("sqlite:"))
    report = check_store(folder)
    if report.is_good:
        advice = "The store is complete."
    elif report.problems:
        advice = "The database is damaged. Restore a backup, or delete the folder to start with an empty store."
    else:
        advice = f"Restore a backup, or go on without what is lost: `protodcs store repair {folder}`."
    _print(report, advice, as_json)
    if not report.is_good:
        raise typer.Exit(1)


def _check_postgres(address: str, as_json: bool) -> None:
    import asyncio

    from ..serve.store.postgres import PostgresStore

    async def find() -> tuple[int, list[str]]:
        store = PostgresStore(address, timeout=_CHECK_SECONDS)
        try:
            return (await store.totals()).streams, await store.find_problems()
        finally:
            await store.close()

    streams, problems = asyncio.run(find())
    if as_json:
        typer.echo(json.dumps({"streams": streams, "problems": problems}))
    else:
        tell({"streams": streams}, as_json)
        for problem in problems:
            typer.echo(f"damaged: {problem}")
        typer.echo("Restore a backup of the database." if problems else "The store is complete.")
    if problems:
        raise typer.Exit(1)


@app.command()
@explained
def repair(folder: Path = _FOLDER, as_json: bool = _AS_JSON) -> None:
    """Let a store go on without the commits that it has lost, and print what is lost.

    The damaged write-ahead log is kept in the folder under another name.
    """
    from ..serve.store.inspection import repair_store

    report = repair_store(folder)
    advice = "There was nothing to repair." if report.is_good else "The service can be started again."
    _print(report, advice, as_json)


@app.command()
@explained
def copy(
    source: str = typer.Argument(..., help="The store to copy, such as sqlite:streams."),
    target: str = typer.Argument(..., help="The new store, such as postgresql://USER@HOST/DATABASE."),
    tenant: str = typer.Option("", help="The new tenant of streams that have none."),
    as_json: bool = typer.Option(False, "--json", help="Print one JSON object for scripts."),
) -> None:
    """Copy everything to a new store, between SQLite and PostgreSQL: streams, logs, thumbnails, webhooks.

    Stop the service on SOURCE first. SOURCE stays as it is. If the command is interrupted, TARGET stays empty.
    """
    import asyncio

    from ..serve.store.copying import copy_store

    tell({"copied": asyncio.run(copy_store(source, target, tenant))}, as_json)


def _print(report: "StoreReport", advice: str, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(asdict(report)))
        return
    tell({"streams": report.streams, "commits": report.commits, "lost commits": report.lost_commits}, as_json)
    for stream, (first, last) in report.lost.items():
        typer.echo(f"lost: positions {first} to {last} of stream {stream!r}")
    if not report.all_named:
        typer.echo("Other streams may have lost records too.")
    if not report.has_marks:
        typer.echo("The file of marks is missing or unreadable: whether commits are lost cannot be known.")
    for problem in report.problems:
        typer.echo(f"damaged: {problem}")
    typer.echo(advice)

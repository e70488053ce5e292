"""`protodcs fetch`: download public datasets."""

import os
from pathlib import Path

import typer

from ..errors import DataError, InputError, did_you_mean
from .screen import console, explained, new_table, progress


def _names_starting_with(incomplete: str) -> list[str]:
    from ..data.origins import ORIGINS

    return [name for name in ORIGINS if name.startswith(incomplete)]


@explained
def fetch(
    names: list[str] | None = typer.Argument(
        None, help="Datasets to download. Without names, list them.", autocompletion=_names_starting_with
    ),
    folder: Path | None = typer.Option(None, help="Data folder (default: the one that PROTODCS_DATA names)."),
) -> None:
    """Download public datasets from their official addresses, check their hashes and unpack them.

    If a download is interrupted, start the same command again: it continues. Encoders download their weights
    themselves when you use them first.
    """
    from ..data.datasets import VARIABLE
    from ..data.origins import ORIGINS

    if not names:
        _list()
        return
    for name in names:
        if name not in ORIGINS:
            raise InputError(
                f"There is no dataset {name!r} to download.{did_you_mean(name, ORIGINS)} "
                f"Datasets: {', '.join(ORIGINS)}."
            )
    chosen = folder or (Path(os.environ[VARIABLE]) if os.environ.get(VARIABLE) else None)
    if chosen is None:
        raise DataError(f"The data folder is not set. Pass --folder, or set {VARIABLE}.")
    for name in names:
        _fetch(name, chosen)
    if os.environ.get(VARIABLE) != str(chosen):
        console().print(f"To use it: export {VARIABLE}={chosen}", highlight=False, soft_wrap=True)


def _fetch(name: str, folder: Path) -> None:
    from ..data.origins import ORIGINS
    from ..download import fetch as download

    origin = ORIGINS[name]
    with progress(False) as bar:
        task = bar.add_task(f"{name}, bytes", total=origin.size)
        is_new = download(origin, folder, lambda count: bar.advance(task, count))
        bar.update(task, completed=origin.size)
    done = "downloaded and checked" if is_new else "there already"
    console().print(f"{name}: {done}, {folder / origin.path}", highlight=False, soft_wrap=True)


def _list() -> None:
    from ..data.origins import ORIGINS

    table = new_table("name", "download", "contents")
    for name, origin in ORIGINS.items():
        table.add_row(name, origin.megabytes, origin.about)
    console().print(table)

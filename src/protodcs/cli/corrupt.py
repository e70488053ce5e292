"""`protodcs corrupt`: write corrupted copies of a set, such as SVHN-C, which exist only as private archives."""

import json
from pathlib import Path

import typer

from ..errors import InputError
from .screen import console, explained, given_corruptions, progress


@explained
def corrupt(
    source: str = typer.Argument(..., help="Dataset: a name such as svhn-test, a folder, a .parquet or .tar file."),
    folder: Path = typer.Argument(..., help="Folder to write to. The same command again continues."),
    corruptions: str = typer.Option("standard", help="standard (15), all (19), or names separated by commas."),
    severities: str = typer.Option("1,2,3,4,5", help="Severities from 1 to 5, separated by commas."),
    form: str = typer.Option("npy", "--format", help="npy (as CIFAR-10-C), or folder (PNG files, as Tiny-ImageNet-C)."),
    family: str | None = typer.Option(
        None, help="Constants: cifar, tiny-imagenet or imagenet (default: by image size)."
    ),
    variant: str = typer.Option("published", help="published, with the quirks of the original generator, or fixed."),
    side: int | None = typer.Option(
        None, help="Crop images to a square of this size first, in pixels; 224 for ImageNet-C."
    ),
    workers: int = typer.Option(1, min=1, help="Number of processes."),
    as_json: bool = typer.Option(False, "--json", help="Print one JSON object for scripts."),
) -> None:
    """Write every image of a dataset with every corruption and severity. Each run gives the same pixels."""
    # They would make every other command start later.
    from concurrent.futures import ProcessPoolExecutor, as_completed
    from multiprocessing import get_context

    from ..data import open_source
    from ..data.corrupted_export import CorruptedExport

    copies = CorruptedExport.planned(
        folder=folder,
        source=open_source(source),
        corruptions=[name for name in given_corruptions(corruptions) if name],
        severities=[_level(level) for level in severities.split(",")],
        form=form,
        family=family,
        variant=variant,
        side=side,
    )
    todo, parts = copies.open(), copies.parts()
    with progress(as_json) as bar, ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        task = bar.add_task("files", total=len(parts), completed=len(parts) - len(todo))
        try:
            for done in as_completed([pool.submit(copies.write, part) for part in todo]):
                done.result()
                bar.advance(task)
        except BaseException:
            # What has not begun is not waited for.
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    images = len(copies.source) * sum(len(part.severities) for part in parts)
    report = {"folder": str(folder), "images": images, "parts": len(parts), "written": len(todo)}
    if as_json:
        typer.echo(json.dumps(report))
    else:
        console().print(f"{folder}: {images:,} images in {len(parts)} parts, {len(todo)} of them new")


def _level(text: str) -> int:
    if text.strip() not in ("1", "2", "3", "4", "5"):
        raise InputError(f"Severities are 1 to 5, separated by commas; given: {text!r}")
    return int(text)

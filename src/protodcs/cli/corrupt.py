"""`protodcs corrupt`: write corrupted copies of a set, such as SVHN-C, which exist only as private archives."""

import json
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path

import typer

from .screen import console, explained, names_given, progress


@explained
def corrupt(
    source: str = typer.Argument(..., help="A set: a name such as svhn-test, a folder, a .parquet or .tar file."),
    folder: Path = typer.Argument(..., help="Where the copies go; the same command again goes on where it stopped."),
    corruptions: str = typer.Option("standard", help="standard (the 15), all (the 19), or names with commas between."),
    severities: str = typer.Option("1,2,3,4,5", help="With commas between."),
    form: str = typer.Option("npy", "--format", help="npy, as CIFAR-10-C; or folder of PNG, as Tiny-ImageNet-C."),
    family: str | None = typer.Option(None, help="cifar, tiny-imagenet or imagenet constants; default: by image size."),
    variant: str = typer.Option("published", help="published or fixed."),
    side: int | None = typer.Option(None, help="Crop images to this square first, 224 as ImageNet-C."),
    workers: int = typer.Option(1, min=1, help="Processes."),
    as_json: bool = typer.Option(False, "--json", help="Print one JSON object for a program."),
) -> None:
    """Write every image of a set under every corruption and severity, the same pixels on every run."""
    from ..data import open_source
    from ..data.copies import Copies

    copies = Copies.planned(
        folder=folder,
        source=open_source(source),
        corruptions=[name for name in names_given(corruptions) if name],
        severities=[int(level) for level in severities.split(",")],
        form=form,
        family=family,
        variant=variant,
        side=side,
    )
    todo = copies.open()
    with progress(as_json) as bar, ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        task = bar.add_task("files", total=len(copies.parts()), completed=len(copies.parts()) - len(todo))
        for done in as_completed([pool.submit(copies.write, part) for part in todo]):
            done.result()
            bar.advance(task)
    report = {"folder": str(folder), "images": len(copies.source) * len(copies.parts()), "written": len(todo)}
    typer.echo(json.dumps(report)) if as_json else console.print(
        f"{folder}: {report['images']} images, {len(todo)} parts new"
    )

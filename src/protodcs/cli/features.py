"""`protodcs features`: every image of a stream through an encoder, into Parquet shards."""

import json
import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import typer

from ..errors import InputError
from .screen import console, explained, names_given, progress


@explained
def features(
    folder: Path = typer.Argument(..., help="Where the features go; the same command again goes on where it stopped."),
    known: str | None = typer.Option(
        None, help="The set with the known classes: a name such as cifar10-test, or a path."
    ),
    unknown: str | None = typer.Option(None, help="Sets of unknown images, with commas between."),
    corruptions: str = typer.Option("clean", help="clean, standard (the 15), all (the 19), or names with commas."),
    severity: int = typer.Option(5, min=1, max=5, help="Of the corruptions."),
    variant: str = typer.Option("published", help="published or fixed."),
    manifest: Path | None = typer.Option(None, help="The images of this manifest instead."),
    model: str = typer.Option(
        "openai/clip-vit-base-patch16", help="An encoder: hub name, folder, open_clip:..., mini."
    ),
    shard_size: int = typer.Option(1000, min=1, help="Images per shard: the unit of work and of resume."),
    batch_size: int = typer.Option(100, min=1, help="Images encoded at once."),
    number_type: str = typer.Option("float32", help="Of the stored features: float32 or float16."),
    side: int | None = typer.Option(
        None, help="Crop images to this square before they are corrupted, 224 as ImageNet-C."
    ),
    workers: int | None = typer.Option(None, min=1, help="How many encode; default: one per GPU, or per CPU core."),
    address: str | None = typer.Option(
        None, help="A Ray cluster; default: this machine. 'none': a plain loop, no Ray."
    ),
    dry_run: bool = typer.Option(False, help="Print the plan and stop."),
    as_json: bool = typer.Option(False, "--json", help="Print one JSON object for a program."),
) -> None:
    """Extract features of a stream or of whole sets, clean or corrupted."""
    from .. import encoders
    from ..data import open_source
    from ..data.streams import Manifest
    from ..features.run import Extraction, in_a_loop, on_ray

    if manifest is not None:
        plan = Manifest.load(manifest)
        sources = [open_source(name) for name in dict.fromkeys(origin.name for origin in plan.sources)]
    else:
        plan, sources = _whole_sets(known, unknown, corruptions, severity, variant)
    encoder = encoders.load(model, batch_size=batch_size)
    extraction = Extraction.planned(
        folder, plan, sources, encoder, shard_size=shard_size, batch_size=batch_size, number_type=number_type, side=side
    )
    report: dict[str, Any] = {
        "folder": str(folder),
        "encoder": extraction.job.encoder,
        "manifest": extraction.job.manifest,
    }
    if dry_run:
        report.update(samples=len(plan), segments=len(plan.segments), shards=len(extraction.shards()))
        _tell(report, as_json)
        return
    todo = extraction.open()
    images = sum(shard.last - shard.first for shard in todo)
    started = time.perf_counter()
    with progress(as_json) as bar:
        task = bar.add_task("images", total=len(plan), completed=len(plan) - images)
        with _cluster(address) as cluster:
            done = on_ray(extraction, todo, workers) if cluster else in_a_loop(extraction, todo)
            for shard in done if todo else ():
                bar.advance(task, shard.last - shard.first)
    report.update(samples=len(plan), extracted=images, seconds=round(time.perf_counter() - started, 1))
    _tell(report, as_json)


def _whole_sets(known: str | None, unknown: str | None, corruptions: str, severity: int, variant: str) -> Any:
    from ..data import open_source
    from ..data.streams import build

    if known is None:
        raise InputError("say what to extract: --known SET and perhaps --unknown SETS, or --manifest FILE")
    first = open_source(known)
    others = [open_source(name) for name in (unknown or "").split(",") if name]
    wanted = names_given(corruptions)
    plan = build("whole", first, others, 0, wanted, severity, variant=variant)
    return plan, [first, *others]


@contextmanager
def _cluster(address: str | None) -> Iterator[bool]:
    """Connect to Ray for as long as the work takes; gives False where no Ray is wanted."""
    if address == "none":
        yield False
        return
    try:
        import ray
    except ImportError:
        raise InputError(
            "this needs Ray: pip install 'protodcs[ray]', or use --address none for a plain loop"
        ) from None
    logging.getLogger("ray.data").setLevel(logging.WARNING)
    mine = not ray.is_initialized()
    if mine:
        quiet = {"log_to_driver": False, "logging_level": "ERROR"}
        ray.init(address=address, **quiet) if address else ray.init(include_dashboard=False, **quiet)
    try:
        yield True
    finally:
        if mine:
            ray.shutdown()


def _tell(report: dict[str, Any], as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(report))
        return
    for key, value in report.items():
        console.print(f"{key.replace('_', ' ')}: {value}")

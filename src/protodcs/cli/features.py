"""`protodcs features`: every image of a stream through an encoder, into Parquet shards."""

import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import typer

from ..errors import InputError
from .cluster.connection import connected
from .screen import explained, given_corruptions, progress, tell


@explained
def features(
    folder: Path = typer.Argument(..., help="Folder to write to. The same command again continues."),
    known: str | None = typer.Option(
        None, help="Dataset with the known classes: a name such as cifar10-test, or a path."
    ),
    unknown: str | None = typer.Option(None, help="Datasets of unknown images, separated by commas."),
    corruptions: str = typer.Option("clean", help="clean, standard (15), all (19), or names separated by commas."),
    severity: int = typer.Option(5, min=1, max=5, help="Corruption severity, 1 to 5."),
    variant: str = typer.Option("published", help="published, with the quirks of the original generator, or fixed."),
    manifest: Path | None = typer.Option(None, help="Use the images of this manifest instead."),
    model: str = typer.Option(
        "openai/clip-vit-base-patch16", help="Encoder: model id, folder, open_clip:..., demo, mini."
    ),
    shard_size: int = typer.Option(
        1000, min=1, help="Images per shard. An interrupted run continues with the next shard."
    ),
    batch_size: int = typer.Option(100, min=1, help="Images that are encoded at once."),
    number_type: str = typer.Option("float32", help="Type of the stored features: float32 or float16."),
    side: int | None = typer.Option(
        None, help="Crop images to a square of this size first, in pixels; 224 for ImageNet-C."
    ),
    workers: int | None = typer.Option(
        None, min=1, help="Number of encoder processes (default: one per GPU or CPU core)."
    ),
    address: str | None = typer.Option(None, help="Address of a Ray cluster (default: this machine); none: no Ray."),
    dry_run: bool = typer.Option(False, help="Print the plan and stop."),
    as_json: bool = typer.Option(False, "--json", help="Print one JSON object for scripts."),
) -> None:
    """Extract the features of a stream or of whole datasets, clean or corrupted."""
    from .. import encoders
    from ..data import open_source
    from ..data.streams import Manifest
    from ..features.on_ray import on_ray
    from ..features.run import Extraction, in_a_loop

    sources = [open_source(name) for name in [known, *(unknown or "").split(",")] if name]
    plan = Manifest.load(manifest) if manifest else _whole_sets(sources, corruptions, severity, variant)
    # A manifest names its sources; those that are not known by name are given beside it.
    there = {source.name for source in sources}
    sources += [
        open_source(name) for name in dict.fromkeys(origin.name for origin in plan.sources) if name not in there
    ]
    extraction = Extraction.planned(
        folder,
        plan,
        sources,
        encoders.load(_everywhere(model), batch_size=batch_size),
        shard_size=shard_size,
        batch_size=batch_size,
        number_type=number_type,
        side=side,
    )
    report: dict[str, Any] = {
        "folder": str(folder),
        "encoder": extraction.job.encoder,
        "manifest": extraction.job.manifest,
        "samples": len(plan),
    }
    if dry_run:
        tell({**report, "segments": len(plan.segments), "shards": len(extraction.shards())}, as_json)
        return
    started = time.perf_counter()
    on_cluster = address != "none"
    ray = connected(address or "local", "use --address none for a plain loop") if on_cluster else nullcontext()
    with ray, progress(as_json) as bar:
        todo = extraction.open()
        images = sum(shard.last - shard.first for shard in todo)
        task = bar.add_task("images", total=len(plan), completed=len(plan) - images)
        done = on_ray(extraction, todo, workers) if on_cluster else in_a_loop(extraction, todo)
        for shard in done if todo else ():
            bar.advance(task, shard.last - shard.first)
    tell({**report, "extracted": images, "seconds": round(time.perf_counter() - started, 1)}, as_json)


def _whole_sets(sources: list[Any], corruptions: str, severity: int, variant: str) -> Any:
    from ..data.streams import build

    if not sources:
        raise InputError(
            "Nothing to extract. Pass --known DATASET, and perhaps --unknown DATASETS, or --manifest FILE."
        )
    return build("whole", sources[0], sources[1:], 0, given_corruptions(corruptions), severity, variant=variant)


def _everywhere(model: str) -> str:
    """Return the name of a model with an absolute folder: workers may run in another one."""
    beginning, colon, place = model.rpartition(":")
    is_folder = model not in ("demo", "mini") and Path(place).is_dir()
    return f"{beginning}{colon}{Path(place).absolute()}" if is_folder else model

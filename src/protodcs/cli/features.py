"""`protodcs features`: every image of a stream through an encoder, into Parquet shards."""

import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import typer

from ..errors import InputError
from .cluster import connected
from .screen import explained, given_corruptions, progress, tell


@explained
def features(
    folder: Path = typer.Argument(..., help="Where the features go; the same command again continues."),
    known: str | None = typer.Option(
        None, help="The set with the known classes: a name such as cifar10-test, or a path."
    ),
    unknown: str | None = typer.Option(None, help="Sets of unknown images, separated by commas."),
    corruptions: str = typer.Option("clean", help="clean, standard (the 15), all (the 19), or names with commas."),
    severity: int = typer.Option(5, min=1, max=5, help="Of the corruptions."),
    variant: str = typer.Option("published", help="published or fixed."),
    manifest: Path | None = typer.Option(None, help="The images of this manifest instead."),
    model: str = typer.Option(
        "openai/clip-vit-base-patch16", help="Encoder: hub name, folder, open_clip:..., demo, mini."
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
    as_json: bool = typer.Option(False, "--json", help="Print one JSON object for scripts."),
) -> None:
    """Extract features of a stream or of whole sets, clean or corrupted."""
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
        raise InputError("say what to extract: --known SET and perhaps --unknown SETS, or --manifest FILE")
    return build("whole", sources[0], sources[1:], 0, given_corruptions(corruptions), severity, variant=variant)


def _everywhere(model: str) -> str:
    """The name of a model with the folder in it, if there is one, spelled out: workers may stand elsewhere."""
    beginning, colon, place = model.rpartition(":")
    is_folder = model not in ("demo", "mini") and Path(place).is_dir()
    return f"{beginning}{colon}{Path(place).absolute()}" if is_folder else model

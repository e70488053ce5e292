"""`protodcs data`: prepare data for the benchmark."""

from pathlib import Path

import typer

from ..errors import InputError
from .screen import explained, progress, tell

app = typer.Typer(help="Prepare data for the benchmark.", no_args_is_help=True)


@app.callback()
def _group() -> None:
    """Keep `pack` a command of its own: Typer would run the only one without its name."""


@app.command()
@explained
def pack(
    file: Path = typer.Argument(..., help="Feature pack to write, a .safetensors file."),
    encoder: str = typer.Option("open_clip:ViT-B-32/openai", help="Encoder: model id, folder, open_clip:..., mini."),
    known: str = typer.Option("imagenet-val", help="Dataset with the known classes: a name or a folder."),
    classes: str = typer.Option("imagenet", help="Class names of the known set: a list that is shipped, or a file."),
    unknown: list[str] = typer.Option([], help="Unknown set as NAME=DATASET, such as dtd=dtd; may be repeated."),
    per_class: int | None = typer.Option(None, min=1, help="Images of each known class, at most (default: all)."),
    as_json: bool = typer.Option(False, "--json", help="Print one JSON object for scripts."),
) -> None:
    """Encode image sets once, for the benchmark's streams of features.

    An interrupted run continues with the next set. Run a grid on it with `protodcs bench run GRID --pack FILE`.
    """
    from .. import encoders
    from ..bench.packing import build

    if file.suffix != ".safetensors":
        raise InputError(f"The pack {str(file)!r} must end with .safetensors.")
    sets = {}
    for words in unknown:
        name, equals, place = words.partition("=")
        if not (name and equals and place):
            raise InputError(f"--unknown {words!r}: write NAME=DATASET, such as dtd=dtd.")
        sets[name] = place
    loaded = encoders.load(encoder, device="auto")
    with progress(as_json) as bar:
        task = bar.add_task("images", total=None)
        counts = build(
            file,
            loaded,
            encoder,
            known,
            classes,
            sets,
            per_class,
            lambda name, done, total: bar.update(task, description=name, completed=done, total=total),
        )
    tell({"pack": str(file), "bytes": file.stat().st_size, **counts}, as_json)

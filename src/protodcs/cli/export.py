"""`protodcs export`: a torch encoder for machines that run ONNX Runtime."""

import json
from pathlib import Path

import typer

from .screen import console, explained, given_classes


@explained
def export(
    model: str = typer.Argument(..., help="Encoder that runs on torch: model id, folder, open_clip:..., mini."),
    folder: Path = typer.Argument(..., help="New folder for the exported encoder."),
    classes: str | None = typer.Option(
        None,
        help="Export prototypes of these classes instead of the text tower: names with commas, a list, or a file.",
    ),
    templates: str | None = typer.Option(None, help="Prompt templates: a list such as imagenet, or a text file."),
    as_json: bool = typer.Option(False, "--json", help="Print one JSON object."),
) -> None:
    """Export an encoder to ONNX, and check that both give the same features."""
    from .. import encoders
    from ..encoders.export import export as write

    names = None if classes is None else given_classes(classes)
    parity = write(encoders.load(model, device="cpu", templates=templates), folder, names)
    if as_json:
        report = {"folder": str(folder), "largest_difference": {"images": parity.images, "texts": parity.texts}}
        typer.echo(json.dumps(report))
        return
    console().print(f"wrote {folder}: load it as onnx:{folder}")
    console().print(f"largest difference to torch: {parity.images:.1e} on images, {parity.texts:.1e} on texts")

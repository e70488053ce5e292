"""`protodcs stream`: fix a stream as a manifest."""

import json
from pathlib import Path
from typing import Any

import typer

from ..errors import InputError
from .screen import console, explained, given_corruptions

_OTHERWISE_GIVEN = ("protocol", "known", "unknown", "corruptions", "severity", "variant", "seed", "classes")


@explained
def stream(
    protocol: str = typer.Argument(..., help="continual, reset, unient, stamp-4to1, correlated, bursty, ..."),
    file: Path = typer.Argument(..., help="Where the manifest goes."),
    known: str = typer.Option(..., help="The set with the known classes: a name such as cifar10-test, or a path."),
    unknown: str = typer.Option("", help="Sets of unknown images, with commas between."),
    corruptions: str = typer.Option("standard", help="clean, standard (the 15), all (the 19), or names with commas."),
    severity: int = typer.Option(5, min=1, max=5, help="Of the corruptions."),
    variant: str = typer.Option("published", help="published or fixed."),
    seed: int = typer.Option(0, min=0, help="Where all chance comes from."),
    option: list[str] = typer.Option([], help="An option of the protocol, such as ratio=1/2; may be given again."),
    as_json: bool = typer.Option(False, "--json", help="Print one JSON object for a program."),
) -> None:
    """Write a manifest: which images come, in which order, under which corruption."""
    from ..data import open_source
    from ..data.streams import build, summary

    sources = [open_source(name) for name in unknown.split(",") if name]
    manifest = build(
        protocol,
        open_source(known),
        sources,
        seed,
        given_corruptions(corruptions),
        severity,
        variant=variant,
        **dict(_pair(text) for text in option),
    )
    manifest.save(file)
    report = {"file": str(file), "hash": manifest.hash, **summary(manifest)}
    if as_json:
        typer.echo(json.dumps(report))
    else:
        console().print(f"{file}: {len(manifest):,} samples in {len(manifest.segments)} segments")
        console().print(f"hash: {manifest.hash}")


def _pair(text: str) -> tuple[str, Any]:
    name, found, value = text.partition("=")
    if not found or name in _OTHERWISE_GIVEN:
        raise InputError(f"an option of a protocol is written name=value; given: {text!r}")
    return name, int(value) if value.isdecimal() else value

"""`protodcs bench manifest`: define a stream by a manifest."""

import json
from pathlib import Path
from typing import Any

import typer

from ..errors import InputError
from .screen import console, explained, given_corruptions

_OWN_OPTIONS = ("protocol", "known", "unknown", "corruptions", "severity", "variant", "seed", "classes")


@explained
def manifest(
    protocol: str = typer.Argument(..., help="continual, reset, unient, stamp-4to1, correlated, bursty, ..."),
    file: Path = typer.Argument(..., help="Manifest file to write."),
    known: str = typer.Option(..., help="Dataset with the known classes: a name such as cifar10-test, or a path."),
    unknown: str = typer.Option("", help="Datasets of unknown images, separated by commas."),
    corruptions: str = typer.Option("standard", help="clean, standard (15), all (19), or names separated by commas."),
    severity: int = typer.Option(5, min=1, max=5, help="Corruption severity, 1 to 5."),
    variant: str = typer.Option("published", help="published or fixed."),
    seed: int = typer.Option(0, min=0, help="Random seed."),
    option: list[str] = typer.Option([], help="Option of the protocol, such as ratio=1/2. May be repeated."),
    as_json: bool = typer.Option(False, "--json", help="Print one JSON object for scripts."),
) -> None:
    """Write the manifest of a stream: its images, their order and their corruptions."""
    from ..data import open_source
    from ..data.streams import build, summary

    sources = [open_source(name) for name in unknown.split(",") if name]
    made = build(
        protocol,
        open_source(known),
        sources,
        seed,
        given_corruptions(corruptions),
        severity,
        variant=variant,
        **dict(_pair(text) for text in option),
    )
    made.save(file)
    report = {"file": str(file), "hash": made.hash, **summary(made)}
    if as_json:
        typer.echo(json.dumps(report))
    else:
        console().print(f"{file}: {len(made):,} samples in {len(made.segments)} segments")
        console().print(f"hash: {made.hash}")


def _pair(text: str) -> tuple[str, Any]:
    name, found, value = text.partition("=")
    if not found or name in _OWN_OPTIONS:
        raise InputError(f"Write an option of a protocol as name=value; given: {text!r}")
    return name, int(value) if value.isdecimal() else value

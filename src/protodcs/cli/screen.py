"""What commands share: how an error is told, and how progress is shown."""

from collections.abc import Callable
from functools import wraps
from typing import Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from ..errors import ProtoDCSError

console = Console()
# Progress goes beside the output, never into it.
_aside = Console(stderr=True)


def explained(command: Callable[..., None]) -> Callable[..., None]:
    """Tell one of our errors in its own words and leave with 1; any other is a bug and keeps its traceback."""

    @wraps(command)
    def wrapped(*args: Any, **options: Any) -> None:
        try:
            command(*args, **options)
        except ProtoDCSError as problem:
            typer.echo(f"error: {problem}", err=True)
            raise typer.Exit(1) from None
        except KeyboardInterrupt:
            typer.echo("interrupted; what was written is whole, and the same command with --resume goes on", err=True)
            raise typer.Exit(130) from None

    return wrapped


def progress(quiet: bool) -> Progress:
    """A progress bar on the error stream, with the time that is left."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
        console=_aside,
        disable=quiet,
    )


def names_given(corruptions: str) -> list[str | None]:
    """What a user means by a list of corruptions; None stands for clean images."""
    from ..data.corruptions import NAMES, STANDARD

    sets: dict[str, list[str | None]] = {"clean": [None], "standard": [*STANDARD], "all": [*NAMES]}
    return [name for part in corruptions.split(",") for name in sets.get(part.strip(), [part.strip()])]

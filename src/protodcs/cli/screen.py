"""Helpers of all commands: print errors and progress, read lists."""

import json
import os
import textwrap
from collections.abc import Callable, Iterable, Mapping
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from ..errors import InputError, ProtoDCSError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress
    from rich.table import Table


VOCABULARY_HELP = "Names of other things to compare the classes with: general, none, or a text file (default: general)."


def console() -> "Console":
    """Return a console for results, as wide as the terminal is now.

    Nothing of rich is imported before, so that `--help` is quick.
    """
    from rich.console import Console

    # Without markup: a class or file may be called "cup [large]".
    return Console(markup=False)


def explained(command: Callable[..., None]) -> Callable[..., None]:
    """Print a user's mistake as one line and exit with 1. Any other error is a bug and keeps its traceback."""

    @wraps(command)
    def wrapped(*args: Any, **options: Any) -> None:
        try:
            command(*args, **options)
        except ProtoDCSError as problem:
            _leave(str(problem), 1)
        except ModuleNotFoundError as missing:
            if (missing.name or "protodcs").startswith("protodcs"):
                raise
            _leave(f"this needs the package {missing.name!r}: pip install 'protodcs[all]', or a smaller extra", 1)
        except OSError as problem:
            _leave(f"{problem.filename or 'the operating system'}: {problem.strerror or problem}", 1)
        except KeyboardInterrupt:
            _leave("interrupted. Complete files were kept; run the command again to continue.", 130)

    return wrapped


def _leave(message: str, code: int) -> None:
    # A message may quote what a service or a file holds.
    typer.echo("\n".join(map(printable, f"error: {message}".split("\n"))), err=True)
    raise typer.Exit(code) from None


def tell(report: Mapping[str, Any], as_json: bool) -> None:
    """Print what a command did: a line per item, or one JSON object for scripts."""
    if as_json:
        typer.echo(json.dumps(report))
        return
    for key, value in report.items():
        line = printable(f"{key.replace('_', ' ')}: {value}")
        console().print(line, highlight=False, soft_wrap=True)


def progress(quiet: bool) -> "Progress":
    """Return a progress bar on the error stream, with the time that is left. Without a terminal it shows nothing."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    errors = Console(stderr=True)
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
        console=errors,
        # Notebooks ask for colours although they show each update of the bar on a new line.
        disable=quiet or not errors.file.isatty(),
    )


def new_table(*columns: str, **options: Any) -> "Table":
    """Return a table with these columns, for `console().print`."""
    from rich.table import Table

    return Table(*columns, title_justify="left", **options)


def print_sentences(sentences: Iterable[str]) -> None:
    """Print sentences as a list."""
    width = min(console().width, 100)
    for sentence in sentences:
        lines = textwrap.fill(
            printable(sentence), width, initial_indent="- ", subsequent_indent="  ", break_on_hyphens=False
        )
        typer.echo(lines)


def print_diagnosis(diagnosis: Mapping[str, Any]) -> None:
    """Print the sentences of a diagnosis, as `Diagnosis.to_dict` returns it."""
    review = ["`protodcs review` asks about the most doubtful decisions."] if diagnosis["misses_similar"] else []
    print_sentences([*diagnosis["sentences"], *review])


def warn_of_boxes(missing: set[str]) -> None:
    """Print a warning if a picture has boxes in place of characters that no installed font has."""
    if missing:
        shown = " ".join(sorted(missing)[:10])
        typer.echo(
            f"warning: no font on this machine has {shown}: they are boxes on the sheet. Install a font for them, such "
            "as one of the Noto fonts.",
            err=True,
        )


def printable(name: str) -> str:
    """Return a name as one line of text: other characters and bytes are written as their numbers."""
    readable = os.fsencode(name).decode("utf-8", "backslashreplace")
    return "".join(letter if letter.isprintable() else f"\\x{ord(letter):02x}" for letter in readable)


def check_new(files: Iterable[Path], other: str) -> None:
    """Raise InputError if a file to write exists already. `other` says what else the user may choose."""
    for file in files:
        if file.exists():
            raise InputError(f"{file} exists already. Delete it, or choose {other}.")


def target_options(target: float | None) -> dict[str, float]:
    """Return the options of a method for --target-false-reject. Raise InputError if the target is out of range."""
    if target is None:
        return {}
    if not 0 < target < 0.5:
        raise InputError(f"--target-false-reject must be between 0 and 0.5, such as 0.05 for 5 %; given: {target:g}")
    return {"target_false_reject": target}


def given_classes(classes: str) -> tuple[str, ...]:
    """Return the class names of an option: names separated by commas, a list of the package, or a file."""
    from ..data.prompts import class_names

    names = class_names(_items(classes) if "," in classes else classes)
    if len(names) == 1:
        raise InputError(
            f"There is only one class, {names[0]!r}. Give at least two: also name other things that your images show, "
            f"such as '{names[0]}, dog, chair'."
        )
    return names


def given_names(given: Iterable[str]) -> dict[int, str]:
    """Return the names of the option --name by cluster."""
    found: dict[int, str] = {}
    for text in given:
        cluster, _, name = text.partition("=")
        if not cluster.strip().isdecimal() or not name.strip():
            raise InputError(f"--name takes the number and the name of a cluster, such as 0=monarch; given: {text!r}")
        found[int(cluster)] = name.strip()
    return found


def given_vocabulary(vocabulary: str) -> str | None:
    """Return what `OpenSetClassifier` takes for --vocabulary: None for none."""
    return None if vocabulary == "none" else vocabulary


def given_corruptions(corruptions: str) -> list[str | None]:
    """Return the corruptions of an option; None stands for clean images."""
    from ..data.corruptions import NAMES, STANDARD

    sets: dict[str, list[str | None]] = {"clean": [None], "standard": [*STANDARD], "all": [*NAMES]}
    return [name for item in _items(corruptions) for name in sets.get(item, [item])]


def _items(text: str) -> list[str]:
    return [item.strip() for item in text.split(",") if item.strip()]

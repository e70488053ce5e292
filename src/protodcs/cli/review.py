"""`protodcs review`: let a person look at doubtful decisions, here or in another tool."""

import csv
import io
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from ..atomic_io import replace_file
from ..errors import DataError, InputError
from .decided import Decided, decide_folder, read_decisions
from .screen import VOCABULARY_HELP, console, explained, printable

if TYPE_CHECKING:
    from ..integrations.samples import ReviewSample

_HELP = 'Enter: the decision is right. A class name, or its number. "u": unknown. "s": skip. "q" or Ctrl-C: stop.'
Labels = dict[str, str | None]
# Columns of a file of labels.
_COLUMNS = ("file", "label")


@explained
def review(
    source: Path = typer.Argument(..., help="Folder of images, or a file of decisions (.csv, .jsonl, .ndjson)."),
    classes: str | None = typer.Option(None, help="Class names, as in `classify`; a folder needs them."),
    model: str = typer.Option("openai/clip-vit-base-patch16", help="Encoder, as in `classify`."),
    vocabulary: str = typer.Option("general", help=VOCABULARY_HELP),
    images: Path | None = typer.Option(None, help="Folder of the images in a file of decisions (default: beside it)."),
    limit: int = typer.Option(50, min=1, help="Maximum number of samples (default: 50)."),
    out: Path = typer.Option(Path("labels.csv"), help="Labels, one row per file; later labels replace earlier ones."),
    label_studio: Path | None = typer.Option(None, help="Write tasks for Label Studio to this file instead of asking."),
    fiftyone: str | None = typer.Option(None, help="Create a FiftyOne dataset of this name instead of asking."),
    import_from: str | None = typer.Option(
        None, "--import", help="Import labels: a JSON export of Label Studio, or fiftyone:NAME."
    ),
) -> None:
    """Look at the most doubtful decisions first, and write down what is right. Near-duplicates come last."""
    _read_labels(out)
    if import_from is not None:
        _add_labels(out, _imported(import_from))
        return
    decided = _decided(source, classes, model, images, vocabulary)
    queue = _queue(decided, limit)
    if label_studio is not None:
        _export_tasks(queue, _names(decided, classes), label_studio)
    elif fiftyone is not None:
        from ..integrations.fiftyone import dataset

        dataset(queue, source if source.is_dir() else images or source.parent, fiftyone)
        console().print(f"{len(queue)} samples in the FiftyOne dataset {fiftyone!r}")
    else:
        _ask(queue, decided, _names(decided, classes), out)


def _decided(source: Path, classes: str | None, model: str, images: Path | None, vocabulary: str) -> Decided:
    if not source.is_dir():
        return read_decisions(source, images)
    if classes is None:
        raise InputError("A folder needs --classes, the names of the known classes.")
    return decide_folder(source, classes, model, quiet=False, vocabulary=vocabulary)


def _names(decided: Decided, classes: str | None) -> tuple[str, ...]:
    from .screen import given_classes

    return decided.classes if classes is None else given_classes(classes)


def _queue(decided: Decided, limit: int) -> "list[ReviewSample]":
    import numpy as np

    from ..discovery import review_order

    p_unknown = np.array([sample.p_unknown for sample in decided.samples])
    order = review_order(p_unknown, decided.confidence, decided.features, limit)
    return [decided.samples[place] for place in order]


def _ask(queue: "Sequence[ReviewSample]", decided: Decided, names: Sequence[str], out: Path) -> None:
    """Ask a person about each sample. Each answer is written at once, so that an interruption loses none."""
    labels: Labels = {}
    try:
        for file, label in _answers(queue, decided, names):
            labels[file] = label
            _write_labels(out, labels)
    except (KeyboardInterrupt, typer.Abort):
        typer.echo()
    _add_labels(out, labels)


def _answers(
    queue: "Sequence[ReviewSample]", decided: Decided, names: Sequence[str]
) -> Iterator[tuple[str, str | None]]:
    """Ask about each sample, and yield its file and label if the person gives one."""
    console().print(_HELP)
    console().print(", ".join(f"{number} {name}" for number, name in enumerate(names, 1)), soft_wrap=True)
    for place, sample in enumerate(queue, 1):
        shown = "unknown" if sample.label is None else sample.label
        typer.echo(f"[{place}/{len(queue)}] {printable(str(decided.files[sample.file]))}")
        typer.echo(f"  {shown} (p_unknown {sample.p_unknown:.2f}, nearest class {sample.nearest_class})")
        answer = _answer(names)
        if answer == "q":
            return
        if answer != "s":
            yield sample.file, sample.label if answer == "" else (None if answer == "u" else answer)


def _answer(names: Sequence[str]) -> str:
    """Return a class name, "" for right, "u", "s" or "q"."""
    while True:
        given = str(typer.prompt("label", default="", show_default=False)).strip()
        if given in ("", "u", "s", "q") or given in names:
            return given
        if given.isdecimal() and 1 <= int(given) <= len(names):
            return names[int(given) - 1]
        typer.echo(f"  there is no class {given!r}. {_HELP}")


def _export_tasks(queue: "Sequence[ReviewSample]", names: Sequence[str], file: Path) -> None:
    from ..integrations.label_studio import labeling_config, tasks

    replace_file(file, json.dumps(tasks(queue), indent=1).encode())
    setup = file.with_suffix(".xml")
    replace_file(setup, labeling_config(names).encode())
    console().print(f"{len(queue)} tasks: {file}\nlabeling setup of the project: {setup}", soft_wrap=True)


def _imported(source: str) -> Labels:
    if source.startswith("fiftyone:"):
        import fiftyone  # type: ignore[import-not-found]

        from ..integrations import fiftyone as exchange

        return exchange.labels(fiftyone.load_dataset(source.removeprefix("fiftyone:")))
    from ..integrations.label_studio import labels

    try:
        return labels(json.loads(Path(source).read_bytes()))
    except ValueError:
        raise DataError(f"{source} is not JSON. Export the project of Label Studio as JSON.") from None


def _add_labels(out: Path, labels: Mapping[str, str | None]) -> None:
    """Write labels to a CSV file, and print how many."""
    _write_labels(out, labels)
    console().print(f"{len(labels)} labels: {out}", soft_wrap=True)


def _read_labels(out: Path) -> dict[str, str]:
    """Return the labels of a file; none if there is no file. Raise InputError if it is a file of something else."""
    if not out.exists():
        return {}
    with out.open(newline="", encoding="utf-8") as lines:
        try:
            first, *rows = [row for row in csv.reader(lines) if row] or [[*_COLUMNS]]
        except (UnicodeDecodeError, csv.Error):
            first, rows = [], []
    if first != [*_COLUMNS] or any(len(row) != len(_COLUMNS) for row in rows):
        raise InputError(f"{out} exists already, and is no file of labels. Choose another file with --out.")
    return dict(rows)


def _write_labels(out: Path, labels: Mapping[str, str | None]) -> None:
    """Write labels to a CSV file, after those that are there. An empty label stands for unknown."""
    written = _read_labels(out) | {file: label or "" for file, label in labels.items()}
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerows([_COLUMNS, *written.items()])
    replace_file(out, text.getvalue().encode())

"""`protodcs compare`: several methods on the user's own labelled images or features."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from ..errors import DataError, InputError, MissingPackageError
from .screen import console, explained, given_classes, new_table, print_sentences, printable, progress, target_options

if TYPE_CHECKING:
    from rich.progress import TaskID

    from ..method_comparison import Table

_FIGURE_ENDINGS = (".png", ".svg", ".pdf")


@explained
def compare(
    source: Path = typer.Argument(
        ..., help="Folder with one subfolder of images for each class; or features, .npy, .npz, .safetensors, .parquet."
    ),
    methods: str | None = typer.Option(
        None,
        help="Methods, separated by commas, with options if you like: 'streamdcs, zero_shot score=energy'. Default: "
        "StreamDCS, ProtoDCS, two zero-shot scores, the mixture and four published methods.",
    ),
    classes: str | None = typer.Option(
        None, help="Class names, if there are more than subfolders: separated by commas, a list, or a text file."
    ),
    unknown: str = typer.Option("unknown", help="Subfolder of images that belong to no class."),
    known_only: bool = typer.Option(False, "--known-only", help="Compare without unknown images."),
    labels: Path | None = typer.Option(
        None, help="Labels of features, if their file has none: .npy, or a text file with one class name per line."
    ),
    prototypes: Path | None = typer.Option(
        None, help="Text features of the classes (K, d), if the file of features has none and you give no --model."
    ),
    model: str | None = typer.Option(
        None, help="Encoder (default for a folder: openai/clip-vit-base-patch16; for features: none)."
    ),
    vocabulary: str = typer.Option(
        "general",
        help="Names of other things to compare the classes with: general, none, a text file, or a file with their "
        "text features (default: general).",
    ),
    target_false_reject: float | None = typer.Option(
        None, help="Fraction of known images that may be rejected, at which methods are sorted (default: 0.05)."
    ),
    shuffle: int | None = typer.Option(None, min=0, help="Seed of the order (default: 0 for a folder)."),
    given_order: bool = typer.Option(
        False, "--given-order", help="Keep the order of the files or features (default for features)."
    ),
    figure: Path | None = typer.Option(None, help="Picture of unknown images found and known ones rejected, .png."),
    device: str = typer.Option("auto", help="auto, cpu or cuda."),
    batch_size: int = typer.Option(32, min=1, help="Images that are encoded at once."),
    as_json: bool = typer.Option(False, "--json", help="Print one JSON object for scripts."),
) -> None:
    """Compare methods on labelled images or features: what they find at equal false-reject rates, and by themselves.

    Each method sees the same stream once. No method sees the labels.
    """
    if given_order and shuffle is not None:
        raise InputError("Choose one of --shuffle and --given-order.")
    target = target_options(target_false_reject).get("target_false_reject")
    if figure is not None:
        _check_figure(figure)
    from .. import encoders
    from ..data.feature_file import ENDINGS, read_array
    from ..labelled_stream import DEFAULT_MODEL
    from ..method_comparison import DEFAULT_METHODS
    from ..method_comparison import compare as compare_methods

    name = DEFAULT_MODEL if model is None and source.is_dir() else model
    others: Any = None if vocabulary == "none" else vocabulary
    if Path(vocabulary).suffix in ENDINGS:
        others = read_array(Path(vocabulary), "vocabulary")
    with progress(as_json) as bar:
        tasks: dict[str, TaskID] = {}

        def advance(what: str, done: int, total: int) -> None:
            if what not in tasks:
                tasks[what] = bar.add_task(what, total=total)
            bar.update(tasks[what], completed=done)

        found = compare_methods(
            source,
            None if labels is None else _labels(labels),
            model=None if name is None else encoders.load(name, device=device, batch_size=batch_size),
            classes=None if classes is None else given_classes(classes),
            prototypes=None if prototypes is None else read_array(prototypes, "prototypes"),
            vocabulary=others,
            methods=DEFAULT_METHODS if methods is None else [item for item in methods.split(",") if item.strip()],
            target_false_reject=target,
            shuffle=False if given_order else shuffle,
            unknown=None if known_only else unknown,
            advance=advance,
        )
    if figure is not None:
        from matplotlib.figure import Figure

        drawn = Figure(figsize=(8.4, 4.8), layout="constrained")
        found.plot(drawn.subplots())
        drawn.savefig(figure, dpi=150)
    if as_json:
        typer.echo(json.dumps(found.to_dict()))
        return
    for table in found.tables():
        _print(table)
    print_sentences(found.sentences)
    if figure is not None:
        console().print(f"figure: {figure}", soft_wrap=True)


def _labels(file: Path) -> Any:
    """Return the labels of a file: an array of numpy, or lines of text."""
    from ..data.feature_file import ENDINGS, read_array

    if file.suffix in ENDINGS:
        return read_array(file, "labels")
    try:
        lines = [line.strip() for line in file.read_text(encoding="utf-8").splitlines()]
    except UnicodeDecodeError:
        raise DataError(f"{file} is not a text file in UTF-8.") from None
    return [line if line else "unknown" for line in lines]


def _check_figure(file: Path) -> None:
    """Raise an error before anything runs if the figure could not be written."""
    if file.suffix not in _FIGURE_ENDINGS:
        raise InputError(f"--figure must end with {', '.join(_FIGURE_ENDINGS)}; given: {file.name!r}")
    if not file.parent.is_dir():
        raise InputError(f"There is no folder {file.parent} for the figure.")
    try:
        import matplotlib  # noqa: F401
    except ModuleNotFoundError:
        raise MissingPackageError("charts need matplotlib: pip install matplotlib") from None


def _print(table: "Table") -> None:
    shown = new_table(title=table.title)
    for place, heading in enumerate(table.headings):
        shown.add_column(heading, justify="right" if place else "left")
    for row in table.rows:
        shown.add_row(*map(printable, row))
    console().print(shown)

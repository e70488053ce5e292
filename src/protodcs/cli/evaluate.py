"""`protodcs evaluate`: measure decisions on the user's own labelled images."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from .screen import (
    VOCABULARY_HELP,
    console,
    explained,
    given_classes,
    given_vocabulary,
    new_table,
    print_diagnosis,
    print_sentences,
    printable,
    progress,
    target_options,
)

if TYPE_CHECKING:
    from ..metrics import Evaluation

_TITLES = {
    "false_reject": "known: rejected",
    "unknown_recall": "unknown: found",
    "known_accuracy": "known: class right",
    "known_accuracy_with_rejection": "known: also accepted",
}
_PASSES = (
    "A folder is decided after two passes over all images, as `protodcs classify` does. A stream is decided image by "
    "image, in an order shuffled with a fixed seed."
)
# Order of the images in one pass: that of their files is often sorted by class.
_SEED = 0


@explained
def evaluate(
    folder: Path = typer.Argument(..., help="Folder with one subfolder of images for each class."),
    classes: str | None = typer.Option(
        None, help="Class names, if there are more than subfolders: separated by commas, a list, or a text file."
    ),
    unknown: str = typer.Option("unknown", help="Subfolder of images that belong to no class."),
    known_only: bool = typer.Option(False, "--known-only", help="Measure without unknown images."),
    model: str = typer.Option(
        "openai/clip-vit-base-patch16", help="Encoder: model id, folder, open_clip:..., onnx:..., demo, mini."
    ),
    method: str = typer.Option("streamdcs", help="Method: streamdcs, protodcs, or another registered one."),
    target_false_reject: float | None = typer.Option(
        None, min=0, max=1, help="Fraction of known images that may be rejected (default: that of the method, 0.05)."
    ),
    vocabulary: str = typer.Option("general", help=VOCABULARY_HELP),
    device: str = typer.Option("auto", help="auto, cpu or cuda."),
    batch_size: int = typer.Option(32, min=1, help="Images that are encoded at once."),
    as_json: bool = typer.Option(False, "--json", help="Print one JSON object for scripts."),
) -> None:
    """Measure false rejects, unknown recall and accuracy of `protodcs classify` on labelled images.

    The images are also decided as a stream, one after another in shuffled order, as the service decides.
    """
    import numpy as np

    from .. import encoders, metrics
    from ..classifier import OpenSetClassifier
    from ..data.labelled_folder import labelled_folder
    from ..diagnosis import diagnose
    from ..encoders.files import encode_files

    labelled = labelled_folder(
        folder, None if classes is None else given_classes(classes), None if known_only else unknown
    )
    options: dict[str, Any] = {**target_options(target_false_reject), "vocabulary": given_vocabulary(vocabulary)}
    encoder = encoders.load(model, device=device, batch_size=batch_size)
    classifier = OpenSetClassifier.with_encoder(encoder, labelled.classes, method=method, **options)
    with progress(as_json) as bar:
        task = bar.add_task("images", total=len(labelled.files))
        encoded = encode_files(encoder, labelled.files, advance=lambda count: bar.advance(task, count))
    for error in encoded.errors.values():
        typer.echo(f"warning: skipped: {printable(error)}", err=True)
    engine, features = classifier.engine, encoded.features
    labels = np.array([labelled.labels[name] for name in encoded.names], dtype=np.int64)
    order = np.random.default_rng(_SEED).permutation(len(labels))
    passed = engine.observe_many(features[order])
    stream = metrics.evaluate(labels[order], passed.index, passed.known)
    engine.reset()
    decisions = engine.observe_many(features, two_pass=True)
    folder_figures = metrics.evaluate(labels, decisions.index, decisions.known)
    diagnosis = diagnose(engine, features, decisions)
    if as_json:
        figures = {"folder": _as_json(folder_figures), "stream": _as_json(stream)}
        typer.echo(json.dumps({**figures, "diagnosis": diagnosis.to_dict(), "unreadable": len(encoded.errors)}))
        return
    _print(folder_figures, stream)
    _print_target(folder_figures, getattr(engine.config, "target_false_reject", None))
    print_diagnosis(diagnosis.to_dict())


def _as_json(found: "Evaluation") -> dict[str, dict[str, float | None]]:
    """Return the figures; those of no image are null."""
    return {
        name: {key: None if number != number else number for key, number in proportion.items()}
        for name, proportion in asdict(found).items()
    }


def _print(folder: "Evaluation", stream: "Evaluation") -> None:
    table = new_table(title="Percent of the images, with 95 % intervals")
    for column in ("images", "as a folder", "as a stream", "count"):
        table.add_column(column, justify="left" if column == "images" else "right")
    for name, title in _TITLES.items():
        both = getattr(folder, name), getattr(stream, name)
        if both[0].total:
            cells = [f"{100 * one.value:.1f} ({100 * one.low:.1f} to {100 * one.high:.1f})" for one in both]
            table.add_row(title, *cells, str(both[0].total))
    console().print(table)
    print_sentences([_PASSES])


def _print_target(found: "Evaluation", target: float | None) -> None:
    """Say so if the interval of the false rejects does not contain the target, unless nothing is left to find."""
    rejected, unknown = found.false_reject, found.unknown_recall
    if target is None or (unknown.total and unknown.count == unknown.total and rejected.value <= target):
        return
    if not rejected.low <= target <= rejected.high:
        typer.echo(
            f"{'More' if rejected.value > target else 'Fewer'} known images are rejected than the target of "
            f"{100 * target:g} %. Measure other values of --target-false-reject."
        )

"""`protodcs classify`: decide on every image of a folder."""

import csv
import io
import json
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from ..durable import replace_file
from ..errors import InputError
from .screen import console, explained, given_classes, new_table, printable, progress

if TYPE_CHECKING:
    from ..core.decision import Decisions
    from ..encoders.files import EncodedFiles

_FIELDS = ("file", "known", "label", "nearest_class", "p_unknown", "score", "reason", "error")
_ON_SHEET = 96
# With fewer images, more known ones are rejected: see docs/research/log.md, "Whole collections".
_FEW = 200

Row = dict[str, Any]


@explained
def classify(
    folder: Path = typer.Argument(..., help="Folder of images, including its subfolders."),
    classes: str = typer.Option(..., help="Class names separated by commas, a list such as cifar10, or a text file."),
    model: str = typer.Option(
        "openai/clip-vit-base-patch16", help="Encoder: hub name, folder, open_clip:..., onnx:..., demo, mini."
    ),
    out: Path = typer.Option(Path("decisions.csv"), help="Result file, .csv or .jsonl; the state is saved beside it."),
    sheet: Path | None = typer.Option(None, help="PNG with the images that were decided as unknown."),
    method: str = typer.Option("streamdcs", help="Method: streamdcs, protodcs, or another registered one."),
    device: str = typer.Option("auto", help="auto, cpu or cuda."),
    batch_size: int = typer.Option(32, min=1, help="Images that are encoded at once."),
    as_json: bool = typer.Option(False, "--json", help="Print one JSON object for scripts."),
) -> None:
    """Decide on every image of a folder: a class of the list, or unknown. File names and order do not matter.

    If a run is interrupted, start the same command again: images that are encoded already are not encoded again.
    """
    from .. import encoders
    from ..classifier import OpenSetClassifier
    from ..data.readers.folder import image_files
    from ..encoders.files import encode_files

    started = time.perf_counter()
    files = {printable(file): folder / file for file in image_files(folder)}
    names = given_classes(classes)
    _check_result(out)
    encoder = encoders.load(model, device=device, batch_size=batch_size)
    classifier = OpenSetClassifier.with_encoder(encoder, names, method=method)
    out.parent.mkdir(parents=True, exist_ok=True)
    store, state = (out.with_suffix(out.suffix + ending) for ending in (".features", ".state"))
    with progress(as_json) as bar:
        task = bar.add_task("images", total=len(files))
        encoded = encode_files(encoder, files, store, lambda count: bar.advance(task, count))
    decisions = classifier.engine.observe_many(encoded.features, two_pass=True)
    rows = _rows(files, encoded, decisions)
    classifier.save(state)
    replace_file(out, _text(rows, out.suffix).encode())
    store.unlink()
    report = _report(rows) | {"seconds": round(time.perf_counter() - started, 2)}
    report |= {"result": str(out), "state": str(state)}
    if sheet is not None:
        report["sheet"] = str(sheet)
        _draw(rows, files, sheet)
    if as_json:
        typer.echo(json.dumps(report))
    else:
        _print(report)
    if len(decisions) < _FEW:
        typer.echo(
            f"warning: only {len(decisions)} images: with fewer than {_FEW}, more known images are rejected", err=True
        )


def _check_result(out: Path) -> None:
    if out.suffix not in (".csv", ".jsonl"):
        raise InputError(f"the result must be a .csv or .jsonl file; given: {out.name!r}")
    if out.exists():
        raise InputError(f"{out} exists already: delete it, or give another file with --out")


def _rows(files: Mapping[str, Path], encoded: "EncodedFiles", decisions: "Decisions") -> list[Row]:
    """Return a row for each file, in order."""
    decided = dict(zip(encoded.names, decisions, strict=True))
    rows = []
    for name in files:
        if name in encoded.errors:
            rows.append(dict.fromkeys(_FIELDS) | {"file": name, "error": encoded.errors[name]})
            continue
        decision = decided[name]
        rows.append(
            {
                "file": name,
                "known": decision.known,
                "label": decision.label,
                "nearest_class": decisions.classes[decision.index],
                "p_unknown": round(decision.p_unknown, 6),
                "score": round(decision.score, 6),
                "reason": decision.reason,
                "error": None,
            }
        )
    return rows


def _text(rows: Sequence[Row], suffix: str) -> str:
    """Return the rows as CSV, or as JSON lines."""
    if suffix == ".jsonl":
        return "".join(json.dumps(row) + "\n" for row in rows)
    text = io.StringIO()
    writer = csv.DictWriter(text, _FIELDS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def _report(rows: Sequence[Row]) -> dict[str, Any]:
    known = Counter(row["label"] for row in rows if row["known"])
    return {
        "images": len(rows),
        "known": known.total(),
        "unknown": sum(row["known"] is False for row in rows),
        "unreadable": sum(row["error"] is not None for row in rows),
        "classes": dict(known.most_common()),
    }


def _draw(rows: Sequence[Row], files: Mapping[str, Path], sheet: Path) -> None:
    from ..data import decode
    from ..data.sheet import Picture, contact_sheet, save_sheet

    unknown = sorted((row for row in rows if row["known"] is False), key=lambda row: (row["score"], row["file"]))
    shown = unknown[:_ON_SHEET]
    pictures = [
        Picture(decode(files[row["file"]]), row["file"], f"{row['p_unknown']:.2f}, near {row['nearest_class']}")
        for row in shown
    ]
    selection = f", the {len(shown)} with the lowest score" if len(shown) < len(unknown) else ""
    title = f"{len(unknown)} unknown images{selection}; below each: p_unknown and the nearest class"
    save_sheet(contact_sheet(pictures, title), sheet)


def _print(report: Mapping[str, Any]) -> None:
    table = new_table(title=f"{report['images']} images in {report['seconds']} s")
    table.add_column("decision")
    table.add_column("images", justify="right")
    for name, count in report["classes"].items():
        table.add_row(name, str(count))
    table.add_row("[bold]unknown", str(report["unknown"]))
    if report["unreadable"]:
        table.add_row("[red]could not be read", str(report["unreadable"]))
    console().print(table)
    for key in ("result", "state", "sheet"):
        if key in report:
            console().print(f"{key}: {report[key]}")

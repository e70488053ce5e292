"""`protodcs classify`: decide on every image of a folder, or on the boxes of a detector."""

import csv
import io
import json
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from ..atomic_io import replace_file
from ..errors import DataError, InputError
from .camera_traps import TARGET_FALSE_REJECT, Boxes, camtrap_package, classify_boxes
from .decided import cluster_names
from .screen import (
    VOCABULARY_HELP,
    check_new,
    console,
    explained,
    given_classes,
    given_vocabulary,
    new_table,
    print_diagnosis,
    printable,
    progress,
    target_options,
    warn_of_boxes,
)

if TYPE_CHECKING:
    from PIL import Image

    from ..core.decision import Decisions
    from ..encoders.files import EncodedFiles
    from ..integrations.camera_traps import Naming

_FIELDS = ("file", "known", "label", "nearest_class", "p_unknown", "score", "reason", "error")
_FORMATS = ("csv", "jsonl", "parquet")
_ON_SHEET, _BORDERLINE = 64, 32

Row = dict[str, Any]


@explained
def classify(
    sources: list[Path] | None = typer.Argument(
        None, metavar="[IMAGES]...", help="Folder of images, including its subfolders; or image files."
    ),
    classes: str | None = typer.Option(
        None, help="Class names separated by commas, a list such as cifar10, or a text file. Not with --state."
    ),
    state: Path | None = typer.Option(
        None, help="State of an earlier run: continue with its classes and what it learned. It is not changed."
    ),
    model: str = typer.Option(
        "openai/clip-vit-base-patch16", help="Encoder: model id, folder, open_clip:..., onnx:..., demo, mini."
    ),
    clusters: Path | None = typer.Option(
        None, help="clusters.state of `discover --name`: unknown images get the name of the cluster they belong to."
    ),
    out: Path | None = typer.Option(
        None,
        help="Result file, .csv, .jsonl or .parquet (default: decisions.FORMAT). The state is saved beside it. With "
        "--megadetector a .json file.",
    ),
    form: str | None = typer.Option(None, "--format", help="csv, jsonl or parquet (default: that of --out, or csv)."),
    sheet: Path | None = typer.Option(
        None, help="Picture of the unknown images: the surest, then the borderline ones. PNG, JPEG or WebP."
    ),
    method: str = typer.Option("streamdcs", help="Method: streamdcs, protodcs, or another registered one."),
    target_false_reject: float | None = typer.Option(
        None,
        help="Fraction of known images that may be rejected, below 0.5 (default: that of the method, 0.05; with "
        "--megadetector 0.03).",
    ),
    vocabulary: str = typer.Option("general", help=VOCABULARY_HELP),
    templates: str | None = typer.Option(None, help="Prompt templates: a list such as imagenet, or a text file."),
    megadetector: Path | None = typer.Option(
        None, help="Results file of MegaDetector: classify its boxes of animals, instead of whole images."
    ),
    images: Path | None = typer.Option(None, help="Folder of the images of --megadetector (default: beside it)."),
    min_confidence: float | None = typer.Option(
        None, min=0, max=1, help="Confidence from which a box is classified (default: that of the file, or 0.2)."
    ),
    event_seconds: float = typer.Option(
        60, min=0, help="Largest time between two images of one event of a camera, in seconds (default: 60)."
    ),
    camtrap_dp: Path | None = typer.Option(None, help="Write a Camtrap DP package to this folder, too."),
    deployments: Path | None = typer.Option(
        None, help="CSV file for --camtrap-dp: deploymentID (the folder of a camera), latitude, longitude."
    ),
    time_zone: str | None = typer.Option(
        None, help="Time zone of the cameras for --camtrap-dp, such as Europe/Brussels (default: unknown, as UTC)."
    ),
    limit: int | None = typer.Option(None, min=1, help="Largest number of images, spread evenly (default: all)."),
    device: str = typer.Option("auto", help="auto, cpu or cuda."),
    batch_size: int = typer.Option(32, min=1, help="Images that are encoded at once."),
    as_json: bool = typer.Option(False, "--json", help="Print one JSON object for scripts."),
) -> None:
    """Decide on every image of a folder: a class of the list, or unknown. File names and order do not matter.

    If a run is interrupted, start the same command again: images that are encoded already are not encoded again.
    """
    from .. import encoders
    from ..classifier import OpenSetClassifier
    from ..diagnosis import diagnose
    from ..encoders.files import encode_files

    started = time.perf_counter()
    if (classes is None) == (state is None):
        raise InputError("Give --classes, or --state to continue an earlier run.")
    if state is not None and target_false_reject is not None:
        raise InputError("--target-false-reject is part of a state. Leave it out with --state.")
    names = () if classes is None else given_classes(classes)
    others = given_vocabulary(vocabulary)
    if megadetector is not None and target_false_reject is None and method == "streamdcs":
        target_false_reject = TARGET_FALSE_REJECT
    target = target_options(target_false_reject)
    naming = cluster_names(clusters)

    def load(file: Path | None) -> OpenSetClassifier:
        encoder = encoders.load(model, device=device, batch_size=batch_size, templates=templates)
        if file is not None:
            return OpenSetClassifier.restored(encoder, file, vocabulary=others)
        options: dict[str, Any] = {**target, "vocabulary": others}
        return OpenSetClassifier.with_encoder(encoder, names, method=method, **options)

    if megadetector is not None:
        if sources or form or sheet or limit:
            raise InputError("--megadetector takes no IMAGES, --format, --sheet or --limit. Use --images FOLDER.")
        out = out or megadetector.with_suffix(".species.json")
        package = None if camtrap_dp is None else camtrap_package(camtrap_dp, deployments, time_zone)
        given = Boxes(megadetector, images, out, min_confidence, event_seconds, state, naming, others, package)
        classify_boxes(given, load, as_json)
        return
    if sources is None:
        raise InputError("Give a folder of images, image files, or a results file with --megadetector.")
    files = _limited(_files(sources), limit)
    out = _result(out, form)
    classifier = load(state)
    out.parent.mkdir(parents=True, exist_ok=True)
    store, new_state = (out.with_suffix(out.suffix + ending) for ending in (".features", ".state"))
    with progress(as_json) as bar:
        task = bar.add_task("images", total=len(files))
        encoded = encode_files(classifier.encoder, files, store, lambda count: bar.advance(task, count))
    if not encoded.names:
        store.unlink(missing_ok=True)
        raise DataError(
            f"No image can be read ({len(files)} given). The first error: {next(iter(encoded.errors.values()))}"
        )
    decisions = classifier.engine.observe_many(encoded.features, two_pass=True)
    rows = _rows(files, encoded, decisions, naming)
    classifier.save(new_state)
    replace_file(out, _content(rows, out.suffix))
    store.unlink()
    report = _report(rows) | {"seconds": round(time.perf_counter() - started, 2)}
    report |= {"result": str(out), "state": str(new_state)}
    report["diagnosis"] = diagnose(classifier.engine, encoded.features, decisions).to_dict()
    if sheet is not None:
        report["sheet"] = str(sheet)
        _draw(rows, files, sheet)
    if as_json:
        typer.echo(json.dumps(report))
    else:
        _print(report)
    if encoded.errors:
        typer.echo(
            f"warning: {len(encoded.errors)} of {len(files)} images cannot be read. "
            f"The column `error` of {out} says why.",
            err=True,
        )


def _files(images: Sequence[Path]) -> dict[str, Path]:
    """Return the image files by name: relative to a single folder, otherwise as given."""
    from ..data.readers.folder import image_files

    if len(images) == 1 and not images[0].is_file():
        return {printable(file): images[0] / file for file in image_files(images[0])}
    found: dict[str, Path] = {}
    for path in images:
        inside = [path] if path.is_file() else [path / file for file in image_files(path)]
        found |= {printable(str(file)): file for file in inside}
    return found


def _limited(files: dict[str, Path], limit: int | None) -> dict[str, Path]:
    """Return at most this many files, evenly spread: the first ones may all be of one class."""
    if limit is None or limit >= len(files):
        return files
    names = list(files)
    return {name: files[name] for name in (names[place * len(names) // limit] for place in range(limit))}


def _result(out: Path | None, form: str | None) -> Path:
    """Return the result file, which must not exist yet."""
    if form is not None and form not in _FORMATS:
        raise InputError(f"--format must be csv, jsonl or parquet; given: {form!r}")
    out = out or Path(f"decisions.{form or 'csv'}")
    if out.suffix[1:] not in _FORMATS or (form is not None and out.suffix[1:] != form):
        raise InputError(
            f"The result must be a {(form and '.' + form) or '.csv, .jsonl or .parquet'} file; given: {out.name!r}"
        )
    check_new([out], "another file with --out")
    return out


def _rows(files: Mapping[str, Path], encoded: "EncodedFiles", decisions: "Decisions", naming: "Naming") -> list[Row]:
    """Return a row for each file, in order."""
    decided = dict(zip(encoded.names, zip(decisions, encoded.features, strict=True), strict=True))
    rows = []
    for name in files:
        if name in encoded.errors:
            rows.append(dict.fromkeys(_FIELDS) | {"file": name, "error": encoded.errors[name]})
            continue
        decision, feature = decided[name]
        rows.append(
            {
                "file": name,
                "known": decision.known,
                "label": decision.label if decision.known else naming(feature),
                "nearest_class": decisions.classes[decision.index],
                "p_unknown": round(decision.p_unknown, 6),
                "score": round(decision.score, 6),
                "reason": decision.reason,
                "error": None,
            }
        )
    return rows


def _content(rows: Sequence[Row], suffix: str) -> bytes:
    """Return the rows as CSV, JSON lines or Parquet."""
    if suffix == ".jsonl":
        return "".join(json.dumps(row) + "\n" for row in rows).encode()
    if suffix == ".parquet":
        import pyarrow as pa
        from pyarrow import parquet

        types = (
            pa.string(),
            pa.bool_(),
            pa.string(),
            pa.string(),
            pa.float64(),
            pa.float64(),
            pa.string(),
            pa.string(),
        )
        schema = pa.schema(list(zip(_FIELDS, types, strict=True)))
        content = io.BytesIO()
        parquet.write_table(pa.Table.from_pylist(list(rows), schema), content)
        return content.getvalue()
    text = io.StringIO()
    writer = csv.DictWriter(text, _FIELDS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue().encode()


def _report(rows: Sequence[Row]) -> dict[str, Any]:
    known = Counter(row["label"] for row in rows if row["known"])
    named = Counter(row["label"] for row in rows if row["known"] is False and row["label"])
    return {
        "images": len(rows),
        "known": known.total(),
        "unknown": sum(row["known"] is False for row in rows),
        "unreadable": sum(row["error"] is not None for row in rows),
        "classes": dict(known.most_common()),
        "clusters": dict(named.most_common()),
    }


def _draw(rows: Sequence[Row], files: Mapping[str, Path], sheet: Path) -> None:
    """Draw the unknown images with the lowest scores, and then the images next to the threshold."""
    from ..data import decode
    from ..data.contact_sheet import Picture, contact_sheet, save_sheets

    missing: set[str] = set()

    def drawn(chosen: Sequence[Row], title: str) -> "Image.Image":
        pictures = [
            Picture(decode(files[row["file"]]), row["file"], f"{row['p_unknown']:.2f}, near {row['nearest_class']}")
            for row in chosen
        ]
        return contact_sheet(pictures, f"{title}; below each: p_unknown and the nearest class", missing=missing)

    decided = [row for row in rows if row["error"] is None]
    unknown = sorted((row for row in decided if not row["known"]), key=lambda row: (row["score"], row["file"]))
    surest = unknown[:_ON_SHEET]
    shown = {row["file"] for row in surest}
    rest = sorted((row for row in decided if row["file"] not in shown), key=lambda row: abs(row["p_unknown"] - 0.5))
    selection = f", the {len(surest)} with the lowest score" if len(surest) < len(unknown) else ""
    sheets = [drawn(surest, f"{len(unknown)} unknown images{selection}")]
    if borderline := rest[:_BORDERLINE]:
        sheets.append(drawn(borderline, f"{len(borderline)} borderline images, known and unknown"))
    save_sheets(sheets, sheet)
    warn_of_boxes(missing)


def _print(report: Mapping[str, Any]) -> None:
    table = new_table(title=f"{report['images']} images in {report['seconds']} s")
    table.add_column("decision")
    table.add_column("images", justify="right")
    for name, count in report["classes"].items():
        table.add_row(name, str(count))
    for name, count in report["clusters"].items():
        table.add_row(f"{name} (cluster)", str(count))
    table.add_row("unknown", str(report["unknown"] - sum(report["clusters"].values())), style="bold")
    if report["unreadable"]:
        table.add_row("could not be read", str(report["unreadable"]), style="red")
    console().print(table)
    print_diagnosis(report["diagnosis"])
    for key in ("result", "state", "sheet"):
        if key in report:
            console().print(f"{key}: {report[key]}")

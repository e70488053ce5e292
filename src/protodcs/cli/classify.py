"""`protodcs classify`: decide on every image of a folder."""

import csv
import io
import json
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer
from rich.table import Table

from ..durable import replace_file
from ..errors import ImageError, InputError
from .screen import console, explained, progress

_ENDINGS = {".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm"}
_FIELDS = ("file", "known", "label", "best", "p_unknown", "score", "problem")
# Results and state are made safe together every so many images; an interrupted run repeats at most these.
_CHECKPOINT = 256
_ON_SHEET = 96


@explained
def classify(
    folder: Path = typer.Argument(..., help="A folder of images; folders inside it are searched too."),
    classes: str = typer.Option(..., help="Class names with commas between, a known list such as cifar10, or a file."),
    model: str = typer.Option(
        "openai/clip-vit-base-patch16", help="An encoder: hub name, folder, open_clip:..., onnx:..."
    ),
    out: Path = typer.Option(Path("decisions.csv"), help="The result, .csv or .jsonl; its state lies beside it."),
    sheet: Path | None = typer.Option(None, help="A PNG with the images that were called unknown."),
    method: str = typer.Option("protodcs", help="A registered method."),
    device: str = typer.Option("auto", help="auto, cpu or cuda."),
    batch_size: int = typer.Option(32, min=1, help="Images that are encoded at once."),
    resume: bool = typer.Option(False, help="Go on where an earlier run into the same file stopped."),
    as_json: bool = typer.Option(False, "--json", help="Print one JSON object for a program."),
) -> None:
    """Decide on every image of a folder, in the order of their names: a class of the list, or unknown."""
    from .. import encoders
    from ..classifier import OpenSetClassifier

    started = time.perf_counter()
    files, names = _files(folder), _names(classes)
    results = Results(out)
    encoder = encoders.load(model, device=device, batch_size=batch_size)
    if resume and results.state.exists():
        classifier = OpenSetClassifier.restored(encoder, results.state)
        if (classifier.engine.name, classifier.classes) != (method, names):
            raise InputError(
                f"{results.state} was begun with other classes or another method: give the same, or a new --out"
            )
        done = results.reopen(classifier.engine.sequence)
        if results.files() != [file.relative_to(folder).as_posix() for file in files[:done]]:
            raise InputError(f"the images in {folder} are not those that {out} was begun with: give a new --out")
    else:
        classifier = OpenSetClassifier.with_encoder(encoder, names, method=method)
        done = results.start(resume)
    with progress(as_json) as bar:
        task = bar.add_task("images", total=len(files), completed=done)
        for first in range(done, len(files), _CHECKPOINT):
            part = files[first : first + _CHECKPOINT]
            for row in _decided(classifier, folder, part):
                results.add(row)
                bar.advance(task)
            results.keep(classifier)
    report = _report(results.rows(), time.perf_counter() - started)
    report["result"], report["state"] = str(out), str(results.state)
    if sheet is not None:
        report["sheet"] = str(sheet)
        _draw(results.rows(), folder, sheet)
    if as_json:
        typer.echo(json.dumps(report))
    else:
        _print(report)


class Results:
    """The result file, row by row, and the state of the classifier beside it."""

    def __init__(self, file: Path):
        if file.suffix not in (".csv", ".jsonl"):
            raise InputError(f"the result is written as .csv or .jsonl; given: {file.name!r}")
        self.file = file
        self.state = file.with_suffix(file.suffix + ".state")
        self._lines: list[str] = []

    def start(self, resume: bool) -> int:
        """Begin an empty file; returns how many images are done, which is none."""
        if self.file.exists() and not resume:
            raise InputError(f"{self.file} exists already: use --resume to go on, or give another file with --out")
        self.file.parent.mkdir(parents=True, exist_ok=True)
        self._begin_with([])
        return 0

    def reopen(self, decided: int) -> int:
        """Drop the rows after the last that the state has seen; returns how many images are done."""
        kept: list[dict[str, Any]] = []
        for row in self.rows():
            if decided == 0:
                break
            kept.append(row)
            decided -= not row["problem"]
        if decided:
            raise InputError(f"{self.file} has fewer rows than {self.state} has seen: start anew with another --out")
        self._begin_with(kept)
        return len(kept)

    def files(self) -> list[str]:
        """The images of the rows."""
        return [row["file"] for row in self.rows()]

    def _begin_with(self, rows: list[dict[str, Any]]) -> None:
        head = [dict(zip(_FIELDS, _FIELDS, strict=True))] if self._is_csv else []
        replace_file(self.file, "".join(self._line(row) for row in head + rows).encode())

    def add(self, row: dict[str, Any]) -> None:
        """Take a row; `keep` writes it."""
        self._lines.append(self._line(row))

    def keep(self, classifier: Any) -> None:
        """Write the rows, then the state that goes with them."""
        self._flush()
        classifier.save(self.state)

    def rows(self) -> Iterator[dict[str, Any]]:
        """The rows written so far; a half-written last one is left out."""
        with self.file.open(encoding="utf-8", newline="") as opened:
            if self._is_csv:
                yield from (_typed(row) for row in csv.DictReader(opened) if row["problem"] is not None)
                return
            for line in opened:
                if line.endswith("\n"):
                    yield json.loads(line)

    @property
    def _is_csv(self) -> bool:
        return self.file.suffix == ".csv"

    def _line(self, row: dict[str, Any]) -> str:
        if not self._is_csv:
            return json.dumps(row) + "\n"
        text = io.StringIO()
        csv.DictWriter(text, _FIELDS, lineterminator="\n").writerow(row)
        return text.getvalue()

    def _flush(self) -> None:
        with self.file.open("a", encoding="utf-8") as opened:
            opened.write("".join(self._lines))
        self._lines.clear()


def _files(folder: Path) -> list[Path]:
    if not folder.is_dir():
        raise InputError(f"{folder} is not a folder")
    found = sorted(
        path
        for path in folder.rglob("*")
        if path.suffix.lower() in _ENDINGS and not path.name.startswith(".") and path.is_file()
    )
    if not found:
        raise InputError(f"{folder} holds no images: files ending in {', '.join(sorted(_ENDINGS))} are looked for")
    return found


def _names(classes: str) -> tuple[str, ...]:
    from ..data.prompts import class_names

    if "," in classes:
        return class_names([name.strip() for name in classes.split(",") if name.strip()])
    return class_names(classes)


def _decided(classifier: Any, folder: Path, files: list[Path]) -> Iterator[dict[str, Any]]:
    from ..data import decode

    problems: dict[Path, str] = {}

    def usable() -> Iterator[Any]:
        for file in files:
            try:
                yield decode(file)
            except ImageError as problem:
                problems[file] = str(problem)

    decided = iter(list(classifier.stream(usable())))
    for file in files:
        name = file.relative_to(folder).as_posix()
        if file in problems:
            yield dict.fromkeys(_FIELDS) | {"file": name, "problem": problems[file]}
            continue
        decision = next(decided)
        yield {
            "file": name,
            "known": decision.known,
            "label": decision.label,
            "best": classifier.classes[decision.index],
            "p_unknown": round(decision.p_unknown, 6),
            "score": round(decision.score, 6),
            "problem": None,
        }


def _typed(row: dict[str, str]) -> dict[str, Any]:
    """A row of a CSV file as it was before it became text."""
    typed: dict[str, Any] = {key: value or None for key, value in row.items()}
    typed["known"] = {"True": True, "False": False}.get(row["known"])
    for key in ("p_unknown", "score"):
        typed[key] = float(row[key]) if row[key] else None
    return typed


def _report(rows: Iterator[dict[str, Any]], seconds: float) -> dict[str, Any]:
    labels = Counter("refused" if row["problem"] else row["label"] if row["known"] else "unknown" for row in rows)
    unknown, refused = labels.pop("unknown", 0), labels.pop("refused", 0)
    return {
        "images": sum(labels.values()) + unknown + refused,
        "known": sum(labels.values()),
        "unknown": unknown,
        "refused": refused,
        "classes": dict(labels.most_common()),
        "seconds": round(seconds, 2),
    }


def _draw(rows: Iterator[dict[str, Any]], folder: Path, sheet: Path) -> None:
    from ..data import decode
    from ..data.sheet import Picture, contact_sheet, save_sheet

    unknown = sorted((row for row in rows if row["known"] is False), key=lambda row: (row["score"], row["file"]))
    shown = unknown[:_ON_SHEET]
    pictures = [
        Picture(decode(folder / row["file"]), row["file"], f"{row['p_unknown']:.2f}, near {row['best']}")
        for row in shown
    ]
    counted = f"{len(unknown)} images called unknown" + (
        f", the {len(shown)} strangest" if len(shown) < len(unknown) else ""
    )
    save_sheet(contact_sheet(pictures, f"{counted}; below each: p_unknown and the nearest class"), sheet)


def _print(report: dict[str, Any]) -> None:
    table = Table(title=f"{report['images']} images in {report['seconds']} s", title_justify="left")
    table.add_column("decision")
    table.add_column("images", justify="right")
    for name, count in report["classes"].items():
        table.add_row(name, str(count))
    table.add_row("[bold]unknown", str(report["unknown"]))
    if report["refused"]:
        table.add_row("[red]could not be read", str(report["refused"]))
    console.print(table)
    for key in ("result", "state", "sheet"):
        if key in report:
            console.print(f"{key}: {report[key]}")

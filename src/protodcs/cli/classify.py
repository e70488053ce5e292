"""`protodcs classify`: decide on every image of a folder."""

import csv
import io
import json
import os
import time
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import typer
from rich.table import Table

from ..core.decision import POSSIBLE_SHIFT, Decision
from ..durable import replace_file
from ..errors import ImageError, InputError
from .screen import console, explained, given_classes, progress

_FIELDS = ("file", "known", "label", "best", "p_unknown", "score", "reason", "problem")
# Results and state are made safe together after so many images, at the end of their batch; an interrupted run repeats
# those since then.
_CHECKPOINT = 256
_ON_SHEET = 96

Row = dict[str, Any]


@explained
def classify(
    folder: Path = typer.Argument(..., help="A folder of images; folders inside it are searched too."),
    classes: str = typer.Option(..., help="Class names with commas between, a known list such as cifar10, or a file."),
    model: str = typer.Option(
        "openai/clip-vit-base-patch16", help="An encoder: hub name, folder, open_clip:..., onnx:..."
    ),
    out: Path = typer.Option(Path("decisions.csv"), help="The result, .csv or .jsonl; its state lies beside it."),
    sheet: Path | None = typer.Option(None, help="A PNG with the images that were called unknown."),
    method: str = typer.Option("streamdcs", help="Method: streamdcs, protodcs, or another registered one."),
    device: str = typer.Option("auto", help="auto, cpu or cuda."),
    batch_size: int = typer.Option(32, min=1, help="Images that are encoded at once."),
    resume: bool = typer.Option(False, help="Go on where an earlier run into the same file stopped."),
    as_json: bool = typer.Option(False, "--json", help="Print one JSON object for a program."),
) -> None:
    """Decide on every image of a folder, in the order of their names: a class of the list, or unknown."""
    from .. import encoders
    from ..classifier import OpenSetClassifier
    from ..data.readers.folder import image_files

    started = time.perf_counter()
    files = {_printable(file): folder / file for file in image_files(folder)}
    names, results = given_classes(classes), Results(out)
    encoder = encoders.load(model, device=device, batch_size=batch_size)
    if resume and results.can_go_on():
        classifier = OpenSetClassifier.restored(encoder, results.state)
        if (classifier.engine.name, classifier.classes) != (method, names):
            raise InputError(f"{results.state} was begun with other classes or another method: give a new --out")
        done = results.go_on(classifier.engine.sequence, list(files))
    else:
        classifier = OpenSetClassifier.with_encoder(encoder, names, method=method)
        done = results.start(resume)
    with progress(as_json) as bar:
        task = bar.add_task("images", total=len(files), completed=done)
        for rows in _checkpoints(_decided(classifier, list(files.items())[done:]), batch_size):
            results.add(rows)
            classifier.save(results.state)
            bar.advance(task, len(rows))
    report = _report(results.rows(), time.perf_counter() - started)
    report["result"], report["state"] = str(out), str(results.state)
    if sheet is not None:
        report["sheet"] = str(sheet)
        _draw(results.rows(), files, sheet)
    if as_json:
        typer.echo(json.dumps(report))
    else:
        _print(report)
    if report["possibly_shifted"]:
        typer.echo(
            f"warning: {report['possibly_shifted']} images came after a possible shift: known images among them are "
            "probably rejected. See the column `reason`.",
            err=True,
        )


class Results:
    """The result file, row by row. Beside it lies the state that the classifier had at the last checkpoint.

    A checkpoint writes its rows first and the state second, so the file may be ahead of the state and never behind it.
    """

    def __init__(self, file: Path):
        if file.suffix not in (".csv", ".jsonl"):
            raise InputError(f"the result is written as .csv or .jsonl; given: {file.name!r}")
        self.file = file
        self.state = file.with_suffix(file.suffix + ".state")

    def can_go_on(self) -> bool:
        """Whether an earlier run has come to its first checkpoint."""
        return self.state.exists() and self.file.exists()

    def start(self, resume: bool) -> int:
        """Begin an empty file; returns how many images are done, which is none."""
        if self.file.exists() and not (resume and self._is_ours()):
            raise InputError(f"{self.file} exists already: use --resume to go on, or give another file with --out")
        self.file.parent.mkdir(parents=True, exist_ok=True)
        # The state of an earlier run must not be taken for one of this.
        self.state.unlink(missing_ok=True)
        replace_file(self.file, self._head())
        return 0

    def go_on(self, decided: int, files: Sequence[str]) -> int:
        """Drop what came after the checkpoint of the state; returns how many images are done."""
        kept: list[dict[str, Any]] = []
        for row in self.rows():
            # Images that could not be read are not counted by the state: those after the last decision are read again.
            if decided == 0:
                break
            kept.append(row)
            decided -= not row["problem"]
        if decided or [row["file"] for row in kept] != list(files[: len(kept)]):
            raise InputError(f"{self.file} does not fit its state and the images in the folder: give a new --out")
        replace_file(self.file, self._head() + self._lines(kept))
        return len(kept)

    def add(self, rows: Sequence[dict[str, Any]]) -> None:
        """Append rows, safe on the disk when this returns."""
        with self.file.open("ab") as opened:
            opened.write(self._lines(rows))
            opened.flush()
            os.fsync(opened.fileno())

    def rows(self) -> Iterator[dict[str, Any]]:
        """The rows written so far; a half-written last one is left out."""
        whole, newline, _ = self.file.read_bytes().rpartition(b"\n")
        text = (whole + newline).decode("utf-8")
        if self._is_csv:
            yield from (_typed(row) for row in csv.DictReader(io.StringIO(text, newline="")))
        else:
            yield from (json.loads(line) for line in text.splitlines())

    @property
    def _is_csv(self) -> bool:
        return self.file.suffix == ".csv"

    def _is_ours(self) -> bool:
        """Whether the file is empty or begins as ours do: what a run leaves that is stopped before a checkpoint."""
        first = self.file.read_bytes().partition(b"\n")[0]
        if not first:
            return True
        if self._is_csv:
            return first + b"\n" == self._head()
        try:
            return tuple(json.loads(first)) == _FIELDS
        except (ValueError, TypeError):
            return False

    def _head(self) -> bytes:
        return (",".join(_FIELDS) + "\n").encode() if self._is_csv else b""

    def _lines(self, rows: Sequence[dict[str, Any]]) -> bytes:
        if not self._is_csv:
            return "".join(json.dumps(row) + "\n" for row in rows).encode()
        text = io.StringIO()
        csv.DictWriter(text, _FIELDS, lineterminator="\n").writerows(rows)
        return text.getvalue().encode()


def _printable(file: str) -> str:
    """The name of a file on one line: what is no character, or would break the line, is written as its number."""
    readable = os.fsencode(file).decode("utf-8", "backslashreplace")
    return "".join(letter if letter.isprintable() else f"\\x{ord(letter):02x}" for letter in readable)


def _checkpoints(parts: Iterator[list[Row]], batch_size: int) -> Iterator[list[Row]]:
    """Rows enough for a checkpoint, from parts that each end with a decision.

    A checkpoint comes after a whole batch: a feature may differ in its last bit with the images it was encoded beside,
    and a run that goes on from here must cut the same batches.
    """
    rows: list[Row] = []
    for decided, part in enumerate(parts, start=1):
        rows += part
        if len(rows) >= _CHECKPOINT and decided % batch_size == 0:
            yield rows
            rows = []
    if rows:
        yield rows


def _decided(classifier: Any, files: Sequence[tuple[str, Path]]) -> Iterator[list[Row]]:
    """A row for every file, in order; each decision brings the rows of the unusable files before it."""
    from ..data import decode

    # Written ahead of the decisions, in the thread that reads: what became of each file.
    read: deque[tuple[str, str | None]] = deque()

    def usable() -> Iterator[Any]:
        for name, file in files:
            try:
                pixels = decode(file, name)
            except ImageError as problem:
                read.append((name, str(problem)))
                continue
            read.append((name, None))
            yield pixels

    for decision in classifier.stream(usable()):
        rows = []
        name, problem = read.popleft()
        while problem is not None:
            rows.append(_refused(name, problem))
            name, problem = read.popleft()
        rows.append(_row(name, decision, classifier.classes))
        yield rows
    yield [_refused(name, str(problem)) for name, problem in read]


def _row(name: str, decision: Decision, classes: Sequence[str]) -> Row:
    return {
        "file": name,
        "known": decision.known,
        "label": decision.label,
        "best": classes[decision.index],
        "p_unknown": round(decision.p_unknown, 6),
        "score": round(decision.score, 6),
        "reason": decision.reason,
        "problem": None,
    }


def _refused(name: str, problem: str) -> Row:
    return dict.fromkeys(_FIELDS) | {"file": name, "problem": problem}


def _typed(row: dict[str, str]) -> dict[str, Any]:
    """A row of a CSV file as it was before it became text."""
    typed: dict[str, Any] = {key: value or None for key, value in row.items()}
    typed["known"] = {"True": True, "False": False}.get(row["known"])
    for key in ("p_unknown", "score"):
        typed[key] = float(row[key]) if row[key] else None
    return typed


def _report(rows: Iterator[dict[str, Any]], seconds: float) -> dict[str, Any]:
    counts: Counter[tuple[bool | None, str | None]] = Counter()
    possibly_shifted = 0
    for row in rows:
        counts[row["known"], row["label"]] += 1
        possibly_shifted += row["reason"] == POSSIBLE_SHIFT
    known = Counter({label: count for (is_known, label), count in counts.items() if is_known})
    return {
        "images": counts.total(),
        "known": known.total(),
        "unknown": counts[False, None],
        "refused": counts[None, None],
        "possibly_shifted": possibly_shifted,
        "classes": dict(known.most_common()),
        "seconds": round(seconds, 2),
    }


def _draw(rows: Iterator[dict[str, Any]], files: dict[str, Path], sheet: Path) -> None:
    from ..data import decode
    from ..data.sheet import Picture, contact_sheet, save_sheet

    unknown = sorted((row for row in rows if row["known"] is False), key=lambda row: (row["score"], row["file"]))
    shown = unknown[:_ON_SHEET]
    pictures = [
        Picture(decode(files[row["file"]]), row["file"], f"{row['p_unknown']:.2f}, near {row['best']}") for row in shown
    ]
    all_or_some = f", the {len(shown)} strangest" if len(shown) < len(unknown) else ""
    title = f"{len(unknown)} images called unknown{all_or_some}; below each: p_unknown and the nearest class"
    save_sheet(contact_sheet(pictures, title), sheet)


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

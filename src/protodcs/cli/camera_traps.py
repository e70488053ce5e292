"""`protodcs classify --megadetector`: add species to the boxes of a detector for camera traps."""

import csv
import io
import json
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import typer

from ..atomic_io import replace_file
from ..errors import DataError, InputError
from .screen import console, new_table, printable, progress

if TYPE_CHECKING:
    from ..arrays import Feature
    from ..classifier import OpenSetClassifier
    from ..core.decision import Decision
    from ..integrations.camera_traps import Event, EventDecision, Photo, Place
    from ..integrations.megadetector import Results

_FIELDS = ("event", "camera", "start", "end", "images", "boxes", "known", "label", "nearest_class", "p_unknown")


class Boxes(NamedTuple):
    """What the options of the command say about a results file.

    Attributes:
        results: the results file.
        images: the folder of its images; None: beside it.
        out: the new results file.
        confidence: confidence from which a box is classified; None: what the file says.
        event_seconds: largest time between two images of one event.
    """

    results: Path
    images: Path | None
    out: Path
    confidence: float | None
    event_seconds: float


class _Decided(NamedTuple):
    """The decisions on boxes and events."""

    boxes: dict["Place", "Decision"]
    events: list["EventDecision"]


def classify_boxes(given: Boxes, load: "Callable[[], OpenSetClassifier]", as_json: bool) -> None:
    """Classify the boxes of animals, write the files, and print a summary. `load` is called after all checks."""
    from ..integrations import camera_traps, megadetector

    started = time.perf_counter()
    events_file = given.out.with_suffix(".events.csv")
    _check_new(given, events_file)
    results = megadetector.read_results(given.results)
    if results.get("classification_categories"):
        raise DataError(f"{given.results} has classifications already. Give the file that the detector wrote.")
    folder = given.results.parent if given.images is None else given.images
    classifier = load()
    crops, errors = _encoded(given, results, folder, classifier, as_json)
    photos = camera_traps.photos(results, folder)
    decided = _decide(classifier, camera_traps.group_events(photos, given.event_seconds), crops)
    written = megadetector.with_species(results, decided.boxes, classifier.classes, classifier.encoder.name)
    replace_file(events_file, _events(decided.events, crops, classifier.classes).encode())
    replace_file(given.out, json.dumps(written, indent=1).encode())
    _store(given.out).unlink(missing_ok=True)
    report = _report(photos, decided, errors, classifier.classes)
    report |= {"seconds": round(time.perf_counter() - started, 2), "results": [str(given.out), str(events_file)]}
    if as_json:
        typer.echo(json.dumps(report))
    else:
        _print(report)
    _warn(report, errors)


def _check_new(given: Boxes, *files: Path) -> None:
    if given.out.suffix != ".json":
        raise InputError(f"The result must be a .json file, as of MegaDetector; given: {given.out.name!r}")
    for file in (given.out, *files):
        if file.exists():
            raise InputError(f"{file} exists already. Delete it, or choose another file with --out.")


def _store(out: Path) -> Path:
    """Return the file with the features so far."""
    return out.with_suffix(".json.features")


def _encoded(
    given: Boxes, results: "Results", folder: Path, classifier: "OpenSetClassifier", quiet: bool
) -> tuple[dict["Place", "Feature"], Mapping[str, str]]:
    """Return the features of the crops by image and box, and why others could not be read."""
    from ..data.crop import Crop
    from ..encoders.files import encode_files
    from ..integrations import megadetector

    confidence = megadetector.usual_confidence(results) if given.confidence is None else given.confidence
    found = megadetector.detections(results, confidence)
    boxes = {
        f"{printable(megadetector.image_path(results['images'][one.image]))}, box {one.place}": one
        for one in found
        if one.category == megadetector.ANIMAL
    }
    if not boxes:
        raise DataError(
            f"{given.results} has no box of an animal with a confidence of at least {confidence:g}. "
            "Set --min-confidence."
        )
    files = {
        name: Crop(folder / megadetector.image_path(results["images"][one.image]), one.box)
        for name, one in boxes.items()
    }
    given.out.parent.mkdir(parents=True, exist_ok=True)
    with progress(quiet) as bar:
        task = bar.add_task("boxes", total=len(files))
        encoded = encode_files(classifier.encoder, files, _store(given.out), lambda count: bar.advance(task, count))
    if not encoded.names:
        _store(given.out).unlink()
        first = next(iter(encoded.errors.values()))
        raise DataError(f"No image can be read. The first error: {first}. Set --images to the folder of the images.")
    places = [(boxes[name].image, boxes[name].place) for name in encoded.names]
    return dict(zip(places, encoded.features, strict=True)), encoded.errors


def _decide(classifier: "OpenSetClassifier", events: Sequence["Event"], crops: Mapping["Place", "Feature"]) -> _Decided:
    """Decide on the boxes and events of each camera, with a stream of its own."""
    from ..integrations.camera_traps import decide_camera

    cameras: dict[str, list[Event]] = {}
    for event in events:
        cameras.setdefault(event.camera, []).append(event)
    decided = _Decided({}, [])
    for of_camera in cameras.values():
        classifier.engine.reset()
        boxes, on_events = decide_camera(classifier.engine, of_camera, crops)
        decided.boxes.update(boxes)
        decided.events.extend(on_events)
    return decided


def _events(decided: Sequence["EventDecision"], crops: Mapping["Place", "Feature"], classes: Sequence[str]) -> str:
    """Return the decisions on events as CSV. Events without an animal have an empty decision."""
    boxes = Counter(image for image, _ in crops)
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(_FIELDS)
    for event, decision in decided:
        times = ["" if moment is None else f"{moment:%Y-%m-%dT%H:%M:%S}" for moment in (event.start, event.end)]
        counts = [len(event.photos), sum(boxes[photo.image] for photo in event.photos)]
        row: list[Any] = ["", "", "", ""]
        if decision is not None:
            row = [decision.known, decision.label, classes[decision.index], round(decision.p_unknown, 6)]
        writer.writerow([event.name, event.camera, *times, *counts, *row])
    return text.getvalue()


def _report(
    photos: Sequence["Photo"], decided: _Decided, errors: Mapping[str, str], classes: Sequence[str]
) -> dict[str, Any]:
    def count(decisions: Sequence["Decision"]) -> dict[str, Any]:
        labels = Counter(decision.label for decision in decisions if decision.known)
        return {"all": len(decisions), "unknown": len(decisions) - labels.total(), "classes": dict(labels)}

    of_events = [decision for _, decision in decided.events if decision is not None]
    boxes = count([*decided.boxes.values()])
    return {
        "images": len(photos),
        "cameras": len({photo.camera for photo in photos}),
        "without_time": sum(photo.time is None for photo in photos),
        "boxes": boxes | {"unreadable": len(errors)},
        "events": count(of_events),
    }


def _print(report: Mapping[str, Any]) -> None:
    boxes, events = report["boxes"], report["events"]
    title = f"{report['images']} images of {report['cameras']} cameras in {report['seconds']} s"
    table = new_table(title=title)
    table.add_column("decision")
    table.add_column("events", justify="right")
    table.add_column("boxes", justify="right")
    names = {**events["classes"], **boxes["classes"]}
    for name in sorted(names, key=lambda name: (-events["classes"].get(name, 0), name)):
        table.add_row(name, str(events["classes"].get(name, 0)), str(boxes["classes"].get(name, 0)))
    table.add_row("unknown", str(events["unknown"]), str(boxes["unknown"]), style="bold")
    if boxes["unreadable"]:
        table.add_row("could not be read", "", str(boxes["unreadable"]), style="red")
    console().print(table)
    for file in report["results"]:
        console().print(file, soft_wrap=True)


def _warn(report: Mapping[str, Any], errors: Mapping[str, str]) -> None:
    if errors:
        first = next(iter(errors.values()))
        typer.echo(f"warning: {len(errors)} boxes have no decision. The first error: {first}", err=True)
    if report["without_time"]:
        typer.echo(
            f"warning: {report['without_time']} images have no time. Each of them is an event of its own.", err=True
        )

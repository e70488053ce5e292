"""`protodcs classify --megadetector`: add species to the boxes of a detector for camera traps."""

import csv
import io
import json
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from datetime import tzinfo
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

import typer

from ..atomic_io import replace_file
from ..errors import DataError, InputError
from .screen import check_new, console, new_table, printable, progress

if TYPE_CHECKING:
    from ..arrays import Feature
    from ..classifier import OpenSetClassifier
    from ..core.decision import Decision
    from ..integrations.camera_traps import Event, EventDecision, Naming, Photo, Place
    from ..integrations.megadetector import Detection, Results

_FIELDS = ("event", "camera", "start", "end", "images", "boxes", "known", "label", "nearest_class", "p_unknown")

# Files of a folder of states.
_SEASON, _MEANS = "season.state", "class-means.safetensors"
# Share of listed animals to reject. Boxes of one event resemble each other, so more are rejected than asked for.
TARGET_FALSE_REJECT = 0.03


class Package(NamedTuple):
    """A Camtrap DP package to write: its folder, where the cameras are, and their time zone; None if unknown."""

    folder: Path
    deployments: Path
    zone: tzinfo | None


class Boxes(NamedTuple):
    """What the options of the command say about a results file.

    Attributes:
        results: the results file.
        images: the folder of its images; None: beside it.
        out: the new results file.
        confidence: confidence from which a box is classified; None: what the file says.
        event_seconds: largest time between two images of one event.
        states: the folder of what an earlier run has learned; None: nothing was learned yet.
        naming: names clusters of unknown animals.
        vocabulary: names of other things, for these states.
        package: the Camtrap DP package to write, if any.
    """

    results: Path
    images: Path | None
    out: Path
    confidence: float | None
    event_seconds: float
    states: Path | None
    naming: "Naming"
    vocabulary: str | None
    package: Package | None


class _Decided(NamedTuple):
    """The decisions on boxes and events, and what was learned, by the names of the files."""

    boxes: dict["Place", "Decision"]
    events: list["EventDecision"]
    states: dict[str, bytes]


def camtrap_package(folder: Path, deployments: Path | None, time_zone: str | None) -> Package:
    """Return what the options of a Camtrap DP package say."""
    if deployments is None:
        raise InputError("--camtrap-dp needs --deployments, a CSV file with deploymentID, latitude and longitude.")
    try:
        zone = None if time_zone is None else ZoneInfo(time_zone)
    except (ZoneInfoNotFoundError, ValueError):
        raise InputError(f"There is no time zone {time_zone!r}. Give one such as Europe/Brussels.") from None
    return Package(folder, deployments, zone)


def classify_boxes(given: Boxes, load: "Callable[[Path | None], OpenSetClassifier]", as_json: bool) -> None:
    """Classify the boxes of animals, write the files, and print a summary. `load` is called after all checks."""
    from ..integrations import camera_traps, megadetector

    started = time.perf_counter()
    events_file = given.out.with_suffix(".events.csv")
    _check_new(given, events_file)
    results = megadetector.read_results(given.results)
    if results.get("classification_categories"):
        raise DataError(f"{given.results} has classifications already. Give the file that the detector wrote.")
    folder = given.results.parent if given.images is None else given.images
    photos = camera_traps.photos(results, folder)
    deployments = _deployments(given.package, photos)
    confidence = megadetector.usual_confidence(results) if given.confidence is None else given.confidence
    detections = megadetector.detections(results, confidence)
    classifier = load(None if given.states is None else given.states / _SEASON)
    crops, errors = _encoded(given, photos, folder, detections, classifier, as_json)
    decided = _decide(given, classifier, camera_traps.group_events(photos, given.event_seconds), photos, crops)
    written = megadetector.with_species(results, decided.boxes, classifier.classes, classifier.encoder.name)
    files = {
        events_file: _events(decided.events, crops, classifier.classes),
        given.out: json.dumps(written, indent=1),
    }
    if given.package is not None:
        files |= _package(given.package, written, detections, decided, deployments)
    states = _states(given.out)
    for name, state in decided.states.items():
        states.mkdir(exist_ok=True)
        replace_file(states / name, state)
    for file, content in files.items():
        file.parent.mkdir(parents=True, exist_ok=True)
        replace_file(file, content.encode())
    _store(given.out).unlink(missing_ok=True)
    report = _report(photos, decided, errors)
    report |= {"seconds": round(time.perf_counter() - started, 2), "results": [*map(str, files), str(states)]}
    if as_json:
        typer.echo(json.dumps(report))
    else:
        _print(report)
    _warn(report, errors)


def _check_new(given: Boxes, events_file: Path) -> None:
    from ..integrations.camtrap_dp import FILES

    if given.out.suffix != ".json":
        raise InputError(f"The result must be a .json file, as of MegaDetector; given: {given.out.name!r}")
    inside = [] if given.package is None else [given.package.folder / name for name in FILES]
    check_new([given.out, events_file, _states(given.out), *inside], "another name for the results")
    for name in (_SEASON, _MEANS):
        if given.states is not None and not (given.states / name).is_file():
            raise InputError(f"{given.states} has no {name}. Give the folder that `classify --megadetector` wrote.")


def _deployments(package: Package | None, photos: Sequence["Photo"]) -> dict[str, dict[str, Any]]:
    """Return where the cameras of a package are, and check that it can be written."""
    from ..integrations import camtrap_dp

    if package is None:
        return {}
    camtrap_dp.check_photos(photos)
    return camtrap_dp.read_deployments(package.deployments, {photo.camera for photo in photos})


def _package(
    package: Package,
    written: "Results",
    detections: Sequence["Detection"],
    decided: _Decided,
    deployments: Mapping[str, dict[str, Any]],
) -> dict[Path, str]:
    """Return the files of a Camtrap DP package."""
    from ..integrations import camtrap_dp

    season = camtrap_dp.Season(
        package.folder.name, written, detections, decided.events, decided.boxes, deployments, package.zone
    )
    return {package.folder / name: content for name, content in camtrap_dp.package_files(season).items()}


def _states(out: Path) -> Path:
    """Return the folder for what was learned."""
    return out.with_suffix(".states")


def _store(out: Path) -> Path:
    """Return the file with the features so far."""
    return out.with_suffix(".json.features")


def _encoded(
    given: Boxes,
    photos: Sequence["Photo"],
    folder: Path,
    detections: Sequence["Detection"],
    classifier: "OpenSetClassifier",
    quiet: bool,
) -> tuple[dict["Place", "Feature"], Mapping[str, str]]:
    """Return the features of the boxes of animals by image and box, and why others could not be read."""
    from ..data.crop import Crop
    from ..encoders.files import encode_files
    from ..integrations.megadetector import ANIMAL

    boxes = {
        f"{printable(photos[one.image].path)}, box {one.place}": one for one in detections if one.category == ANIMAL
    }
    if not boxes:
        raise DataError(f"{given.results} has no box of an animal with enough confidence. Set --min-confidence.")
    files = {name: Crop(folder / photos[one.image].path, one.box) for name, one in boxes.items()}
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


def _decide(
    given: Boxes,
    classifier: "OpenSetClassifier",
    events: Sequence["Event"],
    photos: Sequence["Photo"],
    crops: Mapping["Place", "Feature"],
) -> _Decided:
    """Decide on the boxes and events, with one stream."""
    import numpy as np

    from ..integrations.camera_offsets import read_means, without_offsets
    from ..integrations.camera_traps import decide_events

    _, cameras = np.unique([photos[image].camera for image, _ in crops], return_inverse=True)
    prototypes = classifier.encoder.prototypes(classifier.classes)
    earlier = None if given.states is None else read_means(given.states / _MEANS, prototypes.shape)
    features, means = without_offsets(np.stack([*crops.values()]), cameras, prototypes, earlier)
    comparable = dict(zip(crops, features, strict=True))
    boxes, on_events = decide_events(classifier.engine, events, crops, comparable, given.naming)
    states = {_SEASON: classifier.engine.snapshot(), _MEANS: means.to_bytes()}
    return _Decided(boxes, on_events, states)


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


def _report(photos: Sequence["Photo"], decided: _Decided, errors: Mapping[str, str]) -> dict[str, Any]:
    def count(decisions: Sequence["Decision"]) -> dict[str, Any]:
        labels = Counter(decision.label for decision in decisions if decision.label is not None)
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

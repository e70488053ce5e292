"""Camtrap DP 1.0: write the decisions on camera-trap images as a data package, see https://camtrap-dp.tdwg.org.

A package has the tables `deployments`, `media` and `observations`, and `datapackage.json`. There is an observation for
each box, and one for each event and what it shows. Cameras know no time zone, so you have to say which one they use.
"""

import csv
import io
import json
import mimetypes
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, tzinfo
from pathlib import Path
from typing import Any, NamedTuple

from ..core.decision import Decision
from ..data.prompts import species_names
from ..errors import DataError, InputError
from ..version import __version__
from .camera_traps import Event, EventDecision, Photo, Place
from .megadetector import ANIMAL, PERSON, VEHICLE, Detection, Results

_VERSION = "1.0.2"
_ADDRESS = f"https://raw.githubusercontent.com/tdwg/camtrap-dp/{_VERSION}"
# The columns of each table, in the order of its schema.
COLUMNS = {
    "deployments": (
        "deploymentID", "locationID", "locationName", "latitude", "longitude", "coordinateUncertainty",
        "deploymentStart", "deploymentEnd", "setupBy", "cameraID", "cameraModel", "cameraDelay", "cameraHeight",
        "cameraDepth", "cameraTilt", "cameraHeading", "detectionDistance", "timestampIssues", "baitUse", "featureType",
        "habitat", "deploymentGroups", "deploymentTags", "deploymentComments",
    ),
    "media": (
        "mediaID", "deploymentID", "captureMethod", "timestamp", "filePath", "filePublic", "fileName", "fileMediatype",
        "exifData", "favorite", "mediaComments",
    ),
    "observations": (
        "observationID", "deploymentID", "mediaID", "eventID", "eventStart", "eventEnd", "observationLevel",
        "observationType", "cameraSetupType", "scientificName", "count", "lifeStage", "sex", "behavior", "individualID",
        "individualPositionRadius", "individualPositionAngle", "individualSpeed", "bboxX", "bboxY", "bboxWidth",
        "bboxHeight", "classificationMethod", "classifiedBy", "classificationTimestamp", "classificationProbability",
        "observationTags", "observationComments",
    ),
}  # fmt: skip
FILES = ("datapackage.json", *(f"{name}.csv" for name in COLUMNS))
_TYPES = {PERSON: "human", VEHICLE: "vehicle"}
# The smallest size of a box that the schema allows.
_SMALLEST = 1e-15

Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Season:
    """Everything that a package is made from.

    Attributes:
        title: title of the package and its project.
        results: the results with species.
        detections: its boxes that count.
        events: the events with their decisions.
        boxes: the decisions on the boxes of animals.
        deployments: a row for each camera, as `read_deployments` returns them.
        zone: the time zone of the cameras; None if unknown.
    """

    title: str
    results: Results
    detections: Sequence[Detection]
    events: Sequence[EventDecision]
    boxes: Mapping[Place, Decision]
    deployments: Mapping[str, Row]
    zone: tzinfo | None


class _Shown(NamedTuple):
    """What an observation shows: its type, species, probability, most similar class, and who says so."""

    kind: str
    species: str | None = None
    probability: float | None = None
    nearest: str | None = None
    by: str | None = None


def read_deployments(file: Path, cameras: Iterable[str]) -> dict[str, Row]:
    """Read where the cameras are: a CSV file with columns of the table `deployments` of Camtrap DP.

    It needs `deploymentID`, the name of the camera, `latitude` and `longitude`.
    """
    with file.open(newline="", encoding="utf-8-sig") as lines:
        rows = [*csv.DictReader(lines)]
    needed = ("deploymentID", "latitude", "longitude")
    names = set(rows[0]) if rows else set()
    if not names.issuperset(needed):
        raise DataError(f"{file} must have rows with the columns {', '.join(needed)}.")
    if extra := sorted(map(str, names - set(COLUMNS["deployments"]))):
        raise DataError(f"{file} has columns that Camtrap DP does not have: {', '.join(extra)}. Remove them.")
    found = {row["deploymentID"]: row for row in rows}
    if missing := sorted(set(cameras) - set(found)):
        raise DataError(f"{file} has no row for the camera {missing[0]!r}, the folder of its images.")
    for row in rows:
        for name, largest in (("latitude", 90), ("longitude", 180)):
            try:
                valid = abs(float(row[name])) <= largest
            except ValueError:
                valid = False
            if not valid:
                raise DataError(f"{file}: {name} must be a number of degrees; given: {row[name]!r}")
    return found


def check_photos(photos: Sequence[Photo]) -> None:
    """Raise InputError if no image has a time, or if a path does not begin in the folder of the images."""
    if all(photo.time is None for photo in photos):
        raise InputError("No image has a time, and Camtrap DP needs one. Run MegaDetector with image timestamps.")
    for photo in photos:
        if photo.path.startswith(("/", ".", "~")) or ".." in photo.path or ":" in photo.path:
            raise InputError(
                f"Camtrap DP needs relative paths; given: {photo.path!r}. Run MegaDetector with relative paths."
            )


def package_files(season: Season) -> dict[str, str]:
    """Return the content of the files of a package, by name. Images without a time are left out."""
    events = [decided for decided in season.events if decided.event.start is not None]
    media = [_medium(photo, season.zone) for event, _ in events for photo in event.photos]
    observations = _observations(season, events)
    deployments = _deployments(season, events)
    tables = {"deployments": deployments, "media": media, "observations": observations}
    files = {f"{name}.csv": _table(COLUMNS[name], rows) for name, rows in tables.items()}
    return {"datapackage.json": json.dumps(_description(season, deployments, observations), indent=2), **files}


def _time(moment: datetime | None, zone: tzinfo | None) -> str:
    """Return a time of a camera as ISO 8601 with its zone. Cameras have no microseconds."""
    assert moment is not None
    return moment.replace(tzinfo=zone or UTC).isoformat()


def _deployments(season: Season, events: Sequence[EventDecision]) -> list[Row]:
    """Return a row for each camera. What the user gave stays; start and end are those of its images otherwise."""
    spans: dict[str, list[datetime]] = {}
    for event, _ in events:
        spans.setdefault(event.camera, []).extend(photo.time for photo in event.photos if photo.time is not None)
    rows = []
    for camera, times in spans.items():
        row = {
            "deploymentStart": _time(min(times), season.zone),
            "deploymentEnd": _time(max(times), season.zone),
            "timestampIssues": "true" if season.zone is None else "false",
        }
        rows.append(row | {name: value for name, value in season.deployments[camera].items() if value})
    return rows


def _medium(photo: Photo, zone: tzinfo | None) -> Row:
    name = photo.path.rpartition("/")[2]
    return {
        "mediaID": photo.path,
        "deploymentID": photo.camera,
        "timestamp": _time(photo.time, zone),
        "filePath": photo.path,
        "filePublic": "false",
        "fileName": name,
        "fileMediatype": mimetypes.guess_type(name)[0] or "image/jpeg",
    }


def _observations(season: Season, events: Sequence[EventDecision]) -> list[Row]:
    """Return the observations of each event: first those of its images, then those of the whole event."""
    of_image: dict[int, list[Detection]] = {}
    for detection in season.detections:
        of_image.setdefault(detection.image, []).append(detection)
    rows = []
    now = f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}"
    for event, decision in events:
        common = {
            "deploymentID": event.camera,
            "eventID": event.name,
            "eventStart": _time(event.start, season.zone),
            "eventEnd": _time(event.end, season.zone),
            "classificationMethod": "machine",
            "classificationTimestamp": now,
        }
        for photo in event.photos:
            for row in _of_image(season, photo, of_image.get(photo.image, [])):
                rows.append(common | {"mediaID": photo.path, "observationLevel": "media"} | row)
        for row in _of_event(season, event, decision, of_image):
            rows.append(common | {"observationLevel": "event"} | row)
    return rows


def _of_image(season: Season, photo: Photo, found: Sequence[Detection]) -> list[Row]:
    """Return a row for each box of an image, or one that says that it has none."""
    rows = []
    for detection in found:
        decision = season.boxes.get((detection.image, detection.place))
        shown = _what(season, detection.category, decision, detection.confidence)
        row = {"observationID": f"{photo.path}#{detection.place}", **_box(detection), **_shown(shown)}
        rows.append(row)
    if rows:
        return rows
    entry = season.results["images"][photo.image]
    # The detector could not read it, or it is a video, whose frames are not classified.
    unread = entry.get("detections") is None or any("frame_number" in one for one in entry["detections"])
    shown = _Shown("unclassified" if unread else "blank", by=_detector(season))
    return [{"observationID": photo.path, **_shown(shown)}]


def _of_event(
    season: Season, event: Event, decision: Decision | None, of_image: Mapping[int, Sequence[Detection]]
) -> list[Row]:
    """Return a row for each kind of thing that an event shows. The count is the largest number in one image."""
    counts: Counter[str] = Counter()
    for photo in event.photos:
        counts |= Counter(detection.category for detection in of_image.get(photo.image, ()))
    rows = []
    for category, count in sorted(counts.items()):
        shown = _what(season, category, decision)
        rows.append({"observationID": f"{event.name}#{category}", "count": count, **_shown(shown)})
    return rows or [{"observationID": f"{event.name}#blank", **_shown(_Shown("blank", by=_detector(season)))}]


def _what(season: Season, category: str, decision: Decision | None, confidence: float | None = None) -> _Shown:
    """Return what is shown: what was decided on an animal, and otherwise what the detector says."""
    if category != ANIMAL:
        return _Shown(_TYPES.get(category, "unknown"), probability=confidence, by=_detector(season))
    if decision is None:
        return _Shown("unclassified", probability=confidence, by=_detector(season))
    by = str(season.results["info"]["classifier"])
    nearest = str(season.results["classification_categories"][str(decision.index)])
    if decision.known:
        return _Shown("animal", species_names(nearest)[1], 1 - decision.p_unknown, by=by)
    if decision.label is not None:
        return _Shown("animal", species_names(decision.label)[1], decision.p_unknown, by=by)
    return _Shown("unknown", None, decision.p_unknown, nearest, by)


def _detector(season: Season) -> str:
    return str(season.results.get("info", {}).get("detector") or "MegaDetector")


def _shown(shown: _Shown) -> Row:
    return {
        "observationType": shown.kind,
        "scientificName": shown.species,
        "classifiedBy": shown.by,
        "classificationProbability": None if shown.probability is None else round(shown.probability, 4),
        "observationTags": None if shown.nearest is None else f"detected:animal | nearestClass:{shown.nearest}",
    }


def _box(detection: Detection) -> Row:
    """Return the box, cut to the image."""
    left, top = (min(max(value, 0.0), 1.0) for value in detection.box[:2])
    width = min(max(detection.box.width, _SMALLEST), 1.0)
    height = min(max(detection.box.height, _SMALLEST), 1.0)
    return {"bboxX": left, "bboxY": top, "bboxWidth": width, "bboxHeight": height}


def _description(season: Season, deployments: Sequence[Row], observations: Sequence[Row]) -> dict[str, Any]:
    """Return the content of datapackage.json. Its authors complete contributors and project."""
    resources = [
        {
            "name": name,
            "path": f"{name}.csv",
            "profile": "tabular-data-resource",
            "format": "csv",
            "mediatype": "text/csv",
            "encoding": "utf-8",
            "schema": f"{_ADDRESS}/{name}-table-schema.json",
        }
        for name in COLUMNS
    ]
    points = [[float(row["longitude"]), float(row["latitude"])] for row in deployments]
    species = dict.fromkeys(row["scientificName"] for row in observations if row["scientificName"])
    return {
        "resources": resources,
        "profile": f"{_ADDRESS}/camtrap-dp-profile.json",
        "created": f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}",
        "title": season.title,
        "contributors": [{"title": "unknown", "role": "contributor"}],
        "sources": [{"title": "ProtoDCS", "version": __version__}],
        "project": {
            "title": season.title,
            "samplingDesign": "opportunistic",
            "captureMethod": ["activityDetection"],
            "individualAnimals": False,
            "observationLevel": ["media", "event"],
        },
        "spatial": {"type": "MultiPoint", "coordinates": points},
        "temporal": {
            "start": min(row["deploymentStart"] for row in deployments)[:10],
            "end": max(row["deploymentEnd"] for row in deployments)[:10],
        },
        "taxonomic": [{"scientificName": name} for name in species],
    }


def _table(columns: Sequence[str], rows: Iterable[Row]) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()

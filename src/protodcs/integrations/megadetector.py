"""MegaDetector: read results files of detectors for camera traps, and add species to their boxes.

The format is that of https://lila.science/megadetector-output-format, which Timelapse and AddaxAI read too. All that is
not about species stays as it is.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from ..core.decision import Decision
from ..data.crop import Box
from ..errors import DataError
from ..version import __version__

ANIMAL, PERSON, VEHICLE = "animal", "person", "vehicle"
UNKNOWN = "unknown"
# For files that name no threshold. It is the usual one of MegaDetector 5 and later.
USUAL_CONFIDENCE = 0.2

Results = dict[str, Any]


class Detection(NamedTuple):
    """A box that a detector has found.

    Attributes:
        image: position of its image in the results.
        place: its position among the boxes of this image.
        category: "animal", "person", "vehicle", or another name of the file.
        confidence: that of the detector, 0 to 1.
        box: the box.
    """

    image: int
    place: int
    category: str
    confidence: float
    box: Box


def read_results(file: Path) -> Results:
    """Read a results file.

    Raises:
        DataError: the file is not of this format; the message names the place.
    """
    try:
        results = json.loads(file.read_bytes())
    except ValueError as problem:
        raise DataError(f"{file} is not JSON: {problem}") from None
    if not isinstance(results, dict) or not isinstance(results.get("images"), list):
        raise DataError(f"{file} has no list `images`. Give a results file of MegaDetector.")
    if not isinstance(results.get("detection_categories"), dict):
        raise DataError(f"{file} has no `detection_categories`. Give a results file of MegaDetector.")
    if not isinstance(results.get("info", {}), dict):
        raise DataError(f"{file}: `info` is no object")
    for number, image in enumerate(results["images"]):
        if not isinstance(image, dict) or not isinstance(image.get("file"), str):
            raise DataError(f"{file}: image {number} has no `file`")
        detections = image.get("detections") or []
        if not isinstance(detections, list) or not all(map(_is_detection, detections)):
            raise DataError(f"{file}: {image['file']!r} has a detection without `category`, `conf` or `bbox`")
    return results


def _is_detection(value: Any) -> bool:
    if not isinstance(value, dict) or not isinstance(value.get("category"), str):
        return False
    box = value.get("bbox")
    numbers = [value.get("conf"), *(box if isinstance(box, list) and len(box) == 4 else [None])]
    # JSON of Python may have NaN, which is no number between 0 and 1 either.
    return all(isinstance(number, int | float) and -1 < number < 2 for number in numbers)


def image_path(image: Mapping[str, Any]) -> str:
    """Return the path of an image as the file has it, with slashes."""
    return str(image["file"]).replace("\\", "/")


def usual_confidence(results: Results) -> float:
    """Return the confidence from which a box counts: that of the file if it names one, otherwise 0.2."""
    metadata = results.get("info", {}).get("detector_metadata")
    given = metadata.get("typical_detection_threshold") if isinstance(metadata, dict) else None
    return float(given) if isinstance(given, int | float) and 0 <= given <= 1 else USUAL_CONFIDENCE


def detections(results: Results, confidence: float) -> list[Detection]:
    """Return the boxes with at least this confidence, in order. Frames of videos are left out."""
    names = results["detection_categories"]
    return [
        Detection(image, place, str(names.get(given["category"], "")), float(given["conf"]), Box(*given["bbox"]))
        for image, entry in enumerate(results["images"])
        for place, given in enumerate(entry.get("detections") or [])
        if given["conf"] >= confidence and "frame_number" not in given
    ]


def with_species(
    results: Results,
    decisions: Mapping[tuple[int, int], Decision],
    classes: Sequence[str],
    classifier: str,
) -> Results:
    """Return a copy of results, which have no classifications yet, with the decisions on their boxes.

    Args:
        results: as `read_results` returns them.
        decisions: the decision on a box, by the positions of image and box. The label of an unknown one may be the name
            of a cluster, which becomes a category.
        classes: the class names.
        classifier: name of the encoder or model, for `info`.
    """
    named = sorted({decision.label for decision in decisions.values() if not decision.known and decision.label})
    names = [*classes, UNKNOWN, *(name for name in named if name not in classes)]
    images = []
    for number, image in enumerate(results["images"]):
        found = image.get("detections")
        if found:
            rows = [_classified(row, decisions.get((number, place)), names) for place, row in enumerate(found)]
            image = {**image, "detections": rows}
        images.append(image)
    about = {
        "classifier": f"ProtoDCS {__version__}, {classifier}",
        "classification_completion_time": f"{datetime.now(UTC):%Y-%m-%d %H:%M:%S}",
    }
    info = {"format_version": "1.5", **results.get("info", {}), **about}
    categories = {str(number): name for number, name in enumerate(names)}
    return {**results, "info": info, "classification_categories": categories, "images": images}


def unknown_boxes(results: Results) -> dict[Detection, bool]:
    """Return the boxes that `with_species` has classified, and whether the decision is unknown.

    Raises:
        DataError: the results have no such boxes.
    """
    names = results.get("classification_categories") or {}
    found = {}
    for detection in detections(results, 0):
        row = results["images"][detection.image]["detections"][detection.place].get("classifications")
        if row:
            found[detection] = names.get(row[0][0]) == UNKNOWN
    if not found:
        raise DataError("The file has no classified boxes. Run `protodcs classify --megadetector` first.")
    return found


def _classified(detection: Mapping[str, Any], decision: Decision | None, names: Sequence[str]) -> Mapping[str, Any]:
    """Return a detection with the decision first, and then the nearest class or "unknown", which is less probable."""
    if decision is None:
        return detection
    nearest = [str(decision.index), round(1 - decision.p_unknown, 4)]
    outside = UNKNOWN if decision.known else decision.label or UNKNOWN
    other = [str(names.index(outside)), round(decision.p_unknown, 4)]
    return {**detection, "classifications": [nearest, other] if decision.known else [other, nearest]}

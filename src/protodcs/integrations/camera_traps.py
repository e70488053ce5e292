"""Camera traps: which images are of one camera and one event, and the decisions about their animals.

An event is a sequence of images of one camera, each at most some seconds after the one before. Its animal gets one
decision, on the mean of the features of its crops.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ..arrays import Feature
from ..core.base import FeatureMethod
from ..core.decision import Decision
from ..data.exif import capture_time, parse_time
from .megadetector import Results, image_path

# Folders that cameras make on a memory card: DCIM, and three digits with five letters or digits.
_OF_THE_CARD = re.compile(r"DCIM|\d{3}[A-Z0-9_]{5}", re.IGNORECASE)

# The position of an image in the results, and that of a box among those of the image.
Place = tuple[int, int]
# The name of the cluster that an unknown feature belongs to, if it has one.
Naming = Callable[[Feature], str | None]


class Photo(NamedTuple):
    """An image of a results file.

    Attributes:
        image: its position in the results.
        path: its path, with slashes.
        camera: the camera that took it.
        time: when, by the clock of the camera; None if unknown.
    """

    image: int
    path: str
    camera: str
    time: datetime | None


class Event(NamedTuple):
    """Images of one camera that follow each other. An image without a time is an event of its own.

    Attributes:
        name: camera and number.
        camera: the camera.
        photos: its images, by time.
    """

    name: str
    camera: str
    photos: tuple[Photo, ...]

    @property
    def start(self) -> datetime | None:
        """When its first image was taken."""
        return self.photos[0].time

    @property
    def end(self) -> datetime | None:
        """When its last image was taken."""
        return self.photos[-1].time


class EventDecision(NamedTuple):
    """An event and the decision about its animals; None if it has none that could be read."""

    event: Event
    decision: Decision | None


def camera_of(path: str) -> str:
    """Return the folder of an image, without the folders that a camera makes on its memory card.

    >>> camera_of("north/A01/DCIM/100RECNX/IMG_0001.JPG")
    'north/A01'
    """
    folders = path.split("/")[:-1]
    while folders and _OF_THE_CARD.fullmatch(folders[-1]):
        folders.pop()
    return "/".join(folders)


def photos(results: Results, folder: Path) -> list[Photo]:
    """Return the images of a results file, with their cameras and times.

    Args:
        results: as `megadetector.read_results` returns them.
        folder: the folder of the images. It is read if the results have no `datetime`.
    """
    found = []
    for number, image in enumerate(results["images"]):
        path = image_path(image)
        given = image.get("datetime")
        time = parse_time(given) if isinstance(given, str) else None
        found.append(Photo(number, path, camera_of(path), time or capture_time(folder / path)))
    return found


def group_events(taken: Sequence[Photo], seconds: float) -> list[Event]:
    """Return the events by camera and time.

    Args:
        taken: the images.
        seconds: largest time between two images of one event.
    """
    cameras: dict[str, list[Photo]] = {}
    for photo in taken:
        cameras.setdefault(photo.camera, []).append(photo)
    return [
        Event(f"{camera}#{number}", camera, tuple(group))
        for camera, of_camera in sorted(cameras.items())
        for number, group in enumerate(_sequences(of_camera, timedelta(seconds=seconds)), 1)
    ]


def _sequences(taken: Sequence[Photo], gap: timedelta) -> Iterator[list[Photo]]:
    """Yield the images of one camera in groups without a longer gap. Images without a time come last, one by one."""
    group: list[Photo] = []
    timed = [(photo.time, photo) for photo in taken if photo.time is not None]
    latest: datetime | None = None
    for time, photo in sorted(timed, key=lambda pair: (pair[0], pair[1].path)):
        if latest is not None and time - latest > gap:
            yield group
            group = []
        group.append(photo)
        latest = time
    if group:
        yield group
    yield from ([photo] for photo in taken if photo.time is None)


def decide_events(
    engine: FeatureMethod,
    events: Sequence[Event],
    crops: Mapping[Place, Feature],
    comparable: Mapping[Place, Feature],
    naming: Naming,
) -> tuple[dict[Place, Decision], list[EventDecision]]:
    """Learn from all crops in the order of their times, and return the decisions on the crops and on the events.

    The label of an unknown animal is the name of its cluster, or None.

    Args:
        engine: the stream.
        events: the events.
        crops: unit features by image and box; clusters have them.
        comparable: the same without what their cameras add; the engine has them.
        naming: names clusters of unknown animals.
    """
    of_image: dict[int, list[Place]] = {}
    for place in crops:
        of_image.setdefault(place[0], []).append(place)
    of_event = {event: [place for photo in event.photos for place in of_image.get(photo.image, ())] for event in events}
    # Those without a time come last.
    by_time = sorted(events, key=lambda event: (str(event.start or "~"), event.name))
    places = [place for event in by_time for place in of_event[event]]
    decisions = engine.observe_many(np.stack([comparable[place] for place in places]), two_pass=True)
    named = {place: _named(one, crops[place], naming) for place, one in zip(places, decisions, strict=True)}
    decided = []
    for event, group in of_event.items():
        if not group:
            decided.append(EventDecision(event, None))
            continue
        decision = engine.peek(_mean(comparable, group)).without_learning()
        decided.append(EventDecision(event, _named(decision, _mean(crops, group), naming)))
    return named, decided


def _mean(features: Mapping[Place, Feature], places: Sequence[Place]) -> Feature:
    mean = np.mean([features[place] for place in places], axis=0)
    return np.asarray(mean / np.linalg.norm(mean), dtype=np.float32)


def _named(decision: Decision, feature: Feature, naming: Naming) -> Decision:
    return decision if decision.known else replace(decision, label=naming(feature))

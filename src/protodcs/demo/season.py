"""A made-up season of camera traps, with the files that a detector and its user have.

Four cameras see drawn animals, in sequences of one to five images. Two of the twelve listed species are on 71 % of the
images of animals, and one species is on no list. Each camera has its own light, as in `SHIFTS`. The same arguments make
the same files.
"""

import csv
import json
from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from ..arrays import Pixels, Singles
from ..data.exif import DATE_TIME_ORIGINAL, EXIF_FOLDER
from .drawing import COLOURS, cutout, new_palette
from .shifts import shifted

# The most frequent first.
SPECIES = (
    "butterfly", "fish", "cat", "leaf", "mushroom", "flower", "tree", "moon", "star", "cloud", "boat", "key"
)  # fmt: skip
UNLISTED = "spider"
CAMERAS = {"A01": "clean", "A02": "darkness", "B01": "fog", "B02": "camera"}
PERSON, VEHICLE, NOTHING = "person", "vehicle", "nothing"
# Shares of the events.
SHARES = {UNLISTED: 0.05, PERSON: 0.04, VEHICLE: 0.02, NOTHING: 0.08}
_FREQUENT = (0.42, 0.29)
_CATEGORIES = {"1": "animal", "2": PERSON, "3": VEHICLE}
_WIDTH, _HEIGHT = 320, 240
_START, _DAYS = datetime(2025, 5, 1, tzinfo=UTC), 90
# Events are at least so far apart, and images of one event so near. Seconds.
_BETWEEN, _WITHIN = 300, 4
_MOST_IMAGES = 5

Row = tuple[object, ...]


class _Event(NamedTuple):
    """What happens before a camera."""

    number: int
    camera: str
    time: datetime
    images: int
    shows: str


def make_season(folder: Path, events: int = 600, seed: int = 0) -> int:
    """Write a season into a folder, which is created, and return the number of images.

    The folder has a subfolder of images for each camera, and the boxes of a detector: `results.json`, and its images of
    each half of the season in `first-half.json` and `second-half.json`. `species.txt` has the listed species,
    `deployments.csv` the places of the cameras, and `truth.csv` what each image shows.
    """
    scenes = {camera: _scene(np.random.default_rng([seed, 1, place])) for place, camera in enumerate(CAMERAS)}
    images: list[dict[str, Any]] = []
    truth: list[Row] = []
    for event in _plan(events, seed):
        rng = np.random.default_rng([seed, 2, event.number])
        animal = None if event.shows in SHARES and event.shows != UNLISTED else _Animal(event.shows, rng)
        for place in range(event.images):
            time = event.time + timedelta(seconds=_WITHIN * place)
            file = f"{event.camera}/{time:%Y%m%d-%H%M%S}.jpg"
            pixels, detections = _photo(event, scenes[event.camera], animal, rng)
            _save(pixels, folder / file, time)
            images.append({"file": file, "detections": detections})
            truth.append((file, event.number, event.shows))
    info = {"format_version": "1.5", "detector": "made-up", "detection_completion_time": "2025-08-01 12:00:00"}
    middle = f"{_START + timedelta(days=_DAYS / 2):%Y%m%d}"
    late = [Path(image["file"]).name >= middle for image in images]
    parts = {
        "results": images,
        "first-half": [image for image, is_late in zip(images, late, strict=True) if not is_late],
        "second-half": [image for image, is_late in zip(images, late, strict=True) if is_late],
    }
    for name, part in parts.items():
        results = {"info": info, "detection_categories": _CATEGORIES, "images": part}
        (folder / f"{name}.json").write_text(json.dumps(results, indent=1))
    (folder / "species.txt").write_text("".join(f"{name}\n" for name in SPECIES))
    _write(folder / "truth.csv", [("file", "event", "shows"), *truth])
    places = [(camera, 50 + place / 100, 5 - place / 100) for place, camera in enumerate(CAMERAS)]
    _write(folder / "deployments.csv", [("deploymentID", "latitude", "longitude"), *places])
    return len(images)


def _plan(events: int, seed: int) -> list[_Event]:
    """Return the events by camera and time."""
    rng = np.random.default_rng([seed, 0])
    rest = (1 - sum(_FREQUENT)) / (len(SPECIES) - len(_FREQUENT))
    listed = [*_FREQUENT, *[rest] * (len(SPECIES) - len(_FREQUENT))]
    shown = [name for name, share in SHARES.items() for _ in range(round(share * events))]
    shown += rng.choice(SPECIES, size=events - len(shown), p=listed).tolist()
    rng.shuffle(shown)
    cameras = rng.choice(list(CAMERAS), size=events).tolist()
    slots = rng.choice(_DAYS * 24 * 3600 // _BETWEEN, size=events, replace=False)
    sizes = rng.integers(1, _MOST_IMAGES + 1, size=events)
    made = [
        _Event(number, cameras[number], _START + timedelta(seconds=_BETWEEN * int(slot)), int(size), shown[number])
        for number, (slot, size) in enumerate(zip(np.sort(slots), sizes, strict=True))
    ]
    return sorted(made, key=lambda event: (event.camera, event.time))


def _scene(rng: np.random.Generator) -> Singles:
    """Return the ground that a camera always sees."""
    size = (_WIDTH, _HEIGHT)
    coarse = rng.integers(60, 200, size=(7, 9, 3), dtype=np.uint8)
    fine = rng.integers(0, 256, size=(_HEIGHT // 6, _WIDTH // 6), dtype=np.uint8)
    ground = np.asarray(Image.fromarray(coarse).resize(size, Image.Resampling.BICUBIC), dtype=np.float32)
    grain = np.asarray(Image.fromarray(fine).resize(size, Image.Resampling.BICUBIC), dtype=np.float32)
    return np.asarray(ground + 0.2 * (grain[..., None] - 128), dtype=np.float32)


class _Animal:
    """One animal during an event: its colours and texture stay, its place and pose change."""

    def __init__(self, kind: str, rng: np.random.Generator):
        self.kind = kind
        self.palette = new_palette(COLOURS[str(rng.choice(list(COLOURS)))], rng)
        self.texture = int(rng.integers(2**31))
        self.side = int(rng.integers(75, 160))
        self.room = _HEIGHT - self.side, _WIDTH - self.side
        self.place = rng.uniform((0, 0), self.room)

    def draw(self, scene: Singles, rng: np.random.Generator) -> list[float]:
        """Draw the animal at its next place, and return its box as a detector does: left, top, width, height."""
        painted, opacity = cutout(self.kind, self.palette, 0.5, rng, np.random.default_rng(self.texture))
        size = (self.side, self.side)
        opaque = np.asarray(Image.fromarray(np.uint8(255 * opacity[..., 0])).resize(size)) / 255
        colours = np.asarray(Image.fromarray(np.clip(painted, 0, 255).astype(np.uint8)).resize(size))
        self.place = np.clip(self.place + rng.normal(scale=16, size=2), 0, self.room)
        top, left = (int(value) for value in self.place)
        part = scene[top : top + self.side, left : left + self.side]
        part[:] = part * (1 - opaque[..., None]) + colours * opaque[..., None]
        rows, columns = np.nonzero(opaque > 0.3)
        edges = np.array([left + columns.min(), top + rows.min(), left + columns.max() + 1, top + rows.max() + 1])
        loose = edges + rng.normal(scale=0.02 * self.side, size=4)
        x, y, right, bottom = np.clip(loose / (_WIDTH, _HEIGHT, _WIDTH, _HEIGHT), 0, 1)
        return [x, y, right - x, bottom - y]


def _photo(
    event: _Event, ground: Singles, animal: _Animal | None, rng: np.random.Generator
) -> tuple[Pixels, list[dict[str, Any]]]:
    """Return the pixels of one image, and its detections."""
    scene = np.asarray(ground * rng.uniform(0.95, 1.05), dtype=np.float32)
    detections = []
    if animal is not None:
        detections.append(_detection("1", rng.uniform(0.4, 0.97), animal.draw(scene, rng)))
    elif event.shows != NOTHING:
        x, y, width, height = *rng.uniform(0, 0.6, size=2), 0.2, 0.35
        rows = slice(int(y * _HEIGHT), int((y + height) * _HEIGHT))
        scene[rows, int(x * _WIDTH) : int((x + width) * _WIDTH)] = rng.uniform(0, 255, size=3)
        category = "2" if event.shows == PERSON else "3"
        detections.append(_detection(category, rng.uniform(0.5, 0.99), [x, y, width, height]))
    if rng.random() < 0.3:
        # A box of nothing, below the usual confidence.
        detections.append(_detection("1", rng.uniform(0.01, 0.15), [*rng.uniform(0, 0.7, size=2), 0.15, 0.15]))
    pixels = np.clip(scene + 4 * rng.standard_normal(scene.shape, dtype=np.float32), 0, 255).astype(np.uint8)
    return shifted(pixels, CAMERAS[event.camera], rng), detections


def _detection(category: str, confidence: float, box: Iterable[float]) -> dict[str, Any]:
    return {
        "category": category,
        "conf": round(float(confidence), 3),
        "bbox": [round(float(value), 4) for value in box],
    }


def _save(pixels: Pixels, file: Path, time: datetime) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    exif = Image.Exif()
    exif.get_ifd(EXIF_FOLDER)[DATE_TIME_ORIGINAL] = f"{time:%Y:%m:%d %H:%M:%S}"
    Image.fromarray(pixels).save(file, quality=85, exif=exif)


def _write(file: Path, rows: Iterable[Row]) -> None:
    with file.open("w", newline="") as lines:
        csv.writer(lines, lineterminator="\n").writerows(rows)

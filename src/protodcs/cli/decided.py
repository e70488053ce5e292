"""Decisions that commands start from: a folder of images that is decided now, or a file of earlier decisions."""

import csv
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ..errors import DataError, InputError
from ..integrations.samples import ReviewSample
from .screen import given_classes, given_vocabulary, printable, progress

if TYPE_CHECKING:
    from ..arrays import Feature, Features, Floats
    from ..data.crop import Crop
    from ..encoders.base import Encoder
    from ..encoders.files import EncodedFiles
    from ..integrations.camera_traps import Naming

ENDINGS = (".csv", ".jsonl", ".ndjson")


class Decided(NamedTuple):
    """Samples with their decisions.

    Attributes:
        samples: the samples.
        files: the path of each, by the name in `samples`.
        features: (n, d); None if they come from a file of decisions.
        confidence: (n,) probability of the best class; None if they come from a file of decisions.
        classes: the class names.
    """

    samples: list[ReviewSample]
    files: Mapping[str, Path]
    features: "Features | None"
    confidence: "Floats | None"
    classes: tuple[str, ...]


def decide_folder(folder: Path, classes: str, model: str, quiet: bool, vocabulary: str = "general") -> Decided:
    """Encode and decide all images of a folder. Files that are no images are left out."""
    from ..classifier import OpenSetClassifier
    from ..encoders import load

    encoder = load(model)
    encoded, files = encode_folder(folder, encoder, quiet)
    names = given_classes(classes)
    engine = OpenSetClassifier.with_encoder(encoder, names, vocabulary=given_vocabulary(vocabulary)).engine
    decisions = engine.observe_many(encoded.features, scores=True, two_pass=True)
    samples = [
        ReviewSample(name, decision.label, names[decision.index], decision.p_unknown)
        for name, decision in zip(encoded.names, decisions, strict=True)
    ]
    confidence = None if decisions.scores is None else engine.probabilities(decisions.scores).max(axis=1)
    return Decided(samples, files, encoded.features, confidence, names)


def cluster_names(file: Path | None) -> "Naming":
    """Return a function that names the cluster of an unknown feature.

    Args:
        file: clusters.state of `protodcs discover --name`; None: no cluster has a name.
    """
    if file is None:
        return lambda feature: None
    from ..discovery import Discovery

    found = Discovery.load(file)

    def name_of(feature: "Feature") -> str | None:
        cluster = found.nearest(feature)
        return None if cluster is None else found.name_of(cluster)

    return name_of


def encode_folder(folder: Path, encoder: "Encoder", quiet: bool) -> "tuple[EncodedFiles, dict[str, Path]]":
    """Return the features of all images of a folder, and its files by name."""
    from ..data.readers.folder import image_files

    files = {printable(file): folder / file for file in image_files(folder)}
    return encode(files, encoder, quiet), files


def encode(files: Mapping[str, "Path | Crop"], encoder: "Encoder", quiet: bool) -> "EncodedFiles":
    """Return the features of image files or crops, with a progress bar."""
    from ..encoders.files import encode_files

    with progress(quiet) as bar:
        task = bar.add_task("images", total=len(files))
        return encode_files(encoder, files, None, lambda count: bar.advance(task, count))


def read_decisions(file: Path, folder: Path | None) -> Decided:
    """Read decisions that `protodcs classify` or an export of the decision log wrote.

    Args:
        file: a CSV file, or JSON lines.
        folder: where the images are; None: beside the file.
    """
    samples = []
    for row in _rows(file):
        name, nearest = row.get("file") or row.get("image_ref"), row.get("nearest_class")
        try:
            if name and nearest:
                samples.append(ReviewSample(str(name), row.get("label") or None, str(nearest), float(row["p_unknown"])))
        except (KeyError, TypeError, ValueError):
            raise DataError(f"{file}: the row of {printable(str(name))!r} has no number `p_unknown`.") from None
    if not samples:
        raise DataError(f"{file} has no decision with `file` or `image_ref`, `nearest_class` and `p_unknown`.")
    base = file.parent if folder is None else folder
    classes = dict.fromkeys(sample.nearest_class for sample in samples)
    return Decided(samples, {sample.file: base / sample.file for sample in samples}, None, None, tuple(classes))


def _rows(file: Path) -> Iterator[dict[str, Any]]:
    if file.suffix not in ENDINGS:
        raise InputError(f"a file of decisions must end with {', '.join(ENDINGS)}; given: {file.name!r}")
    with file.open(newline="", encoding="utf-8") as lines:
        if file.suffix == ".csv":
            yield from csv.DictReader(lines)
            return
        for number, line in enumerate(lines, 1):
            try:
                row = json.loads(line)
            except ValueError:
                raise DataError(f"{file}: line {number} is not JSON") from None
            if isinstance(row, dict):
                yield row

"""A feature pack of your own: image sets through an encoder into one file that `feature_pack` reads.

Each set is a file beside the pack until all are done, so an interrupted run continues with the next set.
"""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load_file, save

from ..arrays import Integers
from ..atomic_io import replace_file
from ..data import open_source
from ..data.prompts import class_names
from ..data.source import ImageSource
from ..encoders import Encoder
from ..errors import InputError
from .feature_pack import GENERAL, KNOWN, TEXT, UNKNOWN_SETS, VOCABULARY

Progress = Callable[[str, int, int], None]


def build(
    file: Path,
    encoder: Encoder,
    encoder_name: str,
    known: str,
    classes: str,
    unknown: Mapping[str, str],
    per_class: int | None,
    progress: Progress,
) -> dict[str, int]:
    """Write a feature pack; returns the number of images of each set.

    Args:
        file: the pack, a safetensors file.
        encoder: encodes images and class names.
        encoder_name: of the encoder, for the rows of results.
        known: dataset with the known classes, by name or path.
        classes: class names of the known set, as `class_names` takes them.
        unknown: datasets by their names in the pack, see `UNKNOWN_SETS`.
        per_class: images of each known class, at most; None: all.
        progress: gets the set, and how many of its images are done.
    """
    strange = sorted(set(unknown) - set(UNKNOWN_SETS))
    if strange:
        raise InputError(f"A pack has no unknown set {strange[0]!r}. Choose from {', '.join(UNKNOWN_SETS)}.")
    names = class_names(classes)
    source = open_source(known)
    if len(source.classes) != len(names):
        raise InputError(
            f"{known} has {len(source.classes)} classes, and {classes} has {len(names)} names. Give the names of its "
            "classes, in the order of its labels."
        )
    parts = file.with_name(file.name + ".parts")
    parts.mkdir(parents=True, exist_ok=True)
    rows = _first_of_each(source.labels, per_class)
    arrays = _encoded(parts, KNOWN, source, rows, encoder, progress)
    arrays[TEXT] = encoder.prototypes(names).astype(np.float16)
    general = encoder.vocabulary(GENERAL, names)
    if general is not None:
        arrays[VOCABULARY] = general.rows.astype(np.float16)
    counts = {KNOWN: len(rows)}
    for name, place in unknown.items():
        other = open_source(place)
        labels = other.labels if len(other.classes) else np.arange(len(other)) % 2
        found = _encoded(parts, name, other, np.arange(len(other)), encoder, progress)
        # Parameters are chosen on every second image, and judged on the others.
        for part, chosen in (("val", slice(0, None, 2)), ("test", slice(1, None, 2))):
            arrays[f"{name}_{part}_x"] = found[f"{name}_x"][chosen]
            arrays[f"{name}_{part}_y"] = labels[chosen].astype(np.int32)
        counts[name] = len(other)
    about = {"encoder": encoder_name, "temperature": repr(1.0 / encoder.logit_scale), "classes": json.dumps(names)}
    replace_file(file, save(arrays, about))
    for part_file in parts.iterdir():
        part_file.unlink()
    parts.rmdir()
    return counts


def _first_of_each(labels: Integers, most: int | None) -> Integers:
    """Return the places of the first images of each class, in order."""
    if most is None:
        return np.arange(len(labels))
    return np.sort(np.concatenate([np.flatnonzero(labels == label)[:most] for label in np.unique(labels)]))


def _encoded(
    parts: Path, name: str, source: ImageSource, rows: Integers, encoder: Encoder, progress: Progress
) -> dict[str, NDArray[np.generic]]:
    """Return features and labels of images; those of an earlier run if they are the same."""
    words = json.dumps([source.fingerprint, encoder.fingerprint, rows.tolist()])
    file = parts / f"{name}-{hashlib.sha256(words.encode()).hexdigest()[:16]}.safetensors"
    try:
        return dict(load_file(file))
    except (FileNotFoundError, SafetensorError):
        pass
    features = []
    for batch in _batches(rows, encoder.batch_size):
        features.append(encoder.encode_pixels(source.read(batch)).astype(np.float16))
        progress(name, sum(len(part) for part in features), len(rows))
    arrays: dict[str, NDArray[np.generic]] = {f"{name}_x": np.concatenate(features)}
    arrays[f"{name}_y"] = source.labels[rows].astype(np.int32)
    replace_file(file, save(arrays))
    return arrays


def _batches(rows: Integers, size: int) -> Sequence[list[int]]:
    return [rows[first : first + size].tolist() for first in range(0, len(rows), size)]

"""A stream fixed as data: which images, in which order, under which corruption, with a hash over all of it.

The file is text that can be compared line by line: a header of one line, then one line per sample. A manifest may come
from elsewhere, so a damaged or hostile file always raises `DataError`, never another exception.
"""

import hashlib
import os
import stat
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from ...arrays import Integers
from ...atomic_io import replace_file
from ...errors import DataError
from ..source import ImageSource
from . import header, listing
from .header import Option, Origin, Segment, require

LARGEST_FILE = header.LONGEST_HEADER + header.MOST_SAMPLES * listing.LONGEST_LINE
UNKNOWN = -1


@dataclass(frozen=True, eq=False)
class Manifest:
    """A stream of samples; whoever holds one holds a valid one, for it is checked whole when it is made.

    Attributes:
        protocol: the rule that made the stream.
        options: every option of that rule, fractions as text such as "1/10". Not to be changed.
        seed: what the chance in it came from.
        classes: the known classes, in label order.
        sources: where the images come from, in the order of their numbers.
        segments: the stretches of the stream, end to end.
        source: (N,) int64, read-only, the number of each sample's source.
        index: (N,) int64, read-only, its place in that source.
        label: (N,) int64, read-only, its known class, or -1 for unknown.
    """

    protocol: str
    options: Mapping[str, Option]
    seed: int
    classes: tuple[str, ...]
    sources: tuple[Origin, ...]
    segments: tuple[Segment, ...]
    source: Integers
    index: Integers
    label: Integers

    def __post_init__(self) -> None:
        if isinstance(self.options, Mapping):
            object.__setattr__(self, "options", dict(self.options))
        for name in ("classes", "sources", "segments"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        for name in ("source", "index", "label"):
            object.__setattr__(self, name, _column(name, getattr(self, name)))
        header.check_protocol(self.protocol, self.options, self.seed)
        header.check_classes(self.classes)
        header.check_origins(self.sources)
        header.check_segments(self.segments, len(self.label))
        self._check_rows()

    def __len__(self) -> int:
        return len(self.label)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Manifest) and self.hash == other.hash

    def __hash__(self) -> int:
        return hash(self.hash)

    @cached_property
    def hash(self) -> str:
        """SHA-256, in hexadecimal, of the whole file: what a result names its stream by."""
        return hashlib.sha256(self.to_bytes()).hexdigest()

    def segment_of(self, place: int) -> Segment:
        """The segment in which the sample at `place`, from 0, stands."""
        if not 0 <= place < len(self):
            raise DataError(f"the stream has the samples 0 to {len(self) - 1}; asked for: {place}")
        return self.segments[bisect_right([segment.start for segment in self.segments], place) - 1]

    def to_bytes(self) -> bytes:
        """The content of the file. The same stream gives the same bytes on every machine."""
        text = listing.write(np.stack([self.source, self.index, self.label], axis=1))
        content = {
            "protocol": self.protocol,
            "options": self.options,
            "seed": self.seed,
            "classes": self.classes,
            "sources": header.describe(self.sources),
            "segments": header.describe(self.segments),
            "samples": len(self),
            "sha256": hashlib.sha256(text).hexdigest(),
        }
        return header.write(content) + text

    @classmethod
    def from_bytes(cls, data: bytes) -> "Manifest":
        """The manifest whose file has this content, proven whole and in its one spelling."""
        if not isinstance(data, bytes):
            raise DataError(f"a manifest is bytes, as to_bytes() returns them; given: {type(data).__name__}")
        end = data.find(b"\n", 0, header.LONGEST_HEADER) + 1
        require(end > 0, "the file has no first line of a manifest's length: it is not a manifest")
        content = header.read(data[:end])
        samples, text = content.pop("samples"), data[end:]
        _check_list(text, samples, content.pop("sha256"))
        source, index, label = listing.read(text, samples).T
        del content["format"], content["schema"]
        return cls(**content, source=source, index=index, label=label)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the file in one step: after a crash the old file or the new one is there, never a torn one."""
        try:
            replace_file(Path(path), self.to_bytes())
        except (OSError, ValueError) as problem:
            raise DataError(f"cannot write the manifest {os.fspath(path)!r}: {problem}") from problem

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "Manifest":
        """Load a manifest and check it. Raises `DataError` if the file is missing or damaged."""
        data = _read(Path(path))
        try:
            return cls.from_bytes(data)
        except DataError as problem:
            raise DataError(f"{os.fspath(path)}: {problem}") from None

    def verify(self, sources: Mapping[str, ImageSource]) -> None:
        """Raise a `DataError` unless these sources, by name, are the very ones that the stream was made from."""
        for number, origin in enumerate(self.sources):
            if origin.name not in sources:
                raise DataError(
                    f"the stream needs the source {origin.name!r}; given: {', '.join(sorted(sources)) or 'none'}"
                )
            source = sources[origin.name]
            _check_source(origin, source)
            self._check_labels(number, origin, source)

    def _check_rows(self) -> None:
        require(
            bool((self.source >= 0).all() and (self.source < len(self.sources)).all()),
            f"a sample names a source that is not one of the {len(self.sources)} listed",
        )
        sizes = np.array([origin.size for origin in self.sources], dtype=np.int64)
        _check_samples(
            (self.index >= 0) & (self.index < sizes[self.source]), "an index that lies outside its source", self.index
        )
        known = np.array([origin.role == "known" for origin in self.sources])[self.source]
        fits = np.where(known, (self.label >= 0) & (self.label < len(self.classes)), self.label == UNKNOWN)
        _check_samples(fits, "a label that does not fit the role of its source and the known classes", self.label)

    def _check_labels(self, number: int, origin: Origin, source: ImageSource) -> None:
        rows = np.flatnonzero(self.source == number)
        names = [entry.name for entry in self.sources if entry.role == "known"]
        if origin.role == "unknown" and origin.name not in names:
            return
        truth = known_labels(source, self.classes)
        # An unlabelled image of a source of known classes may be known: nothing can be said about it.
        wrong = rows[(truth[self.index[rows]] != self.label[rows]) | (source.labels[self.index[rows]] < 0)]
        if len(wrong):
            place = int(wrong[0])
            raise DataError(
                f"sample {place}, image {self.index[place]} of the source {origin.name!r}, has the label "
                f"{self.label[place]} in the manifest and {truth[self.index[place]]} in the source; "
                f"{len(wrong)} samples differ: the stream was made from other labels or other classes"
            )


def known_labels(source: ImageSource, classes: tuple[str, ...]) -> Integers:
    """(N,) for each image of the source its place in `classes`, -1 where its class is not among them."""
    places = {name: place for place, name in enumerate(classes)}
    # The last entry stands for images without a label, whose label is -1.
    lookup = np.array([places.get(name, UNKNOWN) for name in source.classes] + [UNKNOWN], dtype=np.int64)
    labels = np.asarray(source.labels)
    require(
        labels.shape == (len(source),) and labels.dtype.kind == "i",
        f"the source {source.name!r} has labels of shape {labels.shape} and type {labels.dtype}, "
        f"not one whole number for each of its {len(source)} images",
    )
    require(
        bool((labels >= -1).all() and (labels < len(source.classes)).all()),
        f"the source {source.name!r} has labels outside its {len(source.classes)} classes",
    )
    known: Integers = lookup[labels]
    return known


def _column(name: str, values: Any) -> Integers:
    if not isinstance(values, np.ndarray) or values.ndim != 1 or values.dtype.kind != "i":
        raise DataError(f"the column {name!r} of a manifest is a one-dimensional array of whole numbers")
    column: Integers = np.array(values, dtype=np.int64)
    column.setflags(write=False)
    return column


def _check_list(text: bytes, samples: object, digest: object) -> None:
    require(
        header.whole_number(samples, 1, header.MOST_SAMPLES),
        f"the manifest announces {header.shown(samples)} samples; wanted: 1 to {header.MOST_SAMPLES}",
    )
    require(header.is_sha256(digest), f"the manifest's sha256 is {header.shown(digest)}, not 64 digits")
    found = hashlib.sha256(text).hexdigest()
    require(
        found == digest,
        f"the list has the hash {found}, the header says {digest}: the manifest is cut off, damaged or changed",
    )


def _check_samples(fits: np.ndarray[Any, np.dtype[np.bool_]], what: str, values: Integers) -> None:
    wrong = np.flatnonzero(~fits)
    if len(wrong):
        raise DataError(f"sample {wrong[0]} has {what}: {values[wrong[0]]}")


def _check_source(origin: Origin, source: ImageSource) -> None:
    require(
        source.name == origin.name,
        f"the source given as {origin.name!r} calls itself {source.name!r}: corruptions would differ",
    )
    require(
        len(source) == origin.size,
        f"the source {origin.name!r} has {len(source)} images, the stream was made from {origin.size}",
    )
    require(
        source.fingerprint == origin.fingerprint,
        f"the source {origin.name!r} has the fingerprint {source.fingerprint}, the stream was made from "
        f"{origin.fingerprint}: same name and size, other images or labels",
    )


def _read(path: Path) -> bytes:
    try:
        found = path.stat()
        # A pipe or a device could block or never end, and is refused before it is opened.
        require(stat.S_ISREG(found.st_mode), f"{path} is not a regular file: a manifest is")
        require(
            found.st_size <= LARGEST_FILE,
            f"{path} has {found.st_size} bytes, a manifest at most {LARGEST_FILE}: it is not a manifest",
        )
        with path.open("rb") as file:
            return file.read(found.st_size)
    except (OSError, ValueError) as problem:
        raise DataError(f"cannot read the manifest {os.fspath(path)!r}: {problem}") from problem

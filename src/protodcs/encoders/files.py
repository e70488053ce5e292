"""Encode image files and parts of them, each once, even if the program is interrupted.

An SQLite file keeps features and errors, one transaction for each batch, and the next run continues from it. It encodes
a file again if the file or the encoder has changed.
"""

import os
import sqlite3
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ..arrays import Features, Pixels
from ..data.crop import Crop, crop_around
from ..data.image import decode
from ..errors import DataError, ImageError
from ..prefetch import Prefetcher
from .base import Encoder, parts

# Batches that are decoded and encoded while another one is being stored.
_BATCHES_AHEAD = 2
_CREATE = "CREATE TABLE IF NOT EXISTS files (path BLOB, version TEXT, feature BLOB, error TEXT, PRIMARY KEY (path))"
_INSERT = "INSERT OR REPLACE INTO files VALUES (?, ?, ?, ?)"


@dataclass(frozen=True, slots=True)
class EncodedFiles:
    """The features of image files, or of crops of them.

    Attributes:
        names: the files or crops that could be read, by name, in order.
        features: (N, d), their unit features.
        errors: for each of the others, why it could not be read.
    """

    names: tuple[str, ...]
    features: Features
    errors: Mapping[str, str]


class _Job(NamedTuple):
    """A file or crop to encode; `version` changes if the file or the encoder does."""

    name: str
    source: Path | Crop
    version: str


class _Row(NamedTuple):
    """A row of the table: a feature, or an error."""

    path: bytes
    version: str
    feature: bytes | None
    error: str | None


def encode_files(
    encoder: Encoder,
    files: Mapping[str, Path | Crop],
    store: Path | None = None,
    advance: Callable[[int], object] = lambda count: None,
) -> EncodedFiles:
    """Encode image files. Files that cannot be read as images go into `errors`.

    Args:
        encoder: the encoder.
        files: the files or crops, by the name that results and error messages have for them. Crops of one file follow
            each other, so that it is decoded once.
        store: an SQLite file that keeps what is done, so that an interrupted call can continue; None: nothing is kept.
        advance: is called with the number of files done since the last call.
    """
    versions = {file: _version(file, encoder) for file in dict.fromkeys(map(_file, files.values()))}
    jobs = [_Job(name, source, versions[_file(source)]) for name, source in files.items()]
    try:
        with closing(sqlite3.connect(store or ":memory:")) as database:
            database.execute(_CREATE)
            done = dict(database.execute("SELECT path, version FROM files"))
            todo = [job for job in jobs if done.get(_key(job.source)) != job.version]
            advance(len(jobs) - len(todo))
            with closing(Prefetcher(lambda items: _encoded(encoder, items), todo, _BATCHES_AHEAD)) as batches:
                for rows in batches:
                    with database:
                        database.executemany(_INSERT, rows)
                    advance(len(rows))
            return _collected(database, jobs, encoder.dimension)
    except sqlite3.Error as problem:
        raise DataError(
            f"{store}: the features cannot be stored: {problem}. Move this file away, or delete it."
        ) from None


def _encoded(encoder: Encoder, jobs: Iterable[_Job]) -> Iterator[list[_Row]]:
    """Yield the rows of each batch of files."""
    latest: tuple[Path, Pixels] | None = None
    for batch in parts(jobs, encoder.batch_size):
        pixels, errors = [], {}
        for job in batch:
            try:
                file = _file(job.source)
                if latest is None or latest[0] != file:
                    latest = file, decode(file, job.name)
                pixels.append(crop_around(latest[1], job.source.box) if isinstance(job.source, Crop) else latest[1])
            except ImageError as problem:
                errors[job.name] = str(problem)
        features = iter(encoder.encode_pixels(pixels))
        yield [
            _Row(_key(source), version, None, errors[name])
            if name in errors
            else _Row(_key(source), version, next(features).tobytes(), None)
            for name, source, version in batch
        ]


def _collected(database: sqlite3.Connection, jobs: list[_Job], dimension: int) -> EncodedFiles:
    """Read the results of all files from the database."""
    names, rows, errors = [], [], {}
    for job in jobs:
        select = "SELECT feature, error FROM files WHERE path = ?"
        feature, error = database.execute(select, (_key(job.source),)).fetchone()
        if feature is None:
            errors[job.name] = error
        else:
            names.append(job.name)
            rows.append(np.frombuffer(feature, np.float32))
    return EncodedFiles(tuple(names), np.stack(rows) if rows else np.empty((0, dimension), np.float32), errors)


def _file(source: Path | Crop) -> Path:
    return source.file if isinstance(source, Crop) else source


def _key(source: Path | Crop) -> bytes:
    """Return what the table calls a file or crop."""
    path = os.fsencode(_file(source).absolute())
    # No path contains a zero byte.
    return path + b"\0" + repr(tuple(source.box)).encode() if isinstance(source, Crop) else path


def _version(file: Path, encoder: Encoder) -> str:
    try:
        about = file.stat()
    except OSError as problem:
        # `decode` reports it.
        return f"{encoder.image_fingerprint} {problem.strerror}"
    return f"{encoder.image_fingerprint} {about.st_size} {about.st_mtime_ns}"

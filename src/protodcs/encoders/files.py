"""Encode image files, each of them once, even if the program is interrupted.

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

from ..arrays import Features
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
    """The features of image files.

    Attributes:
        names: the files that could be read, by name, in order.
        features: (N, d), their unit features.
        errors: for each of the other files, why it could not be read.
    """

    names: tuple[str, ...]
    features: Features
    errors: Mapping[str, str]


class _Job(NamedTuple):
    """A file to encode; `version` changes if the file or the encoder does."""

    name: str
    file: Path
    version: str


class _Row(NamedTuple):
    """A row of the table: a feature, or an error."""

    path: bytes
    version: str
    feature: bytes | None
    error: str | None


def encode_files(
    encoder: Encoder,
    files: Mapping[str, Path],
    store: Path | None = None,
    advance: Callable[[int], object] = lambda count: None,
) -> EncodedFiles:
    """Encode image files. Files that cannot be read as images go into `errors`.

    Args:
        encoder: the encoder.
        files: the files, by the name that results and error messages have for them.
        store: an SQLite file that keeps what is done, so that an interrupted call can continue; None: nothing is kept.
        advance: is called with the number of files done since the last call.
    """
    jobs = [_Job(name, file, _version(file, encoder)) for name, file in files.items()]
    try:
        with closing(sqlite3.connect(store or ":memory:")) as database:
            database.execute(_CREATE)
            done = dict(database.execute("SELECT path, version FROM files"))
            todo = [job for job in jobs if done.get(_path(job.file)) != job.version]
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
    for batch in parts(jobs, encoder.batch_size):
        pixels, errors = [], {}
        for job in batch:
            try:
                pixels.append(decode(job.file, job.name))
            except ImageError as problem:
                errors[job.name] = str(problem)
        features = iter(encoder.encode_pixels(pixels))
        yield [
            _Row(_path(file), version, None, errors[name])
            if name in errors
            else _Row(_path(file), version, next(features).tobytes(), None)
            for name, file, version in batch
        ]


def _collected(database: sqlite3.Connection, jobs: list[_Job], dimension: int) -> EncodedFiles:
    """Read the results of all files from the database."""
    names, rows, errors = [], [], {}
    for job in jobs:
        select = "SELECT feature, error FROM files WHERE path = ?"
        feature, error = database.execute(select, (_path(job.file),)).fetchone()
        if feature is None:
            errors[job.name] = error
        else:
            names.append(job.name)
            rows.append(np.frombuffer(feature, np.float32))
    return EncodedFiles(tuple(names), np.stack(rows) if rows else np.empty((0, dimension), np.float32), errors)


def _path(file: Path) -> bytes:
    return os.fsencode(file.absolute())


def _version(file: Path, encoder: Encoder) -> str:
    try:
        about = file.stat()
    except OSError as problem:
        # `decode` reports it.
        return f"{encoder.image_fingerprint} {problem.strerror}"
    return f"{encoder.image_fingerprint} {about.st_size} {about.st_mtime_ns}"

"""What one result is: the columns of a row, and how rows are kept in Parquet files.

A row names all that its figures depend on. Two runs of a cell give the same row but for the columns in `MEASURED`.
"""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from ..atomic_io import replace_file
from ..errors import DataError

Row = dict[str, Any]

# What was run.
IDENTITY = {
    "grid": pa.string(),  # name of the grid
    "cell": pa.string(),  # hash of method, configuration, stream and seed
    "method": pa.string(),  # registered name
    "label": pa.string(),  # name in tables
    "kind": pa.string(),  # "features", "images" or "texts": what the method looks at, or adapts
    "config": pa.string(),  # JSON, every setting resolved
    "score": pa.string(),  # what AUROC, FPR and OSCR are computed from
    "stream": pa.string(),
    "known": pa.string(),  # set of known images
    "unknown": pa.string(),  # sets of unknown images
    "protocol": pa.string(),
    "seed": pa.int64(),
    "segment": pa.string(),  # a corruption, "clean", or one of GATHERED
    "position": pa.int64(),  # place of the segment in its stream; below zero for GATHERED
    "encoder": pa.string(),
    "fingerprint": pa.string(),  # of the encoder
    "prompts": pa.string(),  # hash of the class names that prototypes are made of
    "manifest": pa.string(),  # SHA-256 of the stream
    "classes": pa.int64(),
    "dimension": pa.int64(),
}
# What came out: shares from 0 to 1, NaN where it cannot be said. The keys of `metrics.summary`, and four of
# our own: AUROC by the largest class score, whatever the score of the method; what a threshold with labels finds at
# the same false rejects; the unknown recall as a share of that; and how many samples moved text prototypes.
FIGURES = {
    name: pa.float64()
    for name in (
        "known_samples",
        "unknown_samples",
        "known_accuracy",
        "known_accuracy_with_rejection",
        "accepted_accuracy",
        "accepted_precision",
        "coverage",
        "false_reject",
        "unknown_recall",
        "balanced_accuracy",
        "auroc",
        "fpr95_known_positive",
        "fpr95_unknown_positive",
        "aupr_known_positive",
        "aupr_unknown_positive",
        "oscr",
        "h_score_accuracy_auroc",
        "h_score_accepted_recall",
        "ece",
        "area_under_accuracy_uncertainty",
        "auroc_class_score",
        "possible_recall",
        "found_of_possible",
        "evolved_samples",
    )
}
# What no two runs share.
MEASURED = {
    "seconds": pa.float64(),  # of the segment, without reading; of the whole cell in MEAN and POOLED; else NaN
    "peak_memory_mb": pa.float64(),  # of the worker while the cell ran
    "versions": pa.string(),  # JSON
    "machine": pa.string(),  # kind of processor, system, device of the encoder
    "started": pa.string(),  # UTC
    "command": pa.string(),  # that ran it
}
SCHEMA = pa.schema(list((IDENTITY | FIGURES | MEASURED).items()))

# Over the segments of a stream: the mean of their figures, and the figures of all their samples together; and those of
# the samples that came first after the start or a reset, and of those that came when a method had long settled.
MEAN, POOLED, FIRST, LATER = "mean", "pooled", "first 100", "after 500"
FIRST_SAMPLES, LATER_SAMPLES = 100, 500
# Their positions, all below zero: whoever wants corruptions takes the rows from zero up.
GATHERED = {MEAN: -1, POOLED: -2, FIRST: -3, LATER: -4}
# Figures that older files do not have: they are read as NaN, and run again with their grid.
_YOUNGER = ("balanced_accuracy", "auroc_class_score", "possible_recall", "found_of_possible", "evolved_samples")


def write(file: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write rows in one step."""
    sink = pa.BufferOutputStream()
    pq.write_table(pa.Table.from_pylist(list(rows), schema=SCHEMA), sink)
    replace_file(file, sink.getvalue().to_pybytes())


def read(file: Path) -> list[Row]:
    """The rows of a file."""
    try:
        table = pq.read_table(file)
    except (OSError, pa.ArrowInvalid) as problem:
        raise DataError(f"{file} is not a file of results: {problem}") from None
    table = _grown(table)
    if table.schema != SCHEMA:
        raise DataError(f"{file} has other columns than this protodcs writes: run its cell again")
    rows: list[Row] = table.to_pylist()
    return rows


def _grown(table: pa.Table) -> pa.Table:
    """A table with the figures that were not there when it was written, unsaid."""
    for name in _YOUNGER:
        if name not in table.column_names:
            place = min(SCHEMA.get_field_index(name), table.num_columns)
            table = table.add_column(place, SCHEMA.field(name), pa.array([math.nan] * len(table), pa.float64()))
    return table


def is_whole(file: Path) -> bool:
    """Whether this is a file of results as this version writes them."""
    try:
        schema: pa.Schema = pq.read_schema(file)
    except (OSError, pa.ArrowInvalid):
        return False
    return schema == SCHEMA


def read_folder(folder: Path) -> list[Row]:
    """All rows of a folder of results, in a fixed order."""
    files = sorted((folder / "cells").glob("*.parquet"))
    if not files:
        raise DataError(f"{folder} holds no results: `protodcs bench run` writes them")
    rows = [row for file in files for row in read(file)]
    return sorted(rows, key=lambda row: (row["stream"], row["protocol"], row["method"], row["label"], row["cell"]))

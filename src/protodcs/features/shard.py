"""One shard as a Parquet file: source, index, label and feature of each sample, with where they come from.

A shard appears whole or not at all.
"""

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from ..atomic_io import replace_file
from ..data.streams import Manifest
from ..errors import DataError
from .job import Job, Shard

_KEY = b"protodcs"


def provenance(job: Job, manifest: Manifest, shard: Shard) -> dict[str, object]:
    """What a shard says of itself."""
    segment = manifest.segments[shard.segment]
    return {
        "format": "protodcs-features",
        "schema": 1,
        "encoder": job.encoder,
        "manifest": job.manifest,
        "shard": shard.number,
        "first": shard.first,
        "samples": shard.last - shard.first,
        "corruption": segment.corruption,
        "severity": segment.severity,
        "sources": [origin.name for origin in manifest.sources],
    }


def write_shard(folder: Path, job: Job, manifest: Manifest, shard: Shard, features: NDArray[np.float32]) -> None:
    """Write the features (n, d) of a shard."""
    rows = slice(shard.first, shard.last)
    stored = features.astype(job.number_type)
    flat = pa.array(stored.reshape(-1), type=pa.float16() if job.number_type == "float16" else pa.float32())
    columns = {
        "source": pa.array(manifest.source[rows].astype(np.int32)),
        "index": pa.array(manifest.index[rows].astype(np.int64)),
        "label": pa.array(manifest.label[rows].astype(np.int32)),
        "feature": pa.FixedSizeListArray.from_arrays(flat, job.dimension),
    }
    about = json.dumps(provenance(job, manifest, shard), sort_keys=True).encode()
    table = pa.table(columns).replace_schema_metadata({_KEY: about})
    buffer = pa.BufferOutputStream()
    # Features are noise to a compressor; dictionaries and statistics would only cost time.
    pq.write_table(table, buffer, compression="none", use_dictionary=False, write_statistics=False)
    replace_file(folder / shard.file, buffer.getvalue())


def is_done(folder: Path, job: Job, manifest: Manifest, shard: Shard) -> bool:
    """Whether the shard is there; one that is damaged or belongs elsewhere is refused, never overwritten."""
    place = folder / shard.file
    if not place.exists():
        return False
    wanted = provenance(job, manifest, shard)
    try:
        found = pq.read_metadata(place)
        about = json.loads((found.metadata or {}).get(_KEY, b"null"))
    except (OSError, pa.ArrowException, ValueError) as problem:
        raise DataError(f"{place} is damaged: {problem}; delete it, and the next run makes it again") from None
    if about != wanted or found.num_rows != wanted["samples"]:
        raise DataError(f"{place} does not belong to this job: delete it, or give another folder")
    return True


def read_features(folder: Path, job: Job, shard: Shard) -> NDArray[np.float32]:
    """(n, d) float32 features of a shard."""
    try:
        column = pq.read_table(folder / shard.file, columns=["feature"]).column("feature").combine_chunks()
    except (OSError, pa.ArrowException) as problem:
        raise DataError(f"{folder / shard.file} cannot be read: {problem}") from None
    flat = column.flatten().to_numpy(zero_copy_only=False)
    if flat.size != (shard.last - shard.first) * job.dimension:
        raise DataError(f"{folder / shard.file} holds {flat.size} numbers: it does not belong to this job")
    rows: NDArray[np.float32] = flat.reshape(-1, job.dimension).astype(np.float32)
    return rows

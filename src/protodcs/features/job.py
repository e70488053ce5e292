"""What is to be extracted, as data, and how it is cut into shards.

The job file in a folder of features says what its shards hold; a run into the same folder must be the same job.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ..atomic_io import replace_file
from ..data.streams import Manifest
from ..errors import DataError

JOB, MANIFEST, SHARDS = "job.json", "manifest.txt", "shards"


class Job(BaseModel):
    """Everything besides the manifest that the bytes of a shard depend on."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    schema_version: Literal[1] = 1
    manifest: str = Field(pattern="^[0-9a-f]{64}$", description="Hash of the manifest.")
    encoder: str = Field(
        min_length=1, max_length=1000, description="Fingerprint of the encoder, and what chooses among views."
    )
    dimension: int = Field(ge=1, description="Length of a feature.")
    logit_scale: float = Field(gt=0, description="Of the encoder: the temperature is its inverse.")
    shard_size: int = Field(1000, ge=1, le=1_000_000, description="Images per shard, the last of a segment fewer.")
    batch_size: int = Field(100, ge=1, le=100_000, description="Images encoded at once, from the shard's start.")
    number_type: Literal["float32", "float16"] = Field("float32", description="Of the stored features.")
    views: int = Field(1, ge=1, le=4096, description="Of each image; its feature is the mean of the most confident.")
    side: int | None = Field(None, ge=8, le=2048, description="Images are cropped to this before they are corrupted.")

    def to_bytes(self) -> bytes:
        """The content of the job file."""
        return self.model_dump_json(indent=1).encode() + b"\n"


@dataclass(frozen=True, slots=True)
class Shard:
    """A run of samples inside one segment of the manifest: `first` to before `last`."""

    number: int
    segment: int
    first: int
    last: int

    @property
    def file(self) -> str:
        """Its place under the folder of features."""
        return f"{SHARDS}/{self.number:06d}.parquet"


def shards(manifest: Manifest, size: int) -> list[Shard]:
    """Return the manifest in parts of `size` samples; each segment starts a new part."""
    cuts = [
        (number, first, min(first + size, segment.start + segment.length))
        for number, segment in enumerate(manifest.segments)
        for first in range(segment.start, segment.start + segment.length, size)
    ]
    return [Shard(number, *cut) for number, cut in enumerate(cuts)]


def begin(folder: Path, job: Job, manifest: Manifest) -> None:
    """Write job and manifest, or check that the folder contains the same job."""
    file = folder / JOB
    if file.exists():
        if file.read_bytes() != job.to_bytes():
            raise DataError(f"{folder} holds features of another job, see its {JOB}: give another folder")
        return
    # A run may have been killed between its first file and the job's own.
    if folder.exists() and not {entry.name for entry in folder.iterdir()} <= {MANIFEST, SHARDS}:
        raise DataError(f"{folder} is not empty and holds no {JOB}: give a new folder")
    (folder / SHARDS).mkdir(parents=True, exist_ok=True)
    manifest.save(folder / MANIFEST)
    replace_file(file, job.to_bytes())


def read_job(folder: Path) -> tuple[Job, Manifest]:
    """The job of a folder of features."""
    try:
        job = Job.model_validate_json((folder / JOB).read_bytes())
    except FileNotFoundError:
        raise DataError(f"{folder} holds no {JOB}: `protodcs features` makes such a folder") from None
    except (OSError, ValidationError) as problem:
        raise DataError(f"{folder / JOB} is not a job of `protodcs features`: {problem}") from None
    manifest = Manifest.load(folder / MANIFEST)
    if manifest.hash != job.manifest:
        raise DataError(f"{folder / MANIFEST} is not the manifest that {JOB} names: one of them was changed")
    return job, manifest

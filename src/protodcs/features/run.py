"""A job with all that is needed to do it, and the plain loop that does it in this process."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from ..core.settings import as_error
from ..data.source import ImageSource
from ..data.streams import Manifest
from ..encoders import Encoder, Preprocessing, load
from ..errors import EncoderError
from .extract import Preparer, extract
from .job import SHARDS, Job, Shard, begin, shards
from .shard import is_done
from .views import Views


@dataclass(frozen=True, slots=True)
class Extraction:
    """A job with all a worker needs to do it; small enough to be sent to every worker.

    Attributes:
        folder: where the shards go; every worker must see it under this name.
        job: what is extracted.
        manifest: of which images.
        sources: the manifest's sources, in its order.
        model: the encoder, as `protodcs.encoders.load` takes it.
        preprocessing: of that encoder.
        views: of each image; None if its feature is that of the plain image.
    """

    folder: Path
    job: Job
    manifest: Manifest
    sources: Sequence[ImageSource]
    model: str
    preprocessing: Preprocessing
    views: Views | None = None

    @classmethod
    def planned(
        cls,
        folder: Path,
        manifest: Manifest,
        sources: Sequence[ImageSource],
        encoder: Encoder,
        views: Views | None = None,
        **settings: Any,
    ) -> "Extraction":
        """An extraction whose job follows from manifest, encoder and views; `settings` are the job's."""
        by_name = {source.name: source for source in sources}
        manifest.verify(by_name)
        try:
            job = Job(
                manifest=manifest.hash,
                encoder=encoder.fingerprint if views is None else views.fingerprint(encoder),
                views=1 if views is None else views.count,
                dimension=encoder.dimension,
                logit_scale=encoder.logit_scale,
                **settings,
            )
        except ValidationError as problem:
            raise as_error(problem) from None
        ordered = [by_name[origin.name] for origin in manifest.sources]
        return cls(folder.absolute(), job, manifest, ordered, encoder.name, encoder.preprocessing, views)

    def shards(self) -> list[Shard]:
        """All of the job's shards."""
        return shards(self.manifest, self.job.shard_size)

    def open(self) -> list[Shard]:
        """Begin or continue in the folder; returns the shards that are still to do."""
        begin(self.folder, self.job, self.manifest)
        for draft in (self.folder / SHARDS).glob(".*.tmp"):
            draft.unlink()
        return [shard for shard in self.shards() if not is_done(self.folder, self.job, self.manifest, shard)]

    def preparer(self) -> Preparer:
        """What turns samples into fitted images."""
        return Preparer(self.job, self.manifest, self.sources, self.preprocessing, self.views)

    def encoder(self, device: str) -> Encoder:
        """The encoder, proven to be the one the job names."""
        encoder = load(self.model, device=device)
        # The templates, the last part of a fingerprint, have no say in features of images.
        if not self.job.encoder.startswith(f"{encoder.image_fingerprint},"):
            raise EncoderError(f"{self.model} is another encoder on this worker: {encoder.fingerprint}")
        return encoder


def in_a_loop(extraction: Extraction, todo: Sequence[Shard], device: str = "auto") -> Iterator[Shard]:
    """Do the shards one after another in this process; yields each when it is done."""
    preparer, encoder = extraction.preparer(), extraction.encoder(device)
    for shard in todo:
        extract(extraction.folder, shard, preparer, encoder)
        yield shard

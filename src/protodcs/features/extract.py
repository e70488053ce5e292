"""The work on one shard: read, corrupt, fit, encode, write; batch by batch, so that memory is bounded by a batch.

Workers hold everything a shard needs and share nothing: any of them may do any shard, any number of times.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import cast

import numpy as np
from numpy.typing import NDArray

from ..data.corruptions import Variant
from ..data.reading import read_corrupted
from ..data.source import ImageSource, Pixels
from ..data.streams import Manifest
from ..encoders import Encoder, Preprocessing
from .job import Job, Shard
from .shard import write_shard


class Preparer:
    """Samples of a manifest to images that a vision tower takes: the part that needs no network."""

    def __init__(self, job: Job, manifest: Manifest, sources: Sequence[ImageSource], preprocessing: Preprocessing):
        self.job = job
        self.manifest = manifest
        self.sources = sources
        self.preprocessing = preprocessing

    def batches(self, shard: Shard) -> Iterator[NDArray[np.uint8]]:
        """Fitted images, `batch_size` at a time."""
        for first in range(shard.first, shard.last, self.job.batch_size):
            yield self.preprocessing.fitted(self._images(shard, first, min(first + self.job.batch_size, shard.last)))

    def _images(self, shard: Shard, first: int, last: int) -> list[Pixels]:
        segment = self.manifest.segments[shard.segment]
        numbers, indices = self.manifest.source[first:last], self.manifest.index[first:last]
        images: list[Pixels] = [np.empty(0, dtype=np.uint8)] * (last - first)
        for number in np.unique(numbers):
            places = np.flatnonzero(numbers == number)
            found = read_corrupted(
                self.sources[number],
                indices[places].tolist(),
                segment.corruption,
                segment.severity,
                family=segment.family,
                variant=cast(Variant, segment.variant),
                side=self.job.side,
            )
            for place, image in zip(places, found, strict=True):
                images[place] = image
        return images


def extract(folder: Path, shard: Shard, preparer: Preparer, encoder: Encoder) -> None:
    """Do one shard from its images to its file."""
    features = np.concatenate([encoder.encode_fitted(batch) for batch in preparer.batches(shard)])
    write_shard(folder, preparer.job, preparer.manifest, shard, features)

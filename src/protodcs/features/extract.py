"""The work on one shard: read, corrupt, fit, encode, write; batch by batch, so that memory is bounded by a batch.

Workers hold everything a shard needs and share nothing: any of them may do any shard, any number of times.
"""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ..data.reading import read_samples
from ..data.source import ImageSource
from ..data.streams import Manifest
from ..encoders import Encoder, Preprocessing
from .job import Job, Shard
from .shard import write_shard
from .views import Views


class Preparer:
    """Samples of a manifest to images that a vision tower takes: the part that needs no network."""

    def __init__(
        self,
        job: Job,
        manifest: Manifest,
        sources: Sequence[ImageSource],
        preprocessing: Preprocessing,
        views: Views | None = None,
    ):
        self.job = job
        self.manifest = manifest
        self.sources = sources
        self.preprocessing = preprocessing
        self.views = views

    def batches(self, shard: Shard) -> Iterator[NDArray[np.uint8]]:
        """Fitted images (n * views, height, width, 3), those of `batch_size` samples at a time."""
        for first in range(shard.first, shard.last, self.job.batch_size):
            yield self._fitted(shard, slice(first, min(first + self.job.batch_size, shard.last)))

    def _fitted(self, shard: Shard, rows: slice) -> NDArray[np.uint8]:
        fitted = np.empty((rows.stop - rows.start, self.job.views, *self.preprocessing.shape), dtype=np.uint8)
        for place, image in read_samples(self.manifest, shard.segment, rows, self.sources, self.job.side):
            if self.views is None:
                fitted[place] = self.preprocessing.fit(image)
            else:
                row = rows.start + place
                seed = int(self.manifest.source[row]), int(self.manifest.index[row])
                fitted[place] = self.views.fitted(image, self.preprocessing, seed)
        return fitted.reshape(-1, *self.preprocessing.shape)


def extract(folder: Path, shard: Shard, preparer: Preparer, encoder: Encoder) -> None:
    """Do one shard from its images to its file."""
    write_features(folder, shard, preparer, encoder, preparer.batches(shard))


def write_features(
    folder: Path, shard: Shard, preparer: Preparer, encoder: Encoder, batches: Iterable[NDArray[np.uint8]]
) -> None:
    """Encode the fitted images of a shard, batch by batch, and write its file."""
    features = np.concatenate([encoder.encode_fitted(batch) for batch in batches])
    if preparer.views is not None:
        features = preparer.views.averaged(features)
    write_shard(folder, preparer.job, preparer.manifest, shard, features)

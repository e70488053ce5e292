"""A folder of finished features, and the features of any stream that can be put together from it."""

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ..data.streams import Manifest, Segment
from ..errors import DataError, InputError
from .job import read_job, shards
from .shard import is_done, read_features


class FeatureStore:
    """Features that `protodcs features` has extracted.

    Attributes:
        job: what was extracted.
        manifest: of which images.
    """

    def __init__(self, folder: str | Path):
        self.folder = Path(folder)
        self.job, self.manifest = read_job(self.folder)
        self._shards = shards(self.manifest, self.job.shard_size)
        missing = [part for part in self._shards if not is_done(self.folder, self.job, self.manifest, part)]
        if missing:
            raise DataError(
                f"{self.folder} is not complete, {len(missing)} of {len(self._shards)} shards are missing: run the "
                "same `protodcs features` again, it goes on where it stopped"
            )

    def segment(self, number: int) -> NDArray[np.float32]:
        """(n, d) features of one segment of the store's own manifest, in its order."""
        if not 0 <= number < len(self.manifest.segments):
            raise InputError(f"the stream has the segments 0 to {len(self.manifest.segments) - 1}; asked for: {number}")
        parts = [part for part in self._shards if part.segment == number]
        return np.concatenate([read_features(self.folder, self.job, part) for part in parts])

    def gather(self, manifest: Manifest, number: int) -> NDArray[np.float32]:
        """(n, d) features of segment `number` of another manifest over the same sources, in that one's order."""
        wanted = manifest.segments[number]
        own = self._alike(wanted)
        if own is None:
            raise DataError(
                f"{self.folder} has no features under {wanted.corruption or 'no corruption'}, severity "
                f"{wanted.severity}: extract them with `protodcs features`"
            )
        features, at = self.segment(own), self._places(own, manifest, wanted)
        if np.any(at < 0):
            raise DataError(f"{self.folder} has no features for {int((at < 0).sum())} of the {len(at)} images wanted")
        return features[at]

    def covers(self, manifest: Manifest, number: int) -> bool:
        """Whether `gather` has every feature of segment `number` of another manifest."""
        wanted = manifest.segments[number]
        own = self._alike(wanted)
        return own is not None and bool(np.all(self._places(own, manifest, wanted) >= 0))

    def _alike(self, wanted: Segment) -> int | None:
        """The number of the store's segment under the same conditions."""
        keys = ("corruption", "severity", "family", "variant")
        same = (all(getattr(own, key) == getattr(wanted, key) for key in keys) for own in self.manifest.segments)
        return next((number for number, alike in enumerate(same) if alike), None)

    def _places(self, number: int, manifest: Manifest, wanted: Segment) -> NDArray[np.int64]:
        """Where each sample of the other manifest's segment stands in segment `number`; -1 where it does not."""
        segment = self.manifest.segments[number]
        rows = segment.rows
        places = np.full((len(manifest.sources), max(origin.size for origin in manifest.sources)), -1, dtype=np.int64)
        for here, own in enumerate(self.manifest.sources):
            inside = np.flatnonzero(self.manifest.source[rows] == here)
            for there, other in enumerate(manifest.sources):
                if own.fingerprint == other.fingerprint and own.name == other.name:
                    places[there, self.manifest.index[rows][inside]] = inside
        return places[manifest.source[wanted.rows], manifest.index[wanted.rows]]

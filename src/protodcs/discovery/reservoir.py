"""A bounded storage of features. If it is full, a new sample replaces an old one.

Features are stored as float16: 2,000 CLIP features of 512 dimensions take 2 MB.
"""

from typing import Self

import numpy as np
from numpy.typing import NDArray

from ..arrays import Features, Flags, Integers

# The number of a sample that belongs to no cluster.
UNASSIGNED = -1
_FIRST_ROWS = 64


class Reservoir:
    """Features with the caller's key, the position in the stream and the cluster of each.

    Attributes:
        size: number of stored samples. Rows from here on are not in use.
    """

    def __init__(self, dimension: int, capacity: int):
        self.capacity = capacity
        self.size = 0
        self._features = np.empty((min(_FIRST_ROWS, capacity), dimension), dtype=np.float16)
        # One row per sample: key, position, cluster.
        self._numbers = np.empty((len(self._features), 3), dtype=np.int64)

    @classmethod
    def of(cls, features: NDArray[np.float16], numbers: Integers, capacity: int) -> Self:
        """Return a reservoir with these samples: features (n, d), and rows of key, position and cluster (n, 3)."""
        reservoir = cls(features.shape[1], capacity)
        reservoir._features, reservoir._numbers = features.copy(), numbers.copy()
        reservoir.size = len(features)
        return reservoir

    @property
    def half_features(self) -> NDArray[np.float16]:
        """The stored features (n, d), as they are stored."""
        return self._features[: self.size]

    @property
    def numbers(self) -> Integers:
        """Key, position and cluster of each stored sample (n, 3)."""
        return self._numbers[: self.size]

    @property
    def keys(self) -> Integers:
        """The caller's key of each stored sample (n,)."""
        return self.numbers[:, 0]

    @property
    def positions(self) -> Integers:
        """The position in the stream of each stored sample (n,)."""
        return self.numbers[:, 1]

    @property
    def clusters(self) -> Integers:
        """The cluster of each stored sample (n,), UNASSIGNED if it has none. Write to it to assign samples."""
        return self.numbers[:, 2]

    def features(self, rows: Flags | None = None) -> Features:
        """Return the stored features (n, d), or some of them, as float32."""
        chosen = self.half_features if rows is None else self.half_features[rows]
        return chosen.astype(np.float32)

    def add(self, feature: Features, key: int, position: int, cluster: int, max_cluster_size: int) -> int:
        """Store a unit feature (d,) and return its row. If the storage is full, replace a sample."""
        if self.size == self.capacity:
            row = self._replaceable(max_cluster_size)
        else:
            row = self.size
            self._grow()
            self.size += 1
        self._features[row] = feature
        self._numbers[row] = key, position, cluster
        return row

    def remove(self, rows: Flags) -> None:
        """Remove the samples `rows` (n,). The others move up and keep their order."""
        kept = np.flatnonzero(~rows)
        self._features[: len(kept)] = self.half_features[kept]
        self._numbers[: len(kept)] = self.numbers[kept]
        self.size = len(kept)

    def _grow(self) -> None:
        if self.size < len(self._features):
            return
        rows = min(max(2 * self.size, _FIRST_ROWS), self.capacity)
        features = np.empty((rows, self._features.shape[1]), dtype=np.float16)
        numbers = np.empty((rows, 3), dtype=np.int64)
        features[: self.size], numbers[: self.size] = self._features, self._numbers
        self._features, self._numbers = features, numbers

    def _replaceable(self, max_cluster_size: int) -> int:
        """Return the row to replace: the oldest of the largest cluster, of those without a cluster, or of all.

        The first if that cluster is too large; the second if they take up more than half of the storage.
        """
        alone = self.clusters == UNASSIGNED
        ids, sizes = np.unique(self.clusters[~alone], return_counts=True)
        if len(sizes) and sizes.max() > max_cluster_size:
            candidates = np.flatnonzero(self.clusters == ids[sizes.argmax()])
        elif 2 * int(alone.sum()) > self.capacity:
            candidates = np.flatnonzero(alone)
        else:
            candidates = np.arange(self.size)
        return int(candidates[self.positions[candidates].argmin()])

"""A bounded storage of features. If it is full, a new sample replaces an old one.

Features are stored as float16: 2,000 CLIP features of 512 dimensions take 2 MB.
"""

from collections import OrderedDict, deque
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
        # Needed only if the storage is full. None: make it when it is needed.
        self._ages: _Ages | None = None

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
        """The cluster of each stored sample (n,), UNASSIGNED if it has none. Call `assign` to change it."""
        return self.numbers[:, 2]

    def assign(self, rows: Flags | Integers, clusters: Integers | int) -> None:
        """Set the clusters of the samples `rows`: flags (n,) or numbers of rows."""
        self.clusters[rows] = clusters
        self._ages = None

    def features(self, rows: Flags | None = None) -> Features:
        """Return the stored features (n, d), or some of them, as float32."""
        chosen = self.half_features if rows is None else self.half_features[rows]
        return chosen.astype(np.float32)

    def add(self, feature: Features, key: int, position: int, cluster: int, max_cluster_size: int) -> int:
        """Store a unit feature (d,) and return its row. If the storage is full, replace a sample."""
        if self.size == self.capacity:
            if self._ages is None:
                self._ages = _Ages(self.clusters, self.positions, max_cluster_size)
            row = self._ages.replace(cluster)
        else:
            row = self.size
            self._grow()
            self.size += 1
            self._ages = None
        self._features[row] = feature
        self._numbers[row] = key, position, cluster
        return row

    def remove(self, rows: Flags) -> None:
        """Remove the samples `rows` (n,). The others move up and keep their order."""
        kept = np.flatnonzero(~rows)
        self._features[: len(kept)] = self.half_features[kept]
        self._numbers[: len(kept)] = self.numbers[kept]
        self.size = len(kept)
        self._ages = None

    def _grow(self) -> None:
        if self.size < len(self._features):
            return
        rows = min(max(2 * self.size, _FIRST_ROWS), self.capacity)
        features = np.empty((rows, self._features.shape[1]), dtype=np.float16)
        numbers = np.empty((rows, 3), dtype=np.int64)
        features[: self.size], numbers[: self.size] = self._features, self._numbers
        self._features, self._numbers = features, numbers


class _Ages:
    """The rows of a full storage by age, so that each new sample finds the one to replace without a search."""

    def __init__(self, clusters: Integers, positions: Integers, max_cluster_size: int):
        self._max_cluster_size = max_cluster_size
        self._clusters = clusters.tolist()
        # All rows, and those of each cluster, the oldest first.
        self._all: OrderedDict[int, None] = OrderedDict()
        self._by_cluster: dict[int, deque[int]] = {}
        self._too_large: set[int] = set()
        for row in positions.argsort(kind="stable").tolist():
            self._insert(row, self._clusters[row])

    def replace(self, cluster: int) -> int:
        """Return the row that a new sample of a cluster replaces.

        It is the oldest of the largest cluster, of those without a cluster, or of all. The first if that cluster is too
        large; the second if they take up more than half of the storage.
        """
        alone = self._by_cluster.get(UNASSIGNED)
        if self._too_large:
            row = self._by_cluster[min(self._too_large, key=lambda one: (-len(self._by_cluster[one]), one))][0]
        elif alone and 2 * len(alone) > len(self._all):
            row = alone[0]
        else:
            row = next(iter(self._all))
        self._remove_oldest(self._clusters[row])
        self._insert(row, cluster)
        return row

    def _insert(self, row: int, cluster: int) -> None:
        self._all[row] = None
        self._clusters[row] = cluster
        self._by_cluster.setdefault(cluster, deque()).append(row)
        self._note_size(cluster)

    def _remove_oldest(self, cluster: int) -> None:
        del self._all[self._by_cluster[cluster].popleft()]
        self._note_size(cluster)

    def _note_size(self, cluster: int) -> None:
        if cluster == UNASSIGNED:
            return
        if len(self._by_cluster[cluster]) > self._max_cluster_size:
            self._too_large.add(cluster)
        else:
            self._too_large.discard(cluster)

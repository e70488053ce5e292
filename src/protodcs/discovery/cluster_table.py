"""The clusters between two passes: where each one lies, how far it reaches, and which is nearest to a sample."""

from dataclasses import dataclass

import numpy as np

from ..arrays import Features, Floats, Integers
from .clustering import directions, products
from .config import MAX_DISMISSED
from .reservoir import UNASSIGNED

# What `nearest` returns for a sample within the radius of a dismissed cluster.
DISMISSED = -2
# Longest name of a cluster, in characters.
MAX_NAME = 1000


@dataclass(frozen=True, slots=True)
class Cluster:
    """A group of similar unknown samples.

    Attributes:
        id: number of the cluster, stable from pass to pass.
        size: number of stored samples.
        keys: keys (n,) of the stored samples, the most typical first.
        centre: mean (d,) of the stored features, as a unit vector.
        similarity: mean cosine between the samples, after centring; 1 if they are equal.
        last_joined: position of the latest sample that joined it.
        name: the name that `name` gave it.
        edited: whether it was named, merged or split. Clustering passes then leave its members alone.
    """

    id: int
    size: int
    keys: Integers
    centre: Features
    similarity: float
    last_joined: int
    name: str | None
    edited: bool


@dataclass(slots=True)
class Entry:
    """A cluster between two passes.

    Attributes:
        centre: mean (d,) of the features of its members.
        min_cosine: a sample belongs if the cosine of its direction with that of the centre is at least this.
        last_joined: position of the latest sample that joined it.
        name: its name, if it has one.
        edited: whether a person named, merged or split it.
    """

    centre: Features
    min_cosine: float
    last_joined: int
    name: str | None = None
    edited: bool = False


def is_name(value: object) -> bool:
    """Return whether a value can be the name of a cluster."""
    return isinstance(value, str) and 0 < len(value) <= MAX_NAME and value.isprintable()


class ClusterTable:
    """All clusters by id, and those that were dismissed.

    Attributes:
        mean: the mean (d,) that the last pass subtracted; directions start from it.
        entries: the clusters.
        dismissed: centre and smallest cosine of each dismissed cluster, the oldest first.
    """

    def __init__(self, dimension: int):
        self.mean: Floats = np.zeros(dimension)
        self.entries: dict[int, Entry] = {}
        self.dismissed: list[tuple[Features, float]] = []
        self.refresh()

    def refresh(self) -> None:
        """Compute the directions of all clusters. Call it after each change of the attributes."""
        reaches = [*((entry.centre, entry.min_cosine) for entry in self.entries.values()), *self.dismissed]
        self._ids = np.array([*self.entries, *(DISMISSED for _ in self.dismissed)], dtype=np.int64)
        centres = np.array([centre for centre, _ in reaches], dtype=np.float32).reshape(-1, len(self.mean))
        self._directions = directions(centres, self.mean)
        self._min_cosines = np.array([least for _, least in reaches])

    def nearest(self, features: Features) -> Integers:
        """Return the nearest cluster (n,) of each feature (n, d); UNASSIGNED if it is outside of its radius."""
        if not len(self._ids):
            return np.full(len(features), UNASSIGNED)
        found = np.empty(len(features), dtype=np.int64)
        for i, row in enumerate(directions(features, self.mean)):
            cosines = products(self._directions, row)
            best = cosines.argmax()
            found[i] = self._ids[best] if cosines[best] >= self._min_cosines[best] else UNASSIGNED
        return found

    def dismiss(self, cluster: int) -> None:
        """Move a cluster to the dismissed ones."""
        entry = self.entries.pop(cluster)
        self.dismissed = [*self.dismissed, (entry.centre, entry.min_cosine)][-MAX_DISMISSED:]
        self.refresh()

"""Discovery: collect rejected features, cluster them from time to time, and keep the clusters apart in between.

Like an engine, it is a state machine without clock and randomness: the same calls give the same clusters and the same
snapshot.
"""

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from ..arrays import Features, Flags, Floats, Integers
from ..core.state import read, write
from ..core.validation import check_encoder, check_feature, check_features, check_prototype, described, unit_rows
from ..errors import ConfigError, InputError, UnknownClusterError, UsageError
from . import clustering
from .cluster_table import DISMISSED, MAX_NAME, Cluster, ClusterTable, Entry, is_name
from .config import FIRST_PASS, MAX_KNOWN, MIN_KNOWN, DiscoveryConfig
from .matching import Changes, match
from .naming import Suggestion, Vocabulary
from .prototypes import LIFT, new_prototype
from .reservoir import UNASSIGNED, Reservoir
from .snapshots import Contents, pack, unpack

_MAX_DIMENSION = 65_536
_MAX_KEY = 2**62


class Discovery:
    """Find groups of similar features among those that an engine rejects.

    Args:
        dimension: length of a feature.
        config: the settings.
        encoder: fingerprint of the encoder that makes the features, if known.

    >>> import numpy as np
    >>> rng = np.random.default_rng(0)
    >>> kinds = rng.normal(size=(3, 64))
    >>> discovery = Discovery(64)
    >>> _ = discovery.add_many(np.repeat(kinds, 20, axis=0) + 0.3 * rng.normal(size=(60, 64)))
    >>> _ = discovery.update()
    >>> [(cluster.id, cluster.size) for cluster in discovery.clusters()]
    [(0, 20), (1, 20), (2, 20)]
    """

    def __init__(self, dimension: int, config: DiscoveryConfig | None = None, encoder: str | None = None):
        if not isinstance(dimension, int) or not 2 <= dimension <= _MAX_DIMENSION:
            raise InputError(f"dimension must be an integer from 2 to {_MAX_DIMENSION}; given: {described(dimension)}")
        if config is not None and not isinstance(config, DiscoveryConfig):
            raise ConfigError(f"config must be a DiscoveryConfig; given: {described(config)}")
        check_encoder(encoder)
        self.config = config or DiscoveryConfig()
        self.encoder = encoder
        self._feature = np.empty(dimension, dtype=np.float32)
        self._reservoir = Reservoir(dimension, self.config.capacity)
        self._table = ClusterTable(dimension)
        self._known_mean = np.zeros(dimension)
        self._added = self._ignored = self._known = self._passes = self._next_id = 0
        # The value of `_added` and the number of stored samples at the last pass.
        self._last_pass = self._last_size = 0
        self._busy = threading.Lock()

    # Samples.

    @property
    def dimension(self) -> int:
        """Length of a feature."""
        return len(self._feature)

    def add(self, feature: NDArray[np.floating], key: int | None = None) -> int | None:
        """Add the feature (d,) of a rejected sample. Run a clustering pass if one is due.

        Args:
            feature: the feature; normalised on entry.
            key: your number for the sample, for example `decision.sequence`. None: the number of samples added before.

        Returns:
            The cluster that the sample belongs to; None if there is none yet, or if it was dismissed.
        """
        with self._exclusive():
            check_feature(feature, self._feature)
            return self._add(self._feature, self._added if key is None else _checked_key(key))

    def nearest(self, feature: NDArray[np.floating]) -> int | None:
        """Return the cluster that a feature (d,) lies in; None if there is none, or if it was dismissed."""
        with self._exclusive():
            check_feature(feature, self._feature)
            cluster = self._nearest(_as_stored(self._feature))
            return None if cluster in (UNASSIGNED, DISMISSED) else cluster

    def add_many(self, features: NDArray[np.floating], keys: Integers | None = None) -> list[int | None]:
        """Add features (n, d) in order, exactly as one by one. On bad input, none is added."""
        with self._exclusive():
            rows = check_features(features, self.dimension)
            if keys is not None and len(keys) != len(rows):
                raise InputError(f"there are {len(rows)} features and {len(keys)} keys: give one key for each")
            numbers = range(self._added, self._added + len(rows)) if keys is None else [_checked_key(k) for k in keys]
            return [self._add(row, key) for row, key in zip(rows, numbers, strict=True)]

    def note_known(self, feature: NDArray[np.floating]) -> None:
        """Take the feature (d,) of a sample that the engine accepted into the mean that passes subtract.

        The feature is not stored. Without known samples, passes subtract the mean of the stored ones. That hides what
        these have in common, so if they are of one or two kinds, passes find few clusters or none.
        """
        with self._exclusive():
            check_feature(feature, self._feature)
            self._known += 1
            self._known_mean += (self._feature - self._known_mean) / min(self._known, MAX_KNOWN)

    def update(self, groups: Integers | None = None) -> Changes:
        """Run a clustering pass now, and return what it changed.

        Args:
            groups: what `find_groups` returned; None: find the groups now.
        """
        with self._exclusive():
            return self._update(groups)

    def find_groups(self) -> Integers:
        """Return the groups that a clustering pass finds now, as numbers for `update`; nothing changes.

        This is the only part of a pass that takes long, and the only one that may differ between types of processors.
        If you repeat the calls of a discovery elsewhere, give the stored groups to `update`.
        """
        with self._exclusive():
            return self._find_groups()

    # Clusters.

    def clusters(self) -> list[Cluster]:
        """Return all clusters, the largest first."""
        with self._exclusive():
            found = [self._cluster(number) for number in self._table.entries if self._members(number).any()]
            return sorted(found, key=lambda cluster: (-cluster.size, cluster.id))

    def cluster(self, cluster: int) -> Cluster:
        """Return one cluster by its id."""
        with self._exclusive():
            return self._cluster(self._known_id(cluster))

    def keys(self) -> list[int]:
        """Return the keys of all stored samples."""
        with self._exclusive():
            keys: list[int] = self._reservoir.keys.tolist()
            return keys

    def feature(self, key: int) -> Features | None:
        """Return the stored feature (d,) with a key, the latest one if there are several; None if there is none."""
        with self._exclusive():
            found = np.flatnonzero(self._reservoir.keys == key)
            if not len(found):
                return None
            newest = found[self._reservoir.positions[found].argmax()]
            stored: Features = self._reservoir.half_features[newest].astype(np.float32)
            return stored

    def name(self, cluster: int, name: str) -> None:
        """Name a cluster. It then keeps its members in later passes, and `add` goes on to assign samples to it."""
        if not is_name(name):
            raise InputError(f"a name must have 1 to {MAX_NAME} printable characters; given: {described(name)}")
        with self._exclusive():
            entry = self._table.entries[self._known_id(cluster)]
            entry.name, entry.edited = name, True

    def name_of(self, cluster: int) -> str | None:
        """Return the name of a cluster; None if it has none."""
        with self._exclusive():
            return self._table.entries[self._known_id(cluster)].name

    def merge(self, first: int, second: int) -> None:
        """Move the members of the cluster `second` to the cluster `first`. Later passes keep them together.

        The cluster keeps the name of `first`, or takes that of `second` if `first` has none.
        """
        with self._exclusive():
            if self._known_id(first) == self._known_id(second):
                raise InputError(f"A cluster cannot be merged with itself; given: {first} and {second}.")
            removed = self._table.entries.pop(second)
            entry = self._table.entries[first]
            entry.edited, entry.last_joined = True, max(entry.last_joined, removed.last_joined)
            entry.name = entry.name or removed.name
            self._reservoir.assign(self._members(second), first)
            self._measure([first])

    def split(self, cluster: int) -> int:
        """Move about half of the members to a new cluster, and return its id. Later passes keep them apart."""
        with self._exclusive():
            members = np.flatnonzero(self._members(self._known_id(cluster)))
            if len(members) < 2:
                raise UsageError(f"Cluster {cluster} has one member. Only larger clusters can be split.")
            rows = clustering.directions(self._reservoir.features()[members], self._table.mean)
            moved = members[clustering.halves(rows) == 1]
            new = self._new_id()
            self._reservoir.assign(moved, new)
            entry = self._table.entries[cluster]
            entry.edited = True
            self._table.entries[new] = Entry(entry.centre, entry.min_cosine, entry.last_joined, edited=True)
            self._measure([cluster, new])
            return new

    def dismiss(self, cluster: int) -> None:
        """Remove a cluster and its samples, and ignore later samples within its radius.

        Call it for clusters without interest, and for those that became a class of the engine.
        """
        with self._exclusive():
            members = self._members(self._known_id(cluster))
            self._table.dismiss(cluster)
            self._reservoir.remove(members)

    # From cluster to class.

    def suggest_names(self, cluster: int, vocabulary: Vocabulary, count: int = 3) -> list[Suggestion]:
        """Return the `count` names of a vocabulary that fit a cluster best, the best first."""
        return vocabulary.suggest(self.cluster(cluster).centre, count)

    def prototype(
        self,
        cluster: int,
        known: NDArray[np.floating],
        text: NDArray[np.floating] | None = None,
        accepted: NDArray[np.floating] | None = None,
        lift: float = LIFT,
    ) -> Features:
        """Return a prototype (d,) for `engine.add_class`.

        Args:
            cluster: id of the cluster.
            known: text prototypes (K, d) of the engine's classes, without those that this function made.
            text: text feature (d,) of the new class, if you have a text encoder.
            accepted: features (N, d) of recent samples that the engine accepted. With them, more later samples get the
                class.
            lift: with a larger one, more samples get the class, also wrongly.
        """
        with self._exclusive():
            members = self._members(self._known_id(cluster))
            rows = unit_rows(known, "the known prototypes")
            if rows.shape[1] != self.dimension:
                raise InputError(f"the known prototypes must be of shape (K, {self.dimension}); given: {rows.shape}")
            unit_text = None if text is None else check_prototype(text, self.dimension)[0]
            stored = self._reservoir.features()
            none = accepted is None or not len(accepted)
            others = stored[:0] if none else check_features(accepted, self.dimension)
            return new_prototype(stored[members], others, stored, rows, unit_text, lift)

    # State.

    def stats(self) -> dict[str, Any]:
        """Return numbers for monitoring, JSON-ready."""
        with self._exclusive():
            return {
                "added": self._added,
                "stored": self._reservoir.size,
                "assigned": int((self._reservoir.clusters != UNASSIGNED).sum()),
                "clusters": len(np.unique(self._reservoir.clusters[self._reservoir.clusters != UNASSIGNED])),
                "dismissed_clusters": len(self._table.dismissed),
                "dismissed_samples": self._ignored,
                "known": self._known,
                "passes": self._passes,
                "since_pass": self._added - self._last_pass,
            }

    def snapshot(self) -> bytes:
        """Return the whole state. A discovery restored from it continues bit-exact."""
        with self._exclusive():
            counters = {
                "added": self._added,
                "ignored": self._ignored,
                "known": self._known,
                "passes": self._passes,
                "next_id": self._next_id,
                "last_pass": self._last_pass,
                "last_size": self._last_size,
            }
            return pack(Contents(self.config, self.encoder, counters, self._known_mean, self._reservoir, self._table))

    @classmethod
    def restore(cls, data: bytes, encoder: str | None = None) -> Self:
        """Return the discovery that `snapshot` was called on.

        Args:
            data: the state. It may come from anybody: damaged or hostile bytes raise `StateError`.
            encoder: fingerprint of the features to come, if known.
        """
        contents = unpack(data, encoder)
        discovery = cls(len(contents.table.mean), contents.config, contents.encoder)
        discovery._reservoir, discovery._table = contents.reservoir, contents.table
        discovery._known_mean = contents.known_mean
        for name, value in contents.counters.items():
            setattr(discovery, f"_{name}", value)
        return discovery

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a snapshot to a file atomically."""
        write(path, self.snapshot())

    @classmethod
    def load(cls, path: str | os.PathLike[str], encoder: str | None = None) -> Self:
        """Return the discovery that a file was saved from; see `restore`."""
        return cls.restore(read(path), encoder)

    # Implementation.

    def _add(self, feature: Features, key: int) -> int | None:
        position = self._added
        self._added += 1
        stored = _as_stored(feature)
        cluster = self._nearest(stored)
        if cluster == DISMISSED:
            self._ignored += 1
            return None
        row = self._reservoir.add(stored, key, position, cluster, self.config.max_cluster_size)
        if cluster != UNASSIGNED:
            self._table.entries[cluster].last_joined = position
        if self._is_due():
            self._update()
            found = np.flatnonzero(self._reservoir.positions == position)
            if not len(found):  # The pass has removed it.
                return None
            row = int(found[0])
        joined = int(self._reservoir.clusters[row])
        return None if joined == UNASSIGNED else joined

    def _nearest(self, stored: Features) -> int:
        return int(self._table.nearest(stored[None])[0])

    def _is_due(self) -> bool:
        # Early passes come each time the number of samples has doubled, so that first clusters appear soon.
        wait = min(self.config.interval, max(FIRST_PASS, self._last_size))
        return self.config.interval > 0 and self._added - self._last_pass >= wait

    def _find_groups(self) -> Integers:
        kept = ~np.isin(self._reservoir.clusters, self._expired())
        rows = self._reservoir.features(kept & ~self._edited())
        return clustering.find_groups(clustering.directions(rows, self._mean(kept)), self.config)

    def _update(self, groups: Integers | None = None) -> Changes:
        groups = self._find_groups() if groups is None else self._checked_groups(groups)
        expired = self._expire()
        reservoir, table = self._reservoir, self._table
        table.mean = self._mean(np.ones(reservoir.size, dtype=np.bool_))
        free = ~self._edited()
        before = reservoir.clusters[free]
        after, changes = match(groups, before, self._next_id)
        self._next_id += len(changes.created) + len(changes.split)
        reservoir.assign(free, after)
        self._rebuild_entries()
        self._assign_the_rest()
        self._passes += 1
        self._last_pass, self._last_size = self._added, reservoir.size
        changes.expired[:0] = expired
        return changes

    def _checked_groups(self, groups: Any) -> Integers:
        numbers = np.asarray(groups)
        wanted = int((~np.isin(self._reservoir.clusters, self._expired()) & ~self._edited()).sum())
        if numbers.shape != (wanted,) or (wanted and (numbers.dtype.kind != "i" or numbers.min() < UNASSIGNED)):
            raise InputError(f"`groups` must be {wanted} integers from -1; given: {described(groups)}")
        return numbers.astype(np.int64)

    def _edited(self) -> Flags:
        """Return which stored samples belong to a cluster that a person edited."""
        edited = [number for number, entry in self._table.entries.items() if entry.edited]
        return np.isin(self._reservoir.clusters, edited)

    def _mean(self, rows: Flags) -> Floats:
        """Return the mean (d,) to subtract from features: that of known samples, or of the stored ones in `rows`."""
        if self._known >= MIN_KNOWN:
            return self._known_mean.copy()
        if not rows.any():
            return self._table.mean
        return self._reservoir.features(rows).mean(axis=0, dtype=np.float64)

    def _expired(self) -> list[int]:
        """Return the clusters that no sample has joined for long, and those without members."""
        oldest = self._added - self.config.expire_after
        return [
            number
            for number, entry in self._table.entries.items()
            if entry.last_joined < oldest or not self._members(number).any()
        ]

    def _expire(self) -> list[int]:
        """Remove expired clusters. Return their ids."""
        expired = self._expired()
        if expired:
            self._reservoir.remove(np.isin(self._reservoir.clusters, expired))
            for number in expired:
                del self._table.entries[number]
        return expired

    def _rebuild_entries(self) -> None:
        """Make one entry for each cluster that has members. Those of earlier passes keep what is known of them."""
        reservoir, before = self._reservoir, self._table.entries
        numbers = np.unique(reservoir.clusters[reservoir.clusters != UNASSIGNED])
        self._table.entries = {}
        for number in numbers.tolist():
            newest = int(reservoir.positions[self._members(number)].max())
            old = before.get(number)
            entry = Entry(self._feature, 1.0, newest) if old is None else old
            entry.last_joined = max(entry.last_joined, newest)
            self._table.entries[number] = entry
        self._measure(numbers.tolist())

    def _measure(self, clusters: list[int]) -> None:
        """Compute centre and radius of clusters from their members."""
        features = self._reservoir.features()
        for number in clusters:
            entry = self._table.entries[number]
            entry.centre, entry.min_cosine = clustering.centre_and_radius(
                features[self._members(number)], self._table.mean
            )
        self._table.refresh()

    def _assign_the_rest(self) -> None:
        """Let samples without a cluster join the nearest one, if they are within its radius."""
        reservoir = self._reservoir
        alone = reservoir.clusters == UNASSIGNED
        reservoir.assign(alone, self._table.nearest(reservoir.features(alone)))
        dismissed = reservoir.clusters == DISMISSED
        if dismissed.any():
            self._ignored += int(dismissed.sum())
            reservoir.remove(dismissed)

    def _cluster(self, number: int) -> Cluster:
        entry, members = self._table.entries[number], self._members(number)
        features = self._reservoir.features(members)
        rows = clustering.directions(features, self._table.mean)
        likeness = clustering.products(rows, clustering.directions(entry.centre, self._table.mean))
        typical = np.argsort(-likeness, kind="stable")
        centre = features.mean(axis=0, dtype=np.float64)
        return Cluster(
            id=number,
            size=len(features),
            keys=self._reservoir.keys[members][typical],
            centre=(centre / np.linalg.norm(centre)).astype(np.float32),
            similarity=clustering.similarity(rows) if len(rows) > 1 else 1.0,
            last_joined=entry.last_joined,
            name=entry.name,
            edited=entry.edited,
        )

    def _members(self, number: int) -> Flags:
        return self._reservoir.clusters == number

    def _known_id(self, number: int) -> int:
        # Between two passes, all members of a cluster may have been replaced.
        if number not in self._table.entries or not self._members(number).any():
            raise UnknownClusterError(f"There is no cluster {number!r}. Call clusters() for those that exist now.")
        return number

    def _new_id(self) -> int:
        self._next_id += 1
        return self._next_id - 1

    @contextmanager
    def _exclusive(self) -> Iterator[None]:
        """Raise UsageError if another call runs."""
        if not self._busy.acquire(False):
            raise UsageError("Another thread is using this discovery. Call it from one thread, or use a lock.")
        try:
            yield
        finally:
            self._busy.release()


def _as_stored(feature: Features) -> Features:
    """Return a feature as it is stored, which decides: so a restored discovery does the same."""
    stored: Features = feature.astype(np.float16).astype(np.float32)
    return stored


def _checked_key(key: Any) -> int:
    if isinstance(key, bool) or not isinstance(key, (int, np.integer)) or not -_MAX_KEY <= key <= _MAX_KEY:
        raise InputError(f"a key must be an integer from -2**62 to 2**62; given: {described(key)}")
    return int(key)

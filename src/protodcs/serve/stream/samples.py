"""The samples of a stream that people work with: recent features, and clusters of rejected ones.

A pure state machine like the engine, and part of the snapshots of a stream. Clustering passes run only if they are
asked for, so an observe never waits for one. Features are stored as float16.
"""

import json
import struct
from collections import OrderedDict
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import ValidationError

from ...arrays import Feature, Features
from ...core.decision import Decision
from ...core.streamdcs.engine import StreamDCS
from ...discovery import Discovery, DiscoveryConfig
from ...errors import ConfigError, InputError, StateError, StoreError, UnknownSampleError, UsageError
from ...method import FeatureMethod
from .answers import JoinedCluster
from .feedback import Feedback

# Number of recent samples whose features are stored.
RECENT = 1000
# Largest number of rejected features of a stream: a clustering pass over them takes less than a second.
MAX_CAPACITY = 2000
# Samples of a cluster that teach a class when the cluster is assigned to it, the most typical ones.
_ASSIGNED = 20
# Positions of a cluster in a response.
_SHOWN = 50
# Samples before the first pass; later ones need half as many new samples as are stored.
_FIRST_PASS = 20
# Of the prototypes of a class that are tried.
_LIFTS = (0.7, 0.85, 1.0, 1.15, 1.3, 1.5)
_HEAD = struct.Struct("<QI")


def check_capacity(config: DiscoveryConfig) -> DiscoveryConfig:
    """Return the settings. Raise ConfigError if a stream of the service may not have them."""
    if config.capacity > MAX_CAPACITY:
        raise ConfigError(f"`capacity` must be at most {MAX_CAPACITY} in the service; given: {config.capacity}.")
    return config


class StreamSamples:
    """The recent features of a stream, and its discovery.

    Args:
        dimension: length of a feature.
        config: the settings of the discovery.
        encoder: fingerprint of the encoder, if known.
    """

    def __init__(self, dimension: int, config: DiscoveryConfig, encoder: str | None):
        self._config = config
        self._discovery = Discovery(dimension, config.model_copy(update={"interval": 0}), encoder)
        # By position, oldest first.
        self._recent: OrderedDict[int, NDArray[np.float16]] = OrderedDict()

    def add(self, position: int, feature: Feature, decision: Decision) -> JoinedCluster | None:
        """Store a sample after its decision. Return the cluster that it joined, if any."""
        self._recent[position] = feature.astype(np.float16)
        if len(self._recent) > RECENT:
            self._recent.popitem(last=False)
        if decision.known:
            self._discovery.note_known(feature)
            return None
        joined = self._discovery.add(feature, key=position)
        return None if joined is None else JoinedCluster(joined, self._discovery.name_of(joined))

    def feature(self, position: int) -> Feature:
        """Return the feature of the sample at a position. Raise UnknownSampleError if it is not stored any more."""
        found = self._recent.get(position)
        if found is not None:
            return found.astype(np.float32)
        stored = self._discovery.feature(position)
        if stored is None:
            raise UnknownSampleError(
                f"The feature at position {position} is not stored. The service stores those of the last {RECENT} "
                "samples and of rejected ones. Send the feature instead."
            )
        return stored

    def recent(self, positions: list[int]) -> list[Feature | None]:
        """Return the features at some positions, as far as they are stored."""
        return [None if (row := self._recent.get(p)) is None else row.astype(np.float32) for p in positions]

    @property
    def latest(self) -> Features:
        """The stored features of recent samples (N, d), oldest first."""
        rows = np.array([*self._recent.values()], dtype=np.float32)
        return rows.reshape(-1, self._discovery.dimension)

    @property
    def positions(self) -> list[int]:
        """The positions of recent samples, oldest first."""
        return [*self._recent]

    def similar(self, feature: Feature) -> list[int]:
        """Return the positions of the recent samples that are most like a feature (d,), the nearest first."""
        rows, positions = self.latest, self.positions
        if not positions:
            return []
        centred = rows - rows.mean(axis=0)
        lengths = np.maximum(np.linalg.norm(centred, axis=1), 1e-6)
        order = np.argsort(-(centred @ (feature - rows.mean(axis=0))) / lengths, kind="stable")
        return [positions[place] for place in order[:_SHOWN]]

    def prototypes(self, cluster: int, known: Features, text: Feature | None) -> list[Feature]:
        """Return prototypes (d,) that make a class of a cluster. Each next one takes more samples."""
        rejected = {*self._discovery.keys()}
        accepted = [row for position, row in self._recent.items() if position not in rejected]
        rows = np.array(accepted, dtype=np.float32).reshape(-1, self._discovery.dimension)
        return [self._discovery.prototype(cluster, known, text, rows, lift) for lift in _LIFTS]

    def facts(self) -> dict[str, Any]:
        """Return all clusters, the largest first, JSON-ready."""
        stats = self._discovery.stats()
        clusters = [
            {
                "id": cluster.id,
                "name": cluster.name,
                "size": cluster.size,
                "similarity": cluster.similarity,
                "edited": cluster.edited,
                "positions": cluster.keys[:_SHOWN].tolist(),
            }
            for cluster in self._discovery.clusters()
        ]
        wait = min(self._config.interval or RECENT, max(_FIRST_PASS, stats["stored"] // 2))
        return {
            "clusters": clusters,
            "stored": stats["stored"],
            "unassigned": stats["stored"] - stats["assigned"],
            "due": stats["since_pass"] >= wait,
        }

    def with_groups(self, payload: bytes) -> bytes:
        """Return an edit with the groups of the clustering pass that it asks for, so that a replay runs no pass."""
        edit = json.loads(payload)
        if edit["action"] != "update":
            return payload
        try:
            groups = self._discovery.find_groups()
        except ModuleNotFoundError as problem:
            raise UsageError(f"This service cannot cluster: {problem}") from None
        return json.dumps(edit | {"groups": groups.tolist()}, separators=(",", ":")).encode()

    def edit(self, payload: bytes, engine: FeatureMethod) -> bytes:
        """Change the clusters as a JSON object says. Return the cluster that now has the samples, as JSON."""
        edit = json.loads(payload)
        discovery, cluster = self._discovery, edit.get("cluster")
        match edit["action"]:
            case "update":
                discovery.update(np.array(edit["groups"], dtype=np.int64))
            case "name":
                discovery.name(cluster, edit["name"])
            case "merge":
                first, *others = edit["clusters"]
                # Check all of them first: an edit applies completely or not at all.
                if len({first, *others}) <= len(others):
                    raise InputError(f"Each cluster can be merged once; given: {[first, *others][:20]}.")
                for number in (first, *others):
                    discovery.cluster(number)
                for number in others:
                    discovery.merge(first, number)
                cluster = first
            case "split":
                cluster = discovery.split(cluster)
            case "dismiss":
                discovery.dismiss(cluster)
                cluster = None
            case "assign":
                self._assign(cluster, edit["label"], engine)
                cluster = None
            case other:
                raise InputError(f"There is no edit {other!r} of clusters.")
        return json.dumps({"cluster": cluster}).encode()

    def _assign(self, cluster: int, label: str, engine: FeatureMethod) -> None:
        """Correct the decisions on a cluster: its samples belong to a class of the engine."""
        members = self._discovery.cluster(cluster).keys[:_ASSIGNED].tolist()
        for position in reversed(members):
            give_feedback(engine, self.feature(position), Feedback(label))
        self._discovery.dismiss(cluster)

    # Snapshots.

    def pack(self) -> bytes:
        """Return all of it as bytes."""
        discovery = self._discovery.snapshot()
        positions = np.array([*self._recent], dtype="<i8")
        features = np.array([*self._recent.values()], dtype="<f2")
        return b"".join(
            [_HEAD.pack(len(discovery), len(positions)), discovery, positions.tobytes(), features.tobytes()]
        )

    def load(self, data: bytes) -> None:
        """Take over what `pack` returned. Raise StoreError for anything else."""
        try:
            size, count = _HEAD.unpack_from(data)
            self._discovery = Discovery.restore(data[_HEAD.size : _HEAD.size + size])
            at = _HEAD.size + size
            positions = np.frombuffer(data, "<i8", count, at)
            features = np.frombuffer(data, "<f2", count * self._discovery.dimension, at + positions.nbytes)
        except (struct.error, ValueError, StateError, ValidationError) as problem:
            raise StoreError(f"The stored samples of a stream cannot be read: {problem}") from None
        rows = features.reshape(count, self._discovery.dimension).copy()
        self._recent = OrderedDict(zip(positions.tolist(), rows, strict=True))


def give_feedback(engine: FeatureMethod, feature: Feature, given: Feedback) -> None:
    """Correct the decision on a feature, or withdraw a correction. Raise UsageError if the method takes none."""
    if not isinstance(engine, StreamDCS):
        raise UsageError(f"The method {engine.name!r} takes no feedback. Use the method 'streamdcs'.")
    if given.withdrawn:
        engine.withdraw_feedback(feature)
    else:
        engine.feedback(feature, given.label)

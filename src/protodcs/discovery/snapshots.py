"""The state of a discovery as bytes: the file format of engines, with a header and arrays of its own.

Anybody may have written a state, so everything in it is checked. Whatever no discovery can have written is a
StateError.
"""

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from ..arrays import Floats
from ..core import state
from ..core.state_checks import check_same_encoder, counter, required, within
from ..errors import ConfigError, StateError
from ..version import __version__
from .cluster_table import ClusterTable, Entry, is_name
from .config import MAX_DISMISSED, DiscoveryConfig
from .reservoir import UNASSIGNED, Reservoir

_MAX_COUNT = 2**62
# Cosines of unit vectors, with rounding.
_MAX_COSINE = 1.001


class Header(BaseModel):
    """The header of a discovery's state."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)

    format: Literal["protodcs-discovery"] = "protodcs-discovery"
    schema_version: Literal[1] = 1
    package: str = Field(max_length=100)
    config: dict[str, Any]
    encoder: str | None = Field(None, min_length=1, max_length=1000)
    counters: dict[str, int]
    names: list[list[int | str]] = Field(description="Id and name of each named cluster.")
    content_hash: str = "0" * 64


@dataclass(frozen=True, slots=True)
class Contents:
    """Everything that a discovery consists of."""

    config: DiscoveryConfig
    encoder: str | None
    counters: dict[str, int]
    known_mean: Floats
    reservoir: Reservoir
    table: ClusterTable


def pack(contents: Contents) -> bytes:
    """Return a state as bytes. The same state gives the same bytes."""
    table, reservoir = contents.table, contents.reservoir
    header = Header(
        package=__version__,
        config=contents.config.model_dump(),
        encoder=contents.encoder,
        counters=contents.counters,
        names=[[number, entry.name] for number, entry in table.entries.items() if entry.name is not None],
    )
    entries, width = list(table.entries.values()), len(table.mean)
    arrays: state.Arrays = {
        "features": reservoir.half_features,
        "samples": reservoir.numbers,
        "mean": table.mean,
        "known_mean": contents.known_mean,
        "cluster_numbers": np.array(
            [(number, entry.last_joined, entry.edited) for number, entry in table.entries.items()], dtype=np.int64
        ).reshape(-1, 3),
        "cluster_centres": np.array([entry.centre for entry in entries], dtype=np.float32).reshape(-1, width),
        "cluster_cosines": np.array([entry.min_cosine for entry in entries], dtype=np.float64),
        "dismissed_centres": np.array([centre for centre, _ in table.dismissed], dtype=np.float32).reshape(-1, width),
        "dismissed_cosines": np.array([least for _, least in table.dismissed], dtype=np.float64),
    }
    return state.pack(header, arrays)


def unpack(data: bytes, encoder: str | None) -> Contents:
    """Return what a state consists of. Raise StateError if it is damaged, or belongs to another encoder."""
    header, arrays = state.unpack(data, header_type=Header)
    check_same_encoder(header.encoder, encoder, "discovery")
    try:
        config = DiscoveryConfig(**header.config)
    except ConfigError as problem:
        raise StateError(f"The header of the state is invalid: {problem}") from None
    counters = _counters(header.counters, config)
    mean = required(arrays, "mean", np.float64, (None,))
    if len(mean) < 2:
        raise StateError("the state's array 'mean' has fewer than two values")
    table = _table(arrays, within(mean, "mean", -1.01, 1.01).copy(), counters)
    _set_names(table, header.names)
    known_mean = within(required(arrays, "known_mean", np.float64, mean.shape), "known_mean", -1.01, 1.01).copy()
    reservoir = _reservoir(arrays, config, counters, table)
    return Contents(config, header.encoder or encoder, counters, known_mean, reservoir, table)


def _counters(given: dict[str, int], config: DiscoveryConfig) -> dict[str, int]:
    added = counter(given, "added", high=_MAX_COUNT)
    limits = {
        "added": added,
        "ignored": added,
        "known": _MAX_COUNT,
        "passes": _MAX_COUNT,
        "next_id": _MAX_COUNT,
        "last_pass": added,
        "last_size": config.capacity,
    }
    return {name: counter(given, name, high=high) for name, high in limits.items()}


def _table(arrays: state.Arrays, mean: np.ndarray[Any, Any], counters: dict[str, int]) -> ClusterTable:
    numbers = required(arrays, "cluster_numbers", np.int64, (None, 3))
    ids, last_joined, edited = numbers.T
    centres, cosines = _reaches(arrays, "cluster", len(numbers), len(mean))
    within(ids, "cluster_numbers", 0, counters["next_id"] - 1)
    within(last_joined, "cluster_numbers", 0, counters["added"] - 1)
    within(edited, "cluster_numbers", 0, 1)
    if len(set(ids.tolist())) < len(ids):
        raise StateError("the state contains a cluster twice")
    table = ClusterTable(len(mean))
    table.mean = mean
    for i, number in enumerate(ids.tolist()):
        reach = centres[i].copy(), float(cosines[i])
        table.entries[number] = Entry(*reach, int(last_joined[i]), edited=bool(edited[i]))
    dismissed = len(required(arrays, "dismissed_cosines", np.float64, (None,)))
    if dismissed > MAX_DISMISSED:
        raise StateError(f"the state contains {dismissed} dismissed clusters, at most {MAX_DISMISSED} are possible")
    centres, cosines = _reaches(arrays, "dismissed", dismissed, len(mean))
    table.dismissed = [(centre.copy(), float(least)) for centre, least in zip(centres, cosines, strict=True)]
    table.refresh()
    return table


def _set_names(table: ClusterTable, names: list[list[int | str]]) -> None:
    for pair in names:
        number, name = pair if len(pair) == 2 else (None, None)
        if not isinstance(number, int) or number not in table.entries or not is_name(name):
            raise StateError(f"the state has the cluster name {str(pair)[:100]}, which no cluster can have")
        table.entries[number].name = str(name)


def _reaches(arrays: state.Arrays, kind: str, count: int, width: int) -> tuple[Any, Any]:
    """Return centres (count, width) and smallest cosines (count,) of clusters."""
    centres = required(arrays, f"{kind}_centres", np.float32, (count, width))
    cosines = required(arrays, f"{kind}_cosines", np.float64, (count,))
    within(centres, f"{kind}_centres", -1.01, 1.01)
    return centres, within(cosines, f"{kind}_cosines", -_MAX_COSINE, _MAX_COSINE)


def _reservoir(
    arrays: state.Arrays, config: DiscoveryConfig, counters: dict[str, int], table: ClusterTable
) -> Reservoir:
    features = required(arrays, "features", np.float16, (None, len(table.mean)))
    samples = required(arrays, "samples", np.int64, (len(features), 3))
    if len(features) > config.capacity:
        raise StateError(f"the state contains {len(features)} samples, its capacity is {config.capacity}")
    within(features, "features", -1.01, 1.01)
    if len(features) and not (np.abs(np.linalg.norm(features.astype(np.float32), axis=1) - 1.0) < 0.01).all():
        raise StateError("the state's array 'features' has rows that are not of length one")
    keys, positions, clusters = samples.T
    within(keys, "samples", -_MAX_COUNT, _MAX_COUNT)
    within(positions, "samples", 0, counters["added"] - 1)
    if len(np.unique(positions)) < len(positions):
        raise StateError("the state contains a sample twice")
    if not np.isin(clusters, [UNASSIGNED, *table.entries]).all():
        raise StateError("the state has samples of a cluster that it does not contain")
    return Reservoir.of(features, samples, config.capacity)

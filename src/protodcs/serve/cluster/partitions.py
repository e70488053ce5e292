"""Partitions of streams, and which process each of them should belong to."""

import hashlib
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np

COUNT = 4096


def partition_of(stream: str) -> int:
    """Return the partition of a stream. It never changes.

    >>> partition_of("camera-7")
    3174
    """
    return _hash(stream) % COUNT


@lru_cache(maxsize=8)
def best_owners(processes: tuple[str, ...]) -> tuple[str, ...]:
    """Return which process should own each partition; empty names if there is none. Their order does not matter.

    The process with the highest weight gets a partition. A weight depends on nothing else, so a process that leaves
    gives its partitions to all others, and no other partition moves.
    """
    names = sorted(processes)
    if not names:
        return ("",) * COUNT
    best = np.zeros(COUNT, np.int64)
    highest = np.zeros(COUNT, np.uint64)
    for number, name in enumerate(names):
        weights = _weights(name)
        better = weights > highest
        best[better] = number
        highest[better] = weights[better]
    return tuple(names[number] for number in best)


@dataclass(frozen=True)
class PartitionMap:
    """Where streams belong, as forwarding and workers see it.

    Attributes:
        workers: the names of all processes that live, in order.
        staying: those of them that take partitions. The others are being stopped.
        owners: who owns each partition; None: nobody.
    """

    workers: tuple[str, ...]
    staying: tuple[str, ...]
    owners: tuple[str | None, ...]

    @cached_property
    def best(self) -> tuple[str, ...]:
        """Who should own each partition; empty: nobody is there."""
        return best_owners(self.staying)

    @cached_property
    def _first(self) -> list[str]:
        live = set(self.workers)
        # Streams of a process that died belong at once to the one that will take its partitions.
        return [
            owner if owner is not None and owner in live else best
            for owner, best in zip(self.owners, self.best, strict=True)
        ]

    def first(self, stream: str) -> str:
        """Return the process that a stream belongs to; empty: there is none."""
        return self._first[partition_of(stream)]

    def order(self, stream: str) -> list[str]:
        """Return the process that a stream belongs to, then those that may stand in for it."""
        partition = partition_of(stream)
        others = sorted(self.staying or self.workers, key=lambda name: _weights(name)[partition], reverse=True)
        return list(dict.fromkeys([self.first(stream), *others]))


@lru_cache(maxsize=2048)
def _weights(process: str) -> np.ndarray:
    """Return a random weight for each partition, by the mixing function of SplitMix64."""
    mixed = np.arange(1, COUNT + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(_hash(process))
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed ^= mixed >> np.uint64(31)
    mixed.setflags(write=False)
    return mixed


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "big")

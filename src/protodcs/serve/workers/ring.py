"""Which worker a stream belongs to: a consistent hash, so that a worker more or less moves few streams.

It is a hint; that no two workers write to one stream is the promise of the store.
"""

import hashlib
from bisect import bisect_right
from collections.abc import Awaitable, Callable, Iterable
from typing import Protocol

# With so many places on the ring the fullest of four workers has about a tenth more than its share.
_PLACES = 128


class Placement(Protocol):
    """Which worker each stream belongs to."""

    @property
    def workers(self) -> tuple[str, ...]:
        """Return the names of all workers."""
        ...

    def order(self, stream: str) -> list[str]:
        """Return workers that may serve a stream: the one it belongs to first, then those who stand in for it."""
        ...

    def first(self, stream: str) -> str:
        """Return the worker that a stream belongs to."""
        ...


FindPlacement = Callable[[], Awaitable[Placement]]


class Ring:
    """The workers around a ring. Everybody who knows their names computes it alike.

    >>> Ring(["a", "b"]).order("camera-7")
    ['a', 'b']
    """

    def __init__(self, workers: Iterable[str]):
        self.workers = tuple(sorted(set(workers)))
        places = sorted((_place(f"{worker}/{number}"), worker) for worker in self.workers for number in range(_PLACES))
        self._places = [place for place, _ in places]
        self._names = [worker for _, worker in places]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Ring) and self.workers == other.workers

    def __hash__(self) -> int:
        return hash(self.workers)

    def order(self, stream: str) -> list[str]:
        """All workers, the one the stream belongs to first, then those who stand in for it."""
        at = bisect_right(self._places, _place(stream))
        around = self._names[at:] + self._names[:at]
        return list(dict.fromkeys(around))

    def first(self, stream: str) -> str:
        """The worker the stream belongs to."""
        return self._names[bisect_right(self._places, _place(stream)) % len(self._names)]


def ring_of(list_workers: Callable[[], Awaitable[list[str]]]) -> FindPlacement:
    """Return what finds the ring of the workers that `list_workers` returns."""

    async def find() -> Placement:
        return Ring(await list_workers())

    return find


def _place(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "big")

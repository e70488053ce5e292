"""Which worker a stream belongs to: a consistent hash, so that a worker more or less moves few streams.

It is a hint that everybody computes alike; that no two workers write to one stream is the promise of the store.
"""

import hashlib
from bisect import bisect_right
from collections.abc import Iterable

# With so many places on the ring the fullest of four workers has about a tenth more than its share.
_PLACES = 128


class Ring:
    """The workers around a ring.

    >>> Ring(["a", "b"]).order("camera-7")
    ['a', 'b']
    """

    def __init__(self, workers: Iterable[str]):
        self.workers = tuple(sorted(set(workers)))
        places = sorted((_place(f"{worker}/{number}"), worker) for worker in self.workers for number in range(_PLACES))
        self._places = [place for place, _ in places]
        self._names = [worker for _, worker in places]

    def order(self, stream: str) -> list[str]:
        """All workers, the one the stream belongs to first, then those who stand in for it."""
        at = bisect_right(self._places, _place(stream))
        around = self._names[at:] + self._names[:at]
        return list(dict.fromkeys(around))

    def first(self, stream: str) -> str:
        """The worker the stream belongs to."""
        return self._names[bisect_right(self._places, _place(stream)) % len(self._names)]


def _place(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "big")

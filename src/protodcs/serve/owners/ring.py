"""Which owner a stream belongs to: a consistent hash, so that an owner more or less moves few streams.

It is a hint that everybody computes alike; that no two owners write to one stream is the promise of the store.
"""

import hashlib
from bisect import bisect_right
from collections.abc import Iterable

# With so many places on the ring the fullest of four owners has about a tenth more than its share.
_PLACES = 128


class Ring:
    """The owners around a ring.

    >>> Ring(["a", "b"]).order("camera-7")
    ['a', 'b']
    """

    def __init__(self, owners: Iterable[str]):
        self.owners = tuple(sorted(set(owners)))
        places = sorted((_place(f"{owner}/{number}"), owner) for owner in self.owners for number in range(_PLACES))
        self._places = [place for place, _ in places]
        self._names = [owner for _, owner in places]

    def order(self, stream: str) -> list[str]:
        """All owners, the one the stream belongs to first, then those who stand in for it."""
        at = bisect_right(self._places, _place(stream))
        around = self._names[at:] + self._names[:at]
        return list(dict.fromkeys(around))

    def first(self, stream: str) -> str:
        """The owner the stream belongs to."""
        return self._names[bisect_right(self._places, _place(stream)) % len(self._names)]


def _place(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "big")

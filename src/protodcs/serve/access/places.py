"""How many requests may be under way at once: as many as leave each of them about as fast as one that is alone.

Nobody has to know what the machine can do: requests that were alone say how fast it is, those that were not say how
crowded it has become. No tenant takes the places of another one that is about. It holds no request and reads no clock.
"""

import math
from collections import Counter, deque
from statistics import median

# Places before anything is known, to which a bad moment is forgotten; and at least.
_FIRST, _LEAST = 8.0, 2.0
# After so many answers the number of places is looked at; so many of those that were alone are remembered.
_WINDOW, _ALONE = 16, 64
# How the number changes where requests became too slow; where they did not and more want in, it grows by one.
_FEWER = 0.85
# For so long a tenant that asked is taken to be about, in seconds.
_ABOUT = 1.0
# After so many seconds in which nobody was alone, one comes in alone: for at most so long others are kept out for it.
_FRESH, _BREATH = 10.0, 0.5


class Places:
    """The places of one process.

    >>> places = Places(slowdown=2)
    >>> [places.enter("a", now=0.0) for _ in range(9)].count(True)
    8

    Args:
        slowdown: how many times slower than alone requests may become, by the median.

    Attributes:
        most: how many places there are now.
        taken: how many are taken.
    """

    def __init__(self, slowdown: float):
        self._slowdown = slowdown
        self.most = _FIRST
        self.taken = 0
        self._taken_by: Counter[str] = Counter()
        self._asked: dict[str, float] = {}
        self._entered = 0
        self._wanted = False
        self._recent: list[float] = []
        self._alone_at = -float("inf")
        self._alone: deque[float] = deque(maxlen=_ALONE)

    def enter(self, tenant: str, now: float) -> bool:
        """Take a place, if there is one for this tenant."""
        self._asked[tenant] = now
        if not self._has_place(tenant, now):
            self._wanted = True
            return False
        self.taken += 1
        self._taken_by[tenant] += 1
        self._entered += 1
        return True

    def _has_place(self, tenant: str, now: float) -> bool:
        since = now - self._alone_at
        if since > _FRESH + _BREATH:
            self._alone_at = now
        elif since > _FRESH:
            return self.taken == 0
        # Its part is free for a tenant always; beyond it, as long as one place is left for each of the others.
        about = self._about(now)
        part = math.ceil(int(self.most) / about)
        return self._taken_by[tenant] < part or self.taken < int(self.most) - (about - 1)

    def mark(self) -> int:
        """What to show to `leave`, taken right after `enter`: whether others were there is told by it. 0: they were."""
        return self._entered if self.taken == 1 else 0

    def leave(self, tenant: str, mark: int, now: float, seconds: float | None) -> None:
        """Give a place back; `seconds` is how long a good answer took, and None for any other."""
        self.taken -= 1
        self._taken_by[tenant] -= 1
        if not self._taken_by[tenant]:
            del self._taken_by[tenant]
        if seconds is None:
            return
        if mark and mark == self._entered:
            self._alone.append(seconds)
            self._alone_at = now
        self._recent.append(seconds)
        if len(self._recent) >= _WINDOW:
            self._adapt()

    def _adapt(self) -> None:
        if not self._alone or median(self._recent) > self._slowdown * median(self._alone):
            self.most = max(_LEAST, self.most * _FEWER)
        elif self._wanted or self.most < _FIRST:
            self.most += 1
        self._recent.clear()
        self._wanted = False

    def _about(self, now: float) -> int:
        """How many tenants asked lately."""
        if len(self._asked) > 1:
            self._asked = {tenant: asked for tenant, asked in self._asked.items() if now - asked < _ABOUT}
        return len(self._asked)

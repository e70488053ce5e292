"""The time for decisions that cannot be taken back, such as deleting what is too old.

A clock can be wrong for a while: after a boot without network, by a mistake of a person or of a time server. What it
says is trusted after it ran for an hour without being set.
"""

from collections.abc import Callable
from typing import Final

# Time without a jump after which the clock is trusted. Seconds.
STEADY_SECONDS: Final = 3600.0
# Between two readings, the clock may gain or lose so much without counting as set: time servers slew it. Seconds.
_TOLERANCE: Final = 60.0


class SteadyClock:
    """A clock that says nothing after it was set.

    Args:
        wall: returns the seconds since 1970.
        monotonic: returns seconds that no one sets.
    """

    def __init__(self, wall: Callable[[], float], monotonic: Callable[[], float]):
        self._wall = wall
        self._monotonic = monotonic
        self._offset = wall() - monotonic()
        self._set = monotonic()

    def now(self) -> float | None:
        """Return the seconds since 1970; None if the clock was set, or this object made, within the last hour.

        Call it every few seconds: a jump that came and went between two calls is not seen.
        """
        wall, monotonic = self._wall(), self._monotonic()
        if abs(wall - monotonic - self._offset) > _TOLERANCE:
            self._set = monotonic
        self._offset = wall - monotonic
        return wall if monotonic - self._set >= STEADY_SECONDS else None

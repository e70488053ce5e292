"""Turns: how the streams of a process share its event loop.

In each turn of the event loop, streams compute for a millisecond in all. New work goes first, in its order. Then work
that goes on gets one slice, so that short work never waits for long work, and long work always ends.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable

# Work gets the time until which it may compute, by the monotonic clock.
Work = Callable[[float], None]

# So long streams compute in one turn, in seconds.
SLICE = 0.001


class Turns:
    """Shares the time of one event loop."""

    def __init__(self) -> None:
        self._new: deque[Work] = deque()
        self._going_on: deque[Work] = deque()
        # When this turn has computed for long enough; None before it computes.
        self._end: float | None = None

    def begin(self, work: Work) -> None:
        """Do new work: at once if this turn has time left, and else in one of the next turns."""
        end = self._turn_end()
        if self._new or time.monotonic() >= end:
            self._new.append(work)
        else:
            work(end)

    def go_on(self, work: Work) -> None:
        """Go on with work that has computed in an earlier turn."""
        self._turn_end()
        self._going_on.append(work)

    async def wait(self, goes_on: bool = False) -> float:
        """Wait for a turn. Return until when the caller may compute."""
        turn = asyncio.Event()
        (self.go_on if goes_on else self.begin)(lambda _: turn.set())
        await turn.wait()
        return time.monotonic() + SLICE

    def _turn_end(self) -> float:
        if self._end is None:
            self._end = time.monotonic() + SLICE
            asyncio.get_running_loop().call_soon(self._take_turn)
        return self._end

    def _take_turn(self) -> None:
        self._end = None
        if not (self._new or self._going_on):
            return
        end = self._turn_end()
        while self._new and time.monotonic() < end:
            self._new.popleft()(end)
        if self._going_on:
            # Even if new work took all of the time, or it would never end.
            self._going_on.popleft()(end)

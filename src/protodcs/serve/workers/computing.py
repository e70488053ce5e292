"""When and where a worker computes: short work in turns of the event loop, long work in threads."""

import asyncio
import heapq
import itertools
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from .loaded_stream import LoadedStream

# A worker computes for so long before other tasks of its event loop get a turn, in seconds.
_SLICE = 0.001
# So many tasks with new work start in the next turn. Those for which there is no time left wait again.
_STARTS = 16
_THREADS = 2

T = TypeVar("T")
_Waiting = list[tuple[int, "asyncio.Future[None]"]]


class Computing:
    """Shares the time of one event loop, and a few threads, among the streams of a worker."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="state")
        # All slow streams share few threads, so that they leave cores to the other streams.
        self._slow_threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="slow streams")
        # When this turn of the event loop has computed for long enough; None before it computes.
        self._turn_ends: float | None = None
        # Those who wait for a turn, by their place: with new work, and with work that goes on.
        self._waiting: _Waiting = []
        self._going_on: _Waiting = []
        self._places = itertools.count()

    async def wait_turn(self, goes_on: bool = False) -> None:
        """Wait until a turn of the event loop has time left to compute.

        Args:
            goes_on: this is no new work: it has computed in an earlier turn. It waits apart from new work, so that
                short work does not wait for long work.
        """
        waiting = self._going_on if goes_on else self._waiting
        must_wait, place = bool(waiting), next(self._places)
        while must_wait or time.monotonic() >= self.turn_end():
            turn = asyncio.get_running_loop().create_future()
            heapq.heappush(waiting, (place, turn))
            try:
                await turn
            finally:
                # Even if it is cancelled: the end of this turn starts the next ones that wait.
                self.turn_end()
            if goes_on:
                # Even if new work took all of the time, or it would never end.
                return
            must_wait = False

    def turn_end(self) -> float:
        """Return when to stop computing in this turn of the event loop."""
        if self._turn_ends is None:
            self._turn_ends = time.monotonic() + _SLICE
            # This runs at the beginning of the next turn.
            asyncio.get_running_loop().call_soon(self._begin_turn)
        return self._turn_ends

    def _begin_turn(self) -> None:
        self._turn_ends = None
        _start(self._waiting, _STARTS)
        _start(self._going_on, 1)

    async def run(self, loaded: LoadedStream, work: Callable[[], T], long: bool = False) -> T:
        """Work on a stream that nobody else uses: in a thread if the work, or any step of the stream, can take long."""
        if not (long or loaded.slow):
            return work()
        return await self.in_thread(work, slow=loaded.slow)

    async def in_thread(self, work: Callable[[], T], slow: bool = False) -> T:
        """Work in a thread; in one of those for slow streams if the work belongs to one."""
        pool = self._slow_threads if slow else self._threads
        return await asyncio.get_running_loop().run_in_executor(pool, work)

    def close(self) -> None:
        """Begin no further work in threads."""
        for pool in (self._threads, self._slow_threads):
            pool.shutdown(wait=False, cancel_futures=True)


def _start(waiting: _Waiting, most: int) -> None:
    """Start those who waited longest."""
    while waiting and most:
        _, turn = heapq.heappop(waiting)
        if not turn.done():
            turn.set_result(None)
            most -= 1

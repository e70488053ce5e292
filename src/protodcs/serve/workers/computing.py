"""Work in threads: what would block the event loop for too long."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from .loaded_stream import LoadedStream

_THREADS = 2

T = TypeVar("T")


class Computing:
    """The threads that the streams of a worker share."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="state")
        # All slow streams share few threads, so that they leave cores to the other streams.
        self._slow_threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="slow streams")

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

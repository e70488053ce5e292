"""Compute results in a background thread before they are needed, in order and with a bounded buffer.

An error is raised after all results before it. The thread must never outlive its reader: not if the reader stops early,
is garbage-collected, fails, or ends the program.
"""

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextvars import copy_context
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from threading import Thread, current_thread
from typing import Generic, TypeVar

from .errors import UsageError

Item = TypeVar("Item")
Result = TypeVar("Result")
Work = Callable[[Iterator[Item]], Iterator[Result]]

# Seconds to wait for a thread that is blocked in the caller's iterator, which nothing can interrupt. The thread ends by
# itself when the next item comes.
STOP_TIMEOUT = 0.5


@dataclass(frozen=True, slots=True)
class _Last:
    """Mark the end of the results."""

    error: BaseException | None


class _Stopped(BaseException):
    """End the work from inside. It is no Exception, so that work which handles errors does not catch it."""


class _Channel(Generic[Result]):
    """Connect the thread and its reader.

    The garbage collector may stop a reader in any thread, even in the thread itself. So there is no lock here:
    `SimpleQueue` may be used from a destructor, and setting a flag is atomic.
    """

    def __init__(self, limit: int):
        self.results: SimpleQueue[Result | _Last] = SimpleQueue()
        # The thread takes a ticket before it starts on a result, and the reader gives it back when it takes one.
        self.tickets: SimpleQueue[None] = SimpleQueue()
        for _ in range(limit):
            self.tickets.put(None)
        self.stopped = False
        self.waits_for_item = False

    def watched(self, items: Iterable[Item]) -> Iterator[Item]:
        """Yield the items until the reader stops."""
        self.waits_for_item = True
        source = iter(items)
        while True:
            # In this order, so that either `stop` sees the flag or this thread sees `stopped`.
            self.waits_for_item = True
            if self.stopped:
                raise _Stopped
            try:
                item = next(source)
            except StopIteration:
                return
            finally:
                self.waits_for_item = False
                # The reader has stopped, so errors and the end of the items do not matter.
                if self.stopped:
                    raise _Stopped
            yield item

    def fill(self, work: Work[Item, Result], items: Iterable[Item]) -> None:
        """Do the work in the thread, result by result."""
        try:
            results = work(self.watched(items))
            while True:
                self.tickets.get()
                if self.stopped:
                    raise _Stopped
                self.results.put(next(results))
        except (StopIteration, _Stopped):
            self.results.put(_Last(None))
        except BaseException as error:
            self.results.put(_Last(error))

    def stop(self, thread: Thread) -> None:
        """End the thread and wait for it, but not for long if it waits for an item."""
        self.stopped = True
        self.tickets.put(None)
        if thread is current_thread() or not thread.is_alive():
            return
        thread.join(STOP_TIMEOUT)
        while thread.is_alive() and not self.waits_for_item:
            thread.join(STOP_TIMEOUT)


class Prefetcher(Iterator[Result]):
    """Iterate over the results of `work(items)`, computed in a background thread.

        with closing(Prefetcher(work, items, 2)) as results:
            for result in results: ...

    Both `items` and `work` run in that thread, and `work` reads an item when it needs it. The thread starts at once. An
    exception in either is raised here, after the results before it.

    Args:
        work: turns an iterator over items into an iterator over results.
        items: the items; may block and may be endless.
        limit: largest number of results in progress or in the buffer.
    """

    def __init__(self, work: Work[Item, Result], items: Iterable[Item], limit: int):
        self._channel: _Channel[Result] = _Channel(limit)
        # The items are read in the context of the caller. The thread is a daemon, because the program would otherwise
        # wait for it at exit. The finalizer, which also runs at exit, ends it in order.
        self._thread = Thread(
            target=copy_context().run, args=(self._channel.fill, work, items), name="protodcs-prefetch", daemon=True
        )
        self._finalizer = weakref.finalize(self, self._channel.stop, self._thread)
        self._thread.start()

    def __next__(self) -> Result:
        if not self._finalizer.alive:
            raise StopIteration
        result = self._taken()
        if not isinstance(result, _Last):
            self._channel.tickets.put(None)
            return result
        self.close()
        if result.error is None:
            raise StopIteration
        try:
            raise result.error
        finally:
            # The error refers to this frame: the two would keep each other alive.
            del result

    @property
    def waiting(self) -> bool:
        """Whether the next result, or the end, is available."""
        return not self._channel.results.empty()

    def close(self) -> None:
        """Stop the thread and discard its results.

        Returns when the thread has ended, at the latest after the current item or result. If the thread is blocked in
        `items`, it is left running and ends when the next item comes.
        """
        self._finalizer()

    def _taken(self) -> Result | _Last:
        while True:
            try:
                return self._channel.results.get(timeout=STOP_TIMEOUT)
            except Empty:
                if not self._thread.is_alive() and self._channel.results.empty():
                    raise UsageError(
                        "The background thread is gone, as after a fork. Start a new stream in this process."
                    ) from None

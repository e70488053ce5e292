"""Work that runs ahead of whoever takes its results: one background thread, a bounded number of results, their order.

An error comes out at its place, after all results before it. The thread must never outlive its reader: not when that
one stops early, is collected, fails, or ends the program.
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

# Seconds after which a thread that stops, and still waits for the next item, is left alone: nothing can interrupt the
# code of a stranger. It ends by itself when the item comes.
PATIENCE = 0.5


@dataclass(frozen=True, slots=True)
class _Last:
    """What comes after the last result."""

    error: BaseException | None


class _Stopped(BaseException):
    """Ends the work from inside; no Exception, so that work which survives errors of its items does not survive it."""


class _Desk(Generic[Result]):
    """What thread and reader share.

    A collector may stop a reader in any thread and at any place, inside the thread itself too. So there is no lock
    here: these queues may be used from a destructor, and a flag is set in one step.
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
        """The items, until the reader has gone."""
        self.waits_for_item = True
        source = iter(items)
        while True:
            # In this order: who stops the thread sees that it waits, or is seen by it.
            self.waits_for_item = True
            if self.stopped:
                raise _Stopped
            try:
                item = next(source)
            except StopIteration:
                return
            finally:
                self.waits_for_item = False
                # Whatever came of the item, an error or the end too, nobody wants it any more.
                if self.stopped:
                    raise _Stopped
            yield item

    def fill(self, work: Work[Item, Result], items: Iterable[Item]) -> None:
        """The thread: do the work, result by result."""
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
        """Let the thread end, and wait until it has; on an item it does not wait for long."""
        self.stopped = True
        self.tickets.put(None)
        if thread is current_thread() or not thread.is_alive():
            return
        thread.join(PATIENCE)
        while thread.is_alive() and not self.waits_for_item:
            thread.join(PATIENCE)


class Ahead(Iterator[Result]):
    """The results of `work(items)`, made in a background thread.

        with closing(Ahead(work, items, 2)) as results:
            for result in results: ...

    Both `items` and `work` run in that thread, and `work` reads an item when it needs it. The thread starts at once. An
    exception of either is raised here, after the results before it.

    Args:
        work: from an iterator over the items to an iterator over the results.
        items: what the work needs; may block, and may be endless.
        limit: how many results are in the making or wait, beyond the last one that was taken.
    """

    def __init__(self, work: Work[Item, Result], items: Iterable[Item], limit: int):
        self._desk: _Desk[Result] = _Desk(limit)
        # In the context of the caller, as if the items were read here. As a daemon, because the program would otherwise
        # wait for a thread that waits for its reader; the finalizer, which is also called at exit, ends it in order.
        self._thread = Thread(
            target=copy_context().run, args=(self._desk.fill, work, items), name="protodcs-ahead", daemon=True
        )
        self._finalizer = weakref.finalize(self, self._desk.stop, self._thread)
        self._thread.start()

    def __next__(self) -> Result:
        if not self._finalizer.alive:
            raise StopIteration
        result = self._taken()
        if not isinstance(result, _Last):
            self._desk.tickets.put(None)
            return result
        self.close()
        if result.error is None:
            raise StopIteration
        try:
            raise result.error
        finally:
            # The error knows this frame: they would keep each other, and all that hangs on them, alive.
            del result

    @property
    def waiting(self) -> bool:
        """Whether the next result, or the end, is there already."""
        return not self._desk.results.empty()

    def close(self) -> None:
        """Stop the thread; what it has made is thrown away.

        Returns when the thread has ended: at most after the item or the result that it works on. Only where the next
        item does not come is it left behind, and ends when that comes.
        """
        self._finalizer()

    def _taken(self) -> Result | _Last:
        while True:
            try:
                return self._desk.results.get(timeout=PATIENCE)
            except Empty:
                if not self._thread.is_alive() and self._desk.results.empty():
                    raise UsageError(
                        "the thread that works ahead is gone, as in a process that was forked: begin a new stream there"
                    ) from None

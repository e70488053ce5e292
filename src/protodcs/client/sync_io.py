"""The names of `async_io` for threads."""

from collections.abc import Iterable, Iterator
from threading import Semaphore
from time import sleep
from typing import Any, TypeAlias

from ..prefetch import Prefetcher
from .protocol import Failure, Payload, item_payloads, payloads_of

__all__ = ["Items", "ReadAhead", "Semaphore", "payloads_of", "sleep"]

Items: TypeAlias = Iterable[Any]


class ReadAhead:
    """Items that a thread in the background reads before they are needed.

    Args:
        items: what `observe_stream` takes.
        ahead: how many items to read ahead.
    """

    def __init__(self, items: Items, ahead: int):
        self._source: Prefetcher[Payload | Failure] = Prefetcher(_payloads, items, ahead)

    @property
    def waiting(self) -> bool:
        """Whether the next item, or the end, is available."""
        return self._source.waiting

    def next(self) -> Payload | Failure | None:
        """Return the next item, or None behind the last."""
        return next(self._source, None)

    def close(self) -> None:
        """Stop the thread."""
        self._source.close()


def _payloads(items: Iterable[Any]) -> Iterator[Payload | Failure]:
    """Yield the payloads of many things, in order. An error comes as the last one, in its place."""
    try:
        for item in items:
            yield from item_payloads(item)
    except Exception as problem:
        yield Failure(problem)

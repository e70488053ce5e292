"""How the asynchronous client waits, reads ahead and reads files. `sync_io` has the same names for threads."""

import asyncio
from asyncio import Semaphore, sleep
from collections.abc import AsyncIterable, Iterable
from contextlib import suppress
from typing import Any, TypeAlias

import numpy as np

from . import protocol
from .protocol import Failure, Payload

__all__ = ["Items", "ReadAhead", "Semaphore", "payloads_of", "sleep"]

Items: TypeAlias = Iterable[Any] | AsyncIterable[Any]


async def payloads_of(x: Any) -> tuple[list[Payload], bool]:
    """As `protocol.payloads_of`; files are read and images packed in a thread, so that other requests go on."""
    if isinstance(x, np.ndarray):
        return protocol.payloads_of(x)
    return await asyncio.to_thread(protocol.payloads_of, x)


class ReadAhead:
    """Items that a task in the background reads before they are needed.

    Args:
        items: what `observe_stream` takes.
        ahead: how many items to read ahead.
    """

    def __init__(self, items: Items, ahead: int):
        self._queue: asyncio.Queue[Payload | Failure | None] = asyncio.Queue(ahead)
        self._ended = False
        self._task = asyncio.create_task(self._read(items))

    @property
    def waiting(self) -> bool:
        """Whether the next item, or the end, is available."""
        return not self._queue.empty()

    async def next(self) -> Payload | Failure | None:
        """Return the next item, or None behind the last."""
        item = None if self._ended else await self._queue.get()
        self._ended = item is None
        return item

    async def aclose(self) -> None:
        """Stop the task."""
        self._task.cancel()
        with suppress(asyncio.CancelledError):
            await self._task

    async def _read(self, items: Items) -> None:
        try:
            if isinstance(items, AsyncIterable):
                async for item in items:
                    await self._put(item)
            else:
                for item in items:
                    await self._put(item)
        except Exception as problem:
            await self._queue.put(Failure(problem))
        await self._queue.put(None)

    async def _put(self, item: Any) -> None:
        found = protocol.item_payloads
        for payload in found(item) if isinstance(item, np.ndarray) else await asyncio.to_thread(found, item):
            await self._queue.put(payload)

"""Images on their way to the encoder: what comes while others are under way travels together.

A call costs as much as a small image, so under load one call carries many. An image that finds no call
under way leaves at once. Order is not kept here; the queue of the stream does that.
"""

import asyncio
import itertools
from collections.abc import Awaitable, Callable
from contextvars import Context
from typing import Any

from ...errors import ImageError

# The features of some images, or words in place of one that cannot be used.
Encode = Callable[[list[bytes]], Awaitable[list[bytes | str]]]


class MicroBatcher:
    """Sends images in groups.

    Args:
        encode: one call.
        calls: how many are under way at once, at most.
        images: how many images a call carries, at most.
    """

    def __init__(self, encode: Encode, calls: int, images: int):
        self._encode = encode
        self._calls = calls
        self._images = images
        # In the order of their arrival.
        self._waiting: dict[asyncio.Future[bytes], bytes] = {}
        self._under_way: set[asyncio.Task[Any] | None] = set()

    @property
    def queued(self) -> int:
        """How many images wait for a call."""
        return len(self._waiting)

    async def encode(self, image: bytes) -> bytes:
        """The feature of one image; an ImageError where there is none."""
        future: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._waiting[future] = image
        if len(self._under_way) < self._calls:
            # It begins after this turn of the event loop, whose images go together. In a context of its own: a call is
            # made for several requests, and must not be part of the trace of one.
            self._under_way.add(asyncio.create_task(self._send(), context=Context()))
        try:
            return await future
        finally:
            # If the caller has gone away, its image must not wait in memory for the calls before it.
            self._waiting.pop(future, None)

    async def _send(self) -> None:
        """Make calls until no image waits."""
        while self._waiting:
            group = {one: self._waiting.pop(one) for one in list(itertools.islice(self._waiting, self._images))}
            answers: list[bytes | str] | list[Exception]
            try:
                answers = await self._encode(list(group.values()))
            except Exception as problem:
                answers = [problem] * len(group)
            for future, answer in zip(group, answers, strict=True):
                if future.done():
                    continue
                if isinstance(answer, bytes):
                    future.set_result(answer)
                else:
                    future.set_exception(ImageError(answer) if isinstance(answer, str) else answer)
        self._under_way.discard(asyncio.current_task())

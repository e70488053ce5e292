"""Images on their way to the encoder: what comes while others are under way travels together.

A call costs as much as a small image, so under load one call carries many. An image that finds no call
under way leaves at once. Order is not kept here; the queue of the stream does that.
"""

import asyncio
import itertools
from collections.abc import Awaitable, Callable
from contextvars import Context

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
        self._under_way: set[asyncio.Task[None]] = set()
        self._soon = False

    @property
    def queued(self) -> int:
        """How many images wait for a call."""
        return len(self._waiting)

    async def encode(self, image: bytes) -> bytes:
        """The feature of one image; an ImageError where there is none."""
        future: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._waiting[future] = image
        self._kick()
        try:
            return await future
        finally:
            # If the caller has gone away, its image must not wait in memory for the calls before it.
            self._waiting.pop(future, None)

    def _kick(self) -> None:
        """Leave soon: what comes within the same turn of the event loop goes together."""
        if self._waiting and not self._soon and len(self._under_way) < self._calls:
            self._soon = True
            asyncio.get_running_loop().call_soon(self._depart)

    def _depart(self) -> None:
        self._soon = False
        group = {future: self._waiting.pop(future) for future in list(itertools.islice(self._waiting, self._images))}
        # In a context of its own: the call is made for several requests, and must not be part of the trace of one.
        task = asyncio.create_task(self._travel(group), context=Context())
        self._under_way.add(task)
        task.add_done_callback(self._arrived)
        self._kick()

    def _arrived(self, task: "asyncio.Task[None]") -> None:
        self._under_way.discard(task)
        self._kick()

    async def _travel(self, group: dict["asyncio.Future[bytes]", bytes]) -> None:
        answers: list[bytes | str] | list[Exception]
        try:
            answers = await self._encode(list(group.values())) if group else []
        except Exception as problem:
            answers = [problem] * len(group)
        for future, answer in zip(group, answers, strict=True):
            if future.done():
                continue
            if isinstance(answer, bytes):
                future.set_result(answer)
            else:
                future.set_exception(ImageError(answer) if isinstance(answer, str) else answer)

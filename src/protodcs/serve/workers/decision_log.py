"""The decision log as one worker serves it: pages, events, thumbnails, purges, retention.

Entries are written together with the journal records, so this module only reads and deletes them. None of it needs a
loaded stream.
"""

import asyncio
import json
import logging
import time
from collections.abc import Callable
from typing import Final

from ...errors import StoreError
from ..log.entries import LogQuery, Purge, described
from ..messages import Reply, ReplyStatus, Request
from ..settings import ServeConfig, log_limits
from ..store.base import Store
from ..telemetry import logs

_log = logging.getLogger(__name__)

# How often a worker deletes old entries of the decision log, in seconds.
_TRIM_SECONDS = 2.0
# Time without a jump after which the clock is trusted. Seconds.
STEADY_SECONDS: Final = 3600.0
# Between two readings, the clock may gain or lose so much without counting as set: time servers slew it. Seconds.
_TOLERANCE: Final = 60.0


class DecisionLog:
    """Reads and deletes entries of the decision log."""

    def __init__(self, store: Store, config: ServeConfig):
        self._store = store
        self._limits = log_limits(config)
        self._forbids_images = config.forbid_images

    async def read(self, request: Request) -> Reply:
        """Return a page of the decision log, without loading the stream."""
        query = LogQuery(**json.loads(request.payload))
        page = await self._store.read_log(request.stream, query)
        facts = {"entries": [described(entry) for entry in page.entries], "more": page.more}
        return Reply(ReplyStatus.DONE, facts=facts)

    async def read_events(self, request: Request) -> Reply:
        """Return decisions and notices in the order of their positions, without loading the stream."""
        query = json.loads(request.payload)
        if query.get("newest"):
            return await self._newest_event(request.stream)
        after, since = query["after"], query["since"]
        # The notices first: each has its decision in the page that is read after it.
        notices = await self._store.read_notices(request.stream, None if after is None else tuple(after), since)
        position = None if after is None else after[0]
        wanted = LogQuery(since=since, after=position, newest_first=False, limit=query["limit"])
        page = await self._store.read_log(request.stream, wanted)
        events = [((entry.position, 0), "decision", described(entry)) for entry in page.entries]
        last = page.entries[-1].position if page.more else None
        events += [
            ((notice.position, notice.number), notice.kind, notice.described())
            for notice in notices
            if last is None or notice.position <= last
        ]
        return Reply(ReplyStatus.DONE, facts={"events": sorted(events, key=lambda event: event[0]), "more": page.more})

    async def _newest_event(self, stream: str) -> Reply:
        notices = await self._store.read_notices(stream, None)
        page = await self._store.read_log(stream, LogQuery(limit=1))
        places = [(entry.position, 0) for entry in page.entries]
        places += [(notice.position, notice.number) for notice in notices[-1:]]
        return Reply(ReplyStatus.DONE, facts={"newest": max(places, default=(-1, 0))})

    async def read_thumbnail(self, request: Request) -> Reply:
        """Return the thumbnail of a decision; an empty one if there is none."""
        thumbnail = await self._store.read_thumbnail(request.stream, int(request.payload))
        return Reply(ReplyStatus.DONE, answer=thumbnail or b"")

    async def purge(self, request: Request) -> Reply:
        """Delete entries of the decision log."""
        deleted = await self._store.purge_log(request.stream, Purge(**json.loads(request.payload)))
        return Reply(ReplyStatus.DONE, facts={"deleted": deleted})

    async def trim_forever(self) -> None:
        """Delete entries beyond the limits, again and again."""
        clock = SteadyClock(time.time, time.monotonic)
        images_deleted = not self._forbids_images
        while True:
            await asyncio.sleep(_TRIM_SECONDS)
            try:
                if not images_deleted:
                    await self._store.delete_thumbnails()
                    images_deleted = True
                await self._store.trim_log(self._limits, clock.now())
            except StoreError as problem:
                _log.warning("the decision log was not trimmed", extra=logs.with_fields(problem=str(problem)))


class SteadyClock:
    """A clock that says nothing after it was set: the time for decisions that cannot be taken back.

    A clock can be wrong for a while: after a boot without network, by a mistake of a person or of a time server. What
    it says is trusted after it ran for an hour without being set.

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

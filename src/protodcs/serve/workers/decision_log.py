"""The decision log as one worker serves it: pages, events, thumbnails, purges, retention.

Entries are written together with the journal records, so this module only reads and deletes them. None of it needs a
loaded stream. Thumbnails of a cluster are files outside of the store.
"""

import asyncio
import json
import logging
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial

from ...errors import StoreError, UnknownStreamError
from ..log.entries import LogEntry, LogQuery, Purge, described
from ..log.thumbnail_files import ThumbnailFiles
from ..messages import Outcome, Reply, Request
from ..settings import ServeConfig, log_limits
from ..store.base import Store
from ..telemetry import logs
from .steady_clock import SteadyClock

_log = logging.getLogger(__name__)

# How often a worker deletes old entries of the decision log, in seconds.
_TRIM_SECONDS = 2.0
# The same for files of thumbnails in a cluster.
_FILE_TRIM_SECONDS = 600.0
# Writes of thumbnail files under way, at most. Beyond them, thumbnails are dropped.
_FILE_TASKS = 100


class DecisionLog:
    """Reads and deletes entries of the decision log.

    Args:
        store: where the entries are.
        config: the settings of the service.
    """

    def __init__(self, store: Store, config: ServeConfig):
        self._store = store
        self._limits = log_limits(config)
        self._forbids_images = config.forbid_images
        self._files = None if config.thumbnail_url is None else ThumbnailFiles(config.thumbnail_url)
        self._file_tasks: set[asyncio.Task[None]] = set()

    @property
    def is_on(self) -> bool:
        """Whether decisions are logged."""
        return self._limits.entries > 0

    async def delete_stream(self, stream: str) -> None:
        """Delete the thumbnail files of a stream. The store deletes its entries."""
        if self._files is not None:
            with suppress(OSError):
                await self._files.delete_stream(stream)

    def write_thumbnails(self, stream: str, incarnation: str, entries: list[LogEntry]) -> None:
        """Write thumbnails to their files in the background, if there are any. A failure is logged."""
        if self._files is None or not entries:
            return
        if len(self._file_tasks) >= _FILE_TASKS:
            fields = logs.with_fields(stream=stream, count=len(entries))
            _log.warning("thumbnails were dropped because their files are written too slowly", extra=fields)
            return
        files = [(entry.position, entry.thumbnail) for entry in entries]
        task = asyncio.create_task(self._files.write(stream, incarnation, files))
        self._file_tasks.add(task)
        task.add_done_callback(partial(self._wrote_thumbnails, stream))

    def _wrote_thumbnails(self, stream: str, task: "asyncio.Task[None]") -> None:
        self._file_tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            _log.warning(
                "thumbnails were not written", extra=logs.with_fields(stream=stream), exc_info=task.exception()
            )

    async def read(self, request: Request) -> Reply:
        """Return a page of the decision log, without loading the stream."""
        query = LogQuery(**json.loads(request.payload))
        page = await self._store.read_log(request.stream, query)
        facts = {"entries": [described(entry) for entry in page.entries], "more": page.more}
        return Reply(Outcome.DONE, facts=facts)

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
        return Reply(Outcome.DONE, facts={"events": sorted(events, key=lambda event: event[0]), "more": page.more})

    async def _newest_event(self, stream: str) -> Reply:
        notices = await self._store.read_notices(stream, None)
        page = await self._store.read_log(stream, LogQuery(limit=1))
        places = [(entry.position, 0) for entry in page.entries]
        places += [(notice.position, notice.number) for notice in notices[-1:]]
        return Reply(Outcome.DONE, facts={"newest": max(places, default=(-1, 0))})

    async def read_thumbnail(self, request: Request) -> Reply:
        """Return the thumbnail of a decision; an empty one if there is none."""
        position, files = int(request.payload), self._files
        if files is None:
            thumbnail = await self._store.read_thumbnail(request.stream, position)
            return Reply(Outcome.DONE, answer=thumbnail or b"")
        # A file may outlive its log entry for a while.
        page = await self._store.read_log(request.stream, LogQuery(after=position - 1, newest_first=False, limit=1))
        if not (page.entries and page.entries[0].position == position and page.entries[0].has_thumbnail):
            return Reply(Outcome.DONE)
        incarnation = (await self._store.describe(request.stream)).incarnation
        return Reply(Outcome.DONE, answer=await files.read(request.stream, incarnation, position) or b"")

    async def purge(self, request: Request) -> Reply:
        """Delete entries of the decision log."""
        wanted = Purge(**json.loads(request.payload))
        if self._files is not None:
            await self._purge_files(self._files, request.stream, wanted)
        deleted = await self._store.purge_log(request.stream, wanted)
        return Reply(Outcome.DONE, facts={"deleted": deleted})

    async def _purge_files(self, files: ThumbnailFiles, stream: str, wanted: Purge) -> None:
        """Delete the thumbnails of the entries that a purge deletes."""
        incarnation = (await self._store.describe(stream)).incarnation
        query, more = LogQuery(wanted.since, wanted.until, newest_first=False, limit=1000), True
        while more:
            entries, more = await self._store.read_log(stream, query)
            chosen = [entry for entry in entries if wanted.image_ref in (None, entry.image_ref)]
            await files.delete(stream, incarnation, [entry.position for entry in chosen if entry.has_thumbnail])
            if entries:
                query = query._replace(after=entries[-1].position)

    async def trim_forever(self, loaded: Callable[[], list[tuple[str, str]]]) -> None:
        """Delete entries beyond the limits, again and again.

        Args:
            loaded: returns the loaded streams and their incarnations. Their files are trimmed too.
        """
        clock = SteadyClock(time.time, time.monotonic)
        images_deleted, files_trimmed = not self._forbids_images, time.monotonic()
        while True:
            await asyncio.sleep(_TRIM_SECONDS)
            try:
                if not images_deleted:
                    await self._store.delete_thumbnails()
                    if self._files is not None:
                        await self._files.delete_all()
                    images_deleted = True
                await self._store.trim_log(self._limits, clock.now())
                if self._files is not None and time.monotonic() - files_trimmed > _FILE_TRIM_SECONDS:
                    files_trimmed = time.monotonic()
                    await self._trim_files(self._files, loaded())
            except (StoreError, OSError) as problem:
                _log.warning("the decision log was not trimmed", extra=logs.with_fields(problem=str(problem)))

    async def _trim_files(self, files: ThumbnailFiles, streams: list[tuple[str, str]]) -> None:
        """Delete the thumbnails of loaded streams whose log entries were deleted."""
        for stream, incarnation in streams:
            with suppress(UnknownStreamError):
                page = await self._store.read_log(stream, LogQuery(newest_first=False, limit=1))
                if page.entries:
                    await files.delete_before(stream, incarnation, page.entries[0].position)

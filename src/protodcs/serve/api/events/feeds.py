"""Feeds: read what is new in the streams that somebody follows, once, and hand it to all who follow them.

A feed reads events from the store only, so nobody sees a change that is not durable. In the process of the worker, each
commit notifies the feed of its stream. With PostgreSQL, feeds poll their streams several times a second. An event is
read and encoded once, and events that follow each other closely are sent together. A client that reads too slowly is
disconnected and resumes from its last id; it never delays a worker or another client.
"""

import asyncio
import json
import logging
import secrets
import time
from collections import Counter
from collections.abc import AsyncGenerator, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

from ....errors import ProtoDCSError
from ...access.problems import ProblemError
from ...messages import Action, ReplyStatus
from ...messages import Request as WorkerRequest
from ...pipeline.queues import Queues
from ...settings import ServeConfig, public_id, tenant_of
from ...workers.waiting import wait_at_most
from ..context import checked
from ..streams.listing import ListStreams, streams_of

_log = logging.getLogger(__name__)

# Events that are read at once.
_PAGE = 500
# Events that wait for one client, at most.
_BUFFER = 2000
# A feed hands out events once in so many seconds, at most. The first event after a pause is sent at once.
_BATCH_SECONDS = 0.05
# In the process of the worker, commits notify the feeds. This is for what they might miss. Seconds.
_LOOK_ANYWAY = 5.0
# Seconds between two listings of the streams of a tenant, to find those that changed, with PostgreSQL. If a listing is
# slow, the pause is longer, so that listings take at most this fraction of the time.
_LIST_SECONDS, _MAX_LIST_FRACTION = 1.0, 0.1
# Statistics of a stream are sent once in so many seconds, at most.
STATS_SECONDS = 1.0
# Above the numbers of all events at one position.
_LAST = 1_000_000


class Cursor(NamedTuple):
    """A place among the events of a stream: a position in its journal, and the number of the event there."""

    position: int
    number: int = 0

    @classmethod
    def parse(cls, text: str) -> "Cursor":
        """Return the cursor of an event id such as 17 or 17.1. Raise ValueError if it is none."""
        parts = text.split(".")
        if len(text) > 20 or len(parts) > 2 or not all(part.isdecimal() and part.isascii() for part in parts):
            raise ValueError(f"{text[:100]!r} is no event id")
        return cls(*map(int, parts))

    def __str__(self) -> str:
        return f"{self.position}.{self.number}" if self.number else str(self.position)


class Frame(NamedTuple):
    """One event, ready to be sent.

    Attributes:
        cursor: its place in its stream; None for one that is not stored.
        time: in milliseconds since 1970.
        kind: the name of the event.
        data: what is sent as JSON.
    """

    cursor: Cursor | None
    time: int
    kind: str
    data: Any

    def encoded(self, name: object) -> bytes:
        """Return the event as it is sent. Only one that is stored has its name as id."""
        line = "" if self.cursor is None else f"id: {name}\n"
        return f"{line}event: {self.kind}\ndata: {json.dumps(self.data)}\n\n".encode()


def for_stream(frames: Iterable[Frame]) -> bytes:
    """Return events for those who follow their stream."""
    return b"".join(frame.encoded(frame.cursor) for frame in frames)


def for_tenant(frames: Iterable[Frame]) -> bytes:
    """Return events for those who follow all streams of a tenant. Times are what all streams share."""
    return b"".join(frame.encoded(frame.time) for frame in frames)


class Subscriber:
    """One client: the events that wait for it.

    Attributes:
        slow: it did not read fast enough, or the feed has ended. It gets what waits, and nothing more.
        signal: set when something waits.
    """

    def __init__(self, skip_to: Cursor | None = None):
        self._waiting: list[bytes] = []
        self._count = 0
        self._skip_to = skip_to
        self.slow = False
        self.signal = asyncio.Event()

    def end(self) -> None:
        """Hand out what waits, and nothing more."""
        self.slow = True
        self.signal.set()

    def put(self, frames: list[Frame], content: bytes) -> None:
        """Have events wait, without those that the client knows already. All clients share their bytes, `content`."""
        known = self._skip_to
        if known is not None:
            new = [frame for frame in frames if frame.cursor is None or frame.cursor > known]
            if len(new) < len(frames):
                frames, content = new, for_stream(new)
        if self.slow or not frames:
            return
        if self._count + len(frames) > _BUFFER:
            self.slow = True
        else:
            self._waiting.append(content)
            self._count += len(frames)
        self.signal.set()

    def take(self) -> bytes:
        """Return all that waits."""
        self.signal.clear()
        content = self._waiting[0] if len(self._waiting) == 1 else b"".join(self._waiting)
        self._waiting.clear()
        self._count = 0
        return content


class _Feed:
    """Reads one stream for all who follow it.

    Args:
        feeds: all feeds of the process.
        stream: the id that workers use.
        cursor: of the newest event that nobody needs from this feed.
        since: a time in milliseconds since 1970, from which on those who follow all streams need events.

    Attributes:
        cursor: of the newest event that was handed out, or where the feed begins.
        subscribers: those who follow this stream alone.
        signal: set if there may be new events.
    """

    def __init__(self, feeds: "Feeds", stream: str, cursor: Cursor, since: int | None = None):
        self._feeds = feeds
        self._stream = stream
        self._since = since
        # Where the next page begins; None: with the events since `since`.
        self._after = cursor if since is None else None
        self._start = self.cursor = cursor
        self.subscribers: set[Subscriber] = set()
        self.signal = asyncio.Event()
        self._handed_out = self._stats_sent = 0.0
        # Decisions since the last event of statistics, and the position of the newest one.
        self._outcomes: Counter[str] = Counter()
        self._position = 0
        self._task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        try:
            while True:
                try:
                    await self._look()
                except _GoneError:
                    return
                except ProtoDCSError as problem:
                    _log.debug("a feed could not read its stream: %s", problem)
                await self._wait()
                if not (self.subscribers or self._feeds.tenant_subscribers(self._stream)):
                    return
        finally:
            self._feeds.ended(self._stream)
            for subscriber in self.subscribers:
                # They ask again, and are told why this is over.
                subscriber.end()

    def committed(self, position: int) -> None:
        """Note that records from a position on are durable."""
        # The feed may have begun behind them. Those who follow all streams would then miss them.
        if self._after == self._start and position <= self._start.position:
            self._start = self._after = self.cursor = Cursor(position - 1, _LAST)
        self.signal.set()

    async def _look(self) -> None:
        """Read what is new, and hand it out."""
        more = True
        while more:
            # Before the read: what is committed meanwhile needs another look.
            self.signal.clear()
            begin = self._after
            frames, more = await self._feeds.read(self._stream, begin, self._since if begin is None else None)
            if self._after is not begin:
                # An earlier commit was noted meanwhile.
                more = True
                continue
            self._after = self.cursor
            for cursor, _, kind, data in frames:
                assert cursor is not None
                self._after, self.cursor = cursor, max(self.cursor, cursor)
                if kind == "decision":
                    self._outcomes[data["outcome"]] += 1
                    self._position = cursor.position
            self._hand_out(frames)

    async def _wait(self) -> None:
        """Wait until there may be something new, and until the next events may be handed out."""
        stats_due = self._stats_sent + STATS_SECONDS - time.monotonic() if self._outcomes else self._feeds.poll_seconds
        await wait_at_most(self.signal, max(0.0, min(stats_due, self._feeds.poll_seconds)))
        if self.signal.is_set():
            await asyncio.sleep(self._handed_out + _BATCH_SECONDS - time.monotonic())
        if self._outcomes and time.monotonic() >= self._stats_sent + STATS_SECONDS:
            self._hand_out([self._stats()])

    def _stats(self) -> Frame:
        """Return the statistics of the decisions since this was last called."""
        counts = {name: self._outcomes[name] for name in ("known", "unsure", "unknown")}
        self._outcomes.clear()
        self._stats_sent, now = time.monotonic(), int(1000 * time.time())
        about = {"stream": public_id(self._stream), "time": now, "position": self._position}
        return Frame(None, now, "stats", {**about, "decisions": sum(counts.values()), **counts})

    def _hand_out(self, frames: list[Frame]) -> None:
        """Have events wait for all who follow the stream."""
        if not frames:
            return
        self._handed_out = time.monotonic()
        for subscribers, encoded in (
            (self.subscribers, for_stream),
            (self._feeds.tenant_subscribers(self._stream), for_tenant),
        ):
            content = encoded(frames) if subscribers else b""
            for subscriber in subscribers:
                subscriber.put(frames, content)


class _GoneError(ProblemError):
    """The stream does not exist any more."""


class _Tenant:
    """Those who follow all streams of a tenant.

    Attributes:
        subscribers: the clients.
        since: when the first of them came, in milliseconds since 1970.
        listing: finds streams that changed, with PostgreSQL.
    """

    def __init__(self) -> None:
        self.subscribers: set[Subscriber] = set()
        self.since = int(1000 * time.time())
        self.listing: asyncio.Task[None] | None = None


class Feeds:
    """All feeds of one process that serves HTTP."""

    def __init__(self, config: ServeConfig, queues: Queues, list_streams: ListStreams):
        self._config = config
        self._queues = queues
        self._list_streams = list_streams
        self.poll_seconds = _LOOK_ANYWAY if config.is_single else config.event_poll_seconds
        self._feeds: dict[str, _Feed] = {}
        self._tenants: dict[str, _Tenant] = {}
        self._closed = False
        self._clients: Counter[str] = Counter()

    @contextmanager
    def counted(self, tenant: str) -> Iterator[None]:
        """Serve a client inside of this. Raise ProblemError if there are too many."""
        most = self._config.max_event_clients
        if self._clients.total() >= most or self._clients[tenant] >= max(1, int(self._config.share(tenant, most))):
            raise ProblemError("overloaded", "Too many event streams are open. Close one, or retry later.")
        self._clients[tenant] += 1
        try:
            yield
        finally:
            self._clients[tenant] -= 1

    def close(self) -> None:
        """End all event streams: the service is being stopped."""
        self._closed = True
        feeds, tenants = self._feeds.values(), self._tenants.values()
        for subscribers in (*(feed.subscribers for feed in feeds), *(tenant.subscribers for tenant in tenants)):
            for subscriber in subscribers:
                subscriber.end()

    def _new_subscriber(self, skip_to: Cursor | None = None) -> Subscriber:
        subscriber = Subscriber(skip_to)
        if self._closed:
            subscriber.end()
        return subscriber

    # Called by the worker in this process, and by feeds.

    def committed(self, stream: str, position: int) -> None:
        """Note that records of a stream from a position on are durable."""
        feed = self._feeds.get(stream)
        if feed is not None:
            feed.committed(position)
        elif self._tenants and self.tenant_subscribers(stream):
            self._feeds[stream] = _Feed(self, stream, Cursor(position - 1, _LAST))

    def ended(self, stream: str) -> None:
        """Remove the feed of a stream."""
        del self._feeds[stream]

    def tenant_subscribers(self, stream: str) -> set[Subscriber]:
        """Return those who follow all streams of the tenant of a stream."""
        tenant = self._tenants.get(tenant_of(stream))
        return set() if tenant is None else tenant.subscribers

    # Clients.

    async def follow(self, stream: str, after: Cursor | None) -> AsyncGenerator[bytes, None]:
        """Yield events of a stream, and nothing if there was none within a while.

        Ends if the client is too slow, or the stream does not exist any more.

        Args:
            stream: the id that workers use.
            after: the last event that the client knows; None: only events from now on.
        """
        while True:
            # A feed that nobody follows ends, also while this client reads older events.
            feed = await self._feed(stream)
            newest = feed.cursor
            after = newest if after is None else after
            if after >= newest:
                break
            frames, _ = await self.read(stream, after)
            yield for_stream(frames)
            after = max(after, frames[-1].cursor or after) if frames else newest
        # From here on nothing is missed: what the feed has not handed out yet comes to the subscriber.
        subscriber = self._new_subscriber(after)
        feed.subscribers.add(subscriber)
        try:
            yield b""
            async for content in _drained(subscriber):
                yield content
        finally:
            feed.subscribers.discard(subscriber)

    async def follow_all(self, tenant: str, after: int | None) -> AsyncGenerator[bytes, None]:
        """Yield events of all streams of a tenant, and nothing if there was none within a while.

        Args:
            tenant: its name; empty without keys.
            after: a time in milliseconds since 1970. Events from then on are sent first, stream by stream.
        """
        subscriber = self._new_subscriber()
        followed = self._tenants.setdefault(tenant, _Tenant())
        followed.subscribers.add(subscriber)
        if not self._config.is_single and followed.listing is None:
            followed.listing = asyncio.create_task(self._watch(tenant))
        try:
            yield b""
            if after is not None:
                async for content in self._replay(tenant, after):
                    yield content
            async for content in _drained(subscriber):
                yield content
        finally:
            followed.subscribers.discard(subscriber)
            if not followed.subscribers:
                del self._tenants[tenant]
                if followed.listing is not None:
                    followed.listing.cancel()

    async def _feed(self, stream: str) -> _Feed:
        """Return the feed of a stream. Raise ProblemError if the stream cannot be read."""
        if stream not in self._feeds:
            newest = await self.newest(stream)
            # With PostgreSQL, those who follow all streams get what this feed would otherwise begin behind.
            tenant = None if self._config.is_single else self._tenants.get(tenant_of(stream))
            # A commit may have made the feed meanwhile.
            if stream not in self._feeds:
                self._feeds[stream] = _Feed(self, stream, newest, None if tenant is None else tenant.since)
        return self._feeds[stream]

    async def _replay(self, tenant: str, since: int) -> AsyncGenerator[bytes, None]:
        async for listed in streams_of(self._list_streams, tenant):
            cursor, more = None, True
            while more:
                try:
                    frames, more = await self.read(listed.id, cursor, since=since)
                except _GoneError:
                    break
                if frames:
                    cursor = frames[-1].cursor
                    yield for_tenant(frames)

    async def _watch(self, tenant: str) -> None:
        """Notify the feeds of streams whose summary has changed. Only PostgreSQL needs this."""
        known: dict[str, bytes] | None = None
        while True:
            start = time.monotonic()
            try:
                found = {listed.id: listed.summary async for listed in streams_of(self._list_streams, tenant)}
                for stream in found:
                    if known is not None and known.get(stream) != found[stream]:
                        with suppress(_GoneError):
                            (await self._feed(stream)).signal.set()
                known = found
            except ProtoDCSError as problem:
                _log.debug("the streams of a tenant could not be read: %s", problem)
            await asyncio.sleep(max(_LIST_SECONDS, (time.monotonic() - start) / _MAX_LIST_FRACTION))

    # Reading.

    async def newest(self, stream: str) -> Cursor:
        """Return the place of the newest event of a stream."""
        facts = await self._ask(stream, {"newest": True})
        return Cursor(*facts["newest"])

    async def read(self, stream: str, after: Cursor | None, since: int | None = None) -> tuple[list[Frame], bool]:
        """Return some events of a stream after a place, or from a time on, and whether there are more."""
        facts = await self._ask(stream, {"after": after, "since": since, "limit": _PAGE})
        name = public_id(stream)
        frames = [
            Frame(Cursor(*place), data["time"], kind, {"stream": name, **data}) for place, kind, data in facts["events"]
        ]
        return frames, facts["more"]

    async def _ask(self, stream: str, query: dict[str, Any]) -> dict[str, Any]:
        request = WorkerRequest(stream, Action.READ_EVENTS, secrets.token_hex(8), json.dumps(query).encode())
        reply = await self._queues.ask_at_once(request)
        if reply.status is ReplyStatus.MISSING:
            raise _GoneError("stream_not_found", reply.message)
        return checked(reply).facts or {}


async def _drained(subscriber: Subscriber) -> AsyncGenerator[bytes, None]:
    """Yield what waits for a client, and nothing once in a while; end if the client is too slow."""
    while True:
        await wait_at_most(subscriber.signal, STATS_SECONDS)
        slow = subscriber.slow
        yield subscriber.take()
        if slow:
            return

"""Clients of the service: one for threads, one for asyncio.

Both ask again by themselves, under the key of the first time, until an answer is final or they give up: whatever a
connection does, an observe is applied once. They must never send two requests on one stream at a time by themselves,
because the service keeps the order in which requests arrive.
"""

import asyncio
import math
import ssl
import time
from collections import deque
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from datetime import datetime
from types import TracebackType
from typing import Any, Literal, Self, overload

import numpy as np
from numpy.typing import NDArray

from . import protocol
from .core.vocabulary import Vocabulary, VocabularyLike
from .errors import InputError, MissingPackageError, ServiceError
from .prefetch import Prefetcher
from .protocol import (
    Call,
    EventReader,
    Failure,
    Image,
    LogFilter,
    LoggedDecision,
    NoResponse,
    Observed,
    Payload,
    PendingRows,
    Response,
    RetryPolicy,
    StreamEvent,
    Written,
)

try:
    import httpx
except ModuleNotFoundError:
    raise MissingPackageError("the client needs httpx: pip install 'protodcs[client]'") from None

# The first is longer than a service takes to say that it is too late: request_seconds of its settings.
_TIMEOUT, _GIVE_UP = 35.0, 120.0
# Entries of the decision log in one response.
_LOG_PAGE = 1000
_ALL = LogFilter()


class Client:
    """A connection to a service; threads may share it. A context manager.

        with Client("http://127.0.0.1:8000") as client:
            camera = client.create("camera-7", classes=["cat", "dog"])
            print(camera.observe("image.jpg").decision.label)

    Args:
        base_url: where the service listens, such as "http://127.0.0.1:8000".
        key: an access key, where the service wants one.
        timeout: seconds to wait for one try.
        give_up: seconds after which a request is not tried again; with 0 each is tried once.
        http: options of `httpx.Client`, such as `verify` and `proxy`.

    Every method raises ServiceError with the words of the service for what it refuses.
    """

    def __init__(
        self,
        base_url: str,
        key: str | None = None,
        *,
        timeout: float = _TIMEOUT,
        give_up: float = _GIVE_UP,
        **http: Any,
    ):
        self._http = httpx.Client(**_options(base_url, key, timeout), **http)
        self._give_up = give_up

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def create(
        self,
        id: str,  # noqa: A002 - as the service calls it
        *,
        classes: str | Sequence[str] | None = None,
        prototypes: Any = None,
        method: str | None = None,
        config: Mapping[str, Any] | None = None,
        guard: Mapping[str, Any] | None = None,
        like: str | None = None,
        vocabulary: str | None = protocol.DEFAULT_VOCABULARY,
    ) -> "Stream":
        """Create a stream. To create it again in the same way is fine; in another way it is a ServiceError, status 409.

        Args:
            id: 1 to 200 characters without slashes and control characters.
            classes: class names, or the name of a list that comes with the package, such as "cifar10".
            prototypes: (K, d), one row for each class, where the features are the caller's own.
            method: "streamdcs" (the default) or "protodcs".
            config: settings that differ from the defaults of the method.
            guard: settings that differ from those of the service's guards.
            like: another stream, to be created as that one was; then nothing else.
            vocabulary: "default": "general" if the service has an encoder and you give class names only, otherwise
                none. "general": that of the service's encoder. The fingerprint of an uploaded one, or None for none.
        """
        call = protocol.create(id, classes, prototypes, method, config, guard, like, vocabulary)
        return Stream(self._send, self._send_rows, id, protocol.facts(self._send(call)))

    def upload_vocabulary(self, vocabulary: VocabularyLike) -> str:
        """Store a vocabulary unless the service has it, and return its fingerprint, as `create` takes it.

        Args:
            vocabulary: the text features of 16 to 5,000 general names, (V, d), or a `Vocabulary`.
        """
        shared = Vocabulary.of(vocabulary)
        try:
            answer = self._send(protocol.find_vocabulary(shared))
        except ServiceError as problem:
            if problem.status != 404:
                raise
            answer = self._send(protocol.upload_vocabulary(shared))
        fingerprint: str = protocol.facts(answer)["fingerprint"]
        return fingerprint

    def create_many(self, streams: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Create up to 1,000 streams in one request.

        Args:
            streams: what each is created with, by the names of the arguments of `create`, such as
                {"id": "camera-7", "like": "camera-1"}.

        Returns:
            For each stream its `id`, a `status` (201 created, 200 existed with the same settings, or an error), and the
            `problem` if it was not created.
        """
        results: list[dict[str, Any]] = protocol.facts(self._send(protocol.create_many(streams)))["results"]
        return results

    def streams(self, *, sort: str = "id", frozen: bool | None = None) -> list[str]:
        """Return the ids of all streams.

        Args:
            sort: "id", "created", "last_seen" or "unknown_rate"; a "-" before it means descending.
            frozen: return only streams that are frozen, or that are not.
        """
        found, cursor = protocol.stream_ids(self._send(protocol.streams(sort=sort, frozen=frozen)))
        while cursor is not None:
            page, cursor = protocol.stream_ids(self._send(protocol.streams(1000, cursor, sort, frozen)))
            found += page
        return found

    def list_streams(
        self, *, limit: int = 100, cursor: str | None = None, sort: str = "id", frozen: bool | None = None
    ) -> dict[str, Any]:
        """Return a page of streams with their times and unknown rates, and the `next_cursor` if there are more."""
        return protocol.facts(self._send(protocol.streams(limit, cursor, sort, frozen)))

    def health(self) -> dict[str, Any]:
        """Return the version of the service and how many requests are in progress."""
        return protocol.facts(self._send(protocol.health()))

    def ready(self) -> dict[str, Any]:
        """Return {"ready": True}. Raise ServiceError if the service cannot serve requests."""
        return protocol.facts(self._send(protocol.ready()))

    def workers(self) -> dict[str, Any]:
        """Return the names of all workers, and what those report that respond. For operators."""
        return protocol.facts(self._send(protocol.workers()))

    def stream(self, id: str) -> "Stream":  # noqa: A002 - as the service calls it
        """A stream that is there already; nothing is asked before it is used."""
        return Stream(self._send, self._send_rows, id, {})

    def follow(self, stream: str | None = None, *, after: str | None = None) -> Iterator[StreamEvent]:
        """Yield events as they happen, without end: decisions, statistics, guard actions and warnings.

        After a broken connection it connects again, and goes on after the last event: none is missing or doubled.

        Args:
            stream: the id of a stream; None for all streams.
            after: the id of the last event that you know, to get what came since; None: only what comes from now on.
        """
        reader = EventReader(after)
        policy: RetryPolicy | None = None
        while True:
            call = protocol.events(stream, reader.last_id)
            policy = policy or RetryPolicy(call, self._give_up)
            heard: Response | NoResponse = NoResponse("the event stream ended")
            try:
                with self._http.stream(call.method, call.path, headers=call.headers) as response:
                    if response.status_code != 200:
                        response.read()
                        heard = _response(response)
                    else:
                        reader.connected()
                        for line in response.iter_lines():
                            policy = None
                            event = reader.read(line)
                            if event is not None:
                                yield event
            except httpx.TransportError as problem:
                heard = _no_response(problem, self._http.base_url)
            policy = policy or RetryPolicy(call, self._give_up)
            time.sleep(policy.pause_after(heard))

    def create_webhook(
        self, url: str, *, events: Sequence[str] | None = None, streams: Sequence[str] | None = None
    ) -> dict[str, Any]:
        """Create a webhook, and return it with its `id` and `secret`.

        Args:
            url: where notices are sent.
            events: "guard", "possible_shift" or "unknown_burst"; None for all.
            streams: ids; None for all streams.
        """
        return protocol.facts(self._send(protocol.create_webhook(url, events, streams)))

    def webhooks(self) -> list[dict[str, Any]]:
        """Return all webhooks, oldest first."""
        found: list[dict[str, Any]] = protocol.facts(self._send(protocol.webhooks()))["webhooks"]
        return found

    def delete_webhook(self, id: str) -> None:  # noqa: A002 - as the service calls it
        """Delete a webhook."""
        self._send(protocol.delete_webhook(id))

    def dead_letters(self, id: str) -> list[dict[str, Any]]:  # noqa: A002 - as the service calls it
        """Return the deliveries of a webhook that were given up, oldest first."""
        found: list[dict[str, Any]] = protocol.facts(self._send(protocol.dead_letters(id)))["items"]
        return found

    def _send(self, call: Call) -> Response:
        policy = RetryPolicy(call, self._give_up)
        while True:
            heard = self._try(call)
            if isinstance(heard, Response) and policy.is_done(heard):
                return heard
            time.sleep(policy.pause_after(heard))

    def _send_rows(self, rows: PendingRows) -> Iterator[Observed]:
        """Yield the decisions on rows. After a broken connection, send those again that have no answer."""
        policy: RetryPolicy | None = None
        while len(rows):
            call = rows.call()
            policy = policy or RetryPolicy(call, self._give_up)
            heard: Response | NoResponse = NoResponse("the response ended before all rows had an answer")
            try:
                with self._http.stream(call.method, call.path, content=call.body, headers=call.headers) as response:
                    if response.status_code != 200:
                        response.read()
                        heard = _response(response)
                    else:
                        for line in response.iter_lines():
                            answer = rows.read(line)
                            if isinstance(answer, Response):
                                heard = answer
                                break
                            policy = None
                            yield answer
            except httpx.TransportError as problem:
                heard = _no_response(problem, self._http.base_url)
            if len(rows):
                policy = policy or RetryPolicy(call, self._give_up)
                time.sleep(policy.pause_after(heard))

    def _try(self, call: Call) -> Response | NoResponse:
        try:
            return _response(self._http.request(call.method, call.path, content=call.body, headers=call.headers))
        except httpx.TransportError as problem:
            return _no_response(problem, self._http.base_url)


class Stream:
    """One stream of a service. Made by `Client.create` and `Client.stream`.

    Attributes:
        id: its name.
        created: what the service said to `create`: its classes, settings and encoder; empty after `Client.stream`.
    """

    def __init__(
        self,
        send: Callable[[Call], Response],
        send_rows: Callable[[PendingRows], Iterator[Observed]],
        id: str,  # noqa: A002 - as the service calls it
        created: Mapping[str, Any],
    ):
        self._send = send
        self._send_rows = send_rows
        self.id = id
        self.created = created

    @overload
    def observe(self, x: Image, *, idempotency_key: str | None = None, image_ref: str | None = None) -> Observed: ...
    @overload
    def observe(
        self, x: list[Any], *, idempotency_key: str | None = None, image_ref: Sequence[str] | None = None
    ) -> list[Observed]: ...
    @overload
    def observe(
        self, x: NDArray[Any], *, idempotency_key: str | None = None, image_ref: str | Sequence[str] | None = None
    ) -> Any: ...

    def observe(
        self, x: Any, *, idempotency_key: str | None = None, image_ref: str | Sequence[str] | None = None
    ) -> Observed | list[Observed]:
        """Decide on x, and learn from it.

        Args:
            x: one thing - a feature (d,) of floats, or an image as a path, bytes, a Pillow image or pixels
                (height, width, 3) - or several: features (N, d), or a list of images. Several features are one request;
                several images are sent one after another, and where one is refused those before it are observed.
            idempotency_key: the caller's own name for this observe. Under the same name it is applied once, also if
                another process asks again; without one, once for each call.
            image_ref: your reference to the image, for the decision log; one for each of several.

        Returns:
            What was decided: `Observed` for one thing, a list of them for several.
        """
        payloads, several = protocol.payloads_of(x)
        payloads = protocol.with_refs(payloads, image_ref)
        found: list[Observed] = []
        for payload, key in zip(payloads, protocol.keys(idempotency_key, len(payloads)), strict=True):
            found += self._decisions(protocol.observe(self.id, payload, key), payload)
        return found if several else found[0]

    @overload
    def peek(self, x: Image) -> Observed: ...
    @overload
    def peek(self, x: list[Any]) -> list[Observed]: ...
    @overload
    def peek(self, x: NDArray[Any]) -> Any: ...

    def peek(self, x: Any) -> Observed | list[Observed]:
        """What `observe` would answer to x; nothing changes."""
        payloads, several = protocol.payloads_of(x)
        found = [seen for payload in payloads for seen in self._decisions(protocol.peek(self.id, payload), payload)]
        return found if several else found[0]

    def observe_stream(self, items: Iterable[Any], ahead: int = 8) -> Iterator[Observed]:
        """The decisions on many features or images, as they come, in order: one request is under way at a time.

        A background thread reads `items` up to `ahead` of them beyond the request that is under way. Features that have
        gathered meanwhile travel together, each under a key of its own. After a broken connection, those that have no
        answer yet are sent again, and each is applied once. An error of an item, or of `items` itself, is raised in
        order, after the decisions on all before it. Closing the iterator, or dropping it, stops the thread.

        Args:
            items: features, images, or `Row` for one of them with its own key and image reference.
            ahead: how many items to read ahead.
        """
        _check_ahead(ahead)
        line: deque[Payload | Failure] = deque()
        with closing(Prefetcher(protocol.queued, items, ahead)) as source:
            while True:
                while len(line) < ahead and (source.waiting or not line):
                    item = next(source, None)
                    if item is None:
                        break
                    line.append(item)
                if not line:
                    return
                payload = protocol.next_payload(line)
                if payload.rows > 1:
                    yield from self._send_rows(PendingRows(self.id, payload))
                else:
                    yield from self._decisions(protocol.observe(self.id, payload, protocol.key_of(payload)), payload)

    def explain(self, x: Any) -> dict[str, Any]:
        """What each stage would do with one feature or image, and why; nothing changes."""
        payloads, _ = protocol.payloads_of(x)
        return protocol.facts(self._send(protocol.explain(self.id, payloads)))

    def log(
        self,
        wanted: LogFilter = _ALL,
        *,
        order: Literal["newest", "oldest"] = "newest",
        limit: int | None = None,
        after: int | None = None,
    ) -> Iterator[LoggedDecision]:
        """Yield entries of the decision log, a page at a time.

        Args:
            wanted: which ones, such as `LogFilter(outcome="unknown")`.
            order: newest or oldest first.
            limit: maximum number of entries; None for all.
            after: position behind which the entries begin, in this order; None for the first one.
        """
        # No page is behind a position before the first one.
        cursor = None if after is None or after < 0 else str(after)
        left = math.inf if limit is None else limit
        while left > 0:
            call = protocol.log(self.id, wanted, order, int(min(left, _LOG_PAGE)), cursor)
            entries, cursor = protocol.log_page(self._send(call))
            yield from entries
            left -= len(entries)
            if cursor is None:
                return

    def export_log(self, wanted: LogFilter = _ALL, *, format: Literal["ndjson", "parquet"] = "ndjson") -> bytes:  # noqa: A002
        """Return the entries of the decision log, oldest first, as one file of NDJSON or Parquet."""
        return self._send(protocol.export_log(self.id, wanted, format)).body

    def thumbnail(self, position: int) -> bytes:
        """Return the thumbnail of a decision as a JPEG file. Raise ServiceError with status 404 if there is none."""
        return self._send(protocol.thumbnail(self.id, position)).body

    def purge_log(
        self, *, since: datetime | None = None, until: datetime | None = None, image_ref: str | None = None
    ) -> int:
        """Delete entries of the decision log with their thumbnails, and return how many. Without arguments: all."""
        return protocol.deleted(self._send(protocol.purge_log(self.id, since, until, image_ref)))

    def status(self) -> dict[str, Any]:
        """What the stream is and how it fares."""
        return protocol.facts(self._send(protocol.status(self.id)))

    def freeze(self) -> Written:
        """Stop learning, and go on deciding."""
        return protocol.written(self._send(protocol.change(self.id, "freeze")))

    def unfreeze(self) -> Written:
        """Learn again."""
        return protocol.written(self._send(protocol.change(self.id, "unfreeze")))

    def reset(self) -> Written:
        """Forget what was learned, and begin again."""
        return protocol.written(self._send(protocol.change(self.id, "reset")))

    def snapshot(self, name: str, replace: bool = False) -> Written:
        """Save the present state under a name. An existing name is an error unless `replace` is set."""
        return protocol.written(self._send(protocol.snapshot(self.id, name, replace)))

    def snapshots(self) -> list[str]:
        """Return the names of the saved snapshots, oldest first."""
        return protocol.names(self._send(protocol.snapshots(self.id)), "snapshots")

    def rollback(self, name: str) -> Written:
        """Restore a saved snapshot."""
        return protocol.written(self._send(protocol.rollback(self.id, name)))

    def delete_snapshot(self, name: str) -> None:
        """Delete a saved snapshot. Raise ServiceError with status 404 if there is none of this name."""
        self._send(protocol.delete_snapshot(self.id, name))

    def add_class(self, name: str, prototype: Any = None) -> Written:
        """Append a class by its name, or with a prototype (d,) where the features are the caller's own."""
        return protocol.written(self._send(protocol.add_class(self.id, name, prototype)))

    def remove_class(self, name: str) -> Written:
        """Take a class off the list; those behind it close the gap."""
        return protocol.written(self._send(protocol.remove_class(self.id, name)))

    def feedback(self, label: str | None, *, position: int | None = None, feature: Any = None) -> Written:
        """Tell the true class of a sample, None if it is unknown. Decisions on similar samples change at once.

        Args:
            label: the class.
            position: of the sample, as in `Observed`, if the stream stores samples.
            feature: the feature (d,) of the sample, instead of its position.
        """
        return protocol.written(self._send(protocol.feedback(self.id, label, position, feature)))

    def export_state(self) -> bytes:
        """The whole state, as `ProtoDCS.restore` takes it."""
        return self._send(protocol.export_state(self.id)).body

    def state_etag(self) -> str:
        """Return the entity tag of the state. It changes with every change of the stream."""
        return (self._send(protocol.export_state(self.id, "HEAD"))).headers["etag"]

    def import_state(self, state: bytes, if_match: str | None = None) -> Written:
        """Import a state that was exported from this stream or from another one.

        With `if_match`, an entity tag from `state_etag`, this is a ServiceError with status 412 if the stream has
        changed since.
        """
        return protocol.written(self._send(protocol.import_state(self.id, state, if_match)))

    def delete(self) -> None:
        """Delete the stream. Raise ServiceError with status 404 if it is gone, or was created again meanwhile."""
        incarnation = self.created.get("incarnation")
        if incarnation is None:
            # A stream that is damaged has no status, and can be deleted all the same.
            with suppress(ServiceError):
                incarnation = self.status()["incarnation"]
        self._send(protocol.delete(self.id, incarnation))

    def _decisions(self, call: Call, payload: Payload) -> list[Observed]:
        return protocol.decisions(self._send(call), payload)

    def __repr__(self) -> str:
        return f"Stream({self.id!r})"


class AsyncClient:
    """The same as `Client` for asyncio: many streams at once. An asynchronous context manager.

    Args:
        base_url: where the service listens, such as "http://127.0.0.1:8000".
        key: an access key, where the service wants one.
        timeout: seconds to wait for one try.
        give_up: seconds after which a request is not tried again; with 0 each is tried once.
        connections: requests under way at once, at most; the others wait for their turn.
        http: options of `httpx.AsyncClient`, such as `verify` and `proxy`.
    """

    def __init__(
        self,
        base_url: str,
        key: str | None = None,
        *,
        timeout: float = _TIMEOUT,
        give_up: float = _GIVE_UP,
        connections: int = 100,
        **http: Any,
    ):
        limits = httpx.Limits(max_connections=connections, max_keepalive_connections=connections)
        self._http = httpx.AsyncClient(**_options(base_url, key, timeout), **{"limits": limits, **http})
        self._give_up = give_up
        # Those who wait stand here: the pool of httpx looks through all of its own at every step.
        self._turns = asyncio.Semaphore(connections)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    async def create(
        self,
        id: str,  # noqa: A002 - as the service calls it
        *,
        classes: str | Sequence[str] | None = None,
        prototypes: Any = None,
        method: str | None = None,
        config: Mapping[str, Any] | None = None,
        guard: Mapping[str, Any] | None = None,
        like: str | None = None,
        vocabulary: str | None = protocol.DEFAULT_VOCABULARY,
    ) -> "AsyncStream":
        """Create a stream, as `Client.create` does."""
        call = protocol.create(id, classes, prototypes, method, config, guard, like, vocabulary)
        return AsyncStream(self._send, self._send_rows, id, protocol.facts(await self._send(call)))

    async def upload_vocabulary(self, vocabulary: VocabularyLike) -> str:
        """Store a vocabulary unless the service has it, and return its fingerprint, as `create` takes it."""
        shared = Vocabulary.of(vocabulary)
        try:
            answer = await self._send(protocol.find_vocabulary(shared))
        except ServiceError as problem:
            if problem.status != 404:
                raise
            answer = await self._send(protocol.upload_vocabulary(shared))
        fingerprint: str = protocol.facts(answer)["fingerprint"]
        return fingerprint

    async def create_many(self, streams: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Create up to 1,000 streams in one request.

        Args:
            streams: what each is created with, by the names of the arguments of `create`, such as
                {"id": "camera-7", "like": "camera-1"}.

        Returns:
            For each stream its `id`, a `status` (201 created, 200 existed with the same settings, or an error), and the
            `problem` if it was not created.
        """
        results: list[dict[str, Any]] = protocol.facts(await self._send(protocol.create_many(streams)))["results"]
        return results

    async def streams(self, *, sort: str = "id", frozen: bool | None = None) -> list[str]:
        """Return the ids of all streams.

        Args:
            sort: "id", "created", "last_seen" or "unknown_rate"; a "-" before it means descending.
            frozen: return only streams that are frozen, or that are not.
        """
        found, cursor = protocol.stream_ids(await self._send(protocol.streams(sort=sort, frozen=frozen)))
        while cursor is not None:
            page, cursor = protocol.stream_ids(await self._send(protocol.streams(1000, cursor, sort, frozen)))
            found += page
        return found

    async def list_streams(
        self, *, limit: int = 100, cursor: str | None = None, sort: str = "id", frozen: bool | None = None
    ) -> dict[str, Any]:
        """Return a page of streams with their times and unknown rates, and the `next_cursor` if there are more."""
        return protocol.facts(await self._send(protocol.streams(limit, cursor, sort, frozen)))

    async def health(self) -> dict[str, Any]:
        """Return the version of the service and how many requests are in progress."""
        return protocol.facts(await self._send(protocol.health()))

    async def ready(self) -> dict[str, Any]:
        """Return {"ready": True}. Raise ServiceError if the service cannot serve requests."""
        return protocol.facts(await self._send(protocol.ready()))

    async def workers(self) -> dict[str, Any]:
        """Return the names of all workers, and what those report that respond. For operators."""
        return protocol.facts(await self._send(protocol.workers()))

    def stream(self, id: str) -> "AsyncStream":  # noqa: A002 - as the service calls it
        """A stream that is there already; nothing is asked before it is used."""
        return AsyncStream(self._send, self._send_rows, id, {})

    async def follow(self, stream: str | None = None, *, after: str | None = None) -> AsyncIterator[StreamEvent]:
        """Yield events as they happen, without end, as `Client.follow` does. It uses a connection of its own."""
        reader = EventReader(after)
        policy: RetryPolicy | None = None
        while True:
            call = protocol.events(stream, reader.last_id)
            policy = policy or RetryPolicy(call, self._give_up)
            heard: Response | NoResponse = NoResponse("the event stream ended")
            try:
                async with self._http.stream(call.method, call.path, headers=call.headers) as response:
                    if response.status_code != 200:
                        await response.aread()
                        heard = _response(response)
                    else:
                        reader.connected()
                        async for line in response.aiter_lines():
                            policy = None
                            event = reader.read(line)
                            if event is not None:
                                yield event
            except httpx.TransportError as problem:
                heard = _no_response(problem, self._http.base_url)
            policy = policy or RetryPolicy(call, self._give_up)
            await asyncio.sleep(policy.pause_after(heard))

    async def create_webhook(
        self, url: str, *, events: Sequence[str] | None = None, streams: Sequence[str] | None = None
    ) -> dict[str, Any]:
        """Create a webhook, as `Client.create_webhook` does."""
        return protocol.facts(await self._send(protocol.create_webhook(url, events, streams)))

    async def webhooks(self) -> list[dict[str, Any]]:
        """Return all webhooks, oldest first."""
        found: list[dict[str, Any]] = protocol.facts(await self._send(protocol.webhooks()))["webhooks"]
        return found

    async def delete_webhook(self, id: str) -> None:  # noqa: A002 - as the service calls it
        """Delete a webhook."""
        await self._send(protocol.delete_webhook(id))

    async def dead_letters(self, id: str) -> list[dict[str, Any]]:  # noqa: A002 - as the service calls it
        """Return the deliveries of a webhook that were given up, oldest first."""
        found: list[dict[str, Any]] = protocol.facts(await self._send(protocol.dead_letters(id)))["items"]
        return found

    async def _send(self, call: Call) -> Response:
        policy: RetryPolicy | None = None
        while True:
            async with self._turns:
                # The time spent waiting for the first turn is nobody's failure.
                policy = policy or RetryPolicy(call, self._give_up)
                heard = await self._try(call)
            if isinstance(heard, Response) and policy.is_done(heard):
                return heard
            await asyncio.sleep(policy.pause_after(heard))

    async def _send_rows(self, rows: PendingRows) -> AsyncIterator[Observed]:
        """Yield the decisions on rows. After a broken connection, send those again that have no answer."""
        policy: RetryPolicy | None = None
        while len(rows):
            call = rows.call()
            heard: Response | NoResponse = NoResponse("the response ended before all rows had an answer")
            found: list[Observed] = []
            rejected: ServiceError | None = None
            async with self._turns:
                policy = policy or RetryPolicy(call, self._give_up)
                try:
                    async with self._http.stream(
                        call.method, call.path, content=call.body, headers=call.headers
                    ) as response:
                        if response.status_code != 200:
                            await response.aread()
                            heard = _response(response)
                        else:
                            async for line in response.aiter_lines():
                                answer = rows.read(line)
                                if isinstance(answer, Response):
                                    heard = answer
                                    break
                                found.append(answer)
                except httpx.TransportError as problem:
                    heard = _no_response(problem, self._http.base_url)
                except ServiceError as problem:
                    rejected = problem
            # Not before: the caller may take long, and others wait for the turn.
            for one in found:
                policy = None
                yield one
            if rejected is not None:
                raise rejected
            if len(rows):
                policy = policy or RetryPolicy(call, self._give_up)
                await asyncio.sleep(policy.pause_after(heard))

    async def _try(self, call: Call) -> Response | NoResponse:
        try:
            return _response(await self._http.request(call.method, call.path, content=call.body, headers=call.headers))
        except httpx.TransportError as problem:
            return _no_response(problem, self._http.base_url)


class AsyncStream:
    """One stream of a service. Made by `AsyncClient.create` and `AsyncClient.stream`.

    The service keeps the order in which requests arrive: to keep the order of a stream, await one before the next.

    Attributes:
        id: its name.
        created: what the service said to `create`: its classes, settings and encoder; empty after `AsyncClient.stream`.
    """

    def __init__(
        self,
        send: Callable[[Call], Awaitable[Response]],
        send_rows: Callable[[PendingRows], AsyncIterator[Observed]],
        id: str,  # noqa: A002 - as the service calls it
        created: Mapping[str, Any],
    ):
        self._send = send
        self._send_rows = send_rows
        self.id = id
        self.created = created

    @overload
    async def observe(
        self, x: Image, *, idempotency_key: str | None = None, image_ref: str | None = None
    ) -> Observed: ...
    @overload
    async def observe(
        self, x: list[Any], *, idempotency_key: str | None = None, image_ref: Sequence[str] | None = None
    ) -> list[Observed]: ...
    @overload
    async def observe(
        self, x: NDArray[Any], *, idempotency_key: str | None = None, image_ref: str | Sequence[str] | None = None
    ) -> Any: ...

    async def observe(
        self, x: Any, *, idempotency_key: str | None = None, image_ref: str | Sequence[str] | None = None
    ) -> Observed | list[Observed]:
        """Decide on x, and learn from it, as `Stream.observe` does."""
        payloads, several = await _payloads_of(x)
        payloads = protocol.with_refs(payloads, image_ref)
        found: list[Observed] = []
        for payload, key in zip(payloads, protocol.keys(idempotency_key, len(payloads)), strict=True):
            found += await self._decisions(protocol.observe(self.id, payload, key), payload)
        return found if several else found[0]

    @overload
    async def peek(self, x: Image) -> Observed: ...
    @overload
    async def peek(self, x: list[Any]) -> list[Observed]: ...
    @overload
    async def peek(self, x: NDArray[Any]) -> Any: ...

    async def peek(self, x: Any) -> Observed | list[Observed]:
        """What `observe` would answer to x; nothing changes."""
        payloads, several = await _payloads_of(x)
        found = [
            seen for payload in payloads for seen in await self._decisions(protocol.peek(self.id, payload), payload)
        ]
        return found if several else found[0]

    async def observe_stream(
        self, items: Iterable[Any] | AsyncIterable[Any], ahead: int = 8
    ) -> AsyncIterator[Observed]:
        """The decisions on many features or images, as they come, in order, as `Stream.observe_stream` gives them.

        `items` are read by a task in the background; give an asynchronous iterator where reading one takes time.
        """
        _check_ahead(ahead)
        line: deque[Payload | Failure] = deque()
        source: asyncio.Queue[Payload | Failure | None] = asyncio.Queue(ahead)
        reading = asyncio.create_task(_read(items, source))
        try:
            ended = False
            while True:
                while not ended and len(line) < ahead and (not source.empty() or not line):
                    item = await source.get()
                    if item is None:
                        ended = True
                    else:
                        line.append(item)
                if not line:
                    return
                payload = protocol.next_payload(line)
                if payload.rows > 1:
                    async for seen in self._send_rows(PendingRows(self.id, payload)):
                        yield seen
                else:
                    for seen in await self._decisions(
                        protocol.observe(self.id, payload, protocol.key_of(payload)), payload
                    ):
                        yield seen
        finally:
            reading.cancel()
            with suppress(asyncio.CancelledError):
                await reading

    async def explain(self, x: Any) -> dict[str, Any]:
        """What each stage would do with one feature or image, and why; nothing changes."""
        payloads, _ = await _payloads_of(x)
        return protocol.facts(await self._send(protocol.explain(self.id, payloads)))

    async def log(
        self,
        wanted: LogFilter = _ALL,
        *,
        order: Literal["newest", "oldest"] = "newest",
        limit: int | None = None,
        after: int | None = None,
    ) -> AsyncIterator[LoggedDecision]:
        """Yield entries of the decision log, a page at a time.

        Args:
            wanted: which ones, such as `LogFilter(outcome="unknown")`.
            order: newest or oldest first.
            limit: maximum number of entries; None for all.
            after: position behind which the entries begin, in this order; None for the first one.
        """
        # No page is behind a position before the first one.
        cursor = None if after is None or after < 0 else str(after)
        left = math.inf if limit is None else limit
        while left > 0:
            call = protocol.log(self.id, wanted, order, int(min(left, _LOG_PAGE)), cursor)
            entries, cursor = protocol.log_page(await self._send(call))
            for entry in entries:
                yield entry
            left -= len(entries)
            if cursor is None:
                return

    async def export_log(self, wanted: LogFilter = _ALL, *, format: Literal["ndjson", "parquet"] = "ndjson") -> bytes:  # noqa: A002
        """Return the entries of the decision log, oldest first, as one file of NDJSON or Parquet."""
        return (await self._send(protocol.export_log(self.id, wanted, format))).body

    async def thumbnail(self, position: int) -> bytes:
        """Return the thumbnail of a decision as a JPEG file. Raise ServiceError with status 404 if there is none."""
        return (await self._send(protocol.thumbnail(self.id, position))).body

    async def purge_log(
        self, *, since: datetime | None = None, until: datetime | None = None, image_ref: str | None = None
    ) -> int:
        """Delete entries of the decision log with their thumbnails, and return how many. Without arguments: all."""
        return protocol.deleted(await self._send(protocol.purge_log(self.id, since, until, image_ref)))

    async def status(self) -> dict[str, Any]:
        """What the stream is and how it fares."""
        return protocol.facts(await self._send(protocol.status(self.id)))

    async def freeze(self) -> Written:
        """Stop learning, and go on deciding."""
        return protocol.written(await self._send(protocol.change(self.id, "freeze")))

    async def unfreeze(self) -> Written:
        """Learn again."""
        return protocol.written(await self._send(protocol.change(self.id, "unfreeze")))

    async def reset(self) -> Written:
        """Forget what was learned, and begin again."""
        return protocol.written(await self._send(protocol.change(self.id, "reset")))

    async def snapshot(self, name: str, replace: bool = False) -> Written:
        """Save the present state under a name. An existing name is an error unless `replace` is set."""
        return protocol.written(await self._send(protocol.snapshot(self.id, name, replace)))

    async def snapshots(self) -> list[str]:
        """Return the names of the saved snapshots, oldest first."""
        return protocol.names(await self._send(protocol.snapshots(self.id)), "snapshots")

    async def rollback(self, name: str) -> Written:
        """Restore a saved snapshot."""
        return protocol.written(await self._send(protocol.rollback(self.id, name)))

    async def delete_snapshot(self, name: str) -> None:
        """Delete a saved snapshot. Raise ServiceError with status 404 if there is none of this name."""
        await self._send(protocol.delete_snapshot(self.id, name))

    async def add_class(self, name: str, prototype: Any = None) -> Written:
        """Append a class by its name, or with a prototype (d,) where the features are the caller's own."""
        return protocol.written(await self._send(protocol.add_class(self.id, name, prototype)))

    async def remove_class(self, name: str) -> Written:
        """Take a class off the list; those behind it close the gap."""
        return protocol.written(await self._send(protocol.remove_class(self.id, name)))

    async def feedback(self, label: str | None, *, position: int | None = None, feature: Any = None) -> Written:
        """Tell the true class of a sample, None if it is unknown. Decisions on similar samples change at once.

        Args:
            label: the class.
            position: of the sample, as in `Observed`, if the stream stores samples.
            feature: the feature (d,) of the sample, instead of its position.
        """
        return protocol.written(await self._send(protocol.feedback(self.id, label, position, feature)))

    async def export_state(self) -> bytes:
        """The whole state, as `ProtoDCS.restore` takes it."""
        return (await self._send(protocol.export_state(self.id))).body

    async def state_etag(self) -> str:
        """Return the entity tag of the state. It changes with every change of the stream."""
        return (await self._send(protocol.export_state(self.id, "HEAD"))).headers["etag"]

    async def import_state(self, state: bytes, if_match: str | None = None) -> Written:
        """Import a state that was exported from this stream or from another one.

        With `if_match`, an entity tag from `state_etag`, this is a ServiceError with status 412 if the stream has
        changed since.
        """
        return protocol.written(await self._send(protocol.import_state(self.id, state, if_match)))

    async def delete(self) -> None:
        """Delete the stream. Raise ServiceError with status 404 if it is gone, or was created again meanwhile."""
        incarnation = self.created.get("incarnation")
        if incarnation is None:
            # A stream that is damaged has no status, and can be deleted all the same.
            with suppress(ServiceError):
                incarnation = (await self.status())["incarnation"]
        await self._send(protocol.delete(self.id, incarnation))

    async def _decisions(self, call: Call, payload: Payload) -> list[Observed]:
        return protocol.decisions(await self._send(call), payload)

    def __repr__(self) -> str:
        return f"AsyncStream({self.id!r})"


def _options(base_url: str, key: str | None, timeout: float) -> dict[str, Any]:
    try:
        url = httpx.URL(base_url)
        whole = url.scheme in ("http", "https") and bool(url.host)
    except (httpx.InvalidURL, TypeError):
        whole = False
    if not whole:
        raise InputError(f"a service has an address such as 'http://127.0.0.1:8000'; given: {base_url!r}")
    if key is not None and not (key.isascii() and key.isprintable() and key == key.strip() and key):
        raise InputError("an access key is one word of printable ASCII characters: is there more in its file?")
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    # Who waits for a free connection has not been kept waiting by the service.
    return {"base_url": base_url, "headers": headers, "timeout": httpx.Timeout(timeout, pool=None)}


def _response(response: httpx.Response) -> Response:
    return Response(
        response.status_code, {name.lower(): value for name, value in response.headers.items()}, response.content
    )


def _no_response(problem: httpx.TransportError, url: httpx.URL) -> NoResponse:
    # Without a password that may stand before it.
    address = f"{url.scheme}://{url.netloc.decode()}"
    cause: BaseException | None = problem
    while cause is not None:
        if isinstance(cause, ssl.SSLCertVerificationError):
            # Retries don't help.
            raise ServiceError(
                f"The certificate of {address} is not trusted: {cause.verify_message}. If it is yours, set "
                "SSL_CERT_FILE to the PEM file of its authority."
            ) from problem
        cause = cause.__cause__ or cause.__context__
    words = f"{type(problem).__name__}: {problem}" if str(problem) else type(problem).__name__
    return NoResponse(f"{address}: {words}")


def _check_ahead(ahead: int) -> None:
    if ahead < 1:
        raise InputError(f"ahead is how many items are read ahead, at least 1; given: {ahead}")


async def _payloads_of(x: Any) -> tuple[list[Payload], bool]:
    """As `protocol.payloads_of`; files are read and images packed in a thread, so that other requests go on."""
    if isinstance(x, np.ndarray):
        return protocol.payloads_of(x)
    return await asyncio.to_thread(protocol.payloads_of, x)


async def _read(items: Iterable[Any] | AsyncIterable[Any], source: "asyncio.Queue[Payload | Failure | None]") -> None:
    """Put all items in line, and None behind the last."""
    try:
        if isinstance(items, AsyncIterable):
            async for item in items:
                await _put(item, source)
        else:
            for item in items:
                await _put(item, source)
    except Exception as problem:
        await source.put(Failure(problem))
    await source.put(None)


async def _put(item: Any, source: "asyncio.Queue[Payload | Failure | None]") -> None:
    in_thread = not isinstance(item, np.ndarray)
    for payload in await asyncio.to_thread(protocol.item_payloads, item) if in_thread else protocol.item_payloads(item):
        await source.put(payload)

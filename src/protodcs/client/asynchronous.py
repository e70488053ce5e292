"""The client for asyncio, by hand."""

import math
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import aclosing, suppress
from datetime import datetime
from typing import Any, Literal, Self, overload

import httpx
from numpy.typing import NDArray

from ..core.vectors import row_fingerprint
from ..core.vocabulary import Vocabulary, VocabularyLike
from ..decision_log import LoggedDecision
from ..errors import InputError, ServiceError
from . import protocol
from .async_io import Items, ReadAhead, Semaphore, payloads_of, sleep
from .protocol import (
    Call,
    Cluster,
    EventReader,
    Failure,
    Image,
    LogFilter,
    NoResponse,
    Observed,
    Payload,
    PendingRows,
    Response,
    RetryPolicy,
    StreamEvent,
    Written,
    facts,
    request,
    without_none,
)
from .transport import as_response, no_response, options

# The first is longer than a service takes to say that it is too late: request_seconds of its settings.
_TIMEOUT, _GIVE_UP = 35.0, 120.0
# Entries of the decision log in one response.
_LOG_PAGE = 1000
_ALL = LogFilter()


class AsyncClient:
    """A connection to a service. Tasks may share it. A context manager.

        async with AsyncClient("http://127.0.0.1:8000") as client:
            camera = await client.create("camera-7", classes=["cat", "dog"])
            seen = await camera.observe("image.jpg")
            print(seen.decision.label)

    Args:
        base_url: where the service listens, such as "http://127.0.0.1:8000".
        key: an access key, where the service wants one.
        timeout: seconds to wait for one try.
        give_up: seconds after which a request is not tried again; with 0 each is tried once.
        connections: requests under way at once, at most; the others wait for their turn.
        http: options of `httpx.AsyncClient`, such as `verify` and `proxy`.

    Every method raises ServiceError with the words of the service for what it refuses.
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
        self._http = httpx.AsyncClient(**{**options(base_url, key, timeout, connections), **http})
        self._give_up = give_up
        # Those who wait stand here: the pool of httpx looks through all of its own at every step.
        self._turns = Semaphore(connections)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
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
        discovery: bool | Mapping[str, Any] | None = None,
    ) -> "AsyncStream":
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
            discovery: whether to store samples for review, clusters and feedback by position, or settings that differ
                from the defaults of a discovery. None: as the service is set.
        """
        names = classes if classes is None or isinstance(classes, str) else list(classes)
        given = without_none({"classes": names, "method": method, "config": config, "guard": guard, "like": like})
        given |= without_none({"prototypes": protocol.rows_of(prototypes), "discovery": discovery})
        # None is a choice, too.
        chosen = {} if vocabulary == protocol.DEFAULT_VOCABULARY else {"vocabulary": vocabulary}
        call = request("POST", "/v1/streams", {"id": id, **given, **chosen})
        return AsyncStream(self, id, await self._ask(call))

    async def upload_vocabulary(self, vocabulary: VocabularyLike) -> str:
        """Store a vocabulary unless the service has it, and return its fingerprint, as `create` takes it.

        Args:
            vocabulary: the text features of 16 to 5,000 general names, (V, d), or a `Vocabulary`.
        """
        rows = Vocabulary.of(vocabulary).rows
        path = f"/v1/vocabularies/{row_fingerprint(rows)}"
        try:
            return await self._ask(request("GET", path), "fingerprint")
        except ServiceError as problem:
            if problem.status != 404:
                raise
        content = rows.astype("<f4", copy=False).tobytes()
        call = Call("PUT", f"{path}?count={len(rows)}", {"content-type": protocol.FEATURES}, content)
        return await self._ask(call, "fingerprint")

    async def create_many(self, streams: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Create up to 1,000 streams in one request.

        Args:
            streams: what each is created with, by the names of the arguments of `create`, such as
                {"id": "camera-7", "like": "camera-1"}.

        Returns:
            For each stream its `id`, a `status` (201 created, 200 existed with the same settings, or an error), and the
            `problem` if it was not created.
        """
        return await self._ask(request("POST", "/v1/streams:batch", {"streams": list(streams)}), "results")

    async def streams(self, *, sort: str = "id", frozen: bool | None = None) -> list[str]:
        """Return the ids of all streams.

        Args:
            sort: "id", "created", "last_seen" or "unknown_rate"; a "-" before it means descending.
            frozen: return only streams that are frozen, or that are not.
        """
        found: list[str] = []
        cursor: str | None = None
        while True:
            answer = await self._send(protocol.streams(1000, cursor, sort, frozen))
            found += [stream["id"] for stream in facts(answer, "streams")]
            cursor = facts(answer, "next_cursor")
            if cursor is None:
                return found

    async def list_streams(
        self, *, limit: int = 100, cursor: str | None = None, sort: str = "id", frozen: bool | None = None
    ) -> dict[str, Any]:
        """Return a page of streams with their times and unknown rates, and the `next_cursor` if there are more."""
        return await self._ask(protocol.streams(limit, cursor, sort, frozen))

    async def health(self) -> dict[str, Any]:
        """Return the version of the service and how many requests are in progress."""
        return await self._ask(request("GET", "/v1/health"))

    async def ready(self) -> dict[str, Any]:
        """Return {"ready": True}. Raise ServiceError if the service cannot serve requests."""
        return await self._ask(request("GET", "/v1/ready"))

    async def workers(self) -> dict[str, Any]:
        """Return the names of all workers, and what those report that respond. For operators."""
        return await self._ask(request("GET", "/v1/workers"))

    def stream(self, id: str) -> "AsyncStream":  # noqa: A002 - as the service calls it
        """A stream that is there already; nothing is asked before it is used."""
        return AsyncStream(self, id, {})

    async def follow(self, stream: str | None = None, *, after: str | None = None) -> AsyncIterator[StreamEvent]:
        """Yield events as they happen, without end: decisions, statistics, guard actions and warnings.

        After a broken connection it connects again, and goes on after the last event: none is missing or doubled. It
        uses a connection of its own.

        Args:
            stream: the id of a stream; None for all streams.
            after: the id of the last event that you know, to get what came since; None: only what comes from now on.
        """
        path = "/v1/events" if stream is None else f"{protocol.stream_path(stream)}/events"
        reader = EventReader(after)
        policy: RetryPolicy | None = None
        while True:
            call = request("GET", path, headers=without_none({"last-event-id": reader.last_id}))
            policy = policy or RetryPolicy(call, self._give_up)
            heard: Response | NoResponse = NoResponse("the event stream ended")
            reader.connected()
            async with aclosing(self._lines(call)) as lines:
                async for line in lines:
                    if not isinstance(line, str):
                        heard = line
                        break
                    policy = None
                    event = reader.read(line)
                    if event is not None:
                        yield event
            policy = policy or RetryPolicy(call, self._give_up)
            await sleep(policy.pause_after(heard))

    async def create_webhook(
        self, url: str, *, events: Sequence[str] | None = None, streams: Sequence[str] | None = None
    ) -> dict[str, Any]:
        """Create a webhook, and return it with its `id` and `secret`.

        Args:
            url: where notices are sent.
            events: "guard", "possible_shift" or "many_unknown"; None for all.
            streams: ids; None for all streams.
        """
        given = {"url": url, "events": events, "streams": streams}
        return await self._ask(request("POST", "/v1/webhooks", without_none(given)))

    async def webhooks(self) -> list[dict[str, Any]]:
        """Return all webhooks, oldest first."""
        return await self._ask(request("GET", "/v1/webhooks"), "webhooks")

    async def delete_webhook(self, id: str) -> None:  # noqa: A002 - as the service calls it
        """Delete a webhook."""
        await self._send(request("DELETE", protocol.webhook_path(id)))

    async def dead_letters(self, id: str) -> list[dict[str, Any]]:  # noqa: A002 - as the service calls it
        """Return the deliveries of a webhook that were given up, oldest first."""
        return await self._ask(request("GET", f"{protocol.webhook_path(id)}/dead-letters"), "items")

    async def _ask(self, call: Call, of: str | None = None) -> Any:
        return facts(await self._send(call), of)

    async def _send(self, call: Call) -> Response:
        policy: RetryPolicy | None = None
        while True:
            async with self._turns:
                # The time spent waiting for the first turn is nobody's failure.
                policy = policy or RetryPolicy(call, self._give_up)
                heard = await self._try(call)
            if isinstance(heard, Response) and policy.is_done(heard):
                return heard
            await sleep(policy.pause_after(heard))

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
                    async with aclosing(self._lines(call)) as lines:
                        async for line in lines:
                            answer = rows.read(line) if isinstance(line, str) else line
                            if not isinstance(answer, Observed):
                                heard = answer
                                break
                            found.append(answer)
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
                await sleep(policy.pause_after(heard))

    async def _lines(self, call: Call) -> AsyncGenerator[str | Response | NoResponse, None]:
        """Yield the lines of a response. If it is not a 200 or breaks off, what came instead is the last item."""
        try:
            async with self._http.stream(call.method, call.path, content=call.body, headers=call.headers) as response:
                if response.status_code == 200:
                    async for line in response.aiter_lines():
                        yield line
                else:
                    await response.aread()
                    yield as_response(response)
        except httpx.TransportError as problem:
            yield no_response(problem, self._http.base_url)

    async def _try(self, call: Call) -> Response | NoResponse:
        try:
            return as_response(
                await self._http.request(call.method, call.path, content=call.body, headers=call.headers)
            )
        except httpx.TransportError as problem:
            return no_response(problem, self._http.base_url)


class AsyncStream:
    """One stream of a service. Made by `AsyncClient.create` and `AsyncClient.stream`.

    The service keeps the order in which requests arrive: to keep the order of a stream, wait for one answer
    before the next request.

    Attributes:
        id: its name.
        created: what the service said to `create`: its classes, settings and encoder; empty after `AsyncClient.stream`.
    """

    def __init__(self, client: AsyncClient, id: str, created: Mapping[str, Any]):  # noqa: A002 - as the service calls it
        self._client = client
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
        payloads, several = await payloads_of(x)
        payloads = protocol.with_refs(payloads, image_ref)
        found: list[Observed] = []
        for payload, key in zip(payloads, protocol.keys(idempotency_key, len(payloads)), strict=True):
            found += await self._decide("observe", payload, key)
        return found if several else found[0]

    @overload
    async def peek(self, x: Image) -> Observed: ...
    @overload
    async def peek(self, x: list[Any]) -> list[Observed]: ...
    @overload
    async def peek(self, x: NDArray[Any]) -> Any: ...

    async def peek(self, x: Any) -> Observed | list[Observed]:
        """What `observe` would answer to x; nothing changes."""
        payloads, several = await payloads_of(x)
        found = [seen for payload in payloads for seen in await self._decide("peek", payload)]
        return found if several else found[0]

    async def observe_stream(self, items: Items, ahead: int = 8) -> AsyncIterator[Observed]:
        """The decisions on many features or images, as they come, in order: one request is under way at a time.

        `items` are read by a task in the background, up to `ahead` of them beyond the request that is under way.
        Features that have gathered meanwhile travel together, each under a key of its own. After a broken connection,
        those that have no answer yet are sent again, and each is applied once. An error of an item, or of `items`
        itself, is raised in order, after the decisions on all before it. Closing the iterator, or dropping it, stops
        the reading.

        Args:
            items: features, images, or `Row` for one of them with its own key and image reference.
            ahead: how many items to read ahead.
        """
        if ahead < 1:
            raise InputError(f"ahead is how many items are read ahead, at least 1; given: {ahead}")
        line: deque[Payload | Failure] = deque()
        async with aclosing(ReadAhead(items, ahead)) as source:
            while True:
                while len(line) < ahead and (source.waiting or not line):
                    item = await source.next()
                    if item is None:
                        break
                    line.append(item)
                if not line:
                    return
                payload = protocol.next_payload(line)
                if payload.rows > 1:
                    async for seen in self._client._send_rows(PendingRows(self.id, payload)):
                        yield seen
                else:
                    for seen in await self._decide("observe", payload, protocol.key_of(payload)):
                        yield seen

    async def explain(self, x: Any) -> dict[str, Any]:
        """What each stage would do with one feature or image, and why; nothing changes."""
        payloads, _ = await payloads_of(x)
        if len(payloads) != 1 or payloads[0].rows != 1:
            raise InputError(f"one sample is explained at a time; given: {sum(payload.rows for payload in payloads)}")
        return await self._client._ask(protocol.decide(self.id, "explain", payloads[0]))

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
            query = {"order": order, "limit": int(min(left, _LOG_PAGE)), "cursor": cursor}
            answer = await self._send("GET", "/decisions", query={**protocol.log_query(wanted), **query})
            entries, cursor = protocol.log_page(answer)
            for entry in entries:
                yield entry
            left -= len(entries)
            if cursor is None:
                return

    async def export_log(self, wanted: LogFilter = _ALL, *, format: Literal["ndjson", "parquet"] = "ndjson") -> bytes:  # noqa: A002
        """Return the entries of the decision log, oldest first, as one file of NDJSON or Parquet."""
        return await self._read("/decisions:export", {**protocol.log_query(wanted), "format": format})

    async def thumbnail(self, position: int) -> bytes:
        """Return the thumbnail of a decision as a JPEG file. Raise ServiceError with status 404 if there is none."""
        return await self._read(f"/decisions/{position:d}/thumbnail")

    async def purge_log(
        self, *, since: datetime | None = None, until: datetime | None = None, image_ref: str | None = None
    ) -> int:
        """Delete entries of the decision log with their thumbnails, and return how many. Without arguments: all."""
        query = {"since": protocol.moment(since), "until": protocol.moment(until), "image_ref": image_ref}
        return facts(await self._send("DELETE", "/decisions", query=query), "deleted")

    async def status(self) -> dict[str, Any]:
        """What the stream is and how it fares."""
        return facts(await self._send("GET"))

    async def freeze(self) -> Written:
        """Stop learning, and go on deciding."""
        return await self._change("POST", "/freeze")

    async def unfreeze(self) -> Written:
        """Learn again."""
        return await self._change("POST", "/unfreeze")

    async def acknowledge(self) -> Written:
        """End the warnings of the stream: what its latest samples show counts as usual."""
        return await self._change("POST", "/acknowledge")

    async def reset(self) -> Written:
        """Forget what was learned, and begin again."""
        return await self._change("POST", "/reset")

    async def snapshot(self, name: str, replace: bool = False) -> Written:
        """Save the present state under a name. An existing name is an error unless `replace` is set."""
        return await self._change("POST", "/snapshots", {"name": name, **({"replace": True} if replace else {})})

    async def snapshots(self) -> list[str]:
        """Return the names of the saved snapshots, oldest first."""
        return facts(await self._send("GET", "/snapshots"), "snapshots")

    async def rollback(self, name: str) -> Written:
        """Restore a saved snapshot."""
        return await self._change("POST", "/rollback", {"name": name})

    async def delete_snapshot(self, name: str) -> None:
        """Delete a saved snapshot. Raise ServiceError with status 404 if there is none of this name."""
        await self._send("DELETE", f"/snapshots/{protocol.segment(name, 'name of a snapshot')}", keyed=True)

    async def add_class(self, name: str, prototype: Any = None) -> Written:
        """Append a class by its name, or with a prototype (d,) where the features are the caller's own."""
        given = without_none({"name": name, "prototype": protocol.rows_of(prototype)})
        return await self._change("POST", "/classes", given)

    async def remove_class(self, name: str) -> Written:
        """Take a class off the list; those behind it close the gap."""
        return await self._change("DELETE", f"/classes/{protocol.segment(name, 'name of a class')}")

    async def feedback(self, label: str | None, *, position: int | None = None, feature: Any = None) -> Written:
        """Tell the true class of a sample, None if it is unknown. Decisions on similar samples change at once.

        Args:
            label: the class.
            position: of the sample, as in `Observed`, if the stream stores samples.
            feature: the feature (d,) of the sample, instead of its position.
        """
        given = {"position": position} if feature is None else {"feature": protocol.rows_of(feature)}
        return await self._change("POST", "/feedback", {"label": label, **given})

    async def clusters(self) -> list[Cluster]:
        """Return the clusters of unknown samples, the largest first, if the stream stores samples."""
        return protocol.clusters(await self._send("GET", "/clusters"))

    async def name_cluster(self, cluster: int, name: str) -> Written:
        """Name a cluster. Later unknown samples that join it get this name as `cluster_name`."""
        return await self._change("POST", f"/clusters/{cluster}:name", {"name": name})

    async def export_state(self) -> bytes:
        """The whole state, as `ProtoDCS.restore` takes it."""
        return await self._read("/state")

    async def state_etag(self) -> str:
        """Return the entity tag of the state. It changes with every change of the stream."""
        return (await self._send("HEAD", "/state")).headers["etag"]

    async def import_state(self, state: bytes, if_match: str | None = None) -> Written:
        """Import a state that was exported from this stream or from another one.

        With `if_match`, an entity tag from `state_etag`, this is a ServiceError with status 412 if the stream has
        changed since.
        """
        headers = without_none({"content-type": protocol.FEATURES, "if-match": if_match})
        call = request("PUT", f"{protocol.stream_path(self.id)}/state", keyed=True, headers=headers)
        return protocol.written(await self._client._send(call._replace(body=bytes(state))))

    async def delete(self) -> None:
        """Delete the stream. Raise ServiceError with status 404 if it is gone, or was created again meanwhile."""
        incarnation = self.created.get("incarnation")
        if incarnation is None:
            # A stream that is damaged has no status, and can be deleted all the same.
            with suppress(ServiceError):
                incarnation = (await self.status())["incarnation"]
        await self._send("DELETE", query={"incarnation": incarnation}, keyed=True)

    async def _decide(self, action: str, payload: Payload, key: str | None = None) -> list[Observed]:
        answer = await self._client._send(protocol.decide(self.id, action, payload, key))
        return protocol.decisions(answer, payload)

    async def _change(self, method: str, path: str, value: Any = None) -> Written:
        return protocol.written(await self._send(method, path, value, keyed=True))

    async def _read(self, path: str, query: Mapping[str, Any] | None = None) -> bytes:
        return (await self._send("GET", path, query=query)).body

    async def _send(self, method: str, path: str = "", value: Any = None, **more: Any) -> Response:
        return await self._client._send(request(method, protocol.stream_path(self.id) + path, value, **more))

    def __repr__(self) -> str:
        return f"AsyncStream({self.id!r})"

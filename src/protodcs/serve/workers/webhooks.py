"""Webhooks: send the notices of a tenant's streams to addresses that the tenant chose.

Each webhook has a durable place among the notices, which the store keeps in the order in which they became durable. A
notice is sent again until the receiver confirms it, or goes to the dead letters after some attempts; only then comes
the next one. So a receiver gets every notice at least once and in order, also if the service dies at any moment.

Each webhook has one deliverer: the worker that holds its lease. If that worker stops, another one takes the lease, goes
on at the stored place, and sends what was under way a second time.

Deliveries are signed by the scheme of Standard Webhooks, for which receivers have libraries.

Tenants choose the addresses, so a delivery must never reach this machine or a private network: the address is resolved
once, checked, and connected to. Redirects are not followed. Nothing here runs in a thread that other work needs, and
each delivery has a deadline, so a slow receiver delays only its own webhook.
"""

import asyncio
import base64
import ipaddress
import json
import logging
import re
import secrets
import socket
import ssl
import threading
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable
from concurrent.futures import Future
from contextlib import suppress
from datetime import UTC, datetime
from functools import cache, partial
from typing import Any, Final, Literal, NamedTuple
from urllib.parse import SplitResult, urlsplit

from pydantic import AwareDatetime, BaseModel, Field
from standardwebhooks import Webhook as Signer

from ...errors import InputError, ProtoDCSError, StoreError
from ...version import __version__
from ..settings import ServeConfig, public_id
from ..store.base import Store
from ..telemetry import logs
from .waiting import wait_at_most

_log = logging.getLogger(__name__)

EventName = Literal["guard", "possible_shift", "many_unknown"]
MAX_WEBHOOKS: Final = 20
MAX_DEAD_LETTERS: Final = 100
_KIND, _CURSOR, _DEAD = "webhook", "webhook-cursor", "dead-letter"
# Notices that are read at once.
_PAGE = 100
# Commits notify the deliveries. This is for what they might miss. Seconds.
_LOOK_ANYWAY = 5.0
# With PostgreSQL, other workers commit too. Seconds between two looks for new notices.
_LOOK_IF_SHARED = 1.0
# A lease is renewed so many times before it ends.
_LOOKS_PER_LEASE = 3
# Pauses between attempts double from the first to the last, in seconds.
_FIRST_PAUSE, _LAST_PAUSE = 1.0, 300.0
# For a whole delivery, from the name of its host to the status. Seconds.
_TIMEOUT = 10.0
# Hosts of a tenant that are resolved at the same time, each in a thread.
_LOOKUPS = 4
_STATUS_LINE = re.compile(rb"HTTP/1\.[01] ([1-5]\d\d)\b")
_MAX_URL = 2000
# The networks of RFC 6052, whose addresses end with one of IPv4, and of RFC 4291.
_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")
_GLOBAL_UNICAST = ipaddress.IPv6Network("2000::/3")


class WebhookStatus(BaseModel):
    """A webhook."""

    id: str
    url: str
    events: list[EventName]
    streams: list[str] | None
    created: AwareDatetime


class CreatedWebhook(WebhookStatus):
    """A webhook and its secret, which no other response contains."""

    secret: str = Field(description="Key of the signatures, as Standard Webhooks has it: `whsec_` and base64.")


class Webhook(CreatedWebhook):
    """A webhook as it is stored, with the tenant whose notices it gets. The tenant is empty without keys."""

    tenant: str

    @property
    def document(self) -> str:
        """The name of its documents in the store."""
        return f"{self.tenant}/{self.id}"

    def wants(self, stream: str, name: str) -> bool:
        """Return whether a notice is sent there."""
        return name in self.events and (self.streams is None or stream in self.streams)


class _RejectedError(ProtoDCSError):
    """A delivery that the receiver did not confirm."""


class _Delivery:
    """A webhook whose lease this worker holds.

    Attributes:
        signal: set if there may be new notices.
        lease_end: when the lease ends, by the monotonic clock. Nothing is sent after that.
        task: sends the notices.
    """

    def __init__(self, lease_end: float):
        self.signal = asyncio.Event()
        self.lease_end = lease_end
        self.task: asyncio.Task[None] | None = None

    def check_lease(self) -> None:
        """Raise StoreError if the lease may be another worker's by now."""
        if time.monotonic() >= self.lease_end:
            raise StoreError("the lease of a webhook was not renewed in time")


class Webhooks:
    """The webhooks of all tenants, and deliveries of those whose lease this worker holds."""

    def __init__(self, store: Store, config: ServeConfig):
        self._store = store
        self._incarnation = secrets.token_hex(8)
        self._attempts = config.webhook_attempts
        self._allow_private = config.webhook_private_targets
        self._lease_seconds = config.lease_seconds
        # In the process of the only worker, commits notify the deliveries.
        self._poll_seconds = _LOOK_ANYWAY if config.is_single else _LOOK_IF_SHARED
        self._deliveries: dict[str, _Delivery] = {}
        # Each tenant has its own, so that slow name servers of one do not delay the webhooks of others.
        self._lookups: defaultdict[str, asyncio.Semaphore] = defaultdict(lambda: asyncio.Semaphore(_LOOKUPS))
        self._sharing: asyncio.Task[None] | None = None
        self._changed = asyncio.Event()

    async def start(self) -> None:
        """Go on with the deliveries."""
        sharing = _repeat(self._share, self._changed, self._lease_seconds / _LOOKS_PER_LEASE)
        self._sharing = asyncio.create_task(sharing)

    async def close(self) -> None:
        """Stop the deliveries. What was not confirmed is sent again, by another worker or after the next start."""
        if self._sharing is not None:
            self._sharing.cancel()
            await asyncio.gather(self._sharing, return_exceptions=True)
        held = list(self._deliveries)
        await asyncio.gather(*map(self._stop, held))
        with suppress(StoreError):
            for document in held:
                await self._store.resign(_lease(document), self._incarnation)

    def notify(self) -> None:
        """Have all webhooks look for new notices."""
        for delivery in self._deliveries.values():
            delivery.signal.set()

    # Called by routes.

    async def create(self, tenant: str, url: str, events: list[EventName], streams: list[str] | None) -> Webhook:
        """Create a webhook for all notices from now on. Raise InputError if its address may not be used."""
        if len(await self.of_tenant(tenant)) >= MAX_WEBHOOKS:
            raise InputError(f"There are {MAX_WEBHOOKS} webhooks, which is the limit. Delete one first.")
        await self._resolve(tenant, url)
        webhook = Webhook(
            id=secrets.token_hex(8),
            url=url,
            events=events,
            streams=streams,
            created=datetime.now(UTC),
            secret=f"whsec_{base64.b64encode(secrets.token_bytes(32)).decode()}",
            tenant=tenant,
        )
        newest = await self._store.newest_notice(tenant)
        await self._store.put_document(_CURSOR, webhook.document, b"%d" % newest)
        await self._store.put_document(_KIND, webhook.document, webhook.model_dump_json().encode())
        self._changed.set()
        return webhook

    async def of_tenant(self, tenant: str) -> list[Webhook]:
        """Return the webhooks of a tenant, oldest first."""
        found = [webhook for webhook in await self._stored() if webhook.tenant == tenant]
        return sorted(found, key=lambda webhook: webhook.created)

    async def delete(self, webhook: Webhook) -> None:
        """Delete a webhook with its dead letters. Its deliverer, if it is another worker, stops within seconds."""
        await self._store.delete_document(_KIND, webhook.document)
        await self._forget(webhook.document)

    async def dead_letters(self, webhook: Webhook) -> list[dict[str, Any]]:
        """Return the deliveries that were given up, oldest first."""
        stored = await self._store.documents(_DEAD)
        return [json.loads(stored[name]) for name in _dead_names(webhook.document, stored)]

    async def _stored(self) -> list[Webhook]:
        return [Webhook.model_validate_json(data) for data in (await self._store.documents(_KIND)).values()]

    # Leases.

    async def _share(self) -> None:
        """Hold the leases of some webhooks, so that each has one worker that delivers."""
        webhooks = {webhook.document: webhook for webhook in await self._stored()}
        for document in self._deliveries.keys() - webhooks.keys():
            await self._forget(document)
        for webhook in webhooks.values():
            await self._take(webhook)

    async def _take(self, webhook: Webhook) -> None:
        """Take or renew the lease of a webhook, and deliver its notices if that succeeds."""
        document, asked = webhook.document, time.monotonic()
        lease = await self._store.renew(_lease(document), self._incarnation, self._lease_seconds)
        if lease.holder not in (None, self._incarnation):
            await self._stop(document)
            return
        lease_end = asked + self._lease_seconds
        delivery = self._deliveries.get(document)
        if delivery is None:
            delivery = self._deliveries[document] = _Delivery(lease_end)
            deliver = partial(self._deliver_new, webhook, delivery)
            delivery.task = asyncio.create_task(_repeat(deliver, delivery.signal, self._poll_seconds))
        delivery.lease_end = lease_end

    async def _stop(self, document: str) -> None:
        delivery = self._deliveries.pop(document, None)
        if delivery is not None and delivery.task is not None:
            delivery.task.cancel()
            await asyncio.gather(delivery.task, return_exceptions=True)

    async def _forget(self, document: str) -> None:
        """Stop the deliveries of a webhook that was deleted, and delete what is left of it."""
        await self._stop(document)
        await self._store.delete_document(_CURSOR, document)
        for name in _dead_names(document, await self._store.documents(_DEAD)):
            await self._store.delete_document(_DEAD, name)

    # Deliveries.

    async def _deliver_new(self, webhook: Webhook, delivery: _Delivery) -> None:
        """Send the notices behind the stored place, one after the other."""
        delivery.check_lease()
        # Read again each time: after the lease was lost, another worker may have sent some.
        cursors = await self._store.documents(_CURSOR)
        if webhook.document not in cursors:
            # It was deleted.
            return
        cursor = int(cursors[webhook.document])
        while page := await self._store.read_tenant_notices(webhook.tenant, cursor, _PAGE):
            for number, stream, notice in page:
                name = public_id(stream)
                content = notice.described()
                if webhook.wants(name, content.get("warning", "guard")):
                    body = {"id": f"{webhook.id}-{number}", "event": notice.kind, "stream": name, **content}
                    await self._deliver(webhook, delivery, number, body)
                cursor = number
                delivery.check_lease()
                await self._store.put_document(_CURSOR, webhook.document, b"%d" % cursor)

    async def _deliver(self, webhook: Webhook, delivery: _Delivery, number: int, body: dict[str, Any]) -> None:
        """Send one notice until it is confirmed, or store it as a dead letter."""
        pause = _FIRST_PAUSE
        for attempt in range(1, self._attempts + 1):
            delivery.check_lease()
            try:
                await self._send(webhook, body)
                return
            except (ProtoDCSError, OSError, ValueError) as raised:
                problem = str(raised) or type(raised).__name__
            fields = logs.with_fields(webhook=webhook.id, attempt=attempt, problem=problem)
            _log.warning("a webhook was not confirmed", extra=fields)
            if attempt < self._attempts:
                await asyncio.sleep(pause)
                pause = min(2 * pause, _LAST_PAUSE)
        letter = {"delivery": body, "error": problem, "attempts": self._attempts, "time": int(1000 * time.time())}
        names = _dead_names(webhook.document, await self._store.documents(_DEAD))
        await self._store.put_document(_DEAD, f"{webhook.document}/{number:016d}", json.dumps(letter).encode())
        for name in names[: len(names) + 1 - MAX_DEAD_LETTERS]:
            await self._store.delete_document(_DEAD, name)

    async def _resolve(self, tenant: str, url: str) -> "Target":
        """Return where a URL leads. Raise InputError if deliveries may not go there."""
        try:
            async with asyncio.timeout(_TIMEOUT), self._lookups[tenant]:
                return await resolve(url, self._allow_private)
        except TimeoutError:
            raise InputError(f"The host of the webhook was not resolved within {_TIMEOUT:g} seconds.") from None

    async def _send(self, webhook: Webhook, body: dict[str, Any]) -> None:
        """Send a delivery. Raise an error if it is not confirmed in time."""
        content, now = json.dumps(body), datetime.now(UTC)
        headers = {
            "Content-Type": "application/json",
            "User-Agent": f"protodcs/{__version__}",
            "webhook-id": body["id"],
            "webhook-timestamp": str(int(now.timestamp())),
            "webhook-signature": Signer(webhook.secret).sign(body["id"], now, content),
        }
        try:
            # For name, connection, handshake and status together: a receiver that sends a byte at a time gets no more.
            async with asyncio.timeout(_TIMEOUT):
                target = await self._resolve(webhook.tenant, webhook.url)
                status = await target.post(headers, content.encode())
        except TimeoutError:
            raise _RejectedError(f"The receiver did not answer within {_TIMEOUT:g} seconds.") from None
        if not 200 <= status < 300:
            raise _RejectedError(f"The receiver answered with status {status}.")


async def _repeat(work: Callable[[], Awaitable[None]], signal: asyncio.Event, seconds: float) -> None:
    """Do some work at each signal and after so many seconds, until it is cancelled. Errors are logged."""
    while True:
        signal.clear()
        try:
            await work()
        except StoreError as problem:
            _log.warning("webhooks cannot use the store", extra=logs.with_fields(problem=str(problem)))
        except Exception:
            _log.exception("webhooks failed")
        await wait_at_most(signal, seconds)


def _dead_names(document: str, stored: Iterable[str]) -> list[str]:
    """Return those of some names that belong to the dead letters of a webhook."""
    return [name for name in stored if name.startswith(f"{document}/")]


def _lease(document: str) -> str:
    """Return the name of the lease of a webhook. No worker has such a name."""
    return f"webhook/{document}"


class Target(NamedTuple):
    """A receiver whose address was resolved and checked."""

    parts: SplitResult
    address: str
    port: int

    async def post(self, headers: dict[str, str], content: bytes) -> int:
        """Send a request to the address that was checked, whatever its name means by now, and return the status."""
        host, path = self.parts.netloc, (self.parts.path or "/") + (f"?{self.parts.query}" if self.parts.query else "")
        headers = {"Host": host, "Connection": "close", "Content-Length": str(len(content)), **headers}
        lines = [f"POST {path} HTTP/1.1", *(f"{name}: {value}" for name, value in headers.items()), "", ""]
        tls, name = (_tls(), self.parts.hostname) if self.parts.scheme == "https" else (None, None)
        reader, writer = await asyncio.open_connection(self.address, self.port, ssl=tls, server_hostname=name)
        try:
            writer.write("\r\n".join(lines).encode() + content)
            return await _status(reader)
        finally:
            # Nothing is left to send, and a receiver that reads no farther must not hold the connection.
            writer.transport.abort()


async def _status(reader: asyncio.StreamReader) -> int:
    """Return the status of a response, after all provisional ones."""
    while True:
        line = await reader.readline()
        found = _STATUS_LINE.match(line)
        if found is None:
            raise _RejectedError("The receiver did not answer with HTTP/1.1.")
        if not found[1].startswith(b"1"):
            return int(found[1])
        while (await reader.readline()).strip():
            pass


@cache
def _tls() -> ssl.SSLContext:
    return ssl.create_default_context()


async def _look_up(host: str, port: int) -> list[str]:
    """Return the addresses of a host.

    In a daemon thread: a name server can take its time, and neither other work nor the end of the service waits for it.
    """
    with suppress(OSError):
        return _addresses(host, port, socket.AI_NUMERICHOST)
    found: Future[list[str]] = Future()
    # If nobody waits any more, the result is dropped.
    found.set_running_or_notify_cancel()

    def work() -> None:
        try:
            found.set_result(_addresses(host, port))
        except Exception as problem:
            found.set_exception(problem)

    threading.Thread(target=work, name="webhook host", daemon=True).start()
    return await asyncio.wrap_future(found)


def _addresses(host: str, port: int, flags: int = 0) -> list[str]:
    return [str(one[4][0]) for one in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=flags)]


async def resolve(url: str, allow_private: bool) -> Target:
    """Return where the URL of a receiver leads. Raise InputError if deliveries may not go there."""
    try:
        parts = urlsplit(url)
        port = parts.port or (443 if parts.scheme == "https" else 80)
    except ValueError:
        raise InputError(f"The URL of a webhook is not valid; given: {url[:100]!r}.") from None
    if parts.scheme not in ("http", "https") or not parts.hostname or len(url) > _MAX_URL or not _is_plain(url):
        raise InputError(f"The URL of a webhook must be https://HOST/PATH or http://HOST/PATH; given: {url[:100]!r}.")
    if parts.username is not None or parts.password is not None:
        raise InputError("The URL of a webhook must not contain a user or a password.")
    try:
        addresses = await _look_up(parts.hostname, port)
    except (OSError, UnicodeError):
        raise InputError(f"The host {parts.hostname[:100]!r} of the webhook cannot be resolved.") from None
    # All of them: a name with one public and one private address is an attempt to pass this check.
    if not allow_private and not all(map(is_public, addresses)):
        raise InputError(
            f"The host {parts.hostname[:100]!r} of the webhook is this machine or in a private network. Use a public "
            "address, or have the operator set `webhook_private_targets`."
        )
    return Target(parts, addresses[0], port)


def _is_plain(url: str) -> bool:
    return url.isascii() and url.isprintable() and " " not in url


def is_public(address: str) -> bool:
    """Return whether an IP address is one of the public Internet.

    >>> [is_public(address) for address in ("8.8.8.8", "127.0.0.1", "10.0.0.7", "169.254.169.254", "::ffff:127.0.0.1")]
    [True, False, False, False, False]
    """
    found = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(found, ipaddress.IPv6Address):
        embedded = found.ipv4_mapped
        if embedded is None and found in _NAT64:
            embedded = ipaddress.IPv4Address(found.packed[-4:])
        if embedded is None:
            return found.is_global and found in _GLOBAL_UNICAST and found.sixtofour is None and found.teredo is None
        found = embedded
    return found.is_global and not found.is_multicast

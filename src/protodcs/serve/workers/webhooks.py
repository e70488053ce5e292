"""Webhooks: send the notices of a tenant's streams to addresses that the tenant chose.

Each webhook has a durable place among the notices, which the store keeps in the order in which they became durable. A
notice is sent again until the receiver confirms it, or goes to the dead letters after some attempts; only then comes
the next one. So a receiver gets every notice at least once and in order, also if the service dies at any moment.

Tenants choose the addresses, so a delivery must never reach this machine or a private network: the address is resolved
once, checked, and connected to. Redirects are not followed.
"""

import asyncio
import hashlib
import hmac
import http.client
import ipaddress
import json
import logging
import secrets
import socket
import ssl
import time
from typing import Any, Final, NamedTuple, Protocol
from urllib.parse import SplitResult, urlsplit

from ...errors import ConfigError, InputError, ProtoDCSError, StoreError
from ...version import __version__
from ..log.notices import Notice
from ..settings import ServeConfig
from ..telemetry import logs

_log = logging.getLogger(__name__)

MAX_WEBHOOKS: Final = 20
MAX_DEAD_LETTERS: Final = 100
SIGNATURE: Final = "X-ProtoDCS-Signature"
_KIND, _CURSOR, _DEAD = "webhook", "webhook-cursor", "dead-letter"
# Notices that are read at once.
_PAGE = 100
# Commits wake the deliveries. This is for what they might miss. Seconds.
_LOOK_ANYWAY = 5.0
# Pauses between attempts double from the first to the last, in seconds.
_FIRST_PAUSE, _LAST_PAUSE = 1.0, 300.0
_TIMEOUT = 10.0
_MAX_URL = 2000


class NoticeStore(Protocol):
    """What webhooks need of a store. Only that of a service in one process has it."""

    async def add_document(self, kind: str, name: str, data: bytes) -> bytes:
        """Store a document unless there is one of this name."""
        ...

    async def put_document(self, kind: str, name: str, data: bytes) -> None:
        """Store a document in place of any other of this name."""
        ...

    async def documents(self, kind: str) -> dict[str, bytes]:
        """Return all documents of a kind, by name."""
        ...

    async def delete_document(self, kind: str, name: str) -> bool:
        """Delete a document. Return whether there was one."""
        ...

    async def read_tenant_notices(self, tenant: str, after: int, limit: int) -> list[tuple[int, str, Notice]]:
        """Return notices of a tenant whose ids are above `after`."""
        ...

    async def newest_notice(self) -> int:
        """Return the id of the newest notice."""
        ...


class Webhook(NamedTuple):
    """Where notices are sent.

    Attributes:
        id: random.
        tenant: whose streams; empty without keys.
        url: the receiver.
        events: which notices: guard, possible_shift or unknown_burst.
        streams: only these; None for all.
        secret: signs the deliveries.
        created: in seconds since 1970.
    """

    id: str
    tenant: str
    url: str
    events: list[str]
    streams: list[str] | None
    secret: str
    created: float

    @property
    def document(self) -> str:
        """The name of its documents in the store."""
        return f"{self.tenant}/{self.id}"

    def wants(self, stream: str, name: str) -> bool:
        """Return whether a notice is sent there."""
        return name in self.events and (self.streams is None or stream in self.streams)


class _RejectedError(ProtoDCSError):
    """A delivery that the receiver did not confirm."""


class Webhooks:
    """All webhooks of a service in one process.

    Args:
        store: where webhooks, their places and dead letters are stored.
        config: the settings of the service.
    """

    def __init__(self, store: NoticeStore, config: ServeConfig):
        self._store = store
        self._attempts = config.webhook_attempts
        self._allow_private = config.webhook_private_targets
        self._webhooks: dict[str, Webhook] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._wakes: dict[str, asyncio.Event] = {}

    async def start(self) -> None:
        """Go on with the deliveries."""
        for data in (await self._store.documents(_KIND)).values():
            self._begin(Webhook(**json.loads(data)))

    async def close(self) -> None:
        """Stop the deliveries. What was not confirmed is sent again after the next start."""
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    def wake(self) -> None:
        """Have all webhooks look for new notices."""
        for wake in self._wakes.values():
            wake.set()

    # What routes need.

    async def create(self, tenant: str, url: str, events: list[str], streams: list[str] | None) -> Webhook:
        """Create a webhook for all notices from now on. Raise InputError if its address may not be used."""
        if sum(webhook.tenant == tenant for webhook in self._webhooks.values()) >= MAX_WEBHOOKS:
            raise InputError(f"There are {MAX_WEBHOOKS} webhooks, which is the limit. Delete one first.")
        await asyncio.to_thread(resolve, url, self._allow_private)
        webhook = Webhook(
            secrets.token_hex(8), tenant, url, events, streams, f"whsec_{secrets.token_urlsafe(32)}", time.time()
        )
        newest = await self._store.newest_notice()
        await self._store.put_document(_CURSOR, webhook.document, b"%d" % newest)
        await self._store.put_document(_KIND, webhook.document, json.dumps(webhook._asdict()).encode())
        self._begin(webhook)
        return webhook

    def of_tenant(self, tenant: str) -> list[Webhook]:
        """Return the webhooks of a tenant, oldest first."""
        found = [webhook for webhook in self._webhooks.values() if webhook.tenant == tenant]
        return sorted(found, key=lambda webhook: webhook.created)

    def find(self, tenant: str, name: str) -> Webhook | None:
        """Return a webhook of a tenant; None if there is none of this id."""
        return self._webhooks.get(f"{tenant}/{name}")

    async def delete(self, webhook: Webhook) -> None:
        """Delete a webhook with its dead letters."""
        document = webhook.document
        self._webhooks.pop(document, None)
        self._wakes.pop(document, None)
        task = self._tasks.pop(document, None)
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        await self._store.delete_document(_KIND, document)
        await self._store.delete_document(_CURSOR, document)
        for name in await self._dead_names(webhook):
            await self._store.delete_document(_DEAD, name)

    async def dead_letters(self, webhook: Webhook) -> list[dict[str, Any]]:
        """Return the deliveries that were given up, oldest first."""
        stored = await self._store.documents(_DEAD)
        return [json.loads(stored[name]) for name in await self._dead_names(webhook)]

    # Deliveries.

    def _begin(self, webhook: Webhook) -> None:
        self._webhooks[webhook.document] = webhook
        self._wakes[webhook.document] = asyncio.Event()
        self._tasks[webhook.document] = asyncio.create_task(self._deliver_all(webhook))

    async def _deliver_all(self, webhook: Webhook) -> None:
        """Send notices, one after the other, for ever."""
        wake = self._wakes[webhook.document]
        while True:
            wake.clear()
            try:
                await self._deliver_new(webhook)
            except StoreError as problem:
                _log.warning("a webhook cannot read its notices", extra=logs.with_fields(problem=str(problem)))
            except Exception:
                _log.exception("a webhook failed")
            try:
                await asyncio.wait_for(wake.wait(), _LOOK_ANYWAY)
            except TimeoutError:
                continue

    async def _deliver_new(self, webhook: Webhook) -> None:
        cursor = int((await self._store.documents(_CURSOR)).get(webhook.document, b"0"))
        while page := await self._store.read_tenant_notices(webhook.tenant, cursor, _PAGE):
            for number, stream, notice in page:
                name = stream.rpartition("/")[2]
                content = notice.described()
                if webhook.wants(name, content.get("warning", "guard")):
                    body = {"id": f"{webhook.id}.{number}", "event": notice.kind, "stream": name, **content}
                    await self._deliver(webhook, number, body)
                cursor = number
                await self._store.put_document(_CURSOR, webhook.document, b"%d" % cursor)

    async def _deliver(self, webhook: Webhook, number: int, body: dict[str, Any]) -> None:
        """Send one notice until it is confirmed, or store it as a dead letter."""
        pause = _FIRST_PAUSE
        for attempt in range(1, self._attempts + 1):
            try:
                await asyncio.to_thread(self._send, webhook, body)
                return
            except (ProtoDCSError, OSError, http.client.HTTPException, ValueError) as raised:
                problem = str(raised) or type(raised).__name__
            fields = logs.with_fields(webhook=webhook.id, attempt=attempt, problem=problem)
            _log.warning("a webhook was not confirmed", extra=fields)
            if attempt < self._attempts:
                await asyncio.sleep(pause)
                pause = min(2 * pause, _LAST_PAUSE)
        letter = {"delivery": body, "error": problem, "attempts": self._attempts, "time": int(1000 * time.time())}
        names = await self._dead_names(webhook)
        await self._store.put_document(_DEAD, f"{webhook.document}/{number:016d}", json.dumps(letter).encode())
        for name in names[: len(names) + 1 - MAX_DEAD_LETTERS]:
            await self._store.delete_document(_DEAD, name)

    def _send(self, webhook: Webhook, body: dict[str, Any]) -> None:
        """Send a delivery. Raise an error if it is not confirmed. This runs in a thread."""
        target = resolve(webhook.url, self._allow_private)
        content = json.dumps(body).encode()
        headers = {
            "Content-Type": "application/json",
            "User-Agent": f"protodcs/{__version__}",
            "X-ProtoDCS-Delivery": body["id"],
            SIGNATURE: sign(webhook.secret, content, int(time.time())),
        }
        connection = target.connection()
        try:
            connection.request("POST", target.path, content, headers)
            status = connection.getresponse().status
        finally:
            connection.close()
        if not 200 <= status < 300:
            raise _RejectedError(f"The receiver answered with status {status}.")

    async def _dead_names(self, webhook: Webhook) -> list[str]:
        prefix = f"{webhook.document}/"
        return [name for name in await self._store.documents(_DEAD) if name.startswith(prefix)]


class Target(NamedTuple):
    """A receiver whose address was resolved and checked."""

    parts: SplitResult
    address: str
    port: int

    @property
    def path(self) -> str:
        """The path and the query."""
        return (self.parts.path or "/") + (f"?{self.parts.query}" if self.parts.query else "")

    def connection(self) -> http.client.HTTPConnection:
        """Return a connection to the address that was checked, whatever the name means by now."""
        host = self.parts.hostname or ""
        if self.parts.scheme == "https":
            return _PinnedHTTPS(host, self.port, self.address)
        return _Pinned(host, self.port, self.address)


class _Pinned(http.client.HTTPConnection):
    """A connection to a given address, whatever the name in its URL."""

    def __init__(self, host: str, port: int, address: str):
        super().__init__(host, port, timeout=_TIMEOUT)
        self._address = address

    def connect(self) -> None:
        """Connect to the address."""
        self.sock = socket.create_connection((self._address, self.port), _TIMEOUT)


class _PinnedHTTPS(_Pinned):
    """The same with TLS, and the certificate of the name."""

    default_port = http.client.HTTPS_PORT

    def connect(self) -> None:
        """Connect to the address, and check the certificate."""
        super().connect()
        self.sock = ssl.create_default_context().wrap_socket(self.sock, server_hostname=self.host)


def resolve(url: str, allow_private: bool) -> Target:
    """Return where a URL leads. Raise InputError if deliveries may not go there.

    Args:
        url: of the receiver.
        allow_private: whether loopback addresses and private networks are allowed.
    """
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
        found = socket.getaddrinfo(parts.hostname, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        raise InputError(f"The host {parts.hostname[:100]!r} of the webhook cannot be resolved.") from None
    addresses = [str(one[4][0]) for one in found]
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
    mapped = found.ipv4_mapped if isinstance(found, ipaddress.IPv6Address) else None
    shown = mapped or found
    return shown.is_global and not shown.is_multicast


def sign(secret: str, body: bytes, moment: int) -> str:
    """Return the signature of a delivery: its time, and an HMAC-SHA256 of the time and the body."""
    digest = hmac.new(secret.encode(), b"%d." % moment + body, hashlib.sha256).hexdigest()
    return f"t={moment},v1={digest}"


def verify(secret: str, body: bytes, signature: str, max_age: float = 300.0) -> bool:
    """Return whether a delivery is genuine and not older than `max_age` seconds. For receivers in Python."""
    fields = dict(part.partition("=")[::2] for part in signature.split(","))
    try:
        moment = int(fields["t"])
    except (KeyError, ValueError):
        return False
    same = hmac.compare_digest(sign(secret, body, moment), signature)
    return same and abs(time.time() - moment) <= max_age


def check_cluster_has_none(webhooks: "Webhooks | None") -> "Webhooks":
    """Return the webhooks. Raise ConfigError on a cluster, which has none."""
    if webhooks is None:
        raise ConfigError("A cluster has no webhooks. Follow `GET /v1/events` instead.")
    return webhooks

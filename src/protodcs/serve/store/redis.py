"""Streams in Redis: for several workers, on several machines.

Every step that must be whole is one script inside Redis (the folder `lua`), so that checking an epoch and writing are
one thing. Snapshots are too large to pass through a script: one is put beside the stream, and the script moves it to
its place in the same transaction. A commit is one round trip and one wait for Redis' disk, however many writes it
holds. This module must never read a clock to judge a lease, nor send a write again whose answer it has.
"""

import asyncio
import hashlib
import json
import logging
import re
import secrets
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any, Final

from redis.asyncio.connection import ConnectionPool, parse_url
from redis.exceptions import (
    AuthenticationError,
    BusyLoadingError,
    NoPermissionError,
    NoScriptError,
    OutOfMemoryError,
    ReadOnlyError,
    RedisError,
    ResponseError,
)

from ...errors import ConfigError, FencedError, HeldError, StoreError, UnknownStreamError, without_passwords
from ..log.entries import LogEntry, LogLimits, LogPage, LogQuery, Purge, Range, marked
from ..log.notices import MAX_NOTICES, Notice
from ..settings import tenant_of
from .base import AcquiredStream, Batch, Described, Fence, Lease, ListedStream, Takeover, Totals, Write, check_lease

_log = logging.getLogger(__name__)

# A blob is put just before the stream that uses it is created; an hour is far more than that takes.
_UNUSED_BLOB_MILLISECONDS: Final = 3_600_000
_LISTED_AT_ONCE: Final = 1000
# With other settings Redis can lose or double acknowledged writes. If `aof-load-truncated` is on, Redis 7 cuts a torn
# file in the middle of a transaction, and the next start applies its first half.
_SAFE_SETTINGS: Final = {
    "appendonly": "yes",
    "appendfsync": "always",
    "no-appendfsync-on-rewrite": "no",
    "aof-load-truncated": "no",
    "maxmemory-policy": "noeviction",
}
_SCRIPTS: Final = (
    "acquire", "append", "checkpoint", "create", "delete", "delete_snapshot", "describe", "list", "notice", "purge_log",
    "release", "renew", "resign", "save_snapshot", "share", "trim_log",
)  # fmt: skip
# Scripts whose effect the service acknowledges to a caller; leases and fences need no replica.
_DURABLE_SCRIPTS: Final = ("create", "delete", "delete_snapshot", "purge_log", "save_snapshot", "share")
# What Redis answers when it cannot serve, by the first word of its answer; what it means and what to do.
_TROUBLE: Final = {
    "BUSY": "is held up by another script: wait, or end that one with SCRIPT KILL",
    "LOADING": "is still reading its data from the disk: try again in a moment",
    "MISCONF": "refuses writes because it could not write to its disk: see its log, and make room or repair the disk",
    "NOAUTH": "wants a password: name it in the address",
    "NOREPLICAS": "has fewer replicas than `min-replicas-to-write`: see whether its replicas run",
    "NOPERM": "does not allow this user what a store needs: see its ACL",
    "OOM": "has used up its maxmemory: give it more, or delete streams",
    "READONLY": "is a replica, which takes no writes: name the primary",
    "WRONGPASS": "does not know this user and password: correct the address",
}
# redis-py takes the first word away where it has a class for it.
_CLASSES: Final = {
    AuthenticationError: "WRONGPASS",
    BusyLoadingError: "LOADING",
    NoPermissionError: "NOPERM",
    OutOfMemoryError: "OOM",
    ReadOnlyError: "READONLY",
}


@dataclass(frozen=True, slots=True)
class _Script:
    """A script of the folder `lua`, and the name that Redis gives it."""

    text: bytes
    digest: bytes


@cache
def _scripts() -> dict[str, _Script]:
    """All scripts by name, each behind what they share."""
    folder = resources.files(__package__) / "lua"
    shared = (folder / "stream.lua").read_bytes()
    texts = {name: shared + (folder / f"{name}.lua").read_bytes() for name in _SCRIPTS}
    return {name: _Script(text, hashlib.sha1(text).hexdigest().encode()) for name, text in texts.items()}


def _bytes(text: str) -> bytes:
    """A name as bytes; half a surrogate pair, which JSON can bring, is a name like any other."""
    return text.encode("utf-8", "surrogatepass")


def _tenant(stream: str) -> bytes:
    """Return the tenant of a stream, as the scripts count its bytes."""
    return _bytes(tenant_of(stream))


def _text(name: bytes) -> str:
    return name.decode("utf-8", "surrogatepass")


def _command(*parts: bytes) -> list[bytes]:
    """A command as Redis reads it, in pieces: large parts are not copied."""
    return [b"*%d\r\n" % len(parts), *_parts(*parts)]


def _parts(*parts: bytes) -> list[bytes]:
    """Parts of a command whose beginning is elsewhere."""
    pieces: list[bytes] = []
    for part in parts:
        pieces += (b"$%d\r\n" % len(part), part, b"\r\n")
    return pieces


_MULTI: Final = _command(b"MULTI")
_EXEC: Final = _command(b"EXEC")
# A call of `append` up to its first log entry: number of parts, script, five keys, fence, position, tenant, summary,
# roll-backs and number of log entries.
_APPEND: Final = b"*%d\r\n$7\r\nEVALSHA\r\n$40\r\n%b\r\n$1\r\n5\r\n" + 11 * b"$%d\r\n%b\r\n"
# Notices that are stored for the webhooks of a tenant, at least; and for how long after the newest one.
_TENANT_NOTICES: Final = 10_000
_TENANT_NOTICE_MILLISECONDS: Final = 30 * 24 * 3_600_000
# Redis names entries of a tenant's notices by milliseconds and a number among those of one millisecond.
_NUMBER_BITS: Final = 20
# Log entries that are read or deleted in one round trip.
_LOG_CHUNK: Final = 1000


def _milliseconds(seconds: float) -> bytes:
    return b"%d" % max(1, round(seconds * 1000))


def _fence(fence: Fence) -> bytes:
    """Return a fence as the scripts compare it."""
    return f"{fence.epoch}:{fence.token}".encode()


def _fenced(stream: str, fence: Fence, newest: bytes | None, holder: bytes | None) -> FencedError:
    """Return the error for a write that a script rejected."""
    epoch = fence.epoch
    if newest is None:
        return FencedError(f"stream {stream!r} does not exist any more: nothing was written for epoch {epoch}")
    by = f", of {_text(holder)!r}" if holder is not None else ""
    other = newest.split(b":")[0].decode()
    if int(other) == epoch:
        by += ", given out a second time after the store lost writes"
    return FencedError(
        f"stream {stream!r} is at epoch {other}{by}: nothing was written for epoch {epoch}; acquire the stream again"
    )


def _facts(information: bytes) -> dict[str, str]:
    """Return the lines of a response to INFO."""
    return dict(line.split(":", 1) for line in information.decode().splitlines() if ":" in line)


def _unsafe_settings(facts: dict[str, str], responses: list[Any], replicas: int) -> list[str]:
    """Return what is wrong with the settings of a Redis.

    Args:
        facts: the response to INFO.
        responses: the responses to CONFIG GET. Some hosts forbid this command.
        replicas: how many replicas must confirm a write.
    """
    found = {
        "appendonly": "yes" if facts.get("aof_enabled") == "1" else "no",
        "maxmemory-policy": facts.get("maxmemory_policy", "unknown"),
    }
    problems = []
    for response in responses:
        if isinstance(response, ResponseError):
            problems = [f"`CONFIG GET` failed ({response}), so settings cannot be checked (allow this command)"]
        else:
            words = [word.decode() for word in response]
            found |= zip(words[::2], words[1::2], strict=True)
    for name, safe in _SAFE_SETTINGS.items():
        value = found.get(name, "unknown")
        if value != safe:
            problems.append(f"`{name}` is `{value}` (set `{name} {safe}`)")
    if replicas:
        needed, connected = found.get("min-replicas-to-write", "0"), facts.get("connected_slaves", "0")
        if int(needed) < replicas:
            problems.append(f"`min-replicas-to-write` is `{needed}` (set `min-replicas-to-write {replicas}`)")
        if int(connected) < replicas:
            problems.append(f"replicas connected: {connected}, needed: {replicas} (start the others)")
    return problems


class RedisStore:
    """A store of streams in one Redis; any number of workers may use it at the same time."""

    problem = ""

    def __init__(
        self,
        url: str,
        prefix: str = "protodcs",
        *,
        timeout: float = 5.0,
        connect_timeout: float = 2.0,
        connections: int = 16,
        replicas: int = 0,
    ):
        """Name a Redis; nothing is opened before the first call.

        Args:
            url: `redis://`, `rediss://` or `unix://`, with user, password and database where they are needed.
            prefix: what all keys begin with, so that several services can share a Redis.
            timeout: seconds that one call waits for its answer, connecting included.
            connect_timeout: seconds to wait for a connection.
            connections: how many are open at most; calls beyond that wait for one.
            replicas: how many replicas must confirm a write before it counts as durable.
        """
        if not re.fullmatch(r"[A-Za-z0-9_.-]+", prefix):
            raise ConfigError(f"prefix {prefix!r}: keys may begin with letters, digits, '-', '_' and '.' only")
        try:
            options: dict[str, Any] = dict(parse_url(url))
        except ValueError:
            # The message of redis-py may quote a part of the password.
            raise ConfigError(
                f"the address of a Redis is redis://HOST:PORT/DATABASE or the like; given: {without_passwords(url)!r}"
            ) from None
        # No retries here: only the caller knows whether its time is over, and a repeated call is safe. The time-out of
        # a call covers all of it, which also spares one for every reply.
        options |= {
            "decode_responses": False,
            "protocol": 2,
            "socket_timeout": None,
            "socket_connect_timeout": connect_timeout,
            "max_connections": connections,
            "redis_connect_func": self._connected,
        }
        self._pool: Any = ConnectionPool(**options)
        self._room = asyncio.Semaphore(connections)
        self._timeout = timeout
        self._replicas = replicas
        # The run id of the Redis that the newest connection reached.
        self.generation = ""
        place = options.get("path") or f"{options.get('host', 'localhost')}:{options.get('port', 6379)}"
        self._place = f"Redis at {place}"
        self._scripts = _scripts()
        start = prefix.encode() + b":"
        self._streams, self._usage = start + b"streams:", start + b"usage"
        self._past, self._writes = start + b"past", start + b"writes"
        self._meta, self._journal, self._snapshot = start + b"meta:", start + b"journal:", start + b"snapshot:"
        self._ready, self._saved, self._order = start + b"ready:", start + b"kept:", start + b"order:"
        self._lease, self._blob, self._users = start + b"lease:", start + b"blob:", start + b"users:"
        self._documents = start + b"documents:"
        self._members, self._taken, self._takeover = start + b"members", start + b"taken:", start + b"takeover:"
        self._log, self._roll_backs = start + b"log:", start + b"roll-backs:"
        self._notices, self._tenant_notices = start + b"notices:", start + b"tenant-notices:"
        # Streams that have got log entries since they were last trimmed.
        self._grown: set[str] = set()

    async def check(self, *, allow_unsafe: bool = False) -> None:
        """Raise StoreError if this Redis could lose acknowledged writes.

        Args:
            allow_unsafe: log a warning instead.

        Raises:
            StoreError: a setting is unsafe, the settings cannot be read, or this Redis is a cluster.
        """
        information, *settings = await self._exchange(
            _command(b"INFO")
            + _command(b"CONFIG", b"GET", b"*appendfsync*")
            + _command(b"CONFIG", b"GET", b"aof-load-truncated")
            + _command(b"CONFIG", b"GET", b"min-replicas-to-write"),
            4,
        )
        facts = _facts(self._served(information))
        if facts.get("cluster_enabled") == "1":
            raise StoreError(f"{self._place} is a cluster, where a script cannot use several keys: name a single Redis")
        problems = _unsafe_settings(facts, settings, self._replicas)
        if not problems:
            return
        message = f"{self._place} could lose acknowledged writes: {'; '.join(problems)}"
        if not allow_unsafe:
            raise StoreError(f"{message}. To accept the loss, set `allow_unsafe_redis: true` in the service settings")
        _log.warning("%s", message)

    async def _connected(self, connection: Any) -> None:
        """Prepare a new connection, and see which Redis it reached: after a fail-over it is another one."""
        await connection.on_connect()
        await connection.send_command("INFO", "server")
        # A user without this permission gets an error here, and the service works without the check.
        with suppress(ResponseError):
            found = re.search(rb"run_id:(\w+)", await connection.read_response())
            if found is not None:
                self.generation = found[1].decode()

    async def renew(self, worker: str, incarnation: str, seconds: float, takes_over: bool = False) -> Lease:
        """Renew the lease of a worker."""
        check_lease(seconds)
        arguments = (_bytes(incarnation), _milliseconds(seconds), b"1" if takes_over else b"0")
        name = _bytes(worker)
        answer = await self._run("renew", [self._lease + name, self._taken + name], *arguments)
        holder, whole, micro, *taken = answer
        epochs = {_text(stream): int(epoch) for stream, epoch in zip(taken[::2], taken[1::2], strict=True)}
        return Lease(None if holder is None else _text(holder), int(whole) + int(micro) / 1e6, epochs)

    async def resign(self, worker: str, incarnation: str) -> None:
        """Say that this worker holds nothing any more."""
        await self._run("resign", [self._lease + _bytes(worker)], _bytes(incarnation))

    async def create(self, stream: str, spec: bytes, *shared: str, start: int = 0) -> bool:
        """Begin a stream; False if it exists already. A StoreError if a shared blob was not put before."""
        name, blobs, tenant = _bytes(stream), [*map(_bytes, shared)], _tenant(stream)
        keys = [self._meta + name, self._streams + tenant, self._past, self._usage]
        keys += [key for blob in blobs for key in (self._blob + blob, self._users + blob)]
        incarnation = secrets.token_hex(8).encode()
        answer = await self._run("create", keys, name, spec, incarnation, tenant, b"%d" % start, *blobs)
        if isinstance(answer, list):
            raise StoreError(f"{self._place} lacks a shared blob of {shared} for stream {stream!r}: put it first")
        return bool(answer)

    async def members(self) -> list[str] | None:
        """Return the names of the workers that streams may belong to; None if no list was stored."""
        stored = await self._ask(b"GET", self._members)
        return None if stored is None else list(json.loads(stored))

    async def set_members(self, names: Sequence[str]) -> None:
        """Store the names of the workers that streams may belong to."""
        request = _command(b"SET", self._members, json.dumps(list(names)).encode())
        self._served((await self._exchange_durably(request, 1))[0])

    async def acquire(
        self, stream: str, worker: str, incarnation: str, takeover: Takeover | None = None
    ) -> AcquiredStream:
        """Become the one that may write to a stream."""
        name = _bytes(stream)
        keys = [self._meta + name, self._journal + name, self._takeover + name]
        arguments = [_bytes(worker), _bytes(incarnation), self._lease]
        demand = [] if takeover is None else [_bytes(takeover.holder), _milliseconds(takeover.pause), self._taken, name]
        while True:
            token = secrets.token_hex(8)
            answer = await self._run("acquire", keys, *arguments, token.encode(), *demand)
            if answer[0] == b"HELD":
                holder = _text(answer[1])
                raise HeldError(f"stream {stream!r} is held by {holder!r}, which lives: ask that worker", holder)
            _, epoch, spec, born, created = self._known(stream, answer)
            fence = Fence(epoch, token)
            # The fence is read last: if it is still this one, nobody has written since it was given out. This is no
            # transaction, because a Redis whose memory is full takes none.
            request = _command(b"GET", self._snapshot + name)
            request += _command(b"LRANGE", self._journal + name, b"0", b"-1")
            request += _command(b"HMGET", self._meta + name, b"start", b"fence")
            snapshot, tail, numbers = map(self._served, await self._exchange(request, 3))
            start, newest = numbers
            # Else another worker has acquired the stream, and the next round says which.
            if newest == _fence(fence):
                return AcquiredStream(fence, spec, snapshot, int(start), tail, born.decode(), float(created))

    async def commit(self, writes: Sequence[Write]) -> list[FencedError | StoreError | None]:
        """Make writes durable, in order, in one round trip. Return for each None, or why it failed.

        Raises:
            StoreError: Redis cannot be reached or refuses all writes, for example because its memory is full. The same
                commit may be sent again: what was done already is not done twice.
        """
        answers: list[Any] = await self._transact(writes) if writes else []
        if any(isinstance(answer, NoScriptError) for answer in answers):
            # Redis was restarted and knows no scripts. What has its answer is not sent again; what was refused because
            # a write before it was not done gets its second chance.
            await self._load()
            open_ = [index for index, answer in enumerate(answers) if not _settled(answer)]
            for index, answer in zip(open_, await self._transact([writes[index] for index in open_]), strict=True):
                answers[index] = answer
                if isinstance(answer, NoScriptError):
                    raise self._trouble(answer)
        return [self._verdict(write, answer) for write, answer in zip(writes, answers, strict=True)]

    async def _transact(self, writes: Sequence[Write]) -> list[Any]:
        """The answers of the scripts to some writes.

        The scripts run between MULTI and EXEC, because Redis would else run those of each 16 KB that it reads on their
        own, and wait for its disk each time; and because a connection that breaks then leaves all or nothing.
        """
        request, last = _MULTI.copy(), []
        commands = 0
        for write in writes:
            added = self._add(request, write)
            # The notices of a batch come behind the command that tells what became of the batch.
            last.append(commands + added - 1 - (isinstance(write, Batch) and bool(write.notices)))
            commands += added
        request += _EXEC
        *queued, answers = await self._exchange_durably(request, commands + 2)
        for answer in (*queued, answers):
            self._served(answer)
        for answer in answers:
            # Another error concerns one stream, for example a key that something else has overwritten.
            if isinstance(answer, ResponseError) and _code(answer) in _TROUBLE:
                raise self._trouble(answer)
        return [answers[index] for index in last]

    def _add(self, request: list[bytes], write: Write) -> int:
        """Add one write to a request; gives how many commands it is, the last of which tells what became of it."""
        name = _bytes(write.stream)
        fence, position, tenant = _fence(write.fence), b"%d" % write.position, _tenant(write.stream)
        meta, journal = self._meta + name, self._journal + name
        if isinstance(write, Batch):
            # All that stands before the records in one piece: joining many small ones costs more than the rest of it.
            log, roll_backs = self._log + name, self._roll_backs + name
            ranges = b",".join(b"%d:%d" % ends for ends in write.roll_backs)
            keys = (meta, journal, self._usage, log, roll_backs)
            arguments = (fence, position, tenant, write.summary, ranges, b"%d" % len(write.log))
            values = [value for part in keys + arguments for value in (len(part), part)]
            count = 14 + 2 * len(write.log) + len(write.records)
            request.append(_APPEND % (count, self._scripts["append"].digest, *values))
            for entry in write.log:
                request += _parts(_log_id(entry.position), entry.pack())
            if write.log:
                self._grown.add(write.stream)
            for record in write.records:
                request += (b"$%d\r\n" % len(record), record, b"\r\n")
            if not write.notices:
                return 1
            packed = [part for notice in write.notices for part in (_notice_id(notice), _packed_notice(notice))]
            script, notices = self._scripts["notice"].digest, self._notices + name
            limits = (b"%d" % MAX_NOTICES, b"%d" % _TENANT_NOTICES, b"%d" % _TENANT_NOTICE_MILLISECONDS)
            notice_keys = (meta, journal, notices, self._tenant_notices + tenant)
            request += _command(b"EVALSHA", script, b"4", *notice_keys, fence, *limits, name, *packed)
            return 2
        digest, ready = self._scripts["checkpoint"].digest, self._ready + name
        request += _command(b"SET", ready, write.snapshot)
        keys = (meta, journal, self._snapshot + name, ready, self._usage)
        request += _command(b"EVALSHA", digest, b"5", *keys, fence, position, tenant)
        return 2

    def _verdict(self, write: Write, answer: Any) -> FencedError | StoreError | None:
        """Return None for a write that was done, or why it failed."""
        if answer == 0:
            return None
        try:
            answer = self._sound(answer)
        except StoreError as problem:
            return problem
        if answer[0] == b"FENCED":
            return _fenced(write.stream, write.fence, answer[1], answer[2])
        count = f"{len(write.records)} records" if isinstance(write, Batch) else "a snapshot"
        return FencedError(
            f"{count} for position {write.position} of stream {write.stream!r}: {answer[1].decode()}; "
            "acquire the stream again"
        )

    async def release(self, stream: str, fence: Fence) -> None:
        """Give a stream up; nothing happens if it has another worker already."""
        await self._run("release", [self._meta + _bytes(stream)], _fence(fence))

    async def delete(self, stream: str, fence: Fence) -> None:
        """Forget a stream and all that belongs to it."""
        name = _bytes(stream)
        parts = (self._meta, self._journal, self._snapshot, self._saved, self._order, self._ready)
        keys = [*(part + name for part in parts), self._streams + _tenant(stream), self._past, self._usage]
        keys += [self._log + name, self._roll_backs + name, self._notices + name]
        answer = await self._run("delete", keys, _fence(fence), name, self._blob, self._users, _tenant(stream))
        self._unfenced(stream, fence, answer)

    async def describe(self, stream: str) -> Described:
        """What is known of a stream; its worker only while that one lives."""
        name = _bytes(stream)
        answer = await self._run("describe", [self._meta + name, self._journal + name], self._lease)
        _, spec, epoch, holder, start, length, size, created = self._known(stream, answer)
        worker = None if holder is None else _text(holder)
        return Described(spec, epoch, worker, start + length, start, size, created.decode())

    async def streams(self) -> AsyncIterator[str]:
        """Yield the ids of all streams."""
        for tenant in await self.usage():
            after = None
            while page := await self.list_streams(tenant, after, _LISTED_AT_ONCE):
                for stream in page:
                    yield stream.id
                after = page[-1].id

    async def list_streams(self, tenant: str, after: str | None, limit: int) -> list[ListedStream]:
        """Return streams of a tenant after an id, in the order of their ids."""
        first = b"-" if after is None else b"(" + _bytes(after)
        found = await self._run("list", [self._streams + _bytes(tenant)], self._meta, first, b"%d" % limit)
        return [ListedStream(_text(stream), float(created), summary) for stream, created, summary in found]

    async def count_streams(self, tenant: str) -> int:
        """Return how many streams a tenant has."""
        return int(await self._ask(b"ZCARD", self._streams + _bytes(tenant)))

    async def usage(self) -> dict[str, int]:
        """Return the bytes that each tenant uses."""
        found = await self._ask(b"HGETALL", self._usage)
        return {_text(tenant): int(size) for tenant, size in zip(found[::2], found[1::2], strict=True)}

    async def log_usage(self) -> dict[str, int]:
        """Return nothing: Redis does not count the logs by tenant."""
        return {}

    async def totals(self) -> Totals:
        """Return how many streams there are, the bytes that they use, and the memory of Redis."""
        usage = await self.usage()
        request = _command(b"INFO", b"memory")
        for tenant in usage:
            request += _command(b"ZCARD", self._streams + _bytes(tenant))
        information, *counts = map(self._served, await self._exchange(request, 1 + len(usage)))
        facts = _facts(information)
        memory, limit = int(facts["used_memory"]), int(facts["maxmemory"])
        return Totals(sum(counts), sum(usage.values()), memory, limit)

    async def save_snapshot(self, stream: str, fence: Fence, name: str, snapshot: bytes) -> None:
        """Save a snapshot under a name, as the newest."""
        arguments = (_fence(fence), _bytes(name), _tenant(stream), snapshot)
        answer = await self._run("save_snapshot", self._saved_keys(stream), *arguments)
        self._unfenced(stream, fence, answer)

    async def saved_snapshots(self, stream: str) -> list[str]:
        """Return the names of the saved snapshots, oldest first."""
        names = await self._ask(b"ZRANGE", self._order + _bytes(stream), b"0", b"-1")
        return [_text(name) for name in names]

    async def saved_snapshot(self, stream: str, name: str) -> bytes | None:
        """Return a saved snapshot; None if there is none of this name."""
        found: bytes | None = await self._ask(b"HGET", self._saved + _bytes(stream), _bytes(name))
        return found

    async def delete_snapshot(self, stream: str, fence: Fence, name: str) -> None:
        """Delete a saved snapshot, if it is there."""
        arguments = (_fence(fence), _bytes(name), _tenant(stream))
        answer = await self._run("delete_snapshot", self._saved_keys(stream), *arguments)
        self._unfenced(stream, fence, answer)

    async def put_shared(self, name: str, data: bytes) -> None:
        """Put a blob that many streams share. If none uses it within an hour, it expires."""
        blob = _bytes(name)
        await self._run("share", [self._blob + blob, self._users + blob], data, b"%d" % _UNUSED_BLOB_MILLISECONDS)

    async def has_shared(self, name: str) -> bool:
        """Return whether there is a shared blob of this name."""
        return bool(await self._ask(b"EXISTS", self._blob + _bytes(name)))

    async def get_shared(self, name: str) -> bytes:
        """A shared blob; a StoreError if it is missing."""
        data: bytes | None = await self._ask(b"GET", self._blob + _bytes(name))
        if data is None:
            raise StoreError(f"{self._place} holds no shared blob {name!r}: put it first")
        return data

    async def add_document(self, kind: str, name: str, data: bytes) -> bytes:
        """Store a document unless there is one of this name. Return the one that is stored."""
        key, field = self._documents + kind.encode(), _bytes(name)
        request = _command(b"HSETNX", key, field, data) + _command(b"HGET", key, field)
        _, stored = map(self._served, await self._exchange_durably(request, 2))
        found: bytes = stored
        return found

    async def put_document(self, kind: str, name: str, data: bytes) -> None:
        """Store a document in place of any other of this name."""
        request = _command(b"HSET", self._documents + kind.encode(), _bytes(name), data)
        self._served((await self._exchange_durably(request, 1))[0])

    async def documents(self, kind: str) -> dict[str, bytes]:
        """Return all documents of a kind, by name."""
        found = await self._ask(b"HGETALL", self._documents + kind.encode())
        return {_text(name): data for name, data in sorted(zip(found[::2], found[1::2], strict=True))}

    async def delete_document(self, kind: str, name: str) -> bool:
        """Delete a document. Return whether there was one."""
        request = _command(b"HDEL", self._documents + kind.encode(), _bytes(name))
        return bool(self._served((await self._exchange_durably(request, 1))[0]))

    # The decision log: a Redis Stream whose ids are the positions plus one.

    async def read_log(self, stream: str, query: LogQuery) -> LogPage:
        """Return a page of the decision log of a stream."""
        await self._check_exists(stream)
        if query.is_contradictory:
            return LogPage([], False)
        low, high = await self._positions_between(stream, query.since, query.until)
        if query.after is not None and query.newest_first:
            high = min(high, query.after)
        elif query.after is not None:
            low = max(low, query.after + 1)
        found: list[LogEntry] = []
        while len(found) <= query.limit and low < high:
            entries = await self._entries(stream, low, high, _LOG_CHUNK, query.newest_first)
            found += filter(query.matches, entries)
            if len(entries) < _LOG_CHUNK:
                break
            if query.newest_first:
                high = entries[-1].position
            else:
                low = entries[-1].position + 1
        ranges = await self._rolled_back(stream) if found else []
        return LogPage(marked(found[: query.limit], ranges), len(found) > query.limit)

    async def read_notices(self, stream: str, after: tuple[int, int] | None, since: int | None = None) -> list[Notice]:
        """Return the notices of a stream after a position and number, or from a time on."""
        await self._check_exists(stream)
        position, number = after or (-1, 0)
        first = b"(%d-%d" % (position + 1, number)
        found = await self._ask(b"XRANGE", self._notices + _bytes(stream), first, b"+")
        notices = [_unpacked_notice(name, fields[1]) for name, fields in found]
        return [notice for notice in notices if notice.time >= (since or 0)]

    async def read_tenant_notices(self, tenant: str, after: int, limit: int) -> list[tuple[int, str, Notice]]:
        """Return notices of a tenant whose ids are above `after`: id, stream and content, in the order of ids."""
        first = b"(%d-%d" % (after >> _NUMBER_BITS, after & ((1 << _NUMBER_BITS) - 1))
        key = self._tenant_notices + _bytes(tenant)
        found = await self._ask(b"XRANGE", key, first, b"+", b"COUNT", b"%d" % limit)
        return [
            (_tenant_notice_id(name), _text(stream), _unpacked_notice(place, data))
            for name, (_, stream, _, place, _, data) in found
        ]

    async def newest_notice(self, tenant: str) -> int:
        """Return the id of the newest notice of a tenant; 0 if there is none."""
        found = await self._ask(b"XREVRANGE", self._tenant_notices + _bytes(tenant), b"+", b"-", b"COUNT", b"1")
        return _tenant_notice_id(found[0][0]) if found else 0

    async def read_thumbnail(self, stream: str, position: int) -> bytes | None:
        """Return None: Redis stores no images."""
        await self._check_exists(stream)
        return None

    async def purge_log(self, stream: str, wanted: Purge) -> int:
        """Delete entries of the decision log of a stream."""
        await self._check_exists(stream)
        low, high = await self._positions_between(stream, wanted.since, wanted.until)
        deleted = 0
        while low < high:
            entries = await self._entries(stream, low, high, _LOG_CHUNK)
            chosen = [entry for entry in entries if wanted.image_ref in (None, entry.image_ref)]
            if chosen:
                name, ids = _bytes(stream), [_log_id(entry.position) for entry in chosen]
                deleted += await self._run("purge_log", [self._meta + name, self._log + name], *ids)
            if len(entries) < _LOG_CHUNK:
                break
            low = entries[-1].position + 1
        return deleted

    async def delete_thumbnails(self) -> None:
        """Do nothing: Redis stores no images."""

    async def trim_log(self, limits: LogLimits, now: float | None) -> None:
        """Delete entries beyond the limits, of streams that have got entries from this worker."""
        if not self._grown:
            return
        oldest = 0 if now is None else max(int(1000 * (now - limits.seconds)), 0)
        expiry = _milliseconds(limits.seconds)
        numbers = (b"%d" % limits.entries, b"%d" % limits.size, b"%d" % oldest, expiry, b"%d" % _LOG_CHUNK)
        # Streams that grow meanwhile wait for the next call: under steady load there are always some.
        grown, self._grown = self._grown, set()
        while grown:
            stream = grown.pop()
            name = _bytes(stream)
            keys = [self._meta + name, self._log + name, self._roll_backs + name]
            try:
                while await self._run("trim_log", keys, *numbers) == _LOG_CHUNK:
                    pass
            except StoreError:
                self._grown |= {stream, *grown}
                raise

    async def _check_exists(self, stream: str) -> None:
        if not await self._ask(b"EXISTS", self._meta + _bytes(stream)):
            raise UnknownStreamError(f"there is no stream {stream!r}: create it first")

    async def _entries(
        self, stream: str, low: int, high: int, limit: int, newest_first: bool = False
    ) -> list[LogEntry]:
        """Return the first entries with positions from `low` on and before `high`."""
        ends = [_log_id(low), _log_id(high - 1)]
        command = [b"XREVRANGE", *reversed(ends)] if newest_first else [b"XRANGE", *ends]
        found = await self._ask(command[0], self._log + _bytes(stream), *command[1:], b"COUNT", b"%d" % limit)
        return [LogEntry.unpack(int(name.split(b"-")[0]) - 1, fields[1]) for name, fields in found]

    async def _positions_between(self, stream: str, since: int | None, until: int | None) -> tuple[int, int]:
        """Return the range of positions between two times."""
        low, high = 0, 1 << 32
        if since is None and until is None:
            return low, high
        ends = [await self._entries(stream, low, high, 1, newest_first) for newest_first in (False, True)]
        if not ends[0]:
            return 0, 0
        first, last = ends[0][0].position, ends[1][0].position + 1
        begin = first if since is None else await self._first_position(stream, first, last, since)
        end = last if until is None else await self._first_position(stream, first, last, until)
        return begin, end

    async def _first_position(self, stream: str, low: int, high: int, moment: int) -> int:
        """Return a position that divides the entries before a time from the others."""
        while low < high:
            middle = (low + high) // 2
            found = await self._entries(stream, middle, high, 1)
            if not found or found[0].time >= moment:
                high = middle
            else:
                low = found[0].position + 1
        return low

    async def _rolled_back(self, stream: str) -> list[Range]:
        found = await self._ask(b"LRANGE", self._roll_backs + _bytes(stream), b"0", b"-1")
        ranges = [ends.split(b":") for line in found for ends in line.split(b",")]
        return [(int(first), int(last)) for first, last in ranges]

    async def close(self) -> None:
        """Let go of the connections."""
        await self._pool.disconnect()

    def _saved_keys(self, stream: str) -> list[bytes]:
        name = _bytes(stream)
        return [self._meta + name, self._saved + name, self._order + name, self._usage]

    def _known(self, stream: str, answer: list[Any]) -> list[Any]:
        """The answer of a script about a stream that exists."""
        if answer[0] == b"UNKNOWN":
            raise UnknownStreamError(f"there is no stream {stream!r}: create it first")
        return answer

    def _unfenced(self, stream: str, fence: Fence, answer: Any) -> None:
        """Raise FencedError if a script refused to write."""
        if answer != 0:
            raise _fenced(stream, fence, answer[1], answer[2])

    async def _run(self, name: str, keys: list[bytes], *arguments: bytes) -> Any:
        """Return the reply of a script; load it first if Redis does not know it."""
        request = _command(b"EVALSHA", self._scripts[name].digest, b"%d" % len(keys), *keys, *arguments)
        exchange = self._exchange_durably if name in _DURABLE_SCRIPTS else self._exchange
        answer = (await exchange(request, 1))[0]
        if isinstance(answer, NoScriptError):
            await self._load()
            answer = (await exchange(request, 1))[0]
        return self._sound(answer)

    async def _exchange_durably(self, request: list[bytes], replies: int) -> list[Any]:
        """Send writes, and wait until enough replicas have confirmed them."""
        if not self._replicas:
            return await self._exchange(request, replies)
        # WAIT waits for the last write of its own connection. A retry of a commit writes nothing, and the commit itself
        # may have gone through another connection: so each request adds a small write of its own.
        milliseconds = b"%d" % round(500 * self._timeout)
        confirm = _command(b"INCR", self._writes) + _command(b"WAIT", b"%d" % self._replicas, milliseconds)
        *answers, counted, confirmed = await self._exchange(request + confirm, replies + 2)
        self._served(counted)
        if self._served(confirmed) < self._replicas:
            raise StoreError(
                f"{self._place} wrote this, but {confirmed} of {self._replicas} replicas confirmed it: see whether its "
                "replicas run; the call may be repeated"
            )
        return answers

    async def _load(self) -> None:
        """Teach Redis all scripts."""
        request = [piece for script in self._scripts.values() for piece in _command(b"SCRIPT", b"LOAD", script.text)]
        for answer in await self._exchange(request, len(self._scripts)):
            self._sound(answer)

    async def _ask(self, *parts: bytes) -> Any:
        """The answer to one command."""
        return self._sound((await self._exchange(_command(*parts), 1))[0])

    async def _exchange(self, request: list[bytes], replies: int) -> list[Any]:
        """Send commands in one go and read so many replies; what Redis refuses is among them as an exception."""
        answers: list[Any] = []
        try:
            async with asyncio.timeout(self._timeout), self._room:
                connection = await self._pool.get_connection()
                try:
                    await connection.send_packed_command(request)
                    while len(answers) < replies:
                        try:
                            answers.append(await connection.read_response())
                        except ResponseError as refused:
                            answers.append(refused)
                finally:
                    # One that broke half-way was closed by redis-py, and is opened again when it is next used.
                    await self._pool.release(connection)
        except TimeoutError:
            raise StoreError(
                f"{self._place} did not answer within {self._timeout} s: see whether it runs and is not overloaded; "
                "the call may be repeated"
            ) from None
        except RedisError as error:
            raise self._trouble(error) from None
        return answers

    def _served(self, answer: Any) -> Any:
        """An answer that is no error."""
        if isinstance(answer, ResponseError):
            raise self._trouble(answer)
        return answer

    def _sound(self, answer: Any) -> Any:
        """The answer of a script that is neither an error nor about a layout that this version does not know."""
        self._served(answer)
        if isinstance(answer, list) and answer and answer[0] == b"LAYOUT":
            raise StoreError(
                f"{self._place} holds a stream in layout {answer[1].decode()}, which this protodcs does not know: "
                "use the version of protodcs that wrote it"
            )
        return answer

    def _trouble(self, error: RedisError) -> StoreError:
        """Return an error of redis-py as a `StoreError`."""
        code = _code(error)
        if code in _TROUBLE:
            return StoreError(f"{self._place} {_TROUBLE[code]}")
        if isinstance(error, ResponseError):
            return StoreError(f"{self._place} refused: {error}")
        return StoreError(f"{self._place} cannot be reached: {error}; see whether it runs; the call may be repeated")


def _notice_id(notice: Notice) -> bytes:
    return b"%d-%d" % (notice.position + 1, notice.number)


def _packed_notice(notice: Notice) -> bytes:
    return json.dumps(notice[2:]).encode()


def _unpacked_notice(name: bytes, data: bytes) -> Notice:
    position, number = map(int, name.split(b"-"))
    return Notice(position - 1, number, *json.loads(data))


def _tenant_notice_id(name: bytes) -> int:
    """Return the id of an entry among a tenant's notices as one number."""
    milliseconds, number = map(int, name.split(b"-"))
    return (milliseconds << _NUMBER_BITS) + number


def _log_id(position: int) -> bytes:
    """Return the id of a log entry; 0 is no id."""
    return b"%d" % (position + 1)


def _code(error: RedisError) -> str:
    """Return the first word of what Redis answered."""
    return _CLASSES.get(type(error)) or str(error).split(" ", 1)[0]


def _settled(answer: Any) -> bool:
    """Whether the answer to a write is final: it was done, or its worker is fenced."""
    return answer == 0 or (isinstance(answer, list) and answer[0] == b"FENCED")

"""Which processes there are and which partitions they own, kept in the database.

A process that renews its row in `processes` is alive. Each beat reads the other rows, and the partitions that changed.
Then the process takes partitions that it should own and that nobody owns who is alive, and hands over those that
another process should own. All changes of partitions wait for one lock of the database, so their epochs become visible
in order, and a beat reads nothing but what has a higher epoch than it knows.

Beats are not synchronous commits. A beat that a crash of the database loses makes a lease end early. A lost change of
partitions makes a request take another hop. Neither loses a write to a stream.
"""

import asyncio
import itertools
import logging
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import psycopg

from ...errors import ConfigError, StoreError
from ..settings import ServeConfig
from ..store.postgres import cut
from ..telemetry import logs
from ..workers.waiting import wait_at_most
from ..workers.worker import Worker
from .partitions import COUNT, PartitionMap, partition_of
from .peers import PROTOCOL

_log = logging.getLogger(__name__)

# Beats within a lease, and seconds between two of them at most.
_BEATS_PER_LEASE, _MAX_BEAT = 5, 1.0
# Partitions that are handed over together. While they move, their streams are served by nobody for some milliseconds.
_BATCH = 128
# A stream that is not unloaded after so many seconds is handed over by the lease of the store.
_UNLOAD_SECONDS = 5.0
# Requests at the wrong process have the partitions read again, so many seconds after the last time: at most, and for
# each process, so that all processes together do not ask the database too often.
_FRESH_SECONDS, _FRESH_SECONDS_EACH = 0.2, 0.005
# The database may take so many seconds to answer a process that has not joined, because it has no lease to lose.
_START_SECONDS = 60.0
# Rows of processes that ended are deleted after so many leases.
_FORGOTTEN_LEASES = 100
# Taken by whoever creates the tables or changes partitions: the bytes of "protodcs".
_LOCK = int.from_bytes(b"protodcs", "big", signed=True)

_SCHEMA = f"""
CREATE TABLE IF NOT EXISTS processes (
    name text PRIMARY KEY,
    incarnation text NOT NULL,
    protocol integer NOT NULL,
    leaving boolean NOT NULL DEFAULT false,
    expires timestamptz NOT NULL
);
CREATE SEQUENCE IF NOT EXISTS partition_epochs;
CREATE TABLE IF NOT EXISTS partitions (number integer PRIMARY KEY, owner text, epoch bigint NOT NULL DEFAULT 0);
INSERT INTO partitions (number) SELECT generate_series(0, {COUNT - 1}) ON CONFLICT DO NOTHING;
"""
_JOIN = """
INSERT INTO processes (name, incarnation, protocol, leaving, expires)
VALUES (
    %(name)s, %(incarnation)s, %(protocol)s, %(leaving)s, clock_timestamp() + %(lease)s * interval '1 second'
)
ON CONFLICT (name) DO UPDATE SET
    incarnation = excluded.incarnation, protocol = excluded.protocol, leaving = excluded.leaving,
    expires = excluded.expires
"""
# The row is missing if a crash of the database lost it, or after a pause of many leases.
_RENEW = f"{_JOIN} WHERE processes.incarnation = excluded.incarnation RETURNING true"
_READ_PROCESSES = "SELECT name, protocol, leaving FROM processes WHERE expires > clock_timestamp()"
_READ_PARTITIONS = "SELECT number, owner, epoch FROM partitions WHERE epoch > %s"
_HOLDS_LEASE = """EXISTS (
    SELECT FROM processes WHERE name = %(name)s AND incarnation = %(incarnation)s AND expires > clock_timestamp()
)"""
_TAKE = f"""
UPDATE partitions SET owner = %(name)s, epoch = nextval('partition_epochs')
WHERE number = ANY(%(numbers)s) AND {_HOLDS_LEASE}
AND NOT EXISTS (SELECT FROM processes WHERE name = owner AND expires > clock_timestamp())
"""
_HAND_OVER = f"""
UPDATE partitions SET owner = moved.owner, epoch = nextval('partition_epochs')
FROM unnest(%(numbers)s::integer[], %(owners)s::text[]) AS moved (number, owner)
WHERE partitions.number = moved.number AND partitions.owner = %(name)s AND {_HOLDS_LEASE}
"""
_LEAVE = "DELETE FROM processes WHERE name = %(name)s AND incarnation = %(incarnation)s"
_FORGET = f"""
DELETE FROM processes WHERE expires < clock_timestamp() - %(lease)s * {_FORGOTTEN_LEASES} * interval '1 second'
"""


class SupersededError(ConfigError):
    """Another process has the same address."""


class Membership:
    """One process among those that share the store.

    Args:
        url: of the database.
        owner: the worker of this process. Its name is the address at which other processes reach it.
        config: the settings of the service.

    Attributes:
        placement: where streams belong, as this process knows it.
        ended: has a `SupersededError` if this process has to end.
    """

    def __init__(self, url: str, owner: Worker, config: ServeConfig):
        self._url = url
        self._owner = owner
        self._lease = config.lease_seconds
        # How long the database may take to answer.
        self._timeout = _START_SECONDS
        # What statements get.
        self._values: dict[str, Any] = {
            "name": owner.name,
            "incarnation": owner.incarnation,
            "protocol": PROTOCOL,
            "leaving": False,
            "lease": config.lease_seconds,
        }
        self._beat_seconds = min(config.lease_seconds / _BEATS_PER_LEASE, _MAX_BEAT)
        self._connection: psycopg.AsyncConnection[Any] | None = None
        # Held while the connection is used.
        self._using = asyncio.Lock()
        self._owners: list[str | None] = [None] * COUNT
        # Partitions that are being handed over, and to whom. This process accepts nothing more for them.
        self._moving: dict[int, str] = {}
        self._epoch = -1
        self._read = -float("inf")
        self._joined = False
        self._wanted = asyncio.Event()
        self._beating: asyncio.Task[None] | None = None
        self._reading: asyncio.Task[None] | None = None
        self.placement = PartitionMap((), (), tuple(self._owners))
        self.ended: asyncio.Future[BaseException] = asyncio.get_running_loop().create_future()

    # What forwarding and routes ask.

    def refresh(self) -> None:
        """Ask the database where streams belong, in the background, unless that was done a moment ago."""
        fresh = min(_FRESH_SECONDS, len(self.placement.workers) * _FRESH_SECONDS_EACH)
        if time.monotonic() - self._read > fresh and (self._reading is None or self._reading.done()):
            self._reading = asyncio.create_task(self._beat_once())

    # Join and leave.

    async def open(self) -> None:
        """Create what is missing in the database, and read where streams belong.

        Raises:
            ConfigError: a process of a version that does not understand this one is running.
            StoreError: the database cannot be reached.
        """
        async with self._changing() as connection:
            await connection.execute(_SCHEMA)
            await connection.execute(_FORGET, self._values)
        await self._beat()

    async def join(self) -> None:
        """Become one of the processes, and own partitions from now on."""
        async with self._connected() as connection:
            found = await connection.execute(_READ_PROCESSES)
            others = [name for name, protocol, _ in await found.fetchall() if protocol != PROTOCOL]
            if others:
                raise ConfigError(
                    f"This version cannot share streams with the running version of {', '.join(sorted(others))}. Stop "
                    "all processes, then start them with one version."
                )
            await connection.execute(_JOIN, self._values)
        await self._beat()
        self._joined, self._timeout = True, self._lease
        self._beating = asyncio.create_task(self._beat_forever())

    async def leave(self) -> None:
        """Hand over all partitions. Return when this process owns none, or nobody is there to take them."""
        self._values["leaving"] = True
        self._wanted.set()
        while self._mine() and set(self.placement.staying) - {self._owner.name} and not self.ended.done():
            await asyncio.sleep(self._beat_seconds / 10)
            self._wanted.set()

    async def close(self) -> None:
        """Give the lease up, and disconnect."""
        if self._beating is not None:
            self._beating.cancel()
            await asyncio.gather(self._beating, return_exceptions=True)
        if self._joined:
            # A beat that somebody still waits for must not renew it again.
            self._joined = False
            with suppress(StoreError):
                async with self._connected() as connection:
                    await connection.execute(_LEAVE, self._values)
        await self._disconnect()

    def _mine(self) -> list[int]:
        return [number for number, owner in enumerate(self._owners) if owner == self._owner.name]

    # Beats.

    async def _beat_forever(self) -> None:
        while not self.ended.done():
            self._wanted.clear()
            try:
                await self._beat()
                await self._take()
                if await self._hand_over():
                    continue
            except StoreError as problem:
                _log.warning("the lease of this process was not renewed", extra=logs.with_fields(problem=str(problem)))
            except Exception:
                _log.exception("the partitions cannot be shared")
            await wait_at_most(self._wanted, self._beat_seconds)

    async def _beat_once(self) -> None:
        with suppress(StoreError):
            await self._beat()

    async def _beat(self) -> None:
        """Renew the lease, and read what is new."""
        async with self._connected() as connection:
            async with connection.pipeline():
                renewed = await connection.execute(_RENEW, self._values) if self._joined else None
                processes = await connection.execute(_READ_PROCESSES)
                changed = await connection.execute(_READ_PARTITIONS, [self._epoch])
            if renewed is not None and await renewed.fetchone() is None and not self.ended.done():
                problem = f"Another process has the address {self._owner.name}. Give each process one of its own."
                self.ended.set_result(SupersededError(problem))
            live = await processes.fetchall()
            for number, owner, epoch in await changed.fetchall():
                self._owners[number] = owner
                self._epoch = max(self._epoch, epoch)
            self._read = time.monotonic()
            staying = tuple(sorted(name for name, _, leaving in live if not leaving))
            self._place(tuple(sorted(name for name, _, _ in live)), staying)

    def _place(self, processes: tuple[str, ...], staying: tuple[str, ...]) -> None:
        owners = tuple(self._moving.get(number, owner) for number, owner in enumerate(self._owners))
        placement = PartitionMap(processes, staying, owners)
        if placement != self.placement:
            self.placement = placement
            if placement.workers:
                self._owner.streams.place(placement)

    async def _take(self) -> None:
        """Take the partitions that this process should own and that belong to nobody who lives."""
        placement, name = self.placement, self._owner.name
        numbers = [
            number
            for number, (best, owner) in enumerate(zip(placement.best, placement.owners, strict=True))
            if best == name and owner != name and owner not in placement.workers
        ]
        if numbers:
            await self._change(_TAKE, numbers=numbers)

    async def _hand_over(self) -> bool:
        """Hand over some partitions that other processes should own. Return whether there were any."""
        placement, name = self.placement, self._owner.name
        moves = (
            (number, best)
            for number, (best, owner) in enumerate(zip(placement.best, placement.owners, strict=True))
            if owner == name and best not in (name, "")
        )
        self._moving = moving = dict(itertools.islice(moves, _BATCH))
        if not moving:
            return False
        try:
            self._place(placement.workers, placement.staying)
            try:
                async with asyncio.timeout(_UNLOAD_SECONDS):
                    await self._owner.streams.unload(lambda stream: partition_of(stream) in moving)
            except TimeoutError:
                _log.warning("partitions are handed over before their streams are unloaded")
            await self._change(_HAND_OVER, numbers=list(moving), owners=list(moving.values()))
        finally:
            self._moving = {}
        return True

    async def _change(self, statement: str, **values: Any) -> None:
        """Change partitions, and read them."""
        async with self._changing() as connection:
            await connection.execute(statement, self._values | values)
        await self._beat()

    # The database.

    @asynccontextmanager
    async def _changing(self) -> "AsyncIterator[psycopg.AsyncConnection[Any]]":
        """Yield the connection in a transaction that may change partitions."""
        async with self._connected() as connection, connection.transaction():
            await connection.execute("SELECT pg_advisory_xact_lock(%s)", [_LOCK])
            yield connection

    @asynccontextmanager
    async def _connected(self) -> "AsyncIterator[psycopg.AsyncConnection[Any]]":
        """Yield the connection, which nobody else uses. Raise StoreError if the database does not answer."""
        async with self._using:
            timer = None
            try:
                if self._connection is None:
                    self._connection = await asyncio.wait_for(self._connect(), self._timeout)
                timer = asyncio.get_running_loop().call_later(self._timeout, cut, self._connection)
                yield self._connection
            except BaseException as problem:
                await self._disconnect()
                if isinstance(problem, psycopg.Error | OSError):
                    reason = " ".join(str(problem).split()) or "no answer in time"
                    raise StoreError(f"The database does not answer: {reason}") from None
                raise
            finally:
                if timer is not None:
                    timer.cancel()

    async def _connect(self) -> "psycopg.AsyncConnection[Any]":
        connection = await psycopg.AsyncConnection.connect(
            self._url, autocommit=True, application_name="protodcs membership"
        )
        await connection.execute("SET synchronous_commit = off")
        # Another server, or an older backup, may answer now.
        self._epoch = -1
        return connection

    async def _disconnect(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            await connection.close()

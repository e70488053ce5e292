"""The one process that may change a stream: it holds streams awake, writes down every change, and answers after that.

The engine runs ahead of the journal and the answer behind it: many requests share one round trip to the store. When a
write fails, what is in memory is thrown away and the stream is woken again from the store. An owner must never answer
for a change that is not durable, and never trust its memory once its lease may have run out.
"""

import asyncio
import itertools
import logging
import secrets
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakValueDictionary

import numpy as np
from prometheus_client.core import Metric

from ...core.prototypes import Prototypes
from ...errors import (
    AnswerExpiredError,
    ConfigError,
    FencedError,
    HeldError,
    InputError,
    ProtoDCSError,
    StateError,
    StoreError,
    UnknownStreamError,
    UsageError,
)
from .. import guard
from ..access import audit
from ..messages import Action, Outcome, Reply, Request, internal_error
from ..settings import ServeConfig, classes_of
from ..store.base import Batch, Checkpoint, Store
from ..stream.answers import described_with_position
from ..stream.hosted import Birth, Hosted, check_classes
from ..stream.idempotency import Answer, Limits, digest_of
from ..stream.records import DIGEST_BYTES, Kind, Record
from ..stream.shared import unpack_prototypes
from ..telemetry import logs, traces
from ..telemetry.metrics import OwnerMetrics
from .adaptation import Adaptation
from .commits import Commits, Journal
from .ring import Ring

_log = logging.getLogger(__name__)

_CHANGES = {
    Action.OBSERVE: Kind.OBSERVE,
    Action.FREEZE: Kind.FREEZE,
    Action.UNFREEZE: Kind.UNFREEZE,
    Action.RESET: Kind.RESET,
    Action.ADD_CLASS: Kind.ADD_CLASS,
    Action.REMOVE_CLASS: Kind.REMOVE_CLASS,
}
# Was this change applied before? Asked before a costly step.
_LOOKUPS = {Action.LOOKUP: Kind.OBSERVE, Action.LOOKUP_CLASS: Kind.ADD_CLASS}
# How often an owner looks which streams should be written or sleep, in seconds.
_ROUND = 1.0
# After so many leases an owner that stands in for another sends callers there again.
_STANDING_IN = 10
# Of so many wake-ups an owner knows how long they took.
_WAKES = 1000


@dataclass(slots=True)
class _Awake:
    """A stream in memory; when it was woken, last used and last written whole, by the monotonic clock."""

    hosted: Hosted
    journal: Journal = field(default_factory=Journal)
    woken: float = field(default_factory=time.monotonic)
    used: float = field(default_factory=time.monotonic)
    written: float = field(default_factory=time.monotonic)
    # Held while a snapshot is saved or deleted, so that two requests cannot both find its name free.
    saving: asyncio.Lock = field(default_factory=asyncio.Lock)


class Owner:
    """Holds streams awake and serves requests on them. All its functions are called from one event loop.

    Args:
        name: which of the owners this is; its successor after a crash has the same one.
        store: where the streams are kept.
        config: the settings of the service.
    """

    def __init__(self, name: str, store: Store, config: ServeConfig):
        self.name = name
        self.incarnation = secrets.token_hex(8)
        self._store = store
        self._config = config
        self.counted = OwnerMetrics(guards=guard.NAMES)
        self._adaptation = Adaptation()
        self._audit = audit.AuditLog(config.audit)
        self._commits = Commits(store, config.store_patience, self.counted)
        self._streams: OrderedDict[str, _Awake] = OrderedDict()
        self._busy: dict[str, asyncio.Task[Any]] = {}
        self._shared: WeakValueDictionary[str, Prototypes] = WeakValueDictionary()
        self._ring: Ring | None = None
        self._refusal: Reply | None = None
        self._renewed = -float("inf")
        # The store's clock minus the monotonic clock of this process.
        self._clock_offset = 0.0
        # The store that the streams in memory were read from.
        self._generation = store.generation
        self._superseded = False
        self._limits = Limits(config.idempotency_answers, config.idempotency_entries, config.idempotency_seconds)
        self._tasks: list[asyncio.Task[None]] = []
        self.woken = 0
        self._wakes: deque[float] = deque(maxlen=_WAKES)

    # Life and death.

    async def start(self) -> None:
        """Take over the lease from an earlier incarnation, and begin to work."""
        await self._renew(takes_over=True)
        self._lease = asyncio.create_task(self._keep_lease())
        self._tasks = [self._lease, *(asyncio.create_task(work) for work in (self._commits.run(), self._look_after()))]

    async def drain(self, refusal: Reply) -> None:
        """Answer every further request with `refusal`, put all streams to sleep, and resign."""
        self._refusal = refusal
        while self._streams or self._busy:
            for stream in list(self._streams):
                self._put_to_sleep(stream)
            await asyncio.gather(*self._busy.values(), return_exceptions=True)
        # From here on nobody renews the lease, or it would come back after it was given up.
        self._lease.cancel()
        with suppress(StoreError):
            await self._store.resign(self.name, self.incarnation)

    async def close(self) -> None:
        """Stop working. What is awake stays as it is in the store."""
        tasks = [*self._tasks, *self._busy.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._store.close()

    def arrange(self, owners: Iterable[str]) -> None:
        """Take note of who the owners are now, and hand over the streams that belong to others."""
        self._ring = Ring(owners)
        if not self._ring.owners:
            self._ring = None
            return
        for stream in list(self._streams):
            if self._ring.first(stream) != self.name:
                self._put_to_sleep(stream)

    async def streams(self) -> list[str]:
        """The ids of all streams in the store, sorted."""
        return sorted([stream async for stream in self._store.streams()])

    def facts(self) -> dict[str, Any]:
        """Numbers for monitoring, JSON-ready."""
        return {
            "owner": self.name,
            "incarnation": self.incarnation,
            "awake": len(self._streams),
            "woken": self.woken,
            "wake_milliseconds": _quantiles(self._wakes),
            "commits": self._commits.groups,
            "writes": self._commits.writes,
            "draining": self._refusal is not None,
            "store_silence_seconds": self.counted.silence,
        }

    def metrics(self) -> list[Metric]:
        """The same and more, for Prometheus."""
        hosted = {stream: awake.hosted for stream, awake in self._streams.items()}
        behind = [stream.position - stream.covered for stream in hosted.values()]
        gauges = {
            "protodcs_owner_awake_streams": len(hosted),
            "protodcs_owner_queued_writes": self._commits.queued,
            "protodcs_owner_records_behind": sum(behind),
            "protodcs_owner_records_behind_most": max(behind, default=0),
        }
        self._adaptation.look(hosted)
        return self.counted.families(gauges, self._adaptation.families())

    # Requests.

    async def handle(self, requests: list[Request]) -> list[Reply]:
        """Serve requests; those on one stream in their order, and after one that is not final none behind it."""
        if self._refusal is not None:
            return [self._refusal] * len(requests)
        if self._superseded:
            return [_SUPERSEDED] * len(requests)
        groups: dict[str, list[int]] = {}
        for place, request in enumerate(requests):
            groups.setdefault(request.stream, []).append(place)
        replies: list[Reply] = [_LATER] * len(requests)
        spans = [request.trace for request in requests if request.trace]
        with traces.shared_span("owner", spans, requests=len(requests), streams=len(groups)):
            served = await asyncio.gather(
                *(self._serve(stream, [requests[place] for place in places]) for stream, places in groups.items()),
                return_exceptions=True,
            )
        for places, answers in zip(groups.values(), served, strict=True):
            if isinstance(answers, BaseException):
                _log.error("a request failed", exc_info=answers)
                answers = [internal_error(answers)] * len(places)
            for place, answer in zip(places, answers, strict=True):
                replies[place] = answer
        return replies

    async def _serve(self, stream: str, requests: list[Request]) -> list[Reply]:
        """Serve requests on one stream, in runs of those that need not wait for one another."""
        replies: list[Reply] = []
        while len(replies) < len(requests):
            rest = requests[len(replies) :]
            special = _SPECIAL.get(rest[0].action)
            if special is not None:
                replies.append(await self._in_words(special(self, rest[0])))
            else:
                run = next((at for at, request in enumerate(rest) if request.action in _SPECIAL), len(rest))
                replies += await self._run(stream, rest[:run])
            if not replies[-1].outcome.final:
                replies += [_LATER] * (len(requests) - len(replies))
        return replies

    async def _run(self, stream: str, requests: list[Request]) -> list[Reply]:
        """Changes and questions that the stream in memory can answer; all become durable together."""
        try:
            awake = await self._awake(stream, requests[0].stand_in)
        except ProtoDCSError as problem:
            return [_said(problem)] * len(requests)
        records: list[bytes] = []
        first = awake.hosted.position
        try:
            replies = [self._step(awake.hosted, request, records) for request in requests]
        except BaseException:
            # The engine may be torn, and is ahead of its journal.
            awake.journal.broken = StoreError("the stream was interrupted while it learned")
            raise
        awake.used = time.monotonic()
        if records:
            self._commits.put(awake.journal, Batch(stream, awake.hosted.fence, first, records))
            if awake.hosted.position - awake.hosted.covered >= self._config.snapshot_records:
                self._checkpoint(stream, awake)
        try:
            await awake.journal.settle()
        except (FencedError, StoreError) as problem:
            self._drop(stream, awake)
            return [Reply(Outcome.LATER, str(problem))] * len(requests)
        await self._tell_of_guard(stream, awake.hosted)
        return replies

    async def _tell_of_guard(self, stream: str, hosted: Hosted) -> None:
        """Count what the guard of a stream did, log it and write it down; its record is durable."""
        for event in hosted.events():
            self.counted.guarded(event.guard)
            _log.warning("a guard acted", extra=logs.with_fields(stream=logs.hashed(stream), **event._asdict()))
            try:
                await asyncio.to_thread(self._audit.write, audit.of_guard(stream, event))
            except OSError:
                _log.exception("the audit log cannot be written")

    def _step(self, hosted: Hosted, request: Request, records: list[bytes]) -> Reply:
        """One change or question; the record of a change is added to `records`."""
        try:
            question = _QUESTIONS.get(request.action)
            if question is not None:
                return question(self, hosted, request.payload)
            kind = _LOOKUPS.get(request.action) or _CHANGES[request.action]
            digest = _digest(request)
            found = hosted.applied(kind, request.key, digest, request.row)
            if found is not None:
                return _told(found, repeated=True)
            if kind is Kind.ADD_CLASS:
                check_classes(len(hosted.engine.classes) + 1, classes_of(self._config, request.stream))
            if request.action in _LOOKUPS:
                return _NOT_APPLIED
            start = time.perf_counter()
            record = hosted.change(kind, request.key, request.payload, self._now(), digest, request.row)
            if kind is Kind.OBSERVE:
                self.counted.stepped(time.perf_counter() - start, record.answer)
        except ProtoDCSError as problem:
            return _said(problem)
        records.append(record.pack())
        return _told(record)

    # Questions that the stream in memory answers.

    def _peek(self, hosted: Hosted, payload: bytes) -> Reply:
        return Reply(Outcome.DONE, answer=hosted.peek(payload))

    def _explain(self, hosted: Hosted, payload: bytes) -> Reply:
        return Reply(Outcome.DONE, facts=hosted.explain(payload))

    def _decisions(self, hosted: Hosted, payload: bytes) -> Reply:
        if not self._config.history:
            raise UsageError("this service does not tell of past decisions: it was started with history off")
        return Reply(
            Outcome.DONE,
            facts={"decisions": [described_with_position(answer) for answer in hosted.recent(int(payload))]},
        )

    def _export(self, hosted: Hosted, _: bytes) -> Reply:
        return Reply(Outcome.DONE, answer=hosted.engine.snapshot())

    def _status(self, hosted: Hosted, _: bytes) -> Reply:
        facts = {
            **hosted.engine.stats(),
            "owner": self.name,
            "incarnation": hosted.incarnation,
            "epoch": hosted.epoch,
            "position": hosted.position,
            "snapshot_position": hosted.covered,
            "replayed_differently": hosted.different,
            "guard": {"state": "off"} if hosted.guard is None else hosted.guard.status(),
        }
        return Reply(Outcome.DONE, facts=facts)

    async def _in_words(self, answer: Any) -> Reply:
        try:
            return await answer
        except ProtoDCSError as problem:
            return _said(problem)

    # What takes more than the stream in memory.

    async def _create(self, request: Request) -> Reply:
        birth = Birth.unpack(request.payload)
        prototypes = unpack_prototypes(request.shared)
        if prototypes.fingerprint != birth.prototypes:
            raise InputError("the prototypes of a new stream are not those that it names")
        birth.engine(prototypes)
        await self._store.put_shared(birth.prototypes, request.shared)
        try:
            return await self._begin_stream(request.stream, birth)
        except StoreError:
            # The blob may have gone meanwhile, with the last stream that used it.
            await self._store.put_shared(birth.prototypes, request.shared)
            return await self._begin_stream(request.stream, birth)

    async def _create_like(self, request: Request) -> Reply:
        """Create a stream as another one was, with the prototypes that it uses."""
        model = await self._store.describe(request.payload.decode())
        return await self._begin_stream(request.stream, Birth.unpack(model.birth))

    async def _begin_stream(self, stream: str, birth: Birth) -> Reply:
        packed = birth.pack()
        created = await self._store.create(stream, packed, birth.prototypes)
        found = await self._store.describe(stream)
        if found.birth != packed:
            return Reply(Outcome.CONFLICT, f"the stream {stream!r} already exists with different settings")
        facts = {**birth.model_dump(), "incarnation": found.incarnation}
        return Reply(Outcome.DONE, repeated=not created, facts=facts)

    async def _keep(self, request: Request) -> Reply:
        """Save the present state under a name."""
        awake = await self._awake(request.stream, request.stand_in)
        async with awake.saving:
            found = await self._applied(awake, Kind.KEEP, request)
            if found is not None:
                return _told(found, repeated=True)
            name = request.payload.decode()
            kept = await self._store.kept(request.stream)
            if name not in kept and len(kept) >= self._config.kept_snapshots:
                return Reply(
                    Outcome.CONFLICT,
                    f"The stream has {len(kept)} saved snapshots, which is the limit. Delete one first.",
                )
            saved = await self._store.kept_snapshot(request.stream, name) if name in kept else None
            # An earlier attempt at this request may have saved it before its worker died: that one stays.
            if saved is None or not _saved_by(saved, request.key):
                if saved is not None and not request.replace:
                    return Reply(
                        Outcome.CONFLICT,
                        f"The stream has a snapshot {name!r} already. Choose another name, or replace it explicitly.",
                    )
                # Taken before the wait, so that all of it is durable after the wait.
                state = _save(awake.hosted.state(), request.key)
                await awake.journal.settle()
                await self._store.keep(request.stream, awake.hosted.fence, name, state)
            return await self._changed(awake, Kind.KEEP, request, request.payload)

    async def _forget(self, request: Request) -> Reply:
        """Delete a saved snapshot; if it is not there, it is gone already."""
        awake = await self._awake(request.stream, request.stand_in)
        async with awake.saving:
            found = await self._applied(awake, Kind.DELETE_SNAPSHOT, request)
            if found is not None:
                return _told(found, repeated=True)
            await self._store.forget(request.stream, awake.hosted.fence, request.payload.decode())
            return await self._changed(awake, Kind.DELETE_SNAPSHOT, request, request.payload)

    async def _kept(self, request: Request) -> Reply:
        await self._awake(request.stream, request.stand_in)
        return Reply(Outcome.DONE, facts={"snapshots": await self._store.kept(request.stream)})

    async def _roll_back(self, request: Request) -> Reply:
        """Restore a saved snapshot; the journal goes on, so every acknowledged observe stays in it."""
        awake = await self._awake(request.stream, request.stand_in)
        found = await self._applied(awake, Kind.RESTORE, request)
        if found is not None:
            return _told(found, repeated=True)
        name = request.payload.decode()
        saved = await self._store.kept_snapshot(request.stream, name)
        if saved is None:
            return Reply(Outcome.MISSING, f"the stream {request.stream!r} has no snapshot {name!r}")
        return await self._changed(awake, Kind.RESTORE, request, _saved_state(saved))

    async def _import(self, request: Request) -> Reply:
        """Restore a state that the caller sent."""
        awake = await self._awake(request.stream, request.stand_in)
        found = await self._applied(awake, Kind.RESTORE, request)
        if found is not None:
            return _told(found, repeated=True)
        state = awake.hosted.imported(request.payload, classes_of(self._config, request.stream))
        return await self._changed(awake, Kind.RESTORE, request, state)

    async def _describe(self, request: Request) -> Reply:
        """Return which incarnation of a stream exists and what it was created with, without loading it."""
        found = await self._store.describe(request.stream)
        return Reply(Outcome.DONE, answer=found.birth, facts={"incarnation": found.incarnation})

    async def _delete(self, request: Request) -> Reply:
        """Delete the incarnation of a stream that the request names; if it does not exist, it is gone already."""
        awake = None
        try:
            awake = await self._awake(request.stream, request.stand_in)
            fence, incarnation = awake.hosted.fence, awake.hosted.incarnation
        except UnknownStreamError:
            return Reply(Outcome.DONE, repeated=True)
        except _DamagedError:
            held = await self._store.acquire(request.stream, self.name, self.incarnation)
            fence, incarnation = held.fence, held.incarnation
        if incarnation.encode() != request.payload:
            return Reply(Outcome.DONE, repeated=True)
        if awake is not None:
            with suppress(FencedError, StoreError):
                await awake.journal.settle()
            self._drop(request.stream, awake)
        await self._store.delete(request.stream, fence)
        return Reply(Outcome.DONE)

    async def _applied(self, awake: _Awake, kind: Kind, request: Request) -> Answer | None:
        """Return the answer to a request that was applied before, as soon as it is durable."""
        found = awake.hosted.applied(kind, request.key, _digest(request))
        if found is not None:
            await awake.journal.settle()
        return found

    async def _changed(self, awake: _Awake, kind: Kind, request: Request, payload: bytes) -> Reply:
        """Apply one change and wait until it is durable. If a retry was faster, only wait."""
        found = await self._applied(awake, kind, request)
        if found is not None:
            return _told(found, repeated=True)
        record = awake.hosted.change(kind, request.key, payload, self._now(), _digest(request))
        batch = Batch(request.stream, awake.hosted.fence, record.position, [record.pack()])
        self._commits.put(awake.journal, batch)
        try:
            await awake.journal.settle()
        except (FencedError, StoreError):
            self._drop(request.stream, awake)
            raise
        return _told(record)

    # Waking, writing whole, sleeping.

    async def _awake(self, stream: str, stand_in: bool) -> _Awake:
        """Return the stream in memory; load it if this owner may."""
        # Once, and not again after a load: a worker that cannot renew its lease would load for ever.
        self._check_lease()
        while True:
            awake = self._streams.get(stream)
            if awake is not None and awake.journal.broken is None:
                self._streams.move_to_end(stream)
                return awake
            if stream in self._busy:
                # It is being woken, or falls asleep; the one who began says how that went.
                await asyncio.wait([self._busy[stream]])
                continue
            if self._refusal is not None:
                raise _RefusedError(self._refusal)
            if self._ring is not None and not stand_in and self._ring.first(stream) != self.name:
                raise _MovedError(self._ring.first(stream))
            task = self._begin(stream, self._wake(stream))
            await asyncio.wait([task])
            task.result()

    def _begin(self, stream: str, work: Any) -> "asyncio.Task[Any]":
        """Be the only one to wake a stream or put it to sleep, until the work is done."""
        task = self._busy[stream] = asyncio.create_task(work)
        task.add_done_callback(lambda done: self._ended(stream, done))
        return task

    def _ended(self, stream: str, task: "asyncio.Task[Any]") -> None:
        if self._busy.get(stream) is task:
            del self._busy[stream]
        if not task.cancelled():
            task.exception()

    async def _wake(self, stream: str) -> None:
        start, generation = time.perf_counter(), self._store.generation
        held = await self._store.acquire(stream, self.name, self.incarnation)
        prototypes = await self._prototypes(Birth.unpack(held.birth).prototypes)
        if self._store.generation != generation:
            raise StoreError("the store was replaced while the stream was loaded: ask again")
        try:
            hosted = Hosted(held, prototypes, self._limits)
        except (StoreError, StateError) as problem:
            raise _DamagedError(f"what is kept of the stream {stream!r} cannot be used: {problem}") from None
        self._streams[stream] = _Awake(hosted)
        self.woken += 1
        self._wakes.append(time.perf_counter() - start)
        self.counted.woke(self._wakes[-1])
        self._make_room()

    def _make_room(self) -> None:
        """Put those streams to sleep that were not used for longest, if too many are awake."""
        too_many = len(self._streams) - self._config.awake
        for stream in list(itertools.islice(self._streams, max(0, too_many))):
            self._put_to_sleep(stream)

    async def _prototypes(self, name: str) -> Prototypes:
        found = self._shared.get(name)
        if found is None:
            found = self._shared[name] = unpack_prototypes(await self._store.get_shared(name))
        return found

    def _checkpoint(self, stream: str, awake: _Awake) -> None:
        """Write a stream whole, behind the records that are on their way."""
        hosted = awake.hosted
        self._commits.put(awake.journal, Checkpoint(stream, hosted.fence, hosted.position, hosted.snapshot()))
        hosted.covered = hosted.position
        awake.written = time.monotonic()

    def _put_to_sleep(self, stream: str) -> None:
        """Begin to let go of a stream, unless it is on its way already."""
        if stream not in self._busy and stream in self._streams:
            self._begin(stream, self._sleep(stream, self._streams.pop(stream)))

    async def _sleep(self, stream: str, awake: _Awake) -> None:
        if awake.hosted.position - awake.hosted.covered > self._config.sleep_records and awake.journal.broken is None:
            self._checkpoint(stream, awake)
        await awake.journal.settle()
        await self._store.release(stream, awake.hosted.fence)
        self.counted.slept()

    def _drop(self, stream: str, awake: _Awake) -> None:
        """Throw away what is in memory."""
        if self._streams.get(stream) is awake:
            del self._streams[stream]

    async def _look_after(self) -> None:
        """Write and put to sleep, by time."""
        while True:
            await asyncio.sleep(_ROUND)
            # Those that were still being woken when there were too many.
            self._make_room()
            for stream, awake in list(self._streams.items()):
                now = time.monotonic()
                try:
                    self._look_at(stream, awake, now)
                except Exception:
                    _log.exception("a stream could not be written", extra=logs.with_fields(stream=logs.hashed(stream)))
                    self._drop(stream, awake)
                if awake.written >= now:
                    await asyncio.sleep(0)

    def _look_at(self, stream: str, awake: _Awake, now: float) -> None:
        if awake.journal.broken is not None:
            self._drop(stream, awake)
        elif now - awake.used > self._config.sleep_seconds or self._stood_in_enough(stream, awake, now):
            self._put_to_sleep(stream)
        elif now - awake.written > self._config.snapshot_seconds and awake.hosted.position > awake.hosted.covered:
            self._checkpoint(stream, awake)

    def _stood_in_enough(self, stream: str, awake: _Awake, now: float) -> bool:
        """Whether it is time to see if the owner that the stream belongs to is back."""
        away = self._ring is not None and self._ring.first(stream) != self.name
        return away and now - awake.woken > _STANDING_IN * self._config.lease_seconds

    # The lease.

    async def _renew(self, takes_over: bool = False) -> None:
        before = time.monotonic()
        lease = await self._store.renew(self.name, self.incarnation, self._config.lease_seconds, takes_over)
        self._clock_offset = lease.time - time.monotonic()
        if lease.holder != self.incarnation:
            # The lease had ended, or the store lost it: others may have acquired and changed any stream.
            self._streams.clear()
        self._check_lease()
        self._superseded = not takes_over and lease.holder not in (None, self.incarnation)
        if self._superseded:
            raise StoreError(f"another process has the lease of {self.name!r}: this one serves nothing")
        self._renewed = before
        self.counted.renewed()

    def _check_lease(self) -> None:
        """Discard what is in memory if others may have changed it, or if the store may have lost it."""
        expired = time.monotonic() - self._renewed > self._config.lease_seconds
        if expired or self._store.generation != self._generation:
            self._streams.clear()
            self._generation = self._store.generation

    def _now(self) -> float:
        """Return the time by the store's clock, in seconds since 1970."""
        return self._clock_offset + time.monotonic()

    async def _keep_lease(self) -> None:
        while True:
            try:
                await self._renew()
            except StoreError as problem:
                self.counted.store_failed()
                _log.warning("the lease was not renewed", extra=logs.with_fields(problem=str(problem)))
            await asyncio.sleep(self._config.lease_seconds / 3)


class _MovedError(ProtoDCSError):
    """The stream belongs to another owner."""


class _DamagedError(ProtoDCSError):
    """The store can be reached, and what it holds of the stream cannot be used."""


class _RefusedError(ProtoDCSError):
    """Whoever drains wakes no stream any more."""

    def __init__(self, reply: Reply):
        super().__init__(reply.words)
        self.reply = reply


def _digest(request: Request) -> bytes:
    """Return the digest of the content of a request, which a retry must repeat."""
    return request.digest or digest_of(request.action.encode(), request.payload)


# A saved snapshot begins with a digest of the idempotency key of the request that saved it.
def _save(state: bytes, key: str) -> bytes:
    return digest_of(key.encode()) + state


def _saved_by(saved: bytes, key: str) -> bool:
    return saved.startswith(digest_of(key.encode()))


def _saved_state(saved: bytes) -> bytes:
    return saved[DIGEST_BYTES:]


def _told(record: Record | Answer, repeated: bool = False) -> Reply:
    return Reply(Outcome.DONE, answer=record.answer, position=record.position, epoch=record.epoch, repeated=repeated)


def _quantiles(seconds: Iterable[float]) -> dict[str, float]:
    """The median and the 99th percentile, in milliseconds; nothing of nothing."""
    values = 1000 * np.asarray([*seconds])
    return {} if len(values) == 0 else {f"p{p}": float(np.percentile(values, p)) for p in (50, 99)}


_LATER = Reply(Outcome.LATER, "a request before this one was not served")
_SUPERSEDED = Reply(Outcome.LATER, "another process took over from this worker")
_NOT_APPLIED = Reply(Outcome.DONE)

_OUTCOMES: list[tuple[type[ProtoDCSError], Outcome]] = [
    (_MovedError, Outcome.MOVED),
    (UnknownStreamError, Outcome.MISSING),
    (FencedError, Outcome.LATER),
    (StoreError, Outcome.LATER),
    (InputError, Outcome.WRONG),
    (ConfigError, Outcome.WRONG),
    (StateError, Outcome.WRONG),
    (UsageError, Outcome.CONFLICT),
    (AnswerExpiredError, Outcome.EXPIRED),
]


def _said(problem: ProtoDCSError) -> Reply:
    """What the caller is told of a problem."""
    if isinstance(problem, HeldError):
        return Reply(Outcome.HELD, problem.owner)
    if isinstance(problem, _RefusedError):
        return problem.reply
    outcome = next((outcome for kind, outcome in _OUTCOMES if isinstance(problem, kind)), Outcome.FAILED)
    return Reply(outcome, str(problem))


_QUESTIONS: dict[str, Callable[[Owner, Hosted, bytes], Reply]] = {
    Action.PEEK: Owner._peek,
    Action.STATUS: Owner._status,
    Action.EXPLAIN: Owner._explain,
    Action.DECISIONS: Owner._decisions,
    Action.EXPORT: Owner._export,
}

_SPECIAL: dict[str, Callable[[Owner, Request], Any]] = {
    Action.CREATE: Owner._create,
    Action.CREATE_LIKE: Owner._create_like,
    Action.KEEP: Owner._keep,
    Action.KEPT: Owner._kept,
    Action.FORGET: Owner._forget,
    Action.ROLLBACK: Owner._roll_back,
    Action.IMPORT: Owner._import,
    Action.DELETE: Owner._delete,
    Action.DESCRIBE: Owner._describe,
}

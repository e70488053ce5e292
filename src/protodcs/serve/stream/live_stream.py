"""One stream in memory: its engine, its guard, its position in the journal, and the requests it has applied.

A pure state machine: no clock, no store, no network. `change` applies a change and returns its `Record`, which the
caller writes to the journal; `replay` applies the same change from the record. Both must give the same state.
"""

import dataclasses
import itertools
import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ... import methods
from ...arrays import Feature, Features
from ...core import state as states
from ...core.protodcs.engine import ProtoDCS
from ...core.prototypes import Prototypes
from ...core.settings import Settings
from ...core.state import leaves_out_prototypes
from ...core.streamdcs.engine import StreamDCS
from ...core.validation import check_features
from ...discovery import DiscoveryConfig, review_order
from ...errors import (
    DamagedDataError,
    InputError,
    ProtoDCSError,
    StateError,
    StateVersionError,
    StoreError,
    UsageError,
)
from ...method import FeatureMethod
from ..guard import Guard, GuardAction, GuardEvent, GuardSettings
from ..log.entries import Range
from ..log.latest import Latest
from ..store.values import AcquiredStream, Checkpoint
from . import snapshots
from .answers import KNOWN, pack_decision, pack_decisions, reason_of, unpack_decision
from .feedback import unpack_feedback
from .idempotency import Answer, IdempotencyCache, IdempotencyLimits, digest_of
from .records import LONGEST_KEY, Kind, Record, join
from .samples import StreamSamples, give_feedback
from .summary import Summary

BIRTH_SCHEMA = 3
# Specs that a process keeps at hand.
_AT_HAND = 64
# Number of recent decisions that a review chooses from.
_REVIEWED = 1000
# Of the frozen baseline's probabilities, for methods that have no temperature of their own: CLIP's.
_TEMPERATURE = 0.01


class StreamSpec(BaseModel):
    """What a stream was created with. It never changes."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    schema_version: int = BIRTH_SCHEMA
    method: str = Field(max_length=100)
    method_version: int = Field(
        default_factory=lambda spec: methods.REGISTER[spec["method"]].version,
        description="Version of the method that replays the journal; see `FeatureMethod.version`.",
    )
    config: dict[str, Any] = Field(description="Every option, resolved.")
    classes: list[str] = Field(min_length=1)
    prototypes: str = Field(pattern="^[0-9a-f]{64}$", description="Fingerprint of the initial prototypes.")
    vocabulary: str | None = Field(None, pattern="^[0-9a-f]{64}$", description="Fingerprint of its vocabulary, if any.")
    encoder: str | None = Field(None, max_length=1000, description="Fingerprint of what makes the features, if known.")
    guard: GuardSettings | None = Field(None, description="Every setting of its guard, resolved. None: it has none.")
    discovery: DiscoveryConfig | None = Field(
        None, description="Settings of its discovery. None: it stores no samples for people to work with."
    )

    def pack(self) -> bytes:
        """Return the spec as bytes, without what it does not have. The same spec gives the same bytes."""
        absent = {name for name in ("guard", "discovery", "vocabulary") if getattr(self, name) is None}
        said = self.model_dump(exclude=absent)
        return json.dumps(said, sort_keys=True, separators=(",", ":")).encode()

    @staticmethod
    @lru_cache(maxsize=_AT_HAND)
    def unpack(data: bytes) -> "StreamSpec":
        """The spec that `pack` wrote. Many streams share one spec, and each load unpacks it twice."""
        try:
            written = json.loads(data)["schema_version"]
        except (ValueError, KeyError, TypeError, RecursionError) as problem:
            raise StoreError(f"what a stream was created with cannot be read: {problem}") from None
        if written != BIRTH_SCHEMA:
            raise StateVersionError.of("The stream", written, BIRTH_SCHEMA)
        try:
            return StreamSpec.model_validate_json(data)
        except ValidationError as problem:
            raise StoreError(f"what a stream was created with cannot be read: {problem.errors()[0]['msg']}") from None

    @property
    def blobs(self) -> tuple[str, ...]:
        """The names of the shared blobs that the stream uses."""
        return tuple(dict.fromkeys(name for name in (self.prototypes, self.vocabulary) if name is not None))

    def settings(self, config: Mapping[str, Any] | None = None) -> Settings:
        """Return the settings of the stream, or those that another `config` gives its method."""
        settings: Settings = methods.REGISTER[self.method].config_type(**(self.config if config is None else config))
        return settings

    def engine(self, prototypes: Prototypes) -> FeatureMethod:
        """A new engine for this stream. Raise StateVersionError if another version would decide differently."""
        methods.REGISTER[self.method].check_version(self.method_version)
        return methods.create(self.method, prototypes, self.classes, self.encoder, **self.config)

    def watcher(self, prototypes: Prototypes, whole: bool = False) -> Guard | None:
        """A new guard for this stream, if it was created with one."""
        if self.guard is None or not self.guard.enabled:
            return None
        return Guard(self.guard, prototypes, self.config.get("temperature", _TEMPERATURE), whole)


def _readable_requests(held: AcquiredStream, limits: IdempotencyLimits) -> IdempotencyCache:
    """Return the applied requests that can still be read of a stream that cannot be loaded."""
    applied = IdempotencyCache(limits)
    try:
        found = snapshots.unpack(held.snapshot or b"")
        applied.load(found.requests, held.keys)
        if found.position != held.start:
            applied.drop_answers(held.start)
    except (StoreError, StateVersionError):
        applied = IdempotencyCache(limits)
        with suppress(StoreError):
            applied.load_keys(held.keys)
        applied.drop_answers(held.start)
    # None: behind a record that cannot be read, whose length is not known.
    due: int | None = held.start
    for data in held.tail:
        try:
            record = Record.unpack(data)
        except (StoreError, StateVersionError):
            due = None
        else:
            if due is None or record.position != due:
                applied.drop_answers(record.position)
            applied.add(record)
            due = record.position + len(record.answers)
    if due != held.position:
        applied.drop_answers(held.position)
    return applied


# Raises an error if a stream may not have these settings, so many classes and this dimension.
Check = Callable[[StreamSpec, dict[str, Any], int, int], None]


class LiveStream:
    """A stream in memory.

    Args:
        held: the stream as the store gave it.
        prototypes: those it was created with, and its vocabulary if it has one.
        limits: how much it stores to recognise retries.

    Attributes:
        position: where its next record goes.
        covered: how many records its newest snapshot covers.
        different: how many decisions differed when the journal was replayed: on another type of processor
            they may, in the last digits.
        prototypes: those it was created with.
        guard: watches the engine; None where the stream has none.
        samples: features that are stored for people to work with; None if the stream stores none.
    """

    def __init__(self, held: AcquiredStream, prototypes: Prototypes, limits: IdempotencyLimits):
        self.spec = StreamSpec.unpack(held.spec)
        self.fence = held.fence
        self.incarnation = held.incarnation
        self.created = held.created
        self.covered = held.start
        self.position = held.start
        self.different = 0
        self.prototypes = prototypes
        self._applied = IdempotencyCache(limits)
        self._events: list[GuardEvent] = []
        self._roll_backs: list[Range] = []
        self._latest = Latest()
        # The unit features (n, d) of the last observe.
        self._observed: Features = np.empty((0, 0), np.float32)
        self._warnings: list[tuple[int, dict[str, Any]]] = []
        if held.snapshot is None and held.start:
            raise DamagedDataError(f"the snapshot of the first {held.start} records is missing")
        if held.snapshot is None:
            self.engine = self.spec.engine(prototypes)
            self.guard = self._watcher()
            self.samples = self._no_samples()
        else:
            found = snapshots.unpack(held.snapshot)
            if found.position != held.start:
                raise DamagedDataError(f"the newest snapshot covers {found.position} records and {held.start} are gone")
            self.engine = self._restored(found.state)
            self.guard = self._watcher()
            if self.guard is not None and found.guard:
                self.guard.resume(found.guard)
            self._applied.load(found.requests, held.keys)
            self.samples = self._no_samples()
            if self.samples is not None and found.samples:
                self.samples.load(found.samples)
            if found.latest:
                self._latest.load(found.latest)
        for data in held.tail:
            self.replay(data)
        # Whoever wrote the records has told of these.
        self._events.clear()
        self._warnings.clear()
        self._roll_backs.clear()

    @classmethod
    def repaired(
        cls, held: AcquiredStream, prototypes: Prototypes, limits: IdempotencyLimits, state: bytes
    ) -> "LiveStream":
        """Return a stream that cannot be loaded, with another state, at the end of its journal.

        It recognises the retries that its snapshot and its records still tell of, as far as they can be read.
        """
        live = cls(dataclasses.replace(held, snapshot=None, start=0, tail=[]), prototypes, limits)
        live._restore(state)
        live._applied = _readable_requests(held, limits)
        live.covered, live.position = held.start, held.position
        return live

    @property
    def epoch(self) -> int:
        """The epoch under which this process writes to the stream."""
        return self.fence.epoch

    @property
    def etag(self) -> str:
        """The entity tag of the state: it changes with every change of the stream."""
        return f'"{self.incarnation}-{self.position}"'

    def summary(self) -> Summary:
        """Return what a list shows of the stream."""
        time, latest = self._applied.time / 1000 or None, self._latest
        guard = self.guard.events[-1].guard if self.guard is not None and self.guard.frozen else None
        return Summary(time, self.engine.frozen, latest.unknown_rate, latest.usual_unknown_rate, guard, latest.warning)

    def applied(self, kind: Kind, key: str, digest: bytes, row: int = 0) -> Answer | None:
        """Return the answer to a row of a request that was applied before, or None if it is new.

        Raises:
            IdempotencyKeyError: the key was used for a request with other content.
            AnswerExpiredError: the row was applied, and its answer is no longer stored.
        """
        return self._applied.find(kind, key, digest, row)

    def has_begun(self, key: str) -> bool:
        """Return whether a row of the request with this key was applied."""
        return self._applied.has_key(key)

    def change(
        self, kind: Kind, key: str, payload: bytes, now: float, digest: bytes | None = None, row: int = 0
    ) -> Record:
        """Apply a change and return its record.

        After a ProtoDCSError nothing has changed. After any other error, discard the stream and load it again.

        Args:
            kind: what to do. OBSERVE_ROWS is for streams that store no samples.
            key: the idempotency key of the request.
            payload: what the change needs, as in `Record`.
            now: seconds since 1970 by the store's clock.
            digest: of the content of the request; None: the payload is all of it.
            row: which row of the request this is, or the first one.
        """
        size = len(key.encode())
        if not 0 < size <= LONGEST_KEY:
            raise InputError(f"a key must have 1 to {LONGEST_KEY} bytes; given: {size}")
        digest = digest_of(payload) if digest is None else digest
        if kind is Kind.EDIT_CLUSTERS:
            payload = self.stored_samples().with_groups(payload)
        answer = _CHANGES[kind](self, payload)
        # A store whose clock was set back must not make an older key look younger than a newer one.
        time = max(int(1000 * now), self._applied.time)
        record = Record(kind, self.position, self.fence.epoch, time, key, payload, answer, digest, row)
        self._add(record)
        return record

    def replay(self, data: bytes) -> None:
        """Make the change that the next record of the journal tells of."""
        record = Record.unpack(data)
        if record.position != self.position:
            raise DamagedDataError(f"the journal holds record {record.position} where {self.position} is due")
        try:
            answer: bytes | None = _CHANGES[record.kind](self, record.payload)
        except (InputError, UsageError):
            # If a decision differed, other samples are stored, and their clusters may differ.
            if record.kind is not Kind.EDIT_CLUSTERS:
                raise
            answer = None
        self.different += answer != record.answer
        self._add(record)

    def _add(self, record: Record) -> None:
        answers = record.answers
        self.position += len(answers)
        self._applied.add(record)
        if record.request_kind is Kind.OBSERVE:
            unknown = [not answer[0] & KNOWN for answer in answers]
            for row, warning in self._latest.add(unknown, [reason_of(answer) for answer in answers], self._observed):
                self._warnings.append((record.position + row, warning))

    def peek(self, payload: bytes) -> bytes:
        """What an observe would answer; nothing changes."""
        return pack_decision(self.engine.peek(_feature(payload)))

    def state(self) -> bytes:
        """What the engine has learned, without the prototypes that it shares; whole once its classes were edited."""
        shares = self.engine._prototypes is self.prototypes
        return self.engine.difference() if shares else self.engine.snapshot()

    def describe_state(self, state: bytes) -> dict[str, Any]:
        """Return what an engine with this state would be, JSON-ready; nothing changes."""
        engine = self._restored(state)
        return {
            "classes": list(engine.classes),
            "frozen": engine.frozen,
            "sequence": engine.sequence,
            "stats": engine.stats(),
        }

    def explain(self, payload: bytes) -> dict[str, Any]:
        """What each stage would do with a feature; nothing changes."""
        return self._explain(_feature(payload))

    def explain_sample(self, position: int) -> dict[str, Any]:
        """What each stage would do now with a stored sample, and the samples most like it; nothing changes."""
        samples = self.stored_samples()
        feature = samples.feature(position)
        return {**self._explain(feature), "similar": samples.similar(feature)}

    def _explain(self, feature: Feature) -> dict[str, Any]:
        if not isinstance(self.engine, StreamDCS | ProtoDCS):
            raise UsageError(f"the method {self.engine.name!r} has no explanations")
        return self.engine.explain(feature).to_dict()

    def copied(self) -> tuple[FeatureMethod, Features]:
        """Return a copy of the engine, and the recent features (N, d): all that `diagnose` needs, for a thread."""
        none = np.empty((0, self.engine.dimension), dtype=np.float32)
        return self._restored(self.state()), none if self.samples is None else self.samples.latest

    def recent(self, most: int) -> list[Answer]:
        """Return the newest observes whose answers are stored, newest first."""
        return list(itertools.islice(self._applied.newest(Kind.OBSERVE), most))

    def checkpoint(self, stream: str) -> Checkpoint:
        """Return what stores all of the stream at its present position. `stream` is its id."""
        self._applied.trim()
        guard = b"" if self.guard is None else self.guard.pack()
        samples = b"" if self.samples is None else self.samples.pack()
        parts = self.state(), guard, self._applied.pack(), samples, self._latest.pack()
        snapshot = snapshots.pack(snapshots.Snapshot(self.position, *parts))
        return Checkpoint(stream, self.fence, self.position, snapshot, *self._applied.unstored_keys())

    def stored(self, checkpoint: Checkpoint) -> None:
        """Take note that a checkpoint is durable."""
        self.covered = checkpoint.position
        self._applied.stored(checkpoint)

    def events(self) -> list[GuardEvent]:
        """What the guard did since this was last asked. Tell of it only after its record is durable."""
        events, self._events = self._events, []
        return events

    def warnings(self) -> list[tuple[int, dict[str, Any]]]:
        """Return the warnings that began since this was last asked, each with the position of its decision."""
        warnings, self._warnings = self._warnings, []
        return warnings

    def roll_backs(self) -> list[Range]:
        """Return the positions that the guard rolled back since this was last asked."""
        roll_backs, self._roll_backs = self._roll_backs, []
        return roll_backs

    def _restored(self, state: bytes) -> FeatureMethod:
        """Return the engine of a state that this service wrote."""
        shared = self.prototypes if leaves_out_prototypes(state) else None
        return methods.restore(state, self.spec.encoder, shared, self.prototypes.vocabulary, trusted=True)

    def _watcher(self) -> Guard | None:
        """A new guard over the classes that the engine has now."""
        own = self.engine._prototypes
        return self.spec.watcher(own, own is not self.prototypes)

    def _no_samples(self) -> StreamSamples | None:
        config = self.spec.discovery
        return None if config is None else StreamSamples(self.engine.dimension, config, self.spec.encoder)

    def stored_samples(self) -> StreamSamples:
        """Return the samples. Raise UsageError if the stream stores none."""
        if self.samples is None:
            raise UsageError("This stream stores no samples. Create it with `discovery` to review and cluster them.")
        return self.samples

    def clusters(self) -> dict[str, Any]:
        """Return the clusters of rejected samples, JSON-ready."""
        return self.stored_samples().facts()

    def review(self, limit: int) -> dict[str, list[int]]:
        """Return positions in the order in which a person should look at the samples, and those of corrected ones."""
        samples, answers = self.stored_samples(), self.recent(_REVIEWED)
        features = samples.recent([answer.position for answer in answers])
        stored = [(answer, row) for answer, row in zip(answers, features, strict=True) if row is not None]
        corrected = [answer.position for answer, feature in stored if self._is_corrected(feature)]
        left = {answer.position for answer, _ in stored} - {*corrected}
        pairs = [(answer, feature) for answer, feature in stored if answer.position in left]
        if not pairs:
            return {"positions": [], "corrected": corrected}
        p_unknown = np.array([unpack_decision(answer.answer).p_unknown for answer, _ in pairs])
        order = review_order(p_unknown, features=np.stack([feature for _, feature in pairs]), limit=limit)
        return {"positions": [pairs[place][0].position for place in order], "corrected": corrected}

    def _is_corrected(self, feature: NDArray[np.float32]) -> bool:
        return isinstance(self.engine, StreamDCS) and self.engine.is_corrected(feature)

    # The changes, by kind: each returns the answer.

    def _observe(self, payload: bytes) -> bytes:
        decision = self.engine.observe(_feature(payload))
        with _NO_REJECTION:
            feature = self.engine.latest
            self._observed, joined = feature[None], None
            if self.samples is not None:
                joined = self.samples.add(self.position, feature, decision)
            if self.guard is not None:
                self._obey(self.guard.watch(feature, decision, self.engine, self.position))
            return pack_decision(decision, joined)

    def _observe_rows(self, payload: bytes) -> bytes:
        unit = check_features(_feature(payload).reshape(-1, self.engine.dimension), self.engine.dimension)
        with _NO_REJECTION:
            answers: list[bytes] = []
            while len(answers) < len(unit):
                first = len(answers)
                # The guard may restore another engine at the end of its window.
                some = unit[first : None if self.guard is None else first + self.guard.room]
                decisions, cosines = self.engine.observe_unit(some)
                answers += pack_decisions(decisions)
                if self.guard is not None:
                    last = self.position + len(answers) - 1
                    self._obey(self.guard.watch_many(some, decisions, cosines, self.engine, last))
            self._observed = unit
            return join(answers)

    def _obey(self, event: GuardEvent | None) -> None:
        """Do what the guard says."""
        if event is None or self.guard is None:
            return
        self._events.append(event)
        good_state = self.guard.good_state
        if event.action == GuardAction.UNFREEZE:
            self.engine.unfreeze()
            return
        if event.action == GuardAction.ROLL_BACK:
            self._roll_backs.append((self.guard.good_position, event.position + 1))
        if event.action == GuardAction.ROLL_BACK and good_state is None:
            self.engine.reset()
        elif event.action == GuardAction.ROLL_BACK and good_state is not None:
            self.engine = self._restored(good_state)
        self.engine.freeze()

    def _freeze(self, _: bytes) -> bytes:
        self.engine.freeze()
        if self.guard is not None:
            self.guard.overruled()
        return b""

    def _unfreeze(self, _: bytes) -> bytes:
        self.engine.unfreeze()
        if self.guard is not None:
            self.guard.overruled()
        return b""

    def _acknowledge(self, _: bytes) -> bytes:
        self._latest.take_as_usual()
        return b""

    def _reset(self, _: bytes) -> bytes:
        self.engine.reset()
        self._latest = Latest()
        self.samples = self._no_samples()
        if self.guard is not None:
            self.guard.begin()
        return b""

    def _restore(self, payload: bytes) -> bytes:
        before = self.engine._prototypes
        self.engine = self._restored(payload)
        if self.guard is not None and self.engine._prototypes is before:
            self.guard.begin()
        else:
            self.guard = self._watcher()
        return b""

    def _feedback(self, payload: bytes) -> bytes:
        given = unpack_feedback(payload)
        position = given.position
        feature = _feature(given.feature) if position is None else self.stored_samples().feature(position)
        give_feedback(self.engine, feature, given)
        return b""

    def _edit_clusters(self, payload: bytes) -> bytes:
        return self.stored_samples().edit(payload, self.engine)

    def _no_change(self, _: bytes) -> bytes:
        return b""

    def _add_class(self, payload: bytes) -> bytes:
        prototype, name = unpack_class(payload, self.engine.dimension)
        self.engine.add_class(name, prototype)
        self.guard = self._watcher()
        return b""

    def _remove_class(self, payload: bytes) -> bytes:
        self.engine.remove_class(payload.decode())
        self.guard = self._watcher()
        return b""


def check_state(data: bytes, spec: StreamSpec, dimension: int, check: Check) -> None:
    """Raise StateError if a state is damaged or does not fit a stream, before anything is built from it.

    Args:
        data: the state.
        spec: what the stream was created with.
        dimension: length of the stream's features.
        check: raises an error if the stream may not have these settings and so many classes.
    """
    header, arrays = states.unpack(data)
    shape = arrays["initial_prototypes"].shape if "initial_prototypes" in arrays else (len(header.classes), dimension)
    if header.method != spec.method or shape[1:] != (dimension,):
        raise StateError(
            f"The state belongs to the method {header.method!r} with prototypes of shape {shape}. The stream needs "
            f"the method {spec.method!r} and {dimension} dimensions."
        )
    if header.vocabulary != spec.vocabulary:
        raise StateError(
            f"The vocabulary of the state ({header.vocabulary or 'none'}) is not that of the stream "
            f"({spec.vocabulary or 'none'}). Create a stream with the vocabulary of the state, and import it there."
        )
    check(spec, header.config, len(header.classes), dimension)


def imported_state(data: bytes, spec: StreamSpec, prototypes: Prototypes, check: Check) -> bytes:
    """Return a state from outside in the form that a stream stores. Raise StateError if it does not fit.

    `prototypes` are those of the stream, with its vocabulary.
    """
    check_state(data, spec, prototypes.unit.shape[1], check)
    return methods.restore(data, spec.encoder, vocabulary=prototypes.vocabulary).snapshot()


def check_classes(count: int, most: int) -> None:
    """Refuse more classes than a stream may have."""
    if count > most:
        raise InputError(f"a stream may have {most} classes; given: {count}")


def pack_class(prototype: bytes, name: str) -> bytes:
    """A class to be added: its prototype as float32, little-endian, and its name."""
    return prototype + name.encode()


def unpack_class(payload: bytes, dimension: int) -> tuple[NDArray[np.float32], str]:
    """The prototype and the name that were packed, for a stream of this dimension."""
    size = 4 * dimension
    if len(payload) <= size:
        raise InputError(f"the prototype of a class must have {dimension} numbers")
    try:
        return np.frombuffer(payload[:size], dtype="<f4"), payload[size:].decode()
    except UnicodeDecodeError:
        raise InputError(f"the prototype of a class must have {dimension} numbers") from None


class _NoRejection:
    """Raises no ProtoDCSError: callers take it for a rejected request that changed nothing."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, problem: BaseException | None, _: object) -> None:
        if isinstance(problem, ProtoDCSError):
            raise RuntimeError(f"a sample was learned, and then an error occurred: {problem}") from problem


_NO_REJECTION = _NoRejection()


def _feature(payload: bytes) -> NDArray[np.float32]:
    if len(payload) % 4:
        raise InputError(f"a feature of float32 cannot have {len(payload)} bytes")
    return np.frombuffer(payload, dtype="<f4")


_CHANGES: dict[Kind, Callable[[LiveStream, bytes], bytes]] = {
    Kind.OBSERVE: LiveStream._observe,
    Kind.OBSERVE_ROWS: LiveStream._observe_rows,
    Kind.FREEZE: LiveStream._freeze,
    Kind.UNFREEZE: LiveStream._unfreeze,
    Kind.ACKNOWLEDGE: LiveStream._acknowledge,
    Kind.RESET: LiveStream._reset,
    Kind.RESTORE: LiveStream._restore,
    Kind.SAVE_SNAPSHOT: LiveStream._no_change,
    Kind.DELETE_SNAPSHOT: LiveStream._no_change,
    Kind.ADD_CLASS: LiveStream._add_class,
    Kind.REMOVE_CLASS: LiveStream._remove_class,
    Kind.FEEDBACK: LiveStream._feedback,
    Kind.EDIT_CLUSTERS: LiveStream._edit_clusters,
}

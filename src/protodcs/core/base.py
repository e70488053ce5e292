"""What every method over features shares: names, input checks, one caller at a time, snapshots.

A method is a pure state machine. It keeps all it has learned in a `Memory` and implements `_advance(memory, feature)`;
everything a user calls is built here, once, on that one function.
"""

import hashlib
import os
import threading
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, Protocol, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel

from ..arrays import Feature
from ..errors import ConfigError, InputError, StateError, UsageError
from ..version import __version__
from . import state
from ._native import BACKEND
from .arena import Arena
from .decision import Decision, Decisions
from .numerics.evidence import uncertainty
from .numerics.softmax import softmax_rows
from .prototypes import Prototypes
from .rows import WORKING_TYPE, contiguous, described, described_values, is_plain, unit_rows
from .state_checks import Counters, prototypes_of
from .vectors import to_unit

_TORN = "this engine was interrupted while it learned from a sample: restore it from a snapshot, or reset it"
_IN_USE = "this engine is in use by another thread: give each stream its own engine, or call it from one thread"
_SINGLE = np.dtype(np.float32)


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a method promises; the contract checks select on it.

    Attributes:
        batch_invariant: the answer does not depend on how the stream is cut into batches.
        rotation_invariant: turning features and prototypes together changes no answer.
        editable_classes: classes can be added and removed while the stream runs.
        cost: what one sample costs beside its encoder.
    """

    batch_invariant: bool
    rotation_invariant: bool
    editable_classes: bool
    cost: Literal["scoring", "prototypes", "backbone"]


class Memory(Protocol):
    """All that a method has learned."""

    sequence: int

    def fork(self) -> Self:
        """A copy that may be changed freely; good until the original moves on."""
        ...

    def export(self) -> tuple[Counters, state.Arrays]:
        """Numbers and arrays from which the memory can be rebuilt to the bit."""
        ...


class FeatureMethod(ABC):
    """The contract of a method that takes unit features, one at a time, in order."""

    name: ClassVar[str]
    capabilities: ClassVar[Capabilities]
    kind: ClassVar[Literal["features"]] = "features"
    config_type: ClassVar[type[BaseModel]]
    # What `Decision.score` is, in words, for each choice of the option `score`; "" where there is no such option.
    score_names: ClassVar[Mapping[str, str]]

    config: BaseModel
    classes: tuple[str, ...]
    encoder: str | None
    frozen: bool

    def __init__(
        self,
        prototypes: NDArray[np.floating] | Prototypes,
        classes: Sequence[str] | None = None,
        config: BaseModel | None = None,
        encoder: str | None = None,
    ):
        if config is None:
            config = self.config_type()
        if not isinstance(config, self.config_type):
            raise ConfigError(f"config must be a {self.config_type.__name__}; given: {type(config).__name__}")
        self._prototypes = Prototypes.of(prototypes)
        entry = self._prototypes.unit
        self._assume(config, encoder, False)
        self._resize(class_names(classes, len(entry)), entry.shape[1])
        self._memory = self._new_memory(entry)

    def _assume(self, config: BaseModel, encoder: str | None, frozen: bool) -> None:
        if encoder is not None and not (isinstance(encoder, str) and 0 < len(encoder) <= 1000):
            raise InputError(f"encoder must be a fingerprint of 1 to 1000 characters; given: {described(encoder)}")
        self.config = config
        self.encoder = encoder
        self._whole = True
        self.frozen = frozen
        self._busy = threading.Lock()

    def _resize(self, classes: tuple[str, ...], width: int) -> None:
        """Take on these class names, and make work space for them."""
        self.classes = classes
        self._feature = np.empty(width, dtype=np.float32)

    # What a method implements.

    @abstractmethod
    def _new_memory(self, entry: Feature) -> Any:
        """The memory before the first sample, for unit prototypes `entry` (K, d), which other engines may share."""

    @abstractmethod
    def _restored_memory(self, counters: Counters, arrays: state.Arrays) -> Any:
        """The memory that was exported; raises StateError on anything that no memory can hold."""

    def _trusted_memory(self, counters: Counters, arrays: state.Arrays) -> Any:
        """Return the memory that was exported by this program. A method may skip checks that take long."""
        return self._restored_memory(counters, arrays)

    def _arena(self) -> Arena | None:
        """Return the arena that holds everything that was learned; None if the method keeps some of it elsewhere."""
        return None

    @abstractmethod
    def _advance(self, memory: Any, feature: Feature, scores: bool) -> Decision:
        """Decide on a unit feature and learn from it, in `memory` and nowhere else."""

    def _glance(self, feature: Feature, scores: bool) -> Decision:
        """What `_advance` would decide on a unit feature; nothing changes."""
        return self._advance(self._memory.fork(), feature, scores)

    def _rehearse(self, rows: Feature) -> None:  # noqa: B027
        """Learn from unit rows (N, d) without counting them, if it helps to see them twice."""

    @abstractmethod
    def _entry(self, memory: Any) -> Feature:
        """The prototypes (K, d) the memory started from."""

    def _with_classes(self, memory: Any, kept: NDArray[np.int64], added: Feature) -> Any:
        """A memory that keeps the classes `kept`, followed by the new unit prototypes `added`."""
        raise UsageError(f"the classes of the method {self.name!r} cannot be edited while a stream runs")

    def _decision(
        self,
        index: int,
        cosines: NDArray[np.float64],
        scores: NDArray[np.floating] | None,
        *,
        score: float,
        sequence: int,
        known: bool = True,
        p_unknown: float | None = None,
        trusted: bool = False,
        cached: bool = False,
    ) -> Decision:
        """The decision for class `index`, for a method that takes no step of its own on the text prototypes.

        Openness and uncertainty are those of the text cosines (K,); `scores` (K,) are the final ones, None where not
        asked for; p_unknown, if None, is sure of `known`.
        """
        aleatoric, epistemic = uncertainty(cosines)
        return Decision(
            known=known,
            index=index,
            label=self.classes[index] if known else None,
            p_unknown=1.0 - known if p_unknown is None else p_unknown,
            openness=1.0 - float(cosines[index]),
            openness_first=1.0 - float(cosines.max()),
            score=score,
            scores=None if scores is None else scores.astype(np.float32),
            aleatoric=aleatoric,
            epistemic=epistemic,
            trusted=trusted,
            cached=cached,
            evolved=False,
            sequence=sequence,
        )

    def stats(self) -> dict[str, Any]:
        """Numbers for monitoring, JSON-ready."""
        return {"method": self.name, "classes": len(self.classes), "frozen": self.frozen, "sequence": self.sequence}

    # What a user calls.

    @property
    def sequence(self) -> int:
        """How many samples were observed."""
        return int(self._memory.sequence)

    @property
    def dimension(self) -> int:
        """Length of a feature."""
        return len(self._feature)

    @property
    def score_name(self) -> str:
        """What `Decision.score` is, in words."""
        return self.score_names[getattr(self.config, "score", "")]

    def probabilities(self, scores: NDArray[np.floating]) -> NDArray[np.float64]:
        """(N, K) class probabilities for the `scores` of decisions: their softmax at the method's temperature."""
        return softmax_rows(np.asarray(scores, dtype=np.float64) / getattr(self.config, "temperature", 1.0))

    @property
    def latest(self) -> Feature:
        """The unit feature (d,) of the last `observe` or `peek`; good until the next call."""
        return self._feature

    def entry_cosines(self) -> NDArray[np.float64] | None:
        """Cosines (K,) of that feature with the entry prototypes, where they are at hand; good until the next call."""
        return None

    def observe(self, feature: NDArray[np.floating]) -> Decision:
        """Decide on one feature (d,) and learn from it."""
        if not self._busy.acquire(False):
            raise UsageError(_IN_USE)
        try:
            if not self._whole:
                raise UsageError(_TORN)
            return self._observe(self._checked(feature), True)
        finally:
            self._busy.release()

    def peek(self, feature: NDArray[np.floating]) -> Decision:
        """What `observe` would return next; nothing changes."""
        with self._alone():
            decision = self._glance(self._checked(feature), True)
            return _nothing_kept(decision) if self.frozen else decision

    def observe_many(
        self, features: NDArray[np.floating], scores: bool = False, *, two_pass: bool = False
    ) -> Decisions:
        """Observe (N, d) features in order, exactly as one by one. On bad input, nothing is observed.

        Args:
            features: the features.
            scores: whether the decisions contain `scores`.
            two_pass: learn from all features first, then decide on each of them with what was learned. The decisions
                then do not depend on the order of the features.
        """
        with self._alone():
            rows = self._checked_many(features)
            if two_pass:
                return Decisions(self._in_two_passes(rows, scores), self.classes)
            return self._observe_rows(rows, scores)

    def freeze(self) -> None:
        """Stop learning: from now on each sample is decided as if it came next, and nothing of it is kept."""
        with self._alone():
            self.frozen = True

    def unfreeze(self) -> None:
        """Learn again, from where `freeze` stopped."""
        with self._alone():
            self.frozen = False

    def reset(self) -> None:
        """Become a new engine with the current class names and their entry prototypes."""
        with self._alone(torn=True):
            self._whole = True
            self.frozen = False
            self._memory = self._new_memory(self._entry(self._memory))

    def add_class(self, name: str, prototype: NDArray[np.floating]) -> None:
        """Append a class; everything learned so far stays."""
        with self._alone():
            if not is_plain(prototype) or prototype.shape != (self.dimension,):
                raise InputError(
                    f"a prototype must be a numpy array of shape ({self.dimension},); given: {described(prototype)}"
                )
            row = unit_rows(prototype[None], "the prototype")
            self._edit(class_names((*self.classes, name), len(self.classes) + 1), np.arange(len(self.classes)), row)

    def remove_class(self, name: str) -> None:
        """Take a class away; the ones behind it close the gap."""
        with self._alone():
            if name not in self.classes:
                some = ", ".join(self.classes[:10]) + (", ..." if len(self.classes) > 10 else "")
                raise InputError(f"there is no class {name!r}: the classes are {some}")
            if len(self.classes) == 1:
                raise UsageError(f"{name!r} is the last class: an engine needs at least one")
            gone = self.classes.index(name)
            kept = np.delete(np.arange(len(self.classes)), gone)
            nothing = np.empty((0, self.dimension), dtype=np.float32)
            self._edit(self.classes[:gone] + self.classes[gone + 1 :], kept, nothing)

    def snapshot(self) -> bytes:
        """The whole state; `restore` continues from it to the bit."""
        with self._alone():
            counters, arrays = self._memory.export()
            return state.pack(self._header(counters), arrays)

    def difference(self) -> bytes:
        """The state without the entry prototypes, which are named by their fingerprint and given to `restore`."""
        with self._alone():
            counters, arrays = self._memory.export()
            del arrays["entry"]
            return state.pack(self._header(counters, self._prototypes.fingerprint), arrays)

    def _header(self, counters: Counters, prototypes: str | None = None) -> state.Header:
        return state.Header(
            package=__version__,
            backend=BACKEND,
            method=self.name,
            config=self.config.model_dump(),
            classes=list(self.classes),
            encoder=self.encoder,
            prototypes=prototypes,
            frozen=self.frozen,
            counters=counters,
        )

    @classmethod
    def restore(
        cls,
        data: bytes,
        encoder: str | None = None,
        prototypes: NDArray[np.floating] | Prototypes | None = None,
        *,
        trusted: bool = False,
    ) -> Self:
        """Return the engine that `snapshot` or `difference` was called on.

        Args:
            data: the state.
            encoder: fingerprint of the features to come, if known.
            prototypes: those the engine started from, which it will share. A difference needs them.
            trusted: skip the slow checks. Use it only for bytes that your program wrote and nobody else can change.
        """
        return cls._from_parts(*state.unpack(data, trusted), encoder, prototypes, trusted)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a snapshot in one step: a crash leaves the old file whole."""
        state.write(path, self.snapshot())

    @classmethod
    def load(
        cls,
        path: str | os.PathLike[str],
        encoder: str | None = None,
        prototypes: NDArray[np.floating] | Prototypes | None = None,
    ) -> Self:
        """The engine a file was saved from; see `restore`."""
        return cls.restore(state.read(path), encoder, prototypes)

    @classmethod
    def from_options(
        cls,
        prototypes: NDArray[np.floating] | Prototypes,
        classes: Sequence[str] | None = None,
        encoder: str | None = None,
        **options: Any,
    ) -> Self:
        """An engine from loose options, as `methods.create` passes them."""
        return cls(prototypes, classes, cls.config_type(**options), encoder)

    # Behind the above.

    @classmethod
    def _from_parts(
        cls,
        header: state.Header,
        arrays: state.Arrays,
        encoder: str | None,
        prototypes: NDArray[np.floating] | Prototypes | None = None,
        trusted: bool = False,
    ) -> Self:
        if header.method != cls.name:
            raise StateError(
                f"the state belongs to the method {header.method!r}, not to {cls.name!r}: use methods.restore for any"
            )
        if encoder is not None and header.encoder is not None and encoder != header.encoder:
            raise StateError(
                f"the state was learned on features of encoder {header.encoder!r}, and this is {encoder!r}: features "
                "of different encoders do not compare; restore it beside its own encoder, or start anew"
            )
        try:
            config = cls.config_type(**header.config)
            classes = class_names(header.classes, len(header.classes))
        except (ConfigError, InputError) as problem:
            raise StateError(f"the state's header is not valid: {problem}") from None
        shared = prototypes_of(header, arrays, None if prototypes is None else Prototypes.of(prototypes))
        used = header.encoder or encoder
        engine = cls._rebuilt(config, classes, used, shared, dict(header.counters), arrays, trusted=trusted)
        engine.frozen = header.frozen
        return engine

    @classmethod
    def _rebuilt(
        cls,
        config: BaseModel,
        classes: tuple[str, ...],
        encoder: str | None,
        prototypes: Prototypes,
        counters: Counters,
        arrays: state.Arrays,
        *,
        trusted: bool,
    ) -> Self:
        """Return an engine from what its memory exported."""
        engine = object.__new__(cls)
        engine._prototypes = prototypes
        engine._assume(config, encoder, False)
        engine._resize(classes, prototypes.unit.shape[1])
        load = engine._trusted_memory if trusted else engine._restored_memory
        engine._memory = load(counters, {**arrays, "entry": prototypes.unit})
        return engine

    def _edit(self, classes: tuple[str, ...], kept: NDArray[np.int64], added: Feature) -> None:
        self._memory = self._with_classes(self._memory, kept, added)
        self._prototypes = Prototypes.of_unit(self._entry(self._memory))
        self._resize(classes, self.dimension)

    def _observe(self, feature: Feature, scores: bool) -> Decision:
        if not self.frozen:
            self._whole = False
            decision = self._advance(self._memory, feature, scores)
            self._whole = True
            return decision
        decision = self._glance(feature, scores)
        self._memory.sequence += 1
        return _nothing_kept(decision)

    def _observe_rows(self, rows: Feature, scores: bool) -> Decisions:
        """Observe unit rows (N, d) in order."""
        return Decisions([self._observe(row, scores) for row in rows], self.classes)

    def _in_two_passes(self, rows: Feature, scores: bool) -> list[Decision]:
        """Learn from unit rows (N, d), in an order that depends on their values alone, and then decide on each."""
        first = self.sequence
        shuffled = rows[np.array(sorted(range(len(rows)), key=lambda place: _digest(rows[place])), dtype=np.int64)]
        if not self.frozen:
            self._whole = False
            self._rehearse(shuffled)
            self._whole = True
        self._observe_rows(shuffled, False)
        return [
            replace(_nothing_kept(self._glance(row, scores)), sequence=first + place) for place, row in enumerate(rows)
        ]

    @contextmanager
    def _alone(self, torn: bool = False) -> Iterator[None]:
        """Be the only caller; `torn` says that a memory torn by an interruption will do."""
        if not self._busy.acquire(False):
            raise UsageError(_IN_USE)
        try:
            if not (self._whole or torn):
                raise UsageError(_TORN)
            yield
        finally:
            self._busy.release()

    def _checked(self, feature: Any) -> Feature:
        # What nearly everybody gives, in the layout that needs no copy.
        plain = type(feature) is np.ndarray and feature.dtype is _SINGLE and feature.shape == self._feature.shape
        if plain and feature.flags.carray and to_unit(feature, self._feature):
            return self._feature
        return self._checked_in_words(feature)

    def _checked_in_words(self, feature: Any) -> Feature:
        """The same for any kind of array, with an error that says what was given."""
        if not is_plain(feature) or feature.ndim != 1 or feature.shape[0] != len(self._feature):
            raise InputError(
                f"a feature must be a numpy array of shape ({self.dimension},); given: {described(feature)}"
            )
        working = WORKING_TYPE.get(feature.dtype)
        if working is None:
            raise InputError(f"a feature must be float16, float32 or float64; given: {described(feature)}")
        values: NDArray[np.floating] = contiguous(feature, working)
        if not to_unit(values, self._feature):
            raise InputError(f"a feature must be finite and longer than 1e-6; given: {described_values(feature)}")
        return self._feature

    def _checked_many(self, features: Any) -> Feature:
        if not is_plain(features) or features.ndim != 2 or features.shape[1] != len(self._feature):
            raise InputError(
                f"features must be a numpy array of shape (N, {self.dimension}); given: {described(features)}"
            )
        return unit_rows(features, "features", least=0)


def class_names(classes: Sequence[str] | None, count: int) -> tuple[str, ...]:
    """Unique non-empty names, one per prototype; "0", "1", ... where none are given."""
    if classes is None:
        return tuple(str(k) for k in range(count))
    if isinstance(classes, str) or not isinstance(classes, Sequence):
        raise InputError(f"classes must be a list of names; given: {described(classes)}")
    for name in classes:
        if not isinstance(name, str) or not name:
            raise InputError(f"a class name must be a non-empty string; given: {name!r}")
    if len(classes) != count:
        raise InputError(f"there are {count} prototypes and {len(classes)} class names: give one name for each")
    if len(set(classes)) != count:
        twice, times = Counter(classes).most_common(1)[0]
        raise InputError(f"class names must be unique; {twice!r} stands there {times} times")
    try:
        "".join(classes).encode()
    except UnicodeEncodeError as problem:
        raise InputError(
            f"class names must be text that UTF-8 can encode; given: one with {problem.object[problem.start]!r}"
        ) from None
    return tuple(classes)


def _digest(row: Feature) -> tuple[bytes, bytes]:
    """Return a sort key of a unit row (d,). Sorting by it shuffles rows, whatever order they came in.

    The last bits of a feature depend on the batch it was encoded in, so the hash is of rounded values.
    """
    rounded = np.rint(100.0 * row).astype(np.int8)
    return hashlib.blake2b(rounded.tobytes(), digest_size=16).digest(), row.tobytes()


def _nothing_kept(decision: Decision) -> Decision:
    return replace(decision, cached=False, evolved=False)

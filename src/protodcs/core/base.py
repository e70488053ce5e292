"""FeatureMethod: the contract of all methods that work on features.

A method is a pure state machine. It stores everything it has learned in a memory and implements
`_advance(memory, feature)`. This class builds all public calls on that one function: input checks, freezing, class
edits and snapshots. It must never use a clock, randomness or the network.
"""

import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel

from ..arrays import Feature, Floats
from ..errors import ConfigError, StateVersionError, UsageError
from . import state
from .arena import Arena
from .decision import Decision, Decisions, html_table
from .numerics.softmax import softmax_rows
from .prototypes import Prototypes
from .shuffling import content_order
from .snapshots import checked_settings, header_of
from .state_checks import Counters, prototypes_of
from .validation import check_encoder, check_feature, check_features, check_prototype, class_index, class_names
from .vectors import to_unit
from .vocabulary import Vocabulary, VocabularyLike

_INCONSISTENT = "This engine was interrupted while it learned from a sample. Restore it from a snapshot, or reset it."
_IN_USE = "Another thread is using this engine. Give each stream its own engine, or call it from one thread."
_FLOAT32 = np.dtype(np.float32)


@dataclass(frozen=True, slots=True)
class Capabilities:
    """Properties of a method. The contract checks test those that it claims.

    Attributes:
        batch_invariant: the decisions do not depend on how the stream is split into batches.
        rotation_invariant: rotating features and prototypes together changes no decision.
        editable_classes: classes can be added and removed while the stream runs.
        cost: the main cost of one sample beside its encoder.
    """

    batch_invariant: bool
    rotation_invariant: bool
    editable_classes: bool
    cost: Literal["scoring", "prototypes", "backbone"]


class FeatureMethod(ABC):
    """A method that decides on unit features, one at a time, in order.

    Subclasses implement `_new_memory`, `_restored_memory`, `_advance` and `_initial_prototypes`.
    """

    name: ClassVar[str]
    # Version of what the method learns. A change of its arrays, counters, options or constants raises it, because an
    # older state would be read wrongly, or continue with other decisions.
    version: ClassVar[int] = 1
    capabilities: ClassVar[Capabilities]
    kind: ClassVar[Literal["features"]] = "features"
    config_type: ClassVar[type[BaseModel]]
    # Whether the method compares its classes with the names of a vocabulary.
    uses_vocabulary: ClassVar[bool] = False
    # Describes `Decision.score` for each value of the option `score`; the key is "" if there is no such option.
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
        vocabulary: VocabularyLike | None = None,
    ):
        config = self.config_type() if config is None else config
        if not isinstance(config, self.config_type):
            raise ConfigError(f"config must be a {self.config_type.__name__}; given: {type(config).__name__}")
        if vocabulary is not None and not self.uses_vocabulary:
            raise ConfigError(f"The method {self.name!r} uses no vocabulary. Leave `vocabulary` out.")
        self._prototypes = Prototypes.of(prototypes, vocabulary)
        initial = self._prototypes.unit
        self._prepare(config, encoder)
        self._resize(class_names(classes, len(initial)), initial.shape[1])
        self._memory = self._new_memory(initial)

    def _prepare(self, config: BaseModel, encoder: str | None) -> None:
        check_encoder(encoder)
        self.config, self.encoder = config, encoder
        self._consistent = True
        self.frozen = False
        self._busy = threading.Lock()

    def _resize(self, classes: tuple[str, ...], width: int) -> None:
        """Set the class names, and allocate the working array for features of this length."""
        self.classes = classes
        self._feature = np.empty(width, dtype=np.float32)

    # To be implemented by a method.

    @abstractmethod
    def _new_memory(self, initial: Feature) -> Any:
        """Return an empty memory for the unit prototypes `initial` (K, d). Other engines may share that array.

        A memory has the number of samples, `sequence`, and of those called known, `known`. Its `fork()` returns a copy
        that may be changed, valid until the original changes. Its `export()` returns the numbers and arrays that
        `_restored_memory` takes.
        """

    @abstractmethod
    def _restored_memory(self, counters: Counters, arrays: state.Arrays) -> Any:
        """Return the memory that was exported. Raise StateError for anything that no memory can have exported."""

    def _trusted_memory(self, counters: Counters, arrays: state.Arrays) -> Any:
        """Return the memory that was exported by this program. A method may skip checks that take long."""
        return self._restored_memory(counters, arrays)

    def _arena(self) -> Arena | None:
        """Return the arena with everything that was learned; None if the method stores some of it elsewhere."""
        return None

    @abstractmethod
    def _advance(self, memory: Any, feature: Feature, scores: bool) -> Decision:
        """Decide on a unit feature and learn from it. Change `memory` and nothing else."""

    def _predict(self, feature: Feature, scores: bool) -> Decision:
        """Return what `_advance` would decide on a unit feature. Nothing changes."""
        return self._advance(self._memory.fork(), feature, scores)

    def _warm_up(self, rows: Feature) -> None:  # noqa: B027
        """Learn from unit rows (N, d) without counting them, if the method gains from seeing them twice."""

    def _count_frozen(self, decision: Decision) -> None:
        """Count a sample that a frozen engine decided on. Most methods count as known only what they learned from."""
        self._memory.sequence += 1

    def _recount(self, learned: Decisions, decided: Decisions) -> None:
        """Count the final decisions on samples, in place of those made while the engine learned from them."""
        self._memory.known += int(decided.known.sum()) - int(learned.known.sum())

    @abstractmethod
    def _initial_prototypes(self, memory: Any) -> Feature:
        """Return the prototypes (K, d) that the memory started from."""

    def _with_classes(self, memory: Any, kept: NDArray[np.int64], added: Feature) -> Any:
        """Return a memory with the classes `kept`, followed by the new unit prototypes `added`."""
        raise UsageError(f"The classes of the method {self.name!r} cannot be edited while a stream runs.")

    def stats(self) -> dict[str, Any]:
        """Return numbers for monitoring, JSON-ready."""
        return {"method": self.name, "classes": len(self.classes), "frozen": self.frozen, "sequence": self.sequence}

    def quick_stats(self) -> dict[str, Any]:
        """Return the numbers of `stats` that take microseconds, for checks while a stream runs."""
        return self.stats()

    def _repr_html_(self) -> str:
        """Return the statistics as a table, for notebooks."""
        return html_table(self.stats())

    # Public calls.

    @property
    def sequence(self) -> int:
        """Number of observed samples."""
        return int(self._memory.sequence)

    @property
    def unknown_share(self) -> float | None:
        """Share of unknown samples among those that the engine learned from; None if the method does not count them."""
        return None

    @property
    def dimension(self) -> int:
        """Length of a feature."""
        return len(self._feature)

    @property
    def vocabulary(self) -> Vocabulary | None:
        """Names that the method compares its classes with; None if there are none, or if the method uses none."""
        return self._prototypes.vocabulary if self.uses_vocabulary else None

    @property
    def score_name(self) -> str:
        """Description of `Decision.score`."""
        return self.score_names[getattr(self.config, "score", "")]

    def probabilities(self, scores: NDArray[np.floating]) -> NDArray[np.float64]:
        """Return class probabilities (N, K): the softmax of decision `scores` at the method's temperature."""
        return softmax_rows(np.asarray(scores, dtype=np.float64) / getattr(self.config, "temperature", 1.0))

    @property
    def latest(self) -> Feature:
        """Unit feature (d,) of the last `observe` or `peek`. Valid until the next call."""
        return self._feature

    def initial_cosines(self) -> NDArray[np.float64] | None:
        """Return the cosines (K,) of `latest` with the initial prototypes; None if the method has not computed them."""
        return None

    def observe(self, feature: NDArray[np.floating]) -> Decision:
        """Decide on one feature (d,) and learn from it."""
        if not self._busy.acquire(False):
            raise UsageError(_IN_USE)
        try:
            if not self._consistent:
                raise UsageError(_INCONSISTENT)
            return self._observe(self._checked(feature), True)
        finally:
            self._busy.release()

    def peek(self, feature: NDArray[np.floating]) -> Decision:
        """Return what `observe` would return next. Nothing changes."""
        with self._exclusive():
            decision = self._predict(self._checked(feature), True)
            return decision.without_learning() if self.frozen else decision

    def observe_many(
        self, features: NDArray[np.floating], scores: bool = False, *, two_pass: bool = False
    ) -> Decisions:
        """Observe (N, d) features in order, exactly as one by one. On bad input, nothing is observed.

        Args:
            features: the features.
            scores: whether the decisions contain `scores`.
            two_pass: learn from all features, then decide on each. Their order then has no effect.
        """
        with self._exclusive():
            rows = check_features(features, self.dimension)
            if two_pass:
                return self._in_two_passes(rows, scores)
            return self._observe_rows(rows, scores)

    def observe_unit(self, rows: Feature) -> tuple[Decisions, Floats | None]:
        """Do the same for unit rows (N, d) that `check_features` has returned.

        Returns:
            The decisions, and the cosines (N, K) of the rows with the initial prototypes; None if the method has not
            computed them.
        """
        with self._exclusive():
            return self._observe_compared(rows)

    def freeze(self) -> None:
        """Stop learning. Later samples are decided, but change nothing except the count."""
        with self._exclusive():
            self.frozen = True

    def unfreeze(self) -> None:
        """Continue learning from where `freeze` stopped it."""
        with self._exclusive():
            self.frozen = False

    def reset(self) -> None:
        """Discard everything learned. Class names and initial prototypes stay."""
        with self._exclusive(allow_inconsistent=True):
            self._consistent = True
            self.frozen = False
            self._memory = self._new_memory(self._initial_prototypes(self._memory))

    def add_class(self, name: str, prototype: NDArray[np.floating]) -> None:
        """Append a class. Everything learned so far stays."""
        with self._exclusive():
            row = check_prototype(prototype, self.dimension)
            self._edit(class_names((*self.classes, name), len(self.classes) + 1), np.arange(len(self.classes)), row)

    def remove_class(self, name: str) -> None:
        """Remove a class. The indices of the classes behind it decrease by one."""
        with self._exclusive():
            removed = class_index(name, self.classes)
            if len(self.classes) == 1:
                raise UsageError(f"{name!r} is the last class. An engine needs at least one.")
            kept = np.delete(np.arange(len(self.classes)), removed)
            added = np.empty((0, self.dimension), dtype=np.float32)
            self._edit(tuple(self.classes[i] for i in kept), kept, added)

    def snapshot(self) -> bytes:
        """Return the whole state. An engine restored from it continues bit-exact."""
        with self._exclusive():
            counters, arrays = self._memory.export()
            return state.pack(header_of(self, counters), arrays)

    def difference(self) -> bytes:
        """Return the state without the initial prototypes, but with their fingerprint. Pass them to `restore`.

        No state contains the vocabulary: pass that to `restore` in any case, if there is one.
        """
        with self._exclusive():
            counters, arrays = self._memory.export()
            del arrays["initial_prototypes"]
            return state.pack(header_of(self, counters, self._prototypes.fingerprint), arrays)

    @classmethod
    def restore(
        cls,
        data: bytes,
        encoder: str | None = None,
        prototypes: NDArray[np.floating] | Prototypes | None = None,
        vocabulary: VocabularyLike | None = None,
        *,
        trusted: bool = False,
    ) -> Self:
        """Return the engine that `snapshot` or `difference` was called on.

        Args:
            data: the state.
            encoder: fingerprint of the features to come, if known.
            prototypes: the initial prototypes, which the engine will share. `difference` needs them.
            vocabulary: the vocabulary of the engine, unless it is in `prototypes`. An engine that had none ignores it.
            trusted: skip the slow checks. Use it only for bytes that your program wrote and nobody else can change.
        """
        return cls._from_parts(*state.unpack(data, trusted), encoder, prototypes, vocabulary, trusted)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a snapshot to a file atomically."""
        state.write(path, self.snapshot())

    @classmethod
    def load(
        cls,
        path: str | os.PathLike[str],
        encoder: str | None = None,
        prototypes: NDArray[np.floating] | Prototypes | None = None,
        vocabulary: VocabularyLike | None = None,
    ) -> Self:
        """Return the engine that a file was saved from; see `restore`."""
        return cls.restore(state.read(path), encoder, prototypes, vocabulary)

    @classmethod
    def from_options(
        cls,
        prototypes: NDArray[np.floating] | Prototypes,
        classes: Sequence[str] | None = None,
        encoder: str | None = None,
        vocabulary: VocabularyLike | None = None,
        **options: Any,
    ) -> Self:
        """Return an engine from the options of its config as keyword arguments."""
        return cls(prototypes, classes, cls.config_type(**options), encoder, vocabulary)

    @classmethod
    def check_version(cls, written: int) -> None:
        """Raise StateVersionError if a state with this version of the method cannot be restored."""
        if written != cls.version:
            raise StateVersionError.of(f"The state of the method {cls.name!r}", written, cls.version)

    # Shared implementation.

    @classmethod
    def _from_parts(
        cls,
        header: state.Header,
        arrays: state.Arrays,
        encoder: str | None,
        prototypes: NDArray[np.floating] | Prototypes | None = None,
        vocabulary: VocabularyLike | None = None,
        trusted: bool = False,
    ) -> Self:
        """Return an engine from a header and arrays that were read from a state."""
        config, classes = checked_settings(cls, header, encoder)
        given = None if prototypes is None else Prototypes.of(prototypes)
        shared = prototypes_of(header, arrays, given, vocabulary)
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
        """Return an engine from the counters and arrays that its memory exported."""
        engine = object.__new__(cls)
        engine._prototypes = prototypes
        engine._prepare(config, encoder)
        engine._resize(classes, prototypes.unit.shape[1])
        load = engine._trusted_memory if trusted else engine._restored_memory
        engine._memory = load(counters, {**arrays, "initial_prototypes": prototypes.unit})
        return engine

    def _edit(self, classes: tuple[str, ...], kept: NDArray[np.int64], added: Feature) -> None:
        self._memory = self._with_classes(self._memory, kept, added)
        self._prototypes = Prototypes.of_unit(self._initial_prototypes(self._memory), self._prototypes.vocabulary)
        self._resize(classes, self.dimension)

    def _observe(self, feature: Feature, scores: bool) -> Decision:
        if not self.frozen:
            self._consistent = False
            decision = self._advance(self._memory, feature, scores)
            self._consistent = True
            return decision
        decision = self._predict(feature, scores)
        self._count_frozen(decision)
        return decision.without_learning()

    def _observe_rows(self, rows: Feature, scores: bool) -> Decisions:
        """Observe unit rows (N, d) in order."""
        return Decisions([self._observe(row, scores) for row in rows], self.classes)

    def _observe_compared(self, rows: Feature) -> tuple[Decisions, Floats | None]:
        """Observe unit rows (N, d) in order. Return the decisions and cosines as `observe_unit` does."""
        return self._observe_rows(rows, False), None

    def _in_two_passes(self, rows: Feature, scores: bool) -> Decisions:
        """Learn from unit rows (N, d) in an order that depends only on their values, then decide on each."""
        first = self.sequence
        shuffled = rows[content_order(rows)]
        if not self.frozen:
            self._consistent = False
            self._warm_up(shuffled)
            self._consistent = True
        learned = self._observe_rows(shuffled, False)
        predicted = [self._predict(row, scores).without_learning() for row in rows]
        decided = Decisions([replace(one, sequence=first + i) for i, one in enumerate(predicted)], self.classes)
        if not self.frozen:
            self._recount(learned, decided)
        return decided

    @contextmanager
    def _exclusive(self, allow_inconsistent: bool = False) -> Iterator[None]:
        """Raise UsageError if another call runs, or if an interrupted call left the memory inconsistent."""
        if not self._busy.acquire(False):
            raise UsageError(_IN_USE)
        try:
            if not (self._consistent or allow_inconsistent):
                raise UsageError(_INCONSISTENT)
            yield
        finally:
            self._busy.release()

    def _checked(self, feature: Any) -> Feature:
        # A fast path for the usual input, which needs no copy. It may be read-only.
        if type(feature) is np.ndarray and feature.dtype is _FLOAT32 and feature.shape == self._feature.shape:
            flags = feature.flags
            if flags.c_contiguous and flags.aligned and to_unit(feature, self._feature):
                return self._feature
        check_feature(feature, self._feature)
        return self._feature

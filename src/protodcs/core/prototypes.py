"""The prototypes that engines start from, and all that follows from them alone: once for however many engines.

Engines only read what they find here. What they learn, they keep in arrays of their own.
"""

import threading
from collections.abc import Callable
from typing import Any, Self, TypeVar
from weakref import WeakValueDictionary

import numpy as np
from numpy.typing import NDArray

from ..arrays import Feature
from ..errors import InputError
from .validation import unit_rows
from .vectors import row_fingerprint
from .vocabulary import Reference, Vocabulary, VocabularyLike

T = TypeVar("T")


class Prototypes:
    """Unit prototypes that many engines share.

        shared = Prototypes(prototypes)
        engines = [ProtoDCS(shared) for _ in range(1000)]

    Args:
        prototypes: (K, d), one row per known class; normalised on entry.
        vocabulary: names to compare the classes with, (V, d) or a `Vocabulary`, for methods that use one.

    >>> import numpy as np
    >>> Prototypes(2 * np.eye(3, 8)).fingerprint == Prototypes(np.eye(3, 8)).fingerprint
    True
    """

    def __init__(self, prototypes: NDArray[np.floating], vocabulary: VocabularyLike | None = None):
        self._take(unit_rows(prototypes, "prototypes"), vocabulary)

    @classmethod
    def of(
        cls, prototypes: "NDArray[np.floating] | Prototypes", vocabulary: VocabularyLike | None = None
    ) -> "Prototypes":
        """Return shared prototypes with this vocabulary; without one, those that are shared keep theirs."""
        if not isinstance(prototypes, Prototypes):
            return cls(prototypes, vocabulary)
        return prototypes if vocabulary is None else prototypes.with_vocabulary(vocabulary)

    @classmethod
    def of_unit(cls, rows: Feature, vocabulary: VocabularyLike | None = None) -> Self:
        """Take over rows (K, d) that are known to be of unit length and are not written to any more."""
        shared = object.__new__(cls)
        shared._take(rows, vocabulary)
        return shared

    def _take(self, rows: Feature, vocabulary: VocabularyLike | None) -> None:
        # Kernels are compiled for writeable arrays alone, so this one stays so, though nothing writes to it.
        self.unit = rows
        self.vocabulary = None if vocabulary is None else _fitting(Vocabulary.of(vocabulary), rows)
        self._reference: Reference | None = None
        self._followed: dict[Callable[[Feature], Any], Any] = {}
        # The same prototypes with other vocabularies, by fingerprint, as long as engines use them.
        self._variants: WeakValueDictionary[str | None, Prototypes] = WeakValueDictionary()
        self._busy = threading.RLock()

    def with_vocabulary(self, vocabulary: VocabularyLike | None) -> "Prototypes":
        """Return the same prototypes with another vocabulary, or with none. They share all arrays."""
        given = None if vocabulary is None else _fitting(Vocabulary.of(vocabulary), self.unit)
        if _name(given) == _name(self.vocabulary):
            return self
        with self._busy:
            self._variants.setdefault(_name(self.vocabulary), self)
            found = self._variants.get(_name(given))
            if found is None:
                found = self._variants[_name(given)] = Prototypes.of_unit(self.unit, given)
                found._followed, found._variants, found._busy = self._followed, self._variants, self._busy
            return found

    def __len__(self) -> int:
        return len(self.unit)

    @property
    def rows(self) -> Feature:
        """The unit rows (K, d) float32, as a view that cannot be written to."""
        view = self.unit.view()
        view.flags.writeable = False
        return view

    @property
    def fingerprint(self) -> str:
        """SHA-256 over shape and rows: prototypes with the same one are the same to the bit."""
        return self.follow(row_fingerprint)

    @property
    def reference(self) -> Reference | None:
        """Mean and spread of the vocabulary, without the names nearest to the classes; None without a vocabulary."""
        with self._busy:
            if self._reference is None and self.vocabulary is not None:
                self._reference = self.vocabulary.reference(self.unit)
            return self._reference

    def follow(self, function: Callable[[Feature], T]) -> T:
        """What `function` makes of the unit rows; computed once, shared, and never to be written to."""
        with self._busy:
            if function not in self._followed:
                self._followed[function] = function(self.unit)
            found: T = self._followed[function]
            return found

    def __repr__(self) -> str:
        return f"Prototypes({len(self.unit)} of {self.unit.shape[1]} dimensions, {self.fingerprint[:12]})"


def _name(vocabulary: Vocabulary | None) -> str | None:
    return None if vocabulary is None else vocabulary.fingerprint


def _fitting(vocabulary: Vocabulary, rows: Feature) -> Vocabulary:
    """Return the vocabulary. Raise InputError if its features are not as long as the prototypes."""
    if vocabulary.dimension != rows.shape[1]:
        raise InputError(
            f"the vocabulary has features of dimension {vocabulary.dimension}, and the prototypes of dimension "
            f"{rows.shape[1]}: compute both with the same encoder"
        )
    return vocabulary

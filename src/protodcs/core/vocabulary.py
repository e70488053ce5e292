"""A vocabulary: the text features of general names that a user did not list as classes.

A method can compare its best class with these names. It needs only their mean and their spread, so a `Reference` has
both. Engines share a vocabulary through their `Prototypes`. A state names it by its fingerprint and never stores it.
"""

import math
import re
import threading
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..arrays import Feature, Floats
from ..errors import InputError
from .validation import unit_rows
from .vectors import row_fingerprint

# Fewer names say too little about names in general.
LEAST_NAMES = 16
# Share of the names that a reference leaves out: those nearest to the classes, because they may mean the same.
LEFT_OUT_SHARE = 0.25
# A name with at least this cosine is a class.
_SAME = 1.0 - 1e-5
# Smallest number of names that a reference keeps.
_LEAST_KEPT = LEAST_NAMES - int(LEFT_OUT_SHARE * LEAST_NAMES)
# Smallest trace of a covariance. Names that are all the same would have no spread.
_LEAST_TRACE = 1e-6
_FINGERPRINT = re.compile("[0-9a-f]{64}")
# Number of names that are compared with the classes at once, to bound the memory for it.
_AT_ONCE = 512


class Reference(NamedTuple):
    """What a vocabulary says about names in general, given the classes of an engine.

    Attributes:
        mean: (d,) float64, the mean of the names. It cannot be written to.
        deviation: standard deviation of a name's cosine with a random direction.
        noise: about how many deviations the largest of these cosines lies above their mean.
    """

    mean: Floats
    deviation: float
    noise: float

    @classmethod
    def of(cls, names: Feature) -> "Reference":
        """Return mean and spread of unit rows (n, d)."""
        mean = np.add.reduce(names, axis=0, dtype=np.float64) / len(names)
        mean.flags.writeable = False
        # The rows have unit length, so the trace of their covariance follows from their mean.
        trace = max(1.0 - math.fsum(mean * mean), _LEAST_TRACE)
        return cls(mean, math.sqrt(trace / names.shape[1]), math.sqrt(2.0 * math.log(len(names))))


class Vocabulary:
    """Unit text features of general names. Any number of engines can share it, and nothing changes it.

        vocabulary = Vocabulary(encoder.prototypes(names))
        engine = StreamDCS(prototypes, vocabulary=vocabulary)

    Args:
        features: (V, d), one row per name, at least 16; normalised on entry.
        fingerprint: 64 hexadecimal digits that identify it; None for the SHA-256 over shape and rows. Encoders give a
            hash of the names instead, because CPUs and GPUs round features differently.

    >>> import numpy as np
    >>> Vocabulary(np.eye(20, 32)).reference(np.eye(3, 32, dtype=np.float32)).mean.shape
    (32,)
    """

    def __init__(self, features: NDArray[np.floating], fingerprint: str | None = None):
        if fingerprint is not None and not _FINGERPRINT.fullmatch(fingerprint):
            raise InputError(f"a fingerprint must be 64 hexadecimal digits; given: {fingerprint!r}")
        self._take(unit_rows(features, "the vocabulary", LEAST_NAMES), fingerprint)

    @classmethod
    def of(cls, vocabulary: "VocabularyLike") -> "Vocabulary":
        """Return the vocabulary itself, or make one from its features."""
        return vocabulary if isinstance(vocabulary, Vocabulary) else cls(vocabulary)

    @classmethod
    def of_unit(cls, rows: Feature, fingerprint: str | None = None) -> "Vocabulary":
        """Return a vocabulary of rows (V, d) that have unit length and that nobody writes to any more."""
        vocabulary = object.__new__(cls)
        vocabulary._take(rows, fingerprint)
        return vocabulary

    def _take(self, rows: Feature, fingerprint: str | None) -> None:
        self._rows = rows.view()
        self._rows.flags.writeable = False
        self._fingerprint = fingerprint
        self._busy = threading.Lock()

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def rows(self) -> Feature:
        """The unit rows (V, d) float32. They cannot be written to."""
        return self._rows

    @property
    def dimension(self) -> int:
        """Length of a row."""
        return self._rows.shape[1]

    @property
    def fingerprint(self) -> str:
        """What identifies the vocabulary: states have it in their headers."""
        with self._busy:
            if self._fingerprint is None:
                self._fingerprint = row_fingerprint(self._rows)
            return self._fingerprint

    def reference(self, prototypes: Feature) -> Reference:
        """Return mean and spread of the names, without the quarter that is nearest to the `prototypes` (K, d).

        If more than a quarter of the names are classes themselves, it leaves all of these out, but keeps twelve names.
        """
        return Reference.of(self._rows[self._far_from(prototypes)])

    def _far_from(self, prototypes: Feature) -> NDArray[np.int64]:
        """Return the names to keep, in order."""
        # In float64, so that the order of two names does not depend on how a CPU sums.
        classes = prototypes.astype(np.float64).T
        nearest = np.empty(len(self))
        for first in range(0, len(self), _AT_ONCE):
            rows = self._rows[first : first + _AT_ONCE].astype(np.float64)
            nearest[first : first + _AT_ONCE] = (rows @ classes).max(axis=1)
        left_out = max(int(LEFT_OUT_SHARE * len(self)), int((nearest >= _SAME).sum()))
        count = max(len(self) - left_out, _LEAST_KEPT)
        return np.sort(np.argsort(nearest, kind="stable")[:count])

    def __repr__(self) -> str:
        return f"Vocabulary({len(self)} of {self.dimension} dimensions, {self.fingerprint[:12]})"


# What functions take: the features (V, d), or a vocabulary that engines share.
VocabularyLike = NDArray[np.floating] | Vocabulary

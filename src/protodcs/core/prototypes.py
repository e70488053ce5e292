"""The prototypes that engines start from, and all that follows from them alone: once for however many engines.

Engines only read what they find here. What they learn, they keep in arrays of their own.
"""

import hashlib
import threading
from collections.abc import Callable
from typing import Any, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from ..arrays import Feature
from .validation import unit_rows

T = TypeVar("T")


class Prototypes:
    """Unit prototypes that many engines share.

        shared = Prototypes(prototypes)
        engines = [ProtoDCS(shared) for _ in range(1000)]

    Args:
        prototypes: (K, d), one row per known class; normalised on entry.

    >>> import numpy as np
    >>> Prototypes(2 * np.eye(3, 8)).fingerprint == Prototypes(np.eye(3, 8)).fingerprint
    True
    """

    def __init__(self, prototypes: NDArray[np.floating]):
        self._take(unit_rows(prototypes, "prototypes"))

    @classmethod
    def of(cls, prototypes: "NDArray[np.floating] | Prototypes") -> "Prototypes":
        """The prototypes themselves where they are shared already."""
        return prototypes if isinstance(prototypes, Prototypes) else cls(prototypes)

    @classmethod
    def of_unit(cls, rows: Feature) -> Self:
        """Take over rows (K, d) that are known to be of unit length and are not written to any more."""
        shared = object.__new__(cls)
        shared._take(rows)
        return shared

    def _take(self, rows: Feature) -> None:
        # Kernels are compiled for writeable arrays alone, so this one stays so, though nothing writes to it.
        self.unit = rows
        self._followed: dict[Callable[[Feature], Any], Any] = {}
        self._busy = threading.RLock()

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
        return self.follow(_fingerprint)

    def follow(self, function: Callable[[Feature], T]) -> T:
        """What `function` makes of the unit rows; computed once, shared, and never to be written to."""
        with self._busy:
            if function not in self._followed:
                self._followed[function] = function(self.unit)
            found: T = self._followed[function]
            return found

    def __repr__(self) -> str:
        return f"Prototypes({len(self.unit)} of {self.unit.shape[1]} dimensions, {self.fingerprint[:12]})"


def _fingerprint(rows: Feature) -> str:
    digest = hashlib.sha256(f"{rows.shape[0]} x {rows.shape[1]} float32 ".encode())
    digest.update(rows.astype("<f4", copy=False).tobytes())
    return digest.hexdigest()

"""The types of the compiled module."""

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Row = NDArray[np.float32]
Vector = NDArray[np.float64]


class Native(Protocol):
    """The compiled module, the same for every instruction set."""

    def supports(self, instructions: str) -> bool:
        """Return whether the CPU has an instruction set."""

    def to_unit(self, values: NDArray[np.floating], out: Row) -> bool:
        """Compute `vectors.to_unit`."""

    def cosines(self, prototypes: Row, inverse_norms: Vector, feature: Row, out: Vector) -> int:
        """Compute `vectors.cosines`."""

    def invert_norms(self, rows: Row, out: Vector) -> None:
        """Compute `vectors.invert_norms`."""

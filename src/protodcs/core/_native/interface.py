"""The types of the compiled module."""

from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

Row = NDArray[np.float32]
Vector = NDArray[np.float64]


class ProtoDCSStep(Protocol):
    """One step of ProtoDCS over the arrays of a state; see `protodcs.pxi`.

    Attributes:
        cosines, after, slopes, affinity, scores: (K,) results of the latest step.
    """

    cosines: Vector
    after: Vector
    slopes: Vector
    affinity: Vector
    scores: Vector

    def run(self, feature: Row, pushed: int, offered: bool, follows: bool, judged: int) -> tuple[Any, ...]:
        """Check a unit feature, offer it to its queue, take its step, predict and verify."""

    def finish(self, feature: Row, trusted: bool, judged: int) -> tuple[Any, ...]:
        """Take the step of a feature whose first check was made, predict and verify."""


class NativeStep(Protocol):
    """The compiled step of one StreamDCS engine."""

    def step(self, feature: Row, learns: bool) -> tuple[bool, int, float, float, float, float, float, str | None]:
        """Compute `StreamState.step`. Return the fields of `Outcome`."""

    def run(self, features: Row, learns: bool, columns: tuple[NDArray[Any], ...], scores: Row | None) -> None:
        """Step through features (N, d), and write the results to columns: see `streamdcs.pxi`."""

    def calibrate(self, feature: Row) -> None:
        """Compute `StreamState.calibrate`."""

    def correct_bias(self) -> None:
        """Compute `ClassBias.correct`, if there is a class bias."""


class Native(Protocol):
    """The compiled module, the same for every instruction set."""

    def ProtoDCSStep(self, state: object, work: NDArray[np.float64]) -> ProtoDCSStep:  # noqa: N802 - it is a class
        """Return the step over the arrays of a `ProtoDCSState`."""

    def supports(self, instructions: str) -> bool:
        """Return whether the CPU has an instruction set."""

    def to_unit(self, values: NDArray[np.floating], out: Row) -> bool:
        """Compute `vectors.to_unit`."""

    def cosines(self, prototypes: Row, inverse_norms: Vector, feature: Row, out: Vector) -> int:
        """Compute `vectors.cosines`."""

    def invert_norms(self, rows: Row, out: Vector) -> None:
        """Compute `vectors.invert_norms`."""

    def StreamStep(  # noqa: N802 - it is a class
        self,
        prototypes: Row,
        inverse_norms: Vector,
        likeness: Vector | None,
        arena: Mapping[str, NDArray[Any]],
        work: tuple[Vector, Vector, Vector],
        config: Any,
    ) -> NativeStep:
        """Return the step of an engine over the arrays of its state."""

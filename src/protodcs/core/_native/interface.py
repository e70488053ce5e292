"""The types of the compiled module."""

from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ...arrays import Feature, Features, Floats, Singles


class ProtoDCSStep(Protocol):
    """One step of ProtoDCS over the arrays of a state; see `protodcs.pxi`.

    Attributes:
        cosines, after, slopes, affinity, scores: (K,) results of the latest step.
    """

    cosines: Floats
    after: Floats
    slopes: Floats
    affinity: Floats
    scores: Floats

    def run(self, feature: Feature, pushed: int, offered: bool, follows: bool, judged: int) -> tuple[Any, ...]:
        """Check a unit feature, offer it to its queue, take its step, predict and verify."""

    def finish(self, feature: Feature, trusted: bool, judged: int) -> tuple[Any, ...]:
        """Take the step of a feature whose first check was made, predict and verify."""


class NativeStep(Protocol):
    """The compiled step of one StreamDCS engine."""

    def step(self, feature: Feature, learns: bool) -> tuple[bool, int, float, float, float, float, float, str | None]:
        """Compute `StreamState.step`. Return the fields of `StepResult`."""

    def run(
        self,
        features: Feature,
        learns: bool,
        columns: tuple[NDArray[Any], ...],
        scores: Feature | None,
        cosines: Floats | None,
    ) -> None:
        """Step through features (N, d), and write the results to columns: see `streamdcs.pxi`."""

    def calibrate(self, feature: Feature) -> None:
        """Compute `StreamState.calibrate`."""

    def refit_now(self) -> int:
        """Compute `Verification.refit`. Return 1 if memory is missing."""

    def correct_bias(self) -> None:
        """Compute `ClassBias.correct`, if there is a class bias."""


class Native(Protocol):
    """The compiled module, the same for every instruction set."""

    def ProtoDCSStep(self, state: object, work: NDArray[np.float64]) -> ProtoDCSStep:  # noqa: N802 - it is a class
        """Return the step over the arrays of a `ProtoDCSState`."""

    def supports(self, instructions: str) -> bool:
        """Return whether the CPU has an instruction set."""

    def to_unit(self, values: NDArray[np.floating], out: Feature) -> bool:
        """Compute `vectors.to_unit`."""

    def to_unit_rows(self, rows: Feature, out: Feature) -> int:
        """Compute `vectors.to_unit_rows`."""

    def move_towards(self, mean: Feature, rows: Features, rates: Singles) -> None:
        """Compute `vectors.move_towards`."""

    def cosines(self, prototypes: Feature, inverse_norms: Floats, feature: Feature, out: Floats) -> int:
        """Compute `vectors.cosines`."""

    def invert_norms(self, rows: Feature, out: Floats) -> None:
        """Compute `vectors.invert_norms`."""

    def StreamStep(  # noqa: N802 - it is a class
        self,
        prototypes: Feature,
        inverse_norms: Floats,
        likeness: Floats | None,
        centring: Any,
        arena: Mapping[str, NDArray[Any]],
        work: tuple[Floats, Floats, Floats, Floats],
        config: Any,
    ) -> NativeStep:
        """Return the step of an engine over the arrays of its state."""

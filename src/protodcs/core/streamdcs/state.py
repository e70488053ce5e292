"""Everything that a StreamDCS engine has learned, with export and checked restore."""

from typing import Any, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from ...arrays import Feature
from ...errors import StateError
from .._native import NativeStep, native
from ..arena import Arena, Layout
from ..numerics.evidence import uncertainty
from ..numerics.softmax import confidence
from ..prototypes import Prototypes
from ..state import Arrays
from ..state_checks import Counters, decided
from ..vectors import cosines, inverse_norms
from . import class_bias, verification
from .class_bias import ClassBias, likeness
from .config import StreamDCSConfig
from .verification import Verification

# Counters of the engine itself. `unknown` and `skipped` follow from the others and are checked against them.
_COUNTERS = frozenset({"sequence", "learned", "known", "unknown", "skipped"})
_BIAS_ARRAYS = frozenset({"bias_rows", "bias_vectors", "bias_sums"})
# Places in `samples`.
SEQUENCE, LEARNED, KNOWN, SAMPLES = range(4)


class Outcome(NamedTuple):
    """The result of a step: `best` is the index of the best class, `Decision` describes the other fields."""

    known: bool
    best: int
    p_unknown: float
    openness: float
    score: float
    aleatoric: float
    epistemic: float
    reason: str | None


def layout(classes: int, dimension: int, config: StreamDCSConfig) -> Layout:
    """Return the arrays of a state."""
    bias = class_bias.layout(classes) if config.has_class_bias(classes) else {}
    return {"samples": (np.int64, (SAMPLES,)), **bias, **verification.layout(classes, dimension, config)}


class StreamState:
    """The state of one engine with K classes of dimension d.

    Attributes:
        prototypes: (K, d) float32, the text prototypes. They never change.
        inverse_norms: (K,) float64, 1 / norm of each prototype.
        arena: everything that was learned.
        verification: the part behind the decision between known and unknown.
        class_bias: the correction of the logits; None if the settings or the number of classes rule it out.
        samples: (3,) int64, number of samples observed, learned from and called known.
        cosines, logits: (K,) float64, of the latest sample.
        native: the compiled step over the same arrays; None if numpy computes.
    """

    def __init__(self, prototypes: Prototypes, config: StreamDCSConfig, arena: Arena | None = None):
        rows = prototypes.unit
        self.config = config
        self.shared = prototypes
        self.prototypes = rows
        self.inverse_norms = prototypes.follow(inverse_norms)
        self.arena = Arena(layout(len(rows), rows.shape[1], config)) if arena is None else arena
        self.verification = Verification(self.arena, config)
        self.class_bias: ClassBias | None = None
        if config.has_class_bias(len(rows)):
            self.class_bias = ClassBias(self.arena, prototypes.follow(likeness), config.temperature)
        self.samples = self.arena["samples"]
        self.cosines, self.logits = np.empty((2, len(rows)))
        self.native: NativeStep | None = None
        if native is not None:
            shared = None if self.class_bias is None else self.class_bias.likeness
            work = (self.cosines, self.logits, np.empty(rows.shape[1]))
            self.native = native.StreamStep(rows, self.inverse_norms, shared, self.arena, work, config)

    @property
    def sequence(self) -> int:
        """Number of samples observed."""
        return int(self.samples[SEQUENCE])

    @sequence.setter
    def sequence(self, value: int) -> None:
        self.samples[SEQUENCE] = value

    def step(self, feature: Feature, learns: bool) -> Outcome:
        """Decide on a sample, and learn from it if it `learns`."""
        if self.native is not None:
            return Outcome(*self.native.step(feature, learns))
        return self.reference_step(feature, learns)

    def reference_step(self, feature: Feature, learns: bool) -> Outcome:
        """Compute `step` in numpy."""
        nearest = cosines(self.prototypes, self.inverse_norms, feature, self.cosines)
        best = self._predict()
        signals = self.verification.signals(feature, self.cosines)
        verdict = self.verification.decide(signals)
        if learns:
            if self.class_bias is not None and self.class_bias.learns_from(verdict.p_unknown):
                self.class_bias.learn(self.cosines, best, confidence(self.logits, best, 1.0))
            self.verification.learn(feature, self.cosines, signals)
            self.samples += (1, 1, verdict.known)
        openness = 1.0 - float(self.cosines[nearest])
        spread = uncertainty(self.cosines)
        return Outcome(verdict.known, best, verdict.p_unknown, openness, verdict.score, *spread, verdict.reason)

    def _predict(self) -> int:
        """Return the class with the largest logit, class bias included."""
        np.divide(self.cosines, self.config.temperature, out=self.logits)
        if self.class_bias is not None:
            self.logits += self.class_bias.logits
        return int(self.logits.argmax())

    def calibrate(self, feature: Feature) -> None:
        """Learn from a sample without a decision. It is not counted, and teaches no class bias."""
        if self.native is not None:
            self.native.calibrate(feature)
            return
        cosines(self.prototypes, self.inverse_norms, feature, self.cosines)
        self.verification.learn(feature, self.cosines, self.verification.signals(feature, self.cosines))

    def fork(self) -> Self:
        """Return a copy that can change freely."""
        return type(self)(self.shared, self.config, self.arena.copy())

    def with_classes(self, kept: NDArray[np.int64], added: Feature) -> "StreamState":
        """Return a state that keeps the classes `kept`, followed by the new unit prototypes `added`."""
        rows = np.concatenate([self.prototypes[kept], added])
        edited = StreamState(Prototypes.of_unit(rows), self.config)
        edited.verification.take_classes(self.verification, kept)
        if edited.class_bias is not None and self.class_bias is not None:
            edited.class_bias.take_classes(self.class_bias, kept)
            edited._correct(edited.class_bias)
        edited.samples[:] = self.samples
        return edited

    def _correct(self, bias: ClassBias) -> None:
        """Compute the class bias to the bits that a step would give it."""
        if self.native is None:
            bias.correct()
        else:
            self.native.correct_bias()

    def stats(self) -> dict[str, Any]:
        """Return numbers for monitoring, JSON-ready."""
        _, learned, known = self.samples.tolist()
        stats = {"learned": learned, "known": known, "unknown": learned - known, **self.verification.stats()}
        if self.class_bias is not None:
            largest = float(np.abs(self.class_bias.logits).max())
            stats |= {"class_bias_slope": self.class_bias.beta, "class_bias_max": largest}
        return stats

    # Export and restore.

    def counters(self) -> Counters:
        """Return the numbers of a state beside its arrays."""
        sequence, learned, known = self.samples.tolist()
        counters: Counters = {
            "sequence": sequence,
            "learned": learned,
            "known": known,
            "unknown": learned - known,
            "skipped": sequence - learned,
        }
        return counters | self.verification.counters()

    def export(self) -> tuple[Counters, Arrays]:
        """Return numbers and arrays from which `restored` rebuilds the same state to the bit."""
        arrays: Arrays = {"initial_prototypes": self.prototypes, **self.verification.export()}
        if self.class_bias is not None:
            arrays |= {name: self.arena[name] for name in _BIAS_ARRAYS}
        return self.counters(), arrays

    @classmethod
    def restored(
        cls, prototypes: Prototypes, config: StreamDCSConfig, counters: Counters, arrays: Arrays, trusted: bool
    ) -> "StreamState":
        """Rebuild an exported state. Raise StateError for anything that `export` cannot have written.

        Rebuilding the sums of the class bias takes longest; they are not checked if the state is `trusted`.
        """
        own = {name: value for name, value in counters.items() if name in _COUNTERS}
        if set(own) != _COUNTERS:
            raise StateError(f"The state has the counters {sorted(counters)[:20]}; it must have {sorted(_COUNTERS)}.")
        of_bias = {name: array for name, array in arrays.items() if name.startswith("bias_")}
        wanted = _BIAS_ARRAYS if config.has_class_bias(len(prototypes)) else frozenset[str]()
        if set(of_bias) != wanted:
            raise StateError(
                f"The state has the class bias {sorted(of_bias)[:10]}; with its settings it must have {sorted(wanted)}."
            )
        others = {name: array for name, array in arrays.items() if name != "initial_prototypes" and name not in of_bias}
        rest = {name: value for name, value in counters.items() if name not in _COUNTERS}
        try:
            restored = cls(prototypes, config)
            restored.verification.restore(rest, others)
            if restored.class_bias is not None:
                restored.class_bias.restore(of_bias, trusted)
                restored._correct(restored.class_bias)
        except MemoryError:
            raise StateError("The state needs more memory than this machine has.") from None
        restored.samples[:] = decided(own)
        if restored.verification.seen < restored.samples[LEARNED]:
            raise StateError("The state's verification has seen fewer samples than the engine has learned from.")
        return restored

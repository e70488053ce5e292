"""Everything that a StreamDCS engine has learned, with export and checked restore."""

from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from ...errors import StateError
from ..base import Counters, Feature, decided
from ..prototypes import Prototypes
from ..state import Arrays
from ..vectors import inverse_norms
from .class_bias import ClassBias, likeness
from .config import StreamDCSConfig
from .verification import Verification

# Prefix of the class bias's arrays in a state file.
_BIAS = "bias_"
# Counters of the engine itself. `unknown` and `skipped` follow from the others and are checked against them.
_COUNTERS = frozenset({"sequence", "learned", "known", "unknown", "skipped"})


class StreamState:
    """The state of one engine with K classes of dimension d.

    Attributes:
        prototypes: (K, d) float32, the text prototypes. They never change.
        inverse_norms: (K,) float64, 1 / norm of each prototype.
        verification: everything behind the decision between known and unknown.
        class_bias: the correction of the logits; None if the settings or the number of classes rule it out.
        sequence, learned, known: number of samples observed, learned from and called known.
    """

    def __init__(
        self,
        prototypes: Prototypes,
        config: StreamDCSConfig,
        verification: Verification | None = None,
        class_bias: ClassBias | None = None,
    ):
        rows = prototypes.unit
        self.config = config
        self.prototypes = rows
        self.inverse_norms = prototypes.follow(inverse_norms)
        if verification is None:
            verification = Verification(len(rows), rows.shape[1], config)
        if class_bias is None and config.has_class_bias(len(rows)):
            class_bias = ClassBias(rows, config.temperature, prototypes.follow(likeness))
        self.verification = verification
        self.class_bias = class_bias
        self.sequence = 0
        self.learned = 0
        self.known = 0

    def fork(self) -> Self:
        """Return a copy that can change freely. It is valid until the original changes."""
        copied = object.__new__(type(self))
        vars(copied).update(vars(self))
        copied.verification = self.verification.fork()
        copied.class_bias = None if self.class_bias is None else self.class_bias.fork()
        return copied

    def with_classes(self, kept: NDArray[np.int64], added: Feature) -> "StreamState":
        """Return a state that keeps the classes `kept`, followed by the new unit prototypes `added`."""
        rows = np.concatenate([self.prototypes[kept], added])
        class_bias = None
        if self.class_bias is not None and self.config.has_class_bias(len(rows)):
            class_bias = self.class_bias.with_classes(rows, kept)
        verification = self.verification.with_classes(len(rows), kept)
        edited = StreamState(Prototypes.of_unit(rows), self.config, verification, class_bias)
        edited.sequence, edited.learned, edited.known = self.sequence, self.learned, self.known
        return edited

    def stats(self) -> dict[str, Any]:
        """Return numbers for monitoring, JSON-ready."""
        stats = {
            "learned": self.learned,
            "known": self.known,
            "unknown": self.learned - self.known,
            **self.verification.stats(),
        }
        if self.class_bias is not None:
            largest = float(np.abs(self.class_bias.logits).max())
            stats |= {"class_bias_slope": self.class_bias.beta, "class_bias_max": largest}
        return stats

    # Export and restore.

    def counters(self) -> Counters:
        """Return the numbers of a state beside its arrays."""
        counters: Counters = {
            "sequence": self.sequence,
            "learned": self.learned,
            "known": self.known,
            "unknown": self.learned - self.known,
            "skipped": self.sequence - self.learned,
        }
        return counters | self.verification.counters()

    def export(self) -> tuple[Counters, Arrays]:
        """Return numbers and arrays from which `restored` rebuilds the same state to the bit."""
        arrays: Arrays = {"entry": self.prototypes, **self.verification.export()}
        if self.class_bias is not None:
            arrays |= {_BIAS + name: array for name, array in self.class_bias.export().items()}
        return self.counters(), arrays

    @classmethod
    def restored(
        cls, prototypes: Prototypes, config: StreamDCSConfig, counters: Counters, arrays: Arrays
    ) -> "StreamState":
        """Rebuild an exported state. Raise StateError for anything that `export` cannot have written."""
        own = {name: value for name, value in counters.items() if name in _COUNTERS}
        if set(own) != _COUNTERS:
            raise StateError(f"the state has the counters {sorted(counters)[:20]}, it must have {sorted(_COUNTERS)}")
        sequence, learned, known = decided(own)
        of_bias = {name.removeprefix(_BIAS): array for name, array in arrays.items() if name.startswith(_BIAS)}
        others = {name: array for name, array in arrays.items() if name != "entry" and not name.startswith(_BIAS)}
        rows, class_bias = prototypes.unit, None
        biased = config.has_class_bias(len(rows))
        if of_bias and not biased:
            raise StateError("the state holds a class bias, but its settings rule one out")
        try:
            rest = {name: value for name, value in counters.items() if name not in _COUNTERS}
            verification = Verification.restored(len(rows), rows.shape[1], config, rest, others)
            if verification.seen < learned:
                raise StateError("the state's verification has seen fewer samples than the engine has learned from")
            if biased:
                class_bias = ClassBias.restored(rows, config.temperature, prototypes.follow(likeness), of_bias)
            state = cls(prototypes, config, verification, class_bias)
        except MemoryError:
            raise StateError("the state needs more memory than this machine has") from None
        state.sequence, state.learned, state.known = sequence, learned, known
        return state

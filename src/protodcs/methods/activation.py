"""Which negative labels a stream activates: mean softmax of known-looking and of unknown-looking samples.

TANL and DDE choose their negative labels by the difference of the two means, for each sample again.
"""

import math

import numpy as np

from ..arrays import Floats, Integers
from ..core.arena import Layout
from ..core.numerics.softmax import softmax, softmax_rows
from ..errors import StateError
from .negatives import NegativesConfig, WithNegatives
from .scored import Memory

# As many noise images as the authors start the memory of unknown-looking samples with. Here they are uniform.
NOISE_SAMPLES = 15
# Share of the sample itself in the mean of its kind, if it is clearly of one kind.
_OWN_SHARE = 0.05
_TOLERANCE = 1e-6


class WithActivation(WithNegatives):
    """A method that ranks its negative labels by how much more unknown-looking than known-looking samples use them."""

    config: NegativesConfig

    def _layout(self, classes: int, width: int) -> Layout:
        names = len(self._negatives)
        return {
            "known_use": (np.float64, (names,)),
            "unknown_use": (np.float64, (names,)),
            "used": (np.int64, (2,)),
        }

    def _begin(self, memory: Memory) -> None:
        if len(self._negatives):
            everything = np.concatenate([memory.initial, self._negatives]).astype(np.float64)
            logits = memory.initial.astype(np.float64) @ everything.T / self.config.temperature
            memory["known_use"][:] = softmax_rows(logits)[:, len(memory.initial) :].mean(axis=0)
            memory["unknown_use"][:] = 1.0 / len(everything)
        memory["used"][:] = len(memory.initial), NOISE_SAMPLES

    def _own_use(self, known: Floats, negative: Floats) -> Floats:
        """Return the softmax (M,) over classes and names, on the names."""
        use: Floats = softmax(np.concatenate([known, negative]))[0][len(known) :]
        return use

    def _most_used(self, memory: Memory, count: int) -> Integers:
        """Return the `count` names that unknown-looking samples use most, compared with known-looking ones."""
        return np.argsort(memory["known_use"] - memory["unknown_use"], kind="stable")[:count]

    def _most_used_with(self, memory: Memory, count: int, use: Floats, kind: int | None) -> Integers:
        """Return the same if the sample's own use counts a little in the mean of its kind, 0: known, 1: unknown."""
        means = [memory["known_use"], memory["unknown_use"]]
        if kind is not None:
            means[kind] = (1.0 - _OWN_SHARE) * means[kind] + _OWN_SHARE * use
        return np.argsort(means[0] - means[1], kind="stable")[:count]

    def _remember_use(self, memory: Memory, use: Floats, kind: int, most: int) -> None:
        """Take a sample into the mean of its kind; it weighs as one of at most `most` samples."""
        mean, used = memory["unknown_use" if kind else "known_use"], memory["used"]
        mean += (use - mean) / min(int(used[kind]) + 1, most)
        used[kind] += 1

    def _check(self, memory: Memory) -> None:
        used = memory["used"]
        if used[0] < len(memory.initial) or used[1] < NOISE_SAMPLES:
            raise StateError("the state's counts of samples that used names must not be below those at the start")
        if used.sum() - len(memory.initial) - NOISE_SAMPLES > memory.learned:
            raise StateError("the state's names were used by more samples than came")
        for name in ("known_use", "unknown_use"):
            values = memory[name]
            if not ((values >= -_TOLERANCE).all() and math.fsum(values) <= 1.0 + _TOLERANCE):
                raise StateError(f"the state's array {name!r} must have shares of a softmax")

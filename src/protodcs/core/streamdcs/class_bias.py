"""Class bias: what a class answers to samples of other classes, beyond what the similarity of the classes explains.

A shift moves all features the same way, and so raises the cosines of some classes and lowers those of others. The
predicted frequencies would show it, but so would a stream with more samples of one class. The cosine of class k on
samples of other classes does not depend on frequencies: a sample verified as class c is modelled as
`z_k = r_c + beta (p_c . p_k) + u_k` over k other than c, and `u_k`, shrunk by its uncertainty, is subtracted. If images
do not follow the geometry of the prototypes at all, beta is small and nothing is subtracted.
"""

import numpy as np
from numpy.typing import NDArray

from ...arrays import Feature, Floats
from ...errors import StateError
from .. import state, vectors
from ..arena import Arena, Layout
from ..state_checks import required, within
from .constants import (
    BIAS_CONFIDENCE_HORIZON,
    BIAS_FLOOR,
    BIAS_HORIZON,
    BIAS_MAX,
    BIAS_MIN_LIKENESS,
    BIAS_PRIOR,
    BIAS_REBUILD,
    BIAS_SURE,
)

_TOLERANCE = 1e-6
# Rows of `vectors`: number of samples of each class, its weight, its products with likeness and with itself, and the
# weighted column sums of responses and of likeness.
_COUNT, _WEIGHT, _LIKE, _SELF, _RESPONSES, _LIKENESS, VECTORS = range(7)
# Places in `sums`: weighted products of responses with likeness, of likeness and of responses with themselves, the
# weights, their squares, the mean confidence, its number of samples, and the number since the last rebuild.
_XY, _XX, _YY, _W, _WW, _CONFIDENCE, _SEEN, _SINCE, SUMS = range(9)


def layout(classes: int) -> Layout:
    """Return the arrays of the bias of this number of classes."""
    return {
        "bias_rows": (np.float64, (classes, classes)),
        "bias_vectors": (np.float64, (VECTORS, classes)),
        "bias_sums": (np.float64, (SUMS,)),
        "bias_logits": (np.float64, (classes,)),
        "bias_beta": (np.float64, (1,)),
    }


def likeness(initial: Feature) -> Floats:
    """Return the cosines between the prototypes `initial` (K, d), each row minus its mean, diagonal zero: (K, K)."""
    cosines, ones = np.empty((len(initial), len(initial))), np.ones(len(initial))
    for row, out in zip(initial, cosines, strict=True):
        vectors.cosines(initial, ones, row, out)
    return _centred(cosines)


class ClassBias:
    """The class bias of K classes, three or more.

    Attributes:
        likeness: (K, K) float64, see `likeness`; never written to.
        rows: (K, K) float64, mean cosines of the samples of each class with the others, each row minus its mean.
        vectors, sums: (VECTORS, K) and (SUMS,) float64, running sums over both.
        logits: (K,) float64, what to add to each class's logit.
    """

    def __init__(self, arena: Arena, initial_likeness: Floats, temperature: float):
        self.likeness = initial_likeness
        self.temperature = temperature
        self.rows = arena["bias_rows"]
        self.vectors = arena["bias_vectors"]
        self.sums = arena["bias_sums"]
        self.logits = arena["bias_logits"]
        self._beta = arena["bias_beta"]

    @property
    def beta(self) -> float:
        """The slope of the responses over the likeness."""
        return float(self._beta[0])

    def learns_from(self, p_unknown: float) -> bool:
        """Whether a sample is certain enough to learn from."""
        return p_unknown < BIAS_SURE

    def learn(self, cosines: Floats, best: int, confidence: float) -> None:
        """Learn from a sample that is certainly known and was predicted as `best` with this probability."""
        self._update(cosines, best, confidence)
        self.sums[_SINCE] += 1.0
        if self.sums[_SINCE] >= BIAS_REBUILD:
            self.rebuild()
        self.correct()

    def _update(self, cosines: Floats, c: int, confidence: float) -> None:
        """Update class `c` by the `cosines` (K,) of one of its samples, weighted down if less sure than the average."""
        sums, vectors = self.sums, self.vectors
        sums[_SEEN] = min(sums[_SEEN] + 1.0, BIAS_CONFIDENCE_HORIZON)
        sums[_CONFIDENCE] += (confidence - sums[_CONFIDENCE]) / sums[_SEEN]
        share = min(1.0, confidence / sums[_CONFIDENCE])
        self._count(c, -1.0)
        mean = (cosines.sum() - cosines[c]) / (len(cosines) - 1)
        vectors[_COUNT, c] = min(vectors[_COUNT, c] + share, BIAS_HORIZON)
        change = share / vectors[_COUNT, c] * (cosines - mean - self.rows[c])
        change[c] = 0.0
        self.rows[c] += change
        self._describe(c)
        self._count(c, 1.0)

    def _describe(self, c: int) -> None:
        """Compute the weight and the products of row `c`."""
        row, vectors = self.rows[c], self.vectors
        vectors[_LIKE, c], vectors[_SELF, c] = row @ self.likeness[c], row @ row
        vectors[_WEIGHT, c] = vectors[_COUNT, c] / (vectors[_COUNT, c] + BIAS_PRIOR)

    def _count(self, c: int, sign: float) -> None:
        """Add row `c` to the running sums, or remove it with sign -1."""
        vectors, sums, like = self.vectors, self.sums, self.likeness[c]
        weight = sign * vectors[_WEIGHT, c]
        vectors[_RESPONSES] += weight * self.rows[c]
        vectors[_LIKENESS] += weight * like
        sums[_XY] += weight * vectors[_LIKE, c]
        sums[_XX] += weight * (like @ like)
        sums[_YY] += weight * vectors[_SELF, c]
        sums[_W] += weight
        sums[_WW] += sign * vectors[_WEIGHT, c] ** 2

    def rebuild(self) -> None:
        """Compute the running sums from the rows."""
        self.sums[: _WW + 1] = 0.0
        self.sums[_SINCE] = 0.0
        self.vectors[_RESPONSES:] = 0.0
        for c in np.flatnonzero(self.vectors[_COUNT]):
            self._describe(int(c))
            self._count(int(c), 1.0)

    def correct(self) -> None:
        """Compute beta and what to add to each class's logit."""
        xy, xx, yy, total, squares = self.sums[: _WW + 1].tolist()
        weights, classes = self.vectors[_WEIGHT], len(self.logits)
        # Orthogonal prototypes have no geometry to follow.
        beta = max(xy / xx, 0.0) if xx > BIAS_MIN_LIKENESS * total * (classes - 1) else 0.0
        others = total - weights
        heard = others > 1e-6
        divisor = np.where(heard, others, 1.0)
        found = np.where(heard, (self.vectors[_RESPONSES] - beta * self.vectors[_LIKENESS]) / divisor, 0.0)
        explained = float(others @ found**2)
        error = float(np.where(heard, (squares - weights**2) / divisor**2, 0.0).sum())
        found -= found.mean()
        variance, observed = float(found @ found), int((weights > 0.0).sum())
        # James-Stein shrinkage: the displacement against what the misfit alone would cause.
        known = 0.0
        if observed > 1:
            misfit = max(yy - beta * xy - explained, 0.0) / max(float(others.sum()), 1e-9) * observed / (observed - 1)
            known = max(0.0, 1.0 - misfit * error / classes / (variance / (classes - 1) + 1e-12))
        scale = -known * min(BIAS_MAX, max(0.0, beta * beta - BIAS_FLOOR)) / self.temperature
        self.logits[:] = found * scale
        self._beta[0] = beta

    # Classes, restore.

    def take_classes(self, other: "ClassBias", kept: NDArray[np.int64]) -> None:
        """Take over the classes `kept` of another bias as the first ones. `correct` must follow."""
        own = slice(0, len(kept))
        self.rows[own, own] = _centred(other.rows[np.ix_(kept, kept)])
        self.vectors[_COUNT, own] = other.vectors[_COUNT, kept]
        self.sums[[_CONFIDENCE, _SEEN]] = other.sums[[_CONFIDENCE, _SEEN]]
        self.rebuild()

    def restore(self, arrays: state.Arrays, trusted: bool) -> None:
        """Take over exported arrays. Raise StateError for anything that cannot have been exported.

        `correct` must follow.
        """
        self.rows[:] = within(required(arrays, "bias_rows", np.float64, self.rows.shape), "bias_rows", -4.0, 4.0)
        self.vectors[:] = required(arrays, "bias_vectors", np.float64, self.vectors.shape)
        self.sums[:] = required(arrays, "bias_sums", np.float64, self.sums.shape)
        within(self.vectors[_COUNT], "bias_vectors", 0.0, BIAS_HORIZON)
        within(self.sums[_CONFIDENCE : _CONFIDENCE + 1], "bias_sums", 0.0, 1.0)
        within(self.sums[_SEEN : _SEEN + 1], "bias_sums", 0.0, BIAS_CONFIDENCE_HORIZON)
        within(self.sums[_SINCE : _SINCE + 1], "bias_sums", 0.0, BIAS_REBUILD)
        if not trusted:
            self._check()

    def _check(self) -> None:
        """Raise StateError if the running sums do not belong to the rows."""
        vectors, sums = self.vectors.copy(), self.sums.copy()
        self.rebuild()
        for name, given, right in (("bias_vectors", vectors, self.vectors), ("bias_sums", sums[:5], self.sums[:5])):
            if not np.allclose(given, right, rtol=_TOLERANCE, atol=_TOLERANCE):
                raise StateError(f"The state's {name!r} contradict its 'bias_rows'. The state is damaged.")
        self.vectors[:], self.sums[:] = vectors, sums


def _centred(square: Floats) -> Floats:
    """Return a square matrix with each row minus the mean of its off-diagonal elements, and a zero diagonal."""
    centred = square.copy()
    np.fill_diagonal(centred, 0.0)
    centred -= centred.sum(axis=1, keepdims=True) / max(len(square) - 1, 1)
    np.fill_diagonal(centred, 0.0)
    return centred

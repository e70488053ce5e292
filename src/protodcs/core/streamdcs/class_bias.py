"""Class bias: what a class answers to samples of other classes, beyond what the similarity of the classes explains.

A shift moves all features the same way, and so raises the cosines of some classes and lowers those of others. The
predicted frequencies would show it, but so would a stream with more samples of one class. The cosine of class k on
samples of other classes does not depend on frequencies: a sample verified as class c is modelled as
`z_k = r_c + beta (p_c . p_k) + u_k` over k other than c, and `u_k`, shrunk by its uncertainty, is subtracted. If images
do not follow the geometry of the prototypes at all, beta is small and nothing is subtracted.
"""

import copy
from typing import Self

import numpy as np
from numpy.typing import NDArray

from ...errors import StateError
from .. import state
from ..base import Feature, is_own, required, within
from ..compiled import kernel

Vector = NDArray[np.float64]
Matrix = NDArray[np.float64]

# Learn from samples with P(unknown) below this.
_SURE = 0.1
# Number of samples that a class remembers, and number of samples at which its weight is one half.
_HORIZON, _PRIOR = 50.0, 10.0
# The correction is scaled by beta squared minus the first value, at most by the second.
_FLOOR, _MAX = 0.1, 1.25
# Mean square of the centred cosines between prototypes below which they have no geometry to follow.
_MIN_LIKENESS = 1e-6
# Number of samples that the mean confidence remembers.
_CONFIDENCE_HORIZON = 1000.0
# Rounding errors accumulate in running sums: they are recomputed after this many samples.
REBUILD_AFTER = 1000
_TOLERANCE = 1e-6
# Rows of `vectors`: number of samples of each class, its weight, its products with likeness and with itself, and the
# weighted column sums of responses and of likeness.
_COUNT, _WEIGHT, _LIKE, _SELF, _RESPONSES, _LIKENESS, VECTORS = range(7)
# Places in `sums`: weighted products of responses with likeness, of likeness and of responses with themselves, the
# weights, their squares, the mean confidence, its number of samples, and the number since the last rebuild.
_XY, _XX, _YY, _W, _WW, _CONFIDENCE, _SEEN, _SINCE, SUMS = range(9)


@kernel("void(float64[:,::1], float64[:,::1], int64, float64, float64[:,::1], float64[::1])")
def _count(rows: Matrix, likeness: Matrix, c: int, sign: float, vectors: Matrix, sums: Vector) -> None:
    """Add row `c` to the running sums, or remove it with sign -1."""
    weight = sign * vectors[_WEIGHT, c]
    own = 0.0
    for k in range(rows.shape[0]):
        vectors[_RESPONSES, k] += weight * rows[c, k]
        vectors[_LIKENESS, k] += weight * likeness[c, k]
        own += likeness[c, k] * likeness[c, k]
    sums[_XY] += weight * vectors[_LIKE, c]
    sums[_XX] += weight * own
    sums[_YY] += weight * vectors[_SELF, c]
    sums[_W] += weight
    sums[_WW] += sign * vectors[_WEIGHT, c] ** 2


@kernel("void(float64[:,::1], float64[:,::1], int64, float64[:,::1])")
def _describe(rows: Matrix, likeness: Matrix, c: int, vectors: Matrix) -> None:
    """Compute the weight and the products of row `c`."""
    like, own = 0.0, 0.0
    for k in range(rows.shape[0]):
        like += rows[c, k] * likeness[c, k]
        own += rows[c, k] * rows[c, k]
    vectors[_LIKE, c], vectors[_SELF, c] = like, own
    vectors[_WEIGHT, c] = vectors[_COUNT, c] / (vectors[_COUNT, c] + _PRIOR)


@kernel("void(float64[::1], int64, float64, float64[:,::1], float64[:,::1], float64[:,::1], float64[::1])")
def update(
    cosines: Vector, c: int, confidence: float, rows: Matrix, likeness: Matrix, vectors: Matrix, sums: Vector
) -> None:
    """Update class `c` by the `cosines` (K,) of one of its samples, weighted down if less sure than the average."""
    classes = cosines.shape[0]
    sums[_SEEN] = min(sums[_SEEN] + 1.0, _CONFIDENCE_HORIZON)
    sums[_CONFIDENCE] += (confidence - sums[_CONFIDENCE]) / sums[_SEEN]
    share = min(1.0, confidence / sums[_CONFIDENCE])
    _count(rows, likeness, c, -1.0, vectors, sums)
    mean = 0.0
    for k in range(classes):
        mean += cosines[k]
    mean = (mean - cosines[c]) / (classes - 1)
    vectors[_COUNT, c] = min(vectors[_COUNT, c] + share, _HORIZON)
    rate = share / vectors[_COUNT, c]
    for k in range(classes):
        if k != c:
            rows[c, k] += rate * (cosines[k] - mean - rows[c, k])
    _describe(rows, likeness, c, vectors)
    _count(rows, likeness, c, 1.0, vectors, sums)


@kernel("float64(float64[:,::1], float64[::1], float64, float64[::1])")
def correction(vectors: Matrix, sums: Vector, temperature: float, out: Vector) -> float:
    """Write what to add to each class's logit into `out` (K,). Return beta."""
    classes = out.shape[0]
    # Orthogonal prototypes have no geometry to follow.
    beta = 0.0
    if sums[_XX] > _MIN_LIKENESS * sums[_W] * (classes - 1):
        beta = max(sums[_XY] / sums[_XX], 0.0)
    mean, explained, weights, error, observed = 0.0, 0.0, 0.0, 0.0, 0.0
    for k in range(classes):
        others = sums[_W] - vectors[_WEIGHT, k]
        observed += vectors[_WEIGHT, k] > 0.0
        out[k] = 0.0
        if others > 1e-6:
            out[k] = (vectors[_RESPONSES, k] - beta * vectors[_LIKENESS, k]) / others
            explained += others * out[k] * out[k]
            error += (sums[_WW] - vectors[_WEIGHT, k] ** 2) / (others * others)
        mean += out[k]
        weights += others
    mean /= classes
    variance = 0.0
    for k in range(classes):
        out[k] -= mean
        variance += out[k] * out[k]
    # James-Stein shrinkage: the displacement against what the misfit alone would cause.
    known = 0.0
    if observed > 1.0:
        left = max(sums[_YY] - beta * sums[_XY] - explained, 0.0) / max(weights, 1e-9) * observed / (observed - 1.0)
        known = max(0.0, 1.0 - left * error / classes / (variance / (classes - 1) + 1e-12))
    scale = -known * min(_MAX, max(0.0, beta * beta - _FLOOR)) / temperature
    for k in range(classes):
        out[k] *= scale
    return beta


@kernel("void(float64[:,::1], float64[:,::1], float64[:,::1], float64[::1])")
def rebuild(rows: Matrix, likeness: Matrix, vectors: Matrix, sums: Vector) -> None:
    """Compute the running sums from the rows."""
    sums[: _WW + 1] = 0.0
    sums[_SINCE] = 0.0
    vectors[_RESPONSES:] = 0.0
    for c in range(rows.shape[0]):
        if vectors[_COUNT, c] != 0.0:
            _describe(rows, likeness, c, vectors)
            _count(rows, likeness, c, 1.0, vectors, sums)


@kernel(
    "float64(float64[::1], int64, float64, float64[:,::1], float64[:,::1], float64[:,::1], float64[::1], float64, "
    "float64[::1])"
)
def learn(
    cosines: Vector, c: int, confidence: float, rows: Matrix, likeness: Matrix, vectors: Matrix, sums: Vector,
    temperature: float, out: Vector,
) -> float:  # fmt: skip
    """Update by one sample, rebuild if it is due, and compute the correction. Return beta."""
    update(cosines, c, confidence, rows, likeness, vectors, sums)
    sums[_SINCE] += 1.0
    if sums[_SINCE] >= REBUILD_AFTER:
        rebuild(rows, likeness, vectors, sums)
    return correction(vectors, sums, temperature, out)


def products_numpy(rows: Feature, out: Matrix) -> None:
    """Numpy reference."""
    values = rows.astype(np.float64)
    out[:] = values @ values.T


@kernel("void(float32[:,::1], float64[:,::1])", twin=products_numpy)
def products(rows: Feature, out: Matrix) -> None:
    """Write the product of each row of `rows` (K, d) with each into `out` (K, K), in a fixed order of summation."""
    for j in range(rows.shape[0]):
        for k in range(j, rows.shape[0]):
            total = 0.0
            for i in range(rows.shape[1]):
                total += np.float64(rows[j, i]) * np.float64(rows[k, i])
            out[j, k] = total
            out[k, j] = total


def likeness(entry: Feature) -> Matrix:
    """Return the cosines between the prototypes `entry` (K, d), each row minus its mean, diagonal zero: (K, K)."""
    cosines = np.empty((len(entry), len(entry)))
    products(entry, cosines)
    return _centred(cosines)


class ClassBias:
    """The class bias of K classes, three or more.

    Attributes:
        likeness: (K, K) float64, see `likeness`; never written to.
        rows: (K, K) float64, mean cosines of the samples of each class with the others, each row minus its mean.
        vectors, sums: (VECTORS, K) and (SUMS,) float64, running sums over both.
        logits: (K,) float64, what to add to each class's logit.
        beta: slope of the responses over the likeness.
    """

    def __init__(self, entry: Feature, temperature: float, of_entry: Matrix | None = None):
        classes = len(entry)
        self.temperature = temperature
        self.rows = np.zeros((classes, classes))
        self.likeness = likeness(entry) if of_entry is None else of_entry
        self.vectors = np.zeros((VECTORS, classes))
        self.sums = np.zeros(SUMS)
        self.logits = np.zeros(classes)
        self.beta = 0.0
        self._shared = False

    def learns_from(self, p_unknown: float) -> bool:
        """Whether a sample is certain enough to learn from."""
        return p_unknown < _SURE

    def learn(self, cosines: Vector, best: int, confidence: float, p_unknown: float) -> None:
        """Learn from a sample predicted as `best` with this probability, if it is certain enough."""
        if not self.learns_from(p_unknown):
            return
        if self._shared:
            self.rows, self._shared = self.rows.copy(), False
        self.beta = learn(
            cosines, best, confidence, self.rows, self.likeness, self.vectors, self.sums, self.temperature, self.logits
        )

    def fork(self) -> Self:
        """Return a copy that shares the rows until it learns."""
        copied = copy.copy(self)
        copied.vectors, copied.sums, copied.logits = self.vectors.copy(), self.sums.copy(), self.logits.copy()
        copied._shared = True
        return copied

    def with_classes(self, entry: Feature, kept: NDArray[np.int64]) -> "ClassBias":
        """Return the bias for the prototypes `entry`: first the classes `kept`, then new ones."""
        copied = ClassBias(entry, self.temperature)
        own = slice(0, len(kept))
        copied.rows[own, own] = _centred(self.rows[np.ix_(kept, kept)])
        copied.vectors[_COUNT, own] = self.vectors[_COUNT, kept]
        copied.sums[[_CONFIDENCE, _SEEN]] = self.sums[[_CONFIDENCE, _SEEN]]
        rebuild(copied.rows, copied.likeness, copied.vectors, copied.sums)
        copied.beta = correction(copied.vectors, copied.sums, copied.temperature, copied.logits)
        return copied

    def export(self) -> state.Arrays:
        return {"rows": self.rows, "vectors": self.vectors, "sums": self.sums}

    @classmethod
    def restored(cls, entry: Feature, temperature: float, of_entry: Matrix, arrays: state.Arrays) -> Self:
        classes = len(entry)
        rows = within(required(arrays, "rows", np.float64, (classes, classes)), "rows", -4.0, 4.0)
        bias = cls(entry, temperature, of_entry)
        bias.rows = rows.copy()
        bias.vectors = required(arrays, "vectors", np.float64, (VECTORS, classes)).copy()
        bias.sums = required(arrays, "sums", np.float64, (SUMS,)).copy()
        within(bias.vectors[_COUNT], "vectors", 0.0, _HORIZON)
        within(bias.sums[_CONFIDENCE : _CONFIDENCE + 1], "sums", 0.0, 1.0)
        within(bias.sums[_SEEN:], "sums", 0.0, REBUILD_AFTER)
        if set(arrays) != {"rows", "vectors", "sums"}:
            raise StateError(f"the state's class bias holds {sorted(arrays)[:10]}, it must hold rows, vectors and sums")
        if not is_own():
            bias._check()
        bias.beta = correction(bias.vectors, bias.sums, temperature, bias.logits)
        return bias

    def _check(self) -> None:
        """Raise StateError if the running sums do not belong to the rows."""
        right = self.fork()
        rebuild(right.rows, right.likeness, right.vectors, right.sums)
        for name, got, wanted in (("vectors", self.vectors, right.vectors), ("sums", self.sums[:5], right.sums[:5])):
            if not np.allclose(got, wanted, rtol=_TOLERANCE, atol=_TOLERANCE):
                raise StateError(f"the state's class bias has {name} that contradict its rows")


def _centred(square: Matrix) -> Matrix:
    """Return a square matrix with each row minus the mean of its off-diagonal elements, and a zero diagonal."""
    centred = square.copy()
    np.fill_diagonal(centred, 0.0)
    centred -= centred.sum(axis=1, keepdims=True) / max(len(square) - 1, 1)
    np.fill_diagonal(centred, 0.0)
    return centred

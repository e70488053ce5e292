"""Class bias: what a prototype answers to samples of other classes, beyond what its likeness with theirs explains.

A shift moves all features the same way, and so lifts some classes' cosines and lowers others'. How often each class is
predicted would show it, but so would a stream that simply holds more of one class. The cosine of class k on samples of
the other classes does not depend on shares: a sample verified as class c is modelled as
`z_k = r_c + beta (p_c . p_k) + u_k` over k other than c, and `u_k`, shrunk by how well it is known, is taken off. Where
images do not follow the geometry of the prototypes at all, beta is small and nothing is taken off.
"""

import copy
from typing import Self

import numpy as np
from numpy.typing import NDArray

from ..errors import StateError
from . import state
from .base import Feature, is_own, required, within
from .compiled import kernel

Vector = NDArray[np.float64]
Matrix = NDArray[np.float64]

# A sample so surely known teaches.
_SURE = 0.1
# A class remembers so many of its samples, and so many count against what it says.
_HORIZON, _PRIOR = 50.0, 10.0
# beta squared is how far the correction is applied, less this and at most that much.
_FLOOR, _MOST = 0.1, 1.25
# Mean square of the prototypes' cosines with each other, each less its row's mean, below which they are all alike.
_LEAST_LIKENESS = 1e-6
# The mean probability of a verified class remembers so many samples.
_CONFIDENCE_HORIZON = 1000.0
# Running sums wear by rounding: after so many samples they are computed anew.
_REBUILD_AFTER = 1000
_TOLERANCE = 1e-6
# Rows of `vectors`: how many samples each class has, its weight, its products with likeness and with itself, and the
# weighted column sums of responses and of likeness.
_COUNT, _WEIGHT, _LIKE, _SELF, _RESPONSES, _LIKENESS, VECTORS = range(7)
# Places in `sums`: weighted products of responses with likeness, of likeness and of responses with themselves, the
# weights, their squares, the mean confidence, how many samples it has, and how many came since the last rebuild.
_XY, _XX, _YY, _W, _WW, _CONFIDENCE, _SEEN, _SINCE, SUMS = range(9)


@kernel("void(float64[:,::1], float64[:,::1], int64, float64, float64[:,::1], float64[::1])")
def _count(rows: Matrix, likeness: Matrix, c: int, sign: float, vectors: Matrix, sums: Vector) -> None:
    """Add row `c` to the running sums, or take it out with sign -1."""
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
    """The weight and the products of row `c`."""
    like, own = 0.0, 0.0
    for k in range(rows.shape[0]):
        like += rows[c, k] * likeness[c, k]
        own += rows[c, k] * rows[c, k]
    vectors[_LIKE, c], vectors[_SELF, c] = like, own
    vectors[_WEIGHT, c] = vectors[_COUNT, c] / (vectors[_COUNT, c] + _PRIOR)


@kernel("void(float64[::1], int64, float64, float64[:,::1], float64[:,::1], float64[:,::1], float64[::1])")
def take_in(
    cosines: Vector, c: int, confidence: float, rows: Matrix, likeness: Matrix, vectors: Matrix, sums: Vector
) -> None:
    """Let class `c` remember the `cosines` (K,) of one of its samples; one less sure than the average counts less."""
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
    """What is added to each class's logit, into `out` (K,); returns beta."""
    classes = out.shape[0]
    # Prototypes as far from each other as can be have no geometry to follow.
    beta = 0.0
    if sums[_XX] > _LEAST_LIKENESS * sums[_W] * (classes - 1):
        beta = max(sums[_XY] / sums[_XX], 0.0)
    mean, explained, weights, error, heard = 0.0, 0.0, 0.0, 0.0, 0.0
    for k in range(classes):
        others = sums[_W] - vectors[_WEIGHT, k]
        heard += vectors[_WEIGHT, k] > 0.0
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
    # James and Stein's shrinkage: displacement against what its misfit alone would make of it. The first class that
    # was heard fits itself.
    known = 0.0
    if heard > 1.0:
        left = max(sums[_YY] - beta * sums[_XY] - explained, 0.0) / max(weights, 1e-9) * heard / (heard - 1.0)
        known = max(0.0, 1.0 - left * error / classes / (variance / (classes - 1) + 1e-12))
    scale = -known * min(_MOST, max(0.0, beta * beta - _FLOOR)) / temperature
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
    """`take_in`, `rebuild` when it is time to, and `correction`."""
    take_in(cosines, c, confidence, rows, likeness, vectors, sums)
    sums[_SINCE] += 1.0
    if sums[_SINCE] >= _REBUILD_AFTER:
        rebuild(rows, likeness, vectors, sums)
    return correction(vectors, sums, temperature, out)


def products_twin(rows: Feature, out: Matrix) -> None:
    """The same without numba."""
    values = rows.astype(np.float64)
    out[:] = values @ values.T


@kernel("void(float32[:,::1], float64[:,::1])", twin=products_twin)
def products(rows: Feature, out: Matrix) -> None:
    """The product of each row of `rows` (K, d) with each into `out` (K, K), in an order that no library chooses."""
    for j in range(rows.shape[0]):
        for k in range(j, rows.shape[0]):
            total = 0.0
            for i in range(rows.shape[1]):
                total += np.float64(rows[j, i]) * np.float64(rows[k, i])
            out[j, k] = total
            out[k, j] = total


def likeness(entry: Feature) -> Matrix:
    """Cosines of the prototypes `entry` (K, d) with each other, each row less its mean, diagonal zero: (K, K)."""
    cosines = np.empty((len(entry), len(entry)))
    products(entry, cosines)
    return _centred(cosines)


class Bias:
    """The class bias of K classes, three or more.

    Attributes:
        likeness: (K, K) float64, see `likeness`; never written to.
        rows: (K, K) float64, what samples of each class answer to the others, each row less its mean, diagonal zero.
        vectors, sums: (VECTORS, K) and (SUMS,) float64, running sums over both.
        logits: (K,) float64, what is added to each class's logit.
        beta: how far the responses follow the likeness.
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
        """Whether a sample is surely known."""
        return p_unknown < _SURE

    def learn(self, cosines: Vector, best: int, confidence: float, p_unknown: float) -> None:
        """Learn from a sample predicted as `best` with this probability, if it is surely known."""
        if not self.learns_from(p_unknown):
            return
        if self._shared:
            self.rows, self._shared = self.rows.copy(), False
        self.beta = learn(
            cosines, best, confidence, self.rows, self.likeness, self.vectors, self.sums, self.temperature, self.logits
        )

    def fork(self) -> Self:
        """A copy that shares the rows until it learns."""
        twin = copy.copy(self)
        twin.vectors, twin.sums, twin.logits = self.vectors.copy(), self.sums.copy(), self.logits.copy()
        twin._shared = True
        return twin

    def with_classes(self, entry: Feature, kept: NDArray[np.int64]) -> "Bias":
        """The bias for the prototypes `entry`, of which the first are the classes `kept`; the others are new."""
        twin = Bias(entry, self.temperature)
        own = slice(0, len(kept))
        twin.rows[own, own] = _centred(self.rows[np.ix_(kept, kept)])
        twin.vectors[_COUNT, own] = self.vectors[_COUNT, kept]
        twin.sums[[_CONFIDENCE, _SEEN]] = self.sums[[_CONFIDENCE, _SEEN]]
        rebuild(twin.rows, twin.likeness, twin.vectors, twin.sums)
        twin.beta = correction(twin.vectors, twin.sums, twin.temperature, twin.logits)
        return twin

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
        within(bias.sums[_SEEN:], "sums", 0.0, _REBUILD_AFTER)
        if set(arrays) != {"rows", "vectors", "sums"}:
            raise StateError(f"the state's class bias holds {sorted(arrays)[:10]}, it must hold rows, vectors and sums")
        if not is_own():
            bias._check()
        bias.beta = correction(bias.vectors, bias.sums, temperature, bias.logits)
        return bias

    def _check(self) -> None:
        """Refuse running sums that are not those of the rows."""
        right = self.fork()
        rebuild(right.rows, right.likeness, right.vectors, right.sums)
        for name, got, wanted in (("vectors", self.vectors, right.vectors), ("sums", self.sums[:5], right.sums[:5])):
            if not np.allclose(got, wanted, rtol=_TOLERANCE, atol=_TOLERANCE):
                raise StateError(f"the state's class bias has {name} that contradict its rows")


def _centred(square: Matrix) -> Matrix:
    """A square matrix with the mean of each row's other elements taken off them, and zeros on its diagonal."""
    centred = square.copy()
    np.fill_diagonal(centred, 0.0)
    centred -= centred.sum(axis=1, keepdims=True) / max(len(square) - 1, 1)
    np.fill_diagonal(centred, 0.0)
    return centred

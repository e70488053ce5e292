"""First check: the openness of a sample, and the two gates it must pass (equation 2).

Openness is `S = 1 - max cosine`. The gates are quantiles of a sliding window of recent openness, which includes the
sample itself.
"""

import numpy as np
from numpy.typing import NDArray

from ..compiled import kernel
from ..vectors import similarities
from ..windows import push, quantile

Vector = NDArray[np.float64]
Row = NDArray[np.float32]
Matrix = NDArray[np.float32]


@kernel(
    "Tuple((int64, float64, float64, float64))(float32[:,::1], float64[::1], float32[::1], float64[::1], "
    "float64[::1], float64[::1], int64, float64, float64)"
)
def look(
    prototypes: Matrix,
    inverse_norms: Vector,
    feature: Row,
    cosines: Vector,
    arrivals: Vector,
    ordered: Vector,
    pushed: int,
    low: float,
    high: float,
) -> tuple[int, float, float, float]:
    """The first check in one pass: best class, openness, and two quantiles of the window that now includes it."""
    best = similarities(prototypes, inverse_norms, feature, cosines)
    openness = 1.0 - float(cosines[best])
    size = push(arrivals, ordered, pushed, openness)
    return best, openness, float(quantile(ordered, size, low)), float(quantile(ordered, size, high))

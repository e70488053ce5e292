"""A t-SNE map of a few hundred points, by scikit-learn. Equal features give an equal map."""

import numpy as np
from numpy.typing import NDArray

from ..errors import InputError

# The cost of the exact method grows with the square of the points.
MOST_POINTS = 2000


def tsne(features: NDArray[np.floating], perplexity: float = 30.0) -> NDArray[np.float64]:
    """Return a map (N, 2) of features (N, d).

    Args:
        features: finite, at least 3 and at most `MOST_POINTS` rows.
        perplexity: effective number of neighbours of a point, at most a third of the points.
    """
    from sklearn.manifold import TSNE

    points = np.asarray(features, dtype=np.float64)
    if points.ndim != 2 or not 3 <= len(points) <= MOST_POINTS or not np.isfinite(points).all():
        raise InputError(f"a map needs 3 to {MOST_POINTS} finite rows of features; given: shape {points.shape}")
    reducer = TSNE(
        init="pca" if points.shape[1] > 1 else "random",
        method="exact",
        perplexity=min(perplexity, (len(points) - 1) / 3),
        random_state=0,
    )
    return np.asarray(reducer.fit_transform(points), dtype=np.float64)

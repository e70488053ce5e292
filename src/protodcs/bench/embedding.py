"""Exact t-SNE in numpy: a map of a few hundred points on which neighbours stay neighbours.

It starts from the first two principal components and draws nothing at random, so equal features give an equal map. Its
cost grows with the square of the points; it must never be given a whole data set.
"""

import math

import numpy as np
from numpy.typing import NDArray

from ..errors import InputError

Matrix = NDArray[np.float64]

MOST_POINTS = 2000
_ITERATIONS = 500
# For a while the attraction is exaggerated, so that clusters form before they push each other away.
_EARLY, _EXAGGERATION = 250, 12.0
_BISECTIONS = 60


def tsne(features: NDArray[np.floating], perplexity: float = 30.0) -> Matrix:
    """A map (N, 2) of features (N, d).

    Args:
        features: finite, at least 3 and at most `MOST_POINTS` rows.
        perplexity: how many neighbours a point has, in effect; lowered to a third of the points where they are few.
    """
    points = np.asarray(features, dtype=np.float64)
    if points.ndim != 2 or not 3 <= len(points) <= MOST_POINTS or not np.isfinite(points).all():
        raise InputError(f"a map needs 3 to {MOST_POINTS} finite rows of features; given: shape {points.shape}")
    target = _joint(_squared_distances(points), min(perplexity, (len(points) - 1) / 3))
    return _descend(target, _principal(points))


def _squared_distances(points: Matrix) -> Matrix:
    squares = (points**2).sum(axis=1)
    distances = np.maximum(squares[:, None] + squares[None, :] - 2 * points @ points.T, 0.0)
    np.fill_diagonal(distances, 0.0)
    return distances


def _joint(distances: Matrix, perplexity: float) -> Matrix:
    """Who is whose neighbour: Gaussian affinities, each row as wide as the perplexity asks, made symmetric."""
    rows = np.stack([_neighbours(row, place, math.log(perplexity)) for place, row in enumerate(distances)])
    both = rows + rows.T
    return np.maximum(both / both.sum(), 1e-12)


def _neighbours(distances: Matrix, place: int, entropy: float) -> Matrix:
    """The affinities of one point, by bisection of their sharpness until their entropy is the wanted one."""
    others = np.delete(distances, place)
    # Unit-free: what counts is distance in terms of the typical one.
    others = (others - others.min()) / max(float(others.mean()), 1e-300)
    low, high, sharpness = 0.0, math.inf, 1.0
    for _ in range(_BISECTIONS):
        weights = np.exp(-others * sharpness)
        total = float(weights.sum())
        if math.log(total) + sharpness * float(others @ weights) / total > entropy:
            low, sharpness = sharpness, 2 * sharpness if math.isinf(high) else 0.5 * (sharpness + high)
        else:
            high, sharpness = sharpness, 0.5 * (low + sharpness)
    return np.insert(weights / total, place, 0.0)


def _principal(points: Matrix) -> Matrix:
    """The first two principal components, tiny, with the sign fixed by the largest entry of each direction."""
    centred = points - points.mean(axis=0)
    _, _, directions = np.linalg.svd(centred, full_matrices=False)
    chosen = np.zeros((2, points.shape[1]))
    chosen[: min(2, len(directions))] = directions[:2]
    largest = chosen[np.arange(2), np.abs(chosen).argmax(axis=1)]
    start = centred @ (chosen * np.where(largest < 0, -1.0, 1.0)[:, None]).T
    return np.asarray(start / max(float(start[:, 0].std()), 1e-300) * 1e-4)


def _descend(target: Matrix, positions: Matrix) -> Matrix:
    """Gradient descent with momentum and a gain for each coordinate, as t-SNE is usually run."""
    rate = max(len(positions) / _EXAGGERATION / 4, 20.0)
    speed, gains = np.zeros_like(positions), np.ones_like(positions)
    for iteration in range(_ITERATIONS):
        early = iteration < _EARLY
        slope = _slope(target * _EXAGGERATION if early else target, positions)
        gains = np.maximum(np.where(slope * speed < 0, gains + 0.2, gains * 0.8), 0.01)
        speed = (0.5 if early else 0.8) * speed - rate * gains * slope
        positions = positions + speed
    return positions - positions.mean(axis=0)


def _slope(target: Matrix, positions: Matrix) -> Matrix:
    """The gradient of the divergence between the neighbourhoods above and on the map."""
    near = 1.0 / (1.0 + _squared_distances(positions))
    np.fill_diagonal(near, 0.0)
    pull = (target - near / near.sum()) * near
    return np.asarray(4.0 * (pull.sum(axis=1)[:, None] * positions - pull @ positions))

"""Build the prototype of a new class from a cluster.

Image features and text features lie in different cones. The centre of a cluster is therefore no prototype: every image
is more similar to it than to any text. The prototype here is a text-like vector instead:

    mean of the known text prototypes + the direction in which the cluster differs from other images + a filling

- The direction is that of linear discriminant analysis, S^-1 (centre - mean), with the shrunk covariance S of the
  stored features. It is orthogonal to both means, so images outside of the cluster score as for any other class. Its
  length raises the cosine of the members by `LIFT` on average.
- The filling gives the vector unit length. It points where images vary least, so it hardly changes a score.

With the text feature of the new name, the prototype is that text plus a direction that adds `TEXT_LIFT`.
"""

from typing import Final

import numpy as np

from ..arrays import Features, Floats

# Both lifts were chosen on the `tune` split; docs/how-to/discovery.md has the measurements.
LIFT: Final = 0.08
TEXT_LIFT: Final = 0.02
# Shrinkage of the covariance, as a multiple of its mean eigenvalue.
SHRINKAGE: Final = 1.0


def new_prototype(centre: Floats, features: Features, known: Features, text: Features | None) -> Features:
    """Return a unit prototype (d,) for a cluster.

    Args:
        centre: mean (d,) of the features of the cluster.
        features: all stored features (n, d), those of the cluster among them.
        known: text prototypes of known classes (K, d).
        text: unit text feature (d,) of the new class, if there is one.
    """
    wide = features.astype(np.float64)
    image_mean, text_mean = wide.mean(axis=0), known.mean(axis=0, dtype=np.float64)
    values, axes = np.linalg.eigh(np.cov(wide.T, bias=True))
    shrunk = np.maximum(values, 0.0) + SHRINKAGE * max(values.mean(), 1e-12)
    difference = centre - image_mean
    direction = _orthogonal((axes / shrunk) @ (axes.T @ difference), image_mean, text_mean)
    gain = float(difference @ direction)
    if gain > 1e-12:
        direction *= (LIFT if text is None else TEXT_LIFT) / gain
    if text is not None:
        return _unit(text + direction)
    missing = 1.0 - text_mean @ text_mean - direction @ direction
    filling = _unit_or_zero(_orthogonal(axes[:, 0], image_mean, text_mean, direction))
    return _unit(text_mean + direction + np.sqrt(max(missing, 0.0)) * filling)


def _orthogonal(vector: Floats, *others: Floats) -> Floats:
    """Return the part of a vector that is orthogonal to the others."""
    basis, _ = np.linalg.qr(np.stack(others, axis=1))
    rest: Floats = vector - basis @ (basis.T @ vector)
    return rest


def _unit_or_zero(vector: Floats) -> Floats:
    length = float(np.linalg.norm(vector))
    return vector / length if length > 1e-9 else np.zeros_like(vector)


def _unit(vector: Floats) -> Features:
    return (vector / np.linalg.norm(vector)).astype(np.float32)

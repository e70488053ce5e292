"""Build the prototype of a new class from a cluster.

Image features and text features often lie in different cones. The centre of a cluster is then no prototype: every image
is more similar to it than to any text. The prototype here is a text-like vector instead:

    mean of the known text prototypes + the direction in which the cluster differs from other images + a filling

- The direction is that of linear discriminant analysis, S^-1 (centre - mean), with the shrunk covariance S within the
  cluster and among the other images. It is orthogonal to both means, so other images score as for any other class. It
  is so long that the members reach the cosine that images of known classes have with their class, and a little more.
- The filling gives the vector unit length. It points where images vary least, so it hardly changes a score. If the
  direction is too long for that, the sum is scaled instead.

With the text feature of the new name, the prototype is that text plus a direction that adds `TEXT_LIFT`. If the members
are less than half as similar to it as images of known classes are to theirs, the encoder does not know the name, and
the text is left out.
"""

from typing import Final

import numpy as np

from ..arrays import Features, Floats

# All of these were chosen on the `tune` split; docs/how-to/discovery.md has the measurements.
# How far the members rise, as a multiple of what images of known classes have over the mean text.
LIFT: Final = 1.3
TEXT_LIFT: Final = 0.02
# How far the members must rise with a text that the encoder knows.
TEXT_REACH: Final = 0.5
# Quantile of the largest cosines that stands for images of known classes.
KNOWN_QUANTILE: Final = 0.75
# Rejected images whose centred cosine with the cluster is larger may be of the same class, so they are no others.
SAME_CLASS: Final = 0.5
# Shrinkage of the covariance, as a multiple of its mean eigenvalue.
SHRINKAGE: Final = 2.0
# Lengths of the direction that are tried if the sum is scaled, as multiples of the longest one without scaling.
_LENGTHS: Final = np.geomspace(1.0, 100.0, 200)


def new_prototype(
    members: Features,
    accepted: Features,
    rejected: Features,
    known: Features,
    text: Features | None,
    lift: float = LIFT,
) -> Features:
    """Return a unit prototype (d,) for a cluster.

    Args:
        members: features (m, d) of the cluster.
        accepted: features (n, d) of images of known classes; there may be none.
        rejected: features (r, d) of all unknown images, members included.
        known: text prototypes of known classes (K, d).
        text: unit text feature (d,) of the new class, if there is one.
        lift: as `LIFT`. With a larger one, more images get the class.
    """
    centre, text_mean = members.mean(axis=0, dtype=np.float64), known.mean(axis=0, dtype=np.float64)
    image_mean = (accepted if len(accepted) else rejected).mean(axis=0, dtype=np.float64)
    towards = (rejected - image_mean) @ _unit_or_zero(centre - image_mean)
    unlike = towards < SAME_CLASS * np.linalg.norm(rejected - image_mean, axis=1)
    others = np.concatenate([accepted, rejected[unlike]]).astype(np.float64)
    within = np.concatenate([others - others.mean(axis=0), members - centre]) if len(others) else members - centre
    values, axes = np.linalg.eigh(within.T @ within / len(within))
    shrunk = np.maximum(values, 0.0) + SHRINKAGE * max(values.mean(), 1e-12)
    discriminant = (axes / shrunk) @ (axes.T @ (centre - image_mean))
    direction = _unit_or_zero(_orthogonal(discriminant, image_mean, text_mean))
    gain, start = float(centre @ direction), float(centre @ text_mean)
    best = ((accepted if len(accepted) else rejected) @ known.T).max(axis=1)
    usual = max(float(np.quantile(best, KNOWN_QUANTILE)) - start, 0.0)
    if text is not None and centre @ text - start >= TEXT_REACH * usual:
        return _unit(text + direction * (TEXT_LIFT / max(gain, 1e-12)))
    room = float(np.sqrt(max(1.0 - text_mean @ text_mean, 0.0)))
    if lift * usual <= gain * room:
        moved = text_mean + direction * (lift * usual / max(gain, 1e-12))
        filling = _unit_or_zero(_orthogonal(axes[:, 0], image_mean, text_mean, direction))
        return _unit(moved + filling * np.sqrt(max(1.0 - moved @ moved, 0.0)))
    lengths = _LENGTHS * room
    cosines = (start + gain * lengths) / np.sqrt(text_mean @ text_mean + lengths**2)
    reached = cosines >= start + lift * usual
    return _unit(text_mean + direction * lengths[(reached if reached.any() else cosines).argmax()])


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

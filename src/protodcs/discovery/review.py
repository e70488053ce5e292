"""Review queue: the samples that a person should look at first, without near-duplicates.

A pure function of its arguments. A sample comes early if its decision is probably wrong and if it differs from all
samples before it in the queue.
"""

import numpy as np
from numpy.typing import NDArray

from ..arrays import Floats, Integers
from ..core.validation import unit_rows
from ..errors import InputError
from .clustering import directions


def review_order(
    p_unknown: NDArray[np.floating],
    confidence: NDArray[np.floating] | None = None,
    features: NDArray[np.floating] | None = None,
    limit: int | None = None,
) -> Integers:
    """Return the places of samples in the order in which a person should look at them.

    Args:
        p_unknown: (n,) from the decisions.
        confidence: (n,) probability of the best class, `engine.probabilities(decisions.scores).max(axis=1)`. Without
            it, doubts about the class do not count.
        features: (n, d) the features of the samples. Without them, similar samples are not moved apart.
        limit: number of places to return; None: all.

    >>> review_order(np.array([0.01, 0.45, 0.9])).tolist()
    [1, 2, 0]
    """
    doubt = _doubt(p_unknown, confidence)
    count = len(doubt) if limit is None else min(limit, len(doubt))
    if features is None or not len(doubt):
        return np.argsort(-doubt, kind="stable")[:count]
    if len(features) != len(doubt):
        raise InputError(f"there are {len(doubt)} decisions and {len(features)} features: give one feature for each")
    unit = unit_rows(features, "the features")
    rows = directions(unit, unit.mean(axis=0, dtype=np.float64))
    # How far each sample differs from the chosen ones, 0 to 1.
    novelty, order = np.ones(len(doubt)), np.empty(count, dtype=np.int64)
    for place in range(count):
        best = int((doubt * novelty).argmax())
        order[place] = best
        # Chosen samples come last, below those of which nothing is left.
        doubt[best] = -1.0
        novelty = np.minimum(novelty, np.clip(1.0 - rows @ rows[best], 0.0, 1.0))
        novelty[order[: place + 1]] = 1.0
    return order


def _doubt(p_unknown: NDArray[np.floating], confidence: NDArray[np.floating] | None) -> Floats:
    """Return the estimated probability (n,) that each decision is wrong."""
    unknown = np.asarray(p_unknown, dtype=np.float64)
    sure = np.ones_like(unknown) if confidence is None else np.asarray(confidence, dtype=np.float64)
    if unknown.ndim != 1 or sure.shape != unknown.shape:
        raise InputError(
            f"`p_unknown` and `confidence` must be of one shape (n,); given: {unknown.shape}, {sure.shape}"
        )
    if not (((unknown >= 0.0) & (unknown <= 1.0)).all() and ((sure >= 0.0) & (sure <= 1.0)).all()):
        raise InputError("`p_unknown` and `confidence` must be probabilities from 0 to 1.")
    doubt: Floats = np.where(unknown < 0.5, 1.0 - (1.0 - unknown) * sure, 1.0 - unknown)
    return doubt

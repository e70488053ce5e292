"""Intervals of ranking metrics by bootstrap over images: would other images of the same kinds give other figures?

Known and unknown images are drawn with replacement, each as many as there are. All methods get the same draws, so the
difference of two methods has an interval of its own, which is narrower than theirs. The draws hold for images that are
independent: many pictures of one scene make the intervals too narrow. The stream is not run again, so what a method
would have learned from other images is not part of them.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..arrays import Floats, Integers
from . import checking
from .checking import Scores
from .detection import auroc, recall_at_false_reject, rejectable
from .evaluation import CONFIDENCE

# So many counts of images are in memory at once.
_AT_ONCE = 2_000_000


@dataclass(frozen=True, slots=True)
class Interval:
    """A figure with its 95 % interval; all NaN if it cannot be said."""

    value: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Draws:
    """The figures of one method, over all images and over each draw.

    Attributes:
        auroc: over all images.
        recall: (R,) unknown images found at each rate of false rejects, over all images.
        drawn_auroc: (D,) the same of each draw.
        drawn_recall: (D, R) the same of each draw.
    """

    auroc: float
    recall: Floats
    drawn_auroc: Floats
    drawn_recall: Floats

    @property
    def auroc_interval(self) -> Interval:
        """Return AUROC with its interval."""
        return _interval(self.auroc, self.drawn_auroc)

    def recall_interval(self, place: int) -> Interval:
        """Return the recall at a rate with its interval."""
        return _interval(float(self.recall[place]), self.drawn_recall[:, place])

    def recall_lead(self, other: "Draws", place: int) -> Interval:
        """Return how much more is found than by another method that had the same draws."""
        value = float(self.recall[place] - other.recall[place])
        return _interval(value, self.drawn_recall[:, place] - other.drawn_recall[:, place])


def bootstrap(
    scores: Sequence[tuple[Scores, Scores]], rates: Sequence[float], draws: int = 1000, seed: int = 0
) -> list[Draws]:
    """Return the figures of several methods on the same images, with the same draws of these images.

    Args:
        scores: for each method, the scores (n,) of the known and (m,) of the unknown images, in one order for all.
        rates: false-reject rates.
        draws: number of draws.
        seed: of the draws.

    >>> known, unknown = np.array([3.0, 2.0, 1.0]), np.array([2.5, 0.0])
    >>> (one,) = bootstrap([(known, unknown)], [0.4])
    >>> one.recall.tolist(), one.recall_interval(0).high
    ([0.5], 1.0)
    """
    checked = [(checking.scores(k, "known"), checking.scores(u, "unknown")) for k, u in scores]
    points = [(auroc(k, u), np.array([recall_at_false_reject(k, u, rate) for rate in rates])) for k, u in checked]
    if not checked or not len(checked[0][0]) or not len(checked[0][1]):
        return [
            Draws(area, recall, np.full(draws, np.nan), np.full((draws, len(rates)), np.nan)) for area, recall in points
        ]
    methods = [_Ranked(known, unknown, rates) for known, unknown in checked]
    count, others = len(checked[0][0]), len(checked[0][1])
    random = np.random.default_rng(seed)
    gathered: list[list[tuple[Floats, Floats]]] = [[] for _ in methods]
    size = max(1, _AT_ONCE // (count + others))
    for first in range(0, draws, size):
        number = min(size, draws - first)
        known_counts, unknown_counts = _drawn(random, number, count), _drawn(random, number, others)
        for found, method in zip(gathered, methods, strict=True):
            found.append(method.figures(known_counts, unknown_counts))
    return [
        Draws(area, recall, np.concatenate([a for a, _ in found]), np.concatenate([r for _, r in found]))
        for (area, recall), found in zip(points, gathered, strict=True)
    ]


class _Ranked:
    """The scores of a method in ascending order, so that a draw needs no sorting."""

    def __init__(self, known: Floats, unknown: Floats, rates: Sequence[float]):
        self.known_order, self.unknown_order = np.argsort(known), np.argsort(unknown)
        ladder, queries = unknown[self.unknown_order], known[self.known_order]
        self.below = np.searchsorted(ladder, queries, side="left")
        self.tied = np.searchsorted(ladder, queries, side="right")
        self.rejected = [rejectable(len(known), rate) for rate in rates]

    def figures(self, known_counts: Integers, unknown_counts: Integers) -> tuple[Floats, Floats]:
        """Return AUROC (D,) and recall (D, R) of draws that have each image so many times, (n, D) and (m, D)."""
        known, unknown = known_counts[self.known_order], unknown_counts[self.unknown_order]
        count, total, draws = len(known), len(unknown), known.shape[1]
        reached = np.concatenate([np.zeros((1, draws), np.int64), np.cumsum(unknown, axis=0, dtype=np.int64)])
        wins = np.einsum("nd,nd->d", known, reached[self.below]) + np.einsum("nd,nd->d", known, reached[self.tied])
        passed = np.cumsum(known, axis=0, dtype=np.int32)
        recall = np.empty((draws, len(self.rejected)))
        for place, rejected in enumerate(self.rejected):
            # The threshold is the first score with more images up to it than may be rejected.
            threshold = np.minimum((passed <= rejected).sum(axis=0), count - 1)
            recall[:, place] = reached[self.below[threshold], np.arange(draws)] / total
        return wins / (2.0 * count * total), recall


def _drawn(random: np.random.Generator, draws: int, count: int) -> Integers:
    """Return how often each of `count` images is in each draw, (count, draws)."""
    places = draws * random.integers(count, size=(draws, count)) + np.arange(draws)[:, None]
    return np.bincount(places.ravel(), minlength=draws * count).reshape(count, draws)


def _interval(value: float, drawn: Floats) -> Interval:
    if math.isnan(value) or np.isnan(drawn).any():
        return Interval(value, math.nan, math.nan)
    low, high = np.quantile(drawn, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2]).tolist()
    return Interval(value, low, high)

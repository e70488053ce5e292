"""Accuracy and rejection at the system's own decisions, each share by its own name.

A label of -1 is an unknown sample. Papers call several of these "Acc": a figure must always go by the name it has
here. Every function gives NaN where the samples it speaks of are none.
"""

import math

import numpy as np

from ..arrays import Flags
from . import checking
from .checking import Classes


def known_accuracy(predicted: Classes, labels: Classes) -> float:
    """Without rejection: the share of the known samples whose best class is right (UniEnt, STAMP, CLIPTTA).

    Args:
        predicted: (N,) integers, the best class of each sample, also where it was rejected.
        labels: (N,) integers, the true class, -1 for unknown.

    >>> known_accuracy(np.array([0, 1, 1, 0]), np.array([0, 1, 0, -1]))
    0.6666666666666666
    """
    predicted, labels = _checked(predicted, labels)
    return _share(predicted == labels, labels >= 0)


def known_accuracy_with_rejection(predicted: Classes, labels: Classes, accepted: Flags) -> float:
    """The share of all known samples that were accepted and named rightly (ROSITA's AccD).

    Args:
        predicted: (N,) integers, the best class of each sample.
        labels: (N,) integers, the true class, -1 for unknown.
        accepted: (N,) bool, whether the system took the sample for known.

    >>> known_accuracy_with_rejection(np.array([0, 1, 0]), np.array([0, 1, -1]), np.array([True, False, True]))
    0.5
    """
    predicted, labels, accepted = _all_checked(predicted, labels, accepted)
    return _share((predicted == labels) & accepted, labels >= 0)


def accepted_accuracy(predicted: Classes, labels: Classes, accepted: Flags) -> float:
    """The share of the accepted known samples that were named rightly.

    Times 1 - `false_reject` this is `known_accuracy_with_rejection`.

    >>> accepted_accuracy(np.array([0, 1, 0]), np.array([0, 1, -1]), np.array([True, False, True]))
    1.0
    """
    predicted, labels, accepted = _all_checked(predicted, labels, accepted)
    return _share(predicted == labels, (labels >= 0) & accepted)


def accepted_precision(predicted: Classes, labels: Classes, accepted: Flags) -> float:
    """The share of all accepted samples, known or not, that were named rightly; an accepted unknown is an error.

    This is how often a user who sees a class name sees the right one. It moves with the ratio of known to unknown.

    >>> accepted_precision(np.array([0, 1, 0]), np.array([0, 1, -1]), np.array([True, False, True]))
    0.5
    """
    predicted, labels, accepted = _all_checked(predicted, labels, accepted)
    return _share((predicted == labels) & (labels >= 0), accepted)


def coverage(accepted: Flags) -> float:
    """The share of all samples, known or not, that were accepted.

    >>> coverage(np.array([True, False, True, True]))
    0.75
    """
    accepted = checking.flags(accepted, "accepted")
    return _share(accepted, np.ones_like(accepted))


def false_reject(labels: Classes, accepted: Flags) -> float:
    """The share of the known samples that were rejected.

    >>> false_reject(np.array([0, 1, -1]), np.array([True, False, False]))
    0.5
    """
    labels, accepted = _labels_checked(labels, accepted)
    return _share(~accepted, labels >= 0)


def unknown_recall(labels: Classes, accepted: Flags) -> float:
    """The share of the unknown samples that were rejected (ROSITA's AccU).

    >>> unknown_recall(np.array([0, -1, -1]), np.array([True, False, True]))
    0.5
    """
    labels, accepted = _labels_checked(labels, accepted)
    return _share(~accepted, labels < 0)


def balanced_accuracy(labels: Classes, accepted: Flags) -> float:
    """How well known and unknown are told apart: the mean of 1 - `false_reject` and `unknown_recall`.

    Unlike the share of right decisions it does not move with the ratio of known to unknown. To accept everything, or
    nothing, gives one half; NaN where either side is missing.

    >>> balanced_accuracy(np.array([0, 1, -1]), np.array([True, False, False]))
    0.75
    """
    return (1.0 - false_reject(labels, accepted) + unknown_recall(labels, accepted)) / 2


def _share(wanted: Flags, among: Flags) -> float:
    total = int(np.count_nonzero(among))
    return int(np.count_nonzero(wanted & among)) / total if total else math.nan


def _checked(predicted: Classes, labels: Classes) -> tuple[Classes, Classes]:
    predicted, labels = checking.predictions(predicted), checking.labels(labels)
    checking.same_length(predicted=predicted, labels=labels)
    return predicted, labels


def _labels_checked(labels: Classes, accepted: Flags) -> tuple[Classes, Flags]:
    labels, accepted = checking.labels(labels), checking.flags(accepted, "accepted")
    checking.same_length(labels=labels, accepted=accepted)
    return labels, accepted


def _all_checked(predicted: Classes, labels: Classes, accepted: Flags) -> tuple[Classes, Classes, Flags]:
    predicted, labels = _checked(predicted, labels)
    labels, accepted = _labels_checked(labels, accepted)
    return predicted, labels, accepted

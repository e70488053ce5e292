"""All figures of a stream at once, as one flat row of a table.

It only calls the other modules of this package, and contains no formula itself.
"""

import math

from ..arrays import Flags
from . import checking
from .accuracy import (
    accepted_accuracy,
    accepted_precision,
    balanced_accuracy,
    coverage,
    false_reject,
    known_accuracy,
    known_accuracy_with_rejection,
    unknown_recall,
)
from .calibration import area_under_accuracy_uncertainty, ece
from .checking import Classes, Scores
from .detection import aupr, auroc, fpr_at_tpr
from .openset import h_score, oscr


def summary(
    labels: Classes,
    predicted: Classes,
    accepted: Flags,
    score: Scores,
    confidence: Scores | None = None,
    uncertainty: Scores | None = None,
) -> dict[str, float]:
    """Every metric of one stream by name; the keys are always the same, and what cannot be said is NaN.

    Of `Decisions` these are `index`, `known`, `score`, and where wanted a confidence and an uncertainty. ECE (15
    bins) and the area under accuracy over uncertainty are taken over the known samples, without rejection.

    Args:
        labels: (N,) integers, the true class, -1 for unknown.
        predicted: (N,) integers, the best class, also where the sample was rejected.
        accepted: (N,) bool, whether the system took the sample for known.
        score: (N,) familiarity.
        confidence: (N,) from 0 to 1, such as the largest class probability; None: `ece` is NaN.
        uncertainty: (N,) larger is less certain; None: `area_under_accuracy_uncertainty` is NaN.

    >>> import numpy as np
    >>> labels, predicted = np.array([0, 1, -1]), np.array([0, 1, 1])
    >>> row = summary(labels, predicted, np.array([True, False, False]), np.array([0.9, 0.4, 0.5]))
    >>> row["known_accuracy"], row["known_accuracy_with_rejection"], row["auroc"], row["oscr"]
    (1.0, 0.5, 0.5, 0.5)
    """
    labels, predicted, score = checking.labels(labels), checking.predictions(predicted), checking.scores(score, "score")
    checking.same_length(labels=labels, predicted=predicted, score=score)
    known = labels >= 0
    correct = (predicted == labels)[known]
    inside, outside = score[known], score[~known]
    accuracy, separation = known_accuracy(predicted, labels), auroc(inside, outside)
    accuracy_with_rejection = known_accuracy_with_rejection(predicted, labels, accepted)
    recall = unknown_recall(labels, accepted)
    return {
        "known_samples": len(inside),
        "unknown_samples": len(outside),
        "known_accuracy": accuracy,
        "known_accuracy_with_rejection": accuracy_with_rejection,
        "accepted_accuracy": accepted_accuracy(predicted, labels, accepted),
        "accepted_precision": accepted_precision(predicted, labels, accepted),
        "coverage": coverage(accepted),
        "false_reject": false_reject(labels, accepted),
        "unknown_recall": recall,
        "balanced_accuracy": balanced_accuracy(labels, accepted),
        "auroc": separation,
        "fpr95_known_positive": fpr_at_tpr(inside, outside, 0.95, positive="known"),
        "fpr95_unknown_positive": fpr_at_tpr(inside, outside, 0.95, positive="unknown"),
        "aupr_known_positive": aupr(inside, outside, positive="known"),
        "aupr_unknown_positive": aupr(inside, outside, positive="unknown"),
        "oscr": oscr(inside, correct, outside),
        "h_score_accuracy_auroc": h_score(accuracy, separation),
        "h_score_accepted_recall": h_score(accuracy_with_rejection, recall),
        **_calibration(known, correct, confidence, uncertainty),
    }


def _calibration(
    known: Flags, correct: Flags, confidence: Scores | None, uncertainty: Scores | None
) -> dict[str, float]:
    values = {"ece": math.nan, "area_under_accuracy_uncertainty": math.nan}
    if confidence is not None:
        confidence = checking.shares(confidence, "confidence")
        checking.same_length(labels=known, confidence=confidence)
        values["ece"] = ece(confidence[known], correct)
    if uncertainty is not None:
        uncertainty = checking.scores(uncertainty, "uncertainty")
        checking.same_length(labels=known, uncertainty=uncertainty)
        values["area_under_accuracy_uncertainty"] = area_under_accuracy_uncertainty(uncertainty[known], correct)
    return values

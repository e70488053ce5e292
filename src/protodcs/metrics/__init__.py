"""Accuracy, detection, open-set and calibration figures: plain functions over numpy arrays.

    from protodcs import metrics

    known = labels >= 0
    metrics.auroc(decisions.score[known], decisions.score[~known])
    metrics.summary(labels, decisions.index, decisions.known, decisions.score)

Scores grow with familiarity, labels are -1 for unknown, all shares lie in 0 to 1, and an empty side gives NaN.
"""

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
from .averaging import per_group, per_group_mean, pooled
from .bootstrap import Draws, Interval, bootstrap
from .calibration import Reliability, accuracy_uncertainty_curve, area_under_accuracy_uncertainty, ece, reliability
from .detection import aupr, auroc, fpr_at_tpr, recall_at_false_reject
from .evaluation import Evaluation, Proportion, evaluate
from .openset import h_score, oscr, oscr_curve, oscr_legacy
from .summary import summary

__all__ = [
    "Draws",
    "Evaluation",
    "Interval",
    "Proportion",
    "Reliability",
    "accepted_accuracy",
    "accepted_precision",
    "accuracy_uncertainty_curve",
    "area_under_accuracy_uncertainty",
    "aupr",
    "auroc",
    "balanced_accuracy",
    "bootstrap",
    "coverage",
    "ece",
    "evaluate",
    "false_reject",
    "fpr_at_tpr",
    "h_score",
    "known_accuracy",
    "known_accuracy_with_rejection",
    "oscr",
    "oscr_curve",
    "oscr_legacy",
    "per_group",
    "per_group_mean",
    "pooled",
    "recall_at_false_reject",
    "reliability",
    "summary",
    "unknown_recall",
]

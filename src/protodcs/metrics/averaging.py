"""One figure for a stream of several corruptions: the mean of the figures of each, or the figure of all samples.

The two are different quantities: scores that separate well within each corruption may overlap between them. A table
must say which it shows. No group is ever left out silently.
"""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import InputError
from . import checking
from .checking import Groups

Metric = Callable[..., float]
Column = NDArray[Any]


def pooled(metric: Metric, *columns: Column) -> float:
    """The metric over all samples at once, whatever group they are of.

    Args:
        metric: takes the columns and gives a number.
        columns: arrays with one value or row a sample, all of one length.
    """
    checking.same_length(**_checked(columns))
    return float(metric(*columns))


def per_group(metric: Metric, groups: Groups, *columns: Column) -> dict[Any, float]:
    """The metric of each group, in the order in which the groups first appear.

    Args:
        metric: takes the columns, cut to one group, and gives a number.
        groups: (N,) the group of each sample, integers or strings, such as the name of its corruption.
        columns: arrays with one value or row a sample.

    >>> from protodcs.metrics import known_accuracy
    >>> groups = np.array(["snow", "fog", "fog", "fog"])
    >>> predicted, labels = np.array([0, 1, 1, 0]), np.array([1, 1, 1, 0])
    >>> per_group(known_accuracy, groups, predicted, labels)
    {'snow': 0.0, 'fog': 1.0}
    >>> per_group_mean(known_accuracy, groups, predicted, labels), pooled(known_accuracy, predicted, labels)
    (0.5, 0.75)
    """
    groups = checking.groups(groups, "groups")
    checking.same_length(groups=groups, **_checked(columns))
    names, first, members = np.unique(groups, return_index=True, return_inverse=True)
    # Sorted by group, the order of the stream kept within each: a group is then one slice.
    order = np.argsort(members, kind="stable")
    stops = np.cumsum(np.bincount(members, minlength=len(names)))
    starts = np.concatenate([[0], stops[:-1]]) if len(names) else stops
    values = {}
    for place in np.argsort(first):
        rows = order[starts[place] : stops[place]]
        values[names[place].item()] = float(metric(*(column[rows] for column in columns)))
    return values


def per_group_mean(metric: Metric, groups: Groups, *columns: Column) -> float:
    """The plain mean of the metric over the groups, each counting the same whatever its size.

    NaN without groups, and NaN if the metric of a group is NaN: leave out such a group yourself, and say so.

    Args:
        metric: takes the columns, cut to one group, and gives a number.
        groups: (N,) the group of each sample, integers or strings.
        columns: arrays with one value or row a sample.
    """
    values = per_group(metric, groups, *columns)
    return math.fsum(values.values()) / len(values) if values else math.nan


def _checked(columns: tuple[Column, ...]) -> dict[str, Column]:
    """The columns by name, from "column 1"."""
    for number, column in enumerate(columns, 1):
        if not isinstance(column, np.ndarray) or column.ndim < 1:
            raise InputError(f"column {number} must be a numpy array; given: a {type(column).__name__}")
    return {f"column {number}": column for number, column in enumerate(columns, 1)}

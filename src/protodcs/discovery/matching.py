"""Carry cluster ids over from one clustering pass to the next, by the members that both have in common."""

from dataclasses import dataclass, field

import numpy as np

from ..arrays import Integers
from .reservoir import UNASSIGNED


@dataclass(frozen=True, slots=True)
class Changes:
    """What a clustering pass changed.

    Attributes:
        created: ids of new clusters.
        merged: for each cluster that became part of another one, the id of the other one.
        split: for each new cluster that was part of another one, the id of the other one.
        expired: ids of clusters that are gone.
    """

    created: list[int] = field(default_factory=list)
    merged: dict[int, int] = field(default_factory=dict)
    split: dict[int, int] = field(default_factory=dict)
    expired: list[int] = field(default_factory=list)


def match(groups: Integers, before: Integers, next_id: int) -> tuple[Integers, Changes]:
    """Return the cluster id (n,) of each sample, and the changes.

    Each group takes the id of the old cluster with which it shares most samples, if these are at least half of the
    smaller of the two. Larger overlaps go first, and each id is given once.

    Args:
        groups: new group of each sample (n,); UNASSIGNED if it has none.
        before: old cluster id of each sample (n,).
        next_id: the first id of new clusters.
    """
    changes = Changes()
    overlaps = _overlaps(groups, before)
    group_sizes, old_sizes = _sizes(groups), _sizes(before)
    id_of: dict[int, int] = {}
    taken: set[int] = set()
    # The old cluster that shares most with a group, and the group that shares most with an old cluster.
    origin_of: dict[int, tuple[int, int]] = {}
    target_of: dict[int, tuple[int, int]] = {}
    for count, old, group in overlaps:
        origin_of.setdefault(group, (count, old))
        target_of.setdefault(old, (count, group))
        if group not in id_of and old not in taken and 2 * count >= min(group_sizes[group], old_sizes[old]):
            id_of[group] = old
            taken.add(old)
    for group in sorted(group_sizes):
        if group not in id_of:
            id_of[group] = next_id
            shared, origin = origin_of.get(group, (0, UNASSIGNED))
            if 2 * shared > group_sizes[group]:
                changes.split[next_id] = origin
            else:
                changes.created.append(next_id)
            next_id += 1
    for old in sorted(set(old_sizes) - taken):
        shared, group = target_of.get(old, (0, UNASSIGNED))
        if 2 * shared > old_sizes[old]:
            changes.merged[old] = id_of[group]
        else:
            changes.expired.append(old)
    return np.array([id_of.get(int(group), UNASSIGNED) for group in groups], dtype=np.int64), changes


def _overlaps(groups: Integers, before: Integers) -> list[tuple[int, int, int]]:
    """Return (number of common samples, old cluster, group) of each pair that has some; the largest first."""
    both = (groups != UNASSIGNED) & (before != UNASSIGNED)
    pairs, counts = np.unique(np.stack([before[both], groups[both]], axis=1), axis=0, return_counts=True)
    found = [(int(count), int(old), int(group)) for count, (old, group) in zip(counts, pairs, strict=True)]
    return sorted(found, key=lambda overlap: (-overlap[0], overlap[1], overlap[2]))


def _sizes(labels: Integers) -> dict[int, int]:
    values, counts = np.unique(labels[labels != UNASSIGNED], return_counts=True)
    return {int(value): int(count) for value, count in zip(values, counts, strict=True)}

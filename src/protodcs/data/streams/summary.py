"""Summarise a manifest in numbers: its samples and their order."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...arrays import Integers
from .header import Segment, describe
from .manifest import UNKNOWN, Manifest


def summary(manifest: Manifest) -> dict[str, Any]:
    """What a stream holds, JSON-ready."""
    unknown = manifest.label == UNKNOWN
    runs = run_lengths(unknown)
    return {
        "protocol": manifest.protocol,
        "options": dict(manifest.options),
        "seed": manifest.seed,
        "hash": manifest.hash,
        "samples": len(manifest),
        "known": int((~unknown).sum()),
        "unknown": int(unknown.sum()),
        "share_of_unknown": float(unknown.mean()),
        "classes": list(manifest.classes),
        "sources": [
            {**entry, "samples": int((manifest.source == number).sum())}
            for number, entry in enumerate(describe(manifest.sources))
        ],
        "segments": [
            {**entry, **_content(segment, unknown)}
            for segment, entry in zip(manifest.segments, describe(manifest.segments), strict=True)
        ],
        "mean_run_of_unknown": float(runs.mean()) if len(runs) else 0.0,
        "longest_run_of_unknown": int(runs.max()) if len(runs) else 0,
        "same_class_as_the_known_before": _repeats(manifest.label[~unknown]),
    }


def run_lengths(flags: NDArray[np.bool_]) -> Integers:
    """The lengths of the unbroken stretches of true values, in order."""
    edges = np.diff(np.concatenate([[False], flags, [False]]).astype(np.int8))
    lengths: Integers = np.flatnonzero(edges == -1) - np.flatnonzero(edges == 1)
    return lengths


def _content(segment: Segment, unknown: NDArray[np.bool_]) -> dict[str, int]:
    strange = int(unknown[segment.rows].sum())
    return {"known": segment.length - strange, "unknown": strange}


def _repeats(labels: Integers) -> float:
    return float((labels[1:] == labels[:-1]).mean()) if len(labels) > 1 else 0.0

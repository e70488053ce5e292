"""What a method did sample by sample, for figures: arrays and a header, in one safetensors file.

A trace is written beside the rows of a cell that asks for it. Reading one never runs a method.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from ..atomic_io import replace_file
from ..errors import DataError


@dataclass(frozen=True)
class Trace:
    """One cell, sample by sample.

    Attributes:
        about: the cell's identity (the columns `rows.IDENTITY` without segment and position), the "command" that ran
            it, its "temperature", its "segments" (titles in order), and "first_fit": the sequence at which the mixture
            was first fitted, or None where it was not.
        arrays: by name, each (N,): label (-1 unknown), segment (place in "segments"), index, known, score, openness,
            openness_first, p_unknown, aleatoric, epistemic, confidence, entropy (nats, of the class probabilities),
            trusted, cached, evolved. Of ProtoDCS also: cache_early and cache_late (M, d) features in the visual cache
            when a mixture could first be fitted and at the end, cache_early_class and cache_late_class (M,); window
            (W,) the last values of openness (of -score where the stream verifies), mixture (2, 3) weight, mean,
            variance of its components, known first; prototypes (K, d).
    """

    about: dict[str, Any]
    arrays: dict[str, NDArray[Any]]


def write(file: Path, trace: Trace) -> None:
    """Write a trace in one step."""
    arrays = {name: np.ascontiguousarray(array) for name, array in trace.arrays.items()}
    replace_file(file, save(arrays, metadata={"about": json.dumps(trace.about, sort_keys=True)}))


def read(file: Path) -> Trace:
    """The trace of a file."""
    try:
        with safe_open(file, "np") as opened:
            about = json.loads((opened.metadata() or {})["about"])
            return Trace(about, {name: opened.get_tensor(name) for name in opened.keys()})  # noqa: SIM118
    except (OSError, SafetensorError, KeyError, ValueError) as problem:
        raise DataError(f"{file} is not a trace of `protodcs bench run`: {problem}") from None


def is_whole(file: Path) -> bool:
    """Whether this is a trace."""
    try:
        with safe_open(file, "np") as opened:
            return "about" in (opened.metadata() or {})
    except (OSError, SafetensorError):
        return False


def read_folder(folder: Path) -> list[Trace]:
    """All traces of a folder of results."""
    return [read(file) for file in sorted((folder / "traces").glob("*.safetensors"))]

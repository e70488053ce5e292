"""The process that reads a MATLAB file: `python -m ... FILE FOLDER NAME...` writes each array to FOLDER/NAME.npy.

If it fails, it prints one line and exits with 1. A damaged file may also crash it.
"""

import sys
import warnings
from pathlib import Path

import numpy as np

# MATLAB's names of numbers, which numpy has too.
_NUMBERS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "single", "double")
# Photographs shrink by less than half, so arrays of far more bytes than the file are an attack or damage.
_MAX_RATIO = 20
# Address space of this process beside the arrays.
_SPARE_BYTES = 4 * 2**30


def main(path: Path, folder: Path, wanted: set[str]) -> None:
    """Write the wanted arrays of a file."""
    from scipy.io import loadmat, whosmat

    most = _MAX_RATIO * path.stat().st_size
    _limit_memory(_SPARE_BYTES + 3 * most)
    sizes = {name: (shape, kind) for name, shape, kind in whosmat(path) if name in wanted}
    for name, (shape, kind) in sizes.items():
        if kind not in _NUMBERS or min(shape, default=-1) < 0:
            sys.exit(f"the variable {name!r} is not a plain array of numbers")
        if float(np.prod(shape, dtype=np.float64)) * np.dtype(kind).itemsize > most:
            sys.exit(f"the variable {name!r} of shape {shape} unpacks to far more than the file")
    for name, array in loadmat(path, variable_names=list(sizes)).items():
        if name in sizes:
            if not isinstance(array, np.ndarray) or array.dtype.kind not in "iuf":
                sys.exit(f"the variable {name!r} is not a plain array of numbers")
            np.save(folder / name, array)


def _limit_memory(most: int) -> None:
    try:
        import resource
    except ImportError:  # Not on Windows.
        return
    resource.setrlimit(resource.RLIMIT_AS, (most, most))


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    try:
        main(Path(sys.argv[1]), Path(sys.argv[2]), set(sys.argv[3:]))
    # scipy raises many kinds of errors for damaged files.
    except Exception as problem:
        sys.exit(f"not a MATLAB 5 file that can be read: {' '.join(str(problem).split())[:200]}")

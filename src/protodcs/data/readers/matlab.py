"""Read arrays of numbers from MATLAB 5 files, the format of SVHN, with scipy.

A damaged file can crash scipy's reader, so `matlab_process` runs it in a process of its own.
"""

import importlib.util
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...errors import DataError, UsageError

# The largest file of SVHN has 1.3 GB.
MAX_BYTES = 2**31
_SECONDS = 600


def read_arrays(path: Path, wanted: tuple[str, ...]) -> dict[str, NDArray[Any]]:
    """Return those arrays of the file that have one of the wanted names.

    Raises:
        DataError: the file is damaged or no MATLAB 5 file, or a wanted name is not a plain array of numbers.
        UsageError: scipy is not installed.
    """
    if importlib.util.find_spec("scipy") is None:
        raise UsageError("reading .mat files needs the package scipy: pip install 'protodcs[data]'")
    if path.stat().st_size > MAX_BYTES:
        raise DataError(f"{path}: larger than the {MAX_BYTES:,} bytes that are read")
    with TemporaryDirectory() as folder:
        command = [sys.executable, "-m", f"{__package__}.matlab_process", str(path), folder, *wanted]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, check=False)
        except subprocess.TimeoutExpired:
            raise DataError(f"{path}: not read after {_SECONDS} seconds; the file is probably damaged") from None
        if done.returncode < 0:
            raise DataError(f"{path}: not a MATLAB 5 file that can be read: it is damaged and crashes the reader")
        if done.returncode:
            raise DataError(f"{path}: {done.stderr.strip()[-300:]}")
        return {file.stem: np.load(file) for file in sorted(Path(folder).iterdir())}

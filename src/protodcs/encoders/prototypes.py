"""Prototypes of class names, kept on disk under the hash of all they depend on.

A thousand names in eighty templates are minutes of work on a CPU and never change. A file that is damaged, or cannot be
written, costs the work again and nothing else. The least recently used files are deleted if there are too many: a
service encodes the class names that its callers make up.
"""

import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load, save

from ..atomic_io import replace_file

_ARRAY = "prototypes"
# What the files may take together. Bytes, and files.
_MAX_BYTES, _MAX_FILES = 2**30, 10_000


def folder() -> Path | None:
    """Where prototypes are kept: `$PROTODCS_CACHE`, else the user's cache folder; None when switched off with ""."""
    chosen = os.environ.get("PROTODCS_CACHE")
    if chosen is not None:
        return Path(chosen) / "prototypes" if chosen else None
    try:
        home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    except RuntimeError:  # a user without a home, as in some containers
        return None
    return home / "protodcs" / "prototypes"


def remembered(
    key: str, shape: tuple[int | None, int], compute: Callable[[], NDArray[np.float32]]
) -> NDArray[np.float32]:
    """Return the array that is stored under `key`, or compute and store it. Any number of rows fits None."""
    home = folder()
    if home is None:
        return compute()
    file = home / f"{key}.safetensors"
    array = _read(file, shape)
    if array is None:
        array = compute()
        _keep(file, array)
    return array


def _read(file: Path, shape: tuple[int | None, int]) -> NDArray[np.float32] | None:
    try:
        array: NDArray[np.float32] = load(file.read_bytes())[_ARRAY]
    except Exception:  # missing, unreadable or damaged: all mean "compute it again"
        return None
    # Mark it as used; a folder that cannot be written to stays as it is.
    with suppress(OSError):
        os.utime(file)
    fits = array.ndim == 2 and array.shape[1] == shape[1] and shape[0] in (None, len(array))
    whole = fits and array.dtype == np.float32 and bool(np.all(np.isfinite(array)))
    return array if whole else None


def _keep(file: Path, array: NDArray[np.float32]) -> None:
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        replace_file(file, save({_ARRAY: np.ascontiguousarray(array)}))
        _delete_oldest(file.parent)
    except OSError:
        return


def _delete_oldest(home: Path) -> None:
    """Delete the least recently used files until the others are within the limits."""
    with os.scandir(home) as entries:
        found = [(entry.stat(), entry.path) for entry in entries if entry.name.endswith(".safetensors")]
    found.sort(key=lambda file: file[0].st_mtime_ns)
    size, count = sum(about.st_size for about, _ in found), len(found)
    for about, path in found:
        if size <= _MAX_BYTES and count <= _MAX_FILES:
            return
        # Another process may have deleted it already.
        Path(path).unlink(missing_ok=True)
        size, count = size - about.st_size, count - 1

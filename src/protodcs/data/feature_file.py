"""Features of your own, read from a file: .npy, .npz, .safetensors or .parquet.

A .npy file is one array. The others may have several, by name:

| name | content |
|---|---|
| `features` | (N, d) floats, one row for each image |
| `labels` | (N,) the class of each: its position, or its name; -1 or "unknown" if it belongs to no class |
| `prototypes` | (K, d) floats, the text feature of each class |
| `classes` | (K,) the class names; not in .safetensors, which has no text |
| `vocabulary` | (V, d) floats, the text features of names of other things |

A Parquet file has the columns `feature`, a list of numbers in each row, and `label`, as `protodcs features` writes
them. A label of null is unknown.
"""

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..arrays import Features
from ..errors import DataError, InputError, MissingPackageError

ENDINGS = (".npy", ".npz", ".safetensors", ".parquet")
_ROWS = ("features", "prototypes", "vocabulary")


class FeatureFile(NamedTuple):
    """The arrays of a file; None if it has none of that name."""

    features: Features
    labels: NDArray[Any] | None = None
    prototypes: Features | None = None
    classes: tuple[str, ...] | None = None
    vocabulary: Features | None = None


def read_features(file: Path) -> FeatureFile:
    """Return what a file of features has."""
    arrays = _arrays(file)
    if "features" not in arrays:
        found = ", ".join(sorted(arrays)) or "none"
        raise DataError(f"{file} has no array `features`. Its arrays: {found}.")
    rows = {name: _rows(file, name, arrays[name]) for name in _ROWS if name in arrays}
    classes = arrays.get("classes")
    return FeatureFile(
        rows["features"],
        arrays.get("labels"),
        rows.get("prototypes"),
        None if classes is None else tuple(str(name) for name in classes),
        rows.get("vocabulary"),
    )


def read_array(file: Path, name: str) -> NDArray[Any]:
    """Return one array: that of a .npy file, or the one with this name."""
    arrays = _arrays(file)
    if file.suffix == ".npy":
        return arrays["features"]
    if name not in arrays:
        raise DataError(f"{file} has no array `{name}`. Its arrays: {', '.join(sorted(arrays)) or 'none'}.")
    return arrays[name]


def _rows(file: Path, name: str, array: NDArray[Any]) -> Features:
    if array.ndim != 2 or array.dtype.kind != "f":
        raise DataError(f"{file}: `{name}` must be an array of floats (n, d); it is {array.dtype} {array.shape}.")
    return array.astype(np.float32, copy=False)


def _arrays(file: Path) -> dict[str, NDArray[Any]]:
    if file.suffix not in ENDINGS:
        raise InputError(f"Features are read from {', '.join(ENDINGS)}; given: {file.name!r}")
    if not file.is_file():
        raise DataError(f"There is no file {file}.")
    if file.suffix == ".parquet":
        return _of_parquet(file)
    if file.suffix == ".safetensors":
        from safetensors import SafetensorError
        from safetensors.numpy import load_file

        try:
            return dict(load_file(file))
        except (SafetensorError, OSError, KeyError) as problem:
            raise DataError(f"{file} is not a safetensors file: {problem}") from None
    try:
        loaded = np.load(file, allow_pickle=False)
        return {"features": loaded} if file.suffix == ".npy" else {name: loaded[name] for name in loaded.files}
    except (ValueError, EOFError, OSError, KeyError) as problem:
        raise DataError(f"{file} is not a file of numpy: {problem}") from None


def _of_parquet(file: Path) -> dict[str, NDArray[Any]]:
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ModuleNotFoundError:
        raise MissingPackageError("Parquet files need pyarrow: pip install 'protodcs[data]'") from None
    try:
        table = pq.read_table(file)
    except (OSError, pa.ArrowException) as problem:
        raise DataError(f"{file} is not a Parquet file: {problem}") from None
    if "feature" not in table.column_names:
        raise DataError(f"{file} has no column `feature`. Its columns: {', '.join(table.column_names)}.")
    column = table.column("feature").combine_chunks()
    try:
        flat = column.flatten().to_numpy(zero_copy_only=False)
        found: dict[str, NDArray[Any]] = {"features": flat.reshape(len(column), -1)}
    except (AttributeError, ValueError):
        raise DataError(f"{file}: the column `feature` must have a list of numbers in each row, all as long.") from None
    if "label" in table.column_names:
        labels = table.column("label").to_pylist()
        numbers = all(label is None or isinstance(label, int) for label in labels)
        if numbers:
            found["labels"] = np.array([-1 if label is None else label for label in labels], dtype=np.int64)
        else:
            found["labels"] = np.array(["unknown" if label is None else str(label) for label in labels])
    return found

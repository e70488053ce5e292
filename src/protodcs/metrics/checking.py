"""Check the arguments of metrics: one-dimensional numpy arrays of the right type and length.

Every score is widened to float64, which loses nothing, so that a tie stays a tie whatever the type it came in.
Nothing here may change an array of the caller.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..arrays import Flags
from ..errors import InputError

Scores = NDArray[np.floating]
Classes = NDArray[np.integer]
Groups = NDArray[Any]

_FLOATS = (np.float16, np.float32, np.float64)
UNKNOWN = -1


def scores(values: Any, name: str) -> NDArray[np.float64]:
    """Real numbers, infinities included, as float64."""
    array = _column(values, name)
    # Integers and long doubles are refused because float64 could merge two of them into a tie that is none.
    if array.dtype.type not in _FLOATS:
        raise InputError(
            f"{name} must be float16, float32 or float64, other numbers: convert them; given: {_described(array)}"
        )
    missing = int(np.isnan(array).sum())
    if missing:
        raise InputError(f"{name} must not hold NaN, find where it comes from; given: NaN {missing} times")
    return array.astype(np.float64, copy=False)


def shares(values: Any, name: str) -> NDArray[np.float64]:
    """Numbers from 0 to 1, as float64."""
    array = scores(values, name)
    if len(array) and not (array.min() >= 0.0 and array.max() <= 1.0):
        raise InputError(f"{name} must lie in 0 to 1; given: {array.min():g} to {array.max():g}")
    return array


def flags(values: Any, name: str) -> Flags:
    """Yes or no for each sample."""
    array = _column(values, name)
    if array.dtype != np.bool_:
        raise InputError(f"{name} must be of type bool, such as `index == labels`; given: {_described(array)}")
    return array


def labels(values: Any) -> Classes:
    """The true class of each sample, -1 for an unknown one."""
    array = _integers(values, "labels")
    if len(array) and array.min() < UNKNOWN:
        raise InputError(f"labels must be -1 for unknown or a class from 0; given: {array.min()}")
    return array


def predictions(values: Any) -> Classes:
    """Return the best class of each sample, also of rejected samples."""
    array = _integers(values, "predicted")
    if len(array) and array.min() < 0:
        raise InputError(
            "predicted must be the best class from 0, also of a rejected sample: a rejection is said by `accepted`; "
            f"given: {array.min()}"
        )
    return array


def groups(values: Any, name: str) -> Groups:
    """The group of each sample, by number or by name."""
    array = _column(values, name)
    if array.dtype.kind not in "iuU":
        raise InputError(f"{name} must be integers or strings; given: {_described(array)}")
    return array


def same_length(**columns: Any) -> None:
    """All columns speak of the same samples."""
    lengths = {name: len(column) for name, column in columns.items()}
    if len(set(lengths.values())) > 1:
        given = ", ".join(f"{name} {length}" for name, length in lengths.items())
        raise InputError(f"{', '.join(lengths)} must be of the same length, one value a sample; given: {given}")


def share(value: Any, name: str) -> float:
    """One number from 0 to 1, or NaN."""
    if isinstance(value, bool) or not isinstance(value, (int, float, np.integer, np.floating)):
        raise InputError(f"{name} must be a number from 0 to 1; given: {type(value).__name__}")
    if value < 0 or value > 1:
        raise InputError(f"{name} must lie in 0 to 1, a percentage: divide it by 100; given: {value:g}")
    return float(value)


def _column(values: Any, name: str) -> NDArray[Any]:
    if not isinstance(values, np.ndarray) or values.ndim != 1:
        raise InputError(f"{name} must be a numpy array of one dimension; given: {_described(values)}")
    return np.asarray(values)


def _integers(values: Any, name: str) -> Classes:
    array = _column(values, name)
    if array.dtype.kind not in "iu":
        raise InputError(f"{name} must be integers; given: {_described(array)}")
    return array


def _described(value: Any) -> str:
    if isinstance(value, np.ndarray):
        return f"an array of shape {value.shape} and type {value.dtype}"
    return f"a {type(value).__name__}"

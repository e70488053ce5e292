"""Checks of what a state contains. Whatever no engine can have exported is a StateError."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..arrays import Feature
from ..errors import StateError
from .prototypes import Prototypes
from .state import Arrays, Header
from .vocabulary import Vocabulary, VocabularyLike

_UNIT_TOLERANCE = 1e-5
# How much one update of a running mean in float32 may add to its squared length by rounding.
_ROUNDING = 4.0 * float(np.finfo(np.float32).eps)

# Numbers of a state beside its arrays.
Counters = dict[str, int | float | bool | None]


def check_same_encoder(stored: str | None, given: str | None, what: str) -> None:
    """Raise StateError if a state was learned with another encoder. `what` names what to start instead."""
    if stored is not None and given is not None and stored != given:
        raise StateError(
            f"The state was learned on features of encoder {stored!r}; given: {given!r}. Restore it with its own "
            f"encoder, or start a new {what}."
        )


def prototypes_of(
    header: Header, arrays: Arrays, shared: Prototypes | None, vocabulary: VocabularyLike | None
) -> Prototypes:
    """Return the initial prototypes of a state with its vocabulary: `shared` if they are the same, or its own."""
    if vocabulary is None and shared is not None:
        vocabulary = shared.vocabulary
    found = _prototypes_of(header, arrays, shared)
    return found.with_vocabulary(_vocabulary_of(header.vocabulary, vocabulary))


def _vocabulary_of(stored: str | None, given: VocabularyLike | None) -> Vocabulary | None:
    """Return the vocabulary that a state was learned with. Raise StateError if it is not the one that was `given`."""
    if stored is None:
        return None
    if given is None:
        raise StateError(
            f"The state was learned with the vocabulary {stored}. States don't contain it: pass it to restore, as "
            "`vocabulary`."
        )
    vocabulary = Vocabulary.of(given)
    if vocabulary.fingerprint != stored:
        raise StateError(
            f"The state was learned with the vocabulary {stored}; given: {vocabulary.fingerprint}. Restore it with its "
            "own vocabulary, or start a new engine."
        )
    return vocabulary


def _prototypes_of(header: Header, arrays: Arrays, shared: Prototypes | None) -> Prototypes:
    if header.prototypes is None:
        own = _stored_prototypes(arrays, len(header.classes))
        wanted = own.fingerprint if shared is not None else None
    elif "initial_prototypes" in arrays:
        raise StateError("the state holds prototypes and says that it leaves them out")
    else:
        own, wanted = None, header.prototypes
    if shared is None:
        if own is None:
            raise StateError(
                f"the state leaves out its prototypes, those with the fingerprint {header.prototypes}: give them to "
                "restore, as `prototypes`"
            )
        return own
    if shared.fingerprint != wanted:
        raise StateError(
            f"the state was learned from prototypes with the fingerprint {wanted}, and those given have "
            f"{shared.fingerprint}: restore it with its own prototypes, or start a new engine"
        )
    if len(shared) != len(header.classes):
        raise StateError(f"the state names {len(header.classes)} classes, and its prototypes are {len(shared)}")
    return shared


def _stored_prototypes(arrays: Arrays, classes: int) -> Prototypes:
    """Return the initial prototypes that a state contains, one unit row per class."""
    initial = required(arrays, "initial_prototypes", np.float32, (classes, None))
    if initial.shape[1] == 0:
        raise StateError("the state's prototypes have no columns")
    check_unit(initial, "initial_prototypes")
    return Prototypes.of_unit(initial.copy())


def required(arrays: Mapping[str, NDArray[Any]], name: str, dtype: type, shape: tuple[int | None, ...]) -> NDArray[Any]:
    """Return an array of a state if it is finite and has this type and shape. None in `shape` is any length."""
    if name not in arrays:
        raise StateError(f"the state has no array {name!r}")
    array = arrays[name]
    fits = array.shape == shape or (
        array.ndim == len(shape) and all(want in (None, got) for want, got in zip(shape, array.shape, strict=True))
    )
    if array.dtype != dtype or not fits:
        raise StateError(
            f"the state's array {name!r} has shape {array.shape} and type {array.dtype}, "
            f"it must have {shape} and {np.dtype(dtype)}"
        )
    if not np.isfinite(array).all():
        raise StateError(f"the state's array {name!r} holds values that are not finite")
    return array


def within(array: NDArray[Any], name: str, low: float, high: float) -> NDArray[Any]:
    """Return the array of a state if all its values are from `low` to `high`."""
    if not ((array >= low) & (array <= high)).all():
        raise StateError(f"the state's array {name!r} has values outside {low} to {high}")
    return array


def counter(counters: Mapping[str, Any], name: str, low: int = 0, high: int | None = None) -> int:
    """Return an integer of a state if it is from `low` to `high`."""
    value = counters.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or value < low or (high is not None and value > high):
        raise StateError(f"the state's counter {name!r} is {value!r}, it must be a whole number from {low} to {high}")
    return value


def truth(counters: Mapping[str, Any], name: str) -> bool:
    """Return a boolean of a state."""
    value = counters.get(name)
    if not isinstance(value, bool):
        raise StateError(f"the state's {name!r} is {value!r}, it must be true or false")
    return value


def decided(counters: Mapping[str, Any]) -> tuple[int, int, int]:
    """Return how many samples a state has observed, learned from and called known, if the counters agree."""
    sequence = counter(counters, "sequence", high=2**62)
    learned = counter(counters, "learned", high=sequence)
    known = counter(counters, "known", high=learned)
    if learned + counter(counters, "skipped") != sequence or known + counter(counters, "unknown") != learned:
        raise StateError("the state's known, unknown and skipped samples do not add up to all samples")
    return sequence, learned, known


def check_unit(rows: Feature, name: str) -> None:
    """Raise StateError if some rows of a state are not of length one. They are float32, so to about seven digits."""
    if not (np.abs(np.einsum("kd,kd->k", rows, rows) - 1.0) < _UNIT_TOLERANCE).all():
        raise StateError(f"the state's array {name!r} has rows that are not of length one")


def check_means(rows: Feature, name: str, updates: int) -> None:
    """Raise StateError if some rows cannot be running means of unit vectors after this many updates.

    They are no longer than one, up to the rounding of each update. One of length zero would have no direction.
    """
    squares = np.einsum("kd,kd->k", rows, rows, dtype=np.float64)
    within(squares, name, 1e-12, 1.0 + _UNIT_TOLERANCE + _ROUNDING * updates)

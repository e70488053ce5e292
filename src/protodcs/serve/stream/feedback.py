"""Pack feedback as journal records store it: a feature or a position, and the label that a person gave."""

import struct
from typing import NamedTuple

from ...errors import InputError

# What is said, the position or -1, and the number of bytes of the feature. Feature and label follow.
_HEAD = struct.Struct("<BqI")
_UNKNOWN, _CLASS, _WITHDRAWN = range(3)


class Feedback(NamedTuple):
    """What a person said about a sample.

    Attributes:
        label: its class; None if it is unknown.
        position: of the sample in the journal; None if the feature is given.
        feature: as float32, little-endian.
        withdrawn: what was said before no longer holds.
    """

    label: str | None
    position: int | None = None
    feature: bytes = b""
    withdrawn: bool = False


def pack_feedback(feedback: Feedback) -> bytes:
    """Return feedback as bytes."""
    position = -1 if feedback.position is None else feedback.position
    said = _WITHDRAWN if feedback.withdrawn else _UNKNOWN if feedback.label is None else _CLASS
    head = _HEAD.pack(said, position, len(feedback.feature))
    return head + feedback.feature + (feedback.label or "").encode()


def unpack_feedback(payload: bytes) -> Feedback:
    """Return the feedback that was packed. Raise InputError for anything else."""
    try:
        said, position, size = _HEAD.unpack_from(payload)
        end = _HEAD.size + size
        label = payload[end:].decode() if said == _CLASS else None
    except (struct.error, UnicodeDecodeError):
        raise InputError("The feedback cannot be read.") from None
    feature = payload[_HEAD.size : end]
    return Feedback(label, None if position < 0 else position, feature, withdrawn=said == _WITHDRAWN)

"""What callers were told, kept for those who ask again.

A decision is packed so that it comes back to the bit. `Remembered` is bounded: it keeps every answer that the journal
still holds, and behind that the newest ones, by number and by age. It must never forget on its own account: what it
forgets depends on its records alone, so that a stream that is woken from its journal remembers the same.
"""

import hashlib
import struct
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from ...core.decision import Decision, decided
from ...errors import StoreError
from .records import Record

# Flags, index, sequence and the six numbers of a decision; its label follows.
_DECISION = struct.Struct("<BIQdddddd")
KNOWN, TRUSTED, CACHED, EVOLVED = 1, 2, 4, 8
# Where the openness stands: behind flags, index, sequence and p_unknown.
_OPENNESS = struct.Struct("<21xd")


def pack_decision(decision: Decision) -> bytes:
    """A decision as bytes, without the scores of every class."""
    flags = KNOWN * decision.known + TRUSTED * decision.trusted + CACHED * decision.cached + EVOLVED * decision.evolved
    numbers = _DECISION.pack(
        flags,
        decision.index,
        decision.sequence,
        decision.p_unknown,
        decision.openness,
        decision.openness_first,
        decision.score,
        decision.aleatoric,
        decision.epistemic,
    )
    return numbers + (decision.label or "").encode()


def unpack_decision(answer: bytes) -> Decision:
    """The decision that `pack_decision` was given."""
    try:
        flags, index, sequence, p_unknown, openness, first, score, aleatoric, epistemic = _DECISION.unpack_from(answer)
        label = answer[_DECISION.size :].decode() if flags & KNOWN else None
    except (struct.error, UnicodeDecodeError):
        raise StoreError("an answer in the store is damaged") from None
    return decided(
        bool(flags & KNOWN),
        index,
        label,
        p_unknown,
        openness,
        first,
        score,
        None,
        aleatoric,
        epistemic,
        bool(flags & TRUSTED),
        bool(flags & CACHED),
        bool(flags & EVOLVED),
        sequence,
    )


def openness_of(answer: bytes) -> float:
    """The openness of a packed decision, and nothing else of it."""
    openness: float = _OPENNESS.unpack_from(answer)[0]
    return openness


def fingerprint(payload: bytes) -> bytes:
    """Eight bytes that tell one request's content from another's."""
    return hashlib.blake2b(payload, digest_size=8).digest()


class Remembered:
    """The newest records of a stream by their keys; in place of its payload each holds a fingerprint of it.

    Args:
        most: how many are kept behind the newest snapshot.
        seconds: and how old they may be, beside the newest one.
    """

    def __init__(self, most: int, seconds: float):
        self._most = most
        self._milliseconds = int(1000 * seconds)
        self._records: OrderedDict[str, Record] = OrderedDict()

    def add(self, record: Record) -> None:
        """Remember a record that was just written."""
        self._records[record.key] = replace(record, payload=fingerprint(record.payload))

    def put_back(self, record: Record) -> None:
        """Remember a record as `__iter__` gave it."""
        self._records[record.key] = record

    def find(self, key: str) -> Record | None:
        """The record of a key, if it is still remembered."""
        return self._records.get(key)

    def forget(self, covered: int) -> None:
        """Let go of what is too old among the records before position `covered`, which a snapshot holds."""
        records = list(self._records.values())
        for oldest in records:
            newest = records[-1]
            young = newest.time - oldest.time <= self._milliseconds
            if oldest.position >= covered or (young and newest.position - oldest.position < self._most):
                return
            del self._records[oldest.key]

    def __iter__(self) -> Iterator[Record]:
        return iter(self._records.values())

    def __len__(self) -> int:
        return len(self._records)


def described(answer: bytes) -> dict[str, Any]:
    """A packed decision as callers are told it, JSON-ready."""
    said = unpack_decision(answer).to_dict()
    del said["scores"]
    return said


def told(record: Record) -> dict[str, Any]:
    """What the caller of an observe is told, JSON-ready."""
    return {**described(record.answer), "position": record.position, "epoch": record.epoch}

"""Pack decisions as journal records store them, and describe them for responses.

A packed decision unpacks to the same bits.
"""

import math
import struct
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from ...core.decision import REASONS, Decision, Decisions, outcome_name
from ...errors import StoreError
from ..log.entries import LogEntry
from ..messages import Reply, Request
from .records import Record

# Flags, index, sequence and the six numbers of a decision. The label of a known sample follows, or the cluster that an
# unknown one joined: its number and its name.
_DECISION = struct.Struct("<BIQdddddd")
_NUMBERS = ("p_unknown", "openness", "openness_first", "score", "aleatoric", "epistemic")
_DECISIONS = np.dtype([("flags", "u1"), ("index", "<u4"), ("sequence", "<u8"), *((name, "<f8") for name in _NUMBERS)])
KNOWN, TRUSTED, CACHED, EVOLVED, UNSURE = 1, 2, 4, 8, 128
# The three bits between the first four flags and the last hold the place of the reason in REASONS, from 1; 0 is none.
_REASON_BIT, _REASON_MASK = 4, 7
_CLUSTER = struct.Struct("<Q")
# Where the openness stands: behind flags, index, sequence and p_unknown.
_OPENNESS = struct.Struct("<21xd")
# Flags, index, p_unknown and score.
_LOGGED = struct.Struct("<BI8xd16xd")


class JoinedCluster(NamedTuple):
    """The cluster of unknown samples that a sample joined; `name` is None if it has none."""

    id: int
    name: str | None


def pack_decision(decision: Decision, joined: JoinedCluster | None = None) -> bytes:
    """Return a decision as bytes, without the scores of every class."""
    flags = KNOWN * decision.known + TRUSTED * decision.trusted + CACHED * decision.cached + EVOLVED * decision.evolved
    flags += UNSURE * decision.unsure
    if decision.reason is not None:
        flags |= (1 + REASONS.index(decision.reason)) << _REASON_BIT
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
    if joined is not None:
        return numbers + _CLUSTER.pack(joined.id) + (joined.name or "").encode()
    return numbers + (decision.label or "").encode()


def pack_decisions(decisions: Decisions) -> list[bytes]:
    """Return each decision as `pack_decision` does."""
    rows = np.empty(len(decisions), _DECISIONS)
    reasons = np.array([0 if reason is None else 1 + REASONS.index(reason) for reason in decisions.reason])
    rows["flags"] = (
        KNOWN * decisions.known
        + TRUSTED * decisions.trusted
        + CACHED * decisions.cached
        + EVOLVED * decisions.evolved
        + UNSURE * decisions.unsure
        + (reasons << _REASON_BIT)
    )
    for name in ("index", "sequence", *_NUMBERS):
        rows[name] = getattr(decisions, name)
    data, size = rows.tobytes(), _DECISION.size
    return [data[size * row : size * (row + 1)] + (label or "").encode() for row, label in enumerate(decisions.label)]


def unpack_decision(answer: bytes) -> Decision:
    """Return the decision that `pack_decision` was given."""
    fields = _unpacked(answer)
    del fields["outcome"]
    return Decision(scores=None, **fields)


def _unpacked(answer: bytes) -> dict[str, Any]:
    """Return the fields of a packed decision, all but its scores, and its outcome."""
    try:
        flags, index, sequence, p_unknown, openness, first, score, aleatoric, epistemic = _DECISION.unpack_from(answer)
        label = answer[_DECISION.size :].decode() if flags & KNOWN else None
        reason = (None, *REASONS)[flags >> _REASON_BIT & _REASON_MASK]
    except (struct.error, UnicodeDecodeError, IndexError):
        raise StoreError("an answer in the store cannot be read") from None
    known, unsure = bool(flags & KNOWN), bool(flags & UNSURE)
    return {
        "outcome": outcome_name(known, unsure),
        "known": known,
        "index": index,
        "label": label,
        "p_unknown": p_unknown,
        "openness": openness,
        "openness_first": first,
        "score": score,
        "aleatoric": aleatoric,
        "epistemic": epistemic,
        "trusted": bool(flags & TRUSTED),
        "cached": bool(flags & CACHED),
        "evolved": bool(flags & EVOLVED),
        "sequence": sequence,
        "reason": reason,
        "unsure": unsure,
    }


def openness_of(answer: bytes) -> float:
    """Return the openness of a packed decision."""
    openness: float = _OPENNESS.unpack_from(answer)[0]
    return openness


def reason_of(answer: bytes) -> str | None:
    """Return the reason of a packed decision."""
    return (None, *REASONS)[answer[0] >> _REASON_BIT & _REASON_MASK]


def described(reply: Reply) -> dict[str, Any]:
    """Return the decision of a reply as a response shows it, JSON-ready."""
    # Not by way of a `Decision`, which takes twice as long.
    answer = reply.answer
    response = _unpacked(answer)
    if not response["known"] and len(answer) >= _DECISION.size + _CLUSTER.size:
        (response["cluster"],) = _CLUSTER.unpack_from(answer, _DECISION.size)
        response["cluster_name"] = answer[_DECISION.size + _CLUSTER.size :].decode() or None
    response["position"], response["epoch"], response["repeated"] = reply.position, reply.epoch, reply.repeated
    return response


def log_entries(record: Record, requests: Sequence[Request], classes: Sequence[str]) -> list[LogEntry]:
    """Return the log entry of each row of an observe; `classes` are those of the engine that decided."""
    entries = []
    for position, (request, answer) in enumerate(zip(requests, record.answers, strict=True), record.position):
        flags, index, p_unknown, score = _LOGGED.unpack_from(answer)
        known = bool(flags & KNOWN)
        entries.append(
            LogEntry(
                position,
                record.time,
                record.key,
                request.image_ref,
                outcome_name(known, bool(flags & UNSURE)),
                known,
                classes[index],
                # JSON and SQLite cannot store other numbers.
                p_unknown if math.isfinite(p_unknown) else None,
                score if math.isfinite(score) else None,
                reason_of(answer),
                bool(request.thumbnail),
                False,
                request.thumbnail,
            )
        )
    return entries

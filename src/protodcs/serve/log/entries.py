"""Entries of the decision log, and what readers ask of it.

A worker makes an entry when it decides, and the store writes it together with the journal record of the observe. So the
log has an entry exactly if the observe is durable. Nothing in the log ever influences an engine.
"""

import json
from collections.abc import Sequence
from dataclasses import fields
from typing import Any, Final, Literal, NamedTuple

from ...core.decision import Outcome
from ...decision_log import LoggedDecision

# Outcomes, and whether the decision has a label. Their places are part of stored entries.
OUTCOMES: Final[tuple[tuple[Outcome, bool], ...]] = (
    ("known", True),
    ("unsure", True),
    ("unknown", False),
    ("unsure", False),
)
_CODES: Final = {outcome: code for code, outcome in enumerate(OUTCOMES)}
MAX_IMAGE_REF: Final = 500
_FIELDS: Final = tuple(field.name for field in fields(LoggedDecision))

# Positions from the first one up to, but without, the last one.
Range = tuple[int, int]


class LogEntry(NamedTuple):
    """One decision.

    Attributes:
        position: of the record in the journal of the stream.
        time: when, in milliseconds since 1970 by the store's clock. It never decreases along a journal.
        key: the idempotency key of the request.
        image_ref: the caller's reference to the image; None if there is none.
        outcome: known, unsure or unknown.
        known: whether the decision has a label. An unsure one may have one or not.
        nearest_class: name of the best class, also if the sample is unknown.
        p_unknown: probability that the sample belongs to no class; None if it is not finite.
        score: increases as the sample looks more known; None if it is not finite.
        reason: why the decision is less certain than it looks.
        has_thumbnail: whether a thumbnail was stored.
        rolled_back: whether a later roll-back undid what the stream learned from the sample.
        thumbnail: the JPEG file on its way to the store; empty when it is read.
    """

    position: int
    time: int
    key: str
    image_ref: str | None
    outcome: Outcome
    known: bool
    nearest_class: str
    p_unknown: float | None
    score: float | None
    reason: str | None
    has_thumbnail: bool = False
    rolled_back: bool = False
    thumbnail: bytes = b""

    @property
    def label(self) -> str | None:
        """The name of the class; None if the sample is not known."""
        return self.nearest_class if self.known else None

    @property
    def outcome_code(self) -> int:
        """The place of the outcome in `OUTCOMES`."""
        return _CODES[self.outcome, self.known]

    def pack(self) -> bytes:
        """Return the entry as bytes, without its position, its thumbnail and whether it was rolled back."""
        return json.dumps(self[1:11], ensure_ascii=False, separators=(",", ":")).encode()

    @classmethod
    def unpack(cls, position: int, data: bytes) -> "LogEntry":
        """Return the entry that `pack` wrote."""
        return cls(position, *json.loads(data))


class LogQuery(NamedTuple):
    """Which entries of a stream to read.

    Attributes:
        since, until: times in milliseconds since 1970: from `since` on, and before `until`.
        outcome: only this one.
        label: only decisions with this label.
        nearest_class: only decisions whose best class is this one, also unknown ones.
        after: position behind which the page begins, in its order.
        newest_first: the order of the entries.
        limit: maximum number of entries.
    """

    since: int | None = None
    until: int | None = None
    outcome: Outcome | None = None
    label: str | None = None
    nearest_class: str | None = None
    after: int | None = None
    newest_first: bool = True
    limit: int = 100

    def outcome_codes(self) -> list[int]:
        """Return the places in `OUTCOMES` of those that can match."""
        return [
            code
            for code, (outcome, known) in enumerate(OUTCOMES)
            if self.outcome in (None, outcome) and (known or self.label is None)
        ]

    def class_name(self) -> str | None:
        """Return the best class that all entries must have; None for any."""
        return self.label if self.label is not None else self.nearest_class

    @property
    def is_contradictory(self) -> bool:
        """Whether no entry can match."""
        two_classes = None not in (self.label, self.nearest_class) and self.label != self.nearest_class
        return not self.outcome_codes() or two_classes


class Purge(NamedTuple):
    """Which entries of a stream to delete; all if nothing is given. The fields are as in `LogQuery`."""

    since: int | None = None
    until: int | None = None
    image_ref: str | None = None


class LogLimits(NamedTuple):
    """How much of the log a stream retains.

    Attributes:
        seconds: maximum age.
        entries: maximum number of entries.
        size: maximum bytes, thumbnails included.
        tenant_size: maximum bytes of all logs of a tenant; 0: no limit.
        total_size: maximum bytes of the logs of all streams; 0: no limit.
    """

    seconds: float
    entries: int
    size: int
    tenant_size: int = 0
    total_size: int = 0


class LogPage(NamedTuple):
    """Some entries, and whether more follow behind the last one."""

    entries: list[LogEntry]
    more: bool


Order = Literal["newest", "oldest"]


def marked(entries: Sequence[LogEntry], ranges: Sequence[Range]) -> list[LogEntry]:
    """Return entries with `rolled_back` set for those whose position is in one of the ranges."""
    if not ranges:
        return list(entries)
    return [
        entry._replace(rolled_back=any(first <= entry.position < last for first, last in ranges)) for entry in entries
    ]


def described(entry: LogEntry) -> dict[str, Any]:
    """Return an entry as responses show it; its time stays a number of milliseconds."""
    return {name: getattr(entry, name) for name in _FIELDS}

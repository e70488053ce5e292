"""Notices: what operators should hear of besides decisions. Guard actions, signs of a shift, many unknown samples.

A worker makes a notice from a decision, and the store writes it together with the journal record of that decision. So
there is a notice exactly if the observe is durable. Nothing here ever influences an engine.
"""

import json
import math
from collections.abc import Callable, Iterable
from typing import Any, Final, Literal, NamedTuple

from ..guard import GuardEvent
from .entries import LogEntry

NoticeKind = Literal["guard", "warning"]
# Notices that a stream keeps, at most; and how many of one position there can be.
MAX_NOTICES: Final = 1000


class Notice(NamedTuple):
    """One notice.

    Attributes:
        position: of the decision that it comes from.
        number: of the notice among those of one position, from 1.
        time: of the decision, in milliseconds since 1970.
        kind: guard or warning.
        content: JSON object with the details.
    """

    position: int
    number: int
    time: int
    kind: NoticeKind
    content: str

    def described(self) -> dict[str, Any]:
        """Return the notice as events and webhooks show it."""
        return {"position": self.position, "time": self.time, **json.loads(self.content)}


class NoticeMaker:
    """Makes the notices of one stream.

    Args:
        take_warnings: returns the warnings that began since it was last called, each with its position.
    """

    def __init__(self, take_warnings: Callable[[], Iterable[tuple[int, dict[str, Any]]]]):
        self._take_warnings = take_warnings

    def make(self, entries: Iterable[LogEntry], guard_events: Iterable[GuardEvent]) -> list[Notice]:
        """Return the notices of some decisions, in order."""
        found: dict[int, list[tuple[NoticeKind, dict[str, Any]]]] = {}
        for event in guard_events:
            found.setdefault(event.position, []).append(("guard", _action(event)))
        for position, warning in self._take_warnings():
            found.setdefault(position, []).append(("warning", warning))
        if not found:
            return []
        return [
            Notice(entry.position, number, entry.time, kind, json.dumps(content))
            for entry in entries
            for number, (kind, content) in enumerate(found.get(entry.position, ()), 1)
        ]


def _action(event: GuardEvent) -> dict[str, Any]:
    value, threshold = (number if math.isfinite(number) else None for number in (event.value, event.threshold))
    action = event.action.value.replace(" ", "_")
    return {"guard": event.guard, "action": action, "value": value, "threshold": threshold, "window": event.window}

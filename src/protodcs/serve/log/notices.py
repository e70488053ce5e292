"""Notices: what operators should hear of besides decisions. Guard actions, signs of a shift, bursts of unknown samples.

A worker makes a notice from a decision, and the store writes it together with the journal record of that decision. So
there is a notice exactly if the observe is durable. Nothing here ever influences an engine.
"""

import json
import math
from collections import deque
from collections.abc import Iterable
from typing import Any, Final, Literal, NamedTuple

from ...core.decision import POSSIBLE_SHIFT
from ..guard import Event
from .entries import LogEntry

Kind = Literal["guard", "warning"]
KINDS: Final[tuple[Kind, ...]] = ("guard", "warning")
# Notices that a stream keeps, at most; and how many of one position there can be.
MAX_NOTICES: Final = 1000
# A burst: this many unknown samples among the latest ones. The next one is reported after they fell below half of it.
BURST_WINDOW: Final = 50
BURST_UNKNOWN: Final = 30


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
    kind: Kind
    content: str

    def described(self) -> dict[str, Any]:
        """Return the notice as events and webhooks show it."""
        return {"position": self.position, "time": self.time, **json.loads(self.content)}


class NoticeMaker:
    """Makes the notices of one stream, decision by decision.

    Args:
        reason: of the newest decision before.
        known: whether each of the latest samples was known, oldest first.
    """

    def __init__(self, reason: str | None, known: Iterable[bool]):
        self._reason = reason
        self._unknown = deque((not one for one in known), maxlen=BURST_WINDOW)
        self._in_burst = sum(self._unknown) >= BURST_UNKNOWN

    def make(self, entries: Iterable[LogEntry], guard_events: Iterable[Event]) -> list[Notice]:
        """Return the notices of some decisions, in order."""
        actions: dict[int, list[Event]] = {}
        for event in guard_events:
            actions.setdefault(event.position, []).append(event)
        notices: list[Notice] = []
        for entry in entries:
            found: list[tuple[Kind, dict[str, Any]]] = [
                ("guard", _action(event)) for event in actions.get(entry.position, [])
            ]
            found += (("warning", warning) for warning in self._warnings(entry))
            notices += (
                Notice(entry.position, number, entry.time, kind, json.dumps(content))
                for number, (kind, content) in enumerate(found, 1)
            )
        return notices

    def _warnings(self, entry: LogEntry) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        if entry.reason == POSSIBLE_SHIFT and self._reason != POSSIBLE_SHIFT:
            found.append({"warning": "possible_shift"})
        self._reason = entry.reason
        self._unknown.append(entry.outcome == "unknown")
        unknown = sum(self._unknown)
        if unknown >= BURST_UNKNOWN and not self._in_burst:
            self._in_burst = True
            found.append({"warning": "unknown_burst", "unknown": unknown, "decisions": len(self._unknown)})
        elif 2 * unknown < BURST_UNKNOWN:
            self._in_burst = False
        return found


def _action(event: Event) -> dict[str, Any]:
    value, threshold = (number if math.isfinite(number) else None for number in (event.value, event.threshold))
    action = event.action.value.replace(" ", "_")
    return {"guard": event.guard, "action": action, "value": value, "threshold": threshold, "window": event.window}

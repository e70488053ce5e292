"""The latest decisions of a stream, and the one rule for "many are unknown" and "the scores have shifted".

A stream applies the rule with each decision. Lists of streams and the UI show its verdict, and notices tell when it
begins.
"""

from collections import deque
from typing import Any, Final, Literal

from ...core.decision import POSSIBLE_SHIFT

WarningName = Literal["possible_shift", "unknown_burst"]
WARNINGS: Final[tuple[WarningName, ...]] = ("possible_shift", "unknown_burst")
# Decisions that the unknown rate is taken from.
LATEST: Final = 100
# A burst begins with this many unknown samples among so many, and ends when they fall below half of it.
BURST_UNKNOWN: Final = 30
BURST_WINDOW: Final = 50


class Latest:
    """The latest decisions of one stream."""

    def __init__(self) -> None:
        self._unknown: deque[bool] = deque(maxlen=LATEST)
        self._window: deque[bool] = deque(maxlen=BURST_WINDOW)
        self._shifted = self._burst = False

    def add(self, unknown: bool, reason: str | None) -> list[dict[str, Any]]:
        """Add a decision. Return the warnings that begin with it, as notices show them."""
        before = self._shifted, self._burst
        self._unknown.append(unknown)
        self._window.append(unknown)
        count = sum(self._window)
        self._shifted = reason == POSSIBLE_SHIFT
        self._burst = 2 * count >= BURST_UNKNOWN if self._burst else count >= BURST_UNKNOWN
        found: list[dict[str, Any]] = []
        if self._shifted and not before[0]:
            found.append({"warning": "possible_shift"})
        if self._burst and not before[1]:
            found.append({"warning": "unknown_burst", "unknown": count, "decisions": len(self._window)})
        return found

    @property
    def unknown_rate(self) -> float | None:
        """Share of unknown samples; None before the first decision."""
        return sum(self._unknown) / len(self._unknown) if self._unknown else None

    @property
    def warning(self) -> WarningName | None:
        """What is wrong; a shift first, because it may cause the burst."""
        if self._shifted:
            return "possible_shift"
        return "unknown_burst" if self._burst else None

"""The summary of a stream in lists of streams. A stream writes it with every record, so that no list has to load it."""

import math
import struct
from typing import NamedTuple, Self

from ..guard import NAMES
from ..log.latest import WARNINGS, WarningName

# Time of the newest record, frozen, both shares of unknown samples, guard and warning. NaN stands for no sample. Guard
# and warning are places in NAMES and WARNINGS, from 1; 0 is none.
_SUMMARY = struct.Struct("<d?ffBB")


class Summary(NamedTuple):
    """A stream in a list.

    Attributes:
        last_seen: time of its newest record, in seconds since 1970; None before the first.
        frozen: whether it decides without learning.
        unknown_rate: share of unknown samples among its latest decisions; None before the first.
        usual_unknown_rate: usual share of unknown samples, from before a warning; None before it is known.
        guard_reason: the guard that froze it; None unless one did.
        warning: what the rule of `log.latest` says of its latest decisions.
    """

    last_seen: float | None = None
    frozen: bool = False
    unknown_rate: float | None = None
    usual_unknown_rate: float | None = None
    guard_reason: str | None = None
    warning: WarningName | None = None

    def pack(self) -> bytes:
        """Return the summary as bytes."""
        last_seen, frozen, latest, usual, guard, warning = self
        return _SUMMARY.pack(
            last_seen or 0.0,
            frozen,
            math.nan if latest is None else latest,
            math.nan if usual is None else usual,
            0 if guard is None else 1 + NAMES.index(guard),
            0 if warning is None else 1 + WARNINGS.index(warning),
        )

    @classmethod
    def unpack(cls, data: bytes) -> Self:
        """Return what `pack` wrote; that of a new stream if there is nothing."""
        if len(data) != _SUMMARY.size:
            return cls()
        last_seen, frozen, *rates, guard, warning = _SUMMARY.unpack(data)
        latest, usual = (None if math.isnan(rate) else rate for rate in rates)
        return cls(last_seen or None, frozen, latest, usual, (None, *NAMES)[guard], (None, *WARNINGS)[warning])

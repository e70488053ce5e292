"""What a list of streams shows of each one. A stream writes it with every record, so that no list has to load it."""

import math
import struct
from typing import NamedTuple, Self

# Time of the newest record, frozen, share of unknown samples; NaN stands for no sample.
_SUMMARY = struct.Struct("<d?f")


class Summary(NamedTuple):
    """A stream in a list.

    Attributes:
        last_seen: time of its newest record, in seconds since 1970; None before the first.
        frozen: whether it decides without learning.
        unknown_rate: share of unknown samples among its latest decisions; None before the first.
    """

    last_seen: float | None = None
    frozen: bool = False
    unknown_rate: float | None = None

    def pack(self) -> bytes:
        """Return the summary as bytes."""
        rate = math.nan if self.unknown_rate is None else self.unknown_rate
        return _SUMMARY.pack(self.last_seen or 0.0, self.frozen, rate)

    @classmethod
    def unpack(cls, data: bytes) -> Self:
        """Return what `pack` wrote; that of a new stream if there is nothing."""
        if len(data) != _SUMMARY.size:
            return cls()
        last_seen, frozen, rate = _SUMMARY.unpack(data)
        return cls(last_seen or None, frozen, None if math.isnan(rate) else rate)

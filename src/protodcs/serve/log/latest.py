"""The latest decisions of a stream beside its usual ones: the one rule for "many are unknown" and "images shifted".

A stream applies the rule after every 32 decisions. Lists of streams and the UI show its verdict, and notices tell when
it begins. What is usual is learned from the stream itself, and not from what a warning is about. So a rise that stays
keeps its warning, until after some thousand decisions it counts as usual.

- **Many unknown**: the share of unknown samples is larger since 192, 384 or 768 decisions than before, so clearly that
  chance does not explain it (a likelihood ratio of two shares against one). Unknown samples that come in runs, because
  one animal stays before the camera, count for fewer.
- **Shift**: the mean feature of the samples decided as known lies much further from the usual one than it mostly does.
  Unknown samples do not move it, fog on all images does. If the images change so much that nearly all are rejected,
  the engine says so itself, with the reason `POSSIBLE_SHIFT`.
"""

import math
import struct
from collections import deque
from collections.abc import Sequence
from typing import Any, Final, Literal, NamedTuple, Self

import numpy as np

from ...arrays import Feature, Features
from ...core.decision import POSSIBLE_SHIFT
from ...core.vectors import move_towards
from ...errors import StoreError

WarningName = Literal["possible_shift", "many_unknown"]
WARNINGS: Final[tuple[WarningName, ...]] = ("possible_shift", "many_unknown")
# Decisions that the unknown rate is taken from.
LATEST: Final = 100
# Decisions between two looks.
BLOCK: Final = 32
# A rise is looked for since so many blocks ago: a large one shows in few of them, a small one or one in runs in many.
_SINCE: Final = (6, 12, 24)
# The first blocks, in which the engine knows too little of the stream.
_SKIPPED: Final = 2
# Blocks after which the usual share of unknown samples is known, and before that the share that is taken for it.
_KNOWN_FROM: Final = 6
_ASSUMED: Final = 0.3
# Blocks that what is usual is taken from.
_MEMORY: Final = 200
# A rise is at least so large when it begins, and a third of that later.
_MIN_RISE: Final = 0.15
# Logarithm of the likelihood ratio at which a rise is no chance.
_CLEAR: Final = 14.0
# Exponent of how much less unknown samples tell that come in runs. At 1 it would be the variance of their number.
_RUNS: Final = 0.65
# Samples that the latest mean feature is taken from, roughly.
_FEATURES: Final = 96
# Blocks after which the usual distance of the latest mean feature is known.
_DISTANCE_FROM: Final = 8
# Usual distances at which the warning of a shift begins and ends.
_SHIFTED, _BACK = 2.9, 2.0
# Share of unknown samples from which on the engine is asked whether the images shifted.
_NEARLY_ALL: Final = 0.7
# Blocks after which what a warning is about counts as usual.
_LASTS: Final = 100

# What a snapshot has of the numbers of `Latest`, then how many blocks and latest decisions follow.
_NUMBERS: Final = (
    "seen", "distances", "features", "warned", "usual", "count", "count_unknown", "pairs", "last", "many", "shift",
    "usual_distance",
)  # fmt: skip
_STATE: Final = struct.Struct("<QQQQHBBB???dHB")
_COUNTS: Final = struct.Struct("<BB")


class Latest:
    """The latest decisions of one stream."""

    def __init__(self) -> None:
        self._unknown: deque[bool] = deque(maxlen=LATEST)
        # Of each block: unknown samples, and those that came right behind another one.
        self._blocks: list[tuple[int, int]] = []
        # How many of these blocks are usual: those from before the present warning, or all.
        self._usual = 0
        # The usual share of unknown samples, from before a warning; None before it is known.
        self.usual_unknown_rate: float | None = None
        # Blocks so far, of the usual distance, and of the present warning; samples of the mean.
        self._seen = self._distances = self._warned = self._features = 0
        # Of the block under way: decisions, unknown ones, and those of them right behind another one.
        self._count = self._count_unknown = self._pairs = 0
        # Whether the last sample was unknown, whether many are, and whether the images shifted.
        self._last = self._many = self._shift = False
        self._usual_distance = 0.0
        # Mean features of the latest samples that were decided as known, and of the usual ones.
        self._mean: Feature | None = None
        self._usual_mean: Feature | None = None

    def add(
        self, unknown: Sequence[bool], reasons: Sequence[str | None], features: Features
    ) -> list[tuple[int, dict[str, Any]]]:
        """Add decisions about unit features (n, d). Return the warnings that begin, as notices show them, by row."""
        begun: list[tuple[int, dict[str, Any]]] = []
        end = 0
        while end < len(unknown):
            some = slice(end, min(end + BLOCK - self._count, len(unknown)))
            end = some.stop
            self._add_to_block(unknown[some], features[some])
            if self._count < BLOCK:
                break
            before = self.warning
            self._end_block(reasons[end - 1] == POSSIBLE_SHIFT)
            if self.warning not in (None, before):
                said: dict[str, Any] = {"warning": self.warning, "unknown_rate": self.unknown_rate}
                begun.append((end - 1, {**said, "usual_unknown_rate": self.usual_unknown_rate}))
        return begun

    def _add_to_block(self, unknown: Sequence[bool], features: Features) -> None:
        """Add decisions about unit features (n, d) to the block under way."""
        rates = np.zeros(len(unknown), dtype=np.float32)
        for row, is_unknown in enumerate(unknown):
            self._count_unknown += is_unknown
            self._pairs += is_unknown and self._last
            self._last = is_unknown
            if not is_unknown:
                self._features += 1
                rates[row] = max(1 / _FEATURES, 1 / self._features)
        self._unknown.extend(unknown)
        self._count += len(unknown)
        if self._features and self._mean is None:
            self._mean, self._usual_mean = np.zeros((2, features.shape[1]), dtype=np.float32)
        if self._mean is not None:
            move_towards(self._mean, features, rates)

    @property
    def unknown_rate(self) -> float | None:
        """Share of unknown samples among the latest; None before the first decision."""
        return self._unknown.count(True) / len(self._unknown) if self._unknown else None

    @property
    def warning(self) -> WarningName | None:
        """What is wrong; a shift first, because it may be why many are unknown."""
        if self._shift:
            return "possible_shift"
        return "many_unknown" if self._many else None

    def take_as_usual(self) -> None:
        """Take the latest decisions as the usual ones, and end the warnings."""
        self._blocks = self._blocks[-_SINCE[0] :]
        self._take_usual(len(self._blocks))
        self._distances = self._warned = 0
        self._many = self._shift = False

    def _end_block(self, engine_warns: bool) -> None:
        block = self._count_unknown, self._pairs
        self._count = self._count_unknown = self._pairs = 0
        self._seen += 1
        if self._seen <= _SKIPPED:
            return
        warned = self.warning is not None
        self._blocks.append(block)
        latest = _Counted.of(self._blocks[-_SINCE[0] :])
        since = len(self._blocks) - self._usual
        if self._many:
            usual = _ASSUMED if self.usual_unknown_rate is None else self.usual_unknown_rate
            self._many = latest.share - usual > _MIN_RISE / 3
        else:
            risen = self._risen_since()
            self._many, since = risen > 0, max(since, risen)
        distance = self._distance()
        limit = self._usual_distance * (_BACK if self._shift else _SHIFTED)
        moved = self._distances >= _DISTANCE_FROM and distance > limit
        nearly_all = latest.share > _NEARLY_ALL
        self._shift = moved or (self._many and nearly_all and (engine_warns or self._shift))
        if self.warning is None:
            if warned:
                # What the warning was about is not usual. The latest blocks are.
                del self._blocks[self._usual : -_SINCE[0]]
            del self._blocks[:-_MEMORY]
            self._take_usual(len(self._blocks))
            self._warned = 0
            self._learn_mean(distance)
        else:
            self._take_usual(len(self._blocks) - since)
            self._warned += 1
            if self._warned > _LASTS:
                self.take_as_usual()

    def _take_usual(self, count: int) -> None:
        """Take the first blocks as the usual ones."""
        self._usual = count
        self.usual_unknown_rate = None if count < _KNOWN_FROM else _Counted.of(self._blocks[:count]).share

    def _risen_since(self) -> int:
        """Return since how many blocks more samples are unknown than before; 0 if there is no clear rise."""
        every = _Counted.of(self._blocks)
        for count in _SINCE:
            latest = _Counted.of(self._blocks[-count:])
            before = every.without(latest)
            if len(self._blocks) < count + _KNOWN_FROM:
                if self._seen > _SKIPPED + len(self._blocks) or len(self._blocks) < count:
                    break
                # The stream has just begun.
                before = _Counted.assumed()
            if latest.share - before.share > _MIN_RISE and latest.evidence_of_rise(before) > _CLEAR:
                return count
        return 0

    def _distance(self) -> float:
        """Return how far the latest mean feature lies from the usual one."""
        if self._mean is None or self._usual_mean is None:
            return 0.0
        return float(np.linalg.norm(self._mean - self._usual_mean))

    def _learn_mean(self, distance: float) -> None:
        if self._mean is None or self._usual_mean is None or self._features < _FEATURES // 2:
            return
        if self._distances:
            self._usual_distance += (distance - self._usual_distance) / min(self._distances, _MEMORY)
        self._distances += 1
        self._usual_mean += (self._mean - self._usual_mean) * np.float32(1 / min(self._distances, _MEMORY))

    # In a snapshot.

    def pack(self) -> bytes:
        """Return all of it as bytes."""
        numbers = (getattr(self, f"_{name}") for name in _NUMBERS)
        state = _STATE.pack(*numbers, len(self._blocks), len(self._unknown))
        blocks = b"".join(_COUNTS.pack(*block) for block in self._blocks)
        means = [b"" if mean is None else mean.tobytes() for mean in (self._mean, self._usual_mean)]
        return b"".join((state, blocks, bytes(self._unknown), *means))

    def load(self, data: bytes) -> None:
        """Take over what `pack` returned. Raise StoreError for anything else."""
        try:
            *numbers, blocks, latest = _STATE.unpack_from(data)
            for name, number in zip(_NUMBERS, numbers, strict=True):
                setattr(self, f"_{name}", number)
            at = _STATE.size + blocks * _COUNTS.size
            self._blocks.extend(_COUNTS.iter_unpack(data[_STATE.size : at]))
            self._unknown.extend(map(bool, data[at : at + latest]))
            means = np.frombuffer(data, np.float32, offset=at + latest).reshape(2, -1).copy()
        except (struct.error, ValueError):
            raise StoreError("The latest decisions of a snapshot cannot be read.") from None
        if means.size:
            self._mean, self._usual_mean = means
        self._take_usual(self._usual)


class _Counted(NamedTuple):
    """Decisions of some blocks: how many, how many unknown ones, and those of them right behind another one."""

    decisions: float
    unknown: float
    pairs: float

    @classmethod
    def of(cls, blocks: Sequence[tuple[int, int]]) -> Self:
        """Count the decisions of blocks."""
        unknown, pairs = map(sum, zip(*blocks, strict=True)) if blocks else (0, 0)
        return cls(BLOCK * len(blocks), unknown, pairs)

    def without(self, part: "_Counted") -> "_Counted":
        """Return the count of the other decisions."""
        return _Counted(self.decisions - part.decisions, self.unknown - part.unknown, self.pairs - part.pairs)

    @classmethod
    def assumed(cls) -> Self:
        """Return what is taken for usual before anything is known."""
        return cls(BLOCK * _MEMORY, _ASSUMED * BLOCK * _MEMORY, 0)

    @property
    def share(self) -> float:
        """Share of unknown samples."""
        return self.unknown / max(self.decisions, 1)

    @property
    def persistence(self) -> float:
        """How much unknown samples come in runs: 0 if they come by chance, near 1 if they come one after another."""
        if not 0 < self.unknown < self.decisions:
            return 0.0
        return min(max((self.pairs / self.unknown - self.share) / (1.0 - self.share), 0.0), 0.95)

    def evidence_of_rise(self, before: "_Counted") -> float:
        """Return the logarithm of how much likelier two shares are than one, with samples in runs counted for fewer."""
        both = _Counted(*map(sum, zip(self, before, strict=True)))
        ratio = sum(part.decisions * _divergence(part.share, both.share) for part in (self, before))
        same = max(self.persistence, both.persistence, before.persistence if before.unknown >= 8 else 0.0)
        return ratio * ((1.0 - same) / (1.0 + same)) ** _RUNS


def _divergence(share: float, other: float) -> float:
    """Return the divergence of a share from another one."""
    pairs = ((share, other), (1.0 - share, 1.0 - other))
    return sum(one * math.log(one / another) for one, another in pairs if one > 0)

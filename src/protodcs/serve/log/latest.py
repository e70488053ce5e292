"""The latest decisions of a stream beside its usual ones: the one rule for "many are unknown" and "images shifted".

A stream applies the rule after every 32 decisions. Lists of streams and the UI show its verdict, and notices tell when
it begins. What is usual is learned from the stream itself. Nothing is learned while a warning lasts, so a rise that
stays keeps its warning, until after some thousand decisions it counts as usual.

- **Many unknown**: the share of unknown samples lies far above the usual one. Samples that resemble their neighbours
  tell less than others, so unknown samples that come in runs count for fewer.
- **Shift**: the mean feature of the samples decided as known lies much further from the usual one than it mostly does.
  Unknown samples do not move it, fog on all images does. If the images change so much that nearly all are rejected,
  the engine says so itself, with the reason `POSSIBLE_SHIFT`.
"""

import math
import struct
from collections import deque
from typing import Any, Final, Literal

import numpy as np

from ...arrays import Feature
from ...core.decision import POSSIBLE_SHIFT
from ...errors import StoreError

WarningName = Literal["possible_shift", "many_unknown"]
WARNINGS: Final[tuple[WarningName, ...]] = ("possible_shift", "many_unknown")
# Decisions that the unknown rate is taken from.
LATEST: Final = 100
# Decisions between two looks.
BLOCK: Final = 32
# The latest decisions are those of so many blocks. A large rise shows in two of them, a small one in six.
_WINDOWS: Final = (2, 6)
# The first blocks, in which the engine knows too little of the stream.
_SKIPPED: Final = 2
# Blocks after which the usual share of unknown samples is known, and before that the share that is taken for it.
_KNOWN_FROM: Final = 6
_ASSUMED: Final = 0.3
# Blocks that what is usual is taken from, roughly.
_MEMORY: Final = 200
# A rise is at least so large when it begins, and half of that later. It counts in standard deviations of a share that
# is at least so large.
_MIN_RISE: Final = 0.12
_MIN_SHARE: Final = 0.05
# Standard deviations at which the warning of many unknown samples begins and ends.
_RISEN, _FALLEN = 8.0, 2.0
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
    "seen", "learned", "distances", "features", "warned", "count", "count_unknown", "pairs", "last", "many", "shift",
    "usual_unknown", "usual_pairs", "usual_count", "usual_distance",
)  # fmt: skip
_STATE: Final = struct.Struct("<QQQQQBBB???ddddBB")
_COUNTS: Final = struct.Struct("<BB")


class Latest:
    """The latest decisions of one stream."""

    def __init__(self) -> None:
        self._unknown: deque[bool] = deque(maxlen=LATEST)
        # Of each of the latest blocks: unknown samples, and those that came right behind another one.
        self._blocks: deque[tuple[int, int]] = deque(maxlen=_WINDOWS[-1])
        # Blocks so far, of the usual share, of the usual distance, and of the present warning; samples of the mean.
        self._seen = self._learned = self._distances = self._warned = self._features = 0
        # Of the block under way: decisions, unknown ones, and those of them right behind another one.
        self._count = self._count_unknown = self._pairs = 0
        # Whether the last sample was unknown, whether many are, and whether the images shifted.
        self._last = self._many = self._shift = False
        self._usual_unknown = self._usual_pairs = self._usual_count = self._usual_distance = 0.0
        # Mean features of the latest samples that were decided as known, and of the usual ones.
        self._mean: Feature | None = None
        self._usual_mean: Feature | None = None

    def add(self, unknown: bool, reason: str | None, feature: Feature) -> dict[str, Any] | None:
        """Add a decision about a unit feature (d,). Return the warning that begins with it, as notices show it."""
        self._unknown.append(unknown)
        self._count += 1
        self._count_unknown += unknown
        self._pairs += unknown and self._last
        self._last = unknown
        if not unknown:
            self._features += 1
            if self._mean is None:
                self._mean, self._usual_mean = np.zeros((2, len(feature)), dtype=np.float32)
            self._mean += (feature - self._mean) * np.float32(max(1 / _FEATURES, 1 / self._features))
        if self._count < BLOCK:
            return None
        before = self.warning
        self._end_block(reason == POSSIBLE_SHIFT)
        if self.warning in (None, before):
            return None
        said: dict[str, Any] = {"warning": self.warning, "unknown_rate": self.unknown_rate}
        return {**said, "usual_unknown_rate": self.usual_unknown_rate}

    @property
    def unknown_rate(self) -> float | None:
        """Share of unknown samples among the latest; None before the first decision."""
        return sum(self._unknown) / len(self._unknown) if self._unknown else None

    @property
    def usual_unknown_rate(self) -> float | None:
        """Usual share of unknown samples, from before a warning; None before it is known."""
        return None if self._learned < _KNOWN_FROM else self._usual_unknown / self._usual_count

    @property
    def warning(self) -> WarningName | None:
        """What is wrong; a shift first, because it may be why many are unknown."""
        if self._shift:
            return "possible_shift"
        return "many_unknown" if self._many else None

    def take_as_usual(self) -> None:
        """Take the latest decisions as the usual ones, and end the warnings."""
        self._usual_unknown = self._usual_pairs = self._usual_count = 0.0
        self._learned = self._distances = self._warned = 0
        for block in self._blocks:
            self._learn_share(*block)
        self._many = self._shift = False

    def _end_block(self, engine_warns: bool) -> None:
        unknown, pairs = self._count_unknown, self._pairs
        self._count = self._count_unknown = self._pairs = 0
        self._seen += 1
        if self._seen <= _SKIPPED:
            return
        if len(self._blocks) == _WINDOWS[-1] and self.warning is None:
            self._learn_share(*self._blocks[0])
        self._blocks.append((unknown, pairs))
        distance = self._distance()
        self._many = self._rise() > (_FALLEN if self._many else _RISEN)
        limit = self._usual_distance * (_BACK if self._shift else _SHIFTED)
        moved = self._distances >= _DISTANCE_FROM and distance > limit
        nearly_all = sum(unknown for unknown, _ in self._blocks) > _NEARLY_ALL * BLOCK * len(self._blocks)
        self._shift = moved or (self._many and nearly_all and (engine_warns or self._shift))
        if self.warning is None:
            self._warned = 0
            self._learn_mean(distance)
        else:
            self._warned += 1
            if self._warned > _LASTS:
                self.take_as_usual()

    def _rise(self) -> float:
        """Return by how many standard deviations the share of unknown samples lies above the usual one."""
        usual, persistence = _ASSUMED, 0.0
        if self._learned >= _KNOWN_FROM:
            usual = self._usual_unknown / self._usual_count
            if self._usual_unknown >= 8:
                persistence = _persistence(self._usual_pairs, self._usual_unknown, self._usual_count)
        spread, largest, least = max(usual, _MIN_SHARE), 0.0, _MIN_RISE / (2 if self._many else 1)
        for window in _WINDOWS:
            blocks = list(self._blocks)[-window:]
            count, unknown = window * BLOCK, sum(unknown for unknown, _ in blocks)
            rise = unknown / count - usual
            if len(blocks) == window and rise > least:
                same = max(_persistence(sum(pairs for _, pairs in blocks), unknown, count), persistence)
                # So many samples tell as much as one.
                run = (1.0 + same) / (1.0 - same)
                largest = max(largest, rise / math.sqrt(spread * (1.0 - spread) * run / count))
        return largest

    def _distance(self) -> float:
        """Return how far the latest mean feature lies from the usual one."""
        if self._mean is None or self._usual_mean is None:
            return 0.0
        return float(np.linalg.norm(self._mean - self._usual_mean))

    def _learn_share(self, unknown: int, pairs: int) -> None:
        self._learned += 1
        rest = 1.0 - 1.0 / _MEMORY
        self._usual_unknown = rest * self._usual_unknown + unknown
        self._usual_pairs = rest * self._usual_pairs + pairs
        self._usual_count = rest * self._usual_count + BLOCK

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


def _persistence(pairs: float, unknown: float, count: float) -> float:
    """Return how much unknown samples come in runs: 0 if they come by chance, near 1 if they come one after another."""
    if not 0 < unknown < count:
        return 0.0
    share = unknown / count
    return min(max((pairs / unknown - share) / (1.0 - share), 0.0), 0.95)

"""Recognise retries: which requests a stream has applied, and what it answered.

A request is identified by its key and a digest of its content. It has one or more rows, each applied at a position of
its own. Keys are small and kept long; answers are larger and kept for fewer positions, those of a request together.
What is dropped depends on the records alone, never on a clock, so a stream that is loaded from its journal recognises
the same requests.

Answers are part of each snapshot. Keys are not, because a fast stream has many: a checkpoint adds a segment with those
since the last one. Small segments are merged, so that there are few, and go as soon as all their keys have expired.
"""

import hashlib
import struct
import zlib
from collections import deque
from collections.abc import Iterable, Iterator
from functools import lru_cache
from typing import NamedTuple, Self

from ...errors import AnswerExpiredError, DamagedDataError, IdempotencyKeyError, StoreError
from ..settings import ServeConfig
from ..store.values import Checkpoint, KeySegment
from .records import DIGEST_BYTES, Kind, Record

# An entry: kind, digest, age of the stream at its newest row; then its runs of rows at consecutive positions.
_ENTRY = struct.Struct("<B16sQ")
# First row, its position, number of rows.
_RUN = struct.Struct("<IQI")
# An answer: kind, epoch; then the packed answer.
_ANSWER = struct.Struct("<BQ")
# Position of the first stored answer, number of answers, time of the newest record, age of the stream, and where the
# newest row of its oldest key ends.
_HEAD = struct.Struct("<QIQQQ")
_LENGTH = struct.Struct("<I")
# Larger segments are not merged. Bytes.
_MERGED = 1 << 18
# Where the oldest key ends if there is none.
_NOWHERE = (1 << 63) - 1


class IdempotencyLimits(NamedTuple):
    """How much a stream stores to recognise retries.

    Attributes:
        answers: newest records whose answers are stored, with all other answers to the same requests.
        entries: newest records whose keys are stored. Older keys are stored too until they are `seconds` old.
        seconds: minimum time that a key is stored, by the store's clock.
    """

    answers: int
    entries: int
    seconds: float

    @classmethod
    def of(cls, config: ServeConfig) -> Self:
        """Return the limits that the settings of a service name."""
        return cls(config.idempotency_answers, config.idempotency_entries, config.idempotency_seconds)


class Answer(NamedTuple):
    """What a stream answered to one row."""

    kind: Kind
    position: int
    epoch: int
    answer: bytes


def digest_of(*parts: bytes) -> bytes:
    """Return a digest of the content of a request; the same parts in another split give another digest."""
    digest = hashlib.blake2b(digest_size=DIGEST_BYTES)
    for part in parts:
        digest.update(_LENGTH.pack(len(part)))
        digest.update(part)
    return digest.digest()


class IdempotencyCache:
    """The applied requests of one stream."""

    def __init__(self, limits: IdempotencyLimits):
        self._limits = limits
        # The minimum time that a key is stored, in the unit of the records' times.
        self._seconds = int(1000 * limits.seconds)
        # By the digest of their key, in the order of their newest row.
        self._entries: dict[bytes, bytes] = {}
        self._answers: deque[bytes] = deque()
        # Position of the first stored answer.
        self._start = 0
        # Time of the newest record.
        self.time = 0
        # The sum of the pauses between records. A pause counts at most half of the minimum time, so that keys outlive a
        # jump of the clock, and not at all if the clock was set back.
        self._age = 0
        # The durable segments of keys: their positions and sizes.
        self._segments: list[tuple[int, int]] = []

    def add(self, record: Record) -> None:
        """Store a record that was just applied."""
        if not self._answers:
            self._start = record.position
        kind, answers = record.request_kind, record.answers
        head = _ANSWER.pack(kind, record.epoch)
        self._answers.extend([head + answer for answer in answers])
        if record.time > self.time:
            self._age += min(record.time - self.time, self._seconds // 2 + 1)
        self.time = record.time
        key, runs = _key(record.key), b""
        row, position, count = record.row, record.position, len(answers)
        before = self._entries.pop(key, None)
        if before is not None:
            # The entry moves to the end. Rows that follow its last run become part of it.
            runs = before[_ENTRY.size :]
            first, start, length = _RUN.unpack_from(runs, len(runs) - _RUN.size)
            if (first + length, start + length) == (row, position):
                runs, row, position, count = runs[: -_RUN.size], first, start, length + count
        self._entries[key] = _ENTRY.pack(kind, record.digest, self._age) + runs + _RUN.pack(row, position, count)

    def drop_answers(self, position: int) -> None:
        """Drop all answers, because a record before `position` cannot be read. Their keys stay."""
        self._answers.clear()
        self._start = position

    def find(self, kind: Kind, key: str, digest: bytes, row: int = 0) -> Answer | None:
        """Return the answer to a row that was applied before, or None if it is new.

        Raises:
            IdempotencyKeyError: the key was used for a request with other content.
            AnswerExpiredError: the row was applied, and its answer is no longer stored.
        """
        entry = self._entries.get(_key(key))
        if entry is None:
            return None
        found_kind, found_digest, _ = _ENTRY.unpack_from(entry)
        if (found_kind, found_digest) != (kind, digest):
            raise IdempotencyKeyError(
                f"Idempotency key {key!r} was used for a request with other content on this stream. Use a new key."
            )
        for first, position, count in _runs(entry):
            if first <= row < first + count:
                return self._answer(key, position + row - first)
        return None

    def has_key(self, key: str) -> bool:
        """Whether a row of the request with this key was applied."""
        return _key(key) in self._entries

    def newest(self, kind: Kind) -> Iterator[Answer]:
        """Yield the stored answers of one kind, newest first."""
        for index, packed in zip(range(len(self._answers) - 1, -1, -1), reversed(self._answers), strict=True):
            if packed[0] == kind:
                yield _unpacked(self._start + index, packed)

    def trim(self) -> None:
        """Drop answers and keys beyond the limits. Call it only when a snapshot is made, which then agrees with it."""
        end = self._start + len(self._answers)
        first = self._first_answer(end - self._limits.answers)
        while self._answers and self._start < first:
            self._answers.popleft()
            self._start += 1
        expired: list[bytes] = []
        for key, entry in self._entries.items():
            *_, age = _ENTRY.unpack_from(entry)
            if _end(entry) > end - self._limits.entries or self._age - age <= self._seconds:
                break
            expired.append(key)
        for key in expired:
            del self._entries[key]

    @property
    def _oldest(self) -> int:
        """Where the newest row of the oldest key ends."""
        return _end(next(iter(self._entries.values()))) if self._entries else _NOWHERE

    def _first_answer(self, position: int) -> int:
        """Return where the stored answers begin so that all of a request are stored if one from `position` on is."""
        first = position
        for entry in reversed(self._entries.values()):
            if _end(entry) <= position:
                break
            first = min(first, *(start for _, start, _ in _runs(entry)))
        return first

    def pack(self) -> bytes:
        """Return all but the keys as bytes, for a snapshot."""
        parts = [_HEAD.pack(self._start, len(self._answers), self.time, self._age, self._oldest)]
        for answer in self._answers:
            parts += (_LENGTH.pack(len(answer)), answer)
        return b"".join(parts)

    def unstored_keys(self) -> tuple[bytes, tuple[int, int]]:
        """Return the segment of keys that a checkpoint adds, and between which positions it keeps the durable ones."""
        kept = [segment for segment in self._segments if segment[0] >= self._oldest]
        data = self._keys_after(kept[-1][0] if kept else 0)
        while kept and kept[-1][1] <= len(data) < _MERGED:
            kept.pop()
            data = self._keys_after(kept[-1][0] if kept else 0)
        return data, (kept[0][0], kept[-1][0]) if kept else (0, 0)

    def _keys_after(self, position: int) -> bytes:
        """Return a segment of the keys whose newest row is at a position or behind it; empty if there is none."""
        parts: list[bytes] = []
        for key, entry in reversed(self._entries.items()):
            if _end(entry) <= position:
                break
            parts += (entry, _LENGTH.pack(len(entry)), key)
        data = b"".join(reversed(parts))
        return data and data + _LENGTH.pack(zlib.crc32(data))

    def stored(self, checkpoint: Checkpoint) -> None:
        """Take note that a checkpoint is durable, with the keys that were unstored."""
        first, last = checkpoint.kept_keys
        self._segments = [segment for segment in self._segments if first <= segment[0] <= last]
        if checkpoint.keys:
            self._segments.append((checkpoint.position, len(checkpoint.keys)))

    def load(self, data: bytes, segments: Iterable[KeySegment] = ()) -> None:
        """Take over what `pack` returned, and the keys. Raise StoreError for anything else."""
        try:
            self._start, answers, self.time, self._age, oldest = _HEAD.unpack_from(data)
            at = _HEAD.size
            for _ in range(answers):
                answer, at = _part(data, at)
                self._answers.append(answer)
        except struct.error:
            raise StoreError("The idempotency data of a snapshot cannot be read.") from None
        self.load_keys(segments, oldest)

    def load_keys(self, segments: Iterable[KeySegment], oldest: int = 0) -> None:
        """Take over durable keys. Raise DamagedDataError if they are damaged.

        Args:
            segments: all of them, in order.
            oldest: where the newest row of the oldest key ends; those before have expired.
        """
        for position, data in segments:
            keys = data[: -_LENGTH.size]
            try:
                if _LENGTH.pack(zlib.crc32(keys)) != data[-_LENGTH.size :]:
                    raise struct.error
                self._load_entries(keys, oldest)
            except struct.error:
                raise DamagedDataError("idempotency keys do not match their checksum: they are damaged") from None
            self._segments.append((position, len(data)))

    def _load_entries(self, data: bytes, oldest: int) -> None:
        at, age = 0, self._age
        while at < len(data):
            key, (entry, at) = data[at : at + DIGEST_BYTES], _part(data, at + DIGEST_BYTES)
            if _end(entry) >= oldest:
                # A later segment has more rows of some requests.
                self._entries.pop(key, None)
                self._entries[key] = entry
                *_, age = _ENTRY.unpack_from(entry)
        self._age = max(self._age, age)

    def _answer(self, key: str, position: int) -> Answer:
        if position < self._start:
            raise AnswerExpiredError(
                f"The request with idempotency key {key!r} was already applied, and its answer is no longer stored. "
                "Do not send it again."
            )
        return _unpacked(position, self._answers[position - self._start])


# A request asks for the same key when it is looked up, checked and stored.
@lru_cache(maxsize=256)
def _key(key: str) -> bytes:
    """Return a digest in place of a key: short, and of one size."""
    return hashlib.blake2b(key.encode(), digest_size=DIGEST_BYTES).digest()


def _runs(entry: bytes) -> list[tuple[int, int, int]]:
    return [_RUN.unpack_from(entry, at) for at in range(_ENTRY.size, len(entry), _RUN.size)]


def _unpacked(position: int, packed: bytes) -> Answer:
    kind, epoch = _ANSWER.unpack_from(packed)
    return Answer(Kind(kind), position, epoch, packed[_ANSWER.size :])


def _part(data: bytes, at: int) -> tuple[bytes, int]:
    """Return the length-prefixed part at an offset, and the offset behind it."""
    (length,) = _LENGTH.unpack_from(data, at)
    at += _LENGTH.size
    if at + length > len(data):
        raise struct.error
    return data[at : at + length], at + length


def _end(entry: bytes) -> int:
    """Return the position behind the newest row of an entry."""
    _, position, count = _RUN.unpack_from(entry, len(entry) - _RUN.size)
    return int(position) + int(count)

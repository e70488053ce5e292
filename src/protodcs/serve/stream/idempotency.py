"""Recognise retries: which requests a stream has applied, and what it answered.

A request is identified by its key and a digest of its content. It has one or more rows, each applied at a position of
its own. Keys are small and kept long; answers are larger and kept for fewer positions, those of a request together.
What is dropped depends on the records alone, never on a clock, so a stream that is loaded from its journal recognises
the same requests.
"""

import hashlib
import struct
from collections import deque
from collections.abc import Iterator
from typing import NamedTuple, Self

from ...errors import AnswerExpiredError, IdempotencyKeyError, StoreError
from ..settings import ServeConfig
from .records import DIGEST_BYTES, Kind, Record

# An entry: kind, digest, time of its newest row; then its runs of rows at consecutive positions.
_ENTRY = struct.Struct("<B16sQ")
# First row, its position, number of rows.
_RUN = struct.Struct("<IQI")
# An answer: kind, epoch; then the packed answer.
_ANSWER = struct.Struct("<BQ")
# Position of the first stored answer, number of answers, number of entries.
_HEAD = struct.Struct("<QII")
_LENGTH = struct.Struct("<I")


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
        # By the digest of their key, in the order of their newest row.
        self._entries: dict[bytes, bytes] = {}
        self._answers: deque[bytes] = deque()
        # Position of the first stored answer.
        self._start = 0
        # Time of the newest record.
        self.time = 0

    def add(self, record: Record) -> None:
        """Store a record that was just applied."""
        if not self._answers:
            self._start = record.position
        head, answers = _ANSWER.pack(record.request_kind, record.epoch), record.answers
        self._answers.extend([head + answer for answer in answers])
        self.time = record.time
        key = _key(record.key)
        # An entry moves to the end when a row is added.
        runs = self._entries.pop(key, b"")[_ENTRY.size :]
        row, position, count = _RUN.unpack_from(runs, len(runs) - _RUN.size) if runs else (0, 0, 0)
        if runs and (row + count, position + count) == (record.row, record.position):
            runs = runs[: -_RUN.size] + _RUN.pack(row, position, count + len(answers))
        else:
            runs += _RUN.pack(record.row, record.position, len(answers))
        self._entries[key] = _ENTRY.pack(record.request_kind, record.digest, record.time) + runs

    def skip(self, position: int) -> None:
        """Leave out a record that cannot be read. The answers before it expire; their keys stay."""
        self._answers.clear()
        self._start = position + 1

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
        for key in self._expired_keys(end - self._limits.entries):
            del self._entries[key]

    def _expired_keys(self, end: int) -> list[bytes]:
        """Return the keys whose newest row is before `end`, and that are too old.

        A key is as old as the sum of the pauses between the records since then. A pause counts at most half of the
        minimum time, so that keys outlive a jump of the clock, and none if the clock was set back.
        """
        if not self._entries or _end(next(iter(self._entries.values()))) > end:
            return []
        seconds = int(1000 * self._limits.seconds)
        age, later = 0, self.time
        expired = []
        for key, entry in reversed(self._entries.items()):
            *_, time = _ENTRY.unpack_from(entry)
            age += min(max(later - time, 0), seconds // 2 + 1)
            later = time
            if age > seconds and _end(entry) <= end:
                expired.append(key)
        return expired

    def _first_answer(self, position: int) -> int:
        """Return where the stored answers begin so that all of a request are stored if one from `position` on is."""
        first = position
        for entry in reversed(self._entries.values()):
            if _end(entry) <= position:
                break
            first = min(first, *(start for _, start, _ in _runs(entry)))
        return first

    def pack(self) -> bytes:
        """Return all of it as bytes, for a snapshot."""
        parts = [_HEAD.pack(self._start, len(self._answers), len(self._entries))]
        for answer in self._answers:
            parts += (_LENGTH.pack(len(answer)), answer)
        for key, entry in self._entries.items():
            parts += (key, _LENGTH.pack(len(entry)), entry)
        return b"".join(parts)

    def load(self, data: bytes) -> None:
        """Take over what `pack` returned. Raise StoreError for anything else."""
        try:
            self._start, answers, entries = _HEAD.unpack_from(data)
            at = _HEAD.size
            for _ in range(answers):
                answer, at = _part(data, at)
                self._answers.append(answer)
            entry = b""
            for _ in range(entries):
                key, (entry, at) = data[at : at + DIGEST_BYTES], _part(data, at + DIGEST_BYTES)
                self._entries[key] = entry
            if entries:
                *_, self.time = _ENTRY.unpack_from(entry)
        except struct.error:
            raise StoreError("The idempotency data of a snapshot cannot be read.") from None

    def _answer(self, key: str, position: int) -> Answer:
        if position < self._start:
            raise AnswerExpiredError(
                f"The request with idempotency key {key!r} was already applied, and its answer is no longer stored. "
                "Do not send it again."
            )
        return _unpacked(position, self._answers[position - self._start])


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

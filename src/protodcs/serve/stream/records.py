"""The journal record: one change of a stream, the request that asked for it, and the answer.

A record stands alone: it holds its version, its position and the epoch of its writer, and a checksum covers all of it.
`Record.unpack` raises `StoreError` for a damaged record.

Rows of one request that are observed together share a record, which has a position for each.
"""

import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum

from ...errors import DamagedDataError, StateVersionError, StoreError

VERSION = 3
# version, kind, bytes of the key, of the payload and of the answer, row, position, epoch, time, digest
_HEAD = struct.Struct("<BBHIIIQQQ16s")
_SEAL = struct.Struct("<I")
# Of an answer, before it in a record with several rows.
_LENGTH = struct.Struct("<H")
LONGEST_KEY = 200
DIGEST_BYTES = 16


class Kind(IntEnum):
    """What a record does to its stream."""

    OBSERVE = 1
    FREEZE = 2
    UNFREEZE = 3
    RESET = 4
    RESTORE = 5
    SAVE_SNAPSHOT = 6
    ADD_CLASS = 7
    REMOVE_CLASS = 8
    DELETE_SNAPSHOT = 9
    FEEDBACK = 10
    EDIT_CLUSTERS = 11
    ACKNOWLEDGE = 12
    OBSERVE_ROWS = 13


# Not frozen: the constructor of a frozen class takes several times as long.
@dataclass(slots=True)
class Record:
    """One change of a stream.

    Attributes:
        kind: what it does.
        position: its place in the journal of the stream, from 0, or that of its first row; no two records of a stream
            share one.
        epoch: of the worker that wrote it.
        time: when, in milliseconds since 1970 by the store's clock; it never decreases along a journal.
        key: the idempotency key of the request; never empty.
        payload: a feature as float32, little-endian; the features of all rows for OBSERVE_ROWS; a state for RESTORE; a
            name for SAVE_SNAPSHOT, DELETE_SNAPSHOT and REMOVE_CLASS; a prototype as float32 followed by a name for
            ADD_CLASS; a JSON object for EDIT_CLUSTERS, with the result of a clustering pass; what `pack_feedback`
            returns for FEEDBACK; else empty.
        answer: the response, as `answers` packs it; those of all rows, as `join` packs them, for OBSERVE_ROWS.
        digest: of the whole content of the request.
        row: which row of the request this is, from 0; the first one for OBSERVE_ROWS.
    """

    kind: Kind
    position: int
    epoch: int
    time: int
    key: str
    payload: bytes
    answer: bytes
    digest: bytes
    row: int = 0
    _answers: list[bytes] | None = field(default=None, init=False, repr=False, compare=False)

    @property
    def request_kind(self) -> Kind:
        """What the request asks for."""
        return Kind.OBSERVE if self.kind is Kind.OBSERVE_ROWS else self.kind

    @property
    def answers(self) -> list[bytes]:
        """The response to each row."""
        if self._answers is None:
            self._answers = split(self.answer) if self.kind is Kind.OBSERVE_ROWS else [self.answer]
        return self._answers

    def pack(self) -> bytes:
        """Return the record as bytes."""
        key = self.key.encode()
        head = _HEAD.pack(
            VERSION,
            self.kind,
            len(key),
            len(self.payload),
            len(self.answer),
            self.row,
            self.position,
            self.epoch,
            self.time,
            self.digest,
        )
        body = b"".join((head, key, self.payload, self.answer))
        return body + _SEAL.pack(zlib.crc32(body))

    @classmethod
    def unpack(cls, data: bytes) -> "Record":
        """Return the record that `pack` wrote. Raise DamagedDataError or StateVersionError otherwise."""
        if len(data) < _HEAD.size + _SEAL.size:
            raise DamagedDataError(f"a journal record of {len(data)} bytes: it was cut off")
        version, kind, key_length, payload_length, answer_length, row, position, epoch, time, digest = (
            _HEAD.unpack_from(data)
        )
        end = len(data) - _SEAL.size
        if zlib.crc32(memoryview(data)[:end]) != _SEAL.unpack_from(data, end)[0]:
            raise DamagedDataError("a journal record does not match its checksum: it is damaged")
        if version != VERSION:
            raise StateVersionError.of("A journal record", version, VERSION)
        if _HEAD.size + key_length + payload_length + answer_length != end:
            raise DamagedDataError(
                f"a journal record of {len(data)} bytes that announces another length: it is damaged"
            )
        payload_at = _HEAD.size + key_length
        answer_at = payload_at + payload_length
        try:
            return cls(
                Kind(kind),
                position,
                epoch,
                time,
                data[_HEAD.size : payload_at].decode(),
                data[payload_at:answer_at],
                data[answer_at:end],
                digest,
                row,
            )
        except ValueError:
            raise StoreError(
                f"another version of protodcs wrote a journal record: it has the unknown kind {kind}"
            ) from None


def join(answers: Sequence[bytes]) -> bytes:
    """Return answers as one."""
    return b"".join([part for answer in answers for part in (_LENGTH.pack(len(answer)), answer)])


def split(data: bytes) -> list[bytes]:
    """Return the answers that were joined. Raise DamagedDataError for anything else."""
    answers, at = [], 0
    try:
        while at < len(data):
            (length,) = _LENGTH.unpack_from(data, at)
            at += _LENGTH.size
            answers.append(data[at : at + length])
            at += length
    except struct.error:
        at = -1
    if at != len(data):
        raise DamagedDataError("the answers in a journal record cannot be read: it is damaged")
    return answers

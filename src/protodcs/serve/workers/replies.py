"""What a worker replies: to a change that was made, and to each error."""

from collections.abc import Iterator
from contextlib import contextmanager

from ...errors import (
    AnswerExpiredError,
    ConfigError,
    DamagedDataError,
    FencedError,
    HeldError,
    IdempotencyKeyError,
    InputError,
    ProtoDCSError,
    StateError,
    StoreError,
    UnknownClassError,
    UnknownClusterError,
    UnknownSampleError,
    UnknownSnapshotError,
    UnknownStreamError,
    UnknownVocabularyError,
    UsageError,
)
from ..messages import Reply, ReplyStatus
from ..stream.idempotency import Answer
from ..stream.records import Record
from .quotas import QuotaError


class MovedError(ProtoDCSError):
    """The stream belongs to another worker."""


class NotLoadedError(ProtoDCSError):
    """The store can be reached, and this version of protodcs cannot use what it holds of the stream."""


class DamagedError(NotLoadedError):
    """The same, because what the store holds is damaged."""


class PreconditionError(ProtoDCSError):
    """The state of a stream is not the one that a request expects."""


class RefusedError(ProtoDCSError):
    """A worker that drains loads no further stream."""

    def __init__(self, reply: Reply):
        super().__init__(reply.message)
        self.reply = reply


@contextmanager
def load_errors() -> Iterator[None]:
    """Raise every error as one of a stream that cannot be loaded, except a lack of memory, which may pass.

    Only a wrong checksum or a missing part is damage. Data that fails another check may be intact: another version
    wrote it, or the check is wrong.
    """
    try:
        yield
    except MemoryError:
        raise
    except DamagedDataError as problem:
        raise DamagedError(str(problem)) from problem
    except Exception as problem:
        reason = str(problem) if isinstance(problem, ProtoDCSError) else repr(problem)
        raise NotLoadedError(reason) from problem


# The status of each error, and the code of the problem if the status alone does not say it.
_STATUSES: list[tuple[type[ProtoDCSError], ReplyStatus, str]] = [
    (MovedError, ReplyStatus.MOVED, ""),
    (DamagedError, ReplyStatus.CONFLICT, "stream_damaged"),
    (NotLoadedError, ReplyStatus.CONFLICT, "stream_not_loaded"),
    (PreconditionError, ReplyStatus.PRECONDITION, ""),
    (UnknownStreamError, ReplyStatus.MISSING, ""),
    (UnknownSnapshotError, ReplyStatus.MISSING, "snapshot_not_found"),
    (UnknownClassError, ReplyStatus.MISSING, "class_not_found"),
    (UnknownVocabularyError, ReplyStatus.MISSING, "vocabulary_not_found"),
    (UnknownClusterError, ReplyStatus.MISSING, "cluster_not_found"),
    (UnknownSampleError, ReplyStatus.MISSING, "sample_not_found"),
    (FencedError, ReplyStatus.LATER, ""),
    (StoreError, ReplyStatus.LATER, ""),
    (InputError, ReplyStatus.WRONG, ""),
    (ConfigError, ReplyStatus.WRONG, ""),
    (StateError, ReplyStatus.WRONG, "invalid_state"),
    (IdempotencyKeyError, ReplyStatus.CONFLICT, "idempotency_key_reused"),
    (UsageError, ReplyStatus.CONFLICT, ""),
    (AnswerExpiredError, ReplyStatus.EXPIRED, ""),
    (QuotaError, ReplyStatus.OVER_QUOTA, ""),
]


def error_reply(problem: ProtoDCSError) -> Reply:
    """What the caller is told of a problem."""
    if isinstance(problem, HeldError):
        return Reply(ReplyStatus.HELD, problem.worker)
    if isinstance(problem, RefusedError):
        return problem.reply
    found = next((found for found in _STATUSES if isinstance(problem, found[0])), None)
    return Reply(ReplyStatus.FAILED, str(problem)) if found is None else Reply(found[1], str(problem), code=found[2])


def done_reply(record: Record | Answer, repeated: bool = False) -> Reply:
    """What the caller is told of a change: a new one, or one that an earlier request made."""
    return Reply(
        ReplyStatus.DONE, answer=record.answer, position=record.position, epoch=record.epoch, repeated=repeated
    )


def done_replies(record: Record) -> list[Reply]:
    """What the caller is told of each row of a new change."""
    return [
        Reply(ReplyStatus.DONE, answer=answer, position=position, epoch=record.epoch)
        for position, answer in enumerate(record.answers, record.position)
    ]

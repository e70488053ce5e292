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
from ..messages import Outcome, Reply
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


# The outcome of each error, and the code of the problem if the outcome alone does not say it.
_OUTCOMES: list[tuple[type[ProtoDCSError], Outcome, str]] = [
    (MovedError, Outcome.MOVED, ""),
    (DamagedError, Outcome.CONFLICT, "stream_damaged"),
    (NotLoadedError, Outcome.CONFLICT, "stream_not_loaded"),
    (PreconditionError, Outcome.PRECONDITION, ""),
    (UnknownStreamError, Outcome.MISSING, ""),
    (UnknownSnapshotError, Outcome.MISSING, "snapshot_not_found"),
    (UnknownClassError, Outcome.MISSING, "class_not_found"),
    (UnknownVocabularyError, Outcome.MISSING, "vocabulary_not_found"),
    (UnknownClusterError, Outcome.MISSING, "cluster_not_found"),
    (UnknownSampleError, Outcome.MISSING, "sample_not_found"),
    (FencedError, Outcome.LATER, ""),
    (StoreError, Outcome.LATER, ""),
    (InputError, Outcome.WRONG, ""),
    (ConfigError, Outcome.WRONG, ""),
    (StateError, Outcome.WRONG, "invalid_state"),
    (IdempotencyKeyError, Outcome.CONFLICT, "idempotency_key_reused"),
    (UsageError, Outcome.CONFLICT, ""),
    (AnswerExpiredError, Outcome.EXPIRED, ""),
    (QuotaError, Outcome.OVER_QUOTA, ""),
]


def error_reply(problem: ProtoDCSError) -> Reply:
    """What the caller is told of a problem."""
    if isinstance(problem, HeldError):
        return Reply(Outcome.HELD, problem.worker)
    if isinstance(problem, RefusedError):
        return problem.reply
    found = next((found for found in _OUTCOMES if isinstance(problem, found[0])), None)
    return Reply(Outcome.FAILED, str(problem)) if found is None else Reply(found[1], str(problem), code=found[2])


def done_reply(record: Record | Answer, repeated: bool = False) -> Reply:
    """What the caller is told of a change: a new one, or one that an earlier request made."""
    return Reply(Outcome.DONE, answer=record.answer, position=record.position, epoch=record.epoch, repeated=repeated)

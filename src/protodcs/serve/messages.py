"""What is asked of a stream, and what is answered: plain values that travel between processes."""

import random
import secrets
from enum import Enum
from typing import Any, NamedTuple

from ..errors import ProtoDCSError

_random = random.Random(secrets.randbits(256))


def new_id() -> str:
    """Return an id that no other request has. It is no secret."""
    return f"{_random.getrandbits(128):032x}"


class Request(NamedTuple):
    """One thing asked of one stream.

    Attributes:
        stream: its id.
        action: one of `Action`.
        key: the idempotency key.
        payload: a feature as float32, little-endian; a name; what a stream is created with; another stream's id; the
            incarnation of a stream that is deleted; or the fingerprint of a vocabulary.
        shared: the packed prototypes of a stream that is created, or the packed rows of a vocabulary.
        stand_in: the worker that the stream belongs to was asked in vain.
        take_from: the worker that holds the stream and that cannot be reached; take the stream from it.
        trace: the span that it belongs to, as a traceparent; empty where nobody records it.
        digest: of the content of the caller's request, all rows of it; empty: the payload is all of it.
        row: which row of the caller's request this is.
        replace: a saved snapshot of the same name may be replaced.
        if_match: apply the change only if the state has one of these entity tags; empty: in any case.
        image_ref: the caller's reference to the image, for the decision log.
        thumbnail: of the image, as a JPEG file, for the decision log; empty: none.
    """

    stream: str
    action: str
    key: str
    payload: bytes = b""
    shared: bytes = b""
    stand_in: bool = False
    trace: str = ""
    digest: bytes = b""
    row: int = 0
    replace: bool = False
    take_from: str = ""
    if_match: tuple[str, ...] = ()
    image_ref: str | None = None
    thumbnail: bytes = b""


class Action:
    """What can be asked."""

    CREATE = "create"
    CREATE_LIKE = "create like"
    OBSERVE = "observe"
    LOOKUP = "lookup"
    LOOKUP_CLASS = "lookup class"
    PEEK = "peek"
    STATUS = "status"
    FREEZE = "freeze"
    UNFREEZE = "unfreeze"
    ACKNOWLEDGE = "acknowledge"
    RESET = "reset"
    SAVE_SNAPSHOT = "save snapshot"
    LIST_SNAPSHOTS = "list snapshots"
    DESCRIBE_SNAPSHOT = "describe snapshot"
    DELETE_SNAPSHOT = "delete snapshot"
    ROLLBACK = "rollback"
    DELETE = "delete"
    DESCRIBE = "describe"
    FIND_VOCABULARY = "find vocabulary"
    PUT_VOCABULARY = "put vocabulary"
    ADD_CLASS = "add class"
    REMOVE_CLASS = "remove class"
    FEEDBACK = "feedback"
    REVIEW = "review"
    LIST_CLUSTERS = "list clusters"
    EDIT_CLUSTERS = "edit clusters"
    EXPLAIN = "explain"
    EXPLAIN_SAMPLE = "explain sample"
    DIAGNOSE = "diagnose"
    PREVIEW_CLASS = "preview class"
    READ_LOG = "read log"
    READ_EVENTS = "read events"
    READ_THUMBNAIL = "read thumbnail"
    PURGE_LOG = "purge log"
    EXPORT = "export"
    IMPORT = "import"
    CHECK_HEALTH = "check health"


class ReplyStatus(Enum):
    """How it went. The last three are not final: the same request may be asked again, here or elsewhere."""

    DONE = "done"
    MISSING = "missing"
    CONFLICT = "conflict"
    WRONG = "wrong"
    FAILED = "failed"
    CLOSED = "closed"
    PRECONDITION = "precondition failed"
    EXPIRED = "expired"
    OVER_QUOTA = "over quota"
    HELD = "held"
    MOVED = "moved"
    LATER = "later"

    def __init__(self, value: str):
        # Whether asking again would change nothing.
        self.final = value not in ("held", "moved", "later")


class Reply(NamedTuple):
    """The answer to one request.

    Attributes:
        status: how it went.
        message: why, if it did not; the holder's name for HELD; for MOVED the worker to ask, if it is known.
        answer: the packed decision of an observe or peek; what a described stream was created with.
        position, epoch: of the record that was written; -1 where none was.
        repeated: this request was answered before.
        facts: what else there is to say, JSON-ready.
        code: names the problem, if the status alone does not.
    """

    status: ReplyStatus
    message: str = ""
    answer: bytes = b""
    position: int = -1
    epoch: int = -1
    repeated: bool = False
    facts: dict[str, Any] | None = None
    code: str = ""


class WorkerLostError(ProtoDCSError, ConnectionError):
    """A worker that died, is not there, or could not be reached. It may or may not have done what was asked."""


STOPPING = Reply(ReplyStatus.CLOSED, "the service is being stopped: nothing was done; ask again when it is back")


def internal_error(problem: BaseException) -> Reply:
    """Return the reply to a request that failed unexpectedly; its facts are for the log, never for the caller."""
    return Reply(ReplyStatus.FAILED, "an error inside the service", facts={"error": repr(problem)})

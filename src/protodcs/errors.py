"""Every error this package raises on purpose.

A message says what was given, what is wanted and what to do about it. Each class also inherits the
built-in exception a caller would expect, so generic handlers keep working.
"""

import re
from collections.abc import Iterable
from difflib import get_close_matches

# User and password in an address, also in one that is not quite valid; and passwords among its options.
_CREDENTIALS = re.compile(r"(:/{0,2})\S*@")
_PASSWORD_OPTION = re.compile(r"(password=)[^&\s]*", re.IGNORECASE)


def without_passwords(text: str) -> str:
    """Return a text in which addresses have no user and password.

    >>> without_passwords("postgresql://user:secret@10.0.0.7:5432/streams")
    'postgresql://***@10.0.0.7:5432/streams'
    """
    return _PASSWORD_OPTION.sub(r"\1***", _CREDENTIALS.sub(r"\1***@", text))


def did_you_mean(given: str, choices: Iterable[str]) -> str:
    """Return a question that names the most similar choice, with a space before it; empty if none is similar.

    >>> did_you_mean("demmo", ["demo", "mini"])
    " Did you mean 'demo'?"
    """
    similar = get_close_matches(given, list(choices), n=1)
    return f" Did you mean {similar[0]!r}?" if similar else ""


class ProtoDCSError(Exception):
    """The root of all errors below: catch this to catch them all."""


class InputError(ProtoDCSError, ValueError):
    """A feature, prototype, class name or array that no engine, encoder or metric can use. Nothing has changed."""


class ImageError(InputError):
    """An image that cannot be used: damaged, hostile, of a kind that is not supported, or not an image at all."""


class DataError(ProtoDCSError, LookupError):
    """A data set that is missing, incomplete or not what its name says."""


class EncoderError(ProtoDCSError, ValueError):
    """A model that is missing, incomplete, or cannot be used as a dual encoder."""


class ConfigError(ProtoDCSError, ValueError):
    """An option that does not exist, lies outside its range or contradicts another one."""


class StateError(ProtoDCSError, ValueError):
    """A snapshot that is damaged, hostile, too new, or made beside another encoder."""


class StateVersionError(StateError):
    """A state that another version of protodcs wrote. It is intact, and that version reads it."""

    @classmethod
    def of(cls, what: str, written: object, readable: int) -> "StateVersionError":
        """Return the error for something with the version `written` if this version of protodcs reads another one."""
        return cls(
            f"{what} was written by another version of protodcs: it has version {str(written)[:20]}, and this one "
            f"reads {readable}. Nothing is lost. Use the version of protodcs that wrote it."
        )


class UsageError(ProtoDCSError, RuntimeError):
    """A call that the object cannot serve now, such as two threads inside one engine."""


class MissingPackageError(ProtoDCSError, ModuleNotFoundError):
    """An optional package that is not installed. The message says how to install it."""


class UnknownMethodError(ProtoDCSError, LookupError):
    """A method name that is not registered."""


class StoreError(ProtoDCSError, OSError):
    """A store of streams that cannot be reached, is full, or holds something damaged."""


class DamagedDataError(StoreError):
    """Stored data that does not match its checksum, or of which a part is missing."""


class FencedError(ProtoDCSError, RuntimeError):
    """A write to a stream by one who no longer owns it, or who is wrong about what it holds. Nothing was written."""


class AnswerExpiredError(ProtoDCSError, RuntimeError):
    """A retry of a request that was applied and whose answer is no longer stored. Nothing was applied again."""


class HeldError(ProtoDCSError, RuntimeError):
    """A stream that another live worker holds.

    Attributes:
        worker: the name of that worker.
    """

    def __init__(self, message: str, worker: str):
        super().__init__(message)
        self.worker = worker


class UnknownStreamError(ProtoDCSError, LookupError):
    """A stream that does not exist."""


class UnknownSnapshotError(ProtoDCSError, LookupError):
    """A saved snapshot that does not exist."""


class UnknownClassError(InputError, LookupError):
    """A class that an engine does not have."""


class UnknownSampleError(InputError, LookupError):
    """A sample whose feature is not stored."""


class UnknownVocabularyError(InputError, LookupError):
    """A vocabulary that is not stored."""


class UnknownClusterError(InputError, LookupError):
    """A cluster that does not exist."""


class IdempotencyKeyError(UsageError):
    """An idempotency key that was used for a request with other content."""


class ServiceError(ProtoDCSError, RuntimeError):
    """A service rejected a request, or gave no response before the client gave up.

    Attributes:
        status: the HTTP status of the last response; None if there was none.
        code: the stable name of the problem, such as "stream_not_found"; None if the service gave none.
    """

    def __init__(self, message: str, status: int | None = None, code: str | None = None):
        super().__init__(message)
        self.status = status
        self.code = code

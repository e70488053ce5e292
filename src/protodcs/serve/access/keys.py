"""The keys that callers of the service have, in one JSON file: whose they are, what they may do, until when.

The file holds salted hashes, never a secret, and is replaced whole. To find out whether a key is good takes the same
steps for one that is good, wrong, unknown, expired or revoked; nothing here may return early because of a secret.
"""

import hashlib
import hmac
import json
import logging
import os
import re
import secrets
import stat
import string
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Literal, NamedTuple, Self

from pydantic import AwareDatetime, BaseModel, ConfigDict, Field, ValidationError

from ...atomic_io import locked, replace_file
from ...errors import ConfigError, InputError
from ..settings import Tenant

_log = logging.getLogger(__name__)

SCHEMA = 1
Role = Literal["read", "observe", "admin"]
ROLES: tuple[Role, ...] = ("read", "observe", "admin")
# The tenant whose admins look after the service itself.
OPERATOR = "operator"

_ID_LETTERS, _ID_LENGTH = string.ascii_lowercase + string.digits, 12
# 43 letters of 62 are 256 random bits.
_SECRET_LETTERS, _SECRET_LENGTH = string.ascii_letters + string.digits, 43
_KEY = re.compile(rf"pdcs_([a-z0-9]{{{_ID_LENGTH}}})_([A-Za-z0-9]{{{_SECRET_LENGTH}}})")
# What looks like a key, or a part of one, wherever it stands.
_LIKE_A_KEY = re.compile(r"pdcs_[A-Za-z0-9_]*")
# Maximum length of a stream id in a log.
_LONGEST_STREAM = 200
# How often the file is looked at, in seconds.
_LOOK = 1.0


class Caller(NamedTuple):
    """Who calls: the tenant, what the key allows, which key it is, and whether it may see images."""

    tenant: str
    role: Role
    key: str
    images: bool = False


class Key(BaseModel):
    """What is known of one key."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    id: str = Field(pattern=f"^[a-z0-9]{{{_ID_LENGTH}}}$")
    tenant: Tenant
    role: Role
    created: AwareDatetime
    expires: AwareDatetime | None = None
    revoked: AwareDatetime | None = None
    images: bool = Field(False, description="Whether it may see thumbnails of images.")
    successor: str | None = Field(None, description="The key that it was rotated to.")
    salt: str = Field(pattern="^[0-9a-f]{32}$")
    hash: str = Field(pattern="^[0-9a-f]{64}$")

    @property
    def caller(self) -> Caller:
        """Who calls with it."""
        return Caller(self.tenant, self.role, self.id, self.images)

    def ended(self, moment: datetime) -> bool:
        """Return whether it has expired or was revoked."""
        expired = self.expires is not None and self.expires <= moment
        return (self.revoked is not None) | expired

    def condition(self, moment: datetime) -> str:
        """Return what a list says of it."""
        if self.revoked is not None:
            return "revoked"
        if self.ended(moment):
            return "expired"
        return "good" if self.successor is None else "rotated"


class _File(BaseModel):
    """All of the file."""

    model_config = ConfigDict(extra="forbid")

    schema_version: int = SCHEMA
    keys: list[Key] = Field(default_factory=list)


def _hashed(secret: str, salt: str) -> bytes:
    """Return the hash of a secret.

    One pass of a fast hash is enough: slow ones protect secrets that people choose, and nobody guesses 256 random bits.
    Every request computes it. The salt keeps equal secrets apart.
    """
    return hashlib.blake2b(secret.encode(), digest_size=32, salt=bytes.fromhex(salt), person=b"protodcs key").digest()


def _now() -> datetime:
    return datetime.now(UTC)


def _drawn(letters: str, length: int) -> str:
    return "".join(secrets.choice(letters) for _ in range(length))


def without_keys(text: str) -> str:
    """Return a text from a caller for a log, without what looks like a key."""
    return _LIKE_A_KEY.sub("pdcs_...", text)


def logged_stream(stream: str | None) -> str | None:
    """Return the stream id of a request, for a log. A rejected request can contain anything."""
    return None if stream is None else without_keys(stream)[:_LONGEST_STREAM]


class Keys:
    """The keys of a file. A change of the file counts within a second. Create it with `Keys.open`.

    A file that cannot be used while the service runs changes nothing: the keys of the last good one hold, and an error
    is logged. So a mistake in an editor locks nobody out, but also revokes nothing.
    """

    def __init__(self, path: Path):
        self._path = path
        self._keys: dict[str, Key] = {}
        self._seen: tuple[int, ...] | None = None
        self._looked = -float("inf")
        # Stands for the record of a key that does not exist, so that it takes as long to reject.
        self._decoy = _made("decoy", "read", None)[0].model_copy(update={"hash": secrets.token_hex(32)})

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> Self:
        """Return the keys of a file. Raise ConfigError if it cannot be read, or others may write to it."""
        keys = cls(Path(path))
        keys._read()
        return keys

    def caller(self, key: str) -> Caller | None:
        """Return who calls with this key; None if it is not good, whatever the reason."""
        self._look()
        found = _KEY.fullmatch(key)
        name, secret = ("", "") if found is None else found.groups()
        record = self._keys.get(name, self._decoy)
        same = hmac.compare_digest(_hashed(secret, record.salt), bytes.fromhex(record.hash))
        good = same & (not record.ended(_now()))
        return record.caller if good else None

    def holder(self, name: str) -> Caller | None:
        """Return who has the key of this id; None if it has expired, was revoked or is not there."""
        self._look()
        record = self._keys.get(name)
        return None if record is None or record.ended(_now()) else record.caller

    def claimed(self, key: str) -> str | None:
        """Return the id in a key that is not good, if a key of this id was ever made."""
        found = _KEY.fullmatch(key)
        return found[1] if found is not None and found[1] in self._keys else None

    def _look(self) -> None:
        """Read the file again if it is another one."""
        if time.monotonic() - self._looked < _LOOK:
            return
        self._looked = time.monotonic()
        try:
            if _signature(self._path.stat()) != self._seen:
                self._read()
        except (ConfigError, OSError) as problem:
            _log.error("the keys stay as they were: %s", problem)

    def _read(self) -> None:
        about, content = _contents(self._path)
        # A file that is bad is not read again before it changes.
        self._seen = _signature(about)
        self._keys = {key.id: key for key in _unpack(self._path, content).keys}
        self._looked = time.monotonic()


def _signature(about: os.stat_result) -> tuple[int, ...]:
    return about.st_dev, about.st_ino, about.st_mtime_ns, about.st_size


def _contents(path: Path) -> tuple[os.stat_result, bytes]:
    try:
        with path.open("rb") as file:
            about = os.fstat(file.fileno())
            content = file.read()
    except OSError as problem:
        raise ConfigError(
            f"the keys file {path} cannot be read: {problem.strerror}; make one with `protodcs keys create`"
        ) from None
    if os.name == "posix" and stat.S_IMODE(about.st_mode) & 0o022:
        raise ConfigError(f"others may write to the keys file {path}, and so make keys: chmod 600 it")
    return about, content


def _unpack(path: Path, content: bytes) -> _File:
    try:
        plain: Any = json.loads(content)
        version = plain.get("schema_version") if isinstance(plain, dict) else None
        if isinstance(version, int) and version > SCHEMA:
            raise ConfigError(f"the keys file {path} has schema {version}, this protodcs reads {SCHEMA}: upgrade")
        found = _File.model_validate_json(content)
    except (ValidationError, ValueError, RecursionError) as problem:
        if isinstance(problem, ConfigError):
            raise
        # The words of pydantic quote what was given; of this file nothing is quoted.
        place = ".".join(map(str, problem.errors()[0]["loc"])) if isinstance(problem, ValidationError) else ""
        raise ConfigError(f"the keys file {path} is damaged{place and f' at {place}'}: bring back a copy") from None
    if len({key.id for key in found.keys}) != len(found.keys):
        raise ConfigError(f"the keys file {path} is damaged: it holds an id twice; bring back a copy")
    return found


# Changes, by the commands.


def _made(tenant: str, role: Role, lifetime: timedelta | None, images: bool = False) -> tuple[Key, str]:
    """Return what the file holds of a new key, and the key itself."""
    name, secret = _drawn(_ID_LETTERS, _ID_LENGTH), _drawn(_SECRET_LETTERS, _SECRET_LENGTH)
    salt, moment = secrets.token_hex(16), _now()
    try:
        record = Key(
            id=name,
            tenant=tenant,
            role=role,
            created=moment,
            expires=None if lifetime is None else moment + lifetime,
            images=images,
            salt=salt,
            hash=_hashed(secret, salt).hex(),
        )
    except ValidationError as problem:
        option = problem.errors()[0]["loc"][0]
        wanted = ", ".join(ROLES) if option == "role" else "1 to 40 of a-z, 0-9 and -, such as acme"
        given = {"role": role, "tenant": tenant}.get(str(option), "")
        raise InputError(f"{option}: wanted: {wanted}; given: {given[:100]!r}") from None
    return record, f"pdcs_{name}_{secret}"


def create_key(
    path: Path, tenant: str, role: Role, lifetime: timedelta | None = None, images: bool = False
) -> tuple[Key, str]:
    """Create a key, in a new file if there is none yet. Return its record and the key, which is stored nowhere."""
    record, key = _made(tenant, role, lifetime, images)
    with _changed(path) as keys:
        keys[record.id] = record
    return record, key


def revoke_key(path: Path, name: str) -> Key:
    """Revoke a key. One that was revoked before stays as it is."""
    with _changed(path) as keys:
        record = _found(path, keys, name)
        if record.revoked is None:
            keys[name] = record.model_copy(update={"revoked": _now()})
        return keys[name]


def rotate_key(path: Path, name: str, grace: timedelta) -> tuple[Key, str]:
    """Create a key for the same tenant, with the same role and lifetime. The old one ends after `grace`."""
    with _changed(path) as keys:
        old = _found(path, keys, name)
        moment = _now()
        if old.ended(moment) or old.successor is not None:
            raise InputError(f"the key {name} is {old.condition(moment)} already: rotate its successor or create one")
        lifetime = None if old.expires is None else old.expires - old.created
        record, key = _made(old.tenant, old.role, lifetime, old.images)
        ends = moment + grace if old.expires is None else min(old.expires, moment + grace)
        keys[name] = old.model_copy(update={"expires": ends, "successor": record.id})
        keys[record.id] = record
    return record, key


def list_keys(path: Path) -> list[Key]:
    """Return all keys of a file, oldest first."""
    return _unpack(path, _contents(path)[1]).keys


def _found(path: Path, keys: dict[str, Key], name: str) -> Key:
    if name not in keys:
        # Whoever gives the whole key by mistake shall not read it again in a log.
        raise InputError(f"{path} holds no key {without_keys(name)[:100]!r}: `protodcs keys list` shows their ids")
    return keys[name]


@contextmanager
def _changed(path: Path) -> Iterator[dict[str, Key]]:
    """Change the keys of a file inside of this, while no other command does."""
    path = path.resolve()
    with locked(path.parent):
        keys = {key.id: key for key in list_keys(path)} if path.exists() else {}
        yield keys
        content = _File(keys=list(keys.values())).model_dump_json(indent=1, exclude_none=True)
        replace_file(path, content.encode() + b"\n", mode=0o600)

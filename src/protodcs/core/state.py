"""How a state travels: one safetensors file whose header says what it is, and whose hash says that it is whole.

A state file may come from a stranger, so nothing in it is trusted: never pickle, every length checked before it is
used, every refusal a `StateError`. This is the only file of this room that touches the disk.
"""

import hashlib
import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import numpy as np
import safetensors
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from safetensors.numpy import save as serialise

from ..durable import replace_file
from ..errors import StateError

Arrays = dict[str, NDArray[Any]]

FORMAT: Literal["protodcs-state"] = "protodcs-state"
SCHEMA = 1
# The one key of safetensors' own metadata. A second one would be written in no particular order.
_KEY = "state"
_NO_HASH = "0" * 64
_HASH = re.compile(rb'\\"content_hash\\":\\"([0-9a-f]{64})\\"')
_DTYPES = {"F64": np.float64, "F32": np.float32, "I64": np.int64}


class Header(BaseModel):
    """What a state file says about itself."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)

    format: Literal["protodcs-state"] = FORMAT
    schema_version: int = Field(SCHEMA, ge=0)
    package: str = Field(max_length=100, description="Version of protodcs that wrote it.")
    kernel: str = Field(max_length=100, description="What computed it: 'native' or 'numpy'.")
    method: str = Field(max_length=100)
    config: dict[str, Any] = Field(description="Every option, resolved.")
    classes: list[str] = Field(min_length=1)
    encoder: str | None = Field(None, max_length=1000, description="Fingerprint of what made the features, if known.")
    prototypes: str | None = Field(
        None, pattern="^[0-9a-f]{64}$", description="Fingerprint of the entry prototypes, where they are left out."
    )
    frozen: bool = False
    counters: dict[str, int | float | bool | None]
    content_hash: str = Field(_NO_HASH, description="SHA-256 over the whole file with these 64 digits as zeros.")


# schema version -> a function from that version's header and arrays to the next one's.
Migration = Callable[[dict[str, Any], Arrays], tuple[dict[str, Any], Arrays]]
MIGRATIONS: dict[int, Migration] = {}


def pack(header: Header, arrays: Arrays) -> bytes:
    """One state as bytes. The same state gives the same bytes."""
    # A whole state says nothing of it, so that it reads as it always did.
    left_out = {"prototypes"} if header.prototypes is None else None
    text = json.dumps(header.model_dump(exclude=left_out), sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    ordered = {name: np.ascontiguousarray(arrays[name]) for name in sorted(arrays)}
    data = serialise(ordered, metadata={_KEY: text})
    start, stop = _hash_span(data)
    digest = hashlib.sha256(data).hexdigest().encode()
    return data[:start] + digest + data[stop:]


def unpack(data: bytes, proven: bool = False) -> tuple[Header, Arrays]:
    """Header and arrays of a state, proven whole, unless it is so already, and brought up to the present schema."""
    if not isinstance(data, (bytes, bytearray, memoryview)):
        raise StateError(f"a state is bytes, as snapshot() returns them; given: {type(data).__name__}")
    data = bytes(data)
    if not proven:
        _verify_hash(data)
    return present(*_parse(data))


def leaves_out_prototypes(data: bytes) -> bool:
    """Whether a state is one of `FeatureMethod.difference`; of anything that is no state it says nothing."""
    try:
        length = int.from_bytes(data[:8], "little")
        header = json.loads(json.loads(data[8 : 8 + length])["__metadata__"][_KEY])
    except (ValueError, KeyError, TypeError, RecursionError):
        return False
    return isinstance(header, dict) and header.get("prototypes") is not None


def present(header: dict[str, Any], arrays: Arrays) -> tuple[Header, Arrays]:
    """A header as it was read and its arrays, brought up to the present schema."""
    version = header.get("schema_version")
    if not isinstance(version, int) or isinstance(version, bool) or version < 0:
        raise StateError(f"the state's schema version is {version!r}: it must be a whole number")
    if version > SCHEMA:
        raise StateError(
            f"the state has schema version {version}, this protodcs reads up to {SCHEMA}: upgrade protodcs to read it"
        )
    while version < SCHEMA:
        if version not in MIGRATIONS:
            raise StateError(f"the state has schema version {version}, for which there is no migration path")
        header, arrays = MIGRATIONS[version](header, arrays)
        version += 1
    try:
        return Header.model_validate({**header, "schema_version": SCHEMA}), arrays
    except ValidationError as problem:
        first = problem.errors()[0]
        raise StateError(
            f"the state's header is not valid: {'.'.join(map(str, first['loc']))}: {first['msg']}"
        ) from None


def write(path: str | os.PathLike[str], data: bytes) -> None:
    """Replace `path` by `data` in one step: after a crash the old file or the new one is there, never a torn one."""
    try:
        replace_file(Path(path), data)
    except OSError as problem:
        reason = problem.strerror or problem
        raise StateError(f"cannot write the state file {os.fspath(path)!r}: {reason}") from problem


def read(path: str | os.PathLike[str]) -> bytes:
    """The bytes of a state file."""
    try:
        return Path(path).read_bytes()
    except OSError as problem:
        raise StateError(f"cannot read the state file {os.fspath(path)!r}: {problem.strerror or problem}") from problem


def _hash_span(data: bytes) -> tuple[int, int]:
    if len(data) < 8:
        raise StateError(f"the state is {len(data)} bytes long: that is no state file")
    length = int.from_bytes(data[:8], "little")
    if length > len(data) - 8:
        raise StateError(f"the state announces a header of {length} bytes and ends after {len(data)}: it is cut off")
    found = list(_HASH.finditer(data, 8, 8 + length))
    if len(found) != 1:
        raise StateError("the state has no content hash: it was not written by protodcs, or it is damaged")
    return found[0].span(1)


def _verify_hash(data: bytes) -> None:
    start, stop = _hash_span(data)
    digest = hashlib.sha256(data[:start])
    digest.update(_NO_HASH.encode())
    digest.update(memoryview(data)[stop:])
    if digest.hexdigest().encode() != data[start:stop]:
        raise StateError("the state's content does not match its hash: it is damaged or was changed by hand")


def _parse(data: bytes) -> tuple[dict[str, Any], Arrays]:
    try:
        tensors = safetensors.deserialize(data)  # type: ignore[no-untyped-call]
        length = int.from_bytes(data[:8], "little")
        header = json.loads(json.loads(data[8 : 8 + length])["__metadata__"][_KEY], parse_constant=_no_constant)
    except (safetensors.SafetensorError, ValueError, KeyError, TypeError, RecursionError) as problem:
        raise StateError(f"the state cannot be read: {str(problem)[:200]}") from None
    if not isinstance(header, dict) or header.get("format") != FORMAT:
        raise StateError("the file is a safetensors file, but not a protodcs state")
    arrays: Arrays = {}
    for name, tensor in tensors:
        if tensor["dtype"] not in _DTYPES:
            raise StateError(f"the state's array {name[:100]!r} has the unknown type {tensor['dtype']}")
        arrays[name] = np.frombuffer(tensor["data"], dtype=_DTYPES[tensor["dtype"]]).reshape(tensor["shape"])
    return header, arrays


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is not a number that a state may hold")

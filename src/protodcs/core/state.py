"""The format of a state: one safetensors file with a JSON header and a hash of its content.

Anybody may have written a state file, so nothing in it is trusted. It is never unpickled, every length is checked
before it is used, and every refusal is a `StateError`. No other module of the core reads or writes files.
"""

import hashlib
import json
import os
import re
from pathlib import Path
from typing import Any, Literal, TypeVar, overload

import numpy as np
import safetensors
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from safetensors.numpy import save as serialise

from ..atomic_io import replace_file
from ..errors import StateError, StateVersionError

Arrays = dict[str, NDArray[Any]]

FORMAT: Literal["protodcs-state"] = "protodcs-state"
SCHEMA: Literal[4] = 4
# The one key of safetensors' own metadata. A second one would be written in no particular order.
_KEY = "state"
_NO_HASH = "0" * 64
_HASH = re.compile(rb'\\"content_hash\\":\\"([0-9a-f]{64})\\"')
_DTYPES = {"F64": np.float64, "F32": np.float32, "F16": np.float16, "I64": np.int64}
H = TypeVar("H", bound=BaseModel)


class Header(BaseModel):
    """The header of a state."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)

    format: Literal["protodcs-state"] = FORMAT
    schema_version: Literal[4] = SCHEMA
    package: str = Field(max_length=100, description="Version of protodcs that wrote it.")
    backend: str = Field(max_length=100, description="What computed it: 'native' or 'numpy'.")
    method: str = Field(max_length=100)
    method_version: int = Field(ge=1, description="Version of the method's state; see `FeatureMethod.version`.")
    config: dict[str, Any] = Field(description="Every setting.")
    classes: list[str] = Field(min_length=1)
    encoder: str | None = Field(None, max_length=1000, description="Fingerprint of what made the features, if known.")
    prototypes: str | None = Field(
        None, pattern="^[0-9a-f]{64}$", description="Fingerprint of the initial prototypes, where they are left out."
    )
    vocabulary: str | None = Field(
        None, pattern="^[0-9a-f]{64}$", description="Fingerprint of the vocabulary, which no state contains."
    )
    frozen: bool = False
    counters: dict[str, int | float | bool | None]
    content_hash: str = Field(_NO_HASH, description="SHA-256 over the whole file with these 64 digits as zeros.")


def pack(header: BaseModel, arrays: Arrays) -> bytes:
    """Return a state as bytes. The same state gives the same bytes. The header needs a field `content_hash`."""
    text = json.dumps(header.model_dump(), sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    ordered = {name: np.ascontiguousarray(arrays[name]) for name in sorted(arrays)}
    data = serialise(ordered, metadata={_KEY: text})
    start, stop = _hash_span(data)
    digest = hashlib.sha256(data).hexdigest().encode()
    return data[:start] + digest + data[stop:]


@overload
def unpack(data: bytes, trusted: bool = False) -> tuple[Header, Arrays]: ...
@overload
def unpack(data: bytes, trusted: bool = False, *, header_type: type[H]) -> tuple[H, Arrays]: ...


def unpack(data: bytes, trusted: bool = False, *, header_type: type[BaseModel] = Header) -> tuple[BaseModel, Arrays]:
    """Return header and arrays of a state. Check its hash unless it is `trusted`.

    `header_type` has default values for `format` and `schema_version`. Other formats are a StateError, other versions a
    StateVersionError.
    """
    if not isinstance(data, (bytes, bytearray, memoryview)):
        raise StateError(
            f"A state must be bytes, as snapshot() returns them; given: {type(data).__name__}. Use load() for a file."
        )
    data = bytes(data)
    if not trusted:
        _verify_hash(data)
    header, arrays = _parse(data, header_type.model_fields["format"].default)
    return _checked_header(header, header_type), arrays


def leaves_out_prototypes(data: bytes) -> bool:
    """Whether `FeatureMethod.difference` made this state. False for anything that is no state."""
    try:
        length = int.from_bytes(data[:8], "little")
        header = json.loads(json.loads(data[8 : 8 + length])["__metadata__"][_KEY])
    except (ValueError, KeyError, TypeError, RecursionError):
        return False
    return isinstance(header, dict) and header.get("prototypes") is not None


def without_vocabulary(data: bytes) -> bytes:
    """Return a state that names no vocabulary, to inspect what was learned. It would decide differently."""
    header, arrays = unpack(data)
    return pack(header.model_copy(update={"vocabulary": None, "content_hash": _NO_HASH}), arrays)


def _checked_header(header: dict[str, Any], header_type: type[H]) -> H:
    version, readable = header.get("schema_version"), header_type.model_fields["schema_version"].default
    if version != readable:
        raise StateVersionError.of("The state", version, readable)
    try:
        return header_type.model_validate(header)
    except ValidationError as problem:
        first = problem.errors()[0]
        raise StateError(
            f"The state's header is not valid: {'.'.join(map(str, first['loc']))}: {first['msg']}."
        ) from None


def write(path: str | os.PathLike[str], data: bytes) -> None:
    """Replace the file `path` in one step. After a crash, either the old or the new file is there."""
    try:
        replace_file(Path(path), data)
    except OSError as problem:
        reason = problem.strerror or problem
        raise StateError(f"cannot write the state file {os.fspath(path)!r}: {reason}") from problem


def read(path: str | os.PathLike[str]) -> bytes:
    """Return the bytes of a state file."""
    try:
        return Path(path).read_bytes()
    except OSError as problem:
        raise StateError(f"cannot read the state file {os.fspath(path)!r}: {problem.strerror or problem}") from problem


def _hash_span(data: bytes) -> tuple[int, int]:
    if len(data) < 8:
        raise StateError(f"This is not a state file: it has only {len(data)} bytes.")
    length = int.from_bytes(data[:8], "little")
    if length > len(data) - 8:
        raise StateError(
            "This is not a state file, or it is truncated. State files are written by `save` and by `protodcs "
            "classify` (.state)."
        )
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


def _parse(data: bytes, file_format: str) -> tuple[dict[str, Any], Arrays]:
    try:
        tensors = safetensors.deserialize(data)  # type: ignore[no-untyped-call]
        length = int.from_bytes(data[:8], "little")
        header = json.loads(json.loads(data[8 : 8 + length])["__metadata__"][_KEY], parse_constant=_no_constant)
    except (safetensors.SafetensorError, ValueError, KeyError, TypeError, RecursionError) as problem:
        raise StateError(f"the state cannot be read: {str(problem)[:200]}") from None
    if not isinstance(header, dict) or header.get("format") != file_format:
        raise StateError(f"the file is a safetensors file, but not a {file_format} file")
    arrays: Arrays = {}
    for name, tensor in tensors:
        if tensor["dtype"] not in _DTYPES:
            raise StateError(f"the state's array {name[:100]!r} has the unknown type {tensor['dtype']}")
        arrays[name] = np.frombuffer(tensor["data"], dtype=_DTYPES[tensor["dtype"]]).reshape(tensor["shape"])
    return header, arrays


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is not a number that a state may hold")

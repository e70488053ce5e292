"""The files of a files store: labels that say what is inside, the content, and a checksum over all of it.

A file is only what its labels say: one that is damaged, of another stream or of a newer version is a `StoreError`, and
must never be passed over.
"""

import hashlib
import json
import struct
import zlib
from pathlib import Path
from typing import Any

from ...errors import StoreError

VERSION = 1
# magic, version, reserved, bytes of the labels, bytes of the content; a checksum over all of it comes last
_HEAD = struct.Struct("<8sHHIQ")
_MAGIC = b"PDCSFILE"
_SEAL = struct.Struct("<I")


def to_json(value: Any) -> bytes:
    """JSON with every character as itself: two halves of a surrogate pair that are escaped are read as one whole."""
    return json.dumps(value, ensure_ascii=False).encode("utf-8", "surrogatepass")


def from_json(data: bytes) -> Any:
    """What `to_json` was given."""
    return json.loads(data.decode("utf-8", "surrogatepass"))


def digest(text: str) -> str:
    """What a name is called in the names of files, whatever characters it has."""
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:42]


def pack(labels: dict[str, Any], content: bytes) -> bytes:
    """A file as bytes; its labels hold at least a `kind` and a `name`."""
    text = to_json(labels)
    body = b"".join((_HEAD.pack(_MAGIC, VERSION, 0, len(text), len(content)), text, content))
    return body + _SEAL.pack(zlib.crc32(body))


def read(path: Path) -> tuple[dict[str, Any], bytes]:
    """The labels and the content of a file."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        raise StoreError(f"{path} is missing: restore it from a copy") from None
    except OSError as problem:
        raise StoreError(f"cannot read {path}: {problem.strerror or problem}") from problem
    if len(data) < _HEAD.size + _SEAL.size or data[: len(_MAGIC)] != _MAGIC:
        raise StoreError(f"{path} is not a file of this store, or is damaged: restore it from a copy")
    _, version, _, labels_length, length = _HEAD.unpack_from(data)
    if version > VERSION:
        raise StoreError(f"{path} is of version {version}, this protodcs reads {VERSION}: upgrade protodcs")
    end = len(data) - _SEAL.size
    start = _HEAD.size + labels_length
    if start + length != end or zlib.crc32(memoryview(data)[:end]) != _SEAL.unpack_from(data, end)[0]:
        raise StoreError(f"{path} does not match its checksum: it is damaged; restore it from a copy")
    return from_json(data[_HEAD.size : start]), data[start:end]


def content(path: Path, kind: str, name: str) -> bytes:
    """What a file holds, if it is what it should be."""
    labels, found = read(path)
    if (labels["kind"], labels["name"]) != (kind, name):
        raise StoreError(f"{path} holds {labels['kind']} of {labels['name']!r}, wanted: {kind} of {name!r}")
    return found

"""WebDataset shards: plain tar files whose members belong together by name, `0001.jpg` with `0001.cls`.

The members' headers are read once, images later by position. Nothing is ever unpacked to disk and no name in a tar is
used as a path, so absolute names, links and devices can do no harm.
"""

import os
from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np

from ...arrays import Labels, Pixels
from ...errors import DataError
from ..image import MAX_BYTES, decode
from .stored import IMAGE_ENDINGS, FilePath, StoredImages, named_after, no_such

_BLOCK = 512
# A long name or a label is a line of text; whoever claims more is up to something.
_MAX_NAME_BYTES = 2**20
_MAX_LABEL_BYTES = 32
# 20 million members are 10 GB of headers alone.
MAX_MEMBERS = 20_000_000
_COMPRESSED = {b"\x1f\x8b": "gzip", b"BZh": "bzip2", b"\xfd7zXZ": "xz", b"\x28\xb5\x2f\xfd": "zstd"}


class _Member(NamedTuple):
    name: str
    start: int
    size: int


class _Sample(NamedTuple):
    shard: int
    key: str
    start: int
    size: int
    label: int


class WebDataset(StoredImages):
    """The images of one or several shards, in their order.

    A member's key is its name up to the first dot of its last part. A member with an image's ending is the image of
    its key, `.cls` its label as a decimal number; all other members are ignored.

    Args:
        paths: a tar file, or several in order. Compressed tars cannot be read by position and are refused.
        name: the name of the set; by default from the first file's name.
        classes: the class names, in label order.
    """

    def __init__(self, paths: FilePath | Sequence[FilePath], name: str | None = None, classes: Sequence[str] = ()):
        several: Sequence[FilePath] = [paths] if isinstance(paths, str | os.PathLike) else paths
        self.paths = tuple(Path(path) for path in several)
        if not self.paths:
            raise DataError("a WebDataset needs at least one tar file; given: none")
        super().__init__(name or named_after(self.paths[0]))
        self._classes = tuple(classes)

    @cached_property
    def _samples(self) -> tuple[_Sample, ...]:
        return tuple(sample for shard, path in enumerate(self.paths) for sample in _samples_of(shard, path))

    def _find_classes(self) -> tuple[str, ...]:
        return self._classes

    def _find_labels(self) -> Labels:
        return np.array([sample.label for sample in self._samples], np.int64)

    def _stored(self) -> Iterator[bytes]:
        for shard, samples in groupby(self._samples, key=lambda sample: sample.shard):
            path = self.paths[shard]
            with _opened(path) as stream:
                for sample in samples:
                    yield _bytes_at(stream, sample.start, sample.size, path)

    def _read(self, positions: list[int]) -> list[Pixels]:
        samples = [self._samples[position] for position in positions]
        images: dict[int, Pixels] = {}
        # Each call opens the file again: no position is shared, so threads cannot disturb each other.
        for shard in sorted({sample.shard for sample in samples}):
            path = self.paths[shard]
            with _opened(path) as stream:
                for place, sample in enumerate(samples):
                    if sample.shard == shard:
                        data = _bytes_at(stream, sample.start, sample.size, path)
                        images[place] = decode(data, f"{sample.key} in {path.name}")
        return [images[place] for place in range(len(samples))]


def _opened(path: Path) -> BinaryIO:
    try:
        return path.open("rb")
    except FileNotFoundError:
        raise no_such(path, "file") from None
    except OSError as problem:
        raise DataError(f"{path}: cannot be read: {problem.strerror}") from None


def _bytes_at(stream: BinaryIO, start: int, size: int, path: Path) -> bytes:
    stream.seek(start)
    data = stream.read(size)
    if len(data) != size:
        raise DataError(f"{path}: has become shorter since it was listed")
    return data


def _samples_of(shard: int, path: Path) -> list[_Sample]:
    """The samples of one tar, in the order of their first members; those without an image are left out."""
    images: dict[str, _Member] = {}
    labels: dict[str, int] = {}
    with _opened(path) as stream:
        for member in _members(stream, path):
            key, ending = _key_and_ending(member.name)
            if ending == ".cls":
                if key in labels:
                    raise DataError(f"{path}: two labels under the key {key!r}")
                labels[key] = _label(stream, member, path)
            elif ending in IMAGE_ENDINGS:
                if key in images:
                    raise DataError(f"{path}: two images under the key {key!r}; which one counts, nobody can say")
                if member.size > MAX_BYTES:
                    raise DataError(f"{path}: {key!r} has {member.size:,} bytes; an image has at most {MAX_BYTES:,}")
                images[key] = member
    if not images:
        raise DataError(f"{path}: no image in this tar; looked for {', '.join(sorted(IMAGE_ENDINGS))}")
    return [_Sample(shard, key, image.start, image.size, labels.get(key, -1)) for key, image in images.items()]


def _key_and_ending(name: str) -> tuple[str, str]:
    folder, slash, last = name.rpartition("/")
    stem, dot, ending = last.partition(".")
    return folder + slash + stem, (dot + ending).lower() if stem else ""


def _label(stream: BinaryIO, member: _Member, path: Path) -> int:
    text = b"" if member.size > _MAX_LABEL_BYTES else _bytes_at(stream, member.start, member.size, path)
    try:
        label = int(text)
        if -1 <= label < 2**31:
            return label
    except ValueError:
        pass
    raise DataError(f"{path}: {member.name!r} must hold a class number in decimal digits; given: {text[:40]!r}")


def _members(stream: BinaryIO, path: Path) -> Iterator[_Member]:
    """The regular files of a tar. Folders, links and devices hold no image and are passed over."""
    length = stream.seek(0, 2)
    position, long_name, long_size = 0, None, None
    for _ in range(MAX_MEMBERS):
        stream.seek(position)
        header = stream.read(_BLOCK)
        if position == 0:
            _check_start(header, path)
        if not header or header == bytes(_BLOCK):
            return
        name, kind, size = _header(header, path)
        if kind in (b"0", b"\0", b"7") and long_size is not None:
            size = long_size
        # Only what has content occupies blocks; a link may state the size of what it points to.
        occupied = size if kind not in (b"1", b"2", b"3", b"4", b"5", b"6") else 0
        start = position + _BLOCK
        if start + occupied > length:
            raise DataError(f"{path}: truncated: {name!r} claims {occupied:,} bytes and {length - start:,} are left")
        if kind == b"L":
            long_name = _text_at(stream, start, size, path).rstrip(b"\0").decode("utf-8", "replace")
        elif kind == b"x":
            long_name, long_size = _extended(_text_at(stream, start, size, path), path, long_name)
        else:
            if kind in (b"0", b"\0", b"7"):
                yield _Member(long_name or name, start, size)
            if kind != b"g":
                long_name, long_size = None, None
        position = start + -(-occupied // _BLOCK) * _BLOCK
    raise DataError(f"{path}: more than {MAX_MEMBERS:,} members")


def _check_start(header: bytes, path: Path) -> None:
    for start, kind in _COMPRESSED.items():
        if header.startswith(start):
            raise DataError(f"{path}: compressed with {kind}, so images cannot be found by position; unpack it to .tar")
    if len(header) < _BLOCK:
        raise DataError(f"{path}: not a tar file: {len(header)} bytes")


def _header(header: bytes, path: Path) -> tuple[str, bytes, int]:
    """Name, kind and size of a member, once its check sum agrees."""
    if len(header) < _BLOCK:
        raise DataError(f"{path}: truncated: it ends inside a header")
    # The check sum counts its own field as spaces.
    if sum(header) - sum(header[148:156]) + 8 * 32 != _number(header[148:156], path):
        raise DataError(f"{path}: not a tar file, or damaged: a header's check sum is wrong")
    name = header[:100].partition(b"\0")[0]
    prefix = header[345:500].partition(b"\0")[0] if header[257:263] == b"ustar\0" else b""
    whole = prefix + b"/" + name if prefix else name
    return whole.decode("utf-8", "replace"), header[156:157], _number(header[124:136], path)


def _number(field: bytes, path: Path) -> int:
    """Octal digits or, for large files, a big-endian number after the byte 0x80. Negative ones do not exist here."""
    if field[:1] == b"\x80":
        return int.from_bytes(field[1:], "big")
    digits = field.strip(b" \0")
    if not digits:
        return 0
    if not all(digit in b"01234567" for digit in digits):
        raise DataError(f"{path}: not a tar file, or damaged: {field!r} is no number")
    return int(digits, 8)


def _text_at(stream: BinaryIO, start: int, size: int, path: Path) -> bytes:
    if size > _MAX_NAME_BYTES:
        raise DataError(f"{path}: a name of {size:,} bytes; at most {_MAX_NAME_BYTES:,} are read")
    return _bytes_at(stream, start, size, path)


def _extended(records: bytes, path: Path, name: str | None) -> tuple[str | None, int | None]:
    """Name and size from a pax header, whose records read `<length> <key>=<value>` and end with a new line."""
    size = None
    position = 0
    while position < len(records) and records[position : position + 1] != b"\0":
        digits, space, _ = records[position : position + 16].partition(b" ")
        length = int(digits) if space and digits.isdigit() else 0
        record = records[position + len(digits) + 1 : position + length]
        key, equals, value = record.partition(b"=")
        if not equals or not record.endswith(b"\n"):
            raise DataError(f"{path}: damaged: a pax header that cannot be read")
        value = value[:-1]
        if key == b"path":
            name = value.decode("utf-8", "replace")
        elif key == b"size":
            size = _decimal(value, path)
        elif key.startswith(b"GNU.sparse"):
            raise DataError(f"{path}: a sparse file, which is not stored in one piece; write the tar without --sparse")
        position += length
    return name, size


def _decimal(value: bytes, path: Path) -> int:
    if not value.isdigit() or len(value) > 18:
        raise DataError(f"{path}: damaged: a pax header with the size {value[:40]!r}")
    return int(value)

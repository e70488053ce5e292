"""The write-ahead log of the files store: frames of all streams in numbered segment files, written group by group.

A group is what one write brought: all of it counts or nothing does. A group that a killed process or a power cut left
unfinished at the very end is cut off when the log is opened. Damage anywhere else must never be passed over: it is a
`StoreError` that names the file and the place.
"""

import os
import secrets
import struct
import zlib
from collections.abc import Callable
from contextlib import suppress
from enum import IntEnum
from pathlib import Path
from typing import NamedTuple

from ...durable import replace_file, sync_folder
from ...errors import StoreError

VERSION = 1
# magic, version, reserved, salt, number of this segment, bytes of the one before it; then a checksum
_TITLE = struct.Struct("<8sHHIQQ")
_TITLE_MAGIC = b"PDCS-LOG"
# magic, kind, whether it ends its group, reserved, bytes of the body, stream, position, epoch, where its group begins
_HEAD = struct.Struct("<4sBBHIQQQQ")
_HEAD_MAGIC = b"\xf5\x9dFr"
_SEAL = struct.Struct("<I")
FIRST = _TITLE.size + _SEAL.size
_AROUND = _HEAD.size + _SEAL.size


class Entry(IntEnum):
    """What a frame says of its stream."""

    RECORD = 1
    CHECKPOINT = 2
    CREATED = 3
    DELETED = 4


class Place(NamedTuple):
    """Where a frame lies, and its size with all that is around its body."""

    segment: int
    offset: int
    size: int


class Frame(NamedTuple):
    """One thing that happened to a stream, which goes by its number here."""

    kind: int
    stream: int
    position: int
    epoch: int
    body: bytes | memoryview


class _Segment:
    """A file of the log.

    Attributes:
        salt: every checksum in the file starts from it, so that no body can pass for a frame, nor a frame of a file
            that lay there before.
        size: bytes that are whole.
        live: bytes of frames that are still needed.
    """

    __slots__ = ("handle", "live", "number", "path", "salt", "size")

    def __init__(self, folder: Path, number: int):
        self.path = folder / f"{number:010d}.log"
        self.number = number
        self.handle = os.open(self.path, os.O_RDWR)
        self.salt = self.size = self.live = 0


class Log:
    """The segments of a folder; the last of them grows.

    Args:
        folder: where the segments are.
        segment_bytes: a segment that reached this size is followed by a new one.
        whole: a segment and an offset up to which the log is known to have been whole once; (0, 0) if there is none.
        visit: called with every frame of every whole group, from the oldest to the newest.
    """

    def __init__(self, folder: Path, segment_bytes: int, whole: tuple[int, int], visit: Callable[[Place, Frame], None]):
        self.folder = folder
        self.segment_bytes = segment_bytes
        self.broken: str | None = None
        self.unsynced = False
        self._staged: list[tuple[Place, Frame]] = []
        self._segments: dict[int, _Segment] = {}
        try:
            self._open(whole, visit)
        except BaseException:
            self.close()
            raise

    # Opening.

    def _open(self, whole: tuple[int, int], visit: Callable[[Place, Frame], None]) -> None:
        try:
            for draft in self.folder.glob(".*.tmp"):  # Of a process that was killed while it wrote.
                draft.unlink()
            numbers = sorted(int(path.stem) for path in self.folder.glob("[0-9]*.log"))
            if whole[0] > (numbers[-1] if numbers else 0):
                raise StoreError(f"the segment {whole[0]} is missing in {self.folder}: restore the folder from a copy")
            for number in numbers:
                self._segments[number] = _Segment(self.folder, number)
            before = 0
            for number in numbers:
                floor = whole[1] if number == whole[0] else FIRST
                before = self._read_segment(self._segments[number], number == numbers[-1], before, floor, visit)
            if not numbers:
                self._begin_segment(1, 0)
            self._last = self._segments[max(self._segments)]
            self.sync()
        except OSError as problem:
            if isinstance(problem, StoreError):
                raise
            raise StoreError(f"cannot open the log in {self.folder}: {problem.strerror or problem}") from problem

    def _read_segment(
        self, segment: _Segment, last: bool, before: int, floor: int, visit: Callable[[Place, Frame], None]
    ) -> int:
        """Visit the groups of a segment and take off what is unfinished at the end of the last; the size it has then.

        The segment before it had `before` bytes, and this one was whole up to `floor` once.
        """
        data = segment.path.read_bytes()
        segment.salt, expected = _read_title(segment, data)
        if before and (segment.number - 1) in self._segments and expected != before:
            raise StoreError(
                f"{self._segments[segment.number - 1].path} has {before} bytes, and had {expected} when it was full: "
                "it is damaged; restore the folder from a copy"
            )
        good, bad = _read_groups(segment, data, visit)
        if bad is not None:
            if not last or good < floor:
                raise _damaged(segment, bad)
            if _group_behind(data, bad, good, segment.salt):
                raise StoreError(f"{_damaged(segment, bad)}, or cut it at {good} to go on without what lies behind")
            os.ftruncate(segment.handle, good)
        elif good < floor:
            raise StoreError(f"{segment.path} has {good} bytes, and had {floor}: restore the folder from a copy")
        segment.size = good
        return good

    def _begin_segment(self, number: int, before: int) -> None:
        salt = secrets.randbits(32)
        title = _TITLE.pack(_TITLE_MAGIC, VERSION, 0, salt, number, before)
        replace_file(self.folder / f"{number:010d}.log", title + _SEAL.pack(zlib.crc32(title)))
        segment = self._segments[number] = self._last = _Segment(self.folder, number)
        segment.salt, segment.size = salt, FIRST

    # Writing.

    @property
    def end(self) -> tuple[int, int]:
        """The last segment and its size."""
        return self._last.number, self._last.size

    def add(self, frame: Frame) -> Place:
        """Put a frame into the next group; where it will be once `write` returned."""
        if not self._staged and self._last.size >= self.segment_bytes:
            self._roll()
        offset = self._staged[-1][0].offset + self._staged[-1][0].size if self._staged else self._last.size
        place = Place(self._last.number, offset, len(frame.body) + _AROUND)
        self._staged.append((place, frame))
        return place

    def staged(self) -> int:
        """How many frames wait for `write`."""
        return len(self._staged)

    def rewind(self, count: int) -> None:
        """Take out again what was added to the next group behind its first `count` frames."""
        del self._staged[count:]

    def write(self) -> None:
        """Write the group that was added. After a failure the log is as it was before, or refuses all further work."""
        staged, self._staged = self._staged, []
        if not staged:
            return
        self.check()
        data = b"".join(self._packed(staged))
        try:
            _write_at(self._last.handle, data, self._last.size)
        except OSError as problem:
            self._take_back()
            raise StoreError(
                f"cannot write {len(data)} bytes to {self._last.path}: {problem.strerror or problem}; none counts"
            ) from problem
        self._last.size += len(data)
        self.unsynced = True

    def sync(self) -> None:
        """Wait until the disk holds all that was written. If it fails nobody knows what it holds: the log is done."""
        self.check()
        try:
            os.fsync(self._last.handle)
        except OSError as problem:
            self.broken = f"the disk did not take what was written to {self._last.path}: {problem.strerror or problem}"
            self.check()
        self.unsynced = False

    def _packed(self, staged: list[tuple[Place, Frame]]) -> list[bytes | memoryview]:
        begin, salt = self._last.size, self._last.salt
        parts: list[bytes | memoryview] = []
        final = len(staged) - 1
        for index, (_, (kind, stream, position, epoch, body)) in enumerate(staged):
            head = _HEAD.pack(_HEAD_MAGIC, kind, index == final, 0, len(body), stream, position, epoch, begin)
            parts += (head, body, _SEAL.pack(zlib.crc32(body, zlib.crc32(head, salt))))
        return parts

    def _take_back(self) -> None:
        """Cut off what a failed write left, or else the next group would stand behind rubble."""
        try:
            os.ftruncate(self._last.handle, self._last.size)
        except OSError as problem:
            self.broken = f"cannot cut {self._last.path} back to {self._last.size} bytes: {problem.strerror or problem}"

    def _roll(self) -> None:
        """Begin a new segment. The full one is on the disk before, so that only the last can ever be unfinished."""
        self.sync()
        number, size = self.end
        try:
            self._begin_segment(number + 1, size)
        except OSError as problem:
            raise StoreError(f"cannot begin a segment in {self.folder}: {problem.strerror or problem}") from problem

    def check(self) -> None:
        """Raise if the log refuses further work."""
        if self.broken is not None:
            raise StoreError(f"{self.broken}; open the store again to see what is there")

    # Reading.

    def read(self, place: Place) -> Frame:
        """The frame at a place, written or only added."""
        if place.segment == self._last.number and place.offset >= self._last.size:
            return next(frame for at, frame in self._staged if at == place)
        segment = self._segments[place.segment]
        try:
            found = _parsed(os.pread(segment.handle, place.size, place.offset), 0, segment.salt)
        except OSError as problem:
            raise StoreError(f"cannot read {segment.path}: {problem.strerror or problem}") from problem
        if found is None or found[0] != place.size:
            raise _damaged(segment, place.offset)
        return found[3]

    # Room.

    def hold(self, place: Place) -> None:
        """Say that a frame is needed."""
        self._segments[place.segment].live += place.size

    def let_go(self, place: Place) -> None:
        """Say that a frame that was held is needed no more."""
        self._segments[place.segment].live -= place.size

    def oldest(self) -> int:
        """The first segment there is."""
        return min(self._segments)

    def sealed(self) -> list[int]:
        """The segments that grow no more, oldest first."""
        return sorted(self._segments)[:-1]

    def live_share(self, segment: int) -> float:
        """How much of a segment is still needed."""
        return self._segments[segment].live / max(1, self._segments[segment].size - FIRST)

    def remove(self, number: int) -> None:
        """Delete a sealed segment; no power cut brings it back after those that come later."""
        segment = self._segments[number]
        try:
            segment.path.unlink()
            sync_folder(self.folder)
        except OSError as problem:
            raise StoreError(f"cannot delete {segment.path}: {problem.strerror or problem}") from problem
        os.close(segment.handle)
        del self._segments[number]

    def close(self) -> None:
        """Let go of the files."""
        for segment in self._segments.values():
            with suppress(OSError):
                os.close(segment.handle)
        self._segments.clear()


def _read_title(segment: _Segment, data: bytes) -> tuple[int, int]:
    """The salt of a segment, and how long the one before it was."""
    if len(data) < FIRST or data[: len(_TITLE_MAGIC)] != _TITLE_MAGIC:
        raise _damaged(segment, 0)
    _, version, _, salt, number, before = _TITLE.unpack_from(data)
    if version > VERSION:
        raise StoreError(f"{segment.path} is of version {version}, this protodcs reads {VERSION}: upgrade protodcs")
    if zlib.crc32(memoryview(data)[: _TITLE.size]) != _SEAL.unpack_from(data, _TITLE.size)[0]:
        raise _damaged(segment, 0)
    if number != segment.number:
        raise StoreError(f"{segment.path} was the segment {number}: files of the log must keep their names")
    return salt, before


def _read_groups(segment: _Segment, data: bytes, visit: Callable[[Place, Frame], None]) -> tuple[int, int | None]:
    """Visit the frames of whole groups: where these end, and where what is not whole was met, if anywhere."""
    offset = begin = FIRST
    group: list[tuple[Place, Frame]] = []
    while offset < len(data):
        found = _parsed(data, offset, segment.salt)
        if found is None or found[2] != begin:
            return begin, offset
        size, ends, _, frame = found
        group.append((Place(segment.number, offset, size), frame))
        offset += size
        if ends:
            for place, frame in group:
                visit(place, frame)
            group.clear()
            begin = offset
    return begin, (offset if group else None)


def _parsed(data: bytes, offset: int, salt: int) -> tuple[int, bool, int, Frame] | None:
    """The frame at an offset, behind its size, whether it ends its group, and where that begins; None if broken."""
    if len(data) - offset < _AROUND:
        return None
    magic, kind, ends, _, length, stream, position, epoch, begin = _HEAD.unpack_from(data, offset)
    seal = offset + _HEAD.size + length
    if magic != _HEAD_MAGIC or seal + _SEAL.size > len(data):
        return None
    view = memoryview(data)
    if zlib.crc32(view[offset:seal], salt) != _SEAL.unpack_from(data, seal)[0]:
        return None
    return length + _AROUND, bool(ends), begin, Frame(kind, stream, position, epoch, view[offset + _HEAD.size : seal])


def _group_behind(data: bytes, bad: int, begin: int, salt: int) -> bool:
    """Whether a later group than the one of the bad frame is there: then that one was finished once, and was damaged.

    Frames of the same group mean nothing: a power cut may keep the end of a write and lose its middle.
    """
    at = data.find(_HEAD_MAGIC, bad + 1)
    while at >= 0:
        found = _parsed(data, at, salt)
        if found is not None and found[2] > begin:
            return True
        at = data.find(_HEAD_MAGIC, at + 1)
    return False


def _write_at(handle: int, data: bytes, offset: int) -> None:
    """Write all of the data; a disk that takes a part of it says at the next part why it did not take more."""
    rest = memoryview(data)
    while rest:
        written = os.pwrite(handle, rest, offset)
        if written <= 0:
            raise OSError("the write stopped short")
        rest, offset = rest[written:], offset + written


def _damaged(segment: _Segment, offset: int) -> StoreError:
    return StoreError(f"{segment.path} is damaged at offset {offset}: restore the folder from a copy")

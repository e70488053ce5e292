"""The number of the newest commit, in a file beside the database.

SQLite takes a damaged write-ahead log for one that ends early, and opens the database without the commits behind the
damage. So the store numbers its commits in the database. It also writes each number to this file before anybody gets a
reply. A database whose number is below that of the file has lost commits.

A thread syncs the file all the time, and no commit waits for it: a second sync would double the time of a commit. The
operating system keeps what a killed process has written, so the newest mark is there after a kill. After a power cut,
marks of the last moment may be missing. A mark that is missing refuses no store.

The file is a ring of marks. A new mark overwrites the oldest ones. If a crash tears it, the mark before it is still
there, and nobody got a reply for the torn one.
"""

import json
import os
import struct
import threading
import zlib
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final, NamedTuple, Self

from ...atomic_io import replace_file

MARKS: Final = "streams.mark"
# A mark begins at a sector of the disk. The ring holds as many commits as a write-ahead log usually does.
_SECTOR: Final = 512
_SECTORS: Final = 512
# Maximum bytes of a mark. A larger one does not name its streams.
_MAX_BYTES: Final = 64 * _SECTOR
# A name of the format, the number of the commit, the length of the content, the checksum of number and content. JSON
# in ASCII cannot contain the name.
_HEADER: Final = struct.Struct("<8sQII")
_FORMAT: Final = b"\xffPDCSm1\xff"

# macOS has no fdatasync.
_sync = getattr(os, "fdatasync", os.fsync)


class Mark(NamedTuple):
    """The mark of one commit.

    Attributes:
        number: of the commit. They count from 1; 0 is that of an empty store.
        ends: where the journals of the streams that got records end, by stream; None if that is not known.
    """

    number: int
    ends: Mapping[str, int] | None


class CommitMarks:
    """The marks of the newest commits of one store.

    Args:
        folder: of the store. Its file of marks must exist.

    Raises:
        OSError: the file cannot be opened.
    """

    def __init__(self, folder: Path):
        self._file = os.open(folder / MARKS, os.O_RDWR | getattr(os, "O_BINARY", 0))
        found = _read(os.pread(self._file, _SECTORS * _SECTOR, 0))
        self._next = found[-1][1] if found else 0
        self._unsynced = threading.Event()
        self._closed = False
        self._problem: OSError | None = None
        self._thread = threading.Thread(target=self._sync_forever, name="commit marks", daemon=True)
        self._thread.start()

    @classmethod
    def create(cls, folder: Path, number: int = 0) -> Self:
        """Create the file with the mark of one commit, in place of any other."""
        replace_file(folder / MARKS, _packed(Mark(number, None)).ljust(_SECTORS * _SECTOR, b"\0"), mode=0o600)
        return cls(folder)

    def write(self, mark: Mark) -> None:
        """Write a mark, and have it synced. Raise OSError if that failed for an earlier one."""
        if self._problem is not None:
            raise self._problem
        data = _packed(mark)
        if self._next + len(data) > _SECTORS * _SECTOR:
            self._next = 0
        os.pwrite(self._file, data, self._next)
        self._next += len(data)
        self._unsynced.set()

    def _sync_forever(self) -> None:
        while not self._closed:
            self._unsynced.wait()
            self._unsynced.clear()
            try:
                _sync(self._file)
            except OSError as problem:
                self._problem = problem

    def close(self) -> None:
        """Sync what was written, and close the file."""
        self._closed = True
        self._unsynced.set()
        self._thread.join()
        with suppress(OSError):
            _sync(self._file)
        os.close(self._file)


def read_marks(folder: Path) -> list[Mark]:
    """Return the marks of a store in the order of their numbers; none if the file is missing or unreadable."""
    try:
        return [mark for mark, _ in _read((folder / MARKS).read_bytes())]
    except FileNotFoundError:
        return []


def _packed(mark: Mark) -> bytes:
    content = json.dumps(mark.ends).encode()
    if _HEADER.size + len(content) > _MAX_BYTES:
        content = b"null"
    header = _HEADER.pack(_FORMAT, mark.number, len(content), _checksum(mark.number, content))
    size = len(header) + len(content)
    return (header + content).ljust(-(-size // _SECTOR) * _SECTOR, b"\0")


def _read(data: bytes) -> list[tuple[Mark, int]]:
    """Return the complete marks and where each ends, in the order of their numbers."""
    found = []
    for start in range(0, len(data) - _HEADER.size, _SECTOR):
        name, number, length, checksum = _HEADER.unpack_from(data, start)
        content = data[start + _HEADER.size : start + _HEADER.size + length] if name == _FORMAT else b""
        if content and checksum == _checksum(number, content):
            size = _HEADER.size + length
            found.append((Mark(number, json.loads(content)), start - (-size // _SECTOR) * _SECTOR))
    return sorted(found, key=lambda one: one[0].number)


def _checksum(number: int, content: bytes) -> int:
    return zlib.crc32(number.to_bytes(8, "little") + content)

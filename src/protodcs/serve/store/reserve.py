"""Disk space that a store keeps for deletions, so that they work on a full disk.

SQLite needs space to delete: it writes the change to its write-ahead log first.
"""

import os
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Final

RESERVE: Final = "reserve"


class Reserve:
    """A file without content that is deleted if the disk is full.

    Args:
        folder: of the store, which must exist.
        size: in bytes; 0: no reserve.
    """

    def __init__(self, folder: Path, size: int):
        self._file = folder / RESERVE
        self._size = size

    def release(self) -> None:
        """Give the space to whatever is written next."""
        with suppress(OSError):
            self._file.unlink(missing_ok=True)

    def restore(self) -> None:
        """Take the space again, if it is there. Without it the store works all the same."""
        with suppress(OSError):
            self._restore()

    def _restore(self) -> None:
        is_there = self._size == 0 or self._file.exists()
        if is_there or shutil.disk_usage(self._file.parent).free < self._size:
            return
        handle = os.open(self._file, os.O_WRONLY | os.O_CREAT, 0o600)
        try:
            _allocate(handle, self._size)
        except OSError:
            with suppress(OSError):
                self._file.unlink()
        finally:
            os.close(handle)


def _allocate(handle: int, size: int) -> None:
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(handle, 0, size)
    else:
        # Zeros that are written take space, unlike those of a hole.
        for _ in range(0, size, 1 << 20):
            os.write(handle, bytes(1 << 20))

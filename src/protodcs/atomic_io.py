"""Files that are there whole or not at all, whatever happens meanwhile, and folders that one process holds.

The errors are the operating system's; callers say in their own words what could not be written.
"""

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_LOCK = "lock"


@contextmanager
def _draft_of(target: Path) -> Iterator[Path]:
    """A file beside `target` to write to, which then takes its place in one step; after a failure nothing is left."""
    draft = target.parent / f".{target.name}.{os.urandom(8).hex()}.tmp"
    try:
        yield draft
        draft.replace(target)
    except BaseException:
        with suppress(OSError, ValueError):
            draft.unlink(missing_ok=True)
        raise


def replace_file(target: Path, data: bytes, mode: int = 0o666) -> None:
    """Replace `target` by `data` in one step: after a crash the old file or the new one is there, never a torn one.

    `mode` says who may read and write it, less what the process's mask takes away; at no moment may anyone else.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0)
    with _draft_of(target) as draft, os.fdopen(os.open(draft, flags, mode), "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    sync_folder(target.parent)


def put_file(target: Path, data: bytes) -> None:
    """As `replace_file`, but not waiting for the disk: proof against a killed process, not against a power cut."""
    with _draft_of(target) as draft:
        draft.write_bytes(data)


def sync_folder(folder: Path) -> None:
    """Make the names in a folder safe: a power cut may else forget a rename though the content is on the disk."""
    if os.name != "posix":
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """Wait until nobody else is inside this function for the same folder: for a file that is read, changed, written."""
    import fcntl

    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def hold_folder(folder: Path) -> int:
    """A handle that holds a folder, made if it is not there, until it is closed or the process ends, however it ends.

    Raises:
        BlockingIOError: another handle holds it; its `strerror` says whose.
    """
    import fcntl  # Not on every system, where the rest of this file is of use all the same.

    folder.mkdir(parents=True, exist_ok=True)
    handle = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            owner = os.pread(handle, 100, 0).decode(errors="replace") or "another process"
            raise BlockingIOError(errno.EAGAIN, f"in use by {owner}") from None
        os.ftruncate(handle, 0)
        os.pwrite(handle, f"process {os.getpid()}".encode(), 0)
    except BaseException:
        os.close(handle)
        raise
    return handle

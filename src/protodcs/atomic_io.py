"""Atomic file replacement, and locks on folders.

All functions raise the errors of the operating system. Callers add which of their files could not be written.
"""

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_LOCK = "lock"


@contextmanager
def _draft_of(target: Path) -> Iterator[Path]:
    """Yield a temporary file beside `target`. It replaces `target` in one step, and is deleted after a failure."""
    draft = target.parent / f".{target.name}.{os.urandom(8).hex()}.tmp"
    try:
        yield draft
        draft.replace(target)
    except BaseException:
        with suppress(OSError, ValueError):
            draft.unlink(missing_ok=True)
        raise


def replace_file(target: Path, data: bytes, mode: int = 0o666) -> None:
    """Replace `target` by `data` in one step. After a crash, either the old or the new file is there, complete.

    `mode` has the permissions of the new file, before the process's umask. They also hold while it is written.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0)
    with _draft_of(target) as draft, os.fdopen(os.open(draft, flags, mode), "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    sync_folder(target.parent)


def sync_folder(folder: Path) -> None:
    """Make renames in a folder durable. Otherwise a power cut can undo a rename, even if the content is on the disk."""
    if os.name != "posix":
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold an exclusive lock on a folder, while a file in it is read, changed and written."""
    import fcntl

    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def lock_folder(folder: Path) -> int:
    """Lock a folder. The lock ends when the returned handle is closed or the process ends.

    If there is no such folder, it is created, and only its owner can read it.

    Raises:
        BlockingIOError: the folder is locked. Its `strerror` names the process.
    """
    import fcntl  # Some systems do not have it. They can use the rest of this module.

    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    handle = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            owner = os.pread(handle, 100, 0).decode(errors="replace") or "another process"
            raise BlockingIOError(errno.EAGAIN, f"in use by {owner}") from None
        # The lock holds without the name of the process, too: a disk may be full.
        with suppress(OSError):
            os.ftruncate(handle, 0)
            os.pwrite(handle, f"process {os.getpid()}".encode(), 0)
    except BaseException:
        os.close(handle)
        raise
    return handle

"""Files that are there whole or not at all, whatever happens meanwhile.

The errors are the operating system's; callers say in their own words what could not be written.
"""

import os
import secrets
from contextlib import suppress
from pathlib import Path


def replace_file(target: Path, data: bytes) -> None:
    """Replace `target` by `data` in one step: after a crash the old file or the new one is there, never a torn one."""
    draft = target.parent / f".{target.name}.{secrets.token_hex(8)}.tmp"
    try:
        with draft.open("xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(target)
    except BaseException:
        with suppress(OSError, ValueError):
            draft.unlink(missing_ok=True)
        raise
    sync_folder(target.parent)


def sync_folder(folder: Path) -> None:
    """Make the names in a folder safe: a power cut may else forget a rename though the content is on the disk."""
    if os.name != "posix":
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def put_file(target: Path, data: bytes) -> None:
    """As `replace_file`, but not waiting for the disk: proof against a killed process, not against a power cut."""
    draft = target.parent / f".{target.name}.{secrets.token_hex(8)}.tmp"
    try:
        draft.write_bytes(data)
        draft.replace(target)
    except BaseException:
        with suppress(OSError, ValueError):
            draft.unlink(missing_ok=True)
        raise

"""Download published datasets: resume after an interruption, check size and hash, then unpack.

A file or folder has its final name only after it was checked and unpacked completely.
"""

import hashlib
import shutil
import tarfile
import zipfile
from collections.abc import Callable
from http.client import HTTPException
from pathlib import Path
from urllib.error import HTTPError
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

from .atomic_io import locked
from .data.origins import Origin
from .errors import DataError

_CHUNK = 1 << 20
# Seconds without a byte after which a download fails.
_TIMEOUT = 60.0
_PARTIAL_CONTENT = 206


def fetch(origin: Origin, folder: Path, advance: Callable[[int], None] = lambda count: None) -> bool:
    """Download a dataset to the data folder. If it is there already, do nothing.

    Args:
        origin: where it comes from.
        folder: the data folder. It is created if it does not exist.
        advance: called with the number of bytes that have arrived, including those of an earlier, interrupted call.

    Returns:
        Whether anything was downloaded.

    Raises:
        DataError: the server cannot be reached, the connection ended early, or the file is not the published one.
    """
    folder.mkdir(parents=True, exist_ok=True)
    # Two programs would write to the same partial file.
    with locked(folder):
        target = folder / origin.path
        if target.exists():
            return False
        partial = folder / f"{archive_name(origin)}.part"
        _download(origin, partial, advance)
        _check(origin, partial)
        _place(origin, partial, target)
        return True


def archive_name(origin: Origin) -> str:
    """Return the name of the published file."""
    return Path(urlsplit(origin.url).path).name


def _download(origin: Origin, partial: Path, advance: Callable[[int], None]) -> None:
    """Add the missing bytes to the partial file."""
    present = partial.stat().st_size if partial.exists() else 0
    if present > origin.size:
        partial.unlink()
        present = 0
    if present < origin.size:
        try:
            present = _receive(origin, partial, present, advance)
        except (OSError, HTTPException) as problem:
            reason = f"HTTP status {problem.code}" if isinstance(problem, HTTPError) else problem
            raise DataError(f"{origin.url} could not be downloaded: {reason}. {_again(partial)}") from None
    else:
        advance(present)
    if present < origin.size:
        raise DataError(
            f"The connection ended after {present:,} of {origin.size:,} bytes of {origin.url}. {_again(partial)}"
        )


def _again(partial: Path) -> str:
    return f"Run the command again: it continues {partial.name}." if partial.exists() else "Try again later."


def _receive(origin: Origin, partial: Path, present: int, advance: Callable[[int], None]) -> int:
    """Return the size of the partial file after adding what the server sends."""
    headers = {"User-Agent": "protodcs"} | ({"Range": f"bytes={present}-"} if present else {})
    with urlopen(Request(origin.url, headers=headers), timeout=_TIMEOUT) as response:
        if present and response.status != _PARTIAL_CONTENT:
            present = 0  # The server sends the whole file again.
        with partial.open("ab" if present else "wb") as file:
            advance(present)
            while present <= origin.size and (chunk := response.read(_CHUNK)):
                file.write(chunk)
                present += len(chunk)
                advance(len(chunk))
    return present


def _check(origin: Origin, partial: Path) -> None:
    """Raise DataError and delete the file unless it is the published one."""
    with partial.open("rb") as file:
        # The publishers list MD5. It detects damage, and no one can make a second file for a given MD5.
        found = hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()
    if found != origin.md5:
        partial.unlink()
        raise DataError(
            f"{origin.url} is not the published file: its MD5 is {found}, expected: {origin.md5}. The download was "
            "deleted. Try again; if that fails too, the file or the connection was changed."
        )


def _place(origin: Origin, partial: Path, target: Path) -> None:
    """Unpack an archive, or rename a single file, so that `target` appears in one step."""
    target.parent.mkdir(parents=True, exist_ok=True)
    name = archive_name(origin)
    if not name.endswith((".zip", ".tar", ".tar.gz")):
        partial.replace(target)
        return
    draft = target.parent / f".{target.name}.unpacking"
    shutil.rmtree(draft, ignore_errors=True)
    try:
        if name.endswith(".zip"):
            with zipfile.ZipFile(partial) as packed:
                packed.extractall(draft)
        else:
            with tarfile.open(partial) as archive:
                archive.extractall(draft, filter="data")
        (draft / origin.path).replace(target)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    partial.unlink()

"""Thumbnails of a cluster as files at an fsspec URL, such as s3://bucket/thumbnails.

A worker writes a file after the decision is durable. If the worker dies in between, the thumbnail is missing. The
decision log says which thumbnails may be shown: a file without its log entry never is.
"""

import asyncio
import importlib
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, Final, TypeVar
from urllib.parse import quote

from ...errors import ConfigError

T = TypeVar("T")

# All files are in a folder of this name, so that deleting all of them deletes nothing else.
_FOLDER: Final = "protodcs-thumbnails"
# Files of consecutive positions share a folder, so that old ones can be deleted folder by folder.
_FILES_PER_FOLDER: Final = 1000


class ThumbnailFiles:
    """The thumbnails of all streams. Each stream has a folder, and each incarnation of it too.

    Args:
        url: a folder, as fsspec reads it.

    Raises:
        ConfigError: the URL cannot be used.
    """

    def __init__(self, url: str):
        try:
            fsspec = importlib.import_module("fsspec.core")
        except ModuleNotFoundError:
            raise ConfigError("`thumbnail_url` needs fsspec: pip install fsspec.") from None
        try:
            files, root = fsspec.url_to_fs(url)
        except (ValueError, ImportError, OSError) as problem:
            raise ConfigError(f"`thumbnail_url` cannot be used: {problem}") from None
        self._files: Any = files
        self._root = f"{root.rstrip('/')}/{_FOLDER}"
        self._threads = ThreadPoolExecutor(4, thread_name_prefix="thumbnail files")

    async def write(self, stream: str, incarnation: str, thumbnails: Iterable[tuple[int, bytes]]) -> None:
        """Write the thumbnails of decisions by their positions."""

        def write() -> None:
            for position, data in thumbnails:
                path = self._path(stream, incarnation, position)
                self._files.makedirs(path.rpartition("/")[0], exist_ok=True)
                self._files.pipe_file(path, data)

        await self._in_thread(write)

    async def read(self, stream: str, incarnation: str, position: int) -> bytes | None:
        """Return a thumbnail; None if there is none."""

        def read() -> bytes | None:
            with suppress(FileNotFoundError):
                data: bytes = self._files.cat_file(self._path(stream, incarnation, position))
                return data
            return None

        return await self._in_thread(read)

    async def delete(self, stream: str, incarnation: str, positions: Sequence[int]) -> None:
        """Delete the thumbnails at these positions."""

        def delete() -> None:
            for position in positions:
                with suppress(FileNotFoundError):
                    self._files.rm_file(self._path(stream, incarnation, position))

        await self._in_thread(delete)

    async def delete_before(self, stream: str, incarnation: str, position: int) -> None:
        """Delete thumbnails before a position, except those that share a folder with later ones."""

        def delete() -> None:
            with suppress(FileNotFoundError):
                for folder in self._files.ls(f"{self._of_stream(stream)}/{incarnation}", detail=False):
                    number = folder.rstrip("/").rpartition("/")[2]
                    if number.isdecimal() and (int(number) + 1) * _FILES_PER_FOLDER <= position:
                        self._files.rm(folder, recursive=True)

        await self._in_thread(delete)

    async def delete_stream(self, stream: str) -> None:
        """Delete all thumbnails of a stream."""
        await self._delete_folder(self._of_stream(stream))

    async def delete_all(self) -> None:
        """Delete the thumbnails of all streams."""
        await self._delete_folder(self._root)

    async def _delete_folder(self, folder: str) -> None:
        def delete() -> None:
            with suppress(FileNotFoundError):
                self._files.rm(folder, recursive=True)

        await self._in_thread(delete)

    def _of_stream(self, stream: str) -> str:
        return f"{self._root}/{quote(stream, safe='')}"

    def _path(self, stream: str, incarnation: str, position: int) -> str:
        return f"{self._of_stream(stream)}/{incarnation}/{position // _FILES_PER_FOLDER:07d}/{position}.jpg"

    async def _in_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

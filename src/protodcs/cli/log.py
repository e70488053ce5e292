"""`protodcs log`: copy the decision logs of a running service to Parquet files, and only what is new.

Each stream has a folder, and each file is named by the positions that it holds. A cursor beside the files says where
the next one begins. It is written after the file. If the command dies in between, the next run finds the file by its
name.
"""

import importlib
import json
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from datetime import datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Final
from urllib.parse import quote, unquote, urlsplit

import typer

from ..atomic_io import replace_file
from ..errors import InputError, without_passwords
from .screen import explained, tell
from .streams import _AS_JSON, _KEY_FILE, _URL, _client

if TYPE_CHECKING:
    from ..client import Client, Stream

app = typer.Typer(help="Copy the decision logs of a running service to files.", no_args_is_help=True)

# Readers of Parquet skip files whose names begin so.
_CURSOR: Final = "_cursor.json"
_PAGE: Final = 1000


@app.callback()
def main() -> None:
    """Copy the decision logs of a running service to files."""


@app.command()
@explained
def export(
    target: str = typer.Argument(..., help="Folder for the files: a path, or an fsspec URL such as s3://bucket/log."),
    stream: list[str] = typer.Option([], help="Id of a stream; repeat it for several (default: all streams)."),
    rows: int = typer.Option(100_000, min=1, help="Maximum number of entries per file."),
    url: str = _URL,
    key_file: Path | None = _KEY_FILE,
    as_json: bool = _AS_JSON,
) -> None:
    """Write entries of the decision log that are not in TARGET yet as Parquet files.

    Run it again to add what is new. Run it for one TARGET only once at a time.
    """
    folder = _opened(target)
    streams = exported = 0
    with _client(url, key_file) as client:
        for id_, created in _chosen(client, stream):
            streams += 1
            exported += _export(client.stream(id_), created, folder, rows)
    tell({"streams": streams, "exported": exported}, as_json)


def _chosen(client: "Client", ids: list[str]) -> Iterator[tuple[str, int]]:
    """Yield streams, and when they were created in microseconds since 1970."""
    for id_ in ids:
        yield id_, _microseconds(client.stream(id_).status()["created"])
    cursor: str | None = None
    while not ids:
        page = client.list_streams(limit=_PAGE, cursor=cursor)
        yield from ((found["id"], _microseconds(found["created"])) for found in page["streams"])
        cursor = page["next_cursor"]
        if cursor is None:
            return


def _microseconds(moment: str) -> int:
    from ..serve.log.export import EPOCH

    return (datetime.fromisoformat(moment) - EPOCH) // timedelta(microseconds=1)


def _export(stream: "Stream", created: int, folder: "Folder", rows: int) -> int:
    """Write what is new in the log of a stream. Return the number of entries.

    A stream that was deleted and created again has the same positions again, so names of files begin with its creation.
    """
    from ..serve.log.export import ParquetWriter

    place, exported = f"stream={quote(stream.id, safe='')}", 0
    known = json.loads(folder.read(f"{place}/{_CURSOR}") or b"{}")
    position = known["position"] if known.get("created") == created else -1

    def advance(last: int) -> int:
        folder.write(f"{place}/{_CURSOR}", json.dumps({"created": created, "position": last}).encode())
        return last

    while names := folder.names(f"{place}/{created}-{position + 1:010d}-"):
        position = advance(max(int(name.removesuffix(".parquet").rpartition("-")[2]) for name in names))
    while entries := list(stream.log(order="oldest", after=position, limit=rows)):
        writer, last = ParquetWriter(), entries[-1].position
        data = writer.add([asdict(entry) for entry in entries]) + writer.finish()
        folder.write(f"{place}/{created}-{position + 1:010d}-{last:010d}.parquet", data)
        position = advance(last)
        exported += len(entries)
        if len(entries) < rows:
            break
    return exported


class _LocalFolder:
    """A folder on this machine. A file is there completely or not at all."""

    def __init__(self, folder: Path):
        self._folder = folder

    def read(self, name: str) -> bytes | None:
        file = self._folder / name
        return file.read_bytes() if file.exists() else None

    def write(self, name: str, data: bytes) -> None:
        file = self._folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        replace_file(file, data)

    def names(self, prefix: str) -> list[str]:
        """Return the names of the Parquet files that begin with a prefix."""
        place, _, start = prefix.rpartition("/")
        found = (self._folder / place).glob("*.parquet")
        return [file.name for file in found if file.name.startswith(start)]


class _FsspecFolder:
    """A folder in an object store, which writes each object in one step and has no folders to create."""

    def __init__(self, url: str):
        try:
            fsspec = importlib.import_module("fsspec.core")
        except ModuleNotFoundError:
            raise InputError("A URL needs fsspec: pip install 'protodcs[s3]'. Or give a local folder.") from None
        self._url = url
        with self._explained():
            self._files, root = fsspec.url_to_fs(url, use_listings_cache=False)
        self._root = root.rstrip("/")

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Raise InputError for any error. Each kind of object store has errors of its own."""
        try:
            yield
        except Exception as problem:
            raise InputError(f"{without_passwords(self._url)} cannot be used: {problem}") from problem

    def read(self, name: str) -> bytes | None:
        with self._explained(), suppress(FileNotFoundError):
            data: bytes = self._files.cat_file(f"{self._root}/{name}")
            return data
        return None

    def write(self, name: str, data: bytes) -> None:
        with self._explained():
            self._files.pipe_file(f"{self._root}/{name}", data)

    def names(self, prefix: str) -> list[str]:
        place, _, start = prefix.rpartition("/")
        found: list[str] = []
        with self._explained(), suppress(FileNotFoundError):
            found = self._files.ls(f"{self._root}/{place}", detail=False)
        names = [path.rpartition("/")[2] for path in found]
        return [name for name in names if name.startswith(start) and name.endswith(".parquet")]


Folder = _LocalFolder | _FsspecFolder


def _opened(target: str) -> Folder:
    scheme = urlsplit(target).scheme if "://" in target else ""
    if scheme == "file":
        return _LocalFolder(Path(unquote(urlsplit(target).path)))
    return _FsspecFolder(target) if scheme else _LocalFolder(Path(target))

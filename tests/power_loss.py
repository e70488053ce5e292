"""Simulate a power loss: remove what a program has written but not synced.

SIGKILL ends a program, but the operating system still writes its data to the disk. So a test that kills a program
cannot find a missing fsync. `PowerLoss` runs programs with a shim (`power_loss_shim.c`) that records every fsync and
fdatasync. After the programs were killed, `cut` brings the folder to a state that a power loss could have left.

The model covers appended data, new files, renames and deletions. A directory entry is durable after an fsync of its
directory. Bytes of a file are durable after an fsync of the file. The model does not cover bytes that are overwritten
in place, truncation without fsync, deleted folders, `O_SYNC`, and programs that are linked statically.
"""

import os
import random
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

import pytest

SHIM_SOURCE = Path(__file__).with_name("power_loss_shim.c")


@cache
def _shim() -> tuple[tempfile.TemporaryDirectory, Path]:
    """Compile the shim. The first value keeps its folder until this process ends."""
    if shutil.which("gcc") is None:
        pytest.skip("gcc is not installed")
    folder = tempfile.TemporaryDirectory(prefix="power-loss-")
    library = Path(folder.name) / "power_loss_shim.so"
    subprocess.run(
        ["gcc", "-shared", "-fPIC", "-O1", "-Wall", "-Werror", "-o", library, SHIM_SOURCE, "-ldl"], check=True
    )
    return folder, library


class PowerLoss:
    """Records what programs sync in one folder, and removes the rest if `cut` is called.

    Example:
        power = PowerLoss(folder)
        process = subprocess.Popen(command, env={**os.environ, **power.begin()})
        ...
        process.kill()
        process.wait()
        power.cut(random.Random(0))

    Args:
        folder: the folder; everything below it is recorded. The records are in a folder beside it.
    """

    def __init__(self, folder: Path):
        self.folder = folder.resolve()
        self._records = self.folder.with_name(self.folder.name + ".power-loss")
        self._sizes: dict[int, int] = {}
        self._listings: dict[int, dict[str, int]] = {}

    def begin(self) -> dict[str, str]:
        """Take everything in the folder as durable. Return the environment variables for the programs to watch."""
        library = _shim()[1]
        self.close()
        self._records.mkdir()
        self._sizes, self._listings = {}, {}
        for place, _, names in os.walk(self.folder):
            folder = Path(place)
            self._listings[folder.stat().st_ino] = _listing(folder)
            for name in names:
                status = (folder / name).stat()
                self._sizes[status.st_ino] = status.st_size
                # The link preserves a file that is deleted or replaced before its folder is synced.
                os.link(folder / name, self._records / str(status.st_ino))
        return {
            "LD_PRELOAD": str(library),
            "POWER_LOSS_FOLDER": str(self.folder),
            "POWER_LOSS_RECORDS": str(self._records),
        }

    def cut(self, rng: random.Random, *, keep_entries: bool | None = None, keep_bytes: float | None = None) -> None:
        """Remove what was not synced. Kill all programs that use the folder before.

        Args:
            rng: decides what is not given.
            keep_entries: keep new, renamed and deleted directory entries that were not synced, or undo all of them.
            keep_bytes: the fraction of the unsynced bytes to keep at the end of each file, from 0 to 1.
        """
        self._read_records()
        if keep_entries is None:
            keep_entries = rng.random() < 0.5
        if not keep_entries:
            self._undo_entries(self.folder)
        for path in sorted(path for path in self.folder.rglob("*") if path.is_file()):
            status = path.stat()
            synced = min(self._sizes.get(status.st_ino, 0), status.st_size)
            fraction = rng.random() if keep_bytes is None else keep_bytes
            os.truncate(path, synced + int((status.st_size - synced) * fraction))

    def close(self) -> None:
        """Delete the records."""
        shutil.rmtree(self._records, ignore_errors=True)

    def _read_records(self) -> None:
        """Read what the shim has written: one line for each sync."""
        log = self._records / "log"
        if not log.exists():
            return
        # A line without its end was written by a program that was killed before its fsync returned.
        for line in log.read_text().split("\n")[:-1]:
            kind, inode, *rest = line.split("\t")
            if kind == "file":
                self._sizes[int(inode)] = int(rest[0])
            else:
                self._listings[int(inode)] = dict(zip(rest[::2], map(int, rest[1::2]), strict=True))

    def _undo_entries(self, folder: Path) -> None:
        """Bring back the entries that a folder had when it was last synced."""
        synced = self._listings.get(folder.stat().st_ino, {})
        for name, inode in _listing(folder).items():
            path = folder / name
            if synced.get(name) != inode:
                shutil.rmtree(path) if path.is_dir() else path.unlink()
            elif path.is_dir():
                self._undo_entries(path)
        for name, inode in synced.items():
            if not (folder / name).exists():
                os.link(self._records / str(inode), folder / name)


def _listing(folder: Path) -> dict[str, int]:
    return {path.name: path.stat().st_ino for path in folder.iterdir()}

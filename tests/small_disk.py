"""A small file system of its own, which a test can fill."""

import shutil
import subprocess
from pathlib import Path

import pytest

_BALLAST = "ballast"


def mount(folder: Path, size: str) -> None:
    """Mount an empty file system of this size in a folder. Skip the test if that is not possible."""
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "none", str(folder)]
    if not shutil.which("mount") or subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("a small file system cannot be mounted here: that needs root")


def unmount(folder: Path) -> None:
    """Remove the file system, also if files are open."""
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


def fill(folder: Path) -> None:
    """Write a file that takes all of the space that is left."""
    with (folder / _BALLAST).open("ab", 0) as file:
        for size in (1 << 20, 4096):
            try:
                while file.write(bytes(size)) == size:
                    pass
            except OSError:
                continue


def free(folder: Path) -> None:
    """Give the space back that `fill` took."""
    (folder / _BALLAST).unlink()

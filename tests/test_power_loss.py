"""The power-loss simulation."""

import os
import random
import subprocess
import sys

import pytest

from power_loss import PowerLoss


def run_watched(folder, program):
    """Run a Python program in a folder, then kill it once it has printed a line."""
    power = PowerLoss(folder)
    command = [sys.executable, "-c", program + "\nprint(flush=True)\nimport time; time.sleep(60)"]
    process = subprocess.Popen(command, cwd=folder, env={**os.environ, **power.begin()}, stdout=subprocess.PIPE)
    with process:
        assert process.stdout.readline() == b"\n"
        process.kill()
    return power


SYNC_FOLDER = "import os; os.fsync(os.open('.', os.O_RDONLY))\n"


def test_bytes_without_fsync_are_lost(tmp_path):
    program = "file = open('f', 'wb', 0); file.write(b'12345')\n" + SYNC_FOLDER
    run_watched(tmp_path, program).cut(random.Random(0), keep_bytes=0)
    assert (tmp_path / "f").read_bytes() == b""


@pytest.mark.parametrize("sync", ["fsync", "fdatasync"])
def test_synced_bytes_stay_and_later_ones_are_torn(tmp_path, sync):
    program = f"""
import os
file = open('f', 'wb', 0)
file.write(b'12345')
os.{sync}(file.fileno())
file.write(b'67890')
"""
    power = run_watched(tmp_path, program + SYNC_FOLDER)
    power.cut(random.Random(0), keep_bytes=0.5)
    assert (tmp_path / "f").read_bytes() == b"1234567"


def test_a_failed_fsync_keeps_nothing(tmp_path):
    program = "import os; file = open('f', 'wb', 0); file.write(b'12345')\ntry: os.fsync(99)\nexcept OSError: pass\n"
    run_watched(tmp_path, program).cut(random.Random(0), keep_entries=True, keep_bytes=0)
    assert (tmp_path / "f").read_bytes() == b""


def test_bytes_from_before_the_start_stay(tmp_path):
    (tmp_path / "f").write_bytes(b"123")
    run_watched(tmp_path, "open('f', 'ab', 0).write(b'45')").cut(random.Random(0), keep_bytes=0)
    assert (tmp_path / "f").read_bytes() == b"123"


CHANGE_ENTRIES = """
import os
for name in ('new', 'next'):
    file = open(name, 'wb', 0)
    file.write(name.encode())
    os.fsync(file.fileno())
os.rename('next', 'replaced')
os.unlink('deleted')
os.mkdir('folder')
"""


@pytest.mark.parametrize("synced", [False, True])
@pytest.mark.parametrize("keep_entries", [False, True])
def test_directory_entries_are_durable_after_a_sync_of_their_folder(tmp_path, synced, keep_entries):
    for name in ("replaced", "deleted"):
        (tmp_path / name).write_text(name)
    power = run_watched(tmp_path, CHANGE_ENTRIES + (SYNC_FOLDER if synced else ""))
    power.cut(random.Random(0), keep_entries=keep_entries, keep_bytes=0)
    found = {path.name: path.read_text() if path.is_file() else None for path in tmp_path.iterdir()}
    if synced or keep_entries:
        assert found == {"new": "new", "replaced": "next", "folder": None}
    else:
        assert found == {"replaced": "replaced", "deleted": "deleted"}


def test_files_outside_of_the_folder_are_not_recorded(tmp_path):
    folder = tmp_path / "inside"
    folder.mkdir()
    program = "import os; file = open('../inside2', 'wb', 0); file.write(b'1'); os.fsync(file.fileno())"
    run_watched(folder, program).cut(random.Random(0), keep_bytes=0)
    assert (tmp_path / "inside2").read_bytes() == b"1"

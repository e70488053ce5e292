"""The power-loss simulation, and what Redis keeps when the power is cut."""

import os
import random
import subprocess
import sys
import threading
import time

import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from power_loss import PowerLoss
from redis_server import RedisServer

CLIENTS = 4


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


class Writer(threading.Thread):
    """Sends one transaction after another until Redis is gone. Each writes a counter, a list and a large value."""

    def __init__(self, server, number, sent):
        super().__init__()
        self.number = number
        self.sent = self.acknowledged = sent
        self._server = server

    def run(self):
        # Without retries: a repeated transaction would count twice.
        with redis.Redis(port=self._server.port, socket_timeout=20, retry=Retry(NoBackoff(), 0)) as client:
            try:
                while True:
                    self.sent += 1
                    with client.pipeline(transaction=True) as transaction:
                        transaction.incr(f"counter:{self.number}")
                        transaction.rpush(f"list:{self.number}", self.sent)
                        transaction.set(f"value:{self.number}", f"{self.sent} " * 4000)
                        transaction.execute()
                    self.acknowledged = self.sent
            except redis.RedisError:
                pass


def read_back(server, number):
    """Return how many transactions of a writer are in Redis. Fail if one of them is incomplete."""
    with redis.Redis(port=server.port, socket_timeout=20) as client:
        count = int(client.get(f"counter:{number}") or 0)
        assert [int(item) for item in client.lrange(f"list:{number}", 0, -1)] == list(range(1, count + 1))
        assert client.get(f"value:{number}") == (f"{count} ".encode() * 4000 if count else None)
        return count


def cut_power_while_writing(server, rng, counts, rewrite):
    """Run the writers, cut the power at a random moment, restart. Return the writers and their new counts."""
    writers = [Writer(server, number, count) for number, count in enumerate(counts)]
    for writer in writers:
        writer.start()
    if rewrite:
        server.command("BGREWRITEAOF")
    time.sleep(rng.uniform(0.01, 0.1))
    server.cut_power(rng)
    for writer in writers:
        writer.join()
    server.start()
    return writers, [read_back(server, writer.number) for writer in writers]


def test_the_first_write_to_a_new_folder_is_durable(tmp_path):
    """Redis does not sync the entry of its folder `appendonlydir`. The start script must do it."""
    with RedisServer(tmp_path, power_loss=True) as server:
        assert server.command("SET", "key", "value") == b"+OK"
        server.cut_power(random.Random(0), keep_entries=False, keep_bytes=0)
        server.start()
        assert server.command("EXISTS", "key") == b":1"


def test_redis_that_always_syncs_keeps_every_acknowledged_transaction(tmp_path):
    rng = random.Random(1)
    counts = [0] * CLIENTS
    with RedisServer(tmp_path, power_loss=True) as server:
        # Some cuts must hit a transaction between its write and its fsync, so that the start script repairs the file.
        for attempt in range(100):
            writers, counts = cut_power_while_writing(server, rng, counts, rewrite=attempt % 3 == 2)
            for writer, count in zip(writers, counts, strict=True):
                assert writer.acknowledged <= count <= writer.sent
            repaired = list(tmp_path.glob("appendonlydir/*.cut-*"))
            if attempt >= 11 and len(repaired) >= 2:
                break
    assert len(repaired) >= 2
    assert sum(counts) > 0


def test_redis_that_syncs_every_second_loses_acknowledged_transactions(tmp_path):
    rng = random.Random(1)
    counts = [0] * CLIENTS
    with RedisServer(tmp_path, power_loss=True, appendfsync="everysec") as server:
        for _ in range(50):
            writers, counts = cut_power_while_writing(server, rng, counts, rewrite=False)
            if any(count < writer.acknowledged for writer, count in zip(writers, counts, strict=True)):
                return
    pytest.fail("no acknowledged transaction was lost")

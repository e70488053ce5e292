"""The script that checks and repairs the append-only files before Redis starts (`deploy/redis/repair_aof.pl`)."""

import random
import shutil
import subprocess
import time

import pytest
import redis

from redis_server import START_SCRIPT, RedisServer

SCRIPT = START_SCRIPT.with_name("repair_aof.pl")
MULTI = b"*1\r\n$5\r\nMULTI\r\n"
EXEC = b"*1\r\n$4\r\nEXEC\r\n"


def command(*words):
    return b"*%d\r\n" % len(words) + b"".join(b"$%d\r\n%b\r\n" % (len(word), word) for word in words)


def rewrite(client):
    """Let Redis move all data to a new base file, and wait until it has."""
    client.bgrewriteaof()
    end = time.monotonic() + 20
    while client.info("persistence")["aof_rewrite_in_progress"] or client.info("persistence")["aof_rewrite_scheduled"]:
        assert time.monotonic() < end
        time.sleep(0.01)


def write_data(server):
    """Write keys to the base file, then transactions and commands to the incremental file."""
    with redis.Redis(port=server.port) as client:
        client.mset({f"base:{number}": "x" * 100 for number in range(50)})
        rewrite(client)
        for number in range(20):
            with client.pipeline(transaction=True) as transaction:
                transaction.incr("counter")
                transaction.rpush("list", f"{number}\r\n")
                transaction.set("value", f"{number} " * 100)
                transaction.execute()
            client.set(f"single:{number}", "y" * 50)
        with client.pipeline(transaction=True) as transaction:
            transaction.incr("counter")
            transaction.rpush("list", "last")
            transaction.set("value", "last " * 20)
            transaction.execute()


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    folder = tmp_path_factory.mktemp("written")
    with RedisServer(folder) as server:
        write_data(server)
        server.stop()
    return folder


class Data:
    """A copy of the files that a test may damage."""

    def __init__(self, written, folder):
        self.folder = folder
        self.aof_folder = folder / "appendonlydir"
        shutil.copytree(written / "appendonlydir", self.aof_folder)
        (self.newest,) = self.aof_folder.glob("*.incr.aof")
        (self.base,) = self.aof_folder.glob("*.base.rdb")
        self.content = self.newest.read_bytes()
        self.last_transaction = self.content.rindex(MULTI)

    def files(self):
        return {path.name: path.read_bytes() for path in self.aof_folder.iterdir()}

    def repair(self):
        return subprocess.run(["perl", SCRIPT, self.aof_folder], capture_output=True, text=True, timeout=60)

    def assert_repaired(self, good, cut, suffix=""):
        """Repair the newest file, which consists of these two parts. Only the first may remain."""
        copy = self.newest.with_name(f"{self.newest.name}.cut-{len(good)}{suffix}")
        before = self.files()
        done = self.repair()
        assert done.returncode == 0, done.stderr
        assert f"Removed {len(cut)} bytes behind offset {len(good)}" in done.stderr
        assert str(copy) in done.stderr
        assert self.files() == {**before, self.newest.name: good, copy.name: cut}

    def assert_refused(self, message):
        """Neither the script nor Redis may start, and every file must stay as it is."""
        before = self.files()
        with pytest.raises(RuntimeError, match=message), RedisServer(self.folder):
            pass
        assert self.files() == before

    def read(self):
        """Start Redis with the start script and return its keys."""
        with RedisServer(self.folder) as server, redis.Redis(port=server.port) as client:
            counter, items = int(client.get("counter")), client.lrange("list", 0, -1)
            return counter, items, client.get("value"), client.dbsize()


@pytest.fixture
def data(written, tmp_path):
    return Data(written, tmp_path)


def before_last_transaction():
    items = [f"{number}\r\n".encode() for number in range(20)]
    return 20, items, b"19 " * 100, 50 + 20 + 3


def test_intact_files_stay_as_they_are(data):
    before = data.files()
    done = data.repair()
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert data.files() == before
    assert data.read() == (21, [*before_last_transaction()[1], b"last"], b"last " * 20, 50 + 20 + 3)


def test_an_empty_folder_is_accepted(tmp_path):
    with RedisServer(tmp_path) as server:
        assert server.command("DBSIZE") == b":0"


def test_a_cut_anywhere_in_the_last_transaction_is_repaired(data):
    good = data.content[: data.last_transaction]
    ends = range(data.last_transaction + 1, len(data.content))
    for end in {ends[0], ends[-1], data.last_transaction + len(MULTI), *random.Random(0).sample(ends, 15)}:
        data.newest.write_bytes(data.content[:end])
        data.assert_repaired(good, data.content[data.last_transaction : end])
        data.newest.with_name(f"{data.newest.name}.cut-{len(good)}").unlink()


@pytest.mark.parametrize("part", [0.01, 0.5, 0.99])
def test_redis_starts_with_the_state_before_the_torn_transaction(data, part):
    length = len(data.content) - data.last_transaction
    data.newest.write_bytes(data.content[: data.last_transaction + int(part * length)])
    assert data.read() == before_last_transaction()


def test_a_cut_anywhere_in_a_single_command_is_repaired(data):
    single = command(b"SET", b"k", b"\r\n\0\r")
    for end in {1, len(single) - 1, *random.Random(0).sample(range(1, len(single)), 10)}:
        data.newest.write_bytes(data.content + single[:end])
        data.assert_repaired(data.content, single[:end])
        data.newest.with_name(f"{data.newest.name}.cut-{len(data.content)}").unlink()


@pytest.mark.parametrize("size", [2**20 - 60, 2**20 + 7, 3 * 2**20])
@pytest.mark.parametrize("missing", [1, 15, 2**20 - 100])
def test_large_arguments_are_repaired_and_accepted(data, size, missing):
    whole = MULTI + command(b"SET", b"k", b"\n" * size) + EXEC
    data.newest.write_bytes(data.content + whole)
    assert data.repair().stderr == ""
    data.newest.write_bytes(data.content + whole[:-missing])
    data.assert_repaired(data.content, whole[:-missing])


def test_timestamps_are_accepted_and_cut(tmp_path):
    stamped = tmp_path / "stamped"
    stamped.mkdir()
    with RedisServer(stamped, **{"aof-timestamp-enabled": "yes"}) as server:
        write_data(server)
        # Redis writes a timestamp in front of the first command of each second.
        while not any(b"#TS:" in path.read_bytes() for path in stamped.glob("appendonlydir/*.incr.aof")):
            assert server.command("SET", "a", "b") == b"+OK"
            time.sleep(0.05)
        server.stop()
    data = Data(stamped, tmp_path)
    assert data.repair().stderr == ""
    stamp = b"#TS:1628217470\r\n"
    for end in (1, 3, 4, 9, len(stamp) - 1):
        data.newest.write_bytes(data.content + stamp[:end])
        data.assert_repaired(data.content, stamp[:end])
        data.newest.with_name(f"{data.newest.name}.cut-{len(data.content)}").unlink()
    inside = MULTI + stamp + command(b"SET", b"k", b"v")
    data.newest.write_bytes(data.content + stamp + inside)
    data.assert_repaired(data.content + stamp, inside)


def test_repeated_damage_at_the_same_offset_keeps_every_copy(data):
    for number, torn in enumerate([MULTI, MULTI + b"*2", b"*"], start=1):
        data.newest.write_bytes(data.content + torn)
        data.assert_repaired(data.content, torn, f".{number}" if number > 1 else "")
        before = data.files()
        assert data.repair().stderr == ""
        assert data.files() == before


def test_a_damaged_byte_in_the_middle_is_refused(data):
    middle = data.content.index(b"*", len(data.content) // 2)
    data.newest.write_bytes(data.content[:middle] + b"+" + data.content[middle + 1 :])
    data.assert_refused(f"is damaged behind offset .*at offset {middle}")


def test_a_damaged_length_that_reaches_behind_the_end_is_refused(data):
    """Everything behind it looks like one argument that was not written to its end."""
    middle = data.content.index(b"$50\r\n")
    data.newest.write_bytes(data.content[:middle] + b"$99999999\r\n" + data.content[middle + 5 :])
    data.assert_refused("command inside an argument|an EXEC")


def test_no_damaged_byte_of_the_last_transaction_removes_it(data):
    """A damaged byte is refused, or it is part of a value and the files stay as they are."""
    outcomes = set()
    exec_ = range(len(data.content) - len(EXEC), len(data.content))
    before_exec = range(data.last_transaction, exec_.start)
    lengths = [offset for offset in before_exec if chr(data.content[offset]).isdigit()]
    for offset in {*exec_, *lengths, *random.Random(0).sample(before_exec, 10)}:
        byte = data.content[offset]
        damaged = ord("9") if chr(byte).isdigit() else byte ^ 1
        data.newest.write_bytes(data.content[:offset] + bytes([damaged]) + data.content[offset + 1 :])
        before = data.files()
        outcomes.add(data.repair().returncode)
        assert data.files() == before, offset
    assert outcomes == {0, 1}


@pytest.mark.parametrize(
    "tail",
    [
        b"\0",
        b"\0" * 5000,
        b"garbage",
        b"\r\n",
        b"*0\r\n",
        b"*-1\r\n",
        b"*01\r\n",
        b"*3\r\n\0",
        b"*1\r\n$4\rPING\r\n",
        b"*1\n$4\nPING\n",
        b"#comment\r\n",
        EXEC,
        MULTI + MULTI,
        MULTI + command(b"SET", b"a", b"b") + b"\0\0\0\0",
        MULTI + command(b"SET", b"a", b"b") + b"*1\r\n$4\r\nEXFC\r\n",
        MULTI + command(b"SET", b"a", b"b") + b"*1\r\n$6\r\nEXEC\r\n",
        MULTI + b"*3\r\n$3\r\nSET\r\n$1\r\na\r\n$9\r\nb\r\n" + EXEC,
        b"*3\r\n$3\r\nSET\r\n$1\r\na\r\n$99\r\nb\r\n" + command(b"SET", b"a", b"b"),
        # The hidden command lies on the border of two blocks.
        b"*3\r\n$3\r\nSET\r\n$1\r\na\r\n$9999999\r\n" + b"b" * (2**20 - 40) + b"\r\n" + command(b"SET", b"a", b"b"),
    ],
)
def test_other_damage_at_the_end_is_refused(data, tail):
    with data.newest.open("ab") as file:
        file.write(tail)
    before = data.files()
    done = data.repair()
    assert done.returncode == 1
    assert f"is damaged behind offset {len(data.content)}" in done.stderr
    assert "Restore the folder from a backup" in done.stderr
    assert data.files() == before


def test_a_damaged_base_file_is_refused(data):
    content = bytearray(data.base.read_bytes())
    content[len(content) // 2] ^= 1
    data.base.write_bytes(content)
    data.assert_refused("base.rdb is damaged")


@pytest.mark.parametrize("size", [0, 100])
def test_a_truncated_base_file_is_refused(data, size):
    data.base.write_bytes(data.base.read_bytes()[:size])
    data.assert_refused(r"base\.rdb is (damaged|empty)")


def test_a_truncated_base_file_without_rdb_is_refused(tmp_path):
    with RedisServer(tmp_path, **{"aof-use-rdb-preamble": "no"}) as server:
        with redis.Redis(port=server.port) as client:
            client.set("a", "b")
            rewrite(client)
        server.stop()
    (base,) = tmp_path.glob("appendonlydir/*.base.aof")
    base.write_bytes(base.read_bytes()[:-1])
    with pytest.raises(RuntimeError, match="only the newest incremental file may be cut"), RedisServer(tmp_path):
        pass


def test_only_the_newest_incremental_file_is_repaired(data):
    """Redis has two incremental files while it rewrites the older one."""
    older, newer = data.newest, data.newest.with_name("appendonly.aof.9.incr.aof")
    torn = data.content[data.last_transaction : -1]
    (manifest,) = data.aof_folder.glob("*.manifest")
    manifest.write_text(manifest.read_text() + f"file {newer.name} seq 9 type i\n")
    newer.write_bytes(torn)
    older.write_bytes(data.content[: data.last_transaction])
    data.newest = newer
    data.assert_repaired(b"", torn)
    assert data.read() == before_last_transaction()
    newer.write_bytes(command(b"SET", b"a", b"b"))
    older.write_bytes(data.content[:-1])
    data.assert_refused("only the newest incremental file may be cut")


@pytest.mark.parametrize("content", ["nonsense\n", "", "file ../a seq 1 type i\n"])
def test_a_damaged_manifest_is_refused(data, content):
    (manifest,) = data.aof_folder.glob("*.manifest")
    manifest.write_text(content)
    data.assert_refused("manifest")


def test_a_missing_file_is_refused(data):
    data.newest.unlink()
    data.assert_refused("No such file")


def test_a_missing_manifest_is_refused(data):
    (manifest,) = data.aof_folder.glob("*.manifest")
    manifest.unlink()
    data.assert_refused("no manifest")


def test_an_unfinished_manifest_is_ignored(data):
    """Redis writes a new manifest under another name first."""
    (data.aof_folder / "temp-appendonly.aof.manifest").write_text("file appendonly.aof.1.ba")
    assert data.repair().stderr == ""


def test_files_that_a_redis_uses_are_not_cut(data):
    with RedisServer(data.folder) as server:
        with data.newest.open("ab") as file:
            file.write(MULTI)
        before = data.files()
        done = data.repair()
        assert done.returncode == 1
        assert f"Process {server.pid} has {data.newest} open" in done.stderr
        assert data.files() == before

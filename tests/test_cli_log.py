"""`protodcs log export`: every entry is in the files once, also if the command was killed anywhere."""

import json
import random
import subprocess
import sys
import time
from collections import Counter
from dataclasses import asdict
from importlib.util import find_spec

import fsspec
import httpx
import pytest
from pyarrow import fs, parquet
from typer.testing import CliRunner

from made_service import FEATURES, ROWS
from ports import free_port
from protodcs import Client
from protodcs.cli import app, log
from served_over_http import serving


@pytest.fixture
def service():
    with serving() as (url, _, _), Client(url) as client:
        client.stream("s").delete()
        yield url, client


def features(count):
    return FEATURES[[number % len(FEATURES) for number in range(count)]]


def run(url, target, *words, code=0):
    command = ["log", "export", str(target), "--url", url, "--json", *words]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == code, result.output
    return json.loads(result.stdout) if code == 0 else result.stderr


def rows_in(target):
    """Return the rows of all files by stream. Whole folders are read, as users do."""
    found = {}
    for folder in sorted(target.iterdir()):
        table = parquet.read_table(folder, partitioning=None)
        found[folder.name.removeprefix("stream=")] = table.sort_by("position").to_pylist()
    return found


def positions_in(target):
    return {stream: [row["position"] for row in rows] for stream, rows in rows_in(target).items()}


def files_in(target):
    return sorted(file.relative_to(target).as_posix() for file in target.rglob("*") if file.is_file())


def test_a_second_run_adds_what_is_new_and_keeps_the_files_that_are_there(service, tmp_path):
    url, client = service
    streams = {name: client.create(name, prototypes=ROWS) for name in ("camera-7", "b c")}
    for stream in streams.values():
        stream.observe(features(25), image_ref=None)
    assert run(url, tmp_path / "log", "--rows", "10") == {"streams": 2, "exported": 50}
    assert positions_in(tmp_path / "log") == {"camera-7": list(range(25)), "b%20c": list(range(25))}
    # As users read it: the name of the folder is a column.
    assert Counter(parquet.read_table(tmp_path / "log")["stream"].to_pylist()) == {"camera-7": 25, "b c": 25}
    before = {file: (tmp_path / "log" / file).read_bytes() for file in files_in(tmp_path / "log")}
    assert run(url, tmp_path / "log") == {"streams": 2, "exported": 0}
    assert {file: (tmp_path / "log" / file).read_bytes() for file in files_in(tmp_path / "log")} == before
    # Freezing takes a position without an entry.
    streams["camera-7"].freeze()
    streams["camera-7"].observe(features(5))
    assert run(url, f"file://{tmp_path / 'log'}") == {"streams": 2, "exported": 5}
    rows = rows_in(tmp_path / "log")["camera-7"]
    assert [row["position"] for row in rows] == [*range(25), *range(26, 31)]
    logged = list(streams["camera-7"].log(order="oldest"))
    assert [row["time"] for row in rows] == [entry.time for entry in logged]
    assert [row["label"] for row in rows] == [entry.label for entry in logged]
    assert [row["score"] for row in rows] == [entry.score for entry in logged]
    assert all(file in files_in(tmp_path / "log") for file in before)


def test_one_stream_can_be_chosen_and_a_new_one_of_the_same_id_is_another(service, tmp_path):
    url, client = service
    client.create("a", prototypes=ROWS).observe(features(7))
    client.create("b", prototypes=ROWS).observe(features(7))
    assert run(url, tmp_path, "--stream", "a") == {"streams": 1, "exported": 7}
    client.stream("a").delete()
    client.create("a", prototypes=ROWS).observe(features(3))
    assert run(url, tmp_path, "--stream", "a") == {"streams": 1, "exported": 3}
    assert positions_in(tmp_path) == {"a": sorted([*range(7), *range(3)])}
    assert "'nobody'" in run(url, tmp_path, "--stream", "nobody", code=1)


def test_an_object_store_gets_the_same_files(service):
    url, client = service
    stream = client.create("a b", prototypes=ROWS)
    stream.observe(features(25))
    target = f"memory://bucket-{random.random()}/log"
    assert run(url, target, "--rows", "10") == {"streams": 1, "exported": 25}
    stream.observe(features(5))
    assert run(url, target, "--rows", "10") == {"streams": 1, "exported": 5}
    files = fsspec.filesystem("memory")
    found = [name for name in files.find(target.removeprefix("memory:/")) if name.endswith(".parquet")]
    positions = []
    for name in sorted(found):
        with files.open(name) as file:
            positions += [row["position"] for row in parquet.read_table(file).to_pylist()]
    assert positions == list(range(30))
    assert "cannot be used" in run(url, "nothing://bucket", code=1)


@pytest.fixture
def s3(tmp_path, monkeypatch):
    """Yield a client of an S3 server with one bucket. It is pyarrow's own, so nothing is read by what wrote it."""
    if not all(find_spec(package) for package in ("s3fs", "moto", "flask")):
        pytest.skip("needs an S3 server and its client: pip install s3fs 'moto[server]'")
    port = free_port()
    settings = {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
        "AWS_ACCESS_KEY_ID": "reader",
        "AWS_SECRET_ACCESS_KEY": "secret",
        # No credentials of this machine.
        "AWS_CONFIG_FILE": str(tmp_path / "none"),
        "AWS_SHARED_CREDENTIALS_FILE": str(tmp_path / "none"),
        "AWS_EC2_METADATA_DISABLED": "true",
    }
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    with (tmp_path / "s3.log").open("wb") as output:
        command = [sys.executable, "-m", "moto.server", "--port", str(port)]
        server = subprocess.Popen(command, stdout=output, stderr=output)
    try:
        while True:
            assert server.poll() is None, (tmp_path / "s3.log").read_text()
            try:
                httpx.get(f"http://127.0.0.1:{port}/moto-api/")
                break
            except httpx.TransportError:
                time.sleep(0.1)
        files = fs.S3FileSystem(
            access_key="reader", secret_key="secret", endpoint_override=f"http://127.0.0.1:{port}",
            allow_bucket_creation=True,
        )  # fmt: skip
        files.create_dir("logs")
        yield files
    finally:
        server.kill()
        server.wait()


def run_beside(url, target, *words):
    """Run the command in a process of its own. Return its report, or its error."""
    command = [sys.executable, "-m", "protodcs", "log", "export", target, "--url", url, "--json", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    return json.loads(done.stdout) if done.returncode == 0 else done.stderr


@pytest.mark.long
def test_s3_gets_every_entry_once_and_a_second_run_goes_on_by_the_cursor(service, s3):
    url, client = service
    stream = client.create("a b", prototypes=ROWS)
    stream.observe(features(25))
    assert run_beside(url, "s3://logs/decisions", "--rows", "10") == {"streams": 1, "exported": 25}
    before = {file.path: file.mtime_ns for file in s3.get_file_info(fs.FileSelector("logs", recursive=True))}
    assert run_beside(url, "s3://logs/decisions") == {"streams": 1, "exported": 0}
    stream.observe(features(7), image_ref=None)
    assert run_beside(url, "s3://logs/decisions") == {"streams": 1, "exported": 7}
    with s3.open_input_stream("logs/decisions/stream=a%20b/_cursor.json") as cursor:
        assert json.loads(cursor.read())["position"] == 31
    after = {file.path: file.mtime_ns for file in s3.get_file_info(fs.FileSelector("logs", recursive=True))}
    assert {file: after[file] for file in before if file.endswith(".parquet")}.items() <= before.items()
    assert sum(file.endswith(".parquet") for file in after) == 4
    table = parquet.read_table("logs/decisions", filesystem=s3)
    assert set(table["stream"].to_pylist()) == {"a b"}
    rows = table.drop_columns("stream").sort_by("position").to_pylist()
    assert rows == [asdict(entry) for entry in stream.log(order="oldest")]
    assert len(rows) == 32


@pytest.mark.long
def test_a_cursor_in_s3_that_was_not_written_costs_and_doubles_nothing(service, s3):
    url, client = service
    stream = client.create("a", prototypes=ROWS)
    stream.observe(features(25))
    run_beside(url, "s3://logs", "--rows", "10")
    s3.delete_file("logs/stream=a/_cursor.json")
    stream.observe(features(5))
    assert run_beside(url, "s3://logs", "--rows", "10") == {"streams": 1, "exported": 5}
    assert sorted(parquet.read_table("logs", filesystem=s3)["position"].to_pylist()) == list(range(30))


@pytest.mark.long
def test_a_bucket_that_is_missing_is_an_error_and_is_not_created(service, s3, monkeypatch):
    url, client = service
    client.create("a", prototypes=ROWS).observe(features(3))
    assert "error: s3://typo/log cannot be used: The specified bucket does not exist" in run_beside(
        url, "s3://typo/log"
    )
    assert [bucket.path for bucket in s3.get_file_info(fs.FileSelector(""))] == ["logs"]
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    assert "Unable to locate credentials" in run_beside(url, "s3://logs")


class KilledError(BaseException):
    """Stands for SIGKILL at one moment."""


@pytest.mark.parametrize("kind", ["local", "memory"])
def test_a_run_that_dies_at_any_write_loses_and_doubles_nothing(service, tmp_path, kind, monkeypatch):
    url, client = service
    stream = client.create("a", prototypes=ROWS)
    target = str(tmp_path) if kind == "local" else f"memory://bucket-{random.random()}"
    kind = log._LocalFolder if kind == "local" else log._FsspecFolder
    write = kind.write
    deaths = 0
    for left in range(12):
        stream.observe(features(25))

        allowed = [None] * left

        def dying(self, name, data, allowed=allowed):
            if not allowed:
                raise KilledError
            allowed.pop()
            write(self, name, data)

        monkeypatch.setattr(kind, "write", dying)
        try:
            CliRunner().invoke(app, ["log", "export", target, "--url", url, "--rows", "10"], catch_exceptions=False)
        except KilledError:
            deaths += 1
        monkeypatch.setattr(kind, "write", write)
        # More came before the next run.
        stream.observe(features(3))
    assert deaths >= 6
    run(url, target, "--rows", "10")
    files = fsspec.filesystem("file" if target.startswith("/") else "memory")
    found = Counter()
    for name in files.find(target.removeprefix("memory:/")):
        if name.endswith(".parquet"):
            with files.open(name) as file:
                found.update(parquet.read_table(file)["position"].to_pylist())
    assert found == Counter(range(12 * 28))


def test_kills_of_the_command_lose_and_double_nothing_of_6_000_entries(service, tmp_path):
    url, client = service
    names = ["a", "b"]
    for name in names:
        stream = client.create(name, prototypes=ROWS)
        for _ in range(3):
            stream.observe(features(1000))
    command = [sys.executable, "-m", "protodcs", "log", "export", str(tmp_path), "--url", url, "--rows", "100"]
    dice, kills = random.Random(7), 0
    while kills < 5:
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        before = len(files_in(tmp_path))
        # Kill it when it is at work.
        while len(files_in(tmp_path)) < before + 2 and process.poll() is None:
            time.sleep(0.01)
        time.sleep(dice.random() * 0.02)
        process.kill()
        assert process.wait() == -9
        kills += 1
    run(url, tmp_path, "--rows", "100")
    assert positions_in(tmp_path) == {name: list(range(3000)) for name in names}

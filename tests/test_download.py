"""`protodcs fetch` and its downloads, from a real HTTP server on this machine."""

import hashlib
import io
import re
import tarfile
import threading
import zipfile
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from typer.testing import CliRunner

from protodcs.cli import app
from protodcs.data import datasets, origins
from protodcs.data.origins import Origin
from protodcs.download import fetch
from protodcs.errors import DataError

CONTENT = {"data_batch_1": bytes(range(256)) * 800, "readme.html": b"text"}


class Server:
    """Serves one file.

    Attributes:
        body: its bytes.
        ranges: whether parts of it can be asked for.
        cut_after: number of bytes after which the next response ends early; None: none.
        requests: the Range header of each request.
    """

    def __init__(self, body):
        self.body, self.ranges, self.cut_after, self.requests = body, True, None, []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                asked = self.headers.get("Range")
                outer.requests.append(asked)
                start = int(re.fullmatch(r"bytes=(\d+)-", asked)[1]) if asked and outer.ranges else 0
                rest = outer.body[start:]
                self.send_response(206 if start else 200)
                self.send_header("Content-Length", str(len(rest)))
                self.end_headers()
                cut, outer.cut_after = outer.cut_after, None
                self.wfile.write(rest[:cut])

            def log_message(self, *_):
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.address = f"http://127.0.0.1:{self.http.server_port}"


@pytest.fixture
def server():
    served = Server(tar_of("cifar-10-batches-py"))
    thread = threading.Thread(target=served.http.serve_forever)
    thread.start()
    yield served
    served.http.shutdown()
    thread.join()
    served.http.server_close()


def tar_of(folder):
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as archive:
        for name, content in CONTENT.items():
            entry = tarfile.TarInfo(f"{folder}/{name}")
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))
    return file.getvalue()


def origin_of(server, name="set.tar", path="cifar-10-batches-py"):
    md5 = hashlib.md5(server.body).hexdigest()
    return Origin("a set", f"{server.address}/{name}?download=1", len(server.body), md5, path)


def contents(folder):
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def test_an_archive_is_downloaded_checked_and_unpacked_and_nothing_else_stays(server, tmp_path):
    arrived = []
    assert fetch(origin_of(server), tmp_path / "data", arrived.append)
    assert contents(tmp_path / "data" / "cifar-10-batches-py") == CONTENT
    assert [file.name for file in (tmp_path / "data").iterdir()] == ["cifar-10-batches-py"]
    assert sum(arrived) == len(server.body)


def test_a_zip_and_a_single_file_are_placed_too(server, tmp_path):
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as packed:
        packed.writestr("tiny-imagenet-200/words.txt", "n01 fish")
    server.body = file.getvalue()
    fetch(origin_of(server, "tiny.zip", "tiny-imagenet-200"), tmp_path)
    assert (tmp_path / "tiny-imagenet-200" / "words.txt").read_text() == "n01 fish"
    server.body = b"matlab"
    fetch(origin_of(server, "test_32x32.mat", "svhn/test_32x32.mat"), tmp_path)
    assert (tmp_path / "svhn" / "test_32x32.mat").read_bytes() == b"matlab"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["svhn", "tiny-imagenet-200"]


def test_an_interrupted_download_continues_with_the_missing_bytes(server, tmp_path):
    origin, server.cut_after = origin_of(server), 100_000
    with pytest.raises(DataError, match=r"ended after 100,000 of [\d,]+ bytes.*again: it continues set.tar.part"):
        fetch(origin, tmp_path)
    assert not (tmp_path / origin.path).exists()
    arrived = []
    fetch(origin, tmp_path, arrived.append)
    assert server.requests == [None, "bytes=100000-"]
    assert arrived[0] == 100_000
    assert sum(arrived) == origin.size
    assert contents(tmp_path / origin.path) == CONTENT


def test_a_server_without_ranges_sends_everything_again(server, tmp_path):
    origin, server.cut_after, server.ranges = origin_of(server), 100_000, False
    with pytest.raises(DataError):
        fetch(origin, tmp_path)
    fetch(origin, tmp_path)
    assert contents(tmp_path / origin.path) == CONTENT


def test_a_file_with_another_hash_is_refused_and_deleted(server, tmp_path):
    origin = origin_of(server)
    server.body = server.body[:-1] + b"x"
    with pytest.raises(DataError, match=f"not the published file: its MD5 is .*, expected: {origin.md5}"):
        fetch(origin, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_longer_file_is_refused_without_reading_all_of_it(server, tmp_path):
    origin = origin_of(server)
    server.body += bytes(20 << 20)
    with pytest.raises(DataError, match="not the published file"):
        fetch(origin, tmp_path)


def test_what_is_there_is_not_downloaded_again(server, tmp_path):
    origin = origin_of(server)
    assert fetch(origin, tmp_path)
    assert not fetch(origin, tmp_path)
    assert len(server.requests) == 1


def test_a_complete_partial_file_is_not_downloaded_again(server, tmp_path):
    (tmp_path / "set.tar.part").write_bytes(server.body)
    fetch(origin_of(server), tmp_path)
    assert server.requests == []
    assert contents(tmp_path / "cifar-10-batches-py") == CONTENT


def test_an_archive_cannot_write_outside_its_folder(server, tmp_path):
    server.body = tar_of("../outside")
    with pytest.raises(tarfile.OutsideDestinationError):
        fetch(origin_of(server), tmp_path / "data")
    assert not (tmp_path / "outside").exists()


def test_a_server_that_is_gone_is_named(tmp_path):
    origin = Origin("a set", "http://127.0.0.1:1/set.tar", 10, "0" * 32, "set")
    with pytest.raises(DataError, match=r"http://127.0.0.1:1/set.tar could not be downloaded: .*refused"):
        fetch(origin, tmp_path)


def test_the_command_fetches_by_name_and_says_where_it_is(server, tmp_path, monkeypatch):
    monkeypatch.setitem(origins.ORIGINS, "cifar10-test", origin_of(server))
    monkeypatch.setenv("PROTODCS_DATA", str(tmp_path))
    for answer in ("downloaded and checked", "there already"):
        result = CliRunner().invoke(app, ["fetch", "cifar10-test"])
        assert result.exit_code == 0, result.output
        assert f"cifar10-test: {answer}, {tmp_path / 'cifar-10-batches-py'}" in result.stdout
    assert len(server.requests) == 1


def test_the_command_lists_its_datasets_and_suggests_names(monkeypatch):
    listed = CliRunner().invoke(app, ["fetch"]).stdout
    assert all(name in listed for name in origins.ORIGINS)
    assert "170 MB" in listed
    mistyped = CliRunner().invoke(app, ["fetch", "cifar10-tst"])
    assert mistyped.exit_code == 1
    assert "Did you mean 'cifar10-test'?" in mistyped.stderr
    monkeypatch.delenv("PROTODCS_DATA", raising=False)
    assert "Pass --folder, or set PROTODCS_DATA" in CliRunner().invoke(app, ["fetch", "dtd"]).stderr


def test_every_origin_is_that_of_a_dataset_that_then_opens():
    places = {row.name: [place.path for place in row.places] for row in datasets.SETS}
    for name, origin in origins.ORIGINS.items():
        assert any(path == origin.path or path.startswith(origin.path + "/") for path in places[name])
        assert re.fullmatch(r"[0-9a-f]{32}", origin.md5)

"""`protodcs serve` in one process: what a user sees when it starts, is stopped, is killed, and cannot start."""

import base64
import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import astuple, replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import httpx
import numpy as np
import psutil
import pytest
from typer.testing import CliRunner

from conftest import clusters, random_stream
from ports import free_port
from protodcs import Client, OpenSetClassifier, StreamDCS
from protodcs.cli import app
from protodcs.serve.store.sqlite import SqliteStore
from service.rig import Service

CLASSES = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]
ROWS, FEATURES, _ = random_stream(samples=50, seed=3)
# As on a machine where only the extra `serve` is installed.
ONLY_SERVE = "import sys; sys.modules['ray'] = sys.modules['PIL'] = None; from protodcs.cli import app; app()"

# A module that is None here cannot be imported: preflight checks must not need it.
WITHOUT_LIBRARIES = (
    "import sys; sys.modules['ray'] = sys.modules['uvicorn'] = sys.modules['fastapi'] = None; "
    "from protodcs.cli import app; app()"
)


def local(tmp_path, **settings):
    return Service(
        tmp_path, store=f"sqlite:{tmp_path / 'streams'}", log_format="off", audit=str(tmp_path / "audit"), **settings
    )


@pytest.mark.parametrize("ends", [signal.SIGINT, signal.SIGTERM])
def test_it_needs_no_ray_and_pillow_and_a_signal_ends_it_with_one_line(tmp_path, ends):
    service = local(tmp_path)
    service.program = [sys.executable, "-W", "ignore", "-c", ONLY_SERVE]
    with service:
        with Client(service.base_url) as client:
            stream = client.create("s", prototypes=ROWS)
            stream.observe(FEATURES[0])
            assert httpx.get(f"{service.base_url}/v1/ready").json() == {"ready": True}
        assert not psutil.Process(service.pid).children()
        service.stop(ends)
    assert [next(iter(line)) for line in service.said] == ["serving", "stopped"]
    with service, Client(service.base_url) as client:
        assert client.stream("s").status()["position"] == 1


def test_12_images_with_keys_retried_by_8_threads_through_kills_give_the_same_12_answers(tmp_path, png_files):
    """Each thread sends all images until each was answered. The process is killed twice and started again meanwhile.

    Four threads wait at the fourth and the eighth image until the process was killed, the others go on.
    """
    images, service = png_files(12), local(tmp_path, encoder="mini")
    reached = {4: threading.Event(), 8: threading.Event()}
    killed = {4: threading.Event(), 8: threading.Event()}

    def send(number):
        answers = {}
        order = random.Random(number).sample(range(12), 12)
        with Client(service.base_url, give_up=300.0) as client:
            stream = client.stream("camera")
            for sent, place in enumerate(order):
                if sent in reached and number < 4:
                    reached[sent].set()
                    killed[sent].wait()
                answers[place] = stream.observe(images[place], idempotency_key=f"image {place}")
        return answers

    def kill():
        for sent in reached:
            reached[sent].wait()
            service.kill()
            killed[sent].set()
            service.start()

    with service:
        with Client(service.base_url) as client:
            client.create("camera", classes=CLASSES)
        with ThreadPoolExecutor(9) as threads:
            killing = threads.submit(kill)
            answers = list(threads.map(send, range(8)))
            killing.result()
        with Client(service.base_url) as client:
            assert client.stream("camera").status()["position"] == 12
            logged = list(client.stream("camera").log(order="oldest"))
            assert [entry.position for entry in logged] == list(range(12))
            assert {entry.key for entry in logged} == {f"image {place}" for place in range(12)}
            assert all(client.stream("camera").thumbnail(entry.position) for entry in logged)
    for place in range(12):
        assert len({(told[place].position, str(told[place].decision)) for told in answers}) == 1
    first = sorted(answers[0].items(), key=lambda item: item[1].position)
    assert [told.position for _, told in first] == list(range(12))
    classifier = OpenSetClassifier.from_pretrained("mini", CLASSES)
    assert [told.decision.label for _, told in first] == [classifier(images[place]).label for place, _ in first]


def test_a_backup_of_a_running_service_is_a_store_of_its_own(tmp_path):
    with local(tmp_path) as service, Client(service.base_url) as client:
        stream = client.create("s", prototypes=ROWS)
        seen = [stream.observe(feature) for feature in FEATURES[:20]]
        done = CliRunner().invoke(app, ["streams", "backup", str(tmp_path / "streams"), str(tmp_path / "copy")])
        assert done.exit_code == 0, done.output
        stream.observe(FEATURES[20])
    with Service(tmp_path, store=f"sqlite:{tmp_path / 'copy'}") as copy, Client(copy.base_url) as client:
        told = list(client.stream("s").log(order="oldest"))
        assert [(entry.position, entry.score) for entry in told] == [(one.position, one.decision.score) for one in seen]


def test_metrics_of_all_parts_are_on_one_page(tmp_path):
    port = free_port()
    with local(tmp_path, metrics_port=port) as service, Client(service.base_url) as client:
        client.create("s", prototypes=ROWS).observe(FEATURES[0])
        wanted = (
            'protodcs_ready{part="store"} 1.0',
            "protodcs_worker_step_seconds_count",
        )
        end = time.monotonic() + 300
        while not all(name in (page := httpx.get(f"http://127.0.0.1:{port}/metrics").text) for name in wanted):
            assert time.monotonic() < end, page
            time.sleep(0.2)


def observe_until_refused(service, number):
    """Send batches to a stream, one after the other. Return how many rows were answered, and all other statuses."""
    rows = np.tile(FEATURES, (4, 1)).astype("<f4").tobytes()
    path, answered, others = f"{service.base_url}/v1/streams/s{number}/observe?count={4 * len(FEATURES)}", 0, []
    with httpx.Client(timeout=300.0) as client:
        for _ in range(100_000):
            try:
                response = client.post(path, content=rows, headers={"content-type": "application/octet-stream"})
            except httpx.TransportError:
                # It was not accepted.
                break
            if response.status_code == 200:
                answered += len(response.json()["decisions"])
            else:
                others.append(response.status_code)
    return answered, others


def test_sigterm_finishes_what_was_accepted_and_accepts_nothing_more(tmp_path):
    service = local(tmp_path)
    with ThreadPoolExecutor(8) as threads, service, Client(service.base_url) as client:
        for number in range(8):
            client.create(f"s{number}", prototypes=ROWS)
        sending = [threads.submit(observe_until_refused, service, number) for number in range(8)]
        while not all(client.stream(f"s{number}").status()["position"] for number in range(8)):
            assert not any(work.done() for work in sending)
        service.stop()
        results = [work.result() for work in sending]
    assert [others for _, others in results] == [[]] * 8
    assert [next(iter(line)) for line in service.said] == ["serving", "stopped"]
    with service, Client(service.base_url) as client:
        positions = [client.stream(f"s{number}").status()["position"] for number in range(8)]
    # Whatever was applied was answered.
    assert positions == [answered for answered, _ in results]


def _fields(decision):
    """Return all of a decision but the scores of all classes, which the service does not send."""
    return astuple(replace(decision, scores=None))


def test_a_stream_of_3000_samples_goes_on_bit_by_bit_after_sigterm_and_a_start(tmp_path):
    """Long enough for every counter of the state to reach its largest value, which a load must accept."""
    prototypes, features, _ = clusters(samples=3300, unknown=0.15)
    rows = features.astype(np.float32)
    engine = StreamDCS(prototypes.astype(np.float32), classes=CLASSES)
    expected = [engine.observe(row) for row in rows]
    assert sum(seen.known and seen.p_unknown < 0.05 for seen in expected) > 2000
    assert sum(not seen.known for seen in expected) > 200
    service, seen = local(tmp_path), []
    for part in (rows[:3000], rows[3000:]):
        with service, Client(service.base_url) as client:
            if not seen:
                client.create("s", prototypes=prototypes, classes=CLASSES)
            stream = client.stream("s")
            for batch in np.array_split(part, max(1, len(part) // 500)):
                seen += stream.observe(batch)
            status, state = stream.status(), stream.export_state()
    assert [told.position for told in seen] == list(range(3300))
    assert [_fields(told.decision) for told in seen] == [*map(_fields, expected)]
    assert (status["sequence"], status["replayed_differently"], status["guard"]["fired"]) == (3300, 0, {})
    assert state == engine.snapshot()


def chunk(data):
    return b"%x\r\n%s\r\n" % (len(data), data)


def test_sigterm_ends_events_and_streamed_rows_after_what_has_arrived(tmp_path):
    """They would go on for as long as the client likes. The service does not wait for them until its time limit."""
    service, followed = local(tmp_path, drain_seconds=10_000), threading.Event()

    def follow():
        with httpx.stream("GET", f"{service.base_url}/v1/streams/s/events", timeout=600) as told:
            for _ in told.iter_lines():
                followed.set()
            return "ended"

    # The service is stopped first, also if the test fails.
    with ThreadPoolExecutor(1) as threads, service:
        with Client(service.base_url) as client:
            client.create("s", prototypes=ROWS)
        following = threads.submit(follow)
        assert followed.wait(600)
        with socket.create_connection(("127.0.0.1", service.settings["port"]), timeout=600) as connection:
            head = b"POST /v1/streams/s/observe:stream HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n"
            connection.sendall(head + b"content-type: application/x-ndjson\r\n\r\n")
            for row in FEATURES[:3]:
                feature = base64.b64encode(row.astype("<f4").tobytes()).decode()
                connection.sendall(chunk(json.dumps({"feature": feature}).encode() + b"\n"))
            answers = connection.makefile("rb")
            positions = []
            while len(positions) < 3:
                line = answers.readline()
                assert line
                if line.startswith(b"{"):
                    positions.append(json.loads(line)["position"])
            # The body has no end, and no more rows.
            service.stop()
            rest = [json.loads(line) for line in answers if line.startswith(b"{")]
        assert positions == [0, 1, 2]
        assert [(line["error"]["status"], line["error"]["code"]) for line in rest] == [(503, "unavailable")]
        assert following.result() == "ended"
    with service, Client(service.base_url) as client:
        assert client.stream("s").status()["position"] == 3


def failed(*options):
    """Return the one line that a service prints which cannot start."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "protodcs", "serve", *options],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 1, done
    assert not done.stdout
    (line,) = done.stderr.splitlines()
    return line


def test_a_port_that_is_taken_is_one_line(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        line = failed("--store", f"sqlite:{tmp_path}", "--port", port)
    assert f"Cannot listen on 127.0.0.1:{port}: Address already in use" in line


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--encoder", "nosuch"], "Unknown encoder 'nosuch'. Use demo, mini"),
        (["--encoder", "mini:missing"], "missing/mini.safetensors is missing. Set PROTODCS_DATA"),
        (["--encoder", "onnx:missing"], "There is no folder 'missing'"),
        (["--encoder", "/missing/folder"], "There is no folder '/missing/folder'"),
        (["--encoder", "some/model"], "'some/model' is not in the cache, and Hugging Face cannot be reached"),
        (["--keys", "missing.json"], "missing.json cannot be read"),
    ],
)
def test_a_missing_file_is_one_line_and_no_library_is_loaded(tmp_path, monkeypatch, options, message):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{free_port()}")
    program = [sys.executable, "-W", "ignore", "-c", WITHOUT_LIBRARIES, "serve", "--port", str(free_port()), *options]
    done = subprocess.run(program, capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stdout) == (1, "")
    (line,) = done.stderr.splitlines()
    assert message in line
    assert not list(tmp_path.iterdir())


def test_a_model_that_hugging_face_does_not_have_is_one_line(monkeypatch):
    class Hub(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(404)
            self.send_header("X-Error-Code", "RepoNotFound")
            self.end_headers()

        def log_message(self, *_):
            pass

    with HTTPServer(("127.0.0.1", 0), Hub) as hub:
        threading.Thread(target=hub.serve_forever).start()
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{hub.server_port}")
        line = failed("--encoder", "some/model", "--port", str(free_port()))
        hub.shutdown()
    assert "Hugging Face has no model 'some/model'" in line


async def test_a_folder_in_use_is_one_line(tmp_path):
    store = SqliteStore(tmp_path)
    line = failed("--store", f"sqlite:{tmp_path}", "--port", str(free_port()))
    assert f"in use by process {os.getpid()}" in line
    await store.close()


def test_another_kind_of_store_is_an_error(tmp_path):
    file = tmp_path / "serve.yaml"
    file.write_text("store: redis://user:secret@127.0.0.1:1/0")
    done = CliRunner().invoke(app, ["serve", "--config", str(file)])
    assert done.exit_code == 1
    assert "A store is sqlite:FOLDER or postgresql://USER@HOST/DB. Given: 'redis://***@127.0.0.1:1/0'." in done.output


def test_a_failed_disk_ends_the_service(tmp_path):
    """The process must not answer from memory what the disk does not have."""
    broken = (
        "import sqlite3\n"
        "from protodcs.serve.store import sqlite\n"
        "def fail(*_):\n"
        "    problem = sqlite3.OperationalError('disk I/O error')\n"
        "    problem.sqlite_errorcode = sqlite3.SQLITE_IOERR_FSYNC\n"
        "    raise problem\n"
        "sqlite.SqliteStore._append = fail\n"
        "from protodcs.cli import app; app()\n"
    )
    service = local(tmp_path)
    service.program = [sys.executable, "-W", "ignore", "-c", broken]
    service.start()
    with httpx.Client(base_url=service.base_url, timeout=60) as client:
        assert client.post("/v1/streams", json={"id": "s", "prototypes": ROWS.tolist()}).status_code == 201
        body = FEATURES[0].astype("<f4").tobytes()
        answer = client.post("/v1/streams/s/observe", content=body)
        assert answer.status_code >= 500
    assert service._process.wait(60) == 1
    service._end()
    assert "disk I/O error; check the disk, and start again" in (tmp_path / "serve.log").read_text()


@pytest.mark.parametrize(
    "start", [b"", b"GET /v1/health HTTP/1.1\r\nHost: s\r\n", b"GET /v1/health HTTP/1.1\r\n\r\nGET"]
)
def test_headers_that_never_end_close_the_connection(tmp_path, start):
    hurried = (
        "from protodcs.serve.runtime import server; server._HEADER_SECONDS = 1.0\nfrom protodcs.cli import app; app()\n"
    )
    service = local(tmp_path)
    service.program = [sys.executable, "-W", "ignore", "-c", hurried]
    with service, socket.create_connection(("127.0.0.1", service.settings["port"]), timeout=60) as slow:
        slow.sendall(start)
        while slow.recv(65_536):
            pass
        with httpx.Client(base_url=service.base_url) as client:
            assert [client.get("/v1/health").status_code for _ in range(3)] == 3 * [200]


KIB_64 = 2**16
CHUNKED = b"POST /v1/streams HTTP/1.1\r\nHost: 127.0.0.1\r\nTransfer-Encoding: chunked\r\n\r\n1\r\n{\r\n"


def answered(service, *pieces):
    """Send the pieces of a request, as far as they are read, and return all that comes back."""
    with socket.create_connection(("127.0.0.1", service.settings["port"]), timeout=60) as connection:
        with suppress(ConnectionError):
            for piece in pieces:
                connection.sendall(piece)
        found = b""
        with suppress(ConnectionError):
            while piece := connection.recv(65_536):
                found += piece
        return found


def peak_memory(service):
    """The largest resident set so far, in MiB."""
    status = Path(f"/proc/{service.pid}/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) / 1024


def test_a_path_and_headers_beyond_64_kib_get_431(tmp_path):
    with local(tmp_path) as service:
        health = b"GET /v1/health?%b HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n%b\r\n"
        many = b"".join(b"x-%d: %b\r\n" % (number, b"v" * 1000) for number in range(KIB_64 // 1000 + 1))
        assert answered(service, health % (b"q" * 50_000, b"")).startswith(b"HTTP/1.1 200 ")
        assert answered(service, health % (b"", b"x: %b\r\n" % (b"v" * 65_000))).startswith(b"HTTP/1.1 200 ")
        for path, headers in ((b"q" * KIB_64, b""), (b"", b"x: %b\r\n" % (b"v" * KIB_64)), (b"", many)):
            whole = health % (path, headers)
            for pieces in ([whole], [whole[start : start + 1000] for start in range(0, len(whole), 1000)]):
                head, _, body = answered(service, *pieces).partition(b"\r\n\r\n")
                assert head.startswith(b"HTTP/1.1 431 "), head
                assert json.loads(body)["code"] == "headers_too_large"


@pytest.mark.parametrize(
    "start",
    [b"GET /v1/health?", b"GET /v1/health HTTP/1.1\r\nx: ", CHUNKED + b"0\r\nx: "],
    ids=["path", "header", "trailer"],
)
def test_headers_of_100_megabytes_take_little_memory(tmp_path, start):
    with local(tmp_path) as service:
        assert answered(service, b"GET /v1/health HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n")
        before = peak_memory(service)
        with ThreadPoolExecutor(4) as threads:
            pieces = [start, *[b"v" * 10**6] * 100]
            found = list(threads.map(lambda _: answered(service, *pieces), range(4)))
        assert not any(b"HTTP/1.1 200 " in one for one in found)
        assert peak_memory(service) - before < 16


def test_a_body_in_many_small_chunks_is_no_header(tmp_path):
    body = json.dumps({"id": "s", "prototypes": ROWS.tolist()}).encode() + b" " * KIB_64
    chunks = b"".join(b"1\r\n%c\r\n" % byte for byte in body)
    with local(tmp_path) as service:
        head = b"POST /v1/streams HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n"
        head += b"Content-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"
        assert answered(service, head, chunks, b"0\r\n\r\n").startswith(b"HTTP/1.1 201 ")

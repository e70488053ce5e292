"""A real service under load before a real Prometheus: panels that have data, alerts that fire, traces and logs."""

import json
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from conftest import random_stream
from ports import free_port
from prometheus_server import Prometheus, promtool
from script_modules import load_file
from service.postgres import PostgresServer
from service.rig import Service

ROOT = Path(__file__).parent.parent
SECONDS = 60
CLASSES = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]
BYTES = {"content-type": "application/octet-stream"}
CALLER = f"00-{0xABC:032x}-{0xDEF:016x}-01"


def drawing():
    """The script that draws the dashboard, as a module."""
    return load_file(ROOT / "scripts" / "dashboard_picture.py")


class Load:
    """Streams of features of both methods, and a camera; a context manager while which requests flow."""

    def __init__(self, url, images):
        self._url, self._images = url, images
        self._rows, self._features, _ = random_stream(samples=3000, seed=5)
        self._over = threading.Event()
        self._workers = ThreadPoolExecutor(4)

    def __enter__(self):
        with self._client() as client:
            for number in range(8):
                body = {
                    "id": f"s{number}",
                    "prototypes": self._rows.tolist(),
                    "method": ("streamdcs", "protodcs")[number % 2],
                }
                assert client.post("/v1/streams", json=body).status_code == 201
            assert client.post("/v1/streams", json={"id": "camera", "classes": CLASSES}).status_code == 201
        self._work = [self._workers.submit(self._send, number) for number in range(3)]
        self._work.append(self._workers.submit(self._film))
        return self

    def __exit__(self, *_):
        self._over.set()
        self._workers.shutdown()
        for work in self._work:
            work.result()

    def _client(self):
        return httpx.Client(base_url=self._url, timeout=60)

    def _send(self, worker):
        with self._client() as client:
            sent = 0
            while not self._over.is_set():
                body = self._features[sent % 3000].tobytes()
                client.post(f"/v1/streams/s{(3 * sent + worker) % 8}/observe", content=body, headers=BYTES)
                sent += 1

    def _film(self):
        with self._client() as client:
            for shown in range(10**9):
                if self._over.wait(0.05):
                    return
                image = self._images[shown % len(self._images)]
                client.post("/v1/streams/camera/observe", content=image, headers={"content-type": "image/png"})


@pytest.fixture
def images(png_files):
    """Real images as PNG files, and one that is none."""
    return [b"GIF89a", *png_files(24)]


def until(condition, seconds):
    """Wait for something that must come true."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not come true"
        time.sleep(0.5)


@pytest.mark.long
def test_prometheus_sees_a_service_under_load_and_alerts_when_it_is_struck(tmp_path, images, monkeypatch):
    spans_of = tmp_path / "traces"
    spans_of.mkdir()
    monkeypatch.setenv("PROTODCS_TRACES", str(spans_of))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT / "src"), str(ROOT / "tests")]))
    port, picture = free_port(), drawing()
    file = Path(os.environ.get("PROTODCS_PICTURE", tmp_path / "dashboard.png"))
    with PostgresServer() as postgres:
        service = Service(
            tmp_path,
            store=postgres.url,
            encoder="mini",
            metrics_port=port,
            lease_seconds=3,
            store_connect_timeout=2,
            tracing="tracing_to_file:start",
        )
        with service, Prometheus(tmp_path, port) as prometheus:
            assert httpx.get(f"{service.base_url}/v1/ready").json() == {"ready": True}
            with Load(service.base_url, images):
                time.sleep(SECONDS)
                one_request_is_traced(service, images[1], spans_of, tmp_path / "serve.log")
                every_panel_has_data(prometheus, picture)
                promtool("check", "metrics", text=httpx.get(f"http://127.0.0.1:{port}/metrics").text)
                assert not prometheus.firing()
                assert picture.draw(prometheus.url, file, SECONDS / 60 + 0.5) == []
            service.kill()
            service.start()
            until(lambda: "ProtodcsRestarts" in prometheus.firing(), 300)
            postgres.pause()
            until(lambda: {"ProtodcsStoreLag", "ProtodcsNotReady"} <= prometheus.firing(), 300)
            refused = httpx.get(f"{service.base_url}/v1/ready", timeout=300)
            assert refused.status_code == 503
            assert "store" in refused.text
            postgres.resume()
            until(lambda: httpx.get(f"{service.base_url}/v1/ready", timeout=300).status_code == 200, 300)


def every_panel_has_data(prometheus, picture):
    """Each question of the dashboard has an answer while requests flow."""
    for panel in picture.panels():
        for question in panel.get("targets", []):
            assert prometheus.ask(picture.asked(question["expr"])), (panel["title"], question["expr"])


def one_request_is_traced(service, image, spans_of, log):
    """A request with an id and a trace of its caller is found in the spans and in the log."""
    name = f"caller-{os.getpid()}-{time.time_ns()}"
    headers = {"content-type": "image/png", "traceparent": CALLER, "x-request-id": name}
    with httpx.Client(base_url=service.base_url, timeout=60) as client:
        assert client.post("/v1/streams/camera/observe", content=image, headers=headers).status_code == 200
        lost = client.post("/v1/streams/nobody/observe", content=b"\0" * 4, headers={**BYTES, "x-request-id": name})
        assert lost.status_code == 422
    time.sleep(1)
    spans = [json.loads(line) for file in spans_of.iterdir() for line in file.read_text().splitlines()]
    found = {span["name"] for span in spans if int(span["context"]["trace_id"], 16) == 0xABC}
    assert found >= {"POST /v1/streams/{stream}/observe", "encode", "route", "step", "commit"}
    (told,) = (json.loads(line) for line in log.read_text().splitlines() if name in line)
    assert (told["level"], told["code"], told["request_id"]) == ("warning", 422, name)

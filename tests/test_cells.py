"""Cells: two databases with a process each, and a front. A dead cell stops its own streams and no other."""

import json
import subprocess
import sys
import time
from base64 import b64encode
from collections import Counter
from contextlib import contextmanager

import httpx
import numpy as np
import pytest
import yaml

from ports import free_port
from protodcs import Client, StreamDCS
from protodcs.errors import ServiceError
from protodcs.serve.cluster.cells import cell_of
from service.postgres import PostgresServer
from service.rig import Service
from test_durable_streams import FEATURES, PROTOTYPES

NAMES = [f"camera-{number}" for number in range(12)]


def test_cells_get_equal_shares_and_a_new_one_takes_streams_from_all():
    ids = [f"camera-{number}" for number in range(30_000)]
    three = {id_: cell_of(id_, ["a", "b", "c"]) for id_ in ids}
    assert all(abs(count - 10_000) < 400 for count in Counter(three.values()).values())
    four = {id_: cell_of(id_, ["d", "c", "b", "a"]) for id_ in ids}
    moved = [id_ for id_ in ids if three[id_] != four[id_]]
    assert {four[id_] for id_ in moved} == {"d"}
    assert abs(len(moved) - 7500) < 400
    # It never changes: stored streams would be lost.
    assert [cell_of(id_, ["a", "b"]) for id_ in NAMES] == [
        "b", "b", "b", "b", "a", "b", "b", "b", "a", "a", "a", "a"
    ]  # fmt: skip


@contextmanager
def front_of(folder, cells):
    """Run `protodcs serve --cells`, and yield its URL."""
    file = folder / "cells.yaml"
    file.write_text(yaml.safe_dump({"port": free_port(), "cells": cells}))
    command = [sys.executable, "-W", "ignore", "-m", "protodcs", "serve", "--cells", str(file), "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield json.loads(process.stdout.readline())["serving"]
        finally:
            process.terminate()
            assert process.wait(300) == 0


@pytest.fixture(scope="module")
def rig(tmp_path_factory):
    """Yield the URL of the front, and the databases and processes of the cells."""
    folder = tmp_path_factory.mktemp("cells")
    with PostgresServer() as one, PostgresServer() as two:
        services = {}
        for cell, server in (("a", one), ("b", two)):
            (folder / cell).mkdir()
            # Requests to a cell without its database wait for as long as they may.
            services[cell] = Service(folder / cell, store=server.url, lease_seconds=3.0, request_seconds=6.0)
        # A process of the first cell cannot be reached, so requests go to the other one.
        cells = {
            "a": [f"http://127.0.0.1:{free_port()}", services["a"].base_url],
            "b": [f"{services['b'].base_url}/"],
        }
        with services["a"], services["b"], front_of(folder, cells) as url:
            yield url, {"a": one, "b": two}, services


@pytest.fixture
def client(rig):
    with Client(rig[0]) as client:
        for name in client.streams():
            client.stream(name).delete()
        yield client


def ids_of(client, **options):
    """Return all ids, by pages of five."""
    found, cursor = [], None
    while True:
        page = client.list_streams(limit=5, cursor=cursor, **options)
        found += [stream["id"] for stream in page["streams"]]
        assert len(page["streams"]) <= 5
        cursor = page["next_cursor"]
        if cursor is None:
            return found


def test_streams_behind_the_front_are_those_of_a_bare_engine_and_in_their_cell(rig, client):
    url, servers, services = rig
    bare = StreamDCS(PROTOTYPES).observe_many(FEATURES[:40])
    for name in NAMES:
        stream = client.create(name, prototypes=PROTOTYPES)
        seen = stream.observe(FEATURES[:40])
        assert [one.decision.index for one in seen] == [one.index for one in bare]
    for cell, server in servers.items():
        stored = {bytes(name).decode() for (name,) in server.sql("SELECT id FROM streams")}
        assert stored == {name for name in NAMES if cell_of(name, servers) == cell}
    with Client(services["a"].base_url) as direct:
        assert set(direct.streams()) == {name for name in NAMES if cell_of(name, servers) == "a"}
    # Pages in every order hold each stream once.
    assert ids_of(client) == sorted(NAMES)
    assert ids_of(client, sort="created") == NAMES
    assert ids_of(client, sort="-created") == NAMES[::-1]
    client.stream("camera-3").freeze()
    assert ids_of(client, frozen=True) == ["camera-3"]
    assert len(list(client.stream("camera-3").log())) == 40
    # A body that is sent in pieces, and a reply that comes in pieces.
    lines = b"".join(
        json.dumps({"feature": b64encode(row.astype("<f4")).decode()}).encode() + b"\n" for row in FEATURES[:30]
    )
    with httpx.stream(
        "POST",
        f"{url}/v1/streams/camera-4/observe:stream",
        content=iter([lines[:1000], lines[1000:]]),
        headers={"content-type": "application/x-ndjson"},
    ) as response:
        assert response.status_code == 200, response.read()
        assert len(list(response.iter_lines())) >= 30
    # Whoever leaves an endless reply ends it in the cell, too.
    for _ in range(3):
        with httpx.stream("GET", f"{url}/v1/streams/camera-4/events") as response:
            assert response.status_code == 200
    assert client.stream("camera-4").status()["position"] == 70


def test_requests_about_no_single_stream_follow_their_rule(rig, client):
    url, servers, _ = rig
    rows = PROTOTYPES.tolist()
    body = {
        "streams": [{"id": name, "prototypes": rows} for name in NAMES]
        + [{"id": "bad", "prototypes": [[0.0] * len(rows[0])] * 10}]
    }
    results = httpx.post(f"{url}/v1/streams:batch", json=body, timeout=60).json()["results"]
    assert [(one["id"], one["status"]) for one in results[:-1]] == [(name, 201) for name in NAMES]
    assert results[-1]["status"] == 422
    assert set(client.streams()) == set(NAMES)
    for answer, status in (
        (httpx.post(f"{url}/v1/streams", json={"prototypes": rows}), 422),
        (httpx.post(f"{url}/v1/streams", content=b"{", headers={"content-type": "application/json"}), 400),
        (httpx.post(f"{url}/v1/streams:batch", json={"streams": [{}]}), 422),
        (httpx.get(f"{url}/v1/streams?limit=x"), 422),
        (httpx.get(f"{url}/v1/streams?cursor=x"), 422),
        (httpx.get(f"{url}/v1/streams/nobody"), 404),
        (httpx.get(f"{url}/v1/webhooks"), 404),
        (httpx.get(f"{url}/v1/events"), 404),
        (httpx.get(f"{url}/v1/health"), 200),
        (httpx.get(f"{url}/openapi.json"), 200),
    ):
        assert answer.status_code == status, answer.text
    assert "about no single stream" in httpx.get(f"{url}/v1/webhooks").json()["detail"]
    assert httpx.get(f"{url}/v1/ready").json() == {"ready": True, "cells": {"a": True, "b": True}}
    from protodcs import Vocabulary

    rng = np.random.default_rng(0)
    vocabulary = Vocabulary(rng.normal(size=(300, PROTOTYPES.shape[1])).astype(np.float32))
    fingerprint = client.upload_vocabulary(vocabulary)
    assert httpx.get(f"{url}/v1/vocabularies/{fingerprint}").status_code == 200
    for cell, server in servers.items():
        assert server.sql("SELECT count(*) FROM blobs WHERE length(data) > 300 * 4")[0][0] >= 1, cell


def test_a_dead_cell_stops_its_own_streams_and_no_other(rig, client):
    url, servers, _ = rig
    for name in NAMES:
        client.create(name, prototypes=PROTOTYPES).observe(FEATURES[:5])
    dead = [name for name in NAMES if cell_of(name, servers) == "b"]
    living = [name for name in NAMES if name not in dead]
    assert dead
    assert living
    body = {"features": [FEATURES[0].tolist()]}
    servers["b"].kill()
    try:
        # One is enough: the cell waits for its database before it gives up.
        for name in dead[:1]:
            answer = httpx.post(f"{url}/v1/streams/{name}/observe", json=body, timeout=60)
            assert answer.status_code == 503, answer.text
            assert "retry-after" in answer.headers
        for name in living:
            assert len(client.stream(name).observe(FEATURES[5:15])) == 10
        with Client(url, give_up=1.0) as impatient, pytest.raises(ServiceError):
            impatient.streams()
        assert httpx.get(f"{url}/v1/ready", timeout=60).status_code == 200
        new = httpx.post(
            f"{url}/v1/streams:batch",
            json={"streams": [{"id": f"new-{number}", "prototypes": PROTOTYPES.tolist()} for number in range(8)]},
            timeout=60,
        )
        states = {one["id"]: one["status"] for one in new.json()["results"]}
        assert states == {id_: 201 if cell_of(id_, servers) == "a" else 503 for id_ in states}
        assert set(states.values()) == {201, 503}
    finally:
        servers["b"].start()
    end = time.monotonic() + 120
    while httpx.get(f"{url}/v1/ready", timeout=60).json()["cells"] != {"a": True, "b": True}:
        assert time.monotonic() < end
        time.sleep(0.1)
    for name in dead:
        assert [one.position for one in client.stream(name).observe(FEATURES[5:15])] == list(range(5, 15))
    assert len(client.streams()) >= len(NAMES)


def test_a_cell_without_a_process_answers_503_at_once(tmp_path):
    with front_of(tmp_path, {"a": [f"http://127.0.0.1:{free_port()}"]}) as url:
        answer = httpx.get(f"{url}/v1/streams/s")
        assert answer.status_code == 503
        assert "cell 'a'" in answer.json()["detail"]
        assert httpx.get(f"{url}/v1/ready").status_code == 503
        assert httpx.get(f"{url}/v1/streams").status_code == 503

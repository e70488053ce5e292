"""The service in one process as a user starts it: one command, an encoder, images over HTTP."""

import asyncio
import json
import shutil
import ssl
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial

import httpx
import numpy as np
import pytest

from conftest import random_stream
from protodcs import OpenSetClassifier
from protodcs.serve.access.keys import create_key, revoke_key, rotate_key
from service.attack_run import Attackers, Honest, attack_service, prepare
from service.hostile import Hostile
from service.rig import Service

CLASSES = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]


@pytest.fixture
def images(png_files):
    """Real images as PNG files."""
    return png_files(24)


BODY_SECONDS = 5.0
ATTACKS, SEED = 80, 21


def test_images_are_decided_as_in_this_process_and_survive_attacks_a_stop_and_a_flood(tmp_path, images, data_folder):
    file = tmp_path / "keys.json"
    mine, other = ({"authorization": f"Bearer {create_key(file, name, 'admin')[1]}"} for name in ("mine", "other"))
    limits = {"keys": str(file), "tenants": {"other": {"rate": 1.0, "burst": 5}}, "body_seconds": BODY_SECONDS}
    store = f"sqlite:{tmp_path / 'streams'}"
    service = Service(tmp_path, store=store, encoder="mini", log_level="warning", **limits)
    classifier = OpenSetClassifier.from_pretrained("mini", CLASSES)
    with service, httpx.Client(base_url=service.base_url, headers=mine, timeout=60) as client:
        created = client.post("/v1/streams", json={"id": "camera 7", "classes": CLASSES})
        assert created.status_code == 201, created.text
        assert created.json()["encoder"] == classifier.encoder.fingerprint
        told = [observed(client, image) for image in images[:12]]
        broken = client.post("/v1/streams/camera 7/observe", content=b"GIF89a", headers={"content-type": "image/gif"})
        assert broken.status_code == 422, broken.text
        assert client.get("/v1/streams/camera 7").json()["sequence"] == 12
        check_errors(client)
        assert not faults_of_attacks(service, data_folder, mine)
    with service, httpx.Client(base_url=service.base_url, headers=mine, timeout=60) as client:
        with ThreadPoolExecutor(1) as beside:
            flood = beside.submit(asyncio.run, flooded(service.base_url, other))
            told += [observed(client, image) for image in images[12:]]
            answers = flood.result()
        assert client.post("/v1/streams", json={"id": "camera 8", "like": "camera 7"}).status_code == 201
        assert {"camera 7", "camera 8"} <= {stream["id"] for stream in client.get("/v1/streams").json()["streams"]}
    refused = [answer for answer in answers if answer.status_code == 429]
    assert len(refused) >= 0.8 * len(answers)
    assert all(int(answer.headers["retry-after"]) >= 1 for answer in refused)
    for place, (image, decision) in enumerate(zip(images, told, strict=True)):
        expected = classifier(image)
        assert decision["position"] == decision["sequence"] == place
        assert (decision["known"], decision["index"], decision["label"]) == (
            expected.known,
            expected.index,
            expected.label,
        )
        assert np.isclose(decision["openness"], expected.openness, atol=1e-5)


def check_errors(client):
    """Errors of the encoder arrive with their own message and status."""
    unknown = client.post("/v1/streams", json={"id": "new", "classes": ["a class that nobody knows"]})
    assert unknown.status_code == 422, unknown.text
    detail = unknown.json()["detail"]
    assert "a class that nobody knows" in detail
    assert len(detail) < 1000
    assert not [part for part in ("Traceback", ".py") if part in detail], detail


def faults_of_attacks(service, data_folder, headers):
    """What goes wrong while the service is attacked; there are many more attacks in test_hostile.py."""
    rows, features, _ = random_stream(samples=1000, seed=11)
    prepare(service.base_url, rows, headers)
    keys = tuple(f"{name}: {value}".encode() for name, value in headers.items())
    attackers = Attackers(partial(Hostile, SEED, data_folder, rows, features, BODY_SECONDS, keys), ATTACKS)
    honest = Honest(rows, features, 2, headers)
    report = asyncio.run(attack_service(service.base_url, service.pid, attackers, honest))
    print(report)
    assert len(report.outcomes) == ATTACKS
    return report.faults


async def flooded(address, headers, connections=20, each=8):
    """The answers to a tenant that asks again at once, over many connections."""

    async def ask(client):
        return [await client.get("/v1/streams/none") for _ in range(each)]

    async with httpx.AsyncClient(base_url=address, headers=headers, timeout=60) as client:
        return [answer for told in await asyncio.gather(*(ask(client) for _ in range(connections))) for answer in told]


def observed(client, image):
    """The decision on one image."""
    answer = client.post("/v1/streams/camera 7/observe", content=image, headers={"content-type": "image/png"})
    assert answer.status_code == 200, answer.text
    (decision,) = answer.json()["decisions"]
    return decision


@pytest.fixture
def certificate(tmp_path):
    """A certificate of this machine, and its key."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl, which makes the certificate, is not installed")
    files = tmp_path / "server.pem", tmp_path / "server.key"
    made = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1", "-subj", "/CN=test"]
    named = ["-addext", "subjectAltName=IP:127.0.0.1", "-out", str(files[0]), "-keyout", str(files[1])]
    subprocess.run([*made, *named], check=True, capture_output=True)
    return files


def test_keys_tls_limits_and_audit_hold_over_real_connections(tmp_path, certificate):
    file, audit = tmp_path / "keys.json", tmp_path / "audit.jsonl"
    old, old_key = create_key(file, "acme", "admin")
    rival_key = create_key(file, "rival", "admin")[1]
    service = Service(
        tmp_path,
        store=f"sqlite:{tmp_path / 'streams'}",
        keys=str(file),
        audit=str(audit),
        tls_certificate=str(certificate[0]),
        tls_key=str(certificate[1]),
        body_bytes=10_000,
        body_seconds=1.0,
        tenants={"rival": {"rate": 0.01, "burst": 1}},
    )
    trusted = ssl.create_default_context(cafile=certificate[0])
    address = service.base_url.replace("http:", "https:")

    def of(key):
        return {"authorization": f"Bearer {key}"}

    with service, httpx.Client(base_url=address, timeout=60, verify=trusted) as client:
        with pytest.raises(httpx.HTTPError):
            httpx.get(f"{service.base_url}/v1/health")
        assert client.get("/v1/health").status_code == 200
        assert client.get("/v1/streams").status_code == 401
        new = {"id": "s", "prototypes": np.eye(5, 32).tolist()}
        made = client.post("/v1/streams", json=new, headers=of(old_key))
        assert made.status_code == 201, made.text
        named = client.get("/v1/streams", headers={**of(old_key), "x-request-id": "mine"})
        assert named.headers.get_list("x-request-id") == ["mine"]
        assert [stream["id"] for stream in named.json()["streams"]] == ["s"]
        for path in ("/v1/streams/s", "/v1/streams/..%2Facme%2Fs", "/v1/streams/acme%2Fs"):
            assert client.get(path, headers=of(rival_key)).status_code == 404
        limited = client.get("/v1/streams", headers=of(rival_key))
        assert limited.status_code == 429
        assert 0 < int(limited.headers["retry-after"]) <= 100
        sent = {"headers": of(old_key), "url": "/v1/streams/s/observe"}
        assert client.post(content=bytes(10_001), **sent).status_code == 413
        assert client.post(content=slowly(2.0), **sent).status_code == 408
        new_key = rotate_key(file, old.id, timedelta(0))[1]
        revoke_key(file, old.id)
        time.sleep(1.5)
        assert client.get("/v1/streams", headers=of(old_key)).status_code == 401
        assert client.get("/v1/streams", headers=of(new_key)).status_code == 200
    lines = [json.loads(line) for line in audit.read_text().splitlines()]
    assert [(line["action"], line["outcome"]) for line in lines] == [
        ("list", "denied"),
        ("create", "done"),
        ("list", "denied"),
    ]


def slowly(seconds):
    """A body that makes a pause."""
    yield bytes(64)
    time.sleep(seconds)
    yield bytes(64)

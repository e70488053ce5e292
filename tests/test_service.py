"""The service as a user starts it: one command, an encoder, files, images over HTTP."""

import io

import httpx
import numpy as np
import pytest
from PIL import Image

from protodcs import OpenSetClassifier
from protodcs.data import open_source
from service.rig import Service

CLASSES = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]


@pytest.fixture
def images(data_folder):
    """Real images as PNG files."""
    files = []
    for pixels in open_source("cifar10-test").read(range(24)):
        file = io.BytesIO()
        Image.fromarray(pixels).save(file, "PNG")
        files.append(file.getvalue())
    return files


def test_images_are_decided_as_in_this_process_and_survive_a_stop(tmp_path, images):
    service = Service(tmp_path, store=f"files:{tmp_path / 'streams'}", encoder="mini")
    classifier = OpenSetClassifier.from_pretrained("mini", CLASSES)
    with service, httpx.Client(base_url=service.base_url, timeout=60) as client:
        created = client.post("/v1/streams", json={"id": "camera 7", "classes": CLASSES})
        assert created.status_code == 201, created.text
        assert created.json()["encoder"] == classifier.encoder.fingerprint
        told = [observed(client, image) for image in images[:12]]
        broken = client.post("/v1/streams/camera 7/observe", content=b"GIF89a", headers={"content-type": "image/gif"})
        assert broken.status_code == 422, broken.text
        assert client.get("/v1/streams/camera 7").json()["sequence"] == 12
    with service, httpx.Client(base_url=service.base_url, timeout=60) as client:
        told += [observed(client, image) for image in images[12:]]
        assert client.post("/v1/streams", json={"id": "camera 8", "like": "camera 7"}).status_code == 201
        assert sorted(client.get("/v1/streams").json()["streams"]) == ["camera 7", "camera 8"]
    for place, (image, decision) in enumerate(zip(images, told, strict=True)):
        expected = classifier(image)
        assert decision["position"] == decision["sequence"] == place
        assert (decision["known"], decision["index"], decision["label"]) == (
            expected.known,
            expected.index,
            expected.label,
        )
        assert np.isclose(decision["openness"], expected.openness, atol=1e-5)


def observed(client, image):
    """The decision on one image."""
    answer = client.post("/v1/streams/camera 7/observe", content=image, headers={"content-type": "image/png"})
    assert answer.status_code == 200, answer.text
    (decision,) = answer.json()["decisions"]
    return decision

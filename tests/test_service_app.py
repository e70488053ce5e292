"""The service over HTTP, with workers in the same process: every route, and every error in words."""

import asyncio
import base64
import json
import math
import re
from contextlib import asynccontextmanager
from datetime import datetime
from urllib.parse import quote

import httpx
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

import made_service
from made_service import FEATURES, PROTOTYPES, ROWS, SHARED, engine_of, feature, learned
from memory_store import MemoryStore, stored_ids
from protodcs import StreamDCS
from protodcs.errors import ImageError
from protodcs.serve.access.problems import TYPES
from protodcs.serve.api.app import application
from protodcs.serve.api.streams import listing
from protodcs.serve.api.streams.schemas import NewStream
from protodcs.serve.messages import Reply, ReplyStatus, WorkerLostError
from protodcs.serve.pipeline.queues import Queues
from protodcs.serve.stream.answers import pack_decision, unpack_decision
from protodcs.serve.telemetry.metrics import IngressMetrics
from protodcs.serve.workers.webhooks import Webhooks
from protodcs.serve.workers.worker import Worker

pytestmark = pytest.mark.usefixtures("virtual_time")

BYTES = {"content-type": "application/octet-stream"}
AS_JSON = {"content-type": "application/json"}
PNG = {"content-type": "image/png"}
STOPPED = Reply(ReplyStatus.CLOSED, "the service is being stopped")
NEW = {"id": "s", "prototypes": ROWS.tolist()}
FIELDS = {"outcome", "known", "index", "label", "p_unknown", "openness", "openness_first", "score", "aleatoric",
          "epistemic", "trusted", "cached", "evolved", "sequence", "reason", "unsure", "position", "epoch",
          "repeated"}  # fmt: skip


class FakeEncoding:
    """Images are numbers of samples; a pause may stand before the number."""

    calls = 1

    async def encode(self, image):
        try:
            pause, number = map(float, image.split())
        except ValueError:
            raise ImageError("this is not an image") from None
        await asyncio.sleep(pause)
        return feature(int(number))

    async def prototypes(self, classes):
        assert len(classes) == len(ROWS)
        return PROTOTYPES.fingerprint, SHARED

    async def vocabulary(self, classes):
        return None

    async def facts(self):
        return {"name": "fake", "fingerprint": "fake-encoder", "temperature": 0.02, "dimension": ROWS.shape[1]}


class Service:
    """An application over one worker, and the client that speaks to it; also what it asks of its cluster."""

    def __init__(self, encoding=None, **changes):
        config = made_service.settings(**{"request_seconds": 60, **changes})
        self.store = MemoryStore()
        self.worker = Worker("worker-0", self.store, config)
        self.problem = None
        self.queues = Queues(self.worker.pipeline.begin, config, IngressMetrics(config.max_queued_requests))
        self.webhooks = Webhooks(self.store, config)
        self.api = application(config, self.queues, self, self.worker, encoding, self.webhooks)
        transport = httpx.ASGITransport(self.api)
        self.client = httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1")

    async def workers(self):
        if self.problem is not None:
            raise self.problem
        return ["worker-0"]

    async def facts(self):
        if self.problem is not None:
            raise self.problem
        return [self.worker.facts()]

    async def all_facts(self):
        return await self.facts()

    async def streams(self):
        """The ids of all streams."""
        return await stored_ids(self.store)

    async def post(self, path, content=None, headers=None, **more):
        return await self.client.post(f"/v1/streams/{path}", content=content, headers=headers, **more)

    async def observe(self, content, headers=None, path="s/observe", key=None, **more):
        named = {} if key is None else {"idempotency-key": key}
        return await self.post(path, content, {**(BYTES if headers is None else headers), **named}, **more)

    async def create(self, **changes):
        return await self.client.post("/v1/streams", json={**NEW, **changes})


async def status_of(api, path, server=("127.0.0.1", 80)):
    """Return the status of a GET whose scope no HTTP client could make."""
    sent = []
    scope = {
        "type": "http", "method": "GET", "path": path, "query_string": b"", "headers": [], "scheme": "http",
        "server": server,
    }  # fmt: skip

    async def receive():
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message):
        sent.append(message)

    await api(scope, receive, send)
    return sent[0]["status"]


@asynccontextmanager
async def served(encoding=None, **changes):
    """A service with a stream "s"."""
    service = Service(encoding, **changes)
    await service.worker.start()
    try:
        assert (await service.create()).status_code == 201
        yield service
    finally:
        await service.client.aclose()
        await service.worker.close()


def words_of(response, status):
    """The words of an error, which is JSON like all of them."""
    assert response.status_code == status, response.text
    assert ("retry-after" in response.headers) == (status in (429, 503))
    said = response.json()
    assert response.headers["content-type"] == "application/problem+json"
    required = {"type", "title", "status", "detail", "code", "instance"}
    assert required <= set(said) <= required | {"errors"}
    assert TYPES[said["code"]] == (said["status"], said["title"])
    assert said["type"] == f"urn:protodcs:problem:{said['code']}"
    assert said["instance"] == f"urn:protodcs:request:{response.headers['x-request-id']}"
    assert said["status"] == status
    assert said["detail"]
    return said["detail"]


def ids_of(response):
    """The ids of a list of streams."""
    assert response.status_code == 200, response.text
    return [stream["id"] for stream in response.json()["streams"]]


def decisions_of(response):
    assert response.status_code == 200, response.text
    return response.json()["decisions"]


# What is asked for.


async def test_observe_and_peek_answer_as_the_engine_alone():
    engine = StreamDCS(PROTOTYPES)
    async with served() as service:
        for number in range(20):
            (peeked,) = decisions_of(await service.observe(feature(number), path="s/peek"))
            expected = unpack_decision(pack_decision(engine.peek(FEATURES[number]))).to_dict()
            assert peeked == {**without_scores(expected), "position": -1, "epoch": -1, "repeated": False}
            (said,) = decisions_of(await service.observe(feature(number)))
            expected = engine.observe(FEATURES[number]).to_dict()
            assert said == {**without_scores(expected), "position": number, "epoch": 1, "repeated": False}
            assert set(said) == FIELDS


def without_scores(said):
    return {name: value for name, value in said.items() if name != "scores"}


async def test_features_come_as_bytes_as_json_one_or_several():
    async with served() as service:
        rows = FEATURES[:9].astype("<f4")
        assert len(decisions_of(await service.observe(rows[0].tobytes(), {}))) == 1
        several = decisions_of(await service.observe(rows[1:4].tobytes(), params={"count": 3}))
        assert [said["position"] for said in several] == [1, 2, 3]
        listed = await service.post("s/observe", json={"features": rows[4:8].astype(float).tolist()})
        assert [said["position"] for said in decisions_of(listed)] == [4, 5, 6, 7]
        named = {"content-type": "Application/Octet-Stream; version=1"}
        decisions_of(await service.observe(rows[8].tobytes(), named))
        assert engine_of(service.worker) == learned(9)


@pytest.mark.parametrize("count", [1, 300])
async def test_features_have_the_same_decisions_in_every_form(count):
    # Numbers that float16 has, so that no form rounds them.
    rows = FEATURES[np.arange(count) % len(FEATURES)].astype("<f2")
    wide = rows.astype("<f4")
    encoded = [base64.b64encode(row.tobytes()).decode() for row in wide]
    forms = [
        ("application/octet-stream", wide.tobytes()),
        ("application/x-float32", wide.tobytes()),
        ("application/x-float16", rows.tobytes()),
        ("application/json", json.dumps({"features": wide.tolist()}).encode()),
        ("application/json", json.dumps({"features": encoded}).encode()),
    ]
    found = []
    for kind, body in forms:
        async with served() as service:
            answer = await service.observe(body, {"content-type": kind}, key="k", params={"count": count})
            found.append(decisions_of(answer))
            # The key names the features, in whatever form they come.
            again = await service.observe(wide.tobytes(), key="k", params={"count": count})
            assert decisions_of(again) == [{**said, "repeated": True} for said in found[-1]]
    assert len(found[0]) == count
    assert all(said == found[0] for said in found)


async def test_images_are_observed_in_order_of_arrival_and_a_bad_one_holds_nobody_up():
    async with served(FakeEncoding()) as service:
        images = [b"0.05 0", b"0 1", b"not an image", b"0.02 2", b"0 3"]
        asked = []
        for image in images:
            asked.append(asyncio.create_task(service.observe(image, PNG)))
            await asyncio.sleep(0.002)
        answers = await asyncio.gather(*asked)
        assert "not an image" in words_of(answers.pop(2), 422)
        assert [decisions_of(answer)[0]["position"] for answer in answers] == [0, 1, 2, 3]
        assert engine_of(service.worker) == learned(4)
        assert len(decisions_of(await service.observe(b"0 4", PNG, path="s/peek"))) == 1


async def test_a_key_makes_a_request_safe_to_repeat():
    async with served(FakeEncoding()) as service:
        first = decisions_of(await service.observe(feature(0), key="one"))
        again = decisions_of(await service.observe(feature(0), key="one"))
        assert again == [{**first[0], "repeated": True}]
        body = FEATURES[1:4].astype("<f4").tobytes()
        first = decisions_of(await service.observe(body, key="many", params={"count": 3}))
        again = decisions_of(await service.observe(body, key="many", params={"count": 3}))
        assert again == [{**said, "repeated": True} for said in first]
        first = decisions_of(await service.observe(b"0 4", PNG, key="image"))
        assert decisions_of(await service.observe(b"0 4", PNG, key="image")) == [{**first[0], "repeated": True}]
        assert engine_of(service.worker) == learned(5)
        assert "'one' was used for a request with other content" in words_of(
            await service.observe(feature(9), key="one"), 409
        )
        headers = {"idempotency-key": "freeze"}
        told = [(await service.post("s/freeze", headers=headers)).json() for _ in range(2)]
        assert told == [{"position": 5, "epoch": 1, "repeated": repeated} for repeated in (False, True)]


async def test_the_life_of_a_stream():
    async with served() as service:
        client = service.client
        for number in range(5):
            await service.observe(feature(number))
        kept = await service.post("s/snapshots", json={"name": "five"})
        assert (kept.status_code, kept.json()) == (201, {"position": 5, "epoch": 1, "repeated": False})
        assert (await client.get("/v1/streams/s/snapshots")).json() == {"snapshots": ["five"]}
        for action in ("freeze", "unfreeze"):
            assert (await service.post(f"s/{action}")).status_code == 200
            status = (await client.get("/v1/streams/s")).json()
            assert status["frozen"] == (action == "freeze")
        assert (status["sequence"], status["position"], status["worker"]) == (5, 8, "worker-0")
        assert (await service.post("s/reset")).status_code == 200
        assert engine_of(service.worker) == learned(0)
        back = await service.post("s/rollback", json={"name": "five"})
        assert (back.status_code, back.json()["position"]) == (200, 9)
        assert engine_of(service.worker) == learned(5)
        assert ids_of(await client.get("/v1/streams")) == ["s"]
        gone = await client.delete("/v1/streams/s")
        assert (gone.status_code, gone.content) == (204, b"")
        assert "'s'" in words_of(await client.delete("/v1/streams/s"), 404)
        assert ids_of(await client.get("/v1/streams")) == []


async def test_a_stream_is_created_from_prototypes_or_from_class_names():
    async with served(FakeEncoding()) as service:
        again = await service.create()
        assert (again.status_code, again.json()["classes"]) == (200, [str(number) for number in range(7)])
        assert "already exists with different settings" in words_of(await service.create(method="protodcs"), 409)
        assert "already exists with different settings" in words_of(
            await service.create(config={"target_false_reject": 0.1}), 409
        )
        named = await service.create(id="named", classes=list("abcdefg"), config={"target_false_reject": 0.1})
        assert named.json()["classes"] == list("abcdefg")
        assert named.json()["config"]["target_false_reject"] == 0.1
        assert named.json()["encoder"] is None
        encoded = await service.client.post("/v1/streams", json={"id": "encoded", "classes": list("abcdefg")})
        assert encoded.status_code == 201
        assert encoded.json()["encoder"] == "fake-encoder"
        assert encoded.json()["config"]["temperature"] == 0.02
        decisions_of(await service.observe(b"0 0", PNG, path="encoded/observe"))


async def test_a_stream_is_guarded_as_the_service_is_set_or_as_it_is_created():
    async with served(guard={"window": 64}) as service:
        assert (await service.create()).json()["guard"]["window"] == 64
        assert (await service.client.get("/v1/streams/s")).json()["guard"]["state"] == "watching"
        other = await service.create(id="other", guard={"duplicate_threshold": 0.9})
        assert (other.json()["guard"]["window"], other.json()["guard"]["duplicate_threshold"]) == (64, 0.9)
        await service.create(id="bold", guard={"enabled": False})
        assert (await service.client.get("/v1/streams/bold")).json()["guard"] == {"state": "off"}
        assert "window" in words_of(await service.create(id="wrong", guard={"window": 1}), 422)


async def test_a_list_of_classes_that_comes_with_the_package_is_known_by_its_name():
    async with served() as service:
        created = await service.create(id="ten", classes="cifar10", prototypes=np.eye(10, 32).tolist())
        assert created.status_code == 201
        assert created.json()["classes"][:2] == ["airplane", "automobile"]


async def test_no_file_that_a_body_names_is_read(tmp_path):
    secret = tmp_path / "secret.txt"
    secret.write_text("\n".join(f"secret-{number}" for number in range(7)))
    async with served(FakeEncoding()) as service:
        for body in ({**NEW, "id": "t"}, {"id": "t"}):
            for name in (str(secret), "/etc/passwd", "../names/cifar10", "nonsense", ""):
                refused = await service.client.post("/v1/streams", json={**body, "classes": name})
                assert "choose one of" in words_of(refused, 422)
                assert "secret-" not in refused.text
        assert (await service.streams()) == ["s"]


async def test_health_and_workers():
    async with served() as service:
        client = service.client
        health = (await client.get("/v1/health")).json()
        assert health["waiting"] == 0
        said = (await client.get("/v1/workers")).json()
        assert (said["names"], [facts["worker"] for facts in said["workers"]]) == (["worker-0"], ["worker-0"])
        service.problem = WorkerLostError("the worker is not there")
        for path in ("/v1/ready", "/v1/workers"):
            assert "the worker" in words_of(await client.get(path), 503)
        assert (await client.get("/v1/health")).status_code == 200


ODD_IDS = ["a b", "\u00e9\u4e2d\U0001f600", "a?b#c", "100%", "%2e", "a%2Fb", "...", "a..b", "-rf", "*", "a:b", "'\"<>&",
           "x" * 200, "observe", "\u202e", " "]  # fmt: skip


@pytest.mark.parametrize("stream", ODD_IDS)
async def test_ids_may_hold_odd_characters(stream):
    async with served() as service:
        created = await service.create(id=stream)
        assert (created.status_code, created.json()["id"]) == (201, stream)
        path = quote(stream, safe="")
        assert decisions_of(await service.observe(feature(0), path=f"{path}/observe"))[0]["position"] == 0
        assert (await service.client.get(f"/v1/streams/{path}")).json()["position"] == 1
        assert ids_of(await service.client.get("/v1/streams")) == sorted(["s", stream], key=str.encode)
        assert (await service.client.delete(f"/v1/streams/{path}")).status_code == 204


@pytest.mark.parametrize("stream", ["", "a/b", "a\\b", "\n", "a\0", "\x7f", "x" * 201, ".", "..", "\ud800", 7, None])
async def test_ids_that_could_not_be_reached_are_refused_in_words(stream):
    async with served() as service:
        body = json.dumps({**NEW, "id": stream})
        refused = words_of(await service.client.post("/v1/streams", content=body, headers=AS_JSON), 422)
        assert refused.startswith("id: ")
        assert await service.streams() == ["s"]


# What goes wrong.


async def test_what_is_not_there_is_404():
    async with served() as service:
        client = service.client
        for response in (
            await service.observe(feature(0), path="nobody/observe"),
            await service.observe(feature(0), path="nobody/peek"),
            await service.post("nobody/freeze"),
            await service.post("nobody/snapshots", json={"name": "x"}),
            await client.get("/v1/streams/nobody"),
            await client.get("/v1/streams/nobody/snapshots"),
        ):
            assert "nobody" in words_of(response, 404)
        assert "'never'" in words_of(await service.post("s/rollback", json={"name": "never"}), 404)
        for path in ("/nonsense", "/v1/streams/s/nonsense", "/v1/streams/a/b/c"):
            words_of(await client.get(path), 404)
        wrong = await client.put("/v1/streams/s")
        words_of(wrong, 405)
        assert set(wrong.headers["allow"].split(", ")) == {"GET", "HEAD", "DELETE"}


async def test_a_snapshot_shows_what_a_roll_back_would_restore():
    async with served() as service:
        for place in range(4):
            await service.post("s/observe", feature(place))
        assert (await service.post("s/snapshots", json={"name": "a/b"})).status_code == 201
        before = (await service.client.get("/v1/streams/s")).json()
        await service.post("s/classes", json={"name": "owl", "prototype": FEATURES[9].tolist()})
        await service.post("s/observe", feature(5))
        path = "/v1/streams/s/snapshots/"
        shown = (await service.client.get(path + quote("a/b", safe=""))).json()
        assert (shown["name"], shown["sequence"], shown["frozen"]) == ("a/b", 4, False)
        assert shown["position"] == 4
        assert shown["classes"] == before["classes"]
        assert (await service.client.get("/v1/streams/s")).json()["sequence"] == 5
        words_of(await service.client.get(path + "none"), 404)
        await service.post("s/rollback", json={"name": "a/b"})
        after = (await service.client.get("/v1/streams/s")).json()
        assert {**after["stats"], "method": "streamdcs"}.items() <= shown["stats"].items()


async def test_too_many_kept_snapshots_are_409():
    async with served(max_snapshots=1) as service:
        assert (await service.post("s/snapshots", json={"name": "a"})).status_code == 201
        assert "Delete one first" in words_of(await service.post("s/snapshots", json={"name": "b"}), 409)


async def test_a_body_that_is_too_long_is_413_on_every_route():
    async def in_parts():
        for _ in range(100):
            yield b" " * 1000

    async with served(FakeEncoding(), body_bytes=10_000) as service:
        long = b"1" * 10_001
        for response in (
            await service.observe(long),
            await service.observe(long, AS_JSON),
            await service.observe(long, PNG),
            await service.observe(in_parts()),
            await service.post("s/snapshots", json={"name": "x" * 10_000}),
            await service.post("s/rollback", json={"name": "x" * 10_000}),
            await service.create(prototypes=np.ones((40, 100)).tolist()),
        ):
            assert "10000 bytes" in words_of(response, 413)
        assert service.queues.waiting == 0
        decisions_of(await service.observe(feature(0)))


@pytest.mark.parametrize("kind", ["text/plain", "multipart/mixed", "application/x-npy", "nonsense", "x" * 5000])
async def test_a_body_of_another_type_is_415(kind):
    async with served() as service:
        refused = words_of(await service.observe(feature(0), {"content-type": kind}), 415)
        assert "Send application/x-float32, application/x-float16, application/json or images" in refused


async def test_an_image_without_an_encoder_is_422():
    async with served() as service:
        assert "no encoder" in words_of(await service.observe(b"0 0", PNG), 422)
        refused = await service.client.post("/v1/streams", json={"id": "t", "classes": ["a", "b"]})
        assert "prototypes" in words_of(refused, 422)
        assert service.queues.waiting == 0


BAD_BYTES = {
    "none": (b"", "1"),
    "one byte short": (feature(0)[:-1], "1"),
    "another width": (feature(0)[:-4], "1"),
    "zero": (bytes(128), "1"),
    "not a number": (np.full(32, np.nan, dtype="<f4").tobytes(), "1"),
    "infinite": (np.full(32, np.inf, dtype="<f4").tobytes(), "1"),
    "one bad of two": (feature(0) + bytes(128), "2"),
    "not divisible": (feature(0), "3"),
    "no count": (feature(0), ""),
    "count zero": (feature(0), "0"),
    "count negative": (feature(0), "-1"),
    "count of words": (feature(0), "one"),
    "count too large": (feature(0), "4097"),
    "count endless": (feature(0), "9" * 5000),
}


@pytest.mark.parametrize("kind", BAD_BYTES)
async def test_bad_bytes_are_422_and_change_nothing(kind):
    content, count = BAD_BYTES[kind]
    async with served() as service:
        words_of(await service.observe(content, params={"count": count}), 422)
        words_of(await service.observe(content, path="s/peek", params={"count": count}), 422)
        assert service.store.content["s"].journal == []


BAD_JSON = [
    b"", b"{", b"null", b"[]", b'"features"', b"7", b"{}", b'{"features": null}', b'{"features": []}',
    b'{"features": [[]]}', b'{"features": [1, 2]}', b'{"features": [[1], [1, 2]]}', b'{"features": [["a"]]}',
    b'{"features": [[NaN]]}', b'{"features": [[1e39]]}', b'{"features": [[1e999]]}', b'{"features": [[null]]}',
    b'{"features": [[{}]]}', b'{"features": {"a": 1}}', b'{"features": "abc"}', b"\xff\xfe", b"[" * 100_000,
    b'{"features": ' + b"[" * 100 + b"]" * 100 + b"}", b'{"features": [[1' + b"0" * 5000 + b"]]}",
    b'{"features": [[1' + b"0" * 400 + b"]]}", b'{"features": [' + b"[1]," * 4096 + b"[1]]}",
    b'{"features": ["AAAA", [1]]}', b'{"features": [[1], "AAAA"]}', b'{"features": ["AAAAAAA="]}',
    b'{"features": ["AACAP", ""]}', b'{"features": ["AADAfw=="]}', b'{"features": ["AACAPwAAgD8AAIA/", "AACAPw=="]}',
    b'{"features": [["1"]]}', b'{"features": [[true]]}', b'{"features": [[1]], "features": 7}',
]  # fmt: skip


def is_json(body):
    try:
        json.loads(body)
    except (ValueError, RecursionError):
        return False
    return True


@pytest.mark.parametrize("body", BAD_JSON, ids=range(len(BAD_JSON)))
async def test_bad_json_is_rejected_and_changes_nothing(body):
    async with served() as service:
        words_of(await service.observe(body, AS_JSON), 422 if is_json(body) else 400)
        assert service.store.content["s"].journal == []


@pytest.mark.parametrize("key", ["", "k" * 201, "\u00e9" * 101])
async def test_a_key_that_is_empty_or_too_long_is_422(key):
    async with served() as service:
        headers = {**BYTES, "idempotency-key": key.encode("latin-1")}
        for path in ("s/observe", "s/freeze"):
            assert "1 to 200 bytes" in words_of(await service.post(path, feature(0), headers), 422)
        assert decisions_of(await service.observe(feature(0), key="k" * 200))[0]["position"] == 0
        body = FEATURES[:100].astype("<f4").tobytes()
        assert len(decisions_of(await service.observe(body, key="m" * 200, params={"count": 100}))) == 100


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"prototypes": []}, "at least 1 item"),
        ({"prototypes": [[]]}, "prototypes"),
        ({"prototypes": [[1.0], [1.0, 2.0]]}, "the same length"),
        ({"prototypes": [[0.0, 0.0]]}, "prototypes"),
        ({"prototypes": [[1.0] * 16_385] * 2}, "at most 16384 items"),
        ({"prototypes": [[1e300, 0.0]]}, "prototypes"),
        ({"prototypes": [["a"]]}, "prototypes"),
        ({"classes": ["a"]}, "7"),
        ({"classes": ["a"] * 7}, "a"),
        ({"classes": []}, "class names"),
        ({"classes": [""] * 7}, "class names"),
        ({"classes": [1] * 7}, "classes"),
        ({"method": "nonsense"}, "method"),
        ({"config": {"nonsense": 1}}, "nonsense"),
        ({"config": {"self": 1, "cls": 2}}, "self"),
        ({"config": {"target_false_reject": 7}}, "target_false_reject"),
        ({"config": {"target_false_reject": "much"}}, "target_false_reject"),
        ({"config": []}, "config"),
        ({"nonsense": 1}, "nonsense"),
    ],
)
async def test_what_cannot_be_created_is_422_in_words(changes, words):
    async with served() as service:
        assert words in words_of(await service.create(**{"id": "t", **changes}), 422)
        assert await service.streams() == ["s"]


async def test_broken_json_is_400_and_a_missing_field_is_422():
    async with served() as service:
        for path in ("/v1/streams", "/v1/streams/s/snapshots", "/v1/streams/s/rollback"):
            for body in (b"", b"[]", b"null", b"{}", b'{"name": 7}', b'{"name": ""}'):
                for headers in (AS_JSON, {}):
                    words_of(await service.client.post(path, content=body, headers=headers), 422)
            for body in (b"{", b"\xff", b"[" * 50_000):
                words_of(await service.client.post(path, content=body, headers=AS_JSON), 400)
        assert words_of(await service.post("s/snapshots", json={}), 422) == "name: Field required"
        surrogate = b'{"name": "\\ud800"}'
        assert "name" in words_of(await service.post("s/snapshots", surrogate, AS_JSON), 422)
        assert "name" in words_of(await service.post("s/snapshots", json={"name": "x" * 201}), 422)


@pytest.mark.parametrize(
    "body",
    [
        {"id": "t", "prototypes": [["a"] * 1000] * 1000},
        {"id": "t", "classes": [7] * 1000},
        {"id": "t", **{f"unknown {number}": 1 for number in range(1000)}},
    ],
)
def test_a_body_that_is_wrong_in_a_thousand_places_is_refused_for_the_first(body):
    with pytest.raises(ValidationError) as problem:
        NewStream(**body)
    assert problem.value.error_count() <= 2


async def test_a_class_name_is_no_book():
    async with served() as service:
        for name, status in (("x" * 1000, 201), ("x" * 1001, 422)):
            assert (await service.create(id="t", classes=[name, *"bcdefg"])).status_code == status


async def test_json_may_be_less_long_than_other_bodies():
    async with served(FakeEncoding(), body_bytes=10_000, json_bytes=5000) as service:
        for kind in ("application/json", "application/problem+json; charset=utf-8", "APPLICATION/JSON"):
            refused = await service.client.post("/v1/streams", content=b" " * 5001, headers={"content-type": kind})
            assert "5000 bytes" in words_of(refused, 413)
        assert "not an image" in words_of(await service.observe(b" " * 5001, PNG), 422)


async def test_bodies_that_are_too_much_together_are_429_and_leave_room_when_they_are_gone():
    arrived, on = asyncio.Event(), asyncio.Event()

    async def in_parts():
        yield feature(0)[:100]
        arrived.set()
        await on.wait()
        yield feature(0)[100:]

    async with served(bodies_bytes=1024) as service:
        first = asyncio.create_task(service.observe(in_parts()))
        await arrived.wait()
        assert "take too much" in words_of(await service.observe(bytes(1000)), 429)
        on.set()
        decisions_of(await first)
        # Alone a body has room, however large: it is refused for what it is.
        words_of(await service.observe(bytes(2000)), 422)
        decisions_of(await service.observe(feature(1)))


async def test_who_leaves_before_the_body_is_there_is_no_error_of_the_service():
    async with served() as service:
        told = []

        async def send(message):
            told.append(message)

        async def receive():
            return {"type": "http.disconnect"}

        scope = {
            "type": "http",
            "method": "POST",
            "path": "/v1/streams/s/observe",
            "query_string": b"",
            "headers": [],
            "server": ("127.0.0.1", 80),
        }
        await service.api(scope, receive, send)
        assert told[0]["status"] == 400
        assert service.queues.waiting == 0


async def test_too_many_waiting_requests_are_429():
    async with served(FakeEncoding(), max_queued_requests=2) as service:
        body = FEATURES[:3].astype("<f4").tobytes()
        assert "Retry later" in words_of(await service.observe(body, params={"count": 3}), 429)
        store = service.store
        store.gate = asyncio.Event()
        two = asyncio.create_task(service.observe(body[:256], params={"count": 2}))
        await asyncio.sleep(0.02)
        words_of(await service.observe(feature(2)), 429)
        words_of(await service.observe(b"0 2", PNG), 429)
        store.gate.set()
        assert len(decisions_of(await two)) == 2
        assert engine_of(service.worker) == learned(2)


async def test_an_error_inside_the_engine_is_500_in_words(monkeypatch):
    async with served() as service:
        decisions_of(await service.observe(feature(0)))

        def broken(*_):
            raise ZeroDivisionError("a bug")

        monkeypatch.setattr(service.worker.streams.loaded["s"].live.engine, "_advance", broken)
        assert "An error inside the service" in words_of(await service.observe(feature(1)), 500)
        decisions_of(await service.observe(feature(1)))
        assert engine_of(service.worker) == learned(2)


async def test_an_error_that_nobody_foresaw_is_500_in_words_and_says_nothing_of_the_inside():
    async with served() as service:
        service.problem = ZeroDivisionError("secret")
        transport = httpx.ASGITransport(service.api, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
            words = words_of(await client.get("/v1/workers"), 500)
            assert "An error inside the service" in words
            assert "secret" not in words


async def test_a_store_that_is_down_is_503_and_the_same_request_is_served_when_it_is_back():
    async with served(request_seconds=0.2, store_connect_timeout=0.05) as service:
        decisions_of(await service.observe(feature(0)))
        service.store.down = True
        assert "ask again with the same key" in words_of(await service.observe(feature(1), key="k"), 503)
        words_of(await service.client.get("/v1/streams/s"), 503)
        service.store.down = False
        (said,) = decisions_of(await service.observe(feature(1), key="k"))
        assert said["position"] == 1
        assert engine_of(service.worker) == learned(2)


async def test_a_service_that_is_being_stopped_is_503():
    async with served() as service:
        await service.worker.drain(STOPPED)
        assert "being stopped" in words_of(await service.observe(feature(0)), 503)


# Whatever is sent.

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=10),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=10), inner, max_size=3),
    max_leaves=12,
)
ROWS_OF_ANYTHING = st.lists(st.lists(JSON, max_size=3), max_size=3)
ROUTES = ["s/observe", "s/peek", "s/freeze", "s/snapshots", "s/rollback", "", "nobody/observe"]
KINDS = ["application/json", "application/octet-stream", "image/png", "text/plain", ""]


def hostile():
    """Bodies from noise to what is nearly right."""
    features = st.fixed_dictionaries({"features": ROWS_OF_ANYTHING | JSON})
    names = st.fixed_dictionaries({"name": JSON})
    new = st.fixed_dictionaries(
        {"id": st.just("t") | JSON},
        optional={
            "prototypes": ROWS_OF_ANYTHING | JSON,
            "classes": JSON,
            "method": JSON,
            "config": st.dictionaries(st.sampled_from(["target_false_reject", "temperature", "seed"]), JSON),
        },
    )
    numbers = st.binary(min_size=128, max_size=128)
    return (
        st.binary(max_size=300)
        | numbers
        | (JSON | features | names | new).map(lambda value: json.dumps(value).encode())
    )


# A float32 whose conversion to float64 makes numpy warn.
SIGNALLING_NAN = b"\x01\x00\x80\x7f"


def test_no_body_whatever_is_an_error_inside_the_service():
    with asyncio.Runner() as runner:
        context = served(FakeEncoding())
        service = runner.run(context.__aenter__())
        seen = set()

        @given(
            route=st.sampled_from(ROUTES),
            kind=st.sampled_from(KINDS),
            body=hostile(),
            count=st.sampled_from(["1", "2", "x"]) | st.text(max_size=5),
            key=st.none() | st.text(st.characters(min_codepoint=32, max_codepoint=255), max_size=10),
        )
        @example(route="s/observe", kind="application/json", body=b'{"features": [[1e300]]}', count="1", key=None)
        @example(route="s/observe", kind="application/octet-stream", body=feature(0), count="\u0661", key=None)
        @example(route="nobody/observe", kind="application/octet-stream", body=feature(0), count="1", key=None)
        @example(route="s/observe", kind="text/plain", body=b"", count="1", key=None)
        @example(route="s/peek", kind="application/octet-stream", body=SIGNALLING_NAN * 32, count="1", key=None)
        @settings(max_examples=400)
        def check(route, kind, body, count, key):
            headers = {"content-type": kind}
            if key is not None:
                headers["idempotency-key"] = key.strip().encode("latin-1")
            path = f"/v1/streams/{route}".rstrip("/")
            response = runner.run(service.client.post(path, content=body, headers=headers, params={"count": count}))
            assert response.status_code < 500, response.text
            if response.status_code >= 400:
                words_of(response, response.status_code)
            seen.add(response.status_code)
            assert service.queues.waiting == 0

        try:
            check()
            assert {200, 404, 415, 422} <= seen
            status = runner.run(service.client.get("/v1/streams/s")).json()
            assert math.isfinite(status["sequence"])
        finally:
            runner.run(context.__aexit__(None, None, None))


async def test_several_images_come_as_files_of_a_form_all_or_none():
    async with served(FakeEncoding()) as service:
        files = [("images", (f"{n}.png", f"{0.05 - n / 100} {n}".encode(), "image/png")) for n in range(4)]
        answer = await service.client.post("/v1/streams/s/observe", files=files)
        assert [said["position"] for said in answer.json()["decisions"]] == [0, 1, 2, 3]
        assert engine_of(service.worker) == learned(4)
        bad = [*files, ("images", ("bad.png", b"no image", "image/png"))]
        words_of(await service.client.post("/v1/streams/s/observe", files=bad), 422)
        words_of(await service.client.post("/v1/streams/s/observe", files={"other": (None, b"")}), 400)
        assert engine_of(service.worker) == learned(4)


async def test_an_explanation_is_that_of_the_engine_and_changes_nothing():
    async with served() as service:
        await service.observe(feature(0))
        answer = await service.observe(feature(1), path="s/explain")
        engine = StreamDCS(ROWS)
        engine.observe(FEATURES[0])
        assert answer.json() == json.loads(json.dumps(engine.explain(FEATURES[1]).to_dict()))
        assert engine_of(service.worker) == learned(1)


async def test_one_sample_is_explained_at_a_time():
    async with served() as service:
        body = FEATURES[:2].astype("<f4").tobytes()
        refused = await service.observe(body, path="s/explain", params={"count": 2})
        assert "one sample" in words_of(refused, 422)


async def test_classes_are_added_and_removed_and_stay_so_after_an_unload():
    async with served(unload_records=0) as service:
        client, engine = service.client, StreamDCS(ROWS)
        await service.observe(feature(0))
        engine.observe(FEATURES[0])
        added = await client.post("/v1/streams/s/classes", json={"name": "owl", "prototype": FEATURES[5].tolist()})
        assert added.status_code == 201, added.text
        engine.add_class("owl", FEATURES[5])
        assert (await client.delete("/v1/streams/s/classes/1")).status_code == 200
        engine.remove_class("1")
        service.worker.streams.begin_unload("s")
        await service.observe(feature(1))
        engine.observe(FEATURES[1])
        assert engine_of(service.worker) == engine.snapshot()
        words_of(await client.delete("/v1/streams/s/classes/owls"), 404)
        for prototype in ([1.0], [1e39] * 32, []):
            new = {"name": "x", "prototype": prototype}
            words_of(await client.post("/v1/streams/s/classes", json=new), 422)
        words_of(await client.post("/v1/streams/s/classes", json={"name": "x"}), 422)


async def test_a_state_goes_out_and_into_another_stream():
    async with served() as service:
        client = service.client
        for n in range(5):
            await service.observe(feature(n))
        state = (await client.get("/v1/streams/s/state")).content
        assert StreamDCS.restore(state).snapshot() == learned(5)
        await service.create(id="t")
        assert (await client.put("/v1/streams/t/state", content=state)).status_code == 200
        for stream in ("s", "t"):
            service.worker.streams.begin_unload(stream)
            await service.observe(feature(5), path=f"{stream}/observe")
            assert engine_of(service.worker, stream) == learned(6)
        for wrong in (b"", b"no state", state[:-1], StreamDCS(np.eye(3, 4)).snapshot()):
            words_of(await client.put("/v1/streams/t/state", content=wrong), 422)
        assert engine_of(service.worker, "t") == learned(6)


# HTTP.


async def test_what_is_created_is_found_at_its_location():
    async with served() as service:
        created = await service.create(id="a b")
        assert (await service.client.get(created.headers["location"])).json()["id"] == "a b"
        saved = await service.post("s/snapshots", json={"name": "x/y"})
        assert (await service.client.delete(saved.headers["location"])).status_code == 204
        added = await service.post("s/classes", json={"name": "owl?", "prototype": FEATURES[5].tolist()})
        assert (await service.client.delete(added.headers["location"])).status_code == 200


async def test_a_replayed_request_says_so_in_a_header():
    async with served() as service:
        for path, body in (("s/observe", feature(0)), ("s/freeze", b"")):
            replayed = []
            for _ in range(2):
                response = await service.post(path, body, {**BYTES, "idempotency-key": path})
                replayed.append(response.headers.get("idempotent-replayed"))
            assert replayed == [None, "true"]


async def test_a_state_is_imported_only_if_it_has_not_changed():
    async with served() as service:
        path = "/v1/streams/s/state"
        exported = await service.client.get(path)
        etag = exported.headers["etag"]
        assert (await service.client.get(path, headers={"if-none-match": etag})).status_code == 304
        await service.observe(feature(0))
        stale = await service.client.put(path, content=exported.content, headers={"if-match": etag})
        assert "Read the state again" in words_of(stale, 412)
        newer = (await service.client.head(path)).headers["etag"]
        assert newer != etag
        for tags in (f'"other", {newer}', "*"):
            response = await service.client.put(path, content=exported.content, headers={"if-match": tags})
            assert response.status_code == 200, response.text


async def test_a_state_with_a_vocabulary_is_not_imported_to_a_stream_without_one():
    async with served() as service:
        path = "/v1/streams/s/state"
        engine = StreamDCS.restore((await service.client.get(path)).content)
        names = np.random.default_rng(0).normal(size=(20, engine.dimension))
        other = StreamDCS(engine._prototypes, engine.classes, engine.config, engine.encoder, names)
        refused = await service.client.put(path, content=other.snapshot())
        assert "is not that of the stream (none)" in words_of(refused, 422)


async def test_head_is_get_without_a_body():
    async with served() as service:
        for path in ("/v1/health", "/v1/streams", "/v1/streams/s", "/openapi.json", "/v1/streams/none"):
            got, head = await service.client.get(path), await service.client.head(path)
            assert (head.status_code, head.content) == (got.status_code, b"")
            assert head.headers["content-type"] == got.headers["content-type"]


async def test_a_problem_names_each_wrong_field():
    async with served() as service:
        refused = (await service.client.post("/v1/streams/s/snapshots", json={"name": ""})).json()
        assert [error["field"] for error in refused["errors"]] == ["name"]
        assert refused["code"] == "invalid_request"
        refused = (await service.client.get("/v1/streams/s/decisions?limit=0&outcome=maybe")).json()
        assert [error["field"] for error in refused["errors"]] == ["outcome", "limit"]


async def test_the_page_of_all_routes_loads_nothing_from_elsewhere():
    async with served() as service:
        page = await service.client.get("/docs")
        assert page.headers["content-type"].startswith("text/html")
        assert "/v1/streams/{stream}/observe" in page.text
        assert not re.findall("(?:src|href)=[^>]*//", page.text)


# Lists and batches.


async def page_of(service, **asked):
    response = await service.client.get("/v1/streams", params=asked)
    assert response.status_code == 200, response.text
    return response.json()


async def pages_of(service, **asked):
    """The ids of all pages."""
    found, page = [], await page_of(service, **asked)
    while True:
        assert 0 < len(page["streams"]) <= asked["limit"]
        found += [stream["id"] for stream in page["streams"]]
        if page["next_cursor"] is None:
            return found
        page = await page_of(service, cursor=page["next_cursor"], **asked)


async def test_streams_are_listed_in_pages_filtered_and_sorted(monkeypatch):
    monkeypatch.setattr(listing, "_PAGE", 2)
    async with served() as service:
        for name in "bcade":
            await service.create(id=name)
        for number, name in enumerate("dab"):
            for row in range(20):
                await service.observe(feature(row + number), path=f"{name}/observe")
        await service.post("c/freeze")
        await service.post("a/freeze")
        rates = {stream["id"]: stream["unknown_rate"] for stream in (await page_of(service))["streams"]}
        assert {name for name, rate in rates.items() if rate is not None} == set("dab")
        for limit in (1, 2, 4, 100):
            assert await pages_of(service, limit=limit) == list("abcdes")
            assert await pages_of(service, limit=limit, frozen=True) == ["a", "c"]
            ascending = sorted(rates, key=lambda name: (-1 if rates[name] is None else rates[name], name))
            assert await pages_of(service, limit=limit, sort="unknown_rate") == ascending
            assert await pages_of(service, limit=limit, sort="-unknown_rate") == ascending[::-1]
            assert await pages_of(service, limit=limit, sort="created") == list("sbcade")
            latest = (await page_of(service, limit=limit, sort="-last_seen"))["streams"]
            times = [stream["last_seen"] or "" for stream in latest]
            assert times == sorted(times, reverse=True)
        cursor = (await page_of(service, limit=1))["next_cursor"]
        for wrong in ({"cursor": "x"}, {"cursor": cursor, "sort": "created"}, {"sort": "name"}, {"limit": 0}):
            words_of(await service.client.get("/v1/streams", params=wrong), 422)


async def test_a_status_has_the_classes_and_times_of_a_stream():
    async with served() as service:
        new = (await service.client.get("/v1/streams/s")).json()
        assert (new["id"], new["tenant"], new["classes"]) == ("s", None, [str(number) for number in range(7)])
        assert (new["last_seen"], new["unknown_rate"]) == (None, None)
        (said,) = decisions_of(await service.observe(feature(0)))
        seen = (await service.client.get("/v1/streams/s")).json()
        assert seen["created"] == new["created"]
        assert datetime.fromisoformat(seen["last_seen"])
        assert seen["unknown_rate"] == float(not said["known"])
        service.worker.streams.begin_unload("s")
        again = (await service.client.get("/v1/streams/s")).json()
        assert {**again, "epoch": 1, "snapshot_position": 0} == {**seen, "snapshot_position": 0}


async def test_streams_of_a_batch_are_created_or_rejected_one_by_one():
    async with served() as service:
        streams = [NEW, {**NEW, "method": "protodcs"}, {**NEW, "id": "t"}, {"id": "u", "like": "none"}]
        response = await service.client.post("/v1/streams:batch", json={"streams": streams})
        results = response.json()["results"]
        assert [(one["id"], one["status"]) for one in results] == [("s", 200), ("s", 409), ("t", 201), ("u", 404)]
        assert [one["problem"] and one["problem"]["code"] for one in results] == [
            None,
            "stream_exists",
            None,
            "stream_not_found",
        ]
        assert await service.streams() == ["s", "t"]
        words_of(await service.client.post("/v1/streams:batch", json={"streams": []}), 422)


# Retries.


class DriftingEncoding(FakeEncoding):
    """Gives each image other last bits each time, as an encoder does whose batches differ; counts what it encoded."""

    def __init__(self):
        self.encoded = 0

    async def encode(self, image):
        self.encoded += 1
        drift = np.float32(1 + 1e-6 * self.encoded)
        numbers = np.frombuffer(await super().encode(image), dtype="<f4").copy()
        numbers[0] *= drift
        return numbers.astype("<f4").tobytes()


IMAGES = {"content": b"0 1", "headers": {"content-type": "image/png", "idempotency-key": "k"}}
OTHER_IMAGES = {"content": b"0 2", "headers": {"content-type": "image/png", "idempotency-key": "k"}}


async def test_an_image_that_is_sent_again_gets_its_first_answer_and_is_not_encoded_again():
    encoding = DriftingEncoding()
    async with served(encoding) as service:
        first = decisions_of(await service.client.post("/v1/streams/s/observe", **IMAGES))
        again = decisions_of(await service.client.post("/v1/streams/s/observe", **IMAGES))
        assert [one["repeated"] for one in (*first, *again)] == [False, True]
        assert {**again[0], "repeated": False} == first[0]
        assert encoding.encoded == 1
        words_of(await service.client.post("/v1/streams/s/observe", **OTHER_IMAGES), 409)
        assert encoding.encoded == 1


async def test_images_that_are_sent_again_at_the_same_time_are_applied_once():
    async with served(DriftingEncoding()) as service:
        responses = await asyncio.gather(*(service.client.post("/v1/streams/s/observe", **IMAGES) for _ in range(8)))
        found = [one for response in responses for one in decisions_of(response)]
        assert sorted(one["repeated"] for one in found) == [False] + [True] * 7
        assert len({json.dumps({**one, "repeated": False}) for one in found}) == 1


async def test_a_form_of_images_is_recognised_whatever_its_boundary():
    encoding = DriftingEncoding()
    files = [("image", (str(number), f"0 {number}".encode())) for number in range(3)]
    async with served(encoding) as service:
        headers = {"idempotency-key": "k"}
        first = decisions_of(await service.client.post("/v1/streams/s/observe", files=files, headers=headers))
        again = decisions_of(await service.client.post("/v1/streams/s/observe", files=files, headers=headers))
        assert [{**one, "repeated": True} for one in first] == again
        assert encoding.encoded == 3
        fewer = await service.client.post("/v1/streams/s/observe", files=files[:2], headers=headers)
        words_of(fewer, 409)


async def test_a_retry_whose_answer_is_no_longer_stored_is_410_and_applied_once():
    changes = {"snapshot_records": 1, "idempotency_answers": 1}
    async with served(**changes) as service:
        bodies = [{"content": feature(number), "headers": {"idempotency-key": f"{number}"}} for number in range(3)]
        for body in bodies:
            decisions_of(await service.client.post("/v1/streams/s/observe", **body))
        said = words_of(await service.client.post("/v1/streams/s/observe", **bodies[0]), 410)
        assert "already applied, and its answer is no longer stored" in said
        assert (await service.client.get("/v1/streams/s")).json()["position"] == 3


async def test_a_request_of_the_largest_size_can_be_retried_after_a_snapshot():
    async with served() as service:
        rows = b"".join(feature(number % 200) for number in range(4096))
        request = {"content": rows, "headers": {"idempotency-key": "k"}}
        first = decisions_of(await service.client.post("/v1/streams/s/observe?count=4096", **request))
        await service.worker.streams.loaded["s"].journal.settle_snapshot()
        again = decisions_of(await service.client.post("/v1/streams/s/observe?count=4096", **request))
        assert again == [{**one, "repeated": True} for one in first]
        assert (await service.client.get("/v1/streams/s")).json()["position"] == 4096


async def test_the_same_key_with_more_or_fewer_rows_is_409():
    async with served() as service:
        rows = b"".join(map(feature, range(4)))
        headers = {"idempotency-key": "k"}
        decisions_of(await service.client.post("/v1/streams/s/observe?count=4", content=rows, headers=headers))
        for count, content in ((1, feature(0)), (3, rows[: 3 * len(feature(0))]), (2, rows)):
            path = f"/v1/streams/s/observe?count={count}"
            response = await service.client.post(path, content=content, headers=headers)
            assert response.status_code in (409, 422), response.text
        assert (await service.client.get("/v1/streams/s")).json()["position"] == 4


async def test_a_snapshot_of_a_taken_name_is_409_unless_it_is_replaced():
    async with served() as service:
        path, name = "/v1/streams/s/snapshots", {"name": "a"}
        assert (await service.client.post(path, json=name)).status_code == 201
        assert "snapshot 'a' already" in words_of(await service.client.post(path, json=name), 409)
        assert (await service.client.post(path, json={**name, "replace": True})).status_code == 201


async def test_a_delete_of_an_earlier_incarnation_leaves_the_stream_alone():
    async with served() as service:
        earlier = (await service.client.get("/v1/streams/s")).json()["incarnation"]
        assert (await service.client.delete(f"/v1/streams/s?incarnation={earlier}")).status_code == 204
        body = {"id": "s", "prototypes": ROWS.tolist()}
        created = (await service.client.post("/v1/streams", json=body)).json()
        assert created["incarnation"] != earlier
        words_of(await service.client.delete(f"/v1/streams/s?incarnation={earlier}"), 404)
        assert (await service.client.get("/v1/streams/s")).json()["incarnation"] == created["incarnation"]
        assert (await service.client.delete("/v1/streams/s")).status_code == 204
        assert (await service.client.get("/v1/streams/s")).status_code == 404


async def test_expensive_settings_are_422_with_the_estimate_the_limit_and_the_fix():
    async with served() as service:
        config = {"mixture_window": 100_000, "mixture_period": 1}
        words = words_of(await service.create(id="dear", method="protodcs", config=config), 422)
        assert "ms for a step on average; the limit `max_mean_step_cost` is 10" in words
        assert "`mixture_window`=100000, `mixture_iterations`=100, `mixture_period`=1" in words
        assert "Choose less expensive values, or ask the operator to raise the limit." in words
        assert ids_of(await service.client.get("/v1/streams")) == ["s"]


async def test_a_damaged_stream_is_409_until_it_is_rolled_back():
    async with served(snapshot_records=1, quarantine_failures=1) as service:
        decisions_of(await service.observe(feature(0)))
        assert (await service.post("s/snapshots", json={"name": "good"})).status_code == 201
        # Or a later snapshot would replace the damaged one.
        await service.worker.streams.loaded["s"].journal.settle_snapshot()
        service.worker.streams.loaded.clear()
        service.store.content["s"].snapshot = b"\x04garbage"
        for response in (await service.observe(feature(1)), await service.client.get("/v1/streams/s")):
            words = words_of(response, 409)
            assert "The stored data of the stream 's' is damaged: a snapshot of 8 bytes: it was cut off." in words
            assert "Restore a saved snapshot, import an exported state" in words
        (listed,) = (await service.client.get("/v1/streams")).json()["streams"]
        assert (listed["id"], listed["problem"]) == ("s", words)
        assert (await service.client.get("/v1/streams/s/snapshots")).json() == {"snapshots": ["good"]}
        assert (await service.post("s/rollback", json={"name": "good"})).json()["position"] == 2
        decisions_of(await service.observe(feature(1)))
        assert engine_of(service.worker) == learned(2)
        assert (await service.client.get("/v1/streams")).json()["streams"][0]["problem"] is None
        await service.worker.streams.loaded["s"].journal.settle_snapshot()
        service.worker.streams.loaded.clear()
        service.store.content["s"].snapshot = b""
        words_of(await service.client.get("/v1/streams/s"), 409)
        assert (await service.client.delete("/v1/streams/s")).status_code == 204

"""Who may do what over HTTP: keys and roles, tenants that know nothing of one another, limits, and the audit log."""

import asyncio
import io
import json
import re
from base64 import b64encode
from contextlib import asynccontextmanager
from datetime import timedelta
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from urllib.parse import quote

import httpx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from made_service import FEATURES, ROWS, engine_of, feature, learned
from protodcs import StreamDCS
from protodcs.core.vocabulary import Vocabulary
from protodcs.errors import ConfigError
from protodcs.serve.access import audit as audit_module
from protodcs.serve.access import keys, limits
from protodcs.serve.access.bucket import Bucket
from protodcs.serve.access.keys import create_key, revoke_key, rotate_key
from protodcs.serve.api.app import RULES as RULE_LIST
from protodcs.serve.messages import WorkerLostError
from protodcs.serve.settings import ServeConfig
from test_service_app import AS_JSON, BYTES, PNG, FakeEncoding, Service, decisions_of, ids_of, words_of

pytestmark = pytest.mark.usefixtures("virtual_time")

NEW = {"id": "s", "prototypes": ROWS.tolist()}
NAME = {"name": "kept"}
ROLES = ("read", "observe", "admin")
RULES = {(method, path.replace(":path}", "}")): rule for method, path, rule in RULE_LIST}


@cache
def made_keys():
    """A file with one key for each tenant and role, a revoked and an expired one; and all of them, good and bad."""
    about = {f"{tenant} {role}": (tenant, role) for tenant in ("acme", "rival", "operator") for role in ROLES}
    about |= {"revoked": ("acme", "admin"), "expired": ("acme", "admin", timedelta(0))}
    with TemporaryDirectory() as folder:
        file = Path(folder) / "keys.json"
        made = {who: create_key(file, *what) for who, what in about.items()}
        revoke_key(file, made["revoked"][0].id)
        content = file.read_bytes()
    given_out = {who: key for who, (_, key) in made.items()}
    name, secret = given_out["acme admin"].split("_")[1:]
    given_out |= {"wrong secret": f"pdcs_{name}_{secret[::-1]}", "unknown id": f"pdcs_{'0' * 12}_{secret}"}
    return content, {who: record for who, (record, _) in made.items()}, {**given_out, "garbage": "garbage"}


class Guarded(Service):
    """A service with keys."""

    def __init__(self, folder, encoding=None, **changes):
        self.file = folder / "keys.json"
        self.audit = folder / "audit.jsonl"
        content, records, given_out = made_keys()
        self.file.write_bytes(content)
        self.file.chmod(0o600)
        self.records, self.keys = {**records}, {**given_out}
        super().__init__(encoding, keys=str(self.file), audit=str(self.audit), **changes)

    def add(self, who, *about):
        self.records[who], self.keys[who] = create_key(self.file, *about)

    async def ask(self, who, method, path, headers=None, **more):
        """A request by someone; by nobody where `who` is None."""
        named = {} if who is None else {"authorization": f"Bearer {self.keys[who]}"}
        # Each request is by someone else, so none sends the cookies of another.
        self.client.cookies.clear()
        return await self.client.request(method, path, headers={**named, **(headers or {})}, **more)

    async def made(self, who="acme admin", **changes):
        return await self.ask(who, "POST", "/v1/streams", json={**NEW, **changes})

    async def seen(self, number, who="acme observe", stream="s", **more):
        return await self.ask(who, "POST", f"/v1/streams/{stream}/observe", BYTES, content=feature(number), **more)

    def lines(self):
        return [json.loads(line) for line in self.audit.read_text().splitlines()] if self.audit.exists() else []


@asynccontextmanager
async def guarded(folder, encoding=None, **changes):
    """A service with keys, and a stream "s" of the tenant acme."""
    service = Guarded(folder, encoding, **changes)
    await service.worker.start()
    try:
        assert (await service.made()).status_code == 201
        yield service
    finally:
        await service.client.aclose()
        await service.worker.close()


# Routes and roles.


def needed(method, path):
    """The role a route ought to need, told apart from the table of the service: the more it changes, the higher."""
    if path in ("/v1/health", "/v1/ready"):
        return None
    if path == "/" or path.startswith("/ui/"):
        return None
    if path == "/v1/workers":
        return "operator"
    if path == "/v1/session":
        return "read"
    if path.startswith("/v1/webhooks"):
        return "admin"
    if path.endswith("/thumbnail"):
        return "images"
    if path.endswith(":add-class"):
        return "admin"
    if method in ("POST", "DELETE") and ("/clusters" in path or "/feedback" in path):
        return "observe"
    if method == "GET":
        return "admin" if path.endswith("/state") else "read"
    return "observe" if path.endswith(("/observe", "/observe:stream", "/peek", "/explain")) else "admin"


STATE = StreamDCS(ROWS).snapshot()
OWL = {"name": "owl", "prototype": FEATURES[5].tolist()}
NAMES = Vocabulary(np.eye(16, 4, dtype=np.float32) + 1)
NAMED = f"{NAMES.fingerprint}?count=16"
BODIES = {
    "/v1/streams/{stream}/explain": {"content": feature(0)},
    "/v1/streams/{stream}/classes": {"json": OWL},
    "/v1/streams/{stream}/state": {"content": STATE},
    "/v1/vocabularies/{fingerprint}": {"content": NAMES.rows.tobytes()},
    "/v1/streams/{stream}/feedback": {"json": {"label": None, "feature": FEATURES[0].tolist()}},
    "/v1/streams/{stream}/clusters/{cluster}:name": {"json": {"name": "owl"}},
    "/v1/streams/{stream}/clusters/{cluster}:add-class": {"json": {"name": "owl"}},
    "/v1/streams/{stream}/clusters/{cluster}/preview": {"params": {"name": "owl"}},
    "/v1/streams/{stream}/clusters/{cluster}:assign": {"json": {"label": "0"}},
    "/v1/streams/{stream}/clusters:merge": {"json": {"clusters": [0, 1]}},
    "/v1/webhooks": {"json": {"url": "http://8.8.8.8/"}},
    "/v1/streams": {"json": NEW},
    "/v1/streams:batch": {"json": {"streams": [NEW]}},
    "/v1/streams/{stream}/observe": {"content": feature(0)},
    "/v1/streams/{stream}/observe:stream": {"content": json.dumps({"feature": b64encode(feature(0)).decode()})},
    "/v1/streams/{stream}/peek": {"content": feature(0)},
    "/v1/streams/{stream}/snapshots": {"json": {**NAME, "replace": True}},
    "/v1/streams/{stream}/rollback": {"json": NAME},
}


# Ids of samples and clusters that are not there.
IDS = {"position": 0, "cluster": 0}


def needs_samples(path):
    """Whether a route works with stored samples, which the stream of these tests has none of."""
    return "/clusters" in path or "/feedback/" in path or path.endswith(("/review", "/explanation"))


def place(path, stream="s"):
    """A path of the description, with names in it that are there."""
    name = "0" if "/classes/" in path else "kept"
    names = {"model": "protodcs", "version": "1", "path": "main.js", "webhook": "none", "fingerprint": NAMED}
    return path.format(stream=stream, name=name, **names, **IDS)


def routes(service):
    """Every route of the application: those of its description, those that serve the description, and the UI."""
    described = [
        (method.upper(), path)
        for path, methods in service.api.openapi()["paths"].items()
        for method in methods
        if method.upper() in ("GET", "POST", "PUT", "PATCH", "DELETE", "HEAD", "OPTIONS", "TRACE")
    ]
    return described + [("GET", path) for path in ("/openapi.json", "/docs", "/", "/ui/", "/ui/{path}")]


def may(who, role):
    """Whether someone may use a route that needs a role."""
    if role is None:
        return True
    tenant, _, own = (who or "").partition(" ")
    if own not in ROLES:
        return False
    if role == "images":
        # No key of these tests may see images. `test_decision_log.py` has one.
        return False
    if role == "operator":
        return (tenant, own) == ("operator", "admin")
    return ROLES.index(own) >= ROLES.index(role)


def test_every_route_has_a_rule_and_every_rule_a_route(tmp_path):
    service = Guarded(tmp_path)
    assert set(routes(service)) == set(RULES)


async def test_each_route_lets_in_who_may_and_nobody_else(tmp_path):
    async with guarded(tmp_path) as service:
        callers = [None, *service.keys]
        checked = 0
        for method, path in routes(service):
            for who in callers:
                if "acme/s" not in service.store.content:
                    assert (await service.made()).status_code == 201
                if "kept" not in service.store.content["acme/s"].saved:
                    saved = {**NAME, "replace": True}
                    kept = await service.ask("acme admin", "POST", "/v1/streams/s/snapshots", json=saved)
                    assert kept.status_code == 201
                if path.endswith("/events") and may(who, needed(method, path)):
                    # These never end. `test_events.py` follows them.
                    checked += 1
                    continue
                before = {name: stream.journal[:] for name, stream in service.store.content.items()}
                response = await service.ask(who, method, place(path), **BODIES.get(path, {}))
                checked += 1
                role = needed(method, path)
                if may(who, role) and "{webhook}" in path:
                    words_of(response, 404)
                    continue
                if may(who, role) and needs_samples(path):
                    words_of(response, 409 if who.startswith("acme") else 404)
                    continue
                if may(who, role):
                    expected = (200, 201, 204, 307)
                    if who is not None and not who.startswith("acme"):
                        expected += (404,)
                    assert response.status_code in expected, (who, method, path, response.text)
                    continue
                status = 403 if who is not None and " " in who and who.split()[1] in ROLES else 401
                words_of(response, status)
                assert {name: stream.journal for name, stream in service.store.content.items()} == before
        assert checked == len(RULES) * len(callers)


async def test_a_route_without_a_rule_is_there_for_nobody(tmp_path):
    async with guarded(tmp_path) as service:

        @service.api.get("/v1/forgotten")
        async def forgotten():
            raise AssertionError("nobody may come here")

        @service.api.put("/v1/streams/{stream}")
        async def replace(stream):
            raise AssertionError("nobody may come here")

        for who in ("acme admin", "operator admin"):
            words_of(await service.ask(who, "GET", "/v1/forgotten"), 404)
            refused = await service.ask(who, "PUT", "/v1/streams/s")
            words_of(refused, 405)
            assert refused.headers["allow"] == "GET, HEAD, DELETE"
        words_of(await service.ask(None, "GET", "/v1/forgotten"), 401)
        words_of(await service.ask(None, "GET", "/nowhere"), 401)


def without_instance(response):
    """The text of a problem without the id of its request."""
    return json.dumps({name: value for name, value in response.json().items() if name != "instance"})


async def test_whatever_is_wrong_with_a_key_the_answer_is_the_same(tmp_path):
    async with guarded(tmp_path) as service:
        said = set()
        for who in ("garbage", "unknown id", "wrong secret", "revoked", "expired"):
            response = await service.ask(who, "GET", "/v1/streams/s")
            words_of(response, 401)
            assert response.headers["www-authenticate"] == "Bearer"
            headers = {name: value for name, value in response.headers.items() if name != "x-request-id"}
            said.add((without_instance(response), json.dumps(headers)))
        assert len(said) == 1


async def test_a_missing_key_and_a_wrong_one_read_differently(tmp_path):
    async with guarded(tmp_path) as service:
        missing, wrong = [await service.ask(who, "GET", "/v1/streams/s") for who in (None, "wrong secret")]
        assert "has no access key" in words_of(missing, 401)
        assert "is unknown, expired or revoked" in words_of(wrong, 401)


HOSTILE = [
    [],
    ["Bearer"],
    ["Bearer "],
    ["{key}"],
    ["Basic {key}"],
    ["Bearer {key} {key}"],
    ["Bearer {key},"],
    ['Bearer "{key}"'],
    ["Bearer\t{key}"],
    ["Bearer={key}"],
    ["Bearer {key}\x85"],
    ["Bearer \xff\xfe"],
    ["Bearer " + "x" * 60_000],
    ["Bearer {key}", "Bearer {key}"],
    ["Bearer {key}", "Bearer garbage"],
    ["Bearer garbage", "Bearer {key}"],
]


@pytest.mark.parametrize("values", HOSTILE, ids=range(len(HOSTILE)))
async def test_a_header_that_is_not_quite_right_lets_nobody_in(tmp_path, values):
    async with guarded(tmp_path) as service:
        key = service.keys["acme admin"]
        headers = [(b"authorization", value.format(key=key).encode("latin-1")) for value in values]
        words_of(await service.client.get("/v1/streams", headers=headers), 401)


async def test_a_header_may_be_written_in_other_ways(tmp_path):
    async with guarded(tmp_path) as service:
        key = service.keys["acme read"]
        for name, value in (("AUTHORIZATION", f"bearer {key}"), ("authorization", f"BEARER  {key} ")):
            response = await service.client.get("/v1/streams", headers={name: value})
            assert response.status_code == 200, response.text
        for hidden in ({"x-api-key": key}, {"cookie": f"authorization=Bearer {key}"}):
            words_of(await service.client.get("/v1/streams", headers=hidden), 401)
        words_of(await service.client.get("/v1/streams", params={"access_token": key}), 401)


async def test_what_is_neither_http_nor_the_life_of_the_server_is_closed(tmp_path):
    sent = []

    async def send(message):
        sent.append(message)

    async with guarded(tmp_path) as service:
        await service.api({"type": "websocket", "path": "/v1/streams", "headers": []}, None, send)
    assert [message["type"] for message in sent] == ["websocket.close"]


async def test_keys_change_while_the_service_runs(tmp_path, monkeypatch):
    monkeypatch.setattr(keys, "_LOOK", 0.0)
    async with guarded(tmp_path) as service:
        old = service.records["acme observe"]
        decisions_of(await service.seen(0))
        service.records["new"], service.keys["new"] = rotate_key(service.file, old.id, timedelta(hours=1))
        decisions_of(await service.seen(1))
        decisions_of(await service.seen(2, "new"))
        revoke_key(service.file, old.id)
        words_of(await service.seen(3), 401)
        decisions_of(await service.seen(3, "new"))
        service.add("late", "acme", "read")
        assert ids_of(await service.ask("late", "GET", "/v1/streams")) == ["s"]
        assert engine_of(service.worker, "acme/s") == learned(4)


# Tenants.


async def test_tenants_have_streams_of_the_same_name_and_each_its_own(tmp_path):
    async with guarded(tmp_path) as service:
        assert (await service.made("rival admin")).status_code == 201
        for number in range(5):
            decisions_of(await service.seen(number))
        (said,) = decisions_of(await service.seen(0, "rival observe"))
        assert said["position"] == said["sequence"] == 0
        assert engine_of(service.worker, "acme/s") == learned(5)
        assert engine_of(service.worker, "rival/s") == learned(1)
        assert (await service.ask("rival admin", "DELETE", "/v1/streams/s")).status_code == 204
        assert (await service.ask("acme read", "GET", "/v1/streams/s")).json()["sequence"] == 5


async def test_what_another_tenant_has_looks_like_what_nobody_has(tmp_path):
    async with guarded(tmp_path) as service:
        decisions_of(await service.seen(0))
        assert (await service.ask("acme admin", "POST", "/v1/streams/s/snapshots", json=NAME)).status_code == 201
        before = service.store.content["acme/s"].journal[:]
        for method, path in routes(service):
            if "{stream}" not in path:
                continue
            answers = []
            for stream in ("s", "t"):
                response = await service.ask("rival admin", method, place(path, stream), **BODIES.get(path, {}))
                answers.append((response.status_code, without_instance(response).replace(repr(stream), "'?'")))
            assert answers[0] == answers[1], (method, path)
            assert answers[0][0] == (403 if needed(method, path) == "images" else 404)
            assert "rival" not in answers[0][1]
        copies = [await service.ask("rival admin", "POST", "/v1/streams", json={"id": "c", "like": like})
                  for like in ("s", "t")]  # fmt: skip
        assert [words_of(copy, 404).replace(repr(like), "?") for copy, like in zip(copies, "st", strict=True)] == [
            "there is no stream ?"
        ] * 2
        assert ids_of(await service.ask("rival admin", "GET", "/v1/streams")) == []
        assert list(service.store.content) == ["acme/s"]
        assert service.store.content["acme/s"].journal == before


GUESSES = [
    "acme/s",
    "/acme/s",
    "../acme/s",
    "..%2facme%2fs",
    "acme%2Fs",
    "acme%2fs",
    "acme\\s",
    "%2e%2e/acme/s",
    "s/../../acme/s",
]


@pytest.mark.parametrize("guess", GUESSES)
async def test_no_way_of_writing_a_name_reaches_another_tenant(tmp_path, guess):
    async with guarded(tmp_path) as service:
        before = service.store.content["acme/s"].journal[:]
        for path in (f"/v1/streams/{guess}", f"/v1/streams/{quote(guess, safe='')}"):
            for method, end in (("GET", ""), ("GET", "/snapshots"), ("POST", "/freeze"), ("DELETE", "")):
                response = await service.ask("rival admin", method, path + end)
                assert response.status_code in ((404, 405, 204) if method == "DELETE" else (404, 405)), response.text
        words_of(await service.ask("rival admin", "POST", "/v1/streams", json={"id": "c", "like": guess}), 404)
        if "/" in guess or "\\" in guess:
            words_of(await service.made("rival admin", id=guess), 422)
        assert list(service.store.content) == ["acme/s"]
        assert service.store.content["acme/s"].journal == before


async def test_words_name_streams_as_their_tenant_does(tmp_path):
    async with guarded(tmp_path) as service:
        words = words_of(await service.made(method="protodcs"), 409)
        assert "the stream 's' already exists" in words
        words = words_of(await service.ask("acme read", "GET", "/v1/streams/it's"), 404)
        assert '"it\'s"' in words
        words = words_of(await service.ask("acme admin", "POST", "/v1/streams/s/rollback", json=NAME), 404)
        assert "the stream 's'" in words


async def test_a_tenant_whose_name_begins_another_ones_sees_its_own(tmp_path, monkeypatch):
    monkeypatch.setattr(keys, "_LOOK", 0.0)
    async with guarded(tmp_path) as service:
        service.add("longer", "acme-2", "admin")
        assert (await service.made("longer", id="u")).status_code == 201
        assert ids_of(await service.ask("longer", "GET", "/v1/streams")) == ["u"]
        assert ids_of(await service.ask("acme read", "GET", "/v1/streams")) == ["s"]


async def test_without_keys_everyone_may_do_everything_by_plain_names(tmp_path):
    service = Service(audit=str(tmp_path / "audit.jsonl"))
    await service.worker.start()
    try:
        assert (await service.create()).status_code == 201
        assert list(service.store.content) == ["s"]
        assert (await service.client.get("/v1/workers")).status_code == 200
        key = {"authorization": "Bearer garbage"}
        assert ids_of(await service.client.get("/v1/streams", headers=key)) == ["s"]
    finally:
        await service.client.aclose()
        await service.worker.close()


# Limits.


def waits(response, words):
    """How long a refused caller is told to wait."""
    assert words in words_of(response, 429)
    return int(response.headers["retry-after"])


async def test_a_tenant_that_asks_too_often_is_429_and_others_are_not(tmp_path, monkeypatch):
    clock = [1000.0]
    monkeypatch.setattr(limits.time, "monotonic", lambda: clock[0])
    special = {"acme": {"rate": 0.5, "burst": 4}}
    async with guarded(tmp_path, tenants=special) as service:
        # One of the four made the stream.
        for _ in range(3):
            assert (await service.ask("acme read", "GET", "/v1/streams")).status_code == 200
        for who in ("acme read", "acme observe"):
            assert waits(await service.ask(who, "GET", "/v1/streams"), "0.5 requests per second") == 2
        assert (await service.ask("rival read", "GET", "/v1/streams")).status_code == 200
        assert (await service.ask(None, "GET", "/v1/health")).status_code == 200
        clock[0] += 2.0
        assert (await service.ask("acme read", "GET", "/v1/streams")).status_code == 200
        waits(await service.ask("acme read", "GET", "/v1/streams"), "0.5 requests per second")


@given(
    rate=st.floats(0.1, 1000),
    burst=st.integers(1, 100),
    steps=st.lists(st.floats(0, 10), min_size=1, max_size=50),
)
def test_a_bucket_gives_no_more_than_burst_and_rate_and_keeps_its_word(rate, burst, steps):
    bucket, now, taken = Bucket(rate, burst), 0.0, 0
    for step in steps:
        now += step
        wait = bucket.take(now)
        taken += wait == 0
        assert taken <= burst + rate * now + 1e-6
        if wait:
            now += wait * (1 + 1e-9) + 1e-9
            assert bucket.take(now) == 0
            taken += 1


async def test_a_flood_of_one_tenant_leaves_room_for_another(tmp_path):
    async with guarded(tmp_path, FakeEncoding(), max_queued_requests=8, tenant_max_fraction=0.5) as service:
        assert (await service.made("rival admin")).status_code == 201
        many = FEATURES[:5].astype("<f4").tobytes()
        path = "/v1/streams/s/observe"
        refused = await service.ask("acme observe", "POST", path, BYTES, content=many, params={"count": 5})
        assert waits(refused, "of this tenant are in progress, the limit is 4") == 1
        service.store.gate = asyncio.Event()
        flood = [asyncio.create_task(service.seen(number)) for number in range(10)]
        await asyncio.sleep(0.05)
        assert service.queues.waiting == 4
        refused = await service.ask("acme observe", "POST", path, PNG, content=b"0 9")
        assert waits(refused, "may have 4 requests in progress") == 1
        other = asyncio.create_task(service.seen(0, "rival observe"))
        await asyncio.sleep(0.05)
        assert service.queues.waiting == 5
        service.store.gate.set()
        decisions_of(await other)
        statuses = [answer.status_code for answer in await asyncio.gather(*flood)]
        assert sorted(statuses) == [200] * 4 + [429] * 6
        assert service.queues.waiting == 0
        decisions_of(await service.seen(11))


async def test_a_tenant_has_so_many_streams_and_no_more(tmp_path):
    async with guarded(tmp_path, streams=3, tenants={"rival": {"streams": 1}}) as service:
        for stream in ("t", "u"):
            assert (await service.made(id=stream)).status_code == 201
        assert waits(await service.made(id="v"), "may have 3 streams, and has 3. Delete one first.") == 60
        assert [service.lines()[-1][name] for name in ("action", "stream", "outcome")] == ["create", "v", "refused"]
        assert waits(await service.ask("acme admin", "POST", "/v1/streams", json={"id": "v", "like": "s"}), "3") == 60
        assert (await service.made(id="t")).status_code == 200
        assert (await service.made("rival admin")).status_code == 201
        waits(await service.made("rival admin", id="t"), "may have 1 streams")
        assert (await service.ask("acme admin", "DELETE", "/v1/streams/t")).status_code == 204
        assert (await service.made(id="v")).status_code == 201
        assert sorted(service.store.content) == ["acme/s", "acme/u", "acme/v", "rival/s"]


async def test_streams_created_at_the_same_time_are_counted_too(tmp_path):
    async with guarded(tmp_path, streams=5) as service:
        answers = await asyncio.gather(*(service.made(id=f"t{number}") for number in range(10)))
        assert sorted(answer.status_code for answer in answers) == [201] * 4 + [429] * 6
        assert len(service.store.content) == 5


async def test_a_stream_of_too_many_classes_is_413(tmp_path):
    async with guarded(tmp_path, FakeEncoding(), classes=7, tenants={"rival": {"classes": 9}}) as service:
        eight = np.eye(8, 32).tolist()
        for body in (
            {"prototypes": eight},
            {"prototypes": ROWS.tolist(), "classes": list("abcdefgh")},
            {"prototypes": None, "classes": list("abcdefgh")},
            {"prototypes": None, "classes": "cifar10"},
        ):
            words = words_of(await service.made(id="t", **body), 413)
            assert "7 classes" in words
        assert (await service.made("rival admin", prototypes=eight)).status_code == 201
        assert list(service.store.content) == ["acme/s", "rival/s"]


async def test_a_stream_does_not_grow_to_too_many_classes(tmp_path):
    async with guarded(tmp_path, classes=8, tenants={"rival": {"classes": 9}}) as service:
        assert (await service.made("rival admin")).status_code == 201
        for who, most in (("acme admin", 8), ("rival admin", 9)):
            for number in range(7, most):
                body = {"name": f"owl {number}", "prototype": FEATURES[number].tolist()}
                named = {"idempotency-key": f"{number}"}
                asked = (who, "POST", "/v1/streams/s/classes", named)
                assert (await service.ask(*asked, json=body)).status_code == 201
            assert (await service.ask(*asked, json=body)).json()["repeated"]
            one_more = await service.ask(who, "POST", "/v1/streams/s/classes", json=OWL)
            assert f"a stream may have {most} classes" in words_of(one_more, 422)
            large = StreamDCS(FEATURES[: most + 1]).snapshot()
            refused = await service.ask(who, "PUT", "/v1/streams/s/state", content=large)
            assert f"a stream may have {most} classes" in words_of(refused, 422)
            assert (await service.ask(who, "GET", "/v1/streams/s")).json()["classes"][most - 1 :] == [f"owl {most - 1}"]


def png(width, height):
    file = io.BytesIO()
    Image.new("RGB", (width, height)).save(file, "PNG")
    return file.getvalue()


async def test_an_image_of_too_many_pixels_is_413_before_it_is_encoded(tmp_path):
    class Counting(FakeEncoding):
        seen = 0

        async def encode(self, image):
            self.seen += 1
            return feature(0)

    encoding = Counting()
    async with guarded(tmp_path, encoding, pixels=100, tenants={"rival": {"pixels": 200}}) as service:
        path = "/v1/streams/s/observe"
        small, large = png(10, 10), png(10, 11)
        decisions_of(await service.ask("acme observe", "POST", path, PNG, content=small))
        refused = await service.ask("acme observe", "POST", path, PNG, content=large)
        assert "An image may have 100 pixels; given: 110" in words_of(refused, 413)
        assert encoding.seen == 1
        assert service.queues.waiting == 0
        assert (await service.made("rival admin")).status_code == 201
        decisions_of(await service.ask("rival observe", "POST", path, PNG, content=large))


async def never_read():
    """A body that nobody may wait for."""
    raise AssertionError("the body was read")
    yield b""


async def test_a_body_that_says_that_it_is_too_long_is_not_read(tmp_path):
    special = {"rival": {"body_bytes": 2000}}
    async with guarded(tmp_path, body_bytes=10_000, tenants=special) as service:
        path = "/v1/streams/s/observe"
        for who, most, length in (
            ("acme observe", 10_000, "10001"),
            ("acme observe", 10_000, "9" * 5000),
            ("rival observe", 2000, "2001"),
        ):
            headers = {**BYTES, "content-length": length}
            refused = await service.ask(who, "POST", path, headers, content=never_read())
            assert f"A body may have {most} bytes" in words_of(refused, 413)
        for length in ("-1", "1e3", "0x10", "ten", "", "\u00b2"):
            headers = {**BYTES, "content-length": length.encode("latin-1")}
            refused = await service.ask("acme observe", "POST", path, headers, content=never_read())
            assert "Content-Length" in words_of(refused, 400)
        twice = [*BYTES.items(), ("content-length", "128"), ("content-length", "129")]
        twice.append(("authorization", f"Bearer {service.keys['acme observe']}"))
        words_of(await service.client.post(path, headers=twice, content=never_read()), 400)


@pytest.mark.parametrize(
    ("method", "path", "most"),
    [
        ("POST", "/v1/streams/s/snapshots", 2**16),
        ("POST", "/v1/streams/s/rollback", 2**16),
        ("POST", "/v1/streams/s/classes", 2**19),
    ],
)
async def test_a_route_that_needs_a_small_body_reads_no_large_one(tmp_path, method, path, most):
    async with guarded(tmp_path) as service:
        headers = {**AS_JSON, "content-length": str(most + 1)}
        refused = await service.ask("operator admin", method, path, headers, content=never_read())
        assert f"A body may have {most} bytes" in words_of(refused, 413)
        # As long as it is not too long, it is read.
        read = await service.ask("operator admin", method, path, AS_JSON, content=b" " * most)
        assert "JSON" in words_of(read, 400)


async def test_the_widest_prototype_of_a_class_is_not_too_long(tmp_path):
    async with guarded(tmp_path) as service:
        body = {"name": "x" * 1000, "prototype": [-1.2345678901234567e-02] * 16_384}
        answer = await service.ask("acme admin", "POST", "/v1/streams/s/classes", json=body)
        assert "prototype" in words_of(answer, 422)


async def test_nobody_without_a_key_has_a_body_read(tmp_path):
    async with guarded(tmp_path) as service:
        path = "/v1/streams/s/observe"
        words_of(await service.ask(None, "POST", path, BYTES, content=never_read()), 401)
        words_of(await service.ask("acme read", "POST", path, BYTES, content=never_read()), 403)


@pytest.mark.parametrize("encoding", ["gzip", "deflate", "br", "identity, gzip", "x" * 5000, "GZIP"])
async def test_a_packed_body_is_415_and_not_read(tmp_path, encoding):
    async with guarded(tmp_path) as service:
        headers = {**BYTES, "content-encoding": encoding}
        path = "/v1/streams/s/observe"
        refused = await service.ask("acme observe", "POST", path, headers, content=never_read())
        assert "Content-Encoding" in words_of(refused, 415)
        headers["content-encoding"] = "Identity"
        decisions_of(await service.ask("acme observe", "POST", path, headers, content=feature(0)))


async def test_a_body_that_comes_too_slowly_is_408_on_every_route(tmp_path):
    async def slow():
        yield feature(0)[:4]
        await asyncio.sleep(30)

    async with guarded(tmp_path, FakeEncoding(), body_seconds=0.1) as service:
        for method, path, headers in (
            ("POST", "/v1/streams/s/observe", BYTES),
            ("POST", "/v1/streams/s/observe", AS_JSON),
            ("POST", "/v1/streams/s/observe", PNG),
            ("POST", "/v1/streams/s/snapshots", AS_JSON),
            ("POST", "/v1/streams", AS_JSON),
        ):
            refused = await service.ask("acme admin", method, path, headers, content=slow())
            assert "within 0.1 seconds" in words_of(refused, 408)
        assert service.queues.waiting == 0
        decisions_of(await service.seen(0))


async def test_the_time_for_a_body_is_not_a_time_for_the_answer(tmp_path):
    async with guarded(tmp_path, FakeEncoding(), body_seconds=0.1) as service:
        path = "/v1/streams/s/observe"
        decisions_of(await service.ask("acme observe", "POST", path, PNG, content=b"0.3 0"))


# The audit log.


# Dashboards ask it every few seconds, and nothing comes of it.

ACTS = [
    ("sign in", "POST", "/v1/session", {}),
    ("sign out", "DELETE", "/v1/session", {}),
    ("create webhook", "POST", "/v1/webhooks", {"json": {"url": "http://8.8.8.8/"}}),
    ("create", "POST", "/v1/streams", {"json": NEW}),
    ("freeze", "POST", "/v1/streams/s/freeze", {}),
    ("unfreeze", "POST", "/v1/streams/s/unfreeze", {}),
    ("acknowledge", "POST", "/v1/streams/s/acknowledge", {}),
    ("snapshot", "POST", "/v1/streams/s/snapshots", {"json": NAME}),
    ("rollback", "POST", "/v1/streams/s/rollback", {"json": NAME}),
    ("delete snapshot", "DELETE", "/v1/streams/s/snapshots/kept", {}),
    ("export", "GET", "/v1/streams/s/state", {}),
    ("import", "PUT", "/v1/streams/s/state", {"content": STATE}),
    ("upload vocabulary", "PUT", f"/v1/vocabularies/{NAMED}", {"content": NAMES.rows.tobytes()}),
    ("add class", "POST", "/v1/streams/s/classes", {"json": OWL}),
    ("remove class", "DELETE", "/v1/streams/s/classes/owl", {}),
    ("reset", "POST", "/v1/streams/s/reset", {}),
    ("purge", "DELETE", "/v1/streams/s/decisions", {}),
    ("feedback", "POST", "/v1/streams/s/feedback", {"json": {"label": None, "feature": FEATURES[0].tolist()}}),
    ("delete", "DELETE", "/v1/streams/s", {}),
]


async def test_every_administrative_act_is_a_line(tmp_path):
    async with guarded(tmp_path) as service:
        # Which webhook is deleted is known only after it was created; clusters are edited in `test_feedback.py`.
        # Thumbnails need another key; `test_decision_log.py` has one.
        acts = {action for action, *_ in ACTS} | {"delete webhook", "thumbnail"}
        edits = ("/clusters", "/feedback/")
        acts |= {
            rule.action for (_, path), rule in RULES.items() if rule.audited and any(edit in path for edit in edits)
        }
        assert acts == {rule.action for rule in RULES.values() if rule.audited}
        await service.ask("acme admin", "DELETE", "/v1/streams/s")
        begun = len(service.lines())
        for action, method, path, more in ACTS:
            who = "acme admin"
            named = {"x-request-id": f"request-{action.split()[0]}"}
            response = await service.ask(who, method, path, named, **more)
            assert response.is_success, response.text
            assert response.headers["x-request-id"] == f"request-{action.split()[0]}"
            line = service.lines()[-1]
            assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}\+00:00", line.pop("time"))
            assert line == {
                "request_id": f"request-{action.split()[0]}",
                "tenant": who.split()[0],
                "key": service.records[who].id,
                "role": "admin",
                "action": action,
                "stream": "s" if path.startswith("/v1/streams") else None,
                "status": response.status_code,
                "outcome": "done",
            }
        assert len(service.lines()) == begun + len(ACTS)
        assert service.audit.stat().st_mode & 0o777 == 0o600


async def test_what_a_guard_does_is_a_line_though_nobody_asked_for_it(tmp_path):
    async with guarded(tmp_path, guard={"window": 32}) as service:
        decisions_of(await service.seen(0))
        begun = len(service.lines())
        while len(service.lines()) == begun:
            (said,) = decisions_of(await service.seen(1))
            assert said["position"] < 128
        line = service.lines()[-1]
        assert (line["tenant"], line["stream"], line["key"], line["request_id"]) == ("acme", "s", None, None)
        assert (line["guard"], line["outcome"]) == ("duplicates", "done")
        assert line["value"] > line["threshold"]
        said = (await service.ask("acme read", "GET", "/v1/streams/s")).json()["guard"]
        assert said["state"] != "watching"


async def test_a_guard_whose_line_cannot_be_written_still_acts(tmp_path, caplog):
    async with guarded(tmp_path, guard={"window": 32}) as service:
        service.audit.unlink()
        service.audit.mkdir()
        for _ in range(128):
            decisions_of(await service.seen(1))
        said = (await service.ask("acme read", "GET", "/v1/streams/s")).json()["guard"]
        assert said["state"] != "watching"
        assert "the audit log cannot be written" in caplog.text


async def test_acts_that_fail_are_lines_and_what_changes_nothing_is_none(tmp_path):
    async with guarded(tmp_path) as service:
        begun = len(service.lines())
        decisions_of(await service.seen(0))
        for path in ("/v1/streams", "/v1/streams/s", "/v1/health", "/v1/streams/none"):
            await service.ask("acme admin", "GET", path)
        await service.ask("operator admin", "GET", "/v1/workers")
        assert len(service.lines()) == begun
        await service.ask("acme admin", "POST", "/v1/streams/none/freeze")
        await service.made(method="protodcs")
        await service.made(id="a/b")

        async def broken(_):
            raise WorkerLostError("the worker is not there")

        service.queues.ask = broken
        await service.ask("acme admin", "POST", "/v1/streams/s/freeze")
        told = [(line["action"], line["stream"], line["status"], line["outcome"]) for line in service.lines()[begun:]]
        assert told == [
            ("freeze", "none", 404, "refused"),
            ("create", "s", 409, "refused"),
            ("create", None, 422, "refused"),
            ("freeze", "s", 503, "failed"),
        ]


async def test_an_error_that_nobody_foresaw_is_a_line_and_has_an_id(tmp_path):
    async with guarded(tmp_path) as service:

        async def broken(_):
            raise ZeroDivisionError("a bug")

        service.queues.ask = broken
        transport = httpx.ASGITransport(service.api, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as service.client:
            response = await service.ask("acme admin", "POST", "/v1/streams/s/freeze")
        words_of(response, 500)
        line = service.lines()[-1]
        assert (line["action"], line["status"], line["outcome"]) == ("freeze", 500, "failed")
        assert line["request_id"] == response.headers["x-request-id"]


async def test_an_act_whose_caller_went_away_is_a_line(tmp_path):
    async with guarded(tmp_path) as service:
        service.store.gate = asyncio.Event()
        asked = asyncio.create_task(service.ask("acme admin", "POST", "/v1/streams/s/freeze"))
        await asyncio.sleep(0.05)
        asked.cancel()
        await asyncio.gather(asked, return_exceptions=True)
        service.store.gate.set()
        line = service.lines()[-1]
        assert (line["action"], line["status"], line["outcome"]) == ("freeze", None, "interrupted")


async def test_denied_attempts_are_lines_that_name_a_key_only_if_it_was_made_here(tmp_path):
    async with guarded(tmp_path) as service:
        begun = len(service.lines())
        for who in (
            None,
            "garbage",
            "unknown id",
            "wrong secret",
            "revoked",
            "expired",
            "acme read",
            "rival admin",
        ):
            path = "/v1/workers" if who == "rival admin" else "/v1/streams/s/observe"
            await service.ask(who, "GET" if who == "rival admin" else "POST", path, content=feature(0))
        ids = {who: record.id for who, record in service.records.items()}
        told = [
            (line["action"], line["tenant"], line["key"], line.get("claimed"), line["status"])
            for line in service.lines()[begun:]
        ]
        assert told == [
            ("observe", None, None, None, 401),
            ("observe", None, None, None, 401),
            ("observe", None, None, None, 401),
            ("observe", None, None, ids["acme admin"], 401),
            ("observe", None, None, ids["revoked"], 401),
            ("observe", None, None, ids["expired"], 401),
            ("observe", "acme", ids["acme read"], None, 403),
            ("workers", "rival", ids["rival admin"], None, 403),
        ]
        assert {line["outcome"] for line in service.lines()[begun:]} == {"denied"}


async def test_strangers_cannot_fill_the_disk_nor_hide_what_tenants_do(tmp_path, monkeypatch):
    monkeypatch.setattr(audit_module, "_DENIED_RATE", 0.001)
    monkeypatch.setattr(audit_module, "_DENIED_BURST", 5)
    async with guarded(tmp_path) as service:
        begun = len(service.lines())
        for _ in range(50):
            words_of(await service.ask(None, "GET", "/v1/streams"), 401)
        assert len(service.lines()) == begun + 5
        words_of(await service.ask("acme read", "POST", "/v1/streams/s/freeze"), 403)
        assert (await service.ask("acme admin", "POST", "/v1/streams/s/freeze")).status_code == 200
        assert [line["outcome"] for line in service.lines()[begun + 5 :]] == ["denied", "done"]


async def test_lines_that_were_left_out_are_counted_in_the_next_one(tmp_path, monkeypatch):
    clock = [1000.0]
    monkeypatch.setattr(audit_module.time, "monotonic", lambda: clock[0])
    async with guarded(tmp_path) as service:
        for _ in range(110):
            await service.ask(None, "GET", "/v1/streams")
        clock[0] += 1
        await service.ask(None, "GET", "/v1/streams")
        assert service.lines()[-1]["left_out"] == 10


async def test_no_line_and_no_answer_holds_a_key_or_what_was_sent(tmp_path):
    async with guarded(tmp_path, FakeEncoding()) as service:
        everything = ""
        for who, key in service.keys.items():
            for stream in ("s", key, f"x{key}y", "a\nb"):
                path = quote(stream, safe="")
                headers = {"x-request-id": key.replace(" ", "")}
                for method, end in (("POST", "/freeze"), ("DELETE", "")):
                    response = await service.ask(who, method, f"/v1/streams/{path}{end}", headers)
                    if stream == "s":
                        everything += response.text
        assert (await service.made(classes=list("abcdefg"), id="secretive")).status_code == 201
        image = {"content": b"0 1"}
        await service.ask("acme read", "POST", "/v1/streams/s/observe", PNG, **image)
        everything += service.audit.read_text()
        for key in service.keys.values():
            assert key[-20:] not in everything or key == "garbage"
        assert "prototypes" not in service.audit.read_text()
        for line in service.audit.read_text().splitlines():
            json.loads(line)


async def test_an_act_that_cannot_be_written_down_is_not_acknowledged(tmp_path):
    async with guarded(tmp_path) as service:
        service.audit.unlink()
        service.audit.mkdir()
        headers = {"idempotency-key": "k", "x-request-id": "r"}
        refused = await service.ask("acme admin", "POST", "/v1/streams/s/freeze", headers)
        assert "audit log" in words_of(refused, 503)
        assert refused.headers["x-request-id"] == "r"
        decisions_of(await service.seen(0))
        words_of(await service.ask(None, "GET", "/v1/streams"), 401)
        service.audit.rmdir()
        again = await service.ask("acme admin", "POST", "/v1/streams/s/freeze", headers)
        assert again.json()["repeated"]
        assert [line["action"] for line in service.lines()] == ["freeze"]


async def test_the_file_may_be_moved_away(tmp_path):
    async with guarded(tmp_path) as service:
        service.audit.rename(tmp_path / "yesterday")
        assert (await service.ask("acme admin", "POST", "/v1/streams/s/freeze")).status_code == 200
        assert [line["action"] for line in service.lines()] == ["freeze"]


async def test_standard_output_takes_the_lines_too(capsys):
    service = Service()
    await service.worker.start()
    try:
        assert (await service.create()).status_code == 201
    finally:
        await service.client.aclose()
        await service.worker.close()
    line = json.loads(capsys.readouterr().out)
    assert (line["action"], line["stream"], line["tenant"], line["key"]) == ("create", "s", None, None)


BAD_IDS = ["", " ", "a b", "x" * 129, "a\x00", "\u00e9", "a\tb", "<b>", "a,b", "{}"]


@pytest.mark.parametrize("given_id", BAD_IDS)
async def test_an_id_that_may_not_stand_in_a_log_is_replaced(tmp_path, given_id):
    async with guarded(tmp_path) as service:
        headers = {"x-request-id": given_id.encode("latin-1")}
        made = [(await service.ask(who, "GET", "/v1/streams", headers)).headers["x-request-id"]
                for who in ("acme read", None)]  # fmt: skip
        assert all(re.fullmatch("[0-9a-f]{32}", value) for value in made)
        assert made[0] != made[1]


def test_no_headers_whatever_are_an_error_inside_the_service(tmp_path):
    with asyncio.Runner() as runner:
        context = guarded(tmp_path)
        service = runner.run(context.__aenter__())
        names = ["authorization", "x-request-id", "content-length", "content-encoding", "content-type",
                 "idempotency-key", "host", "transfer-encoding", "x-forwarded-for", "expect"]  # fmt: skip
        key = service.keys["acme admin"]
        values = st.binary(max_size=40) | st.sampled_from([b"Bearer " + key.encode(), b"identity", b"128", b"\xff"])
        seen = set()

        @given(
            headers=st.lists(st.tuples(st.sampled_from(names), values), max_size=6),
            method=st.sampled_from(["GET", "POST", "PUT", "DELETE", "HEAD", "OPTIONS", "TRACE", "NONSENSE"]),
            path=st.sampled_from(["/v1/streams", "/v1/streams/s", "/v1/streams/s/peek", "/v1/health", "/", "/docs"]),
        )
        @settings(max_examples=300)
        def check(headers, method, path):
            request = service.client.build_request(method, path, content=feature(0))
            raw = [(name.encode(), value) for name, value in headers]
            request.headers = httpx.Headers(raw)
            response = runner.run(service.client.send(request))
            assert response.status_code < 500, response.text
            assert re.fullmatch(r"[A-Za-z0-9._:-]{1,128}", response.headers["x-request-id"])
            seen.add(response.status_code)

        try:
            check()
            assert {200, 401} <= seen
        finally:
            runner.run(context.__aexit__(None, None, None))


# Secure by default.


@pytest.mark.parametrize(
    "host", ["0.0.0.0", "::", "10.0.0.7", "example.org", "", "127.0.0.1.example.org", "0", "2130706433"]
)
def test_an_address_that_others_reach_needs_keys(host):
    with pytest.raises(ConfigError, match="protodcs keys create"):
        ServeConfig(host=host)
    assert ServeConfig(host=host, keys="keys.json").host == host


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.53", "::1", "localhost"])
def test_an_address_of_this_machine_needs_none(host):
    assert ServeConfig(host=host).keys is None


def test_a_certificate_without_its_key_is_refused():
    for half in ("tls_certificate", "tls_key"):
        with pytest.raises(ConfigError, match="TLS needs tls_certificate and tls_key"):
            ServeConfig(**{half: "file.pem"})

"""Webhooks: every notice at least once and in order, signed, to public addresses only."""

import asyncio
import json
import shutil
import socket
import ssl
import subprocess
import threading
from contextlib import ExitStack, asynccontextmanager
from datetime import UTC, datetime, timedelta

import httpx
import pytest
from standardwebhooks import Webhook

from conftest import random_stream
from protodcs import Client
from protodcs.errors import InputError
from protodcs.serve.access.keys import create_key
from protodcs.serve.api.app import application
from protodcs.serve.log.notices import Notice
from protodcs.serve.settings import ServeConfig
from protodcs.serve.store.sqlite import SqliteStore
from protodcs.serve.store.values import Batch
from protodcs.serve.workers import webhooks as module
from protodcs.serve.workers.webhooks import Webhooks, resolve
from service.rig import Service
from store_contract import BLOB, postgres_store
from test_access import Guarded
from test_documentation import ROOT, blocks
from test_service_app import words_of
from webhook_receiver import receiving, receiving_slowly

# The receiver that the documentation shows.
RECEIVER = {}
exec("".join(blocks(ROOT / "docs/how-to/events.md", "python")), RECEIVER)
read_notice = RECEIVER["read_notice"]


@pytest.fixture
def receiver():
    with receiving() as receiver:
        yield receiver


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch):
    monkeypatch.setattr(module, "_FIRST_PAUSE", 0.01)


class Stored:
    """A SQLite store with streams, and the webhooks on it."""

    def __init__(self, folder, **changes):
        self.store = SqliteStore(folder)
        config = ServeConfig(webhook_private_targets=True, **{"webhook_attempts": 3, **changes})
        self.webhooks = Webhooks(self.store, config)
        self.fences = {}
        self.ends = {}

    async def open(self, *streams):
        await self.store.put_shared(BLOB, b"blob")
        for stream in streams:
            await self.store.create(stream, b"spec", BLOB)
            held = await self.store.acquire(stream, "one", "1")
            self.fences[stream], self.ends[stream] = held.fence, held.position

    async def notice(self, stream, kind="warning", **content):
        """Commit a record with a notice."""
        position = self.ends[stream]
        made = Notice(position, 1, 1000, kind, json.dumps(content or {"warning": "possible_shift"}))
        batch = Batch(stream, self.fences[stream], position, [b"record"], notices=[made])
        assert await self.store.commit([batch]) == [None]
        self.ends[stream] += 1
        self.webhooks.notify()


@asynccontextmanager
async def stored(folder, *streams, **changes):
    made = Stored(folder, **changes)
    try:
        await made.open(*(streams or ("s",)))
        await made.webhooks.start()
        yield made
    finally:
        await made.webhooks.close()
        await made.store.close()


async def received(receiver, count):
    return await asyncio.to_thread(receiver.wait_for, count)


ALL = ["guard", "possible_shift", "many_unknown"]


async def test_notices_are_delivered_in_order_signed_and_with_an_id(tmp_path, receiver):
    async with stored(tmp_path) as made:
        await made.notice("s")
        webhook = await made.webhooks.create("", receiver.url + "/hook?a=1", ALL, None)
        await made.notice("s", "guard", guard="drift", action="freeze")
        for _ in range(5):
            await made.notice("s")
        found = await received(receiver, 6)
        # What was there before the webhook is not sent.
        assert [one["position"] for one in found] == [1, 2, 3, 4, 5, 6]
        guard = {"event": "guard", "stream": "s", "guard": "drift", "action": "freeze", "position": 1, "time": 1000}
        assert guard.items() <= found[0].items()
        path, headers, body = receiver.deliveries[0]
        assert path == "/hook?a=1"
        assert headers["webhook-id"] == found[0]["id"]
        assert len({one["id"] for one in found}) == 6
        assert read_notice(webhook.secret, headers, body) == found[0]
        assert read_notice("whsec_YW5vdGhlcg==", headers, body) is None
        assert read_notice(webhook.secret, headers, body + b" ") is None


def test_the_receiver_of_the_documentation_rejects_what_is_old_or_changed(tmp_path):
    secret, body = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw", b'{"a": 1}'

    def headers(age=0.0):
        moment = datetime.now(UTC) - timedelta(seconds=age)
        signature = Webhook(secret).sign("1", moment, body.decode())
        sent = {"webhook-id": "1", "webhook-timestamp": str(int(moment.timestamp()))}
        return {**sent, "webhook-signature": signature}

    assert read_notice(secret, headers(), body) == {"a": 1}
    assert read_notice(secret, headers(age=400), body) is None
    assert read_notice(secret, {**headers(), "webhook-id": "2"}, body) is None
    for signature in ("", "v1", "v1,abc", "v2,AAAA", "nonsense"):
        assert read_notice(secret, {**headers(), "webhook-signature": signature}, body) is None


async def test_a_delivery_that_is_not_confirmed_is_sent_again_before_the_next_one(tmp_path, receiver):
    async with stored(tmp_path) as made:
        await made.webhooks.create("", receiver.url, ALL, None)
        receiver.statuses = [500, 302]
        await made.notice("s")
        await made.notice("s")
        found = await received(receiver, 4)
        assert [one["position"] for one in found] == [0, 0, 0, 1]


async def test_what_cannot_be_delivered_is_a_dead_letter_and_the_next_ones_go_on(tmp_path, receiver, monkeypatch):
    monkeypatch.setattr(module, "MAX_DEAD_LETTERS", 2)
    async with stored(tmp_path) as made:
        webhook = await made.webhooks.create("", receiver.url, ALL, None)
        receiver.statuses = [500] * 9
        for _ in range(4):
            await made.notice("s")
        found = await received(receiver, 10)
        assert [one["position"] for one in found] == [0, 0, 0, 1, 1, 1, 2, 2, 2, 3]
        letters = await made.webhooks.dead_letters(webhook)
        assert [letter["delivery"]["position"] for letter in letters] == [1, 2]
        assert letters[0]["attempts"] == 3
        assert "500" in letters[0]["error"]
        await made.webhooks.delete(webhook)
        assert await made.store.documents("dead-letter") == {}


@pytest.mark.parametrize("turns", range(6))
async def test_a_close_right_after_a_change_ends(tmp_path, turns):
    async with stored(tmp_path) as made, asyncio.timeout(300):
        await asyncio.sleep(0.1)
        made.webhooks._changed.set()
        for _ in range(turns):
            await asyncio.sleep(0)
        await made.webhooks.close()


async def test_deliveries_go_on_where_they_were_after_a_restart(tmp_path, receiver):
    async with stored(tmp_path, webhook_attempts=100) as made:
        await made.webhooks.create("", receiver.url, ALL, None)
        await made.notice("s")
        await received(receiver, 1)
        receiver.statuses = [503] * 2
        for _ in range(3):
            await made.notice("s")
        await received(receiver, 2)
    async with stored(tmp_path):
        await received(receiver, 5)
        while (await asyncio.to_thread(receiver.wait_for, 1))[-1]["position"] != 3:
            await asyncio.sleep(0.01)
    found = list(dict.fromkeys(json.loads(body)["position"] for *_, body in receiver.deliveries))
    assert found == [0, 1, 2, 3]


async def test_a_webhook_gets_only_what_it_asked_for(tmp_path, receiver):
    async with stored(tmp_path, "acme/s", "acme/t", "rival/s") as made:
        await made.webhooks.create("acme", receiver.url + "/burst", ["many_unknown"], None)
        await made.webhooks.create("acme", receiver.url + "/t", ALL, ["t"])
        await made.notice("rival/s")
        await made.notice("acme/s")
        await made.notice("acme/s", warning="many_unknown")
        await made.notice("acme/t")
        await received(receiver, 2)
        assert sorted((path, json.loads(body)["stream"]) for path, _, body in receiver.deliveries) == [
            ("/burst", "s"),
            ("/t", "t"),
        ]


@pytest.mark.parametrize(
    "url",
    [
        "http://127.0.0.1/",
        "http://localhost:8000/",
        "http://[::1]/",
        "http://10.1.2.3/",
        "http://192.168.0.1/",
        "http://169.254.169.254/latest/meta-data",
        "http://[::ffff:127.0.0.1]/",
        "http://0.0.0.0/",
        "http://2130706433/",
        "http://[fd00::1]/",
        "http://[fec0::1]/",
        "http://[64:ff9b::127.0.0.1]/",
        "http://[64:ff9b::10.1.2.3]/",
        "http://[64:ff9b:1::10.1.2.3]/",
        "http://[2002:7f00:1::1]/",
        "http://[2002:a01:203::1]/",
        "http://[2002:808:808::1]/",
        "http://[2001:0:808:808::1]/",
        "http://[::127.0.0.1]/",
        "http://[ff02::1]/",
        "http://100.64.0.1/",
        "http://224.0.0.1/",
        "ftp://example.com/",
        "file:///etc/passwd",
        "http://",
        "http://user:password@8.8.8.8/",
        "http://8.8.8.8:99999/",
        "http://8.8.8.8/\r\nX: y",
        "http://8.8.8.8/" + "x" * 3000,
        "http://no-such-host.invalid/",
    ],
)
async def test_a_webhook_cannot_reach_this_machine_or_a_private_network(url):
    with pytest.raises(InputError):
        await resolve(url, allow_private=False)


@pytest.mark.parametrize("host", ["8.8.8.8", "[2606:4700::1111]", "[::ffff:8.8.8.8]", "[64:ff9b::8.8.8.8]"])
async def test_a_webhook_can_reach_public_addresses_also_through_nat64(host):
    assert (await resolve(f"https://{host}/", allow_private=False)).port == 443


async def test_a_name_that_leads_to_a_private_address_later_is_not_used(monkeypatch):
    def answer(*addresses):
        found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, 80)) for address in addresses]
        monkeypatch.setattr(module.socket, "getaddrinfo", lambda *_, **__: found)

    answer("8.8.8.8", "127.0.0.1")
    with pytest.raises(InputError):
        await resolve("http://example.com/", allow_private=False)
    answer("8.8.8.8")
    assert (await resolve("https://example.com/", allow_private=False)).address == "8.8.8.8"


async def test_routes_create_list_and_delete_webhooks(tmp_path, receiver):
    async with stored(tmp_path / "store", "acme/s") as made:
        service = Guarded(tmp_path, store="sqlite:unused")
        service.api = application(service.queues._config, service.queues, service, service.worker, None, made.webhooks)
        service.client = httpx.AsyncClient(transport=httpx.ASGITransport(service.api), base_url="http://127.0.0.1")
        asked = {"url": receiver.url, "events": ["guard"]}
        response = await service.ask("acme admin", "POST", "/v1/webhooks", json=asked)
        assert response.status_code == 201, response.text
        created = response.json()
        path = response.headers["location"]
        assert created["secret"].startswith("whsec_")
        (listed,) = (await service.ask("acme admin", "GET", "/v1/webhooks")).json()["webhooks"]
        assert {"secret", "tenant"}.isdisjoint(listed)
        assert {**listed, "secret": created["secret"]} == created
        assert (await service.ask("acme admin", "GET", path)).json() == listed
        assert (await service.ask("acme admin", "GET", path + "/dead-letters")).json() == {"items": []}
        # Another tenant sees none of it.
        words_of(await service.ask("rival admin", "GET", path), 404)
        words_of(await service.ask("rival admin", "DELETE", path), 404)
        assert (await service.ask("acme admin", "DELETE", path)).status_code == 204
        words_of(await service.ask("acme admin", "GET", path), 404)
        for wrong in ({"url": "nonsense"}, {}, {"url": receiver.url, "events": []}, {"url": receiver.url, "x": 1}):
            words_of(await service.ask("acme admin", "POST", "/v1/webhooks", json=wrong), 422)
        answers = [await service.ask("acme admin", "POST", "/v1/webhooks", json=asked) for _ in range(21)]
        assert [one.status_code for one in answers] == [201] * 20 + [422]
        await service.client.aclose()


def test_slow_receivers_of_some_tenants_delay_neither_the_audit_log_of_others_nor_the_end_of_the_service(tmp_path):
    """All webhooks of two tenants: more than the default thread pool of asyncio has threads on any machine."""
    rows, features, _ = random_stream(samples=1, seed=3)
    file = tmp_path / "keys.json"
    keys = {tenant: create_key(file, tenant, "admin")[1] for tenant in ("slow", "slower", "other")}
    settings = {"store": f"sqlite:{tmp_path / 'streams'}", "log_format": "off", "audit": str(tmp_path / "audit")}
    service = Service(tmp_path, keys=str(file), webhook_private_targets=True, **settings)
    with receiving_slowly() as receiver, service, ExitStack() as stack:
        clients = {tenant: stack.enter_context(Client(service.base_url, key=key)) for tenant, key in keys.items()}
        for tenant in ("slow", "slower"):
            guard = {"window": 32, "duplicate_threshold": 0.9}
            stream = clients[tenant].create("s", prototypes=rows, guard=guard)
            for _ in range(module.MAX_WEBHOOKS):
                clients[tenant].create_webhook(receiver.url, events=["guard"])
            for _ in range(32):
                stream.observe(features[0])
        receiver.wait_for(2 * module.MAX_WEBHOOKS)
        others = clients["other"].create("s", prototypes=rows)
        others.freeze()
        header = {"authorization": f"Bearer {keys['other']}"}
        assert httpx.post(f"{service.base_url}/v1/session", headers=header, timeout=120).status_code == 201
        assert httpx.get(f"{service.base_url}/v1/streams", timeout=120).status_code == 401
        service.stop()
        assert not receiver.released.is_set()


async def test_a_receiver_has_ten_seconds_for_its_whole_answer(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "_TIMEOUT", 0.5)

    with receiving_slowly() as receiver:
        async with stored(tmp_path, webhook_attempts=1) as made:
            webhook = await made.webhooks.create("", receiver.url, ALL, None)
            await made.notice("s")
            while not (letters := await made.webhooks.dead_letters(webhook)):
                await asyncio.sleep(0.05)
            assert "within 0.5 seconds" in letters[0]["error"]
        assert not receiver.released.is_set()


async def test_a_name_server_that_never_answers_delays_neither_the_webhooks_of_others_nor_the_end(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(module, "_TIMEOUT", 0.5)
    released, look_up = threading.Event(), socket.getaddrinfo

    def stuck(host, *args, flags, **more):
        if host == "slow.example" and flags != socket.AI_NUMERICHOST:
            released.wait(120)
        return look_up(host, *args, flags=flags, **more)

    monkeypatch.setattr(module.socket, "getaddrinfo", stuck)

    with receiving() as receiver:
        async with stored(tmp_path, "other/s") as made:
            slow = (made.webhooks.create("slow", "http://slow.example/", ALL, None) for _ in range(40))
            waiting = asyncio.gather(*slow, return_exceptions=True)
            await asyncio.sleep(0)
            await made.webhooks.create("other", receiver.url, ALL, None)
            await made.notice("other/s")
            await received(receiver, 1)
            assert {str(problem) for problem in await waiting} == {
                "The host of the webhook was not resolved within 0.5 seconds."
            }
        assert not released.is_set()
        released.set()


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl, which makes the certificate, is not installed")
async def test_a_receiver_with_tls_must_have_the_certificate_of_its_name(tmp_path, monkeypatch):
    make = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=receiver.example", "-days", "1"]
    files = ["-keyout", str(tmp_path / "key"), "-out", str(tmp_path / "certificate")]
    subprocess.run([*make, *files, "-addext", "subjectAltName=DNS:receiver.example"], check=True, capture_output=True)
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(tmp_path / "certificate", tmp_path / "key")
    trusting = ssl.create_default_context(cafile=tmp_path / "certificate")
    monkeypatch.setattr(module, "_tls", lambda: trusting)
    found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", 0))]
    monkeypatch.setattr(module.socket, "getaddrinfo", lambda *_, **__: found)

    with receiving(server) as receiver:
        async with stored(tmp_path / "store", webhook_attempts=1) as made:
            await made.webhooks.create("", receiver.url.replace("127.0.0.1", "receiver.example"), ["guard"], None)
            unnamed = await made.webhooks.create("", receiver.url, ALL, None)
            await made.notice("s")
            while not (letters := await made.webhooks.dead_letters(unnamed)):
                await asyncio.sleep(0.01)
            assert "certificate" in letters[0]["error"]
            await made.notice("s", "guard", guard="drift", action="freeze")
            assert [one["position"] for one in await received(receiver, 1)] == [1]


# Several processes share a PostgreSQL.

WORKERS = ["worker-0", "worker-1", "worker-2"]


class Cluster:
    """Workers that deliver webhooks, and a stream whose notices they find in PostgreSQL."""

    def __init__(self, folder):
        self.folder = folder
        self.workers = {}
        self.end = 0

    async def open(self):
        self.store = await postgres_store(self.folder)
        await self.store.put_shared(BLOB, b"blob")
        await self.store.create("acme/s", b"spec", BLOB)
        self.fence = (await self.store.acquire("acme/s", "one", "1")).fence
        for name in WORKERS:
            await self.start(name)

    async def start(self, name):
        config = ServeConfig(
            store="postgresql://unused/none", webhook_private_targets=True, webhook_attempts=100, lease_seconds=2.0
        )
        store = await postgres_store(self.folder)
        webhooks = self.workers[name] = Webhooks(store, config)
        webhooks.store = store
        await webhooks.start()

    async def kill(self, name):
        """End a worker that gives nothing back."""
        webhooks = self.workers.pop(name)
        tasks = [webhooks._sharing, *(delivery.task for delivery in webhooks._deliveries.values())]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await webhooks.store.close()

    async def notice(self, count=1):
        for _ in range(count):
            made = Notice(self.end, 1, 1000, "warning", json.dumps({"warning": "possible_shift"}))
            assert await self.store.commit([Batch("acme/s", self.fence, self.end, [b"record"], notices=[made])]) == [
                None
            ]
            self.end += 1

    async def deliverers(self):
        """The workers that deliver something, as soon as there is one for each webhook."""
        count = len(await self.store.documents("webhook"))
        while True:
            found = [name for name, webhooks in self.workers.items() for _ in webhooks._deliveries]
            if len(found) == count:
                return found
            await asyncio.sleep(0.01)

    async def close(self):
        for webhooks in self.workers.values():
            await webhooks.close()
            await webhooks.store.close()
        await self.store.close()


@pytest.fixture
def on_cluster(tmp_path, monkeypatch):
    """Return a context of a cluster at work."""
    monkeypatch.setattr(module, "_LOOK_IF_SHARED", 0.02)

    @asynccontextmanager
    async def opened():
        cluster = Cluster(tmp_path)
        async with asyncio.timeout(300):
            await cluster.open()
            try:
                yield cluster
            finally:
                await cluster.close()

    return opened


def positions(receiver):
    return [json.loads(body)["position"] for *_, body in receiver.deliveries]


async def test_one_worker_of_a_cluster_delivers_a_webhook_that_another_one_created(on_cluster, receiver):
    async with on_cluster() as cluster:
        await cluster.notice()
        webhook = await cluster.workers["worker-1"].create("acme", receiver.url, ALL, None)
        await cluster.notice(20)
        await received(receiver, 20)
        # Several leases later it is still one worker, and nothing is sent twice.
        (deliverer,) = await cluster.deliverers()
        await asyncio.sleep(5)
        assert await cluster.deliverers() == [deliverer]
        await cluster.notice(5)
        await received(receiver, 25)
        assert positions(receiver) == list(range(1, 26))
        other = next(name for name in WORKERS if name != deliverer)
        assert await cluster.workers[other].of_tenant("acme") == [webhook]
        await cluster.workers[other].delete(webhook)
        for kind in ("webhook", "webhook-cursor", "dead-letter"):
            while await cluster.store.documents(kind):
                await asyncio.sleep(0.01)


@pytest.mark.parametrize("how", ["kill", "close"])
async def test_another_worker_goes_on_with_the_webhooks_of_one_that_stopped(on_cluster, receiver, how):
    async with on_cluster() as cluster:
        await cluster.workers["worker-0"].create("acme", receiver.url, ALL, None)
        for _ in range(4):
            (deliverer,) = await cluster.deliverers()
            before = cluster.end
            # The receiver rejects one of them for a while, so that the worker stops in the middle.
            receiver.statuses = [200] * 3 + [503] * 5
            await cluster.notice(10)
            await received(receiver, len(receiver.deliveries) + 5)
            if how == "kill":
                await cluster.kill(deliverer)
            else:
                webhooks = cluster.workers.pop(deliverer)
                await webhooks.close()
                await webhooks.store.close()
            while cluster.end - 1 not in positions(receiver):
                await asyncio.sleep(0.01)
            assert set(positions(receiver)) >= set(range(before, cluster.end))
            await cluster.start(deliverer)
        # Each first arrives after all before it. Some came twice, because their confirmation was lost.
        assert list(dict.fromkeys(positions(receiver))) == list(range(cluster.end))


async def test_a_worker_that_cannot_renew_its_lease_sends_nothing(on_cluster, receiver):
    async with on_cluster() as cluster:
        await cluster.workers["worker-0"].create("acme", receiver.url, ALL, None)
        (deliverer,) = await cluster.deliverers()
        stuck, sent = cluster.workers[deliverer], []

        async def record(_, body):
            sent.append(body)

        stuck._send = record
        # It hangs at its store, and another worker takes the lease.
        stuck._sharing.cancel()
        while not any(one._deliveries for name, one in cluster.workers.items() if name != deliverer):
            await asyncio.sleep(0.01)
        await cluster.notice(10)
        stuck.notify()
        while cluster.end - 1 not in positions(receiver):
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.5)
        assert sent == []
        # On a loaded machine the other one may lose its lease too, and send some twice.
        assert list(dict.fromkeys(positions(receiver))) == list(range(10))
